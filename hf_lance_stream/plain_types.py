"""Plain Arrow types for those that Hugging Face features cannot hold, or hold as others.

| type | becomes |
|---|---|
| dictionary | its values |
| map | list of structs of `key` and `value` |
| bfloat16, of Lance | float32, of which it is the upper half |
| bool8 | bool |
| fixed-shape tensor | fixed-size list of fixed-size lists … |
| any other extension type, such as a UUID | its storage type |

No value is lost. A type that is not listed stays as it is, and `features` refuses those that
features cannot hold.
"""

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

_BFLOAT16 = "lance.bfloat16"
_BOOL8 = "arrow.bool8"
_TENSOR = "arrow.fixed_shape_tensor"
_BLOB = "lance.blob"  # whose storage only says where the bytes are


def plain_type(kind: pa.DataType) -> pa.DataType:
    """The type that columns of the type `kind` are given out as."""
    types = pa.types
    if isinstance(kind, pa.BaseExtensionType):
        return kind if _is_kept(kind) else _plain_extension(kind)
    if types.is_dictionary(kind):
        return plain_type(kind.value_type)
    if types.is_map(kind):
        pair = [("key", plain_type(kind.key_type)), ("value", plain_type(kind.item_type))]
        return pa.list_(pa.struct(pair))
    if types.is_struct(kind):
        return pa.struct([_plain_field(field) for field in kind])
    if types.is_list(kind):
        return pa.list_(_plain_field(kind.value_field))
    if types.is_large_list(kind):
        return pa.large_list(_plain_field(kind.value_field))
    if types.is_fixed_size_list(kind):
        return pa.list_(_plain_field(kind.value_field), kind.list_size)
    return kind


def _plain_field(field: pa.Field) -> pa.Field:
    return field.with_type(plain_type(field.type))


def _is_kept(kind: pa.BaseExtensionType) -> bool:
    """Whether features hold the type, or its storage would not do."""
    if isinstance(kind, pa.JsonType) or type(kind).__module__.startswith("datasets."):
        return True
    name = kind.extension_name
    return name.startswith(_BLOB) or (name == _TENSOR and _is_permuted(kind))


def _is_permuted(kind: Any) -> bool:
    return kind.permutation not in (None, list(range(len(kind.shape))))


def _shape(kind: Any) -> list[int]:
    return kind.shape or [1]  # a tensor without dimensions is stored as a list of one


def _plain_extension(kind: pa.BaseExtensionType) -> pa.DataType:
    if kind.extension_name == _BFLOAT16:
        return pa.float32()
    if kind.extension_name == _BOOL8:
        return pa.bool_()
    if kind.extension_name == _TENSOR:
        shaped = plain_type(kind.value_type)
        for size in reversed(_shape(kind)):
            shaped = pa.list_(shaped, size)
        return shaped
    return plain_type(kind.storage_type)


def plain_column(column: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    """A column as the type `kind`, which is `plain_type` of its own."""
    if column.type == kind:
        return column
    return pa.chunked_array([_plain(chunk, kind) for chunk in column.chunks], type=kind)


def _plain(array: Any, kind: pa.DataType) -> pa.Array:
    if array.type == kind:
        return array
    if isinstance(array.type, pa.BaseExtensionType):
        return _plain_storage(array, kind)
    if pa.types.is_dictionary(array.type):
        return _plain(array.dictionary_decode(), kind)
    if pa.types.is_struct(kind):
        children = [_plain(array.field(i), field.type) for i, field in enumerate(kind)]
        return pa.StructArray.from_arrays(children, fields=list(kind), mask=pc.is_null(array))
    if pa.types.is_map(array.type):
        entry = list(kind.value_type)
        pair = [_plain(array.keys, entry[0].type), _plain(array.items, entry[1].type)]
        return _with_values(array, pa.StructArray.from_arrays(pair, fields=entry), kind)
    return _with_values(array, _plain(array.values, kind.value_type), kind)


def _with_values(array: Any, values: pa.Array, kind: pa.DataType) -> pa.Array:
    """A list array with other values in the same places."""
    own = 1 if pa.types.is_fixed_size_list(kind) else 2  # validity, offsets
    return pa.Array.from_buffers(
        kind, len(array), array.buffers()[:own], array.null_count, array.offset, [values]
    )


def _plain_storage(array: Any, kind: pa.DataType) -> pa.Array:
    name, storage = array.type.extension_name, array.storage
    if name == _BFLOAT16:
        return _widened(storage)
    if name == _BOOL8:
        return storage.cast(kind)
    if name == _TENSOR:
        return _shaped(array, kind)
    return _plain(storage, kind)


def _widened(storage: pa.Array) -> pa.Array:
    """The float32 values whose upper halves are two bytes each."""
    halves = np.frombuffer(storage.buffers()[1] or b"", dtype="<u2")
    halves = halves[storage.offset : storage.offset + len(storage)]
    floats = (halves.astype(np.uint32) << 16).view(np.float32)
    return pa.array(floats, mask=storage.is_null().to_numpy(zero_copy_only=False))


def _shaped(array: Any, kind: pa.DataType) -> pa.Array:
    """Tensors as nested lists: the same numbers one after the other."""
    shape, leaf = _shape(array.type), kind
    for _ in shape:
        leaf = leaf.value_type
    values = _plain(array.storage.values, leaf)
    for size in reversed(shape[1:]):
        values = pa.FixedSizeListArray.from_arrays(values, size)
    return _with_values(array.storage, values, kind)
