"""Routing and experts as Triton kernels for CUDA."""
