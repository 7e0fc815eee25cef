// csr_select: exact quantiles of one number a row of every cluster, and which rows of a cluster are copies of which.
//
// Contract  value f64 [count], no NaN among rows that count; flag u8 [count], a row counts where it is 0; indptr i64
//           [clusters + 1] rising from 0 to count; share f64 [shares] in 0..1, shares <= 4; quantile f64 [clusters, shares] by
//           linear interpolation between order statistics (Hyndman-Fan type 7), NaN where no row counts. _small does clusters
//           of at most 32 rows, _large the others; each writes only its own, so they run in either order.
//           hash u64 [count, 2], 16-byte aligned; table u64 [mask + 1], every byte 0xff, mask + 1 a power of two >= 2 count:
//           csr_select_insert fills it (its layout may differ from run to run), csr_select_find then gives copy_of i64 [count],
//           the lowest row of the same cluster with the same hash, and fresh u64 [count], 1 where that is the row itself.
//           Blocks of 256 threads, any grid in x.
// Twin      fabric_pipelines/analytics/reference/csr_select.py: equal to the last bit, the sign of a zero aside.
// Floor     quantiles, bytes: 9 a row and sweep, one sweep to find the bits that differ and one for each 8 of them, until
//           every bin asked for holds a single row: 3 to 5 for real radii, 10M rows 0.1 ms at 4.3 TB/s where clusters fit L2.
//           Copies, sectors: 3 random ones of 32 bytes a row, 10M rows 0.3 ms. Never timed: not been on a card.
//
// Why this mapping: digits are integers, so counting them in shared memory by atomics gives the same bits in any order. The
// digits that all keys of a cluster share are skipped: they would put every thread on one bin, which is where radix selection of
// floats gets slow. A warp serves each of at most eight order statistics when bins are searched; statistics that still share a
// prefix share a histogram. Up to 32 rows a lane holds a row and counts those below it, without memory. A cluster is one block's
// work: ten million rows in one cluster cost one multiprocessor some milliseconds, less than their other passes by
// far, and a second path over many blocks would have to hold histograms for every cluster. Copies meet in an open
// hash table of row numbers: no sort, one pass in and one out, and the lowest row wins whatever the order.
#include "lanes.cuh"
#include "segments.cuh"

namespace fabric {

constexpr int kShares = 4;
constexpr int kRanks = 2 * kShares;  // an order statistic below each share and one above: one a warp
constexpr int kBits = 8;
constexpr int kBins = 1 << kBits;
constexpr int64_t kRun = 1024;
constexpr unsigned long long kEmpty = ~0ull;
static_assert(kRanks * kWarp == kBlock, "one warp searches the bins of one order statistic");

// Keys order as the numbers do; -0.0 lies just below 0.0.
__device__ __forceinline__ uint64_t key_of(double x) {
  const uint64_t bits = static_cast<uint64_t>(__double_as_longlong(x));
  return bits >> 63 ? ~bits : bits | 1ull << 63;
}

__device__ __forceinline__ double value_of(uint64_t key) {
  return __longlong_as_double(static_cast<long long>(key >> 63 ? key & ~(1ull << 63) : ~key));
}

// Without its lowest `shift` bits; shift 1..64.
__device__ __forceinline__ uint64_t above(uint64_t key, int shift) { return key >> (shift - 1) >> 1; }

__device__ __forceinline__ uint64_t shuffled(uint64_t value, int lane) {
  return __shfl_sync(kFull, static_cast<unsigned long long>(value), lane);
}

struct Place {
  uint64_t low, high;  // ranks of the order statistics on both sides
  double part;
};

__device__ __forceinline__ Place place_of(double share, uint64_t kept) {
  const double place = __dmul_rn(share, static_cast<double>(kept - 1));
  const double floor_of = floor(place);
  const uint64_t low = static_cast<uint64_t>(floor_of);
  return {low, low + 1 < kept ? low + 1 : kept - 1, __dsub_rn(place, floor_of)};
}

__device__ __forceinline__ double between(uint64_t low, uint64_t high, double part) {
  const double below = value_of(low);
  return __dadd_rn(below, __dmul_rn(__dsub_rn(value_of(high), below), part));
}

__device__ __forceinline__ void small(const double* __restrict__ value,
                                      const uint8_t* __restrict__ flag,
                                      const int64_t* __restrict__ indptr, int64_t clusters,
                                      const double* __restrict__ share, int64_t shares,
                                      double* __restrict__ quantile) {
  const int lane = threadIdx.x % kWarp;
  for (int64_t cluster = warp_index(); cluster < clusters; cluster += warp_count()) {
    const int64_t begin = indptr[cluster];
    const int64_t size = indptr[cluster + 1] - begin;
    if (size > kWarp) continue;  // the same in every lane
    const bool counts = lane < size && __ldg(flag + begin + lane) == 0;
    const uint64_t key = counts ? key_of(__ldg(value + begin + lane)) : 0;
    const unsigned kept = __ballot_sync(kFull, counts);
    int rank = 0;
    for (int other = 0; other < size; ++other) {
      const uint64_t there = shuffled(key, other);
      const bool before = there < key || (there == key && other < lane);
      rank += (kept >> other & 1u) && before;
    }
    for (int64_t at = 0; at < shares; ++at) {
      double found = NAN;
      if (kept != 0) {
        const Place place = place_of(share[at], static_cast<uint64_t>(__popc(kept)));
        const unsigned low = __ballot_sync(kFull, counts && rank == static_cast<int>(place.low));
        const unsigned high = __ballot_sync(kFull, counts && rank == static_cast<int>(place.high));
        found = between(shuffled(key, __ffs(static_cast<int>(low)) - 1),
                        shuffled(key, __ffs(static_cast<int>(high)) - 1), place.part);
      }
      if (lane == 0) quantile[cluster * shares + at] = found;
    }
  }
}

// What the block knows of the order statistics it is after.
struct Search {
  uint64_t prefix[kRanks], rank[kRanks], left[kRanks];  // rank among the `left` keys that have the prefix
  int leader[kRanks];                                   // the first one with the same prefix counts for all
};

// One warp, one order statistic: the bin that holds it.
__device__ __forceinline__ void narrow(Search& search, const unsigned (&bins)[kRanks * kBins],
                                       int which, int width) {
  constexpr int kOwn = kBins / kWarp;
  const int lane = threadIdx.x % kWarp;
  const unsigned* own = bins + search.leader[which] * kBins + lane * kOwn;
  uint64_t sum = 0;
#pragma unroll
  for (int bin = 0; bin < kOwn; ++bin) sum += own[bin];
  uint64_t upto = sum;
#pragma unroll
  for (int offset = 1; offset < kWarp; offset *= 2) {
    const uint64_t before = __shfl_up_sync(kFull, static_cast<unsigned long long>(upto), offset);
    if (lane >= offset) upto += before;
  }
  uint64_t before = upto - sum;
  const uint64_t rank = search.rank[which], prefix = search.prefix[which];
  __syncwarp();  // all have read what one of them now writes
  if (before <= rank && rank < upto) {
    int bin = 0;
    while (before + own[bin] <= rank) before += own[bin++];
    search.prefix[which] = prefix << width | static_cast<uint64_t>(lane * kOwn + bin);
    search.rank[which] = rank - before;
    search.left[which] = own[bin];
  }
}

__device__ __forceinline__ void large(const double* __restrict__ value,
                                      const uint8_t* __restrict__ flag,
                                      const int64_t* __restrict__ indptr, int64_t clusters,
                                      const double* __restrict__ share, int64_t shares,
                                      double* __restrict__ quantile) {
  __shared__ unsigned bins[kRanks * kBins];
  __shared__ Search search;
  __shared__ uint64_t part_kept[kRanks], part_low[kRanks], part_high[kRanks];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int ranks = 2 * static_cast<int>(shares);

  for (int64_t cluster = blockIdx.x; cluster < clusters; cluster += gridDim.x) {
    const int64_t begin = indptr[cluster], end = indptr[cluster + 1];
    if (end - begin <= kWarp) continue;  // the same in every thread

    uint64_t kept = 0, low = ~0ull, high = 0;
#pragma unroll 4
    for (int64_t row = begin + threadIdx.x; row < end; row += kBlock) {
      const uint64_t key = key_of(__ldg(value + row));
      if (__ldg(flag + row) != 0) continue;
      ++kept;
      low = key < low ? key : low;
      high = key > high ? key : high;
    }
    kept = group_sum<kWarp>(kept);
#pragma unroll
    for (int offset = kWarp / 2; offset > 0; offset /= 2) {
      const uint64_t lower = shuffle_xor(low, offset), higher = shuffle_xor(high, offset);
      low = lower < low ? lower : low;
      high = higher > high ? higher : high;
    }
    if (lane == 0) part_kept[warp] = kept, part_low[warp] = low, part_high[warp] = high;
    __syncthreads();
    kept = 0;
    for (int part = 0; part < kRanks; ++part) {
      kept += part_kept[part];
      low = part_low[part] < low ? part_low[part] : low;
      high = part_high[part] > high ? part_high[part] : high;
    }
    if (kept == 0) {
      if (threadIdx.x < shares) quantile[cluster * shares + threadIdx.x] = NAN;
      __syncthreads();  // parts are read before the next cluster writes them
      continue;
    }

    int shift = low == high ? 0 : 64 - __clzll(static_cast<long long>(low ^ high));
    if (threadIdx.x < ranks) {
      const Place place = place_of(share[threadIdx.x / 2], kept);
      search.prefix[threadIdx.x] = shift == 0 ? low : above(low, shift);
      search.rank[threadIdx.x] = threadIdx.x % 2 == 0 ? place.low : place.high;
      search.left[threadIdx.x] = kept;
      search.leader[threadIdx.x] = 0;
    }
    bool single = false;
    while (shift > 0 && !single) {
      const int width = shift < kBits ? shift : kBits;
      for (int bin = threadIdx.x; bin < kRanks * kBins; bin += kBlock) bins[bin] = 0;
      __syncthreads();
#pragma unroll 4
      for (int64_t row = begin + threadIdx.x; row < end; row += kBlock) {
        const uint64_t key = key_of(__ldg(value + row));
        if (__ldg(flag + row) != 0) continue;
        const uint64_t top = above(key, shift);
        const unsigned bin = static_cast<unsigned>(key >> (shift - width)) & ((1u << width) - 1u);
        for (int which = 0; which < ranks; ++which) {
          if (search.leader[which] == which && search.prefix[which] == top) {
            atomicAdd(bins + which * kBins + bin, 1u);
          }
        }
      }
      __syncthreads();
      if (warp < ranks) narrow(search, bins, warp, width);
      __syncthreads();
      shift -= width;
      if (threadIdx.x < ranks) {
        int leader = 0;
        while (search.prefix[leader] != search.prefix[threadIdx.x]) ++leader;
        search.leader[threadIdx.x] = leader;
      }
      single = true;
      for (int which = 0; which < ranks; ++which) single = single && search.left[which] == 1;
    }  // the barrier after the bins are cleared shows the leaders to all
    if (shift > 0) {  // each of them is the one key left with its prefix
      for (int64_t row = begin + threadIdx.x; row < end; row += kBlock) {
        const uint64_t key = key_of(__ldg(value + row));
        if (__ldg(flag + row) != 0) continue;
        const uint64_t top = above(key, shift);
        for (int which = 0; which < ranks; ++which) {
          if (search.prefix[which] == top) search.rank[which] = key;
        }
      }
    } else if (threadIdx.x < ranks) {
      search.rank[threadIdx.x] = search.prefix[threadIdx.x];
    }
    __syncthreads();
    if (threadIdx.x < shares) {
      const Place place = place_of(share[threadIdx.x], kept);
      quantile[cluster * shares + threadIdx.x] =
          between(search.rank[2 * threadIdx.x], search.rank[2 * threadIdx.x + 1], place.part);
    }  // the next cluster writes its search only after its first barrier
  }
}

// Row of the table entry with this row's hash and cluster; what is empty on the way becomes the row's own with INSERT.
template <bool INSERT>
__device__ __forceinline__ unsigned long long* slot_of(const ulonglong2* __restrict__ hash,
                                                       int64_t row, int64_t begin, int64_t end,
                                                       unsigned long long* table, uint64_t mask) {
  const ulonglong2 own = hash[row];
  uint64_t at = (own.x ^ static_cast<uint64_t>(begin) * 0x9E3779B97F4A7C15ull) & mask;
  while (true) {
    unsigned long long there = table[at];
    if (INSERT && there == kEmpty) {
      there = atomicCAS(table + at, kEmpty, static_cast<unsigned long long>(row));
      if (there == kEmpty) return table + at;
    }
    const int64_t other = static_cast<int64_t>(there);
    if (begin <= other && other < end && hash[other].x == own.x && hash[other].y == own.y) {
      return table + at;
    }
    at = (at + 1) & mask;  // at most half the table is taken, so this ends
  }
}

template <typename Work>
__device__ __forceinline__ void each_row(const int64_t* __restrict__ indptr, int64_t count,
                                         int64_t clusters, Work work) {
  for (int64_t run = warp_index(); run * kRun < count; run += warp_count()) {
    const int64_t stop = (run + 1) * kRun < count ? (run + 1) * kRun : count;
    int64_t row = run * kRun + threadIdx.x % kWarp;
    if (row >= stop) continue;
    int64_t cluster = owner_of(indptr, clusters, 0, row);
    for (; row < stop; row += kWarp) {
      if (row >= indptr[cluster + 1]) cluster = owner_of(indptr, clusters, cluster + 1, row);
      work(row, indptr[cluster], indptr[cluster + 1]);
    }
  }
}

}  // namespace fabric

extern "C" __global__ void __launch_bounds__(fabric::kBlock, fabric::kBlocksPerSm)
    csr_select_small(const double* value, const uint8_t* flag, const int64_t* indptr,
                     int64_t clusters, const double* share, int64_t shares, double* quantile) {
  fabric::small(value, flag, indptr, clusters, share, shares, quantile);
}

extern "C" __global__ void __launch_bounds__(fabric::kBlock, fabric::kBlocksPerSm)
    csr_select_large(const double* value, const uint8_t* flag, const int64_t* indptr,
                     int64_t clusters, const double* share, int64_t shares, double* quantile) {
  fabric::large(value, flag, indptr, clusters, share, shares, quantile);
}

extern "C" __global__ void __launch_bounds__(fabric::kBlock, fabric::kBlocksPerSm)
    csr_select_insert(const uint64_t* hash, const int64_t* indptr, int64_t count, int64_t clusters,
                      uint64_t* table, int64_t mask) {
  const ulonglong2* hashes = reinterpret_cast<const ulonglong2*>(hash);
  auto* slots = reinterpret_cast<unsigned long long*>(table);
  fabric::each_row(indptr, count, clusters, [&](int64_t row, int64_t begin, int64_t end) {
    unsigned long long* slot =
        fabric::slot_of<true>(hashes, row, begin, end, slots, static_cast<uint64_t>(mask));
    if (*slot > static_cast<unsigned long long>(row)) {
      atomicMin(slot, static_cast<unsigned long long>(row));
    }
  });
}

extern "C" __global__ void __launch_bounds__(fabric::kBlock, fabric::kBlocksPerSm)
    csr_select_find(const uint64_t* hash, const int64_t* indptr, int64_t count, int64_t clusters,
                    uint64_t* table, int64_t mask, int64_t* copy_of, uint64_t* fresh) {
  const ulonglong2* hashes = reinterpret_cast<const ulonglong2*>(hash);
  auto* slots = reinterpret_cast<unsigned long long*>(table);
  fabric::each_row(indptr, count, clusters, [&](int64_t row, int64_t begin, int64_t end) {
    const int64_t first = static_cast<int64_t>(
        *fabric::slot_of<false>(hashes, row, begin, end, slots, static_cast<uint64_t>(mask)));
    copy_of[row] = first;
    fresh[row] = first == row;
  });
}
