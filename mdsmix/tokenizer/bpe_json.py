"""The text of a BPE tokenizer.json, without parsing its merges.

The merges are most of the file: Gemma 3 has 514,906. As Python lists they take 100 MB and half a
second. All functions read the text as `tokenizers` writes it: without white space between values,
and with the model last. In such a text a quote inside a string is always written `\\"`, so a key
like `"model":` can be searched for.
"""

from __future__ import annotations

from collections.abc import Collection
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
        return self._with_model(vocab=orjson.loads(self.vocab), merges=merges)

    def to_skeleton(self, ids: dict[str, int], kept_tokens: Collection[str]) -> str:
        """Return the text of a small tokenizer.json with the same settings. Its vocabulary has only
        some tokens, with their ids, and it has no merges.

        These tokens are kept: `kept_tokens`, each single character, so that any text that the
        vocabulary covers is encoded, and the token with the largest id.

        Args:
            ids: token -> id of the whole vocabulary.
            kept_tokens: tokens that the small vocabulary must have.
        """
        largest = max(ids.values(), default=0)
        vocab = {
            token: number
            for token, number in ids.items()
            if len(token) == 1 or number == largest or token in kept_tokens
        }
        return orjson.dumps(self._with_model(vocab=vocab, merges=[])).decode()

    def _with_model(self, **parts: Any) -> dict[str, Any]:
        """Return the JSON of the file with these parts of the model."""
        return self.settings | {"model": self.settings["model"] | parts}


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
    `tokenizers` writes it. Return it unchanged if not every merge is a string with one space.

    Args:
        tree: the JSON of the file.
    """
    model = tree["model"]
    merges = model.get("merges") or []
    if not all(isinstance(merge, str) and merge.count(" ") == 1 for merge in merges):
        return tree
    return tree | {"model": model | {"merges": [merge.split(" ") for merge in merges]}}


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
