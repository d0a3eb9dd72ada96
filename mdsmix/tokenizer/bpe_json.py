"""Cuts the JSON of a BPE tokenizer.json into settings, vocabulary and merges, and writes it again.

The merges are most of the file: Gemma 3 has 514,906. As Python lists they take 100 MB and half a
second. So functions that take `bytes` do not parse them. They read the text as `tokenizers` writes
it: without white space between values, and with the model last. In such a text a quote inside a
string is always written `\\"`, so a key like `"model":` can be searched for.

The other functions take a file in any form, as parsed JSON (`tree`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any

import orjson

from mdsmix.frozen import frozen

MODEL = b'"model":{"type":"BPE",'
VOCAB = b',"vocab":{'
MERGES = b'},"merges":['
END = b"]}}"
BACKSLASH = b"\x01"
"Stands for an escaped backslash. JSON text has no control characters."
QUOTE = b"\x02"
"Stands for an escaped quote."
COMMENT = "#version"
"`tokenizers` skips a merge that is a string and begins so, as the first line of a merges.txt does."
JOINED = "tokenizer.joined.json"
"""Name of the file next to a snapshot's tokenizer.json that has the same content, but its merges as
strings (`join_merges`). It is not published.
"""


@frozen(kw_only=True)
class BpeJson:
    """A BPE tokenizer.json in three parts."""

    settings: dict[str, Any]
    "The JSON of the file. Its `model` has neither `vocab` nor `merges`."
    vocab: bytes
    'JSON of the vocabulary: `{"a":0,"b":1}`.'
    merges: bytes
    'JSON of the merges: `[["a","b"],["ab","c"]]`.'

    def to_tree(self) -> dict[str, Any]:
        """Return the JSON of the file. Its merges are text that orjson writes unchanged."""
        merges = orjson.Fragment(self.merges)
        return _with_model(self.settings, vocab=orjson.loads(self.vocab), merges=merges)

    def to_skeleton(self, ids: Mapping[str, int], kept_tokens: Collection[str]) -> str:
        """Return the skeleton of the file (`write_skeleton`)."""
        return write_skeleton(self.settings, ids, kept_tokens)

    def put_into(self, skeleton: bytes) -> bytes:
        """Return the text of a tokenizer.json with this vocabulary and these merges.

        Args:
            skeleton: the text of a tokenizer.json with others, as `tokenizers` writes it.
        """
        start = skeleton.find(VOCAB, skeleton.find(MODEL))
        return b"".join((skeleton[:start], VOCAB, self.vocab[1:-1], MERGES, self.merges[1:-1], END))


def write_skeleton(
    tree: dict[str, Any], ids: Mapping[str, int], kept_tokens: Collection[str]
) -> str:
    """Return the text of a small tokenizer.json with the same settings. Its vocabulary has only
    some tokens, with their ids, and it has no merges.

    These tokens are kept: `kept_tokens`, each single character, so that any text that the
    vocabulary covers is encoded, and the token with the largest id.

    Args:
        tree: the JSON of a BPE tokenizer.json. Its vocabulary and merges may be missing.
        ids: token -> id of the whole vocabulary.
        kept_tokens: tokens that the small vocabulary must have.
    """
    largest = max(ids.values(), default=0)
    kept_tokens = {*kept_tokens}
    vocab = {
        token: number
        for token, number in ids.items()
        if len(token) == 1 or number == largest or token in kept_tokens
    }
    return orjson.dumps(_with_model(tree, vocab=vocab, merges=[])).decode()


def _with_model(tree: dict[str, Any], **parts: Any) -> dict[str, Any]:
    """Return the JSON of a tokenizer.json with these parts of the model."""
    return tree | {"model": tree["model"] | parts}


def parse_bpe_json(content: bytes) -> BpeJson | None:
    """Return the parts of a tokenizer.json; None if its model is not BPE, or if the text is not as
    `tokenizers` writes it.
    """
    model_start = content.find(MODEL)
    vocab_start = content.find(VOCAB, model_start)
    vocab_end = content.find(MERGES, vocab_start)
    if min(model_start, vocab_start, vocab_end) < 0 or not content.endswith(END):
        return None
    # The brackets that open and close the vocabulary and the merges belong to their JSON.
    return BpeJson(
        settings=orjson.loads(content[:vocab_start] + b"}}"),
        vocab=content[vocab_start + len(VOCAB) - 1 : vocab_end + 1],
        merges=content[vocab_end + len(MERGES) - 1 : -len(END) + 1],
    )


def rewrite_bpe_json(tree: dict[str, Any]) -> BpeJson | None:
    """Return the parts of a tokenizer.json as `tokenizers` writes them after it has read the file,
    which takes 1 s for Gemma 3. Return None if that is not sure: if the model is not BPE or marks
    the parts of words, or if `tokenizers` would refuse the file, or write other ids or merges.

    Args:
        tree: the JSON of the file; its merges are pairs.
    """
    model = tree["model"]
    vocab = model.get("vocab")
    merges = model.get("merges")
    marks_parts = model.get("continuing_subword_prefix") or model.get("end_of_word_suffix")
    if model.get("type") != "BPE" or marks_parts or not isinstance(vocab, dict) or not merges:
        return None
    ids = [*vocab.values()]
    if len({*ids}) < len(ids) or not all(type(id) is int and 0 <= id < 1 << 32 for id in ids):
        return None
    if not all(type(merge) is list and len(merge) == 2 for merge in merges):
        return None
    # The same merge twice has the rank of the last. Sets of strings take a third of the time that
    # sets of pairs take.
    if len({*map(" ".join, merges)}) < len(merges):
        return None
    if not vocab.keys() >= {*chain.from_iterable(merges)}:
        return None
    if not all(map(vocab.__contains__, map("".join, merges))):
        return None
    # An unknown token that is only an added token is an error when it is needed. The skeleton would
    # hide that, since its vocabulary has the added tokens.
    unknown = model.get("unk_token")
    if unknown is not None and unknown not in vocab:
        return None
    if "added_tokens" not in tree or not keep_their_ids(tree["added_tokens"], vocab):
        return None
    if ids != sorted(ids):
        vocab = dict(sorted(vocab.items(), key=itemgetter(1)))
    settings = {key: value for key, value in model.items() if key not in ("vocab", "merges")}
    return BpeJson(
        settings=tree | {"model": settings},
        vocab=orjson.dumps(vocab),
        merges=orjson.dumps(merges),
    )


def keep_their_ids(added: Sequence[Mapping[str, Any]], vocab: Mapping[str, int]) -> bool:
    """Return whether `tokenizers` gives added tokens the ids that their file names: those of the
    vocabulary, and for all others the next ones.

    Args:
        added: the added tokens, in the order of the file.
        vocab: token -> id.
    """
    largest = -1
    for token in added:
        number = vocab.get(token["content"], max(len(vocab), largest + 1))
        if token["id"] != number:
            return False
        largest = max(largest, number)
    return len({token["content"] for token in added} - {""}) == len(added)


def join_merges(content: bytes) -> bytes | None:
    """Return a BPE tokenizer.json with each merge as a string: `"a b"` in place of `["a","b"]`.
    Both forms are read as the same merge, by `tokenizers` and by fastokens. While they read strings
    they take half of the memory: 269 in place of 431 MB (fastokens) and 186 in place of 364 MB for
    Gemma 3.

    Return None if a token of a merge contains a space, if a merge would become a comment (COMMENT),
    or if `parse_bpe_json` returns None.

    Args:
        content: the text of the file.
    """
    bpe = parse_bpe_json(content)
    if bpe is None or b" " in bpe.merges or f'["{COMMENT}'.encode() in bpe.merges:
        return None
    import numpy as np  # 50 ms, and a run that knows its tokenizer joins nothing

    # Without escaped quotes, each quote opens or closes a string, and a merge has four of them.
    text = bpe.merges.replace(b"\\\\", BACKSLASH).replace(b'\\"', QUOTE)
    characters = np.frombuffer(text, np.uint8).copy()
    quotes = np.flatnonzero(characters == ord('"')).reshape(-1, 4)
    if not len(quotes):
        return None
    # Write a space for the comma between the tokens, and leave out what is around it and around the
    # merge: its brackets. Python objects for the tokens of Gemma 3 would take 0.2 s more.
    characters[quotes[:, 1] + 1] = ord(" ")
    is_kept = np.ones(len(characters), bool)
    is_kept[quotes[:, 1]] = False
    is_kept[quotes[:, 2]] = False
    is_kept[quotes[:, 0] - 1] = False
    is_kept[quotes[:, 3] + 1] = False
    text = bytes(characters[is_kept])
    merges = text.replace(QUOTE, b'\\"').replace(BACKSLASH, b"\\\\")
    return content.removesuffix(bpe.merges + b"}}") + merges + b"}}"


def split_merges(tree: dict[str, Any]) -> dict[str, Any]:
    """Return a tokenizer.json with each merge as a pair: `["a", "b"]` in place of `"a b"`, as
    `tokenizers` writes it, and without comments. Return it unchanged if not every other merge is a
    string with one space.

    Args:
        tree: the JSON of the file.
    """
    model = tree["model"]
    merges = model.get("merges") or []
    if not all(isinstance(merge, str) for merge in merges):
        return tree
    pairs = [merge.split(" ") for merge in merges if not merge.startswith(COMMENT)]
    if not all(len(pair) == 2 for pair in pairs):
        return tree
    return tree | {"model": model | {"merges": pairs}}


def join_pairs(tree: dict[str, Any]) -> bool:
    """Change each merge of a tokenizer.json to a string: `"a b"` in place of `["a", "b"]`. Return
    whether that was done: it is not if a token of a merge contains a space, if a merge would become
    a comment (COMMENT), or if there are none.

    Args:
        tree: the JSON of the file; changed in place.
    """
    merges = tree["model"].get("merges")
    if not merges or isinstance(merges[0], str):
        return False
    joined = [" ".join(merge) for merge in merges]
    # All merges in one text are searched in 0.02 s for Gemma 3, and one by one in 0.1 s.
    text = "\n" + "\n".join(joined)
    if text.count(" ") > len(joined) or f"\n{COMMENT}" in text:
        return False
    tree["model"]["merges"] = joined
    return True


def find_joined(path: str) -> str:
    """Return the path of the file with joined merges (`join_merges`) next to a tokenizer.json. If
    it is missing, return the path of the tokenizer.json.
    """
    joined = Path(path).with_name(JOINED)
    return str(joined) if joined.is_file() else path
