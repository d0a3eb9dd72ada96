"""The tokenized rows of a batch of records, before a kind lays them out in columns; and pairs,
which no chat template renders, tokenized to such rows.
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
"Ends a path in the texts of Qwen-VL; HTML has none."
PLACEHOLDERS = (
    *("<image>", "<video>", "<audio>", PATH_END),
    *("<start-image>", "<cot-process>", "<image_placeholder>"),  # ms-swift, DeepSeek-VL
    *FILLED_IN,
)
"Strings that stand for a medium in finetuning records; a stream of tokens trains them as text."
_PLACEHOLDER = re.compile("|".join(map(re.escape, PLACEHOLDERS)))


@dataclass(slots=True)
class TurnRows:
    """The tokenized rows of a batch of records, and the reasons of records that gave no row."""

    turns: Turns
    positions: list[int]
    "The position of each row's record in the batch."
    rejected: dict[int, str]
    "Positions of the records without a row -> their reason codes."
    with_specials: Set[int]
    "Positions of the records whose text contains the string of a special token."
    placeholders: Mapping[str, int] = field(default_factory=dict)
    "Placeholder of a medium -> records that contain it."
    unread: Mapping[str, int] = field(default_factory=dict)
    "Field that the chat template does not print -> records that have it."
    images: Sequence[Sequence[Any]] = ()
    "The images of each row's record."


def tokenize_pairs(
    pairs: Sequence[Pair], encoding: Encoding, tokenizer: Tokenizer, backend: Backend
) -> TurnRows:
    """Return the rows of pairs, one turn each. Pairs that `special_tokens_in_text` refuses are
    rejected.
    """
    rule = encoding.special_tokens_in_text
    texts = [*chain.from_iterable(pairs)]
    ids, marked, refused = encode_texts(backend, texts, rule, tokenizer)
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
    """Add the tokens that the tokenizer puts around a text to prompts and responses. If BOS begins
    both sides of a pair, it is removed from the response.

    Args:
        ids: the prompt and the response of each pair in turn.
    """
    rows = add_special_tokens(ids, tokenizer.prefix_ids, tokenizer.suffix_ids, tokenizer.dtype)
    has_bos = rows.lengths > 0
    has_bos[has_bos] = rows.values[rows.offsets[:-1][has_bos]] == tokenizer.bos_id
    # Keep only the responses whose prompt begins with BOS too.
    has_bos[1::2] &= has_bos[0::2]
    has_bos[0::2] = False
    return rows.cut(has_bos.astype(np.int64), rows.lengths - has_bos)


def count_placeholders(texts: Iterable[str], records: Iterable[str]) -> dict[str, int]:
    """Count how many records contain each placeholder; placeholders of no record are left out.

    Texts with a `<`, a few in a hundred, are searched for all placeholders at once. The records are
    searched only if a text contains any: 0.5 us a pair in place of 1.7.

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
