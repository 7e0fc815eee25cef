// The k least of many keys, kept by one warp in its registers: k <= 32 M, lane l holds places l M .. l M + M - 1. The
// first 32 M - k places are taken by 0, which is below every key, so that the k-th least is always the last place: a
// register chosen by k would be an array in local memory.
//
// A key is a distance as an ordered word above the number of a row below, so keys differ, and which k are kept depends
// neither on the order of offers nor on who made them; ties go to the lower row. After n offers about k ln(n / k) of
// them went in, one shuffle and M choices each; all others cost a ballot.
#pragma once
#include "lanes.cuh"

namespace fabric {

constexpr uint64_t kNoKey = ~0ull;

// Unsigned words in the order of the numbers; -0 is 0. Not for NaN.
__device__ __forceinline__ uint32_t ordered(float value) {
  const uint32_t bits = __float_as_uint(value + 0.0f);
  return bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
}

__device__ __forceinline__ float from_ordered(uint32_t word) {
  return __uint_as_float(word ^ (word >> 31 ? 0x80000000u : 0xffffffffu));
}

__device__ __forceinline__ uint64_t key_of(float value, uint32_t row) {
  return static_cast<uint64_t>(ordered(value)) << 32 | row;
}

template <int M>
struct Best {
  uint64_t slot[M];
  uint64_t limit;  // the k-th least so far; the same in all lanes

  __device__ __forceinline__ void clear(int k) {
#pragma unroll
    for (int i = 0; i < M; ++i) slot[i] = place_of(i, k) < 0 ? 0 : kNoKey;
    limit = kNoKey;
  }

  // Place of slot[i] among the k; negative: none.
  __device__ __forceinline__ int place_of(int i, int k) const {
    return static_cast<int>(threadIdx.x % kWarp) * M + i - (kWarp * M - k);
  }

  // The whole warp, one key a lane; kNoKey is none.
  __device__ __forceinline__ void offer(uint64_t key) {
    unsigned waiting = __ballot_sync(kFull, key < limit);
    while (waiting) {
      const int lane = __ffs(static_cast<int>(waiting)) - 1;
      waiting &= waiting - 1;
      const uint64_t fresh = __shfl_sync(kFull, static_cast<unsigned long long>(key), lane);
      if (fresh < limit) put(fresh);
    }
  }

  __device__ __forceinline__ void put(uint64_t fresh) {
    uint64_t before = __shfl_up_sync(kFull, static_cast<unsigned long long>(slot[M - 1]), 1);
    if (threadIdx.x % kWarp == 0) before = 0;
#pragma unroll
    for (int i = M - 1; i >= 0; --i) {
      const uint64_t left = i > 0 ? slot[i > 0 ? i - 1 : 0] : before;
      if (slot[i] > fresh) slot[i] = left < fresh ? fresh : left;
    }
    limit = __shfl_sync(kFull, static_cast<unsigned long long>(slot[M - 1]), kWarp - 1);
  }

  __device__ __forceinline__ void write(uint64_t* out, int k) const {
#pragma unroll
    for (int i = 0; i < M; ++i) {
      const int place = place_of(i, k);
      if (place >= 0) out[place] = slot[i];
    }
  }
};

}  // namespace fabric
