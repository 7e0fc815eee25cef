// gauss_tile: Gaussian weights of all pairs inside each cluster, summed per row relative to its nearest other row.
//
// Contract  rows, norm2, indptr, cluster, first, copy, items: as pair_tile. heat f64 [clusters], T > 0 of every listed
//           cluster; E = d^2 / 2.
//           Per row, over the others of its cluster, with least f32 the least d^2 of them: weight f64 = sum of w =
//           exp(-(d^2 - least) / 2T), first f64 = sum of w (d^2 - least), second f64 = sum of w (d^2 - least)^2.
//           So ln rho = ln weight - least / 2T, ln Z = log-sum-exp of ln rho over rows - ln(n (n - 1)), and the
//           sums of w E and w E^2 follow by moments. A row without others: least +Inf, sums 0. Blocks of 256 threads, any grid in x.
// Twin      fabric_pipelines/analytics/reference/gauss_tile.py, gauss_rows: 1e-5, where d^2 is exact to 1e-6 T.
// Floor     as pair_tile; 1 exp2 a pair besides, 4.2e12 a second on 132 multiprocessors: below the product from dim 32 on.
//
// Why this mapping: include/tiles.cuh. Online log-sum-exp: a nearer row than all before rescales what is summed; moments about
// the old minimum become moments about the new one by the binomial formula, in f64 by one lane, ln n times a row. Exponents
// are relative to the row's own minimum, so an outlier keeps its density where a plain sum is 0, and the variance of E keeps
// the digits that moments about 0 would lose. fp32 over 64 columns, then f64.
#include "segments.cuh"
#include "tiles.cuh"

namespace fabric {

constexpr unsigned kInfinity = 0x7f800000u;

struct GaussRow {
  double weight, first, second;
  unsigned least;  // bits of d^2
};

template <class S>
struct GaussFold {
  GaussRow* state;
  const Job* job;
  const int64_t* copy;
  float rate;  // log2(e) / 2T

  __device__ __forceinline__ bool meets(int, uint32_t row, uint32_t column) const {
    return row != column;
  }
  __device__ __forceinline__ bool copies(uint32_t row, uint32_t column) const {
    const int64_t* own = copy + job->row_start;
    return __ldg(own + row) == __ldg(own + column);
  }

  __device__ __forceinline__ void take(int slot, uint32_t, uint32_t, const float (&d2)[S::kEach],
                                       const bool (&kept)[S::kEach]) {
    const int lane = threadIdx.x % kWarp;
    GaussRow& own = state[slot];
    const unsigned before = own.least;
    unsigned least = before;
#pragma unroll
    for (int v = 0; v < S::kEach; ++v) {
      const unsigned bits = __float_as_uint(d2[v]);
      if (kept[v] && bits < least) least = bits;
    }
    least = __reduce_min_sync(kFull, least);
    if (least == kInfinity) return;  // not a column yet
    float weight = 0.0f, first = 0.0f, second = 0.0f;
#pragma unroll
    for (int v = 0; v < S::kEach; ++v) {
      const float excess = d2[v] - __uint_as_float(least);
      const float w = kept[v] ? exp2f(-rate * excess) : 0.0f;
      const float energy = kept[v] ? w * excess : 0.0f;
      weight += w, first += energy, second = kept[v] ? fmaf(energy, excess, second) : second;
    }
    const float both = two_sums(weight, first);
    const float firsts = __shfl_sync(kFull, both, kWarp / 2);
#pragma unroll
    for (int offset = kWarp / 2; offset > 0; offset /= 2) {
      second += __shfl_xor_sync(kFull, second, offset);
    }
    if (lane != 0) return;
    if (least != before && before != kInfinity) {
      const float step = __uint_as_float(before) - __uint_as_float(least);
      const double gap = step, scale = exp2f(-rate * step);
      own.second = scale * (own.second + gap * (2.0 * own.first + gap * own.weight));
      own.first = scale * (own.first + gap * own.weight);
      own.weight *= scale;
    }
    own.weight += static_cast<double>(both);
    own.first += static_cast<double>(firsts);
    own.second += static_cast<double>(second);
    own.least = least;
  }
};

template <class S, bool DIRECT>
__device__ __forceinline__ void gauss(const float* rows, const float* norm2, const int64_t* indptr,
                                      const int64_t* cluster, const int64_t* first,
                                      const int64_t* copy, const double* heat, int64_t listed,
                                      int64_t items, int pitch, float* least, double* weight,
                                      double* first_moment, double* second_moment) {
  __shared__ TileMemory<S> memory[S::kTeams];
  __shared__ GaussRow state[S::kTeams * S::kSide];
  __shared__ float rate[S::kTeams];
  const int team = threadIdx.x / S::kTeam, thread = team_thread<S>();
  Job& job = memory[team].job;
  for (int64_t item = static_cast<int64_t>(blockIdx.x) * S::kTeams + team; item < items;) {
    if (thread == 0) {
      job.item = item;
      const int64_t number = owner_of(first, listed, 0, item);
      const int64_t start = indptr[cluster[number]];
      job.row_start = job.column_start = start;
      job.rows = job.columns = static_cast<uint32_t>(indptr[cluster[number] + 1] - start);
      job.row_first = static_cast<uint32_t>(item - first[number]) * S::kSide;
      rate[team] = static_cast<float>(0.72134752044448170 / heat[cluster[number]]);  // log2(e) / 2
    }
    GaussRow* own_state = state + team * S::kSide;
    if (thread < S::kSide) own_state[thread] = {0.0, 0.0, 0.0, kInfinity};
    team_sync<S>();
    GaussFold<S> fold{own_state, &job, copy, rate[team]};
    const Operand own{rows, norm2};
    sweep<S, DIRECT>(own, own, pitch, memory[team], fold);
    const uint32_t row = job.row_first + thread;
    if (thread < S::kSide && row < job.rows) {
      const GaussRow& done = own_state[thread];
      const int64_t place = job.row_start + row;
      least[place] = __uint_as_float(done.least);
      weight[place] = done.weight;
      first_moment[place] = done.first;
      second_moment[place] = done.second;
    }
    item = job.item + static_cast<int64_t>(gridDim.x) * S::kTeams;
    team_sync<S>();  // the job is over for all before the next is written
  }
}

}  // namespace fabric

#define GAUSS_TILE(NAME, SHAPE, DIRECT, BLOCKS)                                                    \
  extern "C" __global__ void __launch_bounds__(fabric::kBlock, BLOCKS)                             \
      NAME(const float* rows, const float* norm2, const int64_t* indptr, const int64_t* cluster,   \
           const int64_t* first, const int64_t* copy, const double* heat, int64_t listed,          \
           int64_t items, int64_t pitch, float* least, double* weight, double* first_moment,       \
           double* second_moment) {                                                                \
    fabric::gauss<fabric::SHAPE, DIRECT>(rows, norm2, indptr, cluster, first, copy, heat, listed,  \
                                         items, static_cast<int>(pitch), least, weight,            \
                                         first_moment, second_moment);                             \
  }

GAUSS_TILE(gauss_tile_32, Warp32, false, 2)
GAUSS_TILE(gauss_tile_64, Block64, false, 3)
GAUSS_TILE(gauss_tile_128, Block128, false, 2)
GAUSS_TILE(gauss_tile_direct_32, Warp32, true, 2)
GAUSS_TILE(gauss_tile_direct_64, Block64, true, 3)
GAUSS_TILE(gauss_tile_direct_128, Block128, true, 2)
