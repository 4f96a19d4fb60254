"""Hugging Face features of a Lance table."""

import difflib
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
from datasets import Audio, Features, Image, LargeList, List
from datasets.packaged_modules.lance.lance import MAGIC_BYTES_EXTENSION_AND_FEATURE_TYPES
from datasets.table import table_cast

from hf_lance_stream.blobs import NAME_TYPE
from hf_lance_stream.lazy import LazyBlob
from hf_lance_stream.source import Source

_SNIFFED_ROWS = 16  # rows looked at for the first bytes that are not null
_SNIFFED_BYTES = 64
_FILE_TYPE = Image.pa_type  # of all features of files

MediaFeature = Any  # Audio | Image | Video, which are untyped here


def features_of(source: Source, features: Features | None = None) -> Features:
    """Features of the columns of `source`.

    They come from `features` if given, else from Hugging Face metadata in the schema, else
    from the Arrow types. Binary columns without metadata that start like an image, audio or
    video file get its feature, as in the `lance` builder of `datasets`; for these, and only
    these, a few rows are read.

    Raises:
        ValueError: when a column has a type that features cannot hold, or `features` does not
            name the columns of `source`.
    """
    schema = source.schema
    if features is not None:
        if not isinstance(features, Features):
            raise ValueError(f"`features` must be a datasets.Features or None: got {features!r}")
        _check_names(schema, features)
        if source.blobs == "lazy":
            _check_lazy(schema, features)
        _check_cast(schema, features)
        return Features({name: features[name] for name in schema.names})
    found = _from_schema(schema)
    for table, other in zip(source.tables, map(_from_schema, source.schemas), strict=True):
        for name in found:
            if other[name] != found[name]:
                raise ValueError(
                    f"the tables of one split must have the same features: column {name!r} is "
                    f"{found[name]} in {source.tables[0].name} and {other[name]} in {table.name}; "
                    "give `features` to choose"
                )
    if not isinstance(schema.metadata, Mapping) or b"huggingface" not in schema.metadata:
        found.update(_sniff(source))
    if source.blobs == "lazy":
        found = {name: _lazy(schema.field(name).type, found[name]) for name in found}
    return Features(found)


def _from_schema(schema: pa.Schema) -> dict[str, Any]:
    found: dict[str, Any] = {}
    stored = _from_metadata(schema)
    for field in schema:
        feature = _feature_at(stored, field.name)
        if feature is not None and _can_hold(feature, field.type):
            found[field.name] = feature
            continue
        try:
            found.update(Features.from_arrow_schema(pa.schema([field])))
        except (ValueError, NotImplementedError, TypeError) as error:
            raise ValueError(
                f"column {field.name!r} has the type {field.type}, which Hugging Face features "
                f"cannot hold ({error}); leave it out with `columns`, or store it as another type"
            ) from error
    return found


def _from_metadata(schema: pa.Schema) -> Features:
    """The features that `datasets` wrote in the metadata of a schema, if any."""
    text = (schema.metadata or {}).get(b"huggingface")
    if text is None:
        return Features()
    try:
        stored = json.loads(text).get("info", {}).get("features")
        return Features.from_dict(stored) if stored else Features()
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise ValueError(
            f"the Hugging Face metadata of the schema cannot be read: {error!r}; write it anew, or "
            "remove the key 'huggingface' from it"
        ) from error


def _feature_at(features: Features, name: str) -> Any:
    """The feature of a column, or None; ``a.b`` is the field ``b`` of the struct ``a``."""
    found: Any = features.get(name)
    if found is None and "." in name:
        found = features
        for part in name.split("."):
            found = found.get(part) if isinstance(found, dict) else None
    return found


def _can_hold(feature: Any, kind: pa.DataType) -> bool:
    """Whether columns of an Arrow type are stored values of a feature.

    They are if the type is that of the feature. Features of files, such as Image, also hold
    their bytes alone.
    """
    types = pa.types
    if getattr(feature, "pa_type", None) == _FILE_TYPE:
        is_part = types.is_struct(kind) and {f.name for f in kind} <= {"bytes", "path"}
        return types.is_binary(kind) or types.is_large_binary(kind) or is_part
    if isinstance(feature, dict):
        names = {f.name for f in kind} if types.is_struct(kind) else None
        return names == set(feature) and all(_can_hold(feature[f.name], f.type) for f in kind)
    if isinstance(feature, List) and feature.length == -1 and types.is_list(kind):
        return _can_hold(feature.feature, kind.value_type)
    if isinstance(feature, LargeList) and types.is_large_list(kind):
        return _can_hold(feature.feature, kind.value_type)
    return bool(Features({"": feature}).arrow_schema.field(0).type == kind)


def _lazy(kind: pa.DataType, found: Any) -> Any:
    """A feature `found` for an Arrow type, with files for the lazy blobs in it."""
    if kind == NAME_TYPE:
        return LazyBlob()
    if pa.types.is_struct(kind) and isinstance(found, dict):
        return {name: _lazy(kind.field(name).type, found[name]) for name in found}
    return found


def _check_lazy(schema: pa.Schema, features: Features) -> None:
    for field in schema:
        if not _is_lazy(field.type, features[field.name]):
            raise ValueError(
                f"`features` must have LazyBlob() for the blobs of column {field.name!r}: with "
                f"blobs='lazy' these are files, not bytes; got {features[field.name]}"
            )


def _is_lazy(kind: pa.DataType, feature: Any) -> bool:
    """Whether a feature has files for the lazy blobs of an Arrow type."""
    if kind == NAME_TYPE:
        return isinstance(feature, LazyBlob)
    if not pa.types.is_struct(kind) or not isinstance(feature, dict):
        return True
    return all(_is_lazy(child.type, feature.get(child.name)) for child in kind)


def check_format(features: Features | None, format_type: str | None) -> None:
    """Refuse a format that no value of some column can have.

    Args:
        features: the features of the rows; None where they are not known.
        format_type: a format of `datasets`. Its torch format makes no tensor of a date, a time, a
            timestamp, a duration or a decimal, alone or in a list or struct; others take all.

    Raises:
        ValueError: names the column, its type and what to do.
    """
    if features is None or format_type != "torch":
        return
    for field in features.arrow_schema:
        leaf = next((t for t in _leaves(field.type) if _has_no_tensor(t)), None)
        if leaf is None:
            continue
        cast = ""
        if leaf == field.type:
            cast = f"cast it with cast_column({field.name!r}, Value({_number_for(leaf)!r})), "
        raise ValueError(
            f"column {field.name!r} has the type {field.type}, and the torch format makes no "
            f"tensor of {leaf}: leave it out with `columns` or select_columns, {cast}or use "
            "with_format('numpy') or no format"
        )


def _leaves(kind: pa.DataType) -> Iterator[pa.DataType]:
    if isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    if kind.num_fields == 0:
        yield kind
    for i in range(kind.num_fields):
        yield from _leaves(kind.field(i).type)


def _has_no_tensor(kind: pa.DataType) -> bool:
    return bool(pa.types.is_temporal(kind) or pa.types.is_decimal(kind))


def _number_for(kind: pa.DataType) -> str:
    """The number type that Arrow casts a type without a tensor to."""
    if pa.types.is_decimal(kind):
        return "float64"
    return f"int{kind.bit_width}"


def _check_names(schema: pa.Schema, features: Features) -> None:
    missing = [name for name in features if name not in schema.names]
    extra = [name for name in schema.names if name not in features]
    if missing:
        near = difflib.get_close_matches(missing[0], schema.names, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(
            f"`features` names {missing}, which are not among the columns {schema.names}{hint}"
        )
    if extra:
        raise ValueError(
            f"`features` must name every column that is read: {extra} are missing; add them, or "
            f"choose columns={list(features)}"
        )


def _check_cast(schema: pa.Schema, features: Features) -> None:
    try:
        table_cast(schema.empty_table(), features.arrow_schema)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, TypeError, ValueError) as error:
        raise ValueError(
            f"`features` cannot be cast from the table's types: {error}; got features={features}"
        ) from error


def _sniff(source: Source) -> dict[str, MediaFeature]:
    """Media features of the binary columns whose first bytes look like a media file."""
    names = [
        field.name
        for field in source.schema
        if pa.types.is_binary(field.type) or pa.types.is_large_binary(field.type)
    ]
    if not names:
        return {}
    found: dict[str, MediaFeature] = {}
    for name in names:
        feature = _media_feature(_first_bytes(source.select([name])))
        if feature is not None:
            found[name] = feature
    return found


def _first_bytes(source: Source) -> bytes:
    """How the first value of a column that is not null starts; of a blob no more is read."""
    source = replace(source, blobs="lazy").remembered()
    for count in (1, _SNIFFED_ROWS):  # large values are not read in numbers to see that
        rows = source.read(np.arange(min(count, source.num_rows)))
        first = next((v.as_py() for v in rows.column(0) if v.is_valid), None)
        if isinstance(first, bytes):
            return first
        if first is not None:
            return bytes(LazyBlob().decode_example(first).read(_SNIFFED_BYTES))
    return b""


def _media_feature(data: bytes) -> MediaFeature | None:
    """The feature that the builder of `datasets` finds; it takes WAV, also RIFF, for AVI."""
    if data[:4] == b"RIFF" and data[8:12] == b"WAVE":
        return Audio()
    for magic_hex, _, feature in MAGIC_BYTES_EXTENSION_AND_FEATURE_TYPES:
        magic = bytes.fromhex(magic_hex)
        if magic in data[: len(magic) * 2]:  # it allows some padding
            return feature
    return None
