"""Preferences: a prompt with a chosen and a rejected answer, in the columns that ComposeRL's PairwisePreferenceStreamingDataset reads.

`prompt`, `chosen` and `rejected` are int64 ids (little endian) as plain bytes. The answers stand without the prompt, which that dataset puts
before each, and end in EOS. Its collator joins both, and cuts both where they have more than max_seq_len tokens together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mdsmix.encode import chat
from mdsmix.encode.encoded import Encoded, Rejected, encoded
from mdsmix.encode.labels import Lengths
from mdsmix.encode.pretrained import Tokenizer
from mdsmix.errors import MixRefused
from mdsmix.kinds.conversations import Conversations
from mdsmix.kinds.finetuning import Finetuning, TurnRows
from mdsmix.kinds.kind import Piece
from mdsmix.ragged import Ragged
from mdsmix.recipe import Recipe, StreamSpec
from mdsmix.record import Conversation, Pair
from mdsmix.shapes.preference import REWARDS, Preference
from mdsmix.shards.token_ids import LAYOUTS, NO_IDS, Ids, Tokens, Turn, ids_of
from mdsmix.training.loader_keys import DatasetKeys, OtherLoader

SIDES = ("prompt", "chosen", "rejected")


def _ids(sample: Mapping[str, Any], longest: int | None = None) -> list[Ids]:
    return [ids_of(sample[side], "<i8")[:longest] for side in SIDES]


def _turns(sample: Mapping[str, Any], _: str) -> list[Turn]:
    prompt, chosen, rejected = _ids(sample)
    return [Turn(prompt, chosen), Turn(NO_IDS, rejected)]


LAYOUTS[SIDES] = _turns


def row(sample: Mapping[str, Any], max_seq_len: int) -> dict[str, Any]:
    """Both answers behind the prompt, int64; its length; the rewards. Each side is cut to max_seq_len first."""
    prompt, *answers = _ids(sample, max_seq_len)
    made = {"prompt_len": len(prompt), **{key: sample[key] for key in REWARDS if key in sample}}
    return made | {"answers": [np.concatenate([prompt, answer]) for answer in answers]}


def batch(
    rows: Sequence[Mapping[str, Any]], max_seq_len: int, eos: int, fill: int
) -> dict[str, NDArray[Any]]:
    """Chosen and rejected answer of each row one behind the other: `input_ids`, `attention_mask` and `sequence_id` (0, 1, and -1 for
    padding), int64 [rows, max_seq_len]; `prompt_len`, `chosen_len`, `rejected_len`, int64 [rows]; rewards, float32 [rows]."""
    if any(each.keys() != rows[0].keys() for each in rows):
        raise MixRefused(
            "a batch holds preferences with rewards and others without: convert all streams of the run with them, or none."
        )
    ids, lengths = np.full((len(rows), max_seq_len), fill, np.int64), list[list[int]]()
    places = np.full_like(ids, -1)
    for number, each in enumerate(rows):
        beyond = max(0, sum(map(len, each["answers"])) - max_seq_len)
        answers = [_cut(answer, -(-beyond // 2), eos) for answer in each["answers"]]
        lengths.append([len(answer) for answer in answers])
        both = np.concatenate(answers)
        ids[number, : len(both)] = both
        places[number, : len(both)] = np.repeat([0, 1], lengths[-1])
    sizes = dict(zip(("chosen_len", "rejected_len"), np.array(lengths).T.copy(), strict=True))
    made = {"input_ids": ids, "attention_mask": (places >= 0).astype(np.int64), **sizes}
    said = {key: np.array([each[key] for each in rows]) for key in rows[0] if key != "answers"}
    rewards = {key: said.pop(key).astype(np.float32) for key in REWARDS if key in said}
    return {**made, "sequence_id": places, **said, **rewards}


def _cut(answer: Ids, count: int, eos: int) -> Ids:
    kept = answer[: max(1, len(answer) - count)].copy()
    kept[-1] = eos if count else kept[-1]
    return kept


class Preferences(Conversations):
    name = "preferences"
    word = "preference"
    reads = Preference
    called = ("preference",)
    has_targets = False
    splits_records = False
    reasons: ClassVar[Mapping[str, str]] = {
        "answers_unlike": "One answer of a preference is a text, and the other messages.",
        "prompts_differ": "The chat template prints another prompt before each answer of a preference.",
        "bad_reward": "A reward is no number, or is missing where the recipe names its field.",
    }
    loader = OtherLoader(
        name="pairwise_preference",
        whose="ComposeRL",
        keys=DatasetKeys,
        columns=dict.fromkeys(SIDES, "bytes"),
        row=row,
        batch=batch,
    )

    @classmethod
    def columns(cls, recipe: Recipe, stream: StreamSpec, tokenizer: Tokenizer) -> dict[str, str]:
        named = stream.source.fields if stream.source else {}
        return {**cls.loader.columns, **{key: "float64" for key in REWARDS if key in named}}

    @classmethod
    def settings(
        cls, recipe: Recipe, stream: StreamSpec, tokenizer: Tokenizer
    ) -> Mapping[str, Any]:
        policies = {"target_prompts": "none", "target_responses": "last"}
        template = dict(recipe.tokenizer.template)
        return {**policies, "rewritten_history": "last", "template": template}

    @classmethod
    def contradictions(cls, recipe: Recipe, stream: StreamSpec) -> Iterator[str]:
        named = [key for key in REWARDS if stream.source and key in stream.source.fields]
        if len(named) == 1:
            yield f"source.{named[0]} stands alone: name the fields of both rewards, or of none."
        if stream.pack or not recipe.decoder_only_format:
            yield "is of preferences, whose two answers are a row of their own for a decoder: leave pack and decoder_only_format out."
        yield from super(Finetuning, cls).contradictions(recipe, stream)

    @classmethod
    def lacking(cls, recipe: Recipe, stream: StreamSpec, tokenizer: Tokenizer) -> Iterator[str]:
        yield from super().lacking(recipe, stream, tokenizer)
        if tokenizer.eos_id is None:
            yield f"stream {stream.name}: an answer ends in EOS, and the tokenizer {tokenizer.name} has none: name one in tokenizer.kwargs (eos_token)."

    def encode(self, conversations: Sequence[Any]) -> Encoded:
        """Columns `prompt`, `chosen`, `rejected` (uint8 of int64 ids) and the rewards that the recipe names, a row a preference. The prompt
        counts twice among the tokens, as the model sees it."""
        given: Sequence[Preference] = conversations
        halves, rejected, marked = self._tokenized(given)
        kept = dict[int, tuple[Ids, Ids, Ids]]()
        for at in range(len(given)):
            if at not in rejected:
                (prompt, chosen), (other, worse) = halves[2 * at], halves[2 * at + 1]
                if not np.array_equal(prompt, other):
                    rejected[at] = Rejected(at, "prompts_differ", False)
                elif why := self._unfit(*map(len, (prompt, chosen, worse))):
                    rejected[at] = Rejected(at, why, filtered=True)
                else:
                    kept[at] = prompt, chosen, worse
        rows = [Ragged.of([sides[number] for sides in kept.values()], "<i8") for number in range(3)]
        parts = [Ragged(ids.values.view(np.uint8), ids.offsets * 8) for ids in rows]
        columns, unread = dict(zip(SIDES, parts, strict=True)), Counter[str]()
        for number, key in enumerate(REWARDS):
            rewards = [given[at].rewards[number:][:1] for at in kept]
            if key in self.encoding.columns:
                columns[key] = Ragged.of(rewards, np.float64)
            else:
                unread[key] += sum(map(len, rewards))
        both = rows[1].lengths + rows[2].lengths
        beyond = np.maximum(2 * rows[0].lengths + both - self.encoding.max_seq_len, 0)
        losses = int(np.maximum(both - beyond, 0).sum())
        made = encoded(columns, [rows[0], *rows], [*kept], losses, cut=beyond, unread=+unread)
        totals = replace(made.totals, specials=len(marked))
        return replace(made, rejected=[*rejected.values()], totals=totals)

    def _tokenized(
        self, given: Sequence[Preference]
    ) -> tuple[dict[int, tuple[Ids, Ids]], dict[int, Rejected], set[int]]:
        """Prompt and answer of both halves of each, by twice its position and one more; those that are bad; those that hold a special token."""
        wants = REWARDS[0] in self.encoding.columns
        bad = (at for at, each in enumerate(given) if wants and not each.rewards)
        rejected = {at: Rejected(at, "bad_reward", False) for at in bad}
        halves: list[Any] = [half for each in given for half in each[:2]]
        found, marked = dict[int, tuple[Ids, Ids]](), set[int]()
        ways: tuple[Any, ...] = ((Pair, self.of_pairs), (Conversation, self.render))
        for type_of, rows_of in ways:
            numbers = [number for number, half in enumerate(halves) if isinstance(half, type_of)]
            rows: TurnRows = rows_of([halves[number] for number in numbers])
            for row, at in enumerate(rows.positions):
                ids = rows.turns.ids
                found[numbers[at]] = ids[2 * row], self._ended(ids[2 * row + 1])
            for each in rows.rejected:
                at = numbers[each.position] // 2
                rejected.setdefault(at, replace(each, position=at))
            marked |= {numbers[at] // 2 for at in rows.marked}
        return found, rejected, marked

    def _ended(self, answer: Ids) -> Ids:
        """An answer that says something, with EOS."""
        is_open = len(answer) and answer[-1] != self.tokenizer.eos_id
        return np.append(answer, self.tokenizer.eos_id or 0) if is_open else answer

    def rows_of(self, conversation: Conversation, unread: Counter[str]) -> list[list[chat.Turn]]:
        """One row of one turn: all text up to where the model begins its last answer, and that answer."""
        *before, (prompt, answer) = super().rows_of(conversation, unread)[-1]
        return [[("".join(chain(*before, [prompt])), answer)]]

    def _unfit(self, prompt: int, chosen: int, rejected: int) -> str:
        """Why nothing can be learned from lengths like these; empty where something can. The loader cuts as much of either answer."""
        beyond = 2 * prompt + chosen + rejected - self.encoding.max_seq_len
        if not prompt or not (least := min(chosen, rejected)):
            return "empty_response" if prompt else "empty_prompt"
        return "no_loss_tokens" if -(-beyond // 2) >= least else ""

    def losses(self, tokens: Tokens, eos: int | None) -> Lengths:
        return np.add.reduceat(tokens.responses, tokens.turns[:-1])

    def pieces(self, sample: Mapping[str, Any]) -> Iterator[Piece]:
        """The prompt, then both answers."""
        yield from zip(map(np.ndarray.tolist, _ids(sample)), (False, True, True), strict=True)
