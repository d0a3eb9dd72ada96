"""Preferences: a prompt with a chosen and a rejected answer, in the columns that ComposeRL's
PairwisePreferenceStreamingDataset reads.

`prompt`, `chosen` and `rejected` are int64 ids (little endian) as plain bytes. Answers end in EOS
and are stored without the prompt: that dataset puts the prompt before each, and cuts both sides to
max_seq_len. Its collator joins the two sides to one sequence. If they have more than max_seq_len
tokens together, it takes equally many tokens off each (`cut_of`).
`tests/with_torch/test_preferences.py` compares batches with those recorded from ComposeRL.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mdsmix.encode import chat
from mdsmix.encode.encoded import Encoded, make_encoded
from mdsmix.encode.labels import Lengths
from mdsmix.errors import MixRefused, RecipeError
from mdsmix.foundry_yaml.loader_keys import DATASET_KEYS, ExtraLoader
from mdsmix.kinds.conversations import Conversations, template_variables
from mdsmix.kinds.finetuning import Finetuning, TurnRows, placeholders_in
from mdsmix.kinds.kind import Piece
from mdsmix.ragged import Ragged
from mdsmix.recipe import Recipe, StreamSpec
from mdsmix.record import Conversation, Pair, RecordRefused
from mdsmix.shapes.preference import REWARDS, Preference
from mdsmix.shards.shard_samples import Sample
from mdsmix.shards.token_ids import LAYOUTS, NO_IDS, Ids, Tokens, Turn, decode_ids
from mdsmix.tokenizer.card import Tokenizer

SIDES = ("prompt", "chosen", "rejected")


def _texts(half: Pair | Conversation) -> Sequence[str]:
    return half if isinstance(half, Pair) else half.texts


def _ids(sample: Sample, longest: int | None = None) -> list[Ids]:
    return [decode_ids(sample[side], "<i8")[:longest] for side in SIDES]


def _turns(sample: Sample, _: str) -> list[Turn]:
    prompt, chosen, rejected = _ids(sample)
    return [Turn(prompt, chosen), Turn(NO_IDS, rejected)]


LAYOUTS[SIDES] = _turns


def row(sample: Sample, max_seq_len: int) -> dict[str, Any]:
    """Return a stored sample as `answers` (two int64 arrays, chosen and rejected, each with the
    prompt before it, as many tokens as a batch holds of them), `prompt_len`, and its rewards.

    Raises MixRefused if nothing of an answer and its prompt is left.
    """
    prompt, *answers = _ids(sample)
    prompt = prompt[:max_seq_len]
    sides = [np.concatenate([prompt, answer])[:max_seq_len] for answer in answers]
    cut = int(cut_of(sum(map(len, sides)), max_seq_len))
    if min(map(len, sides)) <= cut:
        raise MixRefused(
            f"max_seq_len: {max_seq_len} leaves nothing of an answer: convert the stream for this max_seq_len, which leaves such records out."
        )
    made = {"prompt_len": len(prompt), **{key: sample[key] for key in REWARDS if key in sample}}
    return made | {"answers": [side[: len(side) - cut] for side in sides]}


def cut_of(length: Any, max_seq_len: int) -> NDArray[np.int64]:
    """Return how many tokens ComposeRL's collator takes off each answer.

    Args:
        length: tokens of both answers together, each with its prompt; an int or an array.

    >>> cut_of([96, 97, 98, 99], 96).tolist()
    [0, 2, 2, 3]
    """
    beyond = np.asarray(length, np.int64) - max_seq_len
    return np.where(beyond > 0, (beyond + 1) // 2 + 1, 0)


def batch(
    rows: Sequence[Mapping[str, Any]], max_seq_len: int, eos: int, fill: int
) -> dict[str, NDArray[Any]]:
    """Return the batch of rows as ComposeRL's collator makes it: the chosen answer, then the
    rejected answer, each with its prompt before it and EOS as its last token.

    Returns: `input_ids` and `sequence_id` (0 chosen, 1 rejected, -1 padding), int64 [rows,
    max_seq_len]; `attention_mask`, bool [rows, max_seq_len], false at every token equal to `fill`,
    which may be EOS; `prompt_len`, `chosen_len`, `rejected_len`, int64 [rows]; rewards, float32
    [rows, 1].

    Raises MixRefused if only some rows have rewards.
    """
    if any(each.keys() != rows[0].keys() for each in rows):
        raise MixRefused(
            "a batch holds preferences with rewards and others without: convert all streams of the run with them, or none."
        )
    ids, lengths = np.full((len(rows), max_seq_len), fill, np.int64), np.zeros((2, len(rows)), int)
    places = np.full_like(ids, -1)
    for number, each in enumerate(rows):
        lengths[:, number] = [*map(len, each["answers"])]
        ends = lengths[:, number].cumsum()
        ids[number, : ends[1]] = np.concatenate(each["answers"])
        ids[number, ends - 1] = eos
        places[number, : ends[1]] = np.repeat([0, 1], lengths[:, number])
    made = {"input_ids": ids, "attention_mask": ids != fill}
    made |= {"chosen_len": lengths[0], "rejected_len": lengths[1], "sequence_id": places}
    made["prompt_len"] = np.array([each["prompt_len"] for each in rows])
    for key in rows[0].keys() & {*REWARDS}:
        made[key] = np.array([[each[key]] for each in rows], np.float32)
    return made


def _common_length(rows: Sequence[Ids]) -> int:
    """Return how many ids all of the rows begin with alike."""
    shortest = min(map(len, rows))
    firsts = np.stack([row[:shortest] for row in rows])
    differs = (firsts != firsts[0]).any(axis=0)
    return int(differs.argmax()) if differs.any() else shortest


class Preferences(Conversations):
    name = "preferences"
    version = 2
    word = "preference"
    reads = Preference
    called = ("preference",)
    has_targets = False
    splits_records = False
    reasons: ClassVar[Mapping[str, str]] = {
        "prompts_differ": "The chat template prints another conversation before each answer of a preference; the detail holds both prompts where they part.",
        "bad_reward": "A reward is no number, or is missing where the recipe names its field.",
    }
    loader = ExtraLoader(
        name="pairwise_preference",
        whose="ComposeRL",
        keys=DATASET_KEYS,
        columns=dict.fromkeys(SIDES, "bytes"),
        row=row,
        batch=batch,
        multiple=2,
    )

    @classmethod
    def settings(cls, recipe: Recipe, stream: StreamSpec, tokenizer: Tokenizer) -> dict[str, Any]:
        if tokenizer.eos_id is None:
            raise RecipeError(
                f"stream {stream.name}: an answer ends in EOS, and the tokenizer {tokenizer.name} has none: name one in tokenizer.kwargs (eos_token)."
            )
        named = stream.source.fields if stream.source else {}
        return {
            "columns": {
                **cls.loader.columns,
                **{key: "float64" for key in REWARDS if key in named},
            },
            "target_prompts": "none",
            "target_responses": "last",
            "rewritten_history": "last",
            "template": template_variables(recipe, tokenizer),
        }

    @classmethod
    def contradictions(cls, recipe: Recipe, stream: StreamSpec) -> Iterator[str]:
        named = [key for key in REWARDS if stream.source and key in stream.source.fields]
        if len(named) == 1:
            yield f"source.{named[0]} stands alone: name the fields of both rewards, or of none."
        if stream.pack or not recipe.decoder_only_format:
            yield "is of preferences, each a row of its own and for decoder-only models alone: leave pack and decoder_only_format out."
        yield from super(Finetuning, cls).contradictions(recipe, stream)

    def encode(self, conversations: Sequence[Any]) -> Encoded:
        """One sample per preference: columns `prompt`, `chosen`, `rejected` (bytes of int64 ids),
        and rewards (float64) where the recipe names their fields. The prompt counts twice among the
        tokens, since the model sees it twice.
        """
        given: Sequence[Preference] = conversations
        halves, marked = self._halves(given)
        kept, rejected = dict[int, tuple[Ids, Ids, Ids]](), dict[int, str]()
        for at, each in enumerate(given):
            chosen, other = halves[2 * at], halves[2 * at + 1]
            if why := self._fault(each, chosen, other):
                rejected[at] = why
            else:
                kept[at] = *chosen, other.response
        rows = [
            Ragged.from_rows([sides[number] for sides in kept.values()], "<i8")
            for number in range(3)
        ]
        prompts, room = rows[0].lengths, self.encoding.max_seq_len - rows[0].lengths
        # The dataset cuts each side before the collator sees it. If max_seq_len is not a multiple
        # of 8, it fails on a side that is longer (it cuts bytes there), so such a side is not
        # stored.
        whole = rows[1].lengths + rows[2].lengths
        rows[1:] = [answers.first(room) for answers in rows[1:]]
        answers = rows[1].lengths + rows[2].lengths
        cut = 2 * cut_of(2 * prompts + answers, self.encoding.max_seq_len)
        columns = {
            side: Ragged(ids.values.view(np.uint8), ids.offsets * 8)
            for side, ids in zip(SIDES, rows, strict=True)
        }
        if self._has_rewards:
            for number, key in enumerate(REWARDS):
                columns[key] = Ragged.from_rows(
                    [given[at].rewards[number : number + 1] for at in kept], np.float64
                )
        rewards = 0 if self._has_rewards else sum(bool(given[at].rewards) for at in kept)
        unread = Counter(dict.fromkeys(REWARDS, rewards))
        for each in given:
            if isinstance(each.chosen, Conversation):  # both answers have the record's variables
                unread.update(self.variables_unread(each.chosen))
        texts = (text for each in given for half in each[:2] for text in _texts(half))
        wholes = ("\n".join([*_texts(each.chosen), *_texts(each.rejected)]) for each in given)
        return make_encoded(
            columns,
            [rows[0], *rows],
            [*kept],
            loss_tokens=int((answers - cut).sum()),
            lost_tokens=int((whole - answers).sum()),
            cut=cut,
            truncated=whole - answers,
            specials=len(marked),
            unread=unread,
            placeholders=placeholders_in(texts, wholes),
            rejected=rejected,
        )

    def _halves(self, given: Sequence[Preference]) -> tuple[dict[int, Any], set[int]]:
        """The turns of all halves, and the positions of preferences that hold a special token.
        Preference i has its chosen half at 2 i and its rejected half at 2 i + 1: a turn, or the
        reason code of a half that gives none.
        """
        halves: list[Any] = [half for each in given for half in each[:2]]
        found, marked = dict[int, Any](), set[int]()
        ways: tuple[Any, ...] = ((Pair, self.of_pairs), (Conversation, self.render))
        for type_of, rows_of in ways:
            numbers = [number for number, half in enumerate(halves) if isinstance(half, type_of)]
            rows: TurnRows = rows_of([halves[number] for number in numbers])
            found |= {numbers[at]: why for at, why in rows.rejected.items()}
            for row, at in enumerate(rows.positions):
                ended = self._ended(rows.turns.ids[2 * row + 1])
                found[numbers[at]] = Turn(rows.turns.ids[2 * row], ended)
            marked |= {numbers[at] // 2 for at in rows.marked}
        self._share_prompts(given, found)
        return found, marked

    def _share_prompts(self, given: Sequence[Preference], halves: dict[int, Any]) -> None:
        """Replace the halves of each preference whose prompts differ: by turns with one prompt if
        they differ only in what the template prints for the answer, else by a reason code.

        The prompt is the common beginning in tokens of both whole texts, so that no token is lost
        or changed. `halves` are those of `_halves`.
        """
        numbers, texts = list[int](), list[str]()
        for at, each in enumerate(given):
            chosen, other = halves[2 * at], halves[2 * at + 1]
            if isinstance(chosen, str) or isinstance(other, str):
                continue
            if np.array_equal(chosen.prompt, other.prompt):
                continue
            try:
                texts += self._parted(each)
            except RecordRefused as refused:
                halves[2 * at] = refused.why
            else:
                numbers.append(2 * at)
        ids = self.backend.encode(texts, match_special=True) if texts else ()
        for place, number in enumerate(numbers):
            start, *sides = [ids[3 * place + row] for row in range(3)]
            end = _common_length([start, *sides])
            for side, whole in enumerate(sides):
                halves[number + side] = Turn(whole[:end], self._ended(whole[end:]))

    def _parted(self, given: Preference) -> list[str]:
        """Return the text that both prompts begin with, and the whole text of each side.

        Raises RecordRefused (prompts_differ) if the prompts part before the answer begins.
        """
        prompts, wholes, histories = list[str](), list[str](), list[str]()
        # Both texts of a pair have the pair's prompt: only those of conversations can differ.
        for half in [half for half in given[:2] if isinstance(half, Conversation)]:
            [[(prompt, answer)]] = self.rows_of(half, Counter())
            prompts.append(prompt)
            wholes.append(prompt + answer)
            template, asked = self.prepared(half, Counter())
            histories.append(template.render(asked.messages[:-1], False, asked.tools))
        start = chat.cut_open_word(chat.find_common_start(prompts), wholes, self.words)
        if all(map(start.startswith, histories)):
            return [start, *wholes]
        around = chat.slice_around_difference(prompts)
        before = {
            f"before_{side}": text[around] for side, text in zip(SIDES[1:], prompts, strict=True)
        }
        raise RecordRefused("prompts_differ", **before)

    def _fault(self, given: Preference, chosen: Turn | str, other: Turn | str) -> str:
        """The reason code of a preference that cannot be trained on; empty where it can. `chosen`,
        `other`: its halves of `_halves`.
        """
        if self._has_rewards and not given.rewards:
            return "bad_reward"
        if isinstance(chosen, str) or isinstance(other, str):
            return chosen if isinstance(chosen, str) else str(other)
        if not len(chosen.prompt):
            return "empty_prompt"
        if not (len(chosen.response) and len(other.response)):
            return "empty_response"
        longest = self.encoding.max_seq_len
        sides = [min(sum(map(len, side)), longest) for side in (chosen, other)]
        left = min(sides) - int(cut_of(sum(sides), longest))
        return "no_loss_tokens" if left <= len(chosen.prompt) else ""

    @property
    def _has_rewards(self) -> bool:
        return REWARDS[0] in self.encoding.columns

    def _ended(self, answer: Ids) -> Ids:
        """The answer with a final EOS; an empty answer stays empty."""
        is_open = len(answer) and answer[-1] != self.tokenizer.eos_id
        return np.append(answer, self.tokenizer.eos_id or 0) if is_open else answer

    def rows_of(self, conversation: Conversation, unread: Counter[str]) -> list[list[chat.Turn]]:
        """One row of one turn: as prompt all text up to the last answer, and that answer."""
        *before, (prompt, answer) = super().rows_of(conversation, unread)[-1]
        return [[("".join(chain(*before, [prompt])), answer)]]

    def losses(self, tokens: Tokens, eos: int | None) -> Lengths:
        return np.add.reduceat(tokens.responses, tokens.turns[:-1]) - self.cut(tokens)

    def cut(self, tokens: Tokens) -> Lengths:
        prompts = np.add.reduceat(tokens.prompts, tokens.turns[:-1])
        answers = np.add.reduceat(tokens.responses, tokens.turns[:-1])
        return 2 * cut_of(2 * prompts + answers, self.encoding.max_seq_len)

    def pieces(self, sample: Sample) -> Iterator[Piece]:
        """The prompt, untrained; then the chosen and the rejected answer, trained."""
        yield from zip(map(np.ndarray.tolist, _ids(sample)), (False, True, True), strict=True)
