"""NumPy twins of the kernels in cuda/, one module a family and of the same name, each written first.

A twin is the meaning of its kernel: integers must be equal bit for bit, floats to the stated tolerance.
The CPU backend runs the twins block by block, so they are used every day and not only in tests.
"""
