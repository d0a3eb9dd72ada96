"""Conversations: rendered by the tokenizer's chat template, and cut into the turns that are trained, as Foundry's converter makes them.

A batch is one call of the tokenizer, with all turns of its conversations in one list; what follows is arithmetic on lengths.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from mdsmix.encode import tool_forms
from mdsmix.encode.chat import ChatTemplate, NotRendered, Turn, answers, open_template
from mdsmix.encode.encoded import Encoded, Rejected
from mdsmix.encode.history import rendered_rows
from mdsmix.encode.image_tokens import ImageToken, Sieve, fitted, overgrown
from mdsmix.encode.special import SpecialStrings
from mdsmix.encode.targets import USABLE, Turns, first_turns, label
from mdsmix.encode.tokenizer import Tokenizer
from mdsmix.kinds.finetuning import Finetuning
from mdsmix.kinds.kind import packed_columns
from mdsmix.recipe import Recipe, StreamSpec
from mdsmix.record import Conversation, RichConversation
from mdsmix.words import hint

NOTHING_TRAINED = "nothing_trained"
"Why a conversation of which no answer is to be trained is left out."
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

    @classmethod
    def columns(cls, recipe: Recipe, stream: StreamSpec, tokenizer: Tokenizer) -> dict[str, str]:
        if stream.pack:
            return packed_columns(f"ndarray:{tokenizer.dtype}", has_targets=True)
        if stream.columns == "turns":
            return {"turns": "json"}
        return dict.fromkeys(("input_ids", "labels"), f"ndarray:{tokenizer.dtype}")

    @classmethod
    def settings(
        cls, recipe: Recipe, stream: StreamSpec, tokenizer: Tokenizer
    ) -> Mapping[str, Any]:
        return {
            **super().settings(recipe, stream, tokenizer),
            "compact": stream.columns == "compact",
            "date_string": stream.date_string,
            "rewritten_history": stream.rewritten_history,
            "template": dict(recipe.tokenizer.template),
        }

    @classmethod
    def contradictions(cls, recipe: Recipe, stream: StreamSpec) -> Iterator[str]:
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

    @property
    def splits_records(self) -> bool:
        return self.encoding.rewritten_history == "each"

    @classmethod
    def lacking(cls, recipe: Recipe, stream: StreamSpec, tokenizer: Tokenizer) -> Iterator[str]:
        reads = open_template(tokenizer.chat_template, {}).reads
        for name in recipe.tokenizer.template:
            if name in OWN_VARIABLES:
                yield f"tokenizer.template.{name} is given by mdsmix itself; {OWN_VARIABLES[name]}"
            elif name not in reads:
                yield (
                    f"tokenizer.template.{name} would change nothing, since the chat template of {tokenizer.name} does not "
                    f"read it: {hint(name, sorted(reads - set(OWN_VARIABLES)))}"
                )

    def template(self, tokenizer: Tokenizer) -> ChatTemplate:
        variables = tokenizer.template_variables | self.encoding.template
        return open_template(tokenizer.chat_template, variables, self.encoding.date_string)

    @cached_property
    def opened_template(self) -> ChatTemplate:
        return self.template(self.tokenizer)

    @cached_property
    def specials(self) -> SpecialStrings:
        return SpecialStrings.of(self.tokenizer.special_tokens)

    @cached_property
    def image(self) -> ImageToken | None:
        """What stands for an image, in a stream of images."""
        return None

    def encode(
        self,
        conversations: Sequence[Conversation],
        spans: Sequence[Sequence[int]] | None = None,
    ) -> Encoded:
        """Column `turns` (json), `input_ids` and `labels`, or those of documents, one row per conversation that can be trained on; several
        where its history is rewritten and each answer gets a row. `spans`: the tokens that each image of each conversation becomes."""
        with self.opened_template.bounded(conversations):
            rendered, positions, rejected, specials, unread = self._render(conversations)
        texts = [text for turns in rendered for turn in turns for text in turn]
        if self.image and any(self.image.around):
            texts = [self.image.in_text(text) for text in texts]
        ids = self.backend.encode(texts, match_special=True)
        counts = np.array([len(turns) for turns in rendered], np.int64)
        if self.image:
            wrong = self.image.miscounted(ids, counts, positions, conversations)
            rejected += wrong.rejected
            ids, counts, positions = wrong.take(ids, counts, positions)
        turns, eos = Turns(ids, counts), self.tokenizer.eos_id
        whole = turns.samples.lengths
        if self.image and spans is not None:
            turns, wrong = self._with_whole_images(turns, positions, spans)
            rejected += wrong.rejected
            whole = whole[wrong.keep]
            ids, counts, positions = wrong.take(turns.ids, turns.counts, positions)
            turns = Turns(ids, counts)
        elif self.targets.too_long == "first_turns":
            turns = first_turns(turns, self.targets.max_seq_len, eos)
        labels = label(self.targets, turns, eos, self.untrained)
        encoded, keep = self.samples(labels, positions, whole, rejected)
        encoded = replace(encoded, specials=specials, unread=unread)
        if self.image:
            kept = turns.take(keep)
            encoded = replace(encoded, placeholders=self.image.count(kept.ids, kept.counts))
        if (
            self.encoding.rewritten_history == "each"
        ):  # what is dropped is a row, and seldom all of a record
            rows_of = np.unique(np.array(positions, np.int64)[keep], return_counts=True)[1]
            gone = {each.position for each in rejected}
            is_lost = np.array([at not in gone for at in positions], bool) & ~keep
            lost = encoded.lost_tokens + int(turns.samples.lengths[is_lost].sum())
            encoded = replace(encoded, lost_tokens=lost, rows_of=rows_of)
        return encoded

    def _with_whole_images(
        self, turns: Turns, positions: Sequence[int], spans: Sequence[Sequence[int]]
    ) -> tuple[Turns, Sieve]:
        """The conversations, shortened where need be, and those of which an image would be cut off at max_seq_len."""
        assert self.image is not None
        of_rows, longest = [spans[position] for position in positions], self.targets.max_seq_len
        if self.targets.too_long == "first_turns":
            grown = self.image.grown(turns.ids, turns.counts, of_rows)
            turns = first_turns(turns, longest, self.tokenizer.eos_id, grown)
        verdicts = label(self.targets, turns, self.tokenizer.eos_id, self.image.id).verdicts()
        may_outgrow = (verdicts == USABLE) & (self.image.count(turns.ids, turns.counts) > 0)
        grown = self.image.grown(turns.ids, turns.counts, of_rows)
        return turns, overgrown(may_outgrow, grown, turns.counts, positions, longest)

    def _render(
        self, conversations: Sequence[Conversation]
    ) -> tuple[list[list[Turn]], list[int], list[Rejected], int, Counter[str]]:
        """The turns of each row, which conversation it is of, those that give none, how many hold a special token, and what
        the template does not print."""
        rendered, positions, rejected, specials = [], [], [], 0
        rule = self.encoding.rewritten_history
        unread = Counter[str]()
        for position, conversation in enumerate(conversations):
            try:
                if self._holds_special(conversation):
                    specials += 1
                    if self.encoding.special_tokens_in_text != "allow":
                        raise NotRendered("special_token_in_text")
                if conversation.trained is not None:
                    self._refuse_flags(conversation)
                if self.image:
                    conversation = fitted(self.opened_template, self.image, conversation)
                if isinstance(conversation, RichConversation):
                    conversation = tool_forms.fitted(self.opened_template, conversation)
                    unread.update(set(tool_forms.unread(self.opened_template, conversation)))
                rows = rendered_rows(self.opened_template, conversation, rule)
                rendered += rows
                positions += [position] * len(rows)
            except NotRendered as fault:
                is_good = fault.reason == NOTHING_TRAINED
                rejected.append(Rejected(position, fault.reason, is_good, fault.detail))
        return rendered, positions, rejected, specials, unread

    def _refuse_flags(self, conversation: Conversation) -> None:
        """NotRendered for a conversation of which nothing is trained, or of which an answer is that is not to be."""
        trained = list(answers(conversation))
        if not trained:
            raise NotRendered(NOTHING_TRAINED)
        every = list(answers(conversation._replace(trained=None)))
        if self.targets.target_prompts != "none" and every[: len(trained)] != trained:
            raise NotRendered("untrained_in_prompt")

    def _holds_special(self, conversation: Conversation) -> bool:
        return self.specials.within(conversation.said)
