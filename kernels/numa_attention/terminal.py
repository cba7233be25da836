"""What the project's commands print: tables that never cut a number, and one sentence where printing fails.

Needs the package rich and nothing else.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text

GAP = 2  # blanks between two columns


def table(*headings: str, title: str | None = None, text: Sequence[str] = ()) -> Table:
    """A table to fill with `add_row` and show with `print_table`.

    The first column and those named in `text` hold words; all others hold numbers.
    """
    made = Table(title=title, title_justify="left", box=None, padding=(0, GAP, 0, 0), header_style="bold")
    for number, heading in enumerate(headings):
        words = number == 0 or heading in text
        made.add_column(heading, justify="left" if words else "right")
    return made


def facts() -> Table:
    """A table of two columns of words without headings, name and value."""
    made = table("", "")
    made.show_header = False
    made.columns[1].justify = "left"
    return made


def print_table(console: Console, shown: Table) -> None:
    """Print a table so that no number is cut or broken.

    A pipe or a file gets one line a row, as wide as it needs. A terminal that is too narrow gets headings broken
    between words, then words broken likewise, then headings broken anywhere; where that does not do, lines run on.
    """
    room = console.width - GAP * len(shown.columns) if console.is_terminal else None
    for column, width in zip(shown.columns, column_widths(shown, room), strict=True):
        column.width, column.overflow = width, "fold"
    needed = sum(column.width + GAP for column in shown.columns)
    given, console.width = console.width, max(console.width, needed)
    try:
        console.print(shown)
    finally:
        console.width = given


def column_widths(shown: Table, room: int | None) -> list[int]:
    """Width of each column without gaps, in all `room` characters where that is possible; None: as wide as it likes."""
    widths = [max(_longest(_cells(column)), _longest([_heading(column)])) for column in shown.columns]
    if room is None:
        return widths
    for floors in (
        [max(_longest_cell(column), _longest_word([_heading(column)])) for column in shown.columns],
        [max(_narrowest_cell(column), _longest_word([_heading(column)])) for column in shown.columns],
        [max(_narrowest_cell(column), 1) for column in shown.columns],
    ):
        widths = _shrink(widths, floors, room)
    return widths


def _shrink(widths: list[int], floors: list[int], room: int) -> list[int]:
    """The widths, the widest reduced first and none below its floor, until they fit or none can be reduced."""
    widths = list(widths)
    while sum(widths) > room:
        spare = [width if width > floor else 0 for width, floor in zip(widths, floors, strict=True)]
        if not any(spare):
            break
        widths[spare.index(max(spare))] -= 1
    return widths


def _cells(column: Column) -> list[str]:
    return [Text.from_markup(cell).plain if isinstance(cell, str) else str(cell) for cell in column.cells]


def _heading(column: Column) -> str:
    return Text.from_markup(str(column.header)).plain


def _longest(texts: list[str]) -> int:
    return max((Text(text).cell_len for text in texts), default=0)


def _longest_word(texts: list[str]) -> int:
    return _longest([word for text in texts for word in text.split()])


def _longest_cell(column: Column) -> int:
    return _longest(_cells(column))


def _narrowest_cell(column: Column) -> int:
    """The width below which a number would break: of a word in a column of words, of a whole cell in the others."""
    return _longest_word(_cells(column)) if column.justify == "left" else _longest_cell(column)


def print_error(sentence: str) -> None:
    Console(stderr=True, highlight=False).print(f"[bold red]error:[/] {escape(sentence)}", soft_wrap=True)


@contextlib.contextmanager
def output_errors_in_one_sentence() -> Iterator[None]:
    """End with exit code 2 and one sentence where a file, or the output itself, cannot be read or written."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except OSError as error:
        _discard_output()
        if error.errno == errno.EPIPE:  # whoever read the output has seen enough
            raise SystemExit(1) from None
        what = error.filename or "the output"
        print_error(f"{what} cannot be used: {error.strerror or error}.")
        raise SystemExit(2) from None


def _discard_output() -> None:
    """Let what is still buffered for the output go nowhere, or Python would fail on it again when it ends."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
