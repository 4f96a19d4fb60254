"""Small plain tables for notebooks, which take their style from wherever they are shown."""

from collections.abc import Iterable
from html import escape


def html_table(lines: Iterable[tuple[str, str]]) -> str:
    """A table of names and values, both escaped.

    Args:
        lines: name and value of each row.
    """
    rows = "".join(
        f'<tr><th style="text-align:left">{escape(name)}</th>'
        f'<td style="text-align:left">{escape(value)}</td></tr>'
        for name, value in lines
    )
    return f"<table>{rows}</table>"


class Description(str):
    """A text of lines such as ``"Rows: 1,000"``, which a notebook shows as a table.

    An empty line starts another table.
    """

    __slots__ = ()

    def _repr_html_(self) -> str:
        tables = []
        for paragraph in self.split("\n\n"):
            lines = [line.partition(": ") for line in paragraph.splitlines()]
            tables.append(html_table((name, value) for name, _, value in lines))
        return "".join(tables)
