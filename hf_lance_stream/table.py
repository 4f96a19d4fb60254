"""One Lance table at a pinned version; with `source` the only importer of lance and lancedb.

A `Table` is small and pickles without its handle, which every process opens for itself.
"""

import hashlib
import io
import os
import threading
from collections.abc import Callable, Sized
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit
from weakref import WeakValueDictionary

import numpy as np
import pyarrow as pa

from hf_lance_stream.blobs import large_binary, must_be_scanned, scanned
from hf_lance_stream.credentials import (
    bare_uri,
    public_uri,
    without_secrets,
)
from hf_lance_stream.lance_errors import (
    hint_of_reading,
    is_reading_error,
    lance_errors,
    reason_of,
)
from hf_lance_stream.open_table import open_lance
from hf_lance_stream.permutation import Int64Array
from hf_lance_stream.processes import is_starting_child
from hf_lance_stream.refs import tag, untag
from hf_lance_stream.stored import StoredTable

if TYPE_CHECKING:
    import lance

_OFFSET = "_rowoffset"  # Lance's number of a live row in scan order, which `take` counts in
_SCANNED_ROWS = 1024  # at a time: what scans fastest

_NAMED_FRAGMENTS = 8  # in an error

_counting = threading.Lock()

_tables: "WeakValueDictionary[tuple[str, int, str], StoredTable]" = WeakValueDictionary()

Rows = TypeVar("Rows", bound=Sized)


@dataclass(frozen=True, eq=False)
class Table:
    """One Lance table at a pinned version.

    Attributes:
        uri: where it is.
        version: its version number.
        storage_options: passed to Lance.
        is_fixed: whether the user named this very version, so that a state does not change it.
        pickle_credentials: whether every pickle holds the secrets in `uri` and `storage_options`;
            else only that for a child process that is being started does.
        left_out: names of what was left out of the pickle that this table comes from.
    """

    uri: str
    version: int
    storage_options: dict[str, str] | None = field(default=None, repr=False)
    is_fixed: bool = False
    pickle_credentials: bool = False
    left_out: tuple[str, ...] = ()
    _handles: dict[int, "lance.LanceDataset"] = field(default_factory=dict, repr=False)
    _requests: dict[int, int] = field(default_factory=dict, repr=False)

    @property
    def handle(self) -> "lance.LanceDataset":
        """The open table of this process."""
        pid = os.getpid()
        if pid not in self._handles:
            self._handles[pid] = self._open(self.version)
        return self._handles[pid]

    def _open(self, version: int) -> "lance.LanceDataset":
        try:
            return open_lance(self.uri, version, self.storage_options, "source")
        except (ValueError, OSError) as error:
            if not self.left_out:
                raise
            raise type(error)(f"{error}{self._hint_of_pickle}") from error

    @property
    def _hint_of_pickle(self) -> str:
        if not self.left_out:
            return ""
        return (
            f"; this dataset was unpickled, and its credentials ({', '.join(self.left_out)}) were "
            "not in the pickle: set them in the environment of this process, or make the dataset "
            "with pickle_credentials=True"
        )

    @property
    def name(self) -> str:
        """The path, or the URI without what of it is secret."""
        if self.uri.startswith("file:///"):
            return os.path.realpath(self.uri.removeprefix("file://"))
        return public_uri(self.uri) if "://" in self.uri else self.uri

    @property
    def is_remote(self) -> bool:
        """Whether the table is in an object store."""
        scheme = urlsplit(self.uri).scheme if "://" in self.uri else "file"
        return scheme not in ("file", "file-object-store", "memory")

    def at(self, version: int) -> "Table":
        """The same table at another version; FileNotFoundError when that is gone."""
        handle = self._open(version)
        return replace(self, version=version, _handles={os.getpid(): handle}, _requests={})

    def tag(self, name: str) -> bool:
        """Tag this version; whether the tag is new. Errors as `untag`."""
        return self._change_tag(tag, name)

    def untag(self, name: str) -> bool:
        """Remove the tag of this version; whether there was one.

        Raises:
            ValueError: the tag is that of another version, or its name is not allowed.
            OSError: it cannot be written.
        """
        return self._change_tag(untag, name)

    def _change_tag(self, change: Callable[..., bool], name: str) -> bool:
        what = f"`tag`: {name!r} of {self.name}"
        try:
            with self._lance_errors():
                return change(self.handle, self.uri, name)
        except LookupError as error:
            raise ValueError(
                f"{what} is that of {error}, and version {self.version} is read: choose another "
                f"name, or remove it with lance.dataset(…).tags.delete({name!r})"
            ) from error
        except (ValueError, OSError) as error:
            kind = ValueError if "ref is invalid" in str(error).lower() else OSError
            raise kind(f"{what} cannot be written: {reason_of(error)}") from error

    def new_requests(self) -> int:
        """Reads of the storage through this handle since this was last asked."""
        with _counting:
            before = self._requests.get(os.getpid(), 0)
            count = self._requests[os.getpid()] = self.handle.io_stats_snapshot().read_iops
        return int(count - before)

    @property
    def schema(self) -> pa.Schema:
        """Arrow schema of the table."""
        return self.handle.schema

    def _fragments(self) -> "list[lance.LanceFragment]":
        with self._lance_errors():
            found: list[lance.LanceFragment] = self.handle.get_fragments()
            return found

    @cached_property
    def fragment_rows(self) -> Int64Array:
        """Live rows of each fragment, from the manifest."""
        counts = [
            # Old manifests lack the counts; then Lance reads them from the files.
            m.physical_rows - m.num_deletions
            if (m := f.metadata).physical_rows is not None and m.num_deletions is not None
            else f.count_rows()
            for f in self._fragments()
        ]
        return np.asarray(counts, dtype=np.int64)

    @cached_property
    def files_digest(self) -> str:
        """Hash of the names of all files with data or deletions, which no other table has."""
        names: list[str] = []
        for fragment in self._fragments():
            parts = fragment.metadata
            names += (file.path for file in parts.files)
            names += (overlay.data_file.path for overlay in parts.overlays)
            if parts.deletion_file is not None:
                names.append(str(parts.deletion_file.id))
        return hashlib.sha256("\n".join(names).encode()).hexdigest()[:16]

    def matching_offsets(self, filter: str) -> Int64Array:
        """Offsets of the live rows that match an SQL filter, in table order."""
        handle = self.handle
        try:
            with self._lance_errors():
                found = handle.scanner(columns=[_OFFSET], filter=filter).to_table()
        except (ValueError, OSError) as error:
            if is_reading_error(error):
                raise OSError(
                    f"could not read what filter={filter!r} needs {self._unreadable_part(filter)}: "
                    f"{reason_of(error)}{hint_of_reading(error, self.name)}{self._hint_of_pickle}"
                ) from error
            raise ValueError(
                f"`filter` cannot be applied to {self.name}: got filter={filter!r}; "
                f"Lance says: {reason_of(error)}"
            ) from error
        offsets = found.column(0).to_numpy().astype(np.int64)
        return offsets if (np.diff(offsets) > 0).all() else np.sort(offsets)

    def take(self, offsets: Int64Array, columns: list[str]) -> pa.Table:
        """Rows by offset among the live rows, in the order given.

        Args:
            offsets: int64, shape ``(n,)``; repeats are allowed.
            columns: columns to read, blobs as descriptors; ``a.b`` comes back inside ``a``.
        """
        return self._read(
            lambda: self.handle.take(offsets, columns=columns).combine_chunks(), offsets
        )

    def read_blobs(self, offsets: Int64Array, column: str) -> pa.Array:
        """The bytes of blobs by offset, in the order given, as large binary.

        Args:
            offsets: int64, shape ``(n,)``; repeats are allowed.
            column: a blob column, or ``"a.b"`` for a blob in a struct.
        """

        def read() -> pa.Array:
            if self._scans_blobs:
                return scanned(self.handle, column, offsets)
            found = self.handle.read_blobs(column, indices=offsets.tolist(), preserve_order=True)
            return large_binary([data for _, data in found])

        return self._read(read, offsets)

    @cached_property
    def _scans_blobs(self) -> bool:
        return must_be_scanned(self.handle)

    def open_blob(self, offset: int, column: str) -> "lance.BlobFile | io.BytesIO":
        """The blob of one row, which is not null, as an open file; nothing of it is read.

        Where Lance finds blobs by scans only, it is read as a whole.
        """
        rows = np.array([offset], dtype=np.int64)
        if self._scans_blobs:
            return io.BytesIO(self.read_blobs(rows, column)[0].as_py())
        return self._read(lambda: self.handle.take_blobs(column, indices=[offset]), rows)[0]

    def scan(self, offsets: Int64Array, columns: list[str]) -> pa.Table:
        """What `take` reads, for neighbouring rows; faster for many, in several arrays."""
        first = int(offsets[0])
        return self._read(
            lambda: self.handle.scanner(
                columns=columns, offset=first, limit=offsets.size, batch_size=_SCANNED_ROWS
            ).to_table(),
            offsets,
        )

    def _read(self, read: Callable[[], Rows], offsets: Int64Array) -> Rows:
        try:
            with self._lance_errors():
                rows = read()
        except Exception as error:
            raise OSError(
                f"could not read {self._rows_in_words(offsets)}: {reason_of(error)}"
                f"{hint_of_reading(error, self.name)}{self._hint_of_pickle}"
            ) from error
        if len(rows) != offsets.size:
            raise OSError(f"got {len(rows)} rows instead of {self._rows_in_words(offsets)}")
        return rows

    def _unreadable_part(self, filter: str) -> str:
        """The first fragment that a filter cannot be applied to, in words."""
        for fragment in self._fragments():
            try:
                with self._lance_errors():
                    fragment.scanner(columns=[_OFFSET], filter=filter).to_table()
            except (ValueError, OSError):
                place = self._fragment_in_words(fragment)
                return f"of {self.name} at version {self.version}, in {place}"
        return f"of {self.name} at version {self.version}"

    def _lance_errors(self) -> AbstractContextManager[None]:
        return lance_errors(self.uri, self.storage_options)

    def _rows_in_words(self, offsets: Int64Array) -> str:
        """Rows with their table, version and fragments, for an error."""
        low, high = int(offsets.min()), int(offsets.max())
        rows = (
            f"row {low}" if offsets.size == 1 else f"{offsets.size} rows between {low} and {high}"
        )
        stops = np.cumsum(self.fragment_rows)
        found = np.unique(np.searchsorted(stops, offsets, side="right"))
        named = [self._fragments()[i] for i in found[:_NAMED_FRAGMENTS]]
        more = f" and {len(found) - len(named)} more" if len(found) > len(named) else ""
        place = f"fragments {', '.join(str(f.fragment_id) for f in named)}{more}"
        if len(found) == 1:
            place = self._fragment_in_words(named[0])
        return f"{rows} of {self.name} at version {self.version}, in {place}"

    def _fragment_in_words(self, fragment: "lance.LanceFragment") -> str:
        ids = [f.fragment_id for f in self._fragments()]
        index = ids.index(fragment.fragment_id)
        stop = int(self.fragment_rows[: index + 1].sum())
        first = stop - int(self.fragment_rows[index])
        files = ", ".join(file.path for file in fragment.metadata.files)
        return f"fragment {fragment.fragment_id} (rows {first} to {stop - 1}, files: {files})"

    def __repr__(self) -> str:
        return f"Table({self.name!r}, version={self.version})"

    def __getstate__(self) -> dict[str, Any]:
        state = {name: getattr(self, name) for name in self.__dataclass_fields__}
        state |= {"_handles": {}, "_requests": {}}
        if not (self.pickle_credentials or is_starting_child()):
            options = self.storage_options or {}
            state["storage_options"] = without_secrets(options) or None
            state["uri"] = bare_uri(self.uri)
            names = [name for name in options if name not in without_secrets(options)]
            names += ["what of the URI is secret"] if state["uri"] != self.uri else []
            state["left_out"] = tuple(dict.fromkeys((*self.left_out, *names)))
        return state


def remember(table: StoredTable, files: str) -> StoredTable:
    """The table of this process with the same bare URI, version and files, which is opened once.

    Args:
        table: a table.
        files: its `files_digest`.
    """
    return _tables.setdefault((bare_uri(table.uri), table.version, files), table)


def table_at(uri: str, version: int, files: str) -> StoredTable:
    """The table that was remembered, by its bare URI; one without storage options if none was."""
    return _tables.get((uri, version, files)) or remember(Table(uri, version), files)
