"""Stream Lance and LanceDB tables into training as Hugging Face datasets.

Importing the package registers the builder ``"lance_stream"`` with `datasets`.
"""

from hf_lance_stream.builder import register
from hf_lance_stream.dataset import LanceIterableDataset, from_lance

__all__ = ["LanceIterableDataset", "from_lance", "register"]
__version__ = "0.1.0"

register()
