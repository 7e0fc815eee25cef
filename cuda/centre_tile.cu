// centre_tile: rows against all centres: the own and the nearest other centre, and the exact silhouette's two means;
// centres against all centres: the greatest Davies-Bouldin ratio and who it is with.
//
// Contract  rows and centres f32 [., pitch] with norm2 f32, both less the same point (the mean of all rows), as pair_tile_rows
//           leaves them; count rows, listed centres (clusters with rows, by rising number). own i64 [count]: the row's centre.
//           spread f64 [listed] = W / n, the mean squared distance of a cluster's rows to its centre; size f64 [listed] = n.
//           centre_tile_points: own2 f32 [count]: squared distance to the own centre. near u64 [count]: bits of the squared
//           distance << 32 | number of the nearest other centre; equals: the lower number; all ones without another.
//           a f64 [count] = n (own2 + W / n) / (n - 1): mean |x - y|^2 to the rest of the cluster; b f64 [count]: least over
//           the others of d^2 + W / n, the mean |x - y|^2 to their rows. No pair of rows is visited.
//           centre_tile_partners: radius f32 [listed] = S; same2 f64. key u64 [listed]: bits of the greatest
//           (S_c + S_j) / |c - j| << 32 | complement of j, 0 where no j has d^2 > same2; coincident i32 [listed]: whether
//           some other has not. Fewer than 2^31 rows and centres. Blocks of 256 threads, any grid in x.
// Twin      fabric_pipelines/analytics/reference/centre_tile.py: d^2 to 2 sqrt(dim) 2^-24 (n_i + n_j), numbers equal off
//           ties.
// Floor     2 N K dim flop: 2.3 s of fp32 at 10M rows of 768 and 10,000 centres, 67 TFLOP/s; 2 K^2 dim: 2.3 ms. O(N + K)
//           memory: K to 10^6 adds columns, never an N x K array.
//
// Why this mapping: include/tiles.cuh, with the centres as columns: what a row keeps is two minima, so a warp reduces its 64
// distances by two integer minima (order of bits = order of values) and only the least lane's number travels.
// SIDE 64 when 128 would leave multiprocessors without a block.
#include "tiles.cuh"

namespace fabric {

using Key = unsigned long long;
constexpr Key kNone = ~0ull;

struct PointRow {
  Key near;
  unsigned mean;  // bits of the least d^2 + W / n
  float own2;
  uint32_t own;
};

template <class S>
struct PointFold {
  PointRow* state;
  const double* spread;

  __device__ __forceinline__ bool meets(int, uint32_t, uint32_t) const { return true; }
  __device__ __forceinline__ bool copies(uint32_t, uint32_t) const { return false; }

  __device__ __forceinline__ void take(int slot, uint32_t, uint32_t first,
                                       const float (&d2)[S::kEach],
                                       const bool (&kept)[S::kEach]) {
    const int lane = threadIdx.x % kWarp;
    PointRow& row = state[slot];
    unsigned least = ~0u, mean = ~0u;
    uint32_t number = ~0u;
#pragma unroll
    for (int v = 0; v < S::kEach; ++v) {
      const uint32_t column = first + v * kWarp + lane;
      if (!kept[v]) continue;
      if (column == row.own) {
        row.own2 = d2[v];
        continue;
      }
      const unsigned bits = __float_as_uint(d2[v]);
      if (bits < least) least = bits, number = column;
      const unsigned all = __float_as_uint(d2[v] + static_cast<float>(__ldg(spread + column)));
      if (all < mean) mean = all;
    }
    const unsigned nearest = __reduce_min_sync(kFull, least);
    if (least != nearest) number = ~0u;
    number = __reduce_min_sync(kFull, number);
    mean = __reduce_min_sync(kFull, mean);
    if (lane == 0 && number != ~0u) {
      const Key key = static_cast<Key>(nearest) << 32 | number;
      if (key < row.near) row.near = key;
      if (mean < row.mean) row.mean = mean;
    }
  }
};

struct PartnerRow {
  Key key;
  float radius;
  int coincident;
};

template <class S>
struct PartnerFold {
  PartnerRow* state;
  const float* radius;
  float same2;

  __device__ __forceinline__ bool meets(int, uint32_t row, uint32_t column) const {
    return row != column;
  }
  __device__ __forceinline__ bool copies(uint32_t, uint32_t) const { return false; }

  __device__ __forceinline__ void take(int slot, uint32_t, uint32_t first,
                                       const float (&d2)[S::kEach],
                                       const bool (&kept)[S::kEach]) {
    const int lane = threadIdx.x % kWarp;
    PartnerRow& row = state[slot];
    unsigned greatest = 0;
    uint32_t number = ~0u;
    bool same = false;
#pragma unroll
    for (int v = 0; v < S::kEach; ++v) {
      const uint32_t column = first + v * kWarp + lane;
      if (!kept[v]) continue;
      if (d2[v] <= same2) {
        same = true;
        continue;
      }
      const unsigned bits =
          __float_as_uint(__fdiv_rn(row.radius + __ldg(radius + column), sqrtf(d2[v])));
      if (number == ~0u || bits > greatest) greatest = bits, number = column;
    }
    const unsigned top = __reduce_max_sync(kFull, number == ~0u ? 0u : greatest);
    if (greatest != top) number = ~0u;
    number = __reduce_min_sync(kFull, number);
    same = __any_sync(kFull, same);
    if (lane == 0) {
      const Key key = number == ~0u ? 0 : static_cast<Key>(top) << 32 | static_cast<uint32_t>(~number);
      if (key > row.key) row.key = key;
      if (same) row.coincident = 1;
    }
  }
};

template <class S, bool DIRECT>
__device__ __forceinline__ void points(const float* rows, const float* norm2, const float* centres,
                                       const float* centre_norm2, const int64_t* own,
                                       const double* spread, const double* size, int64_t count,
                                       int64_t listed, int pitch, float* own2, Key* near, double* a,
                                       double* b) {
  static_assert(S::kTeams == 1, "a block is a team");
  __shared__ TileMemory<S> memory;
  __shared__ PointRow state[S::kSide];
  const int thread = threadIdx.x;
  for (int64_t item = blockIdx.x; item * S::kSide < count; item += gridDim.x) {
    Job& job = memory.job;
    if (thread == 0) {
      job.row_start = job.column_start = 0;
      job.rows = static_cast<uint32_t>(count), job.columns = static_cast<uint32_t>(listed);
      job.row_first = static_cast<uint32_t>(item * S::kSide);
    }
    const int64_t place = item * S::kSide + thread;
    const bool mine = thread < S::kSide && place < count;
    if (mine) state[thread] = {kNone, 0x7f800000u, 0.0f, static_cast<uint32_t>(own[place])};
    __syncthreads();
    PointFold<S> fold{state, spread};
    sweep<S, DIRECT>({rows, norm2}, {centres, centre_norm2}, pitch, memory, fold);
    const int64_t row = static_cast<int64_t>(job.row_first) + thread;
    if (thread < S::kSide && row < count) {
      const PointRow& done = state[thread];
      const double n = size[done.own], within = spread[done.own];
      own2[row] = done.own2;
      near[row] = done.near;
      a[row] = n * (static_cast<double>(done.own2) + within) / (n > 1.0 ? n - 1.0 : 1.0);
      b[row] = static_cast<double>(__uint_as_float(done.mean));
    }
    __syncthreads();  // the job is over for all before the next is written
  }
}

template <class S, bool DIRECT>
__device__ __forceinline__ void partners(const float* centres, const float* norm2,
                                         const float* radius, double same2, int64_t listed,
                                         int pitch, Key* key, int* coincident) {
  static_assert(S::kTeams == 1, "a block is a team");
  __shared__ TileMemory<S> memory;
  __shared__ PartnerRow state[S::kSide];
  const int thread = threadIdx.x;
  for (int64_t item = blockIdx.x; item * S::kSide < listed; item += gridDim.x) {
    Job& job = memory.job;
    if (thread == 0) {
      job.row_start = job.column_start = 0;
      job.rows = static_cast<uint32_t>(listed), job.columns = static_cast<uint32_t>(listed);
      job.row_first = static_cast<uint32_t>(item * S::kSide);
    }
    const int64_t place = item * S::kSide + thread;
    if (thread < S::kSide && place < listed) state[thread] = {0, radius[place], 0};
    __syncthreads();
    PartnerFold<S> fold{state, radius, static_cast<float>(same2)};
    const Operand all{centres, norm2};
    sweep<S, DIRECT>(all, all, pitch, memory, fold);
    const int64_t row = static_cast<int64_t>(job.row_first) + thread;
    if (thread < S::kSide && row < listed) {
      key[row] = state[thread].key;
      coincident[row] = state[thread].coincident;
    }
    __syncthreads();  // the job is over for all before the next is written
  }
}

}  // namespace fabric

#define CENTRE_TILE(MODE, SIDE, DIRECT, BLOCKS)                                                    \
  extern "C" __global__ void __launch_bounds__(fabric::kBlock, BLOCKS)                             \
      centre_tile_points_##MODE##SIDE(                                                             \
          const float* rows, const float* norm2, const float* centres, const float* centre_norm2,  \
          const int64_t* own, const double* spread, const double* size, int64_t count,             \
          int64_t listed, int64_t pitch, float* own2, unsigned long long* near, double* a,         \
          double* b) {                                                                             \
    fabric::points<fabric::Block##SIDE, DIRECT>(rows, norm2, centres, centre_norm2, own, spread,   \
                                                size, count, listed, static_cast<int>(pitch),      \
                                                own2, near, a, b);                                 \
  }                                                                                                \
  extern "C" __global__ void __launch_bounds__(fabric::kBlock, BLOCKS)                             \
      centre_tile_partners_##MODE##SIDE(const float* centres, const float* norm2,                  \
                                        const float* radius, double same2, int64_t listed,         \
                                        int64_t pitch, unsigned long long* key, int* coincident) { \
    fabric::partners<fabric::Block##SIDE, DIRECT>(centres, norm2, radius, same2, listed,           \
                                                  static_cast<int>(pitch), key, coincident);       \
  }

CENTRE_TILE(, 64, false, 3)
CENTRE_TILE(, 128, false, 2)
CENTRE_TILE(direct_, 64, true, 3)
CENTRE_TILE(direct_, 128, true, 2)
