// csr_reduce: one number a row to count, sum, squared deviations, least, most and the row that has the least of every cluster;
// one word a row to its sum modulo 2^64 and its xor.
//
// Contract  value f64 [count], no NaN among rows that count; flag u8 [count], a row counts where it is 0 (others may hold
//           NaN); id i64 [count] >= 0; word u64 [count], where every row counts; indptr i64 [clusters + 1] rising from 0 to
//           count. With runs = ceil(count / 1024) and slots = runs + clusters:
//             csr_reduce_moments  -> real f64 [slots, 4] (sum, m2, least, most), whole i64 [slots, 2] (count, id)
//             csr_reduce_fold     -> real f64 [clusters, 4], whole i64 [clusters, 2]: m2 is the sum of (x - mean)^2, id the
//                                    lowest id among rows that have the least; of nothing: 0, 0, inf, -inf, 0, -1
//             csr_reduce_words    -> u64 [slots, 2] (sum, xor); csr_reduce_words_fold -> u64 [clusters, 2]
//           Blocks of 256 threads, any grid in x.
// Twin      fabric_pipelines/analytics/reference/csr_reduce.py: integers equal, reals to 2 eps sqrt(n) of sum |x| and of m2.
// Floor     bytes: 9 a row for moments (ids are read only where a least changes), 8 for words; 10M rows 21 us and 19 us at
//           4.3 TB/s. Never timed: this file has not been on a card.
//
// Why this mapping: runs of 1,024 rows ignore cluster borders, so one cluster of ten million rows and a million clusters of
// ten are the same work; run + cluster numbers the pairs that meet, without a count or a scan. A warp owns a run and reads each
// segment of it twice, the second time from L1 (9 KB a run), since deviations from the segment's own mean lose nothing to a
// distant origin. 4,096 rows a run would leave a million rows 244 warps, fewer than two a multiprocessor. A warp folds a
// cluster: lanes take every 32nd partial, then a fixed tree, both with Chan's merge. Every product and sum is rounded
// by itself, so the bits depend on neither grid, card nor compiler.
#include "lanes.cuh"
#include "segments.cuh"

namespace fabric {

constexpr int64_t kRun = 1024;
constexpr int64_t kNoId = INT64_MAX;

struct Moments {
  uint64_t count = 0;
  double sum = 0.0, m2 = 0.0, least = INFINITY, most = -INFINITY;
  int64_t id = kNoId;
};

__device__ __forceinline__ void keep_least(Moments& own, double least, int64_t id) {
  if (least < own.least || (least == own.least && id < own.id)) {
    own.least = least;
    own.id = id;
  }
}

// Chan, Golub and LeVeque 1979.
__device__ __forceinline__ Moments merged(Moments a, const Moments& b) {
  if (b.count == 0) return a;
  if (a.count == 0) return b;
  const double na = static_cast<double>(a.count), nb = static_cast<double>(b.count);
  const double gap = __dsub_rn(__ddiv_rn(b.sum, nb), __ddiv_rn(a.sum, na));
  const double between =
      __dmul_rn(__dmul_rn(gap, gap), __ddiv_rn(__dmul_rn(na, nb), __dadd_rn(na, nb)));
  a.count += b.count;
  a.sum = __dadd_rn(a.sum, b.sum);
  a.m2 = __dadd_rn(__dadd_rn(a.m2, b.m2), between);
  a.most = fmax(a.most, b.most);
  keep_least(a, b.least, b.id);
  return a;
}

__device__ __forceinline__ Moments shuffled(const Moments& own, int offset) {
  Moments other;
  other.count = shuffle_xor(own.count, offset);
  other.sum = shuffle_xor(own.sum, offset);
  other.m2 = shuffle_xor(own.m2, offset);
  other.least = shuffle_xor(own.least, offset);
  other.most = shuffle_xor(own.most, offset);
  other.id = static_cast<int64_t>(shuffle_xor(static_cast<uint64_t>(own.id), offset));
  return other;
}

// Rows [begin, end) of one cluster by one warp; every lane returns the whole.
__device__ __forceinline__ Moments of_rows(const double* __restrict__ value,
                                           const uint8_t* __restrict__ flag,
                                           const int64_t* __restrict__ id, int64_t begin,
                                           int64_t end) {
  const int lane = threadIdx.x % kWarp;
  Moments own;
#pragma unroll 8
  for (int64_t row = begin + lane; row < end; row += kWarp) {
    const double x = __ldg(value + row);
    if (__ldg(flag + row) != 0) continue;
    ++own.count;
    own.sum = __dadd_rn(own.sum, x);
    own.most = fmax(own.most, x);
    if (x <= own.least) keep_least(own, x, __ldg(reinterpret_cast<const long long*>(id) + row));
  }
  own.count = group_sum<kWarp>(own.count);
  own.sum = group_sum<kWarp>(own.sum);
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    const uint64_t there = shuffle_xor(static_cast<uint64_t>(own.id), offset);
    const double least = shuffle_xor(own.least, offset);
    own.most = fmax(own.most, shuffle_xor(own.most, offset));
    keep_least(own, least, static_cast<int64_t>(there));
  }
  if (own.count == 0) return own;  // the same in every lane
  const double mean = __ddiv_rn(own.sum, static_cast<double>(own.count));
  double m2 = 0.0;
#pragma unroll 8
  for (int64_t row = begin + lane; row < end; row += kWarp) {
    const double gap = __dsub_rn(__ldg(value + row), mean);
    if (__ldg(flag + row) == 0) m2 = __dadd_rn(m2, __dmul_rn(gap, gap));
  }
  own.m2 = group_sum<kWarp>(m2);
  return own;
}

__device__ __forceinline__ void store(const Moments& own, int64_t at, double* __restrict__ real,
                                      int64_t* __restrict__ whole) {
  double2* reals = reinterpret_cast<double2*>(real) + 2 * at;
  reals[0] = make_double2(own.sum, own.m2);
  reals[1] = make_double2(own.least, own.most);
  reinterpret_cast<longlong2*>(whole)[at] = make_longlong2(
      static_cast<long long>(own.count), own.id == kNoId ? -1 : static_cast<long long>(own.id));
}

__device__ __forceinline__ Moments load(int64_t at, const double* __restrict__ real,
                                        const int64_t* __restrict__ whole) {
  const double2 low = __ldg(reinterpret_cast<const double2*>(real) + 2 * at);
  const double2 high = __ldg(reinterpret_cast<const double2*>(real) + 2 * at + 1);
  const longlong2 ints = __ldg(reinterpret_cast<const longlong2*>(whole) + at);
  Moments own;
  own.sum = low.x, own.m2 = low.y, own.least = high.x, own.most = high.y;
  own.count = static_cast<uint64_t>(ints.x), own.id = ints.y < 0 ? kNoId : ints.y;
  return own;
}

// Calls work(begin, end, slot) for each segment of each run of this warp.
template <typename Work>
__device__ __forceinline__ void each_segment(const int64_t* __restrict__ indptr, int64_t count,
                                             int64_t clusters, Work work) {
  for (int64_t run = warp_index(); run * kRun < count; run += warp_count()) {
    const int64_t end = (run + 1) * kRun < count ? (run + 1) * kRun : count;
    int64_t row = run * kRun;
    int64_t cluster = owner_of(indptr, clusters, 0, row);
    while (row < end) {
      const int64_t border = indptr[cluster + 1] < end ? indptr[cluster + 1] : end;
      work(row, border, run + cluster);
      row = border;
      if (row < end) cluster = owner_of(indptr, clusters, cluster + 1, row);
    }
  }
}

struct Words {
  uint64_t sum = 0, both = 0;
};

__device__ __forceinline__ Words over_lanes(Words own) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    own.sum += shuffle_xor(own.sum, offset);
    own.both ^= shuffle_xor(own.both, offset);
  }
  return own;
}

}  // namespace fabric

extern "C" __global__ void __launch_bounds__(fabric::kBlock, fabric::kBlocksPerSm)
    csr_reduce_moments(const double* value, const uint8_t* flag, const int64_t* id,
                       const int64_t* indptr, int64_t count, int64_t clusters, double* real,
                       int64_t* whole) {
  fabric::each_segment(indptr, count, clusters, [&](int64_t begin, int64_t end, int64_t slot) {
    const fabric::Moments own = fabric::of_rows(value, flag, id, begin, end);
    if (threadIdx.x % fabric::kWarp == 0) fabric::store(own, slot, real, whole);
  });
}

extern "C" __global__ void __launch_bounds__(fabric::kBlock, fabric::kBlocksPerSm)
    csr_reduce_fold(const double* real, const int64_t* whole, const int64_t* indptr,
                    int64_t clusters, double* total_real, int64_t* total_whole) {
  const int lane = threadIdx.x % fabric::kWarp;
  for (int64_t cluster = fabric::warp_index(); cluster < clusters;
       cluster += fabric::warp_count()) {
    const int64_t begin = indptr[cluster], end = indptr[cluster + 1];
    fabric::Moments own;
    if (begin < end) {  // the same in every lane
      for (int64_t run = begin / fabric::kRun + lane; run <= (end - 1) / fabric::kRun;
           run += fabric::kWarp) {
        own = fabric::merged(own, fabric::load(run + cluster, real, whole));
      }
#pragma unroll
      for (int offset = fabric::kWarp / 2; offset > 0; offset /= 2) {
        own = fabric::merged(own, fabric::shuffled(own, offset));
      }
    }
    if (lane == 0) fabric::store(own, cluster, total_real, total_whole);
  }
}

extern "C" __global__ void __launch_bounds__(fabric::kBlock, fabric::kBlocksPerSm)
    csr_reduce_words(const uint64_t* word, const int64_t* indptr, int64_t count, int64_t clusters,
                     uint64_t* partial) {
  const int lane = threadIdx.x % fabric::kWarp;
  fabric::each_segment(indptr, count, clusters, [&](int64_t begin, int64_t end, int64_t slot) {
    fabric::Words own;
#pragma unroll 8
    for (int64_t row = begin + lane; row < end; row += fabric::kWarp) {
      const uint64_t x = __ldg(reinterpret_cast<const unsigned long long*>(word) + row);
      own.sum += x;
      own.both ^= x;
    }
    own = fabric::over_lanes(own);
    if (lane == 0) {
      reinterpret_cast<ulonglong2*>(partial)[slot] = make_ulonglong2(own.sum, own.both);
    }
  });
}

extern "C" __global__ void __launch_bounds__(fabric::kBlock, fabric::kBlocksPerSm)
    csr_reduce_words_fold(const uint64_t* partial, const int64_t* indptr, int64_t clusters,
                          uint64_t* total) {
  const int lane = threadIdx.x % fabric::kWarp;
  for (int64_t cluster = fabric::warp_index(); cluster < clusters;
       cluster += fabric::warp_count()) {
    const int64_t begin = indptr[cluster], end = indptr[cluster + 1];
    fabric::Words own;
    if (begin < end) {
      for (int64_t run = begin / fabric::kRun + lane; run <= (end - 1) / fabric::kRun;
           run += fabric::kWarp) {
        const ulonglong2 part =
            __ldg(reinterpret_cast<const ulonglong2*>(partial) + run + cluster);
        own.sum += part.x;
        own.both ^= part.y;
      }
      own = fabric::over_lanes(own);
    }
    if (lane == 0) {
      reinterpret_cast<ulonglong2*>(total)[cluster] = make_ulonglong2(own.sum, own.both);
    }
  }
}
