"""For the same records, mdsmix's finetuning samples are those of LLM-Foundry's own functions.

Row by row: the same turns, the same rows filtered, the same kind of refusal, and the same batch from
Foundry's collator, for tokenizers of every style and every target policy. Special tokens in the text are
allowed here, since Foundry knows no other way.
"""

from __future__ import annotations

import json
import random
import subprocess
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import orjson
import pytest

from mdsmix.encode.backends import open_backend
from mdsmix.encode.base import Encoded
from mdsmix.encode.chat import open_template, today
from mdsmix.encode.finetuning import Chat, PromptResponse
from mdsmix.encode.special import SpecialStrings
from mdsmix.encode.targets import Targets
from mdsmix.encode.tokenizer import Tokenizer, open_tokenizer
from mdsmix.recipe import TokenizerSpec
from tests.corpus import chats, questions
from tests.styles import STYLES, train_style
from tests.test_encode_causal import conversations

SCRIPT = Path(__file__).with_name("encode_with_foundry.py")
ROWS = 500
POLICIES = [
    ("none", "last", True),
    ("none", "all", True),
    ("all", "last", True),
    ("all", "all", True),
    ("length>=20", "last", True),
    ("length>=20", "all", True),
    ("none", "last", False),
]
REFUSALS = {
    "field_not_text": {"InvalidPromptTypeError", "InvalidResponseTypeError"},
    "lone_surrogate": {"TypeError", "UnicodeEncodeError"},
    "messages_not_a_list": {"InvalidMessageTypeError"},
    "no_messages": {"NotEnoughChatDataError"},
    "too_few_messages": {"NotEnoughChatDataError"},
    "bad_message_keys": {"IncorrectMessageKeyQuantityError", "UnknownExampleTypeError"},
    "unknown_role": {"InvalidRoleError"},
    "content_not_text": {"InvalidContentTypeError"},
    "repeated_role": {"ConsecutiveRepeatedChatRolesError"},
    "last_not_assistant": {"InvalidLastChatMessageRoleError"},
    "starts_with_assistant": {"ChatTemplateError"},
    "template_error": {"ChatTemplateError"},
    "not_prefix_stable": {"InvalidConversationError"},
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
    generated = list(conversations(200))
    real = [r["messages"] for r in islice(chats(), ROWS - len(generated) - len(broken) - 1)]
    thinking = [{**assistant, "content": "<think>hm</think>yes"}, user, assistant]
    mixed = [*real, *generated, *broken, [user, *thinking]]
    random.Random(5).shuffle(mixed)
    return [{"messages": messages} for messages in mixed]


def encoder(tokenizer: Tokenizer, targets: Targets, date: str, **chat: Any) -> Any:
    parts = {
        "tokenizer": tokenizer,
        "backend": open_backend(tokenizer),
        "targets": targets,
        "special_tokens_in_text": "allow",
        "specials": SpecialStrings.of(tokenizer.special_tokens),
    }
    if not chat:
        return PromptResponse(prompt="prompt", response="response", **parts)
    template = open_template(tokenizer.chat_template, tokenizer.template_variables, date)
    return Chat(messages="messages", template=template, **chat, **parts)


def stored(encoded: Encoded) -> list[list[dict[str, list[int]]]]:
    """Our rows as lists of turns."""
    columns = encoded.columns
    if "turns" in columns:
        blobs = columns["turns"]
        return [orjson.loads(blobs[i].tobytes()) for i in range(len(blobs))]
    names = ("input_ids", "labels")
    rows = range(len(columns["labels"]))
    return [[{name: columns[name][i].tolist() for name in names}] for i in rows]


def cases(
    tokenizer: Tokenizer, date: str, records: dict[str, list[Any]]
) -> Iterator[tuple[dict[str, Any], Encoded]]:
    """Every policy over both shapes, and compact chats under the one that allows them."""
    for prompts, responses, is_decoder in POLICIES:
        policy = {
            "max_seq_len": 64,
            "target_prompts": prompts,
            "target_responses": responses,
            "decoder_only_format": is_decoder,
        }
        shapes: list[tuple[str, dict[str, Any]]] = [("pairs", {}), ("chats", {"is_compact": False})]
        if (prompts, responses) == ("none", "last"):
            shapes.append(("chats", {"is_compact": True}))
        for name, chat in shapes:
            encoded = encoder(tokenizer, Targets(**policy), date, **chat).encode(records[name])
            is_pair = "turns" not in encoded.columns
            case = {**policy, "records": name, "rows": stored(encoded), "is_pair": is_pair}
            yield case, encoded


Compared = list[tuple[dict[str, Any], Encoded, dict[str, Any]]]
"For each case its question, what mdsmix made of it, and Foundry's answer."


@pytest.fixture(scope="module")
def compared(foundry_python: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Compared]:
    """All styles in one process of Foundry's, whose imports alone take 10 to 20 s."""
    date, records = today(), {"pairs": pairs(), "chats": chat_records()}
    questions, ours = [], {}
    for style in STYLES:
        folder = str(train_style(tmp_path_factory.mktemp(style), style))
        ours[style] = list(cases(open_tokenizer(TokenizerSpec(name=folder)), date, records))
        asked = [case for case, _ in ours[style]]
        questions.append({"tokenizer": folder, "date": date, "records": records, "cases": asked})
    answers = ask(foundry_python, questions)
    return {
        style: [(case, encoded, found) for (case, encoded), found in zip(mine, theirs, strict=True)]
        for (style, mine), theirs in zip(ours.items(), answers, strict=True)
    }


def ask(python: Path, questions: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    done = subprocess.run(
        [str(python), str(SCRIPT)], input=json.dumps(questions), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return list(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("style", STYLES)
def test_samples_and_batches_are_those_of_foundry(
    style: str, compared: dict[str, Compared]
) -> None:
    for case, encoded, found in compared[style]:
        assert len(found["outcomes"]) == ROWS
        compare_outcomes(encoded, found["outcomes"])
        if "turns" in encoded.columns:
            assert case["rows"] == [f["turns"] for f in found["outcomes"] if f.get("valid")]
        assert found["ours"] == found["theirs"]
        assert len(found["ours"]) > ROWS / 5
        assert encoded.loss_tokens == losses(found["theirs"], case["decoder_only_format"])


def compare_outcomes(encoded: Encoded, outcomes: list[dict[str, Any]]) -> None:
    """Written, filtered or refused, record by record, and refused for the same reason."""
    ours = {r.position: r for r in encoded.rejected}
    for position, theirs in enumerate(outcomes):
        rejected = ours.get(position)
        if "error" in theirs:
            assert rejected is not None
            assert not rejected.filtered
            assert theirs["error"] in REFUSALS[rejected.reason]
        elif theirs["valid"]:
            assert rejected is None
        else:
            assert rejected is not None
            assert rejected.filtered


def losses(batch: list[dict[str, list[int]]], is_decoder: bool) -> int:
    """What the model computes a loss for: a decoder's labels are shifted by one, a target is not."""
    first = 1 if is_decoder else 0
    return sum(label != -100 for row in batch for label in row["labels"][first:])
