"""The tokenized rows of a batch of records, before a kind lays them out in columns.
`tokenize_pairs` makes them of pairs; `turn_renderer` makes them of conversations.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np

from mdsmix.encode.backends import Backend, encode_texts
from mdsmix.encode.encoded import add_special_tokens
from mdsmix.encode.labels import Turns
from mdsmix.ragged import Ragged
from mdsmix.record import Pair
from mdsmix.shapes.extras import FILLED_IN
from mdsmix.shards.manifest import Encoding
from mdsmix.tokenizer.card import Tokenizer

PATH_END = "</img>"
"The end of an image's path in the texts of Qwen-VL. HTML has no such tag."
PLACEHOLDERS = (
    *("<image>", "<video>", "<audio>", PATH_END),
    *("<start-image>", "<cot-process>", "<image_placeholder>"),  # ms-swift, DeepSeek-VL
    *FILLED_IN,
)
"Strings that stand for an image, video or sound in records. A stream of text keeps them as text."
_PLACEHOLDER = re.compile("|".join(map(re.escape, PLACEHOLDERS)))


@dataclass(slots=True)
class TurnRows:
    """The tokenized rows of a batch of records, and the reason codes of records without a row."""

    turns: Turns
    positions: list[int]
    "The position of each row's record in the batch."
    rejected: dict[int, str]
    "Positions of the records without a row -> their reason codes."
    with_specials: Set[int]
    "Positions of the records whose text contains the string of a special token."
    placeholders: Mapping[str, int] = field(default_factory=dict)
    "Placeholder, such as `<image>` -> number of records that contain it."
    unread: Mapping[str, int] = field(default_factory=dict)
    "Field that the chat template does not print -> number of records that have it."
    images: Sequence[Sequence[Any]] = ()
    "The images of each row's record."


def tokenize_pairs(
    pairs: Sequence[Pair], encoding: Encoding, tokenizer: Tokenizer, backend: Backend
) -> TurnRows:
    """Tokenize pairs to rows of one turn each. Pairs with special tokens in their text are rejected
    if `special_tokens_in_text` is `reject`.
    """
    rule = encoding.special_tokens_in_text
    texts = [*chain.from_iterable(pairs)]
    ids, marked, refused = encode_texts(backend, texts, rule, tokenizer)
    # Text 2 i is the prompt of pair i, and text 2 i + 1 its response.
    with_specials = {row // 2 for row in marked}
    refused_pairs = {row // 2 for row in refused}
    keep = np.ones(len(pairs), bool)
    keep[list(refused_pairs)] = False
    turns = Turns(add_own_tokens(ids, tokenizer), np.ones(len(pairs), np.int64))
    return TurnRows(
        turns=turns.take(keep),
        positions=np.flatnonzero(keep).tolist(),
        rejected=dict.fromkeys(sorted(refused_pairs), "special_token_in_text"),
        with_specials=with_specials,
        placeholders=count_placeholders(texts, map("\n".join, pairs)),
    )


def add_own_tokens(ids: Ragged, tokenizer: Tokenizer) -> Ragged:
    """Add the tokens that the tokenizer puts around a text, such as BOS, to prompts and responses.
    If both sides of a pair then begin with BOS, remove it from the response.

    Args:
        ids: the prompt of the first pair, its response, the prompt of the second pair, and so on.
    """
    rows = add_special_tokens(ids, tokenizer.prefix_ids, tokenizer.suffix_ids, tokenizer.dtype)
    has_bos = rows.lengths > 0
    has_bos[has_bos] = rows.values[rows.offsets[:-1][has_bos]] == tokenizer.bos_id
    # Select the responses (odd rows) whose prompt (the row before) begins with BOS too.
    has_bos[1::2] &= has_bos[0::2]
    has_bos[0::2] = False
    # Skip the first token of the selected rows.
    return rows.cut(has_bos.astype(np.int64), rows.lengths - has_bos)


def count_placeholders(texts: Iterable[str], records: Iterable[str]) -> dict[str, int]:
    """Count how many records contain each placeholder; placeholders of no record are left out.

    Texts with a `<`, a few in a hundred, are first searched for all placeholders at once. The
    records are searched only if a text contains any: that takes 0.5 us a pair instead of 1.7.

    Args:
        texts: the texts of the records.
        records: each record as one string.
    """
    if not any(_PLACEHOLDER.search(text) for text in texts if "<" in text):
        return {}
    searched = [*records]
    counts = {
        placeholder: sum(placeholder in record for record in searched)
        for placeholder in PLACEHOLDERS
    }
    return {placeholder: count for placeholder, count in counts.items() if count}
