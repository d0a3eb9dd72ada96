"""The parts of a BPE tokenizer.json are those that a JSON parser finds, for any characters."""

from __future__ import annotations

import json
from collections.abc import Callable
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
    rewrite_bpe_json,
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


def test_a_file_is_rewritten_as_tokenizers_writes_it(content: str) -> None:
    tree = json.loads(content)
    ids = [*tree["model"]["vocab"].items()]
    tree["model"]["vocab"] = dict(reversed(ids))  # any order
    tree["added_tokens"] += [make_added("first", len(ids)), make_added("second", len(ids) + 1)]
    model = Model.from_str(json.dumps(tree))
    expected = parse_bpe_json(model.to_str().encode())
    bpe = rewrite_bpe_json(tree)
    assert bpe is not None
    assert expected is not None
    assert (bpe.vocab, bpe.merges) == (expected.vocab, expected.merges)
    small = Model.from_str(bpe.to_skeleton(dict(ids) | {"first": len(ids)}, AWKWARD)).to_str()
    settings = parse_bpe_json(bpe.put_into(small.encode()))
    assert settings is not None
    assert (settings.vocab, settings.merges) == (expected.vocab, expected.merges)
    assert settings.settings["model"] == expected.settings["model"]


def make_added(content: str, number: int) -> dict[str, Any]:
    switches = ("single_word", "lstrip", "rstrip", "normalized", "special")
    return {"id": number, "content": content, **dict.fromkeys(switches, False)}


def change_vocab(tree: dict[str, Any], **changes: Any) -> None:
    tree["model"]["vocab"] |= changes


REFUSED: dict[str, Callable[[dict[str, Any]], Any]] = {
    "an id twice": lambda tree: change_vocab(tree, again=3),
    "no number": lambda tree: change_vocab(tree, again=True),
    "a negative id": lambda tree: change_vocab(tree, again=-1),
    "a large id": lambda tree: change_vocab(tree, again=1 << 32),
    "a merge twice": lambda tree: tree["model"]["merges"].append(["a", "b"]),
    "a merge of three": lambda tree: tree["model"]["merges"].append(["a", "b", "c"]),
    "a merge that is no pair": lambda tree: tree["model"].update(merges=["ab"]),
    "an unknown token that is missing": lambda tree: tree["model"].update(unk_token="<unk>"),
    "a token that is missing": lambda tree: tree["model"]["merges"].append(["abc", "d"]),
    "what a merge makes is missing": lambda tree: tree["model"]["merges"].append(["c", "d"]),
    "no merges": lambda tree: tree["model"].update(merges=[]),
    "parts of words": lambda tree: tree["model"].update(continuing_subword_prefix="##"),
    "ends of words": lambda tree: tree["model"].update(end_of_word_suffix="</w>"),
    "another model": lambda tree: tree["model"].update(type="WordPiece"),
    "an added token with another id": lambda tree: tree["added_tokens"].append(make_added("e", 9)),
    "an added token that skips an id": lambda tree: tree["added_tokens"].append(make_added("f", 8)),
    "an added token twice": lambda tree: tree["added_tokens"].append(make_added("a", 0)),
    "an empty added token": lambda tree: tree["added_tokens"].append(make_added("", 6)),
    "no added tokens": lambda tree: tree.pop("added_tokens"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_file_that_tokenizers_may_read_in_another_way_is_not_rewritten(case: str) -> None:
    vocab = {token: number for number, token in enumerate(["a", "b", "c", "d", "e", "ab"])}
    model = {"type": "BPE", "vocab": vocab, "merges": [["a", "b"]]}
    tree: dict[str, Any] = {"added_tokens": [make_added("a", 0)], "model": model}
    assert rewrite_bpe_json(tree) is not None
    REFUSED[case](tree)
    assert rewrite_bpe_json(tree) is None


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
    # It is left out as `tokenizers` does, and so is the first line of a merges.txt.
    for comments in ([], ["#version: 0.2 - Trained by"]):
        tree["model"]["merges"] = [*comments, *map(" ".join, merges)]
        read = json.loads(Model.from_str(json.dumps(tree)).to_str())
        assert split_merges(tree)["model"]["merges"] == read["model"]["merges"]


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
