// spectrum: all eigenvalues of many symmetric matrices without negative ones, what the table makes of them, and the eigenvector of
// the greatest.
//
// Contract  matrix f64: matrix c is [m, m], both halves, at at[c]; overwritten. side i64 [listed] = m; vector i64 [listed]: where
//           the m numbers of a matrix start in value, axis and, times 19, in scratch f64. which i64 [listed]: the matrices of
//           this launch by number. value f64: eigenvalues, rising, what rounding leaves below 0 is 0. axis f64, where
//           `axes` is not 0: what inverse iteration makes of start f64 [greatest m], of length 1. real f64 [., 6]: trace, sum of
//           eigenvalues, greatest, entropy of their shares (NaN without any), sum of squares, sum of ln(1 + growth x eigenvalue).
//           status i32 [.]: 0, or the sum of 1: something is not finite; 2: the sum of the eigenvalues is not the trace; 4: the
//           axis is none. Blocks of 256 threads, any grid in x; spectrum_32 has a warp a matrix, spectrum_256 a
//           block; bits are of one or the other.
// Twin      fabric_pipelines/analytics/reference/spectrum.py, moments: eigenvalues to m eps of the greatest.
// Floor     4/3 m^3 flop and 8/3 m^3 bytes a matrix, the trailing square once a column: 2.8 s at 10,000 matrices of 768 and 4.3
//           TB/s. The slow one of the families.
//
// Method    Householder to tridiagonal by panels of 16 columns (LAPACK's dsytrd): inside a panel the square is only read, and
//           what it lacks is added to each product from the panel's vectors; then it is brought up to date at once: half
//           the bytes of an update a column. Eigenvalues by bisection on Sturm counts, one a thread: 53 halvings at most leave
//           2^-52 of the greatest, so it ends whatever the numbers are, and each is where the count says. The axis by inverse
//           iteration on the tridiagonal matrix and the reflectors again, which stay in the rows that they emptied.
// Not taken Jacobi in shared memory up to m = 96: by count 12 times the flops and four times the barriers of this at 96, and no
//           axis without as much memory again. A library's batched solver: its bits are not ours to promise, and it makes no axis alone.
// Mapping   a team a matrix, all in global memory: 32 KiB of 64 x 64, where a warp is the team, and 128 KiB of 128 x 128 fit the
//           first cache of some cards. Fewer matrices than multiprocessors leave some idle: a handful of large ones are slow. Sums in a fixed tree: the bits depend on neither grid nor run. No atomics.
#include <cstdint>

#include "lanes.cuh"

namespace fabric {

constexpr int kPanel = 16;            // reflectors whose updates wait
constexpr int kScratch = kPanel + 3;  // numbers a row of a matrix: panel, diagonal, beside it, factor of its reflector
constexpr int kReal = 6;
constexpr int kHalvings = 64;
constexpr int kRounds = 3;            // of inverse iteration
constexpr double kRounding = 1.0 / 4503599627370496.0;  // 2^-52
constexpr double kLeast = 2.2250738585072014e-308;
constexpr double kNudge = 1e-10;     // of the greatest eigenvalue: the shift, far above its rounding
constexpr double kResidual = 1e-7;   // of the greatest: what an axis may miss
constexpr double kAgreement = 1e-10;  // of the trace: what its eigenvalues may miss

template <int TEAM>
struct Team {
  static constexpr int kTeams = kBlock / TEAM, kWarps = TEAM / kWarp;
  double dots[2 * kPanel];
  double part[TEAM / kWarp];

  static __device__ __forceinline__ int thread() { return threadIdx.x % TEAM; }

  static __device__ __forceinline__ void sync() {
    if constexpr (TEAM == kWarp) {
      __syncwarp();
    } else {
      __syncthreads();
    }
  }

  // Over the team by FOLD, in a fixed tree; all have got there, and what they wrote is seen.
  template <class Fold>
  __device__ __forceinline__ double fold(double value, Fold with) {
#pragma unroll
    for (int offset = kWarp / 2; offset > 0; offset /= 2) value = with(value, shuffle_xor(value, offset));
    if constexpr (TEAM > kWarp) {
      if (threadIdx.x % kWarp == 0) part[thread() / kWarp] = value;
      __syncthreads();
      value = part[0];
#pragma unroll
      for (int warp = 1; warp < kWarps; ++warp) value = with(value, part[warp]);
    }
    sync();
    return value;
  }
  __device__ __forceinline__ double sum(double value) {
    return fold(value, [](double a, double b) { return __dadd_rn(a, b); });
  }
  __device__ __forceinline__ double greatest(double value) {
    return fold(value, [](double a, double b) { return a > b ? a : b; });
  }
};

struct Matrix {
  double* a;  // [m, m]
  int64_t m;
  double *panel, *diagonal, *beside, *factor;

  __device__ __forceinline__ double* row(int64_t k) const { return a + k * m; }
  __device__ __forceinline__ double* second(int l) const { return panel + l * m; }  // w of reflector l of a panel
};

// Column k with the updates that wait; its sum of squares from k + 2 on.
template <int TEAM>
__device__ __forceinline__ double bring_up(const Matrix& of, int64_t k, int waiting) {
  double* own = of.row(k);
  double tail = 0.0;
  for (int64_t i = k + Team<TEAM>::thread(); i < of.m; i += TEAM) {
    double value = own[i];
#pragma unroll 1
    for (int l = 0; l < waiting; ++l) {
      const double *v = of.row(k - waiting + l), *w = of.second(l);
      value = fma(-v[k], w[i], value);
      value = fma(-w[k], v[i], value);
    }
    own[i] = value;
    if (i == k) of.diagonal[k] = value;
    if (i >= k + 2) tail = fma(value, value, tail);
  }
  return tail;
}

// The reflector that clears column k beyond k + 1, in row k with its 1 written out.
template <int TEAM>
__device__ __forceinline__ double reflector(const Matrix& of, int64_t k, double tail) {
  double* own = of.row(k);
  const double alpha = own[k + 1];
  double beta = alpha, factor = 0.0, scale = 0.0;
  if (tail != 0.0) {
    beta = sqrt(fma(alpha, alpha, tail));
    if (alpha >= 0.0) beta = -beta;
    factor = __ddiv_rn(__dsub_rn(beta, alpha), beta);
    scale = __ddiv_rn(1.0, __dsub_rn(alpha, beta));
  }
  Team<TEAM>::sync();  // all have read what one of them writes
  for (int64_t i = k + 1 + Team<TEAM>::thread(); i < of.m; i += TEAM) {
    own[i] = i == k + 1 ? 1.0 : __dmul_rn(own[i], scale);
  }
  if (Team<TEAM>::thread() == 0) of.beside[k] = beta, of.factor[k] = factor;
  return factor;
}

__device__ __forceinline__ double dot(const double* a, const double* b, int64_t low, int64_t high) {
  double sum = 0.0;
#pragma unroll 4
  for (int64_t c = low + threadIdx.x % kWarp; c < high; c += kWarp) sum = fma(a[c], b[c], sum);
  return group_sum<kWarp>(sum);
}

// Column i of the square times v, by one thread: neighbours read neighbouring columns, and no lane waits for another. A warp a
// row took five shuffles a row, which below m = 128 is more than the sum itself.
__device__ __forceinline__ double column_times(const Matrix& of, int64_t k, int64_t i) {
  const double* v = of.row(k);
  double sum[4] = {0.0, 0.0, 0.0, 0.0};
  int64_t c = k + 1;
#pragma unroll 2
  for (; c + 4 <= of.m; c += 4) {
#pragma unroll
    for (int at = 0; at < 4; ++at) sum[at] = fma(of.row(c + at)[i], v[c + at], sum[at]);
  }
#pragma unroll 1
  for (; c < of.m; ++c) sum[0] = fma(of.row(c)[i], v[c], sum[0]);
  return __dadd_rn(__dadd_rn(sum[0], sum[1]), __dadd_rn(sum[2], sum[3]));
}

// w of reflector number `waiting` of the panel: the square, as it stands without it, times v.
template <int TEAM>
__device__ __forceinline__ void second_vector(const Matrix& of, int64_t k, int waiting, double factor,
                                              Team<TEAM>& team) {
  const double* v = of.row(k);
  double* w = of.second(waiting);
  for (int64_t i = k + 1 + Team<TEAM>::thread(); i < of.m; i += TEAM) w[i] = column_times(of, k, i);
  constexpr int kLanes = TEAM == kWarp ? 1 : kWarp;  // that share a product with an earlier vector
  for (int item = Team<TEAM>::thread() / kLanes; item < 2 * waiting; item += TEAM / kLanes) {
    const double* left = item % 2 ? of.second(item / 2) : of.row(k - waiting + item / 2);
    double along = 0.0;
#pragma unroll 4
    for (int64_t c = k + 1 + threadIdx.x % kLanes; c < of.m; c += kLanes) along = fma(left[c], v[c], along);
    along = group_sum<kLanes>(along);
    if (threadIdx.x % kLanes == 0) team.dots[item] = along;
  }
  Team<TEAM>::sync();
  double part = 0.0;
  for (int64_t i = k + 1 + Team<TEAM>::thread(); i < of.m; i += TEAM) {
    double value = w[i];
#pragma unroll 1
    for (int l = 0; l < waiting; ++l) {
      value = fma(-of.row(k - waiting + l)[i], team.dots[2 * l + 1], value);
      value = fma(-of.second(l)[i], team.dots[2 * l], value);
    }
    value = __dmul_rn(value, factor);
    w[i] = value;
    part = fma(value, v[i], part);
  }
  const double shift = __dmul_rn(__dmul_rn(-0.5, factor), team.sum(part));
  for (int64_t i = k + 1 + Team<TEAM>::thread(); i < of.m; i += TEAM) w[i] = fma(shift, v[i], w[i]);
  Team<TEAM>::sync();
}

// The square from `first` on, less what a whole panel before it takes away.
template <int TEAM>
__device__ __forceinline__ void update(const Matrix& of, int64_t first) {
  const int lane = threadIdx.x % kWarp;
  for (int64_t i = first + Team<TEAM>::thread() / kWarp; i < of.m; i += Team<TEAM>::kWarps) {
    double v[kPanel], w[kPanel];
#pragma unroll
    for (int l = 0; l < kPanel; ++l) v[l] = of.row(first - kPanel + l)[i], w[l] = of.second(l)[i];
#pragma unroll 1
    for (int64_t c = first + lane; c < of.m; c += kWarp) {
      double value = of.row(i)[c];
#pragma unroll
      for (int l = 0; l < kPanel; ++l) {
        value = fma(-v[l], of.second(l)[c], value);
        value = fma(-w[l], of.row(first - kPanel + l)[c], value);
      }
      of.row(i)[c] = value;
    }
  }
  Team<TEAM>::sync();
}

template <int TEAM>
__device__ __forceinline__ void tridiagonal(const Matrix& of, Team<TEAM>& team) {
  for (int64_t first = 0; first < of.m; first += kPanel) {
    for (int waiting = 0; waiting < kPanel && first + waiting < of.m; ++waiting) {
      const int64_t k = first + waiting;
      const double tail = team.sum(bring_up<TEAM>(of, k, waiting));
      if (k + 1 == of.m) return;
      const double factor = reflector<TEAM>(of, k, tail);
      Team<TEAM>::sync();
      second_vector<TEAM>(of, k, waiting, factor, team);
    }
    update<TEAM>(of, first + kPanel);
  }
}

// How many eigenvalues lie below x: the negative pivots of T - x (Sturm).
__device__ __forceinline__ int64_t below(const Matrix& of, double x, double pivot) {
  double q = 1.0, beside2 = 0.0;
  int64_t count = 0;
  for (int64_t i = 0; i < of.m; ++i) {
    q = __dsub_rn(__dsub_rn(of.diagonal[i], x), __ddiv_rn(beside2, q));
    if (fabs(q) <= pivot) q = -pivot;
    count += q < 0.0;
    beside2 = i + 1 < of.m ? __dmul_rn(of.beside[i], of.beside[i]) : 0.0;
  }
  return count;
}

template <int TEAM>
__device__ __forceinline__ void bisect(const Matrix& of, double* value, Team<TEAM>& team) {
  double low = -INFINITY, high = -INFINITY, beside2 = 0.0;  // low: negated, so that both are greatest
  for (int64_t i = Team<TEAM>::thread(); i < of.m; i += TEAM) {
    const double before = i > 0 ? fabs(of.beside[i - 1]) : 0.0;
    const double after = i + 1 < of.m ? fabs(of.beside[i]) : 0.0;
    const double reach = __dadd_rn(before, after);
    low = fmax(low, __dsub_rn(reach, of.diagonal[i]));
    high = fmax(high, __dadd_rn(of.diagonal[i], reach));
    beside2 = fmax(beside2, __dmul_rn(after, after));
  }
  low = -team.greatest(low), high = team.greatest(high);
  const double pivot = kLeast * fmax(1.0, team.greatest(beside2));
  const double close = kRounding * fmax(fabs(low), fabs(high));
  for (int64_t i = Team<TEAM>::thread(); i < of.m; i += TEAM) {
    double under = low, over = high;
    for (int step = 0; step < kHalvings && over - under > close; ++step) {
      const double middle = __dmul_rn(0.5, __dadd_rn(under, over));
      if (below(of, middle, pivot) > i) {
        over = middle;
      } else {
        under = middle;
      }
    }
    const double found = __dmul_rn(0.5, __dadd_rn(under, over));
    value[i] = found > 0.0 ? found : 0.0;
  }
  team.sync();
}

// By one warp: z less what reflector k has of it. Lane l keeps the numbers l, l + 32, ... of z, so nobody waits.
__device__ __forceinline__ void reflect(const Matrix& of, int64_t k, double* z) {
  const double* v = of.row(k);
  const int64_t first = (k + 1) / kWarp * kWarp + threadIdx.x % kWarp;
  double along = 0.0;
  for (int64_t i = first; i < of.m; i += kWarp) {
    if (i > k) along = fma(v[i], z[i], along);
  }
  const double share = __dmul_rn(of.factor[k], group_sum<kWarp>(along));
  for (int64_t i = first; i < of.m; i += kWarp) {
    if (i > k) z[i] = fma(-share, v[i], z[i]);
  }
}

// One lane: (sigma - T) z = z, whose pivots are above 0.
__device__ __forceinline__ void solve(const Matrix& of, double sigma, double* pivots, double* z) {
  double before = 0.0, pivot = 1.0;
  for (int64_t i = 0; i < of.m; ++i) {
    const double off = i > 0 ? of.beside[i - 1] : 0.0;
    const double share = __ddiv_rn(off, pivot);
    pivot = fma(-share, off, __dsub_rn(sigma, of.diagonal[i]));
    if (!(pivot > kRounding * sigma)) pivot = kRounding * sigma;
    before = fma(share, before, z[i]);
    pivots[i] = pivot, z[i] = before;
  }
  double after = 0.0;
  for (int64_t i = of.m - 1; i >= 0; --i) {
    const double off = i + 1 < of.m ? of.beside[i] : 0.0;
    after = __ddiv_rn(fma(off, after, z[i]), pivots[i]);
    z[i] = after;
  }
}

__device__ __forceinline__ void to_length_one(const Matrix& of, double* z) {
  const double length2 = dot(z, z, 0, of.m);
  const double scale = length2 > 0.0 ? __ddiv_rn(1.0, sqrt(length2)) : 0.0;
  for (int64_t i = threadIdx.x % kWarp; i < of.m; i += kWarp) z[i] = __dmul_rn(z[i], scale);
  __syncwarp();
}

// By one warp; returns whether it is an eigenvector of `greatest`.
__device__ __forceinline__ bool find_axis(const Matrix& of, double greatest, const double* start, double* z) {
  const int lane = threadIdx.x % kWarp;
  const double size = greatest > 0.0 ? greatest : 1.0, sigma = fma(size, kNudge, size);
  for (int64_t i = lane; i < of.m; i += kWarp) z[i] = start[i];
  for (int64_t k = 0; k + 1 < of.m; ++k) reflect(of, k, z);
  for (int round = 0; round < kRounds; ++round) {
    __syncwarp();
    if (lane == 0) solve(of, sigma, of.panel, z);
    __syncwarp();
    to_length_one(of, z);
  }
  double missed2 = 0.0;
  for (int64_t i = lane; i < of.m; i += kWarp) {
    double missed = __dmul_rn(__dsub_rn(of.diagonal[i], greatest), z[i]);
    if (i > 0) missed = fma(of.beside[i - 1], z[i - 1], missed);
    if (i + 1 < of.m) missed = fma(of.beside[i], z[i + 1], missed);
    missed2 = fma(missed, missed, missed2);
  }
  missed2 = group_sum<kWarp>(missed2);
  __syncwarp();
  for (int64_t k = of.m - 2; k >= 0; --k) reflect(of, k, z);
  return sqrt(missed2) <= kResidual * size;
}

// By one warp: what the table asks of the eigenvalues.
__device__ __forceinline__ void summarise(const double* value, int64_t m, double growth, double* real) {
  const int lane = threadIdx.x % kWarp;
  double total = 0.0, squares = 0.0, logs = 0.0, entropy = 0.0;
  for (int64_t i = lane; i < m; i += kWarp) {
    total = __dadd_rn(total, value[i]);
    squares = fma(value[i], value[i], squares);
    logs = __dadd_rn(logs, log1p(__dmul_rn(growth, value[i])));
  }
  total = group_sum<kWarp>(total), squares = group_sum<kWarp>(squares), logs = group_sum<kWarp>(logs);
  for (int64_t i = lane; i < m; i += kWarp) {
    const double share = __ddiv_rn(value[i], total);
    if (share > 0.0) entropy = fma(-share, log(share), entropy);
  }
  entropy = group_sum<kWarp>(entropy);
  if (lane == 0) {
    real[1] = total, real[2] = value[m - 1], real[3] = total > 0.0 ? entropy : NAN;
    real[4] = squares, real[5] = logs;
  }
}

template <int TEAM>
__device__ __forceinline__ void all(double* matrix, const int64_t* at, const int64_t* side,
                                    const int64_t* vector, const int64_t* which, int64_t count,
                                    double growth, int64_t axes, const double* start, double* scratch,
                                    double* value, double* axis, double* real, int* status) {
  __shared__ Team<TEAM> teams[Team<TEAM>::kTeams];
  Team<TEAM>& team = teams[threadIdx.x / TEAM];
  const int64_t stride = static_cast<int64_t>(gridDim.x) * Team<TEAM>::kTeams;
  for (int64_t item = static_cast<int64_t>(blockIdx.x) * Team<TEAM>::kTeams + threadIdx.x / TEAM;
       item < count; item += stride) {
    const int64_t number = which[item], m = side[number], first = vector[number];
    double* own = scratch + first * kScratch;
    const Matrix of{matrix + at[number], m, own, own + kPanel * m, own + (kPanel + 1) * m,
                    own + (kPanel + 2) * m};
    double trace = 0.0;
    for (int64_t i = Team<TEAM>::thread(); i < m; i += TEAM) trace = __dadd_rn(trace, of.row(i)[i]);
    trace = team.sum(trace);
    tridiagonal<TEAM>(of, team);
    bisect<TEAM>(of, value + first, team);
    if (Team<TEAM>::thread() < kWarp) {
      double* found = real + number * kReal;
      summarise(value + first, m, growth, found);
      const bool straight = axes == 0 || find_axis(of, value[first + m - 1], start, axis + first);
      if (threadIdx.x % kWarp == 0) {
        found[0] = trace;
        status[number] = !isfinite(trace) + 2 * !(fabs(found[1] - trace) <= kAgreement * trace) +
                         4 * !straight;
      }
    }
    team.sync();  // the team's memory is free for the next
  }
}

}  // namespace fabric

#define SPECTRUM(TEAM)                                                                             \
  extern "C" __global__ void __launch_bounds__(fabric::kBlock, 2)                                  \
      spectrum_##TEAM(double* matrix, const int64_t* at, const int64_t* side,                      \
                      const int64_t* vector, const int64_t* which, int64_t count, double growth,   \
                      int64_t axes, const double* start, double* scratch, double* value,           \
                      double* axis, double* real, int* status) {                                   \
    fabric::all<TEAM>(matrix, at, side, vector, which, count, growth, axes, start, scratch, value, \
                      axis, real, status);                                                         \
  }

SPECTRUM(32)
SPECTRUM(256)
