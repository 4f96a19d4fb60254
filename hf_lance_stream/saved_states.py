"""What saved states say: of which table and order they are, and how much of the epoch is done."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hf_lance_stream.checkpoint import check_content
from hf_lance_stream.merge import (
    dataset_states,
    merge_natural,
    merge_state_dicts,
    plan_of,
    rank_counts,
    unpack,
    whole_plan,
)
from hf_lance_stream.permutation import Int64Array
from hf_lance_stream.resume import consumed_of, is_at_start, part_in_words
from hf_lance_stream.splits import SplitStream
from hf_lance_stream.state import (
    STATE_TYPE,
    check_count,
    check_version,
    find_states,
    mapping,
    steps_in_words,
)

_MOST_SPLITS = 2**24  # that a whole state has


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedStates:
    """What a file of states holds.

    Attributes:
        kind: what it is, in words.
        states: the state of each rank, or the only one.
        num_workers: DataLoader workers of each rank, if the file says so.
        global_step: step of the checkpoint, if it is one of Trainer.
        rows_per_step: rows of a step of all ranks, if it is one of Trainer.
    """

    kind: str
    states: tuple[Any, ...]
    num_workers: int | None = None
    global_step: int | None = None
    rows_per_step: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PartProgress:
    """How much of a part of the epoch is done.

    Attributes:
        part: the part in words: splits, or natural shards.
        rows_done: rows delivered.
        least: rows of the split that is the furthest behind; None if splits are not told apart.
        most: rows of the one that is the furthest ahead; None likewise.
    """

    part: str
    rows_done: int
    least: int | None = None
    most: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """Where the states of one table and order stand.

    Attributes:
        epoch: the epoch.
        fingerprint: what is read: table, version, order and so on.
        steps: the steps on top, the last one first, as `datasets` names them.
        parts: the parts of the epoch that the states tell of: of ranks, else of their workers.
        rows_done: rows delivered, all parts together.
        is_exact: False where steps buffer rows or change their number: then `rows_done` counts
            the rows that were read for these steps, which may hold some of them back.
        rows: rows that these parts have in an epoch; None where that is not known.
        obstacle: why the states cannot be loaded on another number of ranks or workers; None if
            they can.
    """

    epoch: int
    fingerprint: Mapping[str, Any]
    steps: str
    parts: tuple[PartProgress, ...]
    rows_done: int
    is_exact: bool
    rows: int | None
    obstacle: str | None


def saved_states(content: Any, name: str, step: int | None = None) -> SavedStates:
    """Tell what a JSON document is that holds states.

    Args:
        content: a state of a dataset or of a loader, a merged state, a list of such, or what
            `RankStates` or a checkpoint of Trainer has of all ranks.
        name: where it is from, for errors.
        step: the global step of the checkpoint of Trainer that it is from; None if unknown.

    Raises:
        ValueError: it is damaged, or something else, or of another step.
    """
    if isinstance(content, Mapping) and "sha256" in content:
        content = check_content(content, name, step)
        states = _list(content, name)
        return SavedStates(
            kind=f"a checkpoint of Trainer, with the loader states of {_ranks(states)}",
            states=states,
            num_workers=check_count(content, "num_workers"),
            global_step=check_count(content, "global_step"),
            rows_per_step=check_count(content, "rows_per_step"),
        )
    if isinstance(content, Mapping) and "states" in content:
        states = _list(content, name)
        workers = check_count(content, "num_workers")
        kind = f"the loader states of {_ranks(states)}, together"
        return SavedStates(kind=kind, states=states, num_workers=workers)
    if isinstance(content, list):
        if not content:
            raise ValueError(f"{name} holds no state: it is an empty list")
        return SavedStates(kind=f"a list of {len(content)} states", states=tuple(content))
    return SavedStates(kind=_kind(content), states=(content,), num_workers=_workers(content))


def _list(content: Mapping[str, Any], name: str) -> tuple[Any, ...]:
    states = content.get("states")
    if not isinstance(states, list) or not states:
        raise ValueError(f"{name} is damaged: `states` must be a list: got {str(states)[:80]}")
    return tuple(states)


def _ranks(states: Sequence[Any]) -> str:
    return "1 rank" if len(states) == 1 else f"{len(states)} ranks"


def _workers(state: Any) -> int | None:
    if isinstance(state, Mapping) and "loader" in state:
        return check_count(mapping(state, "loader"), "num_workers")
    if isinstance(state, Mapping) and "_snapshot" in state:
        return len(dataset_states(state)[0])
    return None


def _kind(state: Any) -> str:
    """What a single state is, in words."""
    if isinstance(state, Mapping) and {"loader", "_snapshot", "dataset_state"} & set(state):
        return "the state of a loader, of one rank"
    found = list(find_states(state))
    is_merged = len(found) == 1 and found[0].get("position") == 0 and not is_at_start(found[0])
    if is_merged:
        return "a merged state, or that of a dataset which has just loaded one"
    return "the state of a dataset"


def progress_of(states: Sequence[Any]) -> list[Progress]:
    """Where states stand, apart for each table and order that they tell of.

    Args:
        states: states of datasets or loaders, each of one rank, or a merged one.

    Raises:
        ValueError: one is damaged, or is none.
    """
    found = [one for state in states for one in _found(state)]
    obstacle = None
    try:
        merge_state_dicts(list(states))
    except ValueError as error:
        obstacle = str(error)
    groups: dict[str, list[_Found]] = {}
    for one in found:
        key = json.dumps({**one.state["fingerprint"], "epoch": one.epoch}, sort_keys=True)
        groups.setdefault(key, []).append(one)
    by_rank = _parts_of_ranks(states) if len(groups) == 1 else None
    return [_progress(group, by_rank, obstacle) for group in groups.values()]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Found:
    """One state of ours, with the epoch and the steps of the dataset that it is in."""

    state: dict[str, Any]
    epoch: int
    steps: str


def _found(state: Any) -> Iterator[_Found]:
    """The states of ours in a state of a dataset or loader, each checked."""
    for dataset in dataset_states(state)[0]:
        nested = dataset["examples_iterable"]
        epoch = check_count(dataset, "epoch")
        inside = list(_live_states(nested))
        if not inside:
            raise ValueError(f"it holds no state of a Lance table: got {str(dataset)[:100]}")
        for one in inside:
            _check(one)
            yield _Found(state=one, epoch=epoch, steps=steps_in_words(nested))


def _live_states(nested: Any) -> Iterator[dict[str, Any]]:
    """The states of ours in a nested state, without those that `datasets` keeps to replay from."""
    if isinstance(nested, dict) and nested.get("type") != STATE_TYPE:
        nested = [value for name, value in nested.items() if name != "previous_state"]
    if isinstance(nested, list):
        for value in nested:
            yield from _live_states(value)
    else:
        yield from find_states(nested)


def _check(state: dict[str, Any]) -> None:
    """Raise ValueError for a state of ours that is damaged."""
    check_version(state)
    fingerprint = mapping(state, "fingerprint")
    if fingerprint.get("num_splits") is not None:  # of which each will take memory
        check_count(fingerprint, "num_splits", low=1, high=_MOST_SPLITS)
    check_count(mapping(state, "part"), "start")
    check_count(mapping(state, "part"), "stop")
    _rows_done(state)


def _rows_done(state: Mapping[str, Any]) -> int:
    """Rows delivered by the reader of a state, those before it started included."""
    plan = plan_of(state, whole_plan(state))
    consumed = consumed_of(state, plan)
    before = 0 if consumed is None else int(consumed.sum())
    return before + check_count(state, "position", high=plan.resumed(consumed).stream_rows)


@dataclass(frozen=True, kw_only=True, slots=True)
class _RankPart:
    """The splits of a rank: the first one, and rows done of each; natural shards: of all."""

    state: dict[str, Any]
    start: int
    counts: Int64Array


def _parts_of_ranks(states: Sequence[Any]) -> list[_RankPart] | None:
    """The parts of the ranks, each once; None with steps that change the number of rows."""
    try:
        ranks = [unpack(state) for state in states]
        whole = whole_plan(ranks[0].states[0])
        if whole.layout is None:
            return [
                _RankPart(state=rank.states[0], start=0, counts=merge_natural([rank], whole))
                for rank in ranks
            ]
        parts = {
            (start, counts.size): _RankPart(state=rank.states[0], start=start, counts=counts)
            for rank in ranks
            for start, counts in rank_counts(rank, whole)
        }
    except ValueError:
        return None
    return [parts[key] for key in sorted(parts)]


def _progress(
    group: list[_Found], by_rank: list[_RankPart] | None, obstacle: str | None
) -> Progress:
    first = group[0]
    fingerprint = mapping(first.state, "fingerprint")
    rows: int | None = None
    if by_rank is not None:
        parts = [_of_rank(part) for part in by_rank]
        if fingerprint.get("num_splits") is not None:
            rows = sum(map(_rows_of, by_rank))
    else:
        parts = [
            PartProgress(
                part=part_in_words(mapping(one.state, "part")), rows_done=_rows_done(one.state)
            )
            for one in group
        ]
    return Progress(
        epoch=first.epoch,
        fingerprint=fingerprint,
        steps=first.steps,
        parts=tuple(parts),
        rows_done=sum(part.rows_done for part in parts),
        is_exact=by_rank is not None,
        rows=rows,
        obstacle=obstacle,
    )


def _of_rank(part: _RankPart) -> PartProgress:
    counts, last = part.counts, part.start + part.counts.size - 1
    if mapping(part.state, "fingerprint").get("num_splits") is None:
        words = part_in_words({**mapping(part.state, "part"), "worker": None})
        return PartProgress(part=words, rows_done=int(counts[0]))
    return PartProgress(
        part=f"split {last}" if last == part.start else f"splits {part.start} to {last}",
        rows_done=int(counts.sum()),
        least=int(counts.min()),
        most=int(counts.max()),
    )


def _rows_of(part: _RankPart) -> int:
    """Rows that the splits of a rank have in an epoch.

    A state does not say what the default tail was; so it is "drop", unless more is done.
    """
    stream = whole_plan(part.state).stream
    assert isinstance(stream, SplitStream)
    tail = mapping(part.state, "fingerprint").get("tail")
    stop, done = part.start + part.counts.size, int(part.counts.sum())
    lengths = [
        len(replace(stream, layout=replace(stream.layout, tail=one), start=part.start, stop=stop))
        for one in ((tail,) if tail else ("drop", "keep"))
    ]
    return next((length for length in lengths if length >= done), lengths[-1])
