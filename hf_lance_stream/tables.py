"""From `data_files` and `data_dir` of `load_dataset` to the tables they name."""

import difflib
import glob
import os
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from datasets.data_files import sanitize_patterns

_PARTS_OF_A_TABLE = {"_versions", "_transactions", "_indices", "_deletions", "data"}


def tables_of_data_files(data_files: Any, data_dir: str | None = None) -> dict[str, list[str]]:
    """URIs of the tables that `data_files` names, per split, in the order given.

    A table is named by its directory, a glob of directories, a URI, or any path inside it.
    No directory of a table is listed.

    Args:
        data_files: str, list or dict of these, as `datasets.load_dataset` takes it.
        data_dir: directory or URI that relative paths start from.

    Raises:
        FileNotFoundError: nothing matches a pattern.
        ValueError: a glob of URIs.
    """
    if isinstance(data_files, os.PathLike):
        data_files = os.fspath(data_files)
    if isinstance(data_files, Mapping):
        data_files = {
            split: list(value) if isinstance(value, list | tuple) else [value]
            for split, value in data_files.items()
        }
    elif not isinstance(data_files, str):
        data_files = list(data_files)
    return {
        split: _unique(
            uri for pattern in patterns for uri in _matches(os.fspath(pattern), data_dir)
        )
        for split, patterns in sanitize_patterns(data_files).items()
    }


def table_of_database(database: str, name: str | None) -> str:
    """URI of a table of a LanceDB database, or of the only table there is.

    Raises:
        FileNotFoundError: there is no such table.
        ValueError: no name is given and there are several tables.
    """
    if "://" in database:
        if name is None:
            raise ValueError(
                f"`table` must name a table of the database: got data_dir={database!r}"
            )
        return f"{database.rstrip('/')}/{name}.lance"
    directory = Path(database).expanduser().absolute()
    if not directory.is_dir():
        raise FileNotFoundError(f"there is no directory `data_dir`: got {database!r}")
    if name is None and _is_table(directory):
        return str(directory)
    names = sorted(p.name.removesuffix(".lance") for p in directory.iterdir() if _is_table(p))
    if name is None:
        if len(names) == 1:
            return str(directory / f"{names[0]}.lance")
        raise ValueError(
            f"`table` must name one of the tables in data_dir={database!r}: {names}"
            if names
            else f"data_dir={database!r} holds no Lance table"
        )
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise FileNotFoundError(
            f"data_dir={database!r} has no table {name!r}{hint} (its tables: {names})"
        )
    return str(directory / f"{name}.lance")


def _matches(pattern: str, data_dir: str | None) -> list[str]:
    if data_dir is not None and "://" not in pattern and not os.path.isabs(pattern):
        pattern = f"{data_dir.rstrip('/')}/{pattern}"
    if "://" in pattern:
        if glob.has_magic(pattern.partition("?")[0]):
            raise ValueError(
                f"`data_files` cannot have a glob in a URI: got {pattern!r}; name each table"
            )
        return [_root_of_uri(pattern)]
    path = Path(pattern).expanduser().absolute()
    if path.exists() or not glob.has_magic(pattern):
        return [str(_root_of_path(path))]
    found = _unique(
        str(_root_of_path(Path(p))) for p in sorted(glob.glob(str(path), recursive=True))
    )
    tables = [p for p in found if _is_table(Path(p))]
    if not tables:
        raise FileNotFoundError(f"no Lance table matches `data_files`: got {pattern!r}")
    return tables


def _root_of_path(path: Path) -> Path:
    return next((p for p in (path, *path.parents) if _is_table(p)), path)


def _root_of_uri(uri: str) -> str:
    scheme, _, rest = uri.partition("://")
    path = PurePosixPath(rest)
    if path.parent.name in _PARTS_OF_A_TABLE and path.suffix:
        return f"{scheme}://{path.parent.parent}"
    return uri


def _is_table(path: Path) -> bool:
    return (path / "_versions").is_dir()


def _unique(items: Any) -> list[str]:
    return list(dict.fromkeys(items))
