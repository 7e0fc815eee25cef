// Which cluster owns a row: indptr[c] <= row < indptr[c + 1]. Offsets are int64: row x dim passes 2^31 early.
#pragma once
#include <cstdint>

namespace fabric {

// Searches clusters from `low` on; `low` must not lie past the owner. Empty clusters are stepped over.
__device__ __forceinline__ int64_t owner_of(const int64_t* indptr, int64_t clusters, int64_t low,
                                            int64_t row) {
  int64_t high = clusters;  // indptr[low] <= row < indptr[high]
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    if (__ldg(reinterpret_cast<const long long*>(indptr) + middle) <= row) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

}  // namespace fabric
