"""Times of the order: build it, find a first row, find a million rows.

Run ``python tests/benchmarks/bench_order.py``; it prints medians of 7 runs in milliseconds.
"""

import statistics
import time
from collections.abc import Callable

import numpy as np

from hf_lance_stream.permutation import Permutation, derive_key
from hf_lance_stream.splits import Order

LENGTHS = {"10**6": 10**6, "2**20+1": 2**20 + 1, "10**12": 10**12, "2**40+1": 2**40 + 1}
RUNS = 7


def median_ms(work: Callable[[], object]) -> float:
    """Median time of `RUNS` calls of `work`, in milliseconds."""
    times = []
    for _ in range(RUNS):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def main() -> None:
    """Print one line per length."""
    columns = ["build", "first row", "10**6 in a row", "10**6 scattered", "clumps of 64"]
    print("rows".rjust(8), *(name.rjust(16) for name in columns), " (ms, median of 7)")
    rng = np.random.default_rng(0)
    for name, n in LENGTHS.items():
        key = derive_key(1, 42, 0)
        permutation = Permutation(n, key)
        clumped = Order(rows=n, clump_size=64, seed=42)
        run = np.arange(n - 10**6, n)
        scattered = rng.integers(0, n, 10**6)
        times = [
            median_ms(lambda n=n, key=key: Permutation(n, key)),
            median_ms(lambda n=n: Order(rows=n, seed=42).rows_at([0])),
            median_ms(lambda p=permutation, x=run: p(x)),
            median_ms(lambda p=permutation, x=scattered: p(x)),
            median_ms(lambda o=clumped, x=run: o.rows_at(x)),
        ]
        print(name.rjust(8), *(f"{ms:16.3f}" for ms in times))


if __name__ == "__main__":
    main()
