"""Images, audio and video: decoded as `datasets` decodes them, wherever they are stored."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import av
import datasets
import lance
import PIL.Image
import pyarrow as pa
import pytest
from blob_tables import ENCODINGS, blob_table
from datasets import Audio, Dataset, Features, Image, List, Value, Video
from jobs import media
from media_files import Decoding, flac, mp4, png, wav

import hf_lance_stream as hls

IMAGES = [png(0), None, png(30), png(60, mode="L"), png(90, format="JPEG")]
IDS = list(range(len(IMAGES)))
ID = {"id": Value("int64")}
SHUFFLED = {"shuffle_seed": 1}
FORMATS = [None, "numpy", "torch"]


@pytest.fixture(scope="module")
def decoding(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Decoding]:
    process = Decoding(tmp_path_factory.mktemp("ffmpeg"))
    yield process
    process.close()


def written(path: Path, columns: dict[str, pa.Array], metadata: Features | None = None) -> str:
    """A table of `id` and these columns, maybe with the metadata that `datasets` writes."""
    data = pa.table({"id": IDS[: len(next(iter(columns.values())))], **columns})
    if metadata is not None:
        data = data.replace_schema_metadata(metadata.arrow_schema.metadata)
    lance.write_dataset(data, str(path / "m.lance"), max_rows_per_file=2)
    return str(path / "m.lance")


def stored(values: list[Any], storage: str, path: Path, feature: Any) -> str:
    """A table of `id` and the media column `m`, stored in one of `STORAGES`."""
    features = Features({**ID, "m": feature})
    if storage.startswith("blob"):
        return blob_table(path / "m.lance", storage[5:], m=values)
    if storage in ("binary", "large_binary"):
        return written(path, {"m": pa.array(values, storage)})
    if storage == "binary with metadata":
        return written(path, {"m": pa.array(values, "large_binary")}, features)
    structs = [None if v is None else {"bytes": v, "path": None} for v in values]
    return written(path, {"m": pa.array(structs, Image.pa_type)}, features)


STORAGES = ["binary", "large_binary", "binary with metadata", "struct"]
STORAGES += [f"blob {encoding}" for encoding in ENCODINGS]


def of_dataset(values: list[Any], feature: Any, steps: media.Steps = ()) -> list[Any]:
    columns = {"id": IDS[: len(values)], "m": values}
    return media.of_dataset(Features({**ID, "m": feature}), columns, steps)


# Images.


@pytest.mark.parametrize("storage", STORAGES)
def test_images_decode_as_those_of_datasets_however_they_are_stored(
    tmp_path: Path, storage: str
) -> None:
    path = stored(IMAGES, storage, tmp_path, Image())
    assert hls.from_lance(path).features["m"] == Image()
    assert type(next(iter(hls.from_lance(path)))["m"]) is PIL.PngImagePlugin.PngImageFile
    for format in FORMATS:
        steps = [("with_format", (format,))]
        expected = of_dataset(IMAGES, Image(), steps)
        for options in ({}, SHUFFLED, {"filter": "id >= 0"}):
            assert media.ours(path, options, steps) == expected


@pytest.mark.parametrize("storage", ["binary", "struct", "blob 2.1"])
def test_images_are_those_of_the_lance_builder_of_datasets(tmp_path: Path, storage: str) -> None:
    path = stored(IMAGES, storage, tmp_path, Image())
    for format in FORMATS:
        steps = [("with_format", (format,))]
        assert media.ours(path, {}, steps) == media.of_builder(path, steps)


@pytest.mark.parametrize("format", FORMATS)
def test_batches_of_images_are_those_of_datasets(tmp_path: Path, format: str | None) -> None:
    path = stored(IMAGES, "binary", tmp_path, Image())
    ds = Dataset.from_dict({"id": IDS, "m": IMAGES}, features=Features({**ID, "m": Image()}))
    theirs = [media.plain(b) for b in ds.with_format(format).iter(2)]
    assert media.batches(path, {}, [("with_format", (format,))], 2) == theirs


STEPS: dict[str, media.Steps] = {
    "decode(False)": [("decode", (False,))],
    "decode(False), decode()": [("decode", (False,)), ("decode", ())],
    "Image(decode=False)": [("cast_column", ("m", Image(decode=False)))],
    "not decoded, then decoded": [
        ("cast_column", ("m", Image(decode=False))),
        ("cast_column", ("m", Image())),
    ],
    "Image(mode='L')": [("cast_column", ("m", Image(mode="L")))],
    "Image(mode='L'), torch": [
        ("cast_column", ("m", Image(mode="L"))),
        ("with_format", ("torch",)),
    ],
    "decode(False), map": [("decode", (False,)), ("map", (media.plain,))],
    "map": [("map", (lambda row: {"size": row["m"] and row["m"].size},))],
    "batch, map": [
        ("batch", (2,)),
        ("map", (lambda rows: {"id": rows["id"], "n": [m and m.width for m in rows["m"]]},)),
    ],
    "filter": [("filter", (lambda row: row["m"] is not None and row["m"].mode == "RGB",))],
    "select_columns, take": [("select_columns", (["m", "id"],)), ("take", (3,))],
    "rename_column": [("rename_column", ("m", "picture"))],
}


@pytest.mark.parametrize("name", STEPS)
def test_steps_on_images_give_what_they_give_in_datasets(tmp_path: Path, name: str) -> None:
    path = stored(IMAGES, "binary", tmp_path, Image())
    found = media.ours(path, {}, STEPS[name])
    assert found == of_dataset(IMAGES, Image(), STEPS[name])
    if "take" not in name and "batch" not in name:
        assert media.ours(path, SHUFFLED, STEPS[name]) == found


def test_undecoded_images_are_their_exact_bytes(tmp_path: Path) -> None:
    path = stored(IMAGES, "blob 2.2", tmp_path, Image())
    for ds in (
        hls.from_lance(path).decode(False),
        hls.from_lance(path).cast_column("m", Image(decode=False)),
        hls.from_lance(path, features=Features({**ID, "m": Image(decode=False)})),
    ):
        assert [row["m"] and row["m"]["bytes"] for row in ds] == IMAGES
    binary = hls.from_lance(path, features=Features({**ID, "m": Value("binary")}))
    assert [row["m"] for row in binary] == IMAGES


def test_bytes_that_nothing_marks_as_images_become_them_by_a_cast(tmp_path: Path) -> None:
    binary = Features({**ID, "m": Value("binary")})
    path = written(tmp_path, {"m": pa.array(IMAGES, "binary")}, binary)
    assert hls.from_lance(path).features == binary
    steps = [("cast_column", ("m", Image(mode="RGB")))]
    expected = of_dataset(IMAGES, Image(mode="RGB"))
    assert media.ours(path, SHUFFLED, steps) == expected
    features = Features({**ID, "m": Image(mode="RGB")})
    assert media.ours(path, {"features": features}) == expected


def test_images_in_lists_and_structs_decode_as_those_of_datasets(tmp_path: Path) -> None:
    lists = [[png(0), png(1)], [], None, [None, png(2)], [png(3)]]
    structs = [{"image": i, "n": n} for n, i in enumerate(IMAGES)]
    features = Features({**ID, "l": List(Image()), "s": {"image": Image(), "n": Value("int64")}})
    columns = {"id": IDS, "l": lists, "s": structs}
    encoded = Dataset.from_dict(columns, features=features)
    struct_type = pa.struct({"image": pa.binary(), "n": pa.int64()})
    plain = {"l": pa.array(lists, pa.list_(pa.binary())), "s": pa.array(structs, struct_type)}
    paths = [written(tmp_path, plain, features), str(tmp_path / "encoded.lance")]
    lance.write_dataset(encoded.data.table, paths[1], max_rows_per_file=2)
    (tmp_path / "bare").mkdir()
    bare = written(tmp_path / "bare", plain)
    for format in FORMATS:
        steps = [("with_format", (format,))]
        expected = media.of_dataset(features, columns, steps)
        for path in paths:
            assert hls.from_lance(path).features == features
            assert media.ours(path, SHUFFLED, steps) == expected
        assert media.ours(bare, {"features": features}, steps) == expected
    child = hls.from_lance(paths[1], columns=["id", "s.image"])
    assert child.features["s.image"] == Image()
    assert [media.plain(row["s.image"]) for row in child] == [
        row["m"] for row in of_dataset(IMAGES, Image())
    ]


def test_images_that_are_paths_are_read_from_there(tmp_path: Path) -> None:
    (tmp_path / "one.png").write_bytes(png(5))
    paths = pa.array([str(tmp_path / "one.png"), None])
    path = written(tmp_path, {"m": paths})
    found = media.ours(path, {"features": Features({**ID, "m": Image()})})
    assert found == of_dataset([str(tmp_path / "one.png"), None], Image())
    assert found[0]["m"][0] == "PngImageFile"


@pytest.mark.parametrize("workers", [0, 2])
def test_images_decode_in_the_workers_of_a_loader(tmp_path: Path, workers: int) -> None:
    path = stored(IMAGES, "struct", tmp_path, Image())
    expected = {row["id"]: [media.number(row["m"])] for row in hls.from_lance(path)}
    found = media.loaded(path, SHUFFLED, workers)
    assert {row["id"]: row["sum"] for row in found} == expected


# Audio and video, in a process with FFmpeg.

SOUNDS = [wav(1), None, wav(9), wav(5, samples=300), flac(7)]
FILMS = [mp4(0), None, mp4(40), mp4(80, frames=2), mp4(100)]
KINDS = {"audio": (SOUNDS, Audio()), "video": (FILMS, Video())}


@pytest.mark.parametrize(
    "storage", ["binary", "binary with metadata", "struct", "blob 2.1", "blob 2.2"]
)
@pytest.mark.parametrize("kind", KINDS)
def test_audio_and_video_decode_as_those_of_datasets(
    tmp_path: Path, decoding: Decoding, kind: str, storage: str
) -> None:
    values, feature = KINDS[kind]
    path = stored(values, storage, tmp_path, feature)
    assert hls.from_lance(path).features["m"] == feature
    features, columns = Features({**ID, "m": feature}), {"id": IDS, "m": values}
    for format in FORMATS:
        steps = [("with_format", (format,))]
        expected = decoding(media.of_dataset, features, columns, steps)
        assert decoding(media.ours, path, SHUFFLED, steps) == expected
    assert [row["m"] for row in expected].count(None) == 1
    assert expected[0]["m"][0] == f"{kind.title()}Decoder"


@pytest.mark.parametrize("kind", KINDS)
def test_audio_and_video_are_those_of_the_lance_builder_of_datasets(
    tmp_path: Path, decoding: Decoding, kind: str
) -> None:
    values, feature = KINDS[kind]
    path = stored(values, "struct", tmp_path, feature)
    assert decoding(media.ours, path, {}) == decoding(media.of_builder, path)


AUDIO_STEPS: dict[str, media.Steps] = {
    "another rate": [("cast_column", ("m", Audio(sampling_rate=4000)))],
    "two channels": [("cast_column", ("m", Audio(num_channels=2)))],
    "decode(False)": [("decode", (False,))],
    "decode(False), decode()": [("decode", (False,)), ("decode", ())],
    "Audio(decode=False)": [("cast_column", ("m", Audio(decode=False)))],
    "map": [("map", (media.measured,)), ("select_columns", (["id", "sum"],))],
}


@pytest.mark.parametrize("name", AUDIO_STEPS)
def test_steps_on_audio_give_what_they_give_in_datasets(
    tmp_path: Path, decoding: Decoding, name: str
) -> None:
    path = stored(SOUNDS, "binary", tmp_path, Audio())
    features, columns = Features({**ID, "m": Audio()}), {"id": IDS, "m": SOUNDS}
    found = decoding(media.ours, path, SHUFFLED, AUDIO_STEPS[name])
    assert found == decoding(media.of_dataset, features, columns, AUDIO_STEPS[name])
    if name == "another rate":
        assert found[0]["m"][1] == 4000


def test_undecoded_audio_and_video_are_their_exact_bytes_without_ffmpeg(tmp_path: Path) -> None:
    for kind, (values, feature) in KINDS.items():
        (tmp_path / kind).mkdir()
        ds = hls.from_lance(stored(values, "blob 2.2", tmp_path / kind, feature))
        assert ds.features["m"] == feature
        assert [row["m"] and row["m"]["bytes"] for row in ds.decode(False)] == values
        table = next(ds.with_format("arrow").iter(10))
        assert [m and m["bytes"] for m in table["m"].to_pylist()] == values


def test_audio_in_lists_and_video_in_structs_decode_as_those_of_datasets(
    tmp_path: Path, decoding: Decoding
) -> None:
    lists, structs = [[wav(1), wav(2)], [], [wav(3)]], [{"v": mp4(0)}, {"v": None}, {"v": mp4(9)}]
    features = Features({**ID, "l": List(Audio()), "s": {"v": Video()}})
    columns = {"id": IDS[:3], "l": lists, "s": structs}
    plain = {
        "l": pa.array(lists, pa.list_(pa.binary())),
        "s": pa.array(structs, pa.struct({"v": pa.binary()})),
    }
    path = written(tmp_path, plain, features)
    assert decoding(media.ours, path, {}) == decoding(media.of_dataset, features, columns)


def test_audio_and_video_decode_in_the_workers_of_a_loader(
    tmp_path: Path, decoding: Decoding
) -> None:
    features = Features({**ID, "a": Audio(), "v": Video()})
    columns = {"a": pa.array(SOUNDS[:4]), "v": pa.array(FILMS[:4])}
    path = written(tmp_path, columns, features)
    in_process = decoding(media.loaded, path, SHUFFLED, 0)
    assert decoding(media.loaded, path, SHUFFLED, 2) == in_process
    assert [-1.0 in row["sum"] for row in in_process] == [False, True, False, False]


def test_without_its_libraries_audio_raises_what_it_raises_in_datasets(tmp_path: Path) -> None:
    path = stored(SOUNDS, "struct", tmp_path, Audio())
    theirs = datasets.load_dataset("lance", data_files=f"{path}/**", streaming=True, split="train")
    try:
        expected: Any = media.plain(next(iter(theirs))["m"])
    except (ImportError, RuntimeError) as error:
        expected = type(error), str(error)[:40]
    try:
        found: Any = media.plain(next(iter(hls.from_lance(path)))["m"])
    except hls.BadRowError as error:
        found = type(error.__cause__), str(error.__cause__)[:40]
    assert found == expected


# Lazy blobs.


def test_decoders_read_lazy_videos(tmp_path: Path, decoding: Decoding) -> None:
    path = blob_table(tmp_path / "v.lance", "2.2", v=FILMS)
    features, columns = Features({**ID, "v": Video()}), {"id": IDS, "v": FILMS}
    assert decoding(media.lazily, path) == decoding(media.of_dataset, features, columns)
    for row in hls.from_lance(path, blobs="lazy"):
        if row["v"] is not None:
            with av.open(row["v"]) as film:
                assert sum(1 for _ in film.decode(video=0)) == (2 if row["id"] == 3 else 4)
