"""Benchmarks against eager autograd and against PyTorch's own ways of compiling a backward."""
