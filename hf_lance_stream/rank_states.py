"""The states of the loaders of all ranks, as one object that a checkpoint of a trainer holds."""

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from hf_lance_stream.merge import merge_state_dicts

_VERSION = 1


class RankStates:
    """The loaders of all ranks as one `Stateful`, for checkpoints that hold one state for all.

    The state has that of each rank, so ranks may stand at different places, as they do with a
    filter. Loaded on as many ranks and workers each rank takes its own, with any steps on top of
    the dataset. On others they are merged, where one row stays one row.

    ``accelerator.register_for_checkpointing(RankStates(loader))`` is one use of it.

    Args:
        loader: a loader from `stateful_dataloader`.
        group: the process group of the ranks; default: the default one, if there is one.
        copies: so many successive ranks read the same rows, as those of a tensor-parallel group.
    """

    def __init__(self, loader: Any, group: Any = None, *, copies: int = 1) -> None:
        self.loader, self.group, self.copies = loader, group, copies

    def state_dict(self) -> dict[str, Any]:
        """The same on every rank: each must call it, at the same step."""
        return self.gathered(self.loader.state_dict())

    def gathered(self, state: dict[str, Any]) -> dict[str, Any]:
        """The same, where this rank stands at `state`."""
        states: list[Any] = [state]
        if self._is_distributed():
            states = [None] * dist.get_world_size(self.group)
            dist.all_gather_object(states, state, group=self.group)
        return {
            "version": _VERSION,
            "num_workers": self.loader.num_workers,
            "states": states[:: self.copies],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Let this rank's loader continue at a saved position; reads nothing.

        Raises:
            ValueError: the state is not of this kind, or does not fit; or the number of ranks or
                workers is another one, and a step of the dataset does not let it change.
        """
        states = state_dict.get("states") if isinstance(state_dict, Mapping) else None
        if not isinstance(states, list) or state_dict.get("version") != _VERSION:
            raise ValueError(
                f"`state_dict` must be what RankStates.state_dict() of version {_VERSION} gave: "
                f"got {str(state_dict)[:100]!r}"
            )
        rank, world_size = 0, 1
        if self._is_distributed():
            rank, world_size = dist.get_rank(self.group), dist.get_world_size(self.group)
        saved = len(states), state_dict.get("num_workers")
        if saved == (world_size // self.copies, self.loader.num_workers):
            self.loader.load_state_dict(states[rank // self.copies])
        else:
            self.loader.load_state_dict(merge_state_dicts(states))

    def _is_distributed(self) -> bool:
        return dist.is_available() and dist.is_initialized()
