"""Whether a saved state fits tables, found without reading them unless the state has a filter."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hf_lance_stream.layouts import examples_to_lay_out
from hf_lance_stream.plan import Options
from hf_lance_stream.source import Source, open_source
from hf_lance_stream.state import differences

_SHORTENED = re.compile(r"… \(\d+ characters, sha256 [0-9a-f]{16}\)$")


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """Whether a state fits.

    Attributes:
        table: URI of the table, or of all tables.
        version: the version that the state was compared with.
        latest_version: the latest version.
        differences: each field that differs, with the saved and the present value.
        notes: what to know about loading the state, and what could not be compared.
    """

    table: str | list[str]
    version: int | list[int] | None
    latest_version: int | list[int]
    differences: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether nothing differs."""
        return not self.differences


def fit_of(
    fingerprint: Mapping[str, Any],
    uris: Sequence[str],
    version: int | str | None = None,
    storage_options: dict[str, str] | None = None,
) -> Fit:
    """Compare what a state tells that it is of with tables as they are.

    Args:
        fingerprint: that of the state.
        uris: the tables, in the order in which the dataset has them.
        version: version number or tag to compare with. Default: the version in the state.
        storage_options: passed to Lance.

    Raises:
        FileNotFoundError: there is no such table, or not the `version` that was given.
        ValueError: it is no table; or the fingerprint is damaged.
    """
    latest = _together([open_source(uri, storage_options=storage_options) for uri in uris])

    def fit(
        differing: Sequence[str], source: Source | None = None, notes: Sequence[str] = ()
    ) -> Fit:
        return Fit(
            table=latest.name,
            version=source.version if source is not None else None,
            latest_version=latest.version,
            differences=tuple(differing),
            notes=tuple(notes),
        )

    versions = _list_of(fingerprint.get("version")) if version is None else [version] * len(uris)
    if len(versions) != len(uris):
        return fit([f"table: saved {fingerprint.get('table')!r}, now {latest.name!r}"])
    columns, filter, unknown = _choices(fingerprint)
    try:
        source = _together(
            [
                open_source(
                    uri,
                    columns=columns,
                    filter=filter,
                    version=one,
                    storage_options=storage_options,
                )
                for uri, one in zip(uris, versions, strict=True)
            ]
        )
        examples = examples_to_lay_out(source, _options(fingerprint))
    except FileNotFoundError as error:
        if version is not None:
            raise
        return fit([f"version: saved {fingerprint.get('version')!r}, now {error}"])
    except ValueError as error:  # the choice of columns or rows, or the number of splits
        return fit([str(error)])
    lines = differences({"fingerprint": dict(fingerprint)}, examples.fingerprint)
    names = [line.partition(":")[0] for line in lines]
    notes = [f"not compared, since the state has it shortened: {name}" for name in unknown]
    if names == ["table"]:
        notes.append(
            "only the place differs: if the table was moved, load_state_dict(state, "
            "allow_moved=True) continues at the same row"
        )
    if not lines and source.version != latest.version:
        notes.append(f"the table has moved on: build the dataset with version={source.version}")
    unknown_fields = unknown if "filter" not in unknown else [*unknown, "rows"]
    kept = [line for line, name in zip(lines, names, strict=True) if name not in unknown_fields]
    return fit(kept, source, notes)


def _together(sources: list[Source]) -> Source:
    """The tables of all sources as those of one."""
    if len(sources) == 1:
        return sources[0]
    return replace(sources[0], tables=tuple(source.tables[0] for source in sources))


def _list_of(value: Any) -> list[Any]:
    """A value of a fingerprint that is one of a table, or the JSON text of a list of these."""
    if not isinstance(value, str):
        return [value]
    try:
        found = json.loads(value)
    except ValueError:
        return [value]
    return found if isinstance(found, list) else [found]


def _choices(fingerprint: Mapping[str, Any]) -> tuple[list[str] | None, str | None, list[str]]:
    """The columns and the filter of a state, and which of them it has shortened."""
    columns, filter = fingerprint.get("columns"), fingerprint.get("filter")
    unknown = [
        name
        for name, value in (("columns", columns), ("filter", filter))
        if isinstance(value, str) and _SHORTENED.search(value)
    ]
    return (
        None if "columns" in unknown else _list_of(columns),
        None if "filter" in unknown else filter,
        unknown,
    )


def _options(fingerprint: Mapping[str, Any]) -> Options:
    return Options(
        num_splits=fingerprint.get("num_splits"),
        shuffle_seed=fingerprint.get("shuffle_seed"),
        shuffle_clump_size=fingerprint.get("shuffle_clump_size"),
        tail=fingerprint.get("tail"),
        epoch=fingerprint.get("epoch") or 0,
    )
