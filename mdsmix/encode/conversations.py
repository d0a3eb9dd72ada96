"""Conversations -> token samples, the ones that Foundry's converter makes.

A batch is one call of the tokenizer, with all turns of its conversations in one list; what follows is arithmetic on lengths. Turns are
stored as JSON and whole, as Foundry's converter stores them. `columns: compact` takes a third of the bytes, but can say less: one
prompt and one response.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import orjson
from numpy.typing import NDArray

from mdsmix.encode import tool_forms
from mdsmix.encode.backends import Backend
from mdsmix.encode.base import Encoded, Rejected
from mdsmix.encode.chat import ChatTemplate, NotRendered, Turn, answers
from mdsmix.encode.documents import as_documents
from mdsmix.encode.history import RewrittenHistory, rendered_rows
from mdsmix.encode.image_tokens import ImageToken, Wrong, fitted, overgrown
from mdsmix.encode.pairs import encode_pairs, lacks_eos, largest_id
from mdsmix.encode.special import SpecialStrings
from mdsmix.encode.targets import (
    USABLE,
    Targets,
    Turns,
    count_cut,
    count_losses,
    filtered_by,
    judge,
    ways_out,
)
from mdsmix.encode.tokenizer import Tokenizer
from mdsmix.encode.too_long import Counts, first_turns, kept_by, row_lengths
from mdsmix.errors import RecipeError
from mdsmix.ragged import Ragged
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
    is_compact: bool
    "Columns input_ids (all before the last answer) and labels (that answer), instead of turns."
    special_tokens_in_text: str
    specials: SpecialStrings
    rewritten_history: RewrittenHistory = "reject"
    image: ImageToken | None = None
    "Of a stream of images: what stands for one."
    is_packed: bool = False
    "Columns input_ids and loss_mask, as documents to be packed."

    def __post_init__(self) -> None:
        if self.is_compact and not self.targets.last_response_only:
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
        image = self.image.id if self.image else None
        long = kept_by(ids, counts, self.targets, self.tokenizer.eos_id, image)
        whole = row_lengths(ids, counts)
        if self.image and spans is not None:
            ids, counts, wrong = self._with_whole_images(ids, counts, positions, spans)
            rejected += wrong.rejected
            whole = whole[wrong.keep]
            ids, counts, positions = wrong.take(ids, counts, positions)
        elif long:
            ids, counts = self._shortened(ids, counts)
        turns = Turns.interleaved(ids.lengths, counts)
        verdicts = judge(self.targets, turns)
        keep = verdicts == USABLE
        rejected += filtered_by(verdicts, positions)
        kept = ids.take(np.repeat(keep, 2 * counts))
        encoded = self._encoded(kept, counts[keep], rejected, specials)
        left_out = int((whole - row_lengths(ids, counts))[keep].sum())
        lost = encoded.lost_tokens + left_out
        encoded = replace(encoded, unread=unread, too_long=long, lost_tokens=lost)
        if self.image:
            encoded = replace(encoded, placeholders=self.image.count(kept, counts[keep]))
        if self.rewritten_history == "each":  # what is dropped is a row, and seldom all of a record
            dropped = ids.take(np.repeat(_lost(verdicts, positions, rejected), 2 * counts))
            rows_of = np.unique(np.array(positions, np.int64)[keep], return_counts=True)[1]
            return replace(encoded, lost_tokens=lost + len(dropped.values), rows_of=rows_of)
        return replace(encoded, ways_out=ways_out(self.targets, turns, verdicts))

    def _shortened(
        self, ids: Ragged, counts: Counts, lengths: Counts | None = None
    ) -> tuple[Ragged, Counts]:
        """The first turns of each conversation that fit, where the recipe wants that. `lengths`: as `first_turns` takes them."""
        if self.targets.too_long != "first_turns":
            return ids, counts
        return first_turns(ids, counts, self.targets.max_seq_len, lengths)

    def _with_whole_images(
        self, ids: Ragged, counts: Counts, positions: Sequence[int], spans: Sequence[Sequence[int]]
    ) -> tuple[Ragged, Counts, Wrong]:
        """The conversations, shortened where need be, and those of which an image would be cut off at max_seq_len."""
        assert self.image is not None
        of_rows = [spans[position] for position in positions]
        ids, counts = self._shortened(ids, counts, self.image.grown(ids, counts, of_rows))
        usable = judge(self.targets, Turns.interleaved(ids.lengths, counts)) == USABLE
        may_outgrow = usable & (self.image.count(ids, counts) > 0)
        grown = self.image.grown(ids, counts, of_rows)
        longest = self.targets.max_seq_len
        return ids, counts, overgrown(may_outgrow, grown, counts, positions, longest)

    def _encoded(
        self, ids: Ragged, counts: Counts, rejected: list[Rejected], specials: int
    ) -> Encoded:
        """Conversations that can be trained on, in the columns that the recipe wants."""
        if self.is_compact:
            pairs = _split_before_last(ids, counts, self.tokenizer.dtype)
            return encode_pairs(*pairs, self.targets, self.tokenizer, rejected, specials)
        if self.is_packed:
            turns = Turns.interleaved(ids.lengths, counts)
            return as_documents(ids, turns, self.targets, self.tokenizer, rejected, specials)
        return self._as_turns(ids, counts, rejected, specials)

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

    def _images(self, ids: Ragged) -> NDArray[np.bool_] | None:
        """Which tokens stand for an image: they are never trained, wherever they stand."""
        return ids.values == self.image.id if self.image else None

    def _as_turns(
        self,
        ids: Ragged,
        counts: Counts,
        rejected: list[Rejected],
        specials: int,
    ) -> Encoded:
        turns = Turns.interleaved(ids.lengths, counts)
        whole = Ragged(ids.values, ids.offsets[2 * turns.offsets])
        gets_eos = lacks_eos(whole, self.tokenizer.eos_id)
        return Encoded(
            columns={"turns": _turns_as_json(ids, turns)},
            tokens=len(ids.values),
            loss_tokens=int(count_losses(self.targets, turns, gets_eos, self._images(ids)).sum()),
            lengths=whole.lengths,
            largest_id=largest_id(ids),
            rejected=rejected,
            specials=specials,
            cut=count_cut(self.targets, turns),
        )


def _lost(
    verdicts: NDArray[np.int64], positions: Sequence[int], rejected: Sequence[Rejected]
) -> NDArray[np.bool_]:
    """bool [rows]: rows that cannot be trained on, of conversations that have other rows."""
    gone = {each.position for each in rejected}
    is_written = np.array([at not in gone for at in positions], bool)
    return np.asarray(is_written & (verdicts != USABLE))


def _split_before_last(ids: Ragged, counts: Counts, dtype: str) -> tuple[Ragged, Ragged]:
    """Of each conversation all before its last response, and that response."""
    ends = 2 * np.cumsum(counts)
    halves = np.zeros(2 * len(counts) + 1, np.int64)
    halves[1::2], halves[2::2] = ends - 1, ends
    rows = Ragged(ids.values.astype(dtype), ids.offsets[halves])
    first = np.arange(0, len(rows), 2)
    return rows.take(first), rows.take(first + 1)


def _turns_as_json(ids: Ragged, turns: Turns) -> Ragged:
    """uint8 rows: `[{"input_ids": [...], "labels": [...]}, ...]` for each conversation.

    orjson writes numpy views without a Python object per token: 80-150 M tokens/s, where cutting up
    one text of all numbers at its commas reached 60.
    """
    rows = [ids.values[start:end] for start, end in pairwise(ids.offsets.tolist())]
    pairs = [
        {"input_ids": prompt, "labels": response}
        for prompt, response in zip(rows[0::2], rows[1::2], strict=True)
    ]
    blobs = [
        orjson.dumps(pairs[start:end], option=orjson.OPT_SERIALIZE_NUMPY)
        for start, end in pairwise(turns.offsets.tolist())
    ]
    lengths = np.array([len(blob) for blob in blobs], np.int64)
    return Ragged.from_lengths(np.frombuffer(b"".join(blobs), np.uint8), lengths)
