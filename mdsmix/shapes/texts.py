"""Records of plain texts: `{"text": "..."}` is a document, `{"prompt": "...", "response": "..."}` a pair."""

from __future__ import annotations

from typing import Any

from mdsmix.record import Document, Pair
from mdsmix.shapes.shape import Fields, Shape, refusing, text_of


@refusing
def read_document(record: Any, fields: Fields) -> Document:
    return Document(text_of(record, fields["text"]))


@refusing
def read_pair(record: Any, fields: Fields) -> Pair:
    return Pair(text_of(record, fields["prompt"]), text_of(record, fields["response"]))


TEXT = Shape(
    name="text",
    gives=Document,
    fields=("text",),
    also_called={"text": ("raw_content", "txt")},
    read=read_document,
)
PROMPT_RESPONSE = Shape(
    name="prompt_response",
    gives=Pair,
    fields=("prompt", "response"),
    also_called={"prompt": ("instruction", "input"), "response": ("output", "summary")},
    read=read_pair,
)
