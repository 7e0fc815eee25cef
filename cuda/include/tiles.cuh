// Squared distances of a block of rows to all columns in turn: the one body of pair_tile, gauss_tile and centre_tile.
//
// Row-owner: a team of threads owns SIDE rows and sweeps the columns SIDE at a time, so what is folded per row (sums, lists,
// minima) has one owner: no atomics, O(rows) memory, and bits that depend on neither grid nor run. It costs twice the flops
// of the upper triangle, which neighbour lists would need anyway.
//
// Operands  f32 [., pitch], pitch % 4 == 0, 16-byte aligned, columns past the dimension 0; their squared lengths f32,
//           finite.
// Product   outer products in registers (8 x 8 a thread at SIDE 128), operands double-buffered in shared memory k-major. The
//           row of 4 x (odd) words puts the 16 rows x 2 quads that a warp stores on 32 banks; a warp is 4 x 8 threads, so a
//           fragment is one wavefront: 4 wavefronts for 64 fused multiply-adds.
// DIRECT    sums (a - b)^2 instead: twice the instructions, and no digit lost. For dimensions up to 32, where near pairs are
//           common and the epilogue costs more than the product.
// SPLIT     SIDE 128 only: products on matrix units (include/matrix.cuh), 64 x 32 a warp. Dimension 2 t takes the place of t and
//           2 t + 1 that of t + 4, for both operands: so a fragment lies on 32 banks in rows of 132 words.
// Expansion n_i + n_j - 2 a.b else. Where that is below 1e-4 (n_i + n_j) it has lost digits: the pair is marked, and the
//           warp that reads the row sums (a - b)^2 with all lanes. Error of d^2 elsewhere: sqrt(dim) x 2^-24 x (n_i + n_j).
// Same      d^2 <= 2^-46 (n_i + n_j) is 0: closer than the rounding of the operands.
// Epilogue  through shared memory, then a warp a row with consecutive columns in consecutive lanes. 64 stores and loads a
//           thread and tile against 64 x dim multiply-adds: 3 % at dim 64, nothing at 768.
// Teams     a warp for SIDE 32 (8 teams a block, each its own rows; only __syncwarp), a block for SIDE 64 and 128.
#pragma once
#include <cstdint>

#include "lanes.cuh"
#include "matrix.cuh"

namespace fabric {

constexpr int kSlab = 8;  // dimensions in shared memory at once: 32 bytes of a row are one whole sector
constexpr float kNear = 1e-4f;
constexpr float kSame = 1.0f / 70368744177664.0f;  // 2^-46
constexpr float kMarked = -1.0f;

template <int TEAM, int SIDE, int DOWN, int ACROSS>
struct Shape {
  static_assert((SIDE / DOWN) * (SIDE / ACROSS) == TEAM, "a thread has DOWN x ACROSS of SIDE x SIDE");
  static constexpr int kTeam = TEAM, kSide = SIDE, kDown = DOWN, kAcross = ACROSS;
  static constexpr int kTeams = kBlock / TEAM, kWarps = TEAM / kWarp;
  static constexpr int kPitch = SIDE + 4;               // of a dimension's SIDE values in shared memory
  static constexpr int kOperand = kSlab * kPitch;
  static constexpr int kStage = 4 * SIDE / ACROSS;      // columns staged at once
  static constexpr int kStagePitch = kStage + 4;
  static constexpr int kHeld = 4 * SIDE / TEAM;         // 16-byte loads a thread of one slab of both operands
  static constexpr int kEach = kStage / kWarp;          // columns a lane
  static constexpr int kValues =
      4 * kOperand > SIDE * kStagePitch ? 4 * kOperand : SIDE * kStagePitch;
};
using Warp32 = Shape<32, 32, 8, 4>;
using Block64 = Shape<256, 64, 4, 4>;
using Block128 = Shape<256, 128, 8, 8>;

// What a team works at. In shared memory and read again at every use: the product needs the registers.
struct Job {
  int64_t item;                     // of the work list
  int64_t row_start, column_start;  // of both sets in their arrays
  uint32_t rows, columns;           // of the sets; numbers in a set fit 32 bits
  uint32_t row_first;               // the team's block starts here
};

template <class S>
struct TileMemory {
  alignas(16) float values[S::kValues];  // two buffers of both operands, then the staged distances
  float row_norm2[S::kSide], column_norm2[S::kSide];
  Job job;
};

template <class S>
__device__ __forceinline__ int team_thread() {
  return threadIdx.x % S::kTeam;
}

struct Operand {
  const float* rows;  // [., pitch]
  const float* norm2;
};

// Element e of a slab is quad e % 2 of row e / 2 of operand e / (2 SIDE). Rows past the end have no source.
template <class S>
__device__ __forceinline__ void find_sources(const Operand& a, const Operand& b, const Job& job,
                                             uint32_t column_first, int pitch,
                                             const float* (&source)[S::kHeld]) {
#pragma unroll
  for (int load = 0; load < S::kHeld; ++load) {
    const int element = team_thread<S>() + load * S::kTeam;
    const bool left = element < 2 * S::kSide;
    const uint32_t row = (left ? job.row_first : column_first) + element % (2 * S::kSide) / 2;
    const bool inside = row < (left ? job.rows : job.columns);
    const float* base = left ? a.rows : b.rows;
    const int64_t place = (left ? job.row_start : job.column_start) + row;
    source[load] = inside ? base + place * pitch + element % 2 * 4 : nullptr;
  }
}

template <class S>
__device__ __forceinline__ void load_slab(const float* (&source)[S::kHeld], int k, int pitch,
                                          float4 (&held)[S::kHeld]) {
  const bool exists = k + threadIdx.x % 2 * 4 < static_cast<unsigned>(pitch);
#pragma unroll
  for (int load = 0; load < S::kHeld; ++load) {
    held[load] = source[load] && exists
                     ? __ldg(reinterpret_cast<const float4*>(source[load] + k))
                     : make_float4(0, 0, 0, 0);
  }
}

template <class S>
__device__ __forceinline__ void store_slab(float* values, const float4 (&held)[S::kHeld]) {
#pragma unroll
  for (int load = 0; load < S::kHeld; ++load) {
    const int element = team_thread<S>() + load * S::kTeam;
    float* target = values + (element < 2 * S::kSide ? 0 : S::kOperand) +
                    element % 2 * 4 * S::kPitch + element % (2 * S::kSide) / 2;
    target[0] = held[load].x;
    target[S::kPitch] = held[load].y;
    target[2 * S::kPitch] = held[load].z;
    target[3 * S::kPitch] = held[load].w;
  }
}

// N values in groups of four, the groups SIDE / (N / 4) apart.
template <class S, int N>
__device__ __forceinline__ void fragment(const float* values, int place, float (&out)[N]) {
#pragma unroll
  for (int group = 0; group < N / 4; ++group) {
    const float4 four =
        *reinterpret_cast<const float4*>(values + group * (4 * S::kSide / N) + 4 * place);
    out[4 * group] = four.x, out[4 * group + 1] = four.y;
    out[4 * group + 2] = four.z, out[4 * group + 3] = four.w;
  }
}

// Sum of (a - b)^2 by the whole warp, in a fixed tree; every lane gets it.
__device__ __forceinline__ float apart2(const float* a, const float* b, int pitch) {
  float sum = 0.0f;
  for (int t = threadIdx.x % kWarp; t < pitch / 4; t += kWarp) {
    const float4 x = __ldg(reinterpret_cast<const float4*>(a) + t);
    const float4 y = __ldg(reinterpret_cast<const float4*>(b) + t);
    const float p = x.x - y.x, q = x.y - y.y, r = x.z - y.z, s = x.w - y.w;
    sum = fmaf(p, p, fmaf(q, q, fmaf(r, r, fmaf(s, s, sum))));
  }
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    sum += __shfl_xor_sync(kFull, sum, offset);
  }
  return sum;
}

template <bool DIRECT>
__device__ __forceinline__ float distance2(float sum, float lengths2) {
  if constexpr (DIRECT) return sum <= kSame * lengths2 ? 0.0f : sum;
  const float found = fmaf(-2.0f, sum, lengths2);
  return found < kNear * lengths2 || lengths2 == 0.0f ? kMarked : found;
}

// Sums of two values over the warp for five shuffles: the first to lanes 0-15, the second to lanes 16-31.
__device__ __forceinline__ float two_sums(float one, float other) {
  const bool upper = threadIdx.x % kWarp >= kWarp / 2;
  float kept = (upper ? other : one) + __shfl_xor_sync(kFull, upper ? one : other, kWarp / 2);
#pragma unroll
  for (int offset = kWarp / 4; offset > 0; offset /= 2) {
    kept += __shfl_xor_sync(kFull, kept, offset);
  }
  return kept;
}

// One slab on matrix units: warp w has the rows of 64 (w / 4) and four blocks of 8 columns, two of each half, so that staging a half
// frees half of its sums. sum[2 m + e / 2][2 n + e % 2] is element e of the lane in the product of rows m and columns n.
template <class S>
__device__ __forceinline__ void product_split(const float* left, float (&sum)[S::kDown][S::kAcross]) {
  static_assert(S::kSide == 128 && S::kTeam == 256, "eight warps of 64 x 32");
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, g = lane / 4, t = lane % 4;
  const float* rows = left + 2 * t * S::kPitch + warp / 4 * 64 + g;
  const float* columns = left + S::kOperand + 2 * t * S::kPitch + warp % 4 * 16 + g;
  unsigned big_b[4][2], small_b[4][2];
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const float* block = columns + n / 2 * 64 + n % 2 * 8;
    split(block[0], big_b[n][0], small_b[n][0]);
    split(block[S::kPitch], big_b[n][1], small_b[n][1]);
  }
#pragma unroll
  for (int m = 0; m < 4; ++m) {
    unsigned big_a[4], small_a[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      split(rows[16 * m + e % 2 * 8 + e / 2 * S::kPitch], big_a[e], small_a[e]);
    }
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      float part[4] = {0.0f, 0.0f, 0.0f, 0.0f};
      multiply_add(part, small_a, big_b[n]);
      multiply_add(part, big_a, small_b[n]);
      multiply_add(part, big_a, big_b[n]);
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[2 * m + e / 2][2 * n + e % 2] += part[e];
    }
  }
}

template <class S>
__device__ __forceinline__ void stage_split(const float (&sum)[S::kDown][S::kAcross], int group,
                                            TileMemory<S>& memory) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int i = 0; i < S::kDown; ++i) {
    const int slot = warp / 4 * 64 + i / 2 * 16 + i % 2 * 8 + g;
    const float p = memory.row_norm2[slot];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const int column = warp % 4 * 16 + 8 * n + 2 * t;
      const float* q = memory.column_norm2 + group * S::kStage + column;
      *reinterpret_cast<float2*>(memory.values + slot * S::kStagePitch + column) =
          make_float2(distance2<false>(sum[i][4 * group + 2 * n], p + q[0]),
                      distance2<false>(sum[i][4 * group + 2 * n + 1], p + q[1]));
    }
  }
}

// The rows of the job's block in `a` against all of `b`. For each row and each run of kStage columns one warp calls
//   fold.take(slot, row, column of lane 0, d2, kept)   column of d2[v] is that + 32 v + lane
// where kept says that the column exists and fold.meets(row, column); fold.copies(row, column): known to be equal.
// All threads of the team come here together, with the job and the fold's state of its rows behind a team_sync.
template <class S, bool DIRECT, class Fold, bool SPLIT = false>
__device__ __forceinline__ void sweep(const Operand& a, const Operand& b, int pitch,
                                      TileMemory<S>& memory, Fold& fold) {
  const int thread = team_thread<S>(), lane = thread % kWarp, warp = thread / kWarp;
  const int y = warp / 2 * 4 + lane / 8, x = warp % 2 * 8 + lane % 8;
  const Job& job = memory.job;
  // unrolled further, ptxas hoists fragments over the 64 sums of a thread and spills
  constexpr int kAtOnce = DIRECT ? 1 : S::kSide == 128 ? 2 : kSlab;
  if (thread < S::kSide) {
    const uint32_t row = job.row_first + thread;
    memory.row_norm2[thread] = row < job.rows ? __ldg(a.norm2 + job.row_start + row) : 0.0f;
  }
  for (uint32_t column_first = 0; column_first < job.columns; column_first += S::kSide) {
    if (thread < S::kSide) {
      const uint32_t column = column_first + thread;
      memory.column_norm2[thread] =
          column < job.columns ? __ldg(b.norm2 + job.column_start + column) : 0.0f;
    }
    float sum[S::kDown][S::kAcross];
#pragma unroll
    for (int i = 0; i < S::kDown; ++i) {
#pragma unroll
      for (int j = 0; j < S::kAcross; ++j) sum[i][j] = 0.0f;
    }
    const float* source[S::kHeld];
    float4 held[S::kHeld];
    find_sources<S>(a, b, job, column_first, pitch, source);
    load_slab<S>(source, 0, pitch, held);
    store_slab<S>(memory.values, held);
    team_sync<S>();
    int buffer = 0;
#pragma unroll 1
    for (int k = 0; k < pitch; k += kSlab) {
      const bool more = k + kSlab < pitch;
      if (more) load_slab<S>(source, k + kSlab, pitch, held);
      const float* left = memory.values + buffer;
      if constexpr (SPLIT) product_split<S>(left, sum);
#pragma unroll kAtOnce
      for (int t = 0; t < (SPLIT ? 0 : kSlab); ++t) {
        float p[S::kDown], q[S::kAcross];
        fragment<S>(left + t * S::kPitch, y, p);
        fragment<S>(left + S::kOperand + t * S::kPitch, x, q);
#pragma unroll
        for (int i = 0; i < S::kDown; ++i) {
#pragma unroll
          for (int j = 0; j < S::kAcross; ++j) {
            if constexpr (DIRECT) {
              const float gap = p[i] - q[j];
              sum[i][j] = fmaf(gap, gap, sum[i][j]);
            } else {
              sum[i][j] = fmaf(p[i], q[j], sum[i][j]);
            }
          }
        }
      }
      buffer = 2 * S::kOperand - buffer;
      if (more) store_slab<S>(memory.values + buffer, held);
      team_sync<S>();
    }
#pragma unroll
    for (int group = 0; group < S::kAcross / 4; ++group) {
      if constexpr (SPLIT) stage_split<S>(sum, group, memory);
      const float4 q = *reinterpret_cast<const float4*>(memory.column_norm2 + group * S::kStage + 4 * x);
#pragma unroll
      for (int i = 0; i < (SPLIT ? 0 : S::kDown); ++i) {
        const int slot = i / 4 * (4 * S::kSide / S::kDown) + 4 * y + i % 4;
        const float p = memory.row_norm2[slot];
        *reinterpret_cast<float4*>(memory.values + slot * S::kStagePitch + 4 * x) =
            make_float4(distance2<DIRECT>(sum[i][4 * group], p + q.x),
                        distance2<DIRECT>(sum[i][4 * group + 1], p + q.y),
                        distance2<DIRECT>(sum[i][4 * group + 2], p + q.z),
                        distance2<DIRECT>(sum[i][4 * group + 3], p + q.w));
      }
      team_sync<S>();
      const uint32_t first = column_first + group * S::kStage;
#pragma unroll 1
      for (int slot = warp; slot < S::kSide; slot += S::kWarps) {
        const uint32_t row = job.row_first + slot;
        if (row >= job.rows) break;
        float d2[S::kEach];
        bool kept[S::kEach];
#pragma unroll
        for (int v = 0; v < S::kEach; ++v) {
          const uint32_t column = first + v * kWarp + lane;
          d2[v] = memory.values[slot * S::kStagePitch + v * kWarp + lane];
          kept[v] = column < job.columns && fold.meets(slot, row, column);
          if constexpr (!DIRECT) {
            bool marked = kept[v] && d2[v] < 0.0f;
            if (marked && fold.copies(row, column)) d2[v] = 0.0f, marked = false;
            unsigned near = __ballot_sync(kFull, marked);
#pragma unroll 1
            while (near) {
              const int from = __ffs(near) - 1;
              near &= near - 1;
              const int64_t one = job.row_start + row;
              const int64_t other = job.column_start + first + v * kWarp + from;
              const float length2 = apart2(a.rows + one * pitch, b.rows + other * pitch, pitch);
              if (lane == from) {
                const float lengths2 = memory.row_norm2[slot] + __ldg(b.norm2 + other);
                d2[v] = length2 <= kSame * lengths2 ? 0.0f : length2;
              }
            }
          }
        }
        fold.take(slot, row, first, d2, kept);
      }
      team_sync<S>();
    }
  }
}

}  // namespace fabric
