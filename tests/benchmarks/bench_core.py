"""Start-up, memory and row rate of one process, side by side; prints medians and ratios.

    python tests/benchmarks/bench_core.py [--runs 5] [--dir DIRECTORY]

Every measurement runs in a fresh process; the runs alternate.
"""

import runner
from bench_peers import BUILTIN, LANCEDB, TEXT, first_row, ours, peer
from runner import Comparison, Measurement

START = ("build_s", "first_s", "memory_mb")
MEASUREMENTS = [
    *(
        Measurement(
            name=name, table=table, kind="start", figures=("build_s", "first_s", "memory_mb")
        )
        for name, table in (
            ("first row of 10 k, fresh", "ints_10k"),
            ("first row of 50 k in 5,000 fragments, fresh", "ints_5k_fragments"),
        )
    ),
    first_row("fresh", 0.0),
    first_row("resumed at 90 %", 0.9),
    ours("rows", "text"),
    ours("single rows", "text", clump=None),
    ours("natural shards, rows", "text", natural=True),
    peer("built-in builder, unshuffled rows", "text", "builtin", BUILTIN),
    peer("LanceDB, rows", "text", "lancedb", LANCEDB),
]
COMPARISONS = [
    Comparison(
        name="text: rows / built-in builder, unshuffled",
        of=TEXT + "rows",
        to=("text, built-in builder, unshuffled rows",),
    ),
    Comparison(
        name="text: rows / LanceDB, clumps of 64",
        of=TEXT + "rows",
        to=("text, LanceDB, rows",),
    ),
]

if __name__ == "__main__":
    runner.main(__doc__, MEASUREMENTS, COMPARISONS)
