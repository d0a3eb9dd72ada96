"""Streams of images from run to run: what is done again when an image changes, and that every bad image is kept by its reason."""

from __future__ import annotations

import base64
import io
import json
import os
import sys
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash
from PIL import Image

from mdsmix.convert.damage import repair
from mdsmix.convert.ledger import FOLDER, UNIT, read_units
from mdsmix.convert.planning import Options
from mdsmix.images import reader
from mdsmix.kinds import open_recipe, pictured
from mdsmix.shards.verification import verify
from mdsmix.storage import Location, locate
from mdsmix.storage.local import LocalPath
from tests.converting import (
    Told,
    files,
    manifest_of,
    mdsmix,
    quarantined,
    run_recipe,
    samples,
    write_jsonl,
    write_recipe,
)
from tests.pictures import TOKEN, drawing, record, seeing_tokenizer, stream, write_drawings
from tests.test_images_http import DRAWING, serving


@pytest.fixture(scope="module")
def seeing(tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return seeing_tokenizer(tokenizer_folder, tmp_path_factory.mktemp("seeing") / "tokenizer")


def recipe_of(folder: Path, tokenizer: Path, records: list[Any] | None = None, **more: Any) -> Path:
    path = folder / "a.jsonl"
    if records is not None:
        write_jsonl(path, records)
    keys = {key: more.pop(key) for key in ("publish", "target_responses") if key in more}
    streams = {"see": stream(more.pop("path", path), **more)}
    return write_recipe(folder, tokenizer, **{"max_seq_len": 400, "streams": streams, **keys})


def ten(folder: Path) -> list[dict[str, Any]]:
    """Records of ten images, one each."""
    return [record(f"img/{path.name}") for path in write_drawings(folder / "img", 10)]


@pytest.fixture
def units(monkeypatch: pytest.MonkeyPatch) -> None:
    """A work unit is about three records."""
    monkeypatch.setattr(pictured.ConversationsWithImages, "line_bytes", 400)


@pytest.mark.usefixtures("units")
def test_a_second_run_reads_no_image_and_one_with_another_image_does_its_unit_alone(
    tmp_path: Path, seeing: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_of(tmp_path, seeing, ten(tmp_path))
    (first,) = run_recipe(recipe)
    assert first.units > 2
    with monkeypatch.context() as patch:
        patch.setattr(LocalPath, "open", None)  # what reads the lines
        (second,) = run_recipe(recipe)
    assert second.units == 0
    os.utime(tmp_path / "img/0.jpg", (1, 1))
    (touched,) = run_recipe(recipe)
    assert touched.units == touched.reused
    (tmp_path / "img/0.jpg").write_bytes(drawing(seed=77))
    assert "1 of" in mdsmix("convert", recipe, "--dry-run").out
    (changed,) = run_recipe(recipe)
    assert changed.units - changed.reused == 1
    assert samples(tmp_path / "out/see/train")[0]["images"] == [drawing(seed=77)]
    assert run_recipe(recipe)[0].units == 0


@pytest.mark.usefixtures("units")
def test_images_that_were_moved_are_the_same_and_the_cache_may_be_lost(
    tmp_path: Path, seeing: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = [each | {"image": Path(each["image"]).name} for each in ten(tmp_path)]
    recipe = recipe_of(tmp_path, seeing, records, images={"root": "img"})
    run_recipe(recipe)
    before = files(tmp_path / "out/see/train")
    (tmp_path / "img").rename(tmp_path / "elsewhere")
    moved = recipe_of(tmp_path, seeing, images={"root": "elsewhere"})
    (again,) = run_recipe(moved)
    assert again.units == again.reused
    monkeypatch.setenv("MDSMIX_CACHE", str(tmp_path / "cache"))
    (lost,) = run_recipe(moved)
    assert lost.units == lost.reused
    (verified,) = run_recipe(moved, verify_source=True)
    assert verified.units == verified.reused
    assert files(tmp_path / "out/see/train") == before


def test_an_image_that_went_is_a_bad_record_and_good_again_when_it_is_back(
    tmp_path: Path, seeing: Path
) -> None:
    recipe = recipe_of(tmp_path, seeing, ten(tmp_path))
    run_recipe(recipe)
    whole = manifest_of(tmp_path / "out/see/train").index_hash
    (tmp_path / "img/3.jpg").rename(tmp_path / "away.jpg")
    run_recipe(recipe)
    assert manifest_of(tmp_path / "out/see/train").records.quarantined == {"image_not_found": 1}
    (bad,) = quarantined(tmp_path / "out/see/train")
    assert bad["detail"]["image"] == "img/3.jpg"
    assert (bad["file"], bad["line"]) == ("a.jsonl", 4)
    (tmp_path / "away.jpg").rename(tmp_path / "img/3.jpg")
    (back,) = run_recipe(recipe)
    assert manifest_of(tmp_path / "out/see/train").index_hash == whole
    assert back.units == back.reused


def test_a_dry_run_says_that_images_are_others(tmp_path: Path, seeing: Path) -> None:
    write_drawings(tmp_path / "img")
    recipe = recipe_of(tmp_path, seeing, [record("img/0.jpg"), record("img/1.jpg")])
    run_recipe(recipe)
    (tmp_path / "img/1.jpg").write_bytes((tmp_path / "img/0.jpg").read_bytes())
    assert "not whole at the target: those of a.jsonl" in mdsmix("convert", recipe, "--dry-run").out


def bad_images(folder: Path) -> dict[str, str]:
    """Path of a bad image -> its reason."""
    folder.mkdir()
    bad = {
        "empty.jpg": (b"", "image_empty"),
        "page.png": (b"<html>", "not_an_image"),
        "cut.jpg": (drawing()[:-300], "image_truncated"),
        "large.png": (drawing("PNG", (300, 300)), "image_too_large"),
    }
    for name, (data, _) in bad.items():
        (folder / name).write_bytes(data)
    return {f"img/{name}": reason for name, (_, reason) in bad.items()} | {
        "img/gone.jpg": "image_not_found",
        "img\\gone.jpg": "image_not_found",
        "img": "image_not_found",
        "/dev/null": "image_unreadable",
        "http://127.0.0.1:9/x.jpg": "remote_image",
        "gopher://x/y.jpg": "bad_image_path",
    }


def test_every_bad_image_is_kept_under_its_reason_and_costs_its_record_alone(
    tmp_path: Path, seeing: Path
) -> None:
    bad = bad_images(tmp_path / "img")
    (tmp_path / "img/good.jpg").write_bytes(drawing())
    records = [record(path) for path in bad] + [record("img/good.jpg", path) for path in bad]
    many = record(*["img/good.jpg"] * 4)
    wrong = {**record("img/good.jpg"), "image": ["img/good.jpg"] * 2}
    records += [record("img/good.jpg"), many, wrong, record(), {"image": 3, **record()}]
    out = tmp_path / "out/see/train"
    run_recipe(recipe_of(tmp_path, seeing, records, images={"max_pixels": 80_000, "max_images": 3}))
    found: dict[str, int] = {"too_many_images": 1, "image_count": 1, "bad_image": 1}
    for reason in bad.values():
        found[reason] = found.get(reason, 0) + 2
    assert manifest_of(out).records.quarantined == found
    assert manifest_of(out).records.written == 2
    details = {each["reason"]: each["detail"] for each in quarantined(out)}
    assert details["image_count"] == {"placeholders": 1, "images": 2}
    assert details["bad_image"]["image_number"] == 0
    assert details["bad_image"]["why"] == "it is 3, no path, URL, bytes or base64"
    whys = {each["detail"].get("image"): each["detail"].get("why") for each in quarantined(out)}
    assert whys["img"] == whys["img/gone.jpg"] == "there is no such file"
    assert "a backslash is a letter of a name" in str(whys["img\\gone.jpg"])
    said = [(each["detail"]["image"], each["reason"]) for each in quarantined(out)[: 2 * len(bad)]]
    assert said == [*bad.items(), *bad.items()]


def test_what_lies_outside_of_the_folder_is_refused_where_the_recipe_says_so(
    tmp_path: Path, seeing: Path
) -> None:
    """And of a file that is no image no byte is kept, wherever it lies."""
    write_drawings(tmp_path / "img", 1)
    (tmp_path / "secret.txt").write_text("root:x:0")
    (tmp_path / "img/link.jpg").symlink_to(tmp_path / "secret.txt")
    paths = ["0.jpg", "link.jpg", "../secret.txt", str(tmp_path / "secret.txt")]
    out = tmp_path / "out/see/train"
    for outside, reason in (("allow", "not_an_image"), ("refuse", "bad_image_path")):
        images = {"root": "img", "outside": outside}
        run_recipe(recipe_of(tmp_path, seeing, [record(path) for path in paths], images=images))
        assert manifest_of(out).records.quarantined == {reason: 3}
        assert not any("root:" in str(each) for each in quarantined(out))
        assert ("outside" in manifest_of(out).encoding.images) == (outside == "refuse")


def test_a_bad_record_is_kept_without_the_image_that_stands_in_it(
    tmp_path: Path, seeing: Path
) -> None:
    """However its base64 is written; a list of words stays."""
    cut = drawing("PNG", (300, 300), 5)[:-20]
    plain = base64.b64encode(cut).decode()
    ways = [plain, base64.urlsafe_b64encode(cut).decode(), base64.encodebytes(cut).decode(), quote(plain, "")]  # fmt: skip
    words = "\n".join(["apple", "pear"] * 200)
    bad = [record(f"data:image/png;base64,{way}", answer=words) for way in ways]
    run_recipe(recipe_of(tmp_path, seeing, [*bad, record()]))
    found = quarantined(tmp_path / "out/see/train")
    assert [each["reason"] for each in found] == ["image_truncated"] * 4
    for each in found:
        assert each["raw"].count("base64 left out") == 1
        assert words.replace("\n", "\\n") in each["raw"]
        assert len(json.dumps(each)) < 1000 + 1.2 * len(words)
        assert each["detail"]["image_number"] == 0


def test_however_images_are_held_and_whoever_converts_the_bytes_are_the_same(
    tmp_path: Path, seeing: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Images that do not fit are read a second time; a shard ends where it is full."""
    monkeypatch.setattr(pictured, "SHARD_BYTES", 3000)
    recipe = recipe_of(tmp_path, seeing, ten(tmp_path) * 3)
    run_recipe(recipe)
    one = files(tmp_path / "out")
    (tmp_path / "out").rename(tmp_path / "before")
    monkeypatch.setattr(reader, "KEEP_BYTES", 1000)
    monkeypatch.setattr(reader, "FIRST_RECORDS", 3)
    monkeypatch.setenv("MDSMIX_CACHE", str(tmp_path / "cache"))
    run_recipe(recipe)
    assert files(tmp_path / "out") == one
    shards = [name for name in one if name.endswith(".mds")]
    assert len(shards) > 3
    assert all(len(one[name]) < 4000 for name in shards)


@pytest.mark.parametrize("rule", ["escape", "allow", "reject"])
def test_a_placeholder_that_somebody_typed_is_no_image(
    tmp_path: Path, seeing: Path, rule: str
) -> None:
    write_drawings(tmp_path / "img")
    records = [record("img/0.jpg", question=f"{TOKEN}?"), record()]
    recipe = recipe_of(tmp_path, seeing, records)
    run_recipe(recipe, f"special_tokens_in_text={rule}")
    reason = "image_placeholders" if rule == "allow" else "special_token_in_text"
    assert manifest_of(tmp_path / "out/see/train").records.quarantined == {reason: 1}


def test_a_conversation_that_is_shortened_keeps_the_images_of_its_turns(
    tmp_path: Path, seeing: Path
) -> None:
    write_drawings(tmp_path / "img")
    talk = record("img/0.jpg")["conversations"] + record("img/1.png")["conversations"]
    records = [{"image": ["img/0.jpg", "img/1.png"], "conversations": talk}]
    recipe = recipe_of(tmp_path, seeing, records, too_long="first_turns")
    run_recipe(recipe)
    (whole,) = samples(tmp_path / "out/see/train")
    assert len(whole["images"]) == 2
    length = sum(len(t["input_ids"]) + len(t["labels"]) for t in whole["turns"])
    run_recipe(recipe, f"max_seq_len={length - 1}")
    (first,) = samples(tmp_path / "out/see/train")
    assert first["images"] == whole["images"][:1]
    assert len(first["turns"]) == 1


def test_an_image_is_made_smaller_or_written_anew_only_where_asked(
    tmp_path: Path, seeing: Path
) -> None:
    write_drawings(tmp_path / "img", 2, (40, 30))
    exif = Image.Exif()
    exif[0x0112] = 6
    (tmp_path / "img/turned.jpg").write_bytes(drawing("JPEG", (100, 50), exif=exif))
    names = ["img/0.jpg", "img/1.png", "img/turned.jpg"]
    recipe = recipe_of(tmp_path, seeing, [record(*names)], images={"resize": {"longest": 60}})
    run_recipe(recipe)
    (sample,) = samples(tmp_path / "out/see/train")
    assert sample["sizes"] == [[30, 40], [30, 40], [60, 30]]
    assert sample["images"][:2] == [(tmp_path / name).read_bytes() for name in names[:2]]
    with Image.open(io.BytesIO(sample["images"][2])) as image:
        assert (image.size, image.format, image.getexif().get(0x0112)) == ((30, 60), "JPEG", None)
    other = {"reencode": {"format": "webp", "quality": 50}}
    run_recipe(recipe_of(tmp_path, seeing, images=other))
    (sample,) = samples(tmp_path / "out/see/train")
    assert sample["sizes"] == [[30, 40], [30, 40], [100, 50]]
    found = [Image.open(io.BytesIO(image)) for image in sample["images"]]
    assert [image.format for image in found] == ["WEBP"] * 3
    assert manifest_of(tmp_path / "out/see/train").encoding.images["reencode"] == other["reencode"]


def test_duplicates_a_holdout_and_a_limit_are_as_for_text(tmp_path: Path, seeing: Path) -> None:
    """Two records are the same where they name the same paths: images are not read for that."""
    records = ten(tmp_path)
    recipe = recipe_of(tmp_path, seeing, records + records[:4], duplicates="drop")
    run_recipe(recipe)
    records_of = manifest_of(tmp_path / "out/see/train").records
    assert (records_of.written, records_of.filtered) == (10, {"duplicate": 4})
    assert run_recipe(recipe)[0].units == 0
    kept = recipe_of(tmp_path, seeing)
    run_recipe(kept)
    assert manifest_of(tmp_path / "out/see/train").records.duplicates == 4
    held = recipe_of(tmp_path, seeing, holdout="40%")
    train, evaluation = run_recipe(held)
    assert 0 < evaluation.manifest.records.written < 14
    assert train.manifest.records.written + evaluation.manifest.records.written == 14
    run_recipe(recipe_of(tmp_path, seeing), limit=3)
    assert manifest_of(tmp_path / "out/see/limit-3").records.read == 3


def found_in(version: Location) -> list[str]:
    report = verify(version, quick=False, begin=lambda *_: None, on_progress=lambda *_: None)
    return [fault.file for fault in report.faults]


@pytest.mark.usefixtures("units")
def test_a_damaged_shard_is_made_again_from_the_images(tmp_path: Path, seeing: Path) -> None:
    recipe = recipe_of(tmp_path, seeing, ten(tmp_path), publish="versioned")
    (done,) = run_recipe(recipe)
    manifest = manifest_of(tmp_path / "out/see/train")
    version = locate(str(tmp_path / f"out/see/train-{manifest.index_hash[:8]}"))
    assert not found_in(version)
    shard = next(name for name, _ in version.list() if name.endswith(".mds"))
    damaged = bytearray((version / shard).read())
    damaged[-1] ^= 1
    (version / shard).write(bytes(damaged))
    assert found_in(version) == [shard]
    opened = open_recipe(recipe)
    found = repair(opened, version, Options(workers=1), Told())
    assert (found.shards, found.units) == ((shard,), 1)
    assert not found_in(version)
    assert done.units > 2


def test_images_that_stand_in_a_table_or_an_archive(tmp_path: Path, seeing: Path) -> None:
    talk = [{"role": "user", "content": "<image>What?"}, {"role": "assistant", "content": "It."}]
    data = [drawing("PNG", seed=n) for n in range(3)] + [drawing()[:-99]]
    rows = [{"messages": talk, "images": [{"bytes": each, "path": None}]} for each in data]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for number, each in enumerate(data):
            members = {"json": json.dumps({"messages": talk}).encode(), "png": each}
            for suffix, content in members.items():
                header = tarfile.TarInfo(f"{number:04}.{suffix}")
                header.size = len(content)
                archive.addfile(header, io.BytesIO(content))
    for name, source, field in (
        ("a.parquet", {}, "images"),
        ("a.tar", {"messages": "json.messages"}, ["jpg", "png"]),
    ):
        recipe = recipe_of(
            tmp_path,
            seeing,
            path=tmp_path / name,
            shape="messages",
            source=source,
            images={"field": field},
        )
        run_recipe(recipe, reencode=True)
        out = tmp_path / "out/see/train"
        assert [sample["images"] for sample in samples(out)] == [[each] for each in data[:3]]
        (bad,) = quarantined(out)
        assert bad["reason"] == "image_truncated"
        assert len(json.dumps(bad)) < 3000
        assert "PNG" not in json.dumps(bad)
        assert set(manifest_of(out).records.unread) <= {"__key__"}
        assert run_recipe(recipe)[0].units == 0


def test_images_at_urls_are_fetched_once_where_the_recipe_says_so(
    tmp_path: Path, seeing: Path
) -> None:
    with serving() as server:
        paths = [f"{server.url}/{name}" for name in ("good", "missing", "good")]
        recipe = recipe_of(tmp_path, seeing, [*map(record, paths)], images={"http": "fetch"})
        run_recipe(recipe)
        assert sorted(server.asked) == ["/good", "/missing"]
        out = tmp_path / "out/see/train"
        assert [sample["images"] for sample in samples(out)] == [[DRAWING]] * 2
        assert manifest_of(out).records.quarantined == {"image_not_found": 1}
        (name,) = (path.name for path in (out / FOLDER).iterdir() if UNIT.fullmatch(path.name))
        units = read_units(locate(str(out)), name)
        assert units is not None
        unit = units.record(manifest_of(out).parts[0].key)
        assert unit is not None
        digest = xxhash.xxh3_128_hexdigest(DRAWING)
        assert unit.fetched == {paths[0]: digest, paths[1]: "image_not_found"}
        assert run_recipe(recipe)[0].units == 0
        assert len(server.asked) == 2


def test_a_table_of_questions_is_given_a_place_for_its_image_by_a_template(
    tmp_path: Path, seeing: Path
) -> None:
    rows = [{"question": "What?", "answer": "It.", "image": {"bytes": drawing(), "path": "x"}}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    source = {"instruction": "<image>\n{question}", "output": "answer"}
    recipe = recipe_of(
        tmp_path,
        seeing,
        path=tmp_path / "a.parquet",
        shape="alpaca",
        source=source,
        images={"field": "image"},
    )
    run_recipe(recipe)
    (sample,) = samples(tmp_path / "out/see/train")
    assert sample["images"] == [drawing()]


def test_a_text_only_stream_knows_nothing_of_images(
    tmp_path: Path, seeing: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its keys, and what is written of it, are as they were. Pillow need not be installed, and urllib3 not for it."""
    for package in ("PIL", "urllib3"):
        monkeypatch.setitem(sys.modules, package, None)
    talk = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]
    recipe = recipe_of(tmp_path, seeing, [{"conversations": talk}], shape="sharegpt")
    run_recipe(recipe)
    manifest = manifest_of(tmp_path / "out/see/train")
    assert manifest.encoding.columns == {"turns": "json"}
    said = (tmp_path / "out/see/train/mdsmix.manifest").read_text()
    assert "image" not in said
    assert replace(manifest.encoding, images={}) == manifest.encoding
    streams = {"see": stream(tmp_path / "a.jsonl", "sharegpt"), "seen": stream("b.jsonl")}
    answer = mdsmix("convert", write_recipe(tmp_path, seeing, streams=streams))
    assert answer.code == 2
    assert "pip install 'mdsmix[images]'" in answer.err
