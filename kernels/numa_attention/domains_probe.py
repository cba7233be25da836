"""Where workgroups run and how far memory is from there, asked of the device itself.

NVIDIA: each SM times single reads of a set of addresses that lie in the L2. A read of the other partition's half takes
longer, by SM and address, which `domain_map.cluster` turns into a map. AMD: a workgroup reads the number of its XCD.
"""

from __future__ import annotations

import torch
import triton.language as tl

from numa_attention.domain_map import SM_IDS, NoDomainMap
from numa_attention.jit import interpreting, kernel
from numa_attention.placement_device import GENERATIONS, own_place
from numa_attention.topology import Topology

LINE = 128  # bytes of an L2 line
SPREAD = 32 << 20  # bytes over which the addresses are strewn: they hash to every slice of both partitions
# the first workgroup on an SM measures: with more of them than SMs, and some launches, each SM gets one
WORKGROUPS_PER_UNIT, MOST_LAUNCHES = 8, 8
XCC_WORKGROUPS_PER_UNIT = 4  # of the launch that shows how an AMD device deals workgroups

# Nothing of the hardware or of ptxas keeps the second clock behind the value but a barrier whose mask is made of it:
# the value is 0, so all lanes meet. A weak read would be done once for all repetitions.
READ = tl.constexpr("""{
.reg .u32 begin, end, value;
mov.u32 begin, %clock;
ld.relaxed.gpu.global.u32 value, [$1];
not.b32 value, value;
bar.warp.sync value;
mov.u32 end, %clock;
sub.u32 $0, end, begin;
}""")
# one lane adds 0 where the line is at home, however many copies of it there are
ADD = tl.constexpr("""{
.reg .u32 begin, end, value, lane;
.reg .pred first;
mov.u32 lane, %laneid;
setp.eq.u32 first, lane, 0;
mov.u32 value, 0;
mov.u32 begin, %clock;
@first atom.global.add.u32 value, [$1], 0;
not.b32 value, value;
bar.warp.sync value;
mov.u32 end, %clock;
sub.u32 $0, end, begin;
}""")
METHODS = ("read", "add")


@kernel
def latency_kernel(
    memory,  # int32, zeros
    offsets,  # int64 [ADDRESSES], in elements of `memory`
    latencies,  # int32 [IDS, ADDRESSES], cycles
    claimed,  # int32 [IDS], zeros
    ADDRESSES: tl.constexpr,
    REPEATS: tl.constexpr,
    IDS: tl.constexpr,
    BY_ADDING: tl.constexpr,
):
    """The least latency in cycles of each address from each SM, over REPEATS reads one after another."""
    sm = own_place()
    if sm >= IDS:
        return
    if tl.atomic_xchg(claimed + sm, 1) == 0:
        for number in range(ADDRESSES):
            # each SM begins elsewhere, or all would ask the same slice at the same time
            o_address = (number + sm * 37) % ADDRESSES
            p_address = (memory + tl.load(offsets + o_address)).to(tl.int64)
            least = 1 << 30
            # the first one also brings the line into the L2 and the page into the TLB
            for _ in range(REPEATS + 1):
                if BY_ADDING:
                    cycles = tl.inline_asm_elementwise(
                        ADD, "=r,l", [p_address], dtype=tl.int32, is_pure=False, pack=1
                    )
                else:
                    cycles = tl.inline_asm_elementwise(
                        READ, "=r,l", [p_address], dtype=tl.int32, is_pure=False, pack=1
                    )
                least = tl.minimum(least, cycles)
            tl.store(latencies + sm * ADDRESSES + o_address, least)


@kernel
def xcc_kernel(domains):
    """The XCD on which each workgroup runs, int32 [workgroups]."""
    tl.store(domains + tl.program_id(0), own_place())


def probe_latencies(
    device: torch.device | str, method: str = "read", addresses: int = 768, repeats: int = 12
) -> torch.Tensor:
    """Latencies of L2 hits in cycles, float32 [SM ids, addresses] on the CPU; rows of ids that no SM has are NaN.

    method: one of METHODS. Takes some milliseconds of an otherwise idle device, and the time to compile. Raises
    NoDomainMap where kernels are interpreted.
    """
    if method not in METHODS:
        raise ValueError(f"method={method!r} is unknown: choose one of {', '.join(METHODS)}.")
    if interpreting():
        raise NoDomainMap(
            "kernels are interpreted in this process, and domains are measured: unset TRITON_INTERPRET and "
            "NUMA_SWIZZLE_KERNELS."
        )
    device = torch.device(device)
    units = torch.cuda.get_device_properties(device).multi_processor_count
    with torch.cuda.device(device):
        arguments = probe_arguments(addresses, device)
        _, _, latencies, claimed = arguments
        constants = probe_constants(method, repeats, addresses)
        for _ in range(MOST_LAUNCHES):
            latency_kernel[(units * WORKGROUPS_PER_UNIT,)](*arguments, **constants)
            if int(claimed.sum()) >= units:
                break
    found = latencies.cpu().float()
    found[claimed.cpu() == 0] = float("nan")
    return found


def probe_arguments(addresses: int, device: torch.device | str) -> tuple[torch.Tensor, ...]:
    """memory, offsets, latencies and claimed, as `latency_kernel` takes them; the addresses are always the same."""
    lines = torch.randperm(SPREAD // LINE, generator=torch.Generator().manual_seed(0))[:addresses]
    return (
        torch.zeros(SPREAD // 4, dtype=torch.int32, device=device),
        (lines * (LINE // 4)).to(device),
        torch.full((SM_IDS, addresses), -1, dtype=torch.int32, device=device),
        torch.zeros(SM_IDS, dtype=torch.int32, device=device),
    )


def probe_constants(method: str, repeats: int, addresses: int) -> dict[str, int | bool]:
    """The constants of `latency_kernel` and its launch options: one warp, which issues one read at a time."""
    return dict(
        ADDRESSES=addresses, REPEATS=repeats, IDS=SM_IDS, BY_ADDING=method == "add", num_warps=1, num_stages=1
    )


def probe_xccs(device: torch.device | str, workgroups: int) -> torch.Tensor:
    """The XCD of each of `workgroups` workgroups of one launch on an AMD device, int32 [workgroups] on the CPU."""
    device = torch.device(device)
    domains = torch.full((workgroups,), -1, dtype=torch.int32, device=device)
    with torch.cuda.device(device):
        xcc_kernel[(workgroups,)](domains, num_warps=1)
    return domains.cpu()


def dealt_xccs(known: Topology) -> dict[str, object]:
    """What one launch on the AMD device here shows: workgroups of each XCD, and how many w ran on XCD w mod domains."""
    if known.generation not in GENERATIONS:
        return {
            "measured": False,
            "how": f"{known.generation} does not tell a workgroup on which XCD it runs.",
        }
    xccs = probe_xccs("cuda", XCC_WORKGROUPS_PER_UNIT * known.compute_units).tolist()
    in_turn = sum(xcc == workgroup % known.domains for workgroup, xcc in enumerate(xccs))
    return {
        "measured": True,
        "workgroups_of_xcc": {xcc: xccs.count(xcc) for xcc in sorted(set(xccs))},
        "first_xccs": xccs[: 2 * known.domains],
        "dealt_in_turn": in_turn / len(xccs),
    }
