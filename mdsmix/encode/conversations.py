"""Conversations -> token samples, the ones that Foundry's converter makes.

A batch is one call of the tokenizer, with all turns of its conversations in one list; what follows is arithmetic on lengths.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from mdsmix.encode import tool_forms
from mdsmix.encode.backends import Backend
from mdsmix.encode.base import Encoded, Rejected
from mdsmix.encode.chat import ChatTemplate, NotRendered, Turn, answers
from mdsmix.encode.columns import Columns, laid_out
from mdsmix.encode.history import RewrittenHistory, rendered_rows
from mdsmix.encode.image_tokens import ImageToken, Wrong, fitted, overgrown
from mdsmix.encode.special import SpecialStrings
from mdsmix.encode.targets import USABLE, Targets, Turns, first_turns, label
from mdsmix.encode.tokenizer import Tokenizer
from mdsmix.errors import RecipeError
from mdsmix.record import Conversation, RichConversation

NOTHING_TRAINED = "nothing_trained"
"Why a conversation of which no answer is to be trained is left out."


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """The encoder of records with a list of messages."""

    tokenizer: Tokenizer
    backend: Backend
    template: ChatTemplate
    targets: Targets
    columns: Columns = "turns"
    special_tokens_in_text: str
    specials: SpecialStrings
    rewritten_history: RewrittenHistory = "reject"
    image: ImageToken | None = None
    "Of a stream of images: what stands for one."

    def __post_init__(self) -> None:
        if self.columns == "pair" and not self.targets.last_response_only:
            raise RecipeError(
                "columns: compact tells only the last answer from all before it, which trains the same "
                "under target_prompts: none and target_responses: last alone: use columns: turns."
            )

    def encode(
        self,
        conversations: Sequence[Conversation],
        spans: Sequence[Sequence[int]] | None = None,
    ) -> Encoded:
        """Column `turns` (json), `input_ids` and `labels`, or those of documents, one row per conversation that can be trained on; several
        where its history is rewritten and each answer gets a row. `spans`: the tokens that each image of each conversation becomes."""
        with self.template.bounded(conversations):
            rendered, positions, rejected, specials, unread = self._render(conversations)
        texts = [text for turns in rendered for turn in turns for text in turn]
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
        labels = label(self.targets, turns, eos, self.image.id if self.image else None)
        verdicts = labels.verdicts()
        encoded = laid_out(
            labels, verdicts, positions, whole, self.columns, self.tokenizer, rejected
        )
        encoded = replace(encoded, specials=specials, unread=unread)
        keep = verdicts == USABLE
        if self.image:
            kept = turns.take(keep)
            encoded = replace(encoded, placeholders=self.image.count(kept.ids, kept.counts))
        if self.rewritten_history == "each":  # what is dropped is a row, and seldom all of a record
            rows_of = np.unique(np.array(positions, np.int64)[keep], return_counts=True)[1]
            gone = {each.position for each in rejected}
            is_lost = np.array([at not in gone for at in positions], bool) & ~keep
            lost = encoded.lost_tokens + int(turns.samples.lengths[is_lost].sum())
            encoded = replace(encoded, lost_tokens=lost, rows_of=rows_of)
        return encoded

    def _with_whole_images(
        self, turns: Turns, positions: Sequence[int], spans: Sequence[Sequence[int]]
    ) -> tuple[Turns, Wrong]:
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
        unread = Counter[str]()
        for position, conversation in enumerate(conversations):
            try:
                if self._holds_special(conversation):
                    specials += 1
                    if self.special_tokens_in_text != "allow":
                        raise NotRendered("special_token_in_text")
                if conversation.trained is not None:
                    self._refuse_flags(conversation)
                if self.image:
                    conversation = fitted(self.template, self.image, conversation)
                if isinstance(conversation, RichConversation):
                    conversation = tool_forms.fitted(self.template, conversation)
                    unread.update(set(tool_forms.unread(self.template, conversation)))
                rows = rendered_rows(self.template, conversation, self.rewritten_history)
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
