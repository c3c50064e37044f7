#include "error.hpp"

#include <utility>

namespace sonata {

Error::Error(ErrorKind kind, std::string message, std::string remedy, DriverText driver)
    : kind(kind),
      message(std::move(message)),
      remedy(std::move(remedy)),
      driver(std::move(driver)) {}

std::string DriverText::describe() const {
  return name + " (" + std::to_string(code) + "): " + text;
}

DriverText driver_text(const DriverApi &api, Result code) {
  const char *name = nullptr;
  const char *text = nullptr;
  if (api.get_error_name(code, &name) != 0) name = nullptr;
  if (api.get_error_string(code, &text) != 0) text = nullptr;
  return {code, name != nullptr ? name : "CUDA_ERROR_" + std::to_string(code),
          text != nullptr ? text : "the driver has no text for this code"};
}

std::string remedy_for(Result code, const std::string &arch) {
  const std::string build = "sonata-aot build --arch " + arch;
  switch (code) {
    case 1:  // CUDA_ERROR_INVALID_VALUE
      return "check that the artifact matches this version of sonata-aot: sonata-aot verify";
    case 2:  // CUDA_ERROR_OUT_OF_MEMORY
      return "free GPU memory or leave more of it unreserved, then load again";
    case 3:  // CUDA_ERROR_NOT_INITIALIZED
      return "if this process was forked after another library had used CUDA, start it with the "
             "'spawn' method instead";
    case 4:  // CUDA_ERROR_DEINITIALIZED
      return "stop launching before the process shuts down";
    case 34:  // CUDA_ERROR_STUB_LIBRARY
      return "take the CUDA toolkit's 'stubs' folder off the library path, so that the driver's "
             "own libcuda.so.1 is found";
    case 46:  // CUDA_ERROR_DEVICE_UNAVAILABLE
      return "check that no other process holds the GPU exclusively: nvidia-smi";
    case 100:  // CUDA_ERROR_NO_DEVICE
      return "check that a GPU is visible to this process: nvidia-smi, CUDA_VISIBLE_DEVICES, and "
             "the container's GPU option";
    case 101:  // CUDA_ERROR_INVALID_DEVICE
      return "check the device index and CUDA_VISIBLE_DEVICES";
    case 200:  // CUDA_ERROR_INVALID_IMAGE
      return "the file is no binary that this driver reads: rebuild the artifact, or update the "
             "driver if it is older than the one that the manifest names";
    case 201:  // CUDA_ERROR_INVALID_CONTEXT
    case 709:  // CUDA_ERROR_CONTEXT_IS_DESTROYED
      return "the device's primary context was reset after load(): do not reset devices in this "
             "process, or restart it";
    case 209:  // CUDA_ERROR_NO_BINARY_FOR_GPU
      return "the binary was built for another architecture: build for this GPU with " + build;
    case 218:  // CUDA_ERROR_INVALID_PTX
      return "the driver's compiler rejected the PTX: build a binary for this GPU with " + build;
    case 221:  // CUDA_ERROR_JIT_COMPILER_NOT_FOUND
      return "the driver's PTX compiler (libnvidia-ptxjitcompiler) is not installed: install it, "
             "or build a binary for this GPU with " + build;
    case 222:  // CUDA_ERROR_UNSUPPORTED_PTX_VERSION
      return "the driver is older than the PTX ISA of the artifact: update the driver, or build a "
             "binary for this GPU with " + build;
    case 223:  // CUDA_ERROR_JIT_COMPILATION_DISABLED
      return "PTX compilation is switched off (CUDA_DISABLE_PTX_JIT): unset it, or build a binary "
             "for this GPU with " + build;
    case 400:  // CUDA_ERROR_INVALID_HANDLE
      return "check that the stream is alive and belongs to this device";
    case 500:  // CUDA_ERROR_NOT_FOUND
      return "the binary has no such entry, so the manifest and the file disagree: rebuild the "
             "artifact";
    case 701:  // CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES
      return "the block needs more registers or threads than this kernel may have: use a smaller "
             "block";
    case 802:  // CUDA_ERROR_SYSTEM_NOT_READY
      return "wait for the machine's GPU services (nvidia-fabricmanager) to start, then try again";
    case 803:  // CUDA_ERROR_SYSTEM_DRIVER_MISMATCH
      return "the kernel module and libcuda differ in version: reboot, or reload the module";
    case 804:  // CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE
      return "take the CUDA compatibility package off the library path: this GPU does not "
             "support it";
    case 700:  // CUDA_ERROR_ILLEGAL_ADDRESS
    case 702:  // CUDA_ERROR_LAUNCH_TIMEOUT
    case 710:  // CUDA_ERROR_ASSERT
    case 714:  // CUDA_ERROR_HARDWARE_STACK_ERROR
    case 715:  // CUDA_ERROR_ILLEGAL_INSTRUCTION
    case 716:  // CUDA_ERROR_MISALIGNED_ADDRESS
    case 717:  // CUDA_ERROR_INVALID_ADDRESS_SPACE
    case 718:  // CUDA_ERROR_INVALID_PC
    case 719:  // CUDA_ERROR_LAUNCH_FAILED
      return "an earlier kernel on this context failed; restart the process, and find that kernel "
             "with CUDA_LAUNCH_BLOCKING=1 or compute-sanitizer";
    case 900:  // CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
    case 901:  // CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
      return "the stream is being captured and an earlier call broke the capture: call load() and "
             "preload PTX before the capture begins";
    default:
      return "see the driver's error text, and the kernel log (dmesg) for an Xid line";
  }
}

void throw_driver_error(const DriverApi &api, Failure failure, const std::string &context,
                        std::string remedy) {
  DriverText text = driver_text(api, failure.code);
  std::string message =
      std::string(failure.call) + " failed with " + text.describe() + " while " + context;
  if (remedy.empty()) remedy = remedy_for(failure.code);
  throw Error(ErrorKind::driver, std::move(message), std::move(remedy), std::move(text));
}

void throw_argument_error(std::string message, std::string remedy) {
  throw Error(ErrorKind::argument, std::move(message), std::move(remedy));
}

std::string quoted(const std::string &text) { return "'" + text + "'"; }

}  // namespace sonata
