"""The order contract in plain lists: slow and obvious, the yardstick of `splits` and `plan`."""

from itertools import zip_longest

from hf_lance_stream.permutation import ORDER_VERSION, Permutation, derive_key


def sequence(rows: int, clump_size: int, seed: int | None, epoch: int) -> list[int]:
    """The rows of an epoch: the table cut into clumps, the clumps shuffled and joined."""
    table = list(range(rows))
    if seed is None or rows == 0:
        return table
    clumps = [table[i : i + clump_size] for i in range(0, rows, clump_size)]
    slots = Permutation(len(clumps), derive_key(ORDER_VERSION, seed, epoch))(range(len(clumps)))
    return [row for slot in slots for row in clumps[slot]]


def cut(sequence: list[int], num_splits: int, tail: str) -> list[list[int]]:
    """The rows of every split: equal parts, then at most one row of the last cycle each."""
    length = len(sequence) // num_splits
    splits = [sequence[s * length : (s + 1) * length] for s in range(num_splits)]
    last_cycle = sequence[num_splits * length :]
    if tail == "drop":
        last_cycle = []
    elif tail == "pad" and last_cycle:
        last_cycle = last_cycle + sequence[: num_splits - len(last_cycle)]
    for split, row in zip(splits, last_cycle, strict=False):
        split.append(row)
    return splits


def deal(splits: list[list[int]]) -> list[int]:
    """What a reader of `splits` yields: one row of each per cycle."""
    return [row for cycle in zip_longest(*splits) for row in cycle if row is not None]


def group(items: list, num_parts: int, index: int) -> list:
    """The `index`-th of `num_parts` equal contiguous groups."""
    size = len(items) // num_parts
    return items[index * size : (index + 1) * size]


def rest(splits: list[list[int]], consumed: list[int]) -> list[int]:
    """What a reader of `splits` yields after so many rows of each: rows that lag come first."""
    left = [
        (cycle, s) for s, split in enumerate(splits) for cycle in range(consumed[s], len(split))
    ]
    return [splits[s][cycle] for cycle, s in sorted(left)]


def batches(rows: list[int], batch_size: int, num_workers: int, worker: int) -> list[int]:
    """The rows of every `num_workers`-th batch, from that of number `worker` on."""
    starts = range(worker * batch_size, len(rows), num_workers * batch_size)
    return [row for start in starts for row in rows[start : start + batch_size]]
