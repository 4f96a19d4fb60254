"""What `test_media.py` does in a process with FFmpeg, and in its own: module functions."""

from collections.abc import Mapping, Sequence
from typing import Any

import datasets
import numpy as np
import PIL.Image
import torch
from datasets import Dataset, Features, IterableDataset

import hf_lance_stream as hls

Steps = Sequence[tuple[str, tuple[Any, ...]]]
"""Methods of a dataset, each with its arguments, called one after the other."""


def plain(value: Any) -> Any:
    """What a value holds, decoded, with its type: to be compared between processes."""
    kind = type(value).__name__
    if isinstance(value, PIL.Image.Image):
        return kind, value.mode, value.size, value.tobytes()
    if kind == "AudioDecoder":
        samples = value.get_all_samples()
        return kind, samples.sample_rate, plain(samples.data)
    if kind == "VideoDecoder":
        return kind, [plain(value[i]) for i in range(len(value))]
    if isinstance(value, torch.Tensor | np.ndarray | np.generic):
        return kind, str(value.dtype), value.shape, plain(value.tolist())
    if isinstance(value, Mapping):
        return {name: plain(child) for name, child in value.items()}
    if isinstance(value, list):
        return [plain(child) for child in value]
    return value


def changed(ds: IterableDataset, steps: Steps) -> IterableDataset:
    for method, arguments in steps:
        ds = getattr(ds, method)(*arguments)
    return ds


def ours(path: str, options: dict[str, Any], steps: Steps = ()) -> list[Any]:
    """The rows of a table by id."""
    return by_id(changed(hls.from_lance(path, **options), steps))


def of_builder(path: str, steps: Steps = ()) -> list[Any]:
    """The same with the `lance` builder of `datasets`."""
    ds = datasets.load_dataset("lance", data_files=f"{path}/**", streaming=True, split="train")
    return by_id(changed(ds, steps))


def of_dataset(features: Features, columns: dict[str, Any], steps: Steps = ()) -> list[Any]:
    """The same rows, of a dataset that `datasets` has made of the values."""
    ds = Dataset.from_dict(columns, features=features).to_iterable_dataset()
    return by_id(changed(ds, steps))


def by_id(rows: Any) -> list[Any]:
    return sorted((plain(row) for row in rows), key=lambda row: str(row["id"]))


def batches(path: str, options: dict[str, Any], steps: Steps, size: int) -> list[Any]:
    """The batches of a table."""
    return [plain(batch) for batch in changed(hls.from_lance(path, **options), steps).iter(size)]


def loaded(path: str, options: dict[str, Any], workers: int) -> list[Any]:
    """The rows by id that come out of a loader, decoded and summed up in its workers."""
    ds = hls.from_lance(path, num_splits=2, tail="keep", **options).map(measured)
    kind = {"multiprocessing_context": "forkserver"} if workers else {}
    loader = hls.stateful_dataloader(
        ds.select_columns(["id", "sum"]), 2, num_workers=workers, collate_fn=list, **kind
    )
    return by_id(row for batch in loader for row in batch)


def measured(row: dict[str, Any]) -> dict[str, Any]:
    """A number for each media value of a row."""
    return {"sum": [number(row[name]) for name in sorted(row) if name != "id"]}


def number(value: Any) -> float:
    if value is None:
        return -1.0
    if isinstance(value, PIL.Image.Image):
        return float(np.asarray(value).sum())
    if type(value).__name__ == "AudioDecoder":
        return float(value.get_all_samples().data.abs().sum())
    return float(sum(value[i].sum() for i in range(len(value))))


def lazily(path: str) -> list[Any]:
    """The lazy blobs of a table by id, opened by the decoder of videos."""
    from torchcodec.decoders import VideoDecoder

    ds = hls.from_lance(path, blobs="lazy")
    return by_id({"id": row["id"], "v": row["v"] and VideoDecoder(row["v"])} for row in ds)
