"""The sub-command ``demo``."""

import argparse
from pathlib import Path
from typing import Any

from hf_lance_stream.commands.common import new_parser

_DESCRIPTION = """\
Write a small Lance table of labelled images, train a model from its shuffled
stream, stop in mid-epoch, resume from the checkpoint in a new process, and
compare rows, losses and weights with those of a run that never stopped.
Needs no network and no GPU, but the extra: pip install "hf_lance_stream[demo]"
"""


def add(commands: Any) -> None:
    """Add its parser."""
    parser = new_parser(
        commands,
        "demo",
        "train, stop in mid-epoch, resume in a new process, compare (about 15 seconds)",
        _DESCRIPTION,
    )
    parser.add_argument(
        "--keep",
        metavar="DIR",
        type=Path,
        help="keep the table and the checkpoint in DIR, which must not hold those of another demo "
        "(default: a temporary directory, removed at the end)",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run it; see `hf_lance_stream.demo.run`."""
    from hf_lance_stream import demo

    return demo.run(arguments.keep)
