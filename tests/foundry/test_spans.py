"""LLM-Foundry's own collator trains exactly the characters that a record names, and its models use
no loss weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson

from mdsmix.encode.backends import open_backend
from mdsmix.kinds.conversations import Conversations
from mdsmix.recipe import TokenizerSpec
from mdsmix.shapes.messages import OPENAI
from mdsmix.tokenizer.card import open_tokenizer
from tests.converting import write_jsonl
from tests.foundry.conftest import Foundry, Lab
from tests.styles import make_dialogue, open_kind
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


def test_llm_foundry_trains_weighted_rows_with_the_weight_1(lab: Lab, foundry: Foundry) -> None:
    """As `check` warns: its models do not use the weights of a batch."""
    losses = []
    for weight in (1, 0.25):
        records = list[dict[str, Any]]()
        for texts, _ in CASES * 4:
            messages = make_dialogue(*(text.replace("[", "").replace("]", "") for text in texts))
            messages[-1]["weight"] = weight
            records.append({"messages": messages})
        write_jsonl(lab.folder / f"{weight}.jsonl", records)
        source = {"path": str(lab.folder / f"{weight}.jsonl"), "shape": "openai"}
        stream = {"kind": "finetuning", "loss_weights": True, "source": source}
        loader = {"num_workers": 0, "dataset": {"shuffle": False}}
        config = lab.rendered(
            streams={f"w{len(losses)}": stream},
            train_loader=loader,
            max_seq_len=64,
            target_responses="all",
        )
        losses.append(foundry("train.losses", path=str(config), steps=3))
    assert losses[0] == losses[1]
    assert len(losses[0]) == 3
