"""What this package relies on in the private parts of `datasets`.

A failure here means that a release of `datasets` changed it: read the place named in the test
before touching anything else. What `builder` relies on is in `test_builder.py`.
"""

import copy
import inspect
import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch.utils.data
from datasets import (
    Dataset,
    Features,
    IterableDataset,
    Value,
    concatenate_datasets,
    interleave_datasets,
)
from datasets.distributed import split_dataset_by_node
from datasets.info import DatasetInfo
from datasets.iterable_dataset import (
    FormattedExamplesIterable,
    MappedExamplesIterable,
    RebatchedArrowExamplesIterable,
    _BaseExamplesIterable,
)
from helpers import make_table

import hf_lance_stream as hls
from hf_lance_stream import examples
from hf_lance_stream.iterables import BatchesIterable, RowsIterable
from hf_lance_stream.state import LiveState


class Recorder(_BaseExamplesIterable):
    """Writes down what `datasets` asks of an examples iterable."""

    def __init__(self, calls):
        super().__init__()
        self.calls = calls
        self._sleep_on_threads_shutdown = False

    num_shards = 4

    def shuffle_data_sources(self, generator):
        self.calls.append(("shuffle", int(generator.bit_generator.seed_seq.entropy)))
        return Recorder(self.calls)

    def shift_rngs(self, value):
        self.calls.append(("shift", value))
        return Recorder(self.calls)

    def shard_data_sources(self, num_shards, index, contiguous=True):
        self.calls.append(("shard", num_shards, index, contiguous))
        return Recorder(self.calls)

    def _init_state_dict(self):
        self.calls.append(("init",))
        self._state_dict = {"position": 0, "type": "Recorder"}
        return self._state_dict

    def __iter__(self):
        yield 0, {"id": 1}


@pytest.fixture
def calls():
    return []


@pytest.fixture
def ds(calls):
    dataset = IterableDataset(Recorder(calls), DatasetInfo(features=Features(id=Value("int64"))))
    assert calls == [("init",)]  # a dataset initialises the state of its iterable when it is made
    calls.clear()
    return dataset


def test_an_epoch_is_a_shuffle_directly_followed_by_a_shift(ds, calls):
    list(ds)
    assert calls == [("init",)]
    calls.clear()
    ds.set_epoch(3)
    list(ds)
    assert calls == [("shuffle", 3), ("shift", 3), ("init",)]


def test_a_users_shuffle_is_not_followed_by_a_shift(ds, calls):
    ds.shuffle(seed=7, max_buffer_input_shards=1)
    assert calls == [("shuffle", 7), ("init",)]


def test_skip_and_take_block_the_shuffle_but_not_the_shift(ds, calls):
    for frozen in (ds.skip(1), ds.take(1)):
        calls.clear()
        frozen.set_epoch(2)
        list(frozen)
        assert calls == [("shift", 2), ("init",)]


def test_ranks_are_dealt_by_a_modulo_and_a_shard_call_after_the_epoch(ds, calls):
    split = split_dataset_by_node(ds, rank=1, world_size=2)
    calls.clear()
    split.set_epoch(2)
    list(split)
    assert calls == [("shuffle", 2), ("shift", 2), ("shard", 2, 1, False), ("init",)]
    assert "num_shards % world_size" in inspect.getsource(
        IterableDataset._prepare_ex_iterable_for_iteration
    )


def test_shard_is_contiguous(ds, calls):
    ds.shard(2, 1)
    assert calls == [("shard", 2, 1, True), ("init",)]


def test_a_worker_is_a_shard_call_directly_followed_by_a_shift(ds, calls, monkeypatch):
    split = split_dataset_by_node(ds, rank=1, world_size=2)
    calls.clear()
    split.set_epoch(3)
    worker = SimpleNamespace(id=1, num_workers=2, dataset=None)
    monkeypatch.setattr(torch.utils.data, "get_worker_info", lambda: worker)
    list(split)
    assert calls == [
        ("shuffle", 3),
        ("shift", 3),
        ("shard", 2, 1, False),
        ("init",),
        ("shard", 2, 1, False),
        ("shift", 1),
        ("init",),
    ]


def test_a_state_is_merged_in_place_and_copied_plainly(ds):
    inner = Recorder([])
    live = LiveState(position=0, nested=LiveState(a=1))
    inner._init_state_dict = lambda: setattr(inner, "_state_dict", live)
    inner.load_state_dict({"position": 5, "nested": {"a": 2, "later": 3}, "later": {"b": 4}})
    assert inner._state_dict is live
    assert live == {"position": 5, "nested": {"a": 2, "later": 3}, "later": {"b": 4}}
    copy = inner.state_dict()
    assert type(copy) is dict
    assert type(copy["nested"]) is dict
    assert copy["nested"] is not live["nested"]


def test_a_fresh_generator_knows_its_seed():
    generator = np.random.default_rng(123)
    assert generator.bit_generator.seed_seq.entropy == 123
    assert examples.seed_of(generator) == 123
    generator.random()
    assert examples.seed_of(generator) == examples.seed_of(generator) != 123
    with pytest.raises(ValueError, match="seed"):
        examples.seed_of(np.random.default_rng())


def test_the_chains_that_are_read_directly_have_the_known_shape(tmp_path):
    plain = Dataset.from_dict({"id": [1, 2]}).to_iterable_dataset()
    for mapped in (plain.map(lambda row: row), plain.filter(lambda row: True)):
        below = mapped._ex_iterable.ex_iterable
        assert isinstance(mapped._ex_iterable, MappedExamplesIterable)
        assert type(below) is FormattedExamplesIterable
        assert type(below.ex_iterable) is RebatchedArrowExamplesIterable
        assert type(below.ex_iterable.ex_iterable) is type(plain._ex_iterable)

    ds = hls.from_lance(make_table(tmp_path / "t.lance", 10, 5))
    prepared = IterableDataset._prepare_ex_iterable_for_iteration(ds.with_format("torch"), 3, True)
    assert type(prepared) is FormattedExamplesIterable
    assert type(prepared.ex_iterable) is RebatchedArrowExamplesIterable
    assert (prepared.ex_iterable.batch_size, prepared.ex_iterable.drop_last_batch) == (3, True)


def test_ours_stand_where_they_should(tmp_path):
    ds = hls.from_lance(make_table(tmp_path / "t.lance", 10, 5))
    prepared = ds._prepare_ex_iterable_for_iteration()
    assert isinstance(prepared, RowsIterable)
    assert isinstance(prepared.ex_iterable, examples.LanceExamplesIterable)
    assert isinstance(ds.map(lambda row: row)._ex_iterable.ex_iterable, RowsIterable)
    assert isinstance(ds.filter(lambda row: True)._ex_iterable.ex_iterable, RowsIterable)
    formatted = ds.with_format("torch")
    assert isinstance(formatted._prepare_ex_iterable_for_iteration(), RowsIterable)
    assert isinstance(formatted.map(lambda row: row)._ex_iterable.ex_iterable, RowsIterable)
    batched = formatted.map(lambda rows: rows, batched=True)._ex_iterable.ex_iterable
    assert isinstance(batched.ex_iterable, BatchesIterable)
    tables = ds.with_format("arrow")._prepare_ex_iterable_for_iteration(4)
    assert isinstance(tables.ex_iterable, BatchesIterable)


def test_the_private_names_of_a_dataset_are_there(ds):
    assert {
        "_starting_state_dict",
        "_state_dict",
        "_ex_iterable",
        "_formatting",
        "_distributed",
    } <= {*vars(ds)}
    assert set(ds.state_dict()) == {"examples_iterable", "epoch"}


def test_whatever_datasets_makes_of_ours_has_our_class(tmp_path):
    ds = hls.from_lance(make_table(tmp_path / "t.lance", 100, 50), num_splits=4)
    made = [
        split_dataset_by_node(ds, rank=0, world_size=2),
        interleave_datasets([ds, ds]),
        concatenate_datasets([ds, ds]),
        concatenate_datasets([ds, ds.rename_column("id", "key")], axis=1),
        pickle.loads(pickle.dumps(ds)),
        copy.deepcopy(ds),
        *(getattr(ds, name)(*arguments) for name, arguments in METHODS.items()),
    ]
    assert {type(new) for new in made} == {hls.LanceIterableDataset}
    plain = Dataset.from_dict({"id": [1, 2]}).to_iterable_dataset()
    assert type(plain) is type(plain.map(lambda row: row)) is IterableDataset
    assert type(pickle.loads(pickle.dumps(plain))) is IterableDataset


METHODS = {
    "map": (),
    "filter": (lambda row: True,),
    "with_format": ("torch",),
    "select_columns": (["id"],),
    "take": (3,),
    "batch": (3,),
    "decode": (False,),
    "_resolve_features": (),
}
