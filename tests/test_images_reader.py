"""What is held of images, and for how long: bounds of memory, which no published byte shows."""

import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mdsmix.errors import Unreachable
from mdsmix.images import fetching, reader
from mdsmix.images.reader import ImageReader, WindowImages
from mdsmix.record import RichConversation
from mdsmix.storage import Stat, locate
from tests.pictures import drawing, write_drawings


def talk(*images: str | bytes) -> RichConversation:
    return RichConversation([], None, None, list(images))


def read(folder: Path, *images: str | bytes) -> Any:
    """The images of a conversation, or its reason."""
    (found,) = ImageReader(root=locate(str(folder))).read([talk(*images)])
    return getattr(found, "images", found)


def test_what_is_beyond_the_bound_is_not_held_and_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as it is the same image."""
    paths = write_drawings(tmp_path, 6)
    stored = [path.read_bytes() for path in paths]
    monkeypatch.setattr(reader, "KEEP_BYTES", len(stored[0]) + len(stored[1]))
    found = read(tmp_path, *(path.name for path in paths))
    assert isinstance(found, list)
    held = [len(image.data) for image in found if image.data is not None]
    assert found[0].data == stored[0]
    assert sum(held) <= reader.KEEP_BYTES
    assert [image.content for image in found] == stored
    again = next(n for n, image in enumerate(found) if image.data is None)
    paths[again].write_bytes(drawing(seed=77))
    with pytest.raises(Unreachable, match="was changed"):
        _ = found[again].content


def test_verdicts_are_remembered_up_to_a_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So an image that records share is decoded once."""
    decoded, real = list[object](), reader.size_of
    monkeypatch.setattr(reader, "_known", {})
    monkeypatch.setattr(reader, "MOST_KNOWN", 2)
    monkeypatch.setattr(reader, "size_of", lambda *of: decoded.append(of) or real(*of))
    for number, path in enumerate(write_drawings(tmp_path, 5), 1):
        assert [image.width for _ in range(3) for image in read(tmp_path, path.name)]
        assert len(reader._known) <= 2
        assert len(decoded) == number


def test_a_record_of_more_bytes_than_a_shard_has_offsets_for_is_bad(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = len(drawing())
    monkeypatch.setattr(reader, "MOST_ROW_BYTES", 2 * size)
    assert isinstance(read(tmp_path, drawing(), drawing()), list)
    bad = read(tmp_path, drawing(), drawing(), drawing())
    assert bad == "images_too_large"
    assert bad.detail == {"bytes": 3 * size, "most": 2 * size}
    (tmp_path / "0.jpg").write_bytes(drawing())
    for most, reason in ((size, ""), (size - 1, "image_file_too_large")):
        monkeypatch.setattr(fetching, "MOST_BYTES", most)
        found = read(tmp_path, "0.jpg")
        assert (found if isinstance(found, str) else "") == reason


def test_a_window_is_known_by_each_of_its_images_and_their_order(tmp_path: Path) -> None:
    """By what is bad of them too: an image that is there again is another window."""
    write_drawings(tmp_path, 2)

    def digest(*talks: RichConversation) -> str:
        reader = ImageReader({"max_images": 2}, locate(str(tmp_path)))
        reader.read(talks)
        return reader.seen.digest

    both = ("0.jpg", "1.png")
    talks = [talk(), talk(*both), talk(*both[::-1]), talk("0.jpg"), talk("0.jpg", "0.jpg")]
    talks += [talk("0.jpg", "lost.jpg"), talk("0.jpg", b"no image"), talk("0.jpg", *both)]
    found = [digest(each) for each in talks]
    assert len(set(found)) == len(talks)
    assert found[0] == WindowImages().digest == ""
    assert digest(talk("0.jpg"), talk("1.png")) == found[1], "whichever record has it"
    assert digest(talk(*both), talk("0.jpg", *both)) != found[1]


def test_an_image_is_judged_by_the_rules_of_its_stream_alone(tmp_path: Path) -> None:
    """Whatever another stream of this process asked of it before."""
    write_drawings(tmp_path, 1)
    settings = ({}, {"max_pixels": 5}, {"max_pixels": 5, "decode": "header"}, {})
    readers = [ImageReader(each, locate(str(tmp_path))) for each in settings]
    assert [(r.rules.decode, r.rules.max_pixels == 5) for r in readers[1:3]] == [("full", True), ("header", True)]  # fmt: skip
    found = [*(read for reader in readers for read in reader.read([talk("0.jpg")]))]
    assert [not isinstance(each, str) for each in found] == [True, False, False, True]
    (tmp_path / "empty.jpg").touch()  # a file that is not there is no empty one
    readers[0].read([talk("empty.jpg", "lost.jpg")])
    sizes = {url.rpartition("/")[2]: stamp[0] for url, stamp in readers[0].seen.stamps.items()}
    assert (sizes["empty.jpg"], sizes["lost.jpg"]) == (0, -1)


def test_large_images_are_read_ahead_within_the_bytes_that_a_worker_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Small ones as many as keep a store busy; before an image was seen few are read."""
    asked, lock = list[int](), threading.Lock()

    def fetch(size: int, _: int) -> tuple[Stat, bytes]:
        with lock:
            asked.append(size)
        return Stat(size, ""), bytes(size)

    def most_held(images: ImageReader, sizes: list[int]) -> int:
        asked.clear()
        places = [SimpleNamespace(is_store=True, fetch=partial(fetch, size)) for size in sizes]
        most = 0
        for number, _ in enumerate(images._ahead([(place, None) for place in places])):  # type: ignore
            time.sleep(0.02)
            most = max(most, len(asked) - number)
        return most

    monkeypatch.setattr(reader, "find", lambda place, *_: place)
    images = ImageReader(judges=False)
    assert most_held(images, [8 << 20] * 12) <= 4 + 1
    most_held(images, [1000] * 50)
    assert most_held(images, [1000] * 80) > reader.IN_FLIGHT / 2
    most_held(images, [40 << 20] * 3)
    assert most_held(images, [40 << 20] * 6) <= max(1, reader.AHEAD_BYTES // (40 << 20)) + 1
