"""LanceDB tables that only LanceDB can read: on a server, or in the memory of this process.

Rows are read through LanceDB's public interface, `take_offsets` at a version that was checked out.
It is the only way to read by row that a server has, and it may answer in any order, so that each
row is asked for with its offset, and all must have come.
"""

import hashlib
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import pyarrow as pa

from hf_lance_stream.address import SCHEME, Address, address_of
from hf_lance_stream.permutation import Int64Array
from hf_lance_stream.processes import is_starting_child, refuse_unsafe_fork
from hf_lance_stream.refs import Version

if TYPE_CHECKING:
    from lancedb.table import Table as Handle

_OFFSET = "_rowoffset"  # LanceDB's number of a row, which `take_offsets` counts in
_ROW_ID = "_rowid"
_ROWS_PER_REQUEST = 4096  # whose offsets are about 30 KB of a request
_NUM_SHARDS = 64  # natural shards: the fragments are not known
_MAIN = "main"  # the name of the branch that a table begins with
_MISSING = {404, 405, 501}  # a server that does not know a call

_UNKNOWN_BRANCH = (  # neither in the list of tags, nor where a server resolves one
    "there is a tag of that name, and LanceDB does not tell for which of the branches of the table "
    "it is: use version numbers, or a tuple of a branch and a number"
)

_lock = threading.Lock()  # around handles and counts

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class RemoteTable:
    """One table that LanceDB reads, at a pinned version; see `stored.StoredTable`.

    Attributes:
        address: where it is.
        version: its version number.
        schema: its Arrow schema.
        num_rows: number of its rows.
        files_digest: hash of the time at which the version was made, which no other table has;
            of its schema only, where the server does not list versions.
        is_fixed: whether the user named this very version.
        pickle_credentials: whether every pickle holds the API key; else only that for a child
            process that is being started does.
        left_out: names of what was left out of the pickle that this table comes from.
    """

    address: Address
    version: int
    schema: pa.Schema = field(repr=False)
    num_rows: int
    files_digest: str
    is_fixed: bool = False
    pickle_credentials: bool = False
    left_out: tuple[str, ...] = ()
    _handles: dict[int, "Handle"] = field(default_factory=dict, repr=False)
    _requests: dict[int, int] = field(default_factory=dict, repr=False)

    @property
    def handle(self) -> "Handle":
        """The open table of this process."""
        with _lock:
            pid = os.getpid()
            if pid not in self._handles:
                self._handles[pid] = self.address.open(self.version)
            return self._handles[pid]

    @property
    def uri(self) -> str:
        """``db://database/namespace/table``, or ``memory://table``."""
        return self.address.uri

    @property
    def name(self) -> str:
        """The URI."""
        return self.address.uri

    @property
    def is_remote(self) -> bool:
        """Whether a server is asked."""
        return self.address.connection is not None

    @cached_property
    def fragment_rows(self) -> Int64Array:
        """Rows of 64 equal shards: LanceDB does not tell the fragments."""
        count = min(_NUM_SHARDS, self.num_rows)
        return np.diff(np.arange(count + 1, dtype=np.int64) * self.num_rows // max(1, count))

    def at(self, version: int) -> "RemoteTable":
        """The same table at another version; FileNotFoundError when that is gone."""
        new = _pinned(self.address, self.handle, version, self.is_fixed)
        return replace(new, pickle_credentials=self.pickle_credentials, left_out=self.left_out)

    def tag(self, name: str) -> bool:
        """Tag this version; whether the tag is new.

        Raises:
            ValueError: the tag is that of another version, or may be that of another branch.
            OSError: it cannot be written.
        """
        is_new = not self._is_tagged(name)
        if is_new:
            self._ask(lambda table: table.tags.create(name, self.version), f"tag {name!r}")
        return is_new

    def untag(self, name: str) -> bool:
        """Remove the tag of this version; whether there was one. Errors as `tag`."""
        is_tagged = self._is_tagged(name)
        if is_tagged:
            self._ask(lambda table: table.tags.delete(name), f"remove the tag {name!r}")
        return is_tagged

    def _is_tagged(self, name: str) -> bool:
        found = self._ask(lambda table: table.tags.list(), "list the tags").get(name)
        if found is None:
            return False
        if self._ask(lambda table: table.branches.list(), "list the branches"):
            raise ValueError(f"`tag`: {name!r} of {self.name}: {_UNKNOWN_BRANCH}")
        if found["version"] != self.version:
            raise ValueError(
                f"`tag`: {name!r} of {self.name} is that of version {found['version']}, and "
                f"version {self.version} is read: choose another name"
            )
        return True

    def new_requests(self) -> int:
        """Requests for rows since this was last asked, in this process."""
        with _lock:
            return self._requests.pop(os.getpid(), 0)

    def matching_offsets(self, filter: str) -> Int64Array:
        """Offsets of the rows that match an SQL filter, ascending.

        Raises:
            ValueError: the filter does not fit the table.
            OSError: the server does not answer, or not with all of them.
        """
        what = f"apply filter={filter!r}"
        try:
            found = self._ask(
                lambda table: table.search().where(filter).select([_OFFSET]).to_arrow(), what
            )
            count = self._ask(lambda table: table.count_rows(filter), what)
        except OSError as error:
            cause = error.__cause__
            if getattr(cause, "status_code", 400) not in (400, 422) or cause is None:
                raise
            raise ValueError(
                f"`filter` cannot be applied to {self.name}: got filter={filter!r}; "
                f"LanceDB says: {self.address.reason_of(cause)}"
            ) from error
        offsets = np.unique(found.column(_OFFSET).to_numpy().astype(np.int64))
        if offsets.size != count:
            raise OSError(
                f"{self.name} at version {self.version} has {count} rows that match "
                f"filter={filter!r}, but gave {offsets.size} of them"
            )
        return offsets

    def take(self, offsets: Int64Array, columns: list[str]) -> pa.Table:
        """Rows by offset, in the order given.

        Args:
            offsets: int64, shape ``(n,)``; repeats are allowed.
            columns: columns to read; ``"_rowid"`` is LanceDB's id of the row.

        Raises:
            OSError: they cannot be read, or not all of them.
        """
        wanted, places = np.unique(offsets, return_inverse=True)
        starts = range(0, wanted.size, _ROWS_PER_REQUEST)
        parts = [wanted[start : start + _ROWS_PER_REQUEST] for start in starts]
        rows = pa.concat_tables([self._request(part, columns) for part in parts])
        came = rows.column(_OFFSET).to_numpy().astype(np.int64)
        if not np.array_equal(np.sort(came), wanted):
            raise OSError(
                f"asked for {self._in_words(wanted)}, {self.name} gave {came.size} rows, of which "
                f"{np.intersect1d(came, wanted).size} are among them"
            )
        order = np.argsort(came)[places]
        return rows.drop_columns([_OFFSET]).take(pa.array(order)).combine_chunks()

    def _request(self, offsets: Int64Array, columns: list[str]) -> pa.Table:
        """Rows by offset, distinct, in any order, with their offsets."""

        def ask(handle: "Handle") -> pa.Table:
            query = handle.take_offsets(offsets.tolist())
            query = query.select([*(name for name in columns if name != _ROW_ID), _OFFSET])
            return (query.with_row_id() if _ROW_ID in columns else query).to_arrow()

        return self._ask(ask, f"read {self._in_words(offsets)}")

    def scan(self, offsets: Int64Array, columns: list[str]) -> pa.Table:
        """The same as `take`: where a scan begins cannot be said by row."""
        return self.take(offsets, columns)

    def read_blobs(self, offsets: Int64Array, column: str) -> pa.Array:
        """The bytes of blobs by offset, in the order given, as large binary."""
        ids = self.take(offsets, [_ROW_ID]).column(_ROW_ID)
        return self._ask(
            lambda table: table.fetch_blobs(column, ids.to_pylist()),
            f"read the blobs {column!r} of {self._in_words(offsets)}",
        )

    def open_blob(self, offset: int, column: str) -> Any:
        """The blob of one row, which is not null, as an open file; nothing of it is read."""
        row = np.array([offset], dtype=np.int64)
        ids = self.take(row, [_ROW_ID]).column(_ROW_ID)
        return self._ask(
            lambda table: table.fetch_blob_files(column, ids.to_pylist()),
            f"open the blob {column!r} of {self._in_words(row)}",
        )[0]

    def _ask(self, ask: Callable[["Handle"], T], what: str) -> T:
        """The answer of LanceDB; OSError says what could not be done."""
        refuse_unsafe_fork()
        with _lock:
            self._requests[os.getpid()] = self._requests.get(os.getpid(), 0) + 1
        try:
            return ask(self.handle)
        except Exception as error:
            reason, hint = self.address.reason_of(error), ""
            if "not found" in reason.lower():
                hint = (
                    "; the table may have been dropped, or the version removed by a clean-up of "
                    "old versions: tag the versions that are in use"
                )
            where = f"of {self.name} at version {self.version}"
            raise OSError(f"could not {what} {where}: {reason}{hint}{self._hint}") from error

    @property
    def _hint(self) -> str:
        if not self.left_out:
            return ""
        return (
            f"; this dataset was unpickled, and its credentials ({', '.join(self.left_out)}) were "
            "not in the pickle: set LANCEDB_API_KEY in the environment of this process, or make "
            "the dataset with pickle_credentials=True"
        )

    def _in_words(self, offsets: Int64Array) -> str:
        if offsets.size == 1:
            return f"row {offsets[0]}"
        return f"{offsets.size} rows between {offsets.min()} and {offsets.max()}"

    def __getstate__(self) -> dict[str, Any]:
        if self.address.connection is None:
            raise ValueError(
                f"{self.name} is in the memory of this process, and another one cannot read it: "
                "use num_workers=0, or make the table in a database on disk or in an object store"
            )
        state = {name: getattr(self, name) for name in self.__dataclass_fields__}
        state |= {"_handles": {}, "_requests": {}}
        if not (self.pickle_credentials or is_starting_child()):
            state["address"] = self.address.without_secrets()
            state["left_out"] = tuple(dict.fromkeys((*self.left_out, *self.address.secrets())))
        return state


def is_remote_table(item: Any) -> bool:
    """Whether what a user named as a table is one that only LanceDB can read."""
    if isinstance(item, str):
        return item.startswith(SCHEME)
    module = type(item).__module__
    if module.startswith("lancedb.remote."):
        return True
    is_embedded = module.startswith("lancedb.") and hasattr(item, "to_lance")
    return is_embedded and str(item.uri).startswith("memory:")


def pin_remote(
    item: Any,
    version: Version | None,
    options: Mapping[str, str] | None,
    argument: str = "source",
) -> RemoteTable:
    """Open what `is_remote_table`, and pin its version; the user's own table is left as it is.

    Args:
        item: ``"db://database/table"``, or a table of `lancedb`.
        version: version number, tag or branch; None for the one that `item` is at.
        options: ``api_key``, ``host_override`` and ``region`` of the database.
        argument: the user's name for `item`, for errors.

    Raises:
        FileNotFoundError: there is no such table, or no such version.
        ValueError: the database cannot be reached, or does not let us in.
    """
    refuse_unsafe_fork()
    address = address_of(item, options, argument)
    try:
        handle = item if not isinstance(item, str) else address.open(None)
        found = handle.version
        named = _named(address, handle, version)
    except LookupError as error:
        raise _no_such_version(address, version, str(error.args[0])) from error
    except Exception as error:
        raise _cannot_open(address, error, argument) from error
    address, number, is_fixed = named
    if number is None and address.branch == handle.current_branch():
        number = found
    return _pinned(address, handle, number, is_fixed, argument)


def _pinned(
    address: Address,
    other: "Handle",
    number: int | None,
    is_fixed: bool,
    argument: str = "source",
) -> RemoteTable:
    """The table at a version; `other` is the same table at any."""
    try:
        if address.connection is None:
            handle = other.branches.checkout(address.branch or _MAIN, number)
        else:
            handle = address.open(number)
        version, schema, rows = handle.version, handle.schema, handle.count_rows()
        digest = _digest(handle, version, schema)
    except Exception as error:
        reason = address.reason_of(error)
        if number is not None and "not found" in reason.lower():
            raise _no_such_version(address, number, reason) from error
        raise _cannot_open(address, error, argument) from error
    return RemoteTable(
        address, version, schema, rows, digest, is_fixed, _handles={os.getpid(): handle}
    )


def _named(
    address: Address, handle: "Handle", version: Version | None
) -> tuple[Address, int | None, bool]:
    """The branch and number that `version` stands for, and whether it is for one version.

    Raises:
        LookupError: there is no tag or branch of that name.
    """
    if version is None or isinstance(version, int):
        return address, version, version is not None
    name, number = (version, None) if isinstance(version, str) else version
    tags = handle.tags.list() if isinstance(version, str) else {}
    branches = [_MAIN, *handle.branches.list()]
    if name in tags:
        if len(branches) > 1:
            raise LookupError(_UNKNOWN_BRANCH)
        return address, tags[name]["version"], True
    if name not in branches:
        raise LookupError(f"its tags and branches are {sorted([*tags, *branches])[:20]}")
    return replace(address, branch=None if name == _MAIN else name), number, number is not None


def _digest(handle: "Handle", version: int, schema: pa.Schema) -> str:
    try:
        times = [v["timestamp"] for v in handle.list_versions() if v["version"] == version]
    except Exception as error:
        if getattr(error, "status_code", 404) not in _MISSING:
            raise
        times = []
    text = repr(([time.timestamp() for time in times], str(schema)))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _cannot_open(address: Address, error: Exception, argument: str) -> Exception:
    reason = address.reason_of(error)
    if "was not found" in reason:
        return FileNotFoundError(f"`{argument}`: there is no table {address.uri!r}: {reason}")
    hint = "; check the API key" if getattr(error, "status_code", None) in (401, 403) else ""
    return ValueError(f"`{argument}`: {address.uri!r} cannot be opened: {reason}{hint}")


def _no_such_version(address: Address, version: Any, reason: str) -> FileNotFoundError:
    return FileNotFoundError(
        f"`version`: {address.uri!r} has no version {version!r}: {reason}; versions can be cleaned "
        "up unless they are tagged; pass a version, tag or branch that exists, or leave it out"
    )
