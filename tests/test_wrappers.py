"""Everything `datasets` wraps around a Lance dataset: same rows, and an exact resume."""

from itertools import islice

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from helpers import through_json
from pipelines import PIPELINES

import hf_lance_stream as hls
from hf_lance_stream import examples

ROWS = 1000
CHUNK_ROWS = 96  # far fewer than rows, so that resumes fall inside, at and across chunks


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    import lance

    path = tmp_path_factory.mktemp("wrappers") / "t.lance"
    vec = np.arange(3 * ROWS, dtype=np.float32)
    columns = {
        "id": pa.array(range(ROWS)),
        "text": [f"text {i // 3}" for i in range(ROWS)],
        "vec": pa.FixedSizeListArray.from_arrays(pa.array(vec), 3),
    }
    lance.write_dataset(pa.table(columns), str(path), max_rows_per_file=250)
    return str(path)


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    monkeypatch.setattr(examples, "_CHUNK_ROWS", CHUNK_ROWS)


SOURCES = {
    "natural": lambda path: hls.from_lance(path),
    "shuffled": lambda path: hls.from_lance(
        path, num_splits=8, shuffle_seed=3, shuffle_clump_size=16
    ),
}


def builtin(path):
    return datasets.load_dataset("lance", data_files=f"{path}/**", split="train", streaming=True)


def exact(item):
    """A value that is equal only for the same values of the same types."""
    if isinstance(item, dict):
        return {name: exact(value) for name, value in item.items()}
    if isinstance(item, pa.Table):
        return item.schema, item.to_pylist()
    if isinstance(item, pd.DataFrame):
        return [(name, str(item[name].dtype), exact(item[name].tolist())) for name in item.columns]
    if isinstance(item, torch.Tensor | np.ndarray):
        return type(item), str(item.dtype), item.tolist()
    if isinstance(item, list):
        return [exact(value) for value in item]
    return type(item), item


def positions(length):
    """40 spread positions of a pass, and those next to a chunk's end."""
    spread = np.linspace(0, length, 34).astype(int).tolist()
    edges = [1, 7, CHUNK_ROWS - 1, CHUNK_ROWS, CHUNK_ROWS + 1, length - 1]
    return sorted({k for k in (*spread, *edges) if 0 <= k <= length})


@pytest.mark.parametrize("name", [n for n in PIPELINES if not n.startswith("reshard")])
def test_natural_shards_behave_as_the_builtin_builder_does(table, name):
    transform = PIPELINES[name]
    ours, theirs = transform(hls.from_lance(table)), transform(builtin(table))
    assert ours.features == theirs.features
    assert [exact(row) for row in ours] == [exact(row) for row in theirs]


@pytest.mark.parametrize("name", ["none", "format_torch", "format_numpy", "select_format_torch"])
def test_batches_are_those_of_the_builtin_builder(table, name):
    transform = PIPELINES[name]
    for batch_size in (1, 7, 96, 2000):
        ours = transform(hls.from_lance(table)).iter(batch_size)
        theirs = transform(builtin(table)).iter(batch_size)
        assert [exact(batch) for batch in ours] == [exact(batch) for batch in theirs]


@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("name", PIPELINES)
def test_resume_is_exact_under(table, name, source):
    def build():
        return PIPELINES[name](SOURCES[source](table))

    ds = build()
    states, full = [through_json(ds.state_dict())], []
    for row in ds:
        full.append(exact(row))
        states.append(through_json(ds.state_dict()))
    assert full
    step = 1 if source == "shuffled" else 4  # 40 positions of the harder one
    for n, k in enumerate(positions(len(full))[::step]):
        new = build()
        new.load_state_dict(states[k])
        if n % 6 == 0 or len(full) - k < CHUNK_ROWS:
            assert [exact(row) for row in new] == full[k:], f"resumed at {k} of {len(full)}"
        else:  # past the next chunk
            rest = [exact(row) for row in islice(new, CHUNK_ROWS + 10)]
            assert rest == full[k : k + len(rest)], f"resumed at {k} of {len(full)}"
            assert len(rest) == min(CHUNK_ROWS + 10, len(full) - k)


@pytest.mark.parametrize("name", ["none", "map_batched", "filter", "format_torch", "batch"])
def test_a_second_resume_in_the_same_pass_is_exact_too(table, name):
    def build():
        return PIPELINES[name](SOURCES["shuffled"](table))

    full = [exact(row) for row in build()]
    seen, state = [], None
    for step in (3, 5, 11, 40, 1000):
        ds = build()
        if state is not None:
            ds.load_state_dict(state)
        seen += [exact(row) for _, row in zip(range(step), ds, strict=False)]
        state = through_json(ds.state_dict())
    assert seen == full[: len(seen)]
    assert len(seen) == min(len(full), 1059)
