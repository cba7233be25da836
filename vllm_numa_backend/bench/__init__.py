"""Kernel benchmarks: our kernels beside vLLM's own attention kernels, in one run, on one GPU."""
