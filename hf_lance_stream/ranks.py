"""The ranks of a job: their state gathered, and which rows each of them reads."""

from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hf_lance_stream.dataset import LanceIterableDataset
from hf_lance_stream.loader import LanceDataLoader
from hf_lance_stream.merge import merge_state_dicts
from hf_lance_stream.plan import Shard
from hf_lance_stream.wrappers import sources

_DATA_PARALLEL_NAMES = ("dp", "data", "ddp", "fsdp", "dp_replicate", "dp_shard", "replicate")


def gather_state_dict(
    loader: Any, group: Any = None, *, all_ranks_level: bool = False
) -> dict[str, Any]:
    """The portable state of all ranks, on every rank.

    With a process group every rank must call it, at the same step. Without one this process is
    the only rank.

    Args:
        loader: a loader from `stateful_dataloader`, or a dataset.
        group: the process group; default: the default one.
        all_ranks_level: see `merge_state_dicts`; for one process of several, without a group.
    """
    state = loader.state_dict()
    if not (dist.is_available() and dist.is_initialized()):
        return merge_state_dicts([state], all_ranks_level=all_ranks_level)
    states: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(states, state, group=group)
    return merge_state_dicts(states)


class PortableState:
    """The portable state of a loader as a `Stateful` of `torch.distributed.checkpoint`.

    ``dcp.save({"data": hls.PortableState(loader)}, checkpoint_id=…)`` on every rank saves it,
    ``dcp.load`` of the same loads it, on any number of ranks and workers.

    Args:
        loader: a loader from `stateful_dataloader`.
        group: the process group of the ranks; default: the default one.
    """

    def __init__(self, loader: LanceDataLoader, group: Any = None) -> None:
        self.loader = loader
        self.group = group

    def state_dict(self) -> dict[str, Any]:
        """See `gather_state_dict`."""
        return gather_state_dict(self.loader, self.group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load it into this rank's loader."""
        self.loader.load_state_dict(state_dict)


def data_parallel_rank(mesh: DeviceMesh, *names: str) -> tuple[int, int]:
    """Data-parallel rank and size of this process in a device mesh.

    Members of a tensor- or pipeline-parallel group have the same rank, and so read the same
    rows: ``rank, world_size = data_parallel_rank(mesh)`` goes to `from_lance`, `shard` or
    ``split_dataset_by_node``.

    Args:
        mesh: the device mesh.
        names: names of its data-parallel dimensions, the slowest first. Default: those among
            "dp", "data", "ddp", "fsdp", "dp_replicate", "dp_shard" and "replicate", or the only
            dimension there is, if it has no name.

    Raises:
        ValueError: the mesh has no dimension of that name, or none that looks data-parallel.
    """
    known = mesh.mesh_dim_names or ()
    chosen = names or tuple(name for name in known if name in _DATA_PARALLEL_NAMES)
    if not chosen and mesh.ndim == 1 and not known:
        return mesh.get_local_rank(), mesh.size()
    unknown = [name for name in chosen if name not in known]
    if unknown or not chosen:
        raise ValueError(
            f"`names` must be data-parallel dimensions of the mesh: got {list(names)}; the mesh "
            f"has {list(known)}"
        )
    rank, size = 0, 1
    for name in chosen:
        length = mesh.size(known.index(name))
        rank, size = rank * length + mesh.get_local_rank(name), size * length
    return rank, size


def part_of_rank(ds: LanceIterableDataset, rank: int, world_size: int) -> LanceIterableDataset:
    """The part of `ds` that one rank reads: divided once, here or by the user.

    Args:
        ds: a dataset, whole or already divided by these very ranks.
        rank: index of this data-parallel rank, in ``[0, world_size)``.
        world_size: number of data-parallel ranks, at least 1.

    Raises:
        ValueError: when `ds` is divided in another way, or cannot be divided evenly.
    """
    parts = parts_of(ds)
    if world_size == 1 or parts == {(rank, world_size)}:
        return ds
    if parts == {None}:
        return ds.shard(world_size, rank)
    raise ValueError(
        f"the dataset is already divided, as {sorted(map(str, parts))} (rank, world_size), and "
        f"this is rank {rank} of {world_size}: give the whole dataset, without shard, "
        "split_dataset_by_node, rank and world_size"
    )


def parts_of(ds: LanceIterableDataset) -> set[Any]:
    """As which (rank, world_size) the sources of a dataset are divided; None for a whole one."""
    if ds._distributed is not None:
        return {(ds._distributed.rank, ds._distributed.world_size)}
    parts: set[Any] = set()
    for examples in sources(ds._ex_iterable):
        shards = [s for s in examples.steps if isinstance(s, Shard) and s.num_parts > 1]
        found = tuple((s.index, s.num_parts) for s in shards)
        parts.add(None if not found else found[0] if len(found) == 1 else found)
    return parts


def length_of(sized: Any) -> int | None:
    """Length of a dataset or loader, or None where only iterating tells."""
    try:
        return len(sized)
    except TypeError:
        return None
