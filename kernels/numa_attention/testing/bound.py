"""A bound on the speed of the gfx1250 decode kernel, computed from its machine code: no measurement.

    python -m numa_attention.testing.bound

For each form of the pipeline: instructions of the loop over KV tiles, the cycles that they take, and the cycles that a
round leaves exposed. For the ten shapes of AMD's article on the MI450 (64 requests, 64 query heads, 1 and 2 KV heads,
head_dim 128, float8, 4k to 64k tokens): the time that bytes, requests under way, LDS, the vector and the matrix units
need at least, and which of them binds. `ASSUMPTIONS` has every figure that is not read off the code.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from math import ceil

from numa_attention.machine.machines import MI450
from numa_attention.machine.pipeline import LoopStages
from numa_attention.terminal import output_errors_in_one_sentence, print_table, table

SIMDS = 4  # of a WGP
LANES = 32
REQUESTS = 64
Q_HEADS = 64
HEAD_DIM = 128
CONTEXTS = (4096, 8192, 16384, 32768, 65536)
PAGE_SIZE = 128
# what the article says: bytes/s of both kinds, and the peak that its percentages are of
ARTICLE = {2: 17.10e12, 1: 16.65e12}
ARTICLE_PEAK = 20e12
ARTICLE_EXPOSED = {"two-stage": 680, "four-stage": 360}


@dataclass(frozen=True)
class Assumptions:
    """Figures that no data sheet at hand has.

    clock: cycles/s. latency: seconds from a TDM request to its data in LDS. lds_bytes: that LDS delivers to a WGP in a
    cycle. transcendental: cycles of one exponential of a wave; other vector instructions take one. requests: of TDM
    that the compiler lets be under way.
    """

    clock: float = 2.4e9
    latency: float = 1.0e-6
    lds_bytes: int = 128
    transcendental: int = 4
    requests: int = 11

    def matrix_cycles(self, opcode: str) -> float:
        """Cycles of one WMMA on one SIMD, from the machine's peak; float8 has twice the rate of 16-bit operands."""
        rows, columns, depth = map(int, re.search(r"_(\d+)x(\d+)x(\d+)_", opcode).groups())
        peak = MI450.flops.value * (2 if re.search(r"fp8|bf8|f8f6f4", opcode) else 1)
        return 2 * rows * columns * depth / (peak / (MI450.units * SIMDS * self.clock))


ASSUMPTIONS = Assumptions()


@dataclass(frozen=True)
class Loop:
    """A round of one wave in the loop over KV tiles, as read off the machine code.

    matrix: cycles of the matrix unit. vector: instructions of the vector unit, exponentials weighted. lds_bytes: read
    from LDS. instructions: all of them.
    """

    matrix: float
    vector: float
    lds_bytes: int
    instructions: int


# bytes a lane reads: the last number of the name are the bits of one read
_LDS = re.compile(r"ds_(load|read)_(2addr_)?(?:stride64_)?(?:tr\d+_)?[ui]?b?(\d+)")
_TRANSCENDENTAL = re.compile(r"v_(exp|log|rcp|rsq|sqrt)_")


def read_loop(instructions: Iterable[str], assumed: Assumptions = ASSUMPTIONS) -> Loop:
    """What a loop's instructions, opcode first, take."""
    opcodes = Counter(text.split()[0] for text in instructions)
    matrix, vector, lds_bytes = 0.0, 0.0, 0
    for opcode, number in opcodes.items():
        if "wmma" in opcode:
            matrix += number * assumed.matrix_cycles(opcode)
        elif opcode.startswith("v_"):
            vector += number * (assumed.transcendental if _TRANSCENDENTAL.match(opcode) else 1)
        elif found := _LDS.match(opcode):
            lds_bytes += number * LANES * int(found[3]) // 8 * (2 if found[2] else 1)
    return Loop(matrix, vector, lds_bytes, opcodes.total())


@dataclass(frozen=True)
class Form:
    """One form of the pipeline as compiled for one number of KV heads.

    rows: of the packed tile, 16 a wave. block_n: tokens of a KV tile. requests: TDM requests of a round's keys and
    values. tensor_row: bytes of their rows. workgroups: of the launch. shared: bytes of LDS of a workgroup. loop: of
    one wave.
    """

    name: str
    rows: int
    block_n: int
    requests: int
    tensor_row: int
    workgroups: int
    shared: int
    loop: Loop

    @property
    def tile_bytes(self) -> int:
        """Of keys, or of values."""
        return self.block_n * HEAD_DIM

    def tiles_ahead(self) -> float:
        """Tiles of keys or values under way while a round computes."""
        return {"single": 0, "two-stage": 2, "four-stage": 4}[self.name]

    def bytes_in_flight(self, assumed: Assumptions = ASSUMPTIONS) -> float:
        """Of one workgroup, within the compiler's limit of requests."""
        return min(self.tiles_ahead(), 2 * assumed.requests / self.requests) * self.tile_bytes

    def exposed(self, load: float = 0.0) -> float:
        """Cycles of a round of one wave in which the matrix unit waits, with copies that take `load` cycles.

        Without a load it is what the softmax exposes, if other workgroups hide the copies. Both halves of the softmax
        are taken as equal, and so are both products.
        """
        half_matrix, half_vector = self.loop.matrix / 2, self.loop.vector / 2
        stages = LoopStages(load, half_matrix, half_vector, half_vector, half_matrix)
        if self.name == "single":
            return stages.single()
        return stages.two_stage() if self.name == "two-stage" else stages.four_stage()


@dataclass(frozen=True)
class Bound:
    """What one launch takes at least.

    seconds: by what it is that binds; time is the largest of them, and the latency of the first tile. rate: bytes of
    keys and values over that time. of_article_peak, of_peak: as shares of 20 and of 19.6 TB/s.
    """

    form: str
    kv_heads: int
    context: int
    bytes: int
    seconds: dict[str, float]
    binds: str
    time: float
    rate: float
    of_article_peak: float
    of_peak: float


def bound(form: Form, kv_heads: int, context: int, assumed: Assumptions = ASSUMPTIONS) -> Bound:
    """The bound of one shape; see the module's text."""
    units = REQUESTS * kv_heads
    tiles = units * ceil(context / form.block_n)
    rounds = ceil(tiles / form.workgroups)  # of the workgroup that has most
    per_unit = ceil(form.workgroups / MI450.units)
    bandwidth = MI450.memory_bandwidth.value
    total = units * 2 * context * HEAD_DIM
    query_bytes = (
        REQUESTS * Q_HEADS * HEAD_DIM * 2 * 2
    )  # query and output, bfloat16; parts may stay in the L2
    in_flight = form.workgroups * form.bytes_in_flight(assumed)
    waves = form.rows // 16
    # a round's cycles of a WGP: its workgroups share LDS and, wave by wave, the SIMDs
    lds = per_unit * waves * form.loop.lds_bytes / assumed.lds_bytes
    on_simd = ceil(per_unit * waves / SIMDS)
    period = form.loop.matrix + form.exposed(assumed.latency * assumed.clock)
    seconds = {
        "memory": (total + query_bytes) / bandwidth,
        # the copies of a single buffer are waited for: their time is in its exposed cycles
        "requests": total / (in_flight / assumed.latency) if in_flight else 0.0,
        "LDS": rounds * lds / assumed.clock,
        "vector unit": rounds * on_simd * form.loop.vector / assumed.clock,
        "matrix unit": rounds * on_simd * form.loop.matrix / assumed.clock,
        "one wave after the other": rounds * period / assumed.clock,
    }
    binds = max(seconds, key=seconds.get)
    time = seconds[binds] + assumed.latency
    rate = total / time
    return Bound(
        form.name, kv_heads, context, total, seconds, binds, time, rate, rate / ARTICLE_PEAK, rate / bandwidth
    )


def compile_form(name: str, kv_heads: int) -> Form:
    """Compile the kernel for the article's layer and read its loop. Raises RuntimeError where Triton is too old."""
    import torch

    from numa_attention.shapes import LayerShape
    from numa_attention.testing import isa
    from numa_attention.testing.capture import Call, compile_call
    from numa_attention.topology import pretend

    shape = LayerShape(Q_HEADS, kv_heads, HEAD_DIM, HEAD_DIM, torch.bfloat16, torch.float8_e4m3fn, PAGE_SIZE)
    call = Call(shape, side_by_side=True)
    (compiled,) = compile_call(call, "gfx1250", "decode", form=name)
    variant = compiled.variant
    if variant.name != "cdna5-decode":
        raise RuntimeError(f"the kernel cannot be compiled here: {variant.describe()}")
    resources, code = isa.inspect(compiled.result, pretend("gfx1250").shared_bytes)
    begin, end = code.main_loop()
    loop, requests = read_loop(code.instructions[begin:end]), code.count((begin, end))["tensor copy"]
    (tensor_row,) = isa.tensor_rows(compiled.result)
    return Form(
        name,
        variant.block_m,
        variant.block_n,
        requests,
        tensor_row,
        variant.workgroups,
        resources.shared,
        loop,
    )


def _print_tables(forms: dict[int, list[Form]], bounds: list[Bound]) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    load = ASSUMPTIONS.latency * ASSUMPTIONS.clock
    loops = table(
        "KV heads", "form", "rows", "TDM rows", "WMMA cycles", "vector cycles", "LDS bytes", "instructions",
        "exposed by the softmax", "article", "with the load", "in flight, KiB", "hides, us",
        title="A round of one wave, computed", text=("form",),
    )  # fmt: skip
    for kv_heads, each in forms.items():
        for form in each:
            in_flight = form.workgroups * form.bytes_in_flight()
            loops.add_row(
                str(kv_heads), form.name, str(form.rows), str(form.tensor_row),
                f"{form.loop.matrix:.0f}", f"{form.loop.vector:.0f}",
                str(form.loop.lds_bytes), str(form.loop.instructions), f"{form.exposed():.0f}",
                str(ARTICLE_EXPOSED.get(form.name, "")), f"{form.exposed(load):.0f}",
                f"{form.bytes_in_flight() / 1024:.0f}", f"{in_flight / MI450.memory_bandwidth.value * 1e6:.2f}",
            )  # fmt: skip
    print_table(console, loops)
    shapes = table(
        "KV heads", "tokens", "GB", "form", "bound, us", "TB/s", "of 20", "of 19.6", "article, TB/s", "what binds",
        title="Bounds, not measurements", text=("form", "what binds"),
    )  # fmt: skip
    for each in bounds:
        shapes.add_row(
            str(each.kv_heads), str(each.context), f"{each.bytes / 1e9:.2f}", each.form, f"{each.time * 1e6:.0f}",
            f"{each.rate / 1e12:.2f}", f"{each.of_article_peak:.0%}", f"{each.of_peak:.0%}",
            f"{ARTICLE[each.kv_heads] / 1e12:.2f}", each.binds,
        )  # fmt: skip
    print_table(console, shapes)
    assumed = ", ".join(f"{name} {value:g}" for name, value in asdict(ASSUMPTIONS).items())
    console.print(f"Assumed: {assumed}", soft_wrap=True)


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m numa_attention.testing.bound", description=__doc__.splitlines()[0]
    )
    names = ("single", "two-stage", "four-stage")
    parser.add_argument("--form", action="append", choices=names, help="default: all three")
    parser.add_argument("--kv-heads", action="append", type=int, choices=(1, 2), help="default: both")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    options = parser.parse_args(arguments)
    forms = {
        kv_heads: [compile_form(name, kv_heads) for name in options.form or names]
        for kv_heads in options.kv_heads or (1, 2)
    }
    bounds = [
        bound(form, kv_heads, context)
        for kv_heads, each in forms.items()
        for context in CONTEXTS
        for form in each
    ]
    if options.json:
        answer = {
            "assumptions": asdict(ASSUMPTIONS),
            "forms": [
                asdict(form) | {"kv_heads": kv_heads, "exposed_by_softmax": form.exposed()}
                for kv_heads, each in forms.items()
                for form in each
            ],
            "bounds": [asdict(each) for each in bounds],
        }
        print(json.dumps(answer))
    else:
        _print_tables(forms, bounds)
    return 0


if __name__ == "__main__":
    with output_errors_in_one_sentence():
        raise SystemExit(main())
