"""The layout of a job before it runs: who would read what, and which rules hold.

Nothing is computed here a second time: the plans are those that the ranks and workers would
make, and the messages those that they would raise.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from datasets import Features

from hf_lance_stream.examples import LanceExamplesIterable
from hf_lance_stream.plan import Options, Plan, unequal_lengths, unlike_steps
from hf_lance_stream.shards import dividing_among_ranks
from hf_lance_stream.source import Source
from hf_lance_stream.splits import BatchDeal, Tail, check_divisible, part_of

Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """A rule, and whether it holds.

    Attributes:
        rule: the rule in words.
        message: what the package says where it is broken; None where it holds.
        severity: whether a broken rule is refused ("error"), only logged ("warning"), or refused
            only where workers share splits, as under a filter ("note").
    """

    rule: str
    message: str | None
    severity: Severity = "error"

    @property
    def holds(self) -> bool:
        """Whether it holds."""
        return self.message is None


@dataclass(frozen=True, kw_only=True, slots=True)
class RankLayout:
    """What one rank reads in an epoch.

    Attributes:
        rank: its index.
        start: its first split, or natural shard.
        stop: one past the last.
        rows: rows it yields.
        steps: batches it yields; None if the batch size is unknown.
        last_batch_rows: rows of the last of them.
        batches_per_worker: batches of each DataLoader worker.
    """

    rank: int
    start: int
    stop: int
    rows: int
    steps: int | None
    last_batch_rows: int | None
    batches_per_worker: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class WorldLayout:
    """An epoch on one number of GPUs.

    Attributes:
        world_size: number of GPUs.
        batch_size: rows per batch of one rank; None if unknown, or not whole.
        tail: what becomes of the surplus rows; None for natural shards, or if not divided.
        dropped_rows: rows that an epoch leaves out.
        padded_rows: rows that it yields a second time.
        ranks: what each reads; empty if the epoch cannot be divided among them.
        rules: the rules for this number of GPUs.
    """

    world_size: int
    batch_size: int | None
    tail: Tail | None
    dropped_rows: int
    padded_rows: int
    ranks: tuple[RankLayout, ...]
    rules: tuple[Rule, ...]

    @property
    def fits(self) -> bool:
        """Whether nothing would be refused."""
        return all(rule.holds or rule.severity != "error" for rule in self.rules)


def examples_to_lay_out(source: Source, options: Options) -> LanceExamplesIterable:
    """The rows of `source`, to be planned but not read: they have no features.

    Raises:
        ValueError: the rows cannot be laid out so.
    """
    examples = LanceExamplesIterable(source, options, Features())
    _ = examples.plan
    return examples


def world_layout(
    examples: LanceExamplesIterable,
    world_size: int,
    *,
    num_workers: int = 0,
    global_batch_size: int | None = None,
    batch_size: int | None = None,
) -> WorldLayout:
    """Lay an epoch out on a number of GPUs.

    Args:
        examples: the whole epoch.
        world_size: number of GPUs, at least 1.
        num_workers: DataLoader workers of each, at least 0.
        global_batch_size: rows per step of all GPUs together, at least 1.
        batch_size: rows per step of each, instead.
    """
    rules: list[Rule] = []
    parts: list[LanceExamplesIterable] = []
    if global_batch_size is not None:
        batch_size, rest = divmod(global_batch_size, world_size)
        message = None
        if rest:
            batch_size, message = None, _uneven_batch(global_batch_size, world_size)
        rules.append(Rule(rule="the number of GPUs divides the global batch", message=message))
    message = _refusal(lambda: parts.extend(_parts(examples, world_size)))
    what = "splits" if examples.plan.layout else "natural shards"
    rules.append(Rule(rule=f"the number of GPUs divides the {what}", message=message))
    count = examples.plan.stream.num_shards
    ranks = tuple(
        _rank_layout(part.plan, part_of(count, world_size, rank), rank, num_workers, batch_size)
        for rank, part in enumerate(parts)
    )
    if ranks:
        rules += _rules_of_steps(examples.plan, parts[0].plan, ranks, num_workers, batch_size)
    layout = parts[0].plan.layout if parts else None  # whose default tail may be that of ranks
    return WorldLayout(
        world_size=world_size,
        batch_size=batch_size,
        tail=layout.tail if layout else None,
        dropped_rows=layout.dropped if layout else 0,
        padded_rows=layout.padded if layout else 0,
        ranks=ranks,
        rules=tuple(rules),
    )


def _uneven_batch(global_batch: int, world_size: int) -> str:
    below = global_batch // world_size * world_size
    near = " or ".join(str(n) for n in (below, below + world_size) if n)
    return (
        f"the global batch must be a multiple of the number of GPUs: got {global_batch} rows, "
        f"{world_size} GPUs; use {near}"
    )


def _parts(examples: LanceExamplesIterable, world_size: int) -> list[LanceExamplesIterable]:
    """What each rank reads; as `from_lance` divides, with its refusals."""
    with dividing_among_ranks("world_size"):
        return [examples.shard_data_sources(world_size, rank) for rank in range(world_size)]


def _rank_layout(
    plan: Plan, span: tuple[int, int], rank: int, num_workers: int, batch_size: int | None
) -> RankLayout:
    steps, last = None, None
    per_worker: tuple[int, ...] = ()
    if batch_size is not None:
        steps = -(-len(plan) // batch_size)
        last = len(plan) - (steps - 1) * batch_size if steps else None
        deals = [
            BatchDeal(worker=worker, num_workers=num_workers, batch_size=batch_size)
            for worker in range(num_workers)
        ]
        per_worker = tuple(-(-len(replace(plan, deal=deal)) // batch_size) for deal in deals)
    return RankLayout(
        rank=rank,
        start=span[0],
        stop=span[1],
        rows=len(plan),
        steps=steps,
        last_batch_rows=last,
        batches_per_worker=per_worker,
    )


def _rules_of_steps(
    whole: Plan,
    part: Plan,
    ranks: tuple[RankLayout, ...],
    num_workers: int,
    batch_size: int | None,
) -> list[Rule]:
    rules = []
    if batch_size is not None:
        lengths = [rank.steps or 0 for rank in ranks]
        rule = "all ranks have equally many steps"
        rules.append(Rule(rule=rule, message=unequal_lengths(lengths)))
    if batch_size is not None and whole.layout is not None:
        rules.append(
            Rule(
                rule="the splits divide the global batch",
                message=unlike_steps(whole.layout, len(ranks), batch_size),
                severity="warning",
            )
        )
    if num_workers and whole.layout is not None:
        splits, rows = part.num_shards, whole.order.rows
        rules.append(
            Rule(
                rule="workers that share splits, as under filter or take, divide those of a rank",
                message=_refusal(lambda: check_divisible(splits, num_workers, "num_workers", rows)),
                severity="note",
            )
        )
    return rules


def _refusal(do: Callable[[], object]) -> str | None:
    """What the package says when it refuses something, or None."""
    try:
        do()
    except ValueError as error:
        return str(error)
    return None
