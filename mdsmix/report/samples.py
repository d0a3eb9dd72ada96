"""A stream's samples as text, with the trained tokens marked.

A sample is a row of segments, each trained or not, by the target policies that the manifest names; the finetuning
loader's labels follow the same rule. The first token of a row is never predicted, so it is never marked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class Segment:
    """Neighbouring tokens that are all trained, or all not."""

    ids: list[int]
    is_trained: bool


def segments(
    sample: Mapping[str, Any], target_prompts: str, target_responses: str
) -> list[Segment]:
    """The segments of a decoded MDS sample of one of the layouts that mdsmix writes."""
    pieces = list(_pieces(sample, target_prompts, target_responses))
    tokens = [(int(token), trained) for ids, trained in pieces for token in ids]
    flags = [trained and place > 0 for place, (_, trained) in enumerate(tokens)]
    paired = zip((token for token, _ in tokens), flags, strict=True)
    return [Segment([t for t, _ in run], flag) for flag, run in groupby(paired, lambda p: p[1])]


def _pieces(
    sample: Mapping[str, Any], target_prompts: str, target_responses: str
) -> Iterator[tuple[Sequence[int], bool]]:
    if "tokens" in sample:
        yield np.asarray(sample["tokens"]).tolist(), True
        return
    turns = sample.get("turns") or [sample]
    for number, turn in enumerate(turns):
        prompt, response = (np.asarray(turn[name]).tolist() for name in ("input_ids", "labels"))
        yield prompt, _is_prompt_trained(prompt, target_prompts)
        yield response, target_responses == "all" or number == len(turns) - 1


def _is_prompt_trained(prompt: Sequence[int], policy: str) -> bool:
    if policy.startswith("length>="):
        return len(prompt) >= int(policy[8:])
    return policy == "all"


def marked(parts: Sequence[Segment], decode: Decode | None) -> str:
    """Plain text with the trained tokens in ⟦ ⟧; ids where there is no tokenizer to decode them."""
    return "".join(
        f"⟦{text}⟧" if part.is_trained else text for part in parts for text in [_text(part, decode)]
    )


def _text(part: Segment, decode: Decode | None) -> str:
    return decode(part.ids) if decode else " ".join(map(str, part.ids)) + " "
