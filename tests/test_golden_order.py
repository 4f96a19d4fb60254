"""Orders that must never change; see `golden/orders_v1.json`.

``python tests/test_golden_order.py --write`` adds the cases that are not yet in the file of the
current `ORDER_VERSION`. It never changes one that is.
"""

import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from hf_lance_stream.permutation import ORDER_VERSION
from hf_lance_stream.plan import Options, Plan, make_plan
from hf_lance_stream.splits import Tail

GOLDEN = Path(__file__).parent / "golden" / f"orders_v{ORDER_VERSION}.json"

ADVICE = (
    "The order of an epoch changed. Saved states of users would continue in another order without "
    "a word. Undo the change, or, if it is meant, raise `permutation.ORDER_VERSION` (states of the "
    "old order are then refused) and run `python tests/test_golden_order.py --write`."
)

WHOLE, HASHED = 64, 2_000_000
"""Longest epochs that are written down whole, and as a digest; of longer ones a few rows are."""


class Case(NamedTuple):
    """What an order depends on."""

    seed: int | None
    epoch: int
    rows: int
    clump: int
    num_splits: int
    tail: Tail


CASES = [
    *(Case(42, 0, rows, 1, 1, "drop") for rows in (1, 2, 3, 4, 5, 8, 9, 16, 17, 31, 33, 64)),
    *(Case(0, epoch, 12, 1, 4, "drop") for epoch in (0, 1, 2, 2**32, 2**64 - 1)),
    *(Case(seed, 0, 12, 1, 4, "drop") for seed in (1, 2, 2**32, 2**63, 2**64 - 1)),
    *(Case(42, 1, 23, clump, 4, "drop") for clump in (1, 2, 5, 22, 23, 64)),
    *(Case(7, 3, 30, 4, 7, tail) for tail in ("drop", "pad", "keep")),
    *(Case(7, 3, 30, 1, num_splits, "keep") for num_splits in (1, 2, 29, 30)),
    *(Case(None, 5, 23, 4, 5, tail) for tail in ("drop", "pad", "keep")),
    Case(42, 0, 1000, 1, 64, "drop"),
    Case(42, 0, 1000, 16, 48, "keep"),
    Case(42, 7, 5000, 64, 60, "pad"),
    Case(1, 1, 65_536, 1, 64, "drop"),
    Case(1, 1, 65_537, 1, 64, "keep"),
    Case(3, 0, 100_003, 7, 240, "pad"),
    Case(2**64 - 1, 2**64 - 1, 200_000, 1, 48, "drop"),
    Case(42, 0, 1_000_000, 1, 64, "drop"),
    Case(42, 0, 1_000_003, 64, 48, "keep"),
    Case(42, 0, 10**12, 1, 64, "drop"),
    Case(42, 9, 10**12 + 7, 64, 48, "pad"),
    Case(2**63, 2**40, 2**40 + 1, 1000, 7, "keep"),
    Case(5, 5, 2**62, 1, 64, "drop"),
]


def epoch_of(case: Case) -> Plan:
    """The epoch of one process that reads all splits."""
    options = Options(
        num_splits=case.num_splits,
        shuffle_seed=case.seed,
        shuffle_clump_size=case.clump,
        tail=case.tail,
        epoch=case.epoch,
    )
    return make_plan(options, rows=case.rows, shard_rows=np.array([case.rows]))


def order_of(case: Case) -> dict[str, Any]:
    """The order of an epoch: whole, as a digest of int64 little-endian, or some of its rows."""
    epoch = epoch_of(case)
    length = len(epoch)
    if length <= WHOLE:
        return {"order": epoch.rows(0, length).tolist()}
    if length <= HASHED:
        data = epoch.rows(0, length).astype("<i8").tobytes()
        return {"first": epoch.rows(0, 4).tolist(), "sha256": hashlib.sha256(data).hexdigest()}
    indices = [0, 1, 2, 63, 64, 10**6, length // 3, length // 2, length - 2, length - 1]
    return {"rows_at": [[i, int(epoch.rows(i, i + 1)[0])] for i in indices]}


def read() -> dict[Case, dict[str, Any]]:
    """The orders of the file."""
    if not GOLDEN.exists():
        return {}
    entries = json.loads(GOLDEN.read_text())["orders"]
    return {Case(**entry.pop("case")): entry for entry in entries}


def lines(orders: dict[Case, dict[str, Any]]) -> Iterator[str]:
    """The file, one order a line, so that a difference shows which."""
    yield f'{{"order_version": {ORDER_VERSION}, "orders": ['
    entries = [json.dumps({"case": case._asdict(), **order}) for case, order in orders.items()]
    yield ",\n".join(entries)
    yield "]}\n"


def write() -> None:
    """Add the cases that are not yet in the file."""
    golden = read()
    orders = {case: order_of(case) for case in [*golden, *CASES]}
    if changed := [case for case, order in golden.items() if orders[case] != order]:
        raise SystemExit(f"{ADVICE}\nIt differs for {changed}")
    GOLDEN.write_text("\n".join(lines(orders)))


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_an_order_never_changes(case: Case) -> None:
    assert order_of(case) == read().get(case), ADVICE


def test_every_case_of_the_file_is_tested() -> None:
    assert [*read()] == CASES, "A golden order was removed or never written. " + ADVICE
    assert json.loads(GOLDEN.read_text())["order_version"] == ORDER_VERSION


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        raise SystemExit(__doc__)
    write()
