"""Preferences: a prompt with a chosen and a rejected answer, in the columns that ComposeRL's
PairwisePreferenceStreamingDataset reads (`preference_loader.py`).

`prompt`, `chosen` and `rejected` are int64 ids (little endian) as plain bytes. Answers end in EOS
and are stored without the prompt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain
from typing import Any, ClassVar, NamedTuple

import numpy as np

from mdsmix.encode import chat
from mdsmix.encode.encoded import Encoded, make_encoded
from mdsmix.encode.labels import Lengths
from mdsmix.errors import RecipeError
from mdsmix.kinds.finetuning import WINDOW_BYTES
from mdsmix.kinds.kind import Piece
from mdsmix.kinds.preference_loader import PREFERENCE_LOADER, cut_per_answer
from mdsmix.kinds.template_kind import TemplateKind, template_variables
from mdsmix.kinds.turn_renderer import TurnRenderer
from mdsmix.kinds.turn_rows import TurnRows, count_placeholders, tokenize_pairs
from mdsmix.ragged import Ragged
from mdsmix.recipe import Recipe, StreamSpec
from mdsmix.record import Conversation, Pair, RecordRefused
from mdsmix.shapes.preference import REWARDS, Preference
from mdsmix.shards.shard_samples import Sample
from mdsmix.shards.token_ids import PREFERENCE_COLUMNS, Ids, Tokens, Turn, decode_preference
from mdsmix.tokenizer.card import Tokenizer

Half = Turn | str
"""The ids of a preference's prompt and of one of its answers, the chosen or the rejected one. A str
is a reason code instead, such as `template_error`: the preference is refused.
"""


class Halves(NamedTuple):
    """Both halves of a preference: its prompt with the chosen answer, and with the rejected one."""

    chosen: Half
    rejected: Half


class StoredIds(NamedTuple):
    """The ids of a preference that can be used for training."""

    prompt: Ids
    chosen: Ids
    rejected: Ids


class LastAnswerRenderer(TurnRenderer):
    """Renders a conversation as one turn: all text up to its last answer, and that answer."""

    def rows_of(self, conversation: Conversation, unread: Counter[str]) -> list[list[chat.Turn]]:
        # The parent's last row ends with the last answer. The prompt of the one turn is the text of
        # all turns before that answer, and its own prompt.
        *before, (prompt, answer) = super().rows_of(conversation, unread)[-1]
        return [[("".join(chain(*before, [prompt])), answer)]]

    def whole_texts(self, preference: Preference) -> list[str]:
        """Return three strings: the text that both prompts begin with, then the whole text of the
        chosen side and of the rejected side.

        Raises RecordRefused (prompts_differ) if the prompts differ before the answer begins.
        """
        prompts = list[str]()
        wholes = list[str]()
        histories = list[str]()
        for half in (preference.chosen, preference.rejected):
            # The two pairs of a preference have one prompt: only conversations can differ.
            if not isinstance(half, Conversation):
                continue
            [[(prompt, answer)]] = self.rows_of(half, Counter())
            prompts.append(prompt)
            wholes.append(prompt + answer)
            template, conversation = self.prepare(half, Counter())
            history = template.render(conversation.messages[:-1], False, conversation.tools)
            histories.append(history)
        start = chat.cut_open_word(chat.find_common_start(prompts), wholes, self.words)
        if all(start.startswith(history) for history in histories):
            return [start, *wholes]
        around = chat.slice_around_difference(prompts)
        chosen_prompt, rejected_prompt = prompts
        raise RecordRefused(
            "prompts_differ",
            before_chosen=chosen_prompt[around],
            before_rejected=rejected_prompt[around],
        )


class Preferences(TemplateKind):
    """The kind of preferences. A sample has the ids of a prompt, of the chosen answer and of the
    rejected answer, in the columns of ComposeRL.
    """

    name = "preferences"
    version = 2
    word = "preference"
    reads = Preference
    key_groups = ("preference",)
    window_bytes = WINDOW_BYTES
    has_targets = False
    keeps_long = True
    loader = PREFERENCE_LOADER
    reasons: ClassVar[Mapping[str, str]] = {
        "answers_unlike": (
            "One answer of a preference is a text, and the other a message or a list of messages."
        ),
        "no_prompt": "A preference has no prompt, and its two texts have no common beginning.",
        "prompts_differ": (
            "The chat template prints another conversation before each answer of a preference; the "
            "detail shows both prompts where they differ."
        ),
        "bad_reward": (
            "A reward is not a number, or is missing although the recipe names its field."
        ),
    }

    @classmethod
    def settings(cls, recipe: Recipe, stream: StreamSpec, tokenizer: Tokenizer) -> dict[str, Any]:
        """Return the fields of Encoding that this kind sets. Raises RecipeError if the tokenizer
        has no EOS, since each answer ends in EOS.
        """
        if tokenizer.eos_id is None:
            raise RecipeError(
                f"stream {stream.name}: an answer ends in EOS, but the tokenizer {tokenizer.name} "
                "has none: name one in tokenizer.kwargs (eos_token)."
            )
        rewards = dict.fromkeys(_rewards_of(stream), "float64")
        return {
            "columns": {**PREFERENCE_LOADER.columns, **rewards},
            "target_prompts": "none",
            "target_responses": "last",
            "rewritten_history": "last",
            "template": template_variables(recipe, tokenizer),
        }

    @classmethod
    def contradictions(cls, recipe: Recipe, stream: StreamSpec) -> Iterator[str]:
        """Yield a sentence for each wrong or contradictory setting, among them those that only
        concern preferences, such as their rewards.
        """
        rewards = _rewards_of(stream)
        if len(rewards) == 1:
            yield (
                f"source.{rewards[0]} is set without the other reward: name the fields of both "
                "rewards, or of none."
            )
        if stream.pack or not recipe.decoder_only_format:
            yield (
                "has preferences, which cannot be packed and are for decoder-only models only: "
                "remove pack and decoder_only_format."
            )
        yield from super().contradictions(recipe, stream)

    @cached_property
    def renderer(self) -> LastAnswerRenderer:
        return LastAnswerRenderer(self.encoding, self.tokenizer, self.backend)

    def encode(self, preferences: Sequence[Preference]) -> Encoded:
        """Encode each preference to one sample: columns `prompt`, `chosen`, `rejected` (bytes of
        int64 ids), and rewards (float64) if the recipe names their fields. The prompt counts twice
        among the tokens, since the model sees it twice.
        """
        # Tokenize both halves of each preference, after the same prompt.
        halves, with_specials = self._tokenize(preferences)
        self._share_prompts(preferences, halves)
        # Select the preferences that can be used for training.
        trainable = dict[int, StoredIds]()
        faults = dict[int, str]()
        for position, preference in enumerate(preferences):
            verdict = self._judge(preference, halves[position])
            if isinstance(verdict, str):
                faults[position] = verdict
            else:
                trainable[position] = verdict
        # Truncate the answers here, as ComposeRL's dataset would before its collator gets them. The
        # dataset fails on a longer side if max_seq_len is not a multiple of 8, since it truncates
        # bytes, not tokens. So no longer side is stored.
        max_seq_len = self.encoding.max_seq_len
        prompts, chosen, rejected = (
            Ragged.from_rows(rows, "<i8") for rows in _transpose(trainable.values())
        )
        whole = chosen.lengths + rejected.lengths
        chosen = chosen.first(max_seq_len - prompts.lengths)
        rejected = rejected.first(max_seq_len - prompts.lengths)
        answers = chosen.lengths + rejected.lengths
        cut = 2 * cut_per_answer(2 * prompts.lengths + answers, max_seq_len)
        # Lay them out in columns.
        columns = dict[str, Ragged]()
        for name, ids in zip(PREFERENCE_COLUMNS, (prompts, chosen, rejected), strict=True):
            columns[name] = Ragged(ids.values.view(np.uint8), ids.offsets * 8)
        if self._has_rewards:
            for number, key in enumerate(REWARDS):
                rewards = [[preferences[position].rewards[number]] for position in trainable]
                columns[key] = Ragged.from_rows(rewards, np.float64)
        return make_encoded(
            columns,
            [prompts, prompts, chosen, rejected],
            [*trainable],
            loss_tokens=int((answers - cut).sum()),
            lost_tokens=int((whole - answers).sum()),
            cut=cut,
            truncated=whole - answers,
            specials=len(with_specials),
            unread=self._count_unread(preferences, trainable),
            placeholders=_placeholders_in(preferences),
            rejected=faults,
        )

    def _tokenize(self, preferences: Sequence[Preference]) -> tuple[list[Halves], set[int]]:
        """Return the halves of each preference, and the positions of the preferences whose text
        contains the string of a special token. A half that cannot be tokenized is a reason code.
        """
        # Preference i has its chosen half at 2 i and its rejected half at 2 i + 1.
        records = [half for preference in preferences for half in preference[:2]]
        halves: list[Half] = [""] * len(records)
        with_specials = set[int]()
        tokenizers: list[tuple[type, Callable[[Sequence[Any]], TurnRows]]] = [
            (Pair, self._tokenize_pairs),
            (Conversation, self.renderer.render),
        ]
        for record_type, tokenize in tokenizers:
            numbers = [i for i, record in enumerate(records) if isinstance(record, record_type)]
            rows = tokenize([records[number] for number in numbers])
            for position, reason in rows.rejected.items():
                halves[numbers[position]] = reason
            for row, position in enumerate(rows.positions):
                prompt = rows.turns.ids[2 * row]
                answer = rows.turns.ids[2 * row + 1]
                halves[numbers[position]] = Turn(prompt, self._end_with_eos(answer))
            with_specials |= {numbers[position] // 2 for position in rows.with_specials}
        pairs = zip(halves[::2], halves[1::2], strict=True)
        return [Halves(*pair) for pair in pairs], with_specials

    def _tokenize_pairs(self, pairs: Sequence[Pair]) -> TurnRows:
        return tokenize_pairs(pairs, self.encoding, self.tokenizer, self.backend)

    def _share_prompts(self, preferences: Sequence[Preference], halves: list[Halves]) -> None:
        """Replace the halves of each preference whose two prompts have different ids.

        If the prompts differ only in text that the template prints for the answer, both halves get
        one prompt: the tokens that both whole texts begin with. So no token is lost or changed. If
        the prompts differ earlier, the preference gets a reason code.

        Args:
            preferences: the records.
            halves: the halves of each preference; entries of this list are replaced.
        """
        positions = list[int]()  # the preferences that get one prompt
        texts = list[str]()  # three for each of them: the common beginning, and both whole texts
        for position, (chosen, rejected) in enumerate(halves):
            # A str is a reason code: the preference is already refused.
            if isinstance(chosen, str) or isinstance(rejected, str):
                continue
            if np.array_equal(chosen.prompt, rejected.prompt):
                continue
            try:
                texts += self.renderer.whole_texts(preferences[position])
            except RecordRefused as refused:
                # One reason code is enough to refuse the preference (see `_judge`).
                halves[position] = Halves(refused.why, rejected)
            else:
                positions.append(position)
        if not texts:
            return
        ids = self.backend.encode(texts, match_special=True)
        for number, position in enumerate(positions):
            # Each preference has three texts in a row, from `whole_texts`.
            start, *wholes = [ids[3 * number + text] for text in range(3)]
            # The prompt ends where the tokens of the three texts first differ.
            end = _common_length([start, *wholes])
            halves[position] = Halves(
                *(Turn(whole[:end], self._end_with_eos(whole[end:])) for whole in wholes)
            )

    def _judge(self, preference: Preference, halves: Halves) -> StoredIds | str:
        """Return the ids of a preference if it can be used for training. A str is a reason code:
        the preference is refused.
        """
        chosen, rejected = halves
        if self._has_rewards and not preference.rewards:
            return "bad_reward"
        if isinstance(chosen, str):
            return chosen
        if isinstance(rejected, str):
            return rejected
        if not len(chosen.prompt):
            return "empty_prompt"
        if not (len(chosen.response) and len(rejected.response)):
            return "empty_response"
        # Truncate both sides as the loader would, and check that an answer token is left of each.
        longest = self.encoding.max_seq_len
        sides = [min(sum(map(len, side)), longest) for side in (chosen, rejected)]
        shortest = min(sides) - int(cut_per_answer(sum(sides), longest))
        if shortest <= len(chosen.prompt):
            return "no_loss_tokens"
        return StoredIds(chosen.prompt, chosen.response, rejected.response)

    def _count_unread(
        self, preferences: Sequence[Preference], trainable: Mapping[int, Any]
    ) -> Counter[str]:
        """Count the rewards that no column stores, and the variables that the template does not
        read.
        """
        unstored = 0
        if not self._has_rewards:
            unstored = sum(bool(preferences[position].rewards) for position in trainable)
        unread = Counter(dict.fromkeys(REWARDS, unstored))
        for preference in preferences:
            # Both answers have the same variables, those of the record: count them once.
            if isinstance(preference.chosen, Conversation):
                unread.update(self.renderer.unread_variables(preference.chosen))
        return unread

    @property
    def _has_rewards(self) -> bool:
        return REWARDS[0] in self.encoding.columns

    def _end_with_eos(self, answer: Ids) -> Ids:
        """Return the answer with a final EOS; an empty answer stays empty."""
        if not len(answer) or answer[-1] == self.tokenizer.eos_id:
            return answer
        return np.append(answer, self.tokenizer.eos_id or 0)

    def losses(self, tokens: Tokens, eos: int | None) -> Lengths:
        return np.add.reduceat(tokens.responses, tokens.turns[:-1]) - self.cut(tokens)

    def cut(self, tokens: Tokens) -> Lengths:
        prompts = np.add.reduceat(tokens.prompts, tokens.turns[:-1])
        answers = np.add.reduceat(tokens.responses, tokens.turns[:-1])
        return 2 * cut_per_answer(2 * prompts + answers, self.encoding.max_seq_len)

    def pieces(self, sample: Sample) -> Iterator[Piece]:
        """Yield the prompt, untrained; then the chosen and the rejected answer, trained."""
        prompt, *answers = decode_preference(sample)
        yield prompt.tolist(), False
        for answer in answers:
            yield answer.tolist(), True


def _rewards_of(stream: StreamSpec) -> list[str]:
    """Return the keys of rewards whose fields the recipe names."""
    return [key for key in REWARDS if stream.source and key in stream.source.fields]


def _transpose(preferences: Iterable[StoredIds]) -> tuple[list[Ids], list[Ids], list[Ids]]:
    """Return three lists with an entry for each preference: the prompts, the chosen answers and
    the rejected answers.
    """
    prompts = list[Ids]()
    chosen = list[Ids]()
    rejected = list[Ids]()
    for preference in preferences:
        prompts.append(preference.prompt)
        chosen.append(preference.chosen)
        rejected.append(preference.rejected)
    return prompts, chosen, rejected


def _common_length(rows: Sequence[Ids]) -> int:
    """Return the length of the common beginning of all rows, in ids."""
    shortest = min(map(len, rows))
    firsts = np.stack([row[:shortest] for row in rows])
    differs = (firsts != firsts[0]).any(axis=0)
    return int(differs.argmax()) if differs.any() else shortest


def _texts_of(half: Pair | Conversation) -> Sequence[str]:
    """Return all texts of a prompt with one of its answers."""
    return half if isinstance(half, Pair) else half.texts


def _placeholders_in(preferences: Sequence[Preference]) -> dict[str, int]:
    """Count the preferences that contain a placeholder of media, such as `<image>`: placeholder ->
    number of preferences.
    """
    texts = (
        text for preference in preferences for half in preference[:2] for text in _texts_of(half)
    )
    records = (
        "\n".join([*_texts_of(preference.chosen), *_texts_of(preference.rejected)])
        for preference in preferences
    )
    return count_placeholders(texts, records)
