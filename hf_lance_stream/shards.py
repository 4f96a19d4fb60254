"""What `datasets` gives and takes in places of its own: a number of shards, a generator."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from copy import copy
from typing import Any

import numpy as np

from hf_lance_stream.permutation import SEED_LIMIT
from hf_lance_stream.splits import check_divisible, near_num_splits

_divided_as: ContextVar[str | None] = ContextVar("_divided_as", default=None)


def divided_as() -> str | None:
    """What the user calls the number of ranks, inside `dividing_among_ranks`."""
    return _divided_as.get()


@contextmanager
def dividing_among_ranks(name: str) -> Iterator[None]:
    """Take every ``shard_data_sources`` inside for a division among ranks, which must be even.

    Args:
        name: what the user calls the number of ranks, for the error.
    """
    token = _divided_as.set(name)
    try:
        yield
    finally:
        _divided_as.reset(token)


class NumShards(int):
    """A number of shards that refuses to be spread unevenly over ranks.

    ``split_dataset_by_node`` decides with ``num_shards % world_size`` whether every rank reads
    its own shards, or everything and drops most of it; the latter is refused here.
    """

    _divided: int
    _rows: int
    _is_natural: bool

    def __new__(cls, value: int, *, divided: int, rows: int, is_natural: bool) -> "NumShards":  # noqa: D102
        new = super().__new__(cls, value)
        new._divided = divided
        new._rows = rows
        new._is_natural = is_natural
        return new

    def __mod__(self, world_size: int) -> int:
        rest = self._divided % world_size
        if rest and self._is_natural:
            near = near_num_splits(max(self._divided, world_size, 48), world_size, self._rows)
            hint = f", such as num_splits={near[0]}" if near else ""
            raise ValueError(
                f"the natural shards (one per fragment) must be divisible by world_size: got "
                f"{self._divided} shards, world_size={world_size}; give the dataset a number of "
                f"splits that {world_size} divides{hint}"
            )
        check_divisible(self._divided, world_size, "world_size", self._rows)
        return rest

    def __reduce__(self) -> tuple[Any, ...]:
        return int, (int(self),)


def seed_of(generator: np.random.Generator) -> int:
    """The seed in ``[0, 2**64)`` that a numpy generator stands for.

    A fresh ``np.random.default_rng(seed)`` stands for `seed`, so that every way to shuffle
    with the same seed gives the same order; any other generator for its next draw.

    Raises:
        ValueError: for a generator made without a seed: every process would get another order.
    """
    sequence: Any = getattr(generator.bit_generator, "seed_seq", None)
    entropy = getattr(sequence, "entropy", None)
    if isinstance(entropy, int | np.integer) and not sequence.spawn_key:
        if not 0 <= entropy < SEED_LIMIT:
            raise ValueError(
                "a shuffle needs a seed in [0, 2**64), so that every process and every resumed "
                "run gets the same order: call shuffle(seed=42), or any other number"
            )
        if type(generator.bit_generator)(sequence).state == generator.bit_generator.state:
            return int(entropy)
    bits = type(generator.bit_generator)()
    bits.state = copy(generator.bit_generator.state)
    return int(np.random.Generator(bits).integers(2**63))
