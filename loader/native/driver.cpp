#include "driver.hpp"

#include <dlfcn.h>
#include <pthread.h>

#include <mutex>

#include "error.hpp"

namespace sonata {

std::atomic<bool> forked{false};

namespace {

struct Opened {
  DriverApi api;
  std::string reason;  // empty when every entry point was found
  std::optional<int> version;
  std::optional<std::string> path;
};

// Threads that are initialising the driver now, plus one for good once it is up.
std::atomic<int> users{0};
std::atomic<bool> ready{false};
std::mutex init_mutex;

Opened open_driver() {
  Opened opened;
  void *handle = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char *text = dlerror();
    opened.reason = std::string("the NVIDIA driver library was not found: ") +
                    (text != nullptr ? text : "libcuda.so.1 cannot be opened");
    return opened;
  }
  std::string missing;
  const auto find = [&](auto &member, const char *symbol, bool required) {
    member = reinterpret_cast<std::decay_t<decltype(member)>>(dlsym(handle, symbol));
    if (member == nullptr && required && missing.empty()) missing = symbol;
  };
#define SONATA_REQUIRED(member, symbol, ...) find(opened.api.member, symbol, true);
#define SONATA_OPTIONAL(member, symbol, ...) find(opened.api.member, symbol, false);
  SONATA_DRIVER_ENTRIES(SONATA_REQUIRED)
  SONATA_OPTIONAL_DRIVER_ENTRIES(SONATA_OPTIONAL)
#undef SONATA_REQUIRED
#undef SONATA_OPTIONAL

  Dl_info info{};
  if (opened.api.init != nullptr &&
      dladdr(reinterpret_cast<void *>(opened.api.init), &info) != 0 && info.dli_fname != nullptr) {
    opened.path = info.dli_fname;
  }
  int version = 0;
  if (opened.api.driver_get_version != nullptr && opened.api.driver_get_version(&version) == 0) {
    opened.version = version;
  }
  if (!missing.empty()) {
    opened.reason = "driver too old: it lacks " + missing + " (needs CUDA 12.0 or newer)";
  }
  return opened;
}

// Opened once and never closed or destroyed: threads may still launch while the process exits.
const Opened &opened_driver() {
  static const Opened &opened = *new Opened(open_driver());
  return opened;
}

// Runs in the child of a fork and may do nothing but set flags. A parent that merely failed to
// initialise leaves its child free to try.
void note_fork() {
  if (users.load(std::memory_order_relaxed) > 0) forked.store(true, std::memory_order_relaxed);
}

[[noreturn]] void throw_unavailable(const std::string &reason, const std::string &remedy) {
  throw Error(ErrorKind::driver_unavailable, reason, remedy);
}

// With init_mutex held.
void initialise() {
  const Opened &opened = opened_driver();
  if (!opened.reason.empty()) {
    throw_unavailable(opened.reason,
                      opened.path ? "update the NVIDIA driver"
                                  : "install the NVIDIA driver, or make its libraries visible "
                                    "(in a container: run it with GPU support)");
  }
  // A failure is not remembered: a fabric manager that is still starting is worth another try.
  const Result code = opened.api.init(0);
  if (code != 0) {
    const DriverText text = driver_text(opened.api, code);
    throw_unavailable("cuInit failed with " + text.describe(), remedy_for(code));
  }
}

}  // namespace

const DriverApi &driver() {
  require_not_forked();
  if (ready.load(std::memory_order_acquire)) return opened_driver().api;
  // Counted before the lock is taken: a child forked in between must not wait for a lock whose
  // holder does not exist there.
  users.fetch_add(1);
  try {
    const std::lock_guard<std::mutex> lock(init_mutex);
    if (!ready.load(std::memory_order_relaxed)) {
      initialise();
      ready.store(true, std::memory_order_release);
      users.fetch_add(1);
    }
  } catch (...) {
    users.fetch_sub(1);
    throw;
  }
  users.fetch_sub(1);
  return opened_driver().api;
}

DriverState driver_state() {
  DriverState state;
  try {
    driver();
    state.available = true;
  } catch (const Error &error) {
    state.reason = error.message;
    if (error.kind == ErrorKind::forked_process) return state;
  }
  state.version = opened_driver().version;
  state.path = opened_driver().path;
  return state;
}

void watch_forks() { pthread_atfork(nullptr, nullptr, note_fork); }

void throw_forked() {
  throw Error(ErrorKind::forked_process,
              "this process was forked after its parent had initialised the CUDA driver, whose "
              "state does not survive a fork",
              "start workers with multiprocessing's 'spawn' start method, or call load() in the "
              "child before the parent uses CUDA");
}

}  // namespace sonata
