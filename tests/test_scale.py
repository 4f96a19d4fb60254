"""Nothing grows with the table: simulated rows and many fragments."""

import io
import time
from dataclasses import dataclass
from functools import cached_property
from multiprocessing.reduction import ForkingPickler

import lance
import numpy as np
import pyarrow as pa
import pytest
from helpers import through_json

import hf_lance_stream as hls
from hf_lance_stream.factory import dataset_of, examples_of
from hf_lance_stream.plan import Options
from hf_lance_stream.source import Source, open_source


@dataclass(frozen=True, eq=False)
class ManyRows(Source):
    """A table that claims to have as many rows as wanted; row i reads as i."""

    claimed: int = 0

    @property
    def num_rows(self):
        return self.claimed

    @cached_property
    def shard_rows(self):
        return np.array([self.claimed])

    def read(self, rows):
        return pa.table({"id": np.asarray(rows)})


def dataset_of_rows(path, rows):
    found = open_source(path)
    source = ManyRows(tables=found.tables, columns=found.columns, claimed=rows)
    options = Options(num_splits=64, shuffle_seed=1, shuffle_clump_size=64)
    return dataset_of(examples_of(source, options, None, None, None, 64 << 20))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("scale") / "tiny.lance")
    lance.write_dataset(pa.table({"id": np.arange(10)}), path)
    return path


@pytest.mark.parametrize("rows", [10**4, 10**9, 10**12])
def test_a_billion_rows_read_and_resume_as_a_few_do(tiny, rows):
    read = []

    def first_rows(ds):
        chunks = iter(ds)
        seen = [next(chunks)["id"] for _ in range(100)]
        chunks.close()
        read.append(ds.stats().rows)
        return seen

    ds = dataset_of_rows(tiny, rows)
    seen = first_rows(ds)
    assert len(set(seen)) == 100
    assert all(0 <= i < rows for i in seen)
    state = through_json(ds.state_dict())
    state["examples_iterable"]["position"] = at = rows * 9 // 10
    new = dataset_of_rows(tiny, rows)
    new.load_state_dict(state)
    resumed = first_rows(new)
    plan = new._ex_iterable.plan
    assert resumed == plan.rows(at, at + 100).tolist()
    assert max(read) <= 2 * 8192  # no more for more rows


@pytest.mark.slow
def test_five_thousand_fragments_start_at_once_and_send_little(tmp_path):
    path = str(tmp_path / "many.lance")
    lance.write_dataset(pa.table({"id": np.arange(5000)}), path, max_rows_per_file=1)
    assert len(lance.dataset(path).get_fragments()) == 5000
    next(iter(hls.from_lance(path, num_splits=8)))  # the libraries are warm
    begin = time.perf_counter()
    ds = hls.from_lance(path, num_splits=8, shuffle_seed=1, shuffle_clump_size=64)
    next(iter(ds))
    assert time.perf_counter() - begin < 5  # a guard only: the benchmark has the figure
    for sent in (ds, hls.from_lance(path)):
        buffer = io.BytesIO()
        ForkingPickler(buffer, 5).dump(sent)
        assert buffer.tell() < 10_000
