"""Compile the kernels for devices that are not there, and say what became of them.

    python -m numa_attention.testing.offline --device gfx942 --subset

Exit code 1 if a kernel does not compile, spills registers, takes more LDS than the device has, or reads a register that
nothing has written.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import triton

from numa_attention.decode import cdna5_variant
from numa_attention.terminal import output_errors_in_one_sentence, print_table, table
from numa_attention.testing import isa
from numa_attention.testing.capture import TARGETS, Call, compile_call
from numa_attention.testing.offline_calls import all_calls, common_calls, describe
from numa_attention.topology import pretend

# (generation, kernel, tile) -> why it is used although registers spill in its main loop, or much outside of it
ACCEPTED = {
    ("sm_90", "prefill_kernel", "128x64 4w 3s"): "fastest of those measured on an H200, at pages of 16",
    **{
        ("sm_90", "prefill_kernel", tile): (
            "fastest of those measured on an H200; it merges parts of tiles, and writes outputs, once a tile of queries"
        )
        for tile in ("128x128 12w 3s", "128x128 12w 2s", "128x64 12w 3s", "128x64 12w 2s")
    },
}
# (generation, kernel, layer) -> why it is compiled although it spills much outside of its main loop
ACCEPTED_LAYERS = {
    ("sm_90", "prefill_kernel", "bf16 d128 g8 p16 window sinks soft_cap alibi lse"): (
        "all options of a layer at once, which no model has"
    ),
}
# what a kernel on NVIDIA may spill: bytes a thread, and of the instructions of its main loop
FEW_BYTES, FEW_IN_LOOP = 160, 1 / 50


@dataclass(frozen=True)
class Report:
    """One kernel compiled for one generation.

    tile: block_m x block_n, warps, stages; empty for kernels that have no variant. whole, main_loop: instructions of
    each kind (see `isa`) in the kernel and in the loop over tiles that need no mask; loop_length: all its instructions.
    announcements: on AMD, how each atomic of a merge follows the stores that it announces, see `isa.announcements`.
    tensor_rows: bytes of a row in the requests to the tensor mover, of each kind of request.
    unwritten: on NVIDIA, instructions that read registers which nothing has written.
    failure: why it does not compile, empty where it does.
    """

    generation: str
    kernel: str
    call: str
    tile: str
    resources: isa.Resources
    shared_limit: int
    whole: dict[str, int]
    main_loop: dict[str, int]
    loop_length: int
    announcements: list[str]
    seconds: float
    failure: str = ""
    tensor_rows: tuple[int, ...] = ()
    unwritten: tuple[str, ...] = ()

    def faults(self) -> list[str]:
        """What is wrong with it; empty if nothing is."""
        found = [f"does not compile: {self.failure}"] if self.failure else []
        if self.resources.shared > self.shared_limit:
            found.append(f"needs {self.resources.shared} bytes of LDS, there are {self.shared_limit}")
        if self._spills() and not self._accepted():
            found.append(self._spills())
        if self.unwritten:
            more = f", and {len(self.unwritten) - 1} more" if len(self.unwritten) > 1 else ""
            found.append(f"computes with what nothing has written: {self.unwritten[0]}{more}")
        in_cluster = bool(self.whole.get("cluster barrier"))
        if in_cluster and self.announcements != isa.MET_IN_A_CLUSTER:
            found.append(f"meets its cluster before its part is there: {'; '.join(self.announcements)}")
        for order in [] if in_cluster else self.announcements:
            if order not in (isa.ANNOUNCED, self._alone()):
                found.append(f"announces its part too early: {order}")
        return found

    def _alone(self) -> str | None:
        """The order that is enough where a workgroup is one wave."""
        return isa.ANNOUNCED_BY_ONE_WAVE if " 1w " in f" {self.tile} " else None

    def notes(self) -> list[str]:
        """What is known and accepted; empty if nothing is."""
        return [f"{self._spills()}; {self._accepted()}"] if self._spills() and self._accepted() else []

    def _accepted(self) -> str | None:
        used = self.resources
        if self.generation.startswith("sm_") and self.call.startswith("fp32"):
            return "exact float32 has no matrix instructions there, and spills whatever the tile"
        few = self._spills_in_loop() <= FEW_IN_LOOP * self.loop_length
        if self.generation.startswith("sm_") and few and used.scratch <= FEW_BYTES:
            if self._spills_in_loop():
                return f"at most one in {round(1 / FEW_IN_LOOP)} instructions of the main loop"
            return "a few registers once a tile of queries, none a tile of keys"
        layer = ACCEPTED_LAYERS.get((self.generation, self.kernel, self.call))
        return layer or ACCEPTED.get((self.generation, self.kernel, self.tile))

    def _spills_in_loop(self) -> int:
        return self.main_loop.get("scratch access", 0)

    def _spills(self) -> str:
        used, in_loop = self.resources, self._spills_in_loop()
        if not used.spills and not used.scratch:
            return ""
        where = f"{in_loop} of them in the main loop" if in_loop else "none in the main loop"
        return f"spills: {used.spills} ({where}), {used.scratch} bytes of scratch a thread"


def reports(generation: str, calls: list[tuple[Call, str]], **tile: int | str) -> Iterator[Report]:
    """Compile each (call, step) for a generation. tile: fields of the variant to be replaced."""
    topology = pretend(generation)
    for call, step in calls:
        start = time.perf_counter()
        try:
            kernels = compile_call(call, generation, step, **tile)
        except Exception as error:  # whatever a compiler raises: the other kernels are still of interest
            yield _not_compiled(
                generation, call, step, topology.shared_bytes, error, time.perf_counter() - start
            )
            continue
        for compiled in kernels:
            resources, code = isa.inspect(compiled.result, topology.shared_bytes)
            variant, loop = compiled.variant, code.main_loop() if compiled.variant else None
            yield Report(
                generation=generation,
                kernel=compiled.kernel,
                call=describe(call),
                tile=f"{variant.block_m}x{variant.block_n} {variant.num_warps}w {variant.num_stages}s"
                if variant
                else "",
                resources=resources,
                shared_limit=topology.shared_bytes,
                whole=dict(code.count()),
                main_loop=dict(code.count(loop)) if loop else {},
                loop_length=loop[1] - loop[0] if loop else 0,
                announcements=isa.announcements(code) if generation.startswith("gfx") else [],
                seconds=time.perf_counter() - start,
                tensor_rows=tuple(isa.tensor_rows(compiled.result)),
                unwritten=code.unwritten,
            )


def _not_compiled(
    generation: str, call: Call, step: str, shared_limit: int, error: Exception, seconds: float
) -> Report:
    nothing = isa.Resources(registers=0, spills=0, scratch=0, shared=0, occupancy=0)
    # Triton's messages begin with the place in the kernel and end with the cause
    cause = ([line.strip() for line in str(error).splitlines() if line.strip()] or [""])[-1]
    failure = f"{type(error).__name__}: {cause}"
    return Report(
        generation, step, describe(call), "", nothing, shared_limit, {}, {}, 0, [], seconds, failure=failure
    )


def _row(report: Report) -> list[str]:
    used, loop = report.resources, report.main_loop
    matrix = ", ".join(f"{loop[kind]} {kind}" for kind in isa.MATRIX_KINDS if loop.get(kind))
    return [
        report.generation,
        report.kernel.removesuffix("_kernel"),
        report.call,
        report.tile,
        str(used.registers),
        f"{used.spills}/{used.scratch}",
        f"{used.shared / 1024:.1f}",
        str(used.occupancy),
        matrix or (f"{loop.get('fused multiply-add', 0)} fma" if loop else ""),
        f"{loop.get('async copy', 0)}/{loop.get('wide load', 0)}" if loop else "",
        str(report.loop_length or ""),
        str(report.whole.get("atomic", 0)),
    ]


COLUMNS = (
    "device", "kernel", "layer", "tile", "registers", "spills/scratch", "LDS KB", "waves", "matrix", "copies/loads",
    "loop", "atomics",
)  # fmt: skip


def markdown(report: Report) -> str:
    """A row of the table in docs/offline-compilation.md: all columns but the last."""
    return f"| {' | '.join(_row(report)[: len(COLUMNS) - 1])} |"


# what --tile can replace, and the least value of a number
POWERS_OF_2 = {"block_m": 16, "block_n": 16, "num_warps": 1, "kpack": 1}
COUNTS = {"num_stages": 1}
FORMS = cdna5_variant.FORMS


def _tile(text: str) -> dict[str, int | str]:
    """The fields of a variant in "block_n=128,num_warps=8". Raises ArgumentTypeError with what can be written."""
    fields: dict[str, int | str] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        least = POWERS_OF_2.get(name, COUNTS.get(name))
        if name == "form":
            if value not in FORMS:
                raise argparse.ArgumentTypeError(
                    f"form={value} is unknown: choose one of {', '.join(FORMS)}."
                )
            fields[name] = value
        elif least is None:
            known = ", ".join((*POWERS_OF_2, *COUNTS, "form"))
            raise argparse.ArgumentTypeError(f"{part!r} sets nothing: write NAME=VALUE, NAME one of {known}.")
        else:
            number = int(value) if value.isdecimal() else 0
            if number < least or (name in POWERS_OF_2 and number & (number - 1)):
                kind = "power of two" if name in POWERS_OF_2 else "number"
                raise argparse.ArgumentTypeError(f"{name}={value} must be a {kind} of at least {least}.")
            fields[name] = number
    return fields


def _wanted(generation: str, options: argparse.Namespace) -> list[tuple[Call, str]]:
    """(call, step) that the command line asks for."""
    return [
        (call, step)
        for call, step in (common_calls(generation) if options.subset else all_calls(generation))
        if options.only in describe(call) and (not options.step or step in options.step)
    ]


def _nothing_wanted(generations: Sequence[str], options: argparse.Namespace) -> str:
    """What there is, where nothing matches."""
    everything = argparse.Namespace(subset=options.subset, only="", step=options.step)
    there = [describe(call) for generation in generations for call, _ in _wanted(generation, everything)]
    if not there:
        return f"--subset has no layer for --step {' '.join(options.step)}: leave out --subset."
    return f"--only {options.only!r} is in no layer's name; there are:\n  " + "\n  ".join(
        dict.fromkeys(there)
    )


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m numa_attention.testing.offline", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--device", action="append", choices=TARGETS, help="default: each of them")
    parser.add_argument("--subset", action="store_true", help="a few common layers")
    parser.add_argument("--only", default="", help='layers whose name contains this, such as "d256 g8"')
    parser.add_argument("--step", action="append", choices=("decode", "prefill", "plan", "write"))
    parser.add_argument(
        "--tile", type=_tile, default={}, help="try another tile: block_n=128,num_warps=8, or form=single"
    )
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="one JSON object a line instead of a table")
    output.add_argument("--markdown", action="store_true", help="the rows of the documentation's table")
    options = parser.parse_args(arguments)
    faulty = 0
    rows = []
    generations = options.device or list(TARGETS)
    calls = {generation: _wanted(generation, options) for generation in generations}
    if not any(calls.values()):
        parser.error(_nothing_wanted(generations, options))
    for generation in generations:
        for report in reports(generation, calls[generation], **options.tile):
            faults = report.faults()
            faulty += bool(faults)
            if options.markdown:
                print(markdown(report), flush=True)
            elif options.json:
                print(json.dumps({**asdict(report), "faults": faults, "notes": report.notes()}), flush=True)
            else:
                print(
                    f"{report.generation} {report.kernel} {report.call}: {report.seconds:.0f} s",
                    file=sys.stderr,
                )
                rows.append((_row(report), faults, report.notes()))
    if rows:
        _print_table(rows)
    return 1 if faulty else 0


def _print_table(rows: list[tuple[list[str], list[str]]]) -> None:
    from rich.console import Console

    shown = table(*COLUMNS, title=f"Triton {triton.__version__}", text=("kernel", "layer", "tile", "matrix"))
    for cells, faults, _ in rows:
        shown.add_row(*cells, style="red" if faults else None)
    console = Console(highlight=False)
    print_table(console, shown)
    for cells, faults, notes in rows:
        for line in faults + notes:
            style = "red" if faults else None
            console.print(
                f"{' '.join(filter(None, cells[:4]))}: {line}", style=style, markup=False, soft_wrap=True
            )


if __name__ == "__main__":
    with output_errors_in_one_sentence():
        sys.exit(main())
