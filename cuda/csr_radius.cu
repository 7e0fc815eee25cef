// csr_radius: squared distance of every row, times its weight, to the centroid of its cluster.
//
// Contract  rows f32 [count, dim]; weight f64 [count], 0 = row left out (its distance is 0, and NaN in it goes
//           nowhere); indptr i64 [clusters + 1] rising from 0 to count; centroid f64 [clusters, dim], 16-byte
//           aligned; radius2 f64 [count]. Any dim >= 1. Blocks of 256 threads, any grid in x.
//           _wide needs dim % 4 == 0 and 16-byte aligned rows; _any takes the rest.
// Twin      fabric_pipelines/analytics/reference/csr_radius.py, to 2 eps sqrt(dim): the products and
//           differences are the same float64 numbers, only the order of the sum differs.
//
// Why this mapping: a warp owns runs of 64 rows, so that one binary search in indptr serves the run and the
// centroid stays in L1 while rows of one cluster pass. Always sum (w x - m)^2: the expansion by norms loses
// every digit of a tight cluster far from the origin.
#include "lanes.cuh"
#include "segments.cuh"

namespace fabric {

constexpr int64_t kRun = 64;

__device__ __forceinline__ double squared_gap(float x, double weight, double mean, double sum) {
  const double gap = __dsub_rn(__dmul_rn(weight, static_cast<double>(x)), mean);
  return fma(gap, gap, sum);
}

template <int LANES, bool WIDE>
__device__ __forceinline__ void radius(const float* __restrict__ rows,
                                       const double* __restrict__ weight,
                                       const int64_t* __restrict__ indptr,
                                       const double* __restrict__ centroid, int64_t count,
                                       int64_t dim, int64_t clusters,
                                       double* __restrict__ radius2) {
  constexpr int kGroups = kWarp / LANES;
  const int lane = threadIdx.x % LANES;
  const int group = threadIdx.x % kWarp / LANES;
  const int64_t steps = WIDE ? dim / 4 : dim;

  for (int64_t start = warp_index() * kRun; start < count; start += warp_count() * kRun) {
    const int64_t end = start + kRun < count ? start + kRun : count;
    int64_t cluster = owner_of(indptr, clusters, 0, start);
    for (int64_t first = start; first < end; first += kGroups) {
      const int64_t row = first + group;
      const bool active = row < end;
      const double w = active ? __ldg(weight + row) : 0.0;
      double even = 0.0, odd = 0.0;
      if (active) {  // not "w != 0": the loads of the row must not wait for the weight
        if (row >= indptr[cluster + 1]) cluster = owner_of(indptr, clusters, cluster + 1, row);
        const float* x = rows + row * dim;
        const double* mean = centroid + cluster * dim;
#pragma unroll 4
        for (int64_t step = lane; step < steps; step += LANES) {
          if constexpr (WIDE) {
            const float4 v = __ldg(reinterpret_cast<const float4*>(x) + step);
            const double2 m = __ldg(reinterpret_cast<const double2*>(mean) + 2 * step);
            const double2 n = __ldg(reinterpret_cast<const double2*>(mean) + 2 * step + 1);
            even = squared_gap(v.x, w, m.x, even);
            odd = squared_gap(v.y, w, m.y, odd);
            even = squared_gap(v.z, w, n.x, even);
            odd = squared_gap(v.w, w, n.y, odd);
          } else {
            even = squared_gap(__ldg(x + step), w, __ldg(mean + step), even);
          }
        }
      }
      const double total = group_sum<LANES>(even + odd);
      if (lane == 0 && active) radius2[row] = w != 0.0 ? total : 0.0;
    }
  }
}

}  // namespace fabric

#define CSR_RADIUS(NAME, LANES, WIDE)                                                              \
  extern "C" __global__ void __launch_bounds__(fabric::kBlock, fabric::kBlocksPerSm)               \
      NAME(const float* rows, const double* weight, const int64_t* indptr, const double* centroid, \
           int64_t count, int64_t dim, int64_t clusters, double* radius2) {                        \
    fabric::radius<LANES, WIDE>(rows, weight, indptr, centroid, count, dim, clusters, radius2);    \
  }

CSR_RADIUS(csr_radius_wide_1, 1, true)
CSR_RADIUS(csr_radius_wide_2, 2, true)
CSR_RADIUS(csr_radius_wide_4, 4, true)
CSR_RADIUS(csr_radius_wide_8, 8, true)
CSR_RADIUS(csr_radius_wide_32, 32, true)
CSR_RADIUS(csr_radius_any_1, 1, false)
CSR_RADIUS(csr_radius_any_2, 2, false)
CSR_RADIUS(csr_radius_any_4, 4, false)
CSR_RADIUS(csr_radius_any_8, 8, false)
CSR_RADIUS(csr_radius_any_32, 32, false)
