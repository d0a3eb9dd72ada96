"""Preferences: a prompt with a chosen and a rejected answer, in the columns that ComposeRL's PairwisePreferenceStreamingDataset reads.

`prompt`, `chosen` and `rejected` are int64 ids (little endian) as plain bytes. Answers end in EOS and are stored without the prompt: that
dataset puts the prompt before each. Its collator joins prompt and chosen answer, prompt and rejected answer to one sequence, and cuts both
by as many tokens where they have more than max_seq_len together.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mdsmix.encode import chat
from mdsmix.encode.encoded import Encoded, encoded
from mdsmix.encode.labels import Lengths
from mdsmix.encode.pretrained import Tokenizer
from mdsmix.errors import MixRefused, RecipeError
from mdsmix.kinds.conversations import Conversations, template_variables
from mdsmix.kinds.finetuning import Finetuning, TurnRows
from mdsmix.kinds.kind import Piece
from mdsmix.ragged import Ragged
from mdsmix.recipe import Recipe, StreamSpec
from mdsmix.record import Conversation, Pair
from mdsmix.shapes.preference import REWARDS, Preference
from mdsmix.shards.shard_samples import Sample
from mdsmix.shards.token_ids import LAYOUTS, NO_IDS, Ids, Tokens, Turn, ids_of
from mdsmix.training.loader_keys import DATASET_KEYS, OtherLoader

SIDES = ("prompt", "chosen", "rejected")


def _ids(sample: Sample, longest: int | None = None) -> list[Ids]:
    return [ids_of(sample[side], "<i8")[:longest] for side in SIDES]


def _turns(sample: Sample, _: str) -> list[Turn]:
    prompt, chosen, rejected = _ids(sample)
    return [Turn(prompt, chosen), Turn(NO_IDS, rejected)]


LAYOUTS[SIDES] = _turns


def row(sample: Sample, max_seq_len: int) -> dict[str, Any]:
    """A stored sample as `answers` (two int64 arrays, chosen and rejected, each behind the prompt), `prompt_len`, and its rewards. Prompt
    and answers are cut to max_seq_len first."""
    prompt, *answers = _ids(sample, max_seq_len)
    made = {"prompt_len": len(prompt), **{key: sample[key] for key in REWARDS if key in sample}}
    return made | {"answers": [np.concatenate([prompt, answer]) for answer in answers]}


def batch(
    rows: Sequence[Mapping[str, Any]], max_seq_len: int, eos: int, fill: int
) -> dict[str, NDArray[Any]]:
    """The batch of rows, chosen answer and rejected answer one behind the other, each with its prompt.

    Returns `input_ids`, `attention_mask` and `sequence_id` (0 chosen, 1 rejected, -1 padding), int64 [rows, max_seq_len]; `prompt_len`,
    `chosen_len`, `rejected_len`, int64 [rows]; rewards, float32 [rows]. MixRefused where only some rows have rewards.
    """
    if any(each.keys() != rows[0].keys() for each in rows):
        raise MixRefused(
            "a batch holds preferences with rewards and others without: convert all streams of the run with them, or none."
        )
    ids, lengths = np.full((len(rows), max_seq_len), fill, np.int64), np.zeros((2, len(rows)), int)
    places = np.full_like(ids, -1)
    for number, each in enumerate(rows):
        beyond = max(0, sum(map(len, each["answers"])) - max_seq_len)
        answers = [_cut(answer, -(-beyond // 2), eos) for answer in each["answers"]]
        lengths[:, number] = [*map(len, answers)]
        ids[number, : lengths[:, number].sum()] = np.concatenate(answers)
        places[number, : lengths[:, number].sum()] = np.repeat([0, 1], lengths[:, number])
    made = {"input_ids": ids, "attention_mask": (places >= 0).astype(np.int64)}
    made |= {"chosen_len": lengths[0], "rejected_len": lengths[1], "sequence_id": places}
    for key in rows[0].keys() - {"answers"}:
        made[key] = np.array([each[key] for each in rows], np.float32 if key in REWARDS else int)
    return made


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
        "answers_unlike": "One answer of a preference is a text, and the other a list of messages.",
        "prompts_differ": "The chat template prints another prompt before each answer of a preference.",
        "bad_reward": "A reward is no number, or is missing where the recipe names its field.",
    }
    loader = OtherLoader(
        name="pairwise_preference",
        whose="ComposeRL",
        keys=DATASET_KEYS,
        columns=dict.fromkeys(SIDES, "bytes"),
        row=row,
        batch=batch,
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
        """One sample per preference: columns `prompt`, `chosen`, `rejected` (bytes of int64 ids), and rewards (float64) where the recipe
        names their fields. The prompt counts twice among the tokens, since the model sees it twice."""
        given: Sequence[Preference] = conversations
        halves, marked = self._halves(given)
        kept, rejected = dict[int, tuple[Ids, Ids, Ids]](), dict[int, str]()
        for at, each in enumerate(given):
            chosen, other = halves[2 * at], halves[2 * at + 1]
            if why := self._fault(each, chosen, other):
                rejected[at] = why
            else:
                kept[at] = *chosen, other.response
        rows = [Ragged.of([sides[number] for sides in kept.values()], "<i8") for number in range(3)]
        columns = {
            side: Ragged(ids.values.view(np.uint8), ids.offsets * 8)
            for side, ids in zip(SIDES, rows, strict=True)
        }
        if self._has_rewards:
            for number, key in enumerate(REWARDS):
                columns[key] = Ragged.of(
                    [given[at].rewards[number : number + 1] for at in kept], np.float64
                )
        unread = 0 if self._has_rewards else sum(bool(given[at].rewards) for at in kept)
        answers = rows[1].lengths + rows[2].lengths
        beyond = np.maximum(2 * rows[0].lengths + answers - self.encoding.max_seq_len, 0)
        return encoded(
            columns,
            [rows[0], *rows],
            [*kept],
            loss_tokens=int(np.maximum(answers - beyond, 0).sum()),
            cut=beyond,
            specials=len(marked),
            unread=dict.fromkeys(REWARDS, unread),
            rejected=rejected,
        )

    def _halves(self, given: Sequence[Preference]) -> tuple[dict[int, Any], set[int]]:
        """The turns of all halves, and the positions of preferences that hold a special token. Preference i has its chosen half at 2 i and
        its rejected half at 2 i + 1: a turn, or the reason code of a half that gives none."""
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
        return found, marked

    def _fault(self, given: Preference, chosen: Turn | str, other: Turn | str) -> str:
        """The reason code of a preference that cannot be trained on; empty where it can. `chosen`, `other`: its halves of `_halves`."""
        if self._has_rewards and not given.rewards:
            return "bad_reward"
        if isinstance(chosen, str) or isinstance(other, str):
            return chosen if isinstance(chosen, str) else str(other)
        if not np.array_equal(chosen.prompt, other.prompt):
            return "prompts_differ"
        if not len(chosen.prompt):
            return "empty_prompt"
        least = min(len(chosen.response), len(other.response))
        whole = sum(map(len, (*chosen, *other)))
        if not least:
            return "empty_response"
        # The loader cuts equally many tokens off both answers.
        return "no_loss_tokens" if -((self.encoding.max_seq_len - whole) // 2) >= least else ""

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
        return np.add.reduceat(tokens.responses, tokens.turns[:-1])

    def pieces(self, sample: Sample) -> Iterator[Piece]:
        """The prompt, untrained; then the chosen and the rejected answer, trained."""
        yield from zip(map(np.ndarray.tolist, _ids(sample)), (False, True, True), strict=True)
