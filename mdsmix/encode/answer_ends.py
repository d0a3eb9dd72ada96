"""How answers end: whether the model stops at the last trained token of an answer.

Most templates print an end-of-turn token after an answer, such as `<|im_end|>`. GLM-4.5 and others
print no such token: there the token of the next role (`<|user|>`, `<|observation|>`) stops a
generation. That token is the first of the next turn's prompt, so LLM-Foundry never trains it. If it
is known to stop the model, it is moved to the end of the answer before it
(`labels.move_stop_tokens`). If that is not known, the user gets a note.

The final answer of a row has no next turn. The loader appends EOS to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from mdsmix.encode.template_facts import AnswerEnd, find_template_facts
from mdsmix.frozen import frozen
from mdsmix.messages import join_names
from mdsmix.shards.manifest import Encoding
from mdsmix.tokenizer.card import Tokenizer
from mdsmix.tokenizer.transformers_five import GENERATION_CONFIG

MAX_STOPS_SHOWN = 6
NO_CONFIG = f"there is no {GENERATION_CONFIG} next to the tokenizer"
STOP_RULE = "template.stop_tokens"
"Name of the rule `ends_by_next_role` among the rules that a stream was made by (`Encoding.rules`)."


@frozen(kw_only=True)
class EndNote:
    """A sentence on how answers end, with a fix."""

    sentence: str
    fix: str = ""
    level: Literal["warning", "note", "fact"] = "warning"
    """warning: an answer is trained without a stop token; note: it is not known whether its last
    token stops the model; fact: nothing is wrong.
    """

    def __str__(self) -> str:
        """Return the note as a line for the user: `WARNING: sentence: fix`."""
        prefix = "WARNING: " if self.level == "warning" else ""
        fix = f": {self.fix}" if self.fix else ""
        return prefix + self.sentence + fix


def find_stop_ids(tokenizer: Tokenizer) -> list[int]:
    """Return the ids at which a model of this tokenizer is known to stop: the tokenizer's stop ids
    if it has any, otherwise EOS.
    """
    if tokenizer.stop_ids:
        return tokenizer.stop_ids
    if tokenizer.eos_id is None:
        return []
    return [tokenizer.eos_id]


@frozen(kw_only=True)
class Stops:
    """The tokens at which a model stops generating."""

    tokens: tuple[str, ...]
    source: str
    """The file or the recipe's key that names the tokens, for messages. Empty if nothing names
    them, so that only EOS is known.
    """

    def __str__(self) -> str:
        """Return the tokens and where they are named: `<|im_end|>, by generation_config.json`."""
        names = "none that this tokenizer has"
        if self.tokens:
            names = join_names([*self.tokens], MAX_STOPS_SHOWN)
        return f"{names}, by {self.source}"

    def are_in(self, text: str) -> bool:
        """Return whether the text contains a stop token."""
        return any(token in text for token in self.tokens)

    @classmethod
    def for_stream(cls, tokenizer: Tokenizer, stream_ids: Sequence[int] = ()) -> Stops:
        """Return the stop tokens of a stream.

        Args:
            tokenizer: the stream's tokenizer. Its stop ids are used if `stream_ids` is empty.
            stream_ids: the stop ids in the stream's manifest; () before the conversion.
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
    """Return whether the token that begins the next message is trained as the end of the answer
    before it.

    Three conditions must hold: the template prints no stop token after an answer, the token that
    begins the next message is a known stop token, and earlier answers are trained but prompts are
    not.
    """
    if not trains_earlier_answers(encoding):
        return False
    stops = Stops.for_stream(tokenizer, encoding.stop_ids)
    ends = find_template_facts(encoding, tokenizer).ends
    return any(find_lead(end, stops) is not None for end in ends)


def is_ended_by_next(encoding: Encoding) -> bool:
    """Return whether a published stream was converted so that its answers end with the token that
    begins the next message (`ends_by_next_role`). The manifest says so.

    Args:
        encoding: the settings in the stream's manifest.
    """
    return STOP_RULE in encoding.rules


def find_lead(end: AnswerEnd, stops: Stops) -> str | None:
    """Return the white space, usually "", that the template prints between an answer and the stop
    token that begins the next message, such as `<|user|>`.

    Return None if the next message does not begin with a stop token, or if the template already
    prints a stop token after the answer.
    """
    following = end.following or ""
    stripped = following.lstrip()
    if stops.are_in(end.ending) or not stripped.startswith(stops.tokens):
        return None
    return following[: len(following) - len(stripped)]


def make_end_notes(encoding: Encoding, tokenizer: Tokenizer) -> Iterator[EndNote]:
    """Yield notes for the user on how answers end in a stream of conversations."""
    stops = Stops.for_stream(tokenizer, encoding.stop_ids)
    ends = find_template_facts(encoding, tokenizer).ends
    if encoding.target_responses == "all":
        yield from _make_notes_before_message(ends, stops, encoding, tokenizer)
    if ends:
        # The first end is an answer's, unless the template prints no probe answer.
        yield from _make_note_at_last(ends[0], stops, tokenizer)


class OpenEnd(NamedTuple):
    """The tokens on both sides of the boundary between an answer and the next message, if the
    template prints no stop token after the answer.
    """

    last_token: str
    "The last special token that is printed with the answer; may be empty."
    next_token: str
    "The token that begins the next message; empty if it begins with ordinary text."


def _make_notes_before_message(
    ends: Sequence[AnswerEnd], stops: Stops, encoding: Encoding, tokenizer: Tokenizer
) -> Iterator[EndNote]:
    """Yield a note for each way that an answer before another message ends without a stop
    token.

    Args:
        ends: how answers, and calls of tools, end.
        stops: the stop tokens of the stream.
        encoding: the settings of the stream.
        tokenizer: the tokenizer of the stream.
    """
    # An answer and a call that end in the same way get one note.
    open_ends = dict[OpenEnd, AnswerEnd]()
    for end in ends:
        if end.following is not None and not stops.are_in(end.ending):
            last_token = _find_last_token(end.ending, tokenizer.special_tokens)
            next_token = _find_first_token(end.following.lstrip(), [*tokenizer.added_tokens])
            open_ends.setdefault(OpenEnd(last_token, next_token), end)
    # The fix names the known stop tokens, and of each boundary the token that may stop the model.
    candidates = list[str]()
    for last_token, next_token in open_ends:
        if last_token or next_token:
            candidates.append(last_token or next_token)
    names = _quote(*stops.tokens, *candidates)
    name_all = (
        "in the recipe, name all tokens that stop the model, for example tokenizer.stop_tokens: "
        f"[{names}]"
    )
    for open_end, end in open_ends.items():
        if open_end.next_token in stops.tokens:
            if trains_earlier_answers(encoding):  # otherwise it is trained as a part of the prompt
                sentence = (
                    f"the next message begins with {open_end.next_token}; the model stops at this "
                    f"token, so it is trained as the end of {end.subject}"
                )
                yield EndNote(sentence=sentence, level="fact")
        elif open_end.last_token:
            yield _make_note_on_last_token(open_end.last_token, end, stops, name_all)
        elif not open_end.next_token:
            sentence = (
                f"no token ends {end.subject} before another message, so the model does not learn "
                f"to stop there; the text continues with {(end.following or '')[:20]!r}"
            )
            fix = "use a chat template that prints EOS or another stop token after an answer"
            yield EndNote(sentence=sentence, fix=fix)
        elif encoding.target_prompts != "all":  # otherwise it is trained as a part of the prompt
            yield _make_note_on_next_token(open_end.next_token, end, stops, name_all)


def _make_note_on_last_token(token: str, end: AnswerEnd, stops: Stops, fix: str) -> EndNote:
    """Return the note on a special token at the end of an answer that is not a known stop token."""
    where = f"{end.subject} before another message"
    if not stops.source:
        sentence = (
            f"{where} ends in {token}, and it is not known whether a model stops there, since "
            f"{NO_CONFIG}"
        )
        return EndNote(sentence=sentence, fix=fix, level="note")
    sentence = (
        f"{where} ends in {token}, which is not among the tokens that stop a generation ({stops})"
    )
    return EndNote(sentence=sentence, fix=fix)


def _make_note_on_next_token(token: str, end: AnswerEnd, stops: Stops, fix: str) -> EndNote:
    """Return the note on an answer without a token at its end, before a message that begins with a
    token that is not a known stop token.
    """
    problem = f"is not among the tokens that stop a generation ({stops})"
    if not stops.source:
        problem = f"is not known to stop a generation ({NO_CONFIG})"
    sentence = (
        f"no token ends {end.subject} before another message; that message begins with {token}, "
        f"but this token {problem}, and is not trained there"
    )
    return EndNote(sentence=sentence, fix=fix)


def _make_note_at_last(end: AnswerEnd, stops: Stops, tokenizer: Tokenizer) -> Iterator[EndNote]:
    """Yield a note if EOS is not among the model's stop tokens, since the loader appends EOS to the
    answer at the end of a row.

    Args:
        end: how the template ends an answer.
        stops: the stop tokens of the stream.
        tokenizer: the tokenizer of the stream.
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
            fix=(
                f"if the model stops at {eos}, name it in the recipe: tokenizer.stop_tokens: "
                f"[{_quote(*stops.tokens, eos)}]"
            ),
        )


def describe_doubled_eos(encoding: Encoding, tokenizer: Tokenizer) -> str:
    """Return a sentence if the template prints EOS and then more text after an answer, since a
    second EOS is then appended: by the loader to a row, or by the conversion to each answer of a
    preference. Otherwise return "".
    """
    eos = tokenizer.template_variables.get("eos_token")
    for end in find_template_facts(encoding, tokenizer).ends:
        if isinstance(eos, str) and eos in end.ending and not end.ending.endswith(eos):
            effect = (
                f"the loader appends a second {eos} at the end of a row: there {eos} is trained "
                "twice, as in LLM-Foundry"
            )
            if encoding.kind == "preference":
                effect = f"convert appends a second {eos} to each answer: {eos} is trained twice"
            return (
                f"after {end.subject} the template prints {end.ending!r}, so the last token is not "
                f"{eos}, and {effect}"
            )
    return ""


def _find_first_token(text: str, tokens: Sequence[str]) -> str:
    """Return the longest token at the beginning of the text; "" if no token is there."""
    matching = [token for token in tokens if text.startswith(token)]
    return max(matching, key=len, default="")


def _find_last_token(text: str, tokens: Sequence[str]) -> str:
    """Return the token that ends furthest to the right in the text; "" if the text contains none of
    the tokens.
    """
    last_token = ""
    last_end = 0
    for token in tokens:
        start = text.rfind(token)
        if token and start >= 0 and start + len(token) > last_end:
            last_token = token
            last_end = start + len(token)
    return last_token


def _quote(*tokens: str) -> str:
    """Return the tokens as items of a YAML list, without repetitions: `"<|im_end|>", "</s>"`."""
    return ", ".join(f'"{token}"' for token in dict.fromkeys(tokens))
