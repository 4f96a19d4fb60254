"""The sub-command ``convert``: anything that `datasets` reads, as a Lance table for training."""

import argparse
import re
import sys
from dataclasses import asdict
from typing import Any

from hf_lance_stream.commands.common import (
    add_json,
    add_storage_options,
    new_parser,
    show,
    storage_options_of,
)
from hf_lance_stream.commands.report import Report
from hf_lance_stream.credentials import public_uri
from hf_lance_stream.writing import Written, write_lance

_DESCRIPTION = """\
Write a dataset as a Lance table for training. SOURCE is a file or a quoted glob of
Parquet, CSV, JSON, Arrow or text files, a directory of such files or of images or
sounds, a dataset saved by save_to_disk, a dataset on the Hub, the name of a builder
of datasets such as parquet, or a Lance table. It is read as a stream, in little
memory; features are kept in the table's schema, and files that are named by path,
such as images, are read into the table.
If it is interrupted or killed, start it again with the same arguments: it goes on
after the last fragment it has committed, without a row missing or there twice.
With --shuffle the rows are written in random order. Any source but a Lance table or
a saved dataset is then written to TABLE.unshuffled first, which is deleted at the end
and takes as much room as TABLE.
"""

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def add(commands: Any) -> None:
    """Add its parser."""
    parser = new_parser(commands, "convert", "write a dataset as a Lance table", _DESCRIPTION)
    parser.add_argument("source", metavar="SOURCE", help="what to read; see above")
    parser.add_argument("target", metavar="TABLE", help="path or URI of the table to write")
    parser.add_argument("--split", help="Hugging Face split (default: the only one there is)")
    parser.add_argument("--name", help="configuration of the dataset SOURCE")
    parser.add_argument(
        "--data-files",
        metavar="FILES",
        action="append",
        help="file or glob that the builder SOURCE shall load, may be repeated",
    )
    parser.add_argument("--data-dir", metavar="DIR", help="directory that it shall load")
    parser.add_argument(
        "--columns",
        metavar="NAME[,NAME…]",
        type=lambda text: text.split(","),
        help="columns to write (default: all)",
    )
    parser.add_argument(
        "--shuffle", metavar="SEED", type=int, help="write the rows in the random order of SEED"
    )
    parser.add_argument(
        "--clump",
        metavar="ROWS",
        type=int,
        help="neighbouring rows that --shuffle moves as one (default: single rows)",
    )
    parser.add_argument(
        "--bytes-per-fragment",
        metavar="BYTES",
        type=byte_count,
        help="size in memory at which a fragment, one data file, ends (default: 512M)",
    )
    parser.add_argument(
        "--rows-per-fragment", metavar="ROWS", type=int, help="number of rows at which it ends"
    )
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="write a new version of a table that is there, without the rows it has",
    )
    parser.add_argument(
        "--no-resume",
        dest="resume",
        action="store_false",
        help="do not go on with what an interrupted run has written; begin anew with --overwrite",
    )
    add_storage_options(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run it."""
    given = {
        "name": arguments.name,
        "data_files": arguments.data_files,
        "data_dir": arguments.data_dir,
        "bytes_per_fragment": arguments.bytes_per_fragment,
    }
    written = write_lance(
        arguments.source,
        arguments.target,
        split=arguments.split,
        columns=arguments.columns,
        shuffle_seed=arguments.shuffle,
        shuffle_clump_size=arguments.clump,
        rows_per_fragment=arguments.rows_per_fragment,
        mode="overwrite" if arguments.overwrite else "create",
        resume=arguments.resume,
        storage_options=storage_options_of(arguments),
        progress=sys.stderr.isatty(),
        **{name: value for name, value in given.items() if value is not None},
    )
    document = asdict(written) | {"table": public_uri(written.table)}
    show(arguments, document, _report(written))
    return 0


def byte_count(text: str) -> int:
    """The type of an argument that is a number of bytes, such as 1000000, 512K, 64M or 2G."""
    found = re.fullmatch(r"(\d+)([KMG]?)(?:i?B)?", text, re.IGNORECASE)
    if found is None:
        raise argparse.ArgumentTypeError(f"must be a number of bytes such as 512M: got {text!r}")
    return int(found[1]) * _UNITS[found[2].upper()]


def _report(written: Written) -> Report:
    report = Report()
    report.line(f"{public_uri(written.table)}, version {written.version}", "Table")
    report.line(f"{written.rows:,}", "Rows")
    size, count = written.bytes / 1e6, written.fragments
    report.line(f"{count:,}, of {size / max(1, count):,.1f} MB on average", "Fragments")
    report.line(f"{size:,.1f} MB", "Data files")
    if written.resumed_rows:
        report.line(
            f"went on after the {written.resumed_rows:,} rows of a run that was interrupted",
            "Resumed",
        )
    new = written.rows - written.resumed_rows
    rate = new / max(written.seconds, 1e-9)
    report.line(f"{written.seconds:,.1f} s, {rate:,.0f} rows/s", "Time")
    return report
