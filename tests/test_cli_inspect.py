"""`mdsmix inspect` shows what is there: the card, and samples as text with the trained tokens
marked.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.converting import Project, chats, documents, mdsmix, pairs, run_ok
from tests.pictures import record, stream, write_drawings
from tests.published import CONCAT, TOKEN_ROW, publish
from tests.small_disk import SmallDisk, run_in_process
from tests.styles import make_dialogue


@pytest.fixture(scope="module")
def mix(tmp_path_factory: pytest.TempPathFactory, tokenizer_folder: Path) -> Path:
    """`typed`: somebody typed a control token's text, a mark of ours, and what rich takes for an
    emoji.
    """
    project = Project(tmp_path_factory.mktemp("mix"), tokenizer_folder, pytest.MonkeyPatch())
    docs = project.write_source([f"[bold]Document[/bold] {n}" for n in range(5)], "docs.jsonl")
    typed = project.write_source(["Say <|endoftext|> and ⟨x⟩ :smile:"], "typed.jsonl")
    faq = project.write_source([{"prompt": "Which one?", "response": " The red one."}], "faq.jsonl")
    chat = project.write_source(
        [{"messages": make_dialogue("Which one?", "The red one.")}], "chat.jsonl"
    )
    streams = {p.stem: documents(p, layout="document") for p in (docs, typed)}
    project.configure(
        streams=streams | {"faq": pairs(faq), "chat": chats(chat)}, max_seq_len=64
    ).convert_ok()
    return project.out


def test_samples_are_text_with_trained_parts_and_control_tokens_marked(
    mix: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run_ok("inspect", mix / "docs")
    assert whole == mdsmix("inspect", mix / "docs/train")
    assert "5 read = 5 written + 0 filtered + 0 quarantined" in whole.out
    assert re.findall(r"^sample (\d) ─", whole.out, re.M) == ["0", "1", "2"]
    monkeypatch.setenv("COLUMNS", "20")
    for name, shown in {
        "docs": "[⟦bold]Document[/bold] 0⟨<|endoftext|>⟩⟧\n",
        "faq": "Which one?⟦ The red one.⟧",
        "chat": "⟨<|im_start|>⟩user\nWhich one?⟨<|im_end|>⟩\n⟨<|im_start|>⟩assistant\n⟦The red one.⟨<|im_end|>⟩\n⟧",
        "typed": " <|endoftext|> and \\u27e8x\\u27e9 :smile:⟨<|endoftext|>⟩⟧\n",
    }.items():
        answer = mdsmix("inspect", mix / name, "-n", 1)
        assert shown in answer.out, "no line break that is not in its text"
        assert mdsmix("inspect", mix / name, "-n", 1, "--tokenizer", tokenizer_folder) == answer
    first, second = json.loads(mdsmix("inspect", mix / "typed", "--json").out)["shown"][0]["sample"]
    assert (first["control"], [second["ids"][place] for place in second["control"]]) == ([], [0])
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    assert "\x1b[36m⟨<|im_start|>⟩\x1b[0muser\n" in mdsmix("inspect", mix / "chat", "-n", 1).out


def test_a_stream_of_another_tool_is_shown_in_ids_and_too_few_are_said(tmp_path: Path) -> None:
    publish(tmp_path, CONCAT, [TOKEN_ROW] * 6, shards=2)
    output = run_ok("inspect", tmp_path, "-n", 99).out
    assert "all figures are the index's" in output
    assert "5 ⟦6 0 7 8 9 10 0 ⟧" in output
    assert "3 of 6 samples: only the first mebibyte of the first" in output
    assert " of 6 samples" not in mdsmix("inspect", tmp_path, "-n", 99, "--random").out


def shown(*arguments: object) -> list[tuple[int, str]]:
    """The numbers of the samples that are shown, and what they hold."""
    shown_samples = json.loads(mdsmix("inspect", *arguments, "--json").out)["shown"]
    return [
        (one["number"], "".join(part["text"] for part in one["sample"])) for one in shown_samples
    ]


@pytest.fixture(scope="module", params=[None, "zstd"])
def many(request: Any, tmp_path_factory: Any, tokenizer_folder: Path) -> Path:
    """200 documents in several shards, the 137th the longest."""
    patch = pytest.MonkeyPatch()
    project = Project(tmp_path_factory.mktemp("many"), tokenizer_folder, patch)
    project.write_source(
        f"Number {n}." + " and more" * (20 if n == 137 else n % 7) for n in range(200)
    )
    stream = documents("a.jsonl", layout="document")
    project.configure(stream, max_seq_len=256, compression=request.param)
    project.set_window_size(1500)
    project.run()
    patch.undo()
    assert len(project.shards) > 2
    return project.out / "web"


def test_samples_are_shown_by_number_longest_or_at_random_or_not(
    many: Path, tmp_path: Path
) -> None:
    """And then one sentence says why."""
    shown_samples = shown(many, "--sample", 199, "--sample", 0)
    assert [(n, text.split(".")[0]) for n, text in shown_samples] == [
        (199, "Number 199"),
        (0, "Number 0"),
    ]
    assert [number for number, _ in shown(many, "--longest")] == [137]
    first = shown(many, "--random", "--seed", 5, "-n", 4)
    assert first == shown(many, "--seed", 5, "-n", 4)
    assert first != shown(many, "--random", "--seed", 6, "-n", 4)
    assert len({number for number, _ in first}) == 4
    out = mdsmix("inspect", many, "--random").out
    (seed,) = re.findall(r"^at random, --seed (\d+)$", out, re.M)
    assert mdsmix("inspect", many, "--random", "--seed", seed).out == out
    for name in ("two/train", "two/val", "damaged"):
        shutil.copytree(many / "train", tmp_path / name)
    for shard in (tmp_path / "damaged").glob("[0-9a-f]*.mds*"):
        shard.write_bytes(b"\xff" * shard.stat().st_size)
    for arguments, code, words in (
        ((many, "--sample", 200), 2, "only 200 samples, and the first is 0: name"),
        ((many, "--longest", "--sample", 1), 2, "exclude each other"),
        ((tmp_path / "damaged",), 4, "is damaged"),
        ((tmp_path / "damaged", "--longest"), 4, "is damaged"),
        ((tmp_path / "two",), 4, "2 splits (train, val)"),
        ((tmp_path / "none",), 4, "no published stream"),
    ):
        answer = mdsmix("inspect", *arguments)
        assert (answer.code, answer.out, answer.err.count("\n")) == (code, "", 1)
        assert words in answer.err


def test_images_are_shown_and_written_as_they_are(project: Project, seeing: Path) -> None:
    paths, out = write_drawings(project.folder / "img"), project.folder / "seen"
    project.write_source([record(), record(*(f"img/{path.name}" for path in paths))])
    project.tokenizer = seeing
    project.configure(stream("a.jsonl"), max_seq_len=99).run()
    output = mdsmix("inspect", project.train, "--images", out).out
    answer = json.loads(mdsmix("inspect", project.train, "--sample", "1", "--json").out)
    (shown,) = answer["shown"]
    for number, (image, path) in enumerate(zip(shown["images"], paths, strict=True)):
        size, kind = path.stat().st_size, ("JPEG", "PNG", "WebP")[number]
        assert image == {"height": 30, "width": 40, "bytes": size, "format": kind}
        assert f"image {number}: 40 x 30 {kind}, {size:,} bytes\n" in output
        assert (out / f"web-train-1-{number}.{kind.lower()}").read_bytes() == path.read_bytes()
    assert output.endswith(f"wrote 3 images into {out}\n")

    def write_on_a_full_disk() -> None:
        """The image that does not fit is not left behind in part."""
        SmallDisk(project.folder / "disk", 4096)
        failed = mdsmix("inspect", project.train, "--images", project.folder / "disk/seen")
        assert (failed.code, "cannot write" in failed.err) == (4, True)
        assert "name another folder for --images" in failed.err
        images = {path.read_bytes() for path in paths}
        assert all(path.read_bytes() in images for path in (project.folder / "disk").rglob("*.*"))

    run_in_process(write_on_a_full_disk)
    failed = mdsmix("inspect", project.train, "--images", project.recipe)
    assert (failed.code, "cannot write" in failed.err) == (4, True)
