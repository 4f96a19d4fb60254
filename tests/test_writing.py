"""`write_lance`: rows, order and features are those of the source; any interruption goes on."""

import gc
import json
import multiprocessing
import os
import random
import shutil
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import lance
import lancedb
import numpy as np
import PIL.Image
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from command import Command
from converting import convert
from datasets import (
    Array2D,
    ClassLabel,
    Dataset,
    DatasetDict,
    Features,
    Image,
    IterableDataset,
    LargeList,
    List,
    Sequence,
    Translation,
    TranslationVariableLanguages,
    Value,
    Video,
)
from helpers import ids, make_table
from s3 import S3

import hf_lance_stream as hls
from hf_lance_stream import feed, inputs, table_writer
from hf_lance_stream.table_writer import open_writer

# The CSV builder of `datasets` leaves its files to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")

ROWS = 1000
multiprocessing.set_forkserver_preload(["hf_lance_stream.preload", "converting"])


def arrow_table(start: int, stop: int) -> pa.Table:
    numbers = range(start, stop)
    return pa.table({"id": pa.array(numbers, pa.int64()), "text": [f"text {n}" for n in numbers]})


@pytest.fixture
def parquet(tmp_path: Path) -> str:
    """1000 rows in three files with row groups of 64 rows, as a glob."""
    for i, (start, stop) in enumerate([(0, 300), (300, 301), (301, ROWS)]):
        pq.write_table(arrow_table(start, stop), tmp_path / f"p{i}.parquet", row_group_size=64)
    return str(tmp_path / "p*.parquet")


@pytest.fixture
def out(tmp_path: Path) -> str:
    return str(tmp_path / "out.lance")


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of a few rows, so that a small source has many."""
    monkeypatch.setattr(inputs, "MAX_ROWS", 37)


def stored_ids(table: str) -> list[int]:
    """The ids as Lance itself reads them."""
    return lance.dataset(table).to_table(columns=["id"]).column("id").to_pylist()


def fragment_rows(table: str) -> list[int]:
    return [fragment.count_rows() for fragment in lance.dataset(table).get_fragments()]


# Sources.


def from_parquet(tmp: Path) -> Any:
    return str(tmp / "p*.parquet"), {}


def from_one_file(tmp: Path) -> Any:
    pq.write_table(arrow_table(0, ROWS), tmp / "one.parquet")
    return tmp / "one.parquet", {}


def from_a_directory(tmp: Path) -> Any:
    (tmp / "d").mkdir()
    pq.write_table(arrow_table(0, ROWS), tmp / "d" / "one.parquet")
    return tmp / "d", {}


def from_csv(tmp: Path) -> Any:
    arrow_table(0, ROWS).to_pandas().to_csv(tmp / "rows.csv", index=False)
    return str(tmp / "rows.csv"), {}


def from_json_lines(tmp: Path) -> Any:
    lines = [json.dumps(row) for row in arrow_table(0, ROWS).to_pylist()]
    (tmp / "rows.jsonl").write_text("\n".join(lines))
    return str(tmp / "rows.jsonl"), {}


def from_arrow(tmp: Path) -> Any:
    table = arrow_table(0, ROWS)
    with (
        pa.OSFile(str(tmp / "rows.arrow"), "wb") as file,
        pa.ipc.new_stream(file, table.schema) as w,
    ):
        w.write_table(table, max_chunksize=90)
    return str(tmp / "rows.arrow"), {}


def from_a_builder(tmp: Path) -> Any:
    return "parquet", {"data_files": {"train": str(tmp / "p*.parquet")}}


def from_a_saved_dataset(tmp: Path) -> Any:
    Dataset(arrow_table(0, ROWS)).save_to_disk(tmp / "saved")
    return tmp / "saved", {}


def from_a_saved_dict(tmp: Path) -> Any:
    both = DatasetDict(train=Dataset(arrow_table(0, ROWS)), test=Dataset(arrow_table(0, 3)))
    both.save_to_disk(tmp / "saved")
    return tmp / "saved", {"split": "train"}


def from_a_dataset(tmp: Path) -> Any:
    return Dataset(arrow_table(0, ROWS)), {}


def from_a_dataset_with_indices(tmp: Path) -> Any:
    rows = Dataset(pa.concat_tables([arrow_table(500, ROWS), arrow_table(0, 500)]))
    return rows.select([*range(500, ROWS), *range(500)]), {}


def from_a_dict(tmp: Path) -> Any:
    return DatasetDict(a=Dataset(arrow_table(0, 3)), b=Dataset(arrow_table(0, ROWS))), {
        "split": "b"
    }


def generate() -> Iterator[dict[str, Any]]:
    yield from arrow_table(0, ROWS).to_pylist()


def from_a_generator(tmp: Path) -> Any:
    return IterableDataset.from_generator(generate), {}


def from_a_mapped_stream(tmp: Path) -> Any:
    stream = Dataset(arrow_table(0, 2 * ROWS)).to_iterable_dataset(num_shards=3)
    return stream.filter(lambda row: row["id"] < ROWS).map(lambda row: {"new": row["id"] + 1}), {}


def from_lance(tmp: Path) -> Any:
    return make_table(tmp / "source.lance", ROWS, 300, ["id", "text"]), {}


def from_lancedb(tmp: Path) -> Any:
    return lancedb.connect(tmp / "db").create_table("rows", arrow_table(0, ROWS)), {}


SOURCES = [
    from_parquet,
    from_one_file,
    from_a_directory,
    from_csv,
    from_json_lines,
    from_arrow,
    from_a_builder,
    from_a_saved_dataset,
    from_a_saved_dict,
    from_a_dataset,
    from_a_dataset_with_indices,
    from_a_dict,
    from_a_generator,
    from_a_mapped_stream,
    from_lance,
    from_lancedb,
]


@pytest.mark.parametrize("make", SOURCES)
def test_any_source_keeps_its_rows_and_order_and_is_permuted_by_a_seed(
    make: Callable[[Path], Any], parquet: str, tmp_path: Path, out: str, small_batches: None
) -> None:
    source, options = make(tmp_path)
    written = hls.write_lance(source, out, rows_per_fragment=400, **options)
    assert (written.rows, written.fragments, written.version) == (ROWS, 3, 3)
    assert stored_ids(out) == list(range(ROWS))
    assert fragment_rows(out) == [400, 400, 200]
    ds = hls.from_lance(out)
    row = list(ds)[-1]
    assert (row["id"], row["text"]) == (999, "text 999")
    assert str(ds.features["id"]) == "Value('int64')"

    shuffled = str(tmp_path / "shuffled.lance")
    hls.write_lance(source, shuffled, shuffle_seed=7, **options)
    found = stored_ids(shuffled)
    assert found != list(range(ROWS))
    assert sorted(found) == list(range(ROWS))
    # Whatever the source is, the order is that of the package.
    assert found == ids(hls.from_lance(out, shuffle_seed=7, num_splits=1))
    assert not Path(shuffled + ".unshuffled").exists()
    gc.collect()  # see above


# Features and values.

PICTURE = PIL.Image.fromarray(np.arange(48, dtype=np.uint8).reshape(4, 4, 3))
TYPES: dict[str, tuple[Any, Any]] = {
    "label": (ClassLabel(names=["cat", "dog"]), 1),
    "small": (Value("int8"), 3),
    "half": (Value("float16"), 1.5),
    "large_text": (Value("large_string"), "x"),
    "bytes": (Value("binary"), b"\0\1"),
    "time": (Value("timestamp[us, tz=UTC]"), None),
    "list": (List(Value("int64")), [1, 2]),
    "fixed": (List(Value("float32"), length=3), [1.0, 2.0, 3.0]),
    "large_list": (LargeList(Value("int64")), [4]),
    "sequence": (Sequence({"x": Value("int64"), "y": Value("string")}), {"x": [1], "y": ["a"]}),
    "struct": ({"a": {"b": Value("int8")}}, {"a": {"b": 5}}),
    "array": (Array2D(shape=(2, 3), dtype="float32"), [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]),
    "arrays": (List(Array2D(shape=(1, 2), dtype="int64")), [[[1, 2]]]),
    "translation": (Translation(languages=["en", "fr"]), {"en": "a", "fr": "b"}),
    "variants": (
        TranslationVariableLanguages(languages=["en", "fr"]),
        {"language": ("en", "fr"), "translation": ("a", "b")},
    ),
    "image": (Image(), PICTURE),
    "images": (List(Image()), [PICTURE]),
    "nothing": (Value("null"), None),
}


def comparable(value: Any) -> Any:
    if isinstance(value, PIL.Image.Image):
        return (value.mode, value.size, value.tobytes())
    if isinstance(value, dict):
        return {k: comparable(v) for k, v in value.items()}
    return [comparable(v) for v in value] if isinstance(value, list) else value


@pytest.mark.parametrize("streaming", [False, True])
def test_all_features_and_values_are_kept(out: str, streaming: bool) -> None:
    features = Features({name: feature for name, (feature, _) in TYPES.items()})
    row = {name: value for name, (_, value) in TYPES.items()}
    rows = [row, dict.fromkeys(row), row]
    rows[1]["label"] = 0
    source = Dataset.from_list(rows, features=features)
    hls.write_lance(source.to_iterable_dataset() if streaming else source, out)
    ds = hls.from_lance(out)
    assert ds.features == source.features
    assert comparable(list(ds)) == comparable(list(source))
    again = out.replace("out", "again")  # and from table to table
    hls.write_lance(out, again, shuffle_seed=1)
    assert lance.dataset(again).schema.equals(lance.dataset(out).schema, check_metadata=True)
    assert hls.from_lance(again).features == source.features


def make_pictures(directory: Path, count: int) -> None:
    for i in range(count):
        path = directory / ("cat", "dog")[i % 2] / f"{i:03}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        PIL.Image.fromarray(np.full((4, 4, 3), i, dtype=np.uint8)).save(path)


@pytest.mark.parametrize("kind", ["folder", "paths", "stream"])
def test_files_named_by_path_are_read_into_the_table(
    tmp_path: Path, out: str, kind: str, small_batches: None
) -> None:
    make_pictures(tmp_path / "pictures", 60)
    folder = datasets.load_dataset(
        "imagefolder", data_dir=str(tmp_path / "pictures"), split="train"
    )
    source: Any = {
        "folder": tmp_path / "pictures",
        "paths": folder,
        "stream": folder.to_iterable_dataset(),
    }[kind]
    values = [row["image"].getpixel((0, 0))[0] for row in folder]
    labels = folder["label"]
    hls.write_lance(source, out, rows_per_fragment=25)
    shutil.rmtree(tmp_path / "pictures")
    rows = list(hls.from_lance(out))
    assert hls.from_lance(out).features == folder.features
    assert sorted(values) == list(range(60))
    assert [row["image"].getpixel((0, 0))[0] for row in rows] == values
    assert [row["label"] for row in rows] == list(labels)


def videos(paths: list[str]) -> Dataset:
    """Made of Arrow: to encode paths, `datasets` wants torchcodec, which wants FFmpeg."""
    schema = Features(video=Video()).arrow_schema
    values = [{"bytes": None, "path": path} for path in paths]
    return Dataset(pa.table([pa.array(values, schema.field(0).type)], schema=schema))


def test_videos_are_read_into_the_table(tmp_path: Path, out: str) -> None:
    (tmp_path / "a.mp4").write_bytes(b"video")
    source = videos([str(tmp_path / "a.mp4")])
    hls.write_lance(source, out)
    (tmp_path / "a.mp4").unlink()
    assert hls.from_lance(out).features == source.features
    stored = lance.dataset(out).to_table().column("video")[0].as_py()
    assert stored == {"bytes": b"video", "path": "a.mp4"}


def test_a_file_that_is_missing_is_an_error_that_names_it(tmp_path: Path, out: str) -> None:
    source = Dataset.from_dict(
        {"image": [str(tmp_path / "no.png")]}, features=Features(image=Image())
    )
    with pytest.raises(FileNotFoundError, match=r"no\.png"):
        hls.write_lance(source, out)


def test_columns_are_chosen_and_put_in_order(parquet: str, tmp_path: Path, out: str) -> None:
    for source in (parquet, Dataset(arrow_table(0, 9)), from_lance(tmp_path)[0]):
        hls.write_lance(source, out, columns=["text", "id"], mode="overwrite")
        assert lance.dataset(out).schema.names == ["text", "id"]


@pytest.mark.parametrize("shuffle", [{}, {"shuffle_seed": 1}])
def test_a_source_without_rows_makes_a_table_without_rows(out: str, shuffle: dict) -> None:
    features = Features(id=Value("int64"), text=Value("string"))
    stream = IterableDataset.from_generator(lambda: iter(()), features=features)
    for source in (Dataset.from_dict({"id": [], "text": []}, features=features), stream):
        written = hls.write_lance(source, out, mode="overwrite", **shuffle)
        assert written.rows == 0
        assert hls.from_lance(out).features == features


# The order of a shuffle.


def test_a_shuffle_is_reproducible_and_another_seed_gives_another_order(
    parquet: str, tmp_path: Path
) -> None:
    orders = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        hls.write_lance(parquet, tmp_path / name, shuffle_seed=seed)
        orders.append(stored_ids(str(tmp_path / name)))
    assert orders[0] == orders[1] != orders[2]


def test_a_shuffle_puts_rows_anywhere(tmp_path: Path) -> None:
    """Over 120 seeds each quarter of the source is in each quarter of the table equally often."""
    source = Dataset(arrow_table(0, 40))
    opened = inputs.input_of_dataset(source)
    counts = np.zeros((4, 4))
    for seed in range(120):
        batches = opened.shuffled(seed, 1).batches(inputs.Position())
        order = [i for batch in batches for i in batch.table.column("id").to_pylist()]
        for place, row in enumerate(order):
            counts[place // 10, row // 10] += 1
    assert (abs(counts - 300) < 5 * np.sqrt(300)).all()


def test_clumps_move_as_one(parquet: str, out: str) -> None:
    hls.write_lance(parquet, out, shuffle_seed=1, shuffle_clump_size=10)
    found = np.array(stored_ids(out)).reshape(-1, 10)
    assert (np.diff(found, axis=1) == 1).all()
    assert (np.diff(found[:, 0]) != 10).any()


# Interruption.


def interrupt(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """Make the commit after so many fail, and all later ones."""
    commit = table_writer.TableWriter.commit
    count = iter(range(1000))

    def commit_or_fail(*arguments: Any, **options: Any) -> Any:
        if next(count) >= after:
            raise KeyboardInterrupt
        return commit(*arguments, **options)

    monkeypatch.setattr(table_writer.TableWriter, "commit", commit_or_fail)


@pytest.mark.parametrize("rows_per_fragment", [37, 90])
@pytest.mark.parametrize("make", [from_parquet, from_a_mapped_stream, from_a_dataset, from_lance])
def test_a_run_interrupted_after_any_fragment_goes_on_exactly(
    make: Callable[[Path], Any],
    rows_per_fragment: int,
    parquet: str,
    tmp_path: Path,
    out: str,
    small_batches: None,
) -> None:
    source, options = make(tmp_path)
    options["rows_per_fragment"] = rows_per_fragment
    for after in (0, 1, 2, 5, 8, 11):  # a chain: each goes on with what the last one left
        with pytest.MonkeyPatch.context() as patch:
            interrupt(patch, after if after < 2 else 2)
            with pytest.raises(KeyboardInterrupt):
                hls.write_lance(source, out, **options)
        if Path(out, "_versions").exists():
            assert stored_ids(out) == list(range(len(stored_ids(out))))
    before = len(stored_ids(out))
    assert before > 0
    written = hls.write_lance(source, out, **options)
    assert written.resumed_rows == before
    assert stored_ids(out) == list(range(ROWS))
    # Nothing is left of the fragments that were written and not committed.
    assert len(list(Path(out, "data").iterdir())) == written.fragments


def test_a_source_that_fails_is_gone_on_with_where_it_failed(out: str, small_batches: None) -> None:
    fails = True

    def generate() -> Iterator[dict[str, int]]:
        for i in range(ROWS):
            if fails and i == 700:
                raise ZeroDivisionError("at 700")
            yield {"id": i}

    stream = IterableDataset.from_generator(generate, features=Features(id=Value("int64")))
    with pytest.raises(ZeroDivisionError, match="at 700"):  # as it is, not as Lance words it
        hls.write_lance(stream, out, rows_per_fragment=100)
    assert stored_ids(out) == list(range(600))
    fails = False
    assert hls.write_lance(stream, out, rows_per_fragment=100).resumed_rows == 600
    assert stored_ids(out) == list(range(ROWS))


def _versions(table: str) -> int:
    try:
        return len([name for name in os.listdir(f"{table}/_versions") if name.endswith("manifest")])
    except FileNotFoundError:
        return 0


@pytest.mark.parametrize("kind", ["stream", "shuffled stream", "table"])
def test_killed_processes_leave_nothing_missing_and_nothing_twice(
    kind: str, parquet: str, tmp_path: Path, out: str
) -> None:
    """Real processes, killed by SIGKILL at random moments, until one lives to the end."""
    rows = 3000
    pq.write_table(arrow_table(0, rows), tmp_path / "one.parquet", row_group_size=100)
    source: Any = str(tmp_path / "one.parquet")
    options: dict[str, Any] = {"rows_per_fragment": 60}  # 50 commits
    if kind == "shuffled stream":
        options["shuffle_seed"] = 5
    if kind == "table":
        source = make_table(tmp_path / "source.lance", rows, 700, ["id", "text"])
    context = multiprocessing.get_context("forkserver")
    randomness = random.Random(kind)
    watched, killed = out, 0
    if kind == "shuffled stream":
        watched = out + ".unshuffled"
    for _ in range(40):
        process = context.Process(target=convert, args=(source, out, options))
        process.start()
        aim = _versions(watched) + randomness.randint(1, 12)
        while process.is_alive() and _versions(watched) < aim:
            process.join(0.002)
        process.join(randomness.random() * 0.01)
        process.kill()
        process.join()
        killed += process.exitcode != 0
        if (open_writer(out).record or {}).get("finished"):  # or killed right after that
            break
        if kind == "shuffled stream" and killed == 2:
            watched = out  # the second pass
        if Path(out, "_versions").exists() and kind != "shuffled stream":
            found = stored_ids(out)
            assert found == list(range(len(found)))
    assert killed >= 3
    expected = list(range(rows))
    if kind == "shuffled stream":
        plain = hls.write_lance(source, tmp_path / "plain.lance").table
        expected = ids(hls.from_lance(plain, shuffle_seed=5, num_splits=1))
    assert stored_ids(out) == expected
    assert fragment_rows(out) == [60] * 50
    if process.exitcode != 0:
        with pytest.raises(ValueError, match="with all rows of this source"):
            hls.write_lance(source, out, **options)
    else:  # nothing is left of fragments that were not committed
        assert len(list(Path(out, "data").iterdir())) == 50
    assert not Path(out + ".unshuffled").exists()


def test_what_a_run_leaves_when_it_is_killed_before_its_last_step_is_tidied(
    parquet: str, out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(table_writer.TableWriter, "drop", lambda self: None)
        hls.write_lance(parquet, out, shuffle_seed=1)
    assert Path(out + ".unshuffled").exists()
    with pytest.raises(ValueError, match="is there already"):
        hls.write_lance(parquet, out, shuffle_seed=1)
    assert not Path(out + ".unshuffled").exists()


def test_a_stream_with_states_does_not_read_again_what_was_written(
    tmp_path: Path, out: str, small_batches: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for i in range(10):
        pq.write_table(arrow_table(i * 100, i * 100 + 100), tmp_path / f"p{i}.parquet")
    source = str(tmp_path / "p*.parquet")
    with pytest.MonkeyPatch.context() as patch:
        interrupt(patch, 8)
        with pytest.raises(KeyboardInterrupt):
            hls.write_lance(source, out, rows_per_fragment=100)
    read: list[int] = []
    iterate = IterableDataset.iter

    def iter_(self: Any, size: int) -> Iterator[pa.Table]:
        for table in iterate(self, size):
            read.extend(table.column("id").to_pylist())
            yield table

    monkeypatch.setattr(IterableDataset, "iter", iter_)
    hls.write_lance(source, out, rows_per_fragment=100)
    assert set(range(800, ROWS)) <= set(read)
    assert (
        len(read) <= 200 + 37 + 8
    )  # a batch in which the last run ended, a look at the first rows


def test_a_run_goes_on_in_the_batches_it_began_with(
    parquet: str, out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inputs, "MAX_ROWS", 37)
    begin(parquet, out)
    monkeypatch.setattr(inputs, "MAX_ROWS", 64)  # as another release might have it
    sizes: list[int] = []
    cast = feed._cast

    def sized(table: pa.Table, *arguments: Any) -> pa.Table:
        sizes.append(table.num_rows)
        return cast(table, *arguments)

    monkeypatch.setattr(feed, "_cast", sized)
    hls.write_lance(parquet, out)
    assert stored_ids(out) == list(range(ROWS))
    assert set(sizes[1:-1]) == {37}


# Refusals.


def test_a_table_that_is_there_is_refused_unless_it_shall_be_overwritten(
    parquet: str, out: str
) -> None:
    hls.write_lance(parquet, out)
    with pytest.raises(
        ValueError, match=r"is there already, with all.* 1,000 rows.*mode=\"overwrite\""
    ):
        hls.write_lance(parquet, out)
    make_table(out, 5, 5, mode="overwrite")  # another's
    with pytest.raises(ValueError, match="is there already"):
        hls.write_lance(parquet, out)
    written = hls.write_lance(parquet, out, mode="overwrite")
    assert written.version == 3
    assert stored_ids(out) == list(range(ROWS))
    assert len(hls.from_lance(out, version=2)) == 5  # older versions are kept


def begin(source: Any, out: str, **options: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        interrupt(patch, 3)
        with pytest.raises(KeyboardInterrupt):
            hls.write_lance(source, out, rows_per_fragment=100, **options)


def test_an_interrupted_run_goes_on_with_the_same_source_and_arguments_only(
    parquet: str, tmp_path: Path, out: str
) -> None:
    begin(parquet, out)
    for arguments, text in [
        ({"shuffle_seed": 1}, "shuffle_seed was None and is 1"),
        ({"columns": ["id"]}, r"columns was None and is \['id'\]"),
    ]:
        with pytest.raises(ValueError, match=text):
            hls.write_lance(parquet, out, **arguments)
    with pytest.raises(ValueError, match="kind was 'parquet' and is 'Dataset'"):
        hls.write_lance(Dataset(arrow_table(0, ROWS)), out)
    with pytest.raises(ValueError, match="has been begun by a run that was interrupted"):
        hls.write_lance(parquet, out, resume=False)
    pq.write_table(arrow_table(301, ROWS), tmp_path / "p2.parquet")
    os.utime(tmp_path / "p2.parquet", (1, 1))
    with pytest.raises(ValueError, match="files was"):
        hls.write_lance(parquet, out)
    assert stored_ids(out) == list(range(300))
    written = hls.write_lance(parquet, out, mode="overwrite", resume=False)
    assert written.resumed_rows == 0
    assert stored_ids(out) == list(range(ROWS))


def test_overwriting_goes_on_too(parquet: str, out: str) -> None:
    make_table(out, 5, 5)
    begin(parquet, out, mode="overwrite")
    assert stored_ids(out) == list(range(300))
    assert hls.write_lance(parquet, out, mode="overwrite").resumed_rows == 300
    assert stored_ids(out) == list(range(ROWS))


def test_a_table_changed_since_the_interruption_is_refused(parquet: str, out: str) -> None:
    begin(parquet, out)
    lance.dataset(out).delete("id = 7")
    with pytest.raises(ValueError, match=r"is there already: .* 299 rows"):
        hls.write_lance(parquet, out)


def test_rows_of_another_stream_are_refused_by_its_features(out: str) -> None:
    begin(IterableDataset.from_generator(generate), out)
    other = Dataset(arrow_table(0, ROWS).select(["id"])).to_iterable_dataset()
    with pytest.raises(ValueError, match="features was"):
        hls.write_lance(other, out)


@pytest.mark.parametrize("moment", ["before", "after"])
def test_two_processes_that_write_are_found_out(
    parquet: str, out: str, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """The other one writes before our second commit, or while it is under way."""
    begin(parquet, out)
    commit = lance.LanceDataset.commit

    def other(*arguments: Any, **options: Any) -> Any:
        monkeypatch.undo()
        lance.write_dataset(arrow_table(0, 1), out, mode="append")
        return commit(*arguments, **options)

    if moment == "after":
        monkeypatch.setattr(lance.LanceDataset, "commit", staticmethod(other))
    else:
        handed_on = table_writer.TableWriter.write

        def write(*arguments: Any, **options: Any) -> Any:
            monkeypatch.undo()
            lance.write_dataset(arrow_table(0, 1), out, mode="append")
            return handed_on(*arguments, **options)

        monkeypatch.setattr(table_writer.TableWriter, "write", write)
    with pytest.raises(OSError, match=r"another process wrote to .*out\.lance meanwhile"):
        hls.write_lance(parquet, out, rows_per_fragment=100)
    # The other one's row is kept, and ours only if they had been committed by then.
    assert len(stored_ids(out)) == (301 if moment == "before" else 401)
    with pytest.raises(ValueError, match=r"is there already|had 400 rows and has 401"):
        hls.write_lance(parquet, out, rows_per_fragment=100)


def test_bad_arguments_are_named(parquet: str, tmp_path: Path, out: str) -> None:
    def refuse(text: str, source: Any = parquet, table: Any = out, **options: Any) -> None:
        with pytest.raises(ValueError, match=text):
            hls.write_lance(source, table, **options)

    refuse("`mode` must be one of", mode="append")
    refuse("`shuffle_seed` must be an integer", shuffle_seed="1")
    refuse("`shuffle_clump_size` has no effect without `shuffle_seed`", shuffle_clump_size=4)
    refuse("`rows_per_fragment` must be an integer", rows_per_fragment=0)
    refuse("`bytes_per_fragment` must be an integer", bytes_per_fragment=0)
    refuse("`columns` names .*did you mean 'text'", columns=["txet"])
    refuse(r"`columns` must be a list", columns="id")
    refuse(r"`split` must name one of \['train'\]: got split='tran'; did you mean", split="tran")
    refuse("`table` must be a path or URI", table=3)
    refuse("`table` must name a directory: got the file", table=tmp_path / "p0.parquet")
    refuse("`table` must name a new directory or a Lance table: .*p0", table=tmp_path)
    refuse("`storage_options` must be a dict", storage_options=["a"])
    refuse("`source` must be a path or URI", source=3)
    refuse("`source` must be a file that datasets can load", source=__file__)
    refuse("`source` is Dataset, which takes no", source=Dataset(arrow_table(0, 1)), name="x")
    table = from_lance(tmp_path)[0]
    refuse("which takes no .'name'.; it takes .'filter', 'version'", source=table, name="x")
    refuse("`table` must be another than `source`", source=table, table=table)
    with pytest.raises(FileNotFoundError, match="there is no file"):
        hls.write_lance(tmp_path / "no.parquet", out)
    with pytest.raises(FileNotFoundError, match="did you mean"):
        hls.write_lance(tmp_path / "sourc.lance", out)
    assert not Path(out).exists()


def test_rows_that_do_not_fit_the_features_found_at_the_start_are_named(
    tmp_path: Path, out: str
) -> None:
    lines = [json.dumps({"id": i, "x": None if i < 400 else {"y": i}}) for i in range(500)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    features = Features(id=Value("int64"), x={"y": Value("int64")})
    hls.write_lance(tmp_path / "rows.jsonl", out, features=features)
    assert len(stored_ids(out)) == 500
    stream = IterableDataset.from_generator(lambda: map(json.loads, lines))
    with pytest.raises((ValueError, TypeError), match=r"null|cast"):
        hls.write_lance(stream, out, mode="overwrite")


# Tables for training.


def test_a_filter_and_a_version_of_a_lance_source(tmp_path: Path, out: str) -> None:
    source = from_lance(tmp_path)[0]
    lance.dataset(source).delete("id < 900")
    hls.write_lance(source, out, filter="id % 2 = 0")
    assert stored_ids(out) == list(range(900, ROWS, 2))
    hls.write_lance(source, out, version=1, mode="overwrite")
    assert stored_ids(out) == list(range(ROWS))


def test_a_fragment_ends_at_its_bytes(tmp_path: Path, out: str) -> None:
    values = np.random.default_rng(0).integers(0, 256, (400, 10_000), dtype=np.uint8)
    source = Dataset(pa.table({"x": [row.tobytes() for row in values]}))
    hls.write_lance(source, out, bytes_per_fragment=1_000_000)
    sizes = [f.metadata.files[0].file_size_bytes for f in lance.dataset(out).get_fragments()]
    assert len(sizes) >= 2
    assert all(1_000_000 <= size < 1_000_000 + 2 * inputs.BATCH_BYTES for size in sizes[:-1])


@pytest.mark.parametrize("streaming", [False, True])
def test_memory_is_bounded_by_batches_not_by_the_source(
    tmp_path: Path, out: str, streaming: bool
) -> None:
    """400 MB of files that the source names by path, in a process that may keep far less.

    Those that a stream begins with say nothing about the size of the others.
    """
    files = []
    for i in range(200):
        path = tmp_path / f"{i}.mp4"
        with path.open("wb") as file:
            # Read as zeros, they take no room.
            file.truncate(1000 if streaming and i < 10 else 2_000_000)
        files.append(str(path))
    source: Any = videos(files)
    if streaming:
        source = source.to_iterable_dataset()
    tracemalloc.start()
    pool = pa.default_memory_pool()
    before = pool.bytes_allocated()
    peaks = []
    cast = feed._cast

    def measured(*arguments: Any) -> pa.Table:
        peaks.append(pool.bytes_allocated() - before)
        return cast(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(feed, "_cast", measured)
        written = hls.write_lance(source, out)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert written.rows == 200
    assert max(peaks) < 150e6
    assert peak < 50e6


def test_a_parquet_file_is_not_kept_in_memory_while_it_is_read(tmp_path: Path, out: str) -> None:
    """80 MB in 40 row groups; Arrow keeps what it reads from Python files as bytes objects."""
    path, random_bytes = tmp_path / "big.parquet", np.random.default_rng(0).bytes
    schema = pa.schema([("id", pa.int64()), ("x", pa.binary())])
    with pq.ParquetWriter(path, schema, compression="none") as writer:
        for i in range(40):
            values = [range(i * 20, i * 20 + 20), [random_bytes(100_000) for _ in range(20)]]
            writer.write_table(pa.table(values, schema=schema))
    tracemalloc.start()
    hls.write_lance(path, out)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert stored_ids(out) == list(range(800))
    assert peak < 40e6


@pytest.mark.parametrize("shuffle", [{}, {"shuffle_seed": 1}])
def test_an_object_store_goes_on_too(parquet: str, shuffle: dict[str, Any], tmp_path: Path) -> None:
    with S3() as s3:
        uri = s3.uri("out.lance")
        options = {"storage_options": s3.options, "rows_per_fragment": 100, **shuffle}
        with pytest.MonkeyPatch.context() as patch:
            interrupt(patch, 13 if shuffle else 3)
            with pytest.raises(KeyboardInterrupt):
                hls.write_lance(parquet, uri, **options)
        written = hls.write_lance(parquet, uri, **options)
        assert written.resumed_rows == 300
        found = ids(hls.from_lance(uri, storage_options=s3.options))
        assert sorted(found) == list(range(ROWS))
        assert (found == list(range(ROWS))) == (not shuffle)
        assert not open_writer(uri + ".unshuffled", s3.options).exists
        with pytest.raises(ValueError, match="is there already"):
            hls.write_lance(parquet, uri, **options)


# The command.


def test_the_command_converts_and_prints_one_document(
    parquet: str, out: str, command: Command
) -> None:
    options = [
        "--columns",
        "text,id",
        "--shuffle",
        "3",
        "--clump",
        "10",
        "--rows-per-fragment",
        "400",
    ]
    found = command("convert", parquet, out, *options, "--json")
    assert found.code == 0, found.err
    assert found.err == ""  # no progress bar where there is no terminal
    assert found.json["rows"] == ROWS
    assert found.json["fragments"] == 3
    assert lance.dataset(out).schema.names == ["text", "id"]
    rows = np.array(stored_ids(out)).reshape(-1, 10)
    assert (np.diff(rows, axis=1) == 1).all()
    assert sorted(rows.ravel()) == list(range(ROWS))


def test_the_command_goes_on_and_says_so(parquet: str, out: str, command: Command) -> None:
    begin(parquet, out)
    found = command("convert", parquet, out, "--bytes-per-fragment", "1K")
    assert found.code == 0, found.err
    assert "went on after the 300 rows" in found.out
    assert stored_ids(out) == list(range(ROWS))
    assert command("convert", parquet, out).code == 2
    again = command("convert", parquet, out, "--overwrite", "--split", "train", "--no-resume")
    assert again.code == 0, again.err
    assert stored_ids(out) == list(range(ROWS))


def test_the_command_takes_a_builder_and_its_files(
    parquet: str, tmp_path: Path, out: str, command: Command
) -> None:
    files = [f"--data-files={tmp_path}/p{i}.parquet" for i in range(2)]
    found = command("convert", "parquet", out, *files)
    assert found.code == 0, found.err
    assert stored_ids(out) == list(range(301))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["no.parquet"], "there is no file 'no.parquet'"),
        (["{}", "--columns", "txet"], "did you mean 'text'"),
        (["{}", "--clump", "4"], "`shuffle_clump_size` has no effect without `shuffle_seed`"),
        (["{}", "--bytes-per-fragment", "1T"], "must be a number of bytes such as 512M"),
        (["{}", "--split", "tran"], "did you mean 'train'"),
    ],
)
def test_wrong_arguments_of_the_command_are_exit_code_2(
    arguments: list[str], text: str, parquet: str, out: str, command: Command
) -> None:
    source, *options = [argument.format(parquet) for argument in arguments]
    found = command("convert", source, out, *options)
    assert found.code == 2
    assert found.out == ""
    assert text in found.err
    assert not Path(out).exists()


def test_contract_with_lance_commits_hold_the_record(out: str) -> None:
    """What `table_writer` relies on: properties of the transaction, and its place."""
    writer = open_writer(out)
    schema = arrow_table(0, 5).schema
    batches = arrow_table(0, 5).to_batches()
    writer = writer.commit(
        schema, writer.write(schema, batches, replacing=True), {"a": 1}, replacing=True
    )
    handle = lance.dataset(out)
    properties = handle.read_transaction(handle.version).transaction_properties
    assert json.loads(properties[table_writer.RECORD]) == {"a": 1}
    assert open_writer(out).record == {"a": 1}
    handle.tags.create("t", 1)
    assert open_writer(out).record == {"a": 1}
