/* The two ways of compiled code into the driver. `linked_*`: symbols bound by the linker; `runtime_*`: what a CUDA runtime
 * does, statically linked or not: dlopen, dlsym, then everything by cuGetProcAddress, which it asks for once more. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>

int cuStreamSynchronize(void *stream);
int cuMemAllocPitch_v2(unsigned long long *to, size_t *pitch, size_t width, size_t height, unsigned element);
int linked_sync(void) { return cuStreamSynchronize((void *)7); }
int linked_pitch(void) {
  unsigned long long to = 0;
  size_t pitch = 0;
  int result = cuMemAllocPitch_v2(&to, &pitch, 0x123456789aull, 3, 16);
  return result != 0 || to != 44 || pitch != 512;
}

typedef int (*Lookup)(const char *, void **, int, uint64_t, int *);
static void *of_runtime(const char *symbol, uint64_t flags) {
  void *driver = dlopen("libcuda.so.1", RTLD_NOW);
  Lookup lookup = (Lookup)dlsym(driver, "cuGetProcAddress_v2");
  void *found = NULL;
  int status = 0;
  if (lookup("cuGetProcAddress", &found, 13000, 0, &status) != 0) return NULL;
  lookup = (Lookup)found;
  return lookup(symbol, &found, 13000, flags, &status) == 0 ? found : NULL;
}
int runtime_alloc(void) {
  unsigned long long to = 0;
  int (*call)(unsigned long long *, size_t) = of_runtime("cuMemAlloc", 0);
  return call(&to, 0x123456789aull) != 0 || to != 42;
}
int runtime_sync(int per_thread) {
  int (*call)(void *) = of_runtime("cuStreamSynchronize", per_thread ? 2 : 0);
  return call((void *)(per_thread ? (intptr_t)8 : (intptr_t)7));
}
int runtime_launch(void) {
  int (*call)(void *) = of_runtime("cuLaunchKernel", 0);
  return call((void *)1);
}
int runtime_knows(const char *symbol) { return of_runtime(symbol, 0) != NULL; }

/* RTLD_NEXT means "behind whoever asks": of this library that is the C library's, of any other it would be this one. */
long standin_next(void) { return -1; }
long next_is_not_mine(void) {
  long (*found)(void) = dlsym(RTLD_NEXT, "standin_next");
  return found == NULL ? 0 : found();
}
