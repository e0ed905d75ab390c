"""`ReadAhead`: all items in order, one ahead at most, and nobody waits for ever."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from dflash_deploy.exporter.read_ahead import ReadAhead


def nothing() -> None:
    pass


def test_items_come_in_order_and_one_is_read_ahead() -> None:
    reader: ReadAhead[int] = ReadAhead(nothing)
    read: list[int] = []

    def noted(numbers: range) -> Iterator[int]:
        for number in numbers:
            read.append(number)
            yield number

    used = 0
    for items in [reader.start(noted(range(start, start + 5))) for start in (0, 5, 10)]:
        for item in items:
            assert item == used
            time.sleep(0.002)
            assert len(read) <= used + 2
            used += 1
    assert read == list(range(15)) == list(range(used))
    reader.close()


def test_an_error_comes_where_the_next_item_would_and_others_go_on() -> None:
    reader: ReadAhead[int] = ReadAhead(nothing)

    def broken() -> Iterator[int]:
        yield 1
        raise OSError("gone")

    first, second = reader.start(broken()), reader.start(iter([2, 3, 4]))
    assert next(first) == 1
    with pytest.raises(OSError, match="gone"):
        next(first)
    assert list(second) == [2, 3, 4]
    reader.close()


def test_closing_ends_reader_and_user() -> None:
    reader: ReadAhead[int] = ReadAhead(nothing)
    items, behind = reader.start(iter(range(1000))), reader.start(iter(range(1000)))
    got: list[int] = []
    waiting = threading.Thread(target=lambda: got.extend([*items, *behind]))
    reader.close()
    waiting.start()
    waiting.join(10)
    assert not waiting.is_alive()
    assert got == list(range(len(got))) and len(got) <= 2
