"""Lightning: a loader whose place is saved and restored exactly, on every rank.

It asks the `Trainer` it is given and imports nothing of Lightning, so it goes with `lightning` and
with `pytorch_lightning`.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from hf_lance_stream.dataset import LanceIterableDataset
from hf_lance_stream.loader import LanceDataLoader
from hf_lance_stream.loader import stateful_dataloader as _stateful_dataloader
from hf_lance_stream.rank_states import RankStates
from hf_lance_stream.ranks import length_of, part_of_rank
from hf_lance_stream.stats import ReadStats


def stateful_dataloader(
    trainer: Any, ds: LanceIterableDataset, batch_size: int, num_workers: int = 0, **kwargs: Any
) -> "LightningLoader":
    """A loader for `Trainer.fit`, whose place is in each of Lightning's checkpoints.

    Each rank gets its own rows and each epoch its own order. ``fit(ckpt_path=…)`` goes on with the
    batch after the last one that was trained on, at once, also where the number of batches is
    unknown and Lightning reads one ahead. On another number of ranks or workers it does so where
    one row stays one row and the rows of a step are as many.

    Make it where the ranks are known, in `train_dataloader` of the module or the data module.

    Args:
        trainer: the `Trainer` of Lightning: ``self.trainer`` there.
        ds: the whole dataset, after all transformations; or one divided by these ranks.
        batch_size: rows per batch of one rank, at least 1.
        num_workers: worker processes of each rank.
        kwargs: see `hf_lance_stream.stateful_dataloader`.

    Raises:
        ValueError: for a dataset divided in another way, and what
            `hf_lance_stream.stateful_dataloader` refuses.
    """
    known = trainer.distributed_sampler_kwargs or {"num_replicas": trainer.world_size, "rank": 0}
    world_size = known["num_replicas"]
    part = part_of_rank(ds, known["rank"], world_size)
    loader = _stateful_dataloader(part, batch_size, num_workers, **kwargs)
    return LightningLoader(loader, trainer, world_size)


class LightningLoader:
    """What `stateful_dataloader` of this module returns.

    Its state has that of each rank, since Lightning saves one for all; so `state_dict` must be
    called on every rank, as Lightning does. It counts the epochs itself: Lightning tells them to
    samplers only, and counts an epoch that `max_steps` has cut short as a whole one.
    """

    def __init__(self, loader: LanceDataLoader, trainer: Any, world_size: int) -> None:
        self.loader = loader
        self._trainer = trainer
        self._ranks = RankStates(loader, copies=trainer.world_size // world_size)
        self._rows_per_step = int(loader.batch_size) * world_size
        self._epoch: int | None = None  # of the pass that runs, or the last one
        self._is_placed = False  # whether the loader stands where the next pass begins
        self._is_read_up = False
        self._batches = 0  # read in this epoch, before a resume too
        self._recent: deque[dict[str, Any]] = deque(maxlen=3)  # states after the last batches

    def __len__(self) -> int:
        """Batches of a whole epoch on this rank; TypeError when only iterating tells."""
        return len(self.loader)

    def __bool__(self) -> bool:
        return True  # also where the length is unknown

    def stats(self) -> ReadStats:
        """See `hf_lance_stream.loader.LanceDataLoader.stats`."""
        return self.loader.stats()

    def __iter__(self) -> Iterator[Any]:
        # Nothing happens before the first batch is asked for: Lightning also calls iter() to see
        # whether that is possible.
        self._place()
        self._is_placed = self._is_read_up = False
        self._recent.clear()
        self._recent.append(self.loader.state_dict())
        for batch in self.loader:
            self._batches += 1
            self._recent.append(self.loader.state_dict())
            yield batch
        self._is_read_up = True

    def _place(self) -> None:
        """Let the loader stand where the next pass begins."""
        if self._is_placed:
            return
        processed = self._trainer.fit_loop.epoch_progress.current.processed
        self._epoch = processed if self._epoch is None else self._epoch + 1
        self._batches, self._is_placed = 0, True
        self.loader.load_state_dict({})
        self.loader.set_epoch(self._epoch)

    def state_dict(self) -> dict[str, Any]:
        """Where all ranks stand, after the last batch that was trained on."""
        if not self._recent:
            self._place()
        behind = self._untrained_batches() if self._recent else 0
        state = self._recent[-1 - behind] if self._recent else self.loader.state_dict()
        batches = self._batches - behind
        is_at_end = self._is_read_up and not behind
        return {
            **self._ranks.gathered(state),
            "epoch": self.loader.dataset.epoch,
            "batches": batches,
            "finished": is_at_end or batches >= self._trainer.num_training_batches,
            "rows_per_step": self._rows_per_step,
        }

    def _untrained_batches(self) -> int:
        """Batches that were read and that a resumed training must get again."""
        progress = self._trainer.fit_loop.epoch_loop.batch_progress.current
        in_step = progress.ready > progress.processed  # stopped by an exception in a step
        # Without a number of batches Lightning reads one ahead, to know the last one.
        reads_ahead = self._trainer.num_training_batches == float("inf") and not self._is_read_up
        return int(in_step) + int(reads_ahead)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue in the next pass; at the end of an epoch, with the next epoch.

        Raises:
            ValueError: the state is not one of this class or does not fit.
        """
        keys = {"epoch", "batches", "finished", "rows_per_step"}
        if not isinstance(state_dict, Mapping) or not keys <= set(state_dict):
            raise ValueError(
                "the checkpoint has no place of a loader of hf_lance_stream.lightning: got "
                f"{str(state_dict)[:100]!r}; was it saved with another train_dataloader?"
            )
        is_other = state_dict["rows_per_step"] != self._rows_per_step
        if is_other and not state_dict["finished"]:
            raise ValueError(
                f"the checkpoint was saved with {state_dict['rows_per_step']} rows per batch of "
                f"all ranks, now there are {self._rows_per_step}, so that Lightning would count "
                "the batches of the epoch wrongly: keep world_size x batch_size"
            )
        before = length_of(self.loader)
        self._ranks.load_state_dict(state_dict)
        if length_of(self.loader) != before:
            self._tell_length()
        self._epoch, self._batches = state_dict["epoch"], state_dict["batches"]
        self._is_placed = not state_dict["finished"]
        self._recent.clear()

    def _tell_length(self) -> None:
        """Let Lightning count the batches anew: a state went to another version of the table.

        Private: it has counted them just before it loads the states, and keeps the number of
        batches of each loader, cut to `limit_train_batches`, in the `limits` of all loaders.
        """
        combined, limit = self._trainer.fit_loop._combined_loader, self._trainer.limit_train_batches
        if combined is None or self not in combined.flattened:
            return
        length = len(self)
        most = limit if isinstance(limit, int) else int(length * limit)
        combined.limits[combined.flattened.index(self)] = min(length, most)
