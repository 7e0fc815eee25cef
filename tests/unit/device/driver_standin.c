/* A stand-in for libcuda.so.1: answers like the driver, and remembers what it was truly asked. It takes no memory and waits
 * for nothing. `asked` counts calls by name; the last argument of each call must have arrived whole. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

static uint64_t asked_allocations, asked_syncs, asked_copies, wrong;
static const size_t SIZE = 0x123456789aull;

int cuCtxSynchronize(void) { asked_syncs++; return 0; }
int cuStreamSynchronize(void *stream) { asked_syncs++; return stream == (void *)7 ? 0 : 700; }
int cuStreamSynchronize_ptsz(void *stream) { asked_syncs++; return stream == (void *)8 ? 0 : 700; }
int cuEventSynchronize(void *event) { asked_syncs++; return event == (void *)9 ? 0 : 700; }
int cuMemAlloc_v2(unsigned long long *to, size_t size) {
  asked_allocations++;
  if (size != SIZE) wrong++;
  *to = 42;
  return cuCtxSynchronize(); /* through the linker's table: the driver's own, and no call of anybody */
}
int cuMemAllocAsync(unsigned long long *to, size_t size, void *stream) {
  asked_allocations++;
  if (size != SIZE || stream != (void *)7) wrong++;
  *to = 43;
  return 0;
}
int cuMemAllocPitch_v2(unsigned long long *to, size_t *pitch, size_t width, size_t height, unsigned element) {
  asked_allocations++;
  if (width != SIZE || height != 3 || element != 16) wrong++;
  *to = 44;
  *pitch = 512;
  return 0;
}
int cuMemHostAlloc(void **to, size_t size, unsigned flags) {
  asked_allocations++;
  if (size != SIZE || flags != 2) wrong++;
  *to = NULL;
  return 2; /* CUDA_ERROR_OUT_OF_MEMORY */
}
int cuMemcpyDtoH_v2(void *to, unsigned long long from, size_t size) {
  asked_copies++;
  if (to != (void *)1 || from != 42 || size != SIZE) wrong++;
  return 0;
}
int cuLaunchKernel(void *function) { return function == NULL ? 400 : 0; }
int cuGetProcAddress_v2(const char *symbol, void **to, int version, uint64_t flags, int *status);

/* By base name, as the driver's: the newest version, and the per-thread stream's with flag 2. */
static const struct { const char *name; uint64_t flags; void *found; } table[] = {
    {"cuMemAlloc", 0, (void *)cuMemAlloc_v2}, {"cuMemAllocAsync", 0, (void *)cuMemAllocAsync},
    {"cuStreamSynchronize", 0, (void *)cuStreamSynchronize}, {"cuStreamSynchronize", 2, (void *)cuStreamSynchronize_ptsz},
    {"cuMemHostAlloc", 0, (void *)cuMemHostAlloc}, {"cuLaunchKernel", 0, (void *)cuLaunchKernel},
    {"cuEventSynchronize", 0, (void *)cuEventSynchronize}, {"cuGetProcAddress", 0, (void *)cuGetProcAddress_v2}};

int cuGetProcAddress_v2(const char *symbol, void **to, int version, uint64_t flags, int *status) {
  if (version < 12000) wrong++;
  *to = NULL;
  for (size_t i = 0; i < sizeof table / sizeof *table; i++)
    if (strcmp(table[i].name, symbol) == 0 && table[i].flags == flags) *to = table[i].found;
  if (status != NULL) *status = *to == NULL;
  return *to == NULL ? 500 : 0;
}

uint64_t standin_asked(int what) {
  return what == 0 ? asked_allocations : what == 1 ? asked_syncs : what == 2 ? asked_copies : wrong;
}
