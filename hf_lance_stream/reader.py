"""Ordered read-ahead: chunks are read by background threads while the consumer works."""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from time import perf_counter

from hf_lance_stream.chunks import Chunk
from hf_lance_stream.stats import Counters

MAX_ROWS = 8192  # of a chunk, so that the first of many small rows comes soon
MAX_CHUNKS = 16  # that are read, or wait for the consumer, beside the one it has


def read_ahead(
    read: Callable[[int, int], Chunk],
    begin: int,
    end: int,
    chunk: int,
    *,
    budget: int,
    chunk_bytes: int = 8 << 20,
    num_threads: int = 2,
    counters: Counters | None = None,
    by_rows: bool = True,
) -> Iterator[tuple[int, Chunk]]:
    """Yield ``(stop, read(start, stop))`` for the chunks of ``[begin, end)``, in order.

    Chunks end at multiples of `chunk`, wherever the reading begins, so that a resumed reader
    cuts its rows at the same places, unless it goes `by_rows`. As many chunks are read ahead as
    the budget holds, at least one, by the size of those read so far. Closing the iterator ends
    the threads, once they have read what they were reading.

    Args:
        read: reads the rows ``[start, stop)``; called in other threads.
        begin: first row.
        end: one past the last row.
        chunk: rows per chunk, at least 1.
        budget: bytes that may be read ahead, at least 1.
        chunk_bytes: what a chunk should have when chunks may be of any size.
        num_threads: chunks read at the same time.
        counters: where rows, bytes and times are counted.
        by_rows: the consumer goes by rows, and chunks of any size will do: the first are small,
            later ones have as many rows as `chunk_bytes` hold by those seen so far, and what can
            be read of a chunk comes before an error is raised at its row. Else nothing of such a
            chunk comes; the error is that of the first row that cannot be read all the same.
    """
    if begin >= end:
        return
    counters = counters or Counters()
    spans = _Spans(begin, end, chunk, by_rows)
    pool = ThreadPoolExecutor(num_threads, thread_name_prefix="hf_lance_stream")
    pending: deque[tuple[int, int, Future[Chunk]]] = deque()
    is_left = False
    row_bytes, ahead = _RowBytes(), 2  # it starts with little: the first row shall come soon

    def submit(count: int) -> None:
        while len(pending) < count and (span := next(spans, None)) is not None:
            pending.append((*span, pool.submit(read, *span)))

    try:
        submit(ahead)
        while pending:
            asked = perf_counter()
            start, stop, future = pending.popleft()
            try:
                found = future.result()
            except Exception:
                for reached, found in _up_to_error(read, start, stop):
                    if by_rows:
                        counters.add(found.num_rows, found.nbytes, 0.0, 0)
                        yield reached, found
                # It was a fault that has passed.
                if by_rows:
                    submit(1)
                    continue
                found = read(start, stop)
            given = perf_counter()
            size = found.nbytes
            row_bytes.count(size, found.num_rows, chunk_bytes)
            if by_rows:
                fitting = int(chunk_bytes / row_bytes.estimate)
                spans.most = max(1, min(MAX_ROWS, 2 * spans.most, fitting))
            largest = int(row_bytes.estimate * spans.most)
            submit(min(ahead, max(1, budget // max(1, largest))))
            ahead = min(2 * ahead, MAX_CHUNKS)
            counters.add(found.num_rows, size, given - asked, _num_done(pending))
            del future
            yield stop, found
            del found  # the consumer is done with it
            counters.consumed(perf_counter() - given)
    except GeneratorExit:
        is_left = True
        raise
    finally:
        # Not `cancel_futures=True`: that fails when a suspended iterator is collected at exit.
        for _, _, waiting in pending:
            waiting.cancel()
        # Who leaves may be the garbage collector, in the middle of the start of another thread,
        # where joining one would wait for a lock of that start for ever.
        pool.shutdown(wait=not is_left)


class _RowBytes:
    """Bytes to expect of a row: the mean, or more for a while after a chunk that was too large."""

    def __init__(self) -> None:
        self._bytes = self._rows = 0
        self._recent = 0.0

    @property
    def estimate(self) -> float:
        """Bytes per row, at least 1."""
        return max(1.0, self._bytes / max(1, self._rows), self._recent)

    def count(self, size: int, rows: int, target: float) -> None:
        """Count a chunk of `size` bytes that should have had at most `target`."""
        self._bytes += size
        self._rows += rows
        self._recent *= 0.8
        if size > target:
            self._recent = max(self._recent, size / max(1, rows))


class _Spans(Iterator[tuple[int, int]]):
    """Start and stop of each chunk; of at most `most` rows."""

    def __init__(self, begin: int, end: int, chunk: int, by_rows: bool) -> None:
        self._start, self._end, self._chunk, self.most = begin, end, chunk, chunk
        self._by_rows = by_rows
        self._first = deque((8, 8, 4, 2) if by_rows else ())  # parts of a chunk

    def __next__(self) -> tuple[int, int]:
        start = self._start
        if start >= self._end:
            raise StopIteration
        if self._first:
            stop = start + min(self.most, max(1, self._chunk // self._first.popleft()))
        elif self._by_rows:
            stop = start + self.most
        else:
            stop = (start // self._chunk + 1) * self._chunk
        self._start = min(stop, self._end)
        return start, self._start


def _num_done(pending: deque[tuple[int, int, Future[Chunk]]]) -> int:
    return sum(future.done() for _, _, future in pending)


def _up_to_error(
    read: Callable[[int, int], Chunk], start: int, stop: int
) -> Iterator[tuple[int, Chunk]]:
    """Yield all that can be read of rows whose reading failed; raise where it fails again."""
    yield start + 1, read(start, start + 1)  # at once, if nothing can be read any more
    start += 1
    size = stop - start
    while start < stop:
        try:
            table = read(start, min(stop, start + size))
        except Exception:
            if size == 1:
                raise
            size = -(-size // 2)
            continue
        start += table.num_rows
        yield start, table
