"""LLM-Foundry's own collator trains exactly the characters that a record names."""

from __future__ import annotations

from pathlib import Path

import orjson

from mdsmix.encode.backends import open_backend
from mdsmix.kinds.conversations import Conversations
from mdsmix.recipe import TokenizerSpec
from mdsmix.shapes.messages import OPENAI
from mdsmix.tokenizer.card import open_tokenizer
from tests.foundry.conftest import Foundry
from tests.styles import open_kind
from tests.test_kinds_spans import make_record

CASES = [
    (("Which?", "This[ one] here."), [" one", "<|im_end|>\n</s>"]),
    (("Which?", "[This] one here."), ["This", "<|im_end|>\n</s>"]),
    (("Which?", "This one[ here.]"), [" here.<|im_end|>\n</s>"]),
    (("Which?", "[This one here.]"), ["This one here.<|im_end|>\n</s>"]),
    (("A?", "No[ way] out.", "B?", "Yes."), [" way", "<|im_end|>\n", "Yes.<|im_end|>\n</s>"]),
    # A token with characters of both sides is trained, if it is not only their space.
    (("Which?", "[This ]one here."), ["This", "<|im_end|>\n</s>"]),
    (("Which?", "This [one] here."), [" one", "<|im_end|>\n</s>"]),
]


def test_the_named_characters_are_trained(foundry: Foundry, styled: dict[str, Path]) -> None:
    tokenizer = open_tokenizer(TokenizerSpec(name=str(styled["plain"])))
    settings = {"max_seq_len": 64, "decoder_only_format": True}
    settings |= {"target_prompts": "none", "target_responses": "all"}
    kind = open_kind(
        Conversations, tokenizer, backend=open_backend(tokenizer), columns="turns", **settings
    )
    records = [OPENAI.read(make_record(*texts), OPENAI.own_fields) for texts, _ in CASES]
    encoded = kind.encode(records)
    assert not encoded.rejected
    rows = [orjson.loads(row.tobytes()) for row in encoded.columns["turns"]]
    found = foundry(
        "rows.trained_texts", tokenizer=str(styled["plain"]), rows=rows, targets=settings
    )
    assert found == [runs for _, runs in CASES]
