"""The parts of a BPE tokenizer.json are those that a JSON parser finds, for any characters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import orjson
import pytest
from tokenizers import Tokenizer as Model
from tokenizers.models import BPE, Unigram

from mdsmix.encode.backends import Fastokens, Reference
from mdsmix.recipe import TokenizerSpec
from mdsmix.tokenizer.bpe_json import (
    find_joined,
    join_merges,
    join_pairs,
    parse_bpe_json,
    split_merges,
)
from mdsmix.tokenizer.card import open_tokenizer
from mdsmix.tokenizer.content_hash import hash_content

IDS = {"bos_id": None, "eos_id": 0, "pad_id": 1}
CHARACTERS = [*map(chr, range(0x3000)), "\ufeff", "\uffff", "\U0001f642", "\U0010ffff"]
AWKWARD = (
    *('"', "\\", '\\"', '",', '","', '"],["', ",", "],[", "[", "]"),
    *("},", '},"merges":[', ',"vocab":{', "]}}"),
    '"model":{"type":"BPE",',
)


@pytest.fixture(scope="module")
def content() -> str:
    """Return a tokenizer.json whose tokens and merges look like parts of the file."""
    tokens = [*CHARACTERS, *(token for token in AWKWARD if len(token) > 1)]
    lefts = ('"', "\\", '",', ",", "],[")
    merges = [(left, right) for left in lefts for right in AWKWARD]
    tokens += ["".join(pair) for pair in merges]
    vocab = {token: number for number, token in enumerate(dict.fromkeys(tokens))}
    model = Model(BPE(vocab=vocab, merges=merges))
    model.add_special_tokens([*AWKWARD])
    return model.to_str()


def dump(tree: Any) -> bytes:
    return orjson.dumps(tree, option=orjson.OPT_SORT_KEYS)


def test_the_parts_are_those_of_a_json_parser(content: str) -> None:
    bpe = parse_bpe_json(content.encode())
    assert bpe is not None
    tree = json.loads(content)
    assert dump(bpe.to_tree()) == dump(tree)
    assert hash_content(bpe.to_tree(), IDS) == hash_content(tree, IDS)


def test_a_skeleton_has_the_settings_and_the_ids_of_the_whole(content: str) -> None:
    bpe = parse_bpe_json(content.encode())
    assert bpe is not None
    whole = json.loads(content)
    vocab = whole["model"]["vocab"]
    small = json.loads(bpe.to_skeleton(vocab, AWKWARD))
    kept = small["model"].pop("vocab")
    assert small["model"].pop("merges") == []
    assert kept == {token: vocab[token] for token in kept}
    assert kept.keys() >= {*AWKWARD, *CHARACTERS, max(vocab, key=vocab.__getitem__)}
    assert len(kept) < len(vocab)
    assert small["model"].items() <= whole.pop("model").items()
    assert {key: small[key] for key in whole} == whole


def test_joined_merges_are_those_of_the_file(content: str, tmp_path: Path) -> None:
    joined = join_merges(content.encode())
    assert joined is not None
    tree = json.loads(content)
    tree["model"]["merges"] = [" ".join(merge) for merge in tree["model"]["merges"]]
    assert json.loads(joined) == tree
    assert split_merges(tree) == json.loads(content)
    assert Model.from_buffer(joined).to_str() == content


def test_merges_with_a_space_are_not_joined() -> None:
    spaced = Model(BPE(vocab={"a": 0, " ": 1, "a ": 2}, merges=[("a", " ")]))
    none = Model(BPE(vocab={"a": 0}, merges=[]))
    assert [join_merges(each.to_str().encode()) for each in (spaced, none)] == [None, None]
    unclear = {"model": {"merges": ["a b", "a  b"]}}
    assert split_merges(unclear) == unclear


def test_a_merge_that_would_become_a_comment_is_not_joined() -> None:
    text = "#versions"
    tokens = [*text, *(text[:end] for end in range(2, len(text) + 1))]
    vocab = {token: number for number, token in enumerate(dict.fromkeys(tokens))}
    merges = [(text[:end], text[end]) for end in range(1, len(text))]
    content = Model(BPE(vocab=vocab, merges=merges)).to_str()
    tree = json.loads(content)
    assert join_merges(content.encode()) is None
    assert not join_pairs(json.loads(content))
    # `tokenizers` skips the last merge if it is a string: the text becomes other ids.
    tree["model"]["merges"] = [" ".join(merge) for merge in merges]
    encoded = [Model.from_str(each).encode(text).tokens for each in (content, json.dumps(tree))]
    assert encoded == [["#versions"], ["#version", "s"]]


def test_backends_read_the_joined_merges_of_a_snapshot(
    tokenizer_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MDSMIX_CACHE", str(tmp_path))
    tokenizer = open_tokenizer(TokenizerSpec(name=str(tokenizer_folder)))
    joined = Path(find_joined(tokenizer.path))
    assert joined != Path(tokenizer.path)
    assert isinstance(json.loads(joined.read_text())["model"]["merges"][0], str)
    assert joined.name not in tokenizer.files
    texts = ["Hello, world! def f(x): return x", "déjà vu 東京 <|im_start|>"]
    ids = [
        backend(tokenizer).encode(texts, match_special=True).values.tolist()
        for backend in (Reference, Fastokens)
    ]
    # Without the file, the published one is read.
    joined.unlink()
    assert find_joined(tokenizer.path) == tokenizer.path
    assert ids == [
        backend(tokenizer).encode(texts, match_special=True).values.tolist()
        for backend in (Reference, Fastokens)
    ]


def test_other_texts_have_no_parts(content: str) -> None:
    spaced = json.dumps(json.loads(content), indent=2)
    reordered = json.dumps(dict(reversed(json.loads(content).items())), separators=(",", ":"))
    unigram = Model(Unigram([("a", 0.0)])).to_str()
    for text in (spaced, reordered, unigram, "{}", ""):
        assert parse_bpe_json(text.encode()) is None
