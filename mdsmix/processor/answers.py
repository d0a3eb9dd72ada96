"""Answers the questions about a processor that other processes send to the server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mdsmix.processor.comparison import first_difference
from mdsmix.processor.loaded import LoadedProcessor


def answer_question(processor: LoadedProcessor, question: Mapping[str, Any]) -> Any:
    """Answer a question that another process has sent.

    Args:
        processor: the processor that the question names.
        question: its keys decide what is answered:
            `sizes` (pairs of height and width): the token count of each size, by
            `LoadedProcessor.count`;
            `rows` (a list of StoredRow): the result of `first_difference`;
            neither: the result of `LoadedProcessor.card`.
    """
    if "sizes" in question:
        return [processor.count(size) for size in question["sizes"]]
    if "rows" in question:
        return first_difference(processor, question["rows"])
    return processor.card()
