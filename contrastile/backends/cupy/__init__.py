"""The cupy backend: CUDA C++ kernels compiled for the GPU at hand, on CuPy arrays, with no torch.

``lse`` forms the logits X once for both directions; ``gradients`` forms them again, chunk by chunk, turns them into G
in a fixed workspace, and leaves the two products to cuBLAS. The kernels are in ``cuda/``: some for Hopper, and others
for sm_80 and newer, which CONTRASTILE_CUPY_KERNELS=sm80 also selects on Hopper. ``record`` is the first to import CuPy.
"""
