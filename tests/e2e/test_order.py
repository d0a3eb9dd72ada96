"""Every command writes in an order that is safe for readers and for a run that continues after a
kill, on a disk and in a store (`tests/publish_order.py` has the rules).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from mdsmix.shards.index import read_index
from mdsmix.shards.published import find_current
from mdsmix.storage import Location, locate
from mdsmix.storage.local import LocalPath
from mdsmix.storage.s3 import S3Path
from tests.converting import Project, documents, list_in_parts, read_location, run_ok, write_jsonl
from tests.faults import Proxy
from tests.publish_order import RECORD, RULES, RecordedRun, check_order
from tests.recording import Disk, list_store_steps

TEXTS = [{"text": f"Document {n} is about the number {n}. "} for n in range(40)]


@dataclass
class Place:
    """A recipe that publishes into a folder or a bucket."""

    recipe: Path
    url: str
    settings: tuple[str, ...]
    proxy: Proxy | None

    @property
    def split(self) -> Location:
        return locate(self.url) / "web/train"

    def record(self, command: Callable[[Place], object]) -> RecordedRun:
        """Run a command, and return the steps in which it changed the target."""
        before = read_location(self.url)
        if self.proxy:
            self.proxy.requests.clear()
            command(self)
            steps = list_store_steps(self.proxy, self.url.removeprefix("s3://"), before)
        else:
            disk = Disk(Path(self.url), self.recipe.parent / f"recorded {time.monotonic_ns()}")
            with disk.recording():
                command(self)
            steps = disk.steps
        run = RecordedRun(before, steps)
        assert run.after == read_location(self.url), "every change was recorded"
        return run


@pytest.fixture
def place(request: pytest.FixtureRequest, project: Project) -> Place:
    project.set_window_size(500)
    list_in_parts(project.patch)
    write_sources(project.folder, 1)
    project.configure(documents(project.folder / "*.jsonl"))
    if request.param == "disk":
        return Place(project.recipe, str(project.out), (), None)
    url = f"s3://{request.getfixturevalue('bucket')}/out"
    return Place(project.recipe, url, (f"remote={url}",), request.getfixturevalue("proxy"))


def write_sources(folder: Path, version: int) -> None:
    """Write three files. b.jsonl and c.jsonl are equal, so their shards are too. a.jsonl has a bad
    record and one that differs between versions.
    """
    write_jsonl(folder / "a.jsonl", [{"text": version}, {"text": str(version)}, *TEXTS])
    for name in ("b", "c"):
        write_jsonl(folder / f"{name}.jsonl", TEXTS[:10])


def command(name: str, *arguments: str) -> Callable[[Place], None]:
    """Return a function that runs `mdsmix NAME` on a place."""

    def run(place: Place) -> None:
        options = list[object]()
        if name == "repair":
            options = [place.split, "--recipe", place.recipe, *place.settings, "--workers", 2]
        elif name == "mix":
            out = f"{place.url}/mixed"
            options = [place.recipe, *place.settings, "--out", out, "--replace"]
        else:
            options = [place.recipe, *place.settings, "--workers", 2]
        run_ok(name, *options, *arguments)

    return run


def edit(place: Place) -> None:
    write_sources(place.recipe.parent, 2)


def fix_records(place: Place) -> None:
    """Replace the bad record."""
    write_jsonl(place.recipe.parent / "a.jsonl", TEXTS)


def damage(place: Place) -> None:
    """Damage one shard and delete one; damage one part of the list of sources and delete the
    others.
    """
    folder = find_current(place.split)
    shards = [folder / shard.stored.basename for shard in read_index(folder).shards]
    parts = [folder / name for name, _ in folder.list() if name.endswith(".sources.zst")]
    for file in (shards[0], parts[0]):
        content = file.read()
        file.delete()
        file.write(content[:-1] + bytes([content[-1] ^ 1]))
    for file in (shards[1], *parts[1:]):
        file.delete()


def gc(*options: str) -> Callable[[Place], None]:
    """Return a function that runs `mdsmix gc`. It deletes unit records slowly, so that a deletion
    that should wait for them but doesn't is recorded as earlier.
    """

    def run(place: Place) -> None:
        with pytest.MonkeyPatch.context() as patch:
            for kind in (LocalPath, S3Path):
                patch.setattr(kind, "delete", _delete_records_slowly(kind.delete))
            run_ok("gc", place.split, "--older-than", "0s", "--delete", *options)

    return run


def _delete_records_slowly(delete: Callable[[Location], None]) -> Callable[[Location], None]:
    def delete_slowly(location: Location) -> None:
        if RECORD.fullmatch(location.url.removeprefix("s3:/")):
            time.sleep(0.1)
        delete(location)

    return delete_slowly


convert = command("convert")
convert_versioned = command("convert", "publish=versioned")
repair = command("repair")
repair_version = command("repair", "publish=versioned")
CHANGES = (edit, fix_records, damage)
LIVES: dict[str, tuple[Sequence[Callable[[Place], object]], str]] = {
    "in place": (
        [convert, edit, convert, damage, repair, fix_records, convert, gc()],
        "the_manifest_is_written_before_its_index an_index_is_copied_before_it_is_replaced "
        "the_lease_is_confirmed_before_the_index",
    ),
    "versions": (
        [
            convert_versioned,
            damage,
            repair_version,
            edit,
            convert_versioned,
            gc("--keep", "1"),
        ],
        "a_version_is_marked_before_another_is_named a_version_never_changes "
        "the_index_of_a_version_is_deleted_first",
    ),
    "to versions and back": (
        [convert, edit, convert_versioned, fix_records, convert],
        "an_index_is_copied_before_it_is_replaced a_version_is_marked_before_another_is_named",
    ),
    "a mix, twice": (
        [convert, command("mix", "--seed", "1"), command("mix", "--seed", "2")],
        "the_manifest_is_written_before_its_index an_index_is_copied_before_it_is_replaced",
    ),
}
"What is done to a stream one after the other, and the rules that must apply to some step of it."
WHERE = [("disk", name) for name in LIVES] + [("store", name) for name in ("in place", "versions")]
"In a store, these two make every kind of request that writes; the others have the same steps."


@pytest.mark.parametrize(("place", "life"), WHERE, indirect=["place"])
def test_a_command_may_end_after_any_of_its_writes(place: Place, life: str) -> None:
    actions, expected = LIVES[life]
    applied = set[str]()
    for action in actions:
        if action in CHANGES:
            action(place)
        else:
            applied |= check_order(place.record(action)).keys()
    assert {*expected.split(), "all_is_done_under_the_lease"} <= applied


def test_every_rule_applies_to_some_step() -> None:
    named = set[str]()
    for _, expected in LIVES.values():
        named.update(expected.split())
    assert {rule.__name__ for rule in RULES} - named == {"all_is_done_under_the_lease"}
