"""`from_lance`: from a user's arguments to a dataset."""

import importlib
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from datasets import DatasetInfo, Features, NamedSplit

from hf_lance_stream.bad_rows import OnBadRows, Transform, check_on_bad_rows
from hf_lance_stream.blobs import Blobs
from hf_lance_stream.dataset import LanceIterableDataset
from hf_lance_stream.examples import (
    DEFAULT_READ_BUDGET,
    LanceExamplesIterable,
    log_tail,
)
from hf_lance_stream.features import features_of
from hf_lance_stream.iterables import TransformedIterable
from hf_lance_stream.plan import Options, check_int
from hf_lance_stream.refs import Version
from hf_lance_stream.shards import dividing_among_ranks
from hf_lance_stream.source import Source, open_source
from hf_lance_stream.splits import Tail


def from_lance(
    source: Any,
    columns: Sequence[str] | None = None,
    filter: str | None = None,
    num_splits: int | None = None,
    shuffle_seed: int | None = None,
    shuffle_clump_size: int | None = None,
    epoch: int = 0,
    tail: Tail | None = None,
    version: Version | None = None,
    storage_options: dict[str, str] | None = None,
    *,
    with_row_id: bool = False,
    blobs: Blobs = "bytes",
    pickle_credentials: bool = False,
    features: Features | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    batch_size: int | None = None,
    read_budget: int = DEFAULT_READ_BUDGET,
    transform: Transform | None = None,
    on_bad_rows: OnBadRows = "raise",
    split: str | NamedSplit | None = None,
) -> LanceIterableDataset:
    """Stream Lance tables as a Hugging Face dataset.

    Args:
        source: a path or URI (str or Path), a `lance.LanceDataset`, a `lancedb` table,
            or a list of these: its tables are read as one, in the order given.
        columns: names of the columns to read; no other is read. ``"a.b"`` is the field ``b`` of
            the struct ``a``. Default: all.
        filter: SQL expression that selects rows, for example ``"label != 3"``. It is applied once,
            when the dataset is made, and takes 8 bytes of memory per matching row, which workers
            share through a temporary file.
        num_splits: number of equal parts the epoch is cut into and dealt from, in turn, one row
            of each. Default: one shard per fragment, in table order, when not shuffled; else 64
            (fewer for fewer rows).
        shuffle_seed: integer in ``[0, 2**64)``. Default: not shuffled.
        shuffle_clump_size: neighbouring rows that the shuffle moves as one; larger reads faster,
            smaller mixes better. Default: single rows.
        epoch: the pass over the data, which with the seed determines the order.
        tail: what becomes of the ``rows % num_splits`` surplus rows at the end of the epoch:
            ``"drop"`` leaves them out, ``"pad"`` adds the first rows of the epoch until the last
            cycle is complete, ``"keep"`` yields them. Default: "drop" with `num_splits` or more
            than one rank, else "keep". Without splits nothing is dropped.
        version: version number, tag or branch of the table; ``("trial", 3)`` is version 3 of the
            branch "trial". Default: the latest. Either way the version is pinned: later changes to
            the table do not show. Without a number or tag a state opens the version it was saved
            at; see `load_state_dict`.
        storage_options: options for Lance's object store, such as credentials.
        with_row_id: add Lance's row id as the column ``"_rowid"`` (uint64).
        blobs: what rows hold of a blob column, alone or in a struct. ``"bytes"``: all bytes.
            ``"lazy"``: a `BlobFile`, which reads what it is asked for; None for null. In Arrow it
            is a struct that names the blob.
        pickle_credentials: write the secrets of URIs and `storage_options` into every pickle of the
            dataset. Default: only into that for a worker that is being started; a dataset from
            another pickle opens its table with the credentials of its environment.
        features: features to cast the columns to. Default: those in the schema's Hugging Face
            metadata, else from the Arrow types; see the README for media.
        rank: index of this process among `world_size`; give both or neither.
        world_size: number of processes; must divide the number of splits.
        batch_size: the batch size of a plain DataLoader that will read the dataset, so that its
            workers share whole batches: then the batches are the same for every num_workers.
            `stateful_dataloader` sets it by itself. Default: workers share splits.
        read_budget: bytes that are read ahead of the consumer, at least 1; a stream takes at most
            three times as much memory. Each DataLoader worker has its own. Default: 64 MiB.
        transform: function that makes a row of a row, both dicts; it gets python objects, media
            decoded. Unlike one given to ``map`` it may fail on single rows: see `on_bad_rows`.
        on_bad_rows: what is done about a row that cannot be cast to the features or decoded, or on
            which `transform` raises. ``"raise"`` raises `BadRowError`, which names the row and its
            row id. ``"skip"`` puts another row of the same tables in its place, drawn by seed,
            epoch and the bad row, so that all ranks keep their number of rows and a resumed run
            has the same rows; ``stats().bad_rows`` counts them. ``"warn"`` logs them too.
        split: name of the Hugging Face split, such as "train".

    Returns:
        The dataset. Making it reads no data file, unless there is a filter or a binary column
        whose feature must be found.

    Raises:
        FileNotFoundError: there is no table at the path, or no such version of it.
        OSError: the table, or what the filter needs of it, cannot be read.
        ValueError: any other argument that does not fit; the message names it.

    Example:
        >>> import datasets, hf_lance_stream as hls
        >>> path = write_example_table(rows=100)
        >>> ds = hls.from_lance(path, shuffle_seed=42, shuffle_clump_size=8)
        >>> len(ds), sorted(row["id"] for row in ds) == list(range(100))
        (100, True)
    """
    options = Options(
        num_splits=num_splits,
        shuffle_seed=shuffle_seed,
        shuffle_clump_size=shuffle_clump_size,
        tail=tail,
        batch_size=batch_size,
    )
    epoch = check_int("epoch", epoch, 0, 2**63)
    opened = open_source(
        source,
        columns=columns,
        filter=filter,
        version=version,
        storage_options=storage_options,
        with_row_id=with_row_id,
        blobs=blobs,
        pickle_credentials=pickle_credentials,
    )
    examples = examples_of(opened, options, features, rank, world_size, read_budget, on_bad_rows)
    return dataset_of(examples, transform=transform, split=split, epoch=epoch)


def examples_of(
    source: Source,
    options: Options,
    features: Features | None,
    rank: int | None,
    world_size: int | None,
    read_budget: int,
    on_bad_rows: OnBadRows = "raise",
) -> LanceExamplesIterable:
    """The rows of `source` that a rank reads; an impossible split is refused here."""
    read_budget = check_int("read_budget", read_budget, 1, 2**62, " (bytes to read ahead)")
    examples = LanceExamplesIterable(
        source,
        options,
        features_of(source, features),
        read_budget=read_budget,
        on_bad_rows=check_on_bad_rows(on_bad_rows),
    )
    _ = examples.plan
    if (rank is None) != (world_size is None):
        raise ValueError(f"give both or neither: got rank={rank!r}, world_size={world_size!r}")
    if rank is None:
        return examples
    world_size = check_int("world_size", world_size, 1, 2**31)
    rank = check_int("rank", rank, 0, world_size)
    with dividing_among_ranks("world_size"):
        return examples.shard_data_sources(world_size, rank)


def dataset_of(
    examples: LanceExamplesIterable,
    *,
    transform: Transform | None = None,
    info: DatasetInfo | None = None,
    split: str | NamedSplit | None = None,
    epoch: int = 0,
    token_per_repo_id: dict[str, Any] | None = None,
) -> LanceIterableDataset:
    """A dataset of `examples` with their features, or of what `transform` makes of them."""
    if transform is not None and not callable(transform):
        raise ValueError(f"`transform` must be a function of a row or None: got {transform!r}")
    if split is not None and not isinstance(split, str):
        raise ValueError(f"`split` must be the name of a split, such as 'train': got {split!r}")
    info = info.copy() if info is not None else DatasetInfo()
    info.features = examples.table_features.copy() if transform is None else None
    dataset = LanceIterableDataset(
        examples if transform is None else TransformedIterable(examples, transform),
        info=info,
        split=NamedSplit(split) if isinstance(split, str) else split,
        token_per_repo_id=token_per_repo_id,
    )
    dataset.set_epoch(epoch)
    if "transformers.trainer" in sys.modules:
        with suppress(ImportError):  # it warns where Trainer resumes by reading everything again
            importlib.import_module("hf_lance_stream.trainer")
    log_tail(examples.plan, str(examples.source.name))
    return dataset
