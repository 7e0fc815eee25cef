// row_admit: squared norm, flag and 128-bit hash of every row.
//
// Contract  rows f32 [count, dim] row-major without padding; norm2 f64 [count]; flag u8 [count], bits 1 NaN,
//           2 Inf, 4 norm below min_norm; hash u64 [count, 2]. Any dim >= 1, any count. Blocks of 256 threads,
//           any grid in x: rows are strided over the grid and the bits do not depend on it.
//           _wide needs dim % 4 == 0 and 16-byte aligned rows; _any takes the rest.
// Twin      fabric_pipelines/analytics/reference/row_admit.py: hash and flag equal bit for bit, norm2 to
//           2 eps sqrt(dim) (float64, another order of the same exact products).
//
// Why this mapping: a group of lanes reads a row (lanes.cuh). Norms are summed in float64, since squares of
// f32 cannot overflow there: a finite sum proves that every component is finite, so the NaN and Inf tests
// run only for rows whose sum is not. The hash costs about 7 integer operations a component; splitmix64 a
// component would need 20 and put integer throughput above the memory floor.
#include "lanes.cuh"

namespace fabric {

constexpr uint64_t kKey1 = 0x9E3779B97F4A7C15ull;
constexpr uint64_t kKey2 = 0xD1B54A32D192ED03ull;
constexpr uint32_t kInfBits = 0x7f800000u;

__device__ __forceinline__ uint64_t mix64(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

struct RowSum {
  uint64_t hash1 = 0, hash2 = 0;
  double even = 0.0, odd = 0.0;

  __device__ __forceinline__ void add_pair(uint32_t low, uint32_t high, uint64_t key1,
                                           uint64_t key2) {
    const uint64_t value = static_cast<uint64_t>(high) << 32 | low;
    const uint64_t white1 = value ^ key1;
    const uint64_t white2 = value ^ key2;
    hash1 += (white1 & 0xffffffffull) * (white1 >> 32) + value;
    hash2 += (white2 & 0xffffffffull) * (white2 >> 32) + value;
    const double x = __uint_as_float(low);
    const double y = __uint_as_float(high);
    even = fma(x, x, even);
    odd = fma(y, y, odd);
  }
};

__device__ __forceinline__ unsigned badness(uint32_t bits) {
  const uint32_t magnitude = bits & 0x7fffffffu;
  return (magnitude > kInfBits ? 1u : 0u) | (magnitude == kInfBits ? 2u : 0u);
}

template <int LANES, bool WIDE>
__device__ __forceinline__ void admit(const uint32_t* __restrict__ rows, int64_t count, int64_t dim,
                                      double min_norm2, double* __restrict__ norm2,
                                      uint8_t* __restrict__ flag, uint64_t* __restrict__ hash) {
  constexpr int kGroups = kWarp / LANES;
  const int lane = threadIdx.x % LANES;
  const int group = threadIdx.x % kWarp / LANES;
  constexpr int kPairs = WIDE ? 2 : 1;  // pairs of words in one step of a lane
  const int64_t steps = WIDE ? dim / 4 : (dim + 1) / 2;
  const int64_t stride = warp_count() * kGroups;

  for (int64_t first = warp_index() * kGroups; first < count; first += stride) {
    const int64_t row = first + group;
    const bool active = row < count;
    const uint32_t* words = rows + (active ? row : first) * dim;
    RowSum sum;
    uint64_t key1 = kKey1 * static_cast<uint64_t>(lane * kPairs + 1);
    uint64_t key2 = kKey2 * static_cast<uint64_t>(lane * kPairs + 1);
#pragma unroll 4
    for (int64_t step = lane; step < steps; step += LANES) {
      if constexpr (WIDE) {
        const uint4 v = __ldg(reinterpret_cast<const uint4*>(words) + step);
        sum.add_pair(v.x, v.y, key1, key2);
        sum.add_pair(v.z, v.w, key1 + kKey1, key2 + kKey2);
      } else {
        const uint32_t low = __ldg(words + 2 * step);
        const uint32_t high = 2 * step + 1 < dim ? __ldg(words + 2 * step + 1) : 0u;
        sum.add_pair(low, high, key1, key2);
      }
      key1 += kKey1 * (LANES * kPairs);
      key2 += kKey2 * (LANES * kPairs);
    }
    const double total = group_sum<LANES>(sum.even + sum.odd);
    const uint64_t hash1 = group_sum<LANES>(sum.hash1);
    const uint64_t hash2 = group_sum<LANES>(sum.hash2);
    const bool bad = !isfinite(total);
    unsigned bits = total < min_norm2 ? 4u : 0u;
    if (__any_sync(kFull, bad)) {
      unsigned found = 0;
      if (bad) {
        for (int64_t word = lane; word < dim; word += LANES) found |= badness(__ldg(words + word));
      }
      found = group_or<LANES>(found);
      if (bad) bits = found;
    }
    if (lane == 0 && active) {
      norm2[row] = total;
      flag[row] = static_cast<uint8_t>(bits);
      const uint64_t length = static_cast<uint64_t>(dim);
      reinterpret_cast<ulonglong2*>(hash)[row] =
          make_ulonglong2(mix64(hash1 ^ length * kKey1), mix64(hash2 ^ length * kKey2));
    }
  }
}

}  // namespace fabric

#define ROW_ADMIT(NAME, LANES, WIDE)                                                               \
  extern "C" __global__ void __launch_bounds__(fabric::kBlock, fabric::kBlocksPerSm)               \
      NAME(const uint32_t* rows, int64_t count, int64_t dim, double min_norm2, double* norm2,      \
           uint8_t* flag, uint64_t* hash) {                                                        \
    fabric::admit<LANES, WIDE>(rows, count, dim, min_norm2, norm2, flag, hash);                    \
  }

ROW_ADMIT(row_admit_wide_1, 1, true)
ROW_ADMIT(row_admit_wide_2, 2, true)
ROW_ADMIT(row_admit_wide_4, 4, true)
ROW_ADMIT(row_admit_wide_8, 8, true)
ROW_ADMIT(row_admit_wide_32, 32, true)
ROW_ADMIT(row_admit_any_1, 1, false)
ROW_ADMIT(row_admit_any_2, 2, false)
ROW_ADMIT(row_admit_any_4, 4, false)
ROW_ADMIT(row_admit_any_8, 8, false)
ROW_ADMIT(row_admit_any_32, 32, false)
