"""Streams of images from run to run: which units are converted again when an image changes, and the
reason code of every bad image.
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
    return configure(project)


def configure(
    project: Project, path: str = "a.jsonl", publish: str = "replace", **more: Any
) -> Project:
    return project.configure(stream(path, **more), max_seq_len=400, publish=publish)


@pytest.fixture
def ten(project: Project) -> list[dict[str, Any]]:
    """Ten records with an image each, about three per work unit."""
    project.patch.setattr(job, "LINE_BYTES", 400)
    paths = write_drawings(project.folder / "img", 10)
    records = [record(f"img/{path.name}") for path in paths]
    project.write_source(records)
    return records


@pytest.mark.usefixtures("ten")
def test_a_second_run_reads_no_image_and_a_changed_image_redoes_its_unit(
    project: Project,
) -> None:
    assert project.run().units > 2
    opened = list[str]()
    open_file = LocalPath.open

    def open_and_note(path: LocalPath, *arguments: Any) -> Any:
        opened.append(path.name)
        return open_file(path, *arguments)

    with project.patch.context() as patch:
        patch.setattr(LocalPath, "open", open_and_note)
        assert project.run().units == 0
    assert opened == ["a.jsonl"], "its beginning decides the size of units"
    os.utime(project.folder / "img/0.jpg", (1, 1))
    assert project.run().done == 0
    (project.folder / "img/0.jpg").write_bytes(drawing(seed=77))
    assert "units of a.jsonl are new, edited or incomplete" in project.convert_ok("--dry-run").out
    assert project.run().done == 1
    assert read_samples(project.train)[0]["images"] == [drawing(seed=77)]
    assert project.run().units == 0


def test_fewer_images_make_larger_units(project: Project) -> None:
    """Otherwise a file of chats without images would become 44 shards instead of 3."""
    project.patch.setattr(job, "LINE_BYTES", 400)
    write_drawings(project.folder / "img", 1)
    for interval, factor in ((1, 1), (4, 4), (99, 16)):
        with_image = record("img/0.jpg")
        records = [record() if n % interval else with_image for n in range(100)]
        path = project.write_source(records)
        assert project.run().units == math.ceil(path.stat().st_size / 400 / factor)


def test_moved_images_cause_no_work_even_without_a_cache(
    project: Project, ten: list[dict[str, Any]]
) -> None:
    project.write_source(item | {"image": Path(item["image"]).name} for item in ten)
    configure(project, images={"root": "img"}).run()
    before = project.files
    (project.folder / "img").rename(project.folder / "elsewhere")
    configure(project, images={"root": "elsewhere"})
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


def test_a_bad_image_makes_only_its_record_bad_with_a_reason(project: Project) -> None:
    good = "img/good.jpg"
    large = drawing("PNG", (300, 300))
    (project.folder / "img").mkdir()
    contents = (drawing(), b"", b"<html>", drawing()[:-300], large)
    for path, content in zip([good, *list(BAD)[:4]], contents, strict=True):
        (project.folder / path).write_bytes(content)
    too_few_placeholders = {**record(good), "image": [good] * 2}
    four_images = record(good, good, good, good)
    not_a_path = {"image": 3, **record()}
    project.write_source(
        [
            *map(record, BAD),
            *(record(good, path) for path in BAD),
            *(record(good), four_images, too_few_placeholders, record(), not_a_path),
        ]
    )
    configure(project, images={"max_pixels": 80_000, "max_images": 3}).run()
    expected = {"too_many_images": 1, "image_count": 1, "bad_image": 1}
    expected |= {reason: 2 * count for reason, count in Counter(BAD.values()).items()}
    records = project.manifest.records
    assert (records.quarantined, records.written) == (expected, 2)
    details = {bad["reason"]: bad["detail"] for bad in project.bad}
    assert details["image_count"] == {"placeholders": 1, "images": 2}
    why = "it is 3, not a path, URL, bytes or base64"
    assert details["bad_image"].items() >= {"image_number": 0, "why": why}.items()
    explanations = {bad["detail"].get("image"): bad["detail"].get("why") for bad in project.bad}
    assert explanations["img"] == explanations["img/gone.jpg"] == "there is no such file"
    reasons = [(bad["detail"]["image"], bad["reason"]) for bad in project.bad[: 2 * len(BAD)]]
    assert reasons == [*BAD.items()] * 2


def test_images_outside_of_the_folder_can_be_refused(project: Project) -> None:
    """No byte of a file that is not an image is stored, wherever it is."""
    write_drawings(project.folder / "img", 1)
    secret = project.folder / "secret.txt"
    secret.write_text("root:x:0")
    (project.folder / "img/link.jpg").symlink_to(secret)
    project.write_source(map(record, ["0.jpg", "link.jpg", "../secret.txt", str(secret)]))
    for outside, reason in (("allow", "not_an_image"), ("refuse", "bad_image_path")):
        configure(project, images={"root": "img", "outside": outside}).run()
        assert project.manifest.records.quarantined == {reason: 3}
        assert not any("root:" in str(bad) for bad in project.bad)


def test_bytes_do_not_depend_on_how_many_images_fit_into_memory(
    project: Project, ten: list[dict[str, Any]]
) -> None:
    """Images that do not fit are read a second time. A shard ends when it is full."""
    project.patch.setattr(pictured, "SHARD_BYTES", 3000)
    project.write_source(ten * 3)
    project.run()
    expected = read_files(project.out)
    project.patch.setattr(reader, "KEEP_BYTES", 1000)
    project.patch.setattr(reader, "FIRST_RECORDS", 3)
    project.switch_machine("cache")
    assert read_files(project.convert_into().out) == expected
    shards = [name for name in expected if name.endswith(".mds")]
    assert len(shards) > 3
    assert all(len(expected[name]) < 4000 for name in shards)


def test_images_at_urls_are_fetched_once_if_the_recipe_allows_it(project: Project) -> None:
    with serving() as server:
        paths = [f"{server.url}/{name}" for name in ("good", "missing", "good")]
        project.write_source(map(record, paths))
        configure(project, images={"http": "fetch"}).run()
        assert sorted(server.requested) == ["/good", "/missing"]
        assert [sample["images"] for sample in read_samples(project.train)] == [[DRAWING]] * 2
        assert project.manifest.records.quarantined == {"image_not_found": 1}
        assert project.run().units == 0
        assert len(server.requested) == 2


def test_a_text_only_stream_needs_no_pillow_and_mentions_no_images(project: Project) -> None:
    project.patch.setitem(sys.modules, "PIL", None)
    project.write_source([record()])
    configure(project, shape="sharegpt").run()
    manifest = project.manifest
    assert manifest.encoding.columns == {"turns": "json"}
    assert "image" not in (project.train / "mdsmix.manifest").read_text()
    assert replace(manifest.encoding, images={}) == manifest.encoding
    streams = {"see": stream("a.jsonl", "sharegpt"), "seen": stream("b.jsonl")}
    assert_refused(project.configure(streams=streams).convert(), 2, "pip install 'mdsmix[images]'")
