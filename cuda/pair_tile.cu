// pair_tile: all distances inside each cluster; of every row their sum, the sum of their squares, the greatest, the k nearest.
//
// Contract  rows f32 [count, pitch] and norm2 f32 [count] as pair_tile_rows leaves them: pitch % 4 == 0, zeros past the
//           dimension, each row less the mean of its cluster; clusters one after another, indptr i64 [. + 1], fewer than
//           2^31 rows each; no length above 1e18.
//           Work list of a launch: cluster i64 [listed], their row blocks numbered by first i64 [listed + 1], first[c + 1] -
//           first[c] = ceil(n / SIDE), items = first[listed]: one cluster of 10^7 rows and 10^6 clusters of three are the same loop.
//           copy i64 [count], equal for equal rows of a cluster. k from 1 to 32.
//           Per row: total f64 of the distances, total2 f64 of their squares, greatest2 f32 squared distance, near u64 [k]
//           rising: bits of the squared distance << 32 | place in the cluster; all ones past the last. The row itself is left
//           out by its number. Equal distances: the lower place first. Blocks of 256 threads, any grid in x.
// Twin      fabric_pipelines/analytics/reference/pair_tile.py, pair_rows: squared distances to
//           2 sqrt(dim) 2^-24 (n_i + n_j) where expanded, places equal where distances differ by more.
// Floor     sum of n^2 x 2 dim flop: 0.23 s of fp32 at 67 TFLOP/s for 10M rows of 768 in clusters of 1,000 (both halves of
//           the square); bytes are read SIDE / 2 flop apart, so never the limit.
//
// Why this mapping: include/tiles.cuh. Sums are fp32 over 64 columns in a fixed tree, then f64. The list of a row is
// in global memory, where its warp owns it, and only its last key in shared memory: a column is looked at again when it beats
// that, k (1 + ln(n / k)) times a row. Few new keys are put in their places one by one; many are sorted by the warp and merged.
// SIDE by size of cluster: 32 up to 96 rows (a warp each), 64 up to 512, 128 above: at most 1.74 times the pairs from 97 rows on.
#include "segments.cuh"
#include "tiles.cuh"

namespace fabric {

using Key = unsigned long long;
constexpr Key kNone = ~0ull;
constexpr int kMany = 12;  // new keys from which on sorting is cheaper than putting in place, by instructions

__device__ __forceinline__ Key compare_exchange(Key mine, int offset, bool low) {
  const Key other = __shfl_xor_sync(kFull, mine, offset);
  return (mine < other) == low ? mine : other;
}

// Each lane one key, rising by lane, in `list`; `fresh` joins where `offered`. The 32 least stay.
__device__ __forceinline__ Key merged(Key list, Key fresh, unsigned offered) {
  const int lane = threadIdx.x % kWarp;
  if (!(offered >> lane & 1)) fresh = kNone;
#pragma unroll
  for (int size = 2; size <= kWarp; size *= 2) {
#pragma unroll
    for (int offset = size / 2; offset > 0; offset /= 2) {
      fresh = compare_exchange(fresh, offset, ((lane & offset) == 0) == ((lane & size) == 0 || size == kWarp));
    }
  }
  const Key falling = __shfl_sync(kFull, fresh, kWarp - 1 - lane);
  list = list < falling ? list : falling;
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    list = compare_exchange(list, offset, (lane & offset) == 0);
  }
  return list;
}

struct PairRow {
  double total, total2;
  Key last;  // the k-th key
  unsigned greatest2;
};

template <class S>
struct PairFold {
  PairRow* state;
  const Job* job;
  const int64_t* copy;
  Key* near;
  int k;

  __device__ __forceinline__ bool meets(int, uint32_t row, uint32_t column) const {
    return row != column;
  }
  __device__ __forceinline__ bool copies(uint32_t row, uint32_t column) const {
    const int64_t* own = copy + job->row_start;
    return __ldg(own + row) == __ldg(own + column);
  }
  __device__ __forceinline__ Key* list_of(uint32_t row) const {
    return near + (job->row_start + row) * k;
  }

  __device__ __forceinline__ void take(int slot, uint32_t row, uint32_t first,
                                       const float (&d2)[S::kEach],
                                       const bool (&kept)[S::kEach]) {
    const int lane = threadIdx.x % kWarp;
    PairRow& own = state[slot];
    Key last = own.last, list = kNone;
    float sum = 0.0f, sum2 = 0.0f;
    unsigned greatest2 = 0;
    bool fetched = false;
#pragma unroll
    for (int v = 0; v < S::kEach; ++v) {
      Key key = kNone;
      if (kept[v]) {
        const unsigned bits = __float_as_uint(d2[v]);
        key = static_cast<Key>(bits) << 32 | (first + v * kWarp + lane);
        sum += sqrtf(d2[v]), sum2 += d2[v];
        greatest2 = bits > greatest2 ? bits : greatest2;
      }
      unsigned offered = __ballot_sync(kFull, key < last);
      if (offered == 0) continue;
      if (!fetched && lane < k) list = list_of(row)[lane];
      fetched = true;
      if (__popc(offered) >= kMany) {
        list = merged(list, key, offered);
        last = __shfl_sync(kFull, list, k - 1);
        continue;
      }
      while (offered) {
        const Key fresh = __shfl_sync(kFull, key, __ffs(offered) - 1);
        offered &= offered - 1;
        if (fresh >= last) continue;
        const int place = __popc(__ballot_sync(kFull, list < fresh));
        const Key shifted = __shfl_up_sync(kFull, list, 1);
        list = lane < place ? list : lane == place ? fresh : shifted;
        last = __shfl_sync(kFull, list, k - 1);
      }
    }
    if (fetched && lane < k) list_of(row)[lane] = list;
    greatest2 = __reduce_max_sync(kFull, greatest2);
    const float total = two_sums(sum, sum2);
    __syncwarp();  // all lanes have read the state
    if (lane == 0) {
      own.total += static_cast<double>(total);
      own.last = last;
      if (greatest2 > own.greatest2) own.greatest2 = greatest2;
    }
    if (lane == kWarp / 2) own.total2 += static_cast<double>(total);
  }
};

template <class S, bool DIRECT, bool SPLIT>
__device__ __forceinline__ void pairs(const float* rows, const float* norm2, const int64_t* indptr,
                                      const int64_t* cluster, const int64_t* first,
                                      const int64_t* copy, int64_t listed, int64_t items,
                                      int pitch, int k, double* total, double* total2,
                                      float* greatest2, Key* near) {
  __shared__ TileMemory<S> memory[S::kTeams];
  __shared__ PairRow state[S::kTeams * S::kSide];
  const int team = threadIdx.x / S::kTeam, thread = team_thread<S>();
  const int lane = thread % kWarp;
  Job& job = memory[team].job;
  for (int64_t item = static_cast<int64_t>(blockIdx.x) * S::kTeams + team; item < items;) {
    if (thread == 0) {
      job.item = item;
      const int64_t number = owner_of(first, listed, 0, item);
      const int64_t start = indptr[cluster[number]];
      job.row_start = job.column_start = start;
      job.rows = job.columns = static_cast<uint32_t>(indptr[cluster[number] + 1] - start);
      job.row_first = static_cast<uint32_t>(item - first[number]) * S::kSide;
    }
    PairFold<S> fold{state + team * S::kSide, &job, copy, near, k};
    if (thread < S::kSide) fold.state[thread] = {0.0, 0.0, kNone, 0u};
    team_sync<S>();
    for (int slot = thread / kWarp; slot < S::kSide; slot += S::kWarps) {
      if (job.row_first + slot < job.rows && lane < k) {
        fold.list_of(job.row_first + slot)[lane] = kNone;
      }
    }
    const Operand own{rows, norm2};
    sweep<S, DIRECT, PairFold<S>, SPLIT>(own, own, pitch, memory[team], fold);
    const uint32_t row = job.row_first + thread;
    if (thread < S::kSide && row < job.rows) {
      const PairRow& done = fold.state[thread];
      total[job.row_start + row] = done.total;
      total2[job.row_start + row] = done.total2;
      greatest2[job.row_start + row] = __uint_as_float(done.greatest2);
    }
    item = job.item + static_cast<int64_t>(gridDim.x) * S::kTeams;
    team_sync<S>();  // the job is over for all before the next is written
  }
}

// Rows `place` of a store, weighted, less the centre of the cluster that owns them, as f32: rows f32 [., dim], weight f64 [.],
// place i64 [count], indptr i64 [clusters + 1] over places, centre f64 [clusters, dim] -> out f32 [count, pitch], zeros past dim,
// and norm2 f32 [count] of what is left in out. A row of weight 0 becomes 0, NaN or not. Floor: 8 bytes a value.
__device__ __forceinline__ void centred(const float* __restrict__ rows,
                                        const double* __restrict__ weight,
                                        const int64_t* __restrict__ place,
                                        const int64_t* __restrict__ indptr,
                                        const double* __restrict__ centre, int64_t count,
                                        int64_t clusters, int64_t dim, int64_t pitch,
                                        float* __restrict__ out, float* __restrict__ norm2) {
  const int lane = threadIdx.x % kWarp;
  for (int64_t row = warp_index(); row < count; row += warp_count()) {
    const int64_t from = __ldg(reinterpret_cast<const long long*>(place) + row);
    const double w = __ldg(weight + from);
    const double* mean = centre + owner_of(indptr, clusters, 0, row) * dim;
    double sum = 0.0;
#pragma unroll 4
    for (int64_t t = lane; t < pitch; t += kWarp) {
      float value = 0.0f;
      if (t < dim && w != 0.0) {
        const double wide = static_cast<double>(__ldg(rows + from * dim + t));
        value = static_cast<float>(__dsub_rn(__dmul_rn(w, wide), __ldg(mean + t)));
      }
      out[row * pitch + t] = value;
      sum = fma(static_cast<double>(value), static_cast<double>(value), sum);
    }
    const double length2 = group_sum<kWarp>(sum);
    if (lane == 0) norm2[row] = static_cast<float>(length2);
  }
}

}  // namespace fabric

#define PAIR_TILE(NAME, SHAPE, DIRECT, SPLIT, BLOCKS)                                              \
  extern "C" __global__ void __launch_bounds__(fabric::kBlock, BLOCKS)                             \
      NAME(const float* rows, const float* norm2, const int64_t* indptr, const int64_t* cluster,   \
           const int64_t* first, const int64_t* copy, int64_t listed, int64_t items,               \
           int64_t pitch, int64_t k, double* total, double* total2, float* greatest2,              \
           unsigned long long* near) {                                                             \
    fabric::pairs<fabric::SHAPE, DIRECT, SPLIT>(rows, norm2, indptr, cluster, first, copy, listed, \
                                                items, static_cast<int>(pitch),                    \
                                                static_cast<int>(k), total, total2, greatest2,     \
                                                near);                                             \
  }

PAIR_TILE(pair_tile_32, Warp32, false, false, 2)
PAIR_TILE(pair_tile_64, Block64, false, false, 3)
PAIR_TILE(pair_tile_128, Block128, false, false, 2)
PAIR_TILE(pair_tile_direct_32, Warp32, true, false, 2)
PAIR_TILE(pair_tile_direct_64, Block64, true, false, 3)
PAIR_TILE(pair_tile_direct_128, Block128, true, false, 2)
// at two blocks a multiprocessor it spills: 64 sums, 24 split factors and the next slab do not fit 128 registers
PAIR_TILE(pair_tile_split_128, Block128, false, true, 1)

extern "C" __global__ void __launch_bounds__(fabric::kBlock, fabric::kBlocksPerSm)
    pair_tile_rows(const float* rows, const double* weight, const int64_t* place,
                   const int64_t* indptr, const double* centre, int64_t count, int64_t clusters,
                   int64_t dim, int64_t pitch, float* out, float* norm2) {
  fabric::centred(rows, weight, place, indptr, centre, count, clusters, dim, pitch, out, norm2);
}
