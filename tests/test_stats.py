"""Counters that can be read while training, across workers."""

import pickle
import time

import pytest
from helpers import make_table

import hf_lance_stream as hls
from hf_lance_stream.stats import ReadStats, StatsBoard, total_of


@pytest.fixture
def table(tmp_path):
    return make_table(tmp_path / "t.lance", 1000, 250)


def test_stats_count_what_was_read(table):
    ds = hls.from_lance(table, num_splits=4, shuffle_seed=1)
    assert ds.stats() == ReadStats()
    list(ds)
    stats = ds.stats()
    assert (stats.rows, stats.bytes, stats.queue_depth) == (1000, 8000, 0)
    assert stats.chunks >= 1
    assert stats.requests >= 1
    list(ds.with_format("torch").iter(10))
    assert ds.stats().rows == 2000  # all passes; what is made of the dataset counts for it too


def test_waiting_and_working_are_told_apart(table):
    ds = hls.from_lance(table)
    for n, _ in enumerate(ds):
        if n < 20:
            time.sleep(0.01)
    stats = ds.stats()
    assert stats.consuming_seconds >= 0.2
    assert 0 <= stats.waiting_fraction < 1
    assert "1,000 rows" in str(stats)
    assert "waiting" in str(stats)


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
def test_stats_of_a_loader_count_its_workers_and_the_step(table, num_workers):
    ds = hls.from_lance(table, num_splits=4, shuffle_seed=1)
    loader = hls.stateful_dataloader(ds, batch_size=10, num_workers=num_workers)
    for n, _ in enumerate(loader):
        if n < 20:
            time.sleep(0.01)
    stats = loader.stats()
    assert stats.rows == 1000
    assert stats.requests >= 1
    assert stats.consuming_seconds >= 0.2  # of this process: the workers wait for nobody
    assert stats.waiting_seconds > 0


def test_mixed_datasets_count_all_sources(table, tmp_path):
    from datasets import interleave_datasets

    other = make_table(tmp_path / "other.lance", 500, 250)
    ds = interleave_datasets(
        [hls.from_lance(table), hls.from_lance(other)], stopping_strategy="all_exhausted"
    )
    list(ds)
    assert ds.stats().rows >= 1500


def test_counters_do_not_travel_with_a_pickle_by_itself(table):
    ds = hls.from_lance(table)
    list(ds)
    board = pickle.loads(pickle.dumps(ds._ex_iterable.stats))
    assert total_of([board, board]) == total_of([StatsBoard()]) == ReadStats()
