"""What a sub-command says to people: lines and tables, plain or, on a terminal, by rich."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console

_INDENT = "  "
_WIDTH = 100


def printable(text: str) -> str:
    """A text with nothing in it that a terminal would obey, such as an escape sequence."""
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)


@dataclass(frozen=True, slots=True)
class _Heading:
    text: str


@dataclass(frozen=True, slots=True)
class _Line:
    label: str
    text: str


@dataclass(frozen=True, slots=True)
class _Table:
    headers: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(slots=True)
class Report:
    """Lines and tables under headings, in the order in which they are added."""

    parts: list[_Heading | _Line | _Table] = field(default_factory=list)

    def heading(self, text: str) -> None:
        """Begin a section."""
        self.parts.append(_Heading(printable(text)))

    def line(self, text: str, label: str = "") -> None:
        """Add a line, with a label before it; long ones are wrapped."""
        self.parts.append(_Line(printable(label), printable(text)))

    def table(self, headers: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Add a table; numbers get thousands separators."""
        self.parts.append(_Table(headers, [[_cell(value) for value in row] for row in rows]))

    def print(self, file: TextIO) -> None:
        """Print it: by rich where `file` is a terminal and rich is installed, else as text."""
        console = _console(file) if file.isatty() else None
        if console is None:
            print(self.text(), file=file)
        else:
            self._print_rich(console)

    def text(self) -> str:
        """All of it as plain text."""
        lines: list[str] = []
        for part in self.parts:
            if isinstance(part, _Heading):
                lines += ["", part.text] if lines else [part.text]
            elif isinstance(part, _Line):
                lines += _wrapped(part)
            else:
                lines += _aligned(part)
        return "\n".join(lines)

    def _print_rich(self, console: "Console") -> None:
        from rich import box
        from rich.markup import escape
        from rich.padding import Padding
        from rich.table import Table

        for number, part in enumerate(self.parts):
            if isinstance(part, _Heading):
                console.print(("\n" if number else "") + f"[bold]{escape(part.text)}[/]")
            elif isinstance(part, _Line):
                label = f"[dim]{escape(part.label)}:[/] " if part.label else ""
                console.print(Padding(label + escape(part.text), (0, 0, 0, len(_INDENT))))
            else:
                table = Table(box=box.SIMPLE_HEAD)
                for index, header in enumerate(part.headers):
                    is_right = _is_right(part, index)
                    table.add_column(escape(header), justify="right" if is_right else "left")
                for row in part.rows:
                    table.add_row(*map(escape, row))
                console.print(table)


def _console(file: TextIO) -> "Console | None":
    try:
        from rich.console import Console
    except ModuleNotFoundError:
        return None
    return Console(file=file, highlight=False)


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return "" if value is None else printable(str(value))


def _wrapped(line: _Line) -> list[str]:
    text = f"{line.label}: {line.text}" if line.label else line.text
    return [
        wrapped
        for piece in text.split("\n")
        for wrapped in textwrap.wrap(
            piece,
            _WIDTH,
            initial_indent=_INDENT,
            subsequent_indent=2 * _INDENT,
            break_long_words=False,
            break_on_hyphens=False,
        )
    ]


def _aligned(table: _Table) -> list[str]:
    rows = [list(table.headers), *table.rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(table.headers))]
    right = [_is_right(table, i) for i in range(len(table.headers))]
    return [
        (
            _INDENT
            + "  ".join(
                cell.rjust(width) if is_right else cell.ljust(width)
                for cell, width, is_right in zip(row, widths, right, strict=True)
            )
        ).rstrip()
        for row in rows
    ]


def _is_right(table: _Table, index: int) -> bool:
    """Whether a column holds numbers, which are flush right."""
    cells = [row[index] for row in table.rows if row[index] not in ("", "…")]
    return bool(cells) and all(cell[0].isdigit() for cell in cells)
