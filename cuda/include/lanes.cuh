// Lanes share a row; they never own a dimension, so no dimension is too large and none is too small.
//
// A group of LANES neighbouring lanes of one warp (1, 2, 4, 8 or 32) reads one row in steps of LANES loads. Eight
// lanes of 16 bytes fill a 128-byte line, and four rows a warp cost 3 shuffle steps where one row a warp
// costs 5: at d = 128 the shuffles of a whole warp a row would alone take as long as the memory floor.
#pragma once
#include <cstdint>

namespace fabric {

constexpr int kBlock = 256;
// Left alone, ptxas squeezes the loops into 32 or 48 registers and spills a few; asking for 3 blocks leaves 80.
// 24 warps with 64 bytes in flight a lane are 48 KiB a multiprocessor, above what latency x bandwidth needs.
constexpr int kBlocksPerSm = 3;
constexpr int kWarp = 32;
constexpr unsigned kFull = 0xffffffffu;

// A team is a warp or a block; S::kTeam says how many threads.
template <class S>
__device__ __forceinline__ void team_sync() {
  if constexpr (S::kTeam == kWarp) {
    __syncwarp();
  } else {
    __syncthreads();
  }
}

__device__ __forceinline__ int64_t warp_index() {
  return (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / kWarp;
}

__device__ __forceinline__ int64_t warp_count() {
  return static_cast<int64_t>(gridDim.x) * blockDim.x / kWarp;
}

__device__ __forceinline__ uint64_t shuffle_xor(uint64_t value, int offset) {
  return __shfl_xor_sync(kFull, static_cast<unsigned long long>(value), offset);
}

__device__ __forceinline__ double shuffle_xor(double value, int offset) {
  return __shfl_xor_sync(kFull, value, offset);
}

// Sum over the lanes of a group; every lane gets it. The order is a fixed tree: same bits for any grid.
template <int LANES, typename T>
__device__ __forceinline__ T group_sum(T value) {
#pragma unroll
  for (int offset = LANES / 2; offset > 0; offset /= 2) value += shuffle_xor(value, offset);
  return value;
}

template <int LANES>
__device__ __forceinline__ unsigned group_or(unsigned value) {
#pragma unroll
  for (int offset = LANES / 2; offset > 0; offset /= 2) {
    value |= __shfl_xor_sync(kFull, value, offset);
  }
  return value;
}

}  // namespace fabric
