"""The cupy backend: CUDA C++ kernels compiled for the GPU at hand, on CuPy arrays, with no torch.

``lse`` reads X once for both directions; ``gradients`` recomputes it chunk by chunk into a fixed workspace and leaves
the two products to cuBLAS. The kernels are in ``cuda/``: Hopper's own, and others for sm_80 and newer, which
CONTRASTILE_CUPY_KERNELS=sm80 has run on Hopper too. ``record`` is the first to import CuPy.
"""
