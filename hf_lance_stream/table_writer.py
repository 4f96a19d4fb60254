"""Writing a Lance table fragment by fragment; with `table` and `source` an importer of lance.

Every commit holds, in one atomic step, a fragment and a record of how far the writing has come.
"""

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from hf_lance_stream.credentials import public_uri
from hf_lance_stream.lance_errors import reason_of
from hf_lance_stream.open_table import is_table
from hf_lance_stream.pinning import pin
from hf_lance_stream.processes import refuse_unsafe_fork
from hf_lance_stream.table import Table

if TYPE_CHECKING:
    import lance

RECORD = "hf_lance_stream.written"
"""Key of the record among the properties of a commit."""

_NO_LIMIT = 2**31 - 1  # rows of a file: the fragment ends where its batches do
_COLUMN_CACHE = 8 << 20  # bytes that Lance keeps of a column before it writes a page
_CACHE = 256 << 20  # and of all columns of a wide table
_FOREVER = timedelta(days=36500)

Record = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class TableWriter:
    """A table that fragments are added to; adding makes a new writer.

    Attributes:
        uri: path or URI of the table.
        storage_options: passed to Lance.
        record: what the commit of the latest version holds, or None.
        has_remains: whether a run that committed nothing left files.
    """

    uri: str
    storage_options: dict[str, str] | None = None
    record: Record | None = None
    has_remains: bool = False
    _handle: "lance.LanceDataset | None" = None

    @property
    def exists(self) -> bool:
        """Whether there is a table."""
        return self._handle is not None

    @property
    def name(self) -> str:
        """The path, or the URI without user name and password."""
        return public_uri(self.uri)

    @property
    def version(self) -> int:
        """Latest version; 0 if there is no table."""
        return self._handle.version if self._handle is not None else 0

    @property
    def num_rows(self) -> int:
        """Rows of the table; 0 if there is none."""
        return self._handle.count_rows() if self._handle is not None else 0

    @property
    def num_fragments(self) -> int:
        """Fragments of the table."""
        return len(self._handle.get_fragments()) if self._handle is not None else 0

    @property
    def num_bytes(self) -> int:
        """Bytes of its data files, as far as the manifest says."""
        fragments = self._handle.get_fragments() if self._handle is not None else []
        files = [file for fragment in fragments for file in fragment.metadata.files]
        return sum(file.file_size_bytes or 0 for file in files)

    @property
    def schema(self) -> pa.Schema:
        """Schema of the table, which exists."""
        assert self._handle is not None
        return self._handle.schema

    def write(
        self, schema: pa.Schema, batches: Iterable[pa.RecordBatch], *, replacing: bool
    ) -> Any:
        """Write rows as one fragment, which is part of no version yet.

        Args:
            schema: their schema.
            batches: the rows, at least one.
            replacing: whether the fragment is the first of a new table or takes the place of the
                rows there are.
        """
        from lance.fragment import write_fragments

        try:
            return write_fragments(
                pa.RecordBatchReader.from_batches(schema, batches),
                self.uri if replacing or self._handle is None else self._handle,
                return_transaction=True,
                mode=("overwrite" if self.exists else "create") if replacing else "append",
                max_rows_per_file=_NO_LIMIT,
                data_cache_bytes=min(_COLUMN_CACHE * len(schema), _CACHE),
                data_storage_version="stable" if replacing else None,
                storage_options=self.storage_options,
            )
        except BaseException as error:
            if type(error).__name__ == "PanicException":  # of Rust: no Exception
                raise OSError(f"Lance could not write to {self.name}: {error}") from error
            raise

    def commit(self, schema: pa.Schema, written: Any, record: Record, *, replacing: bool) -> Any:
        """Make a written fragment, or none, part of the table, together with a record.

        Args:
            schema: schema of the rows.
            written: what `write` returned; None for no rows.
            record: JSON types, kept with the version.
            replacing: as for `write`.

        Returns:
            The writer that goes on after it.

        Raises:
            OSError: another process wrote to the table meanwhile.
        """
        import lance
        from lance.dataset import Transaction

        if written is None:  # no rows: a table with a schema, or the same rows again
            operation = lance.LanceOperation
            made = operation.Overwrite(schema, []) if replacing else operation.Append([])
            written = Transaction(self.version, made)
        self._check_latest()
        written.transaction_properties = {RECORD: json.dumps(record)}
        handle = lance.LanceDataset.commit(
            self._handle if self._handle is not None else self.uri,
            written,
            storage_options=self.storage_options,
            max_retries=0,
        )
        # Two appends do not conflict for Lance: the later one takes the next version.
        if handle.version != self.version + 1:
            raise self._disturbed(handle.version)
        return replace(self, record=record, _handle=handle)

    def remove_unfinished(self) -> None:
        """Delete the files that killed runs have written and not committed."""
        if self._handle is not None:
            # Keeps all versions, as none is so old.
            self._handle.cleanup_old_versions(older_than=_FOREVER, delete_unverified=True)

    def drop(self) -> None:
        """Delete the table."""
        import lance

        if self._handle is not None:
            lance.LanceDataset.drop(self.uri, self.storage_options, ignore_not_found=True)

    def _check_latest(self) -> None:
        if self._handle is not None and self._handle.latest_version != self.version:
            raise self._disturbed(self._handle.latest_version)
        if self._handle is None and open_writer(self.uri, self.storage_options).exists:
            raise self._disturbed(1)

    def _disturbed(self, version: int) -> OSError:
        return OSError(
            f"another process wrote to {self.name} meanwhile: expected version "
            f"{self.version + 1} to be the next one, found version {version}; let only one process "
            'write to it, and begin again with mode="overwrite"'
        )


def open_writer(
    uri: str | os.PathLike[str],
    storage_options: dict[str, str] | None = None,
    *,
    argument: str = "table",
) -> TableWriter:
    """A writer for the latest version of a table, which need not exist.

    Args:
        uri: path or URI.
        storage_options: passed to Lance.
        argument: the user's name for `uri`, for errors.

    Raises:
        ValueError: there is something else at the path.
    """
    refuse_unsafe_fork()
    uri = os.fspath(uri)
    if "://" not in uri:
        uri = os.path.realpath(Path(uri).expanduser())
        names = _names_in(Path(uri), argument)
        if names is not None and not is_table(Path(uri)):
            if names - {"data", "_transactions"}:
                raise ValueError(
                    f"`{argument}` must name a new directory or a Lance table: got {uri!r}, which "
                    f"holds {sorted(names)[:3]}"
                )
            return TableWriter(uri=uri, storage_options=storage_options, has_remains=bool(names))
    try:
        table = pin(uri, None, storage_options, argument)
    except FileNotFoundError:
        return TableWriter(uri=uri, storage_options=storage_options)
    if not isinstance(table, Table):
        raise ValueError(
            f"`{argument}` must be a path or URI where files can be written: got {table.name!r}, "
            "a table that LanceDB has; use its own `create_table` or `add`"
        )
    return TableWriter(
        uri=uri,
        storage_options=storage_options,
        record=_record_of(table.handle),
        _handle=table.handle,
    )


def _names_in(path: Path, argument: str) -> set[str] | None:
    """Names in a directory; None if there is none."""
    if not path.exists():
        return None
    if not path.is_dir():
        raise ValueError(f"`{argument}` must name a directory: got the file {str(path)!r}")
    return {child.name for child in path.iterdir()}


def _record_of(handle: "lance.LanceDataset") -> Record | None:
    try:
        transaction = handle.read_transaction(handle.version)
    except (OSError, ValueError) as error:  # older versions may have none
        if "not found" in reason_of(error).lower():
            return None
        raise
    properties = (transaction.transaction_properties or {}) if transaction is not None else {}
    text = properties.get(RECORD)
    return None if text is None else json.loads(text)
