"""Hugging Face `Trainer` on Lance datasets: every row once over all GPUs, an exact resume at once.

Importing this module imports `transformers`; importing the package does not.
"""

import multiprocessing
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
import torch.distributed as dist

try:
    import transformers.trainer
    from transformers import Trainer
    from transformers.trainer_callback import TrainerState
    from transformers.trainer_utils import get_last_checkpoint

    from hf_lance_stream.evaluation import EvalLoader
except ImportError as error:
    raise ImportError(
        "hf_lance_stream.trainer needs transformers and accelerate: "
        'pip install "hf_lance_stream[trainer]"'
    ) from error

from hf_lance_stream.checkpoint import STATE_NAME, read_states, write_states
from hf_lance_stream.dataset import LanceIterableDataset
from hf_lance_stream.loader import LanceDataLoader, stateful_dataloader
from hf_lance_stream.merge import merge_state_dicts
from hf_lance_stream.plan import unequal_lengths
from hf_lance_stream.ranks import length_of, part_of_rank

_Base: Any = Trainer if TYPE_CHECKING else object


class StatefulTrainerMixin(_Base):  # type: ignore[misc]
    """Lance datasets in `transformers.Trainer` and its subclasses, TRL's too.

    ``class MyTrainer(StatefulTrainerMixin, SFTTrainer)``. Give `train_dataset` whole: the mixin
    divides it among the ranks, makes it a `hls.stateful_dataloader`, gives each epoch its order,
    and writes the loader states of all ranks to ``loader_state.json`` in each checkpoint, before
    Trainer counts it as complete. ``train(resume_from_checkpoint=…)`` goes on with the very next
    batch and reads none of those before. On another number of ranks or workers the states are
    merged; the rows of a step must be as many as before.

    Every rank evaluates its part of each batch of an `eval_dataset` of Lance tables, also of
    ragged rows. Datasets of other kinds are treated as Trainer treats them.

    Raises:
        ValueError: for a dataset divided otherwise than by these ranks, ranks with unequal
            numbers of batches, a setting of accelerate that would change the batches, or a
            checkpoint with a loader state that is missing, damaged or of something else. With
            ``ignore_data_skip=True`` a missing one starts its epoch anew, with a warning.
    """

    loader_state_strict = True
    """Set to False to go on at the same place of a table that differs."""

    loader_state_allow_moved = False
    """Set to True to go on with the same table at another place."""

    _checkpoint: str | None = None  # the one to resume from, while `train` runs
    _rng_is_of: Any = None  # the loader for which the random state has been restored
    _before_step: tuple[int, dict[str, Any]] | None = None  # step, and the state before its rows

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        order = cls.__mro__
        if Trainer in order and order.index(Trainer) < order.index(StatefulTrainerMixin):
            raise TypeError(
                f"StatefulTrainerMixin must come before the trainer: got class {cls.__name__}"
                f"({', '.join(base.__name__ for base in cls.__bases__)}); turn the bases round"
            )

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train; see `transformers.Trainer.train`."""
        if resume_from_checkpoint is True:  # Trainer raises if there is none
            resume_from_checkpoint = get_last_checkpoint(self.args.output_dir) or True  # type: ignore[no-untyped-call]
        if isinstance(resume_from_checkpoint, str | os.PathLike):
            self._checkpoint = os.fspath(resume_from_checkpoint)
        ignores_data_skip = self.args.ignore_data_skip
        try:
            return super().train(resume_from_checkpoint, *args, **kwargs)
        finally:
            loader = self.callback_handler.train_dataloader
            if isinstance(loader, LanceDataLoader) and loader.num_workers:
                loader.load_state_dict({})  # ends its workers, where it was stopped in an epoch
            self._checkpoint, self._rng_is_of, self._before_step = None, None, None
            self.args.ignore_data_skip = ignores_data_skip

    # Loaders. Private: get_train_dataloader, get_eval_dataloader and get_test_dataloader all get
    # theirs here. Trainer takes a loader as it is and moves the tensors itself.

    def _get_dataloader(
        self,
        dataset: Any,
        description: str,
        batch_size: int,
        sampler_fn: Callable[..., Any] | None = None,
        is_training: bool = False,
        dataloader_key: str | None = None,
    ) -> Any:
        if not isinstance(dataset, LanceIterableDataset):
            return super()._get_dataloader(
                dataset, description, batch_size, sampler_fn, is_training, dataloader_key
            )
        rank, world_size = self._data_rank()
        args = self.args
        options = {
            "collate_fn": self._get_collator_with_removed_columns(self.data_collator, description),
            "pin_memory": args.dataloader_pin_memory and torch.accelerator.is_available(),
            "multiprocessing_context": args.dataloader_multiprocessing_context,
            "prefetch_factor": args.dataloader_prefetch_factor,
        }
        if not is_training:
            workers = args.dataloader_num_workers
            return EvalLoader(dataset, batch_size, workers, rank, world_size, **options)
        _check_accelerator_config(args.accelerator_config)
        options |= {
            "drop_last": args.dataloader_drop_last,
            "persistent_workers": args.dataloader_persistent_workers,
            "in_order": args.dataloader_in_order,
        }
        loader, problem = None, None
        try:
            part = part_of_rank(dataset, rank, world_size)
            loader = stateful_dataloader(part, batch_size, args.dataloader_num_workers, **options)
            if self._checkpoint is not None:  # before ranks compare lengths: a table has moved on
                self._restore(loader, Path(self._checkpoint))
        except (ValueError, FileNotFoundError) as error:
            problem = str(error)
        self._check_ranks(loader, problem)
        assert loader is not None
        # For the collators, which workers would import transformers for, each of them.
        multiprocessing.set_forkserver_preload(["hf_lance_stream.preload", __name__])
        return loader

    def _check_ranks(self, loader: LanceDataLoader | None, problem: str | None) -> None:
        """Raise on every rank what one found, so that none waits for those that have left."""
        found = self._gather((problem, length_of(loader) if loader is not None else None))
        problems = [problem for problem, _ in found if problem is not None]
        if problems:
            raise ValueError(problems[0])
        message = unequal_lengths([length for _, length in found])
        if message is not None:
            raise ValueError(message)

    def num_examples(self, dataloader: Any) -> int:
        """Rows of an epoch, all ranks together."""
        number: int = super().num_examples(dataloader)
        return number * self._data_rank()[1] if isinstance(dataloader, LanceDataLoader) else number

    def _data_rank(self) -> tuple[int, int]:
        """Data-parallel rank and size, as Trainer and accelerate count them."""
        if self.get_sp_size() > 1:
            raise ValueError(
                "sequence parallelism deals the rows out in a way of its own, which is not "
                f"supported with Lance datasets: got a size of {self.get_sp_size()}"
            )
        copies = self.get_tp_size() * self.get_cp_size()  # ranks that read the same rows
        return self.args.process_index // copies, self.args.world_size // copies

    def _gather(self, value: Any) -> list[Any]:
        """`value` of each process."""
        if self.args.world_size == 1:
            return [value]
        values = [None] * self.args.world_size
        dist.all_gather_object(values, value)
        return values

    # Steps. Trainer restores the random state of a checkpoint after the first batches were
    # collated, which is too late for a collator that draws.

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        """The batches of one step; see `transformers.Trainer.get_batch_samples`."""
        loader = self.callback_handler.train_dataloader
        if isinstance(loader, LanceDataLoader):
            self._load_rng_state(self._checkpoint)
            self._before_step = self.state.global_step, loader.state_dict()
        return super().get_batch_samples(epoch_iterator, num_batches, device)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        loader = self.callback_handler.train_dataloader
        if not (isinstance(loader, LanceDataLoader) and self._rng_is_of is loader):
            super()._load_rng_state(checkpoint)  # does nothing without a checkpoint
        self._rng_is_of = loader

    # State. Private: `_save_rng_state` runs on every rank with the directory of the checkpoint,
    # before the file of Trainer's state, the push to the hub and the rotation.

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        loader = self.callback_handler.train_dataloader
        if not isinstance(loader, LanceDataLoader):
            if isinstance(_dataset_of(loader), LanceIterableDataset):
                warnings.warn(
                    f"{output_dir} has no loader state, so that a resume will read everything "
                    "again: get_train_dataloader must return a loader of hls.stateful_dataloader, "
                    f"got {type(loader).__name__}",
                    stacklevel=2,
                )
            return
        step = self.state.global_step
        if self._before_step is not None and self._before_step[0] == step:
            state = self._before_step[1]  # saved in the middle of a step, which will be redone
        else:
            state = loader.state_dict()
        states = self._gather({"global_step": step, "state": state})
        if any(saved["global_step"] != step for saved in states):
            steps = [saved["global_step"] for saved in states]
            raise RuntimeError(f"the ranks save a checkpoint at different steps: {steps}")
        if self.args.should_save:
            write_states(
                Path(output_dir),
                {
                    "global_step": step,
                    "num_workers": loader.num_workers,
                    **self._counts(loader),
                    "states": [saved["state"] for saved in states],
                },
            )

    def _counts(self, loader: LanceDataLoader) -> dict[str, int | None]:
        """What must be the same when a run goes on, so that Trainer counts its steps alike."""
        batches = length_of(loader)
        accumulated = self.args.gradient_accumulation_steps
        return {
            "rows_per_step": loader.batch_size * accumulated * self._data_rank()[1],
            "steps_per_epoch": None if batches is None else max(1, -(-batches // accumulated)),
        }

    def _restore(self, loader: LanceDataLoader, checkpoint: Path) -> None:
        """Let the loader go on where it was at the checkpoint."""
        if not (checkpoint / STATE_NAME).exists() and self.args.ignore_data_skip:
            warnings.warn(
                f"{checkpoint} has no {STATE_NAME}: because of ignore_data_skip=True its epoch is "
                "started anew, and rows it has seen are seen again",
                stacklevel=2,
            )
            return
        trainer_state = checkpoint / "trainer_state.json"
        if not trainer_state.is_file():
            raise ValueError(
                f"{trainer_state} is missing: {checkpoint} is no checkpoint of Trainer"
            )
        step = TrainerState.load_from_json(str(trainer_state)).global_step
        saved = read_states(checkpoint, step)
        self._load(loader, saved, checkpoint)
        counts = self._counts(loader)
        lines = [f"{k}: saved {saved.get(k)}, now {v}" for k, v in counts.items() if saved[k] != v]
        if lines:
            raise ValueError(
                f"{checkpoint} was saved with another number of rows per step or epoch, so its "
                f"steps count otherwise ({'; '.join(lines)}): keep world_size x "
                "per_device_train_batch_size x gradient_accumulation_steps, and the dataset"
            )
        steps = counts["steps_per_epoch"]
        first = loader.dataset.epoch
        if steps is None:  # Trainer then takes the whole training for one epoch
            _count_epochs_from(loader, first - step // max(1, self.args.max_steps))
        elif first != step // steps and (first + 1) * steps != step:
            raise ValueError(
                f"{checkpoint} stands in epoch {first} at step {step}, but an epoch has {steps} "
                "steps: an epoch was stopped early, after which Trainer cannot count them"
            )
        self.args.ignore_data_skip = False  # nothing is read for it, and steps are counted right
        _restored.add(loader)

    def _load(self, loader: LanceDataLoader, saved: dict[str, Any], checkpoint: Path) -> None:
        states = saved["states"]
        if (len(states), saved["num_workers"]) == (self.args.world_size, loader.num_workers):
            state = states[self.args.process_index]
        else:
            state = merge_state_dicts(states)
        try:
            loader.load_state_dict(
                state, self.loader_state_strict, allow_moved=self.loader_state_allow_moved
            )
        except (ValueError, FileNotFoundError) as error:
            raise ValueError(
                f"{checkpoint} does not fit `train_dataset`: {error}\nHere strict=False is "
                "`trainer.loader_state_strict = False`, and allow_moved=True is "
                "`trainer.loader_state_allow_moved = True`."
            ) from error


class StatefulTrainer(StatefulTrainerMixin, Trainer):
    """`transformers.Trainer` for Lance datasets; see `StatefulTrainerMixin`.

    Example:
        >>> import torch, hf_lance_stream as hls
        >>> from transformers import TrainingArguments
        >>> from hf_lance_stream.trainer import StatefulTrainer
        >>> class Model(torch.nn.Linear):
        ...     def forward(self, id):
        ...         return {"loss": super().forward(id[:, None] / 100).mean()}
        >>> path = write_example_table(rows=100)
        >>> ds = hls.from_lance(path, num_splits=4, shuffle_seed=1)
        >>> args = TrainingArguments(path + ".run", use_cpu=True, report_to="none", max_steps=30)
        >>> trainer = StatefulTrainer(Model(1, 1), args, train_dataset=ds)
        >>> trainer.train().global_step  # doctest: +ELLIPSIS
        {...}
        30
    """


def _check_accelerator_config(config: Any) -> None:
    if config.split_batches:
        raise ValueError(
            "`split_batches` must be False: got accelerator_config split_batches=True; with Lance "
            "datasets per_device_train_batch_size is the rows of one rank"
        )
    if config.dispatch_batches:
        warnings.warn(
            "dispatch_batches=True has no effect: every rank reads its own rows of a Lance dataset",
            stacklevel=4,
        )


def _count_epochs_from(loader: LanceDataLoader, first: int) -> None:
    """Let Trainer's epoch 0 be the epoch `first` of the loader."""
    set_epoch = loader.set_epoch
    loader.set_epoch = lambda epoch: set_epoch(first + epoch)  # type: ignore[method-assign]


# Private: Trainer calls this name of its module to go to the place of a checkpoint in an epoch.
# Our loaders are there already, which Trainer cannot be told; and it must count the steps before.

_restored: WeakSet[LanceDataLoader] = WeakSet()
_read_and_drop = transformers.trainer.skip_first_batches  # type: ignore[attr-defined]


def _dataset_of(dataloader: Any) -> Any:
    """The dataset of a loader, also of one that accelerate has made of it."""
    dataset = getattr(dataloader, "dataset", None)
    return getattr(dataset, "dataset", dataset)


def _skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
    if dataloader in _restored:
        return dataloader
    if isinstance(_dataset_of(dataloader), LanceIterableDataset):
        warnings.warn(
            f"Trainer resumes by reading {num_batches} batches of this epoch again and dropping "
            "them, which takes as long as they took before: hls.trainer.StatefulTrainer (or "
            "StatefulTrainerMixin) goes on at once",
            stacklevel=3,
        )
    return _read_and_drop(dataloader, num_batches)


transformers.trainer.skip_first_batches = _skip_first_batches  # type: ignore[attr-defined]
