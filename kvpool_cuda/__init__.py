"""The CUDA device: Triton kernels, memory and IPC. See docs/cuda.md.

Importing this package imports neither triton nor a CUDA library.
"""
