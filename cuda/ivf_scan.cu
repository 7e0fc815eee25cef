// ivf_scan: float rows of probed lists against the queries that probe them, list by list; the k nearest of each query.
//
// Contract  rows f32 [n, d], n < 2^32, list after list: indptr i64 [lists + 1]. length f32 [n]: norm of a row, NaN for one that
//           does not count. xq f32 [m, d], reach f32 [m] (norms). Distance: l2 sum (q - x)^2; ip -q.x; cosine
//           1 - q.x / (|q| |x|). A distance that is NaN is never taken.
//           A task is a list and up to 4 queries that probe it: task_list i64 [T], task_query i64 [T, 4] (-1: none),
//           first i64 [T + 1]: prefix sum of pieces of 1,024 rows; items = first[T]. key u64 [items, 4, k], k <= 128:
//           ordered bits of the distance, number of the row; ascending, all ones: none.
//           ivf_scan_merge: at i64 [m, probes]: 4 task + place, -1: no probe. distance f32 [m, k] (NaN), id i64 [m, k]
//           (-1), found i64 [m]; ties to the lower row. _health also adds to the whole numbers of each list: probe
//           (queries that probed it), hit (rows of it in an answer), wasted (probes without a hit), i64 [lists], and to
//           margin i64 [64]: bin floor(32 (1 + (b - w) / (|b| + |w|))), at most 63, b the list's least distance and w the
//           query's last kept one (both 0: bin 32); a list without a row that counts, and a query that found none, have no bin.
//           Blocks of 256 threads, any grid in x.
// Floor     4 d bytes a row of a probed list, once for its queries (below); keys are 8 k bytes a piece and query.
// Twin      fabric_pipelines/analytics/reference/ivf_scan.py: distances to (d / 32 + 8) 2^-24 of their terms' size, ids equal
//           off ties; counts equal, from the same distances.
//
// Why this mapping: lanes share the dimensions, so loads are whole lines and no d is too large. A warp multiplies 8 rows by 4
// queries: 12 loads for 32 products, and one exchange of 31 shuffles leaves every lane with one of the 32 sums, which is
// 1 a sum where a tree would take 5. The tasks of one list are neighbours, taken at one time by the warps of a block, so
// device memory is asked once for a piece and L1 for the rest. The k best stay in registers (best_k.cuh).
// One thread of the merge sees all of a query, so counting costs the scan nothing and cannot change it.
#include "best_k.cuh"
#include "segments.cuh"

namespace fabric {

constexpr int kQueries = 4, kRows = 8, kPiece = 1024, kBins = 64;
enum Metric { kL2, kIp, kCosine };

// Lane l gets the sum over all lanes of value[l]: each round halves the values and doubles the lanes that are in them.
__device__ __forceinline__ float exchanged(float (&value)[32]) {
  const unsigned lane = threadIdx.x % kWarp;
#pragma unroll
  for (int width = 16; width > 0; width /= 2) {
    const bool upper = lane & width;
#pragma unroll
    for (int i = 0; i < width; ++i) {
      const float kept = upper ? value[i + width] : value[i];
      const float given = upper ? value[i] : value[i + width];
      value[i] = kept + __shfl_xor_sync(kFull, given, width);
    }
  }
  return value[0];
}

template <Metric METRIC, int M>
__device__ __forceinline__ void scan(const float* __restrict__ rows, const float* __restrict__ length,
                                     const int64_t* __restrict__ indptr,
                                     const float* __restrict__ xq, const float* __restrict__ reach,
                                     const int64_t* __restrict__ task_list,
                                     const int64_t* __restrict__ task_query,
                                     const int64_t* __restrict__ first, int64_t tasks, int64_t items,
                                     int64_t dim, int64_t k, uint64_t* __restrict__ key) {
  const int lane = threadIdx.x % kWarp, own = lane % kQueries;
  for (int64_t item = warp_index(); item < items; item += warp_count()) {
    const int64_t task = owner_of(first, tasks, 0, item), list = task_list[task];
    const int64_t start = indptr[list] + (item - first[task]) * kPiece, end = indptr[list + 1];
    const int64_t stop = start + kPiece < end ? start + kPiece : end;
    int query[kQueries];  // in numbers: all queries together are below 2^31
    Best<M> best[kQueries];
#pragma unroll
    for (int c = 0; c < kQueries; ++c) {
      const int64_t number = task_query[task * kQueries + c];
      query[c] = static_cast<int>((number < 0 ? 0 : number) * dim);
      best[c].clear(static_cast<int>(k));
    }
    const int64_t mine = task_query[task * kQueries + own];
    const float far = mine < 0 ? 0.0f : reach[mine];
    for (int64_t row = start; row < stop; row += kRows) {
      const float* base = rows + row * dim;
      int line[kRows];
#pragma unroll
      for (int r = 0; r < kRows; ++r) line[r] = row + r < stop ? r * static_cast<int>(dim) : 0;
      float sum[kRows * kQueries];
#pragma unroll
      for (int i = 0; i < kRows * kQueries; ++i) sum[i] = 0.0f;
#pragma unroll (M == 1 ? 2 : 1)
      for (int j = lane; j < dim; j += kWarp) {
        float x[kRows];
#pragma unroll
        for (int r = 0; r < kRows; ++r) x[r] = base[line[r] + j];
#pragma unroll
        for (int c = 0; c < kQueries; ++c) {
          const float q = __ldg(xq + query[c] + j);
#pragma unroll
          for (int r = 0; r < kRows; ++r) {
            float& s = sum[r * kQueries + c];
            if constexpr (METRIC == kL2) {
              const float apart = q - x[r];
              s = fmaf(apart, apart, s);
            } else {
              s = fmaf(q, x[r], s);
            }
          }
        }
      }
      float distance = exchanged(sum);
      const int64_t at = row + lane / kQueries;
      uint64_t offered = kNoKey;
      if (at < stop && mine >= 0) {
        const float norm = length[at];
        if constexpr (METRIC == kIp) distance = -distance;
        if constexpr (METRIC == kCosine) distance = 1.0f - distance / (norm * far);
        if (!isnan(norm) && !isnan(distance)) {
          offered = key_of(distance, static_cast<uint32_t>(at));
        }
      }
#pragma unroll
      for (int c = 0; c < kQueries; ++c) best[c].offer(own == c ? offered : kNoKey);
    }
#pragma unroll
    for (int c = 0; c < kQueries; ++c) {
      best[c].write(key + (item * kQueries + c) * k, static_cast<int>(k));
    }
  }
}

// Keys of one probe, k a piece.
struct Probe {
  const uint64_t* key;
  int64_t task, place, first, last;
  __device__ __forceinline__ uint64_t at(int64_t number, int64_t k) const {
    return key[((first + number / k) * kQueries + place) * k + number % k];
  }
  __device__ __forceinline__ int64_t count(int64_t k) const { return (last - first) * k; }
};

__device__ __forceinline__ Probe probe_of(const uint64_t* key, const int64_t* first, int64_t place) {
  const int64_t task = place / kQueries;
  return {key, task, place % kQueries, first[task], first[task + 1]};
}

__device__ __forceinline__ int bin_of(uint64_t nearest, uint64_t last) {
  const float b = from_ordered(static_cast<uint32_t>(nearest >> 32));
  const float w = from_ordered(static_cast<uint32_t>(last >> 32));
  const float size = __fadd_rn(fabsf(b), fabsf(w));
  if (!(size > 0.0f) || isinf(size)) return kBins / 2;
  const float margin = __fdiv_rn(__fadd_rn(b, -w), size);
  const int bin = static_cast<int>(__fmul_rn(__fadd_rn(margin, 1.0f), 32.0f));
  return bin < 0 ? 0 : bin < kBins ? bin : kBins - 1;
}

template <int M, bool HEALTH>
__device__ __forceinline__ void merge(const uint64_t* __restrict__ key,
                                      const int64_t* __restrict__ first,
                                      const int64_t* __restrict__ at,
                                      const int64_t* __restrict__ ids, int64_t queries,
                                      int64_t probes, int64_t k, float* __restrict__ distance,
                                      int64_t* __restrict__ id, int64_t* __restrict__ found,
                                      const int64_t* __restrict__ task_list,
                                      unsigned long long* __restrict__ probe,
                                      unsigned long long* __restrict__ hit,
                                      unsigned long long* __restrict__ wasted,
                                      unsigned long long* __restrict__ margin) {
  const int lane = threadIdx.x % kWarp;
  for (int64_t query = warp_index(); query < queries; query += warp_count()) {
    Best<M> best;
    best.clear(static_cast<int>(k));
    for (int64_t p = 0; p < probes; ++p) {
      const int64_t place = at[query * probes + p];
      if (place < 0) continue;
      const Probe one = probe_of(key, first, place);
      const int64_t count = one.count(k);
      for (int64_t start = 0; start < count; start += kWarp) {
        best.offer(start + lane < count ? one.at(start + lane, k) : kNoKey);
      }
    }
    uint64_t last = 0;  // the greatest key that is kept
    int kept = 0;
#pragma unroll
    for (int i = 0; i < M; ++i) {
      const int place = best.place_of(i, static_cast<int>(k));
      if (place < 0) continue;
      const bool some = best.slot[i] != kNoKey;
      distance[query * k + place] =
          some ? from_ordered(static_cast<uint32_t>(best.slot[i] >> 32)) : __uint_as_float(0x7fc00000u);
      id[query * k + place] = some ? ids[best.slot[i] & 0xffffffffu] : -1;
      kept += some;
      if (some && best.slot[i] > last) last = best.slot[i];
    }
    kept = __reduce_add_sync(kFull, kept);
    if (lane == 0) found[query] = kept;
    if constexpr (HEALTH) {
#pragma unroll
      for (int offset = kWarp / 2; offset > 0; offset /= 2) {
        const uint64_t other = shuffle_xor(last, offset);
        last = other > last ? other : last;
      }
      for (int64_t p = 0; p < probes; ++p) {
        const int64_t place = at[query * probes + p];
        if (place < 0) continue;
        const Probe one = probe_of(key, first, place);
        const int64_t count = one.count(k);
        uint64_t nearest = kNoKey;
        int hits = 0;
        for (int64_t number = lane; number < count; number += kWarp) {
          const uint64_t seen = one.at(number, k);
          hits += seen <= last;
          nearest = seen < nearest ? seen : nearest;
        }
        hits = __reduce_add_sync(kFull, hits);
#pragma unroll
        for (int offset = kWarp / 2; offset > 0; offset /= 2) {
          const uint64_t other = shuffle_xor(nearest, offset);
          nearest = other < nearest ? other : nearest;
        }
        if (lane == 0) {
          const int64_t list = task_list[one.task];
          atomicAdd(probe + list, 1ull);
          if (hits) atomicAdd(hit + list, static_cast<unsigned long long>(hits));
          if (!hits) atomicAdd(wasted + list, 1ull);
          if (nearest != kNoKey) atomicAdd(margin + bin_of(nearest, last), 1ull);
        }
      }
    }
  }
}

}  // namespace fabric

// Two blocks a multiprocessor leave 128 registers: 32 sums, 8 rows, and at k <= 128 four lists of 4 keys a lane.
#define IVF_SCAN(NAME, METRIC, SLOTS, M)                                                           \
  extern "C" __global__ void __launch_bounds__(fabric::kBlock, 2) ivf_scan_##NAME##_##SLOTS(       \
      const float* rows, const float* length, const int64_t* indptr, const float* xq,              \
      const float* reach, const int64_t* task_list, const int64_t* task_query,                     \
      const int64_t* first, int64_t tasks, int64_t items, int64_t dim, int64_t k, uint64_t* key) { \
    fabric::scan<fabric::METRIC, M>(rows, length, indptr, xq, reach, task_list, task_query, first, \
                                    tasks, items, dim, k, key);                                    \
  }

#define IVF_MERGE(SLOTS, M)                                                                        \
  extern "C" __global__ void __launch_bounds__(fabric::kBlock, fabric::kBlocksPerSm)               \
      ivf_scan_merge_##SLOTS(const uint64_t* key, const int64_t* first, const int64_t* at,         \
                             const int64_t* ids, int64_t queries, int64_t probes, int64_t k,       \
                             float* distance, int64_t* id, int64_t* found) {                       \
    fabric::merge<M, false>(key, first, at, ids, queries, probes, k, distance, id, found, nullptr, \
                            nullptr, nullptr, nullptr, nullptr);                                   \
  }                                                                                                \
  extern "C" __global__ void __launch_bounds__(fabric::kBlock, fabric::kBlocksPerSm)               \
      ivf_scan_merge_health_##SLOTS(                                                               \
          const uint64_t* key, const int64_t* first, const int64_t* at, const int64_t* ids,        \
          int64_t queries, int64_t probes, int64_t k, float* distance, int64_t* id,                \
          int64_t* found, const int64_t* task_list, unsigned long long* probe,                     \
          unsigned long long* hit, unsigned long long* wasted, unsigned long long* margin) {       \
    fabric::merge<M, true>(key, first, at, ids, queries, probes, k, distance, id, found,           \
                           task_list, probe, hit, wasted, margin);                                 \
  }

IVF_SCAN(l2, kL2, 32, 1)
IVF_SCAN(l2, kL2, 128, 4)
IVF_SCAN(ip, kIp, 32, 1)
IVF_SCAN(ip, kIp, 128, 4)
IVF_SCAN(cosine, kCosine, 32, 1)
IVF_SCAN(cosine, kCosine, 128, 4)
IVF_MERGE(32, 1)
IVF_MERGE(128, 4)
