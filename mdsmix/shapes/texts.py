"""Reads records whose fields are texts:

- a document, `{"text": "..."}`
- a pair, `{"prompt": "...", "response": "..."}`
- Alpaca's conversation, `{"instruction": "...", "input": "...", "output": "..."}`, which may also
  have `system`, `tools` and `history`, earlier questions and answers as `[["q", "a"], ...]`

The question of an Alpaca record is its instruction and its input, joined. LLaMA-Factory and
ms-swift join them with a line break, which is the default here. LLaMA-Factory's new architecture
(`llamafactory.v1`) puts nothing between them (`joined_by: ""`).
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any

from mdsmix.record import (
    Conversation,
    Document,
    Message,
    Pair,
    RecordRefused,
    TextColumns,
    is_encodable,
)
from mdsmix.shapes.conversation_rules import (
    CONVERSATION_REASONS,
    make_conversation,
    make_exchange,
    make_system_messages,
)
from mdsmix.shapes.extras import EXTRAS, EXTRAS_REASONS, with_extras
from mdsmix.shapes.shape import Fields, RawRecord, Shape, are_texts
from mdsmix.shapes.training_marks import MASK

ALPACA_REASONS = {
    "bad_history": (
        "The history of an Alpaca record is not a list of [question, answer], both strings."
    ),
    "empty_question": "An Alpaca record has neither an instruction nor an input.",
}
"Reason codes of the shapes with an Alpaca question -> their explanations."
SKIPPED_IF_FALSE = ("input",)
"The keys of an Alpaca question whose 0 and false are left out (`Shape.skipped_if_false`)."


def _make_shape_of_texts(name: str, gives: type[Any], **also_called: tuple[str, ...]) -> Shape:
    """Return the shape of records that have a string for each field of a named tuple.

    Args:
        name: the name of the shape.
        gives: the named tuple, Document or Pair.
        also_called: key -> other names of its field in common data sets.
    """
    keys: tuple[str, ...] = gives._fields

    def parse(raw: RawRecord) -> Any:
        """Return the named tuple of one record."""
        return gives(*map(raw.text, keys))

    def parse_all(records: Sequence[Any], fields: Fields) -> TextColumns | None:
        """Return the texts of all records as columns; None if a value is not a string."""
        columns = [[*map(itemgetter(fields[key]), records)] for key in keys]
        return TextColumns(gives, columns) if all(map(are_texts, columns)) else None

    return Shape(
        name=name, gives=gives, fields=keys, plain=parse_all, also_called=also_called, parse=parse
    )


def parse_alpaca(raw: RawRecord) -> Conversation:
    """Read an Alpaca record as a conversation: system message, history, question and answer."""
    messages = parse_alpaca_prompt(raw)
    answer = raw.text("output")
    has_history = len(messages) > 1  # or a system message
    messages.append({"role": "assistant", "content": answer})
    # Only records with an empty answer, tools or marks need all rules of conversations.
    needs_all_rules = not answer or raw.value("tools") or raw.extra(MASK) is not None
    if needs_all_rules:
        has_system = messages[0]["role"] == "system"
        return make_conversation(raw, messages, int(has_system))
    if has_history and not is_encodable("\n".join([message["content"] for message in messages])):
        raise RecordRefused("lone_surrogate")
    # Empty answers in the history stay: only the last answer is checked.
    # An empty list of tools is not the same as none: it selects a chat template for tools.
    tools: list[Any] | None = [] if raw.value("tools") == [] else None
    return Conversation(messages, tools=tools)


def parse_alpaca_prompt(raw: RawRecord) -> list[Message]:
    """Return a record's messages up to its question, without the answer.

    Raises RecordRefused if a field has a wrong type, or the question is empty.
    """
    question = raw.text("instruction")
    if raw.value("input"):
        separator: str = raw.options.get("joined_by", "\n")
        question = separator.join(filter(None, (question, raw.text("input"))))
    if not question:
        raise RecordRefused("empty_question")
    return [
        *make_system_messages(raw),
        *_make_history_messages(raw),
        {"role": "user", "content": question},
    ]


def _make_history_messages(raw: RawRecord) -> list[Message]:
    """Return the messages of a record's earlier questions and answers, from `[["q", "a"], ...]`.

    Raises RecordRefused (bad_history) if an entry is not a list of two strings.
    """
    history = raw.value("history") or []
    messages = list[Message]()
    for entry in history if isinstance(history, list) else [history]:
        match entry:
            case [str(question), str(answer)]:
                messages += make_exchange(question, answer)
            case _:
                raise RecordRefused("bad_history")
    return messages


TEXT = _make_shape_of_texts("text", Document, text=("raw_content", "txt"))
PROMPT_RESPONSE = _make_shape_of_texts(
    "prompt_response",
    Pair,
    prompt=("instruction", "input", "inputs", "input_text", "problem"),
    response=(
        *("output", "summary", "completion", "targets", "output_text"),
        *("r1_generation", "solution", "generated_solution", "synthetic_answer"),
        "generation",
    ),
)
ALPACA = Shape(
    name="alpaca",
    gives=Conversation,
    fields=("instruction", "output"),
    optional=("input", "history", "system", "tools"),
    structured=("history", "tools"),
    skipped_if_false=SKIPPED_IF_FALSE,
    extras=EXTRAS,
    options=("joined_by",),
    reasons=CONVERSATION_REASONS | EXTRAS_REASONS | ALPACA_REASONS,
    parse=with_extras(parse_alpaca),
)
