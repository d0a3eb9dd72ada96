"""Raw records -> samples: the shape reads each, and the kind's encoder makes samples of those that could be read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mdsmix.encode.backends import Backend
from mdsmix.encode.base import Encoded, Encoder, Rejected
from mdsmix.encode.tokenizer import Tokenizer
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
    noticed: Noticed = field(default_factory=Noticed)

    def encode(self, records: Sequence[Any]) -> Encoded:
        """The samples of the records; `rejected` names positions among them."""
        read, fields = self.shape.read, self.fields
        self.noticed.look_at_fields(records)
        found = [read(record, fields) for record in records]
        if str not in set(map(type, found)):  # nearly every batch
            return self._encode(found)
        good = [i for i, record in enumerate(found) if type(record) is not str]
        bad = [Rejected(i, why, False) for i, why in enumerate(found) if type(why) is str]
        encoded = self._encode([found[i] for i in good])
        moved = [replace(each, position=good[each.position]) for each in encoded.rejected]
        return replace(encoded, rejected=bad + moved)

    def _encode(self, found: list[Any]) -> Encoded:
        if self.shape.gives is not Document:
            self.noticed.look_at_texts(found)
        return self.encoder.encode(found)


def open_reading(encoding: Encoding, tokenizer: Tokenizer, backend: Backend) -> Reading:
    """What turns the raw records of a stream into its samples."""
    encoder = kind_of(encoding).open_encoder(encoding, tokenizer, backend)
    noticed = Noticed(encoding.fields.values())
    return Reading(shape_of(encoding), encoding.fields, encoder, noticed)
