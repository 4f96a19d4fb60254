"""Blob columns as bytes: both encodings, exact, null and empty apart."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import lance
import numpy as np
import pyarrow as pa
import pytest
from blob_tables import (
    CASE_26,
    ENCODINGS,
    VALUES,
    blob_data,
    blob_table,
    struct_table,
)
from datasets import Features, Image, Value
from helpers import cut, make_table
from test_features import image

import hf_lance_stream as hls
from hf_lance_stream.blobs import large_binary
from hf_lance_stream.source import Source, open_source

encodings = pytest.mark.parametrize("encoding", ENCODINGS)


def blobs_by_id(ds: Any, column: str = "b") -> dict[int, Any]:
    """The blob of each id of a pass, of which none may come twice."""
    rows = [(int(row["id"]), row[column]) for row in ds]
    assert len(dict(rows)) == len(rows)
    return dict(rows)


def read_bytes(source: Source) -> int:
    """Bytes that Lance has read of the table since this was last asked."""
    return int(source.tables[0].handle.io_stats_incremental().read_bytes)


# What is relied on.


@encodings
def test_lance_reads_blobs_in_the_order_asked_for_with_nulls_and_repeats(
    tmp_path: Path, encoding: str
) -> None:
    table = lance.dataset(blob_table(tmp_path / "t.lance", encoding, b=VALUES))
    table.delete("id in (0, 5)")
    live = [value for i, value in enumerate(VALUES) if i not in (0, 5)]
    asked = [7, 0, 0, 9, 1, 5, 1, 8]
    found = table.read_blobs("b", indices=asked, preserve_order=True)
    assert [data for _, data in found] == [live[i] for i in asked]
    files = table.take_blobs("b", indices=asked)
    assert [None if f is None else f.read() for f in files] == [live[i] for i in asked]


@encodings
def test_lance_describes_null_and_empty_blobs_apart_with_their_sizes(
    tmp_path: Path, encoding: str
) -> None:
    table = lance.dataset(blob_table(tmp_path / "t.lance", encoding, b=VALUES))
    for read in (
        table.take(list(range(len(VALUES))), columns=["b"]),
        table.scanner(columns=["b"], offset=0, limit=len(VALUES)).to_table(),
    ):
        for value, found in zip(VALUES, read["b"].to_pylist(), strict=True):
            if value is not None:
                assert found["size"] == len(value)
                assert (found["position"], found["size"]) != (1, 0)
            elif encoding == "2.0":
                assert found == {"position": 1, "size": 0}
            else:
                assert found is None


# Exact bytes.


@pytest.mark.parametrize("is_stable", [False, True])
@encodings
def test_case_26_blobs_come_as_their_exact_bytes_after_a_deletion(
    tmp_path: Path, encoding: str, is_stable: bool
) -> None:
    path = blob_table(tmp_path / "t.lance", encoding, b=CASE_26, enable_stable_row_ids=is_stable)
    assert blobs_by_id(hls.from_lance(path)) == dict(enumerate(CASE_26))
    lance.dataset(path).delete("id = 0")
    left = {i: value for i, value in enumerate(CASE_26) if i != 0}
    for options in ({}, {"shuffle_seed": 1}, {"columns": ["b", "id"]}, {"filter": "id >= 0"}):
        ds = hls.from_lance(path, **options)
        assert ds.features["b"] == Value("large_binary")
        assert blobs_by_id(ds) == left


READS: dict[str, Callable[[str], list[Any]]] = {
    "natural shards": lambda path: [hls.from_lance(path)],
    "shuffled": lambda path: [hls.from_lance(path, shuffle_seed=3, num_splits=2, tail="keep")],
    "shuffled in clumps": lambda path: [
        hls.from_lance(path, shuffle_seed=3, shuffle_clump_size=3, num_splits=1)
    ],
    "two ranks": lambda path: [
        hls.from_lance(path, num_splits=4, shuffle_seed=1, rank=r, world_size=2, tail="keep")
        for r in range(2)
    ],
    "batches": lambda path: [
        {"id": i, "b": b}
        for batch in hls.from_lance(path, shuffle_seed=1).iter(5)
        for i, b in zip(batch["id"], batch["b"], strict=True)
    ],
    "tables": lambda path: [
        row
        for table in hls.from_lance(path, shuffle_seed=1).with_format("arrow").iter(5)
        for row in table.to_pylist()
    ],
    "torch": lambda path: [hls.from_lance(path).with_format("torch")],
    "load_dataset": lambda path: [
        datasets.load_dataset(
            "lance_stream", data_files=path, split="train", streaming=True, shuffle_seed=2
        )
    ],
}


def rows_of(reads: list[Any]) -> list[Any]:
    return [row for part in reads for row in ([part] if isinstance(part, dict) else part)]


@pytest.mark.parametrize("is_stable", [False, True])
@encodings
def test_blobs_are_exact_in_every_way_of_reading_after_deletes_updates_and_compaction(
    tmp_path: Path, encoding: str, is_stable: bool
) -> None:
    path = blob_table(tmp_path / "t.lance", encoding, b=VALUES, enable_stable_row_ids=is_stable)
    expected: dict[int, Any] = dict(enumerate(VALUES))
    new = blob_data(encoding, start=2, b=[b"instead of null", None, b""])

    def deleted(table: Any) -> None:
        table.delete("id in (0, 3, 8, 9, 10, 11)")  # of a fragment the first, the last; all

    def merged(table: Any) -> None:
        update = table.merge_insert("id").when_matched_update_all().when_not_matched_insert_all()
        update.execute(new)

    def appended(table: Any) -> None:
        lance.write_dataset(blob_data(encoding, 20, b=[b"more"]), path, mode="append")

    changes: list[Callable[[Any], Any]] = [
        deleted,
        merged,
        lambda table: table.optimize.compact_files(),
        appended,
    ]
    left = [
        {i: expected[i] for i in (1, 2, 4, 5, 6, 7)},
        {1: b"", 2: b"instead of null", 3: None, 4: b"", 5: VALUES[5], 6: None, 7: VALUES[7]},
    ]
    left += [left[1], left[1] | {20: b"more"}]
    for change, now in zip(changes, left, strict=True):
        change(lance.dataset(path))
        for name, read in READS.items():
            found = {int(row["id"]): row["b"] for row in rows_of(read(path))}
            if name == "torch":  # `datasets` drops NULs at the end of bytes there
                assert found == {i: b and b.rstrip(b"\0") for i, b in now.items()}
            else:
                assert found == now, name


@pytest.mark.parametrize("k", [0, 1, 5, 11])
def test_a_resumed_pass_has_the_blobs_of_the_rows_that_were_left(tmp_path: Path, k: int) -> None:
    path = blob_table(tmp_path / "t.lance", "2.2", b=VALUES)

    def build() -> Any:
        ds = hls.from_lance(path, shuffle_seed=5, num_splits=3, shuffle_clump_size=2)
        # The id of a row whose blob is another one's is not in the result.
        return ds.map(lambda row: {"id": row["id"] if row["b"] == VALUES[row["id"]] else -1})

    assert cut(build, k) == [row["id"] for row in build()]
    assert sorted(cut(build, k)) == list(range(len(VALUES)))


def test_blobs_reach_the_workers_of_a_loader(tmp_path: Path) -> None:
    path = blob_table(tmp_path / "t.lance", "2.2", b=VALUES)
    ds = hls.from_lance(path, shuffle_seed=1, num_splits=4)
    batches = []
    for workers in (0, 2):
        options = {"multiprocessing_context": "forkserver"} if workers else {}
        loader = hls.stateful_dataloader(ds, 3, num_workers=workers, collate_fn=list, **options)
        batches.append(list(loader))
    assert batches[0] == batches[1]
    assert blobs_by_id(row for batch in batches[0] for row in batch) == dict(enumerate(VALUES))


@encodings
def test_blobs_of_a_branch_and_of_a_clone_are_those_of_the_files_they_share(
    tmp_path: Path, encoding: str
) -> None:
    path = blob_table(tmp_path / "t.lance", encoding, b=VALUES)
    branch = lance.dataset(path).create_branch("trial")
    branch.delete("id in (0, 3)")
    lance.write_dataset(blob_data(encoding, 20, b=[b"new", None]), branch.uri, mode="append")
    left: dict[int, Any] = {i: v for i, v in enumerate(VALUES) if i not in (0, 3)}
    left |= {20: b"new", 21: None}
    clone = str(tmp_path / "clone.lance")
    lance.dataset(path).shallow_clone(clone, 1)
    for options in ({}, {"shuffle_seed": 1}):
        assert blobs_by_id(hls.from_lance(path, version="trial", **options)) == left
        assert blobs_by_id(hls.from_lance(clone, **options)) == dict(enumerate(VALUES))
        assert blobs_by_id(hls.from_lance(path, **options)) == dict(enumerate(VALUES))
        lazy = hls.from_lance(path, version="trial", blobs="lazy", **options)
        files = blobs_by_id(lazy)
        assert {i: file and file.size() for i, file in files.items()} == {
            i: value and len(value) if value != b"" else 0 for i, value in left.items()
        }
        assert {i: file and file.read() for i, file in files.items()} == left
    nested, values = struct_table(tmp_path / "s.lance", encoding)
    lance.dataset(nested).create_branch("trial")
    assert blobs_by_id(hls.from_lance(nested, version="trial"), "s") == dict(enumerate(values))


@pytest.mark.parametrize("encoding", ["2.0", "2.1"])
def test_lance_finds_old_blobs_of_shared_files_by_scans_only(tmp_path: Path, encoding: str) -> None:
    path = blob_table(tmp_path / "t.lance", encoding, b=VALUES)
    branch = lance.dataset(path).create_branch("trial")
    with pytest.raises(ValueError, match="Not found"):  # once it does not raise: no more scans
        branch.read_blobs("b", indices=[0])
    with pytest.raises(ValueError, match="Not found"):
        branch.take_blobs("b", indices=[0])[0].read()
    found = branch.scanner(columns=["b"], blob_handling="all_binary").to_table()
    assert found["b"].to_pylist() == VALUES


@encodings
def test_two_blob_columns_do_not_mix(tmp_path: Path, encoding: str) -> None:
    other = [None if v is None else v[::-1] + b"!" for v in VALUES[::-1]]
    path = blob_table(tmp_path / "t.lance", encoding, a=VALUES, b=other)
    ds = hls.from_lance(path, shuffle_seed=1)
    assert blobs_by_id(ds, "a") == dict(enumerate(VALUES))
    assert blobs_by_id(ds, "b") == dict(enumerate(other))


@encodings
def test_a_blob_column_is_read_alone_and_with_the_row_id(tmp_path: Path, encoding: str) -> None:
    path = blob_table(tmp_path / "t.lance", encoding, b=VALUES)
    assert [row["b"] for row in hls.from_lance(path, columns=["b"])] == VALUES
    rows = list(hls.from_lance(path, columns=["b"], with_row_id=True))
    assert [row["b"] for row in rows] == VALUES
    ids = lance.dataset(path).scanner(columns=[], with_row_id=True).to_table()["_rowid"]
    assert [row["_rowid"] for row in rows] == ids.to_pylist()


@pytest.mark.parametrize("name", ["with space", "Upper-Case", "ü"])
@encodings
def test_a_blob_column_may_have_an_odd_name(tmp_path: Path, encoding: str, name: str) -> None:
    path = blob_table(tmp_path / "t.lance", encoding, **{name: VALUES[:4]})
    assert blobs_by_id(hls.from_lance(path), name) == dict(enumerate(VALUES[:4]))
    lazy = blobs_by_id(hls.from_lance(path, blobs="lazy"), name)
    assert {i: b and b.read() for i, b in lazy.items()} == dict(enumerate(VALUES[:4]))


# Blobs in structs and lists.


@encodings
def test_blobs_in_a_struct_are_read_with_nulls_of_both(tmp_path: Path, encoding: str) -> None:
    path, values = struct_table(tmp_path / "t.lance", encoding)
    for options in ({}, {"shuffle_seed": 1}):
        ds = hls.from_lance(path, **options)
        assert ds.features["s"] == {"blob": Value("large_binary"), "n": Value("int64")}
        assert blobs_by_id(ds, "s") == dict(enumerate(values))
    alone = hls.from_lance(path, columns=["s.blob", "id"])
    assert blobs_by_id(alone, "s.blob") == {i: v and v["blob"] for i, v in enumerate(values)}
    number = hls.from_lance(path, columns=["s.n", "id"])
    assert blobs_by_id(number, "s.n") == {i: v and v["n"] for i, v in enumerate(values)}


def test_blobs_in_a_list_are_refused_before_anything_is_read(tmp_path: Path) -> None:
    blobs = lance.blob_array([b"a", None, b""])
    lists = pa.ListArray.from_arrays(
        pa.array([0, 1, 3], pa.int32()), blobs, type=pa.list_(lance.blob_field("item"))
    )
    data = pa.table({"id": [0, 1], "l": lists})
    lance.write_dataset(data, str(tmp_path / "t.lance"), data_storage_version="2.2")
    for blobs_option in ("bytes", "lazy"):
        with pytest.raises(ValueError, match=r"'l'.*blobs inside a list.*`columns`"):
            hls.from_lance(tmp_path / "t.lance", blobs=blobs_option)
    assert [row["id"] for row in hls.from_lance(tmp_path / "t.lance", columns=["id"])] == [0, 1]


# Blobs in files outside of the table.


def external_table(path: Path) -> tuple[str, list[Any]]:
    file = path / "outside.bin"
    file.write_bytes(b"0123456789" * 1000)
    blobs = [
        lance.Blob.from_uri(file.as_uri()),
        lance.Blob.from_uri(file.as_uri(), 5, 10),
        None,
        b"inside",
    ]
    data = blob_data("2.2", b=blobs)
    lance.write_dataset(
        data,
        str(path / "t.lance"),
        data_storage_version="2.2",
        allow_external_blob_outside_bases=True,
    )
    return str(path / "t.lance"), [b"0123456789" * 1000, b"5678901234", None, b"inside"]


def test_external_blobs_and_ranges_of_them_are_read(tmp_path: Path) -> None:
    path, values = external_table(tmp_path)
    assert blobs_by_id(hls.from_lance(path, shuffle_seed=1)) == dict(enumerate(values))
    files = blobs_by_id(hls.from_lance(path, shuffle_seed=1, blobs="lazy"))
    assert [files[i] and files[i].size() for i in range(4)] == [10_000, 10, None, 6]
    assert [files[i] and files[i].read() for i in range(4)] == values


def test_an_external_blob_that_is_gone_is_an_error_that_names_the_row_and_table(
    tmp_path: Path,
) -> None:
    path, _ = external_table(tmp_path)
    (tmp_path / "outside.bin").unlink()
    with pytest.raises(OSError, match=r"could not read.*t\.lance.*outside\.bin$"):
        list(hls.from_lance(path))
    assert list(hls.from_lance(path, columns=["id"])) == [{"id": i} for i in range(4)]


# What is read, and how much at a time.

LARGE = [bytes([i]) * (1 << 20) for i in range(12)]


@encodings
def test_no_byte_of_a_blob_is_read_when_its_column_is_not(tmp_path: Path, encoding: str) -> None:
    path = blob_table(tmp_path / "t.lance", encoding, b=LARGE)
    source = open_source(path, columns=["id"])
    read_bytes(source)
    assert source.read(np.arange(12)).num_rows == 12
    assert 0 < read_bytes(source) < 100_000
    whole = open_source(path)
    read_bytes(whole)
    whole.read(np.arange(12))
    assert read_bytes(whole) >= 12 << 20  # the measure sees blobs


@encodings
def test_the_bytes_of_a_row_count_its_blobs_without_reading_them(
    tmp_path: Path, encoding: str
) -> None:
    path = blob_table(tmp_path / "t.lance", encoding, b=LARGE)
    source = open_source(path)
    read_bytes(source)
    assert 1 << 20 <= source.row_bytes < (1 << 20) + 1000
    assert read_bytes(source) < 100_000
    assert open_source(path, blobs="lazy").row_bytes < 1000
    nested, _ = struct_table(tmp_path / "s.lance", encoding)
    assert 70_000 // 4 <= open_source(nested).row_bytes < 71_000


@encodings
def test_chunks_of_blobs_keep_to_the_read_budget(tmp_path: Path, encoding: str) -> None:
    path = blob_table(tmp_path / "t.lance", encoding, b=LARGE)
    ds = hls.from_lance(path, read_budget=8 << 20)
    first = next(iter(ds.with_format("arrow").iter(100)))
    assert first.num_rows == 12  # `iter` joins what was read
    examples = ds._ex_iterable
    assert 1 <= examples._chunk_rows() <= 2  # a quarter of the budget


@encodings
def test_a_feature_is_found_by_the_first_bytes_of_a_blob_only(
    tmp_path: Path, encoding: str
) -> None:
    padded = [None, *(image(shade=i) + bytes(4 << 20) for i in range(5))]
    path = blob_table(tmp_path / "t.lance", encoding, b=padded)
    source = open_source(path)
    ds = hls.from_lance(lance.dataset(path))
    read_bytes(source)
    handle = ds._ex_iterable.source.tables[0].handle
    assert ds.features == Features({"id": Value("int64"), "b": Image()})
    assert handle.io_stats_incremental().read_bytes < 1 << 20
    assert [row["b"] and row["b"].getpixel((0, 0)) for row in ds] == [
        None,
        *((i, 0, 0) for i in range(5)),
    ]


@pytest.mark.parametrize("values", [[], [None], [b""], [b"\0a", None, b"", b"b"], [b"x" * 100_000]])
def test_an_array_of_blobs_has_their_values_and_shares_a_single_one(values: list[Any]) -> None:
    array = large_binary(values)
    array.validate(full=True)
    assert array.equals(pa.array(values, pa.large_binary()))
    assert array.slice(1).to_pylist() == values[1:]
    before = pa.total_allocated_bytes()
    array = large_binary(values)
    assert pa.total_allocated_bytes() - before < 1000


def test_a_table_without_blobs_is_read_the_same_with_either_option(tmp_path: Path) -> None:
    path = make_table(tmp_path / "t.lance", 20, 7, ["id", "text"])
    rows = list(hls.from_lance(path, shuffle_seed=1))
    assert list(hls.from_lance(path, shuffle_seed=1, blobs="lazy")) == rows
