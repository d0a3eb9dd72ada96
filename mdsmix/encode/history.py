"""Conversations whose earlier turns a chat template prints differently once later turns follow.

Templates of reasoning models drop the reasoning of earlier answers (DeepSeek-R1, Qwen3, gpt-oss), others move the system
prompt or the tools to the last question (Mistral v3) or end every text with EOS (Phi-3). Then no single row can hold
every turn as inference sees it, and LLM-Foundry refuses the conversation. A separate row for an answer can hold that one turn:
what the template prints for all messages up to the answer, cut where the model begins to write.
"""

from __future__ import annotations

from typing import Literal

from mdsmix.encode.chat import ChatTemplate, NotRendered, Turn, answers, parting, shared
from mdsmix.record import Conversation

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

    A generation prompt that also opens the reasoning (`<think>`) is not the beginning of an answer that was printed
    without: there the prompt ends where the two part, as long as all messages before the answer are in it.
    """
    messages, tools = conversation.messages, conversation.tools
    prompt = template.render(messages[:answer], True, tools)
    full = template.render(messages[: answer + 1], False, tools)
    if not full.startswith(prompt):
        history = template.render(messages[:answer], False, tools)
        prompt = prompt[: shared(prompt, full)]
        if not prompt.startswith(history):
            raise NotRendered("not_prefix_stable", parting(history, full))
    return prompt, full[len(prompt) :]
