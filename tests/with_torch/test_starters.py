"""Every starter of yamls/, and the folder of `mdsmix example`, goes the whole way: converted,
checked, rendered and loaded, with its own keys and tiny data.
"""

from __future__ import annotations

import gzip
import json
import shlex
from itertools import islice
from pathlib import Path

import pytest
import yaml
import zstandard
from tokenizers import Tokenizer

from mdsmix.load import build_loader
from mdsmix.storage import locate
from tests import drawings
from tests.alarm import fail_after
from tests.converting import chats, manifest_of, run_ok, run_recipe, write_recipe

YAMLS = Path(__file__).parents[2] / "yamls"
STARTERS = sorted(path.name for path in YAMLS.glob("*.yaml"))
assert len(STARTERS) >= 4
LENGTH = 128


def _sources(corpus: Path) -> dict[str, bytes]:
    """Where a starter looks for data, and what lies there."""
    project = (corpus / "web.jsonl.zst").read_bytes()
    plain = zstandard.ZstdDecompressor().decompressobj().decompress(project)
    code = plain.replace(b'{"text":', b'{"content":')
    docs, faq, chat = ((corpus / f"{name}.jsonl").read_bytes() for name in ("docs", "faq", "chat"))
    raw = {"raw/code/deep/a.jsonl.gz": gzip.compress(code), "raw/web-heldout.jsonl": plain}
    chats = ("data/chat.jsonl", "data/chat/a.jsonl", "data/chat-heldout.jsonl")
    webs = ("raw/web/a.jsonl.zst", "data/web/a.jsonl.zst")
    plain_data = {"data/books/a.jsonl": docs, "data/faq.jsonl": faq}
    return raw | plain_data | dict.fromkeys(webs, project) | dict.fromkeys(chats, chat)


def _at_home(name: str, home: Path, tokenizer: Path, corpus: Path, bucket: str) -> Path:
    """The starter, its names of places and its length replaced, and no other word of it."""
    for place, content in _sources(corpus).items():
        where = f"s3://{bucket}/{place}" if place.startswith("raw/") else home / place
        locate(str(where)).write(content)
    text = (YAMLS / name).read_text()
    if "../demo/images" in text:
        drawings.make_corpus(home / "images")
    for before, after in {
        "../demo/images": str(home / "images"),
        "./tokenizer": str(tokenizer),
        "../demo/tokenizer": str(tokenizer),
        "../demo/corpus": str(corpus),
        "../demo/mix": str(home / "demo"),
        "my-bucket": bucket,
        "/scratch": str(home / "scratch"),
        "max_seq_len: 2048": f"max_seq_len: {LENGTH}",
        "max_seq_len: 4096": f"max_seq_len: {LENGTH}",
    }.items():
        text = text.replace(before, after)
    made = home / name
    made.write_text(text)
    return made


@pytest.mark.usefixtures("_looks_here")
@pytest.mark.parametrize("name", STARTERS)
def test_a_starter_goes_the_whole_way(
    name: str, tmp_path: Path, tokenizer_folder: Path, corpus_folder: Path, bucket: str
) -> None:
    recipe = _at_home(name, tmp_path, tokenizer_folder, corpus_folder, bucket)
    if name == "mixed.yaml":  # it takes a stream as it was published
        streams = {"older-stream": chats(corpus_folder / "chat.jsonl")}
        settings = {"max_seq_len": LENGTH, "remote": f"s3://{bucket}"}
        run_recipe(write_recipe(tmp_path, tokenizer_folder, streams=streams, **settings))
    run_ok("convert", recipe)
    run_ok("check", recipe)
    rendered = tmp_path / "train.yaml"
    run_ok("render-yaml", recipe, "-o", rendered)
    tree = yaml.safe_load(rendered.read_text())
    tree["train_loader"] |= {"num_workers": 0, "prefetch_factor": None, "persistent_workers": False}
    with fail_after(120):
        batch = next(iter(build_loader(tree, 2)))
    assert batch["input_ids"].shape[1] in (LENGTH, 256)
    assert (batch["labels"] != -100).any()


@pytest.mark.usefixtures("_looks_here")
def test_the_example_goes_the_whole_way(tmp_path: Path) -> None:
    """By the commands that it prints. Both kinds of stream are in the batches, in their shares."""
    folder = tmp_path / "first"
    told = json.loads(run_ok("example", folder, "--json").out)
    *prepare, train = map(shlex.split, told["next_commands"])
    for words in prepare:
        run_ok(*words[1:])
    loader = build_loader(train[-1], 8)
    rows = [row for batch in loader for row in batch["labels"]]
    assert {len(row) for row in rows} == {256}
    counts = {name: manifest_of(folder / "mix" / name / "train").totals.samples for name in MIXED}
    assert len(rows) == (counts["articles"] + 2 * counts["chats"]) // 8 * 8
    # Of a full row of text all tokens but the first are trained; a prompt is not trained.
    full = sum(bool((row != -100).sum() == 255) for row in rows)
    assert abs(full - counts["articles"]) <= 8, "at most a batch is dropped"
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer/tokenizer.json"))
    (batch,) = islice(build_loader(train[-1], 8, "eval_loader.chats-eval"), 1)
    trained = [row[row != -100].tolist() for row in batch["labels"]]
    answers = [tokenizer.decode(ids, skip_special_tokens=True).strip() for ids in trained]
    chats = (folder / "chats.jsonl").read_text("utf-8").splitlines()
    known = {messages_text(json.loads(line)["messages"]) for line in chats}
    assert sum(answer in known for answer in answers) >= 6, "but for those that are cut"


MIXED = ("articles", "chats")


def messages_text(messages: list[dict[str, str]]) -> str:
    """The trained text of a conversation: its answers, each on lines of its own."""
    return "\n".join(m["content"] for m in messages if m["role"] == "assistant").strip()
