"""PyTorch's and torchdata's loaders as they are, with real worker processes."""

import multiprocessing

import pytest
import torch.utils.data
from helpers import ids, make_table, through_json
from torchdata.stateful_dataloader import StatefulDataLoader

import hf_lance_stream as hls

multiprocessing.set_forkserver_preload(["torch", "datasets", "lance", "hf_lance_stream"])


@pytest.fixture
def table(tmp_path):
    return make_table(tmp_path / "t.lance", 64, 16)


def loader(table, workers, cls=StatefulDataLoader, context="forkserver", **options):
    ds = hls.from_lance(table, num_splits=8, shuffle_seed=1, shuffle_clump_size=4)
    if workers:
        options["multiprocessing_context"] = context
    return cls(ds, batch_size=2, num_workers=workers, **options)


def batches(loader):
    return [batch["id"].tolist() for batch in loader]


@pytest.mark.parametrize("context", ["spawn", "forkserver"])
def test_workers_share_the_rows_by_split(table, context):
    whole = ids(hls.from_lance(table, num_splits=8, shuffle_seed=1, shuffle_clump_size=4))
    found = batches(loader(table, 2, torch.utils.data.DataLoader, context))
    assert sorted(i for batch in found for i in batch) == sorted(whole)
    first = [i for batch in found[::2] for i in batch]
    assert first == [row for n, row in enumerate(whole) if n % 8 < 4]


def test_workers_that_do_not_divide_the_splits_are_refused_by_name(table):
    with pytest.raises(ValueError, match="num_workers=3"):
        batches(loader(table, 3, torch.utils.data.DataLoader))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("persistent", [False, True])
def test_case_4_epochs_after_a_resume_are_whole(table, workers, persistent):
    options = {"persistent_workers": True} if persistent and workers else {}
    first = loader(table, workers, **options)
    full = batches(first)
    rows = iter(first)
    seen = [next(rows)["id"].tolist() for _ in range(26)]
    state = through_json(first.state_dict())
    del rows, first

    new = loader(table, workers, **options)
    new.load_state_dict(state)
    epochs = [batches(new) for _ in range(3)]
    assert [len(epoch) for epoch in epochs] == [6, 32, 32]
    assert seen + epochs[0] == full
    assert epochs[1] == epochs[2] == full


@pytest.mark.parametrize("stop", [0, 1, 2, 3, 31, 32])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_state_is_exact_before_every_worker_has_yielded(table, workers, stop):
    first = loader(table, workers)
    rows = iter(first)
    seen = [next(rows)["id"].tolist() for _ in range(stop)]
    state = through_json(first.state_dict())
    del rows
    new = loader(table, workers)
    new.load_state_dict(state)
    assert through_json(new.state_dict())  # right after the resume, too
    rest = batches(new)
    assert seen + rest == batches(loader(table, workers))
    assert len(batches(new)) == 32


def test_a_short_last_batch_ends_one_pass_only(tmp_path):
    path = make_table(tmp_path / "odd.lance", 65, 16)

    def build():
        return StatefulDataLoader(hls.from_lance(path), batch_size=4, num_workers=0)

    first = build()
    rows = iter(first)
    for _ in range(17):
        next(rows)
    new = build()
    new.load_state_dict(through_json(first.state_dict()))
    assert [len(batches(new)) for _ in range(3)] == [0, 17, 17]


@pytest.mark.parametrize("workers", [0, 2])
def test_case_6_after_a_state_at_the_end_at_most_one_pass_is_empty(table, workers):
    first = loader(table, workers)
    full = batches(first)
    state = through_json(first.state_dict())
    new = loader(table, workers)
    new.load_state_dict(state)
    epochs = [batches(new) for _ in range(3)]
    assert epochs[0] in ([], full)
    assert epochs[1] == epochs[2] == full


def test_case_19_set_epoch_reaches_persistent_workers(table):
    persistent = loader(table, 2, torch.utils.data.DataLoader, persistent_workers=True)
    orders = []
    for epoch in (0, 1, 0):
        persistent.dataset.set_epoch(epoch)
        orders.append(batches(persistent))
    assert orders[0] == orders[2] != orders[1]


def test_a_map_function_and_a_format_work_in_workers(table):
    ds = hls.from_lance(table, num_splits=8).map(_negate).with_format("torch")
    found = torch.utils.data.DataLoader(
        ds, batch_size=4, num_workers=2, multiprocessing_context="forkserver"
    )
    assert sorted(-i for batch in found for i in batch["minus"].tolist()) == list(range(64))


def _negate(row):
    return {"minus": -row["id"]}
