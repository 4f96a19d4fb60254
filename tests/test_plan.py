import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_lance_stream.plan import (
    DEFAULT_NUM_SPLITS,
    Options,
    Plan,
    Reshard,
    Shard,
    Step,
    check_int,
    make_plan,
)
from hf_lance_stream.splits import TAILS, divisors

untimed = settings(deadline=None)


@st.composite
def epochs(draw: st.DrawFn) -> tuple[int, Options]:
    """A number of rows and options that cut them into splits, shuffled or not."""
    rows = draw(st.integers(1, 120))
    return rows, Options(
        num_splits=draw(st.integers(1, rows)),
        shuffle_seed=draw(st.none() | st.integers(0, 2**64 - 1)),
        shuffle_clump_size=draw(st.none() | st.integers(1, 20)),
        tail=draw(st.sampled_from(TAILS)),
        epoch=draw(st.integers(0, 2**64 - 1)),
    )


fragments = st.lists(st.integers(0, 15), max_size=12)


def plan(rows: int | list[int], options: Options, *steps: Step) -> Plan:
    """A plan over `rows` rows in one fragment, or over fragments of so many rows."""
    shard_rows = np.array([rows] if isinstance(rows, int) else rows, dtype=np.int64)
    return make_plan(options, rows=int(shard_rows.sum()), shard_rows=shard_rows, steps=steps)


def listed(plan: Plan) -> list[int]:
    return plan.rows(0, len(plan)).tolist()


def rank(num_parts: int, index: int) -> Shard:
    return Shard(num_parts=num_parts, index=index, contiguous=False, role="rank")


def worker(num_parts: int, index: int) -> Shard:
    return Shard(num_parts=num_parts, index=index, contiguous=False, role="worker")


def piece(num_parts: int, index: int) -> Shard:
    return Shard(num_parts=num_parts, index=index)


def splits_of(rows: int, options: Options) -> list[list[int]]:
    """The splits of the oracle."""
    sequence = oracle.sequence(
        rows, options.shuffle_clump_size or 1, options.shuffle_seed, options.epoch
    )
    return oracle.cut(sequence, options.num_splits, options.tail)


# Options


@pytest.mark.parametrize("value", [True, False, 2.0, "4", [3]])
@pytest.mark.parametrize(
    "name", ["num_splits", "shuffle_seed", "shuffle_clump_size", "epoch", "batch_size"]
)
def test_what_is_no_integer_is_refused_by_name_and_value(name: str, value: Any) -> None:
    message = re.escape(f"`{name}` must be an integer: got {name}={value!r}")
    with pytest.raises(ValueError, match=f"^{message}"):
        Options(**{name: value})


@pytest.mark.parametrize(
    ("name", "value", "low"),
    [
        ("num_splits", 0, 1),
        ("num_splits", -4, 1),
        ("shuffle_clump_size", 0, 1),
        ("shuffle_clump_size", -1, 1),
        ("shuffle_clump_size", 2**62, 1),
        ("shuffle_seed", -1, 0),
        ("shuffle_seed", 2**64, 0),
        ("batch_size", 0, 1),
        ("epoch", -1, 0),
        ("epoch", 2**64, 0),
    ],
)
def test_an_integer_out_of_range_is_refused_with_the_range(name: str, value: int, low: int) -> None:
    high = "2**62" if name == "shuffle_clump_size" else "2**64"
    message = re.escape(f"`{name}` must be an integer in [{low}, {high}): got {name}={value}")
    with pytest.raises(ValueError, match=f"^{message}"):
        Options(**{name: value})


@pytest.mark.parametrize(
    ("name", "way_out"),
    [
        ("num_splits", "leave it out to let the package choose"),
        ("shuffle_clump_size", "use None to shuffle single rows"),
    ],
)
def test_the_message_names_the_way_out(name: str, way_out: str) -> None:
    with pytest.raises(ValueError, match=f"; {way_out}$"):
        Options(**{name: 0})


@pytest.mark.parametrize("tail", ["cut", "DROP", "", 1, ["drop"]])
def test_an_unknown_tail_is_refused_with_the_known_ones(tail: Any) -> None:
    message = f"`tail` must be one of ['drop', 'pad', 'keep'] or None: got {tail!r}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Options(tail=tail)


def test_numpy_integers_become_python_integers() -> None:
    options = Options(
        num_splits=np.int32(4),
        shuffle_seed=np.uint64(2**64 - 1),
        shuffle_clump_size=np.int64(8),
        epoch=np.uint8(3),
    )
    assert options == Options(num_splits=4, shuffle_seed=2**64 - 1, shuffle_clump_size=8, epoch=3)
    assert {type(getattr(options, name)) for name in ("num_splits", "shuffle_seed", "epoch")} == {
        int
    }


def test_the_ends_of_the_ranges_are_accepted() -> None:
    Options(num_splits=1, shuffle_seed=0, shuffle_clump_size=1, epoch=0, tail=None)
    Options(shuffle_seed=2**64 - 1, epoch=2**64 - 1)


def test_check_int_gives_reason_and_any_upper_bound() -> None:
    assert check_int("k", 9, 0, 10) == 9
    message = re.escape("`k` must be an integer in [0, 10): got k=10 in the state")
    with pytest.raises(ValueError, match=f"^{message}$"):
        check_int("k", 10, 0, 10, " in the state")


@pytest.mark.parametrize(
    ("options", "is_natural"),
    [
        (Options(), True),
        (Options(epoch=3, shuffle_clump_size=8), True),
        (Options(num_splits=4), False),
        (Options(shuffle_seed=0), False),
    ],
)
def test_natural_means_neither_split_nor_shuffled(options: Options, is_natural: bool) -> None:
    assert options.is_natural is is_natural
    assert (plan(100, options).layout is None) is is_natural


# Defaults


@pytest.mark.parametrize(("rows", "num_splits"), [(1, 1), (63, 63), (64, 64), (10_000, 64)])
def test_a_shuffle_has_64_splits_or_as_many_as_rows(rows: int, num_splits: int) -> None:
    assert DEFAULT_NUM_SPLITS == 64
    assert plan(rows, Options(shuffle_seed=1)).num_shards == num_splits


@pytest.mark.parametrize(
    ("options", "steps", "tail"),
    [
        (Options(shuffle_seed=1), (), "keep"),
        (Options(shuffle_seed=1), (worker(4, 0),), "keep"),
        (Options(shuffle_seed=1), (rank(1, 0),), "keep"),
        (Options(shuffle_seed=1), (rank(2, 0),), "drop"),
        (Options(shuffle_seed=1), (rank(2, 0), worker(4, 1)), "drop"),
        (Options(num_splits=64), (), "drop"),
        (Options(num_splits=64, tail="pad"), (rank(2, 1),), "pad"),
        (Options(shuffle_seed=1, tail="keep"), (rank(2, 1),), "keep"),
    ],
)
def test_default_tail(options: Options, steps: tuple[Step, ...], tail: str) -> None:
    assert plan(100, options, *steps).layout.tail == tail


def test_one_process_shuffles_without_losing_a_row() -> None:
    assert sorted(listed(plan(1000, Options(shuffle_seed=1)))) == list(range(1000))


def test_the_epoch_matters_only_to_a_shuffle() -> None:
    first, second = (plan(50, Options(num_splits=5, epoch=epoch)) for epoch in (0, 1))
    assert first == second
    first, second = (
        plan(50, Options(num_splits=5, shuffle_seed=1, epoch=epoch)) for epoch in (0, 1)
    )
    assert listed(first) != listed(second)


# Splits


@untimed
@given(epoch=epochs(), window=st.tuples(st.integers(0, 150), st.integers(0, 150)))
def test_any_window_of_an_epoch(epoch: tuple[int, Options], window: tuple[int, int]) -> None:
    rows, options = epoch
    expected = oracle.deal(splits_of(rows, options))
    assert listed(plan(rows, options)) == expected
    assert plan(rows, options).rows(*window).tolist() == expected[slice(*window)]


@untimed
@given(epoch=epochs(), data=st.data())
def test_ranks_get_contiguous_groups_of_splits(
    epoch: tuple[int, Options], data: st.DataObject
) -> None:
    rows, options = epoch
    splits = splits_of(rows, options)
    world_size = data.draw(st.sampled_from(divisors(options.num_splits)))
    for index in range(world_size):
        expected = oracle.deal(oracle.group(splits, world_size, index))
        assert listed(plan(rows, options, rank(world_size, index))) == expected


@untimed
@given(epoch=epochs(), data=st.data())
def test_workers_get_contiguous_groups_of_the_splits_of_their_rank(
    epoch: tuple[int, Options], data: st.DataObject
) -> None:
    rows, options = epoch
    world_size = data.draw(st.sampled_from(divisors(options.num_splits)))
    num_workers = data.draw(st.sampled_from(divisors(options.num_splits // world_size)))
    index = data.draw(st.integers(0, world_size - 1))
    mine = oracle.group(splits_of(rows, options), world_size, index)
    for worker_id in range(num_workers):
        expected = oracle.deal(oracle.group(mine, num_workers, worker_id))
        steps = rank(world_size, index), worker(num_workers, worker_id)
        assert listed(plan(rows, options, *steps)) == expected


@untimed
@given(epoch=epochs(), num_parts=st.integers(1, 30))
def test_uneven_pieces_together_are_the_epoch(epoch: tuple[int, Options], num_parts: int) -> None:
    rows, options = epoch
    pieces = [plan(rows, options, piece(num_parts, index)) for index in range(num_parts)]
    assert sorted(row for p in pieces for row in listed(p)) == sorted(listed(plan(rows, options)))
    assert all(p.num_shards >= 1 for p in pieces)


@untimed
@given(epoch=epochs(), sizes=st.lists(st.integers(0, 20), max_size=8))
def test_the_order_does_not_depend_on_fragments(
    epoch: tuple[int, Options], sizes: list[int]
) -> None:
    rows, options = epoch
    cuts = sorted({0, rows, *(min(size, rows) for size in np.cumsum(sizes).tolist())})
    assert listed(plan(np.diff(cuts).tolist(), options)) == listed(plan(rows, options))


@untimed
@given(epoch=epochs(), cycles=st.integers(1, 3), data=st.data())
def test_a_global_step_has_the_same_rows_at_every_world_size(
    epoch: tuple[int, Options], cycles: int, data: st.DataObject
) -> None:
    rows, options = epoch
    alone = plan(rows, options)
    world_size = data.draw(st.sampled_from(divisors(options.num_splits)))
    ranks = [plan(rows, options, rank(world_size, index)) for index in range(world_size)]
    global_batch = cycles * options.num_splits
    batch = global_batch // world_size
    for step in range(-(-len(alone) // global_batch)):
        together = [r.rows(step * batch, (step + 1) * batch) for r in ranks]
        expected = alone.rows(step * global_batch, (step + 1) * global_batch)
        assert sorted(np.concatenate(together).tolist()) == sorted(expected.tolist())


@pytest.mark.parametrize(("role", "what"), [("rank", "world_size"), ("worker", "num_workers")])
def test_ranks_and_workers_must_divide_the_splits(role: Any, what: str) -> None:
    step = Shard(num_parts=5, index=0, contiguous=False, role=role)
    message = f"must be divisible by {what}: got num_splits=48, {what}=5; .* such as 45 or 50"
    with pytest.raises(ValueError, match=message):
        plan(1000, Options(num_splits=48), step)


def test_workers_must_divide_the_splits_of_one_rank() -> None:
    with pytest.raises(ValueError, match="got num_splits=24, num_workers=16"):
        plan(1000, Options(num_splits=48), rank(2, 0), worker(16, 0))


def test_more_splits_than_rows_are_refused_with_both_numbers() -> None:
    message = "`num_splits` must not be larger than the number of rows: "
    message += "got num_splits=64, rows=5; use at most 5 splits"
    with pytest.raises(ValueError, match=f"^{message}$"):
        plan(5, Options(num_splits=64))


def test_as_many_splits_as_rows_are_accepted() -> None:
    assert listed(plan(5, Options(num_splits=5))) == [0, 1, 2, 3, 4]


# Workers that get whole batches


@untimed
@given(epoch=epochs(), batch_size=st.integers(1, 20), data=st.data())
def test_workers_get_the_batches_of_their_rank_in_turn(
    epoch: tuple[int, Options], batch_size: int, data: st.DataObject
) -> None:
    rows, options = epoch
    world_size = data.draw(st.sampled_from(divisors(options.num_splits)))
    num_workers = data.draw(st.integers(1, 6))
    mine = rank(world_size, data.draw(st.integers(0, world_size - 1)))
    of_rank = listed(plan(rows, options, mine))
    dealt = replace(options, batch_size=batch_size)
    assert listed(plan(rows, dealt, mine)) == of_rank
    for worker_id in range(num_workers):
        expected = oracle.batches(of_rank, batch_size, num_workers, worker_id)
        reader = plan(rows, dealt, mine, worker(num_workers, worker_id))
        assert listed(reader) == expected
        assert reader.stream_rows == len(of_rank)


@untimed
@given(sizes=fragments, batch_size=st.integers(1, 20), num_workers=st.integers(1, 6))
def test_workers_get_batches_of_natural_shards_in_turn(
    sizes: list[int], batch_size: int, num_workers: int
) -> None:
    for worker_id in range(num_workers):
        reader = plan(sizes, Options(batch_size=batch_size), worker(num_workers, worker_id))
        table = list(range(sum(sizes)))
        assert listed(reader) == oracle.batches(table, batch_size, num_workers, worker_id)


# Resume


@untimed
@given(epoch=epochs(), data=st.data())
def test_a_resumed_reader_yields_the_rest(epoch: tuple[int, Options], data: st.DataObject) -> None:
    rows, options = epoch
    reader = plan(rows, options)
    begin = data.draw(st.integers(0, len(reader)))
    consumed = reader.consumed_after(None, begin)
    assert listed(reader.resumed(consumed)) == listed(reader)[begin:]
    middle = data.draw(st.integers(0, len(reader) - begin))
    consumed = reader.consumed_after(consumed, middle)
    assert listed(reader.resumed(consumed)) == listed(reader)[begin + middle :]


@untimed
@given(sizes=fragments, data=st.data())
def test_resumed_natural_shards_yield_the_rest(sizes: list[int], data: st.DataObject) -> None:
    reader = plan(sizes, Options())
    begin = data.draw(st.integers(0, len(reader)))
    middle = data.draw(st.integers(0, len(reader) - begin))
    consumed = reader.consumed_after(reader.consumed_after(None, begin), middle)
    assert listed(reader.resumed(consumed)) == listed(reader)[begin + middle :]


@pytest.mark.parametrize("options", [Options(), Options(num_splits=1)])
def test_a_reader_resumed_past_its_end_yields_nothing(options: Options) -> None:
    for consumed in (10, 15):
        reader = plan(10, options).resumed(np.array([consumed]))
        assert (len(reader), listed(reader)) == (0, [])


@untimed
@given(epoch=epochs(), batch_size=st.integers(1, 20), data=st.data())
def test_another_number_of_workers_continues_with_the_same_batches(
    epoch: tuple[int, Options], batch_size: int, data: st.DataObject
) -> None:
    rows, options = epoch
    alone = plan(rows, options)
    begin = data.draw(st.integers(0, len(alone)))
    consumed = alone.consumed_after(None, begin)
    num_workers = data.draw(st.integers(1, 6))
    for worker_id in range(num_workers):
        dealt = replace(options, batch_size=batch_size)
        reader = plan(rows, dealt, worker(num_workers, worker_id)).resumed(consumed)
        expected = oracle.batches(listed(alone)[begin:], batch_size, num_workers, worker_id)
        assert listed(reader) == expected


@untimed
@given(epoch=epochs(), data=st.data())
def test_another_world_size_continues_with_exactly_the_unseen_rows(
    epoch: tuple[int, Options], data: st.DataObject
) -> None:
    rows, options = epoch
    before, after = (data.draw(st.sampled_from(divisors(options.num_splits))) for _ in range(2))
    seen, consumed = [], []
    for index in range(before):
        reader = plan(rows, options, rank(before, index))
        delivered = data.draw(st.integers(0, len(reader)))
        seen += listed(reader)[:delivered]
        consumed.append(reader.consumed_after(None, delivered))
    for index, counts in enumerate(np.split(np.concatenate(consumed), after)):
        seen += listed(plan(rows, options, rank(after, index)).resumed(counts))
    assert sorted(seen) == sorted(listed(plan(rows, options)))


# Empty tables


@pytest.mark.parametrize("fragments", [[], [0], [0, 0]])
@pytest.mark.parametrize("options", [Options(), Options(shuffle_seed=1), Options(tail="pad")])
def test_an_empty_table_yields_nothing(fragments: list[int], options: Options) -> None:
    empty = plan(fragments, options)
    assert (len(empty), listed(empty)) == (0, [])
    assert empty.num_shards >= 1


def test_an_empty_table_cannot_be_cut_into_splits() -> None:
    message = "`num_splits` needs at least one row: got num_splits=4, rows=0; leave it out"
    with pytest.raises(ValueError, match=f"^{message}"):
        plan([], Options(num_splits=4, shuffle_seed=1))


# Natural shards


@untimed
@given(sizes=fragments, window=st.tuples(st.integers(0, 100), st.integers(0, 100)))
def test_natural_shards_are_the_table_in_order(sizes: list[int], window: tuple[int, int]) -> None:
    natural = plan(sizes, Options())
    assert listed(natural) == list(range(sum(sizes)))
    assert natural.rows(*window).tolist() == list(range(sum(sizes)))[slice(*window)]
    assert natural.num_shards == max(1, len(sizes))


def rows_by_fragment(sizes: list[int]) -> list[list[int]]:
    stops = np.cumsum(sizes).tolist()
    return [list(range(stop - size, stop)) for size, stop in zip(sizes, stops, strict=True)]


@untimed
@given(sizes=fragments, num_parts=st.integers(1, 14))
def test_natural_shards_are_dealt_in_blocks(sizes: list[int], num_parts: int) -> None:
    parts = [plan(sizes, Options(), piece(num_parts, index)) for index in range(num_parts)]
    expected = np.array_split(np.arange(len(sizes)), num_parts)
    shards = rows_by_fragment(sizes)
    assert [listed(part) for part in parts] == [
        [row for i in block for row in shards[i]] for block in expected
    ]


@untimed
@given(sizes=fragments, num_parts=st.integers(1, 14))
def test_natural_shards_are_dealt_round_robin(sizes: list[int], num_parts: int) -> None:
    parts = [plan(sizes, Options(), rank(num_parts, index)) for index in range(num_parts)]
    shards = rows_by_fragment(sizes)
    assert [listed(part) for part in parts] == [
        [row for shard in shards[index::num_parts] for row in shard] for index in range(num_parts)
    ]


@untimed
@given(sizes=fragments, world_size=st.integers(1, 5), num_workers=st.integers(1, 5))
def test_every_natural_row_reaches_one_worker_of_one_rank(
    sizes: list[int], world_size: int, num_workers: int
) -> None:
    readers = [
        plan(sizes, Options(), rank(world_size, r), worker(num_workers, w))
        for r in range(world_size)
        for w in range(num_workers)
    ]
    assert sorted(row for reader in readers for row in listed(reader)) == list(range(sum(sizes)))


# Reshard


@untimed
@given(sizes=fragments, times=st.integers(1, 5))
def test_resharding_natural_shards_keeps_rows_and_order(sizes: list[int], times: int) -> None:
    before, after = plan(sizes, Options()), plan(sizes, Options(), *[Reshard()] * times)
    assert listed(after) == listed(before)
    largest = max(sizes, default=0)
    assert (after.num_shards > before.num_shards) == (largest > 1)


@untimed
@given(sizes=fragments, world_size=st.integers(1, 4))
def test_a_natural_reader_can_be_resharded(sizes: list[int], world_size: int) -> None:
    for index in range(world_size):
        before = plan(sizes, Options(), rank(world_size, index))
        after = plan(sizes, Options(), rank(world_size, index), Reshard())
        assert listed(after) == listed(before)


@untimed
@given(
    sizes=fragments,
    times=st.integers(1, 3),
    parts=st.integers(1, 6),
    part=st.sampled_from([rank, piece]),
)
def test_parts_of_resharded_natural_shards_are_the_table(
    sizes: list[int], times: int, parts: int, part: Callable[[int, int], Shard]
) -> None:
    reshards = [Reshard()] * times
    readers = [plan(sizes, Options(), *reshards, part(parts, i)) for i in range(parts)]
    assert sorted(row for r in readers for row in listed(r)) == list(range(sum(sizes)))
    if len(sizes) % parts == 0:
        unchanged = [plan(sizes, Options(), part(parts, i)) for i in range(parts)]
        assert [listed(reader) for reader in readers] == [listed(reader) for reader in unchanged]


def test_one_fragment_resharded_serves_several_ranks() -> None:
    reshards = Reshard(), Reshard()
    ranks = [plan([8], Options(), *reshards, rank(4, index)) for index in range(4)]
    assert [listed(reader) for reader in ranks] == [[0, 1], [2, 3], [4, 5], [6, 7]]


@untimed
@given(epoch=epochs(), data=st.data())
def test_resharding_splits_keeps_the_set_of_rows_of_every_reader(
    epoch: tuple[int, Options], data: st.DataObject
) -> None:
    rows, options = epoch
    world_size = data.draw(st.sampled_from(divisors(options.num_splits)))
    mine = rank(world_size, data.draw(st.integers(0, world_size - 1)))
    before = plan(rows, options, mine)
    after = plan(rows, options, mine, *[Reshard()] * data.draw(st.integers(1, 3)))
    assert set(listed(after)) == set(listed(before))
    assert after.num_shards >= before.num_shards
    if options.tail != "pad":
        assert len(after) == len(before)


@pytest.mark.parametrize(
    ("rows", "num_splits", "tail", "steps", "num_shards"),
    [
        (100, 10, "drop", (), 20),
        (105, 10, "drop", (rank(2, 1),), 10),
        (105, 10, "keep", (), 20),
        (35, 5, "drop", (), 35),
        (9, 9, "drop", (), 9),  # splits of one row cannot be cut
        (105, 10, "keep", (rank(2, 1),), 5),  # the tail would go to other readers
    ],
)
def test_resharding_cuts_splits_where_no_row_changes_its_reader(
    rows: int, num_splits: int, tail: Any, steps: tuple[Step, ...], num_shards: int
) -> None:
    options = Options(num_splits=num_splits, tail=tail)
    assert plan(rows, options, *steps, Reshard()).num_shards == num_shards


@untimed
@given(epoch=epochs(), data=st.data())
def test_ranks_of_a_resharded_epoch_together_are_the_epoch(
    epoch: tuple[int, Options], data: st.DataObject
) -> None:
    rows, options = epoch
    whole = plan(rows, options, Reshard())
    world_size = data.draw(st.sampled_from(divisors(whole.num_shards)))
    ranks = [plan(rows, options, Reshard(), rank(world_size, i)) for i in range(world_size)]
    assert sorted(row for r in ranks for row in listed(r)) == sorted(listed(whole))


# What a reader is, and how much it reads at a time


@untimed
@given(epoch=epochs(), target=st.integers(1, 300))
def test_a_chunk_is_whole_cycles_when_one_fits(epoch: tuple[int, Options], target: int) -> None:
    rows, options = epoch
    reader = plan(rows, options)
    chunk = reader.chunk_rows(target)
    cycle, clump = reader.num_shards, options.shuffle_clump_size or 1
    assert 1 <= chunk <= target
    if cycle <= target:
        assert chunk % cycle == 0
    if cycle * clump <= target:
        assert chunk % (cycle * clump) == 0
    assert 2 * chunk > target or cycle > target


@pytest.mark.parametrize(
    ("options", "target", "chunk"),
    [
        (Options(num_splits=64, shuffle_seed=1, shuffle_clump_size=16), 4096, 4096),
        (Options(num_splits=48, shuffle_seed=1, shuffle_clump_size=64), 4096, 3072),
        (Options(num_splits=48, shuffle_seed=1, shuffle_clump_size=128), 4096, 4080),
        (Options(num_splits=500), 300, 300),
        (Options(), 300, 300),
    ],
)
def test_chunk_rows(options: Options, target: int, chunk: int) -> None:
    assert plan(10_000, options).chunk_rows(target) == chunk


def test_the_part_of_a_reader_of_splits_says_which() -> None:
    reader = plan(100, Options(num_splits=12), rank(3, 1))
    assert reader.part() == {
        "start": 4,
        "stop": 8,
        "ranges": None,
        "worker": None,
        "num_workers": None,
        "batch_size": None,
    }


def test_the_part_of_a_worker_that_gets_batches_says_which() -> None:
    reader = plan(100, Options(num_splits=12, batch_size=8), rank(3, 1), worker(5, 4))
    assert reader.part() == {
        "start": 4,
        "stop": 8,
        "ranges": None,
        "worker": 4,
        "num_workers": 5,
        "batch_size": 8,
    }


def test_the_part_of_a_natural_reader_tells_readers_apart() -> None:
    sizes = [5, 5, 5, 5]
    parts = [
        plan(sizes, Options(), *steps).part()
        for steps in [(), (rank(2, 0),), (rank(2, 1),), (piece(2, 0),), (piece(2, 1),)]
    ]
    assert len({part["ranges"] for part in parts}) == 5
    assert [part["stop"] for part in parts] == [4, 2, 2, 2, 2]
    assert plan(sizes, Options()).part() == parts[0]


@untimed
@given(epoch=epochs())
def test_a_trillion_rows_can_be_planned(epoch: tuple[int, Options]) -> None:
    _, options = epoch
    reader = plan(10**12 + 11, options)
    begin, end = len(reader) - 3, len(reader)
    rows = reader.rows(begin, end)
    assert ((rows >= 0) & (rows < 10**12 + 11)).all()
    assert np.unique(rows).size == 3
