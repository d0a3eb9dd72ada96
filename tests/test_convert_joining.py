"""What is packed is found again as it was, whatever the moment at which a run ends; and no published byte tells of it."""

import os
import re
import shutil
from collections.abc import Callable
from typing import Any

import pytest

from mdsmix.convert import garbage as gc
from mdsmix.convert import stored
from mdsmix.convert.ledger import FOLDER, SEGMENT, UNIT, UnitFile, read_units, record_of
from mdsmix.convert.planning import ArrayPart, Options
from mdsmix.convert.run import convert
from mdsmix.errors import Unreachable
from mdsmix.kinds import open_recipe
from mdsmix.shards.lease import Lease
from mdsmix.storage import locate
from mdsmix.storage.local import LocalPath
from tests.converting import Told, Web, age, flip, is_whole

TEXTS = [f"Document {n:02} is about the number {n:02}. " * 3 for n in range(21)]
LATER = [*TEXTS, {"text": 5}, "One more, which two others equal."]
FILES = re.compile(r"[0-9a-f]{32}.*\.(segment|unit|hashes)")
DROP = "streams.web.duplicates=drop"


@pytest.fixture
def web(web: Web) -> Web:
    """Seven units; two of them are packed together, and their fingerprints in files of a few."""
    web.windows(400)
    pack(web.patch, 3)
    web.holds(TEXTS)
    return web


def pack(patch: pytest.MonkeyPatch, fewest: int) -> None:
    for name, value in {"FEWEST": fewest, "MOST_FILES": 2}.items():
        patch.setattr(stored, name, value)


def ledger(web: Web, pattern: re.Pattern[str] = FILES) -> list[str]:
    return list(filter(pattern.fullmatch, os.listdir(web.train / FOLDER)))


def segments(web: Web) -> dict[str, UnitFile]:
    return {name: read_units(locate(web.train), name) for name in ledger(web, SEGMENT)}


def together(web: Web) -> dict[str, bytes]:
    """The records that segments hold."""
    return {key: line for of in segments(web).values() for key, line in of.records.items()}


def published(web: Web) -> dict[str, bytes]:
    return {name: held for name, held in web.files.items() if not name.startswith(FOLDER)}


def unpacked(web: Web, *overrides: str) -> dict[str, bytes]:
    """What is published of the same source where nothing is packed."""
    with web.patch.context() as patch:
        pack(patch, 1000)
        return published(web.anew(*overrides))


def forget(web: Web, name: str) -> None:
    """What this machine remembers of the sources: the next run is on another."""
    web.patch.setenv("MDSMIX_CACHE", str(web.folder / name))


@pytest.mark.parametrize("override", ["publish=versioned", DROP])
def test_units_are_packed_when_they_are_published_and_known_again(web: Web, override: str) -> None:
    outcome = web.run(override)
    assert (outcome.units, outcome.reused) == (7, 0)
    assert ledger(web) == ledger(web, SEGMENT)
    assert len(ledger(web)) == (7 if override == DROP else 4)
    assert web.run(override).state == "up to date"
    web.holds([*LATER, LATER[-1], TEXTS[0]])
    assert web.run(override).reused == 6
    forget(web, web.patch, "another")
    outcome = web.run(override)
    assert outcome.reused == outcome.units
    assert web.manifest.records.duplicates == (0 if override == DROP else 2)
    assert unpacked(web, web.patch, override).items() <= published(web).items()
    if override == DROP:  # a part reads no source for duplicates whose fingerprints are packed
        told, recipe = Told(), open_recipe(web.recipe, [DROP])
        (part,) = convert(recipe, Options(part=ArrayPart(1, 2)), told)
        assert (part.units, part.reused, told.said) == (4, 4, [])


def test_wherever_joining_ends_nothing_is_lost_and_nothing_done_again(web: Web) -> None:
    """The second publication packs what the first left, and takes from a pack a unit that was done again since."""
    folder = locate(web.train)
    web.holds(TEXTS[:12])
    web.run()
    packed = together(web)
    (folder / record_of(next(iter(packed.values()))).shards[0].stored.basename).delete()
    web.holds(LATER)
    old = web.files["index.json"]
    before = shutil.copytree(web.out, web.folder / "before")
    whole, number, is_over = unpacked(web, web.patch), 0, False
    while not is_over:
        shutil.rmtree(web.out)
        shutil.copytree(before, web.out)
        with web.patch.context() as patch:
            ended = killed_at(patch, number)
            try:
                web.run()
            except KeyboardInterrupt:
                assert ended()
        assert web.files["index.json"] in (old, whole["index.json"])
        assert not web.run().done, "what was done before the end is not done again"
        assert whole.items() <= published(web).items()
        number, is_over = number + 1, not ended()
    web.holds([*LATER, "And the last one."])
    outcome = web.run()
    assert (outcome.units, outcome.reused) in ((8, 7), (7, 6))
    assert is_whole(web.train)
    assert number > 7


def killed_at(patch: pytest.MonkeyPatch, number: int) -> Callable[[], bool]:
    """Joining ends before its write or deletion of this number; tells whether there was one."""
    counts = {"left": number}

    def counting(change: Callable[..., Any], names: re.Pattern[str]) -> Callable[..., Any]:
        def one(self: LocalPath, *args: Any) -> Any:
            if self.parent.name == FOLDER and names.fullmatch(self.name):
                counts["left"] -= 1
                if counts["left"] < 0:
                    raise KeyboardInterrupt
            return change(self, *args)

        return one

    patch.setattr(LocalPath, "write", counting(LocalPath.write, SEGMENT))
    patch.setattr(LocalPath, "delete", counting(LocalPath.delete, FILES))
    return lambda: counts["left"] < 0


def test_damaged_packs_are_written_anew_and_their_units_done_again_once(web: Web) -> None:
    """First one alone, then all; the new packs have the names of the damaged ones, and their sizes too."""
    web.run()
    for name, segment in segments(web).items():
        flip(web.train / FOLDER / name, 20)
        (web.train / "index.json").unlink()
        assert web.run().done == len(segment.records)
    for name in ledger(web, SEGMENT):
        flip(web.train / FOLDER / name, 20)
    for machine, reused in (("another", 0), ("a third", 7)):
        forget(web, web.patch, machine)
        (web.train / "index.json").unlink()
        assert web.run().reused == reused


def damage_fingerprints(web: Web) -> None:
    """Those of the first unit, and with them the segment in which they lie."""
    ((name, at),) = [
        (n, of.blobs[key]) for n, of in segments(web).items() if (key := web.keys[0]) in of.blobs
    ]
    flip(web.train / FOLDER / name, (at.start + at.stop) // 2)


def test_where_duplicates_are_dropped_a_damaged_pack_is_told_and_made_anew_where_that_is_asked(
    web: Web,
) -> None:
    web.run(DROP)
    damage_fingerprints(web)
    web.holds(LATER)
    with pytest.raises(Unreachable, match=r"segment is damaged or gone.* --verify-target"):
        web.run(DROP)
    assert 0 < web.run(DROP, verify_target=True).reused < 6
    web.holds([*LATER, TEXTS[0]])
    assert web.run(DROP).reused == 6
    assert unpacked(web, web.patch, DROP).items() <= published(web).items()


def test_a_run_that_lost_its_lease_deletes_none_of_the_files_that_it_has_packed(web: Web) -> None:
    """By then they may be another run's."""
    web.patch.setattr(Lease, "is_held_still", lambda _: False)
    web.run()
    assert len(ledger(web, UNIT)) == len(together(web)) == 7


def garbage(web: Web, days: float) -> set[str]:
    """The names of what may go when all is so old."""
    age(web.train, days)
    return {item.name for item in gc.find_garbage(locate(web.train), gc.KEEP_SECONDS)}


def test_what_is_packed_goes_when_nothing_names_a_unit_of_it(web: Web) -> None:
    web.run()
    old, folder = {*web.keys}, locate(web.train)
    web.holds([TEXTS[0].upper(), *TEXTS[1:]])
    web.run()
    assert garbage(web, 6) == set()
    found = garbage(web, 8)
    kinds = sorted(name.rpartition(".")[2] for name in found)
    assert kinds == ["index", "mds", "mds"], "a unit beside it is published"
    # Packed a moment ago: whoever goes on from there believes what they say
    for name in ledger(web, SEGMENT):
        os.utime(web.train / FOLDER / name)
    left = {item.name for item in gc.find_garbage(folder, gc.KEEP_SECONDS)}
    (stays,) = found - left
    records = together(web)
    (key,) = old & records.keys() - {*web.keys}
    assert record_of(records[key]).shards[0].stored.basename == stays
    age(web.train, 8)
    gc.delete_garbage(folder, gc.KEEP_SECONDS, print)
    assert gc.find_garbage(folder, 0) == []
    assert web.run().state == "up to date"
    web.holds(TEXTS)  # the unit's record is there, and its shard is not
    assert web.run().done == 1
    assert is_whole(web.train)
