"""Ways to run and to inspect the kernels on a machine that has no GPU.

`interpret` and `GluonFault` come from `testing.gluon`; nothing of Triton is imported before they are asked for.
"""

_FROM_GLUON = ("interpret", "GluonFault")


def __getattr__(name: str):
    if name in _FROM_GLUON:
        from numa_attention.testing import gluon

        return getattr(gluon, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
