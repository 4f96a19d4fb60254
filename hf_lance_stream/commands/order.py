"""The sub-command ``order``: the first rows of an epoch."""

import argparse
import math
from typing import Any

import numpy as np

from hf_lance_stream.commands.common import (
    add_filter,
    add_json,
    add_order,
    add_table,
    new_parser,
    open_tables,
    options_of,
    show,
)
from hf_lance_stream.commands.report import Report
from hf_lance_stream.layouts import examples_to_lay_out
from hf_lance_stream.permutation import Int64Array
from hf_lance_stream.plan import Plan, check_int
from hf_lance_stream.shards import dividing_among_ranks
from hf_lance_stream.splits import SplitStream
from hf_lance_stream.words import lines_of

_DESCRIPTION = """\
Show the first rows of an epoch, in the order in which a job gets them: for each
its place, its split and its number in the table (of the rows that match, with
--filter). With --rank and --world-size those of one rank. With --columns also
values; only then, or with --filter, are rows read.
"""

_LONGEST = 60  # characters of a value that are shown


def add(commands: Any) -> None:
    """Add its parser."""
    parser = new_parser(commands, "order", "show the first rows of an epoch", _DESCRIPTION)
    add_table(parser, nargs="+")
    add_filter(parser)
    add_order(parser)
    parser.add_argument("--epoch", metavar="E", type=int, default=0, help="the pass (default: 0)")
    parser.add_argument(
        "--rank", metavar="R", type=int, help="with --world-size: rows of this rank"
    )
    parser.add_argument("--world-size", metavar="N", type=int, help="number of ranks")
    parser.add_argument(
        "--rows", metavar="N", type=int, default=20, help="rows to show (default: 20)"
    )
    parser.add_argument(
        "--from", dest="start", metavar="N", type=int, default=0, help="rows to pass over first"
    )
    parser.add_argument("--columns", metavar="NAME[,NAME…]", help="also show values; reads them")
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run it."""
    options = options_of(arguments, epoch=arguments.epoch)
    count = check_int("--rows", arguments.rows, 1, 2**24)
    start = check_int("--from", arguments.start, 0, 2**62)
    columns = arguments.columns.split(",") if arguments.columns is not None else None
    source = open_tables(arguments, columns=columns, filter=arguments.filter)
    examples = examples_to_lay_out(source, options)
    if (arguments.rank is None) != (arguments.world_size is None):
        raise ValueError("give both or neither of --rank and --world-size")
    if arguments.rank is not None:
        world_size = check_int("--world-size", arguments.world_size, 1, 2**31)
        rank = check_int("--rank", arguments.rank, 0, world_size)
        with dividing_among_ranks("world_size"):
            examples = examples.shard_data_sources(world_size, rank)
    plan = examples.plan
    rows = plan.rows(start, start + count)
    values = source.read(rows).to_pylist() if columns is not None else None
    splits = _splits(plan, start, rows)
    document = {
        "table": source.name,
        "version": source.version,
        "filter": source.filter,
        "rows_of_epoch": len(plan),
        "fingerprint": examples.fingerprint,
        "part": plan.part(),
        "start": start,
        "rows": rows.tolist(),
        "splits": splits,
        "values": _jsonable(values),
    }
    report = Report()
    report.heading("Epoch")
    for line in lines_of(examples, arguments.epoch):
        label, _, text = line.partition(": ")
        report.line(text, label)
    if not len(rows):
        report.heading(f"No rows from {start:,} on: there are {len(plan):,}")
    else:
        report.heading(f"Rows {start:,} to {start + len(rows) - 1:,} of {len(plan):,}")
        report.table(*_table(start, rows, splits, columns or [], values))
    show(arguments, document, report)
    return 0


def _splits(plan: Plan, start: int, rows: Int64Array) -> list[int] | None:
    """The split of each row; None for natural shards."""
    if not isinstance(plan.stream, SplitStream):
        return None
    index = np.arange(start, start + len(rows), dtype=np.int64)
    splits: list[int] = plan.stream.cycle_and_split(index)[1].tolist()
    return splits


def _table(
    start: int,
    rows: Int64Array,
    splits: list[int] | None,
    columns: list[str],
    values: list[dict[str, Any]] | None,
) -> tuple[list[str], list[list[Any]]]:
    """The header and the lines of the table of rows."""
    headers = ["place", *(["split"] if splits else []), "row", *columns]
    lines = []
    for i, row in enumerate(rows.tolist()):
        line = [start + i, *([splits[i]] if splits else []), row]
        if values is not None:
            line += [_shown(values[i][name]) for name in columns]
        lines.append(line)
    return headers, lines


def _shown(value: Any) -> str:
    """A value as text, shortened."""
    text = " ".join(str(_jsonable(value)).split())
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


def _jsonable(value: Any) -> Any:
    """A value in JSON types; of bytes only how many there are."""
    if isinstance(value, dict):
        return {str(name): _jsonable(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(inner) for inner in value]
    if isinstance(value, bytes):
        return f"<{len(value)} bytes>"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no such number
    is_plain = value is None or isinstance(value, bool | int | float | str)
    return value if is_plain else str(value)
