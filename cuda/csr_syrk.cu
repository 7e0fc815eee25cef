// csr_syrk: the second moments of every cluster, X'X / n or, where a cluster has fewer rows than dimensions, XX' / n; on which
// side of an axis each row lies.
//
// Contract  rows f32 [., dim]; weight f64 [.], a row of weight 0 is 0 even when it holds NaN; place i64 [.]: rows of the store,
//           cluster after cluster; mean f64 [., dim]. A value is weight x row - mean of its cluster, or weight x row where
//           `centred` is 0. Work list i64 [listed, 5] of matrices: cluster, start (its first place), n, step, at. m = dim and the
//           sum goes over n rows in chunks of `step` (tall), or m = n and it goes over dim (wide, one chunk). out f64: chunk c
//           of a matrix stands at at + c m^2. first i64 [listed + 1] numbers the items: matrix, then chunk, then pair of
//           blocks of SIDE rows of the upper half; items = first[listed]. csr_syrk_fold: values i64 [listed + 1], prefix sum
//           of m^2; adds the chunks up in their order, divides by n and fills both halves of the m x m values at `at`.
//           csr_syrk_sides: bounds i64 [listed + 1], prefix sum of n; vectors i64 [listed]: where the m numbers of a matrix'
//           axis start; side u8 [.] of each row of the store listed: 1 where its value along the axis is above 0 (the axis of a
//           wide matrix has it already). Blocks of 256 threads, any grid in x.
// Twin      fabric_pipelines/analytics/reference/csr_syrk.py, to n eps of the trace.
// Floor     n dim m flop a matrix (upper half): 0.17 s at 10M rows of 768 and 34 TFLOP/s of f64, 0.09 s on matrix units (67).
//
// Numbers   f64 throughout. In f32 an eigenvalue below 1e-7 of the largest is noise, and the coding rate multiplies it by 4 dim;
//           the eigenvalues that follow have 16 times the floor, so f32 or three TF32 products would gain nothing that shows.
// Mapping   a team owns SIDE x SIDE sums in registers (8 x 8 a thread at 128) and takes 8 of what is summed over at a time through
//           shared memory; the next 8 are on their way meanwhile. A warp is a team for m up to 96 (SIDE 32), a block above.
//           `step` depends on n and m alone, so neither grid nor card changes a bit; a cluster of 10^7 rows is many chunks,
//           10^6 clusters of three are one item each. No atomics.
// UNITS     products on f64 matrix units (include/matrix.cuh), 64 x 32 a warp: twice the rate on sm_80, 90 and 100, where they are
//           whole; on request only. Rows of 132 words of 8 bytes put the 4 x 4 values of half a warp on 32 banks.
#include <cstdint>

#include "lanes.cuh"
#include "matrix.cuh"
#include "segments.cuh"

namespace fabric {

constexpr int kDeep = 8;     // of the sum's terms in shared memory at once
constexpr int kFields = 5;   // of a matrix in the work list

template <int TEAM, int SIDE, int DOWN, int ACROSS>
struct Shape {
  static_assert((SIDE / DOWN) * (SIDE / ACROSS) == TEAM, "a thread has DOWN x ACROSS of SIDE x SIDE");
  static constexpr int kTeam = TEAM, kSide = SIDE, kDown = DOWN, kAcross = ACROSS;
  static constexpr int kTeams = kBlock / TEAM;
  static constexpr int kPitch = SIDE + 4;
  static constexpr int kOperand = kDeep * kPitch;
  static constexpr int kHeld = 2 * SIDE * kDeep / TEAM;  // values a thread of both operands
};
using Warp32 = Shape<32, 32, 8, 4>;
using Block128 = Shape<256, 128, 8, 8>;

template <class S>
struct Memory {
  alignas(16) double values[2 * S::kOperand];
};

struct Source {
  const float* rows;
  const double* weight;
  const int64_t* place;
  const double* mean;  // of the cluster
  int64_t dim, m;
  bool centred;
};

// Weight x row - mean as every kernel has it, so that no sum of theirs differs.
__device__ __forceinline__ double value_of(float x, double w, double mean) {
  return w == 0.0 ? 0.0 : __dsub_rn(__dmul_rn(w, static_cast<double>(x)), mean);
}

// Which value number `load` of this thread is: `line` of the two operands' 2 SIDE, `term` of the sum's kDeep. Consecutive threads
// read consecutive dimensions.
template <class S, bool WIDE>
__device__ __forceinline__ void which(int load, int& line, int& term) {
  const int element = threadIdx.x % S::kTeam + load * S::kTeam;
  line = WIDE ? element / kDeep : element % (2 * S::kSide);
  term = WIDE ? element % kDeep : element / (2 * S::kSide);
}

template <class S, bool WIDE>
__device__ __forceinline__ void load(const Source& from, int64_t left, int64_t right, int64_t term_first,
                                     int64_t term_end, float (&x)[S::kHeld], double (&w)[S::kHeld],
                                     double (&mean)[S::kHeld]) {
#pragma unroll
  for (int at = 0; at < S::kHeld; ++at) {
    int line, term;
    which<S, WIDE>(at, line, term);
    const int64_t own = line < S::kSide ? left + line : right + line - S::kSide;
    const int64_t other = term_first + term;
    x[at] = 0.0f, w[at] = 0.0, mean[at] = 0.0;
    if (own >= from.m || other >= term_end) continue;
    const int64_t row = __ldg(reinterpret_cast<const long long*>(from.place) + (WIDE ? own : other));
    const int64_t dimension = WIDE ? other : own;
    x[at] = __ldg(from.rows + row * from.dim + dimension);
    w[at] = __ldg(from.weight + row);
    if (from.centred) mean[at] = __ldg(from.mean + dimension);
  }
}

template <class S, bool WIDE>
__device__ __forceinline__ void store(double* values, const float (&x)[S::kHeld],
                                      const double (&w)[S::kHeld], const double (&mean)[S::kHeld]) {
#pragma unroll
  for (int at = 0; at < S::kHeld; ++at) {
    int line, term;
    which<S, WIDE>(at, line, term);
    values[(line < S::kSide ? 0 : S::kOperand) + term * S::kPitch + line % S::kSide] =
        value_of(x[at], w[at], mean[at]);
  }
}

// N values in groups of four, the groups SIDE / (N / 4) apart.
template <class S, int N>
__device__ __forceinline__ void fragment(const double* values, int place, double (&out)[N]) {
#pragma unroll
  for (int pair = 0; pair < N / 2; ++pair) {
    const double2 two = *reinterpret_cast<const double2*>(
        values + pair / 2 * (4 * S::kSide / N) + 4 * place + pair % 2 * 2);
    out[2 * pair] = two.x, out[2 * pair + 1] = two.y;
  }
}

// A thread's place among the sums of its tile; element (i, j) of `sum` is row and column of the tile.
template <class S, bool UNITS>
struct Own {
  int y, x;

  __device__ __forceinline__ Own() {
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x % S::kTeam / kWarp;
    y = UNITS ? warp / 4 * 64 + lane / 4 : warp / 2 * 4 + lane / 8;
    x = UNITS ? warp % 4 * 32 + lane % 4 * 2 : warp % 2 * 8 + lane % 8;
  }
  __device__ __forceinline__ int row(int i) const {
    return UNITS ? y + 8 * i : i / 4 * (4 * S::kSide / S::kDown) + 4 * y + i % 4;
  }
  __device__ __forceinline__ int column(int j) const {
    return UNITS ? x + j / 2 * 8 + j % 2 : j / 4 * (4 * S::kSide / S::kAcross) + 4 * x + j % 4;
  }
};

template <class S, bool UNITS>
__device__ __forceinline__ void multiply(const double* values, const Own<S, UNITS>& own,
                                         double (&sum)[S::kDown][S::kAcross]) {
  if constexpr (UNITS) {
    static_assert(S::kSide == 128 && S::kTeam == 256, "eight warps of 64 x 32");
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int first = 0; first < kDeep; first += 4) {
      const double* left = values + (first + t) * S::kPitch + own.y;
      const double* right = values + S::kOperand + (first + t) * S::kPitch + own.x - 2 * t +
                            threadIdx.x % kWarp / 4;
      double b[4];
#pragma unroll
      for (int n = 0; n < 4; ++n) b[n] = right[8 * n];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const double a = left[8 * i];
#pragma unroll
        for (int n = 0; n < 4; ++n) multiply_add(sum[i][2 * n], sum[i][2 * n + 1], a, b[n]);
      }
    }
  } else {
#pragma unroll 1
    for (int term = 0; term < kDeep; ++term) {
      double p[S::kDown], q[S::kAcross];
      fragment<S>(values + term * S::kPitch, own.y, p);
      fragment<S>(values + S::kOperand + term * S::kPitch, own.x, q);
#pragma unroll
      for (int i = 0; i < S::kDown; ++i) {
#pragma unroll
        for (int j = 0; j < S::kAcross; ++j) sum[i][j] = fma(p[i], q[j], sum[i][j]);
      }
    }
  }
}

template <class S, bool WIDE, bool UNITS>
__device__ __forceinline__ void products(const float* rows, const double* weight, const int64_t* place,
                                         const double* mean, const int64_t* work, const int64_t* first,
                                         int64_t listed, int64_t items, int64_t dim, int64_t centred,
                                         double* out) {
  __shared__ Memory<S> memory[S::kTeams];
  const int team = threadIdx.x / S::kTeam;
  double* values = memory[team].values;
  const Own<S, UNITS> own;
  for (int64_t item = static_cast<int64_t>(blockIdx.x) * S::kTeams + team; item < items;
       item += static_cast<int64_t>(gridDim.x) * S::kTeams) {
    const int64_t number = owner_of(first, listed, 0, item);
    const int64_t* matrix = work + number * kFields;
    const int64_t n = matrix[2], step = matrix[3];
    const int64_t m = WIDE ? n : dim;
    const Source from{rows, weight, place + matrix[1], mean + matrix[0] * dim, dim, m, centred != 0};
    const int64_t blocks = (m + S::kSide - 1) / S::kSide, pairs = blocks * (blocks + 1) / 2;
    const int64_t chunk = (item - first[number]) / pairs, pair = (item - first[number]) % pairs;
    int64_t right = static_cast<int64_t>((sqrt(8.0 * static_cast<double>(pair) + 1.0) - 1.0) / 2.0);
    while (right * (right + 1) / 2 > pair) --right;
    while ((right + 1) * (right + 2) / 2 <= pair) ++right;
    const int64_t down = (pair - right * (right + 1) / 2) * S::kSide;
    right *= S::kSide;
    int64_t term = WIDE ? 0 : chunk * step;
    const int64_t end = WIDE ? dim : (term + step < n ? term + step : n);

    double sum[S::kDown][S::kAcross];
#pragma unroll
    for (int i = 0; i < S::kDown; ++i) {
#pragma unroll
      for (int j = 0; j < S::kAcross; ++j) sum[i][j] = 0.0;
    }
    float x[S::kHeld];
    double w[S::kHeld], centre[S::kHeld];
    load<S, WIDE>(from, down, right, term, end, x, w, centre);
#pragma unroll 1
    for (; term < end; term += kDeep) {
      store<S, WIDE>(values, x, w, centre);
      team_sync<S>();
      load<S, WIDE>(from, down, right, term + kDeep, end, x, w, centre);
      multiply<S, UNITS>(values, own, sum);
      team_sync<S>();
    }
    double* there = out + matrix[4] + chunk * m * m;
#pragma unroll
    for (int i = 0; i < S::kDown; ++i) {
      const int64_t row = down + own.row(i);
#pragma unroll
      for (int j = 0; j < S::kAcross; ++j) {
        const int64_t column = right + own.column(j);
        if (row < m && column < m) there[row * m + column] = sum[i][j];
      }
    }
  }
}

}  // namespace fabric

#define CSR_SYRK(NAME, SHAPE, WIDE, UNITS, BLOCKS)                                                 \
  extern "C" __global__ void __launch_bounds__(fabric::kBlock, BLOCKS)                             \
      NAME(const float* rows, const double* weight, const int64_t* place, const double* mean,      \
           const int64_t* work, const int64_t* first, int64_t listed, int64_t items, int64_t dim,  \
           int64_t centred, double* out) {                                                         \
    fabric::products<fabric::SHAPE, WIDE, UNITS>(rows, weight, place, mean, work, first, listed,   \
                                                 items, dim, centred, out);                        \
  }

CSR_SYRK(csr_syrk_tall_32, Warp32, false, false, 1)
CSR_SYRK(csr_syrk_tall_128, Block128, false, false, 1)
CSR_SYRK(csr_syrk_wide_32, Warp32, true, false, 1)
CSR_SYRK(csr_syrk_wide_128, Block128, true, false, 1)
CSR_SYRK(csr_syrk_units_tall_128, Block128, false, true, 1)
CSR_SYRK(csr_syrk_units_wide_128, Block128, true, true, 1)

extern "C" __global__ void __launch_bounds__(fabric::kBlock)
    csr_syrk_fold(const int64_t* work, const int64_t* values, int64_t listed, int64_t dim, double* out) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x, items = values[listed];
  for (int64_t item = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; item < items;
       item += stride) {
    const int64_t number = fabric::owner_of(values, listed, 0, item);
    const int64_t* matrix = work + number * fabric::kFields;
    const int64_t n = matrix[2], step = matrix[3], m = n < dim ? n : dim;
    const int64_t chunks = n < dim ? 1 : (n + step - 1) / step;
    const int64_t i = (item - values[number]) / m, j = (item - values[number]) % m;
    if (i > j) continue;
    double* there = out + matrix[4];
    double sum = there[i * m + j];
    for (int64_t chunk = 1; chunk < chunks; ++chunk) {
      sum = __dadd_rn(sum, there[chunk * m * m + i * m + j]);
    }
    sum = __ddiv_rn(sum, static_cast<double>(n));
    there[i * m + j] = sum;
    there[j * m + i] = sum;
  }
}

extern "C" __global__ void __launch_bounds__(fabric::kBlock)
    csr_syrk_sides(const float* rows, const double* weight, const int64_t* place, const double* mean,
                   const int64_t* work, const int64_t* bounds, const int64_t* vectors,
                   const double* axis, int64_t listed, int64_t dim, uint8_t* side) {
  const int lane = threadIdx.x % fabric::kWarp;
  const int64_t items = bounds[listed];
  for (int64_t item = fabric::warp_index(); item < items; item += fabric::warp_count()) {
    const int64_t number = fabric::owner_of(bounds, listed, 0, item);
    const int64_t* matrix = work + number * fabric::kFields;
    const int64_t within = item - bounds[number];
    const int64_t row = place[matrix[1] + within];
    const double* own = axis + vectors[number];
    double along = 0.0;
    if (matrix[2] < dim) {
      along = own[within];
    } else {
      const double w = weight[row];
#pragma unroll 4
      for (int64_t t = lane; t < dim; t += fabric::kWarp) {
        const double value = fabric::value_of(__ldg(rows + row * dim + t), w,
                                              __ldg(mean + matrix[0] * dim + t));
        along = fma(value, __ldg(own + t), along);
      }
      along = fabric::group_sum<fabric::kWarp>(along);
    }
    if (lane == 0) side[row] = along > 0.0;
  }
}
