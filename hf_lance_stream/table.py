"""One Lance table at a pinned version; with `source` the only importer of lance and lancedb.

A `Table` is small and pickles without its handle, which every process opens for itself.
"""

import difflib
import hashlib
import inspect
import os
import re
import threading
from collections.abc import Callable, Sized
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit, urlunsplit
from weakref import WeakValueDictionary

import numpy as np
import pyarrow as pa

from hf_lance_stream.blobs import large_binary
from hf_lance_stream.permutation import Int64Array
from hf_lance_stream.processes import refuse_unsafe_fork
from hf_lance_stream.refs import Version, find_named, tag, untag, uri_of_handle
from hf_lance_stream.remote import is_remote_table, pin_remote
from hf_lance_stream.stored import StoredTable

if TYPE_CHECKING:
    import lance

_OFFSET = "_rowoffset"  # Lance's number of a live row in scan order, which `take` counts in
_SCANNED_ROWS = 1024  # at a time: what scans fastest

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
    """

    uri: str
    version: int
    storage_options: dict[str, str] | None = field(default=None, repr=False)
    is_fixed: bool = False
    _handles: dict[int, "lance.LanceDataset"] = field(default_factory=dict, repr=False)
    _requests: dict[int, int] = field(default_factory=dict, repr=False)

    @property
    def handle(self) -> "lance.LanceDataset":
        """The open table of this process."""
        pid = os.getpid()
        if pid not in self._handles:
            self._handles[pid] = _open(self.uri, self.version, self.storage_options, "source")
        return self._handles[pid]

    @property
    def name(self) -> str:
        """The path, or the URI without user name and password."""
        if self.uri.startswith("file:///"):
            return os.path.realpath(self.uri.removeprefix("file://"))
        return without_password(self.uri)

    @property
    def is_remote(self) -> bool:
        """Whether the table is in an object store."""
        scheme = urlsplit(self.uri).scheme if "://" in self.uri else "file"
        return scheme not in ("file", "file-object-store", "memory")

    def at(self, version: int) -> "Table":
        """The same table at another version; FileNotFoundError when that is gone."""
        handle = _open(self.uri, version, self.storage_options, "source")
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

    @cached_property
    def fragment_rows(self) -> Int64Array:
        """Live rows of each fragment, from the manifest."""
        counts = [
            # Old manifests lack the counts; then Lance reads them from the files.
            m.physical_rows - m.num_deletions
            if (m := f.metadata).physical_rows is not None and m.num_deletions is not None
            else f.count_rows()
            for f in self.handle.get_fragments()
        ]
        return np.asarray(counts, dtype=np.int64)

    @cached_property
    def files_digest(self) -> str:
        """Hash of the names of all files with data or deletions, which no other table has."""
        names: list[str] = []
        for fragment in self.handle.get_fragments():
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
            found = handle.scanner(columns=[_OFFSET], filter=filter).to_table()
        except (ValueError, OSError) as error:
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
            found = self.handle.read_blobs(column, indices=offsets.tolist(), preserve_order=True)
            return large_binary([data for _, data in found])

        return self._read(read, offsets)

    def open_blob(self, offset: int, column: str) -> "lance.BlobFile":
        """The blob of one row, which is not null, as an open file; nothing of it is read."""
        rows = np.array([offset], dtype=np.int64)
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
        what = (
            f"{offsets.size} rows between {offsets.min()} and {offsets.max()} of {self.name} at "
            f"version {self.version}"
        )
        try:
            rows = read()
        except Exception as error:
            reason = reason_of(error)
            hint = ""
            is_own_file = os.path.basename(self.uri.rstrip("/")) in reason  # not an external blob
            if "not found" in reason.lower() and is_own_file:
                hint = (
                    "; its files may have been removed by a clean-up of old versions: tag the "
                    "versions that are in use"
                )
            raise OSError(f"could not read {what}: {reason}{hint}") from error
        if len(rows) != offsets.size:
            raise OSError(f"got {len(rows)} rows instead of {what}")
        return rows

    def __getstate__(self) -> dict[str, Any]:
        return {
            "uri": self.uri,
            "version": self.version,
            "storage_options": self.storage_options,
            "is_fixed": self.is_fixed,
            "_handles": {},
            "_requests": {},
        }


def remember(table: StoredTable, files: str) -> StoredTable:
    """The table of this process with the same URI, version and files, which is opened once.

    Args:
        table: a table.
        files: its `files_digest`.
    """
    return _tables.setdefault((table.uri, table.version, files), table)


def table_at(uri: str, version: int, files: str) -> StoredTable:
    """The table that was remembered, if it is still in use, else one without storage options."""
    return _tables.get((uri, version, files)) or remember(Table(uri, version), files)


def pin(
    item: Any,
    version: Version | None,
    storage_options: dict[str, str] | None,
    argument: str = "source",
) -> StoredTable:
    """Open what a user named as a table, and pin its version.

    Args:
        item: a path or URI, a `lance.LanceDataset` or a `lancedb` table.
        version: version number, tag or branch; None for the latest.
        storage_options: passed to Lance.
        argument: the user's name for `item`, for errors.
    """
    import lance

    if is_remote_table(item):
        return pin_remote(item, version, storage_options, argument)
    if isinstance(item, str | os.PathLike):
        uri = os.fspath(item)
        if isinstance(uri, str):
            if "://" not in uri:
                uri = os.path.realpath(Path(uri).expanduser())
            number = version if isinstance(version, int) else None
            handle = _open(uri, number, storage_options, argument)
            return _at(handle, uri, version, storage_options)
    is_lancedb = type(item).__module__.startswith("lancedb.") and hasattr(item, "to_lance")
    if is_lancedb and not inspect.iscoroutinefunction(item.to_lance):
        try:
            item = item.to_lance()
        except Exception as error:
            raise ValueError(
                f"`{argument}` is a LanceDB table that has no local Lance table behind it: "
                f"got {type(item).__name__}; Lance says: {reason_of(error)}"
            ) from error
    if isinstance(item, lance.LanceDataset):
        options = storage_options or getattr(item, "_storage_options", None)
        uri = item.uri if "://" in item.uri else os.path.realpath(item.uri)
        return _at(item, uri_of_handle(item, uri), version, options)
    raise ValueError(
        f"`{argument}` must be a path or URI (str or Path), a lance.LanceDataset, a "
        f"lancedb table (not an AsyncTable), or a list of these: got {type(item).__name__}"
    )


def _at(
    handle: "lance.LanceDataset",
    uri: str,
    version: Version | None,
    storage_options: dict[str, str] | None,
) -> Table:
    """The open table at `version`; None for where it is."""
    is_fixed = version is not None
    try:
        if isinstance(version, int) and version != handle.version:
            handle = handle.checkout_version(version)
        elif isinstance(version, str | tuple):
            uri, handle, is_fixed = find_named(handle, uri, version)
    except (ValueError, OSError, LookupError) as error:
        raise _no_such_version(uri, version, error) from error
    return Table(uri, handle.version, storage_options, is_fixed, {os.getpid(): handle})


def check_version_argument(version: Any) -> None:
    """Raise ValueError unless `version` is a `Version` or None."""
    is_pair = isinstance(version, tuple) and len(version) == 2
    name, number = version if is_pair else (version, version)
    is_number = isinstance(number, int) and not isinstance(number, bool) and number >= 0
    is_name = isinstance(name, str) and bool(name)
    is_known = is_name and (is_number or number is None) if is_pair else is_name or is_number
    if version is not None and not is_known:
        raise ValueError(
            "`version` must be a version number, a tag, a branch, or a tuple of a branch and a "
            f"version number (or None, for the latest): got version={version!r}"
        )


def check_storage_options(options: Any) -> None:
    """Raise ValueError unless `options` maps names to texts, or is None."""
    is_dict = isinstance(options, dict) and all(
        isinstance(text, str) for pair in options.items() for text in pair
    )
    if options is not None and not is_dict:
        raise ValueError(
            "`storage_options` must be a dict of str to str or None: got "
            f"storage_options={options!r}"
        )


def _open(
    uri: str,
    version: int | None,
    storage_options: dict[str, str] | None,
    argument: str,
) -> "lance.LanceDataset":
    import lance

    refuse_unsafe_fork()
    path = None if "://" in uri else Path(uri)
    name = without_password(uri)
    if path is not None and not path.exists():
        near = difflib.get_close_matches(path.name, tables_in(path.parent), n=1)
        hint = f"; did you mean {str(path.parent / near[0])!r}?" if near else ""
        raise FileNotFoundError(f"`{argument}`: there is no table at {name!r}{hint}")
    if path is not None and not is_table(path):
        inside = tables_in(path)
        hint = f"; it holds the tables {inside}: name one of them" if inside else ""
        raise ValueError(
            f"`{argument}`: {name!r} is not a Lance table: it has no _versions directory{hint}"
        )
    try:
        return lance.dataset(uri, version=version, storage_options=storage_options)
    except (ValueError, OSError) as error:
        is_missing = "not found" in str(error).lower()
        if version is not None and (is_missing or not _is_network_error(error)):
            raise _no_such_version(uri, version, error) from error
        if is_missing:
            raise FileNotFoundError(
                f"`{argument}`: there is no Lance table at {name!r}: {reason_of(error)}"
            ) from error
        raise ValueError(
            f"`{argument}`: {name!r} cannot be opened: {without_password(reason_of(error))}"
            + _hint_of(error)
        ) from error


def _no_such_version(uri: str, version: Any, error: Exception) -> FileNotFoundError:
    return FileNotFoundError(
        f"`version`: {without_password(uri)!r} has no version {version!r}: {reason_of(error)}; "
        "versions can be cleaned up unless they are tagged; pass a version, tag or branch that "
        "exists, or leave it out"
    )


def _is_network_error(error: Exception) -> bool:
    """Whether the object store could not be asked, or did not let us."""
    text = str(error).lower()
    return any(word in text for word in ("error performing", "http error", "after 3 retries"))


def _hint_of(error: Exception) -> str:
    if "builder error" in str(error):  # what the HTTP client says of a URL it may not use
        return '; an http:// endpoint needs storage_options={"allow_http": "true"}'
    return ""


def is_table(path: Path) -> bool:
    """Whether a local directory is a Lance table."""
    return (path / "_versions").is_dir()


def tables_in(directory: Path) -> list[str]:
    """Names of the tables in a local directory."""
    try:
        return sorted(p.name for p in directory.iterdir() if is_table(p))
    except OSError:
        return []


def without_password(uri: str) -> str:
    """A URI, or a text with one, without user name and password."""
    parts = urlsplit(uri) if "\n" not in uri else None
    if parts is None or " " in uri or "@" not in parts.netloc:
        return re.sub(r"://[^/\s@]*@", "://", uri)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def reason_of(error: BaseException) -> str:
    """The first line of a Lance error, without the places in Lance's own source."""
    text = str(error).strip()
    return re.sub(r", \S+\.rs:\d+:\d+", "", text.splitlines()[0]) if text else repr(error)
