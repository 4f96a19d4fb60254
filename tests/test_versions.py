"""Every kind of change to a table, under a reader of the version before and seen by a new one.

Each pass is compared, by id and value, with a plain scan of the version in the order of the
oracle.
"""

import multiprocessing
from collections.abc import Callable
from itertools import chain, islice
from typing import Any

import lance
import oracle
import pyarrow as pa
import pytest
from helpers import through_json
from lance import LanceDataset, LanceOperation
from lance.file import LanceFileWriter
from lance.fragment import DataFile, write_fragments
from torchdata.stateful_dataloader import StatefulDataLoader

import hf_lance_stream as hls

multiprocessing.set_forkserver_preload(["torch", "datasets", "lance", "hf_lance_stream"])

ROWS, SPLITS, CLUMP, SEED = 120, 4, 4, 3
SHUFFLED: dict[str, Any] = {
    "num_splits": SPLITS,
    "shuffle_seed": SEED,
    "shuffle_clump_size": CLUMP,
    "tail": "keep",
}
FILTER = "id % 5 != 2"


def rows_of(ids: Any, x: float | None = None) -> pa.Table:
    """Rows with these ids; their x is id / 2, or the same for all."""
    ids = list(ids)
    values = [i / 2 if x is None else x for i in ids]
    return pa.table({"id": pa.array(ids, pa.int64()), "x": pa.array(values, pa.float64())})


def write_column(path: str, name: str, file: str, values: list[float]) -> None:
    """A data file with one column."""
    with LanceFileWriter(f"{path}/data/{file}", pa.schema([(name, pa.float64())])) as writer:
        writer.write_batch(pa.table({name: pa.array(values, pa.float64())}))


def delete(path: str) -> None:
    lance.dataset(path).delete("id % 3 = 0 or id in (29, 30) or (id >= 60 and id < 90)")


def update(path: str) -> None:
    lance.dataset(path).update({"x": "-1.0"}, where="id % 7 = 0")


def merge_insert(path: str) -> None:
    merge = lance.dataset(path).merge_insert("id")
    merge.when_matched_update_all().when_not_matched_insert_all().execute(
        rows_of(range(100, 140), -2.0)
    )


def replace_rows(path: str) -> None:
    """A merge that also deletes what is not in the source."""
    merge = lance.dataset(path).merge_insert("id").when_matched_update_all()
    merge.when_not_matched_by_source_delete("id < 20").execute(rows_of(range(10, 30), -3.0))


def compact(path: str) -> None:
    delete(path)
    lance.dataset(path).optimize.compact_files(target_rows_per_fragment=1000)


def append(path: str) -> None:
    lance.write_dataset(rows_of(range(120, 150)), path, mode="append", max_rows_per_file=7)


def add_columns(path: str) -> None:
    lance.dataset(path).add_columns({"y": "x * 2"})


def drop_column(path: str) -> None:
    lance.dataset(path).add_columns({"y": "x * 2"})
    lance.dataset(path).drop_columns(["y"])


def rename_column(path: str) -> None:
    lance.dataset(path).alter_columns({"path": "x", "name": "z"})


def cast_column(path: str) -> None:
    lance.dataset(path).alter_columns({"path": "x", "data_type": pa.float32()})


def merge_columns(path: str) -> None:
    """A left join: the column is null in half of the rows."""
    lance.dataset(path).merge(pa.table({"id": range(0, ROWS, 2), "w": range(60)}), "id")


def lack_a_file_when_added(path: str) -> None:
    """All fragments lack the file of a column that was added without values, but the last."""
    lance.dataset(path).add_columns(pa.field("y", pa.float64()))
    more = rows_of(range(120, 130)).append_column("y", pa.array([0.5] * 10))
    lance.write_dataset(more, path, mode="append")


def lack_a_file_when_appended(path: str) -> None:
    """The last fragment lacks the file of a column."""
    add_columns(path)
    lance.write_dataset(rows_of(range(120, 130)), path, mode="append")


def replace_a_file(path: str) -> None:
    """Only the second fragment has the file of a column, from a data replacement."""
    lance.dataset(path).add_columns(pa.field("y", pa.float64()))
    write_column(path, "y", "y.lance", [-9.0] * 30)
    group = LanceOperation.DataReplacementGroup(1, DataFile("y.lance", [2], [0], 2, 0))
    LanceDataset.commit(
        path,
        LanceOperation.DataReplacement([group]),
        read_version=lance.dataset(path).version,
    )


def update_a_column(path: str) -> None:
    """New values of a column in some rows of one fragment, in a file of their own."""
    table = lance.dataset(path)
    fragment, fields = table.get_fragments()[1].update_columns(
        rows_of([30, 31, 59], -5.0), left_on="id", right_on="id"
    )
    LanceDataset.commit(
        path,
        LanceOperation.Update(updated_fragments=[fragment], fields_modified=fields),
        read_version=table.version,
    )


def overwrite(path: str) -> None:
    lance.write_dataset(rows_of(range(1000, 1090)), path, mode="overwrite", max_rows_per_file=40)


def overwrite_by_operation(path: str) -> None:
    data = rows_of(range(50, 170), -4.0)
    fragments = write_fragments(data, path)
    LanceDataset.commit(path, LanceOperation.Overwrite(data.schema, fragments))


def restore(path: str) -> None:
    delete(path)
    lance.dataset(path, version=1).restore()


CHANGES: dict[str, Callable[[str], None]] = {
    change.__name__: change
    for change in (
        delete,
        update,
        merge_insert,
        replace_rows,
        compact,
        append,
        add_columns,
        drop_column,
        rename_column,
        cast_column,
        merge_columns,
        lack_a_file_when_added,
        lack_a_file_when_appended,
        replace_a_file,
        update_a_column,
        overwrite,
        overwrite_by_operation,
        restore,
    )
}
STABLE = pytest.mark.parametrize("stable", [False, True], ids=["addresses", "stable row ids"])
EVERY = pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)


@pytest.fixture
def path(tmp_path: Any, stable: bool) -> str:
    """T(120, 30) with the columns id and x."""
    path = str(tmp_path / "t.lance")
    lance.write_dataset(
        rows_of(range(ROWS)), path, max_rows_per_file=30, enable_stable_row_ids=stable
    )
    return path


def scan(path: str, version: int | None, filter: str | None = None) -> list[dict[str, Any]]:
    """The rows of a version, in table order."""
    rows: list[dict[str, Any]] = (
        lance.dataset(path, version=version).to_table(filter=filter).to_pylist()
    )
    return rows


def expected(rows: list[Any], options: dict[str, Any]) -> list[Any]:
    """`rows` in the order of a pass, by the oracle."""
    if not options.get("num_splits"):
        return rows
    sequence = oracle.sequence(len(rows), CLUMP, SEED, options.get("epoch", 0))
    splits = oracle.cut(sequence, SPLITS, "keep")
    mine = oracle.group(splits, options.get("world_size", 1), options.get("rank", 0))
    return [rows[n] for n in oracle.deal(mine)]


PASSES: dict[str, dict[str, Any]] = {
    "natural": {},
    "shuffled": SHUFFLED,
    "another epoch": {**SHUFFLED, "epoch": 3},
    "rank 0 of 2": {**SHUFFLED, "rank": 0, "world_size": 2},
    "rank 1 of 2": {**SHUFFLED, "rank": 1, "world_size": 2},
    "filtered": {"filter": FILTER},
    "filtered, shuffled": {**SHUFFLED, "filter": FILTER},
}


def check_resumed(path: str, options: dict[str, Any], want: list[Any], version: Any) -> None:
    """A pass cut at some places, each rest read by a dataset that names the version or not."""
    ds = hls.from_lance(path, **options, version=version)
    seen = []
    places = {0, 1, 17, len(want) // 2, len(want) - 1, len(want)}
    states = {0: through_json(ds.state_dict())}
    for n, row in enumerate(ds, 1):
        seen.append(row)
        if n in places:
            states[n] = through_json(ds.state_dict())
    assert seen == want
    for place, state in states.items():
        again = hls.from_lance(path, **options, version=version)
        again.load_state_dict(state)
        assert list(again) == want[place:], place


@STABLE
@EVERY
def test_a_change_does_not_show_in_the_version_before_and_shows_in_a_new_dataset(
    path: str, change: Callable[[str], None]
) -> None:
    before = scan(path, 1)
    kept = scan(path, 1, FILTER)
    datasets = {name: hls.from_lance(path, **options) for name, options in PASSES.items()}
    running = {name: iter(ds) for name, ds in datasets.items()}
    seen = {name: list(islice(rows, 7)) for name, rows in running.items()}
    change(path)
    assert scan(path, None) != before or change in (restore, drop_column, cast_column)
    after, after_kept = scan(path, None), scan(path, None, FILTER)
    for name, options in PASSES.items():
        want = expected(kept if "filter" in options else before, options)
        assert seen[name] + list(running[name]) == want, name  # changed in mid-pass
        assert list(datasets[name]) == want, name  # a whole pass after the change
        new = expected(after_kept if "filter" in options else after, options)
        assert list(hls.from_lance(path, **options)) == new, name


@STABLE
@EVERY
@pytest.mark.parametrize("name", ["natural", "filtered, shuffled", "rank 1 of 2"])
def test_both_versions_resume_at_any_place(
    path: str, change: Callable[[str], None], name: str
) -> None:
    change(path)
    options = PASSES[name]
    for version in (1, None):
        rows = scan(path, version, options.get("filter"))
        check_resumed(path, options, expected(rows, options), version)


@STABLE
@EVERY
def test_a_state_of_the_version_before_goes_on_there_by_itself(
    path: str, change: Callable[[str], None]
) -> None:
    """In a dataset of the latest version that names none; `id` is in all versions."""
    passes = {name: {**options, "columns": ["id"]} for name, options in PASSES.items()}
    wants, states = {}, {}
    for name, options in passes.items():
        rows = scan(path, 1, options.get("filter"))
        wants[name] = [row["id"] for row in expected(rows, options)]
        ds = hls.from_lance(path, **options)
        list(islice(ds, 23))
        states[name] = through_json(ds.state_dict())
    change(path)
    for name, options in passes.items():
        want = wants[name]
        new = hls.from_lance(path, **options)
        new.load_state_dict(states[name])
        assert [row["id"] for row in new] == want[23:], name
        assert [row["id"] for row in new] == want, name  # the next pass stays there
        assert len(new) == len(want)


COLUMN_CHANGES = {
    add_columns: "columns: saved",
    rename_column: "columns: saved",
    cast_column: r"other types: saved .*float64.*, now .*float32.*; build .* with version=1",
    merge_columns: "columns: saved",
}


@pytest.mark.parametrize("stable", [False])
@pytest.mark.parametrize("change", COLUMN_CHANGES, ids=lambda change: change.__name__)
def test_a_state_with_other_columns_or_types_is_refused_and_the_way_out_works(
    path: str, change: Callable[[str], None]
) -> None:
    want = expected(scan(path, 1), SHUFFLED)
    ds = hls.from_lance(path, **SHUFFLED)
    list(islice(ds, 23))
    state = through_json(ds.state_dict())
    change(path)
    new = hls.from_lance(path, **SHUFFLED)
    with pytest.raises(ValueError, match=COLUMN_CHANGES[change]) as caught:
        new.load_state_dict(state)
    assert "version=1" in str(caught.value)
    assert list(new) == expected(scan(path, None), SHUFFLED)  # as if nothing had happened
    old = hls.from_lance(path, **SHUFFLED, version=1)
    old.load_state_dict(state)
    assert list(old) == want[23:]


def batches(loader: Any) -> list[list[int]]:
    return [batch["id"].tolist() for batch in loader]


@pytest.mark.parametrize(
    ("change", "context", "stable"),
    [
        (compact, "spawn", True),
        (compact, "forkserver", False),
        (merge_insert, "forkserver", True),
        (overwrite, "forkserver", False),
    ],
)
def test_case_23_a_change_under_two_workers_does_not_show_and_they_resume_at_their_version(
    path: str, change: Callable[[str], None], context: str
) -> None:
    """Torchdata's loader as it is: the state, and so the version, reaches the workers only."""
    options = {**SHUFFLED, "columns": ["id"]}

    def loader(context: str = "forkserver") -> StatefulDataLoader:
        ds = hls.from_lance(path, **options)
        return StatefulDataLoader(ds, 5, num_workers=2, multiprocessing_context=context)

    first = loader(context)
    rows = iter(first)
    seen = [next(rows)["id"].tolist()]
    change(path)
    seen.append(next(rows)["id"].tolist())
    state = through_json(first.state_dict())
    seen += [batch["id"].tolist() for batch in rows]
    del first, rows
    want = sorted(range(ROWS))
    assert sorted(chain(*seen)) == want

    new = loader()
    before = len(new.dataset)
    new.load_state_dict(state)
    assert batches(new) == seen[2:]
    assert len(new.dataset) == ROWS != before  # the parent knows of the version now
    assert batches(new) == seen  # new workers, in the next epoch
    latest = sorted(row["id"] for row in scan(path, None))
    assert sorted(chain(*batches(loader()))) == latest
