// Releases the GIL for the lifetime of an object.
#pragma once

#include <Python.h>
#include <unistd.h>

namespace sonata {

// nanobind's own guard, but for one case: a daemon thread that comes back while the interpreter
// shuts down. Before Python 3.14, taking the GIL then ends the thread by unwinding its stack, which
// through a C++ destructor aborts the process. Such a thread is parked instead, as 3.14 does.
class GilRelease {
 public:
  GilRelease() : state_(PyEval_SaveThread()) {}
  GilRelease(const GilRelease &) = delete;
  GilRelease &operator=(const GilRelease &) = delete;

  ~GilRelease() {
    try {
      PyEval_RestoreThread(state_);
    } catch (...) {  // the unwinding: a C function throws nothing else
      for (;;) pause();
    }
  }

 private:
  PyThreadState *state_;
};

}  // namespace sonata
