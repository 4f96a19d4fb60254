"""The sub-command ``check``: what a saved state is, and whether it fits a table."""

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hf_lance_stream.checkpoint import STATE_NAME
from hf_lance_stream.commands.common import (
    add_json,
    add_table,
    new_parser,
    show,
    storage_options_of,
    uris_of,
)
from hf_lance_stream.commands.report import Report
from hf_lance_stream.fitting import Fit, fit_of
from hf_lance_stream.saved_states import Progress, SavedStates, progress_of, saved_states

_DESCRIPTION = """\
Say what a saved state is, how much of the epoch is done, and of which table and
order it is; with TABLE also whether it fits: each field that differs is named.
STATE is a JSON file with the state of a dataset or of a loader, a merged state,
what RankStates holds, or a list of states, one of each rank; a checkpoint
directory of Trainer, or its loader_state.json; or - for standard input:
    jq -s . rank*.json | hf-lance-stream check -
TABLE is opened at the version in the state, unless --version is given. A filter in
the state is applied, which reads the columns that it names; else nothing is read.
"""

_SHOWN_PARTS = 16
_TRAINER_STATE = "trainer_state.json"


def add(commands: Any) -> None:
    """Add its parser."""
    parser = new_parser(
        commands, "check", "say what a saved state is, and whether it fits a table", _DESCRIPTION
    )
    parser.add_argument("state", metavar="STATE", help="file or directory of the state, or -")
    add_table(parser, nargs="*")
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run it: 0 if the state is whole and fits, 1 if it does not fit."""
    saved = read_saved(arguments.state)
    found = progress_of(saved.states)
    fit: Fit | None = None
    if arguments.source:
        uris, options = uris_of(arguments), storage_options_of(arguments)
        fits = [fit_of(one.fingerprint, uris, arguments.table_version, options) for one in found]
        fit = min(fits, key=lambda one: len(one.differences))
    document = {
        **{name: value for name, value in asdict(saved).items() if name != "states"},
        "num_states": len(saved.states),
        "sources": [asdict(progress) for progress in found],
        "fit": None if fit is None else {**asdict(fit), "fits": fit.fits},
    }
    show(arguments, document, _report(saved, found, fit))
    return 0 if fit is None or fit.fits else 1


def read_saved(place: str) -> SavedStates:
    """The states in a file, in a checkpoint directory of Trainer, or (``-``) on standard input.

    Raises:
        OSError: it cannot be read.
        ValueError: it holds no states, or damaged ones.
    """
    if place == "-":
        return saved_states(_parsed(sys.stdin.read(), "standard input"), "standard input")
    path = Path(place)
    step = None
    if path.is_dir():
        step = _step_of(path)
        path = path / STATE_NAME
        if not path.exists():
            raise FileNotFoundError(
                f"`STATE`: {place!r} has no {STATE_NAME}: it is no checkpoint of "
                "hls.trainer.StatefulTrainer"
            )
    elif not path.exists():
        raise FileNotFoundError(f"`STATE`: there is no file or directory {place!r}")
    return saved_states(_parsed(path.read_bytes(), str(path)), str(path), step)


def _step_of(directory: Path) -> int | None:
    """The step in Trainer's own state beside ours."""
    path = directory / _TRAINER_STATE
    if not path.exists():
        return None
    content = _parsed(path.read_bytes(), str(path))
    step = content.get("global_step") if isinstance(content, dict) else None
    if not isinstance(step, int):
        raise ValueError(f"{path} is damaged: it has no global_step")
    return step


def _parsed(text: str | bytes, name: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"`STATE`: {name} is no JSON: {error}") from error


# In words.


def _report(saved: SavedStates, found: list[Progress], fit: Fit | None) -> Report:
    report = Report()
    report.heading("State")
    report.line(saved.kind, "What")
    if saved.num_workers is not None:
        report.line(str(saved.num_workers), "DataLoader workers of each rank")
    if saved.global_step is not None:
        report.line(f"{saved.global_step:,}, of {saved.rows_per_step:,} rows each", "Steps")
    for progress in found:
        _add_progress(report, progress)
    obstacle = found[0].obstacle
    report.line(
        "on any number of ranks and DataLoader workers, merged" if obstacle is None else obstacle,
        "Loads" if obstacle is None else "Loads on the same ranks and workers only",
    )
    if fit is not None:
        _add_fit(report, fit)
    return report


def _add_progress(report: Report, progress: Progress) -> None:
    of = progress.fingerprint
    report.heading(f"Table {of.get('table')}")
    report.line(str(of.get("version")), "Version")
    report.line(str(of.get("columns")), "Columns")
    if of.get("filter") is not None:
        report.line(str(of.get("filter")), "Filter")
    report.line(_order_in_words(of), "Order")
    report.line(progress.steps, "Steps of the dataset, the last one first")
    report.line(_done_in_words(progress), f"Epoch {progress.epoch}")
    if len(progress.parts) > 1:
        rows = [[p.part, p.rows_done, p.least, p.most] for p in progress.parts[:_SHOWN_PARTS]]
        if len(progress.parts) > _SHOWN_PARTS:
            rows.append([f"and {len(progress.parts) - _SHOWN_PARTS} more", None, None, None])
        report.table(["part", "rows done", "least of a split", "most of a split"], rows)


def _order_in_words(of: Mapping[str, Any]) -> str:
    splits = of.get("num_splits")
    text = "table order" if of.get("shuffle_seed") is None else ""
    if not text:
        size = of.get("shuffle_clump_size")
        clumps = "single rows" if size == 1 else f"clumps of {size} rows"
        text = f"shuffled with seed {of.get('shuffle_seed')}, {clumps}"
    return f"{text}, " + ("natural shards" if splits is None else f"{splits} splits")


def _done_in_words(progress: Progress) -> str:
    done, rows = progress.rows_done, progress.rows
    if rows is None:
        text = f"{done:,} rows are read, of {progress.fingerprint.get('rows'):,} of the table"
        return text if progress.is_exact else f"{text}; the steps may hold some of them back"
    share = f" ({done / rows:.1%})" if rows else ""
    text = f"{done:,} of {rows:,} rows are done{share}"
    if len({(p.least, p.most) for p in progress.parts}) == 1 and (p := progress.parts[0]).most:
        level = f"{p.most:,}" if p.least == p.most else f"{p.least:,} to {p.most:,}"
        text += f", {level} of each split"
    return text


def _add_fit(report: Report, fit: Fit) -> None:
    report.heading(f"Against {fit.table}")
    if fit.version is not None:
        report.line(f"{fit.version}, the latest is {fit.latest_version}", "Version")
    report.line("yes" if fit.fits else "NO", "Fits")
    for line in fit.differences:
        report.line(line, "Differs")
    for note in fit.notes:
        report.line(note, "Note")
