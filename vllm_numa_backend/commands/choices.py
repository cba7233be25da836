"""What the settings in force make of a layer on a device, which need not be there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .. import settings

if TYPE_CHECKING:
    from numa_attention.shapes import LayerShape
    from numa_attention.topology import Topology
    from numa_attention.variants import Variant


def kernels_on(device: Topology, chosen: settings.Settings, *, pretended: bool) -> str:
    """ "triton" or "torch". pretended: the device is named, not found here.

    Raises ValueError or ImportError where the kernels that are asked for cannot run on it.
    """
    import torch

    from numa_attention.jit import resolve

    if device.generation == "cpu" or not pretended:
        return resolve(chosen.kernels, torch.device("cpu" if device.generation == "cpu" else "cuda"))
    if chosen.kernels == "torch":
        raise ValueError(
            f"NUMA_SWIZZLE_KERNELS=torch attends on the CPU only, not on {device.name}; unset it, or set it to triton."
        )
    return "triton"


def variants_of(
    shape: LayerShape, device: Topology, kernels: str, chosen: settings.Settings
) -> dict[str, Variant]:
    """The variant of each phase, with one query token a decoding request. Raises ValueError where there is none."""
    from numa_attention.variants import check_clusters, choose_decode, choose_prefill, place

    aiter = chosen.aiter if chosen.placement == "dispatch" else "never"
    found = {
        "decode": choose_decode(shape, device, kernels, 1, chosen.mapping, aiter=aiter),
        "prefill": choose_prefill(shape, device, kernels, chosen.mapping, aiter=aiter),
    }
    if chosen.clusters:
        check_clusters(found["decode"])
    return {phase: place(variant, chosen.placement, device) for phase, variant in found.items()}
