"""Streams of images from run to run: what is done again when an image changes, and that every bad
image is kept by its reason.
"""

from __future__ import annotations

import math
import os
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mdsmix.conversion import job
from mdsmix.images import reader
from mdsmix.kinds import pictured
from mdsmix.storage.local import LocalPath
from tests.converting import Web, files, refused, samples
from tests.pictures import drawing, record, stream, write_drawings
from tests.test_images_http import DRAWING, serving


@pytest.fixture
def web(web: Web, seeing: Path) -> Web:
    web.tokenizer = seeing
    return says(web)


def says(web: Web, path: str = "a.jsonl", publish: str = "replace", **more: Any) -> Web:
    return web.says(stream(path, **more), max_seq_len=400, publish=publish)


@pytest.fixture
def ten(web: Web) -> list[dict[str, Any]]:
    """Records of ten images, one each; a work unit is about three of them."""
    web.patch.setattr(job, "LINE_BYTES", 400)
    found = [record(f"img/{path.name}") for path in write_drawings(web.folder / "img", 10)]
    web.holds(found)
    return found


@pytest.mark.usefixtures("ten")
def test_a_second_run_reads_no_image_and_another_image_redoes_its_unit(web: Web) -> None:
    assert web.run().units > 2
    opened, really = list[str](), LocalPath.open
    with web.patch.context() as patch:
        patch.setattr(
            LocalPath, "open", lambda at, *of: (opened.append(at.name), really(at, *of))[1]
        )
        assert web.run().units == 0
    assert opened == ["a.jsonl"], "its beginning, on which the size of units depends"
    os.utime(web.folder / "img/0.jpg", (1, 1))
    assert web.run().done == 0
    (web.folder / "img/0.jpg").write_bytes(drawing(seed=77))
    assert "incomplete: units of a.jsonl" in web.done("--dry-run").out
    assert web.run().done == 1
    assert samples(web.train)[0]["images"] == [drawing(seed=77)]
    assert web.run().units == 0


def test_fewer_images_make_larger_units(web: Web) -> None:
    """A file of chats without images became 44 shards in place of 3."""
    web.patch.setattr(job, "LINE_BYTES", 400)
    write_drawings(web.folder / "img", 1)
    for every, larger in ((1, 1), (4, 4), (99, 16)):
        path = web.holds(record(*["img/0.jpg"] * (n % every == 0)) for n in range(100))
        assert web.run().units == math.ceil(path.stat().st_size / 400 / larger)


def test_moved_images_are_the_same_also_without_cache(web: Web, ten: list[dict[str, Any]]) -> None:
    web.holds(each | {"image": Path(each["image"]).name} for each in ten)
    says(web, images={"root": "img"}).run()
    before = web.files
    (web.folder / "img").rename(web.folder / "elsewhere")
    says(web, images={"root": "elsewhere"})
    assert web.run().done == 0
    web.elsewhere("cache")
    for verify_source in (False, True):
        assert web.run(verify_source=verify_source).done == 0
    assert web.files == before


BAD = {
    "img/empty.jpg": "image_empty",
    "img/page.png": "not_an_image",
    "img/cut.jpg": "image_truncated",
    "img/large.png": "image_too_large",
    "img/gone.jpg": "image_not_found",
    "img\\gone.jpg": "image_not_found",
    "img": "image_not_found",
    "/dev/null": "image_unreadable",
    "http://127.0.0.1:9/x.jpg": "remote_image",
    "gopher://x/y.jpg": "bad_image_path",
}
"Path of a bad image -> its reason."


def test_every_bad_image_is_kept_under_its_reason_and_costs_its_record_alone(web: Web) -> None:
    good, large = "img/good.jpg", drawing("PNG", (300, 300))
    (web.folder / "img").mkdir()
    contents = (drawing(), b"", b"<html>", drawing()[:-300], large)
    for path, content in zip([good, *list(BAD)[:4]], contents, strict=True):
        (web.folder / path).write_bytes(content)
    wrong = {**record(good), "image": [good] * 2}
    others = [record(good), record(*[good] * 4), wrong, record(), {"image": 3, **record()}]
    web.holds([*map(record, BAD), *(record(good, path) for path in BAD), *others])
    says(web, images={"max_pixels": 80_000, "max_images": 3}).run()
    found = {"too_many_images": 1, "image_count": 1, "bad_image": 1}
    found |= {reason: 2 * count for reason, count in Counter(BAD.values()).items()}
    records = web.manifest.records
    assert (records.quarantined, records.written) == (found, 2)
    details = {each["reason"]: each["detail"] for each in web.bad}
    assert details["image_count"] == {"placeholders": 1, "images": 2}
    why = "it is 3, not a path, URL, bytes or base64"
    assert details["bad_image"].items() >= {"image_number": 0, "why": why}.items()
    whys = {each["detail"].get("image"): each["detail"].get("why") for each in web.bad}
    assert whys["img"] == whys["img/gone.jpg"] == "there is no such file"
    said = [(each["detail"]["image"], each["reason"]) for each in web.bad[: 2 * len(BAD)]]
    assert said == [*BAD.items()] * 2


def test_what_lies_outside_of_the_folder_is_refused_where_the_recipe_says_so(web: Web) -> None:
    """And of a file that is no image no byte is kept, wherever it lies."""
    write_drawings(web.folder / "img", 1)
    secret = web.folder / "secret.txt"
    secret.write_text("root:x:0")
    (web.folder / "img/link.jpg").symlink_to(secret)
    web.holds(map(record, ["0.jpg", "link.jpg", "../secret.txt", str(secret)]))
    for outside, reason in (("allow", "not_an_image"), ("refuse", "bad_image_path")):
        says(web, images={"root": "img", "outside": outside}).run()
        assert web.manifest.records.quarantined == {reason: 3}
        assert not any("root:" in str(each) for each in web.bad)


def test_however_images_are_held_bytes_are_the_same(web: Web, ten: list[dict[str, Any]]) -> None:
    """Images that do not fit are read a second time; a shard ends where it is full."""
    web.patch.setattr(pictured, "SHARD_BYTES", 3000)
    web.holds(ten * 3)
    web.run()
    one = files(web.out)
    web.patch.setattr(reader, "KEEP_BYTES", 1000)
    web.patch.setattr(reader, "FIRST_RECORDS", 3)
    web.elsewhere("cache")
    assert files(web.anew().out) == one
    shards = [name for name in one if name.endswith(".mds")]
    assert len(shards) > 3
    assert all(len(one[name]) < 4000 for name in shards)


def test_images_at_urls_are_fetched_once_where_the_recipe_says_so(web: Web) -> None:
    with serving() as server:
        paths = [f"{server.url}/{name}" for name in ("good", "missing", "good")]
        web.holds(map(record, paths))
        says(web, images={"http": "fetch"}).run()
        assert sorted(server.asked) == ["/good", "/missing"]
        assert [sample["images"] for sample in samples(web.train)] == [[DRAWING]] * 2
        assert web.manifest.records.quarantined == {"image_not_found": 1}
        assert web.run().units == 0
        assert len(server.asked) == 2


def test_a_text_only_stream_knows_nothing_of_images(web: Web) -> None:
    """Its keys, and what is written of it, are as they were. Pillow need not be installed."""
    web.patch.setitem(sys.modules, "PIL", None)
    web.holds([record()])
    says(web, shape="sharegpt").run()
    manifest = web.manifest
    assert manifest.encoding.columns == {"turns": "json"}
    assert "image" not in (web.train / "mdsmix.manifest").read_text()
    assert replace(manifest.encoding, images={}) == manifest.encoding
    both = {"see": stream("a.jsonl", "sharegpt"), "seen": stream("b.jsonl")}
    refused(web.says(streams=both).convert(), 2, "pip install 'mdsmix[images]'")
