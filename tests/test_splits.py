from collections.abc import Iterable
from itertools import chain, pairwise

import numpy as np
import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_lance_stream.splits import (
    TAILS,
    BatchDeal,
    Layout,
    NaturalStream,
    Order,
    Resume,
    SplitStream,
    check_divisible,
    divisors,
    halve_ranges,
    near_num_splits,
    part_of,
    ranges_from_lengths,
    smallest_factor,
)

untimed = settings(deadline=None)
seeds = st.integers(0, 2**64 - 1)
windows = st.tuples(st.integers(0, 200), st.integers(0, 200))


@st.composite
def orders(draw: st.DrawFn, *, seeds: st.SearchStrategy = seeds) -> Order:
    return Order(
        rows=draw(st.integers(0, 200)),
        clump_size=draw(st.integers(1, 30)),
        seed=draw(seeds),
        epoch=draw(st.integers(0, 2**64 - 1)),
    )


@st.composite
def layouts(draw: st.DrawFn, *, tails: Iterable[str] = TAILS) -> Layout:
    rows = draw(st.integers(1, 150))
    tail = draw(st.sampled_from(list(tails)))
    return Layout(rows=rows, num_splits=draw(st.integers(1, rows)), tail=tail)


@st.composite
def streams(draw: st.DrawFn) -> SplitStream:
    layout = draw(layouts())
    start = draw(st.integers(0, layout.num_splits))
    return SplitStream(layout=layout, start=start, stop=draw(st.integers(start, layout.num_splits)))


@st.composite
def naturals(draw: st.DrawFn) -> NaturalStream:
    """Shards of any length, empty ones too, of which this reader has only some."""
    lengths = draw(st.lists(st.integers(0, 12), max_size=12))
    starts, stops = ranges_from_lengths(lengths)
    mine = draw(st.lists(st.booleans(), min_size=len(lengths), max_size=len(lengths)))
    mine = np.array(mine, dtype=bool)
    return NaturalStream(starts=starts[mine], stops=stops[mine])


def whole(layout: Layout, world_size: int = 1, rank: int = 0) -> SplitStream:
    size = layout.num_splits // world_size
    return SplitStream(layout=layout, start=rank * size, stop=(rank + 1) * size)


def listed(stream: SplitStream | NaturalStream) -> list[int]:
    return stream.positions(0, len(stream)).tolist()


def splits_of(stream: SplitStream) -> list[list[int]]:
    """The splits of the oracle."""
    layout = stream.layout
    splits = oracle.cut(list(range(layout.rows)), layout.num_splits, layout.tail)
    return splits[stream.start : stream.stop]


def expected(stream: SplitStream) -> list[int]:
    return oracle.deal(splits_of(stream))


# Order


@untimed
@given(order=orders(seeds=seeds | st.none()))
def test_the_order_is_that_of_the_oracle(order: Order) -> None:
    rows = order.rows_at(np.arange(order.rows)).tolist()
    assert rows == oracle.sequence(order.rows, order.clump_size, order.seed, order.epoch)


@untimed
@given(order=orders(seeds=seeds | st.none()))
def test_the_order_has_every_row_once(order: Order) -> None:
    assert sorted(order.rows_at(np.arange(order.rows)).tolist()) == list(range(order.rows))


@untimed
@given(data=st.data(), order=orders().filter(lambda order: order.rows > 0))
def test_any_positions_in_any_order_with_repeats(data: st.DataObject, order: Order) -> None:
    positions = data.draw(st.lists(st.integers(0, order.rows - 1), max_size=60))
    sequence = oracle.sequence(order.rows, order.clump_size, order.seed, order.epoch)
    assert order.rows_at(positions).tolist() == [sequence[i] for i in positions]


@pytest.mark.parametrize("seed", range(40))
def test_the_short_last_clump_stays_whole_wherever_it_lands(seed: int) -> None:
    rows = Order(rows=23, clump_size=5, seed=seed).rows_at(np.arange(23)).tolist()
    at = rows.index(20)
    assert rows[at : at + 3] == [20, 21, 22]
    assert rows == oracle.sequence(23, 5, seed, 0)


def test_the_short_last_clump_lands_first_last_and_between() -> None:
    orders = (Order(rows=23, clump_size=5, seed=seed) for seed in range(40))
    assert {int(order.rows_at(np.arange(23)).tolist().index(20)) for order in orders} == {
        *range(0, 25, 5)
    }


def test_a_clump_larger_than_the_table_keeps_the_table_order() -> None:
    assert Order(rows=7, clump_size=50, seed=1).rows_at(range(7)).tolist() == list(range(7))


def test_one_position_gives_one_row() -> None:
    order = Order(rows=50, clump_size=4, seed=9)
    assert order.rows_at(17).shape == ()
    assert int(order.rows_at(17)) == oracle.sequence(50, 4, 9, 0)[17]


@pytest.mark.parametrize("seed", [None, 3])
def test_an_empty_table_has_an_empty_order(seed: int | None) -> None:
    assert Order(rows=0, clump_size=4, seed=seed).rows_at([]).tolist() == []


def test_rows_are_int64() -> None:
    for seed in (None, 1):
        assert Order(rows=9, clump_size=2, seed=seed).rows_at([3, 4]).dtype == np.int64


@pytest.mark.parametrize("clump_size", [1, 64, 1000])
def test_a_trillion_rows_are_found_one_by_one(clump_size: int) -> None:
    rows = 10**12 + 7
    order = Order(rows=rows, clump_size=clump_size, seed=42)
    positions = np.random.default_rng(0).integers(0, rows, 1000)
    found = order.rows_at(positions)
    assert ((found >= 0) & (found < rows)).all()
    assert np.unique(found).size == np.unique(positions).size
    again = np.array([int(order.rows_at(position)) for position in positions])
    assert np.array_equal(found, again)


def test_seed_and_epoch_are_not_interchangeable() -> None:
    def sequence(seed: int, epoch: int) -> tuple[int, ...]:
        return tuple(Order(rows=40, seed=seed, epoch=epoch).rows_at(np.arange(40)).tolist())

    assert len({sequence(seed, epoch) for seed in range(12) for epoch in range(12)}) == 144


# Layout


@untimed
@given(layout=layouts())
def test_a_layout_accounts_for_every_row(layout: Layout) -> None:
    splits = oracle.cut(list(range(layout.rows)), layout.num_splits, layout.tail)
    yielded = [row for split in splits for row in split]
    assert layout.epoch_rows == len(yielded)
    assert layout.dropped == layout.rows - len(set(yielded))
    assert layout.padded == len(yielded) - len(set(yielded))
    assert all(len(split) - layout.rows_per_split in (0, 1) for split in splits)


@untimed
@given(layout=layouts())
def test_fewer_rows_than_splits_are_dropped_or_padded(layout: Layout) -> None:
    assert 0 <= layout.dropped < layout.num_splits
    assert 0 <= layout.padded < layout.num_splits


# SplitStream


@untimed
@given(stream=streams())
def test_a_stream_yields_its_splits_round_robin(stream: SplitStream) -> None:
    assert listed(stream) == expected(stream)
    assert len(stream) == len(expected(stream))


@untimed
@given(stream=streams(), window=windows)
def test_any_window_of_a_stream(stream: SplitStream, window: tuple[int, int]) -> None:
    begin, end = window
    assert stream.positions(begin, end).tolist() == expected(stream)[begin:end]
    assert stream.positions(begin, end).dtype == np.int64


@untimed
@given(data=st.data(), stream=streams())
def test_windows_join_to_the_whole(data: st.DataObject, stream: SplitStream) -> None:
    at = data.draw(st.lists(st.integers(0, len(stream)), max_size=5))
    bounds = [0, *sorted(at), len(stream)]
    parts = [stream.positions(a, b) for a, b in pairwise(bounds)]
    assert np.concatenate(parts).tolist() == listed(stream)


@untimed
@given(stream=streams())
def test_a_window_past_the_end_is_empty(stream: SplitStream) -> None:
    assert stream.positions(len(stream), len(stream) + 10).size == 0
    assert stream.positions(len(stream) + 5, len(stream) + 10).size == 0


@untimed
@given(layout=layouts())
def test_the_ranks_together_are_exactly_the_epoch(layout: Layout) -> None:
    epoch = [*range(layout.rows - layout.dropped), *range(layout.padded)]
    for world_size in divisors(layout.num_splits):
        ranks = [listed(whole(layout, world_size, rank)) for rank in range(world_size)]
        assert sorted(chain(*ranks)) == sorted(epoch)


@untimed
@given(layout=layouts(tails=["drop", "pad"]))
def test_drop_and_pad_give_every_rank_the_same_length(layout: Layout) -> None:
    for world_size in divisors(layout.num_splits):
        lengths = {len(whole(layout, world_size, rank)) for rank in range(world_size)}
        assert len(lengths) == 1


@untimed
@given(layout=layouts(tails=["keep"]))
def test_keep_gives_the_first_splits_one_row_more(layout: Layout) -> None:
    lengths = [
        len(whole(layout, layout.num_splits, split)) - layout.rows_per_split
        for split in range(layout.num_splits)
    ]
    assert lengths == [1] * layout.surplus + [0] * (layout.num_splits - layout.surplus)


@untimed
@given(layout=layouts())
def test_the_tail_changes_nothing_before_it(layout: Layout) -> None:
    drop, pad, keep = (
        Layout(rows=layout.rows, num_splits=layout.num_splits, tail=tail)
        for tail in ("drop", "pad", "keep")
    )
    for world_size in divisors(layout.num_splits):
        for rank in range(world_size):
            beginning = listed(whole(drop, world_size, rank))
            for other in (pad, keep):
                assert listed(whole(other, world_size, rank))[: len(beginning)] == beginning


@untimed
@given(layout=layouts(), cycles=st.integers(1, 4))
def test_a_global_step_has_the_same_rows_at_every_world_size(layout: Layout, cycles: int) -> None:
    global_batch = cycles * layout.num_splits
    steps = -(-layout.epoch_rows // global_batch)

    def step(t: int, world_size: int) -> list[int]:
        batch = global_batch // world_size
        ranks = (whole(layout, world_size, rank) for rank in range(world_size))
        return sorted(chain(*(r.positions(t * batch, (t + 1) * batch).tolist() for r in ranks)))

    for world_size in divisors(layout.num_splits):
        assert [step(t, world_size) for t in range(steps)] == [step(t, 1) for t in range(steps)]


def test_the_first_and_last_rows_of_a_trillion_need_no_table() -> None:
    layout = Layout(rows=10**12 + 5, num_splits=48, tail="keep")
    stream = SplitStream(layout=layout, start=0, stop=48)
    length = layout.rows_per_split
    assert stream.positions(0, 3).tolist() == [0, length, 2 * length]
    assert stream.positions(10**12 + 4, 10**12 + 9).tolist() == [10**12 + 4]
    assert len(stream) == 10**12 + 5


@untimed
@given(stream=streams())
def test_split_lengths(stream: SplitStream) -> None:
    assert stream.split_lengths().tolist() == [len(split) for split in splits_of(stream)]


# Resume


@st.composite
def resumes(draw: st.DrawFn) -> tuple[SplitStream, np.ndarray]:
    """A stream and the rows consumed of each of its splits, however uneven."""
    stream = draw(streams())
    lengths = stream.split_lengths().tolist()
    consumed = [draw(st.integers(0, length)) for length in lengths]
    return stream, np.array(consumed, dtype=np.int64)


@untimed
@given(resume=resumes())
def test_splits_that_lag_go_first(resume: tuple[SplitStream, np.ndarray]) -> None:
    stream, consumed = resume
    expected = oracle.rest(splits_of(stream), consumed.tolist())
    rest = Resume.of(stream, consumed)
    assert rest.remaining(len(stream)) == len(expected)
    assert stream.at(rest.at(np.arange(len(expected)))).tolist() == expected


@untimed
@given(stream=streams())
def test_nothing_consumed_resumes_at_the_start(stream: SplitStream) -> None:
    rest = Resume.of(stream, np.zeros(stream.num_shards, dtype=np.int64))
    assert (rest.start, rest.late.size) == (0, 0)
    assert rest.remaining(len(stream)) == len(stream)


@untimed
@given(data=st.data(), resume=resumes())
def test_any_chain_of_resumes_yields_the_rest(
    data: st.DataObject, resume: tuple[SplitStream, np.ndarray]
) -> None:
    stream, consumed = resume
    expected = oracle.rest(splits_of(stream), consumed.tolist())
    seen: list[int] = []
    while len(seen) < len(expected):
        rest = Resume.of(stream, consumed)
        count = data.draw(st.integers(1, rest.remaining(len(stream))))
        seen += stream.at(rest.at(np.arange(count))).tolist()
        consumed = stream.consumed_after(consumed, count)
    assert seen == expected
    assert consumed.tolist() == stream.split_lengths().tolist()


@untimed
@given(data=st.data(), stream=streams())
def test_consumed_counts_the_rows_of_each_split(data: st.DataObject, stream: SplitStream) -> None:
    delivered = data.draw(st.integers(0, len(stream)))
    consumed = stream.consumed_after(None, delivered).tolist()
    assert sum(consumed) == delivered
    assert oracle.rest(splits_of(stream), consumed) == expected(stream)[delivered:]


def test_a_resume_in_a_trillion_rows_needs_no_table() -> None:
    layout = Layout(rows=10**12, num_splits=4)
    stream = SplitStream(layout=layout, start=0, stop=4)
    consumed = stream.consumed_after(None, 8 * 10**11 + 2)
    assert (consumed - 2 * 10**11).tolist() == [1, 1, 0, 0]
    rest = Resume.of(stream, consumed)
    assert rest.at(np.arange(4)).tolist() == [8 * 10**11 + i for i in range(2, 6)]


# BatchDeal


@untimed
@given(
    total=st.integers(0, 200),
    batch_size=st.integers(1, 30),
    num_workers=st.integers(1, 8),
)
def test_batches_are_dealt_to_workers_in_turn(
    total: int, batch_size: int, num_workers: int
) -> None:
    for worker in range(num_workers):
        deal = BatchDeal(worker=worker, num_workers=num_workers, batch_size=batch_size)
        expected = oracle.batches(list(range(total)), batch_size, num_workers, worker)
        assert deal.count(total) == len(expected)
        assert deal.at(np.arange(len(expected))).tolist() == expected


# NaturalStream


@untimed
@given(stream=naturals(), window=windows)
def test_any_window_of_natural_shards(stream: NaturalStream, window: tuple[int, int]) -> None:
    shards = zip(stream.starts.tolist(), stream.stops.tolist(), strict=True)
    rows = [row for start, stop in shards for row in range(start, stop)]
    assert listed(stream) == rows
    assert len(stream) == len(rows)
    assert stream.positions(*window).tolist() == rows[slice(*window)]
    assert stream.positions(*window).dtype == np.int64


def test_no_natural_shards_yield_nothing() -> None:
    starts, stops = ranges_from_lengths([])
    stream = NaturalStream(starts=starts, stops=stops)
    assert (stream.num_shards, len(stream), listed(stream)) == (0, 0, [])


@untimed
@given(stream=naturals())
def test_halved_shards_have_the_same_rows_in_the_same_order(stream: NaturalStream) -> None:
    starts, stops = halve_ranges(stream.starts, stream.stops)
    assert listed(NaturalStream(starts=starts, stops=stops)) == listed(stream)


@untimed
@given(stream=naturals())
def test_every_shard_of_two_rows_or_more_is_halved(stream: NaturalStream) -> None:
    starts, stops = halve_ranges(stream.starts, stream.stops)
    divisible = int((stream.stops - stream.starts >= 2).sum())
    assert starts.size == stream.num_shards + divisible
    assert (stops - starts).max(initial=0) <= -(-(stream.stops - stream.starts).max(initial=0) // 2)


def test_ranges_follow_each_other() -> None:
    starts, stops = ranges_from_lengths([3, 0, 2])
    assert (starts.tolist(), stops.tolist()) == ([0, 3, 3], [3, 3, 5])
    assert starts.dtype == stops.dtype == np.int64


# Whole numbers


@untimed
@given(count=st.integers(0, 200), num_parts=st.integers(1, 50))
def test_parts_are_contiguous_and_nearly_equal(count: int, num_parts: int) -> None:
    bounds = [part_of(count, num_parts, index) for index in range(num_parts)]
    sizes = [stop - start for start, stop in bounds]
    assert [i for start, stop in bounds for i in range(start, stop)] == list(range(count))
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("n", [1, 2, 7, 36, 48, 64, 97, 240, 10_000])
def test_divisors_are_all_divisors(n: int) -> None:
    assert divisors(n) == [d for d in range(1, n + 1) if n % d == 0]


@pytest.mark.parametrize(
    ("n", "factor"), [(1, None), (2, 2), (9, 3), (49, 7), (61, 61), (67, None), (67 * 71, None)]
)
def test_smallest_factor(n: int, factor: int | None) -> None:
    assert smallest_factor(n) == factor


@untimed
@given(num_splits=st.integers(1, 500), num_parts=st.integers(1, 100))
def test_suggestions_are_the_nearest_multiples(num_splits: int, num_parts: int) -> None:
    multiples = sorted(
        range(num_parts, 1000, num_parts), key=lambda n: (n > num_splits, abs(n - num_splits))
    )
    suggested = near_num_splits(num_splits, num_parts, 10**6)
    assert len(suggested) == 2
    assert multiples[0] in suggested
    assert all(n % num_parts == 0 and abs(n - num_splits) <= 2 * num_parts for n in suggested)


def test_suggestions_for_more_parts_than_splits() -> None:
    assert near_num_splits(3, 5, 100) == [5, 10]
    assert near_num_splits(48, 5, 100) == [45, 50]
    assert near_num_splits(48, 6, 100) == [48, 54]
    assert near_num_splits(48, 6, 50) == [48]
    assert near_num_splits(48, 6, 5) == []


@pytest.mark.parametrize("what", ["world_size", "num_workers"])
def test_an_uneven_division_is_refused_with_the_way_out(what: str) -> None:
    with pytest.raises(ValueError, match="must be divisible") as error:
        check_divisible(12, 5, what, 100)
    assert str(error.value) == (
        f"the number of splits must be divisible by {what}: got num_splits=12, {what}=5; "
        f"use a {what} out of [1, 2, 3, 4, 6, 12] or a multiple of 5 as `num_splits`, "
        "such as 10 or 15"
    )


@pytest.mark.parametrize("num_parts", [1, 2, 3, 4, 6, 12])
def test_an_even_division_is_accepted(num_parts: int) -> None:
    check_divisible(12, num_parts, "world_size", 100)
