"""What is packed is found again as it was, whatever the moment at which a run ends; and no published byte tells of it."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mdsmix.convert import garbage as gc
from mdsmix.convert import stored
from mdsmix.convert.ledger import FOLDER, SEGMENT, UNIT, FinishedUnits, joined, read_segments
from mdsmix.convert.parts import ArrayPart
from mdsmix.convert.planning import Options
from mdsmix.convert.run import convert_part
from mdsmix.convert.stored import stored_hash
from mdsmix.errors import Unreachable
from mdsmix.kinds import open_recipe
from mdsmix.shards.lease import Lease
from mdsmix.shards.verification import verify
from mdsmix.storage import locate
from mdsmix.storage.local import LocalPath
from tests.converting import (
    Told,
    documents,
    files,
    manifest_of,
    quarantined,
    run_recipe,
    windows,
    write_jsonl,
    write_recipe,
)

TEXTS = [{"text": f"Document {n:02} is about the number {n:02}. " * 3} for n in range(21)]
LATER = [*TEXTS, {"text": "One more, which two others equal."}]
FILES = re.compile(r"[0-9a-f]{32}.*\.(segment|unit|hashes)")


@pytest.fixture
def recipe(tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Seven units; two of them are packed together, and their fingerprints in files of a few."""
    windows(monkeypatch, 400)
    pack(monkeypatch, 3)
    write_jsonl(tmp_path / "a.jsonl", TEXTS)
    return write_recipe(
        tmp_path, tokenizer_folder, streams={"web": documents(tmp_path / "a.jsonl")}
    )


def pack(patch: pytest.MonkeyPatch, fewest: int) -> None:
    patch.setattr(stored, "FEWEST", fewest)
    patch.setattr(stored, "MOST_UNITS", 2)
    patch.setattr(stored, "DELETED", 4)


def split(recipe: Path) -> Path:
    return recipe.parent / "out/web/train"


def ledger(recipe: Path) -> list[str]:
    return os.listdir(split(recipe) / FOLDER)


def in_segments(recipe: Path) -> dict[str, FinishedUnits]:
    return read_segments(locate(split(recipe)), ledger(recipe))


def together(recipe: Path) -> FinishedUnits:
    """What all segments hold."""
    return joined(in_segments(recipe).values())


def published(recipe: Path, out: str = "out") -> dict[str, bytes]:
    found = files(recipe.parent / out / "web/train")
    return {name: held for name, held in found.items() if not name.startswith(FOLDER)}


def unpacked(recipe: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> dict[str, bytes]:
    """What is published of the same source where nothing is packed."""
    with monkeypatch.context() as patch:
        pack(patch, 1000)
        run_recipe(recipe, f"local={recipe.parent / 'alone'}", *overrides)
    return published(recipe, "alone")


def forget(monkeypatch: pytest.MonkeyPatch, recipe: Path, name: str) -> None:
    """What this machine remembers of the sources: the next run is on another."""
    monkeypatch.setenv("MDSMIX_CACHE", str(recipe.parent / name))


@pytest.mark.parametrize(
    "override", ["publish=replace", "publish=versioned", "streams.web.duplicates=drop"]
)
def test_units_are_packed_when_they_are_published_and_known_again(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, override: str
) -> None:
    ((units, reused),) = [(o.units, o.reused) for o in run_recipe(recipe, override)]
    assert (units, reused) == (7, 0)
    assert not list(filter(UNIT.fullmatch, ledger(recipe)))
    assert not [name for name in ledger(recipe) if name.endswith(".hashes")]
    assert len(list(filter(SEGMENT.fullmatch, ledger(recipe)))) == 4
    assert run_recipe(recipe, override)[0].state == "up to date"

    write_jsonl(recipe.parent / "a.jsonl", [*LATER, LATER[-1], TEXTS[0]])
    for machine in ("", "another"):
        if machine:
            forget(monkeypatch, recipe, machine)
        outcome = run_recipe(recipe, override)[0]
        assert outcome.reused == (outcome.units if machine else 6)
    assert manifest_of(split(recipe)).records.duplicates == (0 if "drop" in override else 2)
    assert unpacked(recipe, monkeypatch, override).items() <= published(recipe).items()


def test_bad_records_of_units_that_are_packed_are_published_again(recipe: Path) -> None:
    write_jsonl(recipe.parent / "a.jsonl", [*TEXTS, {"text": 5}])
    run_recipe(recipe)
    assert not list(filter(UNIT.fullmatch, ledger(recipe)))
    before = quarantined(split(recipe))
    shutil.rmtree(split(recipe) / "quarantine")
    (split(recipe) / "index.json").unlink()
    assert run_recipe(recipe)[0].done == 0
    assert quarantined(split(recipe)) == before != []


def test_few_units_are_not_packed_and_as_many_as_it_takes_are(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack(monkeypatch, 8)
    run_recipe(recipe)
    assert not list(filter(SEGMENT.fullmatch, ledger(recipe)))
    pack(monkeypatch, 7)
    write_jsonl(recipe.parent / "a.jsonl", LATER)
    assert run_recipe(recipe)[0].reused == 6
    # One unit was edited: its old record stays alone, as any that no stream names.
    assert len(list(filter(UNIT.fullmatch, ledger(recipe)))) == 1
    assert len(together(recipe).records) == 7


def test_wherever_joining_ends_nothing_is_lost_and_nothing_done_again(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second publication packs what the first left, and takes from a pack a unit that was done again since."""
    folder = locate(split(recipe))
    write_jsonl(recipe.parent / "a.jsonl", TEXTS[:12])
    run_recipe(recipe)
    again = next(iter(together(recipe).records))
    shards = together(recipe).record(again).shards
    (folder / shards[0].stored.basename).delete()
    write_jsonl(recipe.parent / "a.jsonl", LATER)
    old = published(recipe)["index.json"]
    before = shutil.copytree(recipe.parent / "out", recipe.parent / "before")

    whole, number = unpacked(recipe, monkeypatch), 0
    while True:
        shutil.rmtree(recipe.parent / "out")
        shutil.copytree(before, recipe.parent / "out")
        with monkeypatch.context() as patch:
            ended = killed_at(patch, number)
            try:
                run_recipe(recipe)
            except KeyboardInterrupt:
                assert ended()
        assert published(recipe)["index.json"] in (old, whole["index.json"])
        again = run_recipe(recipe)[0]
        assert not again.done, "what was done before the end is not done again"
        assert whole.items() <= published(recipe).items()
        write_jsonl(recipe.parent / "a.jsonl", [*LATER, {"text": "And the last one."}])
        ((units, reused),) = [(o.units, o.reused) for o in run_recipe(recipe)]
        assert (units, reused) in ((8, 7), (7, 6)), number
        assert verify(folder, quick=False, begin=print, on_progress=print).faults == ()
        gc.delete_garbage(folder, 0, print)
        assert not [name for name in ledger(recipe) if name.endswith(".hashes")], number
        write_jsonl(recipe.parent / "a.jsonl", LATER)
        if not ended():
            break
        number += 1
    assert number > 6


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


def test_damaged_packs_are_written_anew_and_their_units_done_again_once(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First one alone, then all; the new packs have the names of the damaged ones, and their sizes too."""
    run_recipe(recipe)
    for name, segment in in_segments(recipe).items():
        flip(split(recipe) / FOLDER / name, 20)
        (split(recipe) / "index.json").unlink()
        assert run_recipe(recipe)[0].done == len(segment.records)
    for name in filter(SEGMENT.fullmatch, ledger(recipe)):
        flip(split(recipe) / FOLDER / name, 20)
    for machine, reused in (("another", 0), ("a third", 7)):
        forget(monkeypatch, recipe, machine)
        (split(recipe) / "index.json").unlink()
        assert run_recipe(recipe)[0].reused == reused


def flip(at: Path, place: int) -> None:
    content = bytearray(at.read_bytes())
    content[place] ^= 1
    at.write_bytes(content)


def damage_fingerprints(recipe: Path) -> None:
    """Those of the first unit, and with them the segment in which they lie."""
    place = together(recipe).blobs[manifest_of(split(recipe)).parts[0].key]
    flip(split(recipe) / FOLDER / place.file, place.start + place.bytes // 2)


def test_units_whose_packed_fingerprints_are_damaged_are_done_again_where_that_is_looked_for(
    recipe: Path,
) -> None:
    run_recipe(recipe)
    before = published(recipe)
    damage_fingerprints(recipe)
    told = Told()
    outcome = run_recipe(recipe, verify_target=True, watcher=told)[0]
    assert 0 < outcome.done < outcome.units
    assert sum(".segment is damaged" in sentence for sentence in told.said) == 1
    assert published(recipe) == before
    for name in filter(SEGMENT.fullmatch, ledger(recipe)):
        assert name.startswith(stored_hash(locate(split(recipe)) / FOLDER / name))
    assert run_recipe(recipe, verify_target=True)[0].done == 0


def test_where_duplicates_are_dropped_a_damaged_pack_is_told_and_made_anew_where_that_is_asked(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drop = "streams.web.duplicates=drop"
    run_recipe(recipe, drop)
    damage_fingerprints(recipe)
    write_jsonl(recipe.parent / "a.jsonl", LATER)
    with pytest.raises(Unreachable, match=r"segment is damaged or gone.* --verify-target"):
        run_recipe(recipe, drop)
    assert 0 < run_recipe(recipe, drop, verify_target=True)[0].reused < 6
    write_jsonl(recipe.parent / "a.jsonl", [*LATER, TEXTS[0]])
    assert run_recipe(recipe, drop)[0].reused == 6
    assert unpacked(recipe, monkeypatch, drop).items() <= published(recipe).items()


def test_a_part_reads_no_source_for_duplicates_whose_fingerprints_are_packed(recipe: Path) -> None:
    drop = "streams.web.duplicates=drop"
    run_recipe(recipe, drop)
    told = Told()
    (part,) = convert_part(open_recipe(str(recipe), [drop]), Options(), told, ArrayPart(1, 2))
    assert (part.units, part.reused, told.said) == (4, 4, [])


def test_a_run_that_lost_its_lease_deletes_none_of_the_files_that_it_has_packed(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By then they may be another run's."""
    monkeypatch.setattr(Lease, "is_held_still", lambda _: False)
    run_recipe(recipe)
    assert len(list(filter(UNIT.fullmatch, ledger(recipe)))) == 7
    assert len(together(recipe).records) == 7


def test_what_is_packed_goes_when_nothing_names_a_unit_of_it(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_recipe(recipe)
    old = {part.key for part in manifest_of(split(recipe)).parts}
    write_jsonl(recipe.parent / "a.jsonl", [{"text": TEXTS[0]["text"].upper()}, *TEXTS[1:]])
    run_recipe(recipe)
    current, folder = {part.key for part in manifest_of(split(recipe)).parts}, locate(split(recipe))
    age(split(recipe), 6)
    assert gc.find_garbage(folder, gc.KEEP_SECONDS) == []
    age(split(recipe), 8)
    found = gc.find_garbage(folder, gc.KEEP_SECONDS)
    assert {item.kind for item in found} == {"shard", "old index"}, "a unit beside it is published"
    # Packed a moment ago: whoever goes on from there believes what they say
    for name in in_segments(recipe):
        os.utime(split(recipe) / FOLDER / name)
    left = gc.find_garbage(folder, gc.KEEP_SECONDS)
    (stays,) = {item.name for item in found if item.kind == "shard"} - {item.name for item in left}
    (key,) = old - current - {last(old, together(recipe))}
    assert together(recipe).record(key).shards[0].stored.basename == stays
    age(split(recipe), 8)
    gc.delete_garbage(folder, gc.KEEP_SECONDS, print)
    assert gc.find_garbage(folder, 0) == []
    assert run_recipe(recipe)[0].state == "up to date"
    write_jsonl(
        recipe.parent / "a.jsonl", TEXTS
    )  # the unit's record is there, and its shard is not
    assert run_recipe(recipe)[0].done == 1
    assert verify(folder, quick=False, begin=print, on_progress=print).faults == ()

    for name, _ in list((folder / FOLDER).list()):  # nothing is published: all of it may go
        if UNIT.fullmatch(name):
            (folder / FOLDER / name).delete()
    for name in ("mdsmix.manifest", "index.json"):
        (folder / name).delete()
    age(split(recipe), 8)
    gone = list[str]()
    for what in ("delete", "flush"):
        monkeypatch.setattr(LocalPath, what, told(getattr(LocalPath, what), what, gone))
    gc.delete_garbage(folder, gc.KEEP_SECONDS, print)
    assert not [n for n in ledger(recipe) if SEGMENT.fullmatch(n)]
    last_segment = max(n for n, name in enumerate(gone) if name.endswith(".segment"))
    first_shard = min(n for n, name in enumerate(gone) if name.endswith(".mds"))
    between = gone[last_segment:first_shard]
    assert f"flush {FOLDER}" in between, "what is named goes when what names it is gone for good"


def told(real: Callable[..., Any], what: str, said: list[str]) -> Callable[..., Any]:
    def call(at: LocalPath, *given: Any) -> Any:
        said.append(f"{what} {at.name}")
        return real(at, *given)

    return call


def last(keys: set[str], packed: Any) -> str:
    """The part of what was left over, which has no record."""
    (key,) = (key for key in keys if key not in packed.records)
    return key


def age(folder: Path, days: float) -> None:
    then = time.time() - days * 86_400
    for name in files(folder):
        os.utime(folder / name, (then, then))
