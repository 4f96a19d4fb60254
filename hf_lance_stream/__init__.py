"""Stream Lance and LanceDB tables into training as Hugging Face datasets.

Importing the package registers the builder ``"lance_stream"`` with `datasets`.
"""

from hf_lance_stream.builder import register
from hf_lance_stream.dataset import LanceIterableDataset
from hf_lance_stream.factory import from_lance
from hf_lance_stream.loader import (
    PortableState,
    data_parallel_rank,
    gather_state_dict,
    stateful_dataloader,
)
from hf_lance_stream.merge import merge_state_dicts

__all__ = [
    "LanceIterableDataset",
    "PortableState",
    "data_parallel_rank",
    "from_lance",
    "gather_state_dict",
    "merge_state_dicts",
    "register",
    "stateful_dataloader",
]
__version__ = "0.1.0"

register()
