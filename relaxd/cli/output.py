"""Output of commands. Control characters are escaped, because texts come from models, data sets and exceptions."""

import errno
import json
import sys
from collections.abc import Callable, Collection, Iterable
from typing import Any, TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table

from relaxd.telemetry.logs import escape, escape_lines


class EscapingConsole(Console):
    """Console that escapes control characters in its output."""

    def on_broken_pipe(self) -> None:
        """Raise BrokenPipeError if nobody reads the output any more, as print does; rich would end the process."""
        raise BrokenPipeError(errno.EPIPE, "nobody reads standard output any more")

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render as rich does, then escape control characters in all text except rich's control codes."""
        for segment in super().render(renderable, options):
            text = segment.text if segment.control else escape_lines(segment.text)
            yield segment if text == segment.text else Segment(text, segment.style)


def show(*parts: object, file: TextIO | None = None, flush: bool = False, end: str = "\n") -> None:
    """Print like Python's `print`, but escape control characters except line ends."""
    print(escape_lines(" ".join(map(str, parts))), file=file or sys.stdout, flush=flush, end=end)


def sayer(console: Console) -> Callable[[str], None]:
    """Return a function that prints a text as a progress line on the console."""
    return lambda text: console.print(text, style="dim", markup=False, highlight=False, soft_wrap=True)


def plain_table(*titles: str, right: Collection[str] = (), title: str | None = None) -> Table:
    """Return an empty table without lines between cells. Columns named in `right`, such as numbers, align right."""
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0), title=title, title_justify="left")
    for name in titles:
        table.add_column(name, justify="right" if name in right else "left", overflow="fold")
    return table


def show_line(text: str) -> None:
    """Print text as one line, and flush."""
    print(escape(text, keep="\t"), flush=True)


def show_json(value: Any) -> None:
    """Print a value as JSON in one line."""
    print(escape(json.dumps(value, ensure_ascii=False)))
