"""Suggested numbers of splits and clump sizes, against naive searches."""

import pytest
from helpers import make_table
from hypothesis import given, settings
from hypothesis import strategies as st

import hf_lance_stream as hls
from hf_lance_stream.splits import Layout
from hf_lance_stream.suggest import (
    EFFICIENT_READ,
    FEWEST_CLUMPS,
    LARGEST_CLUMP,
    suggest_clump_size,
    suggest_num_splits,
)

WORLDS = st.lists(st.integers(1, 24), min_size=1, max_size=4)


def naive(worlds: list[int], batch: int, rows: int | None) -> list[int]:
    """All numbers of splits that would do, found by trying each."""
    highest = batch if rows is None else min(batch, rows)
    return [
        n
        for n in range(1, highest + 1)
        if batch % n == 0 and all(n % world == 0 for world in worlds)
    ]


@settings(deadline=None, max_examples=300)
@given(WORLDS, st.integers(1, 3000), st.none() | st.integers(0, 3000))
def test_equals_a_search_of_all_numbers(worlds, batch, rows):
    expected = naive(worlds, batch, rows)
    if not expected:
        with pytest.raises(ValueError, match="no number of splits suits"):
            suggest_num_splits(worlds, batch, rows)
        return
    found = suggest_num_splits(worlds, batch, rows)
    assert list(found.candidates) == expected
    assert found.num_splits in expected
    assert abs(found.num_splits - 64) == min(abs(n - 64) for n in expected)
    assert list(found.world_sizes) == [
        world for world in range(1, found.num_splits + 1) if found.num_splits % world == 0
    ]
    assert set(worlds) <= set(found.world_sizes)
    if rows is None:
        assert found.dropped_rows is None
    else:
        layout = Layout(rows=rows, num_splits=found.num_splits, tail="drop")
        assert found.dropped_rows == layout.dropped


@settings(deadline=None, max_examples=200)
@given(WORLDS, st.integers(1, 3000))
def test_the_ways_out_of_an_error_are_ways_out(worlds, batch):
    if naive(worlds, batch, None):
        return
    with pytest.raises(ValueError, match="no number of splits suits") as raised:
        suggest_num_splits(worlds, batch)
    text = str(raised.value)
    batches = text.partition("such as ")[2].partition(", or numbers")[0]
    for better in batches.split(" or "):
        assert suggest_num_splits(worlds, int(better)).num_splits
    numbers = text.rpartition("such as ")[2].replace(" and ", ", ").split(", ")
    for number in numbers:
        assert batch % int(number) == 0


def test_says_why():
    found = suggest_num_splits([4, 8], 1024, 1_000_006)
    assert found.num_splits == 64
    assert found.dropped_rows == 6
    assert found.reason == (
        "64 is a multiple of 4 and 8, so all GPUs read equally many splits, and divides the "
        "global batch of 1024 rows, so a step has the same rows on any of these numbers of GPUs; "
        "it is the one of 8, 16, 32, 64, 128, 256, 512 and 1024 nearest to 64; 6 of 1000006 rows "
        'are left out per epoch with tail="drop"'
    )
    assert "it is the only such number" in suggest_num_splits(7, 7).reason


def test_one_world_size_may_be_a_number_and_repeats_do_not_matter():
    assert suggest_num_splits(8, 1024) == suggest_num_splits([8, 8], 1024)


def test_a_tie_goes_to_the_smaller_number():
    found = suggest_num_splits(16, 240)  # 48 and 80 are as near to 64
    assert found.candidates == (16, 48, 80, 240)
    assert found.num_splits == 48


def test_a_global_batch_that_gpus_do_not_divide_names_both_ways_out():
    with pytest.raises(ValueError, match="which 6 does not divide") as raised:
        suggest_num_splits([6, 8], 1024)
    assert "a multiple of 24, such as 1008 or 1032" in str(raised.value)
    assert "numbers of GPUs that divide 1024, such as 4 and 8" in str(raised.value)


def test_fewer_rows_than_any_number_of_splits_that_suits():
    with pytest.raises(ValueError, match=r"it must be a multiple of 48, .*rows=40; use fewer GPUs"):
        suggest_num_splits([16, 3], 480, 40)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (([], 64), "world_sizes"),
        (("8", 64), "world_sizes"),
        (([0], 64), "world_sizes"),
        (([True], 64), "world_sizes"),
        (([8], 0), "global_batch_size"),
        (([8], 64.0), "global_batch_size"),
        (([8], 64, -1), "rows"),
    ],
)
def test_bad_arguments_are_named(arguments, name):
    with pytest.raises(ValueError, match=f"`{name}`"):
        suggest_num_splits(*arguments)


def test_the_steps_of_a_suggested_number_have_the_same_rows_on_all_its_world_sizes(tmp_path):
    path = make_table(tmp_path / "t.lance", 500, 100)
    found = hls.suggest_num_splits([2, 3], 24, rows=500)
    steps = []
    for world in (1, 2, 3):
        ranks = [
            hls.from_lance(
                path, num_splits=found.num_splits, shuffle_seed=1, rank=rank, world_size=world
            ).iter(24 // world)
            for rank in range(world)
        ]
        steps.append(
            [sorted(i for batch in step for i in batch["id"]) for step in zip(*ranks, strict=True)]
        )
    assert steps[0] == steps[1] == steps[2]
    assert sum(map(len, steps[0])) == 500 - (found.dropped_rows or 0)


@settings(deadline=None)
@given(st.integers(1, 2**40), st.integers(0, 2**40))
def test_a_clump_is_the_least_power_of_two_that_reads_well_within_its_bounds(row_bytes, rows):
    size = suggest_clump_size(row_bytes, rows).shuffle_clump_size
    bounds = [LARGEST_CLUMP, max(1, rows // FEWEST_CLUMPS)]
    assert size.bit_count() == 1
    assert size <= min(bounds)
    if 2 * size <= min(bounds):
        assert size * row_bytes >= EFFICIENT_READ
    assert size == 1 or (size // 2) * row_bytes < EFFICIENT_READ


@pytest.mark.parametrize(
    ("row_bytes", "rows", "size", "reason"),
    [
        (100, 10**7, 64, "mix less"),
        (100_000, 10**7, 8, "8 rows are about what one efficient read holds"),
        (10**6, 10**7, 1, "a row is about what one efficient read holds"),
        (100, 5000, 4, "5000 rows make 1250 clumps"),
    ],
)
def test_the_reason_of_a_clump_size_names_what_bounds_it(row_bytes, rows, size, reason):
    found = suggest_clump_size(row_bytes, rows)
    assert found.shuffle_clump_size == size
    assert reason in found.reason
