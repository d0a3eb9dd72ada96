"""A recipe that would give other rows than the published ones is refused, by every command that
takes one.

`recipe` is a recipe of published streams; `findings` and `fixes` read the output of `check --json`.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.converting import (
    Answer,
    assert_refused,
    chats,
    documents,
    manifest_of,
    mdsmix,
    pairs,
    run_ok,
    write_jsonl,
    write_recipe,
)
from tests.published import edit


class Change(NamedTuple):
    """An override, the streams whose rows it shapes, and words of the message."""

    override: str
    streams: set[str]
    words: str = ""


ALL = {"web", "docs", "faq", "chat", "chat-eval"}
CHANGES = [
    Change("max_seq_len=40", ALL, "max_seq_len was 48 and is 40"),
    Change("special_tokens_in_text=reject", ALL, "special_tokens_in_text was escape and is reject"),
    Change("target_responses=all", {"faq", "chat", "chat-eval"}, "was last and is all"),
    Change("tokenizer.template.mood=dry", {"chat", "chat-eval"}, "tokenizer.template.mood was not set and is dry"),
    Change("streams.web.source.where=n > 3", {"web"}, "source.where was not set and is n > 3"),
    Change("streams.web.source.path=other.jsonl", {"web"}, "source.path was web.jsonl and is other.jsonl"),
    Change("streams.web.source.path=web*.jsonl", {"web"}, "source.path was web.jsonl and is web*.jsonl"),
    Change("streams.web.source.text=title", {"web"}, "source.text was text and is title"),
    Change("streams.web.source.format=text", {"web"}, "source.format was not set and is text"),
    Change("streams.web.min_tokens=9", {"web"}, "min_tokens was 0 and is 9"),
    Change("streams.web.max_tokens=9", {"web"}, "max_tokens was not set and is 9"),
    Change("streams.web.add_bos=true", {"web"}, "cannot be converted"),
    Change("streams.web.add_eos=false", {"web"}, "add_eos was true and is false"),
    Change("streams.web.sample=50%", {"web"}, "sample was not set and is 1/2"),
    Change("streams.web.layout=document", {"web"}, "layout was concat and is document"),
    Change("streams.web.duplicates=drop", {"web"}, "duplicates was keep and is drop"),
    Change("streams.faq.too_long=filter", {"faq"}, "too_long was cut and is filter"),
    Change("streams.faq.source.response=prompt", {"faq"}, "source.response was response and is prompt"),
    Change("streams.chat.consecutive_roles=merge", {"chat", "chat-eval"}, "consecutive_roles was not set and is merge"),
    Change("streams.chat.columns=compact", {"chat", "chat-eval"}, "compact was false and is true"),
    Change("streams.chat.rewritten_history=last", {"chat", "chat-eval"}, "was reject and is last"),
    Change("streams.chat.train_parts={reasoning: false}", {"chat", "chat-eval"}, "train_parts.reasoning was not set and is false"),
    Change("streams.chat.holdout=40%", {"chat", "chat-eval"}, "holdout was 1/4 and is 2/5"),
    Change("streams.chat.source.shape=openai", {"chat", "chat-eval"}, "source.shape was not set and is openai"),
    # No row depends on these.
    Change("streams.chat.train_parts={reasoning: true}", set()),
    Change("compression=zstd", set()),
    Change("max_bad=50%", set()),
    Change("train_loader.name=mdsmix", set()),
    Change("mix.web.repeat=2", set()),
    Change("mix.web.share=30%", set()),
    Change("train_loader.num_workers=4", set()),
    Change("train_loader.dataset.shuffle_seed=3", set()),
    Change("streams.web.source.id=n", set()),
    Change("streams.web.source.path=./web.jsonl", set()),
    Change("streams.web.expected_mean_tokens=9", set()),
    Change("tokenizer.backend=reference", set()),
    Change("publish=versioned", set()),
]  # fmt: skip


@pytest.fixture
def recipe(tmp_path: Path, tokenizer_folder: Path) -> Path:
    """Write and convert a recipe with a stream of each kind; `chat` has a holdout."""
    texts = [
        {"text": f"{n} a text of some words", "title": f"title {n}", "n": n} for n in range(60)
    ]
    for name in ("web", "other", "web2"):
        write_jsonl(tmp_path / f"{name}.jsonl", texts if name == "web" else texts[:40])
    questions = [{"prompt": f"what is {n}", "response": f"it is {n}"} for n in range(40)]
    write_jsonl(tmp_path / "faq.jsonl", questions)
    conversations = [
        {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": "so"}]}
        for n in range(60)
    ]
    write_jsonl(tmp_path / "chat.jsonl", conversations)
    tokenizer = tmp_path / "tokenizer"
    shutil.copytree(tokenizer_folder, tokenizer)
    config = json.loads((tokenizer / "tokenizer_config.json").read_text())
    config["chat_template"] += "{% if mood is defined %}{{ mood }}{% endif %}"
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(config))
    streams = {
        "web": documents("web.jsonl"),
        "docs": documents("web.jsonl", layout="document"),
        "faq": pairs("faq.jsonl"),
        "chat": chats("chat.jsonl", holdout="25%"),
    }
    path = write_recipe(tmp_path, tokenizer, max_seq_len=48, streams=streams)
    run_ok("convert", path)
    return path


def fixes(answer: Answer, id: str) -> dict[str, str]:
    """Return stream -> the fix that a check suggests for it, from `--json`."""
    return _read_findings(answer, id, "fix")


def findings(answer: Answer, id: str = "recipe-changed") -> dict[str, str]:
    """Return stream -> the message of a check about it, from `--json`."""
    return _read_findings(answer, id, "message")


def _read_findings(answer: Answer, id: str, key: str) -> dict[str, str]:
    values = dict[str, str]()
    for finding in json.loads(answer.out)["findings"]:
        if finding["id"] == id:
            values |= dict.fromkeys(finding["streams"], finding[key])
    return values


def test_only_changes_that_shape_rows_are_refused(recipe: Path) -> None:
    assert findings(run_ok("check", recipe, "--json")) == {}
    for change in CHANGES:
        answer = mdsmix("check", recipe, change.override, "--json")
        messages = findings(answer)
        assert messages.keys() == change.streams, change
        assert all(change.words in message for message in messages.values()), (change, messages)
        assert (answer.code == 3) == bool(messages), change
        assert not findings(answer, "sources-changed"), change


def test_every_command_that_takes_a_recipe_refuses_it(recipe: Path) -> None:
    override = "streams.web.min_tokens=9"
    words = "min_tokens was 0 and is 9"
    config = recipe.parent / "train.yaml"
    run_ok("render-yaml", recipe, "-o", config)
    before = config.read_bytes()
    for command in (
        ("render-yaml", recipe, override),
        ("render-yaml", recipe, override, "-o", config),
        ("render-yaml", recipe, override, "--into", config),
        ("plan", recipe, override),
        ("preview", recipe, override),
        ("mix", recipe, override, "--out", recipe.parent / "drawn"),
    ):
        answer = mdsmix(*command)
        assert (answer.code, words in answer.err) == (3, True), command
        assert f"mdsmix convert {recipe} {override}" in answer.err
    assert config.read_bytes() == before
    page = recipe.parent / "page.html"
    run_ok("report", recipe, override, "-o", page, "--no-preview")
    assert words in page.read_text()
    # A training YAML and bare streams have no recipe.
    run_ok("check", config)
    run_ok("check", recipe.parent / "out")


def test_every_command_refuses_an_added_holdout_alike(recipe: Path) -> None:
    added = "streams.web.holdout=25%"
    page = recipe.parent / "page.html"
    for command in (
        ("plan", recipe, added),
        ("check", recipe, added),
        ("render-yaml", recipe, added),
        ("render-yaml", recipe, added, "-o", recipe.parent / "train.yaml"),
        ("preview", recipe, added),
        ("leaks", recipe, added),
        ("mix", recipe, added, "--out", recipe.parent / "drawn"),
    ):
        answer = mdsmix(*command)
        assert answer.code == 3, (command, answer)
        for words in ("recipe-changed", "holdout was not set and is", f"convert {recipe} {added}"):
            assert words in answer.err, (command, answer)
    assert not (recipe.parent / "train.yaml").exists()
    assert mdsmix("report", recipe, added, "-o", page, "--no-preview").code == 3
    assert "holdout was not set and is" in page.read_text()
    # A stream that is missing for another reason is not published.
    assert_refused(mdsmix("check", recipe, added, "local=nowhere"), 4, "not published: web at")
    run_ok("convert", recipe, added)
    run_ok("check", recipe, added)
    shutil.rmtree(recipe.parent / "out" / "web" / "eval")
    assert_refused(mdsmix("check", recipe, added), 4, "not published: web-eval at")


@pytest.mark.parametrize("order", [("web", "again"), ("again", "web")])
def test_two_names_of_one_published_stream_are_one_finding(
    recipe: Path, order: tuple[str, str]
) -> None:
    """One of them has a source, which is compared with the stream as without the other."""
    tree = json.loads(recipe.read_text())
    again = {"local": str(Path(tree["local"]) / "web")}
    streams = {"web": tree["streams"]["web"], "again": again}
    recipe.write_text(json.dumps(tree | {"streams": {name: streams[name] for name in order}}))
    answer = mdsmix("check", recipe, "--json")
    assert answer.code == 3
    assert findings(answer, "recipe-changed") == {}
    fix = "both read the same samples: remove one of the two, and set repeat: 2"
    fixes_of_both = fixes(answer, "local-duplicate")
    assert fixes_of_both.keys() == {*order}
    assert all(fix in text for text in fixes_of_both.values())


def test_after_converting_again_the_recipe_is_accepted(recipe: Path) -> None:
    for override in ("streams.web.min_tokens=9", "streams.web.source.path=web*.jsonl"):
        assert mdsmix("check", recipe, override).code == 3
        run_ok("convert", recipe, override)
        assert findings(run_ok("check", recipe, override, "--json")) == {}
        assert mdsmix("check", recipe).code == 3


def test_another_path_to_the_same_files_is_published(recipe: Path) -> None:
    """A machine without the files, which has only the paths to compare, accepts the recipe then."""
    override = "streams.web.source.path='we[b].jsonl'"
    run_ok("convert", recipe, override)
    remove_source(recipe)
    assert findings(run_ok("check", recipe, override, "--json")) == {}
    assert findings(mdsmix("check", recipe, "--json")).keys() == {"web"}


def edit_source(recipe: Path) -> None:
    with (recipe.parent / "web.jsonl").open("ab") as file:
        file.write(b'{"text": "one more"}\n')


def touch_source(recipe: Path) -> None:
    os.utime(recipe.parent / "web.jsonl", (1, 1))


def remove_source(recipe: Path) -> None:
    (recipe.parent / "web.jsonl").unlink()


@pytest.mark.parametrize("change", [edit_source, touch_source, remove_source])
def test_sources_that_changed_are_a_warning(recipe: Path, change: Callable[[Path], None]) -> None:
    change(recipe)
    answer = run_ok("check", recipe, "--json")
    words = "1 gone" if change is remove_source else "1 edited"
    messages = findings(answer, "sources-changed")
    assert messages.keys() == {"web", "docs"}
    assert all(words in message for message in messages.values())
    assert "sources-changed" in run_ok("render-yaml", recipe).err
    for fix in fixes(answer, "sources-changed").values():
        assert ("correct `path`, or bring the files back" in fix) == (change is remove_source)
        assert (f"mdsmix convert {recipe}" in fix) == (change is not remove_source)
    if change is remove_source:
        assert_refused(mdsmix("convert", recipe), 2, "web.jsonl")
    if change is not remove_source:
        run_ok("convert", recipe)
        assert not findings(run_ok("check", recipe, "--json"), "sources-changed")


def test_new_and_missing_files_of_a_pattern_are_counted(recipe: Path) -> None:
    wide = "streams.web.source.path=web*.jsonl"
    run_ok("convert", recipe, wide)
    shutil.copy(recipe.parent / "web.jsonl", recipe.parent / "web3.jsonl")
    (recipe.parent / "web2.jsonl").unlink()
    (recipe.parent / "web4.jsonl").touch()  # an empty file does not count
    answer = run_ok("check", recipe, wide, "--json")
    (message,) = findings(answer, "sources-changed").values()
    assert message.endswith("1 new, 1 gone.")
    (fix,) = fixes(answer, "sources-changed").values()
    assert "correct `path`, or bring the files back" in fix
    assert "mdsmix convert" in fix
    assert_refused(mdsmix("convert", recipe, wide), 2, "web2.jsonl is no longer among its sources")
    (recipe.parent / "web3.jsonl").unlink()
    (fix,) = fixes(run_ok("check", recipe, wide, "--json"), "sources-changed").values()
    assert fix == "correct `path`, or bring the files back."


def test_a_machine_without_the_sources_reports_that_they_were_not_compared(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = recipe.parent / "cache"
    shutil.copytree(Path(os.environ["MDSMIX_CACHE"]) / "tokenizers", cache / "tokenizers")
    monkeypatch.setenv("MDSMIX_CACHE", str(cache))
    touch_source(recipe)
    assert not findings(run_ok("check", recipe, "--json"), "sources-changed")
    edit_source(recipe)
    assert findings(run_ok("check", recipe, "--json"), "sources-changed").keys() == {"web", "docs"}
    remove_source(recipe)
    answer = run_ok("check", recipe, "--json")
    assert findings(answer, "recipe-unseen").keys() == {"web", "docs"}
    assert not findings(answer, "sources-changed")
    with_other_path = mdsmix("check", recipe, "streams.web.source.path=nowhere.jsonl", "--json")
    assert findings(with_other_path).keys() == {"web"}


def test_a_recipe_and_its_files_may_be_moved(recipe: Path) -> None:
    """Neither another folder nor a recipe that names the same files from elsewhere counts as
    another path.
    """
    tree: dict[str, Any] = json.loads(recipe.read_text())
    for stream in tree["streams"].values():
        stream["source"]["path"] = str(recipe.parent / stream["source"]["path"])
    tree["local"] = str(recipe.parent / "out")
    below = recipe.parent / "below" / "recipe.yaml"
    below.parent.mkdir()
    below.write_text(json.dumps(tree))
    answer = run_ok("check", below, "--json")
    assert not findings(answer)
    assert not findings(answer, "sources-changed")


def test_a_sample_for_a_budget_stays_as_published(tmp_path: Path, tokenizer_folder: Path) -> None:
    texts = [{"text": f"{n} a text of some words"} for n in range(400)]
    write_jsonl(tmp_path / "web.jsonl", texts)
    streams = {"web": documents("web.jsonl", layout="document")}
    recipe = write_recipe(
        tmp_path, tokenizer_folder, streams=streams, mix={"web": {"share": "100%"}}
    )
    run_ok("convert", recipe, "--budget", "600")
    assert manifest_of(tmp_path / "out" / "web" / "train").encoding.sample
    answer = run_ok("check", recipe, "--json")
    assert not findings(answer)
    assert "sample: budget" in findings(answer, "recipe-unseen")["web"]
    overrides = ["budget=600 tokens", "streams.web.sample=budget"]
    answer = run_ok("check", recipe, *overrides, "--json")
    assert not findings(answer)
    assert not findings(answer, "recipe-unseen")
    assert findings(mdsmix("check", recipe, "streams.web.sample=50%", "--json")).keys() == {"web"}
    run_ok("convert", recipe, "streams.web.sample=50%")
    assert findings(mdsmix("check", recipe, "--json")).keys() == {"web"}


def test_the_day_of_a_template_stays_as_published(recipe: Path) -> None:
    config = recipe.parent / "tokenizer" / "tokenizer_config.json"
    tree = json.loads(config.read_text())
    tree["chat_template"] = "{{ date_string }}" + tree["chat_template"]
    config.write_text(json.dumps(tree))
    run_ok("convert", recipe, "streams.chat.date_string=2024-05-01")
    assert not findings(mdsmix("check", recipe, "--json"))
    with_other_day = mdsmix("check", recipe, "streams.chat.date_string=2024-05-02", "--json")
    assert findings(with_other_day).keys() == {"chat", "chat-eval"}


def test_a_manifest_without_paths_is_compared_by_its_files(recipe: Path) -> None:
    manifest = recipe.parent / "out" / "web" / "train" / "mdsmix.manifest"
    edit(manifest, lambda tree: {key: tree[key] for key in tree if key != "source"})
    assert not findings(run_ok("check", recipe, "--json"))
    with_other_path = mdsmix("check", recipe, "streams.web.source.path=other.jsonl", "--json")
    assert "source.path was web.jsonl and is other.jsonl" in findings(with_other_path)["web"]
