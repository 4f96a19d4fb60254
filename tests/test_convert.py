"""Fast conversions give what the formatters of `datasets` give, value by value and type by type."""

import datetime
import decimal
from contextlib import suppress

import numpy as np
import pyarrow as pa
import pytest
import torch
from datasets import ClassLabel, Features, Image, Value
from datasets.formatting import get_formatter
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import default_collate

from hf_lance_stream.convert import Converter

INTS = {
    pa.int8(): (-128, 127),
    pa.int16(): (-(2**15), 2**15 - 1),
    pa.int32(): (-(2**31), 2**31 - 1),
    pa.int64(): (-(2**63), 2**63 - 1),
    pa.uint8(): (0, 255),
    pa.uint16(): (0, 2**16 - 1),
    pa.uint32(): (0, 2**32 - 1),
    pa.uint64(): (0, 2**63 - 1),
}
FLOATS = {pa.float16(): 16, pa.float32(): 32, pa.float64(): 64}
DAY = datetime.date(2024, 2, 29)


def floats(width):
    return st.floats(width=width, allow_nan=True)


SCALARS = {
    **{t: st.integers(*bounds) for t, bounds in INTS.items()},
    **{t: floats(w).map(np.float16) if w == 16 else floats(w) for t, w in FLOATS.items()},
    pa.bool_(): st.booleans(),
    pa.string(): st.text(max_size=5),
    pa.large_string(): st.text("ab\0é", max_size=4),
    pa.binary(): st.binary(max_size=5),
    pa.large_binary(): st.binary(max_size=3).map(lambda b: b + b"\0"),
    pa.date32(): st.dates(),
    pa.time64("us"): st.times(),
    pa.timestamp("us"): st.datetimes(datetime.datetime(1970, 1, 1), datetime.datetime(2200, 1, 1)),
    pa.duration("us"): st.timedeltas(datetime.timedelta(0), datetime.timedelta(days=1000)),
    pa.decimal128(10, 2): st.decimals(-1000, 1000, places=2),
    pa.null(): st.none(),
}
NUMBERS = [t for t in SCALARS if t in INTS or t in FLOATS or t == pa.bool_()]
TYPES = st.one_of(
    st.sampled_from(list(SCALARS)),
    st.sampled_from([*NUMBERS, pa.string()]).map(pa.list_),
    st.sampled_from(NUMBERS).map(pa.large_list),
    st.sampled_from(NUMBERS).map(lambda t: pa.list_(t, 3)),
    st.sampled_from([*NUMBERS, pa.string()]).map(lambda t: pa.list_(pa.list_(t))),
    st.sampled_from(NUMBERS).map(lambda t: pa.list_(pa.list_(t, 3))),
    st.sampled_from([*NUMBERS, pa.string()]).map(lambda t: pa.struct({"a": t, "b": pa.int32()})),
    st.just(pa.dictionary(pa.int8(), pa.string())),
    st.just(pa.list_(pa.struct({"a": pa.int64()}))),
)


def values_of(arrow_type, may_be_null):
    if pa.types.is_fixed_size_list(arrow_type):
        inner = values_of(arrow_type.value_type, False)
        values = st.lists(inner, min_size=3, max_size=3)
    elif pa.types.is_list(arrow_type) or pa.types.is_large_list(arrow_type):
        inner = values_of(arrow_type.value_type, may_be_null)
        values = st.one_of(st.lists(inner, max_size=3), st.lists(inner, min_size=2, max_size=2))
    elif pa.types.is_struct(arrow_type):
        values = st.fixed_dictionaries({f.name: values_of(f.type, may_be_null) for f in arrow_type})
    elif pa.types.is_dictionary(arrow_type):
        values = st.sampled_from(["x", "y\0", ""])
    else:
        values = SCALARS[arrow_type]
    return st.one_of(st.none(), values) if may_be_null else values


@st.composite
def tables(draw):
    """A table of one column, sliced as a chunk would be, with or without nulls."""
    arrow_type = draw(TYPES)
    may_be_null = draw(st.booleans())
    values = draw(st.lists(values_of(arrow_type, may_be_null), min_size=1, max_size=6))
    try:
        array = pa.array(values, arrow_type)
    except pa.ArrowInvalid:  # a value that numpy's float16 does not hold
        array = pa.array([None] * len(values), arrow_type)
    table = pa.table({"x": array, "i": np.arange(len(values))})
    start = draw(st.integers(0, len(values) - 1))
    return table.slice(start)


def same(got, want):
    """Whether two values are equal in type, shape, dtype and every bit that shows."""
    assert type(got) is type(want), (got, want)
    if isinstance(want, dict):
        assert list(got) == list(want)
        for name in want:
            same(got[name], want[name])
    elif isinstance(want, torch.Tensor):
        assert (got.dtype, got.shape) == (want.dtype, want.shape)
        assert torch.equal(got.nan_to_num(7), want.nan_to_num(7)), (got, want)
    elif isinstance(want, np.ndarray):
        assert (got.dtype, got.shape) == (want.dtype, want.shape)
        if want.dtype == object:
            for a, b in zip(got.reshape(-1), want.reshape(-1), strict=True):
                same(a, b)
        else:
            np.testing.assert_array_equal(got, want)
        assert got.flags.writeable or not want.flags.writeable
    elif isinstance(want, list | tuple):
        assert len(got) == len(want)
        for a, b in zip(got, want, strict=True):
            same(a, b)
    else:
        assert got == want or (got != got and want != want)


def outcome(make):
    """What `make` returns, or the type of its error."""
    try:
        return make()
    except Exception as error:
        return type(error)


def wanted(make):
    """What `make` of `datasets` or torch returns; where it fails, ours names the column."""
    found = outcome(make)
    failed = isinstance(found, type) and not issubclass(found, Warning)
    return ValueError if failed else found


def plain_rows(formatter, table):
    return [formatter.format_row(table.slice(i, 1)) for i in range(table.num_rows)]


def plain_batch(formatter, table):
    """The batch of `datasets`, which fails at a list column only because its first row is null."""
    with suppress(AttributeError):  # 'NoneType' object has no attribute 'shape'
        return formatter.format_batch(table)
    first = table["x"].is_valid().index(True).as_py()
    parts = pa.concat_tables([table.slice(first), table.slice(0, first)])
    turned = formatter.format_batch(parts.combine_chunks())
    batch = formatter.format_batch(table.select(["i"]))
    found = [*turned["x"][-first:], *turned["x"][:-first]]
    if isinstance(turned["x"], np.ndarray):
        turned["x"][:] = found
        found = turned["x"]
    return {"x": found, **batch}


@pytest.mark.parametrize("format_type", ["python", "numpy", "torch"])
@settings(max_examples=400)
@given(table=tables())
def test_rows_and_batches_are_those_of_the_formatters(format_type, table):
    formatter = get_formatter(format_type, features=None)
    converter = Converter(format_type)
    same(outcome(lambda: list(converter.rows(table))), wanted(lambda: plain_rows(formatter, table)))
    same(outcome(lambda: converter.batch(table)), wanted(lambda: plain_batch(formatter, table)))


@pytest.mark.parametrize("format_type", ["python", "numpy", "torch"])
@settings(max_examples=200)
@given(table=tables())
def test_rows_before_a_map_are_those_of_batches_of_one(format_type, table):
    formatter = get_formatter(format_type, features=None)
    converter = Converter(format_type, rows_of_batches=True)

    def plain():
        batches = [formatter.format_batch(table.slice(i, 1)) for i in range(table.num_rows)]
        return [{name: column[0] for name, column in batch.items()} for batch in batches]

    same(outcome(lambda: list(converter.rows(table))), wanted(plain))


@pytest.mark.parametrize("format_type", ["python", "numpy", "torch"])
@settings(max_examples=400)
@given(table=tables())
def test_batches_of_a_loader_are_what_collating_the_rows_gives(format_type, table):
    formatter = get_formatter(format_type, features=None)
    got = outcome(lambda: Converter(format_type).collated(table))
    same(got, wanted(lambda: default_collate(plain_rows(formatter, table))))


def test_a_batch_of_a_number_column_uses_the_memory_of_arrow():
    table = pa.table({"x": np.arange(8), "v": pa.array([[1.0] * 4] * 8, pa.list_(pa.float32(), 4))})
    batch = Converter("torch").batch(table)
    assert batch["x"].data_ptr() == table["x"].chunk(0).buffers()[1].address
    assert batch["v"].data_ptr() == table["v"].chunk(0).flatten().buffers()[1].address


def test_a_kept_row_keeps_no_chunk():
    table = pa.table({"x": np.arange(100_000)})
    row = next(Converter("torch").rows(table.slice(0, 10)))
    assert row["x"].untyped_storage().nbytes() == 80


def test_media_are_decoded_one_by_one(tmp_path):
    from PIL import Image as Pillow

    Pillow.new("L", (2, 3), 7).save(tmp_path / "a.png")
    good = {"bytes": (tmp_path / "a.png").read_bytes(), "path": None}
    bad = {"bytes": b"no image", "path": None}
    features = Features({"image": Image(), "label": ClassLabel(names=["a"]), "n": Value("int32")})
    data = {"image": [good, good, bad], "label": [0, 0, 0], "n": [1, 2, 3]}
    table = pa.table(data, schema=features.arrow_schema)
    for format_type, kind in ((None, Pillow.Image), ("torch", torch.Tensor)):
        rows = Converter(format_type, features).rows(table)
        assert isinstance(next(rows)["image"], kind)
        assert isinstance(next(rows)["image"], kind)
        with pytest.raises(OSError, match="cannot identify"):
            next(rows)


def test_an_error_of_a_conversion_names_the_column_and_the_way_out():
    table = pa.table({"i": [1], "x": [decimal.Decimal("1.5")], "d": [DAY]})
    way_out = r"column 'x' has a value.*Decimal.*`columns`.*cast_column.*with_format\('numpy'\)"
    with pytest.raises(ValueError, match=way_out):
        Converter("torch").batch(table)
    with pytest.raises(ValueError, match=way_out):
        list(Converter("torch").rows(table))
    with pytest.raises(ValueError, match=r"column 'x' has a value.*NoneType.*collate_fn"):
        Converter(None).collated(pa.table({"i": [1], "x": pa.array([None], pa.string())}))
