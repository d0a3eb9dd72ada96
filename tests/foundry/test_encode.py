"""For the same records, mdsmix's finetuning samples are those of LLM-Foundry's own functions.

Row by row: the same turns, the same rows filtered, the same kind of refusal, and the same batch from
Foundry's collator, for tokenizers of every style and every target policy. Special tokens in the text are
allowed here, since Foundry knows no other way.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from mdsmix.encode.backends import open_backend
from mdsmix.encode.chat import today
from mdsmix.encode.encoded import Encoded
from mdsmix.encode.pretrained import Tokenizer, open_tokenizer
from mdsmix.kinds.conversations import Conversations
from mdsmix.kinds.finetuning import Pairs
from mdsmix.kinds.read_records import Reading
from mdsmix.recipe import TokenizerSpec
from mdsmix.record import FILTERED
from mdsmix.shapes import SHAPES
from tests.encoders import opened
from tests.foundry.conftest import Foundry
from tests.foundry.records import POLICIES, ROWS, chat_records, pairs, policy
from tests.styles import STYLES

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


def encoder(tokenizer: Tokenizer, targets: dict[str, Any], date: str, columns: str) -> Any:
    settings = {
        "special_tokens_in_text": "allow",
        "date_string": date,
        "columns": columns,
        **targets,
    }
    if columns == "":
        fields = {"prompt": "prompt", "response": "response"}
        return Reading(
            SHAPES["prompt_response"],
            fields,
            opened(Pairs, tokenizer, open_backend(tokenizer), **settings),
        )
    rendered = opened(Conversations, tokenizer, open_backend(tokenizer), **settings)
    return Reading(SHAPES["messages"], {"messages": "messages"}, rendered)


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
    for targets in map(policy, range(len(POLICIES))):
        shapes = [("pairs", ""), ("chats", "turns")]
        if (targets["target_prompts"], targets["target_responses"]) == ("none", "last"):
            shapes.append(("chats", "pair"))
        for name, columns in shapes:
            encoded = encoder(tokenizer, targets, date, columns).encode(records[name])
            is_pair = "turns" not in encoded.columns
            case = {**targets, "records": name, "rows": stored(encoded), "is_pair": is_pair}
            yield case, encoded


@pytest.mark.parametrize("style", STYLES)
def test_samples_and_batches_are_those_of_foundry(
    style: str, styled: dict[str, Path], foundry: Foundry
) -> None:
    folder, date = str(styled[style]), today()
    records: dict[str, list[Any]] = {"pairs": pairs(), "chats": chat_records()}
    ours = list(cases(open_tokenizer(TokenizerSpec(name=folder)), date, records))
    asked = [case for case, _ in ours]
    answers = foundry("encode.answers", tokenizer=folder, date=date, records=records, cases=asked)
    for (case, encoded), found in zip(ours, answers, strict=True):
        assert len(found["outcomes"]) == ROWS
        compare_outcomes(encoded, found["outcomes"])
        if "turns" in encoded.columns:
            assert case["rows"] == [f["turns"] for f in found["outcomes"] if f.get("valid")]
        assert found["ours"] == found["theirs"]
        assert len(found["ours"]) > ROWS / 5
        assert encoded.totals.loss_tokens == losses(found["theirs"], case["decoder_only_format"])


def compare_outcomes(encoded: Encoded, outcomes: list[dict[str, Any]]) -> None:
    """Written, filtered or refused, record by record, and refused for the same reason."""
    for position, theirs in enumerate(outcomes):
        rejected = encoded.rejected.get(position)
        if "error" in theirs:
            assert rejected is not None
            assert rejected not in FILTERED
            assert theirs["error"] in REFUSALS[str(rejected)]
        elif theirs["valid"]:
            assert rejected is None
        else:
            assert rejected is not None
            assert rejected in FILTERED


def losses(batch: list[dict[str, list[int]]], is_decoder: bool) -> int:
    """What the model computes a loss for: a decoder's labels are shifted by one, a target is not."""
    first = 1 if is_decoder else 0
    return sum(label != -100 for row in batch for label in row["labels"][first:])
