"""Encodes the first records of a stream by its own shape, template and encoder, and keeps one sample to show. Nothing is published."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson

from mdsmix.encode.backends import open_backend
from mdsmix.encode.encoded import Encoded
from mdsmix.encode.pretrained import Tokenizer
from mdsmix.errors import RecipeError
from mdsmix.init.recognise import parsed
from mdsmix.kinds import Piece, kind_of_stream
from mdsmix.kinds.encodings import fields_parsed, make_encoding
from mdsmix.kinds.read_records import Reading, open_reading
from mdsmix.recipe import Recipe, StreamSpec
from mdsmix.words import printable


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """How many of the first records are written, filtered and quarantined."""

    read: int
    filtered: Mapping[str, int] = field(default_factory=dict)
    quarantined: Mapping[str, int] = field(default_factory=dict)
    template_says: Mapping[str, str] = field(default_factory=dict)
    "By reason, what the chat template says of the first such record."
    unread: Mapping[str, int] = field(default_factory=dict)
    "Field that nothing reads -> records in which it is not empty."
    pieces: Sequence[Piece] | None = None
    "The first that is written: its tokens, and whether they are trained."

    @property
    def written(self) -> int:
        return self.read - sum(self.quarantined.values()) - sum(self.filtered.values())

    @property
    def has_too_many_bad(self) -> bool:
        """Whether more than a tenth are bad, the default of max_bad."""
        return sum(self.quarantined.values()) * 10 > self.read

    @property
    def why_not(self) -> str:
        """Reasons and numbers of records that are not written, with the message of the chat template."""
        says = {
            reason: f", the chat template: {text}" for reason, text in self.template_says.items()
        }
        reasons = {**self.filtered, **self.quarantined}
        return ", ".join(f"{n} {reason}{says.get(reason, '')}" for reason, n in reasons.items())

    def is_mostly(self, reason: str) -> bool:
        """Whether more than a tenth are bad for this reason."""
        return self.quarantined.get(reason, 0) * 10 > self.read


def try_stream(
    recipe: Recipe, stream: StreamSpec, tokenizer: Tokenizer, records: Sequence[Any]
) -> Trial:
    """Encodes the records; RecipeError where the tokenizer lacks what the stream wants."""
    kind = kind_of_stream(stream)
    assert kind is not None
    for sentence in kind.lacking(recipe, stream, tokenizer):
        raise RecipeError(sentence)
    encoding = make_encoding(recipe, stream, tokenizer)
    reading = open_reading(encoding, tokenizer, open_backend(tokenizer, "reference"))
    records = [_parsed(record, fields_parsed(encoding)) for record in records]
    encoded = reading.encode(records)
    out = {each.position for each in encoded.rejected}
    kept = next((record for i, record in enumerate(records) if i not in out), None)
    return Trial(
        read=len(records),
        filtered=Counter(each.reason for each in encoded.rejected if each.filtered),
        quarantined=Counter(each.reason for each in encoded.rejected if not each.filtered),
        template_says={
            each.reason: printable(str(each.detail["template"]))
            for each in reversed(encoded.rejected)
            if each.detail and "template" in each.detail
        },
        unread=dict(reading.oddities.unread),
        pieces=None if kept is None else list(kind(encoding).pieces(_sample(reading, kept))),
    )


def _parsed(record: Any, fields: frozenset[str]) -> Any:
    """Lists and objects that stand in cells of text, as JSON."""
    if not isinstance(record, dict):
        return record
    return {name: parsed(cell) if name in fields else cell for name, cell in record.items()}


def _sample(reading: Reading, record: Any) -> dict[str, Any]:
    """The first row of a record, decoded."""
    encoded: Encoded = reading.encode([record])
    row = {name: np.asarray(column[0]) for name, column in encoded.columns.items()}
    return {n: orjson.loads(v.tobytes()) if n == "turns" else v for n, v in row.items()}
