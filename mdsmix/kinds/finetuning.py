"""Samples of prompts and responses, as LLM-Foundry's converter makes them. The run's target
policies (`target_prompts`, `target_responses`) decide which tokens the model is trained on.

`Finetuning` is the base of pairs and conversations; `Pairs` is the kind of pairs, which no chat
template renders.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from functools import cached_property
from itertools import compress
from typing import Any, ClassVar

import numpy as np

from mdsmix.encode.encoded import Encoded, lay_out_documents, lay_out_pairs, lay_out_turns
from mdsmix.encode.labels import USABLE, Flags, Labels, Lengths, Targets, Turns, keep_first_turns
from mdsmix.kinds.kind import Kind, packed_columns
from mdsmix.kinds.turn_rows import TurnRows, tokenize_pairs
from mdsmix.ragged import Ragged
from mdsmix.recipe import Recipe, StreamSpec
from mdsmix.record import Pair
from mdsmix.shards.manifest import Encoding
from mdsmix.shards.token_ids import Tokens
from mdsmix.tokenizer.card import Tokenizer

WINDOW_BYTES = 16 << 20
"""Source bytes of a work unit: half a second to two seconds of work. 100 MB of chats are 6 units:
two workers take 2.6 s for them; with units of 96 MiB (2 units, one of 5 MB) 4.6 s, with 32 MiB 3.0
s. More units cost 1 to 3 % of CPU: 4.9 to 5.3 s of user time at 16 MiB, 4.7 to 5.0 s at 96.
"""


class Finetuning(Kind):
    """The base of all kinds whose records have prompts and responses, so that the run's target
    policies decide which tokens the model is trained on.
    """

    word = "finetuning"
    keeps_long = True
    key_groups: ClassVar[tuple[str, ...]] = ("finetuning",)
    window_bytes = WINDOW_BYTES

    @classmethod
    def settings(cls, recipe: Recipe, stream: StreamSpec, tokenizer: Tokenizer) -> dict[str, Any]:
        if stream.pack:
            columns = packed_columns(tokenizer, has_targets=True)
        else:
            columns = dict.fromkeys(("input_ids", "labels"), f"ndarray:{tokenizer.dtype}")
        return {"columns": columns, "too_long": stream.too_long, "pack": stream.pack}

    @classmethod
    def contradictions(cls, recipe: Recipe, stream: StreamSpec) -> Iterator[str]:
        """Yield a sentence for each wrong or contradictory setting, among them those that only
        concern finetuning streams, such as `too_long`.
        """
        yield from super().contradictions(recipe, stream)
        if recipe.loader == "text":
            yield (
                "is finetuning data, which the text loader cannot read: set train_loader.name: "
                "finetuning, which reads pretraining streams too, or name: mdsmix, if mdsmix is "
                "installed next to LLM-Foundry, or remove the stream."
            )
        if stream.too_long != "cut" and not recipe.decoder_only_format:
            yield (
                f"too_long: {stream.too_long} cannot be used with decoder_only_format: false, "
                "because the loader then truncates context and target separately: set too_long: "
                "cut."
            )

    @cached_property
    def targets(self) -> Targets:
        return targets_of(self.encoding)

    def losses(self, tokens: Tokens, eos: int | None) -> Lengths:
        return Labels(self.targets, _turns(tokens), eos, self.untrained).losses()

    def appended(self, tokens: Tokens, eos: int | None) -> Flags | None:
        if not self.gets_eos:
            return None
        return Labels(self.targets, _turns(tokens), eos).appended()

    def cut(self, tokens: Tokens) -> Lengths:
        return Labels(self.targets, _turns(tokens), None).cut()

    def make_samples(self, rows: TurnRows) -> Encoded:
        """Return the rows that can be used for training, as samples in the stream's columns. A
        record that has no such row gets a reason code in `Encoded.rejected`.
        """
        eos = self.tokenizer.eos_id
        positions = np.array(rows.positions, np.int64)
        # Leave out the last turns that do not fit, and set the ends of answers.
        is_shortened = self.targets.too_long == "first_turns"
        turns = rows.turns
        if is_shortened:
            lengths = self.expanded_lengths(turns, rows)
            turns = keep_first_turns(turns, self.targets.max_seq_len, eos, lengths)
        turns = self.end_answers(turns)
        # Select the rows that can be used for training.
        labels = Labels(self.targets, turns, eos, self.untrained)
        verdicts = labels.verdicts(self.expanded_lengths(turns, rows))
        keep = verdicts == USABLE
        turns = turns.take(keep)
        # Lay them out in columns.
        labels = Labels(self.targets, turns, eos, self.untrained)
        encoded = self._lay_out(labels, positions[keep])
        # A record is in the stream if any of its rows is; one of several rows may be left out.
        in_stream = np.isin(positions, positions[keep])
        faults = dict(zip(positions[~in_stream].tolist(), verdicts[~in_stream], strict=True))
        # Count the tokens that were lost on the way.
        lengths_before = rows.turns.samples.lengths
        lost_before = int(lengths_before[in_stream].sum()) - len(turns.ids.values)
        totals = replace(
            encoded.totals,
            lost_tokens=lost_before + encoded.totals.lost_tokens,
            specials=len(rows.with_specials),
        )
        if is_shortened:
            shortened_by = lengths_before[keep] - turns.samples.lengths
            totals = replace(
                totals,
                truncated_rows=int(np.count_nonzero(shortened_by)),
                truncated_tokens=int(shortened_by.sum()) + encoded.totals.truncated_tokens,
            )
        return replace(
            encoded,
            totals=totals,
            rejected=rows.rejected | faults,
            images=self._images_in(turns, list(compress(rows.images, keep))),
            unread=rows.unread,
            placeholders=rows.placeholders,
        )

    def _lay_out(self, labels: Labels, positions: Lengths) -> Encoded:
        if self.encoding.pack:
            return lay_out_documents(labels, self.tokenizer, positions)
        if "turns" in self.encoding.columns:
            return lay_out_turns(labels, self.tokenizer, positions)
        return lay_out_pairs(labels, self.tokenizer, positions)

    def _images_in(self, turns: Turns, images: Sequence[Sequence[Any]]) -> Sequence[Sequence[Any]]:
        """Return the images of each row: if the row has n image tokens, the first n images of its
        record.

        Args:
            images: all images of each row's record.
        """
        if self.untrained is None:
            return ()
        counts = turns.count(self.untrained).tolist()
        return [record_images[:count] for record_images, count in zip(images, counts, strict=True)]

    def end_answers(self, turns: Turns) -> Turns:
        """Return the turns with stop tokens moved to the ends of responses, if the template prints
        them at the beginning of the next prompt. Here: the turns unchanged.
        """
        return turns

    def expanded_lengths(self, turns: Turns, rows: TurnRows) -> Lengths | None:
        """Return int64: the length in tokens of each prompt and response, with each image counted
        as the tokens that the processor makes of it. None if the recipe names no processor.
        """
        return None


def _turns(tokens: Tokens) -> Turns:
    """Return the turns of stored samples: the ids split into prompt, response, prompt, and so on,
    and the number of turns of each sample.
    """
    lengths = np.stack([tokens.prompts, tokens.responses], axis=1).ravel()
    return Turns(Ragged.from_lengths(tokens.ids.values, lengths), np.diff(tokens.turns))


def targets_of(encoding: Encoding) -> Targets:
    """Return the target policies that a stream was converted with."""
    return Targets(**{field.name: getattr(encoding, field.name) for field in fields(Targets)})


class Pairs(Finetuning):
    """The kind of pairs: a prompt and its response, tokenized as they are."""

    name = "pairs"
    reads = Pair

    @cached_property
    def targets(self) -> Targets:
        """The stream's target policies. With `length>=N` and N above max_seq_len, no prompt is used
        for training, since the loader truncates a prompt before it measures it.
        """
        targets = super().targets
        is_reached = targets.least_trained_prompt <= targets.max_seq_len
        return targets if is_reached else replace(targets, target_prompts="none")

    def encode(self, pairs: Sequence[Pair]) -> Encoded:
        """Encode each pair that can be used for training to one row."""
        rows = tokenize_pairs(pairs, self.encoding, self.tokenizer, self.backend)
        return self.make_samples(rows)
