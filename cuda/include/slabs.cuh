// A slab: the dimensions that one warp sums in registers, four a lane. A wider row is a loop over slabs, not a limit on dim.
#pragma once
#include "lanes.cuh"

namespace fabric {

constexpr int kSlab = 128;

// Dimension of value j of a lane within its slab.
template <bool WIDE>
__device__ __forceinline__ int place(int lane, int j) {
  return WIDE ? 4 * lane + j : lane + kWarp * j;
}

template <bool WIDE>
__device__ __forceinline__ void load(const float* __restrict__ row, int lane, int64_t left,
                                     float (&x)[4]) {
  if constexpr (WIDE) {
    if (4 * lane < left) {
      const float4 v = __ldg(reinterpret_cast<const float4*>(row) + lane);
      x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
    }
  } else {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (place<false>(lane, j) < left) x[j] = __ldg(row + place<false>(lane, j));
    }
  }
}

}  // namespace fabric
