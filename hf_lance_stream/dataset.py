"""`LanceIterableDataset` and `from_lance`."""

import functools
import logging
import warnings
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch.utils.data
from datasets import IterableDataset
from datasets.iterable_dataset import _BaseExamplesIterable

from hf_lance_stream import words
from hf_lance_stream.examples import LanceExamplesIterable
from hf_lance_stream.permutation import SEED_LIMIT
from hf_lance_stream.plan import Shard, check_int
from hf_lance_stream.resume import start_from
from hf_lance_stream.shards import dividing_among_ranks, seed_of
from hf_lance_stream.splits import Layout
from hf_lance_stream.state import (
    STATE_TYPE,
    check_depth,
    check_state,
    check_steps,
    check_version,
    differences,
    find_states,
)
from hf_lance_stream.versions import VersionedDataset, accept_moved
from hf_lance_stream.wrappers import (
    changes_rows,
    count_rows,
    is_shuffled_as_a_whole,
    only_source,
    place_state,
    read_rows_directly,
    replace_source,
    sources,
)

logger = logging.getLogger(__name__)

_KEEP = object()  # marks an argument that was not given


class LanceIterableDataset(VersionedDataset):
    """A `datasets.IterableDataset` over Lance tables.

    Everything a Hugging Face dataset can do, it does in the same way. What it adds: a shuffle
    that needs no buffer, an exact state that restores the epoch, and a length.
    """

    @property
    def num_shards(self) -> int:
        """Splits, or natural shards, of this rank."""
        return int(super().num_shards)

    # Length.

    def __len__(self) -> int:
        """Rows this process yields in one epoch.

        Raises:
            TypeError: when a filter, a batched map or a mix of sources makes it unknown.
        """
        self._follow_workers()
        ex_iterable = self._ex_iterable
        if self._distributed is not None:
            ex_iterable = self.prepared_source()
        length = count_rows(ex_iterable)
        if length is None:
            raise TypeError(
                "the number of rows is unknown before the pass: the dataset has a step that may "
                "change it, such as filter, a batched map, batch or several sources"
            )
        return length

    def __bool__(self) -> bool:
        return True

    @property
    def dropped_rows(self) -> int:
        """Rows an epoch leaves out, all ranks together."""
        return sum(layout.dropped for layout in self._layouts())

    @property
    def padded_rows(self) -> int:
        """Rows an epoch yields a second time, all ranks together."""
        return sum(layout.padded for layout in self._layouts())

    def _layouts(self) -> list[Layout]:
        plans = [examples.plan for examples in sources(self._ex_iterable)]
        return [plan.layout for plan in plans if plan.layout is not None]

    # Order.

    def shuffle(
        self,
        seed: int | None = None,
        generator: np.random.Generator | None = None,
        buffer_size: int | None = None,
        max_buffer_input_shards: int | None = None,
        *,
        shuffle_clump_size: Any = _KEEP,
    ) -> "LanceIterableDataset":
        """Shuffle the whole table, in clumps, without a buffer.

        It is the shuffle of `from_lance`: the order is a function of the seed and the epoch,
        any position in it is found at once, and a resumed run has the very same order.
        On a dataset whose order is frozen by `take` or `skip`, or that mixes in other sources,
        it is the buffered shuffle of `datasets`, as the arguments say.

        Args:
            seed: integer in ``[0, 2**64)``.
            generator: numpy generator, instead of a seed.
            buffer_size: only for the buffered shuffle; has no effect on Lance tables.
            max_buffer_input_shards: the same.
            shuffle_clump_size: another clump size, None for single rows.

        Raises:
            ValueError: without seed and generator: every process would get another order.
        """
        if seed is None and generator is None:
            raise ValueError(
                "shuffle() needs a `seed` (or `generator`), so that every process and every "
                "resumed run gets the same order: call shuffle(seed=42), or any other number"
            )
        given = {"buffer_size": buffer_size, "max_buffer_input_shards": max_buffer_input_shards}
        given = {name: value for name, value in given.items() if value is not None}
        if not is_shuffled_as_a_whole(self._ex_iterable):
            return self._adopt(super().shuffle(seed, generator, **given))
        # What `IterableDatasetDict.shuffle` passes on by default is nobody's choice.
        defaults = {"buffer_size": 1000, "max_buffer_input_shards": 10}
        given = {name: value for name, value in given.items() if value != defaults[name]}
        if given:
            warnings.warn(
                f"{', '.join(given)} has no effect: a Lance dataset is shuffled without a buffer",
                stacklevel=2,
            )
        new: dict[str, Any] = {
            "shuffle_seed": _seed_of(generator)
            if generator is not None
            else check_int("seed", seed, 0, SEED_LIMIT)
        }
        if shuffle_clump_size is not _KEEP:
            new["shuffle_clump_size"] = shuffle_clump_size
        return self._with_examples(
            lambda examples: examples.with_options(replace(examples.options, **new))
        )

    def shard(self, num_shards: int, index: int, contiguous: bool = True) -> "LanceIterableDataset":
        """Keep the `index`-th of `num_shards` contiguous groups of splits.

        Args:
            num_shards: number of groups; must divide the number of splits. Natural shards need
                not be divisible.
            index: which group.
            contiguous: whether natural shards are kept in blocks or round-robin.

        Raises:
            ValueError: when the splits cannot be dealt evenly.
        """
        num_shards = check_int("num_shards", num_shards, 1, 2**31)
        index = check_int("index", index, 0, num_shards)
        with dividing_among_ranks("num_shards"):
            return self._adopt(super().shard(num_shards, index, contiguous))

    def batch(
        self,
        batch_size: int | None = None,
        by_column: str | list[str] | None = None,
        drop_last_batch: bool = False,
    ) -> "LanceIterableDataset":
        """Make each `batch_size` rows one row of lists, as in `datasets`.

        Args:
            batch_size: rows per batch, at least 1.
            by_column: make a batch of neighbouring rows with the same value instead.
            drop_last_batch: leave out a short last batch.
        """
        if batch_size is not None:
            batch_size = check_int("batch_size", batch_size, 1, 2**62)
        return self._adopt(super().batch(batch_size, by_column, drop_last_batch))

    def reshard(self, num_splits: int | None = None) -> "LanceIterableDataset":
        """Have more shards of the same rows, or a given number of splits.

        Args:
            num_splits: number of splits of the whole epoch. Default: cut every natural shard in
                half, or every split by the smallest number that divides its rows, so that no row
                is lost or added.

        Raises:
            ValueError: a dataset already divided among ranks is given a number of splits.
        """
        if num_splits is None:
            return self._adopt(super().reshard())
        number = check_int("num_splits", num_splits, 1, SEED_LIMIT)

        def resplit(examples: LanceExamplesIterable) -> LanceExamplesIterable:
            if any(isinstance(step, Shard) for step in examples.steps):
                raise ValueError(
                    f"`num_splits` can only be set before the dataset is divided: got "
                    f"num_splits={number}; call reshard before shard or split_dataset_by_node"
                )
            return examples.with_options(replace(examples.options, num_splits=number)).with_steps()

        return self._with_examples(resplit)

    # State.

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass; with a shuffle, its order.

        Args:
            epoch: integer in ``[0, 2**63)``.
        """
        super().set_epoch(check_int("epoch", epoch, 0, 2**63))
        starting = self._starting_state_dict
        if starting is not None and starting["epoch"] != self.epoch:
            self._starting_state_dict = None

    def state_dict(self) -> dict[str, Any]:
        """The position after the last row that was yielded, as JSON data.

        Before a pass it is the start of the epoch, or what was loaded last.
        """
        if not self._pass_is_running and self._state_dict["epoch"] != self.epoch:
            self._prepare_ex_iterable_for_iteration()
        state: dict[str, Any] = super().state_dict()
        return state

    def load_state_dict(
        self, state_dict: dict[str, Any], strict: bool = True, allow_moved: bool = False
    ) -> None:
        """Continue at a saved position in the next pass.

        It restores the epoch. A later `set_epoch` of the same epoch changes nothing; of another
        one, or the end of the pass, lets go of the state. Where a table has another version by
        now, and no version number or tag was given, the dataset reads it at the saved version
        from now on, in later epochs too, and logs a warning.

        Args:
            state_dict: what `state_dict` returned.
            strict: refuse a state of another table, filter or order, or of another version than
                the one that was given. If False, warn, and continue at the same position in this
                dataset as it is.
            allow_moved: accept a state of the same table at another place: its files, versions
                and rows must be the same. The place in the state is never opened.

        Raises:
            FileNotFoundError: the saved version is gone.
            ValueError: when the state does not fit; each field that differs is named.
        """
        if (
            not isinstance(state_dict, dict)
            or not {"examples_iterable", "epoch"} <= set(state_dict)
            or not isinstance(state_dict["examples_iterable"], dict)
        ):
            raise ValueError(
                "`state_dict` must be what `state_dict()` of a dataset returned: got "
                f"{str(state_dict)[:200]}"
            )
        check_depth(state_dict)
        epoch = check_int("epoch", state_dict["epoch"], 0, 2**63, " in the state")
        with self.unchanged_on_failure():
            self._is_at_end = False
            self.set_epoch(epoch)
            saved = self._placed(deepcopy(state_dict))
            if strict:
                self.go_to_versions_of(saved, allow_moved)
            self._check(saved, strict, allow_moved)
        self._starting_state_dict = saved
        self._prepare_ex_iterable_for_iteration()

    def _placed(self, saved: dict[str, Any]) -> dict[str, Any]:
        """A portable state, which has no wrappers, made one of this dataset."""
        state = saved["examples_iterable"]
        is_portable = isinstance(state, dict) and state.get("type") == STATE_TYPE
        if not is_portable or self._state_dict["examples_iterable"].get("type") == STATE_TYPE:
            return saved
        what = changes_rows(self._ex_iterable)
        if what is not None:
            raise ValueError(
                f"the state counts rows of the table, which {what} in this dataset does not keep "
                "one by one: load a state of this very dataset, from as many ranks and workers"
            )
        return {**saved, "examples_iterable": place_state(self.prepared_source(), state)}

    def _check(self, saved: dict[str, Any], strict: bool, allow_moved: bool) -> None:
        """Check `saved` against this dataset at its epoch; adapt it if it need not fit."""
        found = list(find_states(saved))
        for state in found:
            check_version(state)
        if torch.utils.data.get_worker_info() is not None:
            return  # a worker's part: the reader checks when it starts
        prepared = self.prepared_source()
        check_steps(saved["examples_iterable"], prepared._state_dict)
        readers = list(sources(prepared))
        only = readers[0] if only_source(prepared) is not None else None
        if allow_moved:
            accept_moved(found, [reader.fingerprint for reader in readers])
        for state in found:
            reader = min(readers, key=lambda r: len(differences(state, r.fingerprint)))
            lines = differences(state, reader.fingerprint)
            if lines and not strict:
                warnings.warn(
                    "continuing at the position of a state that differs: " + "; ".join(lines),
                    stacklevel=3,
                )
                state["fingerprint"] = reader.fingerprint
                if only is not None:
                    state["part"] = only.plan.part()
            check_state(state, reader.fingerprint)
            if only is not None:
                rest = start_from(state, only.fingerprint, only.plan)
                rest.write_to(state)  # it may have been that of all ranks
                self._is_at_end = (
                    changes_rows(self._ex_iterable) is None and len(rest.plan) == rest.position
                )

    # Words.

    def __repr__(self) -> str:
        return words.representation(self)

    def describe(self) -> str:
        """What is read, in which order and in which parts, in words; a table in a notebook."""
        self._follow_workers()
        return words.description(self)

    def _repr_html_(self) -> str:
        return words.description(self)._repr_html_()

    # The class stays.

    def __new__(cls, *args: Any, **kwargs: Any) -> "LanceIterableDataset":  # noqa: D102
        new: LanceIterableDataset = object.__new__(cls)
        return new

    def __init__(self, ex_iterable: _BaseExamplesIterable, *args: Any, **kwargs: Any) -> None:
        ex_iterable = read_rows_directly(ex_iterable)
        if any(examples.options.batch_size is not None for examples in sources(ex_iterable)):
            ex_iterable = _without_unkept_batches(ex_iterable)
        super().__init__(ex_iterable, *args, **kwargs)

    def _adopt(self, other: IterableDataset) -> "LanceIterableDataset":
        """`other`, made from this dataset by a method of `datasets`, at the same epoch."""
        if self._starting_state_dict is not None:
            warnings.warn(
                "a state loaded before a transformation does not reach the new dataset: "
                "transform first, then load the state",
                stacklevel=3,
            )
        other.set_epoch(self.epoch)
        return cast(LanceIterableDataset, other)

    def with_batches(self, batch_size: int | None) -> "LanceIterableDataset":
        """The same dataset, for a loader whose workers shall share batches of this size.

        Args:
            batch_size: rows per batch; None lets the workers share splits.
        """
        return self._with_examples(
            lambda examples: examples.with_options(replace(examples.options, batch_size=batch_size))
        )

    def _with_examples(
        self, change: Callable[[LanceExamplesIterable], LanceExamplesIterable]
    ) -> "LanceIterableDataset":
        """The same dataset with its `LanceExamplesIterable` changed."""
        return self._adopt(
            IterableDataset(
                replace_source(self._ex_iterable, change),
                info=self._info.copy(),
                split=self._split,
                formatting=self._formatting,
                distributed=deepcopy(self._distributed),
                token_per_repo_id=self._token_per_repo_id,
            )
        )


def _without_unkept_batches(ex_iterable: _BaseExamplesIterable) -> _BaseExamplesIterable:
    """Let workers share splits where a step of the dataset breaks up the batches of its rows."""
    what = changes_rows(ex_iterable)
    if what in (None, "a batched map"):  # a batched map keeps rows, or nothing can keep batches
        return ex_iterable
    logger.warning(
        "DataLoader workers share splits, not batches: %s does not keep one row per row, so the "
        "batches depend on num_workers",
        what,
    )

    def without(examples: LanceExamplesIterable) -> LanceExamplesIterable:
        return examples.with_options(replace(examples.options, batch_size=None))

    return replace_source(ex_iterable, without)


def _seed_of(generator: Any) -> int:
    if not isinstance(generator, np.random.Generator):
        raise ValueError(
            f"`generator` must be a numpy.random.Generator or None: got generator={generator!r}"
        )
    return seed_of(generator)


TRANSFORMATIONS = (
    "add_column",
    "cast",
    "cast_column",
    "decode",
    "filter",
    "map",
    "remove_columns",
    "rename_column",
    "rename_columns",
    "repeat",
    "select_columns",
    "skip",
    "take",
    "with_format",
)
"""Methods that transform a dataset, beside those above; in `datasets` they forget the epoch."""


def _keep_epoch(name: str) -> Callable[..., LanceIterableDataset]:
    method = getattr(IterableDataset, name)

    @functools.wraps(method)
    def transformation(
        self: LanceIterableDataset, *args: Any, **kwargs: Any
    ) -> LanceIterableDataset:
        return self._adopt(method(self, *args, **kwargs))

    return transformation


for _name in TRANSFORMATIONS:
    setattr(LanceIterableDataset, _name, _keep_epoch(_name))


def _new_dataset(
    cls: type[IterableDataset],
    ex_iterable: _BaseExamplesIterable | None = None,
    *args: Any,
    **kwargs: Any,
) -> IterableDataset:
    is_ours = ex_iterable is not None and next(sources(ex_iterable), None) is not None
    return object.__new__(LanceIterableDataset if is_ours and cls is IterableDataset else cls)


# Private: whatever `datasets` makes of a dataset (map, split_dataset_by_node, interleave_datasets
# and all others) it makes by calling `IterableDataset(ex_iterable, …)`, by that name. Where it is
# made of Lance tables, that call makes one of ours.
IterableDataset.__new__ = _new_dataset
