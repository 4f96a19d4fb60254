"""What the sub-commands share: their parsers, how they open a table, how they print."""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from hf_lance_stream.commands.report import Report
from hf_lance_stream.plan import Options
from hf_lance_stream.source import Source, open_source
from hf_lance_stream.splits import TAILS
from hf_lance_stream.tables import table_of_database

EXIT_CODES = """\
exit codes:
  0  all went well
  1  what was checked is not so: for demo, the resumed run differs; for plan, a rule is broken;
     for check, the state does not fit the table
  2  wrong use: arguments, files or installed packages that do not fit
"""


def new_parser(commands: Any, name: str, help: str, description: str) -> argparse.ArgumentParser:
    """A parser of the sub-command `name`, which says `help` in the list of all of them."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=help,
        description=description,
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    return parser


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add ``--json``."""
    parser.add_argument(
        "--json", action="store_true", help="print one JSON document and nothing else"
    )


def add_table(parser: argparse.ArgumentParser, *, nargs: str | None = None) -> None:
    """Add the table, as `source`, and how it is opened."""
    several = "; several are read as one" if nargs in ("+", "*") else ""
    parser.add_argument(
        "source",
        metavar="TABLE",
        nargs=nargs,
        help=f"path or URI of a Lance table, or of a LanceDB database with --table{several}",
    )
    parser.add_argument("--table", metavar="NAME", help="table of the LanceDB database at TABLE")
    parser.add_argument(
        "--version",
        dest="table_version",
        metavar="VERSION",
        type=lambda text: int(text) if text.isdecimal() else text,
        help="version number, tag or branch of the table (default: the latest)",
    )
    add_storage_options(parser)


def add_storage_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--storage-option``."""
    parser.add_argument(
        "--storage-option",
        dest="storage_options",
        metavar="NAME=VALUE",
        type=_storage_option,
        action="append",
        default=[],
        help="option of Lance's object store, may be repeated; it is never printed, but other "
        "users of this machine can see arguments: keep secrets in the environment",
    )


def add_filter(parser: argparse.ArgumentParser) -> None:
    """Add ``--filter``."""
    parser.add_argument(
        "--filter",
        metavar="SQL",
        help="only the rows that match; it is applied, which reads the columns it names",
    )


def add_order(parser: argparse.ArgumentParser) -> None:
    """Add the options of an epoch's order."""
    parser.add_argument("--num-splits", metavar="S", type=int, help="number of splits")
    parser.add_argument(
        "--seed", "--shuffle-seed", dest="shuffle_seed", metavar="SEED", type=int, help="shuffle"
    )
    parser.add_argument(
        "--clump",
        "--shuffle-clump-size",
        dest="shuffle_clump_size",
        metavar="ROWS",
        type=int,
        help="neighbouring rows that the shuffle moves as one (default: single rows)",
    )
    parser.add_argument(
        "--tail",
        choices=TAILS,
        help="what becomes of surplus rows (default: drop, with --num-splits or several GPUs)",
    )


def options_of(arguments: argparse.Namespace, **more: Any) -> Options:
    """The options of an epoch that the arguments of `add_order` name.

    Raises:
        ValueError: one of them does not fit.
    """
    return Options(
        num_splits=arguments.num_splits,
        shuffle_seed=arguments.shuffle_seed,
        shuffle_clump_size=arguments.shuffle_clump_size,
        tail=arguments.tail,
        **more,
    )


def open_tables(
    arguments: argparse.Namespace,
    *,
    columns: Sequence[str] | None = None,
    filter: str | None = None,
) -> Source:
    """Open what the arguments of `add_table` name.

    Raises:
        FileNotFoundError: there is nothing there, or no such version.
        ValueError: it is no table, or `columns` or `filter` do not fit it.
    """
    return open_source(
        uris_of(arguments),
        columns=columns,
        filter=filter,
        version=arguments.table_version,
        storage_options=storage_options_of(arguments),
        argument="TABLE",
    )


def uris_of(arguments: argparse.Namespace) -> list[str]:
    """The places that the arguments of `add_table` name.

    Raises:
        FileNotFoundError: the database has no such table.
        ValueError: a table of several databases is named.
    """
    uris = arguments.source if isinstance(arguments.source, list) else [arguments.source]
    if arguments.table is None:
        return uris
    if len(uris) != 1:
        raise ValueError(f"`--table` names a table of one database: got {len(uris)}")
    return [table_of_database(uris[0], arguments.table)]


def storage_options_of(arguments: argparse.Namespace) -> dict[str, str] | None:
    """The options of the object store that the arguments of `add_table` name."""
    return dict(arguments.storage_options) or None


def numbers(text: str) -> list[int]:
    """The type of an argument that is a number, or several with commas between them."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"must be a number, or several such as 4,8: got {text!r}"
        ) from None


def show(arguments: argparse.Namespace, document: Mapping[str, Any], report: Report) -> None:
    """Print the JSON document if ``--json`` was given, else the report."""
    if arguments.json:
        print(json.dumps(document, indent=2, ensure_ascii=False))
    else:
        report.print(sys.stdout)


def _storage_option(text: str) -> tuple[str, str]:
    name, is_pair, value = text.partition("=")
    if not is_pair or not name:  # the text may be a secret, so it is not in the message
        raise argparse.ArgumentTypeError("must be NAME=VALUE, such as region=eu-west-1")
    return name, value
