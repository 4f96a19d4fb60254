"""Chunks: rows read in the order of storage come out in the order asked for."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_lance_stream.chunks import read_chunk

ROWS = st.lists(st.integers(0, 99), min_size=1, max_size=60).map(np.array)


def reader(calls):
    def read(rows):
        calls.append(rows)
        half = rows.size // 2  # in two arrays, as a scan gives them
        parts = [rows[:half], rows[half:]] if half else [rows]
        return pa.concat_tables([pa.table({"i": p, "t": [f"r{i}" for i in p]}) for p in parts])

    return read


@given(ROWS, st.booleans(), st.integers(0, 60), st.integers(1, 60))
def test_a_slice_has_the_rows_asked_for(rows, in_runs, start, length):
    calls = []
    chunk = read_chunk(reader(calls), rows, in_runs=in_runs)
    want = rows[start : start + length].tolist()
    part = chunk.slice(start, length)
    assert part["i"].to_pylist() == want
    assert part["t"].to_pylist() == [f"r{i}" for i in want]
    assert chunk.select(["t"]).slice(start, length).column_names == ["t"]
    assert chunk.to_table()["i"].to_pylist() == rows.tolist()
    assert chunk.num_rows == len(chunk) == rows.size
    assert all((np.diff(call) >= 0).all() for call in calls)  # in the order of storage


@given(ROWS, st.booleans(), st.integers(1, 9))
def test_blocks_are_all_rows(rows, in_runs, size):
    chunk = read_chunk(reader([]), rows, in_runs=in_runs)
    blocks = list(chunk.blocks(size))
    assert [i for block in blocks for i in block["i"].to_pylist()] == rows.tolist()
    assert all(block.num_rows == size for block in blocks[:-1])


@pytest.mark.parametrize(("in_runs", "reads"), [(False, 1), (True, 3)])
def test_runs_are_read_one_by_one_where_rows_are_large(in_runs, reads):
    calls = []
    rows = np.array([7, 50, 20, 8, 51, 21, 9, 52, 22])
    chunk = read_chunk(reader(calls), rows, in_runs=in_runs)
    assert len(calls) == reads
    assert chunk.to_table()["i"].to_pylist() == rows.tolist()


def test_neighbours_are_read_at_once_and_not_copied():
    calls = []
    table = pa.table({"i": np.arange(100)})
    chunk = read_chunk(
        lambda rows: calls.append(rows) or table.slice(rows[0], rows.size),
        np.arange(10, 60),
        in_runs=True,
    )
    assert len(calls) == 1
    address = table["i"].chunk(0).buffers()[1].address
    assert chunk.slice(5, 8)["i"].chunk(0).buffers()[1].address == address
