"""Vector analytics: health of clusters over rows sorted by cluster (CSR), exact search, and an index over rows that change.

Every function has a CPU path of its own; kernels only take over sweeps and must agree with it.
"""
