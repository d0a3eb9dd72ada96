"""A repaired stream has the bytes it had, only failing units are converted again, and what cannot be repaired is left alone."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from mdsmix.convert import damage, unit
from mdsmix.convert.damage import Repaired, repair
from mdsmix.convert.planning import Options
from mdsmix.encode import chat
from mdsmix.errors import MdsmixError, RecipeError, Unreachable
from mdsmix.kinds import open_recipe
from mdsmix.kinds.pretraining import Pretraining
from mdsmix.shards.index import read_index
from mdsmix.shards.lease import lease
from mdsmix.storage import locate
from tests.converting import (
    Told,
    chats,
    documents,
    files,
    mdsmix,
    run_recipe,
    times,
    windows,
    write_jsonl,
    write_recipe,
)
from tests.corpus import train_tokenizer
from tests.published import edit
from tests.styles import train_style

TEXTS = [{"text": f"Document {n} is about the number {n}. " * 3} for n in range(60)]
SAME = [{"text": "the same text again and again"}] * 40


@pytest.fixture
def recipe(tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    windows(monkeypatch, 1500)
    write_jsonl(tmp_path / "a.jsonl", [*TEXTS, {"text": 5}])
    write_jsonl(tmp_path / "b.jsonl", TEXTS)
    streams = {"web": documents(tmp_path / "a.jsonl"), "other": documents(tmp_path / "b.jsonl")}
    return write_recipe(tmp_path, tokenizer_folder, streams=streams)


@pytest.fixture
def published(tmp_path: Path, recipe: Path) -> Path:
    run_recipe(recipe)
    return tmp_path / "out" / "web" / "train"


def mend(recipe: Path, folder: Path, *overrides: str) -> Repaired:
    return repair(open_recipe(recipe, overrides), locate(folder), Options(workers=1), Told())


def shards(folder: Path) -> list[Path]:
    return [folder / shard.stored.basename for shard in read_index(locate(folder)).shards]


def flip(path: Path, at: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x55
    path.write_bytes(data)


@pytest.fixture
def converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """The keys of the units that are encoded from now on, by whatever process."""
    heard = tmp_path / "heard"
    heard.touch()
    real = unit.UnitTask._convert

    def hearing(*settings: Any) -> Any:
        record = real(*settings)
        with heard.open("a") as file:
            file.write(f"{record.key}\n")
        return record

    monkeypatch.setattr(unit.UnitTask, "_convert", hearing)
    return lambda: heard.read_text().split()


def test_a_whole_stream_is_left_as_it_is(
    published: Path, recipe: Path, converted: Callable[[], list[str]]
) -> None:
    before = times(published)
    assert mend(recipe, published).faults == ()
    assert times(published) == before
    assert converted() == []


@pytest.mark.parametrize(
    "damage",
    [flip, Path.unlink, lambda path: os.truncate(path, 9), lambda path: path.write_bytes(b"")],
)
def test_only_the_units_of_damaged_shards_are_converted_again(
    published: Path, recipe: Path, converted: Callable[[], list[str]], damage: Callable[[Path], Any]
) -> None:
    before, stamps = files(published), times(published)
    parts = json.loads(before["mdsmix.manifest"])["parts"]
    assert len(parts) > 4
    bad = [shards(published)[0], shards(published)[2]]
    for path in bad:
        damage(path)
    done = mend(recipe, published)
    assert files(published) == before
    assert converted() == [parts[0]["key"], parts[2]["key"]]
    assert (done.units, done.of, len(done.faults)) == (2, len(parts) - 1, 2), (
        "the last part is no work unit"
    )
    assert done.shards == tuple(path.name for path in bad)
    written = {name for name, stamp in times(published).items() if stamp != stamps[name]}
    units = [path for key in converted() for path in (published / ".mdsmix").glob(f"{key}*.unit")]
    assert written == {str(path) for path in (*bad, *units)}


def test_the_part_of_leftovers_is_made_of_the_unit_records(
    published: Path, recipe: Path, converted: Callable[[], list[str]]
) -> None:
    before = files(published)
    flip(shards(published)[-1])
    done = mend(recipe, published)
    assert files(published) == before
    assert converted() == []
    assert done.units == 0


def test_shards_of_equal_bytes(
    tmp_path: Path, recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second has a name of its own, and comes of the first."""
    windows(monkeypatch, 42 * 10)
    write_jsonl(tmp_path / "a.jsonl", SAME)
    (outcome,) = run_recipe(recipe, "streams.web.layout=document", only=["web"])
    folder = Path(outcome.target)
    before = files(folder)
    twins = [path for path in shards(folder) if "-" in path.name]
    assert twins
    for bad in ([twins[0]], [shards(folder)[0]], shards(folder)):
        for path in bad:
            flip(path)
        mend(recipe, folder, "streams.web.layout=document")
        assert files(folder) == before


@pytest.mark.parametrize("content", [b"", b"{}", None])
def test_an_index_is_written_again_and_then_believed(
    published: Path, recipe: Path, converted: Callable[[], list[str]], content: bytes | None
) -> None:
    before = files(published)
    flip(shards(published)[1])
    index = json.loads(before["index.json"])
    index["shards"].pop()
    (published / "index.json").write_bytes(
        json.dumps(index).encode() if content is None else content
    )
    done = mend(recipe, published)
    assert {fault.file for fault in done.faults} >= {"index.json"}
    after = files(published)
    assert {name: after[name] for name in before} == before
    assert len(converted()) == 1


def test_lost_unit_records_are_made_again_too(published: Path, recipe: Path) -> None:
    before = files(published)
    for path in (published / ".mdsmix").iterdir():
        path.unlink()
    flip(shards(published)[0])
    mend(recipe, published)
    assert files(published) == before


def test_a_manifest_that_lies_is_written_again(published: Path, recipe: Path) -> None:
    before = files(published)
    edit(published / "mdsmix.manifest", lambda tree: tree["totals"].update(tokens=1))
    mend(recipe, published)
    assert files(published) == before


@pytest.mark.parametrize("override", ["max_seq_len=32", "special_tokens_in_text=allow"])
def test_another_recipe_is_refused_before_anything_is_touched(
    published: Path, recipe: Path, override: str
) -> None:
    flip(shards(published)[0])
    before = files(published)
    with pytest.raises(RecipeError, match="the recipe or its tokenizer was changed since"):
        mend(recipe, published, override)
    assert files(published) == before


def test_another_tokenizer_is_refused_before_anything_is_touched(
    published: Path, recipe: Path, tmp_path: Path
) -> None:
    other = train_tokenizer(tmp_path / "other", vocab_size=300, documents_n=2)
    flip(shards(published)[0])
    before = files(published)
    with pytest.raises(RecipeError, match="the recipe or its tokenizer was changed since"):
        mend(recipe, published, f"tokenizer.name={other}")
    assert files(published) == before


def test_a_stream_that_somebody_writes_to_is_left_alone(published: Path, recipe: Path) -> None:
    flip(shards(published)[0])
    before = files(published)
    with lease(locate(published), lambda _: None), ThreadPoolExecutor(1) as pool:
        answer = pool.submit(mdsmix, "repair", published, "--recipe", recipe).result()
    assert answer.code == 4
    assert "is being written by process" in answer.err
    assert files(published) == before


def test_the_day_that_a_template_prints_is_that_of_the_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [{"role": "user", "content": "What day is it?"}]
    write_jsonl(
        tmp_path / "a.jsonl", [{"messages": [*asked, {"role": "assistant", "content": "A day."}]}]
    )
    streams = {"chat": chats(tmp_path / "a.jsonl")}
    recipe = write_recipe(
        tmp_path, train_style(tmp_path / "dated", "dated"), streams=streams, max_seq_len=512
    )
    monkeypatch.setattr(chat, "today", lambda: "01 Jan 2026")
    run_recipe(recipe)
    published = tmp_path / "out" / "chat" / "train"
    before = files(published)
    flip(shards(published)[0])
    monkeypatch.setattr(chat, "today", lambda: "02 Jan 2026")
    assert len(mend(recipe, published).shards) == 1
    assert files(published) == before


def test_what_is_damaged_again_is_not_called_repaired(
    published: Path, recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that fails gives back what was written otherwise, or not at all."""
    path = shards(published)[0]
    flip(path)

    convert = damage.convert

    def failing(*settings: Any) -> Any:
        yield from convert(*settings)
        os.truncate(path, 9)

    monkeypatch.setattr(damage, "convert", failing)
    with pytest.raises(MdsmixError, match="is still damaged after its repair: "):
        mend(recipe, published)


def test_another_source_is_refused_before_anything_is_touched(
    published: Path, recipe: Path, tmp_path: Path
) -> None:
    flip(shards(published)[0])
    before = files(published)
    write_jsonl(tmp_path / "a.jsonl", TEXTS[1:])
    with pytest.raises(RecipeError, match="files of its source were added, removed or changed"):
        mend(recipe, published)
    assert files(published) == before


def test_a_source_changed_in_secret_is_told(published: Path, recipe: Path, tmp_path: Path) -> None:
    """Of the same size, so that only reading it tells: what comes out is whole, but it is another version."""
    flip(shards(published)[0])
    source = (tmp_path / "a.jsonl").read_bytes()
    (tmp_path / "a.jsonl").write_bytes(source.replace(b"Document 0", b"Abstract 0"))
    with pytest.raises(MdsmixError, match="made again, but as a new version"):
        mend(recipe, published)
    assert mdsmix("verify", published).code == 0


def test_a_stream_that_the_recipe_does_not_publish(
    published: Path, recipe: Path, tmp_path: Path
) -> None:
    with pytest.raises(RecipeError, match=r"does not publish .+; it publishes .+/web/train, "):
        mend(recipe, tmp_path / "elsewhere")


def test_a_manifest_that_cannot_be_read_or_is_lost(published: Path, recipe: Path) -> None:
    (published / "mdsmix.manifest").write_bytes(b"{")
    with pytest.raises(Unreachable, match="--reencode"):
        mend(recipe, published)
    (published / "mdsmix.manifest").unlink()
    flip(shards(published)[0])
    with pytest.raises(RecipeError, match="--reencode"):
        mend(recipe, published)


def test_the_command(published: Path, recipe: Path) -> None:
    answer = mdsmix("repair", published, "--recipe", recipe)
    assert (answer.code, answer.out) == (0, f"{published}: whole, nothing to repair\n")
    name = shards(published)[0].name
    flip(published / name)
    assert mdsmix("verify", published).code == 3
    answer = mdsmix("repair", published.parent, "--recipe", recipe, "--workers", "1")
    first, last = answer.out.splitlines()
    assert answer.code == 0
    assert first.startswith(f"fault {name}: ")
    assert "repaired, 1 of " in last
    assert mdsmix("verify", published).code == 0
    assert mdsmix("repair", published).code == 2


def test_records_that_workers_die_of_are_set_aside_as_they_were(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = Pretraining.encode

    def dying(self: Pretraining, records: list[Any]) -> Any:
        if any(record.text == TEXTS[7]["text"] for record in records):
            os.kill(os.getpid(), signal.SIGKILL)
        return encode(self, records)

    monkeypatch.setattr(Pretraining, "encode", dying)
    run_recipe(recipe, only=["web"], quarantine_crashes=True)
    before, published = files(tmp_path / "out"), tmp_path / "out" / "web" / "train"
    flip(shards(published)[0])
    command = ("repair", published, "--recipe", recipe, "--memory", "1GiB")
    refused = mdsmix(*command)
    assert (refused.code, "--quarantine-crashes" in refused.err) == (1, True)
    assert mdsmix(*command, "--quarantine-crashes").code == 0
    assert files(tmp_path / "out") == before
