"""What a `Source` needs of a table, wherever it is stored."""

from typing import Any, ClassVar, Protocol

import pyarrow as pa

from hf_lance_stream.permutation import Int64Array


class StoredTable(Protocol):
    """One table at a pinned version: `table.Table` on storage, `remote.RemoteTable` in LanceDB.

    It is small and immutable, and pickles without what it has open. Its rows have offsets, 0 to
    the number of rows - 1, in the order of a scan; deleted rows have none.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def uri(self) -> str:
        """Where it is."""

    @property
    def version(self) -> int:
        """Its version number."""

    @property
    def is_fixed(self) -> bool:
        """Whether the user named this very version, so that a state does not change it."""

    @property
    def name(self) -> str:
        """The path or URI without credentials, for states and errors."""

    @property
    def is_remote(self) -> bool:
        """Whether reads go over a network."""

    @property
    def schema(self) -> pa.Schema:
        """Arrow schema of the table."""

    @property
    def fragment_rows(self) -> Int64Array:
        """Rows of each natural shard, int64; they add up to the rows of the table."""

    @property
    def files_digest(self) -> str:
        """What tells this table from one that was made anew at its place."""

    def at(self, version: int) -> "StoredTable":
        """The same table at another version; FileNotFoundError when that is gone."""

    def tag(self, name: str) -> bool:
        """Tag this version; whether the tag is new. ValueError, OSError: it cannot be."""

    def untag(self, name: str) -> bool:
        """Remove the tag of this version; whether there was one. Errors as `tag`."""

    def new_requests(self) -> int:
        """Reads of the storage since this was last asked, in this process."""

    def matching_offsets(self, filter: str) -> Int64Array:
        """Offsets of the rows that match an SQL filter, ascending. ValueError: it is wrong."""

    def take(self, offsets: Int64Array, columns: list[str]) -> pa.Table:
        """Rows by offset in the order given, repeats too; ``a.b`` may come back inside ``a``.

        Raises:
            OSError: they cannot be read, or not all of them.
        """

    def scan(self, offsets: Int64Array, columns: list[str]) -> pa.Table:
        """What `take` reads, for neighbouring rows."""

    def read_blobs(self, offsets: Int64Array, column: str) -> pa.Array:
        """The bytes of blobs by offset in the order given, as large binary."""

    def open_blob(self, offset: int, column: str) -> Any:
        """The blob of one row as an open file."""
