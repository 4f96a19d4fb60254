"""The versions that a dataset reads: a state goes on at its own, a tag keeps them from clean-up."""

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.data

from hf_lance_stream.examples import LanceExamplesIterable
from hf_lance_stream.features import features_of
from hf_lance_stream.iteration import IteratedDataset
from hf_lance_stream.lance_errors import reason_of
from hf_lance_stream.source import Source
from hf_lance_stream.state import (
    check_state,
    differing_fields,
    find_states,
    fingerprint_text,
    mapping,
    new_state,
    shown,
)
from hf_lance_stream.stored import StoredTable
from hf_lance_stream.wrappers import only_source, replace_source, sources

logger = logging.getLogger(__name__)

_FOLLOWS_VERSION = {"version", "files", "rows", "num_splits"}  # fields that differ with the version
_SAME_ROWS = ("version", "files", "rows")  # fields that tell a table wherever it is


class VersionedDataset(IteratedDataset):
    """The part of `LanceIterableDataset` that goes to the versions of a state.

    In a loader of torchdata a state reaches the workers only. They write the versions to memory
    that they share with their parent, which reads these in its next passes too.
    """

    _ex_iterable: Any
    _versions: torch.Tensor | None = None  # of all tables, int64

    def state_dict(self) -> dict[str, Any]:
        """See `LanceIterableDataset.state_dict`."""
        return self.with_sources(super().state_dict())

    def with_sources(self, state: dict[str, Any]) -> dict[str, Any]:
        """`state` with what each source of a mix reads, which its own state does not always tell.

        `interleave_datasets` keeps none of a source that stands at its first row.
        """
        if only_source(self._ex_iterable) is None:
            state["sources"] = [_without_epoch(e.fingerprint) for e in sources(self._ex_iterable)]
        return state

    def go_to_versions_of(self, saved: Mapping[str, Any], allow_moved: bool = False) -> None:
        """Read the tables at the versions that a state was saved at, if the user left that open.

        Where something else differs too nothing is done: the check of the state says what.

        Args:
            saved: the state of a dataset.
            allow_moved: also when the table is at another place.

        Raises:
            FileNotFoundError: a version is gone.
            ValueError: it is not that of the same table, or has columns of other types; or a
                source of a mix reads something else.
        """
        readers = list(sources(self._ex_iterable))
        is_mix = only_source(self._ex_iterable) is None
        if is_mix:
            told = saved.get("sources")
            told = told if isinstance(told, list) else []
        else:
            told = [mapping(state, "fingerprint") for state in find_states(saved)][:1]
        if len(told) != len(readers) or not all(isinstance(one, dict) for one in told):
            return  # a state of other steps
        states = [
            new_state({**one, "epoch": reader.options.epoch}, reader.plan.part())
            for one, reader in zip(told, readers, strict=True)
        ]
        found = [
            _saved_source(reader, state, allow_moved)
            for reader, state in zip(readers, states, strict=True)
        ]
        self._set_sources(found)
        for state, reader in zip(states, sources(self._ex_iterable), strict=True):
            if allow_moved:
                accept_moved([state], [reader.fingerprint])
            if is_mix:
                check_state(state, reader.fingerprint)
        _say_so([reader.source for reader in readers], found)

    def _set_sources(self, new: Sequence[Source]) -> None:
        rest = iter(new)
        if [*self._sources()] != [*new]:
            self._ex_iterable = replace_source(
                self._ex_iterable, lambda examples: examples.with_source(next(rest))
            )
        if self._versions is not None:
            self._versions.copy_(_versions_of(new))

    def _sources(self) -> Iterator[Source]:
        return (examples.source for examples in sources(self._ex_iterable))

    def _follow_workers(self) -> None:
        """Read the versions that workers have found in their states."""
        if self._versions is None:
            self._versions = _versions_of(self._sources())
        elif not torch.equal(self._versions, _versions_of(self._sources())):
            rest = iter(self._versions.tolist())
            found = []
            for source in self._sources():
                tables = [_at(table, next(rest)) for table in source.tables]
                found.append(source.with_tables(tables))
            self._set_sources(found)

    @contextmanager
    def unchanged_on_failure(self) -> Iterator[None]:
        """Leave the dataset as it was where a state does not fit."""
        before = self.epoch, self._starting_state_dict, self._ex_iterable, self._state_dict
        try:
            yield
        except (ValueError, OSError):
            self.set_epoch(before[0])
            _, self._starting_state_dict, self._ex_iterable, self._state_dict = before
            self._set_sources([*self._sources()])
            raise

    def _prepare_ex_iterable_for_iteration(self, *args: Any, **kwargs: Any) -> Any:
        self._follow_workers()
        return super()._prepare_ex_iterable_for_iteration(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        self._follow_workers()
        make, arguments = super().__reduce__()
        return _unpickle, (make, arguments, self._versions)


def _unpickle(make: Any, arguments: Any, versions: torch.Tensor) -> VersionedDataset:
    new: VersionedDataset = make(*arguments)
    new._versions = versions
    return new


def _without_epoch(fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fingerprint.items() if name != "epoch"}


def _versions_of(some: Iterable[Source]) -> torch.Tensor:
    return torch.tensor([table.version for source in some for table in source.tables])


def _at(table: StoredTable, version: int) -> StoredTable:
    return table if table.version == version else table.at(version)


def _saved_source(
    reader: LanceExamplesIterable, state: Mapping[str, Any], allow_moved: bool
) -> Source:
    """What `reader` reads, at the versions of `state`; unchanged where that is not to be."""
    source, saved = reader.source, mapping(state, "fingerprint")
    differing = set(differing_fields(state, reader.fingerprint))
    may_differ = _FOLLOWS_VERSION | ({"table"} if allow_moved else set())
    is_fixed = any(table.is_fixed for table in source.tables)
    if (
        "version" not in differing
        or "version" not in saved
        or not differing <= may_differ
        or is_fixed
    ):
        return source
    versions = _numbers(saved["version"], source)
    tables = [
        _open_saved(table, version) for table, version in zip(source.tables, versions, strict=True)
    ]
    name, says = source.name, f"build the dataset with version={saved['version']}"
    try:
        found = source.with_tables(tables)
        has_changed = features_of(found) != features_of(source)
    except ValueError as error:
        raise ValueError(
            f"the state was saved at version {saved['version']} of {name}, which cannot be read "
            f"as this dataset reads version {source.version}: {error}; {says}"
        ) from error
    files = fingerprint_text(found.files_digest)
    if files != saved.get("files"):
        raise ValueError(
            f"the state was saved at version {saved['version']} of a table with other files than "
            f"{name} has at that version: files: saved {shown(saved.get('files'))}, now {files!r}; "
            "it was made anew, or another one is at its place: load the state into a dataset of "
            "the table it is of, or start anew"
        )
    if has_changed:
        raise ValueError(
            f"the state was saved at version {saved['version']} of {name}, where columns have "
            f"other types: saved {features_of(found)}, now {features_of(source)}; {says}"
        )
    return found


def _numbers(version: Any, source: Source) -> list[int]:
    """The version of each table in a fingerprint."""
    try:
        numbers: Any = json.loads(version) if isinstance(version, str) else [version]
    except (ValueError, RecursionError):
        numbers = None
    if not isinstance(numbers, list) or len(numbers) != len(source.tables):
        numbers = [None]
    if any(type(n) is not int or not 0 <= n < 2**63 for n in numbers):
        raise ValueError(
            f"the versions of {len(source.tables)} tables cannot be found in the state, which has "
            f"{shown(version)} (it is short, and does not hold those of many tables): make the "
            "dataset of the tables at the versions it was saved at, lance.dataset(uri, version=…)"
        )
    return list(numbers)


def _open_saved(table: StoredTable, version: int) -> StoredTable:
    try:
        return _at(table, version)
    except FileNotFoundError as error:
        reason = reason_of(error.__cause__ or error)
        raise FileNotFoundError(
            f"the state was saved at version {version} of {table.name}, which is gone: {reason}; "
            "versions are cleaned up unless they are tagged: tag those that a run reads, with "
            'hls.pin(ds, tag="run-7"). `load_state_dict(state, strict=False)` goes on at the same '
            f"position in version {table.version}, which may repeat and leave out rows"
        ) from error


def _say_so(before: Sequence[Source], after: Sequence[Source]) -> None:
    worker = torch.utils.data.get_worker_info()
    moved = {
        new.name: (new.version, old.version)
        for then, now in zip(before, after, strict=True)
        for old, new in zip(then.tables, now.tables, strict=True)
        if new.version != old.version
    }
    if not moved or (worker is not None and worker.id):
        return
    tables = "; ".join(
        f"{name} at version {saved}, not at {made} as the dataset was made"
        for name, (saved, made) in moved.items()
    )
    versions = {saved for saved, _ in moved.values()}
    logger.warning(
        "the state goes on with the versions that it was saved at, in later epochs too: %s. Give "
        "%s to silence this.",
        tables,
        f"version={versions.pop()}"
        if len(versions) == 1
        else "each table at its version, lance.dataset(uri, version=…),",
    )


def accept_moved(states: Iterable[dict[str, Any]], readers: Iterable[Mapping[str, Any]]) -> None:
    """Make the tables that states name those of readers of the same rows, wherever these are.

    Args:
        states: states of ours; changed in place.
        readers: fingerprints of the readers that load them.
    """
    known = list(readers)
    for state in states:
        saved = mapping(state, "fingerprint")
        for now in known:
            if all(saved.get(name) == now.get(name) for name in _SAME_ROWS):
                state["fingerprint"] = {**saved, "table": now["table"]}


def pin(ds: VersionedDataset, tag: str) -> dict[str, int]:
    """Tag the versions that a dataset reads, so that no clean-up removes them.

    A run that is resumed for longer than old versions are kept (`cleanup_old_versions`, the
    ``optimize`` of LanceDB) needs it. Every rank may call it, in any order.

    Args:
        ds: the dataset, or one made of it; its tables are tagged where they are, which needs the
            right to write there.
        tag: name of the tag, such as ``"run-7"``: letters, digits, ``.``, ``-`` and ``_``.

    Returns:
        The version of each table that has the tag now, by its name.

    Raises:
        ValueError: the tag is that of another version, which is named, or is no name for a tag;
            or two versions of one table are read. No tag is left then that was not there before.
        OSError: the tag cannot be written.

    Example:
        >>> import hf_lance_stream as hls
        >>> ds = hls.from_lance(write_example_table(rows=100))
        >>> list(hls.pin(ds, tag="run-7").values())
        [1]
        >>> len(hls.from_lance(list(hls.pin(ds, tag="run-7"))[0], version="run-7"))
        100
    """
    new: list[StoredTable] = []
    try:
        for table in _tables(ds, tag):
            if table.tag(tag):
                new.append(table)
    except (ValueError, OSError):
        for table in new:
            table.untag(tag)
        raise
    return {table.name: table.version for table in _tables(ds, tag)}


def unpin(ds: VersionedDataset, tag: str) -> dict[str, int]:
    """Remove a tag that `pin` has made: the versions may be cleaned up again.

    Args:
        ds: a dataset that reads those versions.
        tag: name of the tag.

    Returns:
        The version of each table that had the tag, by its name.

    Raises:
        ValueError: the tag is that of another version.
        OSError: the tag cannot be removed.
    """
    return {table.name: table.version for table in _tables(ds, tag) if table.untag(tag)}


def _tables(ds: VersionedDataset, tag: str) -> list[StoredTable]:
    """The tables that a dataset reads, each version once."""
    if not isinstance(ds, VersionedDataset):
        raise ValueError(
            "`ds` must be a dataset of Lance tables, from hls.from_lance or load_dataset("
            f'"lance_stream", …): got {type(ds).__name__}'
        )
    if not isinstance(tag, str) or not tag:
        raise ValueError(f'`tag` must be the name of a tag, such as "run-7": got tag={tag!r}')
    ds._follow_workers()
    tables = (table for source in ds._sources() for table in source.tables)
    return list({(table.name, table.version): table for table in tables}.values())
