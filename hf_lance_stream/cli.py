"""The command ``hf-lance-stream``."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hf_lance_stream import __version__

PROG = "hf-lance-stream"

_EXIT_CODES = """\
exit codes:
  0  all went well
  1  what was checked is not so: for demo, the resumed run differs
  2  wrong use: arguments, files or installed packages that do not fit
"""

_DEMO = """\
Write a small Lance table of labelled images, train a model from its shuffled
stream, stop in mid-epoch, resume from the checkpoint in a new process, and
compare rows, losses and weights with those of a run that never stopped.
Needs no network and no GPU, but the extra: pip install "hf_lance_stream[demo]"
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: the arguments; default: those of the process.

    Returns:
        The exit code.
    """
    arguments = _parser().parse_args(argv)
    run: Callable[[argparse.Namespace], int] = arguments.run
    try:
        return run(arguments)
    except (OSError, ValueError, ModuleNotFoundError) as error:
        print(f"{PROG} {arguments.command}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{PROG} {arguments.command}: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROG,
        description="Stream Lance and LanceDB tables into training as Hugging Face datasets.",
        epilog=_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"{PROG} {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for add in (_add_demo,):
        add(commands)
    return parser


# Each sub-command: a function that adds its parser, and one that runs it.


def _add_demo(commands: Any) -> None:
    parser = commands.add_parser(
        "demo",
        help="train, stop in mid-epoch, resume in a new process, compare (about 15 seconds)",
        description=_DEMO,
        epilog=_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--keep",
        metavar="DIR",
        type=Path,
        help="keep the table and the checkpoint in DIR, which must not hold those of another demo "
        "(default: a temporary directory, removed at the end)",
    )
    parser.set_defaults(run=_run_demo)


def _run_demo(arguments: argparse.Namespace) -> int:
    from hf_lance_stream import demo

    return demo.run(arguments.keep)


if __name__ == "__main__":
    sys.exit(main())
