"""States that every later release of the same state version must load; see `golden/states_v1.json`.

``python tests/test_golden_state.py --write`` adds the cases that are not yet in the file. A case
that is there is never written again: runs that were saved by a release must go on.
"""

import json
import shutil
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from helpers import ids, make_table

import hf_lance_stream as hls
from hf_lance_stream.state import STATE_VERSION

GOLDEN = Path(__file__).parent / "golden" / f"states_v{STATE_VERSION}.json"
TABLE = GOLDEN.with_name(f"table_v{STATE_VERSION}.lance")
"""60 rows in fragments of 25, which the states are of."""

SHUFFLED = {"shuffle_seed": 7, "shuffle_clump_size": 4, "num_splits": 6}


def dataset(path: str, **options: Any) -> Any:
    return hls.from_lance(path, **options)


def mapped(path: str) -> Any:
    return dataset(path, **SHUFFLED).map(lambda row: {"twice": 2 * row["id"]})


def filtered(path: str) -> Any:
    return dataset(path, **SHUFFLED).filter(lambda row: row["id"] % 3 != 0)


def later_epoch(path: str) -> Any:
    ds = dataset(path, **SHUFFLED)
    ds.set_epoch(2)
    return ds


BUILDS: dict[str, Callable[[str], Any]] = {
    "natural": dataset,
    "shuffled": lambda path: dataset(path, **SHUFFLED),
    "single rows": lambda path: dataset(path, shuffle_seed=3, num_splits=6),
    "tail kept": lambda path: dataset(path, shuffle_seed=3, num_splits=8, tail="keep"),
    "rank": lambda path: dataset(path, rank=1, world_size=3, **SHUFFLED),
    "columns and filter": lambda path: dataset(path, columns=["id"], filter="id > 9", **SHUFFLED),
    "map": mapped,
    "filter": filtered,
    "epoch": later_epoch,
    "take": lambda path: dataset(path, **SHUFFLED).skip(5).take(40),
}
"""By name: a dataset of the golden table; its state is saved after 23 rows, or 7 of a rank."""

WORKERS = {"loader": 0, "loader of 2 workers": 2}


def state_and_rest(name: str, path: str) -> dict[str, Any]:
    """A case as it is written: a state, and the ids of all that comes after it."""
    if name in BUILDS:
        ds = BUILDS[name](path)
        rows = iter(ds)
        for _ in range(7 if name == "rank" else 23):
            next(rows)
        return {"state": ds.state_dict(), "rest": [int(row["id"]) for row in rows]}
    if name in WORKERS:
        made = loader(path, WORKERS[name])
        batches = iter(made)
        list(islice(batches, 5))
        state = made.state_dict()
        return {"state": state, "rest": [int(n) for batch in batches for n in batch["id"]]}
    assert name == "merged"
    states, rest = [], []
    for rank, count in enumerate((3, 8, 5)):  # in mid-cycle, and uneven
        ds = dataset(path, rank=rank, world_size=3, **SHUFFLED)
        rows = iter(ds)
        list(islice(rows, count))
        states.append(ds.state_dict())
        rest += [int(row["id"]) for row in rows]
    return {"state": hls.merge_state_dicts(states), "rest": sorted(rest)}


def loader(path: str, num_workers: int) -> Any:
    return hls.stateful_dataloader(dataset(path, **SHUFFLED).with_format("torch"), 4, num_workers)


CASES = [*BUILDS, *WORKERS, "merged"]


@pytest.fixture
def table(tmp_path: Path) -> str:
    """The golden table, somewhere else."""
    path = tmp_path / "golden.lance"
    shutil.copytree(TABLE, path)
    return str(path)


@pytest.mark.parametrize("name", CASES)
def test_a_state_of_this_version_goes_on_as_it_did_when_it_was_saved(table: str, name: str) -> None:
    case = json.loads(GOLDEN.read_text())[name]
    if name in WORKERS:
        made = loader(table, WORKERS[name])
        made.load_state_dict(case["state"], allow_moved=True)
        rest = [int(n) for batch in made for n in batch["id"]]
    else:
        build = BUILDS["shuffled"] if name == "merged" else BUILDS[name]
        ds = build(table)
        ds.load_state_dict(case["state"], allow_moved=True)
        rest = ids(ds)
    assert (sorted(rest) if name == "merged" else rest) == case["rest"]


def test_no_golden_state_was_removed() -> None:
    assert [*json.loads(GOLDEN.read_text())] == CASES


def write() -> None:
    if not TABLE.exists():
        make_table(TABLE, 60, 25, ["id", "text"])
    golden = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    path = "/data/golden.lance"  # where the states say the table is
    for name in CASES:
        if name not in golden:
            text = json.dumps(state_and_rest(name, str(TABLE))).replace(str(TABLE), path)
            golden[name] = json.loads(text)
    GOLDEN.write_text(json.dumps({name: golden[name] for name in CASES}, indent=1) + "\n")


if __name__ == "__main__" and "--write" in sys.argv:
    write()
