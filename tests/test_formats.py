"""Types that a format does not have, values that python does not have, and what is relied on."""

import re

import numpy as np
import pyarrow as pa
import pytest
import torch
from arrow_types import COLUMNS, with_nulls
from datasets import Features, List, Value
from datasets.formatting import get_formatter
from helpers import cut, make_table, through_json

import hf_lance_stream as hls
from hf_lance_stream.convert import Converter
from hf_lance_stream.features import check_format

LACKING = ("date", "time", "duration", "decimal")
WITHOUT_TENSOR = [name for name in COLUMNS if any(word in name for word in LACKING)]
SCALARS = [name for name in WITHOUT_TENSOR if " of " not in name]


@pytest.fixture
def dates(tmp_path):
    """A table with the columns id and day, whose first row is null."""
    days = pa.array([None, *range(1, 30)], pa.int32()).cast(pa.date32())
    return make_table(tmp_path / "dates.lance", 30, 10, extra={"day": days})


@pytest.mark.parametrize("name", COLUMNS)
def test_the_torch_format_is_refused_where_that_of_datasets_fails_and_only_there(name):
    table = pa.table({"x": COLUMNS[name][1]})
    features = Features.from_arrow_schema(table.schema)
    formatter = get_formatter("torch", features=features)
    check_format(features, "numpy")
    if name in WITHOUT_TENSOR:
        with pytest.raises((TypeError, RuntimeError)):
            formatter.format_row(table.slice(0, 1))
        with pytest.raises(ValueError, match=r"^column 'x' has the type .*`columns`"):
            check_format(features, "torch")
    else:
        formatter.format_row(table.slice(0, 1))
        check_format(features, "torch")


@pytest.mark.parametrize(
    "use",
    [
        iter,
        lambda ds: next(ds.iter(4)),
        lambda ds: next(iter(ds.take(3))),
        lambda ds: next(ds.take(3).iter(2)),
        lambda ds: next(iter(ds.shuffle(seed=1))),
        lambda ds: hls.stateful_dataloader(ds, 4),
        lambda ds: hls.stateful_dataloader(ds, 4, num_workers=2),
        lambda ds: ds.map(lambda row: row),
        lambda ds: ds.map(lambda row: {"id": row["id"]}, remove_columns=["day"], batched=True),
        lambda ds: ds.filter(lambda row: True),
    ],
    ids=[
        "rows",
        "batches",
        "take",
        "its batches",
        "shuffle",
        "loader",
        "workers",
        "map",
        "batched",
        "filter",
    ],
)
def test_case_31_a_format_without_the_type_is_refused_before_a_row_is_read(dates, use):
    ds = hls.from_lance(dates).with_format("torch")
    way_out = r"'day' has the type date32.*`columns`.*cast_column\('day', .*'int32'.*'numpy'"
    with pytest.raises(ValueError, match=way_out):
        use(ds)
    assert ds.stats().rows == 0


@pytest.mark.parametrize("name", SCALARS)
def test_case_31_the_ways_out_of_a_refused_format_work(tmp_path, name):
    values = with_nulls(COLUMNS[name][0], [0, 4])
    ds = hls.from_lance(make_table(tmp_path / "t.lance", 6, 4, extra={name: values}))
    with pytest.raises(ValueError, match="torch format") as refused:
        list(ds.with_format("torch"))
    number = re.search(r"cast_column\('(.*)', Value\('(\w+)'\)\)", str(refused.value))
    assert number is not None
    assert number[1] == name
    cast = list(ds.cast_column(name, Value(number[2])).with_format("torch"))
    numbers = values.cast(number[2]).to_numpy(zero_copy_only=False)
    for row, want in zip(cast, numbers, strict=True):
        assert torch.equal(row[name].nan_to_num(7), torch.tensor(want).float().nan_to_num(7))
    for other in (
        ds.with_format("torch").select_columns(["id"]),
        ds.remove_columns(name).with_format("torch"),
    ):
        assert [row["id"].item() for row in other] == list(range(6))
    assert len(list(ds.with_format("numpy"))) == len(list(ds)) == 6


# Values that python, or a tensor, does not have.

FAR = {
    "date32": pa.array([1, 2, 3_000_000], pa.int32()).cast(pa.date32()),
    "timestamp": pa.array([1, 2, 10**14], pa.int64()).cast(pa.timestamp("s")),
    "duration": pa.array([1, 2, 2**62], pa.duration("s")),
}


@pytest.mark.parametrize("kind", FAR)
def test_a_value_that_python_does_not_have_is_an_error_that_names_the_column(tmp_path, kind):
    ds = hls.from_lance(make_table(tmp_path / "t.lance", 3, 2, extra={"far": FAR[kind]}))
    with pytest.raises(ValueError, match=r"column 'far' .*`columns`.*with_format\('numpy'\)"):
        list(ds)
    numbers = [int(row["far"].astype(np.int64)) for row in ds.with_format("numpy")]
    assert numbers == FAR[kind].cast(pa.int64() if kind != "date32" else pa.int32()).to_pylist()
    tables = pa.concat_tables(ds.with_format("arrow"))
    assert tables["far"].combine_chunks().equals(FAR[kind])


@pytest.mark.parametrize("kind", [pa.list_(pa.int64()), pa.list_(pa.float32(), 2)], ids=str)
@pytest.mark.parametrize("format_type", ["numpy", "torch"])
def test_a_batch_of_lists_may_start_with_a_null(tmp_path, kind, format_type):
    """It does in `datasets` where the null is not the first: see the contract below."""
    lists = [None, None, [1, 2], [3, 4], None, [5, 6]]
    extra = {"x": pa.array(lists, kind)}
    ds = hls.from_lance(make_table(tmp_path / "t.lance", 6, 4, extra=extra))
    for batch in ds.shuffle(seed=1).with_format(format_type).iter(3):
        for i, value in zip(batch["id"].tolist(), batch["x"], strict=True):
            assert (None if value is None else value.tolist()) == lists[i]


# Batches, and the choice of columns.


@pytest.mark.parametrize("format_type", [None, "arrow", "numpy", "torch"])
def test_case_27_batches_of_a_filtered_table_have_the_size_asked_for(tmp_path, format_type):
    path = make_table(tmp_path / "t.lance", 50, 10)

    def build():
        return hls.from_lance(path, filter="id % 2 = 0").with_format(format_type)

    assert [len(batch["id"]) for batch in build().iter(8)] == [8, 8, 8, 1]
    ds = build()
    rows = iter(ds)
    for _ in range(5):  # inside a batch, and inside a fragment
        next(rows)
    new = build()
    new.load_state_dict(through_json(ds.state_dict()))
    assert [len(batch["id"]) for batch in new.iter(8)] == [8, 8, 4]


def test_case_33_a_mistyped_field_is_refused_and_the_features_of_fields_are_known(tmp_path):
    struct = pa.array([{"b": 1, "c": {"d": ["x"]}}] * 4)
    path = make_table(tmp_path / "t.lance", 4, 2, extra={"a": struct})
    with pytest.raises(ValueError, match=r"'a\.bb'.*did you mean 'a\.b'"):
        hls.from_lance(path, columns=["a.bb"])
    ds = hls.from_lance(path, columns=["a.c.d", "a.b"])
    features = Features({"a.c.d": List(Value("string")), "a.b": Value("int64")})
    for same in (ds, ds.shuffle(seed=1), ds.take(1), ds.with_format("numpy"), ds.repeat(2)):
        assert same.features == features
        assert list(next(iter(same))) == ["a.c.d", "a.b"]


# What is relied on, of `datasets` and of Lance.


@pytest.mark.parametrize(
    "name", ["bfloat16", "map", "bool8", "uuid", "opaque", "fixed_shape_tensor", "encoded image"]
)
def test_features_of_datasets_do_not_hold_the_types_that_are_made_plain(name):
    with pytest.raises(ValueError, match="does not have a datasets dtype equivalent"):
        Features.from_arrow_schema(pa.schema({"x": COLUMNS[name][0].type}))


@pytest.mark.parametrize("format_type", ["numpy", "torch"])
def test_the_formatters_of_datasets_fail_at_a_batch_whose_first_list_is_null(format_type):
    formatter = get_formatter(format_type, features=None)
    first, second = (pa.table({"x": v}) for v in ([None, [1, 2]], [[1, 2], None]))
    with pytest.raises(AttributeError, match="'NoneType' object has no attribute 'shape'"):
        formatter.format_batch(first)
    assert list(formatter.format_batch(second)["x"])[1] is None
    assert next(iter(Converter(format_type).batch(first)["x"])) is None


def test_bfloat16_of_lance_is_the_upper_half_of_a_float32(tmp_path):
    lance_arrow = pytest.importorskip("lance.arrow")
    values = [1.0, -2.5, 3.140625, float("inf"), None, 0.0]
    column = lance_arrow.bfloat16_array(values)
    assert column.type.extension_name == "lance.bfloat16"
    assert column.equals(pa.ExtensionArray.from_storage(column.type, column.storage))
    path = make_table(tmp_path / "t.lance", 6, 4, extra={"x": column})
    assert [row["x"] for row in hls.from_lance(path)] == values
    assert cut(lambda: hls.from_lance(path, shuffle_seed=1), 3)
