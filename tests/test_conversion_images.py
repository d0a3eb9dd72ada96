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
from tests.converting import Project, assert_refused, read_files, read_samples
from tests.pictures import drawing, record, stream, write_drawings
from tests.test_images_http import DRAWING, serving


@pytest.fixture
def project(project: Project, seeing: Path) -> Project:
    project.tokenizer = seeing
    return says(project)


def says(project: Project, path: str = "a.jsonl", publish: str = "replace", **more: Any) -> Project:
    return project.configure(stream(path, **more), max_seq_len=400, publish=publish)


@pytest.fixture
def ten(project: Project) -> list[dict[str, Any]]:
    """Records of ten images, one each; a work unit is about three of them."""
    project.patch.setattr(job, "LINE_BYTES", 400)
    found = [record(f"img/{path.name}") for path in write_drawings(project.folder / "img", 10)]
    project.write_source(found)
    return found


@pytest.mark.usefixtures("ten")
def test_a_second_run_reads_no_image_and_another_image_redoes_its_unit(project: Project) -> None:
    assert project.run().units > 2
    opened, really = list[str](), LocalPath.open
    with project.patch.context() as patch:
        patch.setattr(
            LocalPath, "open", lambda at, *of: (opened.append(at.name), really(at, *of))[1]
        )
        assert project.run().units == 0
    assert opened == ["a.jsonl"], "its beginning, on which the size of units depends"
    os.utime(project.folder / "img/0.jpg", (1, 1))
    assert project.run().done == 0
    (project.folder / "img/0.jpg").write_bytes(drawing(seed=77))
    assert "incomplete: units of a.jsonl" in project.convert_ok("--dry-run").out
    assert project.run().done == 1
    assert read_samples(project.train)[0]["images"] == [drawing(seed=77)]
    assert project.run().units == 0


def test_fewer_images_make_larger_units(project: Project) -> None:
    """A file of chats without images became 44 shards in place of 3."""
    project.patch.setattr(job, "LINE_BYTES", 400)
    write_drawings(project.folder / "img", 1)
    for every, larger in ((1, 1), (4, 4), (99, 16)):
        path = project.write_source(record(*["img/0.jpg"] * (n % every == 0)) for n in range(100))
        assert project.run().units == math.ceil(path.stat().st_size / 400 / larger)


def test_moved_images_are_the_same_also_without_cache(
    project: Project, ten: list[dict[str, Any]]
) -> None:
    project.write_source(each | {"image": Path(each["image"]).name} for each in ten)
    says(project, images={"root": "img"}).run()
    before = project.files
    (project.folder / "img").rename(project.folder / "elsewhere")
    says(project, images={"root": "elsewhere"})
    assert project.run().done == 0
    project.switch_machine("cache")
    for verify_source in (False, True):
        assert project.run(verify_source=verify_source).done == 0
    assert project.files == before


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


def test_every_bad_image_is_kept_under_its_reason_and_costs_its_record_alone(
    project: Project,
) -> None:
    good, large = "img/good.jpg", drawing("PNG", (300, 300))
    (project.folder / "img").mkdir()
    contents = (drawing(), b"", b"<html>", drawing()[:-300], large)
    for path, content in zip([good, *list(BAD)[:4]], contents, strict=True):
        (project.folder / path).write_bytes(content)
    wrong = {**record(good), "image": [good] * 2}
    others = [record(good), record(*[good] * 4), wrong, record(), {"image": 3, **record()}]
    project.write_source([*map(record, BAD), *(record(good, path) for path in BAD), *others])
    says(project, images={"max_pixels": 80_000, "max_images": 3}).run()
    found = {"too_many_images": 1, "image_count": 1, "bad_image": 1}
    found |= {reason: 2 * count for reason, count in Counter(BAD.values()).items()}
    records = project.manifest.records
    assert (records.quarantined, records.written) == (found, 2)
    details = {each["reason"]: each["detail"] for each in project.bad}
    assert details["image_count"] == {"placeholders": 1, "images": 2}
    why = "it is 3, not a path, URL, bytes or base64"
    assert details["bad_image"].items() >= {"image_number": 0, "why": why}.items()
    whys = {each["detail"].get("image"): each["detail"].get("why") for each in project.bad}
    assert whys["img"] == whys["img/gone.jpg"] == "there is no such file"
    said = [(each["detail"]["image"], each["reason"]) for each in project.bad[: 2 * len(BAD)]]
    assert said == [*BAD.items()] * 2


def test_what_lies_outside_of_the_folder_is_refused_where_the_recipe_says_so(
    project: Project,
) -> None:
    """And of a file that is no image no byte is kept, wherever it lies."""
    write_drawings(project.folder / "img", 1)
    secret = project.folder / "secret.txt"
    secret.write_text("root:x:0")
    (project.folder / "img/link.jpg").symlink_to(secret)
    project.write_source(map(record, ["0.jpg", "link.jpg", "../secret.txt", str(secret)]))
    for outside, reason in (("allow", "not_an_image"), ("refuse", "bad_image_path")):
        says(project, images={"root": "img", "outside": outside}).run()
        assert project.manifest.records.quarantined == {reason: 3}
        assert not any("root:" in str(each) for each in project.bad)


def test_however_images_are_held_bytes_are_the_same(
    project: Project, ten: list[dict[str, Any]]
) -> None:
    """Images that do not fit are read a second time; a shard ends where it is full."""
    project.patch.setattr(pictured, "SHARD_BYTES", 3000)
    project.write_source(ten * 3)
    project.run()
    one = read_files(project.out)
    project.patch.setattr(reader, "KEEP_BYTES", 1000)
    project.patch.setattr(reader, "FIRST_RECORDS", 3)
    project.switch_machine("cache")
    assert read_files(project.convert_into().out) == one
    shards = [name for name in one if name.endswith(".mds")]
    assert len(shards) > 3
    assert all(len(one[name]) < 4000 for name in shards)


def test_images_at_urls_are_fetched_once_where_the_recipe_says_so(project: Project) -> None:
    with serving() as server:
        paths = [f"{server.url}/{name}" for name in ("good", "missing", "good")]
        project.write_source(map(record, paths))
        says(project, images={"http": "fetch"}).run()
        assert sorted(server.asked) == ["/good", "/missing"]
        assert [sample["images"] for sample in read_samples(project.train)] == [[DRAWING]] * 2
        assert project.manifest.records.quarantined == {"image_not_found": 1}
        assert project.run().units == 0
        assert len(server.asked) == 2


def test_a_text_only_stream_knows_nothing_of_images(project: Project) -> None:
    """Its keys, and what is written of it, are as they were. Pillow need not be installed."""
    project.patch.setitem(sys.modules, "PIL", None)
    project.write_source([record()])
    says(project, shape="sharegpt").run()
    manifest = project.manifest
    assert manifest.encoding.columns == {"turns": "json"}
    assert "image" not in (project.train / "mdsmix.manifest").read_text()
    assert replace(manifest.encoding, images={}) == manifest.encoding
    both = {"see": stream("a.jsonl", "sharegpt"), "seen": stream("b.jsonl")}
    assert_refused(project.configure(streams=both).convert(), 2, "pip install 'mdsmix[images]'")
