"""The one door to CUDA: compiled kernels (cubins), the card, its memory, its clocks. CuPy lives here.

Nothing here compiles at run time. A card for which no cubin was built is refused by name.
"""
