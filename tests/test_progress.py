"""The progress bar: right totals and places over epochs, ranks and resumes; states as ever."""

import io
from itertools import islice

import pytest
import torch
from helpers import ids, make_table, through_json
from tqdm import tqdm

import hf_lance_stream as hls
from hf_lance_stream.progress import Progress


@pytest.fixture
def small(tmp_path):
    return make_table(tmp_path / "t.lance", 50, 20, ["id", "label"])


def build(path, **options):
    return hls.from_lance(path, num_splits=4, shuffle_seed=1, shuffle_clump_size=3, **options)


def quiet(source, *args, **options):
    """A bar that is really drawn, on paper nobody reads, at every step."""
    return hls.progress(source, *args, file=io.StringIO(), mininterval=0, miniters=1, **options)


def test_the_items_and_the_states_are_those_of_the_source_at_every_position(small):
    bare, shown = build(small), build(small)
    bar = quiet(shown)
    for n, (row, other) in enumerate(zip(iter(bare), bar, strict=True), start=1):
        assert other == row
        assert shown.state_dict() == bare.state_dict()
        assert shown.state_dict()["examples_iterable"]["position"] == n
        assert bar.n == bar.tqdm.n == n
    assert bar.n == bar.total == 48


def test_a_resume_at_every_position_goes_on_exactly_and_at_the_right_place(tmp_path):
    path = make_table(tmp_path / "tiny.lance", 18, 5)
    whole = ids(build(path))
    assert len(whole) == 16
    for position in range(17):
        first = build(path)
        seen = [row["id"] for row in islice(iter(quiet(first)), position)]
        state = through_json(first.state_dict())
        second = build(path)
        bar = quiet(second, epochs=2)
        second.load_state_dict(state)  # after the bar was made
        rows = iter(bar)
        assert (bar.n, bar.total) == (position, 32)
        assert seen + [row["id"] for row in rows] == whole
        assert bar.n == 16


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("unit", ["rows", "batches"])
def test_the_states_of_a_loader_are_the_same_through_the_bar(small, num_workers, unit):
    def loader():
        ds = build(small).with_format("torch")
        return hls.stateful_dataloader(ds, batch_size=9, num_workers=num_workers)

    bare, shown = loader(), loader()
    bar = quiet(shown, unit=unit)
    expected = iter(bare)
    for n, batch in enumerate(bar, start=1):
        assert torch.equal(batch["id"], next(expected)["id"])
        assert shown.state_dict() == bare.state_dict()
        assert bar.n == (n if unit == "batches" else min(48, 9 * n))
    assert bar.n == bar.total == (6 if unit == "batches" else 48)


@pytest.mark.parametrize("unit", ["rows", "batches"])
@pytest.mark.parametrize("drop_last", [False, True])
def test_one_bar_counts_over_epochs_and_resumes(small, unit, drop_last):
    def loader():
        ds = build(small)
        return hls.stateful_dataloader(ds, batch_size=9, drop_last=drop_last)

    per_epoch = {
        ("rows", False): 48,
        ("rows", True): 45,
        ("batches", False): 6,
        ("batches", True): 5,
    }[unit, drop_last]
    first = loader()
    first.set_epoch(1)
    bar = quiet(first, 3, unit=unit)
    list(islice(bar, 2))
    assert (bar.n, bar.total) == (per_epoch + (2 if unit == "batches" else 18), 3 * per_epoch)
    second = loader()
    second.load_state_dict(through_json(first.state_dict()))
    resumed = quiet(second, 3, unit=unit)
    counts = []
    for epoch in range(second.dataset.epoch, 3):
        second.set_epoch(epoch)
        for _ in resumed:
            counts.append(resumed.n)
    assert counts[0] == bar.n + (1 if unit == "batches" else 9)
    assert sorted(counts) == counts
    assert counts[-1] == resumed.n == resumed.total == 3 * per_epoch
    assert len(counts) == (6 - drop_last) * 2 - 2


def test_a_resume_in_mid_batch_ends_at_the_total(small):
    one = build(small)
    list(islice(iter(one), 10))
    loader = hls.stateful_dataloader(build(small), batch_size=9)
    loader.load_state_dict(one.state_dict())
    for unit, start, end in (("rows", 10, 48), ("batches", 1, 6)):
        loader.load_state_dict(one.state_dict())
        bar = quiet(loader, unit=unit)
        batches = iter(bar)
        assert bar.n == start
        list(batches)
        assert bar.n == bar.total == end


@pytest.mark.parametrize("tail", ["drop", "pad", "keep"])
@pytest.mark.parametrize("how", ["options", "shard", "by_node"])
def test_rank_0_counts_the_rows_of_all_ranks_and_the_others_show_nothing(small, tail, how):
    from datasets.distributed import split_dataset_by_node

    def part(rank):
        whole = build(small, tail=tail)
        if how == "options":
            return build(small, tail=tail, rank=rank, world_size=2)
        return whole.shard(2, rank) if how == "shard" else split_dataset_by_node(whole, rank, 2)

    expected = {"drop": 48, "pad": 52, "keep": 50}[tail]
    bars = [quiet(part(rank), epochs=2) for rank in range(2)]
    for bar in bars:
        rows = iter(bar)
        next(rows)
        assert bar.n in (1, 2)  # one each; "keep" may have another share
        list(rows)
        assert (bar.n, bar.total) == (expected, 2 * expected)
    assert [bar.tqdm.disable for bar in bars] == [False, True]
    mine = quiet(part(1), all_ranks=False, rank=0)
    assert len(list(islice(mine, 5))) == mine.n == 5
    assert mine.total == len(part(1))
    assert not mine.tqdm.disable


def test_a_state_of_two_ranks_shows_on_one(small):
    ranks = [build(small, rank=rank, world_size=2) for rank in range(2)]
    for rank, ds in enumerate(ranks):
        assert len(list(islice(iter(ds), 5 + rank))) == 5 + rank
    whole = build(small)
    whole.load_state_dict(hls.merge_state_dicts([ds.state_dict() for ds in ranks]))
    bar = quiet(whole)
    rest = iter(bar)
    assert (bar.n, bar.total) == (11, 48)
    assert len(list(rest)) == 37


def test_natural_shards_of_ranks_count_all_rows(small):
    bar = quiet(hls.from_lance(small).shard(2, 0))  # 40 of 50 rows
    assert len(list(bar)) == 40
    assert bar.n == bar.total == 50


def test_a_filter_has_no_total_and_counts_what_comes(small):
    ds = build(small).filter(lambda row: row["label"] == 0)
    paper = io.StringIO()
    bar = hls.progress(ds, epochs=2, file=paper, mininterval=0, miniters=1)
    count = 0
    for epoch in range(2):
        ds.set_epoch(epoch)
        for _ in bar:
            count += 1
            assert (bar.n, bar.total) == (count, None)
    assert 10 < count <= 20
    assert f"{count} rows [" in paper.getvalue()
    assert "%" not in paper.getvalue()


def test_a_loader_with_a_filter_counts_batches(small):
    loader = hls.stateful_dataloader(build(small).filter(lambda row: row["label"] < 3), 7)
    paper = io.StringIO()
    bar = hls.progress(loader, file=paper)
    assert len(list(bar)) == bar.n > 3
    assert bar.total is None
    assert "batches" in paper.getvalue()
    with pytest.raises(ValueError, match=r"`unit` must be \"batches\".*filter: got unit='rows'"):
        hls.progress(loader, unit="rows")


def test_known_lengths_of_take_and_repeat(small):
    bar = quiet(build(small).take(20).repeat(2))
    assert len(list(bar)) == bar.n == bar.total == 40
    ds = build(small).take(20)
    list(islice(iter(ds), 5))
    resumed = build(small).take(20)
    resumed.load_state_dict(ds.state_dict())
    bar = quiet(resumed)
    assert len(list(bar)) == bar.n == 15  # how far it was cannot be told
    assert bar.total is None
    again = quiet(resumed)
    assert len(list(again)) == again.n == again.total == 20


def test_map_and_batches_of_a_dataset(small):
    ds = build(small).map(lambda row: {"two": row["id"] * 2}).with_format("torch")
    bar = quiet(ds)
    counts = [(len(batch["two"]), bar.n) for batch in bar.iter(10)]
    assert counts == [(10, 10), (10, 20), (10, 30), (10, 40), (8, 48)]
    counts = [bar.n for _ in bar.iter(10, drop_last_batch=True)]
    assert counts == [10, 20, 30, 40]
    assert bar.total == 40


def test_each_pass_has_a_bar_of_its_own_without_epochs(small):
    ds = build(small)
    bar = quiet(ds)
    list(bar)
    assert (bar.n, bar.total) == (48, 48)
    assert bar.tqdm is None  # closed
    ds.set_epoch(5)
    rows = iter(bar)
    assert (bar.n, bar.total) == (0, 48)
    list(rows)
    assert (bar.n, bar.total) == (48, 48)


def test_a_pass_that_was_left_starts_again(small):
    ds = build(small)
    bar = quiet(ds, epochs=2)
    list(islice(bar, 7))
    shown = bar.tqdm
    rows = iter(bar)
    assert bar.n == shown.n == 0
    next(rows)
    assert bar.tqdm is shown
    bar.close()
    assert shown.disable
    assert bar.tqdm is None


def test_what_was_done_before_a_resume_does_not_count_for_the_speed(small):
    ds = build(small)
    bar = quiet(ds, epochs=1000)
    next(iter(bar))
    ds.set_epoch(900)
    list(islice(bar, 2))
    assert bar.tqdm.n - bar.tqdm.initial == 3
    assert bar.tqdm.n == 900 * 48 + 2


def test_the_bar_is_written_with_total_and_unit(small):
    paper = io.StringIO()
    ds = build(small)
    ds.set_epoch(1)
    bar = hls.progress(ds, epochs=2, file=paper, desc="train", mininterval=0, miniters=1)
    list(bar)
    text = paper.getvalue()
    assert "train:  50%" in text
    assert "48/96" in text.split("\r")[1]
    assert "train: 100%" in text
    assert "96/96" in text
    assert "rows/s" in text


def test_disable_hides_it_and_counts_all_the_same(small):
    paper = io.StringIO()
    bar = hls.progress(build(small), disable=True, file=paper)
    assert len(list(bar)) == bar.n == bar.total == 48
    assert paper.getvalue() == ""
    second = hls.progress(build(small), rank=1, file=paper)
    assert len(list(second)) == 48
    assert paper.getvalue() == ""
    third = hls.progress(build(small), rank=1, disable=False, file=paper)
    assert len(list(third)) == 48
    assert paper.getvalue() != ""


@pytest.mark.parametrize("rank", [0, 1])
def test_the_process_group_says_which_rank_it_is(small, monkeypatch, rank):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
    bar = quiet(build(small, rank=1 - rank, world_size=2))  # such as with tensor parallelism
    iter(bar)
    assert bar.tqdm.disable == (rank == 1)


def test_it_is_a_tqdm_bar(small):
    bar = quiet(build(small))
    for _ in bar:
        assert isinstance(bar.tqdm, tqdm)
        bar.tqdm.set_postfix(loss=0.5)
    assert isinstance(bar, Progress)


def test_bad_arguments_are_refused(small):
    ds = build(small)
    with pytest.raises(ValueError, match="`source` must be a loader of"):
        hls.progress([1, 2])
    with pytest.raises(ValueError, match="`epochs` must be an integer in"):
        hls.progress(ds, epochs=0)
    with pytest.raises(ValueError, match=r"`unit` must be .* got unit='steps'"):
        hls.progress(ds, unit="steps")
    with pytest.raises(ValueError, match='`unit` must be "rows" for a dataset'):
        hls.progress(ds, unit="batches")
    with pytest.raises(ValueError, match="`total` is set by progress"):
        hls.progress(ds, total=5)
    with pytest.raises(ValueError, match="`iter` is for datasets"):
        hls.progress(hls.stateful_dataloader(ds, 4)).iter(3)
