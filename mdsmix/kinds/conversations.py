"""Conversations: rendered by the tokenizer's chat template, and cut into the turns that are trained."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from mdsmix.encode.backends import Backend
from mdsmix.encode.base import Encoder
from mdsmix.encode.tokenizer import Tokenizer
from mdsmix.kinds.base import packed_columns
from mdsmix.kinds.finetuning import Finetuning, columns_of, targets_of
from mdsmix.recipe import Recipe, StreamSpec
from mdsmix.record import Conversation
from mdsmix.shards.manifest import Encoding
from mdsmix.words import hint

if TYPE_CHECKING:
    from mdsmix.encode.chat import ChatTemplate


OWN_VARIABLES = {
    "messages": "the records hold them.",
    "tools": "the records hold them.",
    "documents": "no shape of records holds any.",
    "add_generation_prompt": "it is set where an answer begins.",
    "date_string": "a stream's date_string sets the day.",
    "strftime_now": "a stream's date_string sets the day.",
    "raise_exception": "it ends the rendering of a conversation.",
}
"Variables of a template that a recipe cannot set, and why."


class Conversations(Finetuning):
    name = "conversations"
    reads = Conversation
    keys: ClassVar[tuple[str, ...]] = (
        "columns",
        "date_string",
        "rewritten_history",
        "consecutive_roles",
        "too_long",
        "pack",
    )
    called = "messages"
    has_template = True

    def columns(self, recipe: Recipe, stream: StreamSpec, tokenizer: Tokenizer) -> dict[str, str]:
        if stream.pack:
            return packed_columns(f"ndarray:{tokenizer.dtype}", has_targets=True)
        if stream.columns == "turns":
            return {"turns": "json"}
        return dict.fromkeys(("input_ids", "labels"), f"ndarray:{tokenizer.dtype}")

    def settings(
        self, recipe: Recipe, stream: StreamSpec, tokenizer: Tokenizer
    ) -> Mapping[str, Any]:
        return {
            **super().settings(recipe, stream, tokenizer),
            "compact": stream.columns == "compact",
            "date_string": stream.date_string,
            "rewritten_history": stream.rewritten_history,
            "template": dict(recipe.tokenizer.template),
        }

    def contradictions(self, recipe: Recipe, stream: StreamSpec) -> Iterator[str]:
        yield from super().contradictions(recipe, stream)
        policies = (recipe.target_prompts, recipe.target_responses)
        if stream.columns == "compact" and policies != ("none", "last"):
            yield (
                "columns: compact holds only what target_prompts: none and target_responses: last train on; "
                f"the recipe says {'/'.join(policies)}: use columns: turns."
            )

        if stream.columns == "compact" and stream.pack:
            yield "columns: compact says how a conversation is stored that has a row of its own, and pack: true gives it none: take one of the two out."
        if stream.rewritten_history == "each" and recipe.target_responses != "all":
            yield (
                "rewritten_history: each trains every answer of a conversation whose history the chat template rewrites, "
                "and target_responses: last only the last one of the others: set target_responses: all, or "
                "rewritten_history: last."
            )

    def splits_records(self, encoding: Encoding) -> bool:
        return encoding.rewritten_history == "each"

    def lacking(self, recipe: Recipe, stream: StreamSpec, tokenizer: Tokenizer) -> Iterator[str]:
        from mdsmix.encode.chat import open_template

        reads = open_template(tokenizer.chat_template, {}).reads
        for name in recipe.tokenizer.template:
            if name in OWN_VARIABLES:
                yield f"tokenizer.template.{name} is given by mdsmix itself; {OWN_VARIABLES[name]}"
            elif name not in reads:
                yield (
                    f"tokenizer.template.{name} would change nothing, since the chat template of {tokenizer.name} does not "
                    f"read it: {hint(name, sorted(reads - set(OWN_VARIABLES)))}"
                )

    def template(self, encoding: Encoding, tokenizer: Tokenizer) -> ChatTemplate:
        from mdsmix.encode.chat import open_template

        variables = tokenizer.template_variables | encoding.template
        return open_template(tokenizer.chat_template, variables, encoding.date_string)

    def open_encoder(self, encoding: Encoding, tokenizer: Tokenizer, backend: Backend) -> Encoder:
        from mdsmix.encode.conversations import Chat
        from mdsmix.encode.special import SpecialStrings

        return Chat(
            tokenizer=tokenizer,
            backend=backend,
            template=self.template(encoding, tokenizer),
            targets=targets_of(encoding),
            columns=columns_of(encoding, "turns"),
            special_tokens_in_text=encoding.special_tokens_in_text,
            specials=SpecialStrings.of(tokenizer.special_tokens),
            rewritten_history=encoding.rewritten_history,
        )
