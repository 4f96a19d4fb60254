"""What the forkserver of a loader imports before it forks workers.

Lance warns at every fork. Here it is imported but has not run, which is safe.
"""

import warnings

import hf_lance_stream  # noqa: F401

warnings.filterwarnings("ignore", "lance is not fork-safe", UserWarning)
