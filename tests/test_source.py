"""Opening tables, pinning versions, choosing columns and rows, reading rows by number."""

import gc
import os
import pickle
import shutil
import tracemalloc
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import lance
import lancedb
import numpy as np
import pyarrow as pa
import pytest
from helpers import cut, ids, make_table

import hf_lance_stream as hls
from hf_lance_stream.source import Source, open_source
from hf_lance_stream.table import Table


def append(path: str, first: int, rows: int) -> None:
    new = pa.table({"id": np.arange(first, first + rows)})
    lance.write_dataset(new, path, mode="append")


def scan_ids(path: str, **scan: Any) -> list[int]:
    """Ids in table order, as Lance itself scans them."""
    found: list[int] = lance.dataset(path).to_table(columns=["id"], **scan)["id"].to_pylist()
    return found


def data_files(path: str) -> list[Path]:
    return sorted((Path(path) / "data").iterdir())


def remove_data_files(path: str) -> None:
    for file in data_files(path):
        file.unlink()


# Opening.


def as_lance(path: str) -> Any:
    return lance.dataset(path)


def as_lancedb(path: str) -> Any:
    return lancedb.connect(str(Path(path).parent)).open_table(Path(path).stem)


def as_relative(path: str) -> str:
    return os.path.relpath(path)


def as_home(path: str) -> str:
    return f"~/{Path(path).name}"


def as_url(path: str) -> str:
    return f"file://{path}"


@pytest.mark.parametrize(
    "spell", [str, Path, as_relative, as_home, as_url, as_lance, as_lancedb, lambda path: [path]]
)
def test_every_way_to_name_a_table_gives_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spell: Callable[[str], Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    path = make_table(tmp_path / "pets.lance", 30, 10)
    assert ids(hls.from_lance(spell(path))) == list(range(30))


@pytest.mark.parametrize("spell", [str, Path, as_relative, as_home, as_lance, as_lancedb])
def test_every_local_spelling_is_the_same_table_for_a_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spell: Callable[[str], Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    path = make_table(tmp_path / "pets.lance", 30, 10)
    state = hls.from_lance(path, shuffle_seed=1).state_dict()
    hls.from_lance(spell(path), shuffle_seed=1).load_state_dict(state)


def test_a_relative_path_is_resolved_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_table(tmp_path / "pets.lance", 30, 10)
    monkeypatch.chdir(tmp_path)
    pickled = pickle.dumps(open_source("pets.lance"))
    monkeypatch.chdir("/")
    assert pickle.loads(pickled).read(np.arange(3))["id"].to_pylist() == [0, 1, 2]


def test_a_list_of_tables_of_every_kind_is_read_in_the_order_given(tmp_path: Path) -> None:
    paths = [make_table(tmp_path / f"{i}.lance", 20, 7, start=100 * i) for i in range(4)]
    mixed = [paths[2], Path(paths[0]), as_lance(paths[3]), as_lancedb(paths[1])]
    expected = [i for start in (200, 0, 300, 100) for i in range(start, start + 20)]
    ds = hls.from_lance(mixed)
    assert ids(ds) == expected
    assert ds.num_shards == 12  # fragments of all tables
    assert sorted(ids(hls.from_lance(mixed, shuffle_seed=5))) == sorted(expected)
    assert cut(lambda: hls.from_lance(mixed, shuffle_seed=5, shuffle_clump_size=7), 33) == ids(
        hls.from_lance(mixed, shuffle_seed=5, shuffle_clump_size=7)
    )


def test_a_table_may_be_listed_twice(tmp_path: Path) -> None:
    path = make_table(tmp_path / "pets.lance", 10, 4)
    assert ids(hls.from_lance([path, path])) == [*range(10), *range(10)]


def test_a_filter_on_several_tables_counts_and_reads_the_matches_of_each(tmp_path: Path) -> None:
    paths = [make_table(tmp_path / f"{i}.lance", 20, 7, start=100 * i) for i in range(3)]
    ds = hls.from_lance(paths, filter="id % 100 >= 15 AND id != 117 AND id < 200")
    assert ids(ds) == [15, 16, 17, 18, 19, 115, 116, 118, 119]
    assert len(ds) == 9


@pytest.mark.parametrize("extra_is_in", ["first", "second"])
def test_tables_with_other_columns_are_refused_by_the_column(
    tmp_path: Path, extra_is_in: str
) -> None:
    wide = make_table(tmp_path / "wide.lance", 5, 5, ["id", "text"])
    narrow = make_table(tmp_path / "narrow.lance", 5, 5, ["id"])
    tables = [wide, narrow] if extra_is_in == "first" else [narrow, wide]
    with pytest.raises(ValueError, match=r"'?text\b"):
        hls.from_lance(tables)
    assert len(hls.from_lance(tables, columns=["id"])) == 10


def test_tables_with_other_types_are_refused_with_both_types(tmp_path: Path) -> None:
    one = make_table(tmp_path / "one.lance", 5, 5)
    two = make_table(tmp_path / "two.lance", 5, 5, [], extra={"id": pa.array(range(5), "int32")})
    with pytest.raises(ValueError, match=r"id: int64.*id: int32.*`columns`"):
        hls.from_lance([one, two])


def test_tables_that_differ_only_in_nullability_are_read_as_one(tmp_path: Path) -> None:
    one = make_table(tmp_path / "one.lance", 5, 5)
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False)])
    lance.write_dataset(pa.table({"id": range(5, 10)}, schema), tmp_path / "two.lance")
    for tables in ([one, tmp_path / "two.lance"], [tmp_path / "two.lance", one]):
        assert sorted(ids(hls.from_lance(tables))) == list(range(10))


# Versions.


def change(path: str, how: str) -> None:
    """Change T(100, 25) so that the rows, their places or their number differ."""
    table = lance.dataset(path)
    if how == "append":
        append(path, 100, 30)
    elif how == "delete":
        table.delete("id % 3 = 0")
    elif how == "compact":
        table.delete("id < 30")
        table.optimize.compact_files(target_rows_per_fragment=100)
    elif how == "update":
        table.update({"id": "id + 1000"}, where="id < 10")
    else:
        lance.write_dataset(pa.table({"id": np.arange(7) - 7}), path, mode="overwrite")


CHANGES = ["append", "delete", "compact", "update", "overwrite"]


@pytest.mark.parametrize("how", CHANGES)
@pytest.mark.parametrize("seed", [None, 1])
def test_a_dataset_keeps_its_version_and_a_new_one_sees_the_change(
    tmp_path: Path, how: str, seed: int | None
) -> None:
    path = make_table(tmp_path / "pets.lance", 100, 25)
    old = hls.from_lance(path, shuffle_seed=seed)
    pickled = pickle.dumps(old)
    before = ids(old)
    change(path, how)
    changed = scan_ids(path)
    assert changed != list(range(100))
    assert ids(old) == before
    assert ids(pickle.loads(pickled)) == before  # reopened at the same version
    new = hls.from_lance(path, shuffle_seed=seed)
    assert sorted(ids(new)) == sorted(changed)
    assert seed is not None or ids(new) == changed
    assert ids(hls.from_lance(path, shuffle_seed=seed, version=1)) == before


@pytest.mark.parametrize("spell", [str, as_lance, as_lancedb])
def test_version_by_number_and_by_tag(tmp_path: Path, spell: Callable[[str], Any]) -> None:
    path = make_table(tmp_path / "pets.lance", 100, 25)
    lance.dataset(path).tags.create("gold", 1)
    append(path, 100, 10)
    lance.dataset(path).tags.create("silver", 2)
    append(path, 110, 10)
    lengths = {None: 120, 1: 100, 2: 110, 3: 120, "gold": 100, "silver": 110}
    for version, length in lengths.items():
        assert len(hls.from_lance(spell(path), version=version)) == length, version


def test_a_handle_at_an_old_version_stays_there(tmp_path: Path) -> None:
    path = make_table(tmp_path / "pets.lance", 100, 25)
    append(path, 100, 10)
    db_table = as_lancedb(path)
    db_table.checkout(1)
    for handle in (lance.dataset(path, version=1), db_table):
        source = open_source(handle)
        assert (source.num_rows, source.version) == (100, 1)
        assert pickle.loads(pickle.dumps(source)).num_rows == 100
        assert open_source(handle, version=2).num_rows == 110


def test_moving_a_tag_does_not_move_a_dataset(tmp_path: Path) -> None:
    path = make_table(tmp_path / "pets.lance", 100, 25)
    lance.dataset(path).tags.create("gold", 1)
    source = open_source(path, version="gold")
    append(path, 100, 10)
    lance.dataset(path).tags.update("gold", 2)
    assert source.version == 1
    assert pickle.loads(pickle.dumps(source)).num_rows == 100


def test_a_handle_on_a_branch_is_reopened_on_that_branch(tmp_path: Path) -> None:
    path = make_table(tmp_path / "pets.lance", 100, 25)
    branch = lance.dataset(path).create_branch("trial")
    branch.delete("id < 90")
    append(path, 100, 10)  # gives main the same version number
    source = open_source(branch)
    rows = np.arange(source.num_rows)
    expected = list(range(90, 100))
    assert source.read(rows)["id"].to_pylist() == expected
    assert pickle.loads(pickle.dumps(source)).read(rows)["id"].to_pylist() == expected


# Columns.


@pytest.fixture
def split_table(tmp_path: Path) -> str:
    """T(100, 25) whose column `double` is in files that are gone, and `id` in others."""
    path = make_table(tmp_path / "pets.lance", 100, 25)
    before = data_files(path)
    lance.dataset(path).add_columns({"double": "id * 2"})
    for file in set(data_files(path)) - set(before):
        file.unlink()
    return path


@pytest.mark.parametrize("seed", [None, 1])
def test_columns_not_asked_for_are_not_read(split_table: str, seed: int | None) -> None:
    assert sorted(
        ids(hls.from_lance(split_table, columns=["id"], filter="id >= 10", shuffle_seed=seed))
    ) == list(range(10, 100))
    # That the files are really needed for the other column:
    with pytest.raises(OSError, match="could not read"):
        list(hls.from_lance(split_table, columns=["double"], shuffle_seed=seed))


def test_a_narrow_column_costs_a_fraction_of_the_bytes(tmp_path: Path) -> None:
    wide = pa.array([np.random.default_rng(i).bytes(1000) for i in range(400)])
    path = make_table(tmp_path / "pets.lance", 400, 100, extra={"wide": wide})

    def bytes_read(columns: list[str]) -> int:
        source = open_source(path, columns=columns)
        handle = source.tables[0].handle
        handle.io_stats_incremental()
        source.read(np.arange(400))
        return int(handle.io_stats_incremental().read_bytes)

    assert bytes_read(["id"]) < bytes_read(["id", "wide"]) / 5


def test_columns_come_in_the_order_asked_for(table: str) -> None:
    for columns in (["label", "id"], ["id", "label"], ["text"]):
        ds = hls.from_lance(table, columns=columns)
        assert ds.column_names == columns
        assert list(next(iter(ds))) == columns
        assert open_source(table, columns=columns).read(np.arange(2)).column_names == columns


@pytest.fixture
def nested_table(tmp_path: Path) -> str:
    """T(60, 20) with the struct ``a {b, c, d {e}}``, null for every seventh row."""
    kind = pa.struct([("b", pa.int64()), ("c", pa.string()), ("d", pa.struct([("e", pa.int8())]))])
    values = [{"b": i, "c": f"c{i}", "d": {"e": i}} if i % 7 else None for i in range(60)]
    return make_table(tmp_path / "nested.lance", 60, 20, extra={"a": pa.array(values, kind)})


@pytest.mark.parametrize(
    "columns", [["id", "a.b"], ["a.d.e", "a.b", "id"], ["a.b", "a", "id"], ["a.d", "a.d.e", "id"]]
)
def test_a_nested_column_is_the_same_shuffled_and_not(
    nested_table: str, columns: list[str]
) -> None:
    plain = list(hls.from_lance(nested_table, columns=columns))
    shuffled = list(hls.from_lance(nested_table, columns=columns, shuffle_seed=1))
    assert [row["id"] for row in plain] == list(range(60))
    assert sorted(shuffled, key=lambda row: row["id"]) == plain
    assert list(plain[0]) == columns
    whole = lance.dataset(nested_table).to_table()["a"].to_pylist()
    for row, struct in zip(plain, whole, strict=True):
        values = {"a": struct, "a.b": struct and struct["b"], "a.d": struct and struct["d"]}
        values["a.d.e"] = struct and struct["d"]["e"]
        assert all(row[name] == values[name] for name in columns if name != "id")


def test_columns_with_dots_spaces_and_other_letters_are_found(tmp_path: Path) -> None:
    names = ["two words", "Größe", "UPPER", "select"]
    extra = {name: pa.array(range(5)) for name in names}
    path = make_table(tmp_path / "names.lance", 5, 5, extra=extra)
    for name in names:
        assert [row[name] for row in hls.from_lance(path, columns=[name])] == list(range(5))


# Filters.


@pytest.mark.parametrize("deleted", [None, "id % 3 = 0", "id >= 250 AND id < 500"])
@pytest.mark.parametrize("indexed", [False, True])
@pytest.mark.parametrize("stable", [False, True])
@pytest.mark.parametrize("filter", ["id > 100 AND id < 900", "label = 3", "text LIKE '%7'"])
def test_a_filter_selects_what_a_scan_selects_in_table_order(
    tmp_path: Path, deleted: str | None, indexed: bool, stable: bool, filter: str
) -> None:
    path = str(tmp_path / "pets.lance")
    # Values in another order than the rows, so that an index finds them in another order.
    order = np.random.default_rng(0).permutation(1000)
    lance.write_dataset(
        pa.table({"id": order, "label": order % 5, "text": [f"text {i}" for i in order]}),
        path,
        max_rows_per_file=250,
        enable_stable_row_ids=stable,
    )
    table = lance.dataset(path)
    if indexed:
        table.create_scalar_index("id", "BTREE")
        table.create_scalar_index("label", "BITMAP")
    if deleted:
        table.delete(deleted)
    expected = scan_ids(path, filter=filter)
    kept = [i for i in order.tolist() if i in set(expected)]
    ds = hls.from_lance(path, filter=filter)
    assert ids(ds) == kept
    assert len(ds) == len(kept)
    assert int(open_source(path, filter=filter).shard_rows.sum()) == len(kept)
    assert sorted(ids(hls.from_lance(path, filter=filter, shuffle_seed=1))) == sorted(kept)


def test_a_filter_sees_rows_appended_after_its_index_was_made(tmp_path: Path) -> None:
    path = make_table(tmp_path / "pets.lance", 100, 25)
    lance.dataset(path).create_scalar_index("id", "BTREE")
    append(path, 100, 10)
    lance.dataset(path).delete("id = 104")
    assert ids(hls.from_lance(path, filter="id >= 98")) == [
        98,
        99,
        *range(100, 104),
        *range(105, 110),
    ]


def test_a_filter_may_use_columns_that_are_not_read(table: str) -> None:
    ds = hls.from_lance(table, columns=["id"], filter="label = 3 AND text != 'text 8'")
    assert ids(ds) == [i for i in range(1000) if i % 5 == 3 and i != 8]
    assert ds.column_names == ["id"]


def test_a_filter_on_a_nested_column(nested_table: str) -> None:
    assert ids(hls.from_lance(nested_table, filter="a.b < 10")) == [1, 2, 3, 4, 5, 6, 8, 9]


def test_a_filter_that_matches_nothing_gives_no_rows(table: str) -> None:
    ds = hls.from_lance(table, filter="id = -1")
    assert (ids(ds), len(ds), ds.column_names) == ([], 0, ["id", "text", "label"])
    assert ids(hls.from_lance(table, filter="id = -1", shuffle_seed=1)) == []
    assert open_source(table, filter="id = -1").read(np.empty(0, np.int64)).num_rows == 0


def test_shard_rows_are_the_matches_of_each_fragment(table: str) -> None:
    source = open_source(table, filter="id < 10 OR id >= 740")
    assert source.shard_rows.tolist() == [10, 0, 10, 250]
    assert source.num_rows == 270


def kept_bytes(build: Callable[[], Any]) -> int:
    """Memory that what `build` returns holds on to, as far as Python and numpy allocate it."""
    build()  # imports and caches
    gc.collect()
    tracemalloc.start()
    try:
        result = build()
        gc.collect()
        size = tracemalloc.get_traced_memory()[0]
        del result
        return size
    finally:
        tracemalloc.stop()


def test_a_filter_costs_eight_bytes_per_matching_row_and_no_filter_nothing(tmp_path: Path) -> None:
    path = make_table(tmp_path / "pets.lance", 400_000, 100_000)
    other = 50_000
    assert kept_bytes(lambda: hls.from_lance(path, shuffle_seed=1)) < other
    assert kept_bytes(lambda: hls.from_lance(path, filter="id < 10", shuffle_seed=1)) < other
    matching = 300_000
    filtered = kept_bytes(lambda: hls.from_lance(path, filter="id >= 100000", shuffle_seed=1))
    assert 8 * matching <= filtered < 8 * matching + other
    # A copy with another order shares the selection.
    ds = hls.from_lance(path, filter="id >= 100000")
    assert kept_bytes(lambda: ds.shuffle(seed=3).shard(2, 0)) < other


# Start-up.


def test_building_on_five_million_rows_reads_no_data_file(tmp_path: Path) -> None:
    path = make_table(tmp_path / "big.lance", 5_000_000, 100_000)
    assert len(data_files(path)) == 50
    remove_data_files(path)
    for options in (
        {},
        {"shuffle_seed": 1},
        {"shuffle_seed": 1, "shuffle_clump_size": 64, "num_splits": 48, "tail": "pad"},
        {"num_splits": 7},
        {"num_splits": 8, "rank": 3, "world_size": 4, "with_row_id": True},
    ):
        ds = hls.from_lance(path, **options)
        assert len(ds) in (5_000_000, 5_000_016, 5_000_000 // 7 * 7, 1_250_000)
        assert "num_rows" in repr(ds)
        assert "big.lance" in ds.describe()
        assert len(ds.shuffle(seed=4).with_format("numpy")) == len(ds)
        ds.load_state_dict(ds.state_dict())
        ds.set_epoch(3)
    with pytest.raises(OSError, match=r"could not read"):
        next(iter(ds))


def test_building_on_five_million_rows_makes_a_few_small_reads(tmp_path: Path) -> None:
    path = make_table(tmp_path / "big.lance", 5_000_000, 100_000)
    ds = hls.from_lance(path, shuffle_seed=1, num_splits=48)
    assert len(ds) > 4_999_000
    stats = ds._ex_iterable.source.tables[0].handle.io_stats_snapshot()
    manifest = max((Path(path) / "_versions").iterdir(), key=lambda file: file.stat().st_size)
    assert stats.read_iops <= 3
    assert stats.read_bytes <= 3 * manifest.stat().st_size + 4096


def test_row_counts_come_from_the_manifest_with_deletions_too(tmp_path: Path) -> None:
    path = make_table(tmp_path / "pets.lance", 1000, 250)
    lance.dataset(path).delete("id % 3 = 0")
    expected = [f.count_rows() for f in lance.dataset(path).get_fragments()]
    remove_data_files(path)
    source = open_source(path)
    assert source.shard_rows.tolist() == expected
    assert source.num_rows == sum(expected) == 666


# Deletions (case 25).

DELETED = "id % 3 = 0 OR id IN (250, 499, 1009) OR (id >= 500 AND id < 750)"


@pytest.fixture(params=[False, True], ids=["row addresses", "stable row ids"])
def deleted_table(tmp_path: Path, request: pytest.FixtureRequest) -> str:
    """T(1010, 250) without every third row, both ends of a fragment and a whole fragment."""
    path = make_table(tmp_path / "d.lance", 1010, 250, enable_stable_row_ids=request.param)
    lance.dataset(path).delete(DELETED)
    assert len(lance.dataset(path).get_fragments()) == 4
    return path


def remaining() -> list[int]:
    gone = {250, 499, 1009, *range(500, 750)}
    return [i for i in range(1010) if i % 3 and i not in gone]


def test_deleted_rows_never_appear(deleted_table: str) -> None:
    expected = scan_ids(deleted_table)
    assert expected == remaining()
    assert ids(hls.from_lance(deleted_table)) == expected
    shuffled = ids(hls.from_lance(deleted_table, shuffle_seed=3, shuffle_clump_size=16))
    assert shuffled != expected
    assert sorted(shuffled) == expected


def test_deletions_do_not_shift_rows_between_ranks(deleted_table: str) -> None:
    expected = scan_ids(deleted_table)
    for options in ({}, {"shuffle_seed": 3, "shuffle_clump_size": 16, "tail": "pad"}):
        build = hls.from_lance(deleted_table, num_splits=4, **options)
        parts = [ids(build.shard(num_shards=4, index=i)) for i in range(4)]
        seen = {i for part in parts for i in part}
        if "tail" in options:
            assert seen == set(expected)
        else:
            assert [i for part in parts for i in part] == expected[: len(expected) // 4 * 4]
    natural = hls.from_lance(deleted_table)
    assert [i for index in range(4) for i in ids(natural.shard(4, index))] == expected


@pytest.mark.parametrize("options", [{}, {"shuffle_seed": 3, "shuffle_clump_size": 16}])
def test_a_resume_after_deletions_is_exact(deleted_table: str, options: dict[str, Any]) -> None:
    def build() -> Any:
        return hls.from_lance(deleted_table, **options)

    full = ids(build())
    for k in (0, 1, 166, 167, 300, len(full) - 1, len(full)):
        assert cut(build, k) == full


def test_row_numbers_count_live_rows(deleted_table: str) -> None:
    expected = scan_ids(deleted_table)
    source = open_source(deleted_table)
    for rows in ([0], [len(expected) - 1], [165, 166, 167, 168], [400, 3, 400, 200]):
        assert source.read(np.array(rows))["id"].to_pylist() == [expected[r] for r in rows]


def test_row_ids_are_those_of_a_scan(deleted_table: str) -> None:
    scan = lance.dataset(deleted_table).to_table(with_row_id=True)
    expected = dict(zip(scan["id"].to_pylist(), scan["_rowid"].to_pylist(), strict=True))
    for options in ({}, {"shuffle_seed": 1}, {"filter": "id > 300"}, {"columns": ["id"]}):
        ds = hls.from_lance(deleted_table, with_row_id=True, **options)
        assert ds.column_names == ["id", "_rowid"]
        assert ds.features["_rowid"].dtype == "uint64"
        rows = list(ds)
        assert len(rows) > 300
        assert all(row["_rowid"] == expected[row["id"]] for row in rows)


def test_stable_row_ids_survive_a_compaction(tmp_path: Path) -> None:
    path = make_table(tmp_path / "s.lance", 100, 25, enable_stable_row_ids=True)
    before = {r["id"]: r["_rowid"] for r in hls.from_lance(path, with_row_id=True)}
    change(path, "compact")
    after = {r["id"]: r["_rowid"] for r in hls.from_lance(path, with_row_id=True, shuffle_seed=1)}
    assert after == {i: before[i] for i in range(30, 100)}


# Blobs (case 26).

BLOBS = [b"foo", b"", None, b"\x00\x01", bytes(range(256)) * 4096, b"deleted", b"last"]


@pytest.fixture(params=["2.0", "2.1", "2.2"])
def blob_table(tmp_path: Path, request: pytest.FixtureRequest) -> str:
    """A blob column in every file format that has one; the row 5 is deleted."""
    field = pa.field("data", pa.large_binary(), metadata={"lance-encoding:blob": "true"})
    table = pa.table(
        [pa.array(range(7)), pa.array(BLOBS, pa.large_binary())],
        schema=pa.schema([pa.field("id", pa.int64()), field]),
    )
    path = str(tmp_path / "blobs.lance")
    lance.write_dataset(table, path, max_rows_per_file=4, data_storage_version=request.param)
    lance.dataset(path).delete("id = 5")
    assert lance.dataset(path).take([0])["data"][0].as_py() != b"foo"  # a descriptor
    return path


@pytest.mark.parametrize(
    "options",
    [{}, {"shuffle_seed": 1}, {"filter": "id != 3"}, {"with_row_id": True}, {"num_splits": 3}],
    ids=str,
)
def test_blob_columns_give_their_exact_bytes(blob_table: str, options: dict[str, Any]) -> None:
    ds = hls.from_lance(blob_table, **options)
    rows = {row["id"]: row["data"] for row in ds}
    gone = {3, 5} if "filter" in options else {5}
    assert rows == {i: blob for i, blob in enumerate(BLOBS) if i not in gone}


def test_a_blob_column_alone_and_repeated(blob_table: str) -> None:
    source = open_source(blob_table, columns=["data"])
    read = source.read(np.array([5, 2, 1, 2, 0, 5]))
    assert read["data"].to_pylist() == [b"last", None, b"", None, b"foo", b"last"]


def test_a_resume_in_a_blob_table_is_exact(blob_table: str) -> None:
    def build() -> Any:
        return hls.from_lance(blob_table, shuffle_seed=2)

    for k in range(7):
        assert cut(build, k) == ids(build())


# Pickling.


def test_a_pickled_source_is_small_and_opens_nothing_until_it_reads(tmp_path: Path) -> None:
    path = make_table(tmp_path / "pets.lance", 50_000, 5_000)
    source = open_source(path, filter="id >= 10")
    source.read(np.arange(10))
    pickled = pickle.dumps(source)
    assert len(pickled) < 1000
    away = tmp_path / "away.lance"
    shutil.move(path, away)
    copy = pickle.loads(pickled)  # touches no table
    shutil.move(away, path)
    assert copy.read(np.arange(3))["id"].to_pylist() == [10, 11, 12]
    assert copy.num_rows == 49_990
    assert copy.schema == source.schema


@pytest.mark.parametrize("filter", [None, "id >= 10"])
def test_a_table_that_is_gone_when_it_is_reopened_is_an_error_about_the_table(
    tmp_path: Path, filter: str | None
) -> None:
    path = make_table(tmp_path / "pets.lance", 100, 25)
    copy = pickle.loads(pickle.dumps(open_source(path, filter=filter)))
    shutil.rmtree(path)
    with pytest.raises(OSError, match=r"there is no table at .*pets\.lance") as caught:
        copy.read(np.arange(3))
    assert "`filter`" not in str(caught.value)


def test_a_pickled_source_reads_the_rows_of_its_version(tmp_path: Path) -> None:
    path = make_table(tmp_path / "pets.lance", 100, 25)
    pickled = pickle.dumps(open_source(path, filter="id % 2 = 0"))
    change(path, "compact")
    append(path, 100, 10)
    copy = pickle.loads(pickled)
    assert copy.read(np.arange(copy.num_rows))["id"].to_pylist() == list(range(0, 100, 2))


# Reading rows by number.


@pytest.mark.parametrize(
    "rows",
    [[], [0], [999], [5, 3, 4], [7, 7, 7], [999, 0, 999, 250, 249, 0], list(range(999, -1, -1))],
    ids=lambda rows: f"{len(rows)} rows",
)
def test_read_gives_rows_in_the_order_asked_for(table: str, rows: list[int]) -> None:
    read = open_source(table).read(np.array(rows, dtype=np.int64))
    assert read["id"].to_pylist() == rows
    assert read["text"].to_pylist() == [f"text {i}" for i in rows]
    assert all(column.num_chunks <= 1 for column in read.columns)


def test_read_from_several_tables_keeps_the_order_and_repeats(tmp_path: Path) -> None:
    paths = [make_table(tmp_path / f"{i}.lance", 10, 4, start=10 * i) for i in range(3)]
    source = open_source(paths)
    rows = np.random.default_rng(0).integers(0, 30, 200)
    read = source.read(rows)
    assert read["id"].to_pylist() == rows.tolist()
    assert all(column.num_chunks == 1 for column in read.columns)
    with_filter = open_source(paths, filter="id % 2 = 1")
    assert with_filter.read(np.array([14, 0, 14, 5, 4]))["id"].to_pylist() == [29, 1, 29, 11, 9]


def test_read_from_several_tables_with_an_empty_one(tmp_path: Path) -> None:
    sizes = [0, 5, 0, 3, 0]
    paths = [make_table(tmp_path / f"{i}.lance", n, 4, start=10 * i) for i, n in enumerate(sizes)]
    source = open_source(paths)
    assert source.num_rows == 8
    assert source.read(np.array([7, 0, 4, 5]))["id"].to_pylist() == [32, 10, 14, 30]
    assert ids(hls.from_lance(paths)) == [10, 11, 12, 13, 14, 30, 31, 32]


def test_reading_never_asks_for_the_whole_table(
    table: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The handle is asked for the rows wanted and the columns wanted, and nothing else."""
    calls: list[tuple[int, list[str]]] = []

    class Recorder:
        def __init__(self, handle: lance.LanceDataset) -> None:
            self.schema = handle.schema
            self._handle = handle

        def take(self, offsets: np.ndarray, columns: list[str]) -> pa.Table:
            calls.append((len(offsets), columns))
            return self._handle.take(offsets, columns=columns)

    source = open_source(table, columns=["text"], filter="id > 500")
    handle = source.tables[0].handle
    monkeypatch.setattr(Table, "handle", property(lambda self: Recorder(handle)))
    assert source.read(np.array([3, 1])).to_pydict() == {"text": ["text 504", "text 502"]}
    assert calls == [(2, ["text"])]


# Data that is gone.


def damaged(path: str, how: str) -> Source:
    source = open_source(path)
    if how == "data files removed":
        remove_data_files(path)
    elif how == "data files cut short":
        for file in data_files(path):
            file.write_bytes(file.read_bytes()[:-100])
    else:
        lance.write_dataset(pa.table({"id": np.arange(7)}), path, mode="overwrite")
        lance.dataset(path).cleanup_old_versions(older_than=timedelta(0), delete_unverified=True)
    return source


@pytest.mark.parametrize("how", ["data files removed", "data files cut short", "cleaned up"])
def test_an_unreadable_row_is_an_error_that_names_table_version_and_rows(
    tmp_path: Path, how: str
) -> None:
    path = make_table(tmp_path / "pets.lance", 100, 25)
    source = damaged(path, how)
    with pytest.raises(OSError, match=r"3 rows between 20 and 40 of .*pets\.lance at version 1"):
        source.read(np.array([20, 40, 30]))


@pytest.mark.parametrize("how", ["data files removed", "cleaned up"])
def test_the_error_of_a_vanished_file_advises_to_tag(tmp_path: Path, how: str) -> None:
    path = make_table(tmp_path / "pets.lance", 100, 25)
    source = damaged(path, how)
    with pytest.raises(OSError, match=r"\btag"):
        source.read(np.array([20, 40, 30]))


def test_an_unreadable_row_ends_the_iteration_with_that_error(tmp_path: Path) -> None:
    path = make_table(tmp_path / "pets.lance", 100, 25)
    ds = hls.from_lance(path, shuffle_seed=1)
    remove_data_files(path)
    with pytest.raises(OSError, match=r"pets\.lance at version 1"):
        list(ds)


def test_a_tagged_version_survives_a_cleanup(tmp_path: Path) -> None:
    path = make_table(tmp_path / "pets.lance", 100, 25)
    lance.dataset(path).tags.create("run", 1)
    ds = hls.from_lance(path, version="run")
    change(path, "overwrite")
    lance.dataset(path).cleanup_old_versions(
        older_than=timedelta(0), delete_unverified=True, error_if_tagged_old_versions=False
    )
    assert ids(ds) == ids(pickle.loads(pickle.dumps(ds))) == list(range(100))
