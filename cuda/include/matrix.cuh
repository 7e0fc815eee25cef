// Matrix units: products of f64 matrices, and of f32 ones to their digits on TF32 units, each factor as two TF32 numbers.
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

// Lane 4 g + t holds of A (8 x 4) row g at t, of B (4 x 8) column g at t, of D (8 x 8) row g at columns 2 t and 2 t + 1. Lanes meet
// once and the last one works for all: a meeting a factor took ten times as long.
inline void multiply_add(double& d0, double& d1, double a, double b, HOST_SITE) {
  struct Held {
    double a, b, *d0, *d1;
  } own{a, b, &d0, &d1};
  host::meet(kFull, HOST_AT("mma.m8n8k4"), reinterpret_cast<uint64_t>(&own), 0, 0,
             [](unsigned first, unsigned lane) {
               auto of = [=](unsigned other) {
                 return reinterpret_cast<const Held*>(host::fibers[first + other].value);
               };
               const Held* mine = of(lane);
               for (unsigned k = 0; k < 4; ++k) {
                 const double left = of(lane / 4 * 4 + k)->a;
                 *mine->d0 = fma(left, of(8 * (lane % 4) + k)->b, *mine->d0);
                 *mine->d1 = fma(left, of(8 * (lane % 4) + 4 + k)->b, *mine->d1);
               }
               return uint64_t{0};
             });
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

__device__ __forceinline__ void multiply_add(double& d0, double& d1, double a, double b) {
  asm("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
      : "+d"(d0), "+d"(d1)
      : "d"(a), "d"(b));
}
#endif

__device__ __forceinline__ void split(float x, unsigned& big, unsigned& small) {
  big = tf32(x);
  small = tf32(x - __uint_as_float(big));
}

}  // namespace fabric
