/* Counts the CUDA calls of a process that take memory or make a thread wait, and by whose code they were made.
 *
 * Preloaded (LD_PRELOAD), never linked. Everything that talks to a card ends in the driver, libcuda.so.1, and there are three
 * ways into it: symbols bound by the linker (exported below), dlsym, and the driver's own cuGetProcAddress, by which every
 * CUDA runtime goes, also one that is linked statically into a wheel. All three hand out the wrappers of this file; each
 * calls the function that it stands for and counts first. Counting at the driver alone counts every call once.
 *
 * Whose code: a mark of the thread, OURS until `fabric_calls_owner` says otherwise. So what nobody marked is ours, and an
 * engine's calls are those made while our code had handed the thread to it.
 *
 * Not seen: calls of another process, memory that a captured graph takes when it is replayed, and functions that are not
 * listed here. `fabric_calls_read` tells of functions that had more variants than there is room for. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { DEVICE_ALLOCATION, PINNED_ALLOCATION, SYNCHRONISATION, BLOCKING_COPY, KINDS, UNCOUNTED = KINDS };
enum { OURS, ENGINE, OWNERS };
/* Of one name the driver has up to four: two versions, each for the legacy and the per-thread default stream. */
#define VARIANTS 6
#define INTERFACE 1

typedef int Result;                  /* CUresult */
typedef unsigned long long Address;  /* CUdeviceptr */

static _Atomic uint64_t counts[OWNERS][KINDS];
static _Atomic uint64_t unbound;
static _Thread_local int owner = OURS;
static _Thread_local int depth; /* inside a counted call: what the driver calls of itself is part of it */

static void enter(int kind) {
  if (depth++ == 0 && kind != UNCOUNTED)
    atomic_fetch_add_explicit(&counts[owner][kind], 1, memory_order_relaxed);
}

typedef struct {
  const char *name;
  void *_Atomic *real;      /* [VARIANTS], null where free */
  void *const *wrapper;     /* [VARIANTS] */
} Watched;

static void *substitute(const char *symbol, void *found);

#define WRAPPER(name, kind, n, params, args)        \
  static Result name##_##n params {                 \
    enter(kind);                                    \
    Result result = ((Result(*) params)(name##_real[n])) args; \
    depth--;                                        \
    return result;                                  \
  }
#define COUNTED(name, kind, params, args)                                                      \
  static void *_Atomic name##_real[VARIANTS];                                                  \
  WRAPPER(name, kind, 0, params, args) WRAPPER(name, kind, 1, params, args)                    \
  WRAPPER(name, kind, 2, params, args) WRAPPER(name, kind, 3, params, args)                    \
  WRAPPER(name, kind, 4, params, args) WRAPPER(name, kind, 5, params, args)                    \
  static void *const name##_wrapper[VARIANTS] = {(void *)name##_0, (void *)name##_1, (void *)name##_2, \
                                                 (void *)name##_3, (void *)name##_4, (void *)name##_5};

COUNTED(cuMemAlloc, DEVICE_ALLOCATION, (Address *to, size_t size), (to, size))
COUNTED(cuMemAllocPitch, DEVICE_ALLOCATION, (Address *to, size_t *pitch, size_t width, size_t height, unsigned element),
        (to, pitch, width, height, element))
COUNTED(cuMemAllocManaged, DEVICE_ALLOCATION, (Address *to, size_t size, unsigned flags), (to, size, flags))
COUNTED(cuMemAllocAsync, DEVICE_ALLOCATION, (Address *to, size_t size, void *stream), (to, size, stream))
COUNTED(cuMemAllocFromPoolAsync, DEVICE_ALLOCATION, (Address *to, size_t size, void *pool, void *stream),
        (to, size, pool, stream))
COUNTED(cuMemCreate, DEVICE_ALLOCATION, (Address *to, size_t size, const void *how, unsigned long long flags),
        (to, size, how, flags))
COUNTED(cuArrayCreate, DEVICE_ALLOCATION, (void **to, const void *how), (to, how))
COUNTED(cuArray3DCreate, DEVICE_ALLOCATION, (void **to, const void *how), (to, how))
COUNTED(cuMemHostAlloc, PINNED_ALLOCATION, (void **to, size_t size, unsigned flags), (to, size, flags))
COUNTED(cuMemAllocHost, PINNED_ALLOCATION, (void **to, size_t size), (to, size))
COUNTED(cuMemHostRegister, PINNED_ALLOCATION, (void *at, size_t size, unsigned flags), (at, size, flags))
COUNTED(cuStreamSynchronize, SYNCHRONISATION, (void *stream), (stream))
/* _v2 takes the context; the first takes nothing and leaves the argument register alone. */
COUNTED(cuCtxSynchronize, SYNCHRONISATION, (void *context), (context))
COUNTED(cuEventSynchronize, SYNCHRONISATION, (void *event), (event))
COUNTED(cuMemcpy, BLOCKING_COPY, (Address to, Address from, size_t size), (to, from, size))
COUNTED(cuMemcpyHtoD, BLOCKING_COPY, (Address to, const void *from, size_t size), (to, from, size))
COUNTED(cuMemcpyDtoH, BLOCKING_COPY, (void *to, Address from, size_t size), (to, from, size))
COUNTED(cuMemcpyDtoD, BLOCKING_COPY, (Address to, Address from, size_t size), (to, from, size))

/* cuGetProcAddress hands out functions, so what it hands out is replaced. Its first version has no `status`. */
static void *_Atomic cuGetProcAddress_real[VARIANTS];
#define LOOKUP(n)                                                                                          \
  static Result cuGetProcAddress_##n(const char *symbol, void **to, int version, uint64_t flags, int *status) { \
    Result result = ((Result(*)(const char *, void **, int, uint64_t, int *))(cuGetProcAddress_real[n]))(     \
        symbol, to, version, flags, status);                                                               \
    if (result == 0 && symbol != NULL && to != NULL && *to != NULL) *to = substitute(symbol, *to);         \
    return result;                                                                                         \
  }
LOOKUP(0) LOOKUP(1) LOOKUP(2) LOOKUP(3) LOOKUP(4) LOOKUP(5)
static void *const cuGetProcAddress_wrapper[VARIANTS] = {
    (void *)cuGetProcAddress_0, (void *)cuGetProcAddress_1, (void *)cuGetProcAddress_2,
    (void *)cuGetProcAddress_3, (void *)cuGetProcAddress_4, (void *)cuGetProcAddress_5};

#define ROW(name) {#name, name##_real, name##_wrapper}
static const Watched watched[] = {
    ROW(cuGetProcAddress), ROW(cuMemAlloc), ROW(cuMemAllocPitch), ROW(cuMemAllocManaged), ROW(cuMemAllocAsync),
    ROW(cuMemAllocFromPoolAsync), ROW(cuMemCreate), ROW(cuArrayCreate), ROW(cuArray3DCreate), ROW(cuMemHostAlloc),
    ROW(cuMemAllocHost), ROW(cuMemHostRegister), ROW(cuStreamSynchronize), ROW(cuCtxSynchronize),
    ROW(cuEventSynchronize), ROW(cuMemcpy), ROW(cuMemcpyHtoD), ROW(cuMemcpyDtoH), ROW(cuMemcpyDtoD)};

/* The row of a symbol, whatever its version and default stream: cuMemAlloc, cuMemAlloc_v2, cuMemcpyDtoH_v2_ptds. */
static const Watched *row_of(const char *symbol) {
  if (symbol[0] != 'c' || symbol[1] != 'u') return NULL;
  for (size_t i = 0; i < sizeof watched / sizeof *watched; i++) {
    size_t length = strlen(watched[i].name);
    if (strncmp(symbol, watched[i].name, length) != 0) continue;
    const char *rest = symbol + length;
    if (rest[0] == '_' && rest[1] == 'v' && rest[2] >= '2' && rest[2] <= '9') rest += 3;
    if (strcmp(rest, "_ptsz") == 0 || strcmp(rest, "_ptds") == 0) rest += 5;
    if (*rest == 0) return &watched[i];
  }
  return NULL;
}

/* The wrapper that stands for `found`; one variant keeps one wrapper, in whatever order threads come. */
static void *substitute(const char *symbol, void *found) {
  const Watched *row = row_of(symbol);
  if (row == NULL) return found;
  for (int n = 0; n < VARIANTS; n++)
    if (row->wrapper[n] == found) return found; /* handed out before, and asked for through us once more */
  for (int n = 0; n < VARIANTS; n++) {
    void *before = NULL;
    if (atomic_compare_exchange_strong(&row->real[n], &before, found) || before == found) return row->wrapper[n];
  }
  atomic_fetch_add(&unbound, 1);
  return found;
}

typedef void *(*Lookup)(void *, const char *);
static _Atomic(Lookup) real_dlsym;

/* glibc's own, by version: a plain look-up would find ours. */
static Lookup find_dlsym(void) {
  Lookup known = atomic_load_explicit(&real_dlsym, memory_order_relaxed);
  if (known != NULL) return known;
  static const char *const versions[] = {"GLIBC_2.34", "GLIBC_2.2.5", "GLIBC_2.17"};
  for (size_t i = 0; i < 3 && known == NULL; i++) known = (Lookup)dlvsym(RTLD_NEXT, "dlsym", versions[i]);
  atomic_store_explicit(&real_dlsym, known, memory_order_relaxed);
  return known;
}

#define EXPORTED __attribute__((visibility("default")))

/* A look-up that is not ours is jumped to, not called: RTLD_NEXT asks who its caller is. */
EXPORTED void *dlsym(void *handle, const char *symbol) {
  Lookup lookup = find_dlsym();
  if (row_of(symbol) == NULL) return lookup(handle, symbol);
  void *found = lookup(handle, symbol);
  return found == NULL ? NULL : substitute(symbol, found);
}

/* For libraries that name libcuda.so.1 as needed: their linker finds these first. */
static void *of_driver(const char *symbol) {
  void *driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
  void *found = driver == NULL ? NULL : find_dlsym()(driver, symbol);
  return found == NULL ? NULL : substitute(symbol, found);
}
#define NOT_INITIALISED 3 /* CUDA_ERROR_NOT_INITIALIZED: the driver is not loaded, so nobody can have called it */
#define LINKED(symbol, params, args)                             \
  EXPORTED Result symbol params {                                \
    static void *_Atomic wrapper;                                \
    if (wrapper == NULL) wrapper = of_driver(#symbol);           \
    return wrapper == NULL ? NOT_INITIALISED : ((Result(*) params)(wrapper)) args; \
  }
LINKED(cuGetProcAddress, (const char *symbol, void **to, int version, uint64_t flags), (symbol, to, version, flags))
LINKED(cuGetProcAddress_v2, (const char *symbol, void **to, int version, uint64_t flags, int *status),
       (symbol, to, version, flags, status))
LINKED(cuMemAlloc_v2, (Address *to, size_t size), (to, size))
LINKED(cuMemAllocPitch_v2, (Address *to, size_t *pitch, size_t width, size_t height, unsigned element),
       (to, pitch, width, height, element))
LINKED(cuMemAllocManaged, (Address *to, size_t size, unsigned flags), (to, size, flags))
LINKED(cuMemAllocAsync, (Address *to, size_t size, void *stream), (to, size, stream))
LINKED(cuMemAllocAsync_ptsz, (Address *to, size_t size, void *stream), (to, size, stream))
LINKED(cuMemAllocFromPoolAsync, (Address *to, size_t size, void *pool, void *stream), (to, size, pool, stream))
LINKED(cuMemAllocFromPoolAsync_ptsz, (Address *to, size_t size, void *pool, void *stream), (to, size, pool, stream))
LINKED(cuMemCreate, (Address *to, size_t size, const void *how, unsigned long long flags), (to, size, how, flags))
LINKED(cuArrayCreate_v2, (void **to, const void *how), (to, how))
LINKED(cuArray3DCreate_v2, (void **to, const void *how), (to, how))
LINKED(cuMemHostAlloc, (void **to, size_t size, unsigned flags), (to, size, flags))
LINKED(cuMemAllocHost_v2, (void **to, size_t size), (to, size))
LINKED(cuMemHostRegister_v2, (void *at, size_t size, unsigned flags), (at, size, flags))
LINKED(cuStreamSynchronize, (void *stream), (stream))
LINKED(cuStreamSynchronize_ptsz, (void *stream), (stream))
LINKED(cuCtxSynchronize, (void *context), (context))
LINKED(cuCtxSynchronize_v2, (void *context), (context))
LINKED(cuEventSynchronize, (void *event), (event))
LINKED(cuMemcpy, (Address to, Address from, size_t size), (to, from, size))
LINKED(cuMemcpyHtoD_v2, (Address to, const void *from, size_t size), (to, from, size))
LINKED(cuMemcpyDtoH_v2, (void *to, Address from, size_t size), (to, from, size))
LINKED(cuMemcpyDtoD_v2, (Address to, Address from, size_t size), (to, from, size))

/* What device/calls.py asks. The mark of this thread, and the one before. */
EXPORTED int fabric_calls_owner(int next) {
  int before = owner;
  if (next >= 0 && next < OWNERS) owner = next;
  return before;
}

/* to: OWNERS x KINDS counts of the process so far, then the look-ups that found no room. */
EXPORTED void fabric_calls_read(uint64_t *to) {
  for (int o = 0; o < OWNERS; o++)
    for (int k = 0; k < KINDS; k++) to[o * KINDS + k] = atomic_load_explicit(&counts[o][k], memory_order_relaxed);
  to[OWNERS * KINDS] = atomic_load(&unbound);
}

EXPORTED int fabric_calls_interface(void) { return INTERFACE; }
