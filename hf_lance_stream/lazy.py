"""Blobs that are opened, not loaded: a file for each, and the feature that makes it.

In Arrow a lazy blob is a small struct that names it, see `blobs.NAME_TYPE`. The feature of such
a column decodes it to a `BlobFile`, wherever `datasets` decodes an image.
"""

import io
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import pyarrow as pa
from datasets.features.features import register_feature

from hf_lance_stream.blobs import NAME_TYPE
from hf_lance_stream.credentials import bare_uri
from hf_lance_stream.lance_errors import reason_of
from hf_lance_stream.stored import StoredTable
from hf_lance_stream.table import remember, table_at

if TYPE_CHECKING:
    import lance


class BlobFile(io.RawIOBase):
    """A blob as a read-only file; nothing is read, and nothing opened, before it is asked for.

    What takes binary files takes it: ``PIL.Image.open``, ``av.open``, ``zipfile.ZipFile``. It can
    be pickled, and then stands at the same place. Read it in one thread at a time.

    Args:
        table: the table, at its version.
        files: its `files_digest` when the blob was named.
        column: path of the blob column.
        row: number of the row among the live rows of the table.
        size: bytes; None where only opening the blob tells.
    """

    def __init__(
        self, table: StoredTable, files: str, column: str, row: int, size: int | None
    ) -> None:
        super().__init__()
        self._table = table
        self._files = files
        self._column = column
        self._row = row
        self._size = size
        self._file: lance.BlobFile | io.BytesIO | None = None

    def _opened(self) -> "lance.BlobFile | io.BytesIO":
        self._check_open()
        if self._file is None:
            if self._table.files_digest != self._files:
                raise OSError(f"{self.name}: the table at this path is another one by now")
            self._file = self._table.open_blob(self._row, self._column)
        return self._file

    def _check_open(self) -> None:
        if self.closed:
            raise ValueError("I/O operation on a closed blob")

    def size(self) -> int:
        """Bytes of the blob."""
        if self._size is None:
            file = self._opened()
            position = file.tell()
            self._size = int(file.seek(0, io.SEEK_END))
            file.seek(position)
        return self._size

    def readable(self) -> bool:
        """True."""
        self._check_open()
        return True

    def seekable(self) -> bool:
        """True."""
        self._check_open()
        return True

    def tell(self) -> int:
        """Position in bytes."""
        self._check_open()
        return 0 if self._file is None else self._file.tell()

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a position, which is returned; `whence` as in any file."""
        return int(self._opened().seek(offset, whence))

    def readinto(self, buffer: Any) -> int:
        """Fill `buffer` from the position on; returns how many bytes there were."""
        return int(self._read(lambda file: file.readinto(buffer)))

    def write(self, buffer: Any) -> int:
        """Refused: a blob is read only."""
        raise io.UnsupportedOperation("not writable")

    def readall(self) -> bytes:
        """The bytes from the position to the end."""
        return bytes(self._read(lambda file: file.read()))

    def _read(self, read: Callable[[Any], Any]) -> Any:
        file = self._opened()
        try:
            return read(file)
        except (ValueError, OSError) as error:  # Lance raises either where a file is gone
            raise OSError(f"could not read {self.name}: {reason_of(error)}") from error

    def close(self) -> None:
        """Let go of the file."""
        if self._file is not None:
            self._file.close()
            self._file = None
        super().close()

    @property
    def name(self) -> str:
        """Where the blob is, in words."""
        return f"{self._table.name}, version {self._table.version}, row {self._row}, {self._column}"

    def __repr__(self) -> str:
        return f"<BlobFile of {self.name}>"

    def __reduce__(self) -> tuple[Any, ...]:
        where = self._table, self._files, self._column, self._row, self._size
        return _reopened, (*where, self.tell())

    def to_dict(self) -> dict[str, Any]:
        """What names the blob: the value of the column in Arrow."""
        return {
            "table": bare_uri(self._table.uri),
            "version": self._table.version,
            "files": self._files,
            "column": self._column,
            "row": self._row,
            "size": self._size,
        }


def _reopened(
    table: StoredTable, files: str, column: str, row: int, size: int | None, position: int
) -> BlobFile:
    new = BlobFile(remember(table, files), files, column, row, size)
    if position:
        new.seek(position)
    return new


@dataclass
class LazyBlob:
    """Feature of a blob column that is read with ``blobs="lazy"``: its values are `BlobFile`.

    Args:
        decode: give out files; if False, the structs that name the blobs.
    """

    decode: bool = True
    id: str | None = field(default=None, repr=False)
    dtype: ClassVar[str] = "dict"
    pa_type: ClassVar[pa.DataType] = NAME_TYPE
    _type: str = field(default="LazyBlob", init=False, repr=False)

    def __call__(self) -> pa.DataType:
        """Arrow type of the column."""
        return self.pa_type

    def encode_example(self, value: Any) -> dict[str, Any]:
        """The struct that names a blob, of its file or of itself."""
        named: dict[str, Any] = value.to_dict() if isinstance(value, BlobFile) else value
        return named

    def decode_example(self, value: Any, token_per_repo_id: dict[str, Any] | None = None) -> Any:
        """The file of a blob, of what names it or of itself."""
        if isinstance(value, BlobFile):
            return value
        files, size = str(value["files"]), value["size"]
        table = table_at(str(value["table"]), int(value["version"]), files)
        size = None if size is None or size != size else int(size)  # numpy has NaN for None
        return BlobFile(table, files, str(value["column"]), int(value["row"]), size)

    def cast_storage(self, storage: pa.Array) -> pa.Array:
        """A column as it is; there is nothing else that names a blob."""
        if storage.type != self.pa_type and not pa.types.is_null(storage.type):
            raise TypeError(f"a lazy blob cannot be made of {storage.type}")
        return storage.cast(self.pa_type)


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it is experimental
    register_feature(LazyBlob, "LazyBlob")


def holds_files(feature: Any) -> bool:
    """Whether the values of a feature are `BlobFile`, or structs with one in them."""
    if isinstance(feature, dict):
        return any(map(holds_files, feature.values()))
    return isinstance(feature, LazyBlob) and feature.decode
