// knn_graph: from lists of nearest neighbours to in-degrees, local outlier factors and connected components.
//
// Contract  row i32 or i64 [count, width]: neighbours of each row by rising distance, rows of the same cluster, -1 past the end
//           of a list (never before it); distance f64 [count, width]. In-degrees and components use the first `near` of a list,
//           outlier factors all of it. In this order, each kernel reading what the ones before it left:
//             knn_graph_degree    degree i32 [count] (zeros before), known i32 [count] = length of a list, reach f64 [count]
//                                 = distance to its last, parent u64 [count] = the row itself
//             knn_graph_density   density f64 [count] = 1 / (mean over the list of max(distance, reach there) + 1e-10), 0
//                                 for an empty list (Breunig and others 2000, scikit-learn's words)
//             knn_graph_factor    factor f64 [count] = mean density of the list over the row's own, 1 for an empty list
//             knn_graph_hook      parent: a forest whose trees are the components and whose roots are their lowest rows; what
//                                 lies between may differ from run to run
//             knn_graph_label     label i64 [count] = that root; members i32 [count] (zeros before) = rows with flag u8 0
//                                 of the component whose root this is
//             knn_graph_largest   largest u64 [clusters] (zeros before) = most members
//           Blocks of 256 threads, any grid in x. Names end in the bits of `row`.
// Twin      fabric_pipelines/analytics/reference/knn_graph.py: integers equal, factors to 8 eps.
// Floor     bytes: at width 20 with i32 80 + 240 + 80 + 40 of lists a row and 60 of results; 10M rows 1.2 ms at 4.3 TB/s.
//           What is gathered (reach, density, parent) lies in the same cluster, so in L2. Never timed: not been on a card.
//
// Why this mapping: eight lanes share a list, so four rows of a warp read 32 and 64 bytes side by side; sums run in a fixed tree.
// Degrees and members are counted by integer atomics, whose order leaves no trace. Components by union-find (ECL-CC, Jaiganesh
// and Burtscher 2018): a root is only ever hooked under a lower row, by compare-and-swap, so chains fall and every walk ends; a
// stale parent is still an ancestor, so plain loads will do; path halving needs no atomics since only roots are swapped. The
// lowest row of a component is hooked nowhere, which makes it the root whatever the order.
#include "lanes.cuh"
#include "segments.cuh"

namespace fabric {

constexpr int kLanes = 8;  // of one list
constexpr int64_t kRun = 1024;
constexpr double kFloor = 1e-10;  // copies have no mean reachability

using Parent = unsigned long long;

// Calls work(row, active) with all lanes of the warp, eight for each row.
template <typename Work>
__device__ __forceinline__ void each_list(int64_t count, Work work) {
  constexpr int kGroups = kWarp / kLanes;
  for (int64_t first = warp_index() * kGroups; first < count; first += warp_count() * kGroups) {
    const int64_t row = first + threadIdx.x % kWarp / kLanes;
    work(row, row < count);
  }
}

template <typename Row>
__device__ __forceinline__ void degree(const Row* __restrict__ row, const double* __restrict__ distance,
                                       int64_t count, int64_t width, int64_t near,
                                       int* __restrict__ degree, int* __restrict__ known,
                                       double* __restrict__ reach, Parent* __restrict__ parent) {
  const int lane = threadIdx.x % kLanes;
  each_list(count, [&](int64_t own, bool active) {
    uint64_t listed = 0;
    for (int64_t slot = lane; active && slot < width; slot += kLanes) {
      const int64_t other = row[own * width + slot];
      if (other < 0) break;
      ++listed;
      if (slot < near) atomicAdd(degree + other, 1);
    }
    listed = group_sum<kLanes>(listed);
    if (lane == 0 && active) {
      known[own] = static_cast<int>(listed);
      reach[own] = listed ? distance[own * width + static_cast<int64_t>(listed) - 1] : 0.0;
      parent[own] = static_cast<Parent>(own);
    }
  });
}

template <typename Row>
__device__ __forceinline__ void density(const Row* __restrict__ row, const double* __restrict__ distance,
                                        const int* __restrict__ known,
                                        const double* __restrict__ reach, int64_t count,
                                        int64_t width, double* __restrict__ out) {
  const int lane = threadIdx.x % kLanes;
  each_list(count, [&](int64_t own, bool active) {
    const int listed = active ? known[own] : 0;
    double sum = 0.0;
    for (int64_t slot = lane; slot < listed; slot += kLanes) {
      const int64_t at = own * width + slot;
      sum = __dadd_rn(sum, fmax(__ldg(distance + at), __ldg(reach + row[at])));
    }
    sum = group_sum<kLanes>(sum);
    if (lane == 0 && active) {
      out[own] = listed ? __ddiv_rn(1.0, __dadd_rn(__ddiv_rn(sum, listed), kFloor)) : 0.0;
    }
  });
}

template <typename Row>
__device__ __forceinline__ void factor(const Row* __restrict__ row, const int* __restrict__ known,
                                       const double* __restrict__ density, int64_t count,
                                       int64_t width, double* __restrict__ out) {
  const int lane = threadIdx.x % kLanes;
  each_list(count, [&](int64_t own, bool active) {
    const int listed = active ? known[own] : 0;
    double sum = 0.0;
    for (int64_t slot = lane; slot < listed; slot += kLanes) {
      sum = __dadd_rn(sum, __ldg(density + row[own * width + slot]));
    }
    sum = group_sum<kLanes>(sum);
    if (lane == 0 && active) {
      out[own] = listed ? __ddiv_rn(__ddiv_rn(sum, listed), density[own]) : 1.0;
    }
  });
}

// Halves the path on its way: every row on it is handed to its grandparent.
__device__ __forceinline__ Parent root_of(Parent* parent, Parent row) {
  Parent below = row, here = parent[row];
  while (true) {
    const Parent next = parent[here];
    if (next == here) return here;
    parent[below] = next;
    below = here;
    here = next;
  }
}

__device__ __forceinline__ void join(Parent* parent, Parent left, Parent right) {
  Parent high = root_of(parent, left), low = root_of(parent, right);
  while (high != low) {
    if (high < low) {
      const Parent swap = high;
      high = low;
      low = swap;
    }
    const Parent found = atomicCAS(parent + high, high, low);
    if (found == high) return;
    high = root_of(parent, found);  // it was hooked meanwhile, under something lower
  }
}

template <typename Row>
__device__ __forceinline__ void hook(const Row* __restrict__ row, const int* __restrict__ known,
                                     int64_t count, int64_t width, int64_t near, Parent* parent) {
  const int lane = threadIdx.x % kLanes;
  each_list(count, [&](int64_t own, bool active) {
    const int64_t listed = active ? known[own] : 0;
    for (int64_t slot = lane; slot < listed && slot < near; slot += kLanes) {
      join(parent, static_cast<Parent>(own), static_cast<Parent>(row[own * width + slot]));
    }
  });
}

}  // namespace fabric

#define KNN_GRAPH(BITS, ROW)                                                                       \
  extern "C" __global__ void __launch_bounds__(fabric::kBlock, fabric::kBlocksPerSm)               \
      knn_graph_degree_##BITS(const ROW* row, const double* distance, int64_t count,               \
                              int64_t width, int64_t near, int* degree, int* known,                \
                              double* reach, uint64_t* parent) {                                   \
    fabric::degree(row, distance, count, width, near, degree, known, reach,                        \
                   reinterpret_cast<fabric::Parent*>(parent));                                     \
  }                                                                                                \
  extern "C" __global__ void __launch_bounds__(fabric::kBlock, fabric::kBlocksPerSm)               \
      knn_graph_density_##BITS(const ROW* row, const double* distance, const int* known,           \
                               const double* reach, int64_t count, int64_t width,                  \
                               double* density) {                                                  \
    fabric::density(row, distance, known, reach, count, width, density);                           \
  }                                                                                                \
  extern "C" __global__ void __launch_bounds__(fabric::kBlock, fabric::kBlocksPerSm)               \
      knn_graph_factor_##BITS(const ROW* row, const int* known, const double* density,             \
                              int64_t count, int64_t width, double* factor) {                      \
    fabric::factor(row, known, density, count, width, factor);                                     \
  }                                                                                                \
  extern "C" __global__ void __launch_bounds__(fabric::kBlock, fabric::kBlocksPerSm)               \
      knn_graph_hook_##BITS(const ROW* row, const int* known, int64_t count, int64_t width,        \
                            int64_t near, uint64_t* parent) {                                      \
    fabric::hook(row, known, count, width, near, reinterpret_cast<fabric::Parent*>(parent));       \
  }

KNN_GRAPH(32, int32_t)
KNN_GRAPH(64, int64_t)

extern "C" __global__ void __launch_bounds__(fabric::kBlock, fabric::kBlocksPerSm)
    knn_graph_label(const uint64_t* parent, const uint8_t* flag, int64_t count, int64_t* label,
                    int* members) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; row < count;
       row += stride) {
    uint64_t root = parent[row];
    while (parent[root] != root) root = parent[root];
    label[row] = static_cast<int64_t>(root);
    if (flag[row] == 0) atomicAdd(members + root, 1);
  }
}

extern "C" __global__ void __launch_bounds__(fabric::kBlock, fabric::kBlocksPerSm)
    knn_graph_largest(const int* members, const int64_t* indptr, int64_t count, int64_t clusters,
                      uint64_t* largest) {
  const int lane = threadIdx.x % fabric::kWarp;
  for (int64_t run = fabric::warp_index(); run * fabric::kRun < count;
       run += fabric::warp_count()) {
    const int64_t end = (run + 1) * fabric::kRun < count ? (run + 1) * fabric::kRun : count;
    int64_t row = run * fabric::kRun;
    int64_t cluster = fabric::owner_of(indptr, clusters, 0, row);
    while (row < end) {
      const int64_t border = indptr[cluster + 1] < end ? indptr[cluster + 1] : end;
      uint64_t most = 0;
#pragma unroll 4
      for (int64_t at = row + lane; at < border; at += fabric::kWarp) {
        const uint64_t here = static_cast<uint64_t>(__ldg(members + at));
        most = here > most ? here : most;
      }
#pragma unroll
      for (int offset = fabric::kWarp / 2; offset > 0; offset /= 2) {
        const uint64_t there = fabric::shuffle_xor(most, offset);
        most = there > most ? there : most;
      }
      if (lane == 0) {
        atomicMax(reinterpret_cast<unsigned long long*>(largest) + cluster,
                  static_cast<unsigned long long>(most));
      }
      row = border;
      if (row < end) cluster = fabric::owner_of(indptr, clusters, cluster + 1, row);
    }
  }
}
