"""The machine model: what the caches do with a mapping, where the KV cache goes, which variant that suggests.

machines.py      the machines as data, each figure with its source
closed_form.py   L2 hit rate in plain Python, what the dispatcher uses
cache.py         L2 simulation at tile grain (needs the extra `model`: numba)
counters.py      what ncu counts of a launch
placement.py     the KV cache over two hardware axes: memory, communication, operations, latency
pipeline.py      commands issued, prefill utilisation, exposed latency of the decode loops
plan.py          tensor-parallel and context-parallel sizes for a model and a machine
dispatch.py      mapping and splits for a layer, with the reason

Nothing here imports torch, triton or vLLM.
"""


class ModelError(ValueError):
    """An input that the model has no answer for: one sentence that says what to change."""
