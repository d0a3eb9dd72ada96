"""How answers end: whether the last trained token of an answer is one at which the model stops.

Most templates print an end of turn after an answer, such as `<|im_end|>`. GLM-4.5 and others print
none: the token of the next role (`<|user|>`, `<|observation|>`) stops a generation. It is the first
token of the next turn's prompt, so LLM-Foundry never trains it. If it is known to stop the model,
it becomes the end of the answer before it (`labels.move_stop_tokens`). If it is not known whether
it does, the user gets a note.

A final answer has no next turn. The loader appends EOS to it, which is its stop.

The template is rendered with probes, once, to see the text that it prints after an answer and
before the next message.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from mdsmix.encode.chat import ChatTemplate, open_stream_template
from mdsmix.encode.forms import make_call_probe, make_tool_probe
from mdsmix.messages import join_names
from mdsmix.record import Message, RecordRefused
from mdsmix.shards.manifest import Encoding
from mdsmix.tokenizer.card import Tokenizer
from mdsmix.tokenizer.transformers_five import GENERATION_CONFIG

ANSWER = "probe_answer"
PROBES: tuple[Any, ...] = (str, lambda text: [{"type": "text", "text": text}])
"""Functions that make the content of a probe message from a string: the string itself, or a list of
parts, which the templates of some vision models want.
"""
MAX_STOPS_SHOWN = 6
STOP_RULE = "template.stop_tokens"
"The rule of `ends_by_next_role`, among the rules of a stream."


@dataclass(frozen=True, kw_only=True)
class AnswerEnd:
    """The text that a template prints after an answer or a call."""

    ending: str
    "The text after the answer that is still part of the assistant's turn, so it is trained."
    following: str | None
    """The text between `ending` and the content of the next message: the beginning of the next
    prompt. None if the template prints the answer differently once a message follows: then no row
    contains this answer followed by a message.
    """
    subject: str = "an answer"
    "For messages: `an answer` or `a call`."


@dataclass(frozen=True, kw_only=True)
class EndNote:
    """A sentence on how answers end, with a fix."""

    sentence: str
    fix: str = ""
    level: Literal["warning", "note", "fact"] = "warning"
    """warning: an answer is trained without a stop token; note: it is not known whether its last
    token stops the model; fact: nothing is wrong.
    """

    def __str__(self) -> str:
        prefix = "WARNING: " if self.level == "warning" else ""
        fix = f": {self.fix}" if self.fix else ""
        return prefix + self.sentence + fix


def find_answer_ends(template: ChatTemplate, has_tools: bool) -> list[AnswerEnd]:
    """Return how the template ends an answer, and a call of tools if `has_tools`; [] if probes do
    not show it.
    """
    ends = [_find_answer_end(template)]
    if has_tools:
        ends.append(_find_call_end(template.for_tools([])))
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
    return _find_end(template, messages, "probe_value", "probe_result", "a call", tools)


def _find_end(
    template: ChatTemplate,
    messages: list[Message],
    last_word: str,
    next_word: str,
    subject: str,
    tools: list[Any] | None = None,
) -> AnswerEnd | None:
    """Render two messages, then all three, and return how the second ends. Return None if the
    template does not print the second.

    Args:
        messages: a question, an answer or call, and a message after it.
        last_word: the word that ends the second message.
        next_word: the word that begins the third message.
        subject: `an answer` or `a call`, for messages to the user.
        tools: the tools that the template gets.
    """
    try:
        alone = template.render(messages[:2], False, tools)
    except RecordRefused:
        return None
    if last_word not in alone:
        return None
    ending = alone.rpartition(last_word)[2]
    try:
        with_next = template.render(messages, False, tools)
    except RecordRefused:
        with_next = ""
    following = None
    if with_next.startswith(alone) and next_word in with_next[len(alone) :]:
        following = with_next[len(alone) :].partition(next_word)[0]
    return AnswerEnd(ending=ending, following=following, subject=subject)


def find_stop_ids(tokenizer: Tokenizer) -> list[int]:
    """Return the ids at which a model of this tokenizer is known to stop: the tokenizer's stop ids,
    or only EOS if it has none.
    """
    if tokenizer.stop_ids:
        return tokenizer.stop_ids
    return [] if tokenizer.eos_id is None else [tokenizer.eos_id]


@dataclass(frozen=True, kw_only=True)
class Stops:
    """The tokens at which a model stops generating."""

    tokens: tuple[str, ...]
    source: str
    "Where they are named, for messages; empty if they are named nowhere: then only EOS is known."

    def __str__(self) -> str:
        names = join_names([*self.tokens], MAX_STOPS_SHOWN) or "none that this tokenizer has"
        return f"{names}, by {self.source}"

    def are_in(self, text: str) -> bool:
        """Return whether a stop token is in the text."""
        return any(token in text for token in self.tokens)

    @classmethod
    def for_stream(cls, tokenizer: Tokenizer, stream_ids: Sequence[int] = ()) -> Stops:
        """Return the stop tokens of a stream.

        Args:
            tokenizer: its stop ids are used if `stream_ids` is empty.
            stream_ids: the stop ids that the stream was converted with, from its manifest.
        """
        names = {id: token for token, id in tokenizer.added_tokens.items()}
        eos = tokenizer.eos_id
        if eos is not None:
            names.setdefault(eos, str(tokenizer.template_variables.get("eos_token")))
        if tokenizer.stop_ids:
            source = "tokenizer.stop_tokens" if tokenizer.are_stops_named else GENERATION_CONFIG
        elif stream_ids and [*stream_ids] != [eos]:
            source = "the stream's manifest"
        else:
            source = ""
        ids = stream_ids or find_stop_ids(tokenizer)
        return cls(tokens=tuple(names[id] for id in ids if id in names), source=source)


def trains_earlier_answers(encoding: Encoding) -> bool:
    """Return whether answers before the last one are trained, and prompts are not."""
    return encoding.target_responses == "all" and encoding.target_prompts != "all"


def ends_by_next_role(encoding: Encoding, tokenizer: Tokenizer) -> bool:
    """Return whether the stop token that begins the next message is trained as the end of the
    answer before it.

    This is so if the template prints no stop token after an answer, the token that begins the next
    message is a known stop token, and earlier answers are trained but prompts are not.
    """
    if not trains_earlier_answers(encoding):
        return False
    stops = Stops.for_stream(tokenizer, encoding.stop_ids)
    return any(find_lead(end, stops) is not None for end in find_stream_ends(encoding, tokenizer))


def find_stream_ends(encoding: Encoding, tokenizer: Tokenizer) -> list[AnswerEnd]:
    """Return how the template of a stream ends answers, and calls if its records may have any."""
    template = open_stream_template(encoding, tokenizer)
    may_have_tools = "tools" in encoding.fields or encoding.shape is not None
    return find_answer_ends(template, may_have_tools)


def is_ended_by_next(encoding: Encoding) -> bool:
    """Return whether a stream was converted with the rule of `ends_by_next_role`, by its
    manifest.
    """
    return STOP_RULE in encoding.rules


def find_lead(end: AnswerEnd, stops: Stops) -> str | None:
    """Return the white space, usually "", before the stop token that begins the next message.

    Return None if the next message does not begin with a stop token, or if the answer itself
    already ends in one.
    """
    following = end.following or ""
    stripped = following.lstrip()
    if stops.are_in(end.ending) or not stripped.startswith(stops.tokens):
        return None
    return following[: len(following) - len(stripped)]


def make_end_notes(encoding: Encoding, tokenizer: Tokenizer) -> Iterator[EndNote]:
    """Yield notes for the user on how answers end in a stream of conversations."""
    stops = Stops.for_stream(tokenizer, encoding.stop_ids)
    ends = find_stream_ends(encoding, tokenizer)
    if encoding.target_responses == "all":
        yield from _make_notes_before_message(ends, stops, encoding, tokenizer)
    if ends:
        yield from _make_note_at_last(ends[0], stops, tokenizer)


class OpenEnd(NamedTuple):
    """The tokens at the end of an answer that has no stop token, and after it."""

    last_token: str
    "The special token that ends the answer, or ''."
    next_token: str
    "The token that begins the next message, or ''."


def _make_notes_before_message(
    ends: Sequence[AnswerEnd], stops: Stops, encoding: Encoding, tokenizer: Tokenizer
) -> Iterator[EndNote]:
    """Yield a note for each way in which an answer before another message ends without a stop
    token.
    """
    # An answer and a call that end in the same way get one note.
    open_ends = dict[OpenEnd, AnswerEnd]()
    for end in ends:
        if end.following is not None and not stops.are_in(end.ending):
            last_token = _find_last_token(end.ending, tokenizer.special_tokens)
            next_token = _find_first_token(end.following.lstrip(), [*tokenizer.added_tokens])
            open_ends.setdefault(OpenEnd(last_token, next_token), end)
    unnamed = [tokens.last_token or tokens.next_token for tokens in open_ends]
    names = _quote(*stops.tokens, *filter(None, unnamed))
    name_all = f"name all tokens that stop it: tokenizer.stop_tokens: [{names}]"
    no_config = f"there is no {GENERATION_CONFIG} next to the tokenizer"
    for (last_token, next_token), end in open_ends.items():
        where = f"{end.subject} before another message"
        if next_token in stops.tokens:
            if trains_earlier_answers(encoding):  # otherwise it is trained as a part of the prompt
                sentence = (
                    f"{next_token} of the next message stops {end.subject}, and is trained as its "
                    "end"
                )
                yield EndNote(sentence=sentence, level="fact")
        elif last_token and not stops.source:
            sentence = (
                f"{where} ends in {last_token}, and it is not known whether a model stops there, "
                f"since {no_config}"
            )
            yield EndNote(sentence=sentence, fix=name_all, level="note")
        elif last_token:
            sentence = (
                f"{where} ends in {last_token}, which is not among the tokens that stop a "
                f"generation ({stops})"
            )
            yield EndNote(sentence=sentence, fix=name_all)
        elif next_token and encoding.target_prompts == "all":
            continue  # it is trained as a part of the prompt
        elif next_token:
            problem = f"is not among those that stop a generation ({stops})"
            if not stops.source:
                problem = f"is not known to stop a generation ({no_config})"
            sentence = (
                f"no token ends {where}: the template prints {next_token} of that message after "
                f"it, which {problem}, and is not trained there"
            )
            yield EndNote(sentence=sentence, fix=name_all)
        else:
            sentence = (
                f"no token ends {where}, so the model does not learn to stop there: the text "
                f"continues with {(end.following or '')[:20]!r}"
            )
            fix = "use a chat template that prints EOS or another stop token after an answer"
            yield EndNote(sentence=sentence, fix=fix)


def _make_note_at_last(end: AnswerEnd, stops: Stops, tokenizer: Tokenizer) -> Iterator[EndNote]:
    """Yield a note if EOS does not stop the model. The loader appends EOS to an answer at the end
    of a row, so that answer then ends in a token at which the model does not stop.
    """
    eos = tokenizer.template_variables.get("eos_token")
    if tokenizer.eos_id is None or not isinstance(eos, str):
        return
    if eos not in stops.tokens and not stops.are_in(end.ending):
        yield EndNote(
            sentence=(
                f"the last answer of a row ends in {eos}, the EOS that the loader appends, which "
                f"is not among the tokens that stop a generation ({stops})"
            ),
            fix=f"name it, if it does: tokenizer.stop_tokens: [{_quote(*stops.tokens, eos)}]",
        )


def describe_doubled_eos(encoding: Encoding, tokenizer: Tokenizer) -> str:
    """Return a sentence if the template prints EOS and then more text after an answer. The loader
    then appends a second EOS. Otherwise return "".
    """
    eos = tokenizer.template_variables.get("eos_token")
    for end in find_stream_ends(encoding, tokenizer):
        if isinstance(eos, str) and eos in end.ending and not end.ending.endswith(eos):
            return (
                f"the template ends {end.subject} in {end.ending!r}, which is not {eos} alone, so "
                f"the loader appends {eos} to the last one of a row: it is trained twice there, as "
                "in LLM-Foundry"
            )
    return ""


def _find_first_token(text: str, tokens: Sequence[str]) -> str:
    """Return the longest token with which the text begins; "" if it begins with none of them."""
    return max((token for token in tokens if text.startswith(token)), key=len, default="")


def _find_last_token(text: str, tokens: Sequence[str]) -> str:
    """Return the token whose last occurrence in the text ends furthest to the right; "" if the text
    contains none of them.
    """
    inside = [token for token in tokens if token and token in text]
    return max(inside, key=lambda token: text.rfind(token) + len(token), default="")


def _quote(*tokens: str) -> str:
    """Return the tokens as the items of a list in YAML, each once."""
    return ", ".join(f'"{token}"' for token in dict.fromkeys(tokens))
