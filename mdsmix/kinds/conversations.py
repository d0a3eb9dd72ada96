"""The kind of conversations without images, which the tokenizer's chat template renders."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from typing import Any, ClassVar

from mdsmix.encode.answer_ends import (
    Stops,
    find_lead,
    is_ended_by_next,
)
from mdsmix.encode.answer_parts import require_findable_parts
from mdsmix.encode.encoded import Encoded
from mdsmix.encode.labels import Turns, move_stop_tokens
from mdsmix.encode.open_template import open_tokenizer_template
from mdsmix.encode.template_facts import find_template_facts
from mdsmix.encode.trained_ranges import SPLIT_REASONS
from mdsmix.errors import RecipeError
from mdsmix.kinds.finetuning import Finetuning
from mdsmix.kinds.last_turns import keep_last_turns
from mdsmix.kinds.template_kind import TemplateKind, template_variables
from mdsmix.kinds.turn_renderer import TEMPLATE_REASONS
from mdsmix.recipe import Recipe, StreamSpec
from mdsmix.recipe.stream_spec import TrainPartsSpec
from mdsmix.record import Conversation
from mdsmix.shards.token_ids import LOSS_WEIGHTS
from mdsmix.tokenizer.card import Tokenizer


class Conversations(TemplateKind, Finetuning):
    """The kind of conversations without images. The tokenizer's chat template renders each
    conversation as turns: a prompt and the response to it.
    """

    name = "conversations"
    reads: ClassVar[type] = Conversation
    key_groups: ClassVar[tuple[str, ...]] = (
        *("finetuning", "records with messages", "messages", "messages without images"),
    )
    reasons: ClassVar[Mapping[str, str]] = TEMPLATE_REASONS | SPLIT_REASONS

    @classmethod
    def settings(cls, recipe: Recipe, stream: StreamSpec, tokenizer: Tokenizer) -> dict[str, Any]:
        """Return the settings that this kind adds to the stream's Encoding (the settings that a
        published stream stores), as field -> value: those of all finetuning kinds, and those of the
        chat template.
        """
        settings = super().settings(recipe, stream, tokenizer)
        if stream.columns == "turns" and not stream.pack:
            settings["columns"] = {"turns": "json"}
        if stream.loss_weights:
            settings["columns"] |= {LOSS_WEIGHTS: "ndarray:float32"}
        return {
            **settings,
            "compact": stream.columns == "compact",
            "date_string": stream.date_string,
            "rewritten_history": stream.rewritten_history,
            "template": template_variables(recipe, tokenizer),
            "train_parts": _read_train_parts(recipe, stream, tokenizer),
        }

    @classmethod
    def contradictions(cls, recipe: Recipe, stream: StreamSpec) -> Iterator[str]:
        """Yield a sentence for each setting of the recipe that is wrong for conversations, or
        contradicts another setting. Checks for conversations, such as the check of
        `columns: compact`, are added to the checks that all finetuning kinds share.
        """
        yield from super().contradictions(recipe, stream)
        yield from _find_parts_faults(recipe, stream)
        if stream.loss_weights:
            yield from _find_weights_faults(recipe, stream)
        is_compact = stream.columns == "compact"
        policies = (recipe.target_prompts, recipe.target_responses)
        if is_compact and policies != ("none", "last"):
            yield (
                "columns: compact works only with target_prompts: none and target_responses: "
                f"last, but the recipe sets target_prompts: {recipe.target_prompts} and "
                f"target_responses: {recipe.target_responses}: set columns: turns for this stream."
            )
        if is_compact and stream.pack:
            yield (
                "columns: compact gives each conversation a row of its own, but pack: true joins "
                "several conversations into a row: remove columns or pack from this stream."
            )
        if stream.rewritten_history == "each" and recipe.target_responses != "all":
            yield (
                "rewritten_history: each trains on every answer of the conversations whose earlier "
                "messages the chat template rewrites, but target_responses: last trains only on "
                "the last answer of all other conversations: set target_responses: all for the "
                "run, or rewritten_history: last for this stream."
            )
        if stream.rewritten_history == "each" and stream.too_long == "last_turns":
            yield (
                "too_long: last_turns shortens a conversation to one row, but rewritten_history: "
                "each makes several rows of a conversation, which end at different answers: set "
                "rewritten_history: last, or too_long: filter for this stream."
            )

    @property
    def splits_records(self) -> bool:
        return self.encoding.rewritten_history == "each"

    def encode(self, conversations: Sequence[Conversation]) -> Encoded:
        """Encode conversations. Each that can be used for training becomes one sample.

        With `rewritten_history: each`, a conversation becomes several samples if the chat template
        changes its earlier messages once there are more.

        The columns of a sample are `turns` (json: each a prompt and its response). With
        `columns: compact` they are `input_ids` and `labels`, and with `pack: true` `input_ids` and
        `loss_mask`.
        """
        rows = self.renderer.render(conversations)
        if self.encoding.too_long == "last_turns":
            longest = self.encoding.max_seq_len
            render = self.renderer.render
            rows = keep_last_turns(conversations, rows, longest, render, self.lengths_to_fit)
        return self.make_samples(rows)

    def end_answers(self, turns: Turns) -> Turns:
        if not is_ended_by_next(self.encoding):
            return turns
        return move_stop_tokens(turns, self.encoding.stop_ids, self._space_before_stops)

    @cached_property
    def _space_before_stops(self) -> list[list[int]]:
        """The texts of white space that the template may print between an answer and a stop token,
        each as a list of token ids.
        """
        stops = Stops.for_stream(self.tokenizer, self.encoding.stop_ids)
        ends = find_template_facts(self.encoding, self.tokenizer).ends
        # `find_lead` returns the white space, usually an empty string. It returns None for an
        # answer that no stop token of the next message follows.
        leads = {find_lead(end, stops) for end in ends}
        texts = sorted(lead for lead in leads if lead)
        rows = self.backend.encode(texts, match_special=True)
        return [rows[number].tolist() for number in range(len(rows))]


def _find_weights_faults(recipe: Recipe, stream: StreamSpec) -> Iterator[str]:
    """Yield a sentence for each setting of the recipe that contradicts `loss_weights: true`."""
    if recipe.loader != "mdsmix":
        yield (
            "loss_weights: true needs train_loader.name: mdsmix, since LLM-Foundry's own loaders "
            "do not read weights: correct train_loader.name in the recipe, or remove loss_weights "
            "from this stream."
        )
    if stream.columns == "compact":
        yield (
            "columns: compact has no place for loss weights: remove columns or loss_weights from "
            "this stream."
        )
    if recipe.target_prompts != "none":
        yield (
            f"loss_weights: true weighs answers, but target_prompts: {recipe.target_prompts} "
            "trains prompts too: set target_prompts: none for the run, or remove loss_weights from "
            "this stream."
        )
    if not recipe.decoder_only_format:
        yield (
            "loss_weights: true cannot be used with decoder_only_format: false: remove one of the "
            "two keys from the recipe."
        )


def _find_parts_faults(recipe: Recipe, stream: StreamSpec) -> Iterator[str]:
    """Yield a sentence for each setting of the recipe that contradicts `train_parts`."""
    parts = asdict(stream.train_parts or TrainPartsSpec())
    if all(weight == 1 for weight in parts.values()):
        return
    weighted = {name: weight for name, weight in parts.items() if weight not in (0, 1)}
    if weighted and not stream.loss_weights:
        listed = ", ".join(f"{name}: {weight}" for name, weight in weighted.items())
        yield (
            f"train_parts has loss weights ({listed}), for which rows need a column of weights: "
            "set loss_weights: true for this stream, or write true or false."
        )
    if not any(parts.values()):
        yield (
            "train_parts leaves no part of an answer to train: set reasoning, calls or answer to "
            "true."
        )
    if recipe.target_prompts != "none":
        yield (
            "train_parts stores the parts that are not trained as prompts, but target_prompts: "
            f"{recipe.target_prompts} trains prompts: set target_prompts: none for the run, or "
            "remove train_parts from this stream."
        )
    if not recipe.decoder_only_format:
        yield (
            "train_parts cannot be used with decoder_only_format: false, because an encoder would "
            "read the parts that are not trained: remove one of the two keys from the recipe."
        )


def _read_train_parts(
    recipe: Recipe, stream: StreamSpec, tokenizer: Tokenizer
) -> dict[str, bool | float]:
    """Return the recipe's `train_parts`: part of an answer -> whether it is trained, or its loss
    weight, such as `{"reasoning": False, "calls": True, "answer": 0.5}`. The dict is empty if all
    parts are trained.

    Raises RecipeError if the parts cannot be found in what the tokenizer's chat template prints.
    """
    parts = asdict(stream.train_parts or TrainPartsSpec())
    if all(weight == 1 for weight in parts.values()):
        return {}
    # 1 and 0 mean true and false: write them alike, so that they give the same keys of work units.
    for name, weight in parts.items():
        if weight in (0, 1):
            parts[name] = bool(weight)
    variables = tokenizer.template_variables | template_variables(recipe, tokenizer)
    try:
        require_findable_parts(open_tokenizer_template(tokenizer, variables, stream.date_string))
    except RecipeError as error:
        raise RecipeError(f"stream {stream.name}: {error}") from None
    return parts
