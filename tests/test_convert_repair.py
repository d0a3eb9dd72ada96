"""A damaged stream is mended to the bytes it had, by `repair` or by `convert --verify-target`: only units that fail are converted again, and
what cannot be mended is left alone."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mdsmix.convert.damage import Repaired, repair
from mdsmix.convert.planning import Options
from mdsmix.encode import chat
from mdsmix.errors import MdsmixError, RecipeError, Unreachable
from mdsmix.kinds import open_recipe
from mdsmix.storage import locate
from tests.converting import (
    Told,
    Web,
    chats,
    documents,
    done,
    flip,
    lying_at,
    mdsmix,
    times,
)
from tests.corpus import train_tokenizer
from tests.published import edit
from tests.styles import train_style

TEXTS = [f"Document {n} is about the number {n}. " * 3 for n in range(60)]
SAME = ["the same text again and again"] * 40
CHANGED = "the recipe or its tokenizer was changed since"
CHAT = [{"role": "user", "content": "What day is it?"}, {"role": "assistant", "content": "A day."}]


@pytest.fixture
def published(web: Web) -> Web:
    web.windows(1500)
    web.holds([*TEXTS, {"text": 5}])
    web.holds(TEXTS, "b.jsonl")
    streams = {"web": documents("a.jsonl"), "other": documents("b.jsonl")}
    web.says(streams=streams).run()
    return web


def mend(web: Web, *overrides: str, folder: Path | None = None) -> Repaired:
    recipe = open_recipe(web.recipe, overrides)
    return repair(recipe, locate(folder or web.train), Options(workers=1), Told())


def test_only_the_units_of_damaged_shards_are_made_again(published: Web) -> None:
    before, stamps, keys = published.files, times(published.train), published.keys
    assert mend(published).faults == ()
    assert times(published.train) == stamps, "a whole stream is left as it is"
    bad = [published.shards[0], published.shards[2]]
    flip(bad[0])
    os.truncate(bad[1], 9)
    made = mend(published)
    assert published.files == before
    assert (made.units, made.of, len(made.faults)) == (2, len(keys) - 1, 2), "the last is no unit"
    assert {fault.file for fault in made.faults} == {path.name for path in bad}
    written = {name for name, stamp in times(published.train).items() if stamp != stamps[name]}
    records = [p for k in (keys[0], keys[2]) for p in published.train.glob(f".mdsmix/{k}*")]
    assert written == {str(path) for path in [*bad, *records]}


def forget_units(web: Web) -> None:
    for path in (web.train / ".mdsmix").iterdir():
        path.unlink()
    flip(web.shards[0])


def lie(web: Web) -> None:
    edit(web.train / "mdsmix.manifest", lambda tree: tree["totals"].update(tokens=1))


def shorten(web: Web) -> None:
    flip(web.shards[1])
    edit(web.train / "index.json", lambda tree: tree["shards"].pop() and None)


DAMAGES: list[tuple[Callable[[Web], Any], str, int]] = [
    (lambda web: flip(web.shards[-1]), ".mds", 0),  # made of the units' leftovers
    (lambda web: web.shards[0].unlink(), ".mds", 1),
    (forget_units, ".mds", 5),
    (lie, "mdsmix.manifest", 0),
    (lambda web: (web.train / "index.json").write_bytes(b""), "index.json", 0),
    (lambda web: (web.train / "index.json").write_bytes(b"{}"), "index.json", 0),
    (shorten, "index.json", 1),
]


def test_what_else_lies_there_is_made_again(published: Web) -> None:
    before = published.files
    for number, (damage, file, units) in enumerate(DAMAGES):
        damage(published)
        made = mend(published)
        assert any(fault.file.endswith(file) for fault in made.faults), (number, made.faults)
        assert before.items() <= published.files.items(), number
        assert made.units == units, number


def another_tokenizer(web: Web) -> str:
    other = train_tokenizer(web.folder / "other", vocab_size=300, documents_n=2)
    return f"tokenizer.name={other}"


def with_manifest(web: Web, content: bytes | None) -> None:
    """With this content, or none."""
    (web.train / "mdsmix.manifest").unlink()
    if content is not None:
        (web.train / "mdsmix.manifest").write_bytes(content)


REFUSALS: list[tuple[Callable[[Web], Any], type[MdsmixError], str]] = [
    (lambda web: "max_seq_len=32", RecipeError, CHANGED),
    (lambda web: "special_tokens_in_text=allow", RecipeError, CHANGED),
    (another_tokenizer, RecipeError, CHANGED),
    (lambda web: web.holds(TEXTS[1:]) and None, RecipeError, "files of its source were added"),
    (lambda web: with_manifest(web, b"{"), Unreachable, "--reencode"),
    (lambda web: with_manifest(web, None), RecipeError, "--reencode"),
]
"What is changed, an override that is then given, and the refusal."


def test_what_would_give_another_stream_is_refused_untouched(published: Web) -> None:
    flip(published.shards[0])
    for number, (change, kind, match) in enumerate(REFUSALS):
        overrides, before = filter(None, [change(published)]), published.files
        with pytest.raises(kind, match=match):
            mend(published, *overrides)
        assert published.files == before, number
    with pytest.raises(RecipeError, match=r"does not publish .+; name a stream that it makes"):
        mend(published, folder=published.folder / "elsewhere")


def test_the_day_that_a_template_prints_is_that_of_the_stream(web: Web) -> None:
    web.holds([{"messages": CHAT}])
    web.tokenizer = train_style(web.folder / "dated", "dated")
    web.says(chats("a.jsonl"), max_seq_len=512)
    web.patch.setattr(chat, "today", lambda: "01 Jan 2026")
    web.run()
    before = web.files
    flip(web.shards[0])
    web.patch.setattr(chat, "today", lambda: "02 Jan 2026")
    assert len(mend(web).faults) == 1
    assert web.files == before


def test_a_source_changed_in_secret_is_told(published: Web) -> None:
    """Of the same size, so that only reading it tells: what comes out is whole, but it is another version."""
    flip(published.shards[0])
    source = published.folder / "a.jsonl"
    source.write_bytes(source.read_bytes().replace(b"Document 0", b"Abstract 0"))
    with pytest.raises(MdsmixError, match="made again, but as a new version"):
        mend(published)
    done("verify", published.train)


def test_the_command(published: Web) -> None:
    command = ("repair", published.train.parent, "--recipe", published.recipe, "--workers", "1")
    assert done(*command).out == f"{published.train}: whole, nothing to repair\n"
    name = published.shards[0].name
    flip(published.train / name)
    assert mdsmix("verify", published.train).code == 3
    first, last = done(*command).out.splitlines()
    assert first.startswith(f"fault {name}: ")
    assert "repaired, 1 of " in last
    done("verify", published.train)
    assert mdsmix("repair", published.train).code == 2


@pytest.mark.parametrize(
    ("texts", "settings"), [(TEXTS, {"compression": "zstd", "publish": "versioned"}), (SAME, {})]
)
def test_a_conversion_that_verifies_makes_damaged_shards_anew_and_nothing_else(
    web: Web, texts: list[str], settings: dict[str, str]
) -> None:
    """Compressed versions, and twins in place."""
    web.windows(1500 if texts == TEXTS else 500)
    web.says(documents("a.jsonl", layout="document"), **settings).holds(texts)
    web.run()
    target = web.train.parent
    before, found = lying_at(target), web.shards
    said = web.done("--verify-target", "--workers", 1).out
    assert "at the target read and hashed: all whole\n" in said
    assert "web: up to date, " in said
    assert lying_at(target) == before
    for place in (found[1], found[-1]):
        flip(place)
    assert web.run().done == 0, "a run sees names and sizes"
    told = Told()
    outcome = web.run(verify_target=True, watcher=told)
    assert 0 < outcome.done < outcome.units
    assert [found[1].name in sentence for sentence in told.said].count(True) == 1
    assert outcome.notes[-1].endswith("files at the target read and hashed: 2 damaged, made anew")
    assert lying_at(target) == before
