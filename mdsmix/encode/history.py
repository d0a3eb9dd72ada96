"""Conversations whose earlier turns a chat template prints differently once later turns follow.

Templates of reasoning models drop the reasoning of earlier answers (DeepSeek-R1, Qwen3, gpt-oss), others move the system
prompt or the tools to the last question (Mistral v3) or end every text with EOS (Phi-3). Then no single row can hold
every turn as inference sees it, and LLM-Foundry refuses the conversation. A separate row for an answer can hold that one turn:
what the template prints for all messages up to the answer, cut where the model begins to write.
"""

from __future__ import annotations

import re
from typing import Literal

from mdsmix.encode.chat import ChatTemplate, NotRendered, Turn, answers, common_start, parting
from mdsmix.record import Conversation

_OPEN_TAG = re.compile(r"[<\[][^<>\[\]\s]*\Z")
"The beginning of a control word, which `<think>` and `</think>` have in common: tokenizers know such words as a whole."
RewrittenHistory = Literal["reject", "last", "each"]
"The recipe's `rewritten_history`: quarantine such a conversation, one row for its last answer, or one for every answer."


def rendered_rows(
    template: ChatTemplate, conversation: Conversation, rule: RewrittenHistory
) -> list[list[Turn]]:
    """The rows of a conversation, each a list of turns: one row where its history stays as it was printed.

    Raises:
        NotRendered: the template fails, or the rule is `reject` and the history does not stay; also where not even
            the messages before an answer are printed as they were (not_prefix_stable).
    """
    try:
        return [template.turns(conversation)]
    except NotRendered as fault:
        if rule == "reject" or fault.reason != "not_prefix_stable":
            raise
    wanted = list(answers(conversation))
    return [[_turn(template, conversation, i)] for i in (wanted[-1:] if rule == "last" else wanted)]


def _turn(template: ChatTemplate, conversation: Conversation, answer: int) -> Turn:
    """Everything before the answer as inference sees it, and the answer.

    Where the text does not begin with the whole generation prompt, the prompt ends where inference and the text part, before the
    control word in which they part, and in any case where every answer begins: never inside of this one. Where the answer makes the template print earlier messages otherwise
    (gpt-oss drops the reasoning before a call once a final answer follows), the prompt is that of inference.
    """
    messages, tools = conversation.messages, conversation.tools
    prompt = template.render(messages[:answer], True, tools)
    full = template.render(messages[: answer + 1], False, tools)
    if full.startswith(prompt):
        return prompt, full[len(prompt) :]
    history = template.render(messages[:answer], False, tools)
    head = _head(template, conversation, answer)
    start = common_start([prompt, full, head])
    if len(start) < len(head):  # they part within what the template prints before the answer
        start = _OPEN_TAG.sub("", start)
    if start.startswith(history):
        return start, full[len(start) :]
    first = next(i for i, message in enumerate(messages) if message["role"] == "assistant")
    begins = template.render(messages[:first], True, tools)
    between = _head(template, conversation, first).removeprefix(begins)
    opening, end = prompt.removeprefix(history), len(head) - len(between)
    if opening and head.endswith(opening + between) and full.startswith(head[:end]):
        return prompt, full[end:]
    raise NotRendered("not_prefix_stable", parting(history, full))


def _head(template: ChatTemplate, conversation: Conversation, answer: int) -> str:
    """The text before every answer in this place: several answers of our own have nothing else in common, one of them a thought."""
    before, tools = conversation.messages[:answer], conversation.tools
    in_parts = isinstance(conversation.messages[answer].get("content"), list)
    texts = list[str]()
    for said in ("x", "y", "x</think>y"):
        content = [{"type": "text", "text": said}] if in_parts else said
        texts.append(
            template.render([*before, {"role": "assistant", "content": content}], False, tools)
        )
    return common_start(texts)
