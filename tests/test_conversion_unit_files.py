"""Files of finished units: their contents are read as they were written, and damage is noticed,
since a record is trusted without reading the source. Units that were joined into segments are found
again, whenever a run ends, and joining changes no published byte.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict
from itertools import count, permutations
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import orjson
import pytest
import xxhash
from zstandard import ZstdCompressor

from mdsmix.conversion import finished_units, unit_files
from mdsmix.conversion.finished_units import StoredUnits, list_stored
from mdsmix.conversion.planning import ArrayPart, Options
from mdsmix.conversion.run import convert_part
from mdsmix.conversion.unit_files import (
    FOLDER,
    SEGMENT,
    BlobRef,
    UnitFile,
    pack_unit_file,
    parse_record,
    read_blobs,
    read_unit_file,
)
from mdsmix.errors import Unreachable
from mdsmix.kinds import open_recipe
from mdsmix.shards.counts import Records, Totals
from mdsmix.shards.lease import Lease
from mdsmix.storage import Location, locate
from mdsmix.storage.local import LocalPath
from tests.converting import Project, RecordingWatcher, flip_byte, is_intact, read_public_files

KEYS = [f"{number:032x}" for number in range(6)]


def make_record(key: str) -> bytes:
    record = unit_files.UnitRecord(
        key=key, backend="b", shards=[], totals=Totals(), records=Records()
    )
    return orjson.dumps(asdict(record))


def make_blob(key: str) -> bytes:
    """Return a blob of another length and other bytes for each key."""
    return key[-1].encode() * (3 + int(key[-1]))


@pytest.fixture
def folder(tmp_path: Path) -> Location:
    """Two segments of three units each."""
    folder = locate(str(tmp_path))
    for keys in (KEYS[:3], KEYS[3:]):
        unit_files.write_segment(
            folder, [pack_unit_file([make_record(key)], {key: make_blob(key)}) for key in keys]
        )
    return folder


def read_segments(folder: Location) -> dict[str, UnitFile]:
    names = [name for name, _ in (folder / FOLDER).list()]
    return {name: read_unit_file(folder, name) for name in filter(SEGMENT.fullmatch, names)}


def map_blobs_to_segments(folder: Location) -> dict[str, str]:
    """Return the name of each blob -> the name of its segment."""
    names = dict[str, str]()
    for name, segment in read_segments(folder).items():
        names |= dict.fromkeys(segment.blobs, name)
    return names


def test_a_file_of_its_own_overrides_a_segment(folder: Location) -> None:
    own, hashes = f"{KEYS[1]}-01234567.unit", f"{KEYS[2]}.hashes"
    for name in (own, hashes):
        (folder / FOLDER / name).write(pack_unit_file([make_record(KEYS[1])], {}))
    stored = list_stored(cast(Any, SimpleNamespace(shard_folders=[folder])))
    assert {name for name in stored.files if len(name) == 32} == {*KEYS}
    assert (stored.files[KEYS[1]], stored.find_hashes_file(KEYS[2])) == (own, hashes)
    assert {stored.files[KEYS[0]], stored.files[KEYS[5]]} == stored.segments.keys()


def test_blobs_can_be_read_in_any_order(folder: Location) -> None:
    """One key has a file of its own. The head is read at once, or not."""
    own = "f" * 32
    (folder / FOLDER / f"{own}.hashes").write(pack_unit_file((), {"other": b"1", own: b"own"}))
    for segment in read_segments(folder).values():
        keys = {key: parse_record(line).key for key, line in segment.records.items()}
        assert keys == {key: key for key in segment.blobs}
    file = f"{own}.hashes"
    joined = map_blobs_to_segments(folder)
    assert sorted(joined) == KEYS
    files = {file: file, **{f"{key}.hashes": name for key, name in joined.items()}}
    for order in permutations([*KEYS[2:4], own]):
        expected = [b"own" if key == own else make_blob(key) for key in order]
        refs = [BlobRef(key, StoredUnits(files=files).find_hashes_file(key)) for key in order]
        for head_bytes in (9, 2 << 20):
            with mock.patch.object(unit_files, "HEAD_BYTES", head_bytes):
                assert list(read_blobs(folder, refs)) == expected


def test_a_segment_with_a_damaged_head_counts_as_empty(folder: Location) -> None:
    """Its records would otherwise be published without reading the shards. A bit that Zstandard
    does not read changes nothing.
    """
    for name, segment in read_segments(folder).items():
        content = (folder / FOLDER / name).read()
        head_end = 8 + int.from_bytes(content[:8], "little")
        unchanged = 0
        for offset in range(0, head_end, 5):
            damaged = bytearray(content)
            damaged[offset] ^= 1 << offset % 8
            (folder / FOLDER / name).write(bytes(damaged))
            result = read_unit_file(folder, name)
            assert result in (segment, UnitFile()), offset
            unchanged += result == segment
        assert unchanged < head_end // 20
        for length in (0, 5, 8, 20, head_end - 1):
            (folder / FOLDER / name).write(content[:length])
            assert read_unit_file(folder, name) == UnitFile()


def test_unreadable_fingerprints_are_an_error(folder: Location) -> None:
    """If a store failure counted as no fingerprints, duplicates would be published."""
    blobs = map_blobs_to_segments(folder)
    failing = Unreachable("for a moment")
    with (
        mock.patch.object(LocalPath, "fetch", side_effect=failing),
        pytest.raises(Unreachable, match="for a moment"),
    ):
        list(read_blobs(folder, [BlobRef(*blob) for blob in blobs.items()]))
    segment = folder / FOLDER / blobs[KEYS[2]]
    truncate = lambda: segment.write(segment.read()[:-1])  # noqa: E731  (after its head)
    for damage in (truncate, segment.delete):
        damage()
        with pytest.raises(Unreachable, match=r"segment with .* is damaged or missing"):
            list(read_blobs(folder, [BlobRef(KEYS[2], blobs[KEYS[2]])]))
    assert list(read_blobs(folder, [BlobRef(KEYS[3], blobs[KEYS[3]])])) == [make_blob(KEYS[3])]


def test_files_of_another_format_count_as_empty(folder: Location) -> None:
    """An older or a newer mdsmix may have written them under the same names."""
    for head in (b"", b"[]", b"{}", b"3", b"[[1]]", b'[["a", "b"]]', b"\xff" * 50):
        frame = ZstdCompressor(write_checksum=True).compress(head)
        for content in (head, len(frame).to_bytes(8, "little") + frame):
            name = f"{xxhash.xxh128_hexdigest(content)}.segment"
            (folder / FOLDER / name).write(content)
            assert not read_unit_file(folder, name).records
    assert sorted(map_blobs_to_segments(folder)) == KEYS
    name = f"{KEYS[0]}-01234567.unit"
    key = b'{"key":"%s"' % KEYS[0].encode()
    for content in (b"[]", b"3", b"{", key + b"}", key + b',"backend":3}'):
        (folder / FOLDER / name).write(pack_unit_file([content], {}))
        assert parse_record(read_unit_file(folder, name).records.get(KEYS[0], b"")) is None


TEXTS = [f"Document {n:02} is about the number {n:02}. " * 3 for n in range(21)]
LATER = [*TEXTS, {"text": 5}, "One more, which two others equal."]
FILES = re.compile(r"[0-9a-f]{32}.*\.(segment|unit|hashes)")
DROP = "streams.web.duplicates=drop"


@pytest.fixture
def project(project: Project) -> Project:
    """Seven units, which are joined into segments of two files."""
    project.set_window_size(400)
    project.patch.setattr(finished_units, "FEWEST_TO_JOIN", 3)
    project.patch.setattr(finished_units, "MOST_FILES", 2)
    project.write_source(TEXTS)
    return project


def list_unit_files(project: Project, pattern: re.Pattern[str] = FILES) -> list[str]:
    return list(filter(pattern.fullmatch, os.listdir(project.train / FOLDER)))


def read_joined_records(project: Project) -> dict[str, bytes]:
    """Return the records of all segments."""
    records = dict[str, bytes]()
    for segment in read_segments(locate(project.train)).values():
        records |= segment.records
    return records


def publish_without_joining(project: Project, *overrides: str) -> dict[str, bytes]:
    """Return the public files of the same source when no unit files are joined."""
    with project.patch.context() as patch:
        patch.setattr(finished_units, "FEWEST_TO_JOIN", 1000)
        return read_public_files(project.convert_into(*overrides).train)


@pytest.mark.parametrize("override", ["publish=versioned", DROP])
def test_joined_units_are_reused(project: Project, override: str) -> None:
    outcome = project.run(override)
    assert (outcome.units, outcome.reused) == (7, 0)
    assert list_unit_files(project) == list_unit_files(project, SEGMENT)
    assert len(list_unit_files(project)) == (7 if override == DROP else 4)
    assert project.run(override).state == "up to date"
    project.write_source([*LATER, LATER[-1], TEXTS[0]])
    assert project.run(override).reused == 6
    project.switch_machine("another")
    outcome = project.run(override)
    assert outcome.reused == outcome.units
    assert project.manifest.records.duplicates == (0 if override == DROP else 2)
    assert (
        publish_without_joining(project, override).items()
        <= read_public_files(project.train).items()
    )
    if override == DROP:  # a part finds the joined fingerprints and reads no source
        watcher = RecordingWatcher()
        recipe = open_recipe(project.recipe, [DROP])
        (part,) = convert_part(recipe, Options(part=ArrayPart(1, 2)), watcher)
        assert (part.units, part.reused, watcher.messages) == (4, 4, [])


def test_wherever_joining_ends_no_unit_is_lost_or_converted_again(project: Project) -> None:
    """The second publication joins the files that the first left. One unit of a segment was
    converted again since.
    """
    project.write_source(TEXTS[:12])
    project.run()
    record = parse_record(next(iter(read_joined_records(project).values())))
    (project.train / record.shards[0].stored.basename).unlink()
    project.write_source(LATER)
    old_index = project.files["index.json"]
    expected = publish_without_joining(project)
    before = shutil.copytree(project.out, project.folder / "before")
    for number in count():
        shutil.rmtree(project.out)
        shutil.copytree(before, project.out)
        with project.patch.context() as patch:
            has_ended = end_joining_at(patch, number)
            try:
                project.run()
            except KeyboardInterrupt:
                assert has_ended()
        assert project.files["index.json"] in (old_index, expected["index.json"])
        assert not project.run().done, "no finished unit is converted again"
        assert expected.items() <= read_public_files(project.train).items()
        if not has_ended():
            break
    project.write_source([*LATER, "And the last one."])
    outcome = project.run()
    assert (outcome.units, outcome.reused) in ((8, 7), (7, 6))
    assert is_intact(project.train)
    assert number > 6


def end_joining_at(patch: pytest.MonkeyPatch, number: int) -> Callable[[], bool]:
    """Interrupt joining before its write or deletion of this number. Return a function that returns
    whether there was one.
    """
    calls = list[str]()

    def wrap(change: Callable[..., Any], names: re.Pattern[str]) -> Callable[..., Any]:
        def counted(self: LocalPath, *args: Any) -> Any:
            if self.parent.name == FOLDER and names.fullmatch(self.name):
                calls.append(self.name)
                if len(calls) > number:
                    raise KeyboardInterrupt
            return change(self, *args)

        return counted

    patch.setattr(LocalPath, "write", wrap(LocalPath.write, SEGMENT))
    patch.setattr(LocalPath, "delete", wrap(LocalPath.delete, FILES))
    return lambda: len(calls) > number


def test_damaged_segments_are_written_again_and_their_units_converted_once(
    project: Project,
) -> None:
    """First one segment is damaged at a time, then all. New segments have the names and sizes of
    the damaged ones.
    """
    project.run()
    for name, segment in read_segments(locate(project.train)).items():
        flip_byte(project.train / FOLDER / name, 20)
        (project.train / "index.json").unlink()
        assert project.run().done == len(segment.records)
    for name in list_unit_files(project, SEGMENT):
        flip_byte(project.train / FOLDER / name, 20)
    for machine, reused in (("another", 0), ("a third", 7)):
        project.switch_machine(machine)
        (project.train / "index.json").unlink()
        assert project.run().reused == reused


def test_a_damaged_segment_is_an_error_if_duplicates_are_dropped(
    project: Project,
) -> None:
    project.run(DROP)
    key = project.keys[0]
    segments = read_segments(locate(project.train))
    (name,) = [name for name, segment in segments.items() if key in segment.blobs]
    blob = segments[name].blobs[key]
    flip_byte(project.train / FOLDER / name, (blob.start + blob.stop) // 2)
    project.write_source(LATER)
    with pytest.raises(
        Unreachable, match=r"segment with .* is damaged or missing: .* --verify-target"
    ):
        project.run(DROP)
    assert 0 < project.run(DROP, verify_target=True).reused < 6
    project.write_source([*LATER, TEXTS[0]])
    assert project.run(DROP).reused == 6
    assert (
        publish_without_joining(project, DROP).items() <= read_public_files(project.train).items()
    )


def test_a_run_that_lost_its_lease_does_not_delete_joined_files(project: Project) -> None:
    """They may be another run's by then."""
    project.patch.setattr(Lease, "is_held_recently", lambda _: False)
    project.run()
    assert (
        len(list_unit_files(project, unit_files.UNIT_FILE_NAME))
        == len(read_joined_records(project))
        == 7
    )
