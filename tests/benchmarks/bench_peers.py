"""This package against every peer on the same data, in one session.

    python tests/benchmarks/bench_peers.py --dir DIRECTORY --peers-python PEERS/bin/python

Every measurement runs in a fresh process; the runs alternate; ratios are those of medians. A rate
is rows by the time of a whole pass: making the dataset, its start and all rows, after a pass over
a small table. Very slow readers stop after their first rows. Memory is the peak above that after
the import. All files are read once before, so they are in the page cache.

`peers-requirements.txt` has what the peers need; those that are not installed are skipped.
"""

import runner
from runner import Comparison, Measurement

SCAN_BATCHES = (64, 256, 1024, 4096)
READ_BUDGET_MB = 64 * 2**20 / 1e6
BUILTIN, LANCE, LANCEDB = ("datasets", "lance"), ("lance",), ("lancedb.streaming",)
LANCE_TORCH = ("lance.torch.data",)
SLOW_ROWS = 20_000  # enough for a reader of single torch rows
WORKER_ROWS, WARM_BATCHES = 6_000, 20


def scans(table: str) -> list[Measurement]:
    """The raw ordered scan at several batch sizes; the best of them is the limit."""
    return [
        Measurement(name=name, table=table, reader="scan", options={"batch": batch}, imports=LANCE)
        for name, batch in zip(scan_names(table), SCAN_BATCHES, strict=True)
    ]


def scan_names(table: str) -> tuple[str, ...]:
    return tuple(f"{table}, raw scan, batches of {batch}" for batch in SCAN_BATCHES)


def ours(name: str, table: str, limit: int | None = None, **options: object) -> Measurement:
    """A pass of this package."""
    name = f"{table}, this package, {name}"
    return Measurement(
        name=name, table=table, reader="ours", options=options, more={"limit": limit}
    )


def peer(
    name: str,
    table: str,
    reader: str,
    imports: tuple[str, ...],
    limit: int | None = None,
    **options: object,
) -> Measurement:
    """A pass of another library."""
    return Measurement(
        name=f"{table.split('.')[0]}, {name}",
        table=table,
        reader=reader,
        options=options,
        more={"limit": limit},
        imports=imports,
    )


def workers(count: int, cost: str) -> Measurement:
    """A loader whose map costs 1 ms a row; the time begins when its workers are at work."""
    return Measurement(
        name=f"loader, 1 ms of {cost} a row, {count} workers",
        table="text",
        reader="loader",
        options={"workers": count, "cost": cost, "batch": 32},
        more={"limit": WORKER_ROWS, "skip": WARM_BATCHES},
    )


def slow_consumer(name: str, reader: str, imports: tuple[str, ...]) -> Measurement:
    """300 rows of 100 KB, 20 ms each."""
    return Measurement(
        name=f"slow consumer, {name}",
        table="images",
        reader=reader,
        more={"limit": 300, "pause": 0.02},
        imports=imports,
        figures=("memory_mb",),
    )


def first_row(name: str, at: float) -> Measurement:
    return Measurement(
        name=f"first row of 10 M, {name}",
        table="ints_10m",
        kind="start",
        more={"at": at},
        figures=("build_s", "first_s", "memory_mb"),
    )


MEASUREMENTS = [
    *scans("text"),
    ours("rows", "text"),
    ours("single rows", "text", clump=None),
    ours("torch rows", "text", form="torch"),
    ours("torch iter(32)", "text", form="torch", batch=32),
    ours("arrow iter(1024)", "text", form="arrow", batch=1024),
    ours("natural shards, arrow iter(1024)", "text", form="arrow", batch=1024, natural=True),
    peer("built-in builder, unshuffled rows", "text", "builtin", BUILTIN),
    peer("built-in builder, unshuffled torch rows", "text", "builtin", BUILTIN, SLOW_ROWS,
         form="torch"),
    peer("built-in builder, unshuffled torch iter(32)", "text", "builtin", BUILTIN,
         form="torch", batch=32),
    peer("LanceDB, rows", "text", "lancedb", LANCEDB),
    peer("LanceDB, single rows", "text", "lancedb", LANCEDB, clump=None),
    peer("LitData, rows", "text.litdata", "litdata", ("litdata",)),
    peer("MosaicML Streaming, rows", "text.mds", "mosaicml", ("streaming.base",)),
    peer("lance.torch, unshuffled batches of 32", "text", "lance_torch", LANCE_TORCH, batch=32),
    peer("lance.torch, shuffled batches of 32", "text", "lance_torch", LANCE_TORCH,
         batch=32, shuffled=True),
    *scans("tokens"),
    ours("rows", "tokens"),
    ours("torch iter(32)", "tokens", form="torch", batch=32),
    peer("LanceDB, rows", "tokens", "lancedb", LANCEDB),
    peer("lance.torch, unshuffled batches of 32", "tokens", "lance_torch", LANCE_TORCH, batch=32),
    peer("lance.torch, shuffled batches of 32", "tokens", "lance_torch", LANCE_TORCH,
         batch=32, shuffled=True),
    *scans("images"),
    ours("rows", "images"),
    peer("LanceDB, rows", "images", "lancedb", LANCEDB),
    first_row("fresh", 0.0),
    first_row("resumed at 90 %", 0.9),
    *(workers(count, cost) for cost in ("sleep", "work") for count in (0, 2)),
    slow_consumer("this package", "ours", ("hf_lance_stream",)),
    slow_consumer("LanceDB", "lancedb", LANCEDB),
]  # fmt: skip

TEXT, TOKENS, IMAGES = (f"{table}, this package, " for table in ("text", "tokens", "images"))
COMPARISONS = [
    Comparison(name="text: rows / built-in builder, unshuffled", goal=5,
               of=TEXT + "rows", to=("text, built-in builder, unshuffled rows",)),
    Comparison(name="text: rows / LitData in its own format", goal=1,
               of=TEXT + "rows", to=("text, LitData, rows",)),
    Comparison(name="text: rows / MosaicML Streaming in its own format",
               of=TEXT + "rows", to=("text, MosaicML Streaming, rows",)),
    Comparison(name="text: torch rows / built-in builder, unshuffled", goal=25,
               of=TEXT + "torch rows", to=("text, built-in builder, unshuffled torch rows",)),
    Comparison(name="text: torch iter(32) / built-in builder, unshuffled", goal=2.5,
               of=TEXT + "torch iter(32)",
               to=("text, built-in builder, unshuffled torch iter(32)",)),
    Comparison(name="text: torch iter(32) / lance.torch, shuffled batches",
               of=TEXT + "torch iter(32)", to=("text, lance.torch, shuffled batches of 32",)),
    Comparison(name="text: arrow iter(1024) / raw scan at its best", goal=0.6,
               of=TEXT + "arrow iter(1024)", to=scan_names("text")),
    Comparison(name="text: natural shards, arrow iter(1024) / raw scan at its best", goal=0.95,
               of=TEXT + "natural shards, arrow iter(1024)", to=scan_names("text")),
    Comparison(name="text: rows / LanceDB, clumps of 64", goal=5,
               of=TEXT + "rows", to=("text, LanceDB, rows",)),
    Comparison(name="text: single rows / LanceDB, single rows", goal=3,
               of=TEXT + "single rows", to=("text, LanceDB, single rows",)),
    Comparison(name="tokens: torch iter(32) / raw scan at its best", goal=0.4,
               of=TOKENS + "torch iter(32)", to=scan_names("tokens")),
    Comparison(name="tokens: torch iter(32) / lance.torch, shuffled batches",
               of=TOKENS + "torch iter(32)", to=("tokens, lance.torch, shuffled batches of 32",)),
    Comparison(name="tokens: rows / LanceDB, clumps of 64", goal=3,
               of=TOKENS + "rows", to=("tokens, LanceDB, rows",)),
    Comparison(name="images: rows / raw scan at its best", goal=1.5,
               of=IMAGES + "rows", to=scan_names("images")),
    Comparison(name="images: peak memory above the import, MB", goal=400, direction="<",
               of=IMAGES + "rows", figure="memory_mb"),
    Comparison(name="images: rows / LanceDB, clumps of 64", goal=1.2,
               of=IMAGES + "rows", to=("images, LanceDB, rows",)),
    Comparison(name="first row: resumed at 90 % / fresh", goal=1.2, direction="<=",
               of="first row of 10 M, resumed at 90 %", to=("first row of 10 M, fresh",),
               figure="first_s"),
    *(Comparison(name=f"loader: 2 workers / none, 1 ms of {cost} a row", goal=1.8,
                 of=f"loader, 1 ms of {cost} a row, 2 workers",
                 to=(f"loader, 1 ms of {cost} a row, 0 workers",))
      for cost in ("sleep", "work")),
    Comparison(name="slow consumer: memory above the import, MB (goal: 3 read budgets)",
               goal=3 * READ_BUDGET_MB, direction="<",
               of="slow consumer, this package", figure="memory_mb"),
]  # fmt: skip

if __name__ == "__main__":
    runner.main(__doc__, MEASUREMENTS, COMPARISONS)
