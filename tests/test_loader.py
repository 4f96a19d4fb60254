"""`stateful_dataloader`, and PyTorch's loader beside it, with real worker processes."""

import itertools
import json
import logging
import multiprocessing
import pickle
import subprocess
import sys
import time
import warnings
from itertools import islice

import lance
import numpy as np
import pytest
import torch
import torch.utils.data
from datasets import Dataset, interleave_datasets
from helpers import ids, make_table, through_json
from in_process import in_process_workers
from torchdata.stateful_dataloader import StatefulDataLoader

import hf_lance_stream as hls

multiprocessing.set_forkserver_preload(["torch", "datasets", "lance", "hf_lance_stream"])

ROWS, BATCH = 60, 8  # 8 batches, the last of 4 rows
OPTIONS = {"num_splits": 6, "shuffle_seed": 1, "shuffle_clump_size": 4}
RESUMES = [(0, {}), (2, {}), (2, {"persistent_workers": True})]
AT_END = 100  # more batches than there are


@pytest.fixture
def table(tmp_path):
    return make_table(tmp_path / "t.lance", ROWS, 25, ["id", "text", "label"])


@pytest.fixture
def ds(table):
    return hls.from_lance(table, **OPTIONS)


def batches(loader):
    return [batch["id"].tolist() for batch in loader]


def some(iterator, count):
    return [batch["id"].tolist() for batch in islice(iterator, count)]


def cut(rows, size=BATCH):
    return [rows[i : i + size] for i in range(0, len(rows), size)]


# The same batches for every number of workers.


@pytest.mark.parametrize("workers", [1, 2, 3, 5, 8])
def test_batches_are_the_same_for_every_number_of_workers(ds, workers):
    expected = cut(ids(ds))
    assert [len(batch) for batch in expected] == [8] * 7 + [4]
    assert batches(hls.stateful_dataloader(ds, BATCH)) == expected
    loader = hls.stateful_dataloader(ds, BATCH, workers)
    assert len(loader) == 8
    assert batches(loader) == expected


def _local_map(ds):
    offset = 100

    def add(row):
        return {"sum": row["id"] + offset}

    return ds.map(add)


WRAPPERS = {
    "lambda": lambda ds: ds.map(lambda row: {"twice": row["id"] * 2}),
    "local function": _local_map,
    "torch": lambda ds: ds.with_format("torch"),
    "columns": lambda ds: ds.select_columns(["label", "id"]),
    "rename": lambda ds: ds.rename_column("label", "target"),
    "batched map": lambda ds: ds.map(
        lambda rows: {"twice": [i * 2 for i in rows["id"]]}, batched=True, batch_size=5
    ),
    "all": lambda ds: (
        _local_map(ds)
        .map(lambda row: {"twice": row["id"] * 2})
        .rename_column("label", "target")
        .select_columns(["id", "sum", "twice", "target"])
        .with_format("torch")
    ),
}


def plain(batch):
    return {k: v.tolist() if isinstance(v, torch.Tensor) else v for k, v in batch.items()}


@pytest.mark.parametrize("name", WRAPPERS)
def test_batches_are_the_same_through_wrappers(ds, name):
    wrapped = WRAPPERS[name](ds)
    alone = [plain(batch) for batch in hls.stateful_dataloader(wrapped, BATCH)]
    assert [batch["id"] for batch in alone] == cut(ids(ds))
    if "twice" in alone[0]:
        assert all(batch["twice"] == [2 * i for i in batch["id"]] for batch in alone)
    for workers in (2, 7):  # 7 is more than there are splits
        loader = hls.stateful_dataloader(wrapped, BATCH, workers)
        assert [plain(batch) for batch in loader] == alone


@pytest.mark.parametrize("options", [{"num_splits": 1}, {}], ids=["one_split", "natural"])
def test_batches_are_the_same_with_fewer_splits_than_workers(table, options):
    ds = hls.from_lance(table, **options)
    for workers in (0, 4):
        assert batches(hls.stateful_dataloader(ds, BATCH, workers)) == cut(ids(ds))


def test_drop_last_leaves_out_the_short_batch(ds):
    expected = cut(ids(ds))[:-1]
    for workers in (0, 3):
        loader = hls.stateful_dataloader(ds, BATCH, workers, drop_last=True)
        assert len(loader) == 7
        assert batches(loader) == expected
        state = through_json(loader.state_dict())
        loader.load_state_dict(state)
        assert [batches(loader), batches(loader)] == [[], expected]


def test_a_batch_larger_than_the_epoch(ds):
    for workers in (0, 3):
        loader = hls.stateful_dataloader(ds, 100, workers)
        assert len(loader) == 1
        assert batches(loader) == [ids(ds)]


@pytest.mark.parametrize("cls", [torch.utils.data.DataLoader, StatefulDataLoader])
def test_stock_loaders_have_the_same_batches_once_they_know_the_batch_size(table, cls):
    ds = hls.from_lance(table, **OPTIONS, batch_size=BATCH).map(lambda row: {"x": row["id"]})
    expected = cut(ids(ds))
    for workers in (0, 2, 3):
        context = {"multiprocessing_context": "forkserver"} if workers else {}
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "Length of IterableDataset")
            loader = cls(ds, batch_size=BATCH, num_workers=workers, **context)
            if cls is torch.utils.data.DataLoader:
                assert len(loader) == 8
            assert batches(loader) == expected


@pytest.mark.parametrize(("world_size", "workers"), [(2, 3), (3, 2)])
def test_global_steps_are_the_same_on_some_ranks_with_workers(ds, world_size, workers):
    """A few cells, with processes, of the grid in `test_elastic`."""
    ranks = [
        batches(hls.stateful_dataloader(ds.shard(world_size, rank), 12 // world_size, workers))
        for rank in range(world_size)
    ]
    steps = [sorted(itertools.chain(*step)) for step in zip(*ranks, strict=True)]
    assert steps == [sorted(step) for step in cut(ids(ds), 12)]


def test_len_is_exact_and_torch_warns_of_nothing(ds):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Length of IterableDataset")
        loader = hls.stateful_dataloader(ds, BATCH, 3)
        assert len(loader) == 8 == len(batches(loader))
    assert len(hls.stateful_dataloader(ds.shard(2, 0), 7)) == 5
    with pytest.raises(TypeError, match="number of rows is unknown"):
        len(hls.stateful_dataloader(ds.filter(lambda row: True), BATCH))


def test_len_of_a_loader_whose_workers_share_splits_is_exact_or_unknown(ds):
    """Each worker has a short last batch."""
    for workers in (0, 2, 3):
        with in_process_workers():
            loader = hls.stateful_dataloader(ds.take(51), BATCH, workers)
            try:
                length = len(loader)
            except TypeError:
                assert workers
            else:
                assert length == len(batches(loader))


# State.


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("every", [1, 3])
def test_the_state_is_exact_at_every_step_and_epochs_after_it_are_whole(ds, workers, every):
    """Before the first batch, between workers, at the last batch, after exhaustion."""
    expected = cut(ids(ds))
    loader = hls.stateful_dataloader(ds, BATCH, workers, snapshot_every_n_steps=every)
    states = [through_json(loader.state_dict())]
    for batch in loader:
        assert batch["id"].tolist() == expected[len(states) - 1]
        states.append(through_json(loader.state_dict()))
    assert through_json(loader.state_dict()) == states[-1]
    for done, state in enumerate(states):
        new = hls.stateful_dataloader(hls.from_lance(_path(ds), **OPTIONS), BATCH, workers)
        new.load_state_dict(through_json(state))
        assert through_json(new.state_dict()) == state  # right after a resume
        iterator = iter(new)
        assert through_json(new.state_dict()) == state
        assert some(iterator, 1) == expected[done : done + 1]
        assert through_json(new.state_dict()) == states[min(done + 1, 8)]
        assert batches(iterator) == expected[done + 1 :]
        assert through_json(new.state_dict()) == states[-1]
        if every == 1 or not workers:
            assert batches(new) == expected


def _path(ds):
    return ds.state_dict()["examples_iterable"]["fingerprint"]["table"]


@pytest.mark.parametrize("options", [{}, {"persistent_workers": True}])
def test_resume_right_after_a_resume(ds, options):
    expected = cut(ids(ds))
    state, found = None, []
    loader = hls.stateful_dataloader(ds, BATCH, 2, **options)
    for step in (1, 0, 1, 2, 0, 3, 1):
        if state is not None:
            loader.load_state_dict(state)
        found += some(iter(loader), step)
        state = through_json(loader.state_dict())
    assert found == expected
    loader.load_state_dict(state)
    assert [batches(loader) for _ in range(3)] == [[], expected, expected]


@pytest.mark.parametrize("workers", [0, 2])
def test_case_5_the_state_is_never_that_of_the_idle_parent(ds, workers):
    loader = hls.stateful_dataloader(ds, BATCH, workers)
    iterator = iter(loader)
    some(iterator, 3)
    inner = loader.state_dict()["examples_iterable"]
    assert inner["position"] == 3 * BATCH
    ds.load_state_dict(hls.gather_state_dict(loader))
    rest = list(itertools.chain(*batches(iterator)))
    assert ids(ds) == rest


@pytest.mark.parametrize(("workers", "options"), RESUMES)
def test_case_6_after_a_state_at_the_end_one_pass_is_empty(ds, workers, options):
    full = cut(ids(ds))
    loader = hls.stateful_dataloader(ds, BATCH, workers, **options)
    assert batches(loader) == full
    at_end = through_json(loader.state_dict())
    iterator = iter(loader)
    assert some(iterator, 8) == full
    assert through_json(loader.state_dict()) == at_end  # at the last batch, before the end
    loader.load_state_dict(at_end)
    assert [batches(loader) for _ in range(3)] == [[], full, full]


def test_the_state_is_small_and_json(tmp_path):
    table = make_table(tmp_path / "t.lance", 4096, 4096)
    for num_splits in (8, 512):
        ds = hls.from_lance(table, num_splits=num_splits, shuffle_seed=1)
        loader = hls.stateful_dataloader(ds, 30, 0)
        uneven = hls.merge_state_dicts(
            [_advanced(ds.shard(4, rank), 5 * rank + 1) for rank in range(4)]
        )
        loader.load_state_dict(uneven)
        some(iter(loader), 3)
        for state in (uneven, loader.state_dict(), hls.gather_state_dict(loader)):
            assert len(json.dumps(state)) < 2048 + 8 * num_splits


def _advanced(ds, rows):
    for _ in islice(iter(ds), rows):
        pass
    return ds.state_dict()


def test_a_state_of_other_workers_is_refused(ds):
    loader = hls.stateful_dataloader(ds, BATCH, 2)
    some(iter(loader), 3)
    state = through_json(loader.state_dict())
    alone = hls.stateful_dataloader(ds, BATCH)
    with pytest.raises(ValueError, match=r"num_workers=2.*num_workers=0.*merge_state_dicts"):
        alone.load_state_dict(state)
    alone.load_state_dict(through_json(hls.merge_state_dicts([state])))
    assert batches(alone) == cut(ids(ds))[3:]


def test_a_state_of_another_dataset_is_refused_by_name(ds):
    state = hls.stateful_dataloader(ds, BATCH).state_dict()
    other = hls.stateful_dataloader(ds.shuffle(seed=2), BATCH)
    with pytest.raises(ValueError, match="shuffle_seed: saved 1, now 2"):
        other.load_state_dict(state)
    wrong = [3, "state", ["a"], {"a": 1}, {"loader": {}, "examples_iterable": {}, "epoch": 0}]
    for value in [*wrong, {"_snapshot": None}, {"dataset_state": None}]:
        with pytest.raises(ValueError, match="state"):
            other.load_state_dict(value)
    assert len(batches(other)) == 8


def test_a_state_loaded_into_the_dataset_first_is_where_the_loader_starts(ds):
    expected = cut(ids(ds))
    loader = hls.stateful_dataloader(ds, BATCH)
    some(iter(loader), 5)
    portable = through_json(hls.gather_state_dict(loader))
    for workers in (0, 2):
        new = hls.from_lance(_path(ds), **OPTIONS)
        new.load_state_dict(portable)
        loader = hls.stateful_dataloader(new, BATCH, workers)
        assert hls.gather_state_dict(loader) == portable
        assert [batches(loader), batches(loader)] == [expected[5:], expected]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("workers", [0, 2])
def test_torch_distributed_checkpoint_saves_and_loads_the_portable_state(ds, tmp_path, workers):
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    expected = cut(ids(ds))
    loader = hls.stateful_dataloader(ds, BATCH, workers)
    some(iter(loader), 2)  # splits stand at different rows
    for name, source in (("portable", hls.PortableState(loader)), ("own", loader)):
        dcp.save({"data": source}, checkpoint_id=tmp_path / name, no_dist=True)
    for name, others in (("portable", 0), ("portable", 2), ("own", workers)):
        new = hls.stateful_dataloader(ds, BATCH, others)
        target = hls.PortableState(new) if name == "portable" else new
        dcp.load({"data": target}, checkpoint_id=tmp_path / name, no_dist=True)
        assert batches(new) == expected[2:]


# Epochs.


def epoch_batches(ds, epoch):
    other = hls.from_lance(_path(ds), **OPTIONS, epoch=epoch)
    return cut(ids(other))


@pytest.mark.parametrize("options", [{}, {"persistent_workers": True}])
def test_case_19_set_epoch_reaches_live_workers(ds, options):
    orders = [epoch_batches(ds, epoch) for epoch in range(3)]
    assert orders[0] != orders[1] != orders[2]
    loader = hls.stateful_dataloader(ds, BATCH, 2, **options)
    for epoch in (0, 1, 0, 2):
        loader.set_epoch(epoch)
        assert batches(loader) == orders[epoch]
    ds.set_epoch(1)  # on the dataset the loader was made of
    assert batches(loader) == orders[1]
    loader.dataset.set_epoch(2)
    assert batches(loader) == orders[2]
    assert loader.state_dict()["epoch"] == ds.epoch == 2


@pytest.mark.parametrize("workers", [0, 2])
def test_a_load_restores_the_epoch_and_another_epoch_lets_go_of_it(ds, workers):
    orders = [epoch_batches(ds, epoch) for epoch in range(3)]
    ds.set_epoch(1)
    loader = hls.stateful_dataloader(ds, BATCH, workers)
    some(iter(loader), 3)
    state = through_json(loader.state_dict())

    def resumed():
        new = hls.stateful_dataloader(hls.from_lance(_path(ds), **OPTIONS), BATCH, workers)
        new.load_state_dict(state)
        assert new.dataset.epoch == 1
        return new

    new = resumed()
    assert batches(new) == orders[1][3:]
    new.set_epoch(2)
    assert batches(new) == orders[2]
    new = resumed()
    new.set_epoch(1)  # the same: nothing changes
    assert batches(new) == orders[1][3:]
    new = resumed()
    new.set_epoch(2)
    assert new.state_dict()["examples_iterable"]["position"] == 0
    assert batches(new) == orders[2]
    new.set_epoch(1)
    assert batches(new) == orders[1]
    new = resumed()
    new.set_epoch(0)
    new.set_epoch(1)  # another epoch has let go of the state
    assert batches(new) == orders[1]


@pytest.mark.parametrize("options", [{}, {"persistent_workers": True}])
def test_a_load_on_a_loader_with_live_workers(ds, options):
    expected = cut(ids(ds))
    loader = hls.stateful_dataloader(ds, BATCH, 2, **options)
    iterator = iter(loader)
    assert some(iterator, 3) == expected[:3]
    state = through_json(loader.state_dict())
    assert some(iterator, 3) == expected[3:6]
    loader.load_state_dict(state)
    assert through_json(loader.state_dict()) == state
    assert [batches(loader), batches(loader)] == [expected[3:], expected]
    loader.load_state_dict({})
    assert batches(loader) == expected


@pytest.mark.parametrize("workers", [0, 2])
def test_loading_nothing_lets_go_of_what_was_loaded(ds, workers):
    expected = cut(ids(ds))
    loader = hls.stateful_dataloader(ds, BATCH, workers)
    some(iter(loader), 3)
    state = through_json(loader.state_dict())
    loader.load_state_dict(state)
    loader.load_state_dict({})
    assert batches(loader) == expected


@pytest.mark.parametrize(("workers", "options"), RESUMES)
def test_a_pass_after_an_abandoned_one_is_whole(ds, workers, options):
    expected = cut(ids(ds))
    loader = hls.stateful_dataloader(ds, BATCH, workers, **options)
    for batch in loader:
        assert batch["id"].tolist() == expected[0]
        break
    assert loader.state_dict()["examples_iterable"]["position"] == BATCH
    state = through_json(loader.state_dict())
    assert batches(loader) == expected
    loader.load_state_dict(state)
    assert some(iter(loader), 2) == expected[1:3]  # a resumed pass, abandoned
    assert loader.state_dict()["examples_iterable"]["position"] == 3 * BATCH
    assert batches(loader) == expected


def test_two_iterators_do_not_disturb_each_other(ds):
    expected = cut(ids(ds))
    for workers in (0, 2):
        loader = hls.stateful_dataloader(ds, BATCH, workers)
        first = iter(loader)
        second = iter(loader)
        assert some(first, 3) == expected[:3]
        assert some(second, 1) == expected[:1]
        # The state is that of the latest pass.
        assert loader.state_dict()["examples_iterable"]["position"] == BATCH
        assert some(first, 2) == expected[3:5]
        assert batches(second) == expected[1:]
        assert batches(first) == expected[5:]


def test_an_iterator_made_and_thrown_away_is_the_same_with_and_without_workers(ds):
    """After a load, `iter` is called twice, as some trainers do."""
    found = []
    for workers, options in RESUMES:
        loader = hls.stateful_dataloader(ds, BATCH, workers, **options)
        some(iter(loader), 3)
        loader.load_state_dict(through_json(loader.state_dict()))
        iter(loader)
        state = loader.state_dict()["examples_iterable"]["position"]
        found.append((state, batches(loader), batches(loader)))
    assert found[0] == found[1] == found[2]


# Where workers share splits.


FALLBACK = {
    "filter": lambda ds: ds.filter(lambda row: row["id"] % 5 != 0),
    "take": lambda ds: ds.take(44),
    "skip": lambda ds: ds.skip(9),
    "a mix of sources": lambda ds: interleave_datasets([ds, ds.map(lambda row: row)]),
    "a map with indices": lambda ds: ds.map(lambda row, i: {"i": i}, with_indices=True),
}


def fallback_loader(table, what, workers, **options):
    ds = FALLBACK[what](hls.from_lance(table, **OPTIONS))
    return hls.stateful_dataloader(ds, BATCH, workers, **options)


@pytest.mark.parametrize("what", FALLBACK)
def test_a_step_that_changes_rows_shares_splits_and_says_so_once(table, what, caplog):
    with caplog.at_level(logging.INFO):
        loader = fallback_loader(table, what, 2)
        found = batches(loader)
        batches(loader)
    lines = [r.message for r in caplog.records if "share splits" in r.message]
    assert len(lines) == 1
    assert what in lines[0]
    ds = FALLBACK[what](hls.from_lance(table, **OPTIONS))
    if what in ("filter", "a map with indices"):  # the others do it to each worker's part
        assert sorted(itertools.chain(*found)) == sorted(ids(ds))


@pytest.mark.parametrize(("workers", "options"), RESUMES)
@pytest.mark.parametrize("what", ["filter", "take", "a mix of sources"])
def test_a_fallback_resumes_exactly_on_as_many_workers(table, what, workers, options):
    """Also before all workers have yielded, right after a resume, and after exhaustion."""
    loader = fallback_loader(table, what, workers, **options)
    states = [through_json(loader.state_dict())]
    full = []
    for batch in loader:
        full.append(batch["id"].tolist())
        states.append(through_json(loader.state_dict()))
    states.append(through_json(loader.state_dict()))
    steps = [0, 1, 2, 3, len(full) - 1, len(full), len(full) + 1]
    for done in steps if not options else (1, len(full), len(full) + 1):
        new = fallback_loader(table, what, workers, **options)
        new.load_state_dict(states[done])
        if done in (1, len(full)):  # right after a resume
            new.load_state_dict(through_json(new.state_dict()))
        epochs = [batches(new) for _ in range(3 if done >= len(full) else 2)]
        assert epochs[0] == full[done:], f"step {done}"
        assert all(epoch == full for epoch in epochs[1:]), f"step {done}"


@pytest.mark.parametrize("done", [2, AT_END])
@pytest.mark.parametrize("make", ["fallback", "torchdata"])
def test_a_state_in_the_second_pass_of_live_workers_is_exact(table, make, done):
    """Where a worker has not yielded yet, its state is not that of the pass before."""
    options = {"persistent_workers": True}

    def made():
        if make == "fallback":
            return fallback_loader(table, "filter", 2, **options)
        ds = hls.from_lance(table, **OPTIONS, batch_size=BATCH)
        context = {"multiprocessing_context": "forkserver"}
        return StatefulDataLoader(ds, batch_size=BATCH, num_workers=2, **options, **context)

    loader = made()
    full = batches(made())
    iterator = iter(loader)
    some(iterator, done)
    iterator = iter(loader)
    states = [through_json(loader.state_dict())]
    for batch in full[:3]:
        assert next(iterator)["id"].tolist() == batch
        states.append(through_json(loader.state_dict()))
    for step, state in enumerate(states):
        if make == "torchdata":
            ds = hls.from_lance(table, **OPTIONS)
            ds.load_state_dict(hls.merge_state_dicts([state]))
            assert cut(ids(ds)) == full[step:], f"merged, step {step}"
        new = made()
        new.load_state_dict(state)
        assert batches(new) == full[step:], f"step {step}"


@pytest.fixture(scope="module")
def orders(tmp_path_factory):
    """A table, and the batches of three epochs of a filter on it, for 0 and 2 workers."""
    table = make_table(tmp_path_factory.mktemp("orders") / "t.lance", ROWS, 25)
    found = {}
    for workers, epoch in itertools.product((0, 2), range(3)):
        ds = FALLBACK["filter"](hls.from_lance(table, **OPTIONS, epoch=epoch))
        found[workers, epoch] = batches(hls.stateful_dataloader(ds, BATCH, workers))
        assert epoch == 0 or found[workers, epoch] != found[workers, epoch - 1]
    return table, found


def filter_loader(orders, workers, epoch=0, done=0):
    """A loader of the dataset of `orders` after `done` batches of an epoch, or its end."""
    loader = fallback_loader(orders[0], "filter", workers)
    loader.set_epoch(epoch)
    if done:
        some(iter(loader), done)
        state = through_json(loader.state_dict())
        loader = fallback_loader(orders[0], "filter", workers)
        loader.load_state_dict(state)
    return loader


@pytest.mark.parametrize("done", [2, AT_END])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("on", ["loader", "dataset"])
def test_a_fallback_lets_go_of_a_state_at_another_epoch(orders, workers, done, on):
    loader = filter_loader(orders, workers, 0, done)
    (loader if on == "loader" else loader.dataset).set_epoch(1)
    assert batches(loader) == orders[1][workers, 1]
    assert loader.dataset.epoch == 1
    loader.set_epoch(2)
    assert batches(loader) == orders[1][workers, 2]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_fallback_restores_the_epoch(orders, workers):
    loader = filter_loader(orders, workers, 2, 3)
    assert loader.dataset.epoch == 2
    loader.set_epoch(2)
    expected = orders[1][workers, 2]
    assert [batches(loader), batches(loader)] == [expected[3:], expected]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_fallback_may_be_asked_for_its_state_before_set_epoch_of_the_same(orders, workers):
    loader = filter_loader(orders, workers, 1, 2)
    state = through_json(loader.state_dict())
    loader.set_epoch(1)
    assert through_json(loader.state_dict()) == state
    loader.set_epoch(1)
    assert batches(loader) == orders[1][workers, 1][2:]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("what", [None, "filter"])
def test_a_state_after_set_epoch_is_the_start_of_that_epoch(table, what, workers):
    """Also when the pass before was left, and its iterator is still there."""

    def made():
        ds = hls.from_lance(table, **OPTIONS)
        return hls.stateful_dataloader(FALLBACK[what](ds) if what else ds, BATCH, workers)

    loader = made()
    iterator = iter(loader)
    some(iterator, 2)
    loader.set_epoch(1)
    state = through_json(loader.state_dict())
    del iterator
    expected = batches(loader)
    new = made()
    new.load_state_dict(state)
    assert new.dataset.epoch == 1
    assert batches(new) == expected


@pytest.mark.parametrize("done", [0, 2])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_fallback_may_be_asked_for_its_state_before_set_epoch(orders, workers, done):
    loader = filter_loader(orders, workers, 0, done)
    loader.state_dict()
    time.sleep(0.5)  # for workers that read ahead
    loader.set_epoch(1)
    assert batches(loader) == orders[1][workers, 1]


@pytest.mark.parametrize("done", [2, AT_END])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_fallback_lets_go_of_a_state_when_nothing_is_loaded(orders, workers, done):
    loader = filter_loader(orders, workers, 1, done)
    loader.load_state_dict({})
    assert batches(loader) == orders[1][workers, loader.dataset.epoch]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_state_at_the_end_is_still_one_when_saved_again(orders, workers):
    loader = filter_loader(orders, workers, 1, AT_END)
    loader.load_state_dict(through_json(loader.state_dict()))
    full = orders[1][workers, 1]
    assert [batches(loader) for _ in range(3)] == [[], full, full]


@pytest.mark.parametrize("batch_size", [5, 7, 8])
def test_case_6_a_short_last_batch_of_torchdata_makes_one_empty_pass(table, batch_size):
    """At the last batch its loader without workers knows that the end has come."""
    loader = StatefulDataLoader(hls.from_lance(table, **OPTIONS), batch_size=batch_size)
    full = batches(loader)
    some(iter(loader), len(full))
    states = []
    iterator = iter(loader)
    some(iterator, len(full))
    states.append(through_json(loader.state_dict()))
    assert next(iterator, None) is None
    states.append(through_json(loader.state_dict()))
    for state in states:
        loader.load_state_dict(state)
        epochs = [batches(loader) for _ in range(3)]
        assert epochs[0] in ([], full)
        assert epochs[1:] == [full, full]


@pytest.mark.parametrize("how", ["loader", "dataset"])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("what", ["filter", "take", "skip", "a mix of sources", "batched map"])
def test_a_state_of_the_dataset_is_exact_in_a_fallback_or_refused(table, what, workers, how):
    """A count of rows taken, or skipped, by all is not one of each worker."""

    def made():
        return {**FALLBACK, **WRAPPERS}[what](hls.from_lance(table, **OPTIONS))

    ds = made()
    seen = [row["id"] for row in islice(iter(ds), 20)]
    state = through_json(ds.state_dict())
    ds = made()
    with in_process_workers():
        if workers:
            with pytest.raises(ValueError, match=r"num_workers=2.*state of a loader"):
                _load(ds, workers, state, how)
            return
        loader = _load(ds, workers, state, how)
        assert seen + list(itertools.chain(*batches(loader))) == ids(made())


def _load(ds, workers, state, how):
    if how == "dataset":
        ds.load_state_dict(state)
        return hls.stateful_dataloader(ds, BATCH, workers)
    loader = hls.stateful_dataloader(ds, BATCH, workers)
    loader.load_state_dict(state)
    return loader


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("what", [None, "filter"])
def test_a_refused_state_changes_nothing(table, what, workers):
    """It is refused when it is loaded, also where only workers could read it."""

    def made(seed=1, name=what):
        ds = hls.from_lance(table, **{**OPTIONS, "shuffle_seed": seed})
        return hls.stateful_dataloader(FALLBACK[name](ds) if name else ds, BATCH, workers)

    others = [made(seed=2)] + ([made(name="take")] if what else [])
    for loader in others:
        loader.set_epoch(3)
        some(iter(loader), 2)
    loader = made()
    full = batches(loader)
    iterator = iter(loader)
    some(iterator, 3)
    before = through_json(loader.state_dict())
    for other in others:
        with pytest.raises(ValueError, match=r"shuffle_seed: saved 2, now 1|with other steps"):
            loader.load_state_dict(through_json(other.state_dict()))
        assert through_json(loader.state_dict()) == before
    assert batches(iterator) == full[3:]
    loader.load_state_dict(before)
    with pytest.raises(ValueError, match=r"shuffle_seed: saved 2, now 1"):
        loader.load_state_dict(through_json(others[0].state_dict()))
    assert loader.dataset.epoch == 0
    assert batches(loader) == full[3:]


def test_a_fallback_with_workers_that_do_not_divide_the_splits_is_refused(table):
    with pytest.raises(ValueError, match=r"num_splits=6, num_workers=4; use .*\[1, 2, 3, 6\]"):
        batches(fallback_loader(table, "filter", 4))


@pytest.mark.parametrize("function", [lambda table: table, lambda table: table.take([0, 0])])
def test_an_arrow_map_resumes_exactly(ds, function):
    """It is not batched, but a table of one row may become one of two."""
    changed = ds.with_format("arrow").map(function).with_format(None)
    for workers in (0, 2):
        with in_process_workers():
            loader = hls.stateful_dataloader(changed, 5, workers)
            full = batches(loader)
            iterator = iter(loader)
            some(iterator, 3)
            state = through_json(loader.state_dict())
            loader.load_state_dict(state)
            assert batches(loader) == full[3:]


@pytest.mark.parametrize("size", [None, 7])
def test_a_state_of_the_start_loads_after_a_pass_has_begun(ds, size):
    mapped = ds.map(lambda rows: rows, batched=size is not None, batch_size=size or 1)
    start = through_json(mapped.state_dict())
    whole = ids(mapped)
    for _ in islice(iter(mapped), 10):
        pass
    mapped.load_state_dict(start)
    assert ids(mapped) == whole


def test_an_async_map_resumes_exactly(ds):
    async def slow(row):
        return {"twice": 2 * row["id"]}

    loader = hls.stateful_dataloader(ds.map(slow), BATCH, 2)
    expected = cut(ids(ds))
    some(iter(loader), 3)
    loader.load_state_dict(through_json(loader.state_dict()))
    assert batches(loader) == expected[3:]


# Arguments.


def test_further_arguments_reach_torchdata(ds, tmp_path):
    loader = hls.stateful_dataloader(
        ds,
        BATCH,
        2,
        prefetch_factor=3,
        pin_memory=False,
        collate_fn=_collate,
        worker_init_fn=_note_worker,
        timeout=60,
        persistent_workers=True,
    )
    assert loader.prefetch_factor == 3
    assert [batch for batch, _ in loader] == cut(ids(ds))
    assert {note for _, note in loader} == {"worker 0", "worker 1"}


_noted = "none"


def _note_worker(worker):
    global _noted
    _noted = f"worker {worker}"


def _collate(rows):
    return [row["id"] for row in rows], _noted


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "`batch_size`.*batch_size=0"),
        ({"batch_size": "8"}, "`batch_size`.*batch_size='8'"),
        ({"batch_size": None}, "`batch_size`.*batch_size=None"),
        ({"batch_size": 2.0}, "`batch_size`.*batch_size=2.0"),
        ({"num_workers": -1}, "`num_workers`.*num_workers=-1"),
        ({"num_workers": True}, "`num_workers`.*num_workers=True"),
        ({"shuffle": True}, r"`shuffle`.*shuffle=True; shuffle with ds.shuffle\(seed=…\)"),
        ({"sampler": [1]}, r"`sampler`.*sampler=\[1\]"),
        ({"batch_sampler": [[1]]}, "`batch_sampler`"),
        ({"in_order": False}, "`in_order`.*in_order=False"),
        ({"in_order": False, "num_workers": 2}, "`in_order`.*in_order=False"),
        ({"multiprocessing_context": "fork", "num_workers": 2}, "'fork'.*'forkserver'"),
        (
            {"multiprocessing_context": multiprocessing.get_context("fork"), "num_workers": 2},
            "'fork'.*'forkserver'",
        ),
        ({"multiprocessing_context": "forkserver"}, "multiprocessing_context"),
        ({"prefetch_factor": 2}, "`prefetch_factor`.*num_workers=0"),
        ({"persistent_workers": True}, "`persistent_workers`.*num_workers=0"),
        ({"prefetch_factor": 0, "num_workers": 2}, "prefetch_factor"),
        ({"prefetch_factor": -1, "num_workers": 2}, "prefetch_factor"),
        ({"timeout": 5}, "timeout"),
        ({"timeout": -5, "num_workers": 2}, "timeout"),
    ],
)
def test_wrong_arguments_are_refused_at_once(ds, options, message):
    with pytest.raises(ValueError, match=message):
        hls.stateful_dataloader(ds, **{"batch_size": BATCH, **options})


@pytest.mark.parametrize("other", [[1, 2], None, "path", Dataset.from_dict({"id": [1]})])
def test_a_dataset_that_is_not_ours_is_refused(other):
    with pytest.raises(ValueError, match=r"`ds` must be a dataset of Lance tables.*got"):
        hls.stateful_dataloader(other, BATCH)
    with pytest.raises(ValueError, match="got IterableDataset"):
        hls.stateful_dataloader(Dataset.from_dict({"id": [1]}).to_iterable_dataset(), BATCH)


def test_integers_of_numpy_are_integers(ds):
    loader = hls.stateful_dataloader(ds, np.int64(BATCH), np.int32(0))
    assert len(json.dumps(loader.state_dict())) > 0
    assert batches(loader) == cut(ids(ds))


@pytest.mark.parametrize(("batch_size", "is_said"), [(3, False), (6, False), (4, True), (8, True)])
def test_a_global_batch_that_is_no_multiple_of_the_splits_is_logged(
    ds, caplog, batch_size, is_said
):
    with caplog.at_level(logging.INFO, logger="hf_lance_stream"):
        hls.stateful_dataloader(ds.shard(2, 0), batch_size)
    lines = [r.message for r in caplog.records if "global batch" in r.message]
    assert len(lines) == is_said
    if is_said:
        assert f"{batch_size * 2} rows (world_size=2, batch_size={batch_size})" in lines[0]
        assert "num_splits=6: another world size would form other global batches" in lines[0]


# Processes.


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_in_a_map_function_reaches_the_caller(ds, workers):
    def fail(row):
        if row["id"] == 37:
            raise KeyError("the row of cat 37 is bad")
        return row

    loader = hls.stateful_dataloader(ds.map(fail), BATCH, workers)
    good = next(n for n, batch in enumerate(cut(ids(ds))) if 37 in batch)
    iterator = iter(loader)
    assert some(iterator, good) == cut(ids(ds))[:good]
    with pytest.raises(KeyError, match="the row of cat 37 is bad"):
        next(iterator)
    assert loader.state_dict()["examples_iterable"]["position"] == good * BATCH


@pytest.mark.parametrize("workers", [0, 2])
def test_case_32_a_stop_iteration_in_a_map_function_ends_nothing_in_silence(ds, workers):
    def stop(row):
        if row["id"] == 37:
            next(iter(()))
        return row

    with pytest.raises(RuntimeError, match="StopIteration"):
        batches(hls.stateful_dataloader(ds.map(stop), BATCH, workers))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("what", [None, "filter"])
def test_the_global_random_state_is_left_alone(table, workers, what):
    ds = hls.from_lance(table, **OPTIONS)
    loader = hls.stateful_dataloader(FALLBACK[what](ds) if what else ds, BATCH, workers)
    torch.manual_seed(5)
    np.random.seed(5)
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    some(iter(loader), 2)
    state = loader.state_dict()
    loader.load_state_dict(state)
    batches(loader)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1] == before[1]).all()


def test_random_numbers_in_workers_differ_by_worker_and_epoch_and_repeat_by_run(ds):
    def add_noise(row):
        return {"noise": torch.rand(()).item()}

    def noise(epoch):
        torch.manual_seed(5)
        loader = hls.stateful_dataloader(ds.map(add_noise), BATCH, 2)
        loader.set_epoch(epoch)
        return [x for batch in loader for x in batch["noise"].tolist()]

    runs = [noise(0), noise(0), noise(1)]
    assert runs[0] == runs[1]
    assert len(set(runs[0]) | set(runs[2])) == 2 * ROWS


def test_a_generator_of_the_user_is_used_as_it_is(ds):
    generator = torch.Generator()
    generator.manual_seed(7)
    loader = hls.stateful_dataloader(ds, BATCH, generator=generator)
    batches(loader)
    assert generator.initial_seed() == 7


CHANGE = """
import sys
import lance, pyarrow as pa
path = sys.argv[1]
table = lance.dataset(path)
table.delete("id % 3 = 0")
table.optimize.compact_files(target_rows_per_fragment=1000)
lance.write_dataset(
    table.to_table(limit=9).set_column(0, "id", pa.array(range(1000, 1009))), path, mode="append"
)
"""


def test_case_23_changes_by_another_process_do_not_show_in_a_pass(tmp_path):
    table = make_table(tmp_path / "t.lance", 1000, 100, ["id", "text"])
    options = {"num_splits": 10, "shuffle_seed": 1, "shuffle_clump_size": 4}
    ds = hls.from_lance(table, **options)
    whole = ids(ds)
    loader = hls.stateful_dataloader(ds, 10, 2)
    iterator = iter(loader)
    found = some(iterator, 1)
    subprocess.run([sys.executable, "-c", CHANGE, table], check=True, timeout=120)
    state = through_json(loader.state_dict())
    found += batches(iterator)
    assert found == cut(whole, 10)
    assert batches(loader) == cut(whole, 10)  # new workers, the old version

    new = hls.from_lance(table, **options)
    expected = [i for i in range(1000) if i % 3] + list(range(1000, 1009))
    assert sorted(ids(hls.from_lance(table))) == expected
    assert set(itertools.chain(*batches(hls.stateful_dataloader(new, 10, 2)))) <= set(expected)
    fixed = hls.from_lance(table, version=5, **options)
    with pytest.raises(ValueError, match="version: saved 1, now 5"):
        hls.stateful_dataloader(fixed, 10, 2).load_state_dict(state)
    old = hls.stateful_dataloader(hls.from_lance(table, version=1, **options), 10, 2)
    for loader in (old, hls.stateful_dataloader(new, 10, 2)):
        loader.load_state_dict(state)
        assert batches(loader) == cut(whole, 10)[1:]


@pytest.mark.parametrize("kind", ["path", "lance", "lancedb"])
def test_case_29_datasets_of_every_source_pickle_and_reach_workers(tmp_path, kind):
    import lancedb  # not above, where every worker would import it too

    table = make_table(tmp_path / "t.lance", ROWS, 25)
    source = {
        "path": lambda: table,
        "lance": lambda: lance.dataset(table),
        "lancedb": lambda: lancedb.connect(tmp_path).open_table("t"),
    }[kind]()
    offset = 7
    ds = hls.from_lance(source, **OPTIONS).map(lambda row: {"sum": row["id"] + offset})
    whole = ids(ds)
    assert ids(pickle.loads(pickle.dumps(ds))) == whole
    rows = iter(ds)
    seen = [next(rows)["id"] for _ in range(9)]
    during = pickle.loads(pickle.dumps(ds))
    assert seen + [row["id"] for row in rows] == whole
    assert ids(during) == whole
    loader = hls.stateful_dataloader(ds, BATCH, 2)
    found = [plain(batch) for batch in loader]
    assert [batch["id"] for batch in found] == cut(whole)
    assert all(batch["sum"] == [i + offset for i in batch["id"]] for batch in found)


@pytest.mark.slow
def test_case_29_spawned_workers(tmp_path):
    import lancedb

    make_table(tmp_path / "t.lance", ROWS, 25)
    ds = hls.from_lance(lancedb.connect(tmp_path).open_table("t"), **OPTIONS)
    ds = ds.map(lambda row: {"twice": 2 * row["id"]})
    loader = hls.stateful_dataloader(ds, BATCH, 2, multiprocessing_context="spawn")
    iterator = iter(loader)
    found = some(iterator, 3)
    state = through_json(loader.state_dict())
    assert found + batches(iterator) == cut(ids(ds))
    alone = hls.stateful_dataloader(ds, BATCH)
    alone.load_state_dict(hls.merge_state_dicts([state]))
    assert batches(alone) == cut(ids(ds))[3:]


# The simulation of the other tests, held against processes.


@pytest.mark.parametrize("what", [None, "filter", "batched map"])
def test_the_simulated_workers_do_what_processes_do(table, what):
    ds = hls.from_lance(table, **OPTIONS)
    ds = FALLBACK[what](ds) if what == "filter" else WRAPPERS[what](ds) if what else ds
    ds = ds.with_batches(BATCH)

    def run():
        loader = StatefulDataLoader(
            ds,
            batch_size=BATCH,
            num_workers=2,
            multiprocessing_context="forkserver",
            snapshot_every_n_steps=2,
        )
        found = [_essence(loader.state_dict())]
        for batch in loader:
            found.append((batch["id"].tolist(), _essence(loader.state_dict())))
        found.append(_essence(loader.state_dict()))
        return found

    real = run()
    with in_process_workers():
        assert run() == real


def _essence(state):
    """What of a raw state the dataset and the order of workers go by."""
    snapshot = state["_snapshot"]
    return through_json(
        {
            "step": (snapshot["_snapshot_step"], state["_steps_since_snapshot"]),
            "last": snapshot["_last_yielded_worker_id"],
            "workers": {
                name: worker["dataset_state"]
                for name, worker in snapshot["_worker_snapshots"].items()
            },
            "finished": state["_iterator_finished"],
        }
    )


def test_a_lambda_can_collate_in_workers(tmp_path):
    ds = hls.from_lance(make_table(tmp_path / "t.lance", 100, 20), num_splits=4, shuffle_seed=1)
    more = 1000

    def loader(workers):
        return hls.stateful_dataloader(
            ds, 10, workers, collate_fn=lambda rows: [row["id"] + more for row in rows]
        )

    assert list(loader(2)) == list(loader(0))


def test_batches_are_built_whole_only_where_nothing_sees_the_difference(tmp_path):
    ds = hls.from_lance(make_table(tmp_path / "t.lance", 100, 20), num_splits=4, shuffle_seed=1)
    built = [
        ds,
        ds.with_format("torch"),
        ds.select_columns(["id"]),
    ]
    by_row = [ds.map(lambda row: row), ds.filter(lambda row: True), ds.take(50)]
    assert all(hls.stateful_dataloader(one, 10)._builds_batches for one in built)
    assert not any(hls.stateful_dataloader(one, 10)._builds_batches for one in by_row)
    own = hls.stateful_dataloader(ds, 10, collate_fn=torch.utils.data.default_collate)
    assert own._builds_batches
    assert not hls.stateful_dataloader(ds, 10, collate_fn=list)._builds_batches
    for one in built:
        whole = list(hls.stateful_dataloader(one, 7))
        rows = list(hls.stateful_dataloader(one, 7, collate_fn=list))
        assert repr(whole) == repr([torch.utils.data.default_collate(batch) for batch in rows])
        dropped = list(hls.stateful_dataloader(one, 7, drop_last=True))
        assert repr(dropped) == repr(whole[:-1])
