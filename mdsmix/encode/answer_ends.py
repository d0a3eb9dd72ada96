"""How answers end: whether the last token that is trained of an answer is one at which the model
stops.

Most templates print an end of turn behind an answer, such as `<|im_end|>`. GLM-4.5 and others print
none: the token of the next role (`<|user|>`, `<|observation|>`) is what stops a generation. It is
the first token of the next turn's prompt, so LLM-Foundry never trains it. Where it is known to
stop, it becomes the end of the answer before (`labels.move_stop_tokens`); if nothing is
known, the user gets a note.

A final answer has no next turn. The loader appends EOS to it, which is its stop.

The template is asked with probes, once: what it prints behind an answer, and before the next
message.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from mdsmix.encode.chat import ChatTemplate, open_tokenizer_template
from mdsmix.encode.forms import make_call_probe, make_tool_probe
from mdsmix.messages import join_names
from mdsmix.record import Message, RecordRefused
from mdsmix.shards.manifest import Encoding
from mdsmix.tokenizer.card import Tokenizer
from mdsmix.tokenizer.transformers_five import GENERATION_CONFIG

ANSWER = "probe_answer"
PROBES: tuple[Any, ...] = (str, lambda text: [{"type": "text", "text": text}])
"Forms of a content: a text, or parts, which the templates of some vision models want."
MOST_STOPS = 6
STOP_RULE = "template.stop_tokens"
"The rule of `ends_by_next_role`, among the rules of a stream."


@dataclass(frozen=True, kw_only=True)
class AnswerEnd:
    """What a template prints behind an answer or a call."""

    ending: str
    "The text behind it that is the assistant's own: trained."
    following: str | None
    """The text between it and what the next message says: the beginning of the next prompt. None if
    the template prints the answer otherwise once a message follows, so that it is in no row with
    one.
    """
    what: str = "an answer"


@dataclass(frozen=True, kw_only=True)
class EndNote:
    """A sentence on how answers end, and what to do."""

    sentence: str
    fix: str = ""
    level: Literal["warning", "note", "fact"] = "warning"
    "warning: an answer is trained without a stop; note: it is not known whether it has one."

    def __str__(self) -> str:
        fix = f": {self.fix}" if self.fix else ""
        return ("WARNING: " if self.level == "warning" else "") + self.sentence + fix


def find_answer_ends(template: ChatTemplate, has_tools: bool) -> list[AnswerEnd]:
    """Return how the template ends an answer, and a call of tools if `has_tools`; [] if it cannot
    be told by probes.
    """
    calls = [_call_end(template.for_tools([]))] if has_tools else []
    return [end for end in (_answer_end(template), *calls) if end]


@lru_cache(maxsize=16)
def _answer_end(template: ChatTemplate) -> AnswerEnd | None:
    for form in PROBES:
        said = [("user", "probe_question"), ("assistant", ANSWER), ("user", "probe_next")]
        messages: list[Message] = [{"role": role, "content": form(text)} for role, text in said]
        if found := _end(template, messages, ANSWER, "probe_next", "an answer"):
            return found
    return None


@lru_cache(maxsize=16)
def _call_end(template: ChatTemplate) -> AnswerEnd | None:
    messages = make_call_probe(template)
    if messages is None:
        return None
    return _end(template, messages, "probe_value", "probe_result", "a call", [make_tool_probe()])


def _end(
    template: ChatTemplate,
    messages: list[Message],
    last_word: str,
    next_word: str,
    what: str,
    tools: list[Any] | None = None,
) -> AnswerEnd | None:
    """Return what stands behind the second message: alone, and before the third; None if the
    template does not print the second.
    """
    try:
        alone = template.render(messages[:2], False, tools)
    except RecordRefused:
        return None
    if last_word not in alone:
        return None
    ending = alone.rpartition(last_word)[2]
    try:
        both = template.render(messages, False, tools)
    except RecordRefused:
        both = ""
    following = None
    if both.startswith(alone) and next_word in both[len(alone) :]:
        following = both[len(alone) :].partition(next_word)[0]
    return AnswerEnd(ending=ending, following=following, what=what)


def find_stop_ids(tokenizer: Tokenizer) -> list[int]:
    """Return the ids at which a model of this tokenizer is known to stop: EOS, if nothing names
    others.
    """
    eos = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
    return tokenizer.stop_ids or eos


@dataclass(frozen=True, kw_only=True)
class Stops:
    """The tokens at which a model stops to generate."""

    tokens: tuple[str, ...]
    source: str
    "What says so; empty if nothing does, and EOS alone is known."

    def __str__(self) -> str:
        names = join_names([*self.tokens], MOST_STOPS) or "none that this tokenizer has"
        return f"{names}, by {self.source}"

    def ends(self, text: str) -> bool:
        """Tell whether a stop token is in the text."""
        return any(token in text for token in self.tokens)

    @classmethod
    def of(cls, tokenizer: Tokenizer, ids: Sequence[int] = ()) -> Stops:
        """Return those of a tokenizer. `ids`: those by which a stream was converted, which come
        first.
        """
        names = {id: token for token, id in tokenizer.added_tokens.items()}
        eos = tokenizer.eos_id
        if eos is not None:
            names.setdefault(eos, str(tokenizer.template_variables.get("eos_token")))
        known = ids or find_stop_ids(tokenizer)
        source = "tokenizer.stop_tokens" if tokenizer.are_stops_named else GENERATION_CONFIG
        if not tokenizer.stop_ids:
            source = "the stream's manifest" if ids and [*ids] != [eos] else ""
        return cls(tokens=tuple(names[id] for id in known if id in names), source=source)


def trains_earlier_answers(encoding: Encoding) -> bool:
    """Tell whether answers before the last one are trained, and prompts are not."""
    return encoding.target_responses == "all" and encoding.target_prompts != "all"


def ends_by_next_role(encoding: Encoding, tokenizer: Tokenizer) -> bool:
    """Tell whether a stop token that the next message begins with is trained as the end of an
    answer: the template prints no stop of its own, the stop tokens are known, and earlier answers
    are trained, but prompts are not.
    """
    if not trains_earlier_answers(encoding):
        return False
    stops = Stops.of(tokenizer, encoding.stop_ids)
    return any(find_lead(end, stops) is not None for end in find_stream_ends(encoding, tokenizer))


def find_stream_ends(encoding: Encoding, tokenizer: Tokenizer) -> list[AnswerEnd]:
    variables = tokenizer.template_variables | encoding.template
    template = open_tokenizer_template(tokenizer, variables, encoding.date_string)
    may_have_tools = "tools" in encoding.fields or encoding.shape is not None
    return find_answer_ends(template, may_have_tools)


def is_ended_by_next(encoding: Encoding) -> bool:
    """Tell whether a stream was converted so (`ends_by_next_role`)."""
    return STOP_RULE in encoding.rules


def find_lead(end: AnswerEnd, stops: Stops) -> str | None:
    """Return the white space before the stop token that the next message begins with, most often
    none; None if it begins with no stop token, or the answer has one of its own.
    """
    following = end.following or ""
    begin = following.lstrip()
    if stops.ends(end.ending) or not begin.startswith(stops.tokens):
        return None
    return following[: len(following) - len(begin)]


def make_end_notes(encoding: Encoding, tokenizer: Tokenizer) -> Iterator[EndNote]:
    """Yield what a user of a stream of conversations should know of the ends of its answers."""
    stops, ends = Stops.of(tokenizer, encoding.stop_ids), find_stream_ends(encoding, tokenizer)
    if encoding.target_responses == "all":
        yield from _notes_before_a_message(ends, stops, encoding, tokenizer)
    for end in ends[:1]:
        yield from _notes_at_last(end, stops, tokenizer)


def _notes_before_a_message(
    ends: Sequence[AnswerEnd], stops: Stops, encoding: Encoding, tokenizer: Tokenizer
) -> Iterator[EndNote]:
    """Yield a note for each token by which answers end that another message follows."""
    open_ends = dict[tuple[str, str], AnswerEnd]()
    for end in ends:
        if end.following is not None and not stops.ends(end.ending):
            ended = _last_token(end.ending, tokenizer.special_tokens)
            following = _first_token(end.following.lstrip(), [*tokenizer.added_tokens])
            open_ends.setdefault((ended, following), end)
    unnamed = [ended or following for ended, following in open_ends if ended or following]
    fix = (
        f"name all tokens that stop it: tokenizer.stop_tokens: [{_quoted(*stops.tokens, *unnamed)}]"
    )
    for (ended, following), end in open_ends.items():
        where = f"{end.what} before another message"
        if following in stops.tokens:
            if trains_earlier_answers(encoding):  # else it is trained as a part of the prompt
                told = (
                    f"{following} of the next message stops {end.what}, and is trained as its end"
                )
                yield EndNote(sentence=told, level="fact")
        elif ended and not stops.source:
            told = f"{where} ends in {ended}, and nothing says whether a model stops there: no {GENERATION_CONFIG} is beside the tokenizer"
            yield EndNote(sentence=told, fix=fix, level="note")
        elif ended:
            told = f"{where} ends in {ended}, which is none of the tokens that stop a generation ({stops})"
            yield EndNote(sentence=told, fix=fix)
        elif following and encoding.target_prompts == "all":
            continue  # it is trained as a part of the prompt
        elif following:
            known = f"is none of those that stop a generation ({stops})"
            if not stops.source:
                known = f"is not known to stop a generation (no {GENERATION_CONFIG} is beside the tokenizer)"
            told = f"no token ends {where}: the template prints {following} of that message behind it, which {known}, and is not trained there"
            yield EndNote(sentence=told, fix=fix)
        else:
            told = f"no token ends {where}, so the model learns no stop there: the text goes on with {(end.following or '')[:20]!r}"
            way = "take a chat template that prints EOS, or another token that stops, behind an answer"
            yield EndNote(sentence=told, fix=way)


def _notes_at_last(end: AnswerEnd, stops: Stops, tokenizer: Tokenizer) -> Iterator[EndNote]:
    """Yield a note on an answer at the end of a row, to which the loader appends EOS."""
    eos = tokenizer.template_variables.get("eos_token")
    if tokenizer.eos_id is None or not isinstance(eos, str):
        return
    if eos not in stops.tokens and not stops.ends(end.ending):
        yield EndNote(
            sentence=f"the last answer of a row ends in {eos}, the EOS that the loader appends, which is none of the tokens that stop "
            f"a generation ({stops})",
            fix=f"name it, if it does: tokenizer.stop_tokens: [{_quoted(*stops.tokens, eos)}]",
        )


def describe_doubled_eos(encoding: Encoding, tokenizer: Tokenizer) -> str:
    """Return a sentence if the template prints EOS and something behind it at the end of an answer,
    so that the loader appends another; else "".
    """
    eos = tokenizer.template_variables.get("eos_token")
    for end in find_stream_ends(encoding, tokenizer):
        if isinstance(eos, str) and eos in end.ending and not end.ending.endswith(eos):
            return (
                f"the template ends {end.what} in {end.ending!r}, which is not {eos} alone, so the loader appends {eos} to the last one "
                "of a row: it is trained twice there, as LLM-Foundry does it"
            )
    return ""


def _first_token(text: str, tokens: Sequence[str]) -> str:
    """Return the longest of the tokens that the text begins with; empty without one."""
    return max((token for token in tokens if text.startswith(token)), key=len, default="")


def _last_token(text: str, tokens: Sequence[str]) -> str:
    """Return the token that ends last in the text; empty without one."""
    inside = [token for token in tokens if token and token in text]
    return max(inside, key=lambda token: text.rfind(token) + len(token), default="")


def _quoted(*tokens: str) -> str:
    return ", ".join(f'"{token}"' for token in dict.fromkeys(tokens))
