"""Features: from Arrow types, from metadata, from an argument, from the first bytes of media."""

import decimal
import io
import pickle
from datetime import timedelta
from pathlib import Path
from typing import Any

import datasets
import lance
import PIL.Image
import pyarrow as pa
import pytest
from datasets import (
    Array2D,
    Audio,
    ClassLabel,
    Features,
    Image,
    LargeList,
    List,
    Translation,
    Value,
    Video,
)
from helpers import ids, make_table

import hf_lance_stream as hls

ID = {"id": Value("int64")}


def image(format: str = "PNG", shade: int = 0) -> bytes:
    file = io.BytesIO()
    PIL.Image.new("RGB", (2, 2), (shade, 0, 0)).save(file, format)
    return file.getvalue()


def with_column(path: Path, values: Any, **options: Any) -> str:
    """A table of `id` and the column `c`."""
    return make_table(path / "c.lance", len(values), 2, extra={"c": values}, **options)


def with_features(path: Path, features: dict[str, Any], rows: dict[str, list[Any]]) -> str:
    """A table written as `datasets` would write it, with its metadata in the schema."""
    encoded = datasets.Dataset.from_dict(rows, features=Features(features))
    lance.write_dataset(encoded.data.table, path / "f.lance", max_rows_per_file=2)
    assert b"huggingface" in lance.dataset(path / "f.lance").schema.metadata
    return str(path / "f.lance")


# From the Arrow schema.

ARROW_TYPES = [
    (pa.array([1, None], "int8"), Value("int8"), [1, None]),
    (pa.array([1, None], "uint64"), Value("uint64"), [1, None]),
    (pa.array([1.5, None], "float32"), Value("float32"), [1.5, None]),
    (pa.array([True, None]), Value("bool"), [True, None]),
    (pa.array(["a", None]), Value("string"), ["a", None]),
    (pa.array(["a", None], "large_string"), Value("large_string"), ["a", None]),
    (pa.array([b"a", None]), Value("binary"), [b"a", None]),
    (pa.array([b"ab", None], pa.binary(2)), Value("fixed_size_binary[2]"), [b"ab", None]),
    (pa.array([1, None], pa.duration("s")), Value("duration[s]"), [timedelta(seconds=1), None]),
    (
        pa.array([decimal.Decimal("1.50"), None], pa.decimal128(10, 2)),
        Value("decimal128(10, 2)"),
        [decimal.Decimal("1.50"), None],
    ),
    (pa.array([[1], None]), List(Value("int64")), [[1], None]),
    (pa.array([[1], None], pa.large_list(pa.int8())), LargeList(Value("int8")), [[1], None]),
    (pa.array([[1, 2], None], pa.list_(pa.int8(), 2)), List(Value("int8"), 2), [[1, 2], None]),
    (pa.array([{"x": 1}, {"x": None}]), {"x": Value("int64")}, [{"x": 1}, {"x": None}]),
    (pa.array(["a", None]).dictionary_encode(), Value("string"), ["a", None]),
    (pa.nulls(2), Value("null"), [None, None]),
]


@pytest.mark.parametrize(
    ("values", "feature", "rows"), ARROW_TYPES, ids=[str(a.type) for a, _, _ in ARROW_TYPES]
)
def test_features_follow_the_arrow_types(
    tmp_path: Path, values: pa.Array, feature: Any, rows: list[Any]
) -> None:
    ds = hls.from_lance(with_column(tmp_path, values))
    assert ds.features == Features({**ID, "c": feature})
    assert [row["c"] for row in ds] == rows


def test_features_are_those_of_the_columns_asked_for_in_their_order(table: str) -> None:
    ds = hls.from_lance(table, columns=["label", "id"])
    assert list(ds.features.items()) == [("label", Value("int64")), ("id", Value("int64"))]
    assert ds.column_names == ["label", "id"]


def test_features_are_known_before_and_after_every_operation(table: str) -> None:
    ds = hls.from_lance(table)
    features = Features({"id": Value("int64"), "text": Value("string"), "label": Value("int64")})
    for same in (
        ds.shuffle(seed=1),
        ds.shard(2, 0),
        ds.take(3),
        ds.skip(3),
        ds.with_format("torch"),
        ds.filter(lambda row: True),
        ds.repeat(2),
        pickle.loads(pickle.dumps(ds)),
    ):
        assert same.features == features
    assert ds.remove_columns("text").column_names == ["id", "label"]
    assert ds.rename_column("text", "words").column_names == ["id", "words", "label"]
    assert ds.cast_column("label", Value("int8")).features["label"] == Value("int8")


def test_changing_the_features_of_one_dataset_leaves_others_alone(table: str) -> None:
    ds = hls.from_lance(table)
    other = ds.shuffle(seed=1)
    other.features["id"] = Value("string")
    assert ds.features["id"] == Value("int64")
    assert next(iter(ds))["id"] == 0


# A type that features cannot hold.


def test_a_type_that_features_cannot_hold_is_an_error_that_names_the_column(
    tmp_path: Path,
) -> None:
    kind = pa.fixed_shape_tensor(pa.int8(), [1, 2], permutation=[1, 0])
    values = pa.ExtensionArray.from_storage(kind, pa.array([[1, 2]] * 2, kind.storage_type))
    path = with_column(tmp_path, values)
    with pytest.raises(ValueError, match=r"column 'c' has the type .*permutation.*`columns`"):
        hls.from_lance(path)
    assert ids(hls.from_lance(path, columns=["id"])) == [0, 1]  # the way out


# From metadata in the schema.


def test_metadata_gives_class_labels_and_images(tmp_path: Path) -> None:
    features = {
        "id": Value("int64"),
        "animal": ClassLabel(names=["cat", "dog"]),
        "image": Image(mode="RGB"),
        "pair": Translation(["en", "fr"]),
    }
    pairs = [{"en": f"{i}", "fr": f"{i}!"} for i in range(4)]
    rows = {
        "id": [0, 1, 2, 3],
        "animal": ["dog", "cat", None, "dog"],
        "image": [{"bytes": image(shade=i), "path": None} for i in range(4)],
        "pair": pairs,
    }
    path = with_features(tmp_path, features, rows)
    for options in ({}, {"shuffle_seed": 1}):
        ds = hls.from_lance(path, **options)
        assert ds.features == Features(features)
        seen = sorted(ds, key=lambda row: row["id"])
        assert [row["animal"] for row in seen] == [1, 0, None, 1]
        assert [row["image"].getpixel((0, 0)) for row in seen] == [(i, 0, 0) for i in range(4)]
        assert [row["pair"] for row in seen] == pairs
        assert ds.features["animal"].int2str(1) == "dog"


def test_metadata_holds_for_a_choice_of_columns(tmp_path: Path) -> None:
    features = {"a": ClassLabel(names=["x"]), "b": Value("int32"), "c": ClassLabel(names=["y"])}
    path = with_features(tmp_path, features, {"a": [0], "b": [1], "c": [0]})
    assert hls.from_lance(path, columns=["c", "b"]).features == Features(
        {"c": features["c"], "b": features["b"]}
    )


def test_metadata_wins_over_the_first_bytes(tmp_path: Path) -> None:
    path = with_features(tmp_path, {**ID, "c": Value("binary")}, {"id": [0], "c": [image()]})
    ds = hls.from_lance(path)
    assert ds.features["c"] == Value("binary")
    assert next(iter(ds))["c"] == image()


def test_tables_whose_metadata_disagree_are_not_read_as_one(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    one = with_features(tmp_path / "a", {"c": ClassLabel(names=["cat", "dog"])}, {"c": [0]})
    two = with_features(tmp_path / "b", {"c": ClassLabel(names=["dog", "cat"])}, {"c": [0]})
    with pytest.raises(ValueError, match=r"'?c\b"):
        hls.from_lance([one, two])
    agreed = Features({"c": Value("int64")})
    assert [row["c"] for row in hls.from_lance([one, two], features=agreed)] == [0, 0]


# From the first bytes.

MEDIA = {
    "png": (image("PNG"), Image),
    "jpeg": (image("JPEG"), Image),
    "gif": (image("GIF"), Image),
    "tiff": (image("TIFF"), Image),
    "mp3": (b"ID3" + bytes(40), Audio),
    "flac": (b"fLaC" + bytes(40), Audio),
    "mp4": (b"ftypisom" + bytes(40), Video),
    "mkv": (bytes.fromhex("1A45DFA3") + bytes(40), Video),
    "avi": (b"RIFF" + bytes(4) + b"AVI LIST" + bytes(30), Video),
    "wav": (b"RIFF" + bytes(4) + b"WAVEfmt " + bytes(30), Audio),
    "padded png": (bytes(2) + image("PNG"), Image),
    "text": (b"hello", None),
    "one byte": (b"\x89", None),
    "empty": (b"", None),
}


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary()], ids=str)
def test_media_is_found_as_the_lance_builder_of_datasets_finds_it(
    tmp_path: Path, kind: pa.DataType
) -> None:
    extra = {name: pa.array([data] * 3, kind) for name, (data, _) in MEDIA.items()}
    path = make_table(tmp_path / "media.lance", 3, 2, extra=extra)
    ours = hls.from_lance(path).features
    theirs = datasets.load_dataset("lance", data_files=f"{path}/**", streaming=True)["train"]
    assert theirs.features["wav"] == Video()  # RIFF is taken for AVI: see `_media_feature`
    assert ours == theirs.features | {"wav": Audio()}
    plain = Value(str(kind))
    for name, (_, feature) in MEDIA.items():
        assert ours[name] == (plain if feature is None else feature()), name


def test_media_in_a_blob_column_is_found_as_the_lance_builder_of_datasets_finds_it(
    tmp_path: Path,
) -> None:
    blob = pa.field("c", pa.large_binary(), metadata={"lance-encoding:blob": "true"})
    schema = pa.schema([pa.field("id", pa.int64()), blob])
    data = pa.table({"id": [0, 1], "c": [image(shade=0), image(shade=1)]}, schema=schema)
    path = str(tmp_path / "blob.lance")
    lance.write_dataset(data, path, data_storage_version="2.1")
    theirs = datasets.load_dataset("lance", data_files=f"{path}/**", streaming=True)["train"]
    ds = hls.from_lance(path)
    assert ds.features == theirs.features == Features({**ID, "c": Image()})
    assert [row["c"].getpixel((0, 0)) for row in ds] == [(0, 0, 0), (1, 0, 0)]


@pytest.mark.parametrize("nulls", [1, 10])
def test_media_is_found_in_a_column_that_starts_with_nulls(tmp_path: Path, nulls: int) -> None:
    values = pa.array([None] * nulls + [image(shade=3)], pa.binary())
    ds = hls.from_lance(with_column(tmp_path, values))
    assert ds.features["c"] == Image()
    rows = [row["c"] for row in ds]
    assert rows[:-1] == [None] * nulls
    assert rows[-1].getpixel((0, 0)) == (3, 0, 0)


def test_a_binary_column_of_nulls_or_of_no_rows_stays_binary(tmp_path: Path) -> None:
    path = with_column(tmp_path, pa.array([None, None], pa.binary()))
    assert hls.from_lance(path).features["c"] == Value("binary")
    assert hls.from_lance(path, filter="id < 0").features["c"] == Value("binary")


def test_the_feature_of_a_column_does_not_depend_on_the_filter(tmp_path: Path) -> None:
    path = with_column(tmp_path, pa.array([image(), image(), b"text", b"text"]))
    for filter in (None, "id >= 2", "id < 0"):
        assert hls.from_lance(path, filter=filter).features["c"] == Image()


def test_only_binary_columns_are_read_to_find_media(tmp_path: Path) -> None:
    path = with_column(tmp_path, pa.array([image(), image()]))
    before = set((Path(path) / "data").iterdir())
    lance.dataset(path).add_columns({"text": "cast(id as string)"})
    for file in set((Path(path) / "data").iterdir()) - before:
        file.unlink()  # the files of `text`
    assert hls.from_lance(path).features == Features({**ID, "c": Image(), "text": Value("string")})


def test_media_goes_out_undecoded_where_decoding_is_off(tmp_path: Path) -> None:
    ds = hls.from_lance(with_column(tmp_path, pa.array([image(), image()])))
    assert next(iter(ds.decode(False)))["c"] == {"bytes": image(), "path": None}
    undecoded = ds.cast_column("c", Image(decode=False))
    assert next(iter(undecoded))["c"] == {"bytes": image(), "path": None}


# From the argument.

CASTS = [
    (pa.array(["cat", None, "dog"]), ClassLabel(names=["cat", "dog"]), [0, None, 1]),
    (pa.array([0, 1, 1]), ClassLabel(names=["cat", "dog"]), [0, 1, 1]),
    (pa.array([0, None, 300]), Value("int32"), [0, None, 300]),
    (pa.array(["1", "2", None]), Value("int32"), [1, 2, None]),
    (pa.array([1, 2, 3]), Value("string"), ["1", "2", "3"]),
    (pa.array([1, 2, 3]), Value("float32"), [1.0, 2.0, 3.0]),
    (pa.array([[1, 2], [3, 4]]), List(Value("int8"), 2), [[1, 2], [3, 4]]),
    (pa.array([[[1, 2], [3, 4]]]), Array2D((2, 2), "int64"), [[[1, 2], [3, 4]]]),
    (pa.array([b"ID3", b"x"]), Value("binary"), [b"ID3", b"x"]),
    (
        pa.array([image(), None]),
        Image(decode=False),
        [{"bytes": image(), "path": None}, None],
    ),
]


@pytest.mark.parametrize(
    ("values", "feature", "rows"), CASTS, ids=[f"{a.type} to {f}" for a, f, _ in CASTS]
)
def test_columns_are_cast_to_the_features_given(
    tmp_path: Path, values: pa.Array, feature: Any, rows: list[Any]
) -> None:
    path = with_column(tmp_path, values)
    features = Features({"c": feature, **ID})
    for options in ({}, {"shuffle_seed": 1}, {"filter": "id >= 0"}):
        ds = hls.from_lance(path, features=features, **options)
        assert ds.features == features
        assert ds.column_names == ["id", "c"]  # the order is that of the columns
        assert [row["c"] for row in sorted(ds, key=lambda row: row["id"])] == rows


def test_the_features_given_win_over_metadata(tmp_path: Path) -> None:
    path = with_features(tmp_path, {"c": ClassLabel(names=["x"])}, {"c": [0, 0]})
    ds = hls.from_lance(path, features=Features({"c": Value("int8")}))
    assert ds.features == Features({"c": Value("int8")})


@pytest.mark.parametrize(
    ("features", "words"),
    [
        ({"id": Value("int64"), "txet": Value("string")}, ["txet", "did you mean 'text'"]),
        ({"id": Value("int64")}, ["text", "missing", "columns=['id']"]),
        ({"id": Value("int64"), "text": Value("string"), "x": Value("int8")}, ["x", "'text'"]),
        ({}, ["'id', 'text'", "missing"]),
    ],
)
def test_features_with_other_names_are_refused(
    tmp_path: Path, features: dict[str, Any], words: list[str]
) -> None:
    path = make_table(tmp_path / "pets.lance", 4, 2, ["id", "text"])
    with pytest.raises(ValueError, match="`features`") as caught:
        hls.from_lance(path, features=Features(features))
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    ("values", "feature"),
    [
        (pa.array([[1], [2]]), Value("int32")),
        (pa.array([1, 2]), Image()),
        (pa.array([1, 2]), {"x": Value("int32")}),
    ],
)
def test_features_that_no_value_of_the_column_could_have_are_refused_by_the_column(
    tmp_path: Path, values: pa.Array, feature: Any
) -> None:
    path = with_column(tmp_path, values)
    with pytest.raises(ValueError, match=r"(?s)`features`.*'c'"):
        hls.from_lance(path, features=Features({**ID, "c": feature}))


@pytest.mark.parametrize(
    ("values", "feature"),
    [
        (pa.array(["1", "two"]), Value("int32")),
        (pa.array([1, 300]), Value("int8")),
        (pa.array(["cat", "cow"]), ClassLabel(names=["cat", "dog"])),
        (pa.array([[1], [2]]), List(Value("int64"), 2)),
    ],
)
def test_a_value_that_cannot_be_cast_is_an_error_that_names_the_column(
    tmp_path: Path, values: pa.Array, feature: Any
) -> None:
    path = with_column(tmp_path, values)
    ds = hls.from_lance(path, features=Features({**ID, "c": feature}))
    with pytest.raises(ValueError, match=r"(?s)column.*'c'"):
        list(ds)


@pytest.mark.parametrize("features", [3, "id", {"id": Value("int64")}, {"id": "int64"}], ids=repr)
def test_features_of_another_type_are_refused(tmp_path: Path, features: Any) -> None:
    path = make_table(tmp_path / "pets.lance", 4, 2)
    with pytest.raises(ValueError, match="`features`"):
        hls.from_lance(path, features=features)


# Renaming columns.


def test_renamed_columns_keep_their_features_and_values(tmp_path: Path) -> None:
    path = with_features(tmp_path, {**ID, "c": ClassLabel(names=["x", "y"])}, {"id": [5], "c": [1]})
    ds = hls.from_lance(path).rename_columns({"c": "label", "id": "key"})
    assert ds.features == Features({"key": Value("int64"), "label": ClassLabel(names=["x", "y"])})
    assert list(ds) == [{"key": 5, "label": 1}]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [("txet", "words", "'txet'.*not in the dataset"), ("text", "id", "already in the dataset")],
)
def test_renaming_a_missing_column_or_to_a_name_in_use_is_an_error(
    table: str, old: str, new: str, words: str
) -> None:
    ds = hls.from_lance(table).rename_column(old, new)
    with pytest.raises(ValueError, match=words):
        next(iter(ds))
