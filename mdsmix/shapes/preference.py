"""Preferences: `{"prompt": ..., "chosen": ..., "rejected": ...}`, as TRL, UltraFeedback and HH-RLHF write them.

The prompt is a text or a list of messages, and so are both answers; messages may hold the prompt themselves.
"""

from typing import Any, NamedTuple

from mdsmix.record import Conversation, Message, Pair, RecordRefused
from mdsmix.shapes.messages import parse_messages
from mdsmix.shapes.shape import RawRecord, Shape

REWARDS = ("chosen_reward", "rejected_reward")


class Preference(NamedTuple):
    """Two answers to one prompt: the chosen one is preferred to the rejected one."""

    chosen: Pair | Conversation
    rejected: Pair | Conversation
    rewards: tuple[float, ...] = ()
    "Rewards of the chosen and of the rejected answer; empty where the record has none."


def parse(raw: RawRecord) -> Preference:
    chosen, rejected = (_answer(raw, key) for key in ("chosen", "rejected"))
    if type(chosen) is not type(rejected):
        raise RecordRefused("answers_unlike")
    found = [*map(raw.value, REWARDS)]
    if found == [None, None]:
        return Preference(chosen, rejected)
    if any(type(reward) not in (int, float) for reward in found):
        raise RecordRefused("bad_reward")
    return Preference(chosen, rejected, tuple(map(float, found)))


def _answer(raw: RawRecord, key: str) -> Pair | Conversation:
    """The prompt with one of its answers."""
    answer = raw.value(key)
    if not isinstance(answer, list):
        return Pair(raw.text("prompt"), raw.text(key))
    before = _messages(raw.value("prompt"))
    after = answer if answer[: len(before)] == before else [*before, *answer]
    return parse_messages(RawRecord({"messages": after}, {"messages": "messages"}, {}))


def _messages(prompt: Any) -> list[Message]:
    """The prompt's messages; a text is the user's."""
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}] if prompt else []
    return prompt if isinstance(prompt, list) else []


SHAPE = Shape(
    name="preference",
    gives=Preference,
    fields=("chosen", "rejected"),
    optional=("prompt", *REWARDS),
    structured=("prompt", "chosen", "rejected"),
    also_called={"chosen_reward": ("score_chosen",), "rejected_reward": ("score_rejected",)},
    parse=parse,
)
