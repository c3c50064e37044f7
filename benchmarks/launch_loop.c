/* What a launch costs without Python: a loop of cuLaunchKernel, or cuLaunchKernelEx, over one kernel.
 *
 * benchmarks/launch.py compiles it; the driver is the one that the process has loaded already. */

#include <dlfcn.h>
#include <stddef.h>
#include <time.h>

typedef struct {
  int id, padding, value[16]; /* CUlaunchAttribute; a flag is the first word of the value */
} Attribute;

typedef struct {
  unsigned grid[3], block[3], shared;
  void *stream;
  Attribute *attributes;
  unsigned count;
} Config; /* CUlaunchConfig */

typedef int (*Load)(void **, const void *, int *, void **, unsigned, int *, void **, unsigned);
typedef int (*GetKernel)(void **, void *, const char *);
typedef int (*GetFunction)(void **, void *);
typedef int (*SetAttribute)(void *, int, int);
typedef int (*Launch)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                      void *, void **, void **);
typedef int (*LaunchEx)(const Config *, void *, void **, void **);

static void *find(const char *name) {
  void *driver = dlopen("libcuda.so.1", RTLD_NOW);
  return driver ? dlsym(driver, name) : NULL;
}

/* The function of an entry of a cubin, in the current context, or a CUresult other than 0. */
int load(const void *image, const char *entry, int shared, void **function) {
  void *library, *kernel;
  int code = ((Load)find("cuLibraryLoadData"))(&library, image, NULL, NULL, 0, NULL, NULL, 0);
  if (!code) code = ((GetKernel)find("cuLibraryGetKernel"))(&kernel, library, entry);
  if (!code) code = ((GetFunction)find("cuKernelGetFunction"))(function, kernel);
  /* 8: CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES */
  if (!code && shared) code = ((SetAttribute)find("cuFuncSetAttribute"))(*function, 8, shared);
  return code;
}

/* Nanoseconds a launch of `count`, or the negative CUresult of one that failed. */
double loop(void *function, Config *config, int programmatic, void *params, size_t size,
            int count) {
  Launch launch = (Launch)find("cuLaunchKernel");
  LaunchEx launch_ex = (LaunchEx)find("cuLaunchKernelEx");
  /* 6: CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION */
  Attribute attribute = {6, 0, {1}};
  struct timespec from, to;
  clock_gettime(CLOCK_MONOTONIC, &from);
  for (int i = 0; i < count; ++i) {
    void *extra[] = {(void *)1, params, (void *)2, &size, NULL};
    const unsigned *grid = config->grid, *block = config->block;
    int code;
    if (programmatic) {
      config->attributes = &attribute;
      config->count = 1;
      code = launch_ex(config, function, NULL, extra);
    } else {
      code = launch(function, grid[0], grid[1], grid[2], block[0], block[1], block[2],
                    config->shared, config->stream, NULL, extra);
    }
    if (code) return -code;
  }
  clock_gettime(CLOCK_MONOTONIC, &to);
  return ((to.tv_sec - from.tv_sec) * 1e9 + (to.tv_nsec - from.tv_nsec)) / count;
}
