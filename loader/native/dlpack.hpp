// The part of DLPack's ABI (1.x, https://github.com/dmlc/dlpack) that the loader reads tensors by.
//
// A class of tensors offers a table of C functions as the capsule `__dlpack_c_exchange_api__`. One
// of them fills in a view of a tensor: it allocates nothing, takes no reference, waits for nothing.
#pragma once

#include <cstddef>
#include <cstdint>

namespace sonata::dlpack {

constexpr const char *kCapsule = "dlpack_exchange_api";
constexpr std::uint32_t kMajor = 1;  // within it, nothing below changes its place

struct Device {
  std::int32_t type;
  std::int32_t id;
};

struct DataType {
  std::uint8_t code;
  std::uint8_t bits;
  std::uint16_t lanes;
};

// DLTensor. Strides count elements; both arrays are the tensor's own.
struct View {
  void *data;
  Device device;
  std::int32_t dimensions;
  DataType dtype;
  std::int64_t *shape;
  std::int64_t *strides;
  std::uint64_t byte_offset;

  std::uint64_t address() const { return reinterpret_cast<std::uintptr_t>(data) + byte_offset; }
};
static_assert(sizeof(View) == 48 && offsetof(View, shape) == 24);

// DLPackExchangeAPIHeader, and the table of an older major version if there is one.
struct Header {
  std::uint32_t major;
  std::uint32_t minor;
  const Header *older;
};

// DLPackExchangeAPI. What is not called is left without its type.
struct ExchangeApi {
  Header header;
  void *allocate;
  void *managed_from_object;
  void *managed_to_object;
  // 0, or -1 with a Python exception set; may be null. Needs the GIL.
  int (*view_of_object)(void *object, View *view);
  void *current_stream;
};
static_assert(sizeof(ExchangeApi) == 56 && offsetof(ExchangeApi, view_of_object) == 40);

}  // namespace sonata::dlpack
