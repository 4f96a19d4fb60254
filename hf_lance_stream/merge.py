"""One portable state from the states of all ranks and workers.

The portable state is that of the whole epoch, with nothing read since: a count of consumed rows
per split. `resume.start_from` lets a reader of any part of the epoch continue it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import numpy as np

from hf_lance_stream.permutation import Int64Array
from hf_lance_stream.plan import Plan
from hf_lance_stream.resume import advanced, consumed_of, is_at_start, part_in_words
from hf_lance_stream.splits import (
    BatchDeal,
    Layout,
    NaturalStream,
    Order,
    SplitStream,
    ranges_from_lengths,
)
from hf_lance_stream.state import (
    STATE_TYPE,
    check_count,
    check_depth,
    check_version,
    counts_to_text,
    differences,
    mapping,
    new_state,
    shown,
)

_REBATCHED = "RebatchedArrowExamplesIterable"
_REFUSED = {
    "FilteredExamplesIterable": "filter",
    "SkipExamplesIterable": "skip",
    "TakeExamplesIterable": "take",
    "RepeatExamplesIterable": "repeat",
    "StepExamplesIterable": "a split by examples",
    "CyclingMultiSourcesExamplesIterable": "interleave_datasets",
    "RandomlyCyclingMultiSourcesExamplesIterable": "interleave_datasets",
    "VerticallyConcatenatedMultiSourcesExamplesIterable": "concatenate_datasets",
    "HorizontallyConcatenatedMultiSourcesExamplesIterable": "concatenate_datasets",
}


@dataclass(frozen=True, kw_only=True)
class RankState:
    """What one rank's state says.

    Attributes:
        states: our state of each of its workers, or its one state.
        epoch: its epoch.
        extra_rows: rows delivered, over all workers together, since these states were taken.
        lagging_steps: batches delivered since these states were taken.
    """

    states: list[dict[str, Any]]
    epoch: int
    lagging_steps: int = 0


def merge_state_dicts(
    states: Sequence[Mapping[str, Any]], *, all_ranks_level: bool = False
) -> dict[str, Any]:
    """Merge the states of all ranks into one that loads on any number of ranks and workers.

    Args:
        states: one state per rank, in any order: what `state_dict()` of the loader of
            `stateful_dataloader`, of torchdata's `StatefulDataLoader` or of the dataset
            returned there, or merged states. Ranks that read the same rows, such as the members
            of a tensor-parallel group, may all be there.
        all_ranks_level: one rank's state stands for all ranks. Only true where every rank has
            delivered equally many batches, such as after a step of synchronous training.

    Returns:
        The portable state: load it into the dataset, or into a loader of it.

    Raises:
        ValueError: a rank is missing; the states do not belong together; or a step of the
            dataset, which is named, buffers rows or changes their number.

    Example:
        >>> import hf_lance_stream as hls
        >>> path = write_example_table(rows=100)
        >>> ds = hls.from_lance(path, num_splits=4, shuffle_seed=1)
        >>> ranks = [ds.shard(2, rank) for rank in range(2)]
        >>> for rank in ranks:
        ...     rows = iter(rank)
        ...     seen = [next(rows) for _ in range(10)]
        >>> portable = hls.merge_state_dicts([rank.state_dict() for rank in ranks])
        >>> ds.load_state_dict(portable)
        >>> sum(1 for _ in ds)
        80
    """
    if isinstance(states, Mapping):
        states = [states]
    if not isinstance(states, list | tuple):
        raise ValueError(f"`states` must be a list of states, one per rank: got {shown(states)}")
    check_depth([*states])
    ranks = [unpack(state) for state in states]
    if not ranks:
        raise ValueError("`states` must hold the state of at least one rank: got none")
    first = ranks[0].states[0]
    for number, rank in enumerate(ranks):
        if rank.epoch != ranks[0].epoch:
            raise ValueError(
                f"the states are of different epochs: {ranks[0].epoch} and {rank.epoch} "
                f"(state {number})"
            )
        for state in rank.states:
            lines = differences(state, mapping(first, "fingerprint"))
            if lines:
                raise ValueError(
                    f"the states are of different datasets; state {number} differs in "
                    + "; ".join(lines)
                )
    plan = whole_plan(first)
    if plan.layout is None:
        counts = merge_natural(ranks, plan)
    else:
        counts = _merge_splits(ranks, plan, all_ranks_level)
    part = dict(mapping(first, "part")) if plan.layout is None else plan.part()
    merged = new_state(
        mapping(first, "fingerprint"),
        {**part, "worker": None, "num_workers": None, "batch_size": None},
    ).__deepcopy__({})
    merged["consumed"] = counts_to_text(counts)
    return {"examples_iterable": merged, "epoch": ranks[0].epoch}


def _merge_splits(ranks: list[RankState], whole: Plan, all_ranks_level: bool) -> Int64Array:
    """Consumed rows of each split of the epoch."""
    assert whole.layout is not None
    num_splits = whole.layout.num_splits
    counts = np.full(num_splits, -1, dtype=np.int64)
    for rank in ranks:
        for start, found in rank_counts(rank, whole):
            known = counts[start : start + found.size]
            if ((known != found) & (known >= 0)).any():
                raise ValueError(
                    f"two states of the splits {start} to {start + found.size - 1} stand at "
                    "different rows: give one state per rank, all taken at the same step"
                )
            counts[start : start + found.size] = found
    missing = np.flatnonzero(counts < 0)
    if missing.size and all_ranks_level:
        group = counts[counts >= 0]
        if num_splits % group.size or len(ranks) > 1:
            raise ValueError("`all_ranks_level` needs the state of exactly one rank")
        if any(isinstance(state.get("consumed"), str) for state in ranks[0].states):
            raise ValueError(
                "`all_ranks_level` cannot be true: this run went on from a state in which the "
                "splits were not level; merge the states of all ranks"
            )
        counts = np.tile(group, num_splits // group.size)
    elif missing.size:
        raise ValueError(_missing(ranks, missing, num_splits))
    return counts


def _missing(ranks: list[RankState], missing: Int64Array, num_splits: int) -> str:
    size = max(_span(state)[1] - _span(state)[0] for rank in ranks for state in rank.states)
    names = f"splits {missing.tolist()}"
    if size and num_splits % size == 0 and missing.size % size == 0:
        absent = sorted({int(split) // size for split in missing})
        names = f"ranks {absent} of {num_splits // size}"
    return (
        f"the states of {names} are missing: merge the states of all ranks; where all have "
        "delivered equally many batches, all_ranks_level=True lets one stand for all"
    )


def _span(state: Mapping[str, Any]) -> tuple[int, int]:
    part = mapping(state, "part")
    return check_count(part, "start"), check_count(part, "stop")


def rank_counts(rank: RankState, whole: Plan) -> Iterator[tuple[int, Int64Array]]:
    """First split and consumed rows of each part that the states of a rank tell of."""
    dealt = [state for state in rank.states if mapping(state, "part").get("worker") is not None]
    if dealt:
        plan = plan_of(dealt[0], whole)
        counts = _dealt_counts(rank, dealt, plan)
        assert isinstance(plan.stream, SplitStream)
        yield plan.stream.start, counts
        return
    batch_size = mapping(rank.states[0], "part").get("batch_size")
    if rank.lagging_steps and batch_size is not None:  # no worker had told of a batch yet
        plan = plan_of(rank.states[0], whole)
        counts = advanced(rank.states[0], plan)
        length = plan.resumed(counts).stream_rows
        yield (
            _span(rank.states[0])[0],
            plan.consumed_after(counts, min(rank.lagging_steps * batch_size, length)),
        )
        return
    if rank.lagging_steps:
        raise ValueError(
            "the state lags behind by "
            f"{rank.lagging_steps} batches (snapshot_every_n_steps > 1), which cannot be told "
            "apart by worker: use snapshot_every_n_steps=1, or hls.stateful_dataloader"
        )
    # Workers that have not started yet stand for the whole rank; the others know better.
    known: dict[tuple[int, int], Int64Array] = {}
    for state in sorted(rank.states, key=lambda s: _span(s)[0] - _span(s)[1]):
        plan = plan_of(state, whole)
        known[_span(state)] = advanced(state, plan)
    spans = list(known)
    start, stop = min(s[0] for s in spans), max(s[1] for s in spans)
    counts = np.full(stop - start, -1, dtype=np.int64)
    for (first, last), found in known.items():
        counts[first - start : last - start] = found
    if (counts < 0).any():
        raise ValueError(f"the states of some workers of splits {start} to {stop - 1} are missing")
    yield start, counts


def _dealt_counts(rank: RankState, dealt: list[dict[str, Any]], plan: Plan) -> Int64Array:
    """Consumed rows of each split of a rank whose workers share its batches."""
    assert plan.deal is not None
    base = consumed_of(dealt[0], plan)
    delivered = np.zeros(plan.deal.num_workers, dtype=np.int64)
    for state in rank.states:
        if state in dealt:
            part = mapping(state, "part")
            if {**part, "worker": 0} != {**mapping(dealt[0], "part"), "worker": 0} or state.get(
                "consumed"
            ) != dealt[0].get("consumed"):
                raise ValueError(
                    f"the workers of a rank do not belong together: {part_in_words(part)} and "
                    f"{part_in_words(mapping(dealt[0], 'part'))}"
                )
            delivered[check_count(part, "worker", high=delivered.size - 1)] = check_count(
                state, "position"
            )
        elif not is_at_start(state) or base is not None:
            counts = advanced(state, replace(plan, deal=None))
            if not np.array_equal(counts, base if base is not None else np.zeros_like(counts)):
                raise ValueError("the workers of a rank did not start at the same row")
    total = int(delivered.sum())
    expected = [replace(plan.deal, worker=w).count(total) for w in range(plan.deal.num_workers)]
    if delivered.tolist() != expected:
        raise ValueError(
            f"the workers of a rank have delivered {delivered.tolist()} rows, which is not a "
            f"prefix of its batches ({expected}): a loader with in_order=False cannot be merged"
        )
    length = plan.resumed(base).stream_rows
    total = min(total + rank.lagging_steps * plan.deal.batch_size, length)
    return plan.consumed_after(base, total)


def merge_natural(ranks: list[RankState], whole: Plan) -> Int64Array:
    """Consumed rows of natural shards, which only one rank can have."""
    found = []
    states = [state for rank in ranks for state in rank.states]
    alike = len({str(mapping(state, "part").get("ranges")) for state in states}) == 1
    for rank in ranks if alike else ():
        states = rank.states
        dealt = [state for state in states if mapping(state, "part").get("worker") is not None]
        if dealt:
            found.append(_dealt_counts(rank, dealt, plan_of(dealt[0], whole)))
        elif not rank.lagging_steps:
            found.append(advanced(states[0], whole))
    if len(found) == len(ranks) and all(np.array_equal(f, found[0]) for f in found):
        return found[0]
    raise ValueError(
        "natural shards cannot move to another number of ranks or workers: give the dataset a "
        "`num_splits`"
    )


def whole_plan(state: Mapping[str, Any]) -> Plan:
    """The plan of the whole epoch that a state tells of; its order does not matter here."""
    fingerprint = mapping(state, "fingerprint")
    rows = check_count(fingerprint, "rows")
    order = Order(rows=rows)
    if fingerprint.get("num_splits") is None:
        starts, stops = ranges_from_lengths([rows])
        return Plan(order=order, stream=NaturalStream(starts=starts, stops=stops), layout=None)
    num_splits = check_count(fingerprint, "num_splits", low=1, high=max(rows, 1))
    # Which tail there is does not matter: a reader without one ends there all the same.
    tail = "pad" if fingerprint.get("tail") == "pad" else "keep"
    layout = Layout(rows=rows, num_splits=num_splits, tail=tail)  # type: ignore[arg-type]
    return Plan(
        order=order, stream=SplitStream(layout=layout, start=0, stop=num_splits), layout=layout
    )


def plan_of(state: Mapping[str, Any], whole: Plan) -> Plan:
    """The plan of the part of a state, workers included."""
    part = mapping(state, "part")
    deal = None
    if part.get("worker") is not None:
        deal = BatchDeal(
            worker=check_count(part, "worker"),
            num_workers=check_count(part, "num_workers", low=1),
            batch_size=check_count(part, "batch_size", low=1),
        )
    if not isinstance(whole.stream, SplitStream):
        return replace(whole, deal=deal, batch_size=part.get("batch_size"))
    start, stop = _span(state)
    check_count(part, "stop", low=start, high=whole.stream.stop)
    return replace(whole, stream=replace(whole.stream, start=start, stop=stop), deal=deal)


def dataset_states(state: Any) -> tuple[list[Mapping[str, Any]], int]:
    """The states of datasets inside the state of a dataset or of a loader.

    Returns:
        That of each worker, or the only one; and how many batches they lag behind the loader.

    Raises:
        ValueError: it is neither.
    """
    datasets, lagging = [state], 0
    if isinstance(state, Mapping) and "_snapshot" in state:  # torchdata with workers
        snapshots = mapping(mapping(state, "_snapshot"), "_worker_snapshots")
        datasets = [mapping(snapshots, name).get("dataset_state") for name in snapshots]
        if state.get("_steps_since_snapshot") is not None:
            lagging = check_count(state, "_steps_since_snapshot")
    elif isinstance(state, Mapping) and "dataset_state" in state:  # torchdata without workers
        datasets = [state["dataset_state"]]
    for dataset in datasets or [state]:
        if not isinstance(dataset, Mapping) or not {"examples_iterable", "epoch"} <= set(dataset):
            raise ValueError(
                "`states` must hold states of Lance datasets or of loaders of them: got "
                f"{str(dataset)[:200]}"
            )
    return datasets, lagging


def unpack(state: Any) -> RankState:
    """Our states inside the state of a dataset or of a loader."""
    datasets, lagging = dataset_states(state)
    found = [innermost_state(dataset["examples_iterable"]) for dataset in datasets]
    epochs = {check_count(dataset, "epoch") for dataset in datasets}
    if len(epochs) != 1:
        raise ValueError(f"the workers of a rank are in different epochs: {sorted(epochs)}")
    return RankState(states=found, epoch=epochs.pop(), lagging_steps=lagging)


def innermost_state(state: Any) -> dict[str, Any]:
    """Our state below wrappers that keep one row per row."""
    rebatched = False
    while isinstance(state, Mapping) and state.get("type") != STATE_TYPE:
        kind = state.get("type")
        if kind == _REBATCHED:  # there may be a step below that says more
            rebatched, state = True, state.get("examples_iterable")
            continue
        if not isinstance(kind, str):
            what = "a step of the dataset"
        elif kind in _REFUSED:
            what = _REFUSED[kind]
        elif state.get("previous_state") is not None:
            what = "a batched or asynchronous map"
        elif kind == "MappedExamplesIterable":
            state = state.get("examples_iterable")
            continue
        else:
            what = str(kind)
        _refuse(what)
    if rebatched:
        _refuse("a map, filter or batch on Arrow tables")
    if not isinstance(state, Mapping):
        raise ValueError(
            f"the state is damaged: there is none of a Lance table in {str(state)[:200]}"
        )
    check_version(state)
    return dict(state)


def _refuse(what: str) -> NoReturn:
    raise ValueError(
        f"{what} buffers rows or changes their number, so its state cannot move to another "
        "number of ranks or workers; it resumes exactly on the same ones"
    )
