"""Stream Lance and LanceDB tables into training as Hugging Face datasets.

Importing the package registers the builder ``"lance_stream"`` with `datasets`.
"""

import importlib

from hf_lance_stream.bad_rows import BadRowError
from hf_lance_stream.builder import register
from hf_lance_stream.dataset import LanceIterableDataset
from hf_lance_stream.factory import from_lance
from hf_lance_stream.lazy import BlobFile, LazyBlob
from hf_lance_stream.loader import stateful_dataloader
from hf_lance_stream.merge import merge_state_dicts
from hf_lance_stream.progress import progress
from hf_lance_stream.quality import (
    ShuffleQuality,
    buffer_shuffle_positions,
    plot_shuffles,
    shuffle_quality,
)
from hf_lance_stream.rank_states import RankStates
from hf_lance_stream.ranks import PortableState, data_parallel_rank, gather_state_dict
from hf_lance_stream.stats import ReadStats
from hf_lance_stream.suggest import suggest_num_splits
from hf_lance_stream.versions import pin, unpin
from hf_lance_stream.writing import Written, write_lance

__all__ = [
    "BadRowError",
    "BlobFile",
    "LanceIterableDataset",
    "LazyBlob",
    "PortableState",
    "RankStates",
    "ReadStats",
    "ShuffleQuality",
    "Written",
    "buffer_shuffle_positions",
    "data_parallel_rank",
    "from_lance",
    "gather_state_dict",
    "merge_state_dicts",
    "pin",
    "plot_shuffles",
    "progress",
    "register",
    "shuffle_quality",
    "stateful_dataloader",
    "suggest_num_splits",
    "unpin",
    "write_lance",
]
__version__ = "0.1.0"

register()


def __getattr__(name: str) -> object:
    if name in ("accelerate", "lightning", "trainer"):  # not everybody has what they import
        return importlib.import_module(f"hf_lance_stream.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
