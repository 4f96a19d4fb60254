"""Fields of structs as columns: the same however they are read."""

import datetime
from itertools import islice

import lance
import pyarrow as pa
import pytest
from helpers import make_table, through_json

import hf_lance_stream as hls

ROWS = 600
KIND = pa.struct(
    [
        ("b", pa.int32()),
        ("c", pa.struct([("d", pa.string()), ("e", pa.date32()), ("f", pa.struct([("g", "i1")]))])),
        ("list", pa.list_(pa.struct([("x", pa.int32())]))),
        ("vector", pa.list_(pa.float32(), 2)),
        ("word", pa.dictionary(pa.int32(), pa.string())),
        ("map", pa.map_(pa.string(), pa.int32())),
    ]
)
COLUMNS = {
    "leaves and a plain column": ["a.b", "id", "a.c.d", "plain"],
    "a struct in a struct": ["a.c", "id"],
    "a leaf three deep": ["id", "a.c.f.g"],
    "lists and vectors": ["a.vector", "a.list", "id"],
    "a struct and its fields": ["a.b", "a", "a.c.e", "id"],
    "types that are made plain": ["id", "a.map", "a.word"],
}


def value(i, has_nulls):
    """The struct of row i; every level is null somewhere."""
    if has_nulls and i % 7 == 0:
        return None
    inner = {"d": f"d{i}", "e": datetime.date(2024, 1, 1 + i % 28), "f": {"g": i % 100}}
    if has_nulls and i % 5 == 0:
        inner = None
    elif has_nulls and i % 3 == 0:
        inner |= {"d": None, "f": None}
    return {
        "b": None if i % 11 == 0 else i,
        "c": inner,
        "list": [{"x": j} for j in range(i % 3)],
        "vector": [i, -i],
        "word": f"w{i % 4}",
        "map": [("k", i)],
    }


@pytest.fixture(scope="module", params=["2.0", "2.1", "2.2"])
def nested(request, tmp_path_factory):
    """The path of a table and its structs; storage version 2.0 has no null structs."""
    version = request.param
    fields = [field for field in KIND if version == "2.2" or field.name != "map"]
    values = [value(i, version != "2.0") for i in range(ROWS)]
    values = [v and {f.name: v[f.name] for f in fields} for v in values]
    extra = {"a": pa.array(values, pa.struct(fields)), "plain": pa.array(range(ROWS))}
    path = tmp_path_factory.mktemp("nested") / "t.lance"
    make_table(path, ROWS, 250, extra=extra, data_storage_version=version)
    return str(path), values, version


def field_of(struct, name):
    """The field of a struct: of a null struct it is null."""
    for part in name.split(".")[1:]:
        struct = None if struct is None else struct[part]
    return struct


def given(found):
    """As datasets give it out."""
    if isinstance(found, dict):
        return {name: given(value) for name, value in found.items()}
    if isinstance(found, list) and found and isinstance(found[0], tuple):
        return [{"key": key, "value": value} for key, value in found]
    return found


@pytest.mark.parametrize("filter", [None, "a.b > 100 AND id < 580"], ids=["whole", "filtered"])
@pytest.mark.parametrize("columns", COLUMNS.values(), ids=COLUMNS)
def test_fields_have_the_same_names_types_and_values_however_they_are_read(nested, columns, filter):
    path, values, version = nested
    columns = [name for name in columns if name != "a.map" or version == "2.2"]
    chosen = [i for i in range(ROWS) if filter is None or (i % 11 and 100 < i < 580 and values[i])]
    want = {
        i: {
            name: i if name in ("id", "plain") else given(field_of(values[i], name))
            for name in columns
        }
        for i in chosen
    }
    schema = None
    for options in ({}, {"shuffle_seed": 1}, {"shuffle_seed": 2, "shuffle_clump_size": 300}):

        def build(options=options):
            return hls.from_lance(path, columns=columns, filter=filter, **options)

        rows = list(build())
        assert sorted(row["id"] for row in rows) == chosen
        assert all(row == want[row["id"]] for row in rows)
        assert all(list(row) == columns for row in rows)
        ds = build()
        first = list(islice(ds, 77))
        new = build()
        new.load_state_dict(through_json(ds.state_dict()))
        assert first + list(new) == rows
        tables = pa.concat_tables(build().with_format("arrow").iter(100))
        schema = schema or tables.schema
        assert tables.schema == schema
        assert tables.to_pylist() == rows
        assert build().features == hls.from_lance(path, columns=columns).features
    assert schema.names == columns


def test_fields_have_the_values_of_a_scan_of_lance(nested):
    path, _, _ = nested
    columns = ["a.b", "a.c.d", "a.c.f.g", "plain"]
    scanned = lance.dataset(path).scanner(columns=columns).to_table()
    ours = pa.concat_tables(hls.from_lance(path, columns=columns).with_format("arrow").iter(100))
    assert ours.combine_chunks().equals(scanned.combine_chunks())


@pytest.mark.parametrize("version", ["2.1", "2.2"])
def test_a_field_of_a_null_struct_is_null_whatever_was_written_under_it(tmp_path, version):
    fields = [pa.array(range(300)), pa.array([f"{i}" for i in range(300)])]
    is_null = pa.array([i % 3 == 0 for i in range(300)])
    struct = pa.StructArray.from_arrays(fields, ["b", "c"], mask=is_null)
    path = tmp_path / "t.lance"
    make_table(path, 300, 100, extra={"a": struct}, data_storage_version=version)
    for options in ({}, {"shuffle_seed": 1}):
        for row in hls.from_lance(path, columns=["id", "a.b", "a.c"], **options):
            i = row["id"]
            assert (row["a.b"], row["a.c"]) == ((None, None) if i % 3 == 0 else (i, f"{i}"))


@pytest.mark.parametrize(
    ("name", "whole"), [("a.list.x", "a.list"), ("a.list.item.x", "a.list"), ("a.vector.0", "a.v")]
)
def test_a_field_inside_a_list_is_refused_by_name(nested, name, whole):
    with pytest.raises(ValueError, match=rf"`columns` names '{name}', but '{whole}.* is a .*list"):
        hls.from_lance(nested[0], columns=["id", name])


def test_a_field_of_a_column_that_has_none_is_refused(nested):
    for name in ("plain.x", "a.b.c", "a.", ".b", "a..b"):
        with pytest.raises(ValueError, match=r"`columns` names .* does not have"):
            hls.from_lance(nested[0], columns=[name])


def test_lance_has_no_column_with_a_dot_in_its_name(tmp_path):
    """So that "a.b" can only be a field."""
    with pytest.raises(OSError, match="cannot contain"):
        lance.write_dataset(pa.table({"a.b": [1]}), tmp_path / "t.lance")


def test_a_field_with_a_dot_in_its_name_comes_with_its_struct_only(tmp_path):
    struct = pa.array([{"b.c": 1, "b": {"c": 2}}] * 4)
    path = make_table(tmp_path / "t.lance", 4, 2, extra={"a": struct})
    for options in ({}, {"shuffle_seed": 1}):
        ds = hls.from_lance(path, columns=["a.b.c", "a"], **options)
        assert list(ds) == [{"a.b.c": 2, "a": {"b.c": 1, "b": {"c": 2}}}] * 4
