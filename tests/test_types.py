"""Every Arrow type that Lance stores, in every format, against Hugging Face's own conversion."""

import functools
import re
from itertools import islice

import lance
import numpy as np
import pyarrow as pa
import pytest
from arrow_types import COLUMNS, UNSTORABLE, VERSIONS, is_stored, with_nulls
from datasets import Features
from datasets.formatting import get_formatter
from helpers import make_table, through_json
from test_convert import same
from torch.utils.data import default_collate

import hf_lance_stream as hls
from hf_lance_stream.features import check_format
from hf_lance_stream.plain_types import plain_column, plain_type
from hf_lance_stream.source import open_source

ROWS = 12
NULLS = {"no nulls": [], "nulls first and in the middle": [0, 5, 6]}
SHUFFLE = {"shuffle_seed": 3, "num_splits": 3, "shuffle_clump_size": 2}
FORMATS = [None, "arrow", "numpy", "torch"]


def column(array, nulls=()):
    """The six values twice, with nulls in these rows."""
    return with_nulls(pa.concat_arrays([array, array]), nulls)


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """The path of a table, made once, for a storage version and rows that are null."""
    root = tmp_path_factory.mktemp("types")

    @functools.cache
    def path(version, nulls):
        names = [n for n in COLUMNS if is_stored(n, version, bool(NULLS[nulls]))]
        extra = {name: column(COLUMNS[name][0], NULLS[nulls]) for name in names}
        to = root / f"{version} {nulls}.lance"
        return make_table(to, ROWS, 5, extra=extra, data_storage_version=version), names

    return path


# The yardstick: what the formatters of `datasets` make of the same Arrow data.


@functools.cache
def expected(name, nulls):
    return column(COLUMNS[name][1], NULLS[nulls])


def rows_of_datasets(array, format_type):
    table = pa.table({"x": array})
    formatter = get_formatter(format_type, features=Features.from_arrow_schema(table.schema))
    return [formatter.format_row(table.slice(i, 1))["x"] for i in range(len(array))]


def batch_of_datasets(array, format_type):
    table = pa.table({"x": array})
    formatter = get_formatter(format_type, features=Features.from_arrow_schema(table.schema))
    try:
        return formatter.format_batch(table)["x"]
    except AttributeError as error:
        # It asks the first list for its shape, also where that is a null.
        if "'NoneType' object has no attribute 'shape'" not in str(error):
            raise
    first = array.is_valid().index(True).as_py()
    turned = pa.concat_arrays([array.slice(first), array.slice(0, first)])
    batch = batch_of_datasets(turned, format_type)
    together = [*batch[-first:], *batch[:-first]]
    if format_type == "numpy":
        batch[:] = together
        return batch
    return together


@functools.cache
def their_rows(name, nulls, format_type):
    return rows_of_datasets(expected(name, nulls), format_type)


@functools.cache
def their_batch(name, nulls, format_type, rows):
    return batch_of_datasets(expected(name, nulls).take(pa.array(rows)), format_type)


@functools.cache
def has_tensor(name):
    """Whether the torch format of `datasets` takes a type."""
    try:
        their_rows(name, "no nulls", "torch")
    except (TypeError, RuntimeError):
        return False
    return True


# Ours: every way to read the same columns.


def rows_of(data):
    return [(int(row["id"]), row) for row in data]


def arrow_rows_of(data):
    return [(row["id"][0].as_py(), row) for row in data]


def resumed(build, take):
    """All that a dataset yields, with a new dataset after two of them."""
    ds = build()
    first = list(islice(take(ds), 2))
    new = build()
    new.load_state_dict(through_json(ds.state_dict()))
    return first + list(take(new))


@pytest.fixture(scope="module")
def passes(tables):
    """Rows and batches, by how they were read."""

    @functools.cache
    def read(version, nulls, format_type):
        path, names = tables(version, nulls)
        if format_type == "torch":
            names = [name for name in names if has_tensor(name)]
        rows, batches = {}, {}

        def build(**options):
            ds = hls.from_lance(path, columns=["id", *names], **options)
            return ds.with_format(format_type)

        rows["plain, resumed"] = resumed(build, iter)
        loader = hls.stateful_dataloader(build(**SHUFFLE), 5, collate_fn=list)
        rows["shuffled, from a loader"] = [row for batch in loader for row in batch]
        batches["plain"] = list(build().iter(4))
        batches["shuffled, resumed"] = resumed(lambda: build(**SHUFFLE), lambda ds: ds.iter(4))
        ids_of = arrow_rows_of if format_type == "arrow" else rows_of
        return {way: ids_of(found) for way, found in rows.items()}, batches

    return read


def same_array(got, want):
    assert got.type == want.type
    assert repr(got.to_pylist()) == repr(want.to_pylist())  # NaNs are equal to themselves


CASES = [
    (name, version)
    for name in COLUMNS
    for version in VERSIONS
    if is_stored(name, version, has_nulls=False)
]


@pytest.mark.parametrize("format_type", FORMATS, ids=["python", "arrow", "numpy", "torch"])
@pytest.mark.parametrize(("name", "version"), CASES, ids=map("-".join, CASES))
def test_case_31_every_type_has_its_values_in_every_format(
    tables, passes, name, version, format_type
):
    for nulls in NULLS:
        if not is_stored(name, version, bool(NULLS[nulls])):
            continue
        if format_type == "torch" and not has_tensor(name):
            ds = hls.from_lance(tables(version, nulls)[0], columns=[name]).with_format("torch")
            with pytest.raises(ValueError, match=r"^column .* has the type .*with_format\('numpy'"):
                next(iter(ds))
            continue
        rows, batches = passes(version, nulls, format_type)
        for way, found in rows.items():
            assert sorted(i for i, _ in found) == list(range(ROWS)), way
            for i, row in found:
                if format_type == "arrow":
                    same_array(row[name].combine_chunks(), expected(name, nulls).slice(i, 1))
                else:
                    same(row[name], their_rows(name, nulls, format_type)[i])
        for batch in (batch for found in batches.values() for batch in found):
            numbers = tuple(int(i.as_py() if format_type == "arrow" else i) for i in batch["id"])
            if format_type == "arrow":
                want = expected(name, nulls).take(pa.array(numbers))
                same_array(batch[name].combine_chunks(), want)
            else:
                same(batch[name], their_batch(name, nulls, format_type, numbers))


@pytest.mark.parametrize(("name", "version"), CASES, ids=map("-".join, CASES))
def test_a_plain_scan_of_lance_has_the_values_that_were_written(scans, name, version):
    """And so it has those that the test above compares with."""
    stored, given = COLUMNS[name]
    if "view" in name or name == "json in large strings":
        stored = given
    for nulls, rows in NULLS.items():
        if is_stored(name, version, bool(rows)):
            scanned = scans(version, nulls)[name]
            assert scanned.type == stored.type
            same_array(plain(scanned), plain(pa.chunked_array([column(stored, rows)])))


def plain(array):
    """The values of a type that Arrow cannot put together or make python values of."""
    return plain_column(array, plain_type(array.type)).combine_chunks()


@pytest.fixture(scope="module")
def scans(tables):
    @functools.cache
    def scan(version, nulls):
        return lance.dataset(tables(version, nulls)[0]).to_table()

    return scan


# What Lance does not store: when a release of it does, this is where it shows.

UNSTORED = {(name, version): a for name, a in UNSTORABLE.items() for version in VERSIONS} | {
    (name, version): array
    for name, (array, _) in COLUMNS.items()
    for version in VERSIONS
    if not is_stored(name, version, has_nulls=False)
}


@pytest.mark.parametrize("case", UNSTORED, ids="-".join)
def test_a_type_that_lance_does_not_store(tmp_path, case):
    values = pa.table({"x": UNSTORED[case], "y": range(len(UNSTORED[case]))})

    def write_and_read():
        lance.write_dataset(values, tmp_path / "t.lance", data_storage_version=case[1])
        assert lance.dataset(tmp_path / "t.lance").to_table().equals(values)

    with pytest.raises(BaseException, match=r"."):  # some are panics of Rust
        write_and_read()


@pytest.mark.parametrize("name", [n for n in COLUMNS if n.startswith("struct")])
def test_storage_version_2_0_does_not_store_a_null_struct(tmp_path, name):
    with pytest.raises(OSError, match="null"):
        lance.write_dataset(
            pa.table({"x": with_nulls(COLUMNS[name][0], [1])}),
            tmp_path / "t.lance",
            data_storage_version="2.0",
        )


# Nothing but nulls, and nothing.

SCARCE = [name for name in COLUMNS if is_stored(name, "2.2", has_nulls=True)]


@pytest.fixture(scope="module")
def scarce(tmp_path_factory):
    """A dataset of nulls, or of no rows, its rows and its batches."""
    root = tmp_path_factory.mktemp("scarce")

    @functools.cache
    def read(rows, format_type):
        names = SCARCE if format_type != "torch" else [n for n in SCARCE if has_tensor(n)]
        extra = {name: pa.nulls(rows, COLUMNS[name][0].type) for name in names}
        path = root / f"{rows} {format_type}.lance"
        make_table(path, rows, 5, extra=extra, data_storage_version="2.2")
        ds = hls.from_lance(path).with_format(format_type)
        return ds.features, list(ds), list(ds.iter(3))

    return read


@pytest.mark.parametrize("format_type", FORMATS, ids=["python", "arrow", "numpy", "torch"])
@pytest.mark.parametrize("name", SCARCE)
def test_a_column_of_nulls_and_one_without_rows(scarce, name, format_type):
    if format_type == "torch" and not has_tensor(name):
        with pytest.raises(ValueError, match="with_format"):
            check_format(scarce(0, None)[0], "torch")
        return
    kind = COLUMNS[name][1].type
    feature = Features.from_arrow_schema(pa.schema({name: kind}))[name]
    features, rows, batches = scarce(0, format_type)
    assert (features[name], rows, batches) == (feature, [], [])
    features, rows, batches = scarce(4, format_type)
    assert features[name] == feature
    if format_type == "arrow":
        for tables in (rows, batches):
            same_array(pa.concat_tables(tables)[name].combine_chunks(), pa.nulls(4, kind))
        return
    same([row[name] for row in rows], rows_of_datasets(pa.nulls(4, kind), format_type))
    want = [batch_of_datasets(pa.nulls(size, kind), format_type) for size in (3, 1)]
    same([batch[name] for batch in batches], want)


# Several tables, and rows enough for a scan.


@pytest.mark.parametrize("version", VERSIONS)
def test_tables_with_other_dictionaries_and_nulls_are_read_as_one(tmp_path, version):
    words = [[f"{t}{i % 5}" if i % 7 else None for i in range(700)] for t in "ab"]
    paths = [
        make_table(
            tmp_path / f"{i}.lance",
            700,
            300,
            start=700 * i,
            extra={"x": pa.array(words[i]).dictionary_encode()},
            data_storage_version=version,
        )
        for i in (0, 1)
    ]
    whole = words[0] + words[1]
    order = np.random.default_rng(0).permutation(1400)
    read = open_source(paths).read(order)
    assert read["x"].to_pylist() == [whole[i] for i in order]
    for options in ({}, SHUFFLE, {"filter": "id > 5"}, SHUFFLE | {"shuffle_clump_size": 64}):
        ds = hls.from_lance(paths, **options)
        for rows in (list(ds), list(ds.with_format("numpy"))):
            assert [row["x"] for row in rows] == [whole[row["id"]] for row in rows]
            assert len(rows) == len(ds) >= 1394


# A loader's own batches.


@pytest.mark.parametrize("format_type", [None, "torch"], ids=["python", "torch"])
@pytest.mark.parametrize("name", [n for n in COLUMNS if is_stored(n, "2.2", has_nulls=False)])
def test_a_loader_collates_what_torch_collates_and_names_the_column_of_others(
    tables, name, format_type
):
    ds = hls.from_lance(tables("2.2", "no nulls")[0], columns=[name]).with_format(format_type)
    try:
        rows = [{name: row} for row in their_rows(name, "no nulls", format_type)]
        want = default_collate(rows[:4])
    except (TypeError, RuntimeError):
        with pytest.raises(ValueError, match=f"^column {re.escape(repr(name))} has "):
            next(iter(hls.stateful_dataloader(ds, 4)))
        return
    same(next(iter(hls.stateful_dataloader(ds, 4))), want)
