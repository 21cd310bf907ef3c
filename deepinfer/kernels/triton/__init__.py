"""Kernels for Hopper GPUs, in Triton: one module per operation, each the twin of one in `kernels/reference`."""
