// flat_select: from the products of a tile of rows with queries to the few rows that can be among the k nearest.
//
// Contract  products f32 [queries, stride], of which columns 0..rows are a tile: query vector times row vector (under
//           cosine the query is of length one). length f32 [rows], NaN for a row that does not count; reach f32
//           [queries] and slack f32 [queries]: length of the query vector and of what rounding took from it.
//           A score is a distance (cosine: 1 - cos; l2: squared) that is at most `margin` from the true one:
//             cosine  1 - p / length                      margin gamma + slack
//             l2      length^2 + reach^2 - 2 p            margin gamma (length + reach)^2 + 2 slack length + tiny
//           bound f32 [queries, 1024]: least upper bound (score + margin) seen among the rows of each slot; row r of
//           a tile belongs to slot r mod 1024, so neighbours of one list fall into different slots. limit f32
//           [queries]: the k-th smallest of bound, k <= 1024. k rows have an upper bound no higher, so a row whose
//           lower bound lies above limit is not among the k nearest. taken i64 [capacity, queries] and lower f32
//           likewise: rows (first + r) whose lower bound does not, in any order; count i32 [queries] counts
//           them all, also those past capacity. flat_words gathers 32-bit words: rows of vectors, ids.
//           Blocks of 256 threads, any grid in x. Nothing here is summed, so no bit depends on the grid.
// Twin      fabric_pipelines/analytics/reference/flat_select.py: bound, limit and the set of rows taken are equal up to
//           the rounding of one score (the compiler may fuse a product with a sum).
//
// Why this mapping: products are read twice, once by flat_slots and once by flat_take, each time by neighbouring
// threads in neighbouring columns. One thread owns a slot, so the minimum needs no atomics; 1,024 slots a query keep
// 64 rows of a tile of 65,536 a thread. The sort of 1,024 floats lives in shared memory (55 steps of 2 pairs a thread).
#include "lanes.cuh"

namespace fabric {

constexpr int kSlots = 1024;

struct Scored {
  float score, margin;
};

template <bool L2>
__device__ __forceinline__ Scored scored(float product, float length, float reach, float slack,
                                         float gamma, float tiny) {
  if constexpr (L2) {
    const float sum = length + reach;
    return {length * length + reach * reach - 2.0f * product,
            gamma * sum * sum + 2.0f * slack * length + tiny};
  } else {
    return {1.0f - product / length, gamma + slack};
  }
}

template <bool L2>
__device__ __forceinline__ void slots(const float* __restrict__ products,
                                      const float* __restrict__ length,
                                      const float* __restrict__ reach,
                                      const float* __restrict__ slack, int64_t queries, int64_t rows,
                                      int64_t stride, double gamma, double tiny,
                                      float* __restrict__ bound) {
  const int64_t threads = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t at = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
       at < queries * kSlots; at += threads) {
    const int64_t query = at / kSlots;
    const float* line = products + query * stride;
    const float far = reach[query], lost = slack[query];
    float least = bound[at];
    for (int64_t row = at % kSlots; row < rows; row += kSlots) {
      const Scored s = scored<L2>(line[row], length[row], far, lost, static_cast<float>(gamma),
                                  static_cast<float>(tiny));
      least = fminf(least, s.score + s.margin);  // the other one, when a row that does not count is NaN
    }
    bound[at] = least;
  }
}

__device__ __forceinline__ void kth(const float* __restrict__ bound, int64_t queries, int64_t k,
                                    float* __restrict__ limit) {
  __shared__ float key[kSlots];
  for (int64_t query = blockIdx.x; query < queries; query += gridDim.x) {
    for (int i = threadIdx.x; i < kSlots; i += kBlock) key[i] = bound[query * kSlots + i];
    for (int size = 2; size <= kSlots; size *= 2) {
      for (int gap = size / 2; gap > 0; gap /= 2) {
        __syncthreads();
        for (int pair = threadIdx.x; pair < kSlots / 2; pair += kBlock) {
          const int low = 2 * pair - (pair & (gap - 1));
          const bool up = (low & size) == 0;
          const float a = key[low], b = key[low + gap];
          if ((a > b) == up) {
            key[low] = b;
            key[low + gap] = a;
          }
        }
      }
    }
    __syncthreads();
    if (threadIdx.x == 0) limit[query] = key[k - 1];
    __syncthreads();
  }
}

template <bool L2>
__device__ __forceinline__ void take(const float* __restrict__ products,
                                     const float* __restrict__ length,
                                     const float* __restrict__ reach,
                                     const float* __restrict__ slack,
                                     const float* __restrict__ limit, int64_t queries, int64_t rows,
                                     int64_t stride, int64_t first, double gamma, double tiny,
                                     int64_t capacity, int* __restrict__ count,
                                     int64_t* __restrict__ taken, float* __restrict__ lower) {
  constexpr int64_t kSpan = 8 * kBlock;  // columns of one block
  const int64_t spans = (rows + kSpan - 1) / kSpan;
  for (int64_t piece = blockIdx.x; piece < queries * spans; piece += gridDim.x) {
    const int64_t query = piece / spans;
    const float* line = products + query * stride;
    const float far = reach[query], lost = slack[query], highest = limit[query];
    const int64_t start = piece % spans * kSpan;
    const int64_t stop = start + kSpan < rows ? start + kSpan : rows;
    for (int64_t row = start + threadIdx.x; row < stop; row += kBlock) {
      const Scored s = scored<L2>(line[row], length[row], far, lost, static_cast<float>(gamma),
                                  static_cast<float>(tiny));
      const float least = s.score - s.margin;
      if (least <= highest) {  // false for NaN
        const int64_t at = atomicAdd(count + query, 1);
        if (at < capacity) {
          taken[at * queries + query] = first + row;
          lower[at * queries + query] = least;
        }
      }
    }
  }
}

__device__ __forceinline__ void words(const uint32_t* __restrict__ source,
                                      const int64_t* __restrict__ rows, int64_t count, int64_t width,
                                      uint32_t* __restrict__ out) {
  for (int64_t at = warp_index(); at < count; at += warp_count()) {
    const uint32_t* from = source + rows[at] * width;
    for (int64_t word = threadIdx.x % kWarp; word < width; word += kWarp) {
      out[at * width + word] = __ldg(from + word);
    }
  }
}

}  // namespace fabric

#define FLAT(NAME, L2)                                                                             \
  extern "C" __global__ void __launch_bounds__(fabric::kBlock, fabric::kBlocksPerSm)               \
      flat_slots_##NAME(const float* products, const float* length, const float* reach,            \
                        const float* slack, int64_t queries, int64_t rows, int64_t stride,         \
                        double gamma, double tiny, float* bound) {                                 \
    fabric::slots<L2>(products, length, reach, slack, queries, rows, stride, gamma, tiny, bound);  \
  }                                                                                                \
  extern "C" __global__ void __launch_bounds__(fabric::kBlock, fabric::kBlocksPerSm)               \
      flat_take_##NAME(const float* products, const float* length, const float* reach,             \
                       const float* slack, const float* limit, int64_t queries, int64_t rows,      \
                       int64_t stride, int64_t first, double gamma, double tiny,                   \
                       int64_t capacity, int* count, int64_t* taken, float* lower) {               \
    fabric::take<L2>(products, length, reach, slack, limit, queries, rows, stride, first, gamma,   \
                     tiny, capacity, count, taken, lower);                                         \
  }

FLAT(cosine, false)
FLAT(l2, true)

extern "C" __global__ void __launch_bounds__(fabric::kBlock, fabric::kBlocksPerSm)
    flat_limit(const float* bound, int64_t queries, int64_t k, float* limit) {
  fabric::kth(bound, queries, k, limit);
}

extern "C" __global__ void __launch_bounds__(fabric::kBlock, fabric::kBlocksPerSm)
    flat_words(const uint32_t* source, const int64_t* rows, int64_t count, int64_t width,
               uint32_t* out) {
  fabric::words(source, rows, count, width, out);
}
