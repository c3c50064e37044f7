// What the stand-in for libcuda.so.1 is made of: its objects, its settings and its log.
#pragma once

#include <elf.h>
#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "sha256.hpp"

namespace {

using Context = std::uintptr_t;  // 4096 + device
constexpr Context kFirstContext = 4096;
constexpr int kSharedOptin = 232448;
constexpr int kSharedDefault = 49152;

struct Library {
  std::string image;
};

struct Function {
  Context context = 0;
  std::atomic<int> dynamic_shared{kSharedDefault};
  std::string entry;
};

struct Kernel {
  Library *library = nullptr;
  std::string entry;
  std::map<Context, Function *> functions;
};

std::mutex mutex;  // over the tables below
std::map<std::pair<Library *, std::string>, Kernel *> kernels;
std::atomic<pid_t> initialised_by{0};
thread_local std::vector<Context> contexts;

const char *environment(const char *name, const char *otherwise) {
  const char *value = std::getenv(name);
  return value != nullptr && *value != '\0' ? value : otherwise;
}

int device_count() { return std::atoi(environment("SONATA_TEST_CUDA_DEVICES", "1")); }

int multiprocessors(int device) {
  const char *list = environment("SONATA_TEST_CUDA_MULTIPROCESSORS", "132");
  for (const char *comma; device > 0 && (comma = std::strchr(list, ',')) != nullptr; --device) {
    list = comma + 1;
  }
  return std::atoi(list);
}

Context current() { return contexts.empty() ? 0 : contexts.back(); }

std::string quoted(const std::string &text) {
  std::string out = "\"";
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte >= 0x7f || c == '"' || c == '\\') {
      char escape[8];
      std::snprintf(escape, sizeof escape, "\\u%04x", byte);
      out += escape;
    } else {
      out += c;
    }
  }
  return out + "\"";
}

std::string hex(const void *data, std::size_t size) {
  std::string out;
  for (std::size_t i = 0; i < size; ++i) {
    char part[3];
    std::snprintf(part, sizeof part, "%02x", static_cast<const unsigned char *>(data)[i]);
    out += part;
  }
  return out;
}

std::string number(std::uintptr_t value) { return std::to_string(value); }
std::string number(const void *value) { return number(reinterpret_cast<std::uintptr_t>(value)); }

std::string triple(unsigned x, unsigned y, unsigned z) {
  return "[" + number(x) + ", " + number(y) + ", " + number(z) + "]";
}

// What a variable such as "cuLaunchKernel=700;cuInit=100" says of this call, or 0.
int knob_of(const char *variable, const std::string &call) {
  const std::string knob = std::string(";") + environment(variable, "") + ";";
  for (const std::string &name : {call, call.substr(0, call.find("_v"))}) {
    const auto at = knob.find(";" + name + "=");
    if (at != std::string::npos) return std::atoi(knob.c_str() + at + name.size() + 2);
  }
  return 0;
}

// One call: its line is written when it returns.
class Call {
 public:
  explicit Call(const char *name, bool needs_init = true)
      : name_(name), context_(current()), result_(knob_of("SONATA_TEST_CUDA_FAIL", name)) {
    const int delay = knob_of("SONATA_TEST_CUDA_DELAY", name);
    if (delay > 0) std::this_thread::sleep_for(std::chrono::milliseconds(delay));
    if (result_ == 0 && needs_init && initialised_by != getpid()) result_ = 3;
  }

  Call &with(const char *key, const std::string &json) {
    fields_ += std::string(", \"") + key + "\": " + json;
    return *this;
  }

  bool fails() const { return result_ != 0; }

  int done(int result = 0) {
    if (result_ == 0) result_ = result;
    const char *path = std::getenv("SONATA_TEST_CUDA_LOG");
    if (path == nullptr || *path == '\0') return result_;
    const std::string line = "{\"call\": " + quoted(name_) + ", \"result\": " +
                             std::to_string(result_) + ", \"pid\": " + std::to_string(getpid()) +
                             ", \"thread\": " + std::to_string(syscall(SYS_gettid)) +
                             ", \"context\": " + number(context_) + fields_ + "}\n";
    const int file = open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
    if (file < 0 || write(file, line.data(), line.size()) != ssize_t(line.size())) std::abort();
    close(file);
    return result_;
  }

 private:
  std::string name_;
  Context context_;
  int result_;
  std::string fields_;
};

// cuLibraryLoadData is told no size: text ends at its NUL, an ELF file where its last part does.
std::size_t image_size(const void *image) {
  const auto *bytes = static_cast<const unsigned char *>(image);
  if (std::memcmp(bytes, ELFMAG, SELFMAG) != 0) {
    return std::strlen(static_cast<const char *>(image));
  }
  Elf64_Ehdr header;
  std::memcpy(&header, bytes, sizeof header);
  std::size_t end = std::max(header.e_shoff + std::size_t{header.e_shnum} * header.e_shentsize,
                             header.e_phoff + std::size_t{header.e_phnum} * header.e_phentsize);
  for (unsigned i = 0; i < header.e_shnum; ++i) {
    Elf64_Shdr section;
    std::memcpy(&section, bytes + header.e_shoff + std::size_t{i} * header.e_shentsize,
                sizeof section);
    if (section.sh_type != SHT_NOBITS) {
      end = std::max<std::size_t>(end, section.sh_offset + section.sh_size);
    }
  }
  return end;
}

const std::map<int, std::pair<const char *, const char *>> &error_texts() {
  static const std::map<int, std::pair<const char *, const char *>> texts{
      {0, {"CUDA_SUCCESS", "no error"}},
      {1, {"CUDA_ERROR_INVALID_VALUE", "invalid argument"}},
      {2, {"CUDA_ERROR_OUT_OF_MEMORY", "out of memory"}},
      {3, {"CUDA_ERROR_NOT_INITIALIZED", "initialization error"}},
      {100, {"CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"}},
      {101, {"CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"}},
      {200, {"CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"}},
      {201, {"CUDA_ERROR_INVALID_CONTEXT", "invalid device context"}},
      {209, {"CUDA_ERROR_NO_BINARY_FOR_GPU", "no kernel image is available for this device"}},
      {218, {"CUDA_ERROR_INVALID_PTX", "a PTX JIT compilation failed"}},
      {222, {"CUDA_ERROR_UNSUPPORTED_PTX_VERSION", "the provided PTX has another version"}},
      {400, {"CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"}},
      {500, {"CUDA_ERROR_NOT_FOUND", "named symbol not found"}},
      {700, {"CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"}},
      {701, {"CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", "too many resources requested for launch"}},
      {802, {"CUDA_ERROR_SYSTEM_NOT_READY", "system not yet initialized"}},
  };
  return texts;
}

}  // namespace
