"""Where a reader goes on from a saved state, its own or that of a larger part of the epoch."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from hf_lance_stream.permutation import Int64Array
from hf_lance_stream.plan import Plan
from hf_lance_stream.splits import SplitStream
from hf_lance_stream.state import (
    check_count,
    check_state,
    counts_from_text,
    counts_to_text,
    mapping,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """Where a reader goes on.

    Attributes:
        plan: its plan after `consumed`.
        consumed: rows of each of its splits that are done, int64; None for none. For natural
            shards, which come one after the other, one number.
        position: rows of `plan` that are done too.
        is_level: whether all splits of the epoch, those of other ranks too, started level.
    """

    plan: Plan
    consumed: Int64Array | None = None
    position: int = 0
    is_level: bool = True

    def write_to(self, state: dict[str, Any]) -> None:
        """Make `state`, in place, that of this reader at this place."""
        state["part"] = self.plan.part()
        state["consumed"] = None
        if self.consumed is not None:
            state["consumed"] = counts_to_text(self.consumed, is_level=self.is_level)
        state["position"] = self.position


def start_from(state: Mapping[str, Any], fingerprint: Mapping[str, Any], plan: Plan) -> Start:
    """Where the reader of `plan` continues `state`.

    A state of this very reader is continued where it stands. A state of a part of the epoch
    that holds this reader's part (a rank's state for its workers, a merged state for anyone)
    is continued by everyone behind it.

    Args:
        state: a state of ours.
        fingerprint: what the reader reads.
        plan: the reader, at the start of the epoch.

    Raises:
        ValueError: the state is damaged, or of something else, or of a part that does not hold
            this reader's.
    """
    check_state(state, fingerprint)
    part, mine = mapping(state, "part"), plan.part()
    if is_at_start(state):
        return Start(plan=plan)
    is_level = not isinstance(state.get("consumed"), str)
    if dict(part) == mine:
        consumed = consumed_of(state, plan)
        resumed = plan.resumed(consumed)
        position = check_count(state, "position", high=len(resumed))
        return Start(plan=resumed, consumed=consumed, position=position, is_level=is_level)
    if part.get("worker") is None and part.get("ranges") == mine["ranges"]:
        whole = _plan_of_part(part, plan)
        if whole is not None:
            counts = advanced(state, whole)
            is_level = is_level and bool((counts == counts[:1]).all())
            if isinstance(plan.stream, SplitStream):
                first = check_count(part, "start")
                counts = counts[plan.stream.start - first : plan.stream.stop - first]
            return Start(plan=plan.resumed(counts), consumed=counts, is_level=is_level)
    raise ValueError(
        f"the state is that of {part_in_words(part)}, this reader has {part_in_words(mine)}: "
        + (
            "natural shards cannot move to another number of ranks or workers; give the dataset "
            "a `num_splits`"
            if plan.layout is None
            else "to continue on another number of ranks or workers, load what "
            "hls.merge_state_dicts([...]) makes of the states of all ranks"
        )
    )


def is_at_start(state: Mapping[str, Any]) -> bool:
    """Whether nothing has been read at all, by any reader."""
    return state.get("position") == 0 and state.get("consumed") is None


def consumed_of(state: Mapping[str, Any], plan: Plan) -> Int64Array | None:
    """Rows consumed of each split of `plan` when the reader of the state started."""
    size = plan.stream.num_shards if isinstance(plan.stream, SplitStream) else 1
    return counts_from_text(state.get("consumed"), size)


def advanced(state: Mapping[str, Any], plan: Plan) -> Int64Array:
    """Rows consumed of each split where `state`, of the reader of `plan`, stands."""
    consumed = consumed_of(state, plan)
    high = plan.resumed(consumed).stream_rows
    return plan.consumed_after(consumed, check_count(state, "position", high=high))


def _plan_of_part(part: Mapping[str, Any], plan: Plan) -> Plan | None:
    """The plan of a part of the epoch without workers, if it holds the part of `plan`."""
    if not isinstance(plan.stream, SplitStream):
        return replace(plan, deal=None, resume=None)
    start, stop = check_count(part, "start"), check_count(part, "stop")
    if not start <= plan.stream.start <= plan.stream.stop <= stop <= plan.stream.layout.num_splits:
        return None
    stream = replace(plan.stream, start=start, stop=stop)
    return replace(plan, stream=stream, deal=None, resume=None)


def part_in_words(part: Mapping[str, Any]) -> str:
    """A part for an error message."""
    worker = ""
    if part.get("worker") is not None:
        worker = (
            f", worker {part['worker']} of {part.get('num_workers')} with batches of "
            f"{part.get('batch_size')} rows"
        )
    if part.get("ranges") is not None:
        return f"{part.get('stop')} natural shards{worker}"
    last = part["stop"] - 1 if isinstance(part.get("stop"), int) else part.get("stop")
    return f"splits {part.get('start')} to {last}{worker}"
