"""`mdsmix convert` on bad input: one sentence and its exit code, or a counted quarantine; the good records are all there."""

from __future__ import annotations

import base64
import gzip
import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.converting import (
    Answer,
    chats,
    documents,
    encoder,
    manifest_of,
    mdsmix,
    pairs,
    quarantined,
    token_rows,
    windows,
    write_jsonl,
    write_recipe,
)
from tests.processes import MDSMIX

EOS = 0


def refused(answer: Answer, code: int, *words: str) -> None:
    """One sentence on stderr that starts with `error:`, nothing on stdout, no traceback."""
    assert answer.code == code
    assert answer.out == ""
    said = answer.err.splitlines()
    (line,) = [line for line in said if not line.startswith("looking at the tokenizer ")]
    assert line.startswith("error: ")
    assert all(word in line for word in words), line


@pytest.fixture
def recipe(tmp_path: Path, tokenizer_folder: Path) -> Path:
    write_jsonl(tmp_path / "a.jsonl", [{"text": f"good {n}"} for n in range(20)])
    streams = {"web": documents(tmp_path / "a.jsonl")}
    return write_recipe(tmp_path, tokenizer_folder, streams=streams)


BAD_DOCUMENTS = {
    b"not json": "not_json",
    b'{"text": "cut o': "not_json",
    b'{"text": "a"} {"text": "b"}': "not_json",
    b'{"text": NaN}': "not_json",
    b'{"other": "a"}': "missing_field",
    b'{"text": 7}': "field_not_text",
    b'{"text": null}': "field_not_text",
    b'{"text": ["a"]}': "field_not_text",
    b'["text"]': "not_an_object",
    b'"text"': "not_an_object",
    b"null": "not_an_object",
    b'{"text": "\xff\xfe"}': "invalid_utf8",
    b'{"text": "\\ud800 alone"}': "lone_surrogate",
    b"[" * 1030 + b"]" * 1030: "too_deep",
}


@pytest.mark.parametrize("window", [7, 60, 1 << 27])
@pytest.mark.parametrize("layout", ["concat", "document"])
def test_bad_lines_are_set_aside_and_their_neighbours_converted(
    tmp_path: Path,
    tokenizer_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    layout: str,
    window: int,
) -> None:
    """The quarantine names the line that an editor shows and the byte where it starts, also in a unit that starts inside a file."""
    windows(monkeypatch, window)
    lines: list[bytes] = []
    for n, bad in enumerate(BAD_DOCUMENTS):
        lines += [json.dumps({"text": f"good document {n}"}).encode(), bad]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join([*lines, b"", b"  ", b'{"text": "the last"}']))
    streams = {"web": documents(tmp_path / "a.jsonl", layout=layout)}
    recipe = write_recipe(tmp_path, tokenizer_folder, streams=streams)
    answer = mdsmix("convert", recipe)
    assert answer.code == 0
    published = tmp_path / "out" / "web" / "train"
    kept = sorted(quarantined(published), key=lambda record: record["offset"])
    assert [(k["line"], k["reason"]) for k in kept] == [
        (2 * n + 2, reason) for n, reason in enumerate(BAD_DOCUMENTS.values())
    ]
    content = (tmp_path / "a.jsonl").read_bytes()
    for record in kept:
        raw = record["raw"].encode() if "raw" in record else base64.b64decode(record["raw_base64"])
        assert content[record["offset"] : record["offset"] + record["length"]] == raw
        assert record["file"] == "a.jsonl"
    assert [raw for raw in BAD_DOCUMENTS if b"\xff" in raw] == [
        base64.b64decode(k["raw_base64"]) for k in kept if "raw_base64" in k
    ]
    records = manifest_of(published).records
    assert (records.read, records.bad) == (2 * len(BAD_DOCUMENTS) + 1, len(BAD_DOCUMENTS))
    if layout == "document":
        encode = encoder(tokenizer_folder)
        texts = [f"good document {n}" for n in range(len(BAD_DOCUMENTS))] + ["the last"]
        assert token_rows(published) == [[*encode(text), EOS] for text in texts]
    assert "14 of the records" not in answer.out
    assert f"{len(BAD_DOCUMENTS) / records.read:.1%} of the records are bad" in answer.out
    assert "2 field_not_text" not in answer.out
    assert "3 field_not_text" in answer.out
    assert f"the bad records lie in {published}/quarantine/" in answer.out


def _messages(*turns: str) -> Any:
    roles = {"u": "user", "a": "assistant", "s": "system", "x": "wizard"}
    return {"messages": [{"role": roles[t[0]], "content": t[1:]} for t in turns]}


BAD_CHATS = [
    (_messages("uHi", "aYes", "uAnd?"), "quarantined"),
    (_messages("uHi", "uHello", "aYes"), "quarantined"),
    (_messages("uHi", "aYes", "aNo"), "quarantined"),
    (_messages("xHi", "aYes"), "quarantined"),
    (_messages("aYes"), "quarantined"),
    ({"messages": []}, "quarantined"),
    ({"messages": None}, "quarantined"),
    ({"messages": "Hi"}, "quarantined"),
    ({"messages": ["Hi", "Yes"]}, "quarantined"),
    ({"conversation": []}, "quarantined"),
    ({"messages": [{"role": "user"}, {"role": "assistant", "content": "x"}]}, "quarantined"),
    ({"messages": [{"role": "user", "content": None}, {"role": "assistant", "content": "x"}]}, "quarantined"),
    (_messages("uLong " * 40, "aYes"), "filtered"),
    (_messages("uHi", "aHow <|im_end|> ends"), "quarantined"),
]  # fmt: skip


@pytest.mark.parametrize("columns", ["turns", "compact"])
def test_bad_conversations_are_counted_one_by_one(
    tmp_path: Path, tokenizer_folder: Path, columns: str
) -> None:
    good = _messages("sBe short.", "uHi", "aYes", "uWhy?", "aSo.")
    records = [record for bad, _ in BAD_CHATS for record in (bad, good)]
    write_jsonl(tmp_path / "a.jsonl", records)
    streams = {"chat": chats(tmp_path / "a.jsonl", columns=columns)}
    recipe = write_recipe(tmp_path, tokenizer_folder, streams=streams, max_seq_len=64)
    answer = mdsmix("convert", recipe)
    assert answer.code == 0
    published = tmp_path / "out" / "chat" / "train"
    counted = manifest_of(published).records
    kinds = [kind for _, kind in BAD_CHATS]
    assert (counted.read, counted.written) == (len(records), len(BAD_CHATS))
    assert (counted.bad, counted.dropped) == (kinds.count("quarantined"), kinds.count("filtered"))
    rows = token_rows(published)
    assert len(rows) == len(BAD_CHATS)
    assert all(row == rows[0] for row in rows)
    lines = [2 * n + 1 for n, kind in enumerate(kinds) if kind == "quarantined"]
    assert [record["line"] for record in quarantined(published)] == lines
    raws = [json.loads(record["raw"]) for record in quarantined(published)]
    assert raws == [bad for bad, kind in BAD_CHATS if kind == "quarantined"]


BAD_PAIRS = [
    ({"prompt": "What is it?", "response": ""}, "filtered"),
    ({"prompt": "What is it? " * 40, "response": "That."}, "filtered"),
    ({"prompt": "What is it?"}, "quarantined"),
    ({"prompt": 7, "response": "That."}, "quarantined"),
    (["What is it?", "That."], "quarantined"),
]


def test_bad_pairs_are_counted_one_by_one(tmp_path: Path, tokenizer_folder: Path) -> None:
    good = {"prompt": "What is it?", "response": "That."}
    write_jsonl(tmp_path / "a.jsonl", [r for bad, _ in BAD_PAIRS for r in (bad, good)])
    streams = {"faq": pairs(tmp_path / "a.jsonl")}
    recipe = write_recipe(tmp_path, tokenizer_folder, streams=streams, max_seq_len=32)
    assert mdsmix("convert", recipe).code == 0
    records = manifest_of(tmp_path / "out" / "faq" / "train").records
    assert (records.written, records.dropped, records.bad) == (5, 2, 3)


@pytest.mark.parametrize(
    ("document", "reason"), [("", "empty"), ("a", "one_token"), ("a b", "min_tokens")]
)
def test_documents_without_a_loss_are_filtered_and_counted(
    tmp_path: Path, tokenizer_folder: Path, document: str, reason: str
) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"text": document}, {"text": "long enough to stay"}])
    least = 3 if reason == "min_tokens" else 0
    stream = documents(tmp_path / "a.jsonl", layout="document", add_eos=False, min_tokens=least)
    recipe = write_recipe(tmp_path, tokenizer_folder, streams={"web": stream})
    assert mdsmix("convert", recipe).code == 0
    records = manifest_of(tmp_path / "out" / "web" / "train").records
    assert (records.read, records.written, records.filtered) == (2, 1, {reason: 1})


def test_a_first_run_and_a_second_print_what_they_did(recipe: Path) -> None:
    first, second = mdsmix("convert", recipe), mdsmix("convert", recipe)
    assert (first.code, first.err, second.code, second.err) == (0, "", 0, "")
    assert re.search(r"web: 1 of 1 work units converted, /", first.out)
    assert re.search(r"web: up to date, /", second.out)
    row = next(line for line in first.out.splitlines() if line.startswith("  web"))
    read, written, dropped, bad, made, shards, *_ = row.split()[1:]
    assert (read, written, dropped, bad, shards) == ("20", "20", "0", "0", "1")
    manifest = manifest_of(recipe.parent / "out" / "web" / "train")
    assert int(made) == manifest.totals.tokens


def test_a_key_that_does_not_exist_names_the_nearest(recipe: Path) -> None:
    refused(mdsmix("convert", recipe, "max_seq_length=64"), 2, "did you mean max_seq_len?")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["streams.web.source.path=nothing/*.jsonl"], ["matches no file", "nothing"]),
        (["streams.web.source.path=."], ["is a folder", "*.jsonl"]),
        (["streams.web.source.path=recipe.yaml"], ["recipe.yaml", "no suffix that mdsmix reads"]),
        (["--only", "wbe"], ["--only wbe", "web"]),
        (["max_seq_len"], ["max_seq_len", "key=value"]),
        (["max_seq_len=many"], ["max_seq_len", "'many'", "a whole number"]),
        (["local=null"], ["neither remote nor local"]),
        (["streams.web.add_bos=true"], ["add_bos", "no BOS"]),
    ],
)
def test_a_wrong_recipe_is_one_sentence(
    recipe: Path, overrides: list[str], words: list[str]
) -> None:
    refused(mdsmix("convert", recipe, *overrides), 2, *words)
    assert not (recipe.parent / "out" / "web").exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", ["recipe.yaml"]),
        ("- a\n- b\n", ["top level"]),
        ("a: [\n", ["not a readable recipe"]),
        ("a: ${nothing}\n", ["nothing"]),
        ("\tx", ["not a readable recipe"]),
        ("tokenizer: x\nmax_seq_len: 8\nstreams: 7\n", ["streams", "7"]),
    ],
)
def test_a_recipe_that_is_none_is_one_sentence(
    tmp_path: Path, content: str, words: list[str]
) -> None:
    (tmp_path / "recipe.yaml").write_text(content)
    refused(mdsmix("convert", tmp_path / "recipe.yaml"), 2, *words)


def test_a_recipe_that_is_not_there_or_a_folder_is_one_sentence(tmp_path: Path) -> None:
    refused(mdsmix("convert", tmp_path / "no.yaml"), 2, "no.yaml")
    refused(mdsmix("convert", tmp_path), 2, str(tmp_path))


def test_a_tokenizer_that_cannot_be_loaded_is_one_sentence(recipe: Path) -> None:
    name = "nobody/no-such-tokenizer"
    refused(mdsmix("convert", recipe, f"tokenizer.name={name}"), 4, name, "could not be loaded")


@pytest.mark.parametrize("option", ["--memory", "--max-bad"])
def test_an_option_without_a_value_is_not_overlooked(recipe: Path, option: str) -> None:
    """As of a variable that is not set: `--memory "$CAP"`."""
    assert mdsmix("convert", recipe, option, "").code == 2


def test_an_output_with_another_streams_data_is_one_sentence(recipe: Path, tmp_path: Path) -> None:
    assert mdsmix("convert", recipe).code == 0
    write_jsonl(tmp_path / "b.jsonl", [{"text": "another stream's words, some of them"}] * 9)
    other = f"streams.web.source.path={tmp_path / 'b.jsonl'}"
    refused(mdsmix("convert", recipe, other), 2, "a.jsonl", "b.jsonl", "--reencode")
    assert mdsmix("convert", recipe, other, "--reencode").code == 0


def test_a_stream_without_a_sample_ends_with_five(recipe: Path) -> None:
    refused(mdsmix("convert", recipe, "max_seq_len=4096"), 5, "stream web", "not one sample")
    limited = mdsmix("convert", recipe, "max_seq_len=4096", "--limit", "1")
    refused(limited, 5, "not one sample", "holdout and --limit, which leave records out.")


@pytest.mark.parametrize("place", ["a file", "a file's folder"])
def test_an_output_that_cannot_be_written_is_one_sentence(recipe: Path, place: str) -> None:
    in_the_way = recipe.parent / "taken"
    in_the_way.write_text("")
    local = in_the_way if place == "a file" else in_the_way / "below"
    refused(mdsmix("convert", recipe, f"local={local}"), 4, str(in_the_way))


def test_a_cache_folder_that_cannot_be_written_is_one_sentence(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MDSMIX_CACHE", str(recipe / "below"))
    refused(mdsmix("convert", recipe), 4, str(recipe / "below"), "MDSMIX_CACHE")


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_damaged_archive_is_one_sentence(recipe: Path, tmp_path: Path, suffix: str) -> None:
    import zstandard

    whole = (tmp_path / "a.jsonl").read_bytes() * 50
    packed = gzip.compress(whole) if suffix == ".gz" else zstandard.compress(whole)
    path = tmp_path / f"cut.jsonl{suffix}"
    path.write_bytes(packed[:-20])
    answer = mdsmix("convert", recipe, f"streams.web.source.path={path}")
    refused(answer, 4, str(path), "is damaged")


def test_names_with_spaces_quotes_and_brackets_are_names(recipe: Path, tmp_path: Path) -> None:
    name = 'it\'s a [draft] of "50 %" é.jsonl'
    (tmp_path / "a.jsonl").rename(tmp_path / name)
    odd = recipe.read_text().replace("a.jsonl", name.replace('"', '\\"'))
    recipe.write_text(odd.replace('/out"', '/the out [x] put"'))
    answer = mdsmix("convert", recipe)
    assert (answer.code, answer.err) == (0, "")
    manifest = manifest_of(tmp_path / "the out [x] put" / "web" / "train")
    assert [source.path for source in manifest.sources] == [name]


def test_a_link_to_a_file_is_that_file(recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "a.jsonl")
    assert mdsmix("convert", recipe, f"streams.web.source.path={tmp_path / 'link.jsonl'}").code == 0


def test_a_link_that_leads_nowhere_is_one_sentence(recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "gone.jsonl").symlink_to(tmp_path / "nothing.jsonl")
    answer = mdsmix("convert", recipe, f"streams.web.source.path={tmp_path / 'gone.jsonl'}")
    refused(answer, 4, "gone.jsonl: it is a link to", "take the link away")


def test_two_runs_at_once_publish_one_whole_stream(recipe: Path) -> None:
    command = [*MDSMIX, "convert", recipe]
    both = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    ends = [(process.communicate()[1], process.returncode) for process in both]
    assert ("", 0) in ends
    for said, code in ends:  # the one that came second may be refused, in a sentence
        assert (code, said.count("\n"), said.startswith("error: ")) in ((0, 0, False), (4, 1, True))
    assert "up to date" in mdsmix("convert", recipe).out
    assert len(token_rows(recipe.parent / "out" / "web" / "train")) > 1


def test_quietly_only_warnings_are_said_and_on_stderr(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    """Each with the stream that it is of; the streams are the same."""
    good = write_jsonl(tmp_path / "good.jsonl", [{"text": f"good {n}"} for n in range(20)])
    bad = write_jsonl(tmp_path / "bad.jsonl", [{"text": "good"}, {"no": "text"}])
    streams = {"web": documents(good), "odd": documents(bad)}
    recipe = write_recipe(tmp_path, tokenizer_folder, streams=streams, max_seq_len=4)
    assert mdsmix("convert", recipe, "--dry-run").code == 0  # the tokenizer is known
    answer = mdsmix("convert", recipe, "--quiet")
    assert (answer.code, answer.out) == (0, "")
    assert answer.err == "odd: WARNING: 50.0% of the records are bad\n"
    assert mdsmix("convert", recipe, "--only", "web", "-q") == Answer(0, "", "")
    parts = mdsmix("convert", recipe, "--reencode", "max_seq_len=8", "--part", "1/1", "-q")
    assert (parts.code, parts.out) == (0, "")
    assert parts.err.startswith("odd: WARNING: 1 records are bad")
    assert mdsmix("verify", tmp_path / "out/web", "-q") == Answer(0, "", "")
    for shard in tmp_path.glob("out/web/*/*.mds"):
        shard.write_bytes(b"")
    assert mdsmix("verify", tmp_path / "out/web", "-q").out.startswith("fault ")


def test_quietly_no_step_is_said_that_goes_as_it_should(
    tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tokenizer that is looked at for the first time, units read for duplicates, parts that have finished, streams without a sample."""
    monkeypatch.setenv("MDSMIX_CACHE", str(tmp_path / "cache"))
    source = write_jsonl(tmp_path / "a.jsonl", [{"text": f"text {n}"} for n in range(20)])
    streams = {
        "web": documents(source, duplicates="drop"),
        "held": documents(source, split="validation"),
    }
    recipe = write_recipe(tmp_path, tokenizer_folder, streams=streams, max_seq_len=4)
    for more in (["--part", "1/1"], ["--finish"], ["--budget", "40"]):
        assert mdsmix("convert", recipe, "-q", *more) == Answer(0, "", "")


def test_converting_checking_and_rendering_import_nothing_heavy(
    recipe: Path, tmp_path: Path, tokenizer_folder: Path, corpus_folder: Path
) -> None:
    """Neither the command nor its workers, whose imports are told on the same stderr."""
    assert mdsmix("convert", recipe).code == 0  # the tokenizer is known
    streams = {
        "web": documents(tmp_path / "a.jsonl", layout="document"),
        "faq": pairs(corpus_folder / "faq.jsonl"),
        "chat": chats(corpus_folder / "chat.jsonl"),
    }
    write_recipe(tmp_path, tokenizer_folder, streams=streams, max_seq_len=512)
    python, *program = MDSMIX
    run = [python, "-X", "importtime", *program]
    for command in ("convert", "check", "render-yaml"):
        arguments = [*run, command, str(recipe), *["--reencode"] * (command == "convert")]
        done = subprocess.run(arguments, capture_output=True, text=True, env=os.environ)
        assert done.returncode == 0, done.stderr[-2000:]
        lines = done.stderr.splitlines()
        modules = {line.rpartition("|")[2].strip() for line in lines}
        assert "mdsmix.cli.main" in modules
        only_workers = {"mdsmix.encode.template_code"}
        assert only_workers <= modules or command != "convert"
        packages = {module.partition(".")[0] for module in modules}
        assert not packages & {"torch", "torchvision", "streaming", "transformers", "llmfoundry"}
