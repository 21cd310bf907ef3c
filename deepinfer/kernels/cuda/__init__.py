"""Kernels in CUDA C++ for Hopper, each with a Triton twin that serves where they do not."""
