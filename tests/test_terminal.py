"""Tables that never cut a number, and output that cannot be written."""

from __future__ import annotations

import io
import subprocess
import sys

import pytest
from rich.console import Console

from numa_attention.terminal import print_table, table

NUMBERS = ("12,345,678.90 GB", "-16.2 GB", "1,048,576")


def printed(width: int, terminal: bool) -> list[str]:
    shown = table("a name of several words", "the longest context", "room", "tokens", "why", text=("why",))
    shown.add_row("layer [b]16 x 64[/] *", *NUMBERS, "because of what was measured on one device")
    shown.add_section()
    shown.add_row("short")
    out = io.StringIO()
    print_table(Console(file=out, width=width, force_terminal=terminal, color_system=None), shown)
    return out.getvalue().splitlines()


@pytest.mark.parametrize("width", [200, 90, 60, 30, 1])
def test_a_narrow_terminal_breaks_words_and_no_number(width):
    lines = printed(width, terminal=True)
    text = "\n".join(lines)
    assert all(number in text for number in NUMBERS), text
    assert "…" not in text
    for word in ("measured", "layer", "several" if width > 60 else "e"):
        assert word in text
    if width >= 60:
        assert max(len(line.rstrip()) for line in lines) <= width
    assert (len(lines) == 3) == (width == 200)


def test_a_pipe_gets_one_line_a_row():
    lines = printed(80, terminal=False)
    assert len(lines) == 3
    assert all(number in lines[1] for number in (*NUMBERS, "16 x 64 *", "on one device"))


@pytest.mark.parametrize(
    "command", [["vllm_numa_backend.cli", "simulate", "seed-2"], ["vllm_numa_backend.cli", "plan", "--help"]]
)
def test_a_full_disk_is_one_sentence(command):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", *command], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60
        )
    assert done.returncode == 2
    assert done.stderr.strip() == "error: the output cannot be used: No space left on device."
