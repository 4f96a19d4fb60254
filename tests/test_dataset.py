"""`from_lance` and `LanceIterableDataset`."""

import copy
import inspect
import pickle
import shutil
from itertools import islice

import datasets
import lance
import numpy as np
import pyarrow as pa
import pytest
from datasets.distributed import split_dataset_by_node
from helpers import cut, ids, make_table, through_json
from scipy import stats

import hf_lance_stream as hls
from hf_lance_stream import dataset as dataset_module
from hf_lance_stream.source import Source

PREFIXES = (0, 1, 15, 16, 137, 249, 250, 999, 1000)


def shuffled(table, **options):
    return hls.from_lance(table, **{"shuffle_seed": 3, "shuffle_clump_size": 16, **options})


# Resume.


@pytest.mark.parametrize("num_splits", [None, 1, 8, 48])
def test_case_1_a_resumed_shuffle_loses_and_replays_nothing(table, num_splits):
    def build():
        return shuffled(table, num_splits=num_splits)

    full = ids(build())
    assert len(set(full)) == len(full) >= 1000 - 40
    for k in PREFIXES:
        assert cut(build, min(k, len(full))) == full


def test_every_one_of_1000_positions_resumes_exactly(table):
    def build():
        return shuffled(table, num_splits=8)

    full = ids(build())
    ds = build()
    states = [through_json(ds.state_dict())]
    for row in ds:
        assert row["id"] == full[len(states) - 1]
        states.append(through_json(ds.state_dict()))
    assert len(states) == 1001
    new = build()
    for k, state in enumerate(states):
        new.load_state_dict(state)
        assert ids(new) == full[k:], k


def test_a_chain_of_resumes_is_the_uninterrupted_pass(table):
    full = ids(shuffled(table))
    seen, state = [], None
    for step in (1, 63, 64, 65, 200, 7, 300, 300):
        ds = shuffled(table)
        if state is not None:
            ds.load_state_dict(state)
        seen += [row["id"] for row in islice(ds, step)]
        state = through_json(ds.state_dict())
    ds = shuffled(table)
    ds.load_state_dict(state)
    assert seen + ids(ds) == full


def test_case_3_loading_alone_restores_the_epoch(table):
    full = ids(shuffled(table, epoch=1))
    ds = shuffled(table)
    ds.set_epoch(1)
    seen = [row["id"] for row in islice(ds, 100)]
    state = through_json(ds.state_dict())

    new = shuffled(table)
    new.load_state_dict(state)
    assert new.epoch == 1
    assert seen + ids(new) == full

    new = shuffled(table)
    new.load_state_dict(state)
    new.set_epoch(1)  # the same epoch does not rewind
    assert seen + ids(new) == full

    new = shuffled(table)
    new.load_state_dict(state)
    new.set_epoch(2)  # another one starts afresh
    assert ids(new) == ids(shuffled(table, epoch=2))
    new.set_epoch(1)  # and the state is not remembered
    assert ids(new) == full


def test_case_4_a_pass_after_a_resumed_one_is_whole(table):
    ds = shuffled(table)
    _ = next(iter(ds))
    state = ds.state_dict()
    new = shuffled(table)
    new.load_state_dict(state)
    assert [len(ids(new)) for _ in range(3)] == [999, 1000, 1000]


def test_case_6_a_state_at_the_end_gives_one_empty_rest_then_whole_passes(table):
    ds = shuffled(table)
    ids(ds)
    new = shuffled(table)
    new.load_state_dict(through_json(ds.state_dict()))
    assert [len(ids(new)) for _ in range(3)] == [0, 1000, 1000]


def test_the_state_before_a_pass_is_the_start_of_its_epoch(table):
    ds = shuffled(table)
    ids(ds)
    ds.set_epoch(1)
    new = shuffled(table)
    new.load_state_dict(through_json(ds.state_dict()))
    assert ids(new) == ids(shuffled(table, epoch=1))


def test_the_state_right_after_loading_is_what_was_loaded(table):
    ds = shuffled(table)
    _ = list(islice(ds, 77))
    state = through_json(ds.state_dict())
    new = shuffled(table)
    new.load_state_dict(state)
    assert through_json(new.state_dict()) == state


def test_case_9_resuming_reads_as_much_at_the_end_as_at_the_start(tmp_path, monkeypatch):
    path = make_table(tmp_path / "big.lance", 1_000_000, 100_000)
    ds = shuffled(path, num_splits=8, shuffle_clump_size=64)
    state = through_json(ds.state_dict())
    read = []
    original = Source.read
    monkeypatch.setattr(
        Source, "read", lambda self, rows: read.append(rows.size) or original(self, rows)
    )
    counts = []
    for position in (10, 990_000):
        for inner in (state["examples_iterable"],):
            inner["position"] = position
        new = shuffled(path, num_splits=8, shuffle_clump_size=64)
        read.clear()
        new.load_state_dict(state)
        rows = iter(new)
        next(rows)
        rows.close()
        counts.append(sum(read))
    # How many of the chunks read ahead were begun before the close is a matter of timing.
    assert min(counts) >= 1
    assert max(counts) - min(counts) <= 8192  # one read


@pytest.mark.parametrize("format_type", [None, "torch", "numpy", "arrow", "pandas"])
def test_case_27_batches_have_the_size_asked_for(tmp_path, format_type):
    path = make_table(tmp_path / "t.lance", 25, 10)

    def sizes(batches):
        return [len(batch["id"]) for batch in batches]

    for ds in (
        hls.from_lance(path).with_format(format_type),
        hls.from_lance(path).filter(lambda row: True).with_format(format_type),
    ):
        assert sizes(ds.iter(batch_size=8)) == [8, 8, 8, 1]
        assert sizes(ds.iter(batch_size=8, drop_last_batch=True)) == [8, 8, 8]
    ds = hls.from_lance(path).with_format(format_type)
    _ = list(islice(ds, 5))  # stops inside a batch, by rows
    new = hls.from_lance(path).with_format(format_type)
    new.load_state_dict(through_json(ds.state_dict()))
    assert sizes(new.iter(batch_size=8)) == [8, 8, 4]
    _ = list(islice(ds.iter(batch_size=8), 2))  # stops by batches, goes on by rows
    new.load_state_dict(through_json(ds.state_dict()))
    assert [int(np.asarray(row["id"]).reshape(-1)[0]) for row in new] == [*range(16, 25)]


@pytest.mark.parametrize("look", [len, repr, list, lambda ds: ds.describe()])
def test_looking_at_a_dataset_changes_no_state(table, look):
    def build():
        return split_dataset_by_node(shuffled(table, num_splits=24), rank=1, world_size=2)

    full = ids(build())
    ds = build()
    rows = iter(ds)
    _ = list(islice(rows, 10))
    if look is not list:
        look(ds)
    state = through_json(ds.state_dict())
    new = build()
    new.load_state_dict(state)
    if look is not list:
        look(new)
    assert [row["id"] for row in list(new)] == full[10:]


def test_a_state_of_other_steps_is_refused_and_nothing_restarts(table):
    plain, mapped = shuffled(table), shuffled(table).map(lambda row: {"y": 1})
    for ds, other in (
        (plain, mapped),
        (mapped, plain),
        (plain.take(10), plain),
        (plain, plain.skip(3)),
    ):
        _ = next(iter(ds))
        state = through_json(ds.state_dict())
        if ds is plain and other is mapped:
            continue  # it counts rows of the table, and map keeps them
        with pytest.raises(ValueError, match=r"other steps|does not keep"):
            other.load_state_dict(state)


def test_a_state_of_the_bare_dataset_is_portable_to_row_for_row_steps(table):
    full = ids(shuffled(table))
    ds = shuffled(table)
    _ = list(islice(ds, 137))
    for other in (
        shuffled(table).map(lambda row: {"y": 1}),
        shuffled(table).select_columns("id"),
        shuffled(table).with_format("torch"),
        shuffled(table).with_format("numpy").map(lambda row: row),
    ):
        other.load_state_dict(through_json(ds.state_dict()))
        assert ids(other) == full[137:]


def test_a_state_of_a_table_made_anew_at_the_same_path_is_refused(tmp_path):
    path = make_table(tmp_path / "t.lance", 100, 50)
    state = through_json(shuffled(path).state_dict())
    shutil.rmtree(path)
    make_table(path, 100, 50, start=1000)
    with pytest.raises(ValueError, match="files: saved"):
        shuffled(path).load_state_dict(state)


def test_strict_false_reaches_every_table_of_a_mix(tmp_path):
    one, two = (make_table(tmp_path / f"{n}.lance", 100, 50) for n in "ab")
    ds = datasets.concatenate_datasets([hls.from_lance(one), hls.from_lance(one)])
    _ = list(islice(ds, 10))
    other = datasets.concatenate_datasets([hls.from_lance(two), hls.from_lance(two)])
    with pytest.raises(ValueError, match="table: saved"):
        other.load_state_dict(ds.state_dict())
    with pytest.warns(UserWarning, match="table: saved"):
        other.load_state_dict(ds.state_dict(), strict=False)
    assert ids(other) == [*range(10, 100), *range(100)]


@pytest.mark.parametrize("wrap", [lambda d: d, lambda d: d.take(20), lambda d: d.repeat(2)])
def test_batches_without_the_last_short_one_resume(table, wrap):
    batches = [batch["id"] for batch in wrap(shuffled(table)).iter(8, drop_last_batch=True)]
    for k in (0, 1, 2):
        ds = wrap(shuffled(table))
        it = ds.iter(8, drop_last_batch=True)
        _ = list(islice(it, k))
        new = wrap(shuffled(table))
        new.load_state_dict(through_json(ds.state_dict()))
        assert [batch["id"] for batch in new.iter(8, drop_last_batch=True)] == batches[k:]


def test_the_end_of_the_table_is_not_the_end_of_a_repeated_pass(table):
    ds = shuffled(table).repeat(2)
    rows = iter(ds)
    seen = [next(rows)["id"] for _ in range(1000)]
    new = shuffled(table).repeat(2)
    new.load_state_dict(through_json(ds.state_dict()))
    assert ids(new) == seen


def test_another_epoch_lets_go_of_a_loaded_state_for_good(table):
    ds = shuffled(table, epoch=2)
    _ = list(islice(ds, 10))
    new = shuffled(table)
    new.load_state_dict(ds.state_dict())
    new.set_epoch(1)
    new.set_epoch(2)
    assert len(ids(new)) == 1000


def test_the_number_of_shards_is_a_plain_number(table):
    assert shuffled(table, num_splits=8).num_shards % 3 == 2
    assert type(shuffled(table).num_shards) is int


def test_rows_that_compress_well_are_read_in_chunks_of_few(tmp_path):
    rows = [bytes([i % 3]) * 500_000 for i in range(200)]
    path = str(tmp_path / "masks.lance")
    lance.write_dataset(pa.table({"id": range(200), "mask": rows}), path)
    ds = hls.from_lance(path, shuffle_seed=1, num_splits=8)
    next(iter(ds))
    assert ds.state_dict()["examples_iterable"]["chunk_rows"] <= 33  # 16 MiB


# Shuffle and epochs.


def test_case_16_an_unseeded_shuffle_is_refused(table):
    with pytest.raises(ValueError, match="seed"):
        hls.from_lance(table).shuffle()
    with pytest.raises(ValueError, match="seed"):
        hls.from_lance(table).shuffle(generator=np.random.default_rng())
    mixed = datasets.interleave_datasets([hls.from_lance(table), hls.from_lance(table)])
    with pytest.raises(ValueError, match="seed"):
        mixed.shuffle()


def test_every_way_to_shuffle_with_a_seed_gives_the_same_order(table):
    full = ids(hls.from_lance(table, shuffle_seed=7, shuffle_clump_size=16))
    plain = hls.from_lance(table, shuffle_clump_size=16)
    assert ids(plain.shuffle(7)) == full
    assert ids(plain.shuffle(generator=np.random.default_rng(7))) == full
    assert ids(hls.from_lance(table).shuffle(seed=7, shuffle_clump_size=16)) == full
    assert ids(plain.map(lambda row: row).shuffle(7)) == full
    assert ids(plain.select_columns("id").shuffle(7)) == full
    assert ids(plain.shuffle(8)) != full


def test_case_20_seed_and_epoch_are_not_added_up(table):
    orders = [
        tuple(ids(shuffled(table, shuffle_seed=s, epoch=e))) for s in (0, 1, 2) for e in (0, 1, 2)
    ]
    assert len(set(orders)) == 9


def test_set_epoch_changes_the_order_and_nothing_else(table):
    ds = shuffled(table)
    orders = []
    for epoch in (0, 1, 0, 2):
        ds.set_epoch(epoch)
        orders.append(ids(ds))
    assert orders[0] == orders[2] != orders[1] != orders[3]
    assert all(sorted(order) == list(range(1000)) for order in orders)


def test_an_epoch_does_not_shuffle_what_is_not_shuffled(table):
    for ds in (hls.from_lance(table), hls.from_lance(table, num_splits=8)):
        first = ids(ds)
        ds.set_epoch(3)
        assert ids(ds) == first


def test_the_epoch_reaches_through_every_wrapper_and_stays_frozen_under_skip(table):
    ds = shuffled(table)
    expected = ids(shuffled(table, epoch=2))
    for wrapped in (
        ds.map(lambda row: row),
        ds.with_format("torch"),
        ds.select_columns("id"),
        split_dataset_by_node(ds, rank=0, world_size=1),
    ):
        wrapped.set_epoch(2)
        assert ids(wrapped) == expected
    frozen = ds.skip(10)
    frozen.set_epoch(2)
    assert ids(frozen) == ids(ds)[10:]
    mixed = datasets.interleave_datasets([ds, ds])
    mixed.set_epoch(2)
    assert ids(mixed)[::2] == expected


def test_the_epoch_of_a_dataset_survives_its_transformations(table):
    ds = shuffled(table, epoch=2)
    assert ds.map(lambda row: row).epoch == ds.shuffle(3).epoch == ds.shard(2, 0).epoch == 2


def test_a_shuffle_has_no_buffer_and_says_so(table):
    with pytest.warns(UserWarning, match="buffer_size has no effect"):
        ds = hls.from_lance(table).shuffle(seed=1, buffer_size=10)
    assert np.abs(np.array(ids(ds)) - np.arange(1000)).max() > 500


def test_a_frozen_order_is_shuffled_through_a_buffer_as_in_datasets(table):
    ds = hls.from_lance(table).take(100).shuffle(seed=1, buffer_size=50)
    assert isinstance(ds, hls.LanceIterableDataset)
    assert sorted(ids(ds)) == list(range(100)) != ids(ds)


def test_a_buffered_shuffle_by_datasets_itself_still_yields_every_row_once(table):
    mixed = datasets.concatenate_datasets([hls.from_lance(table), hls.from_lance(table)])
    rows = ids(mixed.shuffle(seed=1, buffer_size=100))
    assert sorted(rows) == sorted([*range(1000)] * 2)
    plain = datasets.IterableDataset.shuffle(hls.from_lance(table), seed=1, buffer_size=100)
    assert sorted(ids(plain)) == list(range(1000))


def test_case_22_batches_are_no_near_neighbours(tmp_path):
    path = make_table(tmp_path / "t.lance", 100_000, 1000)
    order = np.array(
        ids(hls.from_lance(path, shuffle_seed=1, shuffle_clump_size=16, num_splits=48))
    )
    assert abs(stats.spearmanr(order, np.arange(order.size)).statistic) < 0.02
    fragments = order[: order.size // 256 * 256].reshape(-1, 256) // 1000
    assert min(len(set(batch)) for batch in fragments.tolist()) > 10


# Shards.


@pytest.mark.parametrize(
    "wrap",
    [
        lambda ds: ds,
        lambda ds: ds.map(lambda row: row),
        lambda ds: ds.select_columns("id"),
        lambda ds: ds.with_format("numpy"),
        lambda ds: split_dataset_by_node(ds, rank=1, world_size=2),
    ],
    ids=["none", "map", "select_columns", "with_format", "split_by_node"],
)
@pytest.mark.parametrize("options", [{}, {"num_splits": 8, "shuffle_seed": 1}])
def test_case_18_reshard_gives_more_shards_of_the_same_rows(table, wrap, options):
    ds = wrap(hls.from_lance(table, **options))
    more = ds.reshard()
    assert more.num_shards > ds.num_shards
    assert sorted(ids(more)) == sorted(ids(ds))
    assert more.features == ds.features
    if not options:
        whole, again = wrap(hls.from_lance(table)), wrap(hls.from_lance(table).reshard().reshard())
        assert again.num_shards == 4 * whole.num_shards


def test_reshard_with_a_number_sets_the_splits(table):
    ds = hls.from_lance(table, shuffle_seed=1).reshard(num_splits=24)
    assert ids(ds) == ids(hls.from_lance(table, shuffle_seed=1, num_splits=24))
    with pytest.raises(ValueError, match="before the dataset is divided"):
        ds.shard(2, 0).reshard(num_splits=48)
    with pytest.raises(ValueError, match="num_splits"):
        ds.reshard(num_splits=2000)


@pytest.mark.parametrize(
    "divide",
    [
        lambda ds, rank, size: ds.shard(size, rank),
        lambda ds, rank, size: split_dataset_by_node(ds, rank, size),
    ],
    ids=["shard", "split_by_node"],
)
def test_ranks_get_contiguous_groups_of_splits(table, divide):
    whole = np.array(ids(shuffled(table, num_splits=24)))
    cycles = whole.reshape(-1, 24)
    for size in (1, 2, 3, 4, 8, 24):
        for rank in range(size):
            got = ids(divide(shuffled(table, num_splits=24), rank, size))
            group = 24 // size
            assert got == cycles[:, rank * group : (rank + 1) * group].reshape(-1).tolist()


def test_from_lance_divides_by_rank_like_the_others(table):
    for rank in range(2):
        ds = shuffled(table, num_splits=24, rank=rank, world_size=2)
        assert ids(ds) == ids(shuffled(table, num_splits=24).shard(2, rank))


def test_a_dataset_split_by_node_resumes_like_any_other(table):
    def build():
        return split_dataset_by_node(shuffled(table, num_splits=24), rank=1, world_size=2)

    ds = build()
    ds.set_epoch(1)
    full = ids(ds)
    assert len(ds) == len(full) == 492
    _ = list(islice(ds, 100))
    new = build()
    new.load_state_dict(through_json(ds.state_dict()))
    assert [ids(new), ids(new)] == [full[100:], full]
    with pytest.raises(ValueError, match="splits 12 to 23, this reader has splits 0 to 11"):
        split_dataset_by_node(shuffled(table, num_splits=24), rank=0, world_size=2).load_state_dict(
            ds.state_dict()
        )


@pytest.mark.parametrize("options", [{"num_splits": 48}, {"shuffle_seed": 1}, {}])
def test_case_15_ranks_that_do_not_divide_the_shards_are_refused(table, options):
    ds = hls.from_lance(table, **options)
    with pytest.raises(ValueError, match="world_size=5"):
        split_dataset_by_node(ds, rank=0, world_size=5)
    with pytest.raises(ValueError, match="world_size=5"):
        split_dataset_by_node(ds.map(lambda row: row), rank=0, world_size=5)
    with pytest.raises(ValueError, match="world_size=5"):
        hls.from_lance(table, rank=0, world_size=5, **options)


# Length and words.


def test_the_length_is_the_number_of_rows_that_come(table):
    cases = [
        hls.from_lance(table),
        hls.from_lance(table, filter="id % 7 = 0"),
        hls.from_lance(table, num_splits=48),
        hls.from_lance(table, num_splits=48, tail="keep"),
        hls.from_lance(table, num_splits=48, tail="pad"),
        hls.from_lance(table, num_splits=48, tail="keep").shard(4, 3),
        hls.from_lance(table, num_splits=48, tail="pad").shard(4, 3),
        hls.from_lance(table, shuffle_seed=1),
        hls.from_lance(table, shuffle_seed=1).shard(4, 0),
        hls.from_lance(table).take(30).skip(7),
        hls.from_lance(table).take(5000),
        hls.from_lance(table).skip(5000),
        hls.from_lance(table).repeat(3),
        hls.from_lance(table).map(lambda row: {"n": 1}).with_format("numpy").select_columns("id"),
    ]
    for ds in cases:
        assert len(ds) == len(list(ds)), ds


def test_an_unknown_length_is_a_type_error_and_the_dataset_is_still_true(table):
    ds = hls.from_lance(table)
    for unknown in (
        ds.filter(lambda row: True),
        ds.map(lambda batch: batch, batched=True),
        ds.batch(8),
        ds.repeat(None),
    ):
        with pytest.raises(TypeError, match="unknown"):
            len(unknown)
        assert unknown
    assert bool(hls.from_lance(table, filter="id < 0")) is True
    assert len(hls.from_lance(table, filter="id < 0")) == 0


def test_describe_says_in_words_what_is_read(table):
    ds = hls.from_lance(
        table, filter="id < 990", num_splits=48, shuffle_seed=5, shuffle_clump_size=16
    )
    text = ds.describe()
    for part in (
        "pets.lance",
        "version 1",
        "Rows: 990",
        "'id < 990'",
        "48",
        "20 rows each",
        "30 rows dropped",
        "clumps of 16",
        "seed 5",
        "1, 2, 3, 4, 6, 8, 12, 16, 24, 48",
    ):
        assert part in text, (part, text)
    assert "natural shards: 4" in hls.from_lance(table).describe()
    assert "This reader: splits 12 to 23" in ds.shard(4, 1).describe()
    for part in ("LanceIterableDataset", "'id', 'text', 'label'", "num_rows: 960", "seed 5"):
        assert part in repr(ds)


@pytest.mark.parametrize(
    ("tail", "dropped", "padded"), [("drop", 40, 0), ("keep", 0, 0), ("pad", 0, 8), (None, 40, 0)]
)
def test_case_34_what_is_dropped_or_padded_is_logged_once_and_readable(
    tmp_path, caplog, tail, dropped, padded
):
    ds = hls.from_lance(make_table(tmp_path / "t.lance", 1000, 250), num_splits=48, tail=tail)
    assert (ds.dropped_rows, ds.padded_rows) == (dropped, padded)
    assert len(ids(ds)) == len(ids(ds)) == 1000 - dropped + padded
    text = {40: "40 of 1000 rows are left out", 0: ""}[dropped] or (
        "8 of 1000 rows are repeated" if padded else ""
    )
    assert [record.message for record in caplog.records if "rows are" in record.message] == [
        message for message in caplog.messages if text and text in message
    ]
    assert len([m for m in caplog.messages if "rows are" in m]) == bool(dropped or padded)


# The class.


def test_every_transformation_method_of_datasets_keeps_the_class():
    wrapped = {
        name
        for name, method in inspect.getmembers(datasets.IterableDataset, inspect.isfunction)
        if inspect.signature(method).return_annotation in ("IterableDataset", "'IterableDataset'")
        and "self" in inspect.signature(method).parameters
        and not name.startswith("_")
    }
    ours = {*dataset_module.TRANSFORMATIONS, "batch", "shuffle", "shard", "reshard"}
    assert wrapped == ours


def test_a_state_loaded_before_a_transformation_is_not_lost_in_silence(table):
    ds = shuffled(table)
    ds.load_state_dict(ds.state_dict())
    with pytest.warns(UserWarning, match="transform first"):
        ds.map(lambda row: row)


def test_a_strict_false_load_warns_and_keeps_the_position(table):
    ds = shuffled(table)
    _ = list(islice(ds, 100))
    other = shuffled(table, shuffle_seed=4)
    with pytest.warns(UserWarning, match="shuffle_seed: saved 3, now 4"):
        other.load_state_dict(ds.state_dict(), strict=False)
    assert ids(other) == ids(shuffled(table, shuffle_seed=4))[100:]


def test_a_refused_state_leaves_the_dataset_as_it_was(table):
    ds = shuffled(table)
    state = shuffled(table, shuffle_seed=4, epoch=2).state_dict()
    with pytest.raises(ValueError, match="shuffle_seed"):
        ds.load_state_dict(state)
    assert ds.epoch == 0
    assert ids(ds) == ids(shuffled(table))


def test_case_29_a_dataset_pickles_before_and_during_a_pass(table):
    ds = shuffled(table)
    full = ids(ds)
    rows = iter(ds)
    next(rows)
    for new in (pickle.loads(pickle.dumps(ds)), copy.deepcopy(ds)):
        assert ids(new) == full
    assert len(pickle.dumps(ds)) < 10_000
    state = ds.state_dict()
    loaded = pickle.loads(pickle.dumps(ds))
    loaded.load_state_dict(state)
    assert ids(pickle.loads(pickle.dumps(loaded))) == full[1:]


def test_case_32_an_exception_in_a_map_function_propagates(table):
    def fail(row):
        if row["id"] == 500:
            raise StopIteration("bad row")
        return row

    with pytest.raises(RuntimeError, match="StopIteration"):
        ids(hls.from_lance(table).map(fail))

    def fail_differently(row):
        raise KeyError("missing")

    with pytest.raises(KeyError, match="missing"):
        ids(hls.from_lance(table).map(fail_differently))


def test_case_33_features_are_known_before_and_after_every_operation(table):
    ds = hls.from_lance(table, columns=["id"])
    assert list(ds.features) == ["id"]
    assert list(next(iter(ds))) == ["id"]
    assert list(ds.with_format("torch").take(3).skip(1).repeat(2).shuffle(seed=1).features) == [
        "id"
    ]
    assert list(ds.rename_column("id", "key").features) == ["key"]


def test_a_pinned_version_does_not_change_under_a_reader(table):
    ds = hls.from_lance(table)
    rows = iter(ds)
    first = [next(rows)["id"] for _ in range(10)]
    lance.dataset(table).delete("id < 500")
    assert first + [row["id"] for row in rows] == list(range(1000))
    assert ids(ds) == list(range(1000))
    assert ids(hls.from_lance(table)) == list(range(500, 1000))


USES = {
    "rows": list,
    "iter": lambda ds: list(ds.iter(7)),
    "torch": lambda ds: list(ds.with_format("torch")),
    "torch batch": lambda ds: list(ds.with_format("torch").batch(7)),
    "arrow map": lambda ds: list(ds.with_format("arrow").map(lambda t: t, batched=True)),
    "map": lambda ds: list(ds.map(lambda row: row)),
    "select": lambda ds: list(ds.select_columns(["id"]).with_format("arrow")),
    "take": lambda ds: list(ds.take(50).with_format("numpy")),
    "interleave": lambda ds: list(datasets.interleave_datasets([ds, ds])),
    "concatenate": lambda ds: list(datasets.concatenate_datasets([ds, ds])),
}


@pytest.mark.parametrize("second", USES)
@pytest.mark.parametrize("first", USES)
def test_one_use_of_a_dataset_does_not_change_another(tmp_path, first, second):
    path = make_table(tmp_path / "t.lance", 100, 20)
    expected = repr(USES[second](hls.from_lance(path, shuffle_seed=1, num_splits=4)))
    ds = hls.from_lance(path, shuffle_seed=1, num_splits=4)
    USES[first](ds)
    running = iter(ds)
    next(running)
    assert repr(USES[second](ds)) == expected


@pytest.mark.parametrize("size", [0, -1, 2.5])
def test_a_batch_size_that_makes_no_batches_is_refused(table, size):
    with pytest.raises(ValueError, match="`batch_size` must be an integer"):
        shuffled(table).batch(size)
