// Matrix units: products of f64 matrices, and of f32 ones to their digits on TF32 units, each factor as two TF32 numbers.
//
// Ootomo and Yokota, arXiv 2203.03341: x = big + small, x y = big big + big small + small big to 2^-22. The units
// truncate what they add, so every 8 dimensions are summed from 0 there and added outside, rounded.
// On a host (HOST_CUDA) lanes meet and hand over what they hold, by the places that PTX ISA gives for m16n8k8 .tf32 and m8n8k4 .f64.
#pragma once
#include <cstdint>

#include "lanes.cuh"

namespace fabric {

// Lane 4 g + t holds of A (16 x 8) the rows g, g + 8 at t, then at t + 4; of B (8 x 8) column g at t, t + 4; of D (16 x 8) row g,
// then g + 8, at columns 2 t and 2 t + 1.
#ifdef HOST_CUDA
inline unsigned tf32(float x) { return (__float_as_uint(x) + 0x1000u) & ~0x1fffu; }  // ties away, as cvt.rna

// What each lane holds, by the lane's number; the last lane to come works for all 32, so that a product is one meeting.
template <typename Held, typename Work>
inline void together(Held own, Work work, host::Site site) {
  host::meet(kFull, site, reinterpret_cast<uint64_t>(&own), 0, 0, [=](unsigned first, unsigned lane) {
    work(lane, [=](unsigned other) {
      return *reinterpret_cast<const Held*>(host::fibers[first + other].value);
    });
    return uint64_t{0};
  });
}

struct Tf32Lane {
  const unsigned *a, *b;
  float* d;
};
inline void multiply_add(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], HOST_SITE) {
  together(Tf32Lane{a, b, d}, [](unsigned lane, auto of) {
    const unsigned g = lane / 4, t = lane % 4;
    float* sum = of(lane).d;
    for (unsigned k = 0; k < 8; ++k) {
      const unsigned half = k / 4, place = k % 4;
      const float upper = __uint_as_float(of(4 * g + place).a[2 * half]);
      const float lower = __uint_as_float(of(4 * g + place).a[2 * half + 1]);
      const float left = __uint_as_float(of(8 * t + place).b[half]);
      const float right = __uint_as_float(of(8 * t + 4 + place).b[half]);
      sum[0] += upper * left, sum[1] += upper * right, sum[2] += lower * left, sum[3] += lower * right;
    }
  }, HOST_AT("mma.m16n8k8"));
}

// Lane 4 g + t holds of A (8 x 4) row g at t, of B (4 x 8) column g at t, of D (8 x 8) row g at columns 2 t and 2 t + 1.
struct F64Lane {
  double a, b, *d0, *d1;
};
inline void multiply_add(double& d0, double& d1, double a, double b, HOST_SITE) {
  together(F64Lane{a, b, &d0, &d1}, [](unsigned lane, auto of) {
    const F64Lane own = of(lane);
    for (unsigned k = 0; k < 4; ++k) {
      const double left = of(lane / 4 * 4 + k).a;
      *own.d0 = fma(left, of(8 * (lane % 4) + k).b, *own.d0);
      *own.d1 = fma(left, of(8 * (lane % 4) + 4 + k).b, *own.d1);
    }
  }, HOST_AT("mma.m8n8k4"));
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
