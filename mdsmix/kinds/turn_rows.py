"""The tokenized rows of a batch of records, before a kind lays them out in columns.

`tokenize_pairs` makes such rows of pairs. `turn_renderer.py` makes them of conversations.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

from mdsmix.encode.backends import Backend
from mdsmix.encode.encoded import add_special_tokens
from mdsmix.encode.labels import Flags, Lengths, Turns
from mdsmix.encode.special_tokens import encode_texts
from mdsmix.lazy_numpy import np
from mdsmix.messages import plural
from mdsmix.ragged import Ragged
from mdsmix.record import Pair, list_texts
from mdsmix.shapes.extras import FILLED_IN
from mdsmix.shards.manifest import Encoding
from mdsmix.tokenizer.card import Tokenizer

PATH_END = "</img>"
"The end of an image's path in the texts of Qwen-VL. HTML has no such tag."
PLACEHOLDERS = (
    *("<image>", "<video>", "<audio>", PATH_END),
    *("<sound>", "<speech>", "<video-audio>"),  # NeMo RL
    *("<start-image>", "<cot-process>", "<image_placeholder>"),  # ms-swift, DeepSeek-VL
    *FILLED_IN,
)
"""Strings that mark the place of an image, a video or a sound in a text. A stream of text keeps
these strings as text.
"""
_PLACEHOLDER = re.compile("|".join(map(re.escape, PLACEHOLDERS)))
PARENT = "parent_id"
"""The field in which a record of H2O LLM Studio names the record that it continues: the question
and the answer of that record come before its own question.
"""
MESSAGES_AS_TEXT = '[{"role": ...}]'
"""The name under which `count_message_texts` counts: such a text is a whole conversation, which its
writer has not decoded.
"""
_MESSAGE_TEXT = re.compile(
    r"""
    \[ \s* \{ \s*
    (?:
        ["'] (?:content|value) ["'] \s*:\s*
        (?: "[^"\\]*(?:\\.[^"\\]*)*" | '[^'\\]*(?:\\.[^'\\]*)*' ) \s*,\s*
    )?
    ["'] (?:role|from) ["'] \s*:\s*
    ["'] (?:system|developer|user|human|assistant|gpt|tool|function|observation) ["']
    """,
    re.VERBOSE | re.DOTALL,
)
"""The beginning of a list of messages: the role of the first message, perhaps after its content. An
answer may be a list of other objects, such as `[{"from": "Rome", "to": "Oslo"}]`.
"""
_first_character = itemgetter(slice(1))


@dataclass(slots=True)
class TurnRows:
    """The tokenized rows of a batch of records, and the reason codes of records without a row."""

    turns: Turns
    "The token ids of each row's turns."
    positions: list[int]
    "The position of each row's record in the batch."
    rejected: dict[int, str]
    "Positions of the records without a row -> their reason codes."
    with_specials: Set[int]
    "Positions of the records whose text contains the string of a special token."
    placeholders: Mapping[str, int] = field(default_factory=dict)
    "Placeholder, such as `<image>` -> number of records that contain it."
    faults: Mapping[str, Set[int]] = field(default_factory=dict)
    "Name of a fault, such as an open thought -> positions of the records that have it."
    unread: Mapping[str, int] = field(default_factory=dict)
    "Field that the chat template does not print -> number of records that have it."
    with_untrained_calls: Set[int] = frozenset()
    """Positions of the records that call tools in an answer which is not trained, since only the
    last answer of the record is.
    """
    images: Sequence[Sequence[Any]] = ()
    "The images of each row's record."
    has_spans: Flags | None = None
    """bool [rows]: whether the record of each row marks characters of answers; None if no record
    does.
    """
    whole_lengths: Lengths | None = None
    """int64 [rows]: the tokens of each row before `too_long: last_turns` shortened some of them;
    None if no row was shortened.
    """
    left_out_turns: Lengths | None = None
    "int64 [rows]: the user messages that `too_long: last_turns` left out; None as above."

    def count_faults(self, written: Set[int]) -> dict[str, int]:
        """Return name of a fault -> number of the written records that have it.

        Args:
            written: positions of the records that become samples.
        """
        counts = {name: len(positions & written) for name, positions in self.faults.items()}
        return {name: count for name, count in counts.items() if count}


def tokenize_pairs(
    pairs: Sequence[Pair], encoding: Encoding, tokenizer: Tokenizer, backend: Backend
) -> TurnRows:
    """Tokenize each pair to a row with one turn: the prompt and the response. If the stream sets
    `special_tokens_in_text: reject`, a pair whose text contains the string of a special token gets
    a reason code instead.

    Args:
        pairs: the records.
        encoding: the settings of the stream.
        tokenizer: the tokenizer of the stream.
        backend: encodes texts by that tokenizer.
    """
    rule = encoding.special_tokens_in_text
    texts = list_texts(pairs)
    ids, marked, refused = encode_texts(backend, texts, rule, tokenizer)
    # Text 2 i is the prompt of pair i, and text 2 i + 1 its response. So half the number of a text
    # is the number of its pair.
    with_specials = {text // 2 for text in marked}
    refused_pairs = {text // 2 for text in refused}
    keep = np.ones(len(pairs), bool)
    keep[list(refused_pairs)] = False
    turns = Turns(add_own_tokens(ids, tokenizer), np.ones(len(pairs), np.int64))
    return TurnRows(
        turns=turns.take(keep),
        positions=np.flatnonzero(keep).tolist(),
        rejected=dict.fromkeys(sorted(refused_pairs), "special_token_in_text"),
        with_specials=with_specials,
        placeholders=count_texts(texts, pairs),
    )


def add_own_tokens(ids: Ragged, tokenizer: Tokenizer) -> Ragged:
    """Add the tokens that the tokenizer puts around a text, such as BOS, to prompts and responses.
    If both sides of a pair then begin with BOS, remove it from the response.

    Args:
        ids: the prompt of the first pair, its response, the prompt of the second pair, and so on.
    """
    rows = add_special_tokens(ids, tokenizer.prefix_ids, tokenizer.suffix_ids, tokenizer.dtype)
    # Find the rows that begin with BOS. Only rows with tokens have a first token.
    has_tokens = rows.lengths > 0
    first_tokens = rows.values[rows.offsets[:-1][has_tokens]]
    has_bos = has_tokens.copy()
    has_bos[has_tokens] = first_tokens == tokenizer.bos_id
    # Select the responses (odd rows) that begin with BOS, and whose prompts (the rows before) do so
    # too.
    is_doubled = np.zeros(len(has_bos), bool)
    is_doubled[1::2] = has_bos[1::2] & has_bos[0::2]
    # Skip the first token of the selected rows.
    return rows.cut(is_doubled.astype(np.int64), rows.lengths - is_doubled)


def count_texts(texts: Sequence[str], records: Sequence[Sequence[str]]) -> dict[str, int]:
    """Return placeholder -> number of records that contain it, and MESSAGES_AS_TEXT -> number of
    records with a list of messages as text.

    Args:
        texts: all texts of all records.
        records: the texts of each record.
    """
    return {
        **count_placeholders(texts, map("\n".join, records)),
        **count_message_texts(texts, records),
    }


def count_placeholders(texts: Iterable[str], records: Iterable[str]) -> dict[str, int]:
    """Return placeholder -> number of records that contain it: `{"<image>": 12}`. A placeholder
    that no record contains is left out.

    To be fast, the texts are first searched for any placeholder; only a few in a hundred contain a
    `<`. The records are then counted only if a text contains a placeholder. This takes 0.5 us a
    pair instead of 1.7.

    Args:
        texts: all texts of all records.
        records: each record as one string, its texts joined.
    """
    contain_any = any(_PLACEHOLDER.search(text) for text in texts if "<" in text)
    if not contain_any:
        return {}
    searched = [*records]
    counts = dict[str, int]()
    for placeholder in PLACEHOLDERS:
        count = len([record for record in searched if placeholder in record])
        if count:
            counts[placeholder] = count
    return counts


def count_message_texts(texts: Iterable[str], records: Iterable[Iterable[str]]) -> dict[str, int]:
    """Return MESSAGES_AS_TEXT -> number of records with a text that is a list of messages, as JSON
    or Python writes it: `[{"role": "user", "content": "Hi"}]`. Return {} if no record has one.

    To be fast, the first characters of all texts are looked at together: 0.07 us a pair, where
    `startswith` takes 0.2.

    Args:
        texts: all texts of all records.
        records: the texts of each record.
    """
    first_characters = {*map(_first_character, texts)}
    if "[" not in first_characters:
        return {}
    count = sum(any(map(is_message_text, record)) for record in records)
    return {MESSAGES_AS_TEXT: count} if count else {}


def is_message_text(text: str) -> bool:
    """Check whether a text begins as a list of messages does, as JSON or Python writes it."""
    return _MESSAGE_TEXT.match(text) is not None


def describe_parents(count: int | None) -> str:
    """Return a warning of questions that may continue another record.

    Args:
        count: the number of records whose field `parent_id` is not empty; None if the field was not
            looked into.
    """
    records = "the records" if count is None else plural(count, "record")
    verb = "may name" if count is None else "names" if count == 1 else "name"
    return (
        f"{records} {verb} another record in the field {PARENT}, which is not read: if that is "
        "what comes before the question, as in H2O LLM Studio, it is missing in the rows: join "
        "each record with its parents, as the messages of one conversation"
    )


def describe_message_texts(count: int) -> str:
    """Return a phrase on records with lists of messages as text, and the fix: `2 records have ...`.

    Args:
        count: the number of these records.
    """
    verb = "has" if count == 1 else "have"
    return (
        f"{plural(count, 'record')} {verb} a list of messages as text ({MESSAGES_AS_TEXT}). It "
        "is trained as it is written, without the chat template: decode the list before "
        "converting, or in a function of your own (source.shape)"
    )
