"""Lance and other processes: forked children, and workers whose parent has died.

Lance's runtime has threads, and a forked child has none of them: whatever it reads hangs or
crashes. So a child forked after Lance ran refuses to read, at once and in words.
"""

import multiprocessing
import os
import threading
from collections.abc import Callable
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import dill

_RUNTIME_THREADS = "lance"  # beginning of the names of the threads of Lance's runtimes

_ran_before_fork = False
_is_unsafe = False


def refuse_unsafe_fork() -> None:
    """Raise RuntimeError in a process that was forked after Lance ran in its parent."""
    if _is_unsafe:
        raise RuntimeError(
            "this process was forked after Lance was used in its parent, and Lance cannot read in "
            "such a process. Start workers another way: use hls.stateful_dataloader, or give the "
            'DataLoader multiprocessing_context="forkserver" or "spawn"'
        )


def _lance_runs() -> bool:
    try:
        tasks = list(Path("/proc/self/task").iterdir())
    except OSError:  # no such place outside Linux
        return False
    return any(_name(task).startswith(_RUNTIME_THREADS) for task in tasks)


def _name(task: Path) -> str:
    try:
        return (task / "comm").read_text()
    except OSError:  # the thread has ended
        return ""


def _before_fork() -> None:
    global _ran_before_fork
    _ran_before_fork = _lance_runs()


def _after_fork_in_child() -> None:
    global _is_unsafe
    _is_unsafe = _is_unsafe or _ran_before_fork


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_child=_after_fork_in_child)


def is_starting_child() -> bool:
    """Whether what is pickled now goes to a child process that is being started, and nowhere else.

    Private: `multiprocessing` protects its own `AuthenticationString` by this very question.
    """
    return get_spawning_popen() is not None


class ByDill:
    """A function that reaches a worker also if it is a lambda or a local function.

    Args:
        function: the function.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *args: Any) -> Any:
        """Call it."""
        return self.function(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        try:
            ForkingPickler.dumps(self.function)
        except Exception:
            return _by_dill, (dill.dumps(self.function, recurse=True),)
        return ByDill, (self.function,)


def _by_dill(function: bytes) -> ByDill:
    return ByDill(dill.loads(function))


class WorkerInit:
    """A `worker_init_fn` that ends a worker when the process that reads from it has died.

    PyTorch's workers watch their parent's process id, which under forkserver is that of the
    server; and the server lives as long as one of them. So they would outlive a killed job.

    Args:
        function: the user's `worker_init_fn`, called after that.
    """

    def __init__(self, function: Callable[[int], Any] | None) -> None:
        self.function = function

    def __call__(self, worker: int) -> None:
        """Run in a worker, with its number, before it reads."""
        parent = multiprocessing.parent_process()
        if parent is not None:
            threading.Thread(target=_exit_after, args=(parent,), daemon=True).start()
        if self.function is not None:
            self.function(worker)


def _exit_after(parent: Any) -> None:
    parent.join()
    os._exit(1)
