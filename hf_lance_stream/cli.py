"""The command ``hf-lance-stream``; its sub-commands are in `hf_lance_stream.commands`."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from hf_lance_stream import __version__
from hf_lance_stream.commands import bench, check, convert, demo, inspect, order, plan
from hf_lance_stream.commands.common import EXIT_CODES
from hf_lance_stream.commands.report import printable

PROG = "hf-lance-stream"

_COMMANDS: tuple[Any, ...] = (inspect, plan, order, check, bench, convert, demo)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: the arguments; default: those of the process.

    Returns:
        The exit code.
    """
    parser = _parser()
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:  # cut off where a value begins, which may be a secret
        names = " ".join(text.partition("=")[0] for text in unknown)
        parser.error(f"unrecognized arguments: {names}")
    run: Callable[[argparse.Namespace], int] = arguments.run
    try:
        code = run(arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # who reads the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (OSError, ValueError, ModuleNotFoundError) as error:
        print(f"{PROG} {arguments.command}: error: {printable(str(error))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{PROG} {arguments.command}: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROG,
        description="Stream Lance and LanceDB tables into training as Hugging Face datasets.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"{PROG} {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in _COMMANDS:
        command.add(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
