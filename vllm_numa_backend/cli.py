"""The numa-swizzle command: what is installed, a demonstration, and test models."""

from __future__ import annotations

from typing import Annotated

import typer

from numa_attention.terminal import output_errors_in_one_sentence, print_error

from .commands import UserError
from .commands.bench import bench
from .commands.bench_mapping import mapping
from .commands.checkpoint import checkpoint
from .commands.demo import demo
from .commands.doctor import doctor
from .commands.plan import plan
from .commands.simulate import simulate
from .commands.topology import topology
from .commands.variant import variant

app = typer.Typer(
    name="numa-swizzle",
    help="Attention for vLLM that knows the NUMA domains of the device.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
for command in (doctor, demo, checkpoint, plan, topology, variant):
    app.command()(command)
bench.command()(mapping)
app.add_typer(bench, name="bench")
app.add_typer(simulate, name="simulate")


def print_version(wanted: bool) -> None:
    if wanted:
        from numa_attention import __version__

        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line; what the user can put right ends in one sentence and exit code 2."""
    with output_errors_in_one_sentence():
        try:
            app()
        except UserError as error:
            print_error(str(error))
            raise SystemExit(2) from None


if __name__ == "__main__":
    main()
