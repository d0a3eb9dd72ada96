"""Fields that the best guess at a shape leaves unread although they may matter, such as a second
answer, the choices of a question, or a mark of bad answers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from statistics import median
from typing import Any

from mdsmix.encode.printed_parts import MASKED_ROLE
from mdsmix.init.recognise import Guess, usual_names
from mdsmix.kinds.turn_rows import PARENT, describe_parents
from mdsmix.messages import format_field, join_names, make_printable, plural
from mdsmix.record import Conversation
from mdsmix.shapes import SHAPES
from mdsmix.shapes.extras import ARGUMENTS, OWN_VARIABLES, VARIABLES
from mdsmix.shapes.fields import find_value
from mdsmix.shapes.prompt import Prompt
from mdsmix.shapes.sharegpt import TAGS
from mdsmix.shapes.training_marks import TRAIN_KEYS
from mdsmix.sources.class_labels import read_class_names

BAD_ANSWER_MARKS = frozenset({"label", "labels", "chosen", "is_good", "desirable", "kto_tag"})
"""Names of fields that may mark bad answers by false. LLaMA-Factory's records for KTO have the last
one.
"""
POSSIBLE_MARKS = frozenset(
    (
        *("correct", "is_correct", "verified", "is_verified", "resolved", "passed", "success"),
        *("successful", "valid", "is_valid", "accepted", "safe", "is_safe", "reward"),
        *BAD_ANSWER_MARKS,
        *TRAIN_KEYS,  # of a message; here of a whole record
    )
)
"Names of fields that may mark bad answers by false, 0 or -1, but may say something else as well."
CHOICES = ("choices", "options", "answer_choices", "answerchoices", "answer_options")
"Names of the field with the choices of a question that has several."
REASONING = (
    *("reasoning_content", "reasoning", "thinking", "thought", "thoughts", "cot", "complex_cot"),
    *("chain_of_thought", "thinking_trajectory", "rationale", "reasoning_trace"),
    "synthetic_reasoning",
)
"Names of the field with the reasoning that comes before the answer."
MOST_CLASSES = 6
"The most classes that a sentence names."


def _list_values(guess: Guess, name: str) -> list[Any]:
    """Return the values of a field of the first records; None for a record that lacks it."""
    return [record.get(name) for record in guess.head.objects]


def find_condition(guess: Guess) -> str | None:
    """Return the condition `where` that leaves out answers that the records mark as bad; None if
    they mark none.
    """
    mark = find_bad_answer_mark(guess)
    if mark:
        return mark
    role = _find_masked_role(guess)
    return f"{MASKED_ROLE} != '{role}'" if role else None


def find_bad_answer_mark(guess: Guess) -> str | None:
    """Return the field that marks bad answers in a file of questions and answers; None if no field
    does.

    Unpaired preferences (KTO) have a boolean for each answer. A model must not be trained on the
    answers with false, which people rejected.
    """
    if guess.kind.word != "finetuning":
        return None
    for name in sorted(guess.unread & BAD_ANSWER_MARKS):
        values = _list_values(guess, name)
        if False in values and all(type(value) is bool for value in values):
            return name
    return None


def _find_masked_role(guess: Guess) -> str | None:
    """Return the assistant's role if a record of NeMo names it in `mask`: NeMo then trains the
    other messages of the record, and none of its answers. None if no record does.
    """
    if "conversations" not in guess.shape.fields or MASKED_ROLE not in guess.unread:
        return None
    role: str = (TAGS | guess.options.get("tags", {}))["assistant_tag"]
    masked = role in _list_values(guess, MASKED_ROLE)
    return role if masked and "'" not in role else None


def describe_doubts(guess: Guess) -> Iterator[str]:
    """Yield a sentence on each key of the shape that could also be read from another field, on a
    field with reasoning, on answers that are not texts, on fields that may mark bad answers, and on
    records whose answers NeMo does not train.
    """
    for key, name in guess.fields.items():
        rivals = [
            other
            for other in usual_names(guess.shape, key)
            if other in guess.unread and _has_alike_values(guess, name, other)
        ]
        for rival in rivals:
            lengths = [_describe_length(guess, field) for field in (name, rival)]
            yield (
                f"`{key}` is read from the field {format_field(name)} ({lengths[0]}), and not from "
                f"{format_field(rival)} ({lengths[1]}): if that is wrong, write `{key}: {rival}`"
            )
    yield from _describe_answers_without_text(guess)
    yield from _describe_reasoning(guess)
    yield from _describe_stand_ins(guess)
    yield from _describe_unread_tools(guess)
    yield from _describe_possible_marks(guess)
    yield from _describe_parents(guess)
    role = _find_masked_role(guess)
    if role:
        yield (
            f"the field {MASKED_ROLE} is {role} in some records: NeMo does not train the answers "
            "of these, and the condition `where` leaves them out"
        )


def describe_unread_variables(guess: Guess, variables: Set[str]) -> Iterator[str]:
    """Yield a sentence on each field of the records, such as verl's `enable_thinking`, that has the
    name of a variable of the chat template. The template gets only the variables of
    `chat_template_kwargs`.

    Args:
        guess: the guess at the shape of the records.
        variables: names of the variables that the chat template reads.
    """
    if VARIABLES not in guess.shape.extras:
        return
    for name in sorted(guess.unread & variables - OWN_VARIABLES - ARGUMENTS):
        if any(value is not None for value in _list_values(guess, name)):
            yield (
                f"the chat template reads a variable {name}, but the field {name} of the records "
                f"is not passed to it: if it is that variable, move it into the records' "
                f'{VARIABLES}, as in {{"{VARIABLES}": {{"{name}": ...}}}}'
            )


def _describe_answers_without_text(guess: Guess) -> Iterator[str]:
    """Yield a sentence if records of questions and answers are read as prompts, since their answers
    are numbers or objects, and only a text can be trained.
    """
    if guess.shape.gives is not Prompt:
        return
    for name in usual_names(SHAPES["prompt_response"], "response"):
        values = [value for value in _list_values(guess, name) if value is not None]
        if values and not any(isinstance(value, (str, list)) for value in values):
            field = format_field(name)
            yield (
                f"the values of {field} are not texts, so these records are read as prompts for "
                f"reinforcement learning, and {field} is not trained: to train it as the answer, "
                "make texts of its values (of JSON Lines: "
                f"`jq -c 'if .{name} == null then . else .{name} |= tostring end'`), and run init "
                "again"
            )


def _describe_reasoning(guess: Guess) -> Iterator[str]:
    """Yield a sentence on each field that is not read and seems to have the reasoning before an
    answer that is a text. A word such as `on` does not count.
    """
    keys = [key for key in ("response", "output") if key in guess.fields]
    for name in sorted(guess.unread) if keys else ():
        values = _list_values(guess, name)
        has_texts = any(isinstance(value, str) and " " in value.strip() for value in values)
        if name.lower() in REASONING and has_texts:
            answer = guess.fields[keys[0]]
            yield (
                f"the texts of {format_field(name)} are not trained: if they are the reasoning "
                f'before the answer, write `{keys[0]}: "<think>\\n{{{name}}}\\n</think>\\n\\n'
                f'{{{answer}}}"`, or as the model writes its reasoning'
            )


def _describe_stand_ins(guess: Guess) -> Iterator[str]:
    """Yield a sentence if most records have a mark such as `-` in place of a question. NVIDIA's
    records for code do, since the questions are in other data sets.
    """
    stand_ins = guess.stand_ins
    if 2 * len(stand_ins) > len(guess.head):
        first_records = f"the first {plural(len(guess.head), 'record')}"
        yield (
            f"the question is only {make_printable(repr(stand_ins[0][:20]))} or the like in "
            f"{len(stand_ins):,} of {first_records}: if the questions are in another data set, "
            "write them into the records, since the answers are trained without them"
        )


def _describe_unread_tools(guess: Guess) -> Iterator[str]:
    """Yield a sentence on each field of conversations that has tools and is not read."""
    if guess.shape.gives is not Conversation:
        return
    for name in usual_names(SHAPES["openai"], "tools"):
        if name in guess.unread and any(_list_values(guess, name)):
            yield (
                f"the tools in the field {format_field(name)} are not read, so they are not in the "
                f"text that is trained: they are printed by `tools: {name}`, if they are a list of "
                "objects with names, or the JSON text of such a list"
            )


def _describe_possible_marks(guess: Guess) -> Iterator[str]:
    """Yield a sentence on each field that may mark bad answers, such as `resolved` of SWE's
    trajectories or the `reward` of sampled answers. Only `find_bad_answer_mark` is sure of its
    field.
    """
    if guess.kind.word != "finetuning":
        return
    for name in sorted(guess.unread & POSSIBLE_MARKS - {find_bad_answer_mark(guess)}):
        values = _list_values(guess, name)
        bad = sum(value in (False, -1) for value in values)
        are_whole = all(
            type(value) in (bool, int, float) and value in (-1, 0, 1) for value in values
        )
        if not bad or not are_whole:
            continue
        are_flags = all(type(value) is bool for value in values)
        condition = name if are_flags else f"{name} == 1"
        yield (
            f"the field {name} is {'false' if are_flags else 'not 1'} in {bad:,} of the first "
            f"{plural(len(values), 'record')}: if it marks bad answers, write `where: {condition}` "
            "under source, which leaves them out"
        )


def _describe_parents(guess: Guess) -> Iterator[str]:
    """Yield a sentence if questions name the record that they continue."""
    if PARENT not in guess.unread or {"prompt", "instruction"}.isdisjoint(guess.fields):
        return
    named = sum(value not in (None, "") for value in _list_values(guess, PARENT))
    if named:
        yield f"of the first {plural(len(guess.head), 'record')}, {describe_parents(named)}"


def _has_alike_values(guess: Guess, name: str, other: str) -> bool:
    """Check whether two fields of the records have values of one type, other than numbers, nulls
    and truth values.
    """
    for record in guess.head.objects:
        value = find_value(name, record)
        if value and isinstance(value, (str, list)) and type(record.get(other)) is type(value):
            return True
    return False


def _describe_length(guess: Guess, name: str) -> str:
    """Return the middle length of a field's values: `28 characters`, or of lists `3 messages`."""
    values = [find_value(name, record) for record in guess.head.objects]
    lengths = [len(value) for value in values if isinstance(value, (str, list))]
    middle = int(median(lengths)) if lengths else 0
    are_lists = any(isinstance(value, list) for value in values)
    return plural(middle, "message" if are_lists else "character")


def describe_classes(guess: Guess) -> Iterator[str]:
    """Yield a sentence on each field that is read and has class labels of `datasets`: the file has
    only their numbers, so a label of 1 may mean `undesirable`.
    """
    classes = read_class_names(guess.head.file)
    for key, name in guess.fields.items():
        if name in classes:
            numbered = [f"{number} is {label}" for number, label in enumerate(classes[name])]
            yield (
                f"`{key}` is read from {format_field(name)}, whose values are numbers of "
                f"classes ({make_printable(join_names(numbered, MOST_CLASSES))}); the numbers are "
                "used, and not these names"
            )


def find_lost_choices(guess: Guess) -> str | None:
    """Return the field with the choices of questions that do not contain them, as in MMLU:
    `{"question": ..., "choices": [...], "answer": 2}`. None if most records have no such field.

    Without its choices, such a question has no answer.
    """
    questions = [name for key, name in guess.fields.items() if key in ("prompt", "instruction")]
    for name in guess.unread:
        if not questions or name.lower() not in CHOICES:
            continue
        objects = guess.head.objects
        lacking = sum(_lacks_choices(record, questions[0], name) for record in objects)
        if 2 * lacking > len(objects):
            return name
    return None


def _lacks_choices(record: Mapping[str, Any], question: str, name: str) -> bool:
    """Check whether a field of a record has choices that the question does not contain."""
    text = record.get(question)
    choices = _list_choices(record.get(name))
    return isinstance(text, str) and bool(choices) and not all(choice in text for choice in choices)


def _list_choices(value: Any) -> Sequence[str]:
    """Return the choices of a question: the texts of a list, those of the list `text` of an object,
    as in ARC, the values of an object such as `{"A": ..., "B": ...}`, or one text with all of them.
    """
    if isinstance(value, dict):
        value = value.get("text") or [*value.values()]
    if isinstance(value, str):
        return [value] if value else []
    return [choice for choice in value or () if isinstance(choice, str)]
