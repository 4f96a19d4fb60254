"""Embedded LanceDB: paths, namespaces, memory, indices, tags and branches."""

import pickle
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import lance
import lancedb
import numpy as np
import pyarrow as pa
import pytest
from helpers import MAKERS, cut, ids, make_table, through_json

import hf_lance_stream as hls
from hf_lance_stream.remote import RemoteTable

ROWS = 600
SHUFFLED: dict[str, Any] = {"num_splits": 8, "shuffle_seed": 3, "shuffle_clump_size": 4}


def data(start: int = 0, rows: int = ROWS, columns: tuple[str, ...] = ("id", "text")) -> pa.Table:
    numbers = np.arange(start, start + rows)
    return pa.table({name: MAKERS[name](numbers) for name in columns})


def local_ids(tmp_path: Path, **options: Any) -> list[int]:
    """The order of a plain table of as many rows."""
    path = tmp_path / "plain.lance"
    if not path.exists():
        make_table(path, ROWS, 250, ["id", "text"])
    return ids(hls.from_lance(str(path), **options))


# Where a table is.


def at_path(tmp_path: Path) -> Any:
    return lancedb.connect(tmp_path / "db").create_table("pets", data())


def in_root_namespace(tmp_path: Path) -> Any:
    database = lancedb.connect_namespace("dir", {"root": str(tmp_path / "root")})
    return database.create_table("pets", data())


def in_namespace(tmp_path: Path) -> Any:
    database = lancedb.connect_namespace("dir", {"root": str(tmp_path / "root")})
    database.create_namespace(["north"])
    database.create_namespace(["north", "farm"])
    database.create_table("pets", data(), namespace_path=["north", "farm"])
    return database.open_table("pets", namespace_path=["north", "farm"])


def in_memory(tmp_path: Path) -> Any:
    return lancedb.connect("memory://").create_table("pets", data())


PLACES = [at_path, in_root_namespace, in_namespace, in_memory]


@pytest.mark.parametrize("place", PLACES)
def test_rows_are_those_of_a_plain_table_wherever_it_is(
    place: Callable[[Path], Any], tmp_path: Path
) -> None:
    table = place(tmp_path)
    for options in ({}, SHUFFLED, {**SHUFFLED, "filter": "id % 3 = 1", "columns": ["id"]}):
        assert ids(hls.from_lance(table, **options)) == local_ids(tmp_path, **options)


@pytest.mark.parametrize("place", PLACES)
def test_resume_is_exact_wherever_it_is(place: Callable[[Path], Any], tmp_path: Path) -> None:
    table = place(tmp_path)
    full = local_ids(tmp_path, **SHUFFLED)
    for k in (0, 1, 250, 599):
        assert cut(lambda: hls.from_lance(table, **SHUFFLED), k) == full


@pytest.mark.parametrize("place", PLACES)
def test_case_23_what_is_written_later_does_not_show(
    place: Callable[[Path], Any], tmp_path: Path
) -> None:
    table = place(tmp_path)
    ds = hls.from_lance(table, columns=["id"], read_budget=1, **SHUFFLED)
    rows = iter(ds)
    seen = [next(rows)["id"] for _ in range(5)]
    table.delete("id % 2 = 0")
    table.add(data(ROWS, 10))
    full = local_ids(tmp_path, **SHUFFLED)
    assert seen + [row["id"] for row in rows] == full == ids(ds)
    assert ids(hls.from_lance(table)) == [*range(1, ROWS, 2), *range(ROWS, ROWS + 10)]
    assert ids(hls.from_lance(table, version=ds._ex_iterable.source.version)) == [*range(ROWS)]


@pytest.mark.parametrize("place", PLACES[:3])
def test_case_29_workers_read_it(place: Callable[[Path], Any], tmp_path: Path) -> None:
    ds = hls.from_lance(place(tmp_path), columns=["id"], **SHUFFLED)
    loader = hls.stateful_dataloader(ds, batch_size=16, num_workers=2)
    found = [number for batch in loader for number in batch["id"].tolist()]
    assert found == local_ids(tmp_path, **SHUFFLED)


def test_load_dataset_names_a_database_and_a_table(tmp_path: Path) -> None:
    at_path(tmp_path)
    ds = datasets.load_dataset(
        "lance_stream",
        data_dir=str(tmp_path / "db"),
        table="pets",
        split="train",
        streaming=True,
        **SHUFFLED,
    )
    assert ids(ds) == local_ids(tmp_path, **SHUFFLED)


# Memory.


def test_a_table_in_memory_is_read_through_lancedb(tmp_path: Path) -> None:
    ds = hls.from_lance(in_memory(tmp_path))
    (table,) = ds._ex_iterable.source.tables
    assert isinstance(table, RemoteTable)
    assert (table.name, table.is_remote) == ("memory://pets", False)


def test_a_table_in_memory_is_refused_to_other_processes(tmp_path: Path) -> None:
    ds = hls.from_lance(in_memory(tmp_path), columns=["id"], **SHUFFLED)
    words = r"memory://pets is in the memory of this process.*num_workers=0"
    with pytest.raises(ValueError, match=words):
        pickle.dumps(ds)
    with pytest.raises(ValueError, match=words):
        list(hls.stateful_dataloader(ds, batch_size=16, num_workers=2))
    loader = hls.stateful_dataloader(ds, batch_size=16)
    found = [number for batch in loader for number in batch["id"].tolist()]
    assert found == local_ids(tmp_path, **SHUFFLED)


def test_a_table_in_memory_lives_as_long_as_its_dataset(tmp_path: Path) -> None:
    ds = hls.from_lance(in_memory(tmp_path), **SHUFFLED)
    assert ids(ds) == local_ids(tmp_path, **SHUFFLED)


def test_a_state_of_a_table_in_memory_goes_on_at_its_version(tmp_path: Path) -> None:
    table = in_memory(tmp_path)
    ds = hls.from_lance(table, **SHUFFLED)
    seen = [row["id"] for row in islice(ds, 100)]
    state = through_json(ds.state_dict())
    table.add(data(ROWS, 10))
    new = hls.from_lance(table, **SHUFFLED)
    assert len(ids(new)) == 608
    new.load_state_dict(state)
    assert seen + ids(new) == local_ids(tmp_path, **SHUFFLED)


def test_another_table_in_memory_is_not_taken_for_it(tmp_path: Path) -> None:
    ds = hls.from_lance(in_memory(tmp_path), **SHUFFLED)
    next(iter(ds))
    with pytest.raises(ValueError, match="files: saved"):
        hls.from_lance(in_memory(tmp_path), **SHUFFLED).load_state_dict(ds.state_dict())


def test_a_wrong_filter_and_version_of_a_table_in_memory_are_named(tmp_path: Path) -> None:
    table = in_memory(tmp_path)
    with pytest.raises(ValueError, match=r"`filter` cannot be applied to memory://pets.*idd"):
        hls.from_lance(table, filter="idd > 3")
    for version in (99, "nope", ("nope", 1)):
        with pytest.raises(FileNotFoundError, match=r"`version`: 'memory://pets' has no version"):
            hls.from_lance(table, version=version)


# Indices.


@pytest.mark.parametrize("place", [at_path, in_memory])
def test_a_table_with_indices_gives_the_same_rows(
    place: Callable[[Path], Any], tmp_path: Path
) -> None:
    database = lancedb.connect("memory://" if place is in_memory else tmp_path / "db")
    table = database.create_table("pets", data(columns=("id", "text", "label", "vector")))
    table.create_index("id", config=lancedb.index.BTree())
    table.create_index("label", config=lancedb.index.Bitmap())
    table.create_index("text", config=lancedb.index.FTS())
    index = lancedb.index.IvfPq(num_partitions=2, num_sub_vectors=2)
    table.create_index("vector", config=index)
    assert len(table.list_indices()) == 4
    table.delete("id < 10")
    table.add(data(ROWS, 30, columns=("id", "text", "label", "vector")))  # not in an index
    options = {"filter": "id BETWEEN 5 AND 615 AND label = 2", **SHUFFLED}
    wanted = [n for n in range(10, 616) if n % 5 == 2]
    assert sorted(ids(hls.from_lance(table, tail="keep", **options))) == wanted
    assert ids(hls.from_lance(table)) == list(range(10, 630))


# Versions, tags and branches.


@pytest.mark.parametrize("place", [at_path, in_namespace, in_memory])
def test_a_table_is_read_where_it_was_checked_out(
    place: Callable[[Path], Any], tmp_path: Path
) -> None:
    table = place(tmp_path)
    first = table.version
    table.tags.create("first", first)
    table.add(data(ROWS, 10))
    latest = table.version
    table.branches.create("side")  # what it returns cannot read in memory, of lancedb 0.40
    side = table.branches.checkout("side")
    side.add(data(2000, 5))
    assert ids(hls.from_lance(side)) == [*range(ROWS + 10), *range(2000, 2005)]
    assert ids(hls.from_lance(table.branches.checkout("side"))) == ids(hls.from_lance(side))
    for place_in_time in ("first", first):
        table.checkout(place_in_time)
        assert ids(hls.from_lance(table)) == list(range(ROWS))
        assert ids(hls.from_lance(table, version=latest)) == list(range(ROWS + 10))
        assert table.version == first  # the user's table stays where it was
    table.checkout_latest()
    assert ids(hls.from_lance(table)) == list(range(ROWS + 10))
    assert ids(hls.from_lance(table, version="side")) == ids(hls.from_lance(side))


def test_contract_a_table_in_memory_can_be_checked_out_apart(tmp_path: Path) -> None:
    table = in_memory(tmp_path)
    apart = table.branches.checkout("main", 1)
    table.add(data(ROWS, 10))
    assert (apart.version, apart.count_rows()) == (1, ROWS)
    assert (table.version, table.count_rows()) == (2, ROWS + 10)
    assert str(table.uri).startswith("memory:")


def test_an_embedded_table_on_disk_is_read_by_lance_itself(tmp_path: Path) -> None:
    (table,) = hls.from_lance(at_path(tmp_path))._ex_iterable.source.tables
    assert isinstance(table.handle, lance.LanceDataset)
