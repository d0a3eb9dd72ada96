"""Preferences: two answers to one prompt, of which one is preferred, in three forms.

- `{"prompt": ..., "chosen": ..., "rejected": ...}`, as TRL, UltraFeedback and hh-rlhf write them.
  The
  prompt is a text or a list of messages, and so are both answers. Messages may contain the prompt
  themselves. Two texts without a prompt begin with it (`common_prompt`).
- LLaMA-Factory's ranked Alpaca records: `{"instruction": ..., "input": ..., "chosen": ...,
  "rejected": ...}`.
- LLaMA-Factory's ranked ShareGPT records: `{"conversations": [...], "chosen": {...}, "rejected":
  {...}}`.
  Each answer is the message that follows the conversation.

The last message is the answer that is compared. Marks, which say whether a message is trained, are
taken out, and a record with an answer that is marked not to be trained is left out.
"""

from __future__ import annotations

from os.path import commonprefix
from typing import Any, NamedTuple

from mdsmix.record import Conversation, Message, Pair, RecordRefused
from mdsmix.shapes.conversation_rules import (
    CONVERSATION_REASONS,
    MARK,
    MASK,
    are_trained,
    conversation_of,
    list_of,
    without_marks,
)
from mdsmix.shapes.extras import EXTRAS_REASONS, OBJECTS, VARIABLES, with_extras
from mdsmix.shapes.messages import parse_messages
from mdsmix.shapes.shape import RawRecord, Shape
from mdsmix.shapes.sharegpt import SHAREGPT, guess, sharegpt_messages
from mdsmix.shapes.texts import alpaca_messages

REWARDS = ("chosen_reward", "rejected_reward")
ANSWERS = ("chosen", "rejected")
BEGINS = "\n\nAssistant:"
"The text before each answer of a dialogue of hh-rlhf."
FIRST_WITHOUT_SPACES = "\u2e80"
"Scripts from this character on (Chinese, Japanese, Korean) have no spaces between words."


class Preference(NamedTuple):
    """Two answers to one prompt: the chosen one is preferred to the rejected one."""

    chosen: Pair | Conversation
    rejected: Pair | Conversation
    rewards: tuple[float, ...] = ()
    "Rewards of the chosen and of the rejected answer; empty where the record has none."


def parse(raw: RawRecord) -> Preference:
    prompt = raw.value("prompt")
    are_messages = {isinstance(raw.required_value(key), (list, dict)) for key in ANSWERS}
    if len(are_messages) > 1:
        raise RecordRefused("answers_unlike")
    if isinstance(prompt, list) or are_messages == {True}:
        before = prompt if isinstance(prompt, list) else _asked(prompt)
        return _preference(raw, *(_conversation(raw, before, key) for key in ANSWERS))
    texts = [raw.text(key) for key in ANSWERS]
    if prompt is None:
        prompt = common_prompt(*texts)
        if not prompt:
            raise RecordRefused("no_prompt")
        texts = [text.removeprefix(prompt) for text in texts]
    else:
        prompt = raw.text("prompt")
    return _preference(raw, *(Pair(prompt, text) for text in texts))


def common_prompt(chosen: str, rejected: str) -> str:
    """Return the prompt that both texts begin with.

    It ends after the last BEGINS that both texts contain. Without one it ends where the texts
    differ, as in TRL, but before a word that they share in part and before a space.

    >>> common_prompt("\\n\\nHuman: Hi\\n\\nAssistant: No.", "\\n\\nHuman: Hi\\n\\nAssistant: Now.")
    '\\n\\nHuman: Hi\\n\\nAssistant:'
    >>> common_prompt("The town is Paris", "The town is Parma")
    'The town is'
    """
    common = commonprefix([chosen, rejected])  # noqa: RUF071 - of characters
    if BEGINS in common:
        return common[: common.rindex(BEGINS) + len(BEGINS)]
    end = len(common)
    is_whole = end in (len(chosen), len(rejected))
    if is_whole or _is_letter(chosen[end]) or _is_letter(rejected[end]):
        while end and _is_letter(common[end - 1]):
            end -= 1
    return common[:end].removesuffix(" ")


def _is_letter(char: str) -> bool:
    """Return whether a character belongs to a word with spaces around it."""
    return char.isalnum() and char < FIRST_WITHOUT_SPACES


def _asked(prompt: Any) -> list[Message]:
    """Return the messages of a prompt that is a text: the user's, if it is not empty."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) and prompt else []


def _conversation(raw: RawRecord, before: list[Message], key: str) -> Conversation:
    """Return the conversation of a prompt's messages and an answer: a text, a message, or messages
    that may contain the prompt."""
    answer = raw.required_value(key)
    if isinstance(answer, dict):
        answer = [answer]
    elif not isinstance(answer, list):
        answer = [{"role": "assistant", "content": raw.text(key)}]
    after = answer if answer[: len(before)] == before else [*before, *answer]
    whole = RawRecord({"messages": after}, {"messages": "messages"}, raw.options)
    if all(isinstance(message, dict) and "role" in message for message in after):
        if not all(are_trained(whole, after)[-1:]):
            raise RecordRefused("nothing_trained")
        whole = whole._replace(record={"messages": without_marks(whole, after)})
    return parse_messages(whole)


def _preference(raw: RawRecord, chosen: Any, rejected: Any) -> Preference:
    """Return the preference of two answers, with the record's rewards.

    Raises RecordRefused (bad_reward) if a reward is not a number, or one of the two is missing.
    """
    found = [*map(raw.value, REWARDS)]
    if found == [None, None]:
        return Preference(chosen, rejected)
    if any(type(reward) not in (int, float) for reward in found):
        raise RecordRefused("bad_reward")
    return Preference(chosen, rejected, tuple(map(float, found)))


def parse_alpaca(raw: RawRecord) -> Preference:
    before = alpaca_messages(raw)
    halves = [
        _half(raw, [*before, {"role": "assistant", "content": raw.text(key)}]) for key in ANSWERS
    ]
    return _preference(raw, *halves)


def _half(raw: RawRecord, messages: list[Message]) -> Conversation:
    """Return the conversation of a prompt and an answer. Raises RecordRefused if the answer is
    marked not to be trained, or the messages break a rule together.
    """
    if raw.extra(MASK) is not None:  # a list of marks cannot be that of both answers
        raw = raw._replace(record={**raw.record, MASK: None})
    conversation = conversation_of(raw, messages)
    if conversation.trained and not conversation.trained[-1]:
        raise RecordRefused("nothing_trained")
    return conversation


def parse_sharegpt(raw: RawRecord) -> Preference:
    before = list_of(raw, "conversations")
    halves = [_half(raw, sharegpt_messages(raw, [*before, *_items(raw, key)])) for key in ANSWERS]
    return _preference(raw, *halves)


def _items(raw: RawRecord, key: str) -> list[Any]:
    """Return the messages of an answer, as the record has them."""
    answer = raw.required_value(key)
    return list_of(raw, key) if isinstance(answer, list) else [answer]


RATED = {"chosen_reward": ("score_chosen",), "rejected_reward": ("score_rejected",)}
PREFERENCE = Shape(
    name="preference",
    version=2,
    gives=Preference,
    fields=ANSWERS,
    optional=("prompt", *REWARDS),
    structured=("prompt", *ANSWERS),
    extras=(VARIABLES, OBJECTS),
    options=(MARK,),
    also_called=RATED,
    reasons=CONVERSATION_REASONS | EXTRAS_REASONS,
    parse=with_extras(parse),
)
PREFERENCE_ALPACA = Shape(
    name="preference_alpaca",
    gives=Preference,
    fields=("instruction", *ANSWERS),
    optional=("input", "history", "system", *REWARDS),
    structured=("history",),
    extras=(VARIABLES, OBJECTS),
    options=("joined_by",),
    also_called=RATED,
    reasons=CONVERSATION_REASONS | EXTRAS_REASONS,
    parse=with_extras(parse_alpaca),
)
PREFERENCE_SHAREGPT = Shape(
    name="preference_sharegpt",
    gives=Preference,
    fields=("conversations", *ANSWERS),
    optional=("system", "tools", *REWARDS),
    structured=("conversations", *ANSWERS, "tools"),
    extras=(VARIABLES, OBJECTS),
    options=("tags", "consecutive_roles", "nulls", MARK),
    also_called={**RATED, **SHAREGPT.also_called},
    guess=guess,
    reasons=CONVERSATION_REASONS | EXTRAS_REASONS,
    parse=with_extras(parse_sharegpt),
)
