// point_score: what the silhouette and the margins need between the families and after them, so that nothing of a row crosses to
// the host: columns of numbers and marks for csr_reduce, means, their origin and scale, the centres as tiles take them, scores.
//
// Contract  Rows of a store and the clusters that own them: norm2 f64, flag u8 (bits 1 NaN, 2 Inf, 4 too short; a row counts where
//           it is 0) and radius2 f64 [count], indptr i64 [clusters + 1] rising from 0 to count. whole i64 [clusters, 2] as
//           csr_reduce leaves it: n, the rows that count, first. A column is `stride` >= count numbers of a longer array.
//             _admit    norm2, flag -> column f64 [2, stride]: norm and its square, 0 of rows that do not count; again u8 [count]
//                       = flag; weight f64 [count], 0 of such rows, else 1 or, with cosine, 1 / norm; own and place i64 [count]:
//                       cluster and number of the row; mark u64 [4, stride], 0: NaN + Inf << 32, 1: too short
//             _means    total f64 [clusters, dim] -> mean = total / max(n, 1) and length2 f64 [clusters] = |mean|^2
//             _roots    value f64 [count] -> their roots
//             _origin   mean -> origin f64 [dim], the mean of all rows that count: clusters in their order
//             _reach    mean, origin -> far2 f64 [clusters] = |mean - origin|^2
//             _unit     far2 and real f64 [clusters, 4], whose first numbers are W -> unit f64 [2]: the power of two that brings
//                       reach2 = max far2 + max W / n to about 1, and reach2; spread f64 [clusters] = W / n in that scale
//                       squared, 0 of clusters without rows; size f64 [clusters] = n. One block.
//             _centres  rows f32 [clusters, pitch], zeros past dim, = unit (mean - origin), and norm2 f32 [clusters] of them;
//                       scaled f64 [count] = unit weight; shifted f64 [dim] = unit origin
//             _rows     radius2 and, in that scale, own2 f32, near u64 and b f64 [count] of centre_tile_points -> column f64
//                       [2, stride]: silhouette (b - a) / max(a, b) with a = (n r^2 + W) / (n - 1), 0 where n < 2 or a = b = 0;
//                       |own2 - r^2| in units of rounding (r^2 + reach2), inf where that is no number. mark u64 [4, stride], 2:
//                       (s < 0) + (margin < narrow) << 32, 3: (margin < 0) + (near^2 < told reach2) << 32; margins f64 [count] =
//                       (near - r) / (near + r). All 0 of rows that do not count.
//           Blocks of 256 threads; any grid in x but for _unit.
// Twin      fabric_pipelines/analytics/reference/point_score.py: equal to the last bit, but for sums over dimensions (length2, far2,
//           norm2): 2 eps sqrt(dim), norm2 then rounded to f32.
// Floor     bytes: _admit 9 in and 73 out a row, _rows 45 in and 40 out, the others less: 10M rows 0.4 ms at 4.3 TB/s. Never timed:
//           this file has not been on a card.
//
// Why this mapping: one row a thread, one cluster a warp where dimensions are summed. The origin is summed by one thread a dimension
// over clusters in their order: a chain of K additions, and the bits are numpy's, so that tiles see the same float32 whichever side
// prepared them. Every product and sum is rounded by itself.
#include "lanes.cuh"
#include "segments.cuh"

namespace fabric {

constexpr unsigned kNan = 1, kInf = 2, kShort = 4;
constexpr double kTiny = 0x1p-1022;

__device__ __forceinline__ int64_t thread_index() {
  return static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
}

__device__ __forceinline__ int64_t thread_count() {
  return static_cast<int64_t>(gridDim.x) * blockDim.x;
}

__device__ __forceinline__ int64_t whole_of(const int64_t* whole, int64_t cluster) {
  return __ldg(reinterpret_cast<const long long*>(whole) + 2 * cluster);
}

// 2^-rint(log2(x) / 2), ties to even; 1 where x is not above 0.
__device__ __forceinline__ double unit_of(double x) {
  if (!(x > 0.0)) return 1.0;
  const bool small = x < kTiny;
  const uint64_t bits = static_cast<uint64_t>(__double_as_longlong(small ? __dmul_rn(x, 0x1p54) : x));
  const int exponent = static_cast<int>(bits >> 52) - 1023 - (small ? 54 : 0);  // x = m 2^exponent, 1 <= m < 2
  const bool odd = (exponent & 1) != 0, exact = (bits & 0xfffffffffffffull) == 0;
  int half = (exponent - (odd ? 1 : 0)) / 2;
  if (odd && (!exact || (half & 1) != 0)) ++half;
  return __longlong_as_double(static_cast<long long>(1023 - half) << 52);
}

// Greatest of a block; every thread gets it.
__device__ __forceinline__ double block_max(double value, double* shared) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    value = fmax(value, shuffle_xor(value, offset));
  }
  if (threadIdx.x % kWarp == 0) shared[threadIdx.x / kWarp] = value;
  __syncthreads();
  double most = shared[0];
#pragma unroll
  for (int warp = 1; warp < kBlock / kWarp; ++warp) most = fmax(most, shared[warp]);
  __syncthreads();
  return most;
}

}  // namespace fabric

extern "C" __global__ void __launch_bounds__(fabric::kBlock, fabric::kBlocksPerSm)
    point_score_admit(const double* norm2, const uint8_t* flag, const int64_t* indptr,
                      int64_t count, int64_t clusters, int64_t cosine, int64_t stride,
                      double* column, uint8_t* again, double* weight, int64_t* own, int64_t* place,
                      uint64_t* mark) {
  for (int64_t row = fabric::thread_index(); row < count; row += fabric::thread_count()) {
    const unsigned bits = __ldg(flag + row);
    const double norm = bits == 0 ? __dsqrt_rn(__ldg(norm2 + row)) : 0.0;
    column[row] = norm;
    column[stride + row] = __dmul_rn(norm, norm);
    again[row] = static_cast<uint8_t>(bits);
    weight[row] = bits != 0 ? 0.0 : cosine != 0 ? __ddiv_rn(1.0, norm) : 1.0;
    own[row] = fabric::owner_of(indptr, clusters, 0, row);
    place[row] = row;
    const uint64_t infinite = (bits & fabric::kInf) != 0 ? 1 : 0;
    mark[row] = ((bits & fabric::kNan) != 0 ? 1 : 0) | infinite << 32;
    mark[stride + row] = (bits & fabric::kShort) != 0 ? 1 : 0;
  }
}

extern "C" __global__ void __launch_bounds__(fabric::kBlock, fabric::kBlocksPerSm)
    point_score_means(const double* total, const int64_t* whole, int64_t clusters, int64_t dim,
                      double* mean, double* length2) {
  const int lane = threadIdx.x % fabric::kWarp;
  for (int64_t cluster = fabric::warp_index(); cluster < clusters;
       cluster += fabric::warp_count()) {
    const int64_t rows = fabric::whole_of(whole, cluster);
    const double n = static_cast<double>(rows > 1 ? rows : 1);
    double sum = 0.0;
    for (int64_t t = lane; t < dim; t += fabric::kWarp) {
      const double value = __ddiv_rn(__ldg(total + cluster * dim + t), n);
      mean[cluster * dim + t] = value;
      sum = __dadd_rn(sum, __dmul_rn(value, value));
    }
    sum = fabric::group_sum<fabric::kWarp>(sum);
    if (lane == 0) length2[cluster] = sum;
  }
}

extern "C" __global__ void __launch_bounds__(fabric::kBlock, fabric::kBlocksPerSm)
    point_score_roots(const double* value, int64_t count, double* root) {
  for (int64_t row = fabric::thread_index(); row < count; row += fabric::thread_count()) {
    root[row] = __dsqrt_rn(__ldg(value + row));
  }
}

extern "C" __global__ void __launch_bounds__(fabric::kBlock, fabric::kBlocksPerSm)
    point_score_origin(const double* mean, const int64_t* whole, int64_t clusters, int64_t dim,
                       double* origin) {
  for (int64_t t = fabric::thread_index(); t < dim; t += fabric::thread_count()) {
    double sum = 0.0;
    int64_t rows = 0;
#pragma unroll 16
    for (int64_t cluster = 0; cluster < clusters; ++cluster) {
      const int64_t n = fabric::whole_of(whole, cluster);
      rows += n;
      sum = __dadd_rn(sum, __dmul_rn(__ldg(mean + cluster * dim + t), static_cast<double>(n)));
    }
    origin[t] = __ddiv_rn(sum, static_cast<double>(rows > 1 ? rows : 1));
  }
}

extern "C" __global__ void __launch_bounds__(fabric::kBlock, fabric::kBlocksPerSm)
    point_score_reach(const double* mean, const double* origin, int64_t clusters, int64_t dim,
                      double* far2) {
  const int lane = threadIdx.x % fabric::kWarp;
  for (int64_t cluster = fabric::warp_index(); cluster < clusters;
       cluster += fabric::warp_count()) {
    double sum = 0.0;
    for (int64_t t = lane; t < dim; t += fabric::kWarp) {
      const double apart = __dsub_rn(__ldg(mean + cluster * dim + t), __ldg(origin + t));
      sum = __dadd_rn(sum, __dmul_rn(apart, apart));
    }
    sum = fabric::group_sum<fabric::kWarp>(sum);
    if (lane == 0) far2[cluster] = sum;
  }
}

extern "C" __global__ void __launch_bounds__(fabric::kBlock, fabric::kBlocksPerSm)
    point_score_unit(const double* far2, const double* real, const int64_t* whole,
                     int64_t clusters, double* unit, double* spread, double* size) {
  __shared__ double shared[fabric::kBlock / fabric::kWarp];
  double far = 0.0, wide = 0.0;
  for (int64_t cluster = threadIdx.x; cluster < clusters; cluster += fabric::kBlock) {
    const int64_t n = fabric::whole_of(whole, cluster);
    if (n == 0) continue;
    far = fmax(far, __ldg(far2 + cluster));
    wide = fmax(wide, __ddiv_rn(__ldg(real + 4 * cluster), static_cast<double>(n)));
  }
  far = fabric::block_max(far, shared);
  wide = fabric::block_max(wide, shared);
  const double reach2 = __dadd_rn(far, wide), scale = fabric::unit_of(reach2);
  const double scale2 = __dmul_rn(scale, scale);
  if (threadIdx.x == 0) unit[0] = scale, unit[1] = reach2;
  for (int64_t cluster = threadIdx.x; cluster < clusters; cluster += fabric::kBlock) {
    const double n = static_cast<double>(fabric::whole_of(whole, cluster));
    const double within = n > 0.0 ? __ddiv_rn(__ldg(real + 4 * cluster), n) : 0.0;
    size[cluster] = n;
    spread[cluster] = __dmul_rn(within, scale2);
  }
}

extern "C" __global__ void __launch_bounds__(fabric::kBlock, fabric::kBlocksPerSm)
    point_score_centres(const double* mean, const double* origin, const double* unit,
                        const double* weight, int64_t clusters, int64_t dim, int64_t pitch,
                        int64_t count, float* rows, float* norm2, double* scaled,
                        double* shifted) {
  const int lane = threadIdx.x % fabric::kWarp;
  const double scale = __ldg(unit);
  for (int64_t cluster = fabric::warp_index(); cluster < clusters;
       cluster += fabric::warp_count()) {
    double sum = 0.0;
    for (int64_t t = lane; t < pitch; t += fabric::kWarp) {
      float value = 0.0f;
      if (t < dim) {
        const double apart = __dsub_rn(__ldg(mean + cluster * dim + t), __ldg(origin + t));
        value = static_cast<float>(__dmul_rn(apart, scale));
      }
      rows[cluster * pitch + t] = value;
      const double wide = static_cast<double>(value);
      sum = __dadd_rn(sum, __dmul_rn(wide, wide));
    }
    sum = fabric::group_sum<fabric::kWarp>(sum);
    if (lane == 0) norm2[cluster] = static_cast<float>(sum);
  }
  for (int64_t row = fabric::thread_index(); row < count; row += fabric::thread_count()) {
    scaled[row] = __dmul_rn(__ldg(weight + row), scale);
  }
  for (int64_t t = fabric::thread_index(); t < dim; t += fabric::thread_count()) {
    shifted[t] = __dmul_rn(__ldg(origin + t), scale);
  }
}

extern "C" __global__ void __launch_bounds__(fabric::kBlock, fabric::kBlocksPerSm)
    point_score_rows(const double* radius2, const float* own2, const unsigned long long* near,
                     const double* b, const uint8_t* flag, const int64_t* own, const double* real,
                     const int64_t* whole, const double* unit, int64_t count, int64_t stride,
                     double rounding, double told, double narrow, double* column, double* margins,
                     uint64_t* mark) {
  const double scale = __ldg(unit), reach2 = __ldg(unit + 1);
  const double scale2 = __dmul_rn(scale, scale), close2 = __dmul_rn(told, reach2);
  for (int64_t row = fabric::thread_index(); row < count; row += fabric::thread_count()) {
    double score = 0.0, error = 0.0, margin = 0.0;
    uint64_t negative = 0, border = 0, misplaced = 0, close = 0;
    if (__ldg(flag + row) == 0) {
      const int64_t cluster = __ldg(reinterpret_cast<const long long*>(own) + row);
      const double n = static_cast<double>(fabric::whole_of(whole, cluster));
      const double r2 = __ldg(radius2 + row), within = __ldg(real + 4 * cluster);
      const unsigned bits = static_cast<unsigned>(__ldg(near + row) >> 32);
      const double near2 = __ddiv_rn(static_cast<double>(__uint_as_float(bits)), scale2);
      const double other = __ddiv_rn(__ldg(b + row), scale2);
      const double inside =
          __ddiv_rn(__dadd_rn(__dmul_rn(n, r2), within), n > 2.0 ? __dsub_rn(n, 1.0) : 1.0);
      const double larger = fmax(inside, other);
      if (n >= 2.0 && inside >= 0.0 && other >= 0.0 && larger > 0.0) {
        score = __ddiv_rn(__dsub_rn(other, inside), larger);
      }
      const double r = __dsqrt_rn(r2), away = __dsqrt_rn(near2), both = __dadd_rn(r, away);
      if (both > 0.0) margin = __ddiv_rn(__dsub_rn(away, r), both);
      const double found = __ddiv_rn(static_cast<double>(__ldg(own2 + row)), scale2);
      const double least = fmax(__dadd_rn(r2, reach2), fabric::kTiny);
      error = __ddiv_rn(fabs(__dsub_rn(found, r2)), __dmul_rn(rounding, least));
      if (!(error >= 0.0)) error = INFINITY;  // csr_reduce passes NaN over
      negative = score < 0.0 ? 1 : 0, border = margin < narrow ? 1 : 0;
      misplaced = margin < 0.0 ? 1 : 0, close = near2 < close2 ? 1 : 0;
    }
    column[row] = score;
    column[stride + row] = error;
    margins[row] = margin;
    mark[2 * stride + row] = negative | border << 32;
    mark[3 * stride + row] = misplaced | close << 32;
  }
}
