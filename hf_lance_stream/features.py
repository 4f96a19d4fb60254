"""Hugging Face features of a Lance table."""

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
from datasets import Features
from datasets.packaged_modules.lance.lance import MAGIC_BYTES_EXTENSION_AND_FEATURE_TYPES
from datasets.table import table_cast

from hf_lance_stream.source import Source

_SNIFFED_ROWS = 16  # rows looked at for the first bytes that are not null

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
    return Features(found)


def _from_schema(schema: pa.Schema) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for field in schema:
        one = pa.schema([field], metadata=schema.metadata)
        try:
            found.update(Features.from_arrow_schema(one))
        except (ValueError, NotImplementedError, TypeError) as error:
            raise ValueError(
                f"column {field.name!r} has the type {field.type}, which Hugging Face features "
                f"cannot hold ({error}); leave it out with `columns`, or store it as another type"
            ) from error
    return found


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
    table = source.select(names)
    rows = table.read(np.arange(min(_SNIFFED_ROWS, table.num_rows)))
    found: dict[str, MediaFeature] = {}
    for name in names:
        first = next((v.as_py() for v in rows.column(name) if v.is_valid), None)
        feature = _media_feature(first) if first else None
        if feature is not None:
            found[name] = feature
    return found


def _media_feature(data: bytes) -> MediaFeature | None:
    for magic_hex, _, feature in MAGIC_BYTES_EXTENSION_AND_FEATURE_TYPES:
        magic = bytes.fromhex(magic_hex)
        if magic in data[: len(magic) * 2]:  # the builder of `datasets` allows some padding
            return feature
    return None
