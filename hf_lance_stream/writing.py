"""`write_lance`: any dataset becomes a Lance table, in a stream that can be interrupted."""

import os
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args

import pyarrow as pa
from tqdm.auto import tqdm

from hf_lance_stream.feed import Feed, Limits
from hf_lance_stream.inputs import (
    IndexedInput,
    Position,
    Record,
    StreamInput,
    differences,
    input_of_source,
)
from hf_lance_stream.opening import open_input
from hf_lance_stream.permutation import MAX_LENGTH, ORDER_VERSION, SEED_LIMIT
from hf_lance_stream.pinning import check_storage_options
from hf_lance_stream.plan import check_int
from hf_lance_stream.source import open_source
from hf_lance_stream.table_writer import TableWriter, open_writer

BYTES_PER_FRAGMENT = 512 << 20
"""Default size of a fragment, in memory: large enough for object stores, small enough to lose."""

UNSHUFFLED = ".unshuffled"
"""End of the name of the table that a stream is first written to when it is shuffled."""

Mode = Literal["create", "overwrite"]
_RECORD_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """What `write_lance` has made.

    Attributes:
        table: path or URI of the table.
        version: its version.
        rows: its rows.
        fragments: its fragments, each one data file.
        bytes: bytes of the data files.
        resumed_rows: rows that an earlier, interrupted run had written.
        seconds: time this run took.
    """

    table: str
    version: int
    rows: int
    fragments: int
    bytes: int
    resumed_rows: int
    seconds: float


def write_lance(
    source: Any,
    table: str | os.PathLike[str],
    *,
    split: str | None = None,
    columns: Sequence[str] | None = None,
    shuffle_seed: int | None = None,
    shuffle_clump_size: int | None = None,
    bytes_per_fragment: int = BYTES_PER_FRAGMENT,
    rows_per_fragment: int | None = None,
    mode: Mode = "create",
    resume: bool = True,
    storage_options: dict[str, str] | None = None,
    progress: bool = False,
    **load_options: Any,
) -> Written:
    """Write a dataset as a Lance table for training, reading it as a stream.

    The features go into the table's schema, so that ``from_lance(table).features`` are those of
    the source. Images, audio and other files that the source names by path are read into the table.

    Memory holds a few batches of about 8 MB, read ahead, and Lance's buffers of 8 MiB a column (256
    MiB in all at most); a source of Parquet files is read a row group at a time.

    A run that was interrupted, or killed, goes on when it is started again with the same
    arguments: each fragment is committed together with the position after it, so that no row
    is missing or there twice. What was written of an unfinished fragment is deleted at the end.

    Args:
        source: a file or a glob of files that `datasets` can load (Parquet, CSV, JSON, Arrow, text
            ...), a directory of such files or of images or sounds, one that `save_to_disk` made,
            a dataset on the Hub or the name of a builder such as "parquet", a Lance or LanceDB
            table, or an object: `datasets.Dataset`, `IterableDataset`, `DatasetDict`. An
            `IterableDataset` must give the same rows again for an interrupted run to go on: those
            that were written are read again and passed over.
        table: path or URI of the table. Only one process may write to it.
        split: name of the Hugging Face split. Default: the only one there is.
        columns: columns to write. Default: all.
        shuffle_seed: integer in ``[0, 2**64)``: write the rows in random order, each order
            equally likely; the same seed gives the same one. A source that can only be read in
            its order is written to a second table beside this one first, whose name has
            ``".unshuffled"`` at the end, and which is deleted when all is done. Default: the
            order of the source.
        shuffle_clump_size: neighbouring rows that the shuffle moves as one. Default: single rows.
        bytes_per_fragment: bytes after which a fragment ends, as they are in memory; files are
            often smaller. A run that is killed loses what it had written of one fragment.
        rows_per_fragment: rows after which a fragment ends, if it has not ended before.
        mode: ``"create"`` refuses a table that is there, unless it is one that an interrupted run
            began with the same arguments. ``"overwrite"`` writes a new version of it, without its
            rows.
        resume: whether to go on with what an interrupted run has written. False with
            mode="overwrite" begins anew.
        storage_options: options for Lance's object store, for `table` and a Lance `source`.
        progress: show a progress bar on stderr.
        **load_options: for `datasets.load_dataset`, such as name, data_files, data_dir or
            features; for a Lance `source` filter and version.

    Returns:
        What was written.

    Raises:
        FileNotFoundError: there is no source.
        ValueError: an argument does not fit, a table is there already, or an interrupted run had
            another source or other arguments; the message names it.
        OSError: reading or writing failed, or another process wrote to the table.

    Example:
        >>> import tempfile, datasets, hf_lance_stream as hls
        >>> pets = datasets.Dataset.from_dict({"id": range(100)})
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     written = hls.write_lance(pets, f"{directory}/pets.lance", shuffle_seed=1)
        ...     ds = hls.from_lance(written.table)
        ...     written.rows, sorted(row["id"] for row in ds) == list(range(100))
        (100, True)
    """
    began = time.monotonic()
    shuffle = _Shuffle.of(shuffle_seed, shuffle_clump_size)
    limits = Limits(
        bytes=check_int("bytes_per_fragment", bytes_per_fragment, 1, 2**40),
        rows=check_int("rows_per_fragment", rows_per_fragment, 1, 2**31)
        if rows_per_fragment is not None
        else None,
    )
    if mode not in get_args(Mode):
        raise ValueError(f"`mode` must be one of {list(get_args(Mode))}: got mode={mode!r}")
    check_storage_options(storage_options)
    if not isinstance(table, str | os.PathLike):
        raise ValueError(f"`table` must be a path or URI: got {type(table).__name__}")
    opened = open_input(
        source,
        split=split,
        columns=columns,
        storage_options=storage_options,
        load_options=load_options,
    )
    writer = open_writer(table, storage_options)
    if opened.identity.get("table") == writer.name:
        raise ValueError(f"`table` must be another than `source`: both are {writer.name!r}")
    job = _Job(opened.identity, shuffle, limits, mode=mode, resume=resume, progress=progress)
    if job.has_finished(writer):
        job.tidy(writer)
    start = job.start_of(writer, opened.schema)
    if shuffle.seed is None:
        writer = job.write(opened, writer, start)
    elif isinstance(opened, IndexedInput):
        writer = job.write(opened.shuffled(shuffle.seed, shuffle.clump_size), writer, start)
    else:
        writer = _write_in_two_passes(job, opened, writer, start)
    return Written(
        table=writer.uri,
        version=writer.version,
        rows=writer.num_rows,
        fragments=writer.num_fragments,
        bytes=writer.num_bytes,
        resumed_rows=start.position.rows,
        seconds=time.monotonic() - began,
    )


@dataclass(frozen=True)
class _Shuffle:
    seed: int | None
    clump_size: int

    @classmethod
    def of(cls, seed: int | None, clump_size: int | None) -> "_Shuffle":
        if seed is None and clump_size is not None:
            raise ValueError("`shuffle_clump_size` has no effect without `shuffle_seed`")
        if seed is not None:
            seed = check_int("shuffle_seed", seed, 0, SEED_LIMIT)
        if clump_size is not None:
            clump_size = check_int("shuffle_clump_size", clump_size, 1, MAX_LENGTH)
        return cls(seed, clump_size or 1)

    @property
    def record(self) -> Record:
        if self.seed is None:
            return {"shuffle_seed": None}
        return {
            "shuffle_seed": self.seed,
            "shuffle_clump_size": self.clump_size,
            "order_version": ORDER_VERSION,
        }


@dataclass(frozen=True)
class _Start:
    """Where a run begins.

    Attributes:
        position: in the source.
        settings: those of the run that it goes on from; None if there was none.
        is_replacing: whether its first commit takes the place of what is in the table.
    """

    position: Position
    settings: Record | None
    is_replacing: bool


@dataclass(frozen=True)
class _Job:
    """The rows of one source, in one order, on their way into a table."""

    identity: Record
    shuffle: _Shuffle
    limits: Limits
    mode: Mode = "create"
    resume: bool = True
    progress: bool = False
    title: str = ""

    def has_finished(self, writer: TableWriter) -> bool:
        """Whether the latest version of a table is what this job makes."""
        record = writer.record
        return (
            record is not None
            and record["finished"]
            and not differences(record["source"], self.identity)
            and not differences(record["shuffle"], self.shuffle.record)
        )

    def tidy(self, writer: TableWriter) -> None:
        """Remove the second table of a run that has finished, if it did not live to do that."""
        unshuffled = _unshuffled_of(writer)
        if self.first_pass().has_finished(unshuffled):
            unshuffled.drop()

    def first_pass(self) -> "_Job":
        """The job of writing the rows in their order, before they are shuffled."""
        not_shuffled = _Shuffle(None, 1)
        return replace(
            self, shuffle=not_shuffled, mode="create", resume=True, title="1/2 in its order"
        )

    def start_of(self, writer: TableWriter, schema: pa.Schema) -> _Start:
        """Where to go on in a table, or to begin anew.

        Raises:
            ValueError: the table may not be written to, or goes with other arguments.
        """
        anew = _Start(Position(), None, is_replacing=True)
        if not writer.exists:
            return anew
        record = writer.record
        is_unfinished = record is not None and not record["finished"]
        if not is_unfinished or not self.resume:
            if self.mode == "overwrite":
                return anew
            what = "is there already"
            if is_unfinished:
                what = (
                    "has been begun by a run that was interrupted; leave out resume=False to go on"
                )
            elif self.has_finished(writer):
                what = "is there already, with all rows of this source"
            raise ValueError(
                f"`table` {what}: {writer.name} has {writer.num_rows:,} rows; name another one, or "
                'write a new version without them with mode="overwrite"'
            )
        assert record is not None
        return self._start_from(record, writer, schema)

    def _start_from(self, record: Record, writer: TableWriter, schema: pa.Schema) -> _Start:
        if record["version"] != _RECORD_VERSION:
            found = [f"the version of the record was {record['version']} and is {_RECORD_VERSION}"]
        else:
            found = differences(record["source"], self.identity)
            found += differences(record["shuffle"], self.shuffle.record)
            if not found and not writer.schema.equals(schema):
                found = ["the columns or features of the source have changed"]
            if not found and writer.num_rows != record["position"]["rows"]:
                found = [
                    f"{writer.name} had {record['position']['rows']} rows and has {writer.num_rows}"
                ]
        if found:
            raise ValueError(
                f"the interrupted run that began {writer.name} cannot go on: {'; '.join(found)}; "
                'give the same source and arguments, or begin anew with mode="overwrite" and '
                "resume=False"
            )
        return _Start(Position(**record["position"]), record["settings"], is_replacing=False)

    def write(
        self, source: IndexedInput | StreamInput, writer: TableWriter, start: _Start
    ) -> TableWriter:
        """Write all rows from `start` on, a fragment a commit."""
        reader: IndexedInput | StreamInput = source
        if start.settings is not None:
            reader = source.with_settings(start.settings)
        is_replacing = start.is_replacing
        was_interrupted = writer.has_remains or start.settings is not None
        bar = tqdm(
            total=source.num_rows,
            initial=start.position.rows,
            desc=self.title or None,
            unit=" rows",
            unit_scale=True,
            disable=not self.progress,
        )
        with bar, closing(Feed(reader, start.position, bar)) as feed:
            while is_replacing or not feed.is_done:
                written = None
                if not feed.is_done:
                    written = feed.write_fragment(writer, self.limits, is_replacing)
                record = self._record(reader, feed.position, is_finished=feed.is_done)
                writer = writer.commit(reader.schema, written, record, replacing=is_replacing)
                is_replacing = False
        if was_interrupted:
            writer.remove_unfinished()
        return writer

    def _record(
        self, source: IndexedInput | StreamInput, position: Position, *, is_finished: bool
    ) -> Record:
        return {
            "version": _RECORD_VERSION,
            "source": self.identity,
            "shuffle": self.shuffle.record,
            "settings": source.settings,
            "position": asdict(position),
            "finished": is_finished,
        }


def _write_in_two_passes(
    job: _Job, source: StreamInput, writer: TableWriter, start: _Start
) -> TableWriter:
    """Shuffle what can only be read in its order: by way of a second table."""
    first, unshuffled = job.first_pass(), _unshuffled_of(writer)
    if not first.has_finished(unshuffled):
        begin = first.start_of(unshuffled, source.schema)
        unshuffled = first.write(source, unshuffled, begin)
    rows = open_source(unshuffled.uri, storage_options=writer.storage_options)
    indexed = input_of_source(rows)
    assert job.shuffle.seed is not None
    second = replace(job, title="2/2 shuffled")
    writer = second.write(indexed.shuffled(job.shuffle.seed, job.shuffle.clump_size), writer, start)
    unshuffled.drop()
    return writer


def _unshuffled_of(writer: TableWriter) -> TableWriter:
    return open_writer(writer.uri.rstrip("/") + UNSHUFFLED, writer.storage_options)
