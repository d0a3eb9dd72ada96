"""Counts answers whose reasoning is probably damaged, and is trained as it is: a thought that is
never closed, or reasoning that the chat template prints twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from mdsmix.encode.answer_parts import REASONING_KEYS, THINK, THINK_END
from mdsmix.encode.chat import ChatTemplate, find_trained_answers
from mdsmix.encode.forms import prints_key
from mdsmix.messages import plural
from mdsmix.record import Conversation, Message

UNCLOSED = "<think> without </think>"
TWICE = "<think> next to a key for reasoning"
THOUGHT_FAULTS = {
    UNCLOSED: (
        "an answer that begins with <think> and has no </think>, as generations that were cut off: "
        "the model would learn to end without an answer. Leave these records out, or complete them"
    ),
    TWICE: (
        "an answer with reasoning both under a key, such as reasoning_content, and between <think> "
        "and </think>, and the chat template prints both: remove one of the two"
    ),
}
"Name of a fault, under which records are counted -> what these records have, and the fix."


def count_thought_faults(
    conversations: Iterable[Conversation], template: ChatTemplate, trains_last: bool
) -> Counter[str]:
    """Return name of a fault (THOUGHT_FAULTS) -> number of conversations that have it in an
    answer that is trained.

    Args:
        conversations: the records.
        template: the chat template.
        trains_last: whether only the last answer of a record is trained.
    """
    counts = Counter[str]()
    for conversation in conversations:
        faults = set[str]()
        answers = find_trained_answers(conversation)
        for answer in answers[-1:] if trains_last else answers:
            message = conversation.messages[answer]
            content = message.get("content")
            if type(content) is str and THINK in content:
                faults |= _find_faults(message, content, template)
        counts.update(faults)
    return counts


def _find_faults(message: Message, content: str, template: ChatTemplate) -> set[str]:
    """Return the faults of one answer.

    Args:
        message: the answer.
        content: its text, which contains `<think>`.
        template: the chat template, which may print no key for reasoning.
    """
    if not content.lstrip().startswith(THINK):
        return set()
    if THINK_END not in content:
        return {UNCLOSED}
    keys = [key for key in REASONING_KEYS if message.get(key)]
    return {TWICE} if any(prints_key(template, "assistant", key) for key in keys) else set()


def describe_thought_fault(name: str, count: int) -> str:
    """Return a phrase on the records that have a fault, and the fix: `2 records have ...`."""
    verb = "has" if count == 1 else "have"
    return f"{plural(count, 'record')} {verb} {THOUGHT_FAULTS[name]}"
