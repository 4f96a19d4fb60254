"""Ordered read-ahead: chunks are read by background threads while the consumer works."""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

_NUM_THREADS = 2  # one reading while another converts; more gained nothing on two cores

T = TypeVar("T")


def read_ahead(
    read: Callable[[int, int], T], begin: int, end: int, chunk: int, depth: int = 2
) -> Iterator[tuple[int, T]]:
    """Yield ``(stop, read(start, stop))`` for the chunks of ``[begin, end)``, in order.

    Chunks end at multiples of `chunk`, wherever the reading begins, so that a resumed reader
    cuts its rows at the same places. At most `depth` chunks are read ahead. An error is raised
    at the chunk it belongs to. Closing the iterator ends the threads.

    Args:
        read: reads the rows ``[start, stop)``; called in other threads.
        begin: first row.
        end: one past the last row.
        chunk: rows per chunk, at least 1.
        depth: chunks under way beside the one the consumer has.
    """
    if begin >= end:
        return
    starts = iter([begin, *range((begin // chunk + 1) * chunk, end, chunk)])
    pool = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="hf_lance_stream")
    pending: deque[tuple[int, Future[T]]] = deque()

    def submit() -> None:
        start = next(starts, None)
        if start is not None:
            stop = min(end, (start // chunk + 1) * chunk)
            pending.append((stop, pool.submit(read, start, stop)))

    try:
        for _ in range(depth + 1):
            submit()
        while pending:
            stop, future = pending.popleft()
            result = future.result()
            submit()
            yield stop, result
            del result, future  # the consumer is done with it
    finally:
        # Not `cancel_futures=True`: that fails when a suspended iterator is collected at exit.
        for _, waiting in pending:
            waiting.cancel()
        pool.shutdown(wait=True)
