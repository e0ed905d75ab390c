"""Things that take long to get, got in a thread of their own while the last ones are still in use."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")

_AT_ONCE = 2  # one in use, one being read


class ReadAhead(Generic[T]):
    """Goes through iterables one after another, at most one item ahead of who uses them."""

    def __init__(self, initializer: Callable[[], None]) -> None:
        """Start nothing yet; `initializer` is called once in the thread."""
        self._thread = ThreadPoolExecutor(1, initializer=initializer)
        self._room = threading.Semaphore(_AT_ONCE)
        self._closed = threading.Event()

    def start(self, items: Iterable[T]) -> Iterator[T]:
        """Go through `items` when those that were started before are through.

        Returns:
            The items. What is returned for several iterables must be used up in the order of the calls. An
            error of the iterable is raised where its next item would come.
        """
        queue: SimpleQueue[T | _End] = SimpleQueue()
        self._thread.submit(self._read, items, queue)
        return self._items(queue)

    def close(self) -> None:
        """End the thread; the iterables are left as they are, and whoever waits for an item gets no more."""
        self._closed.set()
        self._room.release()
        self._thread.shutdown()

    def _read(self, items: Iterable[T], queue: SimpleQueue[T | _End]) -> None:
        end = _End(None)
        try:
            iterator = iter(items)
            while self._has_room():
                queue.put(next(iterator))
        except StopIteration:
            self._room.release()
        except BaseException as error:
            self._room.release()
            end = _End(error)
        queue.put(end)

    def _has_room(self) -> bool:
        """Wait until one more may be read; False if none is wanted any more."""
        self._room.acquire()
        if self._closed.is_set():
            self._room.release()  # for the next one who asks
            return False
        return True

    def _items(self, queue: SimpleQueue[T | _End]) -> Iterator[T]:
        while not isinstance(item := queue.get(), _End):
            yield item
            del item  # before there is room for another one
            self._room.release()
        if item.error is not None:
            raise item.error


class _End:
    """Behind the last item."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error
