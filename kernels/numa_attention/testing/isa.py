"""Reading a compiled kernel: registers, spills, shared memory, and what its loops are made of.

AMD code is read as the assembly that LLVM prints, NVIDIA code as the SASS that nvdisasm prints.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

import triton
from triton.compiler import CompiledKernel

from numa_attention.testing.unwritten import unwritten_reads

# what an instruction is for -> how it looks, opcode first
AMD_KINDS = {
    "mfma": r"v_s?mfma\w*",
    "wmma": r"v_s?wmma\w*",
    "float8 wmma": r"v_s?wmma\w*_(fp8|bf8|f8f6f4)",
    "async copy": r"(tensor_load_to_lds|global_load_async_to_lds|global_load_lds|buffer_load\S+ .*\blds\b)",
    "tensor copy": r"tensor_load_to_lds",
    "tensor wait": r"s_wait_tensorcnt",
    "tensor wait for less than all": r"s_wait_tensorcnt (0x)?0*[1-9a-f]",
    "cluster barrier": r"s_barrier_(signal|wait) -3",
    "write-back of caches": r"global_wb",
    "invalidation of caches": r"global_inv",
    "LDS store": r"ds_store",
    "move between lanes through LDS": r"ds_b?permute",
    "wide load": r"(global|buffer|flat)_load_(dwordx4|b128)(?! .*\blds\b)",
    "transposed read": r"(ds_read_\w*_tr_|ds_load_tr|global_load_tr)",
    "atomic": r"(global|flat|buffer)_atomic",
    "exponential": r"v_(pk_)?exp_f32",
    "fused multiply-add": r"v_(pk_|dual_)?fmac?_f32",
    "scratch access": r"scratch_(load|store)",
    "domain read": r"s_getreg_b32 .*HW_REG_XCC_ID",
}
NVIDIA_KINDS = {
    "wgmma": r"[HQI]GMMA",
    "float8 wgmma": r"QGMMA",
    "mma.sync": r"[HQI]MMA",
    "tcgen05": r"UTC\w*MMA",
    "async copy": r"(LDGSTS|UTMALDG|UBLKCP)",
    "wide load": r"LDG\.\S*128",
    "transposed read": r"LDSM\.\S*T",
    "atomic": r"(ATOM|ATOMG|RED)\.",
    "exponential": r"MUFU\.EX2",
    "domain read": r"S2U?R .*SR_VIRTUALSMID",
    "fused multiply-add": r"F(FMA|FMA2)\b",
    "scratch access": r"(STL|LDL)\b",
}
MATRIX_KINDS = ("mfma", "wmma", "wgmma", "mma.sync", "tcgen05")

# how a workgroup on AMD tells another that its stores are done: the order of these decides whether it is true
ANNOUNCING = {
    "store": r"(buffer|global|flat)_store",
    "wait": r"s_waitcnt .*vmcnt\(0\)|s_wait_storecnt 0x0",
    "barrier": r"s_barrier",
    "write back": r"buffer_wbl2 sc1|global_wb scope:SCOPE_DEV",
    "atomic": AMD_KINDS["atomic"],
    "invalidate": r"buffer_inv sc1|global_inv scope:SCOPE_DEV",
}
# stores of every wave have reached the L2, all waves have come, the L2 is written back for the other domains, then the
# count; after it what this domain's L2 holds of the others' stores is dropped
ANNOUNCED = "store wait barrier write back wait atomic invalidate"
ANNOUNCED_BY_ONE_WAVE = "store wait write back wait atomic invalidate"
# around a cluster's barrier: one atomic writes back before it, another one invalidates behind it
MET_IN_A_CLUSTER = [
    "store wait barrier write back wait atomic barrier",
    "store wait barrier write back wait atomic barrier atomic invalidate",
]

_LABEL = re.compile(r"(\.L(?:BB|_x_)\w+):")
_AMD_INSTRUCTION = re.compile(r"\t([a-z]\w+.*)")
_NVIDIA_INSTRUCTION = re.compile(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:\{\s*)?(?:@!?U?P\w+\s+)?([A-Z].*)")
_BRANCH = re.compile(r"(?:s_c?branch\w*|BRA\S*)\s.*?(\.L(?:BB|_x_)\w+)")


@dataclass(frozen=True)
class Code:
    """The instructions of a kernel in their order, and its loops as ranges [begin, end) of them.

    unwritten: on NVIDIA, instructions that read registers which nothing has written, see `unwritten`.
    """

    kinds: dict[str, str]
    instructions: list[str]
    loops: list[tuple[int, int]]
    unwritten: tuple[str, ...] = ()

    def count(self, loop: tuple[int, int] | None = None) -> Counter[str]:
        """Instructions of each kind, in the whole kernel or in one loop."""
        begin, end = loop or (0, len(self.instructions))
        return Counter(
            kind
            for text in self.instructions[begin:end]
            for kind, pattern in self.kinds.items()
            if re.match(pattern, text)
        )

    def main_loop(self) -> tuple[int, int] | None:
        """The innermost loop that multiplies tiles and, where any does, exponentiates.

        Kernels have several: the walk over tiles that need no mask is the shortest, with as many exponentials, and runs
        the longest. Products that take no matrix instruction (float32 on NVIDIA) show as fused multiply-adds.
        """
        counts = {loop: self.count(loop) for loop in self.loops}
        multiplying = [loop for loop in self.loops if any(counts[loop][kind] for kind in MATRIX_KINDS)]
        if not multiplying:
            most = max((count["fused multiply-add"] for count in counts.values()), default=0)
            multiplying = [loop for loop in self.loops if 2 * counts[loop]["fused multiply-add"] > most]
        # waits that repeat may look like loops of their own, around some of the products and few exponentials
        multiplying = [loop for loop in multiplying if counts[loop]["exponential"]] or multiplying
        innermost = [
            (begin, end)
            for begin, end in multiplying
            if not any(begin <= b and e <= end and (b, e) != (begin, end) for b, e in multiplying)
        ]

        def density(loop: tuple[int, int]) -> tuple[float, int]:
            length = loop[1] - loop[0]
            return counts[loop]["exponential"] / length, -length

        return max(innermost, key=density, default=None)


_TENSOR_ROW = re.compile(r"tensordesc<(?:tensor<)?(?:\d+x)*(\d+)x[a-z]+(\d+)")


def tensor_rows(kernel: CompiledKernel) -> list[int]:
    """Bytes of a row in the requests to the tensor mover, ascending; empty where a kernel makes none."""
    rows = {int(width) * int(bits) // 8 for width, bits in _TENSOR_ROW.findall(kernel.asm["ttgir"])}
    return sorted(rows)


def announcements(code: Code) -> list[str]:
    """For each atomic, the kinds of ANNOUNCING from the last store before it to what invalidates after it, in order.

    Repetitions count once; the wait for the atomic's own result is left out, and so are atomics that neither follow a
    write-back nor precede an invalidation: they count what no data hang on, as those of hardware placement do.
    """
    words = [
        kind for text in code.instructions for kind, pattern in ANNOUNCING.items() if re.match(pattern, text)
    ]
    found = []
    for place, word in enumerate(words):
        if word != "atomic":
            continue
        begin = max((at for at in range(place) if words[at] == "store"), default=0)
        before = [kind for kind, _ in groupby(words[begin:place])]
        after = next((kind for kind in words[place + 1 :] if kind != "wait"), "nothing")
        if "write back" in before or after == "invalidate":
            found.append(" ".join([*before, "atomic", after]))
    return found


def parse(listing: str, kinds: dict[str, str]) -> Code:
    """A kernel's instructions and loops. A loop is what lies between a label and the last branch back to it."""
    pattern = _AMD_INSTRUCTION if kinds is AMD_KINDS else _NVIDIA_INSTRUCTION
    labels: dict[str, int] = {}
    ends: dict[str, int] = {}
    instructions: list[str] = []
    for line in listing.splitlines():
        if line.startswith(".Lfunc_end"):
            break
        if label := _LABEL.match(line):
            labels[label[1]] = len(instructions)
        elif instruction := pattern.match(line):
            instructions.append(instruction[1])
            target = _BRANCH.match(instruction[1])
            if target and target[1] in labels:
                ends[target[1]] = len(instructions)
    return Code(kinds, instructions, [(labels[label], end) for label, end in ends.items()])


@dataclass(frozen=True)
class Resources:
    """What one kernel takes.

    registers: vector registers of a thread. spills: registers that spilled (AMD), instructions that access spilled ones
    (NVIDIA). scratch: bytes a thread keeps in memory. shared: bytes of LDS or shared memory of a workgroup.
    occupancy: wavefronts of a SIMD (AMD) or warps of an SM (NVIDIA) that run at a time.
    """

    registers: int
    spills: int
    scratch: int
    shared: int
    occupancy: int


def inspect(kernel: CompiledKernel, shared_bytes: int) -> tuple[Resources, Code]:
    """Read a compiled kernel. shared_bytes: LDS or shared memory of one compute unit."""
    if "amdgcn" in kernel.asm:
        return _inspect_amd(kernel, shared_bytes)
    return _inspect_nvidia(kernel, shared_bytes)


SIMDS_PER_UNIT = 4


def _inspect_amd(kernel: CompiledKernel, shared_bytes: int) -> tuple[Resources, Code]:
    text = kernel.asm["amdgcn"]

    def number(pattern: str) -> int:
        found = re.search(pattern + r"\s+(\d+)", text)
        if found is None:
            raise ValueError(
                f"the assembly of {kernel.name} has no {pattern!r}: this Triton prints it otherwise."
            )
        return int(found[1])

    shared = kernel.metadata.shared
    occupancy = number("; Occupancy:")
    if shared:
        wavefronts = shared_bytes // shared * kernel.metadata.num_warps
        # of the fullest SIMD, where a workgroup has fewer wavefronts than a unit has SIMDs
        occupancy = min(occupancy, -(-wavefronts // SIMDS_PER_UNIT))
    resources = Resources(
        registers=number(r"\.vgpr_count:"),
        spills=number(r"\.vgpr_spill_count:"),
        scratch=number(r"\.private_segment_fixed_size:"),
        shared=shared,
        occupancy=occupancy,
    )
    return resources, parse(text, AMD_KINDS)


MOST_REGISTERS = 255  # of an NVIDIA thread
SM_REGISTERS, SM_WARPS, SM_WORKGROUPS = 65536, 64, 32
RESERVED_SHARED = 1024  # bytes of shared memory that a workgroup takes besides its own


def _inspect_nvidia(kernel: CompiledKernel, shared_bytes: int) -> tuple[Resources, Code]:
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder) / "kernel.cubin"
        binary.write_bytes(kernel.asm["cubin"])
        usage = _run(triton.knobs.nvidia.cuobjdump.path, "-res-usage", binary)
        listing = _run(triton.knobs.nvidia.nvdisasm.path, "-c", binary)
    code = replace(parse(listing, NVIDIA_KINDS), unwritten=tuple(unwritten_reads(listing)))
    used = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
    warps, shared = kernel.metadata.num_warps, kernel.metadata.shared
    registers_of_workgroup = -(-used["REG"] // 8) * 8 * 32 * warps
    workgroups = min(
        SM_WORKGROUPS,
        SM_WARPS // warps,
        SM_REGISTERS // registers_of_workgroup,
        (shared_bytes + RESERVED_SHARED) // (shared + RESERVED_SHARED),
    )
    resources = Resources(
        registers=used["REG"],
        spills=code.count()["scratch access"],
        scratch=used["STACK"] + used["LOCAL"],
        shared=shared,
        occupancy=workgroups * warps,
    )
    return resources, code


def _run(*command) -> str:
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, check=True).stdout
