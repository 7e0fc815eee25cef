// two_means: Lloyd's iteration with two centres in every cluster at once, from sides that the caller gives.
//
// Contract  A row counts as y = weight x - mean of its cluster. The two means of rows whose y sum to nothing lie on one line:
//           with U = sum of y over the upper side, `above` of `size` rows there, they are U / above and -U / (size - above), and
//           a row is nearer to the upper one where y.U > |U|^2 (1 / above - 1 / (size - above)) / 2. So U is all there is.
//           rows f32 [count, dim]; weight f64 [count], 0 = row left out; indptr i64 [clusters + 1] rising from 0 to count; mean,
//           upper (U) f64 [clusters, dim], 16-byte aligned; size, above i64 [clusters]; norm2 f64 [clusters] = |U|^2; side u8
//           [count], bit 0 where the row is, bit 1 where it goes; active u8 [clusters], 0 = done; moves u64 [runs + clusters],
//           runs = ceil(count / 128), rows that move | rows that move up << 32. Before: U, above 0, active 1. Then
//           count (start u8 [count] -> side, moves), settle, move, fold, norm, and for each round assign, settle, move, fold, norm;
//           finish at the end. No host decides anything between them: a cluster that is done costs two loads a run.
//             settle   done where no row moves, or where all would be on one side, which then does not happen
//             move     `partial` f64 [runs + clusters, width], a window [low, low + width) of dimensions as in csr_centroid: sum of
//                      y of rows that move, with their sign, only of runs where some do; fold adds it to U in run order
//             finish   side u8 0 or 1; place f64 [count] = y.U / |U|; apart2 f64 [count] = squared distance to its own mean
//           _wide needs dim % 4 == 0 and 16-byte aligned rows; _any takes the rest. Blocks of 256 threads, any grid in x.
// Twin      fabric_pipelines/analytics/reference/two_means.py: sides equal off ties, reals to 1e-12 of the cluster's radius.
// Floor     bytes: each round reads the rows of active clusters once and those that move once more; 10M x 768 at 4.3 TB/s
//           7.1 ms a round, 121 ms for 16 rounds and the finish, if no cluster were ever done. Never timed: not been on a card.
//
// Why this mapping: sums of what moves, instead of sums of both sides, make a round one sweep, and nearly no rows move after the
// first few. Sweeps are csr_radius's (lanes share a row, a warp owns a run, U and mean stay in L1 and serve the four rows of a warp
// at once), sums are csr_centroid's (a warp sums a run over 128 dimensions in registers, in row order). No atomics, and every
// product and sum is rounded by itself or fused by name, so the bits depend on neither grid, card nor compiler.
#include "lanes.cuh"
#include "segments.cuh"
#include "slabs.cuh"

namespace fabric {

constexpr int64_t kRun = 128;
constexpr int kAhead = 4;   // rows in flight, or loads of 16 bytes
// Mean and U take twice the registers of csr_radius: at three blocks some entries spill for sm_100. 16 warps with 64 bytes in
// flight a lane are 32 KiB a multiprocessor, still above latency x bandwidth (33 B/ns x 0.7 us).
constexpr int kBlocks = 2;

// Calls work(cluster, begin, end, slot) for each segment of a run; the same in every lane.
template <typename Work>
__device__ __forceinline__ void segments_of(int64_t run, const int64_t* __restrict__ indptr,
                                            int64_t count, int64_t clusters, Work work) {
  const int64_t end = (run + 1) * kRun < count ? (run + 1) * kRun : count;
  int64_t row = run * kRun;
  int64_t cluster = owner_of(indptr, clusters, 0, row);
  while (row < end) {
    const int64_t border = indptr[cluster + 1] < end ? indptr[cluster + 1] : end;
    work(cluster, row, border, run + cluster);
    row = border;
    if (row < end) cluster = owner_of(indptr, clusters, cluster + 1, row);
  }
}

__device__ __forceinline__ double off_mean(float x, double weight, double mean) {
  return __dsub_rn(__dmul_rn(weight, static_cast<double>(x)), mean);
}

// Calls each(x, mean, upper, odd) for the lane's share of a row, four loads of 16 bytes of it in flight.
template <int LANES, bool WIDE, typename Each>
__device__ __forceinline__ void each_value(const float* __restrict__ x, const double* __restrict__ mean,
                                           const double* __restrict__ upper, int64_t dim, Each each) {
  const int lane = threadIdx.x % LANES;
  if constexpr (WIDE) {
#pragma unroll kAhead
    for (int64_t step = lane; step < dim / 4; step += LANES) {
      const float4 v = __ldg(reinterpret_cast<const float4*>(x) + step);
      const double2 m = __ldg(reinterpret_cast<const double2*>(mean) + 2 * step);
      const double2 n = __ldg(reinterpret_cast<const double2*>(mean) + 2 * step + 1);
      const double2 u = __ldg(reinterpret_cast<const double2*>(upper) + 2 * step);
      const double2 w = __ldg(reinterpret_cast<const double2*>(upper) + 2 * step + 1);
      each(v.x, m.x, u.x, false);
      each(v.y, m.y, u.y, true);
      each(v.z, n.x, w.x, false);
      each(v.w, n.y, w.y, true);
    }
  } else {
#pragma unroll 4
    for (int64_t step = lane; step < dim; step += LANES) {
      each(__ldg(x + step), __ldg(mean + step), __ldg(upper + step), false);
    }
  }
}

__device__ __forceinline__ void write_moves(uint64_t moves, int64_t slot, uint64_t* __restrict__ out) {
  moves = group_sum<kWarp>(moves);
  if (threadIdx.x % kWarp == 0) out[slot] = moves;
}

__device__ __forceinline__ uint64_t move_of(unsigned from, unsigned to) {
  return from == to ? 0 : 1ull | static_cast<uint64_t>(to) << 32;
}

template <int LANES, bool WIDE>
__device__ __forceinline__ void assign(
    const float* __restrict__ rows, const double* __restrict__ weight,
    const int64_t* __restrict__ indptr, const double* __restrict__ mean,
    const double* __restrict__ upper, const double* __restrict__ norm2,
    const int64_t* __restrict__ above, const int64_t* __restrict__ size,
    const uint8_t* __restrict__ active, int64_t count, int64_t dim, int64_t clusters,
    uint8_t* __restrict__ side, uint64_t* __restrict__ moves) {
  constexpr int kGroups = kWarp / LANES;
  const int group = threadIdx.x % kWarp / LANES;
  for (int64_t run = warp_index(); run * kRun < count; run += warp_count()) {
    segments_of(run, indptr, count, clusters,
                [&](int64_t cluster, int64_t begin, int64_t end, int64_t slot) {
      if (!active[cluster]) return;
      const double over = __ddiv_rn(1.0, static_cast<double>(above[cluster]));
      const double under = __ddiv_rn(1.0, static_cast<double>(size[cluster] - above[cluster]));
      const double middle = __dmul_rn(__dmul_rn(0.5, norm2[cluster]), __dsub_rn(over, under));
      uint64_t moved = 0;
      for (int64_t first = begin; first < end; first += kGroups) {
        const int64_t row = first + group;
        const bool here = row < end;
        const double w = here ? __ldg(weight + row) : 0.0;
        double even = 0.0, odd = 0.0;
        if (here) {
          each_value<LANES, WIDE>(rows + row * dim, mean + cluster * dim, upper + cluster * dim, dim,
                                  [&](float x, double m, double u, bool second) {
                                    double& sum = second ? odd : even;
                                    sum = fma(off_mean(x, w, m), u, sum);
                                  });
        }
        const double along = group_sum<LANES>(__dadd_rn(even, odd));
        if (here && threadIdx.x % LANES == 0) {
          const unsigned from = side[row] >> 1;
          const unsigned to = w != 0.0 && along > middle;
          side[row] = static_cast<uint8_t>(from | to << 1);
          moved += move_of(from, to);
        }
      }
      write_moves(moved, slot, moves);
    });
  }
}

template <int LANES, bool WIDE>
__device__ __forceinline__ void finish(
    const float* __restrict__ rows, const double* __restrict__ weight,
    const int64_t* __restrict__ indptr, const double* __restrict__ mean,
    const double* __restrict__ upper, const double* __restrict__ norm2,
    const int64_t* __restrict__ above, const int64_t* __restrict__ size,
    const uint8_t* __restrict__ active, int64_t count, int64_t dim, int64_t clusters,
    uint8_t* __restrict__ side, double* __restrict__ place, double* __restrict__ apart2) {
  constexpr int kGroups = kWarp / LANES;
  const int group = threadIdx.x % kWarp / LANES;
  for (int64_t run = warp_index(); run * kRun < count; run += warp_count()) {
    segments_of(run, indptr, count, clusters,
                [&](int64_t cluster, int64_t begin, int64_t end, int64_t) {
      const int64_t high = above[cluster], low = size[cluster] - high;
      const double over = high > 0 ? __ddiv_rn(1.0, static_cast<double>(high)) : 0.0;
      const double under = low > 0 ? -__ddiv_rn(1.0, static_cast<double>(low)) : 0.0;
      const double length = sqrt(norm2[cluster]);
      const unsigned shift = active[cluster] ? 1 : 0;
      for (int64_t first = begin; first < end; first += kGroups) {
        const int64_t row = first + group;
        const bool here = row < end;
        const double w = here ? __ldg(weight + row) : 0.0;
        const unsigned own = here ? side[row] >> shift & 1u : 0u;
        const double share = own ? over : under;
        double along = 0.0, apart = 0.0;
        if (here) {
          each_value<LANES, WIDE>(rows + row * dim, mean + cluster * dim, upper + cluster * dim, dim,
                                  [&](float x, double m, double u, bool) {
                                    const double y = off_mean(x, w, m);
                                    const double gap = __dsub_rn(y, __dmul_rn(share, u));
                                    along = fma(y, u, along);
                                    apart = fma(gap, gap, apart);
                                  });
        }
        along = group_sum<LANES>(along);
        apart = group_sum<LANES>(apart);
        __syncwarp();  // lanes of a group have read the side that one of them writes
        if (here && threadIdx.x % LANES == 0) {
          side[row] = static_cast<uint8_t>(own);
          place[row] = w != 0.0 && length > 0.0 ? __ddiv_rn(along, length) : 0.0;
          apart2[row] = w != 0.0 ? apart : 0.0;
        }
      }
    });
  }
}

template <bool WIDE>
__device__ __forceinline__ void move(const float* __restrict__ rows, const double* __restrict__ weight,
                                     const int64_t* __restrict__ indptr,
                                     const double* __restrict__ mean,
                                     const uint8_t* __restrict__ side,
                                     const uint64_t* __restrict__ moves,
                                     const uint8_t* __restrict__ active, int64_t count, int64_t dim,
                                     int64_t clusters, int64_t low, int64_t width,
                                     double* __restrict__ partial) {
  const int lane = threadIdx.x % kWarp;
  const int64_t runs = (count + kRun - 1) / kRun;
  const int64_t slabs = (width + kSlab - 1) / kSlab;
  for (int64_t item = warp_index(); item < runs * slabs; item += warp_count()) {
    const int64_t slab = item % slabs * kSlab;
    const int64_t left = width - slab < kSlab ? width - slab : kSlab;
    segments_of(item / slabs, indptr, count, clusters,
                [&](int64_t cluster, int64_t begin, int64_t end, int64_t slot) {
      if (!active[cluster] || moves[slot] == 0) return;
      double own[4] = {}, sum[4] = {};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (place<WIDE>(lane, j) < left) {
          own[j] = __ldg(mean + cluster * dim + low + slab + place<WIDE>(lane, j));
        }
      }
      for (int64_t row = begin; row < end; row += kAhead) {
        float x[kAhead][4] = {};
        double w[kAhead];
        unsigned bits[kAhead];
#pragma unroll
        for (int a = 0; a < kAhead; ++a) {
          bits[a] = row + a < end ? side[row + a] : 0u;  // 1: down, 2: up, else it stays
          const bool moving = bits[a] == 1u || bits[a] == 2u;
          w[a] = moving ? __ldg(weight + row + a) : 0.0;
          if (moving) load<WIDE>(rows + (row + a) * dim + low + slab, lane, left, x[a]);
        }
#pragma unroll
        for (int a = 0; a < kAhead; ++a) {
          if (bits[a] != 1u && bits[a] != 2u) continue;
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const double y = off_mean(x[a][j], w[a], own[j]);
            sum[j] = bits[a] == 2u ? __dadd_rn(sum[j], y) : __dsub_rn(sum[j], y);
          }
        }
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (place<WIDE>(lane, j) < left) {
          partial[slot * width + slab + place<WIDE>(lane, j)] = sum[j];
        }
      }
    });
  }
}

}  // namespace fabric

extern "C" __global__ void __launch_bounds__(fabric::kBlock)
    two_means_count(const uint8_t* start, const double* weight, const int64_t* indptr, int64_t count,
                    int64_t clusters, uint8_t* side, uint64_t* moves) {
  for (int64_t run = fabric::warp_index(); run * fabric::kRun < count; run += fabric::warp_count()) {
    fabric::segments_of(run, indptr, count, clusters,
                        [&](int64_t, int64_t begin, int64_t end, int64_t slot) {
      uint64_t moved = 0;
      for (int64_t row = begin + threadIdx.x % fabric::kWarp; row < end; row += fabric::kWarp) {
        const unsigned to = start[row] != 0 && weight[row] != 0.0;
        side[row] = static_cast<uint8_t>(to << 1);
        moved += fabric::move_of(0u, to);
      }
      fabric::write_moves(moved, slot, moves);
    });
  }
}

extern "C" __global__ void __launch_bounds__(fabric::kBlock)
    two_means_settle(const uint64_t* moves, const int64_t* indptr, const int64_t* size,
                     int64_t clusters, int64_t* above, uint8_t* active) {
  const int lane = threadIdx.x % fabric::kWarp;
  for (int64_t cluster = fabric::warp_index(); cluster < clusters;
       cluster += fabric::warp_count()) {
    if (!active[cluster]) continue;
    const int64_t begin = indptr[cluster], end = indptr[cluster + 1];
    uint64_t moved = 0, up = 0;
    if (begin < end) {
      for (int64_t run = begin / fabric::kRun + lane; run <= (end - 1) / fabric::kRun;
           run += fabric::kWarp) {
        const uint64_t here = moves[run + cluster];
        moved += here & 0xffffffffull;
        up += here >> 32;
      }
    }
    moved = fabric::group_sum<fabric::kWarp>(moved);
    up = fabric::group_sum<fabric::kWarp>(up);
    const int64_t now = above[cluster] + 2 * static_cast<int64_t>(up) - static_cast<int64_t>(moved);
    const bool done = moved == 0 || now == 0 || now == size[cluster];
    __syncwarp();  // all have read what one of them writes
    if (lane == 0) {
      active[cluster] = !done;
      if (!done) above[cluster] = now;
    }
  }
}

extern "C" __global__ void __launch_bounds__(fabric::kBlock)
    two_means_fold(const double* partial, const uint64_t* moves, const int64_t* indptr,
                   const uint8_t* active, int64_t dim, int64_t clusters, int64_t low, int64_t width,
                   double* upper) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t item = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
       item < clusters * width; item += stride) {
    const int64_t cluster = item / width, place = item % width;
    const int64_t begin = indptr[cluster], end = indptr[cluster + 1];
    if (!active[cluster] || begin == end) continue;
    double sum = upper[cluster * dim + low + place];
#pragma unroll 4
    for (int64_t run = begin / fabric::kRun; run <= (end - 1) / fabric::kRun; ++run) {
      if (__ldg(reinterpret_cast<const unsigned long long*>(moves) + run + cluster) != 0) {
        sum = __dadd_rn(sum, __ldg(partial + (run + cluster) * width + place));
      }
    }
    upper[cluster * dim + low + place] = sum;
  }
}

extern "C" __global__ void __launch_bounds__(fabric::kBlock)
    two_means_norm(const double* upper, const uint8_t* active, int64_t dim, int64_t clusters,
                   double* norm2) {
  const int lane = threadIdx.x % fabric::kWarp;
  for (int64_t cluster = fabric::warp_index(); cluster < clusters;
       cluster += fabric::warp_count()) {
    if (!active[cluster]) continue;
    double sum = 0.0;
#pragma unroll 4
    for (int64_t at = lane; at < dim; at += fabric::kWarp) {
      const double u = __ldg(upper + cluster * dim + at);
      sum = fma(u, u, sum);
    }
    sum = fabric::group_sum<fabric::kWarp>(sum);
    if (lane == 0) norm2[cluster] = sum;
  }
}

#define TWO_MEANS_MOVE(NAME, WIDE)                                                                 \
  extern "C" __global__ void __launch_bounds__(fabric::kBlock)                                     \
      NAME(const float* rows, const double* weight, const int64_t* indptr, const double* mean,     \
           const uint8_t* side, const uint64_t* moves, const uint8_t* active, int64_t count,       \
           int64_t dim, int64_t clusters, int64_t low, int64_t width, double* partial) {           \
    fabric::move<WIDE>(rows, weight, indptr, mean, side, moves, active, count, dim, clusters, low, \
                       width, partial);                                                            \
  }

TWO_MEANS_MOVE(two_means_move_wide, true)
TWO_MEANS_MOVE(two_means_move_any, false)

#define TWO_MEANS(KIND, LANES, WIDE)                                                               \
  extern "C" __global__ void __launch_bounds__(fabric::kBlock, fabric::kBlocks)                    \
      two_means_assign_##KIND##_##LANES(                                                           \
          const float* rows, const double* weight, const int64_t* indptr, const double* mean,      \
          const double* upper, const double* norm2, const int64_t* above, const int64_t* size,     \
          const uint8_t* active, int64_t count, int64_t dim, int64_t clusters, uint8_t* side,      \
          uint64_t* moves) {                                                                       \
    fabric::assign<LANES, WIDE>(rows, weight, indptr, mean, upper, norm2, above, size, active,     \
                                count, dim, clusters, side, moves);                                \
  }                                                                                                \
  extern "C" __global__ void __launch_bounds__(fabric::kBlock, fabric::kBlocks)                    \
      two_means_finish_##KIND##_##LANES(                                                           \
          const float* rows, const double* weight, const int64_t* indptr, const double* mean,      \
          const double* upper, const double* norm2, const int64_t* above, const int64_t* size,     \
          const uint8_t* active, int64_t count, int64_t dim, int64_t clusters, uint8_t* side,      \
          double* place, double* apart2) {                                                         \
    fabric::finish<LANES, WIDE>(rows, weight, indptr, mean, upper, norm2, above, size, active,     \
                                count, dim, clusters, side, place, apart2);                        \
  }

TWO_MEANS(wide, 1, true)
TWO_MEANS(wide, 2, true)
TWO_MEANS(wide, 4, true)
TWO_MEANS(wide, 8, true)
TWO_MEANS(wide, 32, true)
TWO_MEANS(any, 1, false)
TWO_MEANS(any, 2, false)
TWO_MEANS(any, 4, false)
TWO_MEANS(any, 8, false)
TWO_MEANS(any, 32, false)
