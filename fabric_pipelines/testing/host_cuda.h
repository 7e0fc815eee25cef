// A stand-in for CUDA, so that a kernel of cuda/ compiles as C++17 and runs on a CPU. No card, no speed, no PTX.
//
// Threads of a block are fibers of one thread, blocks run one after another. A fiber gives way only at a barrier, a warp
// collective or an atomic, in a set order, so a run can be repeated to the bit, and run again in the opposite order: what
// differs then was a race. What a card answers with garbage or not at all stops the launch with the kernel's name and line:
// a collective that lanes of its mask do not reach, a value taken from a lane outside the mask, a barrier that not all
// threads reach, an argument of another size, memory outside an array (guard pages), and what the compiler can trap
// (misaligned vectors, indices outside fixed arrays, shifts, integer overflow). Shared memory is NaN when a block starts.
//
// Not here: races between plain loads and stores of different threads inside one stretch without a barrier are seen when the
// opposite order changes the result, or with HOST_RACES; products and sums are never fused unless the source says fma.
#pragma once
#include <csetjmp>
#include <csignal>
#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <type_traits>
#include <utility>

#include <dlfcn.h>
#include <link.h>
#include <sys/mman.h>
#include <ucontext.h>

#define HOST_CUDA 1
#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
// Thread-local variables of one library lie in one piece whose place the loader knows: that is how shared memory is
// found and poisoned, also that of templates, which no section attribute reaches.
#define __shared__ static thread_local
#define __constant__ static const

struct uint3 { unsigned x, y, z; };
struct dim3 { unsigned x = 1, y = 1, z = 1; };

#define HOST_VECTOR(T, NAME)                                                                       \
  struct alignas(2 * sizeof(T)) NAME##2 { T x, y; };                                               \
  struct NAME##3 { T x, y, z; };                                                                   \
  struct alignas(4 * sizeof(T) < 16 ? 4 * sizeof(T) : 16) NAME##4 { T x, y, z, w; };               \
  inline NAME##2 make_##NAME##2(T x, T y) { return {x, y}; }                                       \
  inline NAME##4 make_##NAME##4(T x, T y, T z, T w) { return {x, y, z, w}; }
HOST_VECTOR(float, float)
HOST_VECTOR(double, double)
HOST_VECTOR(int, int)
HOST_VECTOR(char, char)
HOST_VECTOR(unsigned char, uchar)
HOST_VECTOR(short, short)
HOST_VECTOR(unsigned short, ushort)
HOST_VECTOR(long long, longlong)
HOST_VECTOR(unsigned long long, ulonglong)
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;
constexpr int warpSize = 32;

namespace host {

constexpr unsigned kWarp = 32, kThreadsMax = 1024;
constexpr size_t kStack = 128 << 10, kGuard = 4096;

struct Site {
  const char *what, *file;
  int line;
  bool operator==(const Site& other) const {
    return line == other.line && !strcmp(what, other.what) && !strcmp(file, other.file);
  }
};

enum class State { kRunnable, kGaveWay, kCollective, kBarrier, kEnded };

struct Fiber {
  State state;
  Site site;
  unsigned mask, meetings;  // meetings: collectives that it has passed
  uint64_t value, result;
  int argument, width;
#ifdef HOST_UCONTEXT
  ucontext_t context;
#else
  void* stack;
#endif
};

// What went wrong, for the launcher: `offset` is the place in the library's code where a signal came from.
struct Report {
  int failed;
  char message[1000];
  uint64_t address, offset;
};

static Fiber fibers[kThreadsMax];
static unsigned threads, running, barriers;
static volatile bool in_atomic;
static bool falling;
static const char* kernel_name;
static Report* report;
static void (*body)();
static char* stacks;
static sigjmp_buf on_signal;
static thread_local volatile char anchor;  // makes the piece of shared memory exist

#ifdef HOST_UCONTEXT
static ucontext_t scheduler;
inline void leave() { swapcontext(&fibers[running].context, &scheduler); }
inline void enter(unsigned thread) { swapcontext(&scheduler, &fibers[thread].context); }
#else
// Callee-saved registers on the stack, then the other stack: 1/50 of swapcontext, which asks the kernel for its signal mask.
extern "C" __attribute__((visibility("hidden"))) void host_switch(void** from, void* to);
asm(R"(
.text
.hidden host_switch
.globl host_switch
.type host_switch,@function
host_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size host_switch,.-host_switch
)");
static void* scheduler;
inline void leave() { host_switch(&fibers[running].stack, scheduler); }
inline void enter(unsigned thread) { host_switch(&scheduler, fibers[thread].stack); }
#endif

inline const char* base_name(const char* path) {
  const char* slash = strrchr(path, '/');
  return slash ? slash + 1 : path;
}

// From a fiber: it is left for good. From the scheduler: the caller stops.
__attribute__((format(printf, 1, 2))) inline void note(const char* format, ...) {
  if (report->failed) return;
  report->failed = 1;
  int length = snprintf(report->message, sizeof report->message, "%s, block %u: ", kernel_name,
                        blockIdx.x);
  va_list rest;
  va_start(rest, format);
  vsnprintf(report->message + length, sizeof report->message - length, format, rest);
  va_end(rest);
}

[[noreturn]] inline void give_up() {
  leave();
  abort();  // a fiber that failed is never entered again
}

inline std::string standing(unsigned thread) {
  const Fiber& fiber = fibers[thread];
  char text[200];
  if (fiber.state == State::kEnded) {
    snprintf(text, sizeof text, "thread %u has ended", thread);
  } else {
    snprintf(text, sizeof text, "thread %u is at %s, %s:%d, mask %08x", thread, fiber.site.what,
             base_name(fiber.site.file), fiber.site.line, fiber.mask);
  }
  return text;
}

inline void run_body() {
  body();
  fibers[running].state = State::kEnded;
  leave();
  abort();
}

// One area serves all libraries of a process, in turn: each guard page splits a mapping, and a process may have some 65,000.
inline char* map_stacks() {
  const size_t size = kThreadsMax * (kStack + kGuard);
  void* found = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                     -1, 0);
  if (found == MAP_FAILED) return nullptr;
  char* area = static_cast<char*>(found);
  for (unsigned t = 0; t < kThreadsMax; ++t) {
    if (mprotect(area + t * (kStack + kGuard), kGuard, PROT_NONE) == 0) continue;
    munmap(area, size);
    return nullptr;
  }
  return area;
}

inline void prepare(unsigned thread) {
  Fiber& fiber = fibers[thread];
  fiber.state = State::kRunnable;
  fiber.mask = 0, fiber.meetings = 0;
  char* low = stacks + thread * (kStack + kGuard) + kGuard;
#ifdef HOST_UCONTEXT
  getcontext(&fiber.context);
  fiber.context.uc_stack = {low, 0, kStack};
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, run_body, 0);
#else
  void** top = reinterpret_cast<void**>(low + kStack);
  *--top = nullptr;  // where a caller's return address would keep the stack aligned
  *--top = reinterpret_cast<void*>(run_body);
  for (int saved = 0; saved < 6; ++saved) *--top = nullptr;
  fiber.stack = top;
#endif
}

inline int find_shared(dl_phdr_info* info, size_t, void* out) {
  const auto here = reinterpret_cast<uintptr_t>(&find_shared);
  bool mine = false;
  const ElfW(Phdr)* piece = nullptr;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const ElfW(Phdr)& header = info->dlpi_phdr[i];
    const uintptr_t low = info->dlpi_addr + header.p_vaddr;
    if (header.p_type == PT_LOAD && low <= here && here < low + header.p_memsz) mine = true;
    if (header.p_type == PT_TLS) piece = &header;
  }
  if (!mine) return 0;
  auto* range = static_cast<std::pair<void*, size_t>*>(out);
  if (piece) *range = {info->dlpi_tls_data, piece->p_memsz};
  return 1;
}

inline bool runnable(unsigned thread) { return fibers[thread].state == State::kRunnable; }

// Each thread of the warp runs until it waits; true when one did.
inline bool run_warp(unsigned first, unsigned count) {
  bool ran = false, again = true;
  while (again) {
    again = false;
    for (unsigned step = 0; step < count; ++step) {
      const unsigned thread = first + (falling ? count - 1 - step : step);
      if (!runnable(thread)) continue;
      running = thread;
      threadIdx = {thread, 0, 0};
      enter(thread);
      if (report->failed) return true;
      ran = again = true;
    }
  }
  return ran;
}

inline void blame_waiting() {
  unsigned at_barrier = 0;
  for (unsigned t = 0; t < threads; ++t) {
    const Fiber& fiber = fibers[t];
    if (fiber.state == State::kBarrier) ++at_barrier;
    if (fiber.state != State::kCollective) continue;
    for (unsigned lane = 0; lane < kWarp; ++lane) {
      const unsigned other = t / kWarp * kWarp + lane;
      if (!(fiber.mask >> lane & 1)) continue;
      const Fiber& missed = fibers[other];
      const bool arrived = other < threads && missed.state == State::kCollective &&
                           missed.mask == fiber.mask && missed.site == fiber.site;
      if (arrived) continue;
      note("divergent %s at %s:%d with mask %08x: thread %u waits for lane %u, but %s", fiber.site.what,
           base_name(fiber.site.file), fiber.site.line, fiber.mask, t, lane,
           other < threads ? standing(other).c_str() : "the block has no such thread");
      return;
    }
  }
  for (unsigned t = 0; t < threads; ++t) {
    if (fibers[t].state != State::kBarrier) continue;
    for (unsigned other = 0; other < threads; ++other) {
      if (fibers[other].state == State::kBarrier && fibers[other].site == fibers[t].site) continue;
      note("__syncthreads at %s:%d is reached by %u of %u threads: %s", base_name(fibers[t].site.file),
           fibers[t].site.line, at_barrier, threads, standing(other).c_str());
      return;
    }
  }
  note("no thread can run");
}

// False when all ended or something failed.
inline bool pass_barrier() {
  unsigned ended = 0;
  for (unsigned t = 0; t < threads; ++t) ended += fibers[t].state == State::kEnded;
  if (ended == threads) return false;
  bool whole = fibers[0].state == State::kBarrier;
  for (unsigned t = 1; t < threads; ++t) {
    whole = whole && fibers[t].state == State::kBarrier && fibers[t].site == fibers[0].site;
  }
  if (!whole) {
    blame_waiting();
    return false;
  }
  for (unsigned t = 0; t < threads; ++t) fibers[t].state = State::kRunnable;
  ++barriers;
  return true;
}

inline void run_block() {
  for (unsigned t = 0; t < threads; ++t) prepare(t);
  const unsigned warps = (threads + kWarp - 1) / kWarp;
  while (true) {
    bool ran = false;
    for (unsigned step = 0; step < warps; ++step) {
      const unsigned first = (falling ? warps - 1 - step : step) * kWarp;
      ran |= run_warp(first, threads - first < kWarp ? threads - first : kWarp);
      if (report->failed) return;
    }
    bool gave_way = false;
    for (unsigned t = 0; t < threads; ++t) {
      if (fibers[t].state != State::kGaveWay) continue;
      fibers[t].state = State::kRunnable;
      gave_way = true;
    }
    if (!gave_way && !ran && !pass_barrier()) return;
  }
}

#ifdef HOST_RACES
// Who touched each value last. Two threads race over a value when one of them writes, not both by atomics, and neither a barrier
// of their block nor a collective of their warp lies between. One reader a value is remembered, so a race may be missed,
// but what is reported is one.
struct Touch {
  unsigned block, thread, barrier, meeting;
  bool some, atomic;
};
struct Cell {
  Touch written, read;
};
struct Watched {
  uint64_t low, size, grain, argument;
  Cell* cells;
};
constexpr uint64_t kShared = ~0ull;  // for an argument: a block's own memory
constexpr unsigned kWatchedMax = 65;
static Watched watched[kWatchedMax];
static unsigned watched_count;

__attribute__((no_sanitize("thread"))) inline bool races(const Touch& before, const Touch& now, bool shared) {
  if (!before.some || (before.block == now.block && before.thread == now.thread)) return false;
  if (before.atomic && now.atomic) return false;
  if (before.block != now.block) return !shared;
  if (before.barrier != now.barrier) return false;
  return before.thread / kWarp != now.thread / kWarp || before.meeting == now.meeting;
}

__attribute__((no_sanitize("thread"), noinline)) inline void touched(const void* where, uint64_t size,
                                                                     bool write, void* from) {
  const uint64_t at = reinterpret_cast<uint64_t>(where);
  for (unsigned which = 0; which < watched_count; ++which) {
    Watched& area = watched[which];
    if (at < area.low || at >= area.low + area.size) continue;
    const Fiber& fiber = fibers[running];
    const Touch now{blockIdx.x, running, barriers, fiber.meetings, true, in_atomic};
    const bool shared = area.argument == kShared;
    for (uint64_t cell = (at - area.low) / area.grain; cell <= (at - area.low + size - 1) / area.grain; ++cell) {
      Cell& own = area.cells[cell];
      const bool over = races(own.written, now, shared);
      if (over || (write && races(own.read, now, shared))) {
        const Touch& other = over ? own.written : own.read;
        char what[40] = "shared memory, byte";
        if (!shared) snprintf(what, sizeof what, "argument %u, value", static_cast<unsigned>(area.argument));
        note("race over %s %llu: thread %u of block %u %s it, thread %u %s it, and nothing lies between", what,
             static_cast<unsigned long long>(cell), other.thread, other.block, over ? "writes" : "reads", running,
             write ? "writes" : "reads");
        Dl_info library;
        if (dladdr(from, &library)) {
          report->offset = reinterpret_cast<uint64_t>(from) - 1 - reinterpret_cast<uint64_t>(library.dli_fbase);
        }
        report->failed = 1000;
        give_up();
      }
      Touch& last = write ? own.written : own.read;
      if (write || !last.some || last.block != now.block || last.barrier != now.barrier) last = now;
    }
    return;
  }
}
#endif

inline void signalled(int number, siginfo_t* info, void* where) {
  (void)where;
  report->address = reinterpret_cast<uint64_t>(info->si_addr);
#if defined(__x86_64__)
  const uint64_t at = static_cast<ucontext_t*>(where)->uc_mcontext.gregs[REG_RIP];
  Dl_info library;
  if (dladdr(reinterpret_cast<void*>(at), &library)) {
    report->offset = at - reinterpret_cast<uint64_t>(library.dli_fbase);
  }
#endif
  const char* what = number == SIGILL ? "misaligned vector, index outside a fixed array, shift or integer overflow"
                     : number == SIGFPE ? "integer division by zero"
                                        : "memory outside the arguments";
  note("thread %u: %s", threadIdx.x, what);
  report->failed = number;
  siglongjmp(on_signal, 1);
}

inline void launch(const char* name, void (*kernel)(), unsigned blocks, unsigned block_threads,
                   bool backwards, Report* out) {
  kernel_name = name, body = kernel, report = out, falling = backwards, threads = block_threads;
  report->failed = 0, report->address = 0, report->offset = 0;
  blockIdx = {0, 0, 0};
  if (threads == 0 || threads > kThreadsMax || blocks == 0) return note("no grid of %u x %u", blocks, threads);
  if (!stacks) return note("its library has no stacks: host_stacks was not called");
  gridDim = {blocks, 1, 1}, blockDim = {threads, 1, 1};
  anchor = 1;
  std::pair<void*, size_t> shared{nullptr, 0};
  dl_iterate_phdr(find_shared, &shared);
  barriers = 0, in_atomic = false;
#ifdef HOST_RACES
  watched[watched_count++] = {reinterpret_cast<uint64_t>(shared.first), shared.second, 1, kShared,
                              static_cast<Cell*>(calloc(shared.second, sizeof(Cell)))};
#endif

  static char alternate[1 << 16];
  const stack_t handler_stack{alternate, 0, sizeof alternate};
  stack_t stack_before;
  sigaltstack(&handler_stack, &stack_before);
  struct sigaction action {};
  action.sa_sigaction = signalled;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  const int caught[] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE};
  struct sigaction before[4];
  for (int i = 0; i < 4; ++i) sigaction(caught[i], &action, &before[i]);
  if (sigsetjmp(on_signal, 1) == 0) {
    for (unsigned step = 0; step < blocks && !report->failed; ++step) {
      blockIdx = {backwards ? blocks - 1 - step : step, 0, 0};
      memset(shared.first, 0xff, shared.second);
      run_block();
    }
  }
  for (int i = 0; i < 4; ++i) sigaction(caught[i], &before[i], nullptr);
  sigaltstack(&stack_before, nullptr);
}

// Lanes of `mask` meet; the last one to come works out what each of them gets.
template <typename Result>
inline uint64_t meet(unsigned mask, Site site, uint64_t value, int argument, int width, Result result) {
  Fiber& own = fibers[running];
  const unsigned first = running / kWarp * kWarp;
  if (!(mask >> (running % kWarp) & 1)) {
    note("%s at %s:%d: thread %u is not in its own mask %08x", site.what, base_name(site.file), site.line,
         running, mask);
    give_up();
  }
  own.state = State::kCollective, own.site = site, own.mask = mask, own.value = value;
  own.argument = argument, own.width = width;
  bool whole = true;
  for (unsigned lane = 0; lane < kWarp && whole; ++lane) {
    if (!(mask >> lane & 1)) continue;
    const Fiber& other = fibers[first + lane];
    whole = first + lane < threads && other.state == State::kCollective && other.mask == mask &&
            other.site == site;
  }
  if (!whole) {
    leave();
    ++own.meetings;
    return own.result;
  }
  for (unsigned lane = 0; lane < kWarp; ++lane) {
    if (!(mask >> lane & 1)) continue;
    fibers[first + lane].result = result(first, lane);
    fibers[first + lane].state = State::kRunnable;
  }
  if (report->failed) give_up();
  ++own.meetings;
  return own.result;
}

template <typename T>
inline uint64_t bits_of(T value) {
  static_assert(sizeof(T) <= 8 && std::is_arithmetic<T>::value, "a lane hands over one number");
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof value);
  return bits;
}

template <typename T>
inline T value_of(uint64_t bits) {
  T value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

template <typename T, typename Source>
inline T shuffle(unsigned mask, T value, int argument, int width, Site site, Source source) {
  return value_of<T>(meet(mask, site, bits_of(value), argument, width, [=](unsigned first, unsigned lane) {
    const Fiber& own = fibers[first + lane];
    const int from = source(static_cast<int>(lane), own.argument, own.width);
    if (!(mask >> from & 1)) {
      note("%s at %s:%d: lane %u takes a value from lane %d, outside the mask %08x", site.what,
           base_name(site.file), site.line, lane, from, mask);
    }
    return fibers[first + from].value;
  }));
}

template <typename T, typename Fold>
inline T reduce(unsigned mask, T value, Site site, Fold fold) {
  return value_of<T>(meet(mask, site, bits_of(value), 0, 0, [=](unsigned first, unsigned) {
    bool some = false;
    T total{};
    for (unsigned lane = 0; lane < kWarp; ++lane) {
      if (!(mask >> lane & 1)) continue;
      const T other = value_of<T>(fibers[first + lane].value);
      total = some ? fold(total, other) : other;
      some = true;
    }
    return bits_of(total);
  }));
}

// Others run before an atomic and after it, in one of the two orders: that is where updates get lost and swaps fail.
inline void give_way() {
  if (!falling) return;
  fibers[running].state = State::kGaveWay;
  leave();
}

template <typename T, typename New>
inline T exchange(T* address, New fresh) {
  give_way();
  in_atomic = true;
  const T before = *address;
  *address = static_cast<T>(fresh(before));
  in_atomic = false;
  give_way();
  return before;
}

// Three letters an argument: r and w a pointer to constant and to changing values, v a value; f float, i signed, u
// unsigned (behind a pointer: words of any type); its bytes.
template <typename T>
inline std::string in_letters() {
  using Value = std::remove_cv_t<std::remove_pointer_t<T>>;
  static_assert(std::is_arithmetic<Value>::value, "a launch passes numbers and arrays of numbers");
  const bool constant = std::is_const<std::remove_pointer_t<T>>::value;
  return {std::is_pointer<T>::value ? (constant ? 'r' : 'w') : 'v',
          std::is_floating_point<Value>::value ? 'f' : (std::is_signed<Value>::value ? 'i' : 'u'),
          static_cast<char>('0' + sizeof(Value))};
}
template <typename... A>
inline const char* signature(void (*)(A...)) {
  static const std::string text = (std::string{} + ... + in_letters<A>());
  return text.c_str();
}

static void* const* arguments;

template <typename Kernel>
struct Call;
template <typename... A>
struct Call<void (*)(A...)> {
  template <void (*Kernel)(A...), size_t... I>
  static void with(std::index_sequence<I...>) {
    Kernel(*static_cast<std::remove_cv_t<A>*>(arguments[I])...);
  }
  template <void (*Kernel)(A...)>
  static void go() {
    with<Kernel>(std::index_sequence_for<A...>{});
  }
};

}  // namespace host

// The area of another library, or nullptr for a new one; nullptr back: there is no room for it.
extern "C" __attribute__((visibility("default"))) void* host_stacks(void* area) {
  host::stacks = area ? static_cast<char*>(area) : host::map_stacks();
  return host::stacks;
}

#define HOST_ENTRY(NAME)                                                                           \
  extern "C" __attribute__((visibility("default"))) const char* host_signature_##NAME() {          \
    return host::signature(&NAME);                                                                 \
  }                                                                                                \
  extern "C" __attribute__((visibility("default"))) void host_launch_##NAME(                       \
      unsigned blocks, unsigned threads, void* const* arguments, int falling, host::Report* out) { \
    host::arguments = arguments;                                                                   \
    host::launch(#NAME, &host::Call<decltype(&NAME)>::go<&NAME>, blocks, threads, falling, out);   \
  }

#ifdef HOST_RACES
// What -fsanitize=thread calls for each load and store; its own library knows threads, not fibers, and is not linked.
#define HOST_TOUCH(NAME, SIZE, WRITE)                                                              \
  extern "C" __attribute__((no_sanitize("thread"), noinline, used)) void NAME(void* where) {       \
    host::touched(where, SIZE, WRITE, __builtin_return_address(0));                                \
  }
HOST_TOUCH(__tsan_read1, 1, false)
HOST_TOUCH(__tsan_read2, 2, false)
HOST_TOUCH(__tsan_read4, 4, false)
HOST_TOUCH(__tsan_read8, 8, false)
HOST_TOUCH(__tsan_read16, 16, false)
HOST_TOUCH(__tsan_write1, 1, true)
HOST_TOUCH(__tsan_write2, 2, true)
HOST_TOUCH(__tsan_write4, 4, true)
HOST_TOUCH(__tsan_write8, 8, true)
HOST_TOUCH(__tsan_write16, 16, true)
extern "C" {
__attribute__((no_sanitize("thread"), noinline, used)) void __tsan_read_range(void* where, unsigned long size) {
  host::touched(where, size, false, __builtin_return_address(0));
}
__attribute__((no_sanitize("thread"), noinline, used)) void __tsan_write_range(void* where, unsigned long size) {
  host::touched(where, size, true, __builtin_return_address(0));
}
__attribute__((used)) void __tsan_init() {}
__attribute__((used)) void __tsan_func_entry(void*) {}
__attribute__((used)) void __tsan_func_exit() {}
// Four numbers an array: where it starts, its bytes, the bytes of one value, which argument it is.
__attribute__((visibility("default"))) void host_watch(const uint64_t* areas, unsigned count) {
  for (unsigned old = 0; old < host::watched_count; ++old) free(host::watched[old].cells);
  host::watched_count = count;
  for (unsigned area = 0; area < count; ++area) {
    const uint64_t* own = areas + 4 * area;
    host::watched[area] = {own[0], own[1], own[2], own[3],
                           static_cast<host::Cell*>(calloc(own[1] / own[2] + 1, sizeof(host::Cell)))};
  }
}
}
#endif

#define HOST_SITE const char *file = __builtin_FILE(), int line = __builtin_LINE()
#define HOST_AT(NAME) host::Site { NAME, file, line }

inline void __syncthreads(HOST_SITE) {
  host::Fiber& own = host::fibers[host::running];
  own.state = host::State::kBarrier, own.site = HOST_AT("__syncthreads");
  host::leave();
}
inline void __syncwarp(unsigned mask = 0xffffffffu, HOST_SITE) {
  host::meet(mask, HOST_AT("__syncwarp"), 0, 0, 0, [](unsigned, unsigned) { return uint64_t{0}; });
}
inline void __threadfence() {}
inline void __threadfence_block() {}

template <typename T>
inline T __shfl_sync(unsigned mask, T value, int lane, int width = 32, HOST_SITE) {
  return host::shuffle(mask, value, lane, width, HOST_AT("__shfl_sync"), [](int own, int from, int wide) {
    return (own & ~(wide - 1)) | (from & (wide - 1));
  });
}
template <typename T>
inline T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32, HOST_SITE) {
  return host::shuffle(mask, value, lanes, width, HOST_AT("__shfl_xor_sync"), [](int own, int by, int wide) {
    const int from = own ^ by;
    return from < (own & ~(wide - 1)) + wide ? from : own;
  });
}
template <typename T>
inline T __shfl_up_sync(unsigned mask, T value, unsigned lanes, int width = 32, HOST_SITE) {
  return host::shuffle(mask, value, static_cast<int>(lanes), width, HOST_AT("__shfl_up_sync"),
                       [](int own, int by, int wide) {
                         return own - by >= (own & ~(wide - 1)) ? own - by : own;
                       });
}
template <typename T>
inline T __shfl_down_sync(unsigned mask, T value, unsigned lanes, int width = 32, HOST_SITE) {
  return host::shuffle(mask, value, static_cast<int>(lanes), width, HOST_AT("__shfl_down_sync"),
                       [](int own, int by, int wide) {
                         return own + by < (own & ~(wide - 1)) + wide ? own + by : own;
                       });
}

inline unsigned __ballot_sync(unsigned mask, int predicate, HOST_SITE) {
  return static_cast<unsigned>(
      host::meet(mask, HOST_AT("__ballot_sync"), predicate != 0, 0, 0, [=](unsigned first, unsigned) {
        uint64_t votes = 0;
        for (unsigned lane = 0; lane < host::kWarp; ++lane) {
          if (mask >> lane & 1) votes |= (host::fibers[first + lane].value & 1) << lane;
        }
        return votes;
      }));
}
inline int __any_sync(unsigned mask, int predicate, HOST_SITE) {
  return host::reduce(mask, static_cast<int>(predicate != 0), HOST_AT("__any_sync"),
                      [](int a, int b) { return a | b; });
}
inline int __all_sync(unsigned mask, int predicate, HOST_SITE) {
  return host::reduce(mask, static_cast<int>(predicate != 0), HOST_AT("__all_sync"),
                      [](int a, int b) { return a & b; });
}
template <typename T>
inline unsigned __match_any_sync(unsigned mask, T value, HOST_SITE) {
  return static_cast<unsigned>(host::meet(
      mask, HOST_AT("__match_any_sync"), host::bits_of(value), 0, 0, [=](unsigned first, unsigned lane) {
        uint64_t same = 0;
        for (unsigned other = 0; other < host::kWarp; ++other) {
          if (mask >> other & 1) {
            same |= uint64_t{host::fibers[first + other].value == host::fibers[first + lane].value} << other;
          }
        }
        return same;
      }));
}
#define HOST_REDUCE(NAME, T, FOLD)                                                                 \
  inline T NAME(unsigned mask, T value, HOST_SITE) {                                               \
    return host::reduce(mask, value, HOST_AT(#NAME), [](T a, T b) { return static_cast<T>(FOLD); });\
  }
HOST_REDUCE(__reduce_add_sync, unsigned, a + b)
HOST_REDUCE(__reduce_add_sync, int, static_cast<unsigned>(a) + static_cast<unsigned>(b))
HOST_REDUCE(__reduce_min_sync, unsigned, a < b ? a : b)
HOST_REDUCE(__reduce_min_sync, int, a < b ? a : b)
HOST_REDUCE(__reduce_max_sync, unsigned, a > b ? a : b)
HOST_REDUCE(__reduce_max_sync, int, a > b ? a : b)
HOST_REDUCE(__reduce_and_sync, unsigned, a& b)
HOST_REDUCE(__reduce_or_sync, unsigned, a | b)
HOST_REDUCE(__reduce_xor_sync, unsigned, a ^ b)

// Integers only: a sum of floats by atomics has no bits of its own, and no kernel here may have one.
#define HOST_ATOMIC(NAME, T, FRESH)                                                                \
  inline T NAME(T* address, T value) {                                                             \
    return host::exchange(address, [=](T before) { return FRESH; });                               \
  }
#define HOST_ATOMICS(T, UNSIGNED)                                                                  \
  HOST_ATOMIC(atomicAdd, T, static_cast<UNSIGNED>(before) + static_cast<UNSIGNED>(value))          \
  HOST_ATOMIC(atomicMin, T, before < value ? before : value)                                       \
  HOST_ATOMIC(atomicMax, T, before > value ? before : value)                                       \
  HOST_ATOMIC(atomicAnd, T, before& value)                                                         \
  HOST_ATOMIC(atomicOr, T, before | value)                                                         \
  HOST_ATOMIC(atomicXor, T, before ^ value)                                                        \
  HOST_ATOMIC(atomicExch, T, ((void)before, value))                                                \
  inline T atomicCAS(T* address, T expected, T value) {                                            \
    return host::exchange(address, [=](T before) { return before == expected ? value : before; }); \
  }
HOST_ATOMICS(int, unsigned)
HOST_ATOMICS(unsigned, unsigned)
HOST_ATOMICS(unsigned long long, unsigned long long)
HOST_ATOMIC(atomicMin, long long, before < value ? before : value)
HOST_ATOMIC(atomicMax, long long, before > value ? before : value)
float atomicAdd(float*, float) = delete;
double atomicAdd(double*, double) = delete;

template <typename T>
inline T __ldg(const T* address) { return *address; }
template <typename T>
inline T __ldcs(const T* address) { return *address; }
template <typename T>
inline T __ldca(const T* address) { return *address; }
template <typename T>
inline T __ldcg(const T* address) { return *address; }
template <typename T>
inline void __stcs(T* address, T value) { *address = value; }
template <typename T>
inline void __stcg(T* address, T value) { *address = value; }

#define HOST_CAST(NAME, FROM, TO)                                                                  \
  inline TO NAME(FROM from) {                                                                      \
    TO to;                                                                                         \
    static_assert(sizeof to == sizeof from, "bits stay");                                          \
    memcpy(&to, &from, sizeof to);                                                                 \
    return to;                                                                                     \
  }
HOST_CAST(__float_as_uint, float, unsigned)
HOST_CAST(__uint_as_float, unsigned, float)
HOST_CAST(__float_as_int, float, int)
HOST_CAST(__int_as_float, int, float)
HOST_CAST(__double_as_longlong, double, long long)
HOST_CAST(__longlong_as_double, long long, double)

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz(static_cast<unsigned>(x)) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll(static_cast<unsigned long long>(x)) : 64; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline unsigned __brev(unsigned x) {
  unsigned y = 0;
  for (int bit = 0; bit < 32; ++bit) y |= (x >> bit & 1u) << (31 - bit);
  return y;
}
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>(static_cast<uint64_t>(a) * b >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return static_cast<unsigned long long>(static_cast<unsigned __int128>(a) * b >> 64);
}
inline int __dp4a(int a, int b, int c) {
  for (int byte = 0; byte < 4; ++byte) {
    c += static_cast<int>(static_cast<int8_t>(a >> 8 * byte)) * static_cast<int8_t>(b >> 8 * byte);
  }
  return c;
}
inline int min(int a, int b) { return a < b ? a : b; }
inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
inline long long min(long long a, long long b) { return a < b ? a : b; }
inline long min(long a, long b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
inline long long max(long long a, long long b) { return a > b ? a : b; }
inline long max(long a, long b) { return a > b ? a : b; }
inline unsigned long long min(unsigned long long a, unsigned long long b) { return a < b ? a : b; }
inline unsigned long long max(unsigned long long a, unsigned long long b) { return a > b ? a : b; }

#define HOST_BINARY(NAME, T, HOW) inline T NAME(T a, T b) { return HOW; }
HOST_BINARY(__dadd_rn, double, a + b)
HOST_BINARY(__dsub_rn, double, a - b)
HOST_BINARY(__dmul_rn, double, a * b)
HOST_BINARY(__ddiv_rn, double, a / b)
HOST_BINARY(__fadd_rn, float, a + b)
HOST_BINARY(__fsub_rn, float, a - b)
HOST_BINARY(__fmul_rn, float, a * b)
HOST_BINARY(__fdiv_rn, float, a / b)
HOST_BINARY(__fdividef, float, a / b)
inline double __fma_rn(double a, double b, double c) { return fma(a, b, c); }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline double __dsqrt_rn(double x) { return sqrt(x); }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline double rsqrt(double x) { return 1.0 / sqrt(x); }
inline float __frsqrt_rn(float x) { return 1.0f / sqrtf(x); }
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __log2f(float x) { return log2f(x); }
inline int __float2int_rn(float x) { return static_cast<int>(rintf(x)); }
inline unsigned __float2uint_rn(float x) { return static_cast<unsigned>(rintf(x)); }
inline long long __double2ll_rn(double x) { return static_cast<long long>(rint(x)); }
using std::isfinite;
using std::isinf;
using std::isnan;
