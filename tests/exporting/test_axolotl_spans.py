"""`train_detail` and parts with marks train the same tokens as by axolotl's own strategy, which
needs no GPU.
"""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any

import pytest

from mdsmix.recipe import TokenizerSpec
from mdsmix.shapes.messages import OPENAI
from mdsmix.tokenizer.card import open_tokenizer
from tests.styles import open_chats

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "{{ eos_token if message['role'] == 'assistant' else '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"Answers end in EOS, which axolotl trains (train_on_eos: turn), and mdsmix's loader appends none."
WORDS = [
    "One",
    "two",
    "three",
    "four.",
    "Five",
    "six,",
    "seven",
    "eight?",
    "Größe",
    "日本",
    "nine\n\nten",
    "x",
]
RECORDS = 150


@pytest.fixture(scope="module")
def strategy(tokenizer_folder: Path) -> Any:
    """axolotl's strategy for conversations, with its defaults."""
    from axolotl.prompt_strategies.chat_template import ChatTemplatePrompter, ChatTemplateStrategy
    from transformers import AutoTokenizer

    logging.getLogger("axolotl").setLevel(logging.ERROR)
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    prompter = ChatTemplatePrompter(
        tokenizer,
        chat_template=TEMPLATE,
        message_property_mappings={"role": "role", "content": "content"},
        message_field_training="train",
        message_field_training_detail="train_detail",
    )
    return ChatTemplateStrategy(
        prompter, tokenizer, False, 2048, roles_to_train=["assistant"], train_on_eos="turn"
    )


def draw_messages(rng: random.Random) -> list[dict[str, Any]]:
    """Return messages whose answers have no marks, a `train_detail` of whole words, or parts with
    marks. axolotl does not train a token if only one of its characters is in the range, so words of
    one character have the mark of the word before them.
    """
    messages = list[dict[str, Any]]()
    for number in range(rng.randint(1, 3)):
        messages.append({"role": "user", "content": f"Question {number}?"})
        pieces = [rng.choice(WORDS)]
        pieces += [" " + rng.choice(WORDS) for _ in range(rng.randint(3, 9))]
        flags = list[bool]()
        for piece in pieces:
            flags.append(flags[-1] if len(piece.strip()) == 1 and flags else rng.random() < 0.5)
        answer: dict[str, Any] = {"role": "assistant", "content": "".join(pieces)}
        way = rng.choice(["plain", "detail", "named", "parts", "train"])
        if way == "parts":
            parts = zip(pieces, flags, strict=True)
            answer["content"] = [{"type": "text", "text": t, "train": f} for t, f in parts]
        elif way == "train":
            answer["train"] = flags[0]
        elif way != "plain":
            entries = list[dict[str, Any]]()
            begin = 0
            for piece, flag in zip(pieces, flags, strict=True):
                end = begin + len(piece) - 1
                if flag or way == "detail":
                    entries.append({"begin_offset": begin, "end_offset": end, "train": flag})
                begin = end + 1
            answer["train_detail"] = entries
        # Of an answer without trained characters axolotl trains the EOS, and mdsmix nothing.
        if way in ("parts", "detail", "named") and not any(flags):
            answer = {"role": "assistant", "content": "All of it."}
        messages.append(answer)
    return messages


def test_the_trained_tokens_are_axolotls(strategy: Any, tokenizer_folder: Path) -> None:
    rng = random.Random(6)
    records = [{"messages": draw_messages(rng)} for _ in range(RECORDS)]
    tokenizer = open_tokenizer(TokenizerSpec(name=str(tokenizer_folder)))
    kind = open_chats(
        tokenizer, TEMPLATE, tokenizer.template_variables,
        target_responses="all", pack=True, columns="pair", max_seq_len=2048,
    )  # fmt: skip
    encoded = kind.encode([OPENAI.read(record, OPENAI.own_fields) for record in records])
    assert {*encoded.rejected.values()} <= {"nothing_trained"}
    split = 0
    for row, position in enumerate(encoded.positions.tolist()):
        theirs = strategy.tokenize_prompt(records[position])
        trained = [label != -100 for label in theirs["labels"]]
        ids = encoded.columns["input_ids"][row].tolist()
        mask = encoded.columns["loss_mask"][row].astype(bool).tolist()
        # mdsmix ends a row with its last trained answer.
        end = len(ids)
        assert ids == theirs["input_ids"][:end], records[position]
        assert mask == trained[:end], records[position]
        assert not any(trained[end:])
        split += mask != sorted(mask)
    assert split > RECORDS / 3
