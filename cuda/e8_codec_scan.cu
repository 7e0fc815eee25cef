// e8_codec_scan: exact products of whole-numbered queries with E8 codes of probed lists; the k best of each query and list.
//
// Contract  codes u32 [groups, words, 32]: a list is cut into groups of 32 rows (the last one filled up with zeros), a lane
//           a row; word w of a row holds bytes 4w .. 4w + 3 of the code that analytics/index/e8.py packs (b bytes of
//           bit planes a block of 8 dimensions), dimensions filled up to a multiple of 32 with zeros, so that words =
//           b dims / 32. list_group i64 [lists + 1]: first group of each list.
//           Queries are whole numbers q = sum 256^p q_p, q_p int8: queries i32 [m, planes, dims / 4], four int8 a word, 0 in
//           dimensions past the end; total i64 [m] their sums. planes = 1 are queries rounded to int8; 2 or 3 hold the
//           levels of the CPU index, whose products these are to the bit. |product| < 2^31.
//           A task is a list and up to 4 queries that probe it: task_list i64 [T], task_query i64 [T, 4] (-1: none),
//           first i64 [T + 1]: prefix sum of the tasks' groups; items = first[T]. product i32 [items, 4, 32], 0 where there
//           is no query and anything where there is no row.
//           e8_codec_best: size i64 [lists], group-wise factor and constant f32 [groups, 32], unit f32 [m], apart f32 [T, 4].
//           score = product * factor * unit + constant + apart, float32, each step rounded, in this order: the CPU's
//           score, bit for bit, where its product is below 2^24 (dims <= 2048). key u64 [T, 4, k], k <= 128: ordered
//           bits of the score, place of the row in its list; ascending, ties to the lower place, all ones: none; NaN is
//           never taken. Blocks of 256 threads, any grid in x.
// Floor     b dims / 8 bytes a row for 4 queries together (384 at 4 bits of 768), 8 more for factor and constant, 8 a product
//           that goes out and comes back. 2 planes dp4a a block of 8 and query beside 9 b steps to decode it once.
// Twin      fabric_pipelines/analytics/reference/e8_codec_scan.py: products and keys equal to the last bit.
//
// Why this layout: a lane owns a row, so sums need no shuffle, and 32 lanes must then find their words side by side: one
// line of 128 bytes a load. In the CPU's own layout (rows of 96 to 384 bytes one after another) each lane would touch a line
// of its own. The change is made once, when codes are uploaded. A block's 8 dimensions are decoded once for all 4
// queries: 4k + 2c is a byte of 0 .. 62, what is left, -(2^(b+1) - 1) times the sum of the query, is one number a query.
// Query words are the same in all lanes (one broadcast from L1 for 4 products): no shared memory, no barrier.
#include "best_k.cuh"
#include "segments.cuh"

namespace fabric {

constexpr int kQueries = 4;

// Bits 0 .. 3 of nibble to bit 0 of bytes 0 .. 3.
__device__ __forceinline__ uint32_t spread(uint32_t nibble) {
  return nibble * 0x00204081u & 0x01010101u;
}

// One block: bytes (b of them, the lowest first) -> 4k + 2 coset of coordinates 0 .. 3 and 4 .. 7.
template <int BITS>
__device__ __forceinline__ uint2 decoded(uint32_t bytes) {
  const uint32_t seven = bytes & 0x7fu;
  const uint32_t low = seven | (static_cast<uint32_t>(__popc(seven)) & 1u) << 7;
  const uint32_t coset = bytes & 0x80u ? 0x02020202u : 0u;
  uint2 out = make_uint2(coset | spread(low & 15u) << 2, coset | spread(low >> 4) << 2);
#pragma unroll
  for (int plane = 1; plane < BITS; ++plane) {
    const uint32_t byte = bytes >> (8 * plane) & 0xffu;
    out.x |= spread(byte & 15u) << (2 + plane);
    out.y |= spread(byte >> 4) << (2 + plane);
  }
  return out;
}

// Bytes BITS * block .. of four blocks in BITS words.
template <int BITS>
__device__ __forceinline__ uint32_t block_bytes(const uint32_t (&word)[BITS], int block) {
  const int bit = 8 * BITS * block;
  uint32_t found = word[bit / 32] >> (bit % 32);
  if (bit % 32 + 8 * BITS > 32) found |= word[(bit / 32 + 1) % BITS] << ((32 - bit % 32) % 32);
  return found;
}

template <int BITS, int PLANES>
__device__ __forceinline__ void scan(const uint32_t* __restrict__ codes,
                                     const int64_t* __restrict__ list_group,
                                     const int32_t* __restrict__ queries,
                                     const int64_t* __restrict__ total,
                                     const int64_t* __restrict__ task_list,
                                     const int64_t* __restrict__ task_query,
                                     const int64_t* __restrict__ first, int64_t tasks, int64_t items,
                                     int64_t dims, int32_t* __restrict__ product) {
  const int lane = threadIdx.x % kWarp;
  const int steps = static_cast<int>(dims / 32), width = static_cast<int>(dims / 4);
  for (int64_t item = warp_index(); item < items; item += warp_count()) {
    const int64_t task = owner_of(first, tasks, 0, item);
    const int64_t group = list_group[task_list[task]] + item - first[task];
    const uint32_t* code = codes + group * steps * BITS * 32 + lane;
    int query[kQueries];  // in words: what all queries take is below 2^31
    int sum[kQueries][PLANES];
#pragma unroll
    for (int c = 0; c < kQueries; ++c) {
      const int64_t number = task_query[task * kQueries + c];
      query[c] = static_cast<int>((number < 0 ? 0 : number) * PLANES * width);
#pragma unroll
      for (int p = 0; p < PLANES; ++p) sum[c][p] = 0;
    }
#pragma unroll 1
    for (int step = 0; step < steps; ++step, code += BITS * 32) {
      uint32_t word[BITS];
#pragma unroll
      for (int w = 0; w < BITS; ++w) word[w] = __ldcs(code + w * 32);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint2 one = decoded<BITS>(block_bytes<BITS>(word, 2 * half));
        const uint2 two = decoded<BITS>(block_bytes<BITS>(word, 2 * half + 1));
#pragma unroll
        for (int c = 0; c < kQueries; ++c) {
#pragma unroll
          for (int p = 0; p < PLANES; ++p) {
            const int at = query[c] + p * width + step * 8 + half * 4;
            const int4 levels = __ldg(reinterpret_cast<const int4*>(queries + at));
            int s = __dp4a(static_cast<int>(one.x), levels.x, sum[c][p]);
            s = __dp4a(static_cast<int>(one.y), levels.y, s);
            s = __dp4a(static_cast<int>(two.x), levels.z, s);
            sum[c][p] = __dp4a(static_cast<int>(two.y), levels.w, s);
          }
        }
      }
    }
#pragma unroll
    for (int c = 0; c < kQueries; ++c) {
      int64_t whole = 0;
      const int64_t number = task_query[task * kQueries + c];
      if (number >= 0) {
#pragma unroll
        for (int p = PLANES - 1; p >= 0; --p) whole = whole * 256 + sum[c][p];
        whole -= total[number] * ((2 << BITS) - 1);
      }
      product[(item * kQueries + c) * 32 + lane] = static_cast<int32_t>(whole);
    }
  }
}

template <int M>
__device__ __forceinline__ void best(const int32_t* __restrict__ product,
                                     const float* __restrict__ factor,
                                     const float* __restrict__ constant,
                                     const int64_t* __restrict__ list_group,
                                     const int64_t* __restrict__ size,
                                     const int64_t* __restrict__ task_list,
                                     const int64_t* __restrict__ task_query,
                                     const int64_t* __restrict__ first,
                                     const float* __restrict__ unit, const float* __restrict__ apart,
                                     int64_t tasks, int64_t k, uint64_t* __restrict__ key) {
  const int lane = threadIdx.x % kWarp;
  for (int64_t pair = warp_index(); pair < tasks * kQueries; pair += warp_count()) {
    const int64_t task = pair / kQueries, list = task_list[task], number = task_query[pair];
    const int64_t rows = number < 0 ? 0 : size[list];
    const float level = number < 0 ? 0.0f : unit[number], far = apart[pair];
    Best<M> found;
    found.clear(static_cast<int>(k));
    for (int64_t start = 0; start < rows; start += 32) {
      uint64_t offered = kNoKey;
      if (start + lane < rows) {
        const int64_t at = list_group[list] * 32 + start + lane;
        const int64_t item = first[task] + start / 32;
        const float exact =
            static_cast<float>(product[(item * kQueries + pair % kQueries) * 32 + lane]);
        float score = __fmul_rn(__fmul_rn(exact, factor[at]), level);
        score = __fadd_rn(__fadd_rn(score, constant[at]), far);
        if (!isnan(score)) offered = key_of(score, static_cast<uint32_t>(start + lane));
      }
      found.offer(offered);
    }
    found.write(key + pair * k, static_cast<int>(k));
  }
}

}  // namespace fabric

// 12 sums and the words of 4 queries pass 80 registers from two planes on, 128 with three.
#define E8_SCAN(BITS, PLANES)                                                                      \
  extern "C" __global__ void __launch_bounds__(fabric::kBlock, 4 - PLANES)                         \
      e8_codec_scan_##BITS##_##PLANES(                                                             \
          const uint32_t* codes, const int64_t* list_group, const int32_t* queries,                \
          const int64_t* total, const int64_t* task_list, const int64_t* task_query,               \
          const int64_t* first, int64_t tasks, int64_t items, int64_t dims, int32_t* product) {    \
    fabric::scan<BITS, PLANES>(codes, list_group, queries, total, task_list, task_query, first,    \
                               tasks, items, dims, product);                                       \
  }

#define E8_BEST(SLOTS, M)                                                                          \
  extern "C" __global__ void __launch_bounds__(fabric::kBlock, fabric::kBlocksPerSm)               \
      e8_codec_best_##SLOTS(const int32_t* product, const float* factor, const float* constant,    \
                            const int64_t* list_group, const int64_t* size,                        \
                            const int64_t* task_list, const int64_t* task_query,                   \
                            const int64_t* first, const float* unit, const float* apart,           \
                            int64_t tasks, int64_t k, uint64_t* key) {                             \
    fabric::best<M>(product, factor, constant, list_group, size, task_list, task_query, first,     \
                    unit, apart, tasks, k, key);                                                   \
  }

E8_SCAN(2, 1)
E8_SCAN(2, 2)
E8_SCAN(2, 3)
E8_SCAN(3, 1)
E8_SCAN(3, 2)
E8_SCAN(3, 3)
E8_SCAN(4, 1)
E8_SCAN(4, 2)
E8_SCAN(4, 3)
E8_BEST(32, 1)
E8_BEST(128, 4)
