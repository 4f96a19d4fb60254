"""What this package knows of the iterables `datasets` wraps around ours.

A dataset's `_ex_iterable` is a chain of wrappers over a `LanceExamplesIterable`, or a tree when
it mixes sources. These functions walk it. All of it is private to `datasets`; the contract
tests in `tests/test_datasets_contract.py` fail when a release changes what is relied on.
"""

from collections.abc import Callable, Iterator
from copy import copy, deepcopy
from typing import Any

from datasets import Features
from datasets.features.features import require_decoding
from datasets.iterable_dataset import (
    BufferShuffledExamplesIterable,
    FilteredExamplesIterable,
    FormattedExamplesIterable,
    FormattingConfig,
    MappedExamplesIterable,
    RebatchedArrowExamplesIterable,
    RepeatExamplesIterable,
    SelectColumnsIterable,
    SkipExamplesIterable,
    StepExamplesIterable,
    TakeExamplesIterable,
    _BaseExamplesIterable,
)

from hf_lance_stream.convert import FORMATS, Converter
from hf_lance_stream.examples import LanceExamplesIterable
from hf_lance_stream.features import check_format
from hf_lance_stream.iterables import BatchesIterable, RowsIterable, TransformedIterable
from hf_lance_stream.state import STATE_TYPE

_ROW_FOR_ROW = (
    BatchesIterable,
    FormattedExamplesIterable,
    RebatchedArrowExamplesIterable,
    RowsIterable,
    SelectColumnsIterable,
    TransformedIterable,
)
_PASSES_SHUFFLE_ON = (*_ROW_FOR_ROW, MappedExamplesIterable, RepeatExamplesIterable)
_YIELDS_ROWS = (
    RepeatExamplesIterable,
    SelectColumnsIterable,
    SkipExamplesIterable,
    TakeExamplesIterable,
)


def sources(ex_iterable: _BaseExamplesIterable) -> Iterator[LanceExamplesIterable]:
    """Every source of ours in a tree of iterables, in order."""
    if isinstance(ex_iterable, LanceExamplesIterable):
        yield ex_iterable
    elif hasattr(ex_iterable, "ex_iterables"):
        for child in ex_iterable.ex_iterables:
            yield from sources(child)
    elif hasattr(ex_iterable, "ex_iterable"):
        yield from sources(ex_iterable.ex_iterable)


def only_source(ex_iterable: _BaseExamplesIterable) -> LanceExamplesIterable | None:
    """The source at the end of a chain, or None for a tree."""
    while not isinstance(ex_iterable, LanceExamplesIterable):
        if not hasattr(ex_iterable, "ex_iterable"):
            return None
        ex_iterable = ex_iterable.ex_iterable
    return ex_iterable


def replace_source(
    ex_iterable: _BaseExamplesIterable,
    change: Callable[[LanceExamplesIterable], LanceExamplesIterable],
) -> _BaseExamplesIterable:
    """A copy of a chain, or tree, of iterables with every source of ours changed."""
    if isinstance(ex_iterable, LanceExamplesIterable):
        return change(ex_iterable)
    new = copy(ex_iterable)
    if hasattr(ex_iterable, "ex_iterable"):
        new.ex_iterable = replace_source(ex_iterable.ex_iterable, change)
    elif hasattr(ex_iterable, "ex_iterables"):
        new.ex_iterables = [replace_source(child, change) for child in ex_iterable.ex_iterables]
    return new


def count_rows(ex_iterable: _BaseExamplesIterable) -> int | None:
    """Rows an iterable yields in an epoch, or None if only iterating tells."""
    if isinstance(ex_iterable, LanceExamplesIterable):
        return len(ex_iterable.plan)
    if not hasattr(ex_iterable, "ex_iterable"):
        return None
    below = count_rows(ex_iterable.ex_iterable)
    if below is None or getattr(ex_iterable, "drop_last_batch", False):
        return None
    if isinstance(ex_iterable, TakeExamplesIterable):
        return min(max(0, int(ex_iterable.n)), below)
    if isinstance(ex_iterable, SkipExamplesIterable):
        return below - min(max(0, int(ex_iterable.n)), below)
    if isinstance(ex_iterable, RepeatExamplesIterable):
        times = ex_iterable.num_times
        return None if times is None else below * max(0, int(times))
    is_map = type(ex_iterable) is MappedExamplesIterable and not ex_iterable.batched
    return below if is_map or isinstance(ex_iterable, _ROW_FOR_ROW) else None


_NAMES = {
    BufferShuffledExamplesIterable: "shuffle with a buffer",
    FilteredExamplesIterable: "filter",
    RepeatExamplesIterable: "repeat",
    SkipExamplesIterable: "skip",
    StepExamplesIterable: "a split by examples",
    TakeExamplesIterable: "take",
}


def changes_rows(ex_iterable: _BaseExamplesIterable) -> str | None:
    """Name of the outermost step of a dataset that does not keep one row per row, or None."""
    while not isinstance(ex_iterable, LanceExamplesIterable):
        if not hasattr(ex_iterable, "ex_iterable"):
            return "a mix of sources"
        if type(ex_iterable) in _NAMES:
            return _NAMES[type(ex_iterable)]
        if isinstance(ex_iterable, MappedExamplesIterable):
            if ex_iterable.batched:
                return "a batched map"
            if ex_iterable.formatting and ex_iterable.formatting.is_table:
                return "a map on tables"
            if ex_iterable.with_indices:
                return "a map with indices"
        elif not isinstance(ex_iterable, _ROW_FOR_ROW):
            return type(ex_iterable).__name__
        ex_iterable = ex_iterable.ex_iterable
    return None


def place_state(ex_iterable: _BaseExamplesIterable, state: dict[str, Any]) -> dict[str, Any]:
    """The nested state of a chain at its start, with `state` as that of its source."""
    nested = ex_iterable._init_state_dict()
    copied: dict[str, Any] = deepcopy(nested)
    if copied.get("type") == STATE_TYPE:
        return state
    inner = copied
    while inner["examples_iterable"].get("type") != STATE_TYPE:
        inner = inner["examples_iterable"]
    inner["examples_iterable"] = state
    return copied


def is_shuffled_as_a_whole(ex_iterable: _BaseExamplesIterable) -> bool:
    """Whether shuffling the source shuffles the dataset: nothing mixes, takes or skips rows."""
    if isinstance(ex_iterable, LanceExamplesIterable):
        return True
    return isinstance(ex_iterable, _PASSES_SHUFFLE_ON) and is_shuffled_as_a_whole(
        ex_iterable.ex_iterable
    )


def rows_below(
    ex_iterable: _BaseExamplesIterable,
    features: Features | None,
    formatting: FormattingConfig | None,
    token_per_repo_id: Any,
    rows_of_batches: bool,
) -> RowsIterable | None:
    """What yields the same rows as a formatted chain, without one table per row.

    Args:
        ex_iterable: a chain as `datasets` prepares it to yield rows.
        features: the features its rows shall have.
        formatting: the format they shall have.
        token_per_repo_id: what the formatter may need to decode media.
        rows_of_batches: see `Converter`.

    Returns:
        The rows, or None where the formatting does more than convert: when it casts or adds
        columns, or has a format that is not known here.
    """
    below = _below_formatting(ex_iterable, features)
    format_type = formatting.format_type if formatting else None
    if below is None or format_type not in FORMATS:
        return None
    if not _yields_tables_of_source(below):
        is_python = formatting is None and not require_decoding(features)
        return RowsIterable(below, features) if is_python else None
    converter = Converter(format_type, features, token_per_repo_id, rows_of_batches)
    return RowsIterable(below, features, converter)


def _below_formatting(
    ex_iterable: _BaseExamplesIterable, features: Features | None
) -> _BaseExamplesIterable | None:
    """The iterable below a formatting that only converts its rows."""
    if isinstance(ex_iterable, FormattedExamplesIterable):
        ex_iterable = ex_iterable.ex_iterable
    if isinstance(ex_iterable, RebatchedArrowExamplesIterable):
        ex_iterable = ex_iterable.ex_iterable  # who asked for batches of rows drops the last one
    return ex_iterable if _has_features(ex_iterable, features) else None


def _has_features(ex_iterable: _BaseExamplesIterable, features: Features | None) -> bool:
    found = _row_features(ex_iterable)
    if found is None or features is None:
        return False
    return found == features and list(found) == list(features)


def _row_features(ex_iterable: _BaseExamplesIterable) -> Features | None:
    """Features of the rows of a source under select_columns, take, skip and repeat."""
    if isinstance(ex_iterable, LanceExamplesIterable):
        return ex_iterable.table_features
    if not isinstance(ex_iterable, _YIELDS_ROWS):
        return None
    below = _row_features(ex_iterable.ex_iterable)
    if below is not None and isinstance(ex_iterable, SelectColumnsIterable):
        return Features({name: below[name] for name in ex_iterable.column_names})
    return below


def _yields_tables_of_source(ex_iterable: _BaseExamplesIterable) -> bool:
    """Whether it yields the tables of a source, whole, and has its state."""
    while isinstance(ex_iterable, SelectColumnsIterable):
        ex_iterable = ex_iterable.ex_iterable
    return isinstance(ex_iterable, LanceExamplesIterable)


def batch_exactly(ex_iterable: _BaseExamplesIterable) -> _BaseExamplesIterable:
    """The same chain, with `BatchesIterable` where `datasets` cuts a source into batches."""
    if isinstance(ex_iterable, FormattedExamplesIterable):
        new = copy(ex_iterable)
        new.ex_iterable = batch_exactly(ex_iterable.ex_iterable)
        return new
    if not isinstance(ex_iterable, RebatchedArrowExamplesIterable):
        return ex_iterable
    if not _yields_tables_of_source(ex_iterable.ex_iterable):
        return ex_iterable
    return BatchesIterable(
        ex_iterable.ex_iterable, ex_iterable.batch_size, ex_iterable.drop_last_batch
    )


def read_rows_directly(ex_iterable: _BaseExamplesIterable) -> _BaseExamplesIterable:
    """The same chain, with `RowsIterable` where a map or filter gets one table per row.

    Where it needs tables, for a table format or a cast, they come from `BatchesIterable`.
    """
    if not isinstance(ex_iterable, MappedExamplesIterable):
        return ex_iterable
    formatted = ex_iterable.ex_iterable
    if not isinstance(formatted, FormattedExamplesIterable):
        return ex_iterable
    tables = formatted.ex_iterable
    if formatted.formatting is not None:
        check_format(formatted.features, formatted.formatting.format_type)
    is_by_row = getattr(tables, "batch_size", 1) == 1  # a format may change with the batch
    rows = None
    if formatted.formatting is None or is_by_row:
        rows = rows_below(
            formatted,
            formatted.features,
            formatted.formatting,
            formatted.token_per_repo_id,
            rows_of_batches=True,
        )
    new = copy(ex_iterable)
    new.ex_iterable = rows or batch_exactly(formatted)
    return new


def only_converts(ex_iterable: _BaseExamplesIterable, features: Features | None) -> bool:
    """Whether a dataset's rows are those of the tables of a source, but for their format."""
    return _yields_tables_of_source(ex_iterable) and _has_features(ex_iterable, features)
