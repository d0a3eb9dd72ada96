"""`mdsmix inspect` shows what is there: the card, and samples as text with the trained tokens marked."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.converting import (
    chats,
    documents,
    mdsmix,
    pairs,
    run_recipe,
    windows,
    write_jsonl,
    write_recipe,
)
from tests.pictures import record, seeing_tokenizer, stream, write_drawings
from tests.published import CONCAT, TOKEN_ROW, publish

CHAT = {
    "messages": [
        {"role": "user", "content": "Which one?"},
        {"role": "assistant", "content": "The red one."},
    ]
}


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def mix(tmp_path: Path, tokenizer_folder: Path) -> Path:
    write_jsonl(tmp_path / "docs.jsonl", [{"text": f"[bold]Document[/bold] {n}"} for n in range(5)])
    write_jsonl(tmp_path / "faq.jsonl", [{"prompt": "Which one?", "response": " The red one."}])
    write_jsonl(tmp_path / "chat.jsonl", [CHAT])
    streams = {
        "docs": documents(tmp_path / "docs.jsonl", layout="document"),
        "faq": pairs(tmp_path / "faq.jsonl"),
        "chat": chats(tmp_path / "chat.jsonl"),
    }
    recipe = write_recipe(tmp_path, tokenizer_folder, streams=streams, max_seq_len=64)
    assert mdsmix("convert", recipe).code == 0
    return tmp_path / "out"


def test_the_stream_or_its_split_may_be_named(mix: Path) -> None:
    whole, split = mdsmix("inspect", mix / "docs"), mdsmix("inspect", mix / "docs" / "train")
    assert whole == split
    assert (whole.code, whole.err) == (0, "")
    assert "5 read = 5 written + 0 filtered + 0 quarantined" in whole.out
    assert re.findall(r"^sample (\d) ─", whole.out, re.M) == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("stream", "shown"),
    [
        ("docs", "[⟦bold]Document[/bold] 0⟨<|endoftext|>⟩⟧"),
        ("faq", "Which one?⟦ The red one.⟧"),
        ("chat", "⟨<|im_start|>⟩user\nWhich one?⟨<|im_end|>⟩\n⟨<|im_start|>⟩assistant\n⟦The red one.⟨<|im_end|>⟩\n⟧"),
    ],
)  # fmt: skip
def test_samples_are_text_with_the_trained_part_marked(mix: Path, stream: str, shown: str) -> None:
    assert shown in mdsmix("inspect", mix / stream, "-n", 1).out


def test_a_sample_gets_no_line_break_that_is_not_in_its_text(
    mix: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    assert "[⟦bold]Document[/bold] 0⟨<|endoftext|>⟩⟧\n" in mdsmix("inspect", mix / "docs").out


def test_another_tokenizer_may_decode(mix: Path, tokenizer_folder: Path) -> None:
    arguments = ("inspect", mix / "faq", "-n", 1)
    assert mdsmix(*arguments, "--tokenizer", tokenizer_folder) == mdsmix(*arguments)


def test_a_stream_of_another_tool_is_shown_in_ids(tmp_path: Path) -> None:
    publish(tmp_path, CONCAT, [TOKEN_ROW])
    answer = mdsmix("inspect", tmp_path)
    assert answer.code == 0
    assert "only the index speaks" in answer.out
    assert "5 ⟦6 0 7 8 9 10 0 ⟧" in answer.out


@pytest.mark.parametrize("place", ["nothing", "."])
def test_no_stream_is_one_sentence(tmp_path: Path, place: str) -> None:
    answer = mdsmix("inspect", tmp_path / place)
    assert (answer.code, answer.out) == (4, "")
    assert answer.err.startswith("error: ")
    assert answer.err.count("\n") == 1
    assert "no published stream" in answer.err


def test_two_splits_are_to_be_told_apart(mix: Path, tmp_path: Path) -> None:
    (mix / "docs" / "train").rename(mix / "docs" / "val")
    (mix / "faq" / "train").rename(mix / "docs" / "train")
    answer = mdsmix("inspect", mix / "docs")
    assert answer.code == 4
    assert "2 splits (train, val)" in answer.err


def test_a_damaged_shard_is_one_sentence(mix: Path) -> None:
    (shard,) = (mix / "docs" / "train").glob("*.mds")
    shard.write_bytes(shard.read_bytes()[:20])
    answer = mdsmix("inspect", mix / "docs")
    assert answer.code == 4
    assert shard.name in answer.err
    assert answer.err.count("\n") == 1


def typed(folder: Path, tokenizer: Path) -> Path:
    """A document in which somebody typed a control token's text, a mark of ours, and what rich takes for an emoji."""
    write_jsonl(folder / "docs.jsonl", [{"text": "Say <|endoftext|> and ⟨x⟩ :smile:"}])
    streams = {"docs": documents(folder / "docs.jsonl", layout="document")}
    assert mdsmix("convert", write_recipe(folder, tokenizer, streams=streams, max_seq_len=128)).code == 0  # fmt: skip
    return folder / "out/docs"


def test_text_that_looks_like_a_control_token_is_none(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    out = mdsmix("inspect", typed(tmp_path, tokenizer_folder)).out
    assert " <|endoftext|> and \\u27e8x\\u27e9 :smile:⟨<|endoftext|>⟩⟧\n" in out


def test_programs_are_told_where_the_control_tokens_stand(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    at = typed(tmp_path, tokenizer_folder)
    first, rest = json.loads(mdsmix("inspect", at, "--json").out)["shown"][0]["sample"]
    assert first["control"] == []
    assert rest["text"].count("<|endoftext|>") == 2
    assert [rest["ids"][place] for place in rest["control"]] == [0]


def test_on_a_terminal_control_tokens_have_a_colour(
    mix: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    out = mdsmix("inspect", mix / "chat", "-n", 1).out
    assert "\x1b[36m⟨<|im_start|>⟩\x1b[0muser\n" in out


def shown(*arguments: object) -> list[tuple[int, str]]:
    """The numbers of the samples that are shown, and what they hold."""
    found = json.loads(mdsmix("inspect", *arguments, "--json").out)["shown"]
    return [(one["number"], "".join(part["text"] for part in one["sample"])) for one in found]


@pytest.fixture(params=[None, "zstd"])
def many(request: Any, tmp_path: Path, tokenizer_folder: Path) -> Path:
    """200 documents in several shards, the 137th the longest."""
    texts = [f"Number {n}." + " and more" * (20 if n == 137 else n % 7) for n in range(200)]
    write_jsonl(tmp_path / "docs.jsonl", [{"text": text} for text in texts])
    streams = {"docs": documents(tmp_path / "docs.jsonl", layout="document")}
    recipe = write_recipe(
        tmp_path, tokenizer_folder, streams=streams, max_seq_len=256, compression=request.param
    )
    with pytest.MonkeyPatch.context() as patch:
        windows(patch, 1500)
        run_recipe(recipe)
    assert len(list((tmp_path / "out/docs/train").glob("[0-9a-f]*.mds*"))) > 2
    return tmp_path / "out/docs"


def test_samples_are_shown_by_their_numbers(many: Path) -> None:
    found = shown(many, "--sample", 199, "--sample", 0)
    assert [number for number, _ in found] == [199, 0]
    assert [text.split(".")[0] for _, text in found] == ["Number 199", "Number 0"]
    answer = mdsmix("inspect", many, "--sample", 200)
    assert (answer.code, answer.out) == (2, "")
    assert "--sample 200" in answer.err
    assert "200 samples, the first is 0" in answer.err


def test_the_longest_is_found_wherever_it_lies(many: Path) -> None:
    ((number, _),) = shown(many, "--longest")
    assert number == 137


def test_random_samples_are_the_same_for_the_same_seed(many: Path) -> None:
    first = shown(many, "--random", "--seed", 5, "-n", 4)
    assert first == shown(many, "--random", "--seed", 5, "-n", 4)
    assert first != shown(many, "--random", "--seed", 6, "-n", 4)
    assert len({number for number, _ in first}) == 4
    out = mdsmix("inspect", many, "--random").out
    (seed,) = re.findall(r"^at random, --seed (\d+)$", out, re.M)
    assert mdsmix("inspect", many, "--random", "--seed", seed).out == out


def test_only_one_choice_is_taken(many: Path) -> None:
    assert "exclude each other" in mdsmix("inspect", many, "--longest", "--sample", 1).err
    answer = mdsmix("inspect", many, "--seed", 1)
    assert answer.code == 2
    assert "give --random too" in answer.err


def test_a_damaged_table_is_one_sentence(many: Path) -> None:
    for shard in (many / "train").glob("[0-9a-f]*.mds*"):
        shard.write_bytes(b"\xff" * shard.stat().st_size)
    for choice in (("--longest",), ("--sample", 3)):
        answer = mdsmix("inspect", many, *choice)
        assert (answer.code, answer.err.count("\n")) == (4, 1)
        assert "is damaged" in answer.err


def test_images_are_shown_with_their_places_and_written_as_they_are(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    paths = write_drawings(tmp_path / "img")
    names = [f"img/{path.name}" for path in paths]
    data = write_jsonl(tmp_path / "a.jsonl", [record(), record(*names)])
    words = seeing_tokenizer(tokenizer_folder, tmp_path / "words")
    run_recipe(write_recipe(tmp_path, words, max_seq_len=99, streams={"see": stream(data)}))
    see, out = str(tmp_path / "out/see"), tmp_path / "seen"
    said = mdsmix("inspect", see, "--images", str(out)).out
    answer = json.loads(mdsmix("inspect", see, "--sample", "1", "--json").out)
    (shown,) = answer["shown"] if "shown" in answer else answer["streams"][0]["shown"]
    ids = [token for part in shown["sample"] for token in part["ids"]]
    formats = ("JPEG", "PNG", "WebP")
    for number, (image, path) in enumerate(zip(shown["images"], paths, strict=True)):
        size = path.stat().st_size
        kind = formats[number]
        assert image | {"token": 0} == {
            "height": 30,
            "width": 40,
            "bytes": size,
            "format": kind,
            "token": 0,
        }
        place = image["token"]
        assert ids[place] == ids[shown["images"][0]["token"]]
        assert (
            f"image {number}: 40 x 30 {kind}, {size:,} bytes, token {place} of {len(ids)}" in said
        )
        assert (out / f"see-train-1-{number}{path.suffix}").read_bytes() == path.read_bytes()
    assert said.endswith(f"wrote 3 images into {out}\n")
    (tmp_path / "file").write_text("")
    failed = mdsmix("inspect", see, "--images", str(tmp_path / "file"))
    assert (failed.code, "cannot write" in failed.err) == (4, True)


def test_fewer_samples_than_were_asked_for_are_said(tmp_path: Path) -> None:
    """The first ones lie in the first shard."""
    publish(tmp_path, CONCAT, [TOKEN_ROW] * 6, shards=2)
    shown = mdsmix("inspect", tmp_path, "-n", 99).out
    assert "3 of 6 samples: the first are read from the first mebibyte of the first shard" in shown
    for enough in (("-n", 3), ("-n", 99, "--random"), ("--sample", 5), ("--longest",)):
        assert " of 6 samples" not in mdsmix("inspect", tmp_path, *enough).out
