"""Vector analytics: health of clusters and exact search, over rows sorted by cluster (CSR).

Every function has a CPU path of its own; kernels only take over sweeps and must agree with it.
"""
