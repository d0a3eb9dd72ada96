"""Whatever is done to a stream, on a disk or in a store, is done in an order that a reader and a
killed process can live with.
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
from tests.converting import Web, documents, done, list_in_parts, lying_at, write_jsonl
from tests.faults import Proxy
from tests.publish_order import RECORD, RULES, Story, held_against
from tests.recording import Disk, steps_in_a_store

TEXTS = [{"text": f"Document {n} is about the number {n}. "} for n in range(40)]


@dataclass
class Place:
    """A recipe that publishes into a folder or a bucket, and what its publications are seen to
    change.
    """

    recipe: Path
    url: str
    settings: tuple[str, ...]
    proxy: Proxy | None

    @property
    def split(self) -> Location:
        return locate(self.url) / "web/train"

    def recorded(self, work: Callable[[Place], object]) -> Story:
        before = lying_at(self.url)
        if self.proxy:
            self.proxy.requests.clear()
            work(self)
            steps = steps_in_a_store(self.proxy, self.url.removeprefix("s3://"), before)
        else:
            disk = Disk(Path(self.url), self.recipe.parent / f"recorded {time.monotonic_ns()}")
            with disk.recording():
                work(self)
            steps = disk.steps
        story = Story(before, steps)
        assert story.after == lying_at(self.url), "nothing was changed unseen"
        return story


@pytest.fixture
def place(request: pytest.FixtureRequest, web: Web) -> Place:
    web.windows(500)
    list_in_parts(web.patch)
    write_sources(web.folder, 1)
    web.says(documents(web.folder / "*.jsonl"))
    if request.param == "disk":
        return Place(web.recipe, str(web.out), (), None)
    url = f"s3://{request.getfixturevalue('bucket')}/out"
    return Place(web.recipe, url, (f"remote={url}",), request.getfixturevalue("proxy"))


def write_sources(folder: Path, version: int) -> None:
    """Equal files give equal shards; of a.jsonl one line is bad, and the others are of this
    version.
    """
    write_jsonl(folder / "a.jsonl", [{"text": version}, {"text": str(version)}, *TEXTS])
    for name in ("b", "c"):
        write_jsonl(folder / f"{name}.jsonl", TEXTS[:10])


def command(name: str, *arguments: str) -> Callable[[Place], None]:
    def work(place: Place) -> None:
        split = (place.split, "--recipe") if name == "repair" else ()
        workers = () if name == "mix" else ("--workers", 2)
        out = ("--out", f"{place.url}/mixed", "--replace") if name == "mix" else ()
        done(name, *split, place.recipe, *place.settings, *out, *workers, *arguments)

    return work


def edit(place: Place) -> None:
    write_sources(place.recipe.parent, 2)


def mend(place: Place) -> None:
    """No record is bad any more."""
    write_jsonl(place.recipe.parent / "a.jsonl", TEXTS)


def damage(place: Place) -> None:
    """One shard is flipped, and one is gone; one part of the list of sources is flipped, and any
    other gone.
    """
    folder = find_current(place.split)
    flipped, gone, *_ = (folder / shard.stored.basename for shard in read_index(folder).shards)
    parts = [folder / name for name, _ in folder.list() if name.endswith(".sources.zst")]
    for at in (flipped, parts[0]):
        content = at.read()
        at.delete()
        at.write(content[:-1] + bytes([content[-1] ^ 1]))
    for at in (gone, *parts[1:]):
        at.delete()


def gc(*options: str) -> Callable[[Place], None]:
    """Unit records are slow to go, so whatever does not wait for them is seen to overtake them."""

    def work(place: Place) -> None:
        with pytest.MonkeyPatch.context() as patch:
            for kind in (LocalPath, S3Path):
                patch.setattr(kind, "delete", _slowly(kind.delete))
            done("gc", place.split, "--older-than", "0s", "--delete", *options)

    return work


def _slowly(delete: Callable[[Location], None]) -> Callable[[Location], None]:
    def slow(place: Location) -> None:
        if RECORD.fullmatch(place.url.removeprefix("s3:/")):
            time.sleep(0.1)
        delete(place)

    return slow


convert, versioned = command("convert"), command("convert", "publish=versioned")
repair, repair_version = command("repair"), command("repair", "publish=versioned")
LIVES: dict[str, tuple[Sequence[Callable[[Place], object]], str]] = {
    "in place": (
        [convert, edit, convert, damage, repair, mend, convert, gc()],
        "the_manifest_before_its_index an_index_is_kept_before_it_goes the_lease_is_confirmed_before_the_index",
    ),
    "versions": (
        [versioned, damage, repair_version, edit, versioned, gc("--keep", "1")],
        "a_version_is_marked_before_another_is_named a_version_never_changes the_index_goes_first_of_a_version",
    ),
    "to versions and back": (
        [convert, edit, versioned, mend, convert],
        "an_index_is_kept_before_it_goes a_version_is_marked_before_another_is_named",
    ),
    "a mix, twice": (
        [convert, command("mix", "--seed", "1"), command("mix", "--seed", "2")],
        "the_manifest_before_its_index an_index_is_kept_before_it_goes",
    ),
}
"What is done one after the other, and the rules of which at least that must give an example."
WHERE = [("disk", name) for name in LIVES] + [("store", name) for name in ("in place", "versions")]
"Between them every request that changes something; the others are made of the same steps."


@pytest.mark.parametrize(("place", "life"), WHERE, indirect=["place"])
def test_everything_is_done_in_an_order_that_can_end_anywhere(place: Place, life: str) -> None:
    works, expected = LIVES[life]
    spoke = set[str]()
    for work in works:
        if work in (edit, mend, damage):
            work(place)
        else:
            spoke |= held_against(place.recorded(work)).keys()
    assert {*expected.split(), "all_is_done_under_the_lease"} <= spoke


def test_every_rule_has_its_example() -> None:
    named = {name for _, expected in LIVES.values() for name in expected.split()}
    assert {rule.__name__ for rule in RULES} - named == {"all_is_done_under_the_lease"}
