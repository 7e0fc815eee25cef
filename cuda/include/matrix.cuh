// Products of f32 matrices on TF32 matrix units, to the digits of f32: each factor as two TF32 numbers, three products.
//
// Ootomo and Yokota, arXiv 2203.03341: x = big + small, x y = big big + big small + small big to 2^-22. The units
// truncate what they add, so every 8 dimensions are summed from 0 there and added outside, rounded.
// On a host (HOST_CUDA) a product is made of shuffles, by the places that PTX ISA gives for m16n8k8 .tf32.
#pragma once
#include <cstdint>

#include "lanes.cuh"

namespace fabric {

// Lane 4 g + t holds of A (16 x 8) the rows g, g + 8 at t, then at t + 4; of B (8 x 8) column g at t, t + 4; of D (16 x 8) row g,
// then g + 8, at columns 2 t and 2 t + 1.
#ifdef HOST_CUDA
inline unsigned tf32(float x) { return (__float_as_uint(x) + 0x1000u) & ~0x1fffu; }  // ties away, as cvt.rna

inline void multiply_add(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  const int g = threadIdx.x % kWarp / 4, t = threadIdx.x % 4;
  for (int k = 0; k < 8; ++k) {
    const int half = k / 4, place = k % 4;
    const float upper = __uint_as_float(__shfl_sync(kFull, a[2 * half], 4 * g + place));
    const float lower = __uint_as_float(__shfl_sync(kFull, a[2 * half + 1], 4 * g + place));
    const float left = __uint_as_float(__shfl_sync(kFull, b[half], 8 * t + place));
    const float right = __uint_as_float(__shfl_sync(kFull, b[half], 8 * t + 4 + place));
    d[0] += upper * left, d[1] += upper * right, d[2] += lower * left, d[3] += lower * right;
  }
}
#else
__device__ __forceinline__ unsigned tf32(float x) {
  unsigned bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
  return bits;
}

__device__ __forceinline__ void multiply_add(float (&d)[4], const unsigned (&a)[4],
                                             const unsigned (&b)[2]) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
#endif

__device__ __forceinline__ void split(float x, unsigned& big, unsigned& small) {
  big = tf32(x);
  small = tf32(x - __uint_as_float(big));
}

}  // namespace fabric
