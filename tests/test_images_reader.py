"""The path of an image leads to its file, or is refused if it leads out of its folder. Memory for
images is bounded, which no published byte shows.
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


def test_a_path_is_relative_to_its_folder_or_absolute_or_bad() -> None:
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


def test_a_path_that_leads_out_of_its_folder_is_bad_if_the_recipe_refuses_it(
    tmp_path: Path,
) -> None:
    """The folder has an image, a link to an image outside and a link to a folder outside, and is
    itself reached by a link.
    """
    folder, real = tmp_path / "img", tmp_path / "real/img"
    real.mkdir(parents=True)
    folder.symlink_to(real)
    for name in ("real/img/0.jpg", "secret.jpg", "real/img2.jpg"):
        (tmp_path / name).write_bytes(b"")
    (real / "link.jpg").symlink_to(tmp_path / "secret.jpg")
    (real / "up").symlink_to(tmp_path)
    inside_paths = [
        "0.jpg",
        "./up/img/0.jpg",
        f"{folder}/0.jpg",
        f"{real}/0.jpg",
        f"file://{real}/0.jpg",
        "gone.jpg",
        "http://a/x.jpg",
    ]
    for path in inside_paths:
        assert locate_image(path, locate(folder), inside=True)
    outside_paths = [
        "../secret.jpg",
        "link.jpg",
        "up/secret.jpg",
        f"{real}2.jpg",
        "/etc/passwd",
        "file:///etc/passwd",
        "s3://bucket/0.jpg",
        "hf://datasets/a/b/c",
    ]
    for path in outside_paths:
        assert locate_image(path, locate(folder))
        with pytest.raises(BadImage, match=r"images\.outside: refuse") as bad:
            locate_image(path, locate(folder), inside=True)
        assert bad.value.reason == "bad_image_path"


def talk(*images: str | bytes) -> RichConversation:
    return RichConversation([], None, None, list(images))


def read(folder: Path, *images: str | bytes) -> Any:
    """Return the images of a conversation, or the reason why it is bad."""
    (answer,) = ImageReader(root=locate(str(folder))).read([talk(*images)])
    return getattr(answer, "images", answer)


def test_few_bytes_of_images_are_kept_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Images that are not kept are read again, and refused if they have changed."""
    paths = write_drawings(tmp_path, 6)
    stored = [path.read_bytes() for path in paths]
    monkeypatch.setattr(reader, "KEEP_BYTES", len(stored[0]) + len(stored[1]))
    images = read(tmp_path, *(path.name for path in paths))
    contents = [image.data for image in images]
    assert contents[0] == stored[0]
    assert sum(map(len, filter(None, contents))) <= reader.KEEP_BYTES
    assert [image.content for image in images] == stored
    again = contents.index(None)
    paths[again].write_bytes(drawing(seed=77))
    with pytest.raises(Unreachable, match="was changed"):
        _ = images[again].content


def test_a_too_large_record_is_bad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = len(drawing())
    monkeypatch.setattr(reader, "MOST_ROW_BYTES", 2 * size)
    assert isinstance(read(tmp_path, drawing(), drawing()), list)
    bad = read(tmp_path, drawing(), drawing(), drawing())
    assert bad == "images_too_large"
    assert bad.detail == {"bytes": 3 * size, "most": 2 * size}
    (tmp_path / "0.jpg").write_bytes(drawing())
    for limit, is_read in ((size, True), (size - 1, False)):
        monkeypatch.setattr(fetching, "MOST_BYTES", limit)
        assert (read(tmp_path, "0.jpg") != "image_file_too_large") is is_read


def test_the_digest_of_a_window_covers_each_image_and_their_order(tmp_path: Path) -> None:
    """Bad images count too: the digest changes when a missing image appears."""
    write_drawings(tmp_path, 2)

    def digest(*talks: RichConversation) -> str:
        reader = ImageReader({"max_images": 2}, locate(str(tmp_path)))
        reader.read(talks)
        return reader.window_images.digest

    both = ("0.jpg", "1.png")
    talks = [talk(), talk(*both), talk(*both[::-1]), talk("0.jpg"), talk("0.jpg", "0.jpg")]
    talks += [talk("0.jpg", "lost.jpg"), talk("0.jpg", b"no image"), talk("0.jpg", *both)]
    digests = [digest(conversation) for conversation in talks]
    assert len(set(digests)) == len(talks)
    assert digests[0] == WindowImages().digest == ""
    assert digest(talk("0.jpg"), talk("1.png")) == digests[1], (
        "the images count, not the records that have them"
    )
    assert digest(talk(*both), talk("0.jpg", *both)) != digests[1]


def test_an_image_is_judged_only_by_the_rules_of_its_stream(tmp_path: Path) -> None:
    """Rules of another stream of this process do not matter."""
    write_drawings(tmp_path, 1)
    settings = ({}, {"max_pixels": 5}, {"max_pixels": 5, "decode": "header"}, {})
    readers = [ImageReader(answer, locate(str(tmp_path))) for answer in settings]
    assert [(r.rules.decode, r.rules.max_pixels == 5) for r in readers[1:3]] == [
        ("full", True),
        ("header", True),
    ]
    answers = [reader.read([talk("0.jpg")])[0] for reader in readers]
    assert [isinstance(answer, str) for answer in answers] == [False, True, True, False]
    (tmp_path / "empty.jpg").touch()  # an empty file is not a missing one
    readers[0].read([talk("empty.jpg", "lost.jpg")])
    sizes = {
        url.rpartition("/")[2]: stamp[0] for url, stamp in readers[0].window_images.stamps.items()
    }
    assert (sizes["empty.jpg"], sizes["lost.jpg"]) == (0, -1)


def test_large_images_are_read_ahead_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enough small images are read ahead to keep a store busy; before the first image only few."""
    fetched_sizes = list[int]()

    def fetch(size: int, _: int) -> tuple[Stat, bytes]:
        fetched_sizes.append(size)
        return Stat(size, ""), bytes(size)

    def most_held(images: ImageReader, size: int, count: int) -> int:
        fetched_sizes.clear()
        location = SimpleNamespace(is_store=True, fetch=partial(fetch, size))
        largest = 0
        for number, _ in enumerate(images._read_ahead([(location, None)] * count)):  # type: ignore
            time.sleep(0.01)
            largest = max(largest, len(fetched_sizes) - number)
        return largest

    monkeypatch.setattr(reader, "locate_image", lambda location, *_: location)
    images = ImageReader(judges=False)
    assert most_held(images, 8 << 20, 12) <= 4 + 1
    most_held(images, 1000, 50)
    assert most_held(images, 1000, 40) > reader.IN_FLIGHT / 2
    most_held(images, 40 << 20, 3)
    assert most_held(images, 40 << 20, 6) <= 2
