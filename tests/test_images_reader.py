"""Where the path of an image leads, or that it leads out; what is held of images, and for how long:
bounds of memory, which no published byte shows.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mdsmix.errors import Unreachable
from mdsmix.images import fetching, reader
from mdsmix.images.fetching import locate_image
from mdsmix.images.judge import BadImage
from mdsmix.images.reader import ImageReader, WindowImages
from mdsmix.record import RichConversation
from mdsmix.storage import Stat, locate
from tests.pictures import drawing, write_drawings

HUB = "hf://datasets/org/name@v2/talks"


def test_a_path_begins_at_its_folder_or_stands_for_itself_or_is_bad() -> None:
    for base, path, url in (
        ("/data", "img/0.jpg", "/data/img/0.jpg"),
        ("/data", "../0.jpg", "/0.jpg"),
        ("/data", "/x/0.jpg", "/x/0.jpg"),
        ("/data", "file:///x/a%20b.jpg", "/x/a b.jpg"),
        ("/data", "a%20b.jpg", "/data/a%20b.jpg"),
        ("/data", "s3://bucket/0.jpg", "s3://bucket/0.jpg"),
        ("s3://bucket/a", "img//./0.jpg", "s3://bucket/a/img/0.jpg"),
        ("s3://bucket/a", "../0.jpg", "s3://bucket/0.jpg"),
        ("s3://bucket", "0.jpg", "s3://bucket/0.jpg"),
        ("s3://bucket/a", "/x/0.jpg", "/x/0.jpg"),
        (HUB, "img/0.jpg", f"{HUB}/img/0.jpg"),
        (HUB, "../0.jpg", "hf://datasets/org/name@v2/0.jpg"),
    ):
        assert locate_image(path, locate(base)) == locate(url), (base, path)
    for base, path, why in (
        ("s3://bucket/a", "../../0.jpg", "it leads out of the bucket bucket"),
        ("s3://bucket", "../0.jpg", "it leads out of the bucket bucket"),
        (HUB, "../../x/0.jpg", "it leads out of the data set datasets/org/name@v2"),
        ("/data", "a\0.jpg", "a path cannot contain a NUL character"),
        ("/data", "a\ud800.jpg", "surrogates not allowed"),
    ):
        with pytest.raises(BadImage, match=why):
            locate_image(path, locate(base))


def test_where_nothing_may_be_outside_what_leads_out_is_bad(tmp_path: Path) -> None:
    """Of a folder with an image, with a link to one beside it, and one to a folder outside; itself
    behind a link.
    """
    folder, real = tmp_path / "img", tmp_path / "real/img"
    real.mkdir(parents=True)
    folder.symlink_to(real)
    for name in ("real/img/0.jpg", "secret.jpg", "real/img2.jpg"):
        (tmp_path / name).write_bytes(b"")
    (real / "link.jpg").symlink_to(tmp_path / "secret.jpg")
    (real / "up").symlink_to(tmp_path)
    within = ["0.jpg", "./up/img/0.jpg", f"{folder}/0.jpg", f"{real}/0.jpg", f"file://{real}/0.jpg", "gone.jpg", "http://a/x.jpg"]  # fmt: skip
    for path in within:
        assert locate_image(path, locate(folder), inside=True)
    out = ["../secret.jpg", "link.jpg", "up/secret.jpg", f"{real}2.jpg", "/etc/passwd", "file:///etc/passwd", "s3://bucket/0.jpg", "hf://datasets/a/b/c"]  # fmt: skip
    for path in out:
        assert locate_image(path, locate(folder))
        with pytest.raises(BadImage, match=r"images\.outside is refuse") as bad:
            locate_image(path, locate(folder), inside=True)
        assert bad.value.reason == "bad_image_path"


def talk(*images: str | bytes) -> RichConversation:
    return RichConversation([], None, None, list(images))


def read(folder: Path, *images: str | bytes) -> Any:
    """The images of a conversation, or its reason."""
    (found,) = ImageReader(root=locate(str(folder))).read([talk(*images)])
    return getattr(found, "images", found)


def test_few_bytes_are_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as it is the same image."""
    paths = write_drawings(tmp_path, 6)
    stored = [path.read_bytes() for path in paths]
    monkeypatch.setattr(reader, "KEEP_BYTES", len(stored[0]) + len(stored[1]))
    found = read(tmp_path, *(path.name for path in paths))
    held = [image.data for image in found]
    assert held[0] == stored[0]
    assert sum(map(len, filter(None, held))) <= reader.KEEP_BYTES
    assert [image.content for image in found] == stored
    again = held.index(None)
    paths[again].write_bytes(drawing(seed=77))
    with pytest.raises(Unreachable, match="was changed"):
        _ = found[again].content


def test_a_too_large_record_is_bad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = len(drawing())
    monkeypatch.setattr(reader, "MOST_ROW_BYTES", 2 * size)
    assert isinstance(read(tmp_path, drawing(), drawing()), list)
    bad = read(tmp_path, drawing(), drawing(), drawing())
    assert bad == "images_too_large"
    assert bad.detail == {"bytes": 3 * size, "most": 2 * size}
    (tmp_path / "0.jpg").write_bytes(drawing())
    for most, is_read in ((size, True), (size - 1, False)):
        monkeypatch.setattr(fetching, "MOST_BYTES", most)
        assert (read(tmp_path, "0.jpg") != "image_file_too_large") is is_read


def test_a_window_is_known_by_each_of_its_images_and_their_order(tmp_path: Path) -> None:
    """By what is bad of them too: an image that is there again is another window."""
    write_drawings(tmp_path, 2)

    def digest(*talks: RichConversation) -> str:
        reader = ImageReader({"max_images": 2}, locate(str(tmp_path)))
        reader.read(talks)
        return reader.window_images.digest

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
    found = [reader.read([talk("0.jpg")])[0] for reader in readers]
    assert [isinstance(each, str) for each in found] == [False, True, True, False]
    (tmp_path / "empty.jpg").touch()  # a file that is not there is no empty one
    readers[0].read([talk("empty.jpg", "lost.jpg")])
    sizes = {
        url.rpartition("/")[2]: stamp[0] for url, stamp in readers[0].window_images.stamps.items()
    }
    assert (sizes["empty.jpg"], sizes["lost.jpg"]) == (0, -1)


def test_large_images_are_read_ahead_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small ones as many as keep a store busy; before an image was seen few are read."""
    asked = list[int]()

    def fetch(size: int, _: int) -> tuple[Stat, bytes]:
        asked.append(size)
        return Stat(size, ""), bytes(size)

    def most_held(images: ImageReader, size: int, count: int) -> int:
        asked.clear()
        place = SimpleNamespace(is_store=True, fetch=partial(fetch, size))
        most = 0
        for number, _ in enumerate(images._read_ahead([(place, None)] * count)):  # type: ignore
            time.sleep(0.01)
            most = max(most, len(asked) - number)
        return most

    monkeypatch.setattr(reader, "locate_image", lambda place, *_: place)
    images = ImageReader(judges=False)
    assert most_held(images, 8 << 20, 12) <= 4 + 1
    most_held(images, 1000, 50)
    assert most_held(images, 1000, 40) > reader.IN_FLIGHT / 2
    most_held(images, 40 << 20, 3)
    assert most_held(images, 40 << 20, 6) <= 2
