"""`{"text": "..."}`: one field that holds the document."""

from __future__ import annotations

from typing import Any

from mdsmix.record import Document
from mdsmix.shapes.base import Fields, Shape, text_of


def read(record: Any, fields: Fields) -> Document | str:
    text, fault = text_of(record, fields["text"])
    return fault or Document(text)


SHAPE = Shape(
    name="text",
    gives=Document,
    fields=("text",),
    also_called={"text": ("raw_content", "txt")},
    read=read,
)
