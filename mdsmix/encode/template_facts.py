"""What mdsmix must know of a chat template before it renders records: whether it prints the date,
whether it prints contents without any text between, whether it prints contents that are strings,
and how it ends answers and calls.

The template is rendered with probes, once, to see the text that it prints after an answer and
before the next message. What was found is kept in the cache, since importing jinja2 and rendering
the probes takes 25 of the 250 ms of an unchanged `check`.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import xxhash

from mdsmix import schema
from mdsmix.cache import cache_folder, keep_in_cache
from mdsmix.encode.chat import ChatTemplate, joins_contents
from mdsmix.encode.forms import make_call_probe, make_tool_probe
from mdsmix.encode.open_template import open_stream_template
from mdsmix.errors import Unreachable
from mdsmix.frozen import frozen
from mdsmix.record import Message, RecordRefused
from mdsmix.shards.manifest import Encoding
from mdsmix.tokenizer.card import Tokenizer
from mdsmix.tokenizer.snapshot import package_version

ANSWER = "probe_answer"


def _as_parts(text: str) -> list[dict[str, str]]:
    """Return a content as a list of parts, which the templates of some vision models need."""
    return [{"type": "text", "text": text}]


PROBES: tuple[Any, ...] = (str, _as_parts)
"Functions that make the content of a probe message from a string. They are tried in this order."
CODE = (
    *("template_facts.py", "chat.py", "control_words.py", "forms.py", "open_template.py"),
    *("placeholders.py", "template_code.py", "template_probes.py", "text_layouts.py"),
)
"The files of this package on whose code the facts depend. Another content makes new facts."


@frozen(kw_only=True)
class AnswerEnd:
    """The text that a template prints after an answer or after a call of a tool."""

    ending: str
    "The text after the answer that is still part of the assistant's turn, so it is trained."
    following: str | None
    """The text between `ending` and the content of the next message: the beginning of the next
    prompt. None if the template prints the answer differently once a message follows, since then
    no row contains this answer with a message after it.
    """
    subject: str = "an answer"
    "For messages: `an answer`, or a call of a tool, which the records of the stream may lack."


@frozen(kw_only=True)
class TemplateFacts:
    """What is known of the chat template of a stream."""

    prints_date: bool
    "Whether the rendered text may depend on the date."
    joins_contents: bool
    "Whether it prints a stripped content directly before one that it does not strip."
    needs_parts: bool
    "Whether it prints a content only if that is a list of parts, and nothing of a string."
    ends: list[AnswerEnd]
    "How the template ends answers and, if records may contain calls of tools, calls."


def find_template_facts(encoding: Encoding, tokenizer: Tokenizer) -> TemplateFacts:
    """Return what is known of the chat template of a stream. It comes from the cache if an earlier
    run has found it.

    Raises RecipeError if the template is not valid.
    """
    may_have_tools = "tools" in encoding.fields or encoding.shape is not None
    variables = tokenizer.template_variables | encoding.template
    depends_on = [
        *(tokenizer.chat_template, tokenizer.named_templates, variables),
        *(encoding.date_string, may_have_tools, package_version("jinja2"), _hash_code()),
    ]
    digest = xxhash.xxh128_hexdigest(json.dumps(depends_on, sort_keys=True))
    file = cache_folder() / "templates" / f"{digest}.json"
    facts = _recall(file)
    if facts is None:
        template = open_stream_template(encoding, tokenizer)
        ends = find_answer_ends(template, may_have_tools)
        facts = TemplateFacts(
            prints_date=template.prints_date,
            joins_contents=joins_contents(template),
            needs_parts=needs_parts(template),
            ends=ends,
        )
        # What a template prints today is not kept: it may print something else tomorrow.
        if encoding.date_string or not facts.prints_date:
            with suppress(Unreachable):  # without a cache it is found again
                keep_in_cache(file, json.dumps(asdict(facts)).encode())
    return facts


def _recall(file: Path) -> TemplateFacts | None:
    """Return the facts in a file of the cache; None if it is missing or damaged."""
    with suppress(OSError, ValueError, schema.Misfit):
        return schema.parse_mapping(TemplateFacts, json.loads(file.read_bytes()))
    return None


@cache
def _hash_code() -> str:
    """Return a hash of the code that the facts depend on."""
    files = map(Path(__file__).with_name, CODE)
    return xxhash.xxh128_hexdigest(b"".join(file.read_bytes() for file in files))


def needs_parts(template: ChatTemplate) -> bool:
    """Return whether the template prints contents that are lists of parts, and prints a question
    and an answer that are strings without their texts, as those of SmolVLM and Idefics 3 do. Return
    False if it fails on strings, since these records are quarantined.
    """
    prints_any = list[bool]()
    for make_content in PROBES:
        question = {"role": "user", "content": make_content("probe_question")}
        answer = {"role": "assistant", "content": make_content(ANSWER)}
        try:
            text = template.render([question, answer], add_generation_prompt=False)
        except RecordRefused:
            return False
        prints_any.append("probe_question" in text or ANSWER in text)
    prints_strings, prints_parts = prints_any
    return prints_parts and not prints_strings


def find_answer_ends(template: ChatTemplate, has_tools: bool) -> list[AnswerEnd]:
    """Return how the template ends an answer and, if `has_tools`, how it ends a call of a tool.
    Leave out what the template does not print for probe messages.
    """
    ends = [_find_answer_end(template)]
    if has_tools:
        template_for_tools = template.for_tools([])  # an empty list counts as tools
        ends.append(_find_call_end(template_for_tools))
    return [end for end in ends if end]


@lru_cache(maxsize=16)
def _find_answer_end(template: ChatTemplate) -> AnswerEnd | None:
    """Return how the template ends an answer, found with probes; None if it prints no probe."""
    texts = (("user", "probe_question"), ("assistant", ANSWER), ("user", "probe_next"))
    for make_content in PROBES:
        messages = [{"role": role, "content": make_content(text)} for role, text in texts]
        end = _find_end(template, messages, ANSWER, "probe_next", "an answer")
        if end:
            return end
    return None


@lru_cache(maxsize=16)
def _find_call_end(template: ChatTemplate) -> AnswerEnd | None:
    """Return how the template ends a call of a tool; None if it prints no calls or results."""
    messages = make_call_probe(template)
    if messages is None:
        return None
    tools = [make_tool_probe()]
    return _find_end(
        template,
        messages,
        last_word="probe_value",
        next_word="probe_result",
        subject="a call of a tool (if the records have any)",
        tools=tools,
    )


def _find_end(
    template: ChatTemplate,
    messages: list[Message],
    last_word: str,
    next_word: str,
    subject: str,
    tools: list[Any] | None = None,
) -> AnswerEnd | None:
    """Render the first two of three messages, then all three, and return how the second message
    ends. Return None if the template does not print the second message.

    Args:
        template: the template.
        messages: a question, an answer or call, and a message after it.
        last_word: the word that ends the second message.
        next_word: the word that begins the third message.
        subject: such as `an answer`, for messages to the user.
        tools: the tools that the template gets.
    """
    try:
        alone = template.render(messages[:2], add_generation_prompt=False, tools=tools)
    except RecordRefused:
        return None
    if last_word not in alone:
        return None
    ending = alone.rpartition(last_word)[2]
    try:
        with_next = template.render(messages, add_generation_prompt=False, tools=tools)
    except RecordRefused:
        with_next = ""
    following = None
    if with_next.startswith(alone) and next_word in with_next[len(alone) :]:
        following = with_next[len(alone) :].partition(next_word)[0]
    return AnswerEnd(ending=ending, following=following, subject=subject)
