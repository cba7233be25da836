"""Paged attention that knows the NUMA domains of the device it runs on.

A kernel library on torch and Triton alone; it knows nothing of vLLM. Importing the package imports neither:
each module is imported by whoever needs it, ``from numa_attention.runner import attend``.
"""

__version__ = "0.1.0"
