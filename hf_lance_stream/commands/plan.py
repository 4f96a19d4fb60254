"""The sub-command ``plan``: who reads what, before a job is started."""

import argparse
from dataclasses import asdict
from typing import Any

from hf_lance_stream.commands.common import (
    add_filter,
    add_json,
    add_order,
    add_table,
    new_parser,
    numbers,
    open_tables,
    options_of,
    show,
)
from hf_lance_stream.commands.report import Report
from hf_lance_stream.examples import LanceExamplesIterable
from hf_lance_stream.layouts import RankLayout, WorldLayout, examples_to_lay_out, world_layout
from hf_lance_stream.plan import Options, check_int
from hf_lance_stream.source import Source
from hf_lance_stream.splits import Layout, divisors
from hf_lance_stream.suggest import suggest_num_splits
from hf_lance_stream.words import lines_of

_DESCRIPTION = """\
Say what a job would read: which splits each GPU and how many batches each
worker gets, steps per epoch, rows left out, the numbers of GPUs that go with the
number of splits, and each rule with what the package says where it is broken.
Without --num-splits and --seed it is what the package does then: one shard per
fragment, in table order; with --seed alone 64 splits. With --gpus and a batch it
also suggests a number of splits, for all the numbers of GPUs given.
Reads nothing but the table's manifest, unless there is a --filter.
The exit code is 1 if a rule is broken that the package would refuse.
"""

_SHOWN_RANKS = 8
_BROKEN = {"error": "BROKEN", "warning": "broken (a warning)", "note": "broken (if it applies)"}


def add(commands: Any) -> None:
    """Add its parser."""
    parser = new_parser(commands, "plan", "say who would read what; reads nothing", _DESCRIPTION)
    add_table(parser, nargs="+")
    add_filter(parser)
    add_order(parser)
    parser.add_argument(
        "--gpus",
        metavar="N[,N…]",
        type=numbers,
        default=[1],
        help="number of GPUs, or several that the job shall run on (default: 1)",
    )
    parser.add_argument(
        "--workers", metavar="N", type=int, default=0, help="DataLoader workers of each GPU"
    )
    batch = parser.add_mutually_exclusive_group()
    batch.add_argument(
        "--global-batch", metavar="ROWS", type=int, help="rows per step of all GPUs together"
    )
    batch.add_argument("--batch", metavar="ROWS", type=int, help="rows per step of each GPU")
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run it: 0 if all rules hold that the package insists on, else 1."""
    for name, low in (("workers", 0), ("global_batch", 1), ("batch", 1)):
        if getattr(arguments, name) is not None:
            check_int(f"--{name.replace('_', '-')}", getattr(arguments, name), low, 2**31)
    for world in arguments.gpus:
        check_int("--gpus", world, 1, 2**31)
    options = options_of(arguments)
    source = open_tables(arguments, filter=arguments.filter)
    refusal = None
    worlds: list[WorldLayout] = []
    try:
        examples = examples_to_lay_out(source, options)
    except ValueError as error:
        refusal, examples = str(error), None
    if examples is not None:
        worlds = [
            world_layout(
                examples,
                world,
                num_workers=arguments.workers,
                global_batch_size=arguments.global_batch,
                batch_size=arguments.batch,
            )
            for world in arguments.gpus
        ]
    suggestion = _suggestion(arguments, source)
    document = _document(source, options, examples, refusal, worlds, suggestion)
    show(arguments, document, _report(source, examples, refusal, worlds, suggestion))
    return 0 if document["fits"] else 1


def _suggestion(arguments: argparse.Namespace, source: Source) -> dict[str, Any] | None:
    """A number of splits for all numbers of GPUs; None without a batch."""
    global_batch = arguments.global_batch
    if arguments.batch is not None:
        if len(arguments.gpus) > 1:  # each has another global batch, so no step is the same
            return None
        global_batch = arguments.batch * arguments.gpus[0]
    if global_batch is None:
        return None
    try:
        found = suggest_num_splits(arguments.gpus, global_batch, source.num_rows)
    except ValueError as error:
        return {"num_splits": None, "reason": str(error)}
    return asdict(found)


# As JSON.


def _document(
    source: Source,
    options: Options,
    examples: LanceExamplesIterable | None,
    refusal: str | None,
    worlds: list[WorldLayout],
    suggestion: dict[str, Any] | None,
) -> dict[str, Any]:
    layout = examples.plan.layout if examples is not None else None
    return {
        "table": source.name,
        "version": source.version,
        "filter": source.filter,
        "rows": source.num_rows,
        "options": asdict(options),
        "refusal": refusal,
        "splits": None
        if layout is None
        else {
            "num_splits": layout.num_splits,
            "rows_per_split": layout.rows_per_split,
            "tail": layout.tail,
            "compatible_world_sizes": divisors(layout.num_splits),
        },
        "natural_shards": examples.plan.stream.num_shards if examples and layout is None else None,
        "worlds": [_world_document(world) for world in worlds],
        "suggestion": suggestion,
        "fits": refusal is None and all(world.fits for world in worlds),
    }


def _world_document(world: WorldLayout) -> dict[str, Any]:
    return {
        "world_size": world.world_size,
        "batch_size": world.batch_size,
        "tail": world.tail,
        "epoch_rows": sum(rank.rows for rank in world.ranks) if world.ranks else None,
        "dropped_rows": world.dropped_rows,
        "padded_rows": world.padded_rows,
        "steps_per_epoch": _common([rank.steps for rank in world.ranks]),
        "ranks": [asdict(rank) for rank in world.ranks],
        "rules": [{**asdict(rule), "holds": rule.holds} for rule in world.rules],
        "fits": world.fits,
    }


def _common(values: list[int | None]) -> int | None:
    """The value that all have, or None."""
    return values[0] if len(set(values)) == 1 else None


# In words.


def _report(
    source: Source,
    examples: LanceExamplesIterable | None,
    refusal: str | None,
    worlds: list[WorldLayout],
    suggestion: dict[str, Any] | None,
) -> Report:
    report = Report()
    report.heading("Epoch")
    if examples is None:
        report.line(f"{source.name}, version {source.version}", "Table")
        report.line(str(refusal), "Refused")
    else:
        for line in lines_of(examples, 0):
            label, _, text = line.partition(": ")
            report.line(text, label)
    if source.filter is not None:
        report.line("the filter was applied, which read the columns it names", "Note")
    for world in worlds:
        _add_world(report, world, examples.plan.layout if examples is not None else None)
    if suggestion is not None:
        report.heading("Suggested number of splits")
        found = suggestion["num_splits"]
        report.line(f"{found}: {suggestion['reason']}" if found else suggestion["reason"])
    return report


def _add_world(report: Report, world: WorldLayout, whole: Layout | None) -> None:
    gpus = "1 GPU" if world.world_size == 1 else f"{world.world_size:,} GPUs"
    batch = ""
    if world.batch_size is not None:
        batch = f", batches of {world.batch_size:,} rows"
        if world.world_size > 1:
            batch += f", {world.batch_size * world.world_size:,} together"
    report.heading(gpus + batch)
    if world.ranks:
        text = _epoch_of(world)
        if whole is not None and world.tail != whole.tail:
            text += f"; tail {world.tail!r}, the default of several GPUs"
        report.line(text)
        what = "shards" if whole is None else "splits"
        headers = ["rank", what, "rows"]
        if world.batch_size is not None:
            headers += ["steps", "last batch"]
        if world.ranks[0].batches_per_worker:
            headers.append("batches of each worker")
        report.table(headers, _abbreviated([_rank_row(rank) for rank in world.ranks]))
    for rule in world.rules:
        verdict = "holds" if rule.holds else _BROKEN[rule.severity]
        report.line(rule.rule + (f": {rule.message}" if rule.message else ""), verdict)


def _epoch_of(world: WorldLayout) -> str:
    first = world.ranks[0]
    text = f"{sum(rank.rows for rank in world.ranks):,} rows per epoch"
    if world.dropped_rows:
        text += f", {world.dropped_rows:,} left out"
    if world.padded_rows:
        text += f", {world.padded_rows:,} of them a second time"
    if first.steps is not None:
        steps = sorted({rank.steps or 0 for rank in world.ranks})
        text += f"; {' to '.join(f'{count:,}' for count in (steps[0], steps[-1])[: len(steps)])}"
        text += " steps"
        per_split, rest = divmod((world.batch_size or 0) * world.world_size, world.ranks[-1].stop)
        if world.tail is not None and per_split and not rest:
            text += (
                f"; a step takes {'a row' if per_split == 1 else f'{per_split} rows'} of each split"
            )
    return text


def _rank_row(rank: RankLayout) -> list[Any]:
    span = str(rank.start) if rank.stop == rank.start + 1 else f"{rank.start} to {rank.stop - 1}"
    row: list[Any] = [rank.rank, span, rank.rows]
    if rank.steps is not None:
        row += [rank.steps, rank.last_batch_rows]
    if rank.batches_per_worker:
        row.append(_abbreviated_list(rank.batches_per_worker))
    return row


def _abbreviated(rows: list[list[Any]]) -> list[list[Any]]:
    if len(rows) <= _SHOWN_RANKS:
        return rows
    return [*rows[: _SHOWN_RANKS - 2], ["…"] * len(rows[0]), rows[-1]]


def _abbreviated_list(numbers: tuple[int, ...]) -> str:
    shown = [f"{number:,}" for number in numbers]
    if len(shown) > _SHOWN_RANKS:
        shown = [*shown[: _SHOWN_RANKS - 2], "…", shown[-1]]
    return " ".join(shown)
