"""The readers that the benchmarks time, and the process that times one of them.

    python tests/benchmarks/readers.py '{"kind": "rate", "reader": "ours", "path": …, "small": …}'

A process makes one measurement and prints it as JSON; `runner.py` starts it. Each library is
imported only where it is needed, so any Python with the library of one reader can run that reader.
"""

import importlib.util
import json
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import Any

SPLITS, SEED = 8, 1


def ours(
    path: str,
    *,
    clump: int | None = 64,
    natural: bool = False,
    form: str | None = None,
    batch: int | None = None,
) -> Iterable[Any]:
    """This package: shuffled, or (`natural`) its natural shards."""
    import hf_lance_stream as hls

    shuffled = {"num_splits": SPLITS, "shuffle_seed": SEED, "shuffle_clump_size": clump}
    return _formatted(hls.from_lance(path, **({} if natural else shuffled)), form, batch)


def builtin(path: str, *, form: str | None = None, batch: int | None = None) -> Iterable[Any]:
    """The built-in `lance` builder of `datasets`, unshuffled."""
    import datasets

    ds = datasets.load_dataset("lance", data_files=f"{path}/**", split="train", streaming=True)
    return _formatted(ds, form, batch)


def _formatted(ds: Any, form: str | None, batch: int | None) -> Iterable[Any]:
    ds = ds.with_format(form) if form else ds
    return ds.iter(batch) if batch else ds


def scan(path: str, *, batch: int) -> Iterable[Any]:
    """The raw ordered scan of Lance."""
    import lance

    return lance.dataset(path).scanner(batch_size=batch, scan_in_order=True).to_batches()


def lancedb(path: str, *, clump: int | None = 64) -> Iterable[Any]:
    """LanceDB's StreamingDataset, shuffled."""
    import lancedb
    from lancedb.streaming import StreamingDataset

    table = lancedb.connect(str(Path(path).parent)).open_table(Path(path).stem)
    return StreamingDataset(table, num_splits=SPLITS, shuffle_seed=SEED, shuffle_clump_size=clump)


def lance_torch(path: str, *, batch: int, shuffled: bool = False) -> Iterable[Any]:
    """Lance's own torch dataset: in order, or whole batches in random order."""
    import lance
    from lance.sampler import ShardedBatchSampler
    from lance.torch.data import LanceDataset

    sampler = ShardedBatchSampler(0, 1, randomize=True, seed=SEED) if shuffled else None
    has_text = "text" in lance.dataset(path).schema.names
    options = {"to_tensor_fn": _text_batch} if has_text else {}
    return LanceDataset(path, batch, sampler=sampler, **options)


def _text_batch(batch: Any, **_: Any) -> dict[str, Any]:
    """What `datasets` makes of a torch batch with a text; Lance itself refuses strings."""
    import torch

    return {"id": torch.from_numpy(batch["id"].to_numpy()), "text": batch["text"].to_pylist()}


def litdata(path: str) -> Iterable[Any]:
    """LitData's StreamingDataset over its own format, shuffled."""
    import litdata

    return litdata.StreamingDataset(path, shuffle=True, seed=SEED)


def mosaicml(path: str) -> Iterable[Any]:
    """MosaicML's StreamingDataset over its own format, shuffled."""
    base = load("streaming.base")
    return base.StreamingDataset(local=path, shuffle=True, shuffle_seed=SEED, batch_size=32)


def load(name: str) -> Any:
    """Import a module; of MosaicML's package only that one, not all the package imports.

    It would import torchvision, which is not needed here, and breaks where its build (for CUDA, for
    CPUs) is not that of torch.
    """
    package = name.split(".")[0]
    if package == "streaming" and package not in sys.modules:
        spec = importlib.util.find_spec(package)
        if spec is None:
            raise ModuleNotFoundError("mosaicml-streaming is not installed")
        sys.modules[package] = importlib.util.module_from_spec(spec)  # its __init__ does not run
    return importlib.import_module(name)


def loader(path: str, *, workers: int, cost: str, batch: int) -> Iterable[Any]:
    """A loader of this package whose map function costs 1 ms a row."""
    import hf_lance_stream as hls

    ds = hls.from_lance(path, num_splits=SPLITS, shuffle_seed=SEED, shuffle_clump_size=64)
    return hls.stateful_dataloader(ds.map(COSTS[cost]), batch_size=batch, num_workers=workers)


def sleep_1ms(row: dict[str, Any]) -> dict[str, Any]:
    """Wait, as for a network."""
    time.sleep(0.001)
    return row


def work_1ms(row: dict[str, Any]) -> dict[str, Any]:
    """Take 1 ms of a processor, however many want it."""
    end = time.thread_time() + 0.001
    while time.thread_time() < end:
        pass
    return row


COSTS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "sleep": sleep_1ms,
    "work": work_1ms,
}
READERS: dict[str, Callable[..., Iterable[Any]]] = {
    f.__name__: f for f in (ours, builtin, scan, lancedb, lance_torch, litdata, mosaicml, loader)
}


def rate(
    reader: str,
    path: str,
    small: str,
    *,
    options: dict[str, Any],
    rows: int,
    limit: int | None = None,
    skip: int = 0,
    pause: float = 0.0,
) -> dict[str, float]:
    """Time a pass over the table, or its first `limit` rows.

    A pass over a small table of the same kind comes first, so that what a library does once is not
    counted. The time is that of the whole pass: making the dataset, its start, the rows. With
    `skip`, that many batches come first and are not counted, and there is no pass over a small
    table.

    Args:
        reader: name of the reader.
        path: the table.
        small: the small table.
        options: options of the reader; with "batch" its items are batches, else rows.
        rows: rows of the table; a pass that yields 1 % less, or more, is an error.
        limit: rows to read at most.
        skip: batches before the time begins.
        pause: seconds the consumer takes for each row.
    """
    make = READERS[reader]
    before = peak_mb()
    if not skip:
        deque(make(small, **options), maxlen=0)
    begin = time.perf_counter()
    # Through islice, as a second iter() on LitData's iterator would start its pass again.
    items = islice(make(path, **options), None if "batch" in options else limit)
    first = next(items)
    first_s = time.perf_counter() - begin
    if "batch" in options:
        count = rows_in(first)
        if skip:
            deque(islice(items, skip - 1), maxlen=0)
            begin, count = time.perf_counter(), 0
        for item in items:
            count += rows_in(item)
            if limit and count >= limit:
                break
    elif pause:
        count = 1
        for _ in items:
            time.sleep(pause)
            count += 1
    else:  # counted in C: a loop in Python would cost the fast readers 5 %
        last = deque(enumerate(items, 2), maxlen=1)
        count = last[0][0] if last else 1
    seconds = time.perf_counter() - begin
    if not limit and not 0.99 * rows <= count <= rows:
        raise RuntimeError(f"the reader yielded {count} of {rows} rows")
    return {
        "rows_per_s": count / seconds,
        "rows": count,
        "first_s": first_s,
        "memory_mb": peak_mb() - before,
    }


def rows_in(batch: Any) -> int:
    """Rows of a batch: Arrow, a tensor, or a dictionary of columns."""
    if isinstance(batch, dict):
        batch = next(iter(batch.values()))
    return len(batch)


def start(path: str, small: str, *, rows: int, at: float = 0.0) -> dict[str, float]:
    """Time the making of a shuffled dataset and its first row, resumed after a share of the rows.

    The first row of a small table comes first; the memory is what is used above that.

    Args:
        path: the table.
        small: the small table.
        rows: rows of the table.
        at: share of the rows that the state says were read.
    """
    import hf_lance_stream as hls

    splits = {"num_splits": SPLITS, "shuffle_seed": SEED, "shuffle_clump_size": 64}
    next(iter(hls.from_lance(small, **splits)))
    Path("/proc/self/clear_refs").write_text("5")  # restarts the peak
    before = peak_mb()
    begin = time.perf_counter()
    ds = hls.from_lance(path, **splits)
    built = time.perf_counter()
    if at:
        state = ds.state_dict()
        state["examples_iterable"]["position"] = int(rows * at)
        ds.load_state_dict(state)
    next(iter(ds))
    first = time.perf_counter()
    return {
        "build_s": built - begin,
        "first_s": first - begin,
        "memory_mb": peak_mb() - before,
    }


def peak_mb() -> float:
    """Peak resident memory of this process, in MB (10**6 bytes)."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in x)
    return int(line.split()[1]) * 1024 / 1e6


def main() -> None:
    job = json.loads(sys.argv[1])
    kind = {"rate": rate, "start": start}[job.pop("kind")]
    for name in job.pop("imports"):
        load(name)
    print(json.dumps(kind(**job)))


if __name__ == "__main__":
    main()
