"""The kind of preferences whose prompts have images. A sample has the images of the prompt with
their sizes, and the token ids of the prompt and of both answers, with one token for each image.

ComposeRL reads no images, so mdsmix's own loader reads these streams. Its batches are those of
TRL's DataCollatorForVisionPreference (`load/preference_batch.py`). So the answers are the text that
the chat template prints for them, without a further EOS, and each answer is cut by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

from mdsmix.encode.encoded import Encoded
from mdsmix.foundry_yaml.loader_keys import MDSMIX_LOADER
from mdsmix.images.reasons import IMAGE_REASONS
from mdsmix.kinds.assemble import Assembler
from mdsmix.kinds.kind import Kind
from mdsmix.kinds.pictured import (
    ImageRows,
    ImageTurnRenderer,
    find_image_contradictions,
    make_image_settings,
)
from mdsmix.kinds.preferences import ID_BYTES, PreferenceRenderer, Preferences, list_reward_keys
from mdsmix.lazy_numpy import np
from mdsmix.recipe import Recipe, StreamSpec
from mdsmix.record import Conversation
from mdsmix.shapes import find_shape
from mdsmix.shapes.image_parts import ANSWER_REASONS
from mdsmix.shapes.preference import PREFERENCE, PREFERENCE_OPENAI, Preference
from mdsmix.shards.shard_files import ShardLayout
from mdsmix.shards.token_ids import PREFERENCE_COLUMNS, Ids
from mdsmix.tokenizer.card import Tokenizer

COLUMNS = {
    "images": "list[jpeg]",
    "sizes": "json",
    **dict.fromkeys(PREFERENCE_COLUMNS, "bytes"),
}


class ImageAnswerRenderer(PreferenceRenderer, ImageTurnRenderer):
    """Renders a conversation with images as one turn: all text up to its last answer, and that
    answer.
    """

    def render_history(self, conversation: Conversation) -> str:
        return self.frame_images(super().render_history(conversation))


class PreferencesWithImages(Preferences):
    """The kind of preferences whose prompts have images."""

    name = "image_preferences"
    version = 1
    key_groups = (*Preferences.key_groups, "messages with images")
    window_bytes = Kind.window_bytes
    has_images = True
    image_copies = 2
    ends_in_eos = False
    loader = None
    reasons: ClassVar[Mapping[str, str]] = {
        **Preferences.reasons,
        **IMAGE_REASONS,
        **ANSWER_REASONS,
    }

    @classmethod
    def needs_own_run(cls) -> bool:
        return True

    def doubled_eos(self, tokenizer: Tokenizer) -> str:
        return ""  # answers end as the template prints them

    @classmethod
    def settings(cls, recipe: Recipe, stream: StreamSpec, tokenizer: Tokenizer) -> dict[str, Any]:
        """Return the settings that this kind adds to the stream's Encoding (the settings that a
        published stream stores), as field -> value: those of preferences, and those of images.

        Raises RecipeError if Pillow is not installed, or no image token is known.
        """
        # Rows with images have these columns and no compression, whatever the recipe sets.
        return {
            **super().settings(recipe, stream, tokenizer),
            "columns": dict(COLUMNS),
            "loader": MDSMIX_LOADER,
            "compression": None,
            "images": make_image_settings(recipe, stream, tokenizer),
        }

    @classmethod
    def contradictions(cls, recipe: Recipe, stream: StreamSpec) -> Iterator[str]:
        """Yield a sentence for each setting of the recipe that is wrong for preferences with
        images, or contradicts another setting.
        """
        if recipe.loader != MDSMIX_LOADER:
            yield (
                "has preferences with images, which only mdsmix's own loader reads, but the "
                f"recipe's train_loader.name is {recipe.loader}: remove train_loader.name, or set "
                "it to mdsmix."
            )
        unlike_streams = [
            candidate.name
            for candidate in recipe.streams.values()
            if candidate.kind is not None
            and (candidate.kind != cls.word or not candidate.has_images)
        ]
        if unlike_streams:
            yield (
                f"has preferences with images, and a batch of them cannot have rows of other "
                f"streams, but the recipe has {unlike_streams[0]} too: write a recipe of its own "
                "for preferences with images."
            )
        source = stream.source
        if source and find_shape(source.shape, source.fields) is PREFERENCE:
            yield (
                f"has images, but records of the shape {PREFERENCE.name} may be texts, which no "
                f"chat template renders: set source.shape: {PREFERENCE_OPENAI.name}, which makes "
                "messages of texts."
            )
        rewards = list_reward_keys(stream)
        if rewards:
            keys = " and ".join(f"source.{key}" for key in rewards)
            yield (
                f"source.{rewards[0]} would change nothing, since no loader reads rewards of "
                f"preferences with images: remove {keys}."
            )
        yield from find_image_contradictions(recipe, stream)
        yield from super().contradictions(recipe, stream)

    @cached_property
    def renderer(self) -> ImageAnswerRenderer:
        return ImageAnswerRenderer(self.encoding, self.tokenizer, self.backend)

    @property
    def untrained(self) -> int:
        return int(self.encoding.images["id"])

    def open_rows(self, layout: ShardLayout, dtype: str) -> Assembler:
        return ImageRows(layout, self.encoding.max_seq_len, dtype, copies=self.image_copies)

    def encode(self, preferences: Sequence[Preference]) -> Encoded:
        """Encode each preference that can be used for training to one sample, as for preferences
        without images. The longest sample is that with the longest row: a prompt with one answer.
        """
        encoded = super().encode(preferences)
        prompts, chosen, rejected = (
            encoded.columns[name].lengths // ID_BYTES for name in PREFERENCE_COLUMNS
        )
        rows = prompts + np.maximum(chosen, rejected)
        totals = replace(encoded.totals, longest=int(rows.max(initial=0)))
        return replace(encoded, totals=totals)

    def prompt_length(self, prompt: Ids, preference: Preference) -> int:
        """Return how many tokens of a row a prompt takes once the processor has expanded its
        images. Without a processor an image counts as one token.
        """
        # Each image already has one token in `prompt`.
        added: list[int] = [max(0, image.tokens - 1) for image in preference.images]
        return len(prompt) + sum(added)

    def images_of(self, preferences: Sequence[Preference]) -> Sequence[Sequence[Any]]:
        return [preference.images for preference in preferences]

    def cut_per_answer(self, length: Any) -> Any:
        """Return zeros: the loader does not cut an answer for the sake of the other one."""
        return np.zeros_like(np.asarray(length, np.int64))
