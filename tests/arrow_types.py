"""A column of every Arrow type, with the column that datasets give out for it."""

import datetime
import decimal
import struct

import lance.arrow  # noqa: F401  (registers Lance's extension types)
import numpy as np
import pyarrow as pa
from lance.arrow import BFloat16Type, EncodedImageType

VERSIONS = ["2.0", "2.1", "2.2"]
DAY = datetime.date(2024, 2, 29)
TIME = datetime.time(1, 2, 3)
MAX = np.finfo(np.float64).max
NAN, INF = float("nan"), float("inf")
UUIDS = [bytes([i]) * 16 for i in range(1, 7)]
JSON = ['{"a":1}', "[1,2]", '"text"', "1.5", '{"b":{"c":null}}', "true"]


def decimals(digits):
    return [decimal.Decimal(f"{i}.50") for i in (1, -2, 3)] + [decimal.Decimal(digits)]


def six(values, kind=None):
    """An array of six values, which are repeated as often as needed."""
    return pa.array([values[i % len(values)] for i in range(6)], kind)


def extension(kind, storage):
    return pa.ExtensionArray.from_storage(kind, storage)


def bfloat16(values):
    """The values, which must be ones it holds, as Lance's bfloat16."""
    halves = [None if v is None else struct.pack("<f", v)[2:] for v in values]
    return extension(BFloat16Type(), pa.array(halves, pa.binary(2)))


def ints(bits, low):
    return [low, 2**bits - 1, 1, 0, 7, 5]


HALVES = [1.5, -0.0, INF, 2.0**-126, -3.0, NAN]
PAIR = pa.struct([("a", pa.int32()), ("b", pa.string())])
PAIRS = [{"a": 1, "b": "x"}, {"a": None, "b": ""}, {"a": 3, "b": None}]
DEEP = pa.struct([("s", pa.struct([("t", pa.int8())])), ("v", pa.list_(pa.float32(), 2))])
DEEPS = [{"s": {"t": 1}, "v": [1, 2]}, {"s": {"t": None}, "v": [3, 4]}]
MAPS = [[("a", 1), ("b", None)], [], [("c", 2**31 - 1)]]
ENTRY = pa.struct([("key", pa.string()), ("value", pa.int32())])
ENTRIES = [[{"key": k, "value": v} for k, v in entries] for entries in MAPS]
TENSORS = [[1, 2, 3, 4, 5, 6], [-1, 0, 0, 0, 0, 9]]
TENSOR = pa.list_(pa.list_(pa.int32(), 3), 2)
WORDS = ["a", "", "é\0x", "text", "a" * 300, "b"]
BYTES = [b"a", b"", b"\0x", b"\xff", b"a" * 300, b"b"]
LISTS = [[1, None], [], [2, 3], [4], [5, 6], [7, 8]]

SAME = {
    **{f"int{n}": six(ints(n - 1, -(2 ** (n - 1))), f"int{n}") for n in (8, 16, 32, 64)},
    **{f"uint{n}": six(ints(n, 0), f"uint{n}") for n in (8, 16, 32)},
    "uint64": six(ints(63, 0), "uint64"),
    "float16": six([np.float16(v) for v in (1.5, NAN, INF, -0.0, 6e-8, 65504)], pa.float16()),
    "float32": six([1.5, NAN, INF, -INF, 1e-45, -0.0], "float32"),
    "float64": six([1.5, NAN, INF, -INF, 1e30, -0.0], "float64"),
    "bool": six([True, False, False], pa.bool_()),
    "string": six(WORDS, pa.string()),
    "large_string": six(WORDS, pa.large_string()),
    "binary": six(BYTES, pa.binary()),
    "large_binary": six(BYTES, pa.large_binary()),
    "fixed_size_binary": six([b"ab", b"\0\0", b"\xff\1"], pa.binary(2)),
    "date32": six([DAY, datetime.date(1, 1, 1), datetime.date(9999, 12, 31)], pa.date32()),
    "date64": six([DAY, datetime.date(1, 1, 1), datetime.date(9999, 12, 31)], pa.date64()),
    **{f"time32[{u}]": six([TIME, datetime.time(0)], pa.time32(u)) for u in ("s", "ms")},
    **{f"time64[{u}]": six([TIME, datetime.time(0)], pa.time64(u)) for u in ("us", "ns")},
    **{
        f"timestamp[{unit}{zone and f', {zone}'}]": six([0, -12, 86_400_000], pa.int64()).cast(
            pa.timestamp(unit, zone or None)
        )
        for unit in ("s", "ms", "us", "ns")
        for zone in (["", "UTC", "Europe/Paris", "+05:30"] if unit == "us" else ["", "UTC"])
    },
    **{f"duration[{u}]": six([0, -12, 86_400_000], pa.duration(u)) for u in ("s", "ms", "us")},
    "duration[ns]": six([0, -12_000, 86_400_000], pa.duration("ns")),
    "decimal128": six(decimals("9" * 36 + ".99"), pa.decimal128(38, 2)),
    "decimal128 with a negative scale": six(
        [decimal.Decimal("100"), decimal.Decimal("-1200")], pa.decimal128(5, -2)
    ),
    "decimal256": six(decimals("9" * 48 + ".99"), pa.decimal256(50, 2)),
    "null": pa.nulls(6),
    "list": six(LISTS, pa.list_(pa.int64())),
    "large_list": six(LISTS, pa.large_list(pa.int32())),
    "fixed_size_list": six([[1, 2], [3.5, -0.0]], pa.list_(pa.float32(), 2)),
    "fixed_size_list of nulls": six([[1, None], [None, 2]], pa.list_(pa.int8(), 2)),
    "fixed_size_list of float16": six([[np.float16(1), np.float16(2)]], pa.list_(pa.float16(), 2)),
    "fixed_size_list of bool": six([[True, False]], pa.list_(pa.bool_(), 2)),
    "fixed_size_list of them": six([[[1, 2], [3, 4]]], pa.list_(pa.list_(pa.int32(), 2), 2)),
    "list of vectors": six([[[1, 2]], [], [[3, 4], None]], pa.list_(pa.list_(pa.float32(), 2))),
    "list of lists": six([[[1], None, []], [], [[None]]], pa.list_(pa.list_(pa.int32()))),
    "list of strings": six([["a", None], [], [""]], pa.list_(pa.string())),
    "list of binary": six([[b"a", None], [], [b""]], pa.list_(pa.binary())),
    "list of bool": six([[True, None], [], [False]], pa.list_(pa.bool_())),
    "list of null": six([[None], [], [None, None]], pa.list_(pa.null())),
    "list of dates": six([[DAY, None], []], pa.list_(pa.date32())),
    "list of decimals": six([[decimal.Decimal("1.50"), None], []], pa.list_(pa.decimal128(5, 2))),
    "struct": six(PAIRS, PAIR),
    "struct of float16": six([{"a": np.float16(1)}], pa.struct([("a", pa.float16())])),
    "struct of times": six(
        [{"a": TIME, "b": datetime.datetime(2024, 1, 1)}],
        pa.struct([("a", pa.time32("s")), ("b", pa.timestamp("us", "UTC"))]),
    ),
    "struct of null": six([{"a": None}], pa.struct([("a", pa.null())])),
    "struct of nothing": six([{}], pa.struct([])),
    "struct of structs": six(DEEPS, DEEP),
    "list of structs": six([PAIRS, [], PAIRS[:1]], pa.list_(PAIR)),
    "large_list of structs": six([PAIRS, [], PAIRS[:1]], pa.large_list(PAIR)),
    "fixed_size_list of structs": six([PAIRS[:2], PAIRS[1:]], pa.list_(PAIR, 2)),
}
"""Columns that are given out as they are stored."""

OTHER = {
    "string_view": (six(WORDS, pa.string_view()), SAME["string"]),
    "binary_view": (six(BYTES, pa.binary_view()), SAME["binary"]),
    "list of string_view": (
        six([["a", None], [], [""]], pa.list_(pa.string_view())),
        SAME["list of strings"],
    ),
    "dictionary of strings": (SAME["string"].dictionary_encode(), SAME["string"]),
    "dictionary of ints": (SAME["int64"].dictionary_encode(), SAME["int64"]),
    "dictionary of large strings": (
        pa.DictionaryArray.from_arrays(
            pa.array([0, 1, 1, 0, 1, 0], pa.int8()), pa.array(["x", ""], pa.large_string())
        ),
        six(["x", "", "", "x", "", "x"], pa.large_string()),
    ),
    "list of dictionaries": (
        pa.ListArray.from_arrays(
            pa.array([0, 2, 2, 3, 4, 5, 6]),
            pa.array(["a", None, "", "a", "b", "c"]).dictionary_encode(),
        ),
        pa.array([["a", None], [], [""], ["a"], ["b"], ["c"]]),
    ),
    "bfloat16": (bfloat16(HALVES), pa.array(HALVES, pa.float32())),
    "list of bfloat16": (
        pa.ListArray.from_arrays(pa.array([0, 2, 2, 3, 4, 5, 6]), bfloat16([1, None, *HALVES[2:]])),
        pa.array([[1, None], [], *([v] for v in HALVES[2:])], pa.list_(pa.float32())),
    ),
    "vector of bfloat16": (
        pa.FixedSizeListArray.from_arrays(bfloat16(HALVES * 2), 2),
        pa.FixedSizeListArray.from_arrays(pa.array(HALVES * 2, pa.float32()), 2),
    ),
    "struct of bfloat16": (
        pa.StructArray.from_arrays([bfloat16(HALVES)], ["a"]),
        pa.StructArray.from_arrays([pa.array(HALVES, pa.float32())], ["a"]),
    ),
    "map": (six(MAPS, pa.map_(pa.string(), pa.int32())), six(ENTRIES, pa.list_(ENTRY))),
    "list of maps": (
        six([MAPS, [], [None, *MAPS]], pa.list_(pa.map_(pa.string(), pa.int32()))),
        six([ENTRIES, [], [None, *ENTRIES]], pa.list_(pa.list_(ENTRY))),
    ),
    "bool8": (extension(pa.bool8(), six([1, 0], pa.int8())), six([True, False])),
    "uuid": (extension(pa.uuid(), six(UUIDS, pa.binary(16))), six(UUIDS, pa.binary(16))),
    "opaque": (extension(pa.opaque(pa.binary(), "t", "v"), six(BYTES)), six(BYTES)),
    "fixed_shape_tensor": (
        extension(pa.fixed_shape_tensor(pa.int32(), [2, 3]), six(TENSORS, pa.list_(pa.int32(), 6))),
        six([[v[:3], v[3:]] for v in TENSORS], TENSOR),
    ),
    "encoded image": (extension(EncodedImageType(), six(BYTES)), six(BYTES)),
    "json": (extension(pa.json_(), six(JSON)), extension(pa.json_(), six(JSON))),
    "json in large strings": (
        extension(pa.json_(pa.large_string()), six(JSON, pa.large_string())),
        extension(pa.json_(), six(JSON)),
    ),
    "struct of json": (
        pa.StructArray.from_arrays([extension(pa.json_(), six(JSON))], ["a"]),
        pa.StructArray.from_arrays([extension(pa.json_(), six(JSON))], ["a"]),
    ),
}
"""Columns, and what is given out for them."""

COLUMNS = {name: (array, array) for name, array in SAME.items()} | OTHER

UNSTORABLE = {
    "decimal32": six([decimal.Decimal("1.50")], pa.decimal32(5, 2)),
    "decimal64": six([decimal.Decimal("1.50")], pa.decimal64(10, 2)),
    "list_view": six(LISTS, pa.list_view(pa.int32())),
    "large_list_view": six(LISTS, pa.large_list_view(pa.int32())),
    "fixed_size_list of nothing": six([[]], pa.list_(pa.float32(), 0)),
    "fixed_size_list of strings": six([["a", "b"]], pa.list_(pa.string(), 2)),
    "interval": six([(1, 2, 3)], pa.month_day_nano_interval()),
    "dense_union": pa.UnionArray.from_dense(
        pa.array([0, 1], pa.int8()), pa.array([0, 0], pa.int32()), [pa.array([1]), pa.array(["a"])]
    ),
    "sparse_union": pa.UnionArray.from_sparse(
        pa.array([0, 1], pa.int8()), [pa.array([1, 2]), pa.array(["a", "b"])]
    ),
    "run_end_encoded": pa.RunEndEncodedArray.from_arrays(
        pa.array([1, 3], pa.int32()), pa.array(["a", "b"])
    ),
}
"""Columns that Lance writes in no storage version."""


def is_stored(name, version, has_nulls):
    """Whether Lance 14 writes the column in a storage version, and reads it and its neighbours."""
    if "map" in name:
        return version == "2.2"
    if name == "fixed_size_list of structs":
        return False  # only where it is the only column
    if version == "2.0":
        if name == "list of string_view":
            return False
        return not (has_nulls and name.startswith("struct"))
    return name != "struct of nothing"  # the column after it is read wrongly


def with_nulls(array, rows):
    """The column with nulls in these rows."""
    none = pa.nulls(1, array.type)
    return pa.concat_arrays([none if i in rows else array.slice(i, 1) for i in range(len(array))])
