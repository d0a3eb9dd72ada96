"""Raw records -> samples: the shape reads each, and the kind's encoder makes samples of those that could be read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from typing import Any

from mdsmix.encode.backends import Backend
from mdsmix.encode.base import Encoded, Encoder, Rejected
from mdsmix.encode.tokenizer import Tokenizer
from mdsmix.kinds.holdout import Holdout
from mdsmix.kinds.noticed import Noticed
from mdsmix.kinds.registry import kind_of, shape_of
from mdsmix.record import Document
from mdsmix.shapes import Fields, Shape
from mdsmix.shards.manifest import Encoding


@dataclass(frozen=True, slots=True)
class Reading:
    """An encoder behind a shape."""

    shape: Shape
    fields: Fields
    encoder: Encoder
    options: Mapping[str, Any] = field(default_factory=dict)
    "Of the shape, those that are not at their defaults."
    noticed: Noticed = field(default_factory=Noticed)
    holdout: Holdout | None = None

    def encode(self, records: Sequence[Any]) -> Encoded:
        """The samples of the records; `rejected` names positions among them."""
        read, fields = partial(self.shape.read, **self.options), self.fields
        self.noticed.look_at_fields(records)
        found = [read(record, fields) for record in records]
        if str not in set(map(type, found)) and self.holdout is None:  # nearly every batch
            return self._encode(found)
        rejected = [Rejected(i, why, False) for i, why in enumerate(found) if type(why) is str]
        rejected += self._left_out(found)
        out = {each.position for each in rejected}
        good = [i for i in range(len(found)) if i not in out]
        encoded = self._encode([found[i] for i in good])
        rejected += [replace(each, position=good[each.position]) for each in encoded.rejected]
        return replace(encoded, rejected=rejected)

    def _left_out(self, found: list[Any]) -> Iterator[Rejected]:
        """The records that are on the other side of the holdout."""
        if self.holdout:
            for i, record in enumerate(found):
                if type(record) is not str and (why := self.holdout.refused(record)):
                    yield Rejected(i, why, True)

    def _encode(self, found: list[Any]) -> Encoded:
        if self.shape.gives is not Document:
            self.noticed.look_at_texts(found)
        return self.encoder.encode(found)


def open_reading(encoding: Encoding, tokenizer: Tokenizer, backend: Backend) -> Reading:
    """What turns the raw records of a stream into its samples."""
    encoder = kind_of(encoding).open_encoder(encoding, tokenizer, backend)
    noticed = Noticed(encoding.fields.values())
    holdout = encoding.holdout and Holdout(Fraction(encoding.holdout), encoding.held_out)
    return Reading(
        shape=shape_of(encoding),
        fields=encoding.fields,
        encoder=encoder,
        options=encoding.shape_options,
        noticed=noticed,
        holdout=holdout or None,
    )
