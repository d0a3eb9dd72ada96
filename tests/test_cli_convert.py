"""`mdsmix convert` on bad input: one sentence and its exit code, or a counted quarantine; the good records are all there."""

import base64
import gzip
import json
import re
import subprocess
import sys
from pathlib import Path

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
    refused,
    token_rows,
    windows,
    write_jsonl,
    write_recipe,
)

EOS = 0


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
    b'["text"]': "not_an_object",
    b'{"text": "\xff\xfe"}': "invalid_utf8",
    b'{"text": "\\ud800 alone"}': "lone_surrogate",
    b"[" * 1030 + b"]" * 1030: "too_deep",
}


def test_bad_lines_are_set_aside_and_their_neighbours_converted(
    tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The quarantine names the line that an editor shows and the byte where it starts, also in a unit that starts inside a file."""
    lines: list[bytes] = []
    for n, bad in enumerate(BAD_DOCUMENTS):
        lines += [json.dumps({"text": f"good document {n}"}).encode(), bad]
    content = b"\n".join([*lines, b"", b"  ", b'{"text": "the last"}'])
    (tmp_path / "a.jsonl").write_bytes(content)
    count, encode = len(BAD_DOCUMENTS), encoder(tokenizer_folder)
    expected = [(2 * n + 2, reason) for n, reason in enumerate(BAD_DOCUMENTS.values())]
    for layout, window in (("concat", 60), ("document", 20), ("document", 1 << 27)):
        windows(monkeypatch, window)
        published = tmp_path / f"{layout}-{window}/web/train"
        streams = {"web": documents(tmp_path / "a.jsonl", layout=layout)}
        answer = mdsmix("convert", write_recipe(tmp_path, tokenizer_folder, streams=streams, local=str(published.parents[1])))  # fmt: skip
        assert answer.code == 0, answer.err
        kept = sorted(quarantined(published), key=lambda record: record["offset"])
        assert [(k["line"], k["reason"]) for k in kept] == expected
        for record in kept:
            raw = record["raw"].encode() if "raw" in record else base64.b64decode(record["raw_base64"])  # fmt: skip
            assert content[record["offset"] : record["offset"] + record["length"]] == raw
            assert (record["file"], "raw_base64" in record) == ("a.jsonl", b"\xff" in raw)
        records = manifest_of(published).records
        assert (records.read, records.bad) == (2 * count + 1, count)
        if layout == "document":
            texts = [f"good document {n}" for n in range(count)] + ["the last"]
            assert token_rows(published) == [[*encode(text), EOS] for text in texts]
        said = rf"WARNING: {count / records.read:.1%} of the records are quarantined: .*\b4 not_json.*, in {published}/quarantine/"
        assert re.search(said, answer.out)


def test_a_first_run_and_a_second_print_what_they_did(recipe: Path) -> None:
    first, second = mdsmix("convert", recipe), mdsmix("convert", recipe)
    assert (first.code, first.err, second.code, second.err) == (0, "", 0, "")
    assert re.search(r"web: 1 of 1 work units converted, /", first.out)
    assert re.search(r"web: up to date, /", second.out)
    (row,) = [line.split() for line in first.out.splitlines() if line.startswith("  web")]
    made = manifest_of(recipe.parent / "out" / "web" / "train").totals.tokens
    assert row[1:7] == ["20", "20", "0", "0", str(made), "1"]


REFUSED: list[tuple[list[str], int, list[str]]] = [
    (["max_seq_length=64"], 2, ["did you mean max_seq_len?"]),
    (["streams.web.source.path=nothing/*.jsonl"], 2, ["matches no file", "nothing"]),
    (["streams.web.source.path=."], 2, ["is a folder", "*.jsonl"]),
    (["streams.web.source.path=recipe.yaml"], 2, ["recipe.yaml", "no suffix that mdsmix reads"]),
    (["streams.web.source.path=cut.jsonl.gz"], 4, ["cut.jsonl.gz", "is damaged"]),
    (["--only", "wbe"], 2, ["--only wbe", "web"]),
    (["--memory", ""], 2, []),
    (["--max-bad", ""], 2, []),
    (["--part", "1/2", "--finish"], 2, ["--part does a part of the work units"]),
    (["--part", "1/2", "--engine", "ray"], 2, ["--part does a part of the work units"]),
    (["--dry-run", "--verify-target"], 2, ["--dry-run does not look into shards"]),
    (["--budget", "some"], 2, ["budget is 'some'", "with its unit"]),
    (["max_seq_len"], 2, ["max_seq_len", "key=value"]),
    (["local=null"], 2, ["neither remote nor local"]),
    (["local=taken/below"], 4, ["taken"]),
    (["streams.web.add_bos=true"], 2, ["add_bos", "no BOS"]),
    (["tokenizer.name=nobody/no-such-tokenizer"], 4, ["nobody/no-such", "could not be loaded"]),
    (["max_seq_len=4096"], 5, ["stream web", "not one sample"]),
    (["max_seq_len=4096", "--limit", "1"], 5, ["holdout and --limit, which leave records out."]),
]  # fmt: skip


def test_what_cannot_be_converted_is_one_sentence(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An option without a value, as of a variable that is not set (`--memory "$CAP"`), is not overlooked."""
    whole = (tmp_path / "a.jsonl").read_bytes() * 50
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(whole)[:-20])
    (tmp_path / "taken").write_text("")
    for more, code, words in REFUSED:
        refused(mdsmix("convert", recipe, *more), code, *words)
        assert not (tmp_path / "out" / "web" / "train" / "index.json").exists()
    refused(mdsmix("convert", tmp_path / "no.yaml"), 2, "no.yaml")
    monkeypatch.setenv("MDSMIX_CACHE", str(recipe / "below"))
    refused(mdsmix("convert", recipe), 4, str(recipe / "below"), "MDSMIX_CACHE")
    recipe.write_text("a: [\n")
    refused(mdsmix("convert", recipe), 2, "not a readable recipe")


def test_quietly_only_warnings_are_said_and_on_stderr(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    """Each with the stream that it is of; the streams are the same."""
    good = write_jsonl(tmp_path / "good.jsonl", [{"text": f"good {n}"} for n in range(20)])
    bad = write_jsonl(tmp_path / "bad.jsonl", [{"text": "good"}, {"no": "text"}])
    streams = {"web": documents(good), "odd": documents(bad)}
    recipe = write_recipe(tmp_path, tokenizer_folder, streams=streams, max_seq_len=4)
    assert mdsmix("convert", recipe, "--dry-run").code == 0  # the tokenizer is known
    warning = "odd: WARNING: 50.0% of the records are quarantined: 1 missing_field, "
    warning += f"in {tmp_path}/out/odd/train/quarantine/\n"
    assert mdsmix("convert", recipe, "--quiet") == Answer(0, "", warning)
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


COMMANDS = """
import shlex, sys
from mdsmix.cli.main import run
heavy = {"torch", "streaming", "transformers", "tokenizers", "boto3", "numpy", "omegaconf"}
assert not heavy & {name.partition(".")[0] for name in sys.modules}
for command in ("convert --reencode", "check", "render-yaml"):
    sys.argv = ["mdsmix", *shlex.split(command), sys.argv[-1]]
    try:
        run()
    except SystemExit as end:
        assert not end.code, command
"""


def test_starting_converting_checking_and_rendering_import_nothing_heavy(
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
    command = [sys.executable, "-X", "importtime", "-c", COMMANDS, str(recipe)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    modules = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert {"mdsmix.mix.render", "mdsmix.mix.checking", "mdsmix.encode.template_code"} <= modules
    packages = {module.partition(".")[0] for module in modules}
    assert not packages & {"torch", "torchvision", "streaming", "transformers", "llmfoundry"}
