"""The sub-command ``bench``: how fast a table can be read where it is, and with what settings."""

import argparse
import sys
from dataclasses import asdict
from typing import Any

from tqdm.auto import tqdm

from hf_lance_stream.benching import (
    Benchmark,
    Figures,
    bench,
    number_of_runs,
    stages_of,
)
from hf_lance_stream.commands.common import (
    add_filter,
    add_json,
    add_table,
    new_parser,
    numbers,
    open_tables,
    show,
)
from hf_lance_stream.commands.convert import byte_count
from hf_lance_stream.commands.report import Report
from hf_lance_stream.source import Source

_DESCRIPTION = """\
Read a table for a short time with several clump sizes, read budgets and numbers of
workers, through the loader that a training uses, from where it is: a disk or an
object store. The settings take turns, and the medians are shown with the slowest and
the fastest run. Then it says which settings suit the table, and how long a training
step must take for the loader to keep up with it.
The very first run, the cold start, is shown apart; the operating system may have had
parts of the files in memory all the same. Nothing is decoded but what --format needs.
"""

_HEADERS = [
    "clump",
    "budget",
    "workers",
    "rows/s",
    "slowest to fastest run",
    "MB/s",
    "first batch",
    "peak memory",
]


def add(commands: Any) -> None:
    """Add its parser."""
    parser = new_parser(
        commands,
        "bench",
        "measure how fast a table can be read, and recommend settings",
        _DESCRIPTION,
    )
    add_table(parser, nargs="+")
    add_filter(parser)
    parser.add_argument(
        "--columns",
        metavar="NAME[,NAME…]",
        type=lambda text: text.split(","),
        help="columns to read, those that the training reads (default: all)",
    )
    parser.add_argument(
        "--batch-size", metavar="ROWS", type=int, default=64, help="rows per batch (default: 64)"
    )
    parser.add_argument(
        "--format",
        choices=["torch", "numpy", "arrow", "python"],
        default="torch",
        help="format of the batches (default: torch)",
    )
    parser.add_argument(
        "--clumps", metavar="ROWS[,ROWS…]", type=numbers, help="clump sizes (default: 1 to 1024)"
    )
    parser.add_argument(
        "--read-budgets",
        metavar="BYTES[,BYTES…]",
        type=lambda text: [byte_count(part) for part in text.split(",")],
        help="bytes read ahead (default: 16M,64M,256M)",
    )
    parser.add_argument(
        "--workers", metavar="N[,N…]", type=numbers, help="numbers of workers (default: 0,2)"
    )
    parser.add_argument("--num-splits", metavar="S", type=int, help="number of splits")
    parser.add_argument(
        "--seconds",
        metavar="S",
        type=float,
        default=2.0,
        help="how long each run takes, beside its start (default: 2)",
    )
    parser.add_argument(
        "--rounds", metavar="N", type=int, default=3, help="runs of each setting (default: 3)"
    )
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run it."""
    source = open_tables(arguments, columns=arguments.columns, filter=arguments.filter)
    stages = stages_of(source.num_rows, arguments.clumps, arguments.read_budgets, arguments.workers)
    total = number_of_runs(stages, arguments.rounds)
    with tqdm(total=total, unit=" runs", disable=not sys.stderr.isatty()) as bar:
        begun = 0

        def on_run(text: str) -> None:
            nonlocal begun
            bar.set_description(text, refresh=False)
            bar.update(1 if begun else 0)
            begun += 1

        found = bench(
            source,
            batch_size=arguments.batch_size,
            format=None if arguments.format == "python" else arguments.format,
            clump_sizes=arguments.clumps,
            read_budgets=arguments.read_budgets,
            workers=arguments.workers,
            num_splits=arguments.num_splits,
            seconds=arguments.seconds,
            rounds=arguments.rounds,
            on_run=on_run,
        )
        bar.update(1)
    show(arguments, _document(source, arguments, found), _report(source, arguments, found))
    return 0


def _document(source: Source, arguments: argparse.Namespace, found: Benchmark) -> dict[str, Any]:
    return {
        "table": source.name,
        "version": source.version,
        "rows": source.num_rows,
        "row_bytes": source.row_bytes,
        "columns": list(source.columns),
        "filter": source.filter,
        "format": arguments.format,
        "seconds": arguments.seconds,
        **asdict(found),
    }


def _report(source: Source, arguments: argparse.Namespace, found: Benchmark) -> Report:
    report = Report()
    report.heading("Table")
    names = source.name if isinstance(source.name, str) else ", ".join(source.name)
    report.line(f"{names}, {source.num_rows:,} rows of about {source.row_bytes:,} bytes", "Table")
    report.line(
        f"{found.batch_size} rows, format {arguments.format}"
        + ("" if found.joins_batches else ", as lists of rows, which cannot be joined"),
        "Batches",
    )
    report.line(
        f"{found.cold.first_batch_seconds:.2f} s to the first batch, then "
        f"{found.cold.rows_per_second:,.0f} rows/s",
        "Cold start",
    )
    titles = {"clump": "Clump sizes", "budget": "Read budgets", "workers": "Workers"}
    for stage, title in titles.items():
        figures = [one for one in found.figures if one.stage == stage]
        if figures:
            report.heading(title)
            report.table(
                _HEADERS,
                [_row(one) for one in figures],
            )
    report.heading("Recommendation")
    for reason in found.recommendation.reasons:
        report.line(reason)
    report.line(
        f"the loader keeps up with a training whose steps of {found.batch_size} rows take at least "
        f"{1000 * found.recommendation.step_seconds:,.2f} ms on each GPU of a machine with one; "
        "several share its processors and its network"
    )
    return report


def _row(one: Figures) -> list[Any]:
    setting = one.setting
    return [
        setting.shuffle_clump_size,
        f"{setting.read_budget / (1 << 20):,.4g} MiB",
        setting.num_workers,
        f"{one.rows_per_second:,.0f}",
        f"{one.lowest:,.0f} to {one.highest:,.0f}",
        f"{one.megabytes_per_second:,.1f}",
        f"{one.first_batch_seconds:.2f} s",
        "" if one.peak_bytes is None else f"{one.peak_bytes / 1e6:,.0f} MB",
    ]
