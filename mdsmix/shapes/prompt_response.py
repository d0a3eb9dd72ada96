"""`{"prompt": "...", "response": "..."}`: two fields that hold a pair."""

from __future__ import annotations

from typing import Any

from mdsmix.record import Pair
from mdsmix.shapes.base import Fields, Shape, text_of


def read(record: Any, fields: Fields) -> Pair | str:
    prompt, fault = text_of(record, fields["prompt"])
    response, other_fault = text_of(record, fields["response"])
    return fault or other_fault or Pair(prompt, response)


SHAPE = Shape(
    name="prompt_response",
    gives=Pair,
    fields=("prompt", "response"),
    also_called={"prompt": ("instruction", "input"), "response": ("output", "summary")},
    read=read,
)
