"""From `data_files` and `data_dir` of `load_dataset` to the tables they name."""

import difflib
import fnmatch
import glob
import itertools
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from datasets.data_files import sanitize_patterns

from hf_lance_stream.address import SCHEME
from hf_lance_stream.credentials import public_uri
from hf_lance_stream.open_table import is_table, tables_in

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
    if isinstance(data_files, str | os.PathLike):
        data_files = [data_files]
    if isinstance(data_files, Mapping):
        data_files = {
            split: list(value) if isinstance(value, list | tuple) else [value]
            for split, value in data_files.items()
        }
    elif not isinstance(data_files, list | tuple):
        raise _no_pattern(data_files)
    return {
        split: _tables(patterns, data_dir)
        for split, patterns in sanitize_patterns(data_files).items()
    }


def _tables(patterns: list[Any], data_dir: str | None) -> list[str]:
    """The tables of one split. Only a table named in full is read as often as it is named."""
    tables: list[str] = []
    for pattern in patterns:
        for uri in _matches(pattern, data_dir):
            in_full = PurePosixPath(str(pattern)).name == PurePosixPath(uri).name
            if in_full or uri not in tables:
                tables.append(uri)
    return tables


def _no_pattern(value: Any) -> ValueError:
    return ValueError(
        "`data_files` must be a path or URI, a list of them, or a dict of splits to these: got "
        f"data_files={value!r}"
    )


def table_of_database(database: str, name: str | None) -> str:
    """URI of a table of a LanceDB database, or of the only table there is.

    Raises:
        FileNotFoundError: there is no such table.
        ValueError: no name is given and there are several tables.
    """
    if "://" in database:
        if name is None:
            raise ValueError(
                f"`table` must name a table of the database: got data_dir={public_uri(database)!r}"
            )
        if database.startswith(SCHEME):
            return f"{database.rstrip('/')}/{name}"
        return f"{database.rstrip('/')}/{name.removesuffix('.lance')}.lance"
    name = None if name is None else name.removesuffix(".lance")
    directory = Path(database).expanduser().absolute()
    if not directory.is_dir():
        raise FileNotFoundError(f"there is no directory `data_dir`: got {database!r}")
    if name is None and is_table(directory):
        return str(directory)
    paths = {p.removesuffix(".lance"): directory / p for p in tables_in(directory)}
    names = list(paths)
    if name is None:
        if len(names) == 1:
            return str(paths[names[0]])
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
    return str(paths[name])


def _matches(pattern: Any, data_dir: str | None) -> list[str]:
    if not isinstance(pattern, str | os.PathLike):
        raise _no_pattern(pattern)
    pattern = os.fspath(pattern)
    if data_dir is not None and "://" not in pattern and not os.path.isabs(pattern):
        pattern = f"{data_dir.rstrip('/')}/{pattern}"
    if "://" in pattern:
        if glob.has_magic(pattern.partition("?")[0]):
            raise ValueError(
                f"`data_files` cannot have a glob in a URI: got {public_uri(pattern)!r}; name each "
                "table"
            )
        return [_root_of_uri(pattern)]
    path = Path(pattern).expanduser().absolute()
    if path.exists() or not glob.has_magic(pattern):
        return [str(_root_of_path(path))]
    found = sorted(map(str, _glob_tables(path)))
    if not found:
        raise FileNotFoundError(f"no Lance table matches `data_files`: got {pattern!r}")
    return found


def _glob_tables(pattern: Path) -> Iterator[Path]:
    """Tables that a glob matches, or that hold what it could match; none is listed."""
    plain = itertools.takewhile(lambda part: not glob.has_magic(part), pattern.parts)
    base = Path(*plain)
    root = _root_of_path(base)
    if is_table(root):
        yield root
        return
    matches = re.compile(_regex(pattern.parts[len(base.parts) :]))
    for directory, names, _ in os.walk(base):
        for name in sorted(names):
            path = Path(directory) / name
            if is_table(path):
                names.remove(name)
                inside = path.relative_to(base).as_posix()
                if matches.match(inside):
                    yield path


def _regex(parts: tuple[str, ...]) -> str:
    """A regex for a path that a glob matches, or for a directory on the way to one."""
    regex = ""
    for part in reversed(parts):
        one = ".*" if part == "**" else fnmatch.translate(part)[4:-3].replace(".*", "[^/]*")
        rest = f"(?:/{regex})?" if regex else ""
        regex = f"(?:{one}/)?{regex}" if part == "**" and regex else f"{one}{rest}"
    return f"(?:{regex})$"


def _root_of_path(path: Path) -> Path:
    return next((p for p in (path, *path.parents) if is_table(p)), path)


def _root_of_uri(uri: str) -> str:
    scheme, _, rest = uri.partition("://")
    path = PurePosixPath(rest)
    if path.parent.name in _PARTS_OF_A_TABLE and path.suffix:
        return f"{scheme}://{path.parent.parent}"
    return uri
