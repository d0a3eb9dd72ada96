"""The kind of unpaired preferences: an answer to a prompt, with a label that says whether it is
desirable, for Kahneman-Tversky optimization (KTO).

The columns `prompt_ids` and `completion_ids` have int32 token ids, and `label` is 1 or 0. These are
the columns of TRL's KTOTrainer. The completion ends in EOS, as the answers of preferences do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain
from typing import Any, ClassVar, NamedTuple

import numpy as np

from mdsmix.encode.encoded import Encoded, make_encoded
from mdsmix.encode.labels import Lengths
from mdsmix.errors import RecipeError
from mdsmix.kinds.finetuning import WINDOW_BYTES
from mdsmix.kinds.kind import Piece
from mdsmix.kinds.preferences import LastAnswerRenderer
from mdsmix.kinds.template_kind import TemplateKind, template_variables
from mdsmix.kinds.turn_rows import TurnRows, count_placeholders, tokenize_pairs
from mdsmix.kinds.unpaired_loader import DTYPE, UNPAIRED_LOADER
from mdsmix.ragged import Ragged
from mdsmix.recipe import Recipe, StreamSpec
from mdsmix.record import Conversation, Pair
from mdsmix.shapes.unpaired_preference import LABEL, UNPAIRED_REASONS, UnpairedPreference
from mdsmix.shards.counts import count_labels
from mdsmix.shards.shard_samples import Sample
from mdsmix.shards.token_ids import UNPAIRED_COLUMNS, Ids, Tokens, Turn, decode_ids
from mdsmix.tokenizer.card import Tokenizer


class TokenizedAnswers(NamedTuple):
    """Unpaired preferences as token ids, and what was found in their texts."""

    turns: list[Turn | str]
    "The ids of each prompt and its completion. A str is a reason code: the record is refused."
    with_specials: set[int]
    "Positions of the records whose text contains the string of a special token."
    unread: Counter[str]
    "Field that the chat template does not print -> number of records that have it."


class UnpairedPreferences(TemplateKind):
    """The kind of unpaired preferences. A sample has the token ids of a prompt and of one answer to
    it, and a label.
    """

    name = "unpaired_preferences"
    word = "preference"
    reads = UnpairedPreference
    key_groups = ("preference",)
    window_bytes = WINDOW_BYTES
    has_targets = False
    may_have_images = False
    loader = UNPAIRED_LOADER
    reasons: ClassVar[Mapping[str, str]] = UNPAIRED_REASONS

    @classmethod
    def settings(cls, recipe: Recipe, stream: StreamSpec, tokenizer: Tokenizer) -> dict[str, Any]:
        """Return the settings that this kind adds to the stream's Encoding (the settings that a
        published stream stores), as field -> value: the columns, the chat template's variables, and
        fixed values of settings that preferences do not have.

        Raises RecipeError if the tokenizer has no EOS, which ends each completion.
        """
        if tokenizer.eos_id is None:
            raise RecipeError(
                f"stream {stream.name}: completions of preferences end in EOS, but the tokenizer "
                f"{tokenizer.name} has no EOS token: set tokenizer.kwargs.eos_token in the recipe."
            )
        return {
            "columns": {**UNPAIRED_LOADER.columns},
            "target_prompts": "none",
            "target_responses": "last",
            "rewritten_history": "last",
            "template": template_variables(recipe, tokenizer),
        }

    @classmethod
    def contradictions(cls, recipe: Recipe, stream: StreamSpec) -> Iterator[str]:
        """Yield a sentence for each setting of the recipe that is wrong for preferences, or
        contradicts another setting.
        """
        if stream.pack or not recipe.decoder_only_format:
            yield (
                "has preferences, which cannot be packed and are only for decoder-only models: "
                "remove pack from this stream and decoder_only_format from the recipe."
            )
        yield from super().contradictions(recipe, stream)

    @cached_property
    def renderer(self) -> LastAnswerRenderer:
        return LastAnswerRenderer(self.encoding, self.tokenizer, self.backend)

    def encode(self, preferences: Sequence[UnpairedPreference]) -> Encoded:
        """Encode each preference that can be used for training to one sample.

        Its columns are `prompt_ids`, `completion_ids` (int32) and `label` (int8). A completion that
        does not fit into max_seq_len tokens after its prompt is cut.
        """
        tokenized = self._tokenize(preferences)
        # Select the preferences that can be used for training.
        trainable = dict[int, Turn]()
        faults = dict[int, str]()
        for position, turn in enumerate(tokenized.turns):
            verdict = self._judge(turn)
            if isinstance(verdict, str):
                faults[position] = verdict
            else:
                trainable[position] = verdict
        # Cut the completions that do not fit.
        prompts = Ragged.from_rows([turn.prompt for turn in trainable.values()], DTYPE)
        whole = Ragged.from_rows([turn.response for turn in trainable.values()], DTYPE)
        completions = whole.first(self.encoding.max_seq_len - prompts.lengths)
        truncated = whole.lengths - completions.lengths
        # Lay out the columns.
        labels = np.array([preferences[n].is_desirable for n in trainable], np.int8)
        columns = dict(zip(UNPAIRED_COLUMNS, (prompts, completions), strict=True))
        columns[LABEL] = Ragged.from_lengths(labels, np.ones(len(labels), np.int64))
        encoded = make_encoded(
            columns,
            [prompts, completions],
            [*trainable],
            loss_tokens=len(completions.values),
            lost_tokens=int(truncated.sum()),
            truncated=truncated,
            specials=len(tokenized.with_specials),
            unread=tokenized.unread,
            placeholders=_placeholders_in(preferences),
            rejected=faults,
        )
        return replace(encoded, totals=replace(encoded.totals, labels=count_labels(labels)))

    def _tokenize(self, preferences: Sequence[UnpairedPreference]) -> TokenizedAnswers:
        """Tokenize preferences: those of texts together, and those of messages together."""
        turns: list[Turn | str] = [""] * len(preferences)
        with_specials = set[int]()
        unread = Counter[str]()
        tokenizers: list[tuple[type, Callable[[Sequence[Any]], TurnRows]]] = [
            (Pair, self._tokenize_pairs),
            (Conversation, self.renderer.render),
        ]
        for record_type, tokenize in tokenizers:
            answers = dict[int, Any]()
            for number, preference in enumerate(preferences):
                if isinstance(preference.answer, record_type):
                    answers[number] = preference.answer
            # A position in `rows` counts only the answers of this type: `numbers` leads back.
            numbers = [*answers]
            rows = tokenize([*answers.values()])
            for position, reason in rows.rejected.items():
                turns[numbers[position]] = reason
            for row, position in enumerate(rows.positions):
                # Each row has one turn: its prompt and its completion are two successive lists.
                prompt = rows.turns.ids[2 * row]
                completion = rows.turns.ids[2 * row + 1]
                turns[numbers[position]] = Turn(prompt, self._end_with_eos(completion))
            with_specials |= {numbers[position] for position in rows.with_specials}
            unread.update(rows.unread)
        return TokenizedAnswers(turns, with_specials, unread)

    def _tokenize_pairs(self, pairs: Sequence[Pair]) -> TurnRows:
        return tokenize_pairs(pairs, self.encoding, self.tokenizer, self.backend)

    def _end_with_eos(self, completion: Ids) -> Ids:
        """Return the completion with EOS as its last token. An empty one stays empty."""
        if not len(completion) or completion[-1] == self.tokenizer.eos_id:
            return completion
        return np.append(completion, self.tokenizer.eos_id or 0)

    def _judge(self, turn: Turn | str) -> Turn | str:
        """Return the ids of a preference that can be used for training. For any other preference
        return a reason code (a str).
        """
        if isinstance(turn, str):
            return turn
        if not len(turn.prompt):
            return "empty_prompt"
        if not len(turn.response):
            return "empty_response"
        if len(turn.prompt) >= self.encoding.max_seq_len:
            return "no_loss_tokens"
        return turn

    def losses(self, tokens: Tokens, eos: int | None) -> Lengths:
        return tokens.responses  # each sample is one turn

    def pieces(self, sample: Sample) -> Iterator[Piece]:
        """Yield the prompt, which is not trained, and the completion, which is."""
        for name, is_trained in zip(UNPAIRED_COLUMNS, (False, True), strict=True):
            yield decode_ids(sample[name], DTYPE).tolist(), is_trained


def _placeholders_in(preferences: Sequence[UnpairedPreference]) -> dict[str, int]:
    """Return placeholder -> number of preferences that contain it, for placeholders of images,
    videos and sounds such as `<image>`.
    """
    texts_of = [
        preference.answer if isinstance(preference.answer, Pair) else preference.answer.texts
        for preference in preferences
    ]
    return count_placeholders(chain.from_iterable(texts_of), map("\n".join, texts_of))
