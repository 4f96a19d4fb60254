"""Reading ahead: order, bounds in bytes, errors where they belong, threads that end."""

import threading
import time

import numpy as np
import pyarrow as pa
import pytest
from helpers import ids, make_table, through_json
from hypothesis import given
from hypothesis import strategies as st

import hf_lance_stream as hls
from hf_lance_stream.reader import MAX_CHUNKS, read_ahead
from hf_lance_stream.source import Source
from hf_lance_stream.stats import Counters


def numbers(start, stop):
    return pa.table({"id": np.arange(start, stop)})


def rows_of(chunks):
    return [i for _, table in chunks for i in table["id"].to_pylist()]


def collect(chunks, seen):
    for _, table in chunks:
        seen.extend(table["id"].to_pylist())


def collect_ids(items, seen):
    for item in items:
        seen.extend(np.atleast_1d(item["id"]).tolist())


@given(
    st.integers(0, 60),
    st.integers(0, 60),
    st.integers(1, 20),
    st.integers(1, 600),
    st.integers(1, 4),
    st.booleans(),
)
def test_all_rows_come_in_order_in_chunks_that_end_at_multiples(
    begin, end, chunk, budget, threads, by_rows
):
    stops = []
    rows = []
    for stop, table in read_ahead(
        numbers, begin, end, chunk, budget=budget, num_threads=threads, by_rows=by_rows
    ):
        stops.append(stop)
        rows += table["id"].to_pylist()
    assert rows == list(range(begin, end))
    assert by_rows or all(stop % chunk == 0 for stop in stops[:-1])
    assert by_rows or max(np.diff([begin, *stops]), default=0) <= chunk


@pytest.mark.parametrize(("budget", "most"), [(1, 2), (4 * 800, 4), (10**9, MAX_CHUNKS)])
def test_no_more_is_read_ahead_than_the_budget_holds(budget, most):
    begun = []

    def read(start, stop):
        begun.append(start)
        return numbers(start, stop)

    chunks = read_ahead(read, 0, 100 * 100, 100, budget=budget, num_threads=8, by_rows=False)
    for n, _ in enumerate(chunks):
        time.sleep(0.002)
        assert len(begun) <= n + 1 + most
    assert len(begun) == 100


def test_chunks_have_fewer_rows_where_rows_turn_out_to_be_large():
    sizes = []

    def read(start, stop):
        lengths = [10_000 if i % 50 == 0 else 10 for i in range(start, stop)]
        return pa.table({"x": [b"x" * n for n in lengths]})

    for _, table in read_ahead(read, 0, 10_000, 4000, budget=80_000, chunk_bytes=20_000):
        sizes.append(table.nbytes)
    assert sum(sizes) > 2_000_000
    assert max(sizes[4:]) <= 60_000  # below the budget, from when the first have been seen
    assert len(sizes) < 400


def test_it_starts_with_little_and_reads_on_while_the_consumer_works():
    begun = []

    def read(start, stop):
        begun.append(start)
        return numbers(start, stop)

    chunks = read_ahead(read, 0, 1000, 10, budget=10**9, chunk_bytes=80)
    next(chunks)
    time.sleep(0.05)
    assert len(begun) <= 3
    for _ in range(6):
        next(chunks)
    time.sleep(0.05)
    assert len(begun) >= 7 + 8
    chunks.close()


@pytest.mark.parametrize("bad", [0, 1, 7, 16, 63, 64, 99])
def test_an_error_is_raised_at_its_row_after_all_rows_before_it(bad):
    def read(start, stop):
        if start <= bad < stop:
            raise OSError(f"rows {start} to {stop}")
        return numbers(start, stop)

    seen = []
    with pytest.raises(OSError, match=f"rows {bad} to {bad + 1}"):
        collect(read_ahead(read, 0, 100, 16, budget=10**6), seen)
    assert seen == list(range(bad))


def test_a_fault_that_passes_is_got_over():
    failed = set()

    def read(start, stop):
        if stop - start > 1 and (start, stop) not in failed:
            failed.add((start, stop))
            raise OSError("gone")
        return numbers(start, stop)

    counters = Counters()
    chunks = read_ahead(read, 0, 100, 64, budget=10**6, num_threads=1, counters=counters)
    assert rows_of(chunks) == list(range(100))
    assert counters._values[0] == 100


def test_where_chunks_must_stay_whole_an_error_comes_at_its_chunk():
    def read(start, stop):
        if stop > 40:
            raise OSError("bad")
        return numbers(start, stop)

    seen = []
    with pytest.raises(OSError, match="bad"):
        collect(read_ahead(read, 0, 100, 16, budget=10**6, by_rows=False), seen)
    assert seen == list(range(32))


def our_threads():
    return {t for t in threading.enumerate() if t.name.startswith("hf_lance_stream")}


@pytest.mark.parametrize("leave", ["close", "collect", "error", "end"])
def test_no_thread_is_left(leave):
    def read(start, stop):
        if leave == "error" and start >= 50:
            raise OSError("bad")
        return numbers(start, stop)

    before = our_threads()  # of passes that other tests have left
    chunks = read_ahead(read, 0, 100, 10, budget=10**6, chunk_bytes=80, num_threads=4)
    next(chunks)
    assert our_threads() - before
    if leave == "close":
        chunks.close()
    elif leave == "error":
        with pytest.raises(OSError, match="bad"):
            rows_of(chunks)
    elif leave == "end":
        rows_of(chunks)
    del chunks
    until = time.monotonic() + 10  # they end once they have read what they were reading
    while our_threads() - before and time.monotonic() < until:
        time.sleep(0.01)
    assert not our_threads() - before


def test_leaving_waits_for_no_thread():
    """Who leaves may be the garbage collector while another thread starts: joining would hang."""
    reading = threading.Event()
    go_on = threading.Event()
    has_read = threading.Event()

    def read(start, stop):
        if start:
            reading.set()
            go_on.wait(2)
            has_read.set()
        return numbers(start, stop)

    chunks = read_ahead(read, 0, 1000, 100, budget=10**6)
    next(chunks)
    assert reading.wait(10)
    chunks.close()  # while a chunk is being read
    assert not has_read.is_set()
    go_on.set()


def test_counters_add_up():
    counters = Counters()
    chunks = read_ahead(numbers, 0, 1000, 100, budget=10**6, chunk_bytes=800, counters=counters)
    next(chunks)
    time.sleep(0.05)
    rows_of(chunks)
    rows, size, count, _, waiting, consuming, _, bad = counters._values.tolist()
    assert (rows, size, count) == (1000, 8000, 14)  # the first are smaller
    assert bad == 0
    assert consuming >= 0.05
    assert waiting >= 0


@pytest.mark.parametrize("kind", ["rows", "torch", "batches", "map", "take"])
def test_a_bad_row_of_a_table_is_named_and_the_rows_before_it_come(tmp_path, monkeypatch, kind):
    ds = hls.from_lance(make_table(tmp_path / "t.lance", 1000, 250), num_splits=4, shuffle_seed=1)
    full = ids(ds)
    original = Source.read

    def read(self, rows):
        if bad and full[300] in rows:
            raise OSError(f"could not read {rows.size} rows")
        return original(self, rows)

    bad = True
    monkeypatch.setattr(Source, "read", read)
    ds = {
        "rows": lambda: ds,
        "torch": lambda: ds.with_format("torch"),
        "batches": lambda: ds.with_format("torch"),
        "map": lambda: ds.map(lambda row: row),
        "take": lambda: ds.take(900),
    }[kind]()
    seen = []
    with pytest.raises(OSError, match="could not read 1 rows"):
        collect_ids(ds.iter(7) if kind == "batches" else ds, seen)
    whole = 300 // 7 * 7 if kind == "batches" else 300
    assert seen == full[:whole]
    bad, state = False, through_json(ds.state_dict())
    ds.load_state_dict(state)
    assert seen + [int(row["id"]) for row in ds] == (full[:900] if kind == "take" else full)
