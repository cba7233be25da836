"""Ways to run and to inspect the kernels on a machine that has no GPU."""
