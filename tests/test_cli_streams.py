"""What a command says of streams: of one, several or a recipe, of its bad records, and nothing that
steers a terminal.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from mdsmix.foundry_yaml.findings import Finding
from mdsmix.report.show import print_findings
from tests.converting import (
    Answer,
    Project,
    documents,
    flip_byte,
    manifest_of,
    mdsmix,
    pairs,
    run_ok,
)
from tests.corpus import train_tokenizer
from tests.published import CONCAT, TOKEN_ROW, publish

COMMANDS = ("inspect", "verify", "gc", "quarantine")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, tokenizer_folder: Path) -> Path:
    """Two converted streams with a bad record each, and one of another tool without a split."""
    project = Project(tmp_path_factory.mktemp("several"), tokenizer_folder, pytest.MonkeyPatch())
    streams: dict[str, Any] = {}
    for name, bad in (("a", [{"text": 5}]), ("b", [{"text": 5}, {"other": 1}])):
        rows: list[Any] = [f"Document {n} of {name}" for n in range(20)]
        streams[name] = documents(project.write_source(rows + bad, f"{name}.jsonl"))
    theirs = publish(project.folder / "theirs", CONCAT, [TOKEN_ROW], split="")
    streams["c"] = {"kind": "pretraining", "local": str(theirs)}
    (project.folder / "convert.json").write_text(
        project.configure(streams=streams).convert_ok("--json").out
    )
    return project.recipe


def asked(*arguments: object) -> tuple[int, list[dict[str, Any]], str]:
    answer = mdsmix(*arguments, "--json")
    return answer.code, json.loads(answer.out)["streams"], answer.err


def test_programs_get_the_figures_that_a_person_is_shown(recipe: Path) -> None:
    def told(*arguments: object) -> Any:
        return json.loads(mdsmix(*arguments, "--json").out)

    folder = recipe.parent / "out/a"
    a, b = json.loads(recipe.with_name("convert.json").read_text())["rows"]
    tokens = manifest_of(folder / "train").totals.tokens
    assert (a["stream"], a["read"], a["tokens"]) == ("a", 21, tokens)
    assert b["reasons"] == {
        "filtered": {},
        "quarantined": {"field_not_text": 1, "missing_field": 1},
    }
    again = told("convert", recipe)
    assert again["rows"][0]["state"].startswith("up to date")
    for row in (*again["rows"], again["total"]):  # a number, as in a run that converts
        assert (row["seconds"], row["tokens_per_second"]) == (0, None)
    assert told("convert", recipe, "--dry-run")["plan"]
    card = told("inspect", folder)
    assert card["manifest"]["totals"]["samples"] == card["samples"] > 0
    assert (card["shown"][0]["sample"][-1]["trained"], card["is_whole"]) == (True, True)
    assert told("verify", folder)["faults"] == []
    assert told("repair", folder, "--recipe", recipe)["units"] == 0
    assert told("gc", folder, "--older-than", "0s")["garbage"] == []
    assert told("check", folder)["may_be_mixed"] is True


def test_a_recipe_is_all_its_streams_and_one_that_fails_ends_none(recipe: Path) -> None:
    home = recipe.parent
    urls = [str(home / "out" / name / "train") for name in "ab"]
    some = [home / "nowhere", home / "out/b", home / "neither"]
    for command in COMMANDS:
        code, streams, err = asked(command, recipe)
        assert (code, err) == (0, "")
        places = urls + [str(home / "theirs")] * (command != "gc")
        assert [stream["stream"] for stream in streams] == places
        assert all(place in mdsmix(command, recipe).out for place in places)
        moved = mdsmix(command, recipe, f"local={home / 'elsewhere'}")
        assert (moved.code, moved.err.count("error: ")) == (4, 2)
        answer = mdsmix(command, *some)
        assert (answer.code, answer.err.count("error: ")) == (4, 2)
        assert str(some[1]) in answer.out
        code, streams, _ = asked(command, *some)
        assert (code, ["error" in stream for stream in streams]) == (4, [True, False, True])
    a = home / "out/a"
    for wrong in ((recipe, a), (a, "max_seq_len=4"), (recipe, recipe)):
        answer = mdsmix("verify", *wrong)
        assert (answer.code, answer.out) == (2, "")
        assert "name one recipe" in answer.err


def test_the_folder_of_a_mix_is_all_its_streams(tmp_path: Path) -> None:
    """Evaluations and streams without a split too. Trials count only where nothing else is."""
    for place, split in (
        ("web", "train"),
        ("web", "eval"),
        ("web", "limit-5"),
        ("tried", "limit-5"),
        ("theirs", ""),
    ):
        publish(tmp_path / "mix" / place, CONCAT, [TOKEN_ROW], split=split)
    (tmp_path / "mix/tokenizer-0123abcd").mkdir()
    _, streams, _ = asked("verify", tmp_path / "mix")
    expected = ["theirs", "tried/limit-5", "web/eval", "web/train"]
    assert [stream["stream"] for stream in streams] == [f"{tmp_path}/mix/{n}" for n in expected]
    checked = json.loads(mdsmix("check", tmp_path / "mix", "--json").out)
    assert [stream["stream"] for stream in checked["epoch"]] == [f"{tmp_path}/mix/web/train"]


def test_a_damaged_stream_is_less_grave_than_a_missing_one(recipe: Path) -> None:
    home = recipe.parent
    (shard,) = (home / "out/a/train").glob("*.mds")
    flip_byte(shard)
    code, streams, _ = asked("verify", recipe)
    assert code == 3
    assert [len(stream["faults"]) for stream in streams] == [1, 0, 0]
    a, b, none = home / "out/a", home / "out/b", home / "nowhere"
    for arguments, grave in (((recipe, "--quick"), 0), ((a, none), 4), ((none, a), 4), ((b, a), 3)):
        assert mdsmix("verify", *arguments).code == grave
    flip_byte(shard)


LINES = """{"text": "good"}
{"text": 1}
no json
{"text": 2)
{"other": "\\u001b[31mred"}
{"text": "end"}
"""


@pytest.fixture
def docs(project: Project) -> Project:
    (project.folder / "docs.jsonl").write_text(LINES)
    return project.configure(documents("docs.jsonl", layout="document"))


def test_each_reason_has_its_count_and_its_first_records(docs: Project) -> None:
    for way in ("publish=replace", "publish=versioned"):
        docs.convert(way)
        for folder in (docs.train.parent, docs.train):
            assert mdsmix("quarantine", folder, "-n", 1) == Answer(
                0,
                f"{docs.train}: 4 bad records\n"
                "\nnot_json: 2\n  docs.jsonl, line 3, offset 29, 7 bytes\n    no json\n"
                '\nfield_not_text: 1\n  docs.jsonl, line 2, offset 17, 11 bytes\n    {"text": 1}\n'
                "\nmissing_field: 1\n  docs.jsonl, line 5, offset 49, 26 bytes\n"
                '    {"other": "\\u001b[31mred"}\n    missing: text\n',
                "",
            )


def test_an_unpublished_run_has_bad_records_and_a_sentence_tells_the_rest(docs: Project) -> None:
    bad, good, hurt = (docs.folder / name / "web/train" for name in ("bad", "good", "hurt"))
    docs.convert("max_bad=10%", f"local={docs.folder}/bad")
    docs.convert(f"local={docs.folder}/hurt")
    (docs.folder / "docs.jsonl").write_text(LINES.partition("\n")[0])
    docs.convert(f"local={docs.folder}/good")
    assert not (bad / "index.json").exists()
    assert "not_json: 2" in mdsmix("quarantine", bad).out
    others = "; with other reasons: not_json: 2, field_not_text: 1, missing_field: 1"
    (kept,) = (hurt / "quarantine").iterdir()
    kept.write_bytes(kept.read_bytes()[:-9])
    for arguments, code, words in (
        ([good], 0, f"{good}: 0 bad records\n"),
        ([bad, "--reason", "no_json"], 0, f"{bad}: 0 bad records{others}\n"),
        ([docs.folder / "nowhere"], 4, "no published stream"),
        ([hurt], 4, "is damaged"),
    ):
        answer = mdsmix("quarantine", *arguments)
        assert (answer.code, words in answer.out + answer.err) == (code, True), answer.err


HOSTILE = "x\x1b]0;owned\x07\x1b[2J\x9b31m\u202e\r:smile:[bold]"
"""Sets the window's title, clears the screen, turns red, changes the direction, and returns to the
beginning of the line.
"""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One with a hostile special token, in a folder of a hostile name."""
    folder = train_tokenizer(tmp_path_factory.mktemp("plain"), documents_n=5)
    path = folder / "tokenizer.json"
    tree = json.loads(path.read_text())
    (end,) = [token for token in tree["added_tokens"] if token["content"] == "<|im_end|>"]
    end["content"] = HOSTILE
    tree["model"]["vocab"][HOSTILE] = tree["model"]["vocab"].pop("<|im_end|>", 3)
    path.write_text(json.dumps(tree))
    hostile = tmp_path_factory.mktemp("hostile") / f"tokenizer {HOSTILE}"
    shutil.copytree(folder, hostile)
    return hostile


@pytest.fixture
def hostile(tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Hostile everywhere: folder, files, field names, fields that nothing reads, bad records and
    texts.
    """
    project = Project(tmp_path / f"data {HOSTILE}", tokenizer, monkeypatch)
    texts: list[Any] = [{"text": f"Number {n} {HOSTILE}", HOSTILE: "more"} for n in range(20)]
    project.write_source([*texts, {"text": {HOSTILE: 1}}, {HOSTILE: 1}], f"docs {HOSTILE}.jsonl")
    project.write_source([{HOSTILE: "Which?", "answer": "This."}], f"faq {HOSTILE}.jsonl")
    faq = pairs("faq*.jsonl")
    faq["source"] |= {"prompt": HOSTILE, "response": "answer"}
    streams = {"docs": documents("docs*.jsonl", layout="document"), "faq": faq}
    return project.configure(streams=streams, max_seq_len=64, special_tokens_in_text="allow").recipe


def is_safe(text: str) -> bool:
    return all(c.isprintable() or c == "\n" for c in text)


def without_colours(text: str) -> str:
    return re.sub(r"\x1b\[[\d;]*m", "", text)


def safe(*arguments: object) -> Answer:
    answer = run_ok(*arguments)
    assert is_safe(answer.out + answer.err), ascii(answer)
    return answer


def test_no_command_hands_on_what_steers_a_terminal(hostile: Path) -> None:
    home = hostile.parent
    docs = home / "out/docs"
    safe("convert", hostile, "--dry-run")
    assert "fields not read: x\\x1b]0;owned" in safe("convert", hostile).out
    for command in ("inspect", "verify", "gc", "quarantine"):
        for arguments in ((hostile,), (docs,), (hostile, "--json")):
            assert "\\x1b" in safe(command, *arguments).out or "--json" in arguments
    for command, *more in (("convert",), ("check",), ("mix", "--out", home / "mixed")):
        safe(command, hostile, *more)
        safe(command, hostile, *more, "--json")
    safe("repair", docs, "--recipe", hostile)
    assert "x\\x1b]0;owned" in safe("inspect", docs).out


def test_colours_are_our_own(hostile: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    hostile_texts = dict.fromkeys(("message", "why", "fix"), HOSTILE)
    finding = Finding(id="x", severity="note", streams=("a\nnote fine",), **hostile_texts)
    for is_terminal in (False, True):
        monkeypatch.setattr("sys.stdout.isatty", lambda answer=is_terminal: answer)
        print_findings([finding])
        out = without_colours(capsys.readouterr().out)
        assert is_safe(out)
        assert "a\\nnote fine" in out
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    for command in ("convert", "inspect", "quarantine"):
        answer = run_ok(command, hostile)
        assert is_safe(without_colours(answer.out)), ascii(answer.out)
    assert ":smile:[bold]" in answer.out, "neither an emoji nor markup"
