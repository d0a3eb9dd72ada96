"""How many images are read ahead: as many as keep a store busy, and no more bytes than a worker has room for."""

import threading
import time
from dataclasses import dataclass, field
from typing import Any

import pytest

from mdsmix.images import reader
from mdsmix.images.reader import AHEAD_BYTES, IN_FLIGHT, ImageReader
from mdsmix.storage import Stat


@dataclass
class Store:
    """What is asked for and not handed on yet."""

    held: int = 0
    most: int = 0
    lock: Any = field(default_factory=threading.Lock)


@dataclass
class Asked:
    store: Store
    size: int
    is_store = True

    def fetch(self, _: int) -> tuple[Stat, bytes]:
        with self.store.lock:
            self.store.held += 1
            self.store.most = max(self.store.most, self.store.held)
        time.sleep(0.002)
        return Stat(self.size, ""), bytes(self.size)


def most_held(reader: ImageReader, sizes: list[int]) -> int:
    store = Store()
    for image in reader._ahead([(Asked(store, size), None) for size in sizes]):  # type: ignore
        with store.lock:
            store.held -= 1
        assert not image.reason
    return store.most


def test_large_images_are_read_ahead_within_the_bytes_that_a_worker_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And before an image was seen few are read."""
    monkeypatch.setattr(reader, "find", lambda place, *_: place)
    assert most_held(ImageReader(judges=False), [8 << 20] * 12) <= 4 + 1
    for size in (1 << 20, 40 << 20):
        small = ImageReader(judges=False)
        most_held(small, [1000] * 200)
        assert IN_FLIGHT / 2 <= most_held(small, [1000] * 200) <= IN_FLIGHT
        most_held(small, [size] * 3)
        assert most_held(small, [size] * 6) <= max(1, AHEAD_BYTES // size) + 1
        assert most_held(small, [size, 1000, 1000] * 4) <= max(1, AHEAD_BYTES // size) + 6
