"""What mdsmix asks of a store, asked of each: objects, conditions, whole commands, and what goes wrong in between."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from mdsmix.convert.garbage import delete_garbage, find_garbage
from mdsmix.errors import Unreachable
from mdsmix.shards.index import read_index
from mdsmix.shards.lease import lease
from mdsmix.storage import Location, locate, s3
from tests.alarm import SECONDS
from tests.converting import (
    documents,
    files,
    mdsmix,
    run_recipe,
    windows,
    write_jsonl,
    write_recipe,
)
from tests.doomed import Run, Write
from tests.stalled import COMMITS, overtake, publish_version, standing
from tests.stores.servers import Store

TEXTS = [{"text": f"Document {n} is about the number {n}. " * 3} for n in range(60)]
CHANGED = [{"text": TEXTS[0]["text"].upper()}, *TEXTS[1:], {"text": 5}]
WINDOW = 1500
ODD = ["a b", "ü", "a+b", "50%", "x=1&y", "#", "中文", "it's", "(1)", "~", "a;b,c", "z" * 200]


@pytest.fixture
def recipe(
    root: Location, tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    windows(monkeypatch, WINDOW)
    write_jsonl(tmp_path / "a.jsonl", [*TEXTS, {"text": 5}])
    streams = {"web": documents(tmp_path / "a.jsonl")}
    return write_recipe(tmp_path, tokenizer_folder, remote=f"{root}/mix ü", streams=streams)


@pytest.fixture
def split(root: Location, recipe: Path) -> Location:
    return root / "mix ü/web/train"


def content(folder: Location) -> dict[str, bytes]:
    return {name: (folder / name).read() for name, _ in folder.list(recursive=True)}


def on_disk(recipe: Path, *settings: str) -> dict[str, bytes]:
    run_recipe(recipe, "remote=null", *settings)
    return files(recipe.parent / "out" / "web")


def test_objects_of_any_name_are_written_listed_read_and_deleted(root: Location) -> None:
    folder = root / "a folder"
    for name in ODD:
        (folder / name).write(name.encode(), b"-1234")
    listed = dict(folder.list())
    assert sorted(listed) == list(listed) == sorted(ODD, key=lambda name: name.encode())
    for name in ODD:
        place, size = folder / name, len(name.encode()) + 5
        assert (place.read(), place.read(size - 3, 2)) == (name.encode() + b"-1234", b"23")
        found, fetched = place.stat(), place.fetch()
        assert found is not None
        assert fetched == (found, place.read())
        assert (found.size, listed[name].size) == (size, size)
        assert listed[name].stamp in ("", found.stamp)
        assert (place / "below").stat() is None
        place.delete()
        place.delete()
        assert place.stat() is None
        assert place.fetch() is None
        with pytest.raises(Unreachable, match="there is no such object"):
            place.read()
        place.write(b"again")
    folder.delete_all([*ODD, "not there"])
    assert list(folder.list()) == []
    large = bytes(range(256)) * 4 * 11_000
    (root / "large ü").write(large[:1000], large[1000:])
    (root / "large ü").copy_to(root / "copy")
    assert (root / "copy").read() == large
    nowhere = locate("s3://no-such-bucket-of-ours/x")
    for act in (lambda: nowhere.write(b"1"), lambda: list(nowhere.list())):
        with pytest.raises(Unreachable, match="bucket"):
            act()


def test_a_list_goes_on_over_pages_and_a_pattern_finds_sources_with_stamps_that_change(
    root: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    for i in range(5):
        (root / "f" / str(i)).write(b"x")
        (root / "f" / f"d{i}" / "below").write(b"x")
    page = s3._page
    monkeypatch.setattr(s3, "_page", lambda wanted, client: page({**wanted, "MaxKeys": 2}, client))
    assert [name for name, _ in (root / "f").list()] == list("01234")
    assert list((root / "f").folders()) == [f"d{i}" for i in range(5)]
    assert len(list((root / "f").list(recursive=True))) == 10
    (root / "raw/a.jsonl").write(b"one")
    ((place, before),) = (root / "raw/*.jsonl").expand()
    assert before == place.stat()
    assert before.stamp
    (root / "raw/a.jsonl").write(b"two")
    assert (root / "raw/*.jsonl").expand() != [(place, before)]


def test_conditions_are_kept_one_after_the_other(root: Location, store: Store) -> None:
    assert (root / "x").keeps_conditions() is store.keeps_conditions
    assert list(root.list(recursive=True)) == [], "the trial leaves nothing"
    place = root / "a"
    first = place.create(b"one")
    assert first is not None
    assert place.create(b"two") is None
    second = place.replace(first.stamp, b"three")
    assert second is not None
    assert second == place.stat()
    assert place.replace(first.stamp, b"four") is None
    assert place.read() == b"three"
    place.delete()
    assert place.replace(second.stamp, b"five") is None
    assert place.stat() is None


def done(*arguments: object) -> str:
    """What a command says that goes well, on both streams."""
    answer = mdsmix(*arguments)
    assert answer.code == 0, answer.err
    return answer.out + answer.err


def test_a_stream_is_converted_mixed_repaired_changed_and_tidied(
    recipe: Path, split: Location, store: Store, root: Location
) -> None:
    """The bytes of a disk by two workers, and nothing twice."""
    expected = on_disk(recipe)
    said = done("convert", recipe, "--workers", "2")
    assert ("keeps no conditions" in said) is not store.keeps_conditions
    assert content(split.parent) == expected
    assert run_recipe(recipe)[0].state == "up to date"
    for command in ("verify", "check", "inspect"):
        done(command, split.parent)

    done("mix", recipe, "--out", f"{root}/all")
    done("verify", f"{root}/all")
    mixed = content(root / "all")
    assert "up to date" in done("mix", recipe, "--out", f"{root}/all")
    assert content(root / "all") == mixed

    flipped, gone = [split / shard.stored.basename for shard in read_index(split).shards][:2]
    flipped.write(flipped.read()[:-1] + b"\0")
    gone.delete()
    assert mdsmix("verify", split).code == 3
    done("repair", split.parent, "--recipe", recipe, "--workers", "1")
    assert content(split.parent) == expected

    write_jsonl(recipe.parent / "a.jsonl", CHANGED)
    (outcome,) = run_recipe(recipe)
    assert 0 < outcome.done < outcome.units
    kinds = {item.kind for item in find_garbage(split, 0)}
    assert {"shard", "unit record", "old index"} <= kinds
    before = content(split)
    deleted = delete_garbage(split, 0, lambda _: None)
    assert before.keys() - content(split).keys() == {item.name for item in deleted}
    assert find_garbage(split, 0) == []
    done("verify", split)
    assert run_recipe(recipe)[0].state == "up to date"


@pytest.mark.parametrize(
    # The first unit is finished, the second one lacks its record alone.
    "end",
    [Write("worker", "record", "before", 2), Write("main", "index.json", "before")],
)
def test_a_run_that_was_killed_is_completed(
    recipe: Path, split: Location, end: Write, tmp_path: Path
) -> None:
    expected = on_disk(recipe)
    run = Run([str(recipe), "--workers", "1"], WINDOW, tmp_path / "writes.log", end)
    assert run.was_killed()
    assert (split / "index.json").stat() is None
    (outcome,) = run_recipe(recipe)
    assert outcome.reused
    assert content(split.parent) == expected


def test_of_several_at_one_moment_one_gets_the_lease(split: Location, store: Store) -> None:
    for _ in range(2):
        together, done = threading.Barrier(3), threading.Barrier(3)

        def run(
            _: int, together: threading.Barrier = together, done: threading.Barrier = done
        ) -> bool:
            together.wait(SECONDS)
            try:
                with lease(split, lambda _: None):
                    done.wait(SECONDS)
                    return True
            except Unreachable:
                done.wait(SECONDS)
                return False

        with ThreadPoolExecutor(3) as pool:
            holders = sum(pool.map(run, range(3)))
        assert holders == 1 or not store.keeps_conditions


@pytest.mark.parametrize("way", COMMITS)
def test_a_run_that_stands_still_before_it_publishes_publishes_nothing(
    recipe: Path, split: Location, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Right before the write that counts."""
    settings = (f"publish={way}",)
    publish_version(recipe, 0, *settings)
    kind: Any = type(split)
    real, is_first = kind.replace, threading.Event()

    def replace(place: Location, stamp: str, new: bytes) -> Any:
        if place.url.endswith(COMMITS[way]) and not is_first.is_set():
            is_first.set()
            overtake(split, lambda: publish_version(recipe, 2, *settings))
            theirs.update(standing(split))
        return real(place, stamp, new)

    theirs: dict[str, bytes] = {}
    monkeypatch.setattr(kind, "replace", replace)
    with pytest.raises(Unreachable, match="was published by another run"):
        publish_version(recipe, 1, *settings)
    assert standing(split) == theirs
