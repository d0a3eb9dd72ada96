"""The base of the kinds whose records a chat template renders: conversations, preferences, unpaired
preferences and prompts.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import orjson

from mdsmix.encode.answer_ends import EndNote, describe_doubled_eos, make_end_notes
from mdsmix.encode.open_template import open_tokenizer_template
from mdsmix.encode.template_facts import find_template_facts
from mdsmix.errors import RecipeError
from mdsmix.kinds.kind import Kind
from mdsmix.kinds.turn_renderer import TurnRenderer
from mdsmix.messages import suggest_key
from mdsmix.recipe import Recipe, StreamSpec
from mdsmix.record import RichConversation
from mdsmix.shapes.extras import OWN_VARIABLES
from mdsmix.tokenizer.card import Tokenizer

SET_BY_MDSMIX = OWN_VARIABLES | {"documents", "date_string"}
"""Variables of a chat template that a recipe cannot set, since mdsmix sets them. For example
`date_string` is a key of the stream, and `documents` comes from the record.
"""


def template_variables(recipe: Recipe, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the variables of the chat template that the recipe sets in `tokenizer.template`, such
    as `{"enable_thinking": False}`.

    Raises RecipeError if the template does not read a variable, if mdsmix sets the variable itself,
    or if a value cannot be written into the manifest.
    """
    variables = recipe.tokenizer.template
    if not variables:
        return {}
    read_names = open_tokenizer_template(tokenizer, {}).reads
    for name, value in variables.items():
        if name in SET_BY_MDSMIX:
            raise RecipeError(
                f"tokenizer.template.{name} is set by mdsmix itself, from a record or from the "
                f"stream's date_string: remove tokenizer.template.{name} from the recipe."
            )
        if name not in read_names:
            similar = suggest_key(name, sorted(read_names - SET_BY_MDSMIX))
            raise RecipeError(
                f"tokenizer.template.{name} would change nothing, since the chat template of "
                f"{tokenizer.name} does not read it: {similar}"
            )
        try:
            orjson.dumps(value)
        except TypeError as error:
            raise RecipeError(
                f"tokenizer.template.{name} cannot be written as JSON ({error}): use strings as "
                "keys, and numbers of at most 64 bits."
            ) from None
    return dict(variables)


def find_decoder_faults(recipe: Recipe, stream: StreamSpec, contents: str) -> Iterator[str]:
    """Yield a sentence if a stream is packed or its recipe is for an encoder-decoder model. For
    streams whose records only a decoder-only model can use, each in a row of its own.

    Args:
        recipe: the recipe.
        stream: one of its streams.
        contents: the word for the stream's records in the sentence, such as `preferences`.
    """
    if stream.pack or not recipe.decoder_only_format:
        yield (
            f"has {contents}, which cannot be packed and are only for decoder-only models: remove "
            "pack from this stream and decoder_only_format from the recipe."
        )


class TemplateKind(Kind):
    """A kind that renders its records by the chat template of the tokenizer."""

    has_template = True

    @cached_property
    def renderer(self) -> TurnRenderer:
        return TurnRenderer(self.encoding, self.tokenizer, self.backend)

    def prints_date(self, tokenizer: Tokenizer) -> bool:
        return find_template_facts(self.encoding, tokenizer).prints_date

    def prints_null(self, conversation: RichConversation, role: str, path: tuple[str, ...]) -> bool:
        return self.renderer.prints_null(conversation, role, path)

    def end_notes(self, tokenizer: Tokenizer) -> list[EndNote]:
        return list(make_end_notes(self.encoding, tokenizer))

    def doubled_eos(self, tokenizer: Tokenizer) -> str:
        return describe_doubled_eos(self.encoding, tokenizer)
