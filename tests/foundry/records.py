"""160 records of each finetuning shape: real ones, and every way in which one can be odd or broken."""

import random
from itertools import islice
from typing import Any

from tests.corpus import chats, questions
from tests.test_encode_chat import conversations

ROWS = 160
POLICIES = [
    ("none", "last", True),
    ("none", "all", True),
    ("all", "last", True),
    ("all", "all", True),
    ("length>=20", "last", True),
    ("length>=20", "all", True),
    ("none", "last", False),
]
"target_prompts, target_responses, decoder_only_format: all that Foundry has."


def policy(number: int) -> dict[str, Any]:
    prompts, responses, is_decoder = POLICIES[number % len(POLICIES)]
    return {
        "max_seq_len": 64,
        "target_prompts": prompts,
        "target_responses": responses,
        "decoder_only_format": is_decoder,
    }


def pairs() -> list[dict[str, Any]]:
    """Real ones, and ones that are empty, hold special tokens, or are no text."""
    texts = ["", " ", "</s>", "<s>", "<s>a", "a</s>", "<|im_start|>a", "\n\n", "é", "x " * 80]
    both: list[tuple[Any, Any]] = [(a, b) for a in texts for b in texts]
    both += [pair for bad in (None, 3, ["a"], "a\ud800") for pair in ((bad, "a"), ("a", bad))]
    odd = [{"prompt": a, "response": b} for a, b in both]
    return [*islice(questions(), ROWS - len(odd)), *odd]


def chat_records() -> list[dict[str, Any]]:
    """Real ones, generated ones, and one for each rule that a conversation can break."""
    user, assistant = ({"role": role, "content": "hi"} for role in ("user", "assistant"))
    broken: list[Any] = [
        None,
        [],
        [assistant],
        [{"role": "user"}, assistant],
        [{**user, "name": "x"}, assistant],
        [{"role": "human", "content": "a"}, assistant],
        [{"role": "user", "content": None}, assistant],
        [user, user, assistant],
        [user, assistant, user],
        [assistant, user, assistant],
        [{"role": "user", "content": "a\ud800"}, assistant],
    ]
    generated = list(conversations(80))
    real = [r["messages"] for r in islice(chats(), ROWS - len(generated) - len(broken) - 1)]
    thinking = [{**assistant, "content": "<think>hm</think>yes"}, user, assistant]
    mixed = [*real, *generated, *broken, [user, *thinking]]
    random.Random(5).shuffle(mixed)
    return [{"messages": messages} for messages in mixed]
