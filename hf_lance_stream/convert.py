"""Arrow tables to python, numpy or torch rows and batches, a whole table at a time.

The values and types are those of the formatters of `datasets`, which convert every row by
itself. A column that is not converted faster here is given to them.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from datasets import Features
from datasets.features.features import decode_nested_example
from datasets.formatting import get_formatter
from torch.utils.data import default_collate
from torch.utils.dlpack import from_dlpack

from hf_lance_stream.lazy import holds_files

FORMATS = (None, "python", "numpy", "torch")
"""Formats of `datasets` that a `Converter` makes."""

Column = Sequence[Any] | torch.Tensor | np.ndarray[Any, Any]
_Convert = Callable[[pa.Array], Column | None]


class Converter:
    """Converts tables to one format.

    Args:
        format_type: one of `FORMATS`.
        features: features of the tables; columns with media are decoded.
        token_per_repo_id: passed to the formatter of `datasets`.
        rows_of_batches: make of a row what ``format_batch`` makes of a batch of it alone, as
            `datasets` does before a map; in numpy that has other number types than ``format_row``.
    """

    def __init__(
        self,
        format_type: str | None,
        features: Features | None = None,
        token_per_repo_id: dict[str, Any] | None = None,
        rows_of_batches: bool = False,
    ) -> None:
        self._format = format_type or "python"
        self._rows_of_batches = rows_of_batches
        self._formatter = get_formatter(
            format_type, features=features, token_per_repo_id=token_per_repo_id
        )
        self._features = features

    def rows(self, table: pa.Table) -> Iterator[dict[str, Any]]:
        """The rows of a table: what the formatter makes of each; media are decoded one by one."""
        names = table.column_names
        columns = [self._rows(table, name) for name in names]
        for values in zip(*columns, strict=True):
            yield dict(zip(names, values, strict=True))

    def one(self, row: pa.Table) -> dict[str, Any]:
        """The row of a table of one row."""
        return next(self.rows(row))

    @property
    def decodes(self) -> bool:
        """Whether a column is decoded, which its rows may make impossible."""
        return any(map(self._decodes, self._features or ()))

    def batch(self, table: pa.Table) -> dict[str, Any]:
        """The table as one batch: what ``format_batch`` makes of it."""
        batch = {name: self._fast(table, name, _BATCHES) for name in table.column_names}
        for name in batch:
            if self._has_files(name):
                batch[name] = list(self._files(table, name))
            elif batch[name] is None:
                batch[name] = self._formatted_batch(table, name)
        return batch

    def collated(self, table: pa.Table) -> dict[str, Any]:
        """The table as one batch: what torch's ``default_collate`` makes of its rows."""
        batch = {}
        for name in table.column_names:
            column = self._fast(table, name, _COLLATED)
            if column is None:
                rows = list(self._rows(table, name))
                with naming(name, "no batch of tensors", "or give the loader a collate_fn"):
                    column = default_collate(rows)
            batch[name] = column
        return batch

    def _formatted_batch(self, table: pa.Table, name: str) -> Any:
        """A column as `datasets` makes it of a batch."""
        only = table.select([name])
        first = _first_list(only.column(0))
        if first:  # `datasets` asks the first list for its shape: it must not be a null
            only = pa.concat_tables([only.slice(first), only.slice(0, first)])
        with self._naming(name):  # in one piece: number types may be those of a piece
            batch = self._formatter.format_batch(only.combine_chunks())[name]
        if not first:
            return batch
        parts = batch[-first:], batch[:-first]
        return np.concatenate(parts) if isinstance(batch, np.ndarray) else [*parts[0], *parts[1]]

    def _naming(self, name: str) -> AbstractContextManager[None]:
        if self._decodes(name):
            return nullcontext()  # what a bad image raises is known to those who look for it
        other = "arrow" if self._format == "numpy" else "numpy"
        return naming(name, f"no {self._format} value", f"or use with_format({other!r})")

    def _fast(self, table: pa.Table, name: str, kinds: "_Kinds") -> Column | None:
        """A column converted as a whole, or None where `datasets` has to do it."""
        column = table.column(name)
        kind = kinds[self._format].get(_kind_of(column.type))
        return None if kind is None or self._decodes(name) else kind(_one_array(column))

    def _rows(self, table: pa.Table, name: str) -> Iterable[Any]:
        if self._format == "python" and not self._decodes(name):
            with self._naming(name):
                return table.column(name).to_pylist()  # type: ignore[no-any-return]
        if self._has_files(name):
            return self._files(table, name)
        values = self._fast(table, name, _ROWS_OF_BATCHES if self._rows_of_batches else _ROWS)
        if values is not None:
            return values
        return self._formatted_rows(table.select([name]), name)

    def _formatted_rows(self, only: pa.Table, name: str) -> Iterator[Any]:
        """A column as `datasets` makes it row by row."""
        for i in range(only.num_rows):
            row = only.slice(i, 1)
            with self._naming(name):
                if self._rows_of_batches:
                    value = self._formatter.format_batch(row)[name][0]
                else:
                    value = self._formatter.format_row(row)[name]
            yield value

    def _has_files(self, name: str) -> bool:
        """Whether a column has lazy blobs: python objects in every format."""
        return self._decodes(name) and holds_files(self._features[name])  # type: ignore[index]

    def _files(self, table: pa.Table, name: str) -> Iterator[Any]:
        """The values of a column with lazy blobs, each made when it is asked for."""
        feature = self._features[name]  # type: ignore[index]
        return (decode_nested_example(feature, v) for v in table.column(name).to_pylist())

    def _decodes(self, name: str) -> bool:
        features = self._features
        return features is not None and bool(features._column_requires_decoding.get(name))


@contextmanager
def naming(name: str, what: str, way_out: str) -> Iterator[None]:
    """Make an error inside one that names the column that cannot be converted."""
    try:
        yield
    except (TypeError, ValueError, RuntimeError, ArithmeticError, AttributeError) as error:
        raise ValueError(
            f"column {name!r} has a value that {what} can be made of: {error}; leave the column "
            f"out with `columns`, give it another type with cast_column, {way_out}"
        ) from error


def _first_list(column: pa.ChunkedArray) -> int:
    """The first row with a list that is not null; 0 in a column of anything else."""
    types, kind = pa.types, column.type
    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    if not is_list or column.null_count in (0, len(column)):
        return 0
    return int(pc.index(column.is_valid(), True).as_py())


@functools.cache
def _kind_of(arrow_type: pa.DataType) -> str:
    """Which conversion a type has, by the names of the tables below; "" for none."""
    types = pa.types
    if _is_number(arrow_type):
        return "number"
    if types.is_string(arrow_type) or types.is_large_string(arrow_type):
        return "text"
    if types.is_binary(arrow_type) or types.is_large_binary(arrow_type):
        return "bytes"
    if types.is_list(arrow_type) or types.is_large_list(arrow_type):
        inner = _kind_of(arrow_type.value_type)
        return {"number": "list", "list": "list of lists", "text": "list of texts"}.get(inner, "")
    is_vector = types.is_fixed_size_list(arrow_type) and _is_number(arrow_type.value_type)
    return "list" if is_vector else ""


def _is_number(arrow_type: pa.DataType) -> bool:
    types = pa.types
    if arrow_type == pa.uint64():  # no such tensor
        return False
    is_integer, is_floating = types.is_integer(arrow_type), types.is_floating(arrow_type)
    return bool(is_integer or is_floating or types.is_boolean(arrow_type))


def _one_array(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


# Numbers. Arrow's nulls have no number: the formatters make them NaN or None, row by row.


def _tensor(array: pa.Array) -> torch.Tensor:
    """Numbers without nulls as int64, float32 or bool; the memory is Arrow's where it can be."""
    if pa.types.is_boolean(array.type) or len(array) == 0:
        tensor = torch.from_numpy(array.to_numpy(zero_copy_only=False).copy())
    else:
        tensor = from_dlpack(array)
    return tensor.to(_torch_type(array.type))


def _torch_type(arrow_type: pa.DataType) -> torch.dtype:
    if pa.types.is_boolean(arrow_type):
        return torch.bool
    return torch.float32 if pa.types.is_floating(arrow_type) else torch.int64


def _array(array: pa.Array) -> np.ndarray[Any, Any]:
    """Numbers without nulls as a new int64, float32 or bool array."""
    values: np.ndarray[Any, Any] = array.to_numpy(zero_copy_only=False)
    if pa.types.is_boolean(array.type):
        return values.copy()
    return values.astype(np.float32 if pa.types.is_floating(array.type) else np.int64)


def _numbers_torch(array: pa.Array) -> torch.Tensor | None:
    return None if array.null_count else _tensor(array)


def _number_rows_torch(array: pa.Array) -> Sequence[Any] | None:
    return None if array.null_count else _tensor(array).clone().unbind(0)


def _numbers_numpy(array: pa.Array) -> np.ndarray[Any, Any] | None:
    return None if array.null_count else _array(array)


def _number_rows_numpy(array: pa.Array) -> Sequence[Any] | None:
    if array.null_count:
        return None
    values = array.to_numpy(zero_copy_only=False)
    return [np.asarray(v) for v in values] if values.dtype == bool else list(values)


def _numbers_collated(array: pa.Array) -> torch.Tensor | None:
    """What ``default_collate`` makes of python numbers: int64, float64 or bool."""
    if array.null_count or array.type == pa.float16():
        return None
    if pa.types.is_floating(array.type):
        return from_dlpack(array).to(torch.float64)
    return _tensor(array)


# Texts and bytes. numpy, through which the formatters go, drops NULs at their ends, unless a
# null keeps it from making an array of them.


def _texts(array: pa.Array) -> list[Any]:
    return _without_final_nuls(array.to_pylist(), "\0", has_nulls=array.null_count > 0)


def _bytes(array: pa.Array) -> list[Any]:
    return _without_final_nuls(array.to_pylist(), b"\0", has_nulls=array.null_count > 0)


def _without_final_nuls(values: list[Any], nul: Any, has_nulls: bool) -> list[Any]:
    return values if has_nulls else [value.rstrip(nul) for value in values]


def _text_rows(make: Callable[[Any], Any], nul: Any) -> _Convert:
    def rows(array: pa.Array) -> list[Any]:
        return [None if v is None else make(v.rstrip(nul)) for v in array.to_pylist()]

    return rows


def _texts_collated(array: pa.Array) -> list[Any] | None:
    return None if array.null_count else array.to_pylist()


# Lists of numbers without nulls.


def _values_of_lists(array: pa.Array) -> pa.Array | None:
    if array.null_count:
        return None
    values = array.flatten()
    return None if values.null_count else values


def _lengths_of_lists(array: pa.Array) -> Any:
    """The length that all lists share, or an int64 array of them."""
    if pa.types.is_fixed_size_list(array.type):
        return array.type.list_size
    lengths = np.diff(array.offsets.to_numpy()).astype(np.int64)
    return int(lengths[0]) if lengths.size and (lengths == lengths[0]).all() else lengths


def _lists_torch(array: pa.Array) -> Any:
    values = _values_of_lists(array)
    return None if values is None else _cut_tensor(_tensor(values), array)


def _cut_tensor(flat: torch.Tensor, array: pa.Array) -> Any:
    lengths = _lengths_of_lists(array)
    if isinstance(lengths, int):
        return flat.reshape(len(array), lengths)
    return list(torch.split(flat, lengths.tolist()))


def _list_rows_torch(array: pa.Array) -> Any:
    values = _values_of_lists(array)
    if values is None:
        return None
    cut = _cut_tensor(_tensor(values).clone(), array)
    return cut.unbind(0) if isinstance(cut, torch.Tensor) else cut


def _lists_numpy(array: pa.Array) -> Any:
    values = _values_of_lists(array)
    if values is None:
        return None
    flat, lengths = _array(values), _lengths_of_lists(array)
    if isinstance(lengths, int):
        return flat.reshape(len(array), lengths)
    cut = np.empty(len(array), dtype=object)
    cut[:] = np.split(flat, np.cumsum(lengths)[:-1])
    return cut


def _list_rows_numpy(array: pa.Array) -> Any:
    cut = _lists_numpy(array)
    return None if cut is None else list(cut)


# Lists of them, which `batch` makes.


def _rows_of_lists(convert: _Convert, none: Callable[[], Any]) -> _Convert:
    def rows(array: pa.Array) -> Any:
        if array.null_count:
            return None
        inner = [array[i].values for i in range(len(array))]
        found = [convert(values) if len(values) else none() for values in inner]
        return None if any(value is None for value in found) else found

    return rows


def _texts_numpy(array: pa.Array) -> np.ndarray[Any, Any]:
    texts = np.empty(len(array), dtype=object)
    texts[:] = array.to_pylist()
    return texts


def _lists_collated_torch(array: pa.Array) -> torch.Tensor | None:
    stacked = _lists_torch(array)
    return stacked if isinstance(stacked, torch.Tensor) else None


_Kinds = dict[str, dict[str, _Convert]]
_ROWS: _Kinds = {
    "python": {},
    "numpy": {
        "number": _number_rows_numpy,
        "text": _text_rows(np.str_, "\0"),
        "bytes": _text_rows(np.bytes_, b"\0"),
        "list": _list_rows_numpy,
        "list of lists": _rows_of_lists(_lists_numpy, lambda: np.empty(0, dtype=object)),
        "list of texts": _rows_of_lists(_texts_numpy, lambda: np.empty(0, dtype=object)),
    },
    "torch": {
        "number": _number_rows_torch,
        "text": _text_rows(lambda v: v, "\0"),
        "bytes": _text_rows(lambda v: v, b"\0"),
        "list": _list_rows_torch,
        "list of lists": _rows_of_lists(_lists_torch, list),
        "list of texts": _rows_of_lists(lambda array: array.to_pylist(), list),
    },
}
_ROWS_OF_BATCHES = _ROWS | {"numpy": _ROWS["numpy"] | {"number": _numbers_numpy}}
_BATCHES: _Kinds = {
    "python": {},
    "numpy": {"number": _numbers_numpy, "list": _lists_numpy},
    "torch": {
        "number": _numbers_torch,
        "text": _texts,
        "bytes": _bytes,
        "list": _lists_torch,
    },
}
_COLLATED: _Kinds = {
    "python": {"number": _numbers_collated, "text": _texts_collated, "bytes": _texts_collated},
    "numpy": {},
    "torch": {
        "number": _numbers_torch,
        "text": lambda array: None if array.null_count else _texts(array),
        "bytes": lambda array: None if array.null_count else _bytes(array),
        "list": _lists_collated_torch,
    },
}
