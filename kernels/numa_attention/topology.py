"""What the device is: NUMA domains, compute units, caches.

A *NUMA domain* is the set of compute units behind one L2 slice (an XCD on MI300X, an L2 partition on H100/H200,
a die on B200). *Dispatch domains* are the domains over which the hardware deals consecutive workgroups round robin;
where it does not (NVIDIA), there is one dispatch domain, and a mapping that trusts dispatch has nothing to swizzle.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Topology:
    """One device as the dispatcher sees it.

    compute_units: CUs, WGPs or SMs of the whole device. domains: NUMA domains. dispatch_domains: domains over which
    workgroup ids are dealt round robin, 1 where they are not. l2_bytes: L2 of the whole device. shared_bytes: LDS or
    shared memory one workgroup can take.
    """

    name: str
    generation: str
    compute_units: int
    domains: int
    dispatch_domains: int
    l2_bytes: int
    shared_bytes: int


MIB = 1 << 20
KIB = 1 << 10

# AMD's CDNA architecture papers and NVIDIA's architecture papers; the H200's two L2 partitions of 66 SMs each are
# also visible in the latency of its L2 hits.
PRODUCTS = {
    "MI300X": Topology("MI300X", "gfx942", 304, 8, 8, 32 * MIB, 64 * KIB),
    "MI308X": Topology("MI308X", "gfx942", 80, 4, 4, 16 * MIB, 64 * KIB),
    "MI325X": Topology("MI325X", "gfx942", 304, 8, 8, 32 * MIB, 64 * KIB),
    "MI350X": Topology("MI350X", "gfx950", 256, 8, 8, 32 * MIB, 160 * KIB),
    "MI355X": Topology("MI355X", "gfx950", 256, 8, 8, 32 * MIB, 160 * KIB),
    "MI450": Topology("MI450", "gfx1250", 256, 8, 8, 32 * MIB, 320 * KIB),
    "H100": Topology("H100", "sm_90", 132, 2, 1, 50 * MIB, 227 * KIB),
    "H200": Topology("H200", "sm_90", 132, 2, 1, 60 * MIB, 227 * KIB),
    "B200": Topology("B200", "sm_100", 148, 2, 1, 126 * MIB, 227 * KIB),
    "cpu": Topology("cpu", "cpu", 4, 1, 1, 32 * MIB, 64 * KIB),
}
# the product that stands for a generation when only the generation is named
GENERATIONS = {
    "gfx942": "MI300X",
    "gfx950": "MI355X",
    "gfx1250": "MI450",
    "sm_90": "H200",
    "sm_100": "B200",
    "cpu": "cpu",
}


def pretend(name: str) -> Topology:
    """The topology of a named generation ("gfx942") or product ("MI300X"), on any machine.

    Raises ValueError with the known names.
    """
    known = {key.lower(): value for key, value in PRODUCTS.items()}
    wanted = GENERATIONS.get(name.lower(), name).lower()
    if wanted not in known:
        raise ValueError(
            f"unknown device {name!r}: name one of {', '.join(GENERATIONS)} or {', '.join(PRODUCTS)}"
        )
    return known[wanted]


def detect(device: torch.device | str | None = None) -> Topology:
    """The topology of `device` (default: the current GPU if there is one, else the CPU)."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    if device.type == "cpu":
        return PRODUCTS["cpu"]
    properties = torch.cuda.get_device_properties(device)
    units = properties.multi_processor_count
    l2_bytes = getattr(properties, "L2_cache_size", 0)
    if torch.version.hip:
        generation = properties.gcnArchName.split(":")[0]
        # by its own name first: MI308X has fewer compute units an XCD than others of its generation
        named = (p for p in PRODUCTS.values() if p.generation == generation and p.name in properties.name)
        known = next(named, PRODUCTS.get(GENERATIONS.get(generation, "")))
        # partitioned modes (CPX, DPX) and MI300A expose fewer XCDs: count them from the compute units
        domains = min(max(1, units * known.domains // known.compute_units), known.domains) if known else 1
        shared = known.shared_bytes if known else 64 * KIB
        per_domain = known.l2_bytes // known.domains if known else l2_bytes
        return Topology(
            properties.name,
            generation if known else "gpu",
            units,
            domains,
            domains,
            per_domain * domains,
            shared,
        )
    generation = f"sm_{properties.major}{properties.minor}"
    known = PRODUCTS.get(GENERATIONS.get(generation, ""))
    shared = getattr(properties, "shared_memory_per_block_optin", 99 * KIB)
    return Topology(
        properties.name,
        generation if known else "gpu",
        units,
        known.domains if known else 1,
        1,
        l2_bytes,
        shared,
    )
