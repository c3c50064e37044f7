// Functions of libraries that the process has loaded already.
#pragma once

#include <dlfcn.h>

namespace sonata {

// Null where there is no such library or function.
template <typename Function>
void find_loaded(const char *library, const char *name, Function &found) {
  // A reference that is kept: torch is never unloaded.
  if (void *handle = dlopen(library, RTLD_LAZY | RTLD_NOLOAD)) {
    found = reinterpret_cast<Function>(dlsym(handle, name));
  }
}

}  // namespace sonata
