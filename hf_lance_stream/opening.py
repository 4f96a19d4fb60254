"""From what a user names as the source of `write_lance` to its rows."""

import difflib
import glob
import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from datasets import (
    Dataset,
    DatasetBuilder,
    DatasetDict,
    IterableDataset,
    IterableDatasetDict,
    load_dataset_builder,
    load_from_disk,
    packaged_modules,
)
from datasets.packaged_modules.parquet.parquet import ParquetConfig
from pyarrow.dataset import ParquetFragmentScanOptions

from hf_lance_stream.inputs import (
    IndexedInput,
    StreamInput,
    input_of_dataset,
    input_of_source,
    input_of_stream,
)
from hf_lance_stream.open_table import is_table
from hf_lance_stream.source import open_source

_SAVED = {"state.json", "dataset_dict.json"}  # what `save_to_disk` leaves in a directory
_COMPRESSIONS = {".gz", ".bz2", ".xz", ".zst"}
_PARQUET_BUFFER = 1 << 20  # bytes of a column read at a time
_LANCE_OPTIONS = {"filter", "version"}


def open_input(
    source: Any,
    *,
    split: str | None,
    columns: Sequence[str] | None,
    storage_options: dict[str, str] | None,
    load_options: Mapping[str, Any],
) -> IndexedInput | StreamInput:
    """Open a source.

    Args:
        source: as for `write_lance`, like all others.
        split: name of the Hugging Face split, or None for the only one there is.
        columns: columns to keep, or None for all.
        storage_options: for Lance tables.
        load_options: for `load_dataset`, or for Lance tables ``filter`` and ``version``.

    Raises:
        FileNotFoundError: there is nothing there.
        ValueError: anything else that does not fit, named.
    """
    if isinstance(source, DatasetDict | IterableDatasetDict):
        source = _of_split(source, split)
    if isinstance(source, Dataset | IterableDataset):
        _check_no_options(load_options, type(source).__name__, ())
        source = _select(source, columns)
        return input_of_dataset(source) if isinstance(source, Dataset) else input_of_stream(source)
    is_name = isinstance(source, str | os.PathLike)
    if not is_name or _names_lance_tables(os.fspath(source)):
        _check_no_options(load_options, "a Lance table", _LANCE_OPTIONS)
        return input_of_source(
            open_source(source, columns=columns, storage_options=storage_options, **load_options)
        )
    name = os.fspath(source)
    directory = Path(name).expanduser()
    if "://" not in name and any((directory / file).is_file() for file in _SAVED):
        _check_no_options(load_options, "a saved dataset", ())
        return _open_saved(directory, split, columns)
    return _open_builder(name, split, columns, dict(load_options))


def _names_lance_tables(name: str) -> bool:
    return name.rstrip("/").endswith(".lance") or ("://" not in name and is_table(Path(name)))


def _open_saved(directory: Path, split: str | None, columns: Sequence[str] | None) -> IndexedInput:
    loaded = load_from_disk(directory)
    dataset = _of_split(loaded, split) if isinstance(loaded, DatasetDict) else loaded
    return input_of_dataset(_select(dataset, columns))


def _open_builder(
    name: str, split: str | None, columns: Sequence[str] | None, options: dict[str, Any]
) -> StreamInput:
    builder = _builder(name, options)
    try:
        splits = builder.as_streaming_dataset()
    except (NotImplementedError, TypeError) as error:
        raise ValueError(
            f"`source` cannot be streamed: got {name!r}, and datasets says: {error}; load it with "
            "datasets.load_dataset and pass what that returns"
        ) from error
    dataset = _of_split(splits, split)
    known = (builder.info.splits or {}).get(str(dataset.split))
    identity = {
        "kind": builder.dataset_name or builder.name,
        "config": builder.config_id,
        "files": _files_digest(builder),
        "split": str(dataset.split),
        "columns": list(columns) if columns is not None else None,
    }
    return input_of_stream(
        _select(dataset, columns),
        identity=identity,
        num_rows=(known.num_examples or None) if known is not None else None,
        has_states=True,  # nothing but files and a choice of columns
    )


def _builder(name: str, options: dict[str, Any]) -> DatasetBuilder:
    # The table by which `load_dataset` knows files in directories.
    module, defaults = packaged_modules._EXTENSION_TO_MODULE.get(_suffix(name), (None, {}))
    is_uri, path = "://" in name, Path(name).expanduser()
    if module is None and (is_uri or glob.has_magic(name) or path.is_file()):
        raise ValueError(
            f"`source` must be a file that datasets can load, or a glob of such: got {name!r}; for "
            "other names of files name the builder, and the files as `data_files`"
        )
    if module is not None and "data_files" not in options and not path.is_dir():
        if not is_uri and not glob.has_magic(name) and not path.exists():
            raise FileNotFoundError(f"`source`: there is no file {name!r}")
        options = {**defaults, **options, "data_files": name}
        name = module
    builder = load_dataset_builder(name, **options)
    if isinstance(builder.config, ParquetConfig) and builder.config.fragment_scan_options is None:
        # By default Arrow keeps all it has read of a file until the whole file has been read.
        builder.config.fragment_scan_options = ParquetFragmentScanOptions(
            pre_buffer=False, use_buffered_stream=True, buffer_size=_PARQUET_BUFFER
        )
    return builder


def _suffix(name: str) -> str:
    """End of the name of a file, before that of a compression."""
    path = Path(name.partition("?")[0])
    return path.with_suffix("").suffix if path.suffix in _COMPRESSIONS else path.suffix


def _files_digest(builder: DatasetBuilder) -> str:
    """Hash of the names of the data files and what tells their versions apart."""
    files = builder.config.data_files or {}
    seen = [(split, list(names), names.origin_metadata) for split, names in files.items()]
    return hashlib.sha256(repr(seen).encode()).hexdigest()[:16]


def _of_split(splits: Mapping[Any, Any], split: str | None) -> Any:
    names = [str(name) for name in splits]
    if split is None and len(names) == 1:
        return splits[names[0]]
    if split not in names:
        near = difflib.get_close_matches(str(split), names, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"`split` must name one of {names}: got split={split!r}{hint}")
    return splits[split]


def _select(dataset: Any, columns: Sequence[str] | None) -> Any:
    if columns is None:
        return dataset
    is_list = isinstance(columns, list | tuple) and columns
    if not is_list or not all(isinstance(c, str) for c in columns):
        raise ValueError(f"`columns` must be a list of column names or None: got {columns!r}")
    names = dataset.column_names
    if names is not None and (missing := [c for c in columns if c not in names]):
        near = difflib.get_close_matches(missing[0], names, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(
            f"`columns` names {missing}, which are not among the columns {names}{hint}"
        )
    return dataset.select_columns(list(columns))


def _check_no_options(options: Mapping[str, Any], what: str, known: Any) -> None:
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ValueError(
            f"`source` is {what}, which takes no {unknown}"
            + (f"; it takes {sorted(known)}" if known else "")
        )
