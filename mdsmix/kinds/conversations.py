"""Conversations, which the tokenizer's chat template renders."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

from mdsmix.encode.answer_ends import (
    Stops,
    find_lead,
    find_stream_ends,
    is_ended_by_next,
)
from mdsmix.encode.encoded import Encoded
from mdsmix.encode.labels import Turns, move_stop_tokens
from mdsmix.kinds.finetuning import Finetuning
from mdsmix.kinds.template_kind import TemplateKind, template_variables
from mdsmix.kinds.turn_renderer import TEMPLATE_REASONS
from mdsmix.recipe import Recipe, StreamSpec
from mdsmix.record import Conversation
from mdsmix.tokenizer.card import Tokenizer


class Conversations(TemplateKind, Finetuning):
    """The kind of conversations without images. The tokenizer's chat template renders each one as
    turns of a prompt and a response.
    """

    name = "conversations"
    reads: ClassVar[type] = Conversation
    key_groups: ClassVar[tuple[str, ...]] = ("finetuning", "messages", "messages without images")
    reasons: ClassVar[Mapping[str, str]] = TEMPLATE_REASONS

    @classmethod
    def settings(cls, recipe: Recipe, stream: StreamSpec, tokenizer: Tokenizer) -> dict[str, Any]:
        """Return the fields of Encoding that this kind sets: besides those of all finetuning kinds,
        the settings of the chat template.
        """
        settings = super().settings(recipe, stream, tokenizer)
        if stream.columns == "turns" and not stream.pack:
            settings["columns"] = {"turns": "json"}
        return {
            **settings,
            "compact": stream.columns == "compact",
            "date_string": stream.date_string,
            "rewritten_history": stream.rewritten_history,
            "template": template_variables(recipe, tokenizer),
        }

    @classmethod
    def contradictions(cls, recipe: Recipe, stream: StreamSpec) -> Iterator[str]:
        """Yield a sentence for each wrong or contradictory setting, among them those that only
        concern conversations, such as `columns: compact`.
        """
        yield from super().contradictions(recipe, stream)
        is_compact = stream.columns == "compact"
        policies = (recipe.target_prompts, recipe.target_responses)
        if is_compact and policies != ("none", "last"):
            yield (
                "columns: compact works only with target_prompts: none and target_responses: "
                f"last, but the recipe sets target_prompts: {recipe.target_prompts} and "
                f"target_responses: {recipe.target_responses}: use columns: turns."
            )
        if is_compact and stream.pack:
            yield (
                "columns: compact gives each conversation a row of its own, but pack: true joins "
                "several into a row: remove one of the two."
            )
        if stream.rewritten_history == "each" and recipe.target_responses != "all":
            yield (
                "rewritten_history: each trains on every answer of a conversation whose history "
                "the chat template rewrites, but target_responses: last trains only on the last "
                "answer of the other conversations: set target_responses: all, or "
                "rewritten_history: last."
            )

    @property
    def splits_records(self) -> bool:
        return self.encoding.rewritten_history == "each"

    def encode(self, conversations: Sequence[Conversation]) -> Encoded:
        """Encode each conversation that can be used for training to one sample. With
        `rewritten_history: each`, a conversation whose earlier text changes becomes several.

        Columns: `turns` (json); `input_ids` and `labels` with `columns: compact`; `input_ids` and
        `loss_mask` with `pack: true`.
        """
        return self.make_samples(self.renderer.render(conversations))

    def end_answers(self, turns: Turns) -> Turns:
        if not is_ended_by_next(self.encoding):
            return turns
        return move_stop_tokens(turns, self.encoding.stop_ids, self._space_before_stops)

    @cached_property
    def _space_before_stops(self) -> list[list[int]]:
        """The token ids of the white space that the template may print between an answer and a
        stop token, one list for each such text.
        """
        stops = Stops.for_stream(self.tokenizer, self.encoding.stop_ids)
        ends = find_stream_ends(self.encoding, self.tokenizer)
        # White space, or None for an answer that no stop token of the next message follows.
        texts = {find_lead(end, stops) for end in ends}
        rows = self.backend.encode(sorted(text for text in texts if text), match_special=True)
        return [rows[number].tolist() for number in range(len(rows))]
