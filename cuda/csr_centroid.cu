// csr_centroid: weighted sum of the rows of every cluster, in two launches.
//
// Contract  rows f32 [count, dim]; weight f64 [count], 0 = row left out; indptr i64 [clusters + 1] rising from
//           0 to count. Dimensions are worked in windows [low, low + width), width a multiple of 128 or what is
//           left of dim: `partial` f64 [runs + clusters, width] with runs = ceil(count / 256) holds one window,
//           and csr_centroid_fold adds it up into total f64 [clusters, dim]. Blocks of 256 threads, any grid.
//           _wide needs dim % 4 == 0 and 16-byte aligned rows; _any takes the rest.
// Twin      fabric_pipelines/analytics/reference/csr_centroid.py, to 2 eps sqrt(n) of sum |w x|.
//
// Why this mapping: runs of 256 rows ignore cluster borders, so one cluster of ten million rows and a million
// clusters of ten are the same work. A warp sums a run over 128 dimensions in registers, in row order, and
// leaves one partial for each cluster that it meets. The pairs (run, cluster) come in rising order, so
// run + cluster numbers them without a count or a scan. No atomics: the fold adds partials in run order, and
// the bits depend neither on the grid nor on the card. The width of a warp's window is a loop over windows,
// not a limit on dim.
#include "lanes.cuh"
#include "segments.cuh"
#include "slabs.cuh"

namespace fabric {

constexpr int64_t kRun = 256;
constexpr int kAhead = 4;  // rows in flight

template <bool WIDE>
__device__ __forceinline__ void sum_runs(const float* __restrict__ rows,
                                         const double* __restrict__ weight,
                                         const int64_t* __restrict__ indptr, int64_t count,
                                         int64_t dim, int64_t clusters, int64_t low, int64_t width,
                                         double* __restrict__ partial) {
  const int lane = threadIdx.x % kWarp;
  const int64_t runs = (count + kRun - 1) / kRun;
  const int64_t slabs = (width + kSlab - 1) / kSlab;

  for (int64_t item = warp_index(); item < runs * slabs; item += warp_count()) {
    // slabs of one run side by side: neighbouring warps read neighbouring bytes
    const int64_t run = item / slabs;
    const int64_t slab = item % slabs * kSlab;
    const int64_t left = width - slab < kSlab ? width - slab : kSlab;
    const int64_t end = (run + 1) * kRun < count ? (run + 1) * kRun : count;
    int64_t row = run * kRun;
    int64_t cluster = owner_of(indptr, clusters, 0, row);
    while (row < end) {
      const int64_t border = indptr[cluster + 1] < end ? indptr[cluster + 1] : end;
      double sum[4] = {0.0, 0.0, 0.0, 0.0};
      for (; row < border; row += kAhead) {
        float x[kAhead][4] = {};
        double w[kAhead];
#pragma unroll
        for (int a = 0; a < kAhead; ++a) {
          w[a] = row + a < border ? __ldg(weight + row + a) : 0.0;
          if (row + a < border) load<WIDE>(rows + (row + a) * dim + low + slab, lane, left, x[a]);
        }
#pragma unroll
        for (int a = 0; a < kAhead; ++a) {
          if (w[a] == 0.0) continue;
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            sum[j] = __dadd_rn(sum[j], __dmul_rn(w[a], static_cast<double>(x[a][j])));
          }
        }
      }
      row = border;
      double* out = partial + (run + cluster) * width + slab;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (place<WIDE>(lane, j) < left) out[place<WIDE>(lane, j)] = sum[j];
      }
      if (row < end) cluster = owner_of(indptr, clusters, cluster + 1, row);
    }
  }
}

}  // namespace fabric

#define CSR_CENTROID(NAME, WIDE)                                                                   \
  extern "C" __global__ void __launch_bounds__(fabric::kBlock)                                     \
      NAME(const float* rows, const double* weight, const int64_t* indptr, int64_t count,          \
           int64_t dim, int64_t clusters, int64_t low, int64_t width, double* partial) {           \
    fabric::sum_runs<WIDE>(rows, weight, indptr, count, dim, clusters, low, width, partial);       \
  }

CSR_CENTROID(csr_centroid_wide, true)
CSR_CENTROID(csr_centroid_any, false)

extern "C" __global__ void __launch_bounds__(fabric::kBlock)
    csr_centroid_fold(const double* __restrict__ partial, const int64_t* __restrict__ indptr,
                      int64_t dim, int64_t clusters, int64_t low, int64_t width,
                      double* __restrict__ total) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  const int64_t items = clusters * width;
  for (int64_t item = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; item < items;
       item += stride) {
    const int64_t cluster = item / width;
    const int64_t place = item % width;
    const int64_t begin = indptr[cluster];
    const int64_t end = indptr[cluster + 1];
    double sum = 0.0;
    if (begin < end) {
      const int64_t last = (end - 1) / fabric::kRun;
#pragma unroll 8
      for (int64_t run = begin / fabric::kRun; run <= last; ++run) {
        sum = __dadd_rn(sum, __ldg(partial + (run + cluster) * width + place));
      }
    }
    total[cluster * dim + low + place] = sum;
  }
}
