"""What pairs and conversations share: samples of prompts and responses, trained by the run's target policies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from mdsmix.encode.encoded import Encoded, Rejected
from mdsmix.encode.layouts import LayOut, as_documents, as_pairs, as_turns
from mdsmix.encode.targets import (
    USABLE,
    Flags,
    Labels,
    Lengths,
    Targets,
    Turns,
    filtered_by,
    label,
)
from mdsmix.encode.tokenizer import Tokenizer
from mdsmix.kinds.kind import Kind
from mdsmix.ragged import Ragged
from mdsmix.recipe import Recipe, StreamSpec
from mdsmix.shards.manifest import Encoding
from mdsmix.shards.token_ids import Tokens

WINDOW_BYTES = 16 << 20
"""Half a second to two seconds of work. 100 MB of chats are 6 units: two workers take 2.6 s for them, where 96 MiB (2 units, one of 5 MB)
take 4.6 s and 32 MiB 3.0 s. A unit's fresh start costs 1 to 3 % of CPU: 4.9 to 5.3 s of user time at 16 MiB, 4.7 to 5.0 at 96."""


class Finetuning(Kind):
    word = "finetuning"
    keys: ClassVar[tuple[str, ...]] = ("too_long", "pack")
    called = "finetuning"
    window_bytes = WINDOW_BYTES

    @classmethod
    def settings(
        cls, recipe: Recipe, stream: StreamSpec, tokenizer: Tokenizer
    ) -> Mapping[str, Any]:
        return {"too_long": stream.too_long, "pack": stream.pack}

    @classmethod
    def contradictions(cls, recipe: Recipe, stream: StreamSpec) -> Iterator[str]:
        yield from super().contradictions(recipe, stream)
        if recipe.loader == "text":
            yield (
                "is finetuning data, which the text loader cannot read; set train_loader.name: finetuning, "
                "which reads pretraining streams too, or name: mdsmix, which reads both kinds as they are where mdsmix is "
                "installed beside LLM-Foundry, or take the stream out."
            )
        if stream.too_long != "cut" and not recipe.decoder_only_format:
            yield (
                f"too_long: {stream.too_long} stands beside decoder_only_format: false, where the loader cuts context and target "
                "apart: set too_long: cut."
            )

    @cached_property
    def targets(self) -> Targets:
        return targets_of(self.encoding)

    def losses(self, tokens: Tokens, eos: int | None) -> Lengths:
        return label(self.targets, _turns(tokens), eos, self.untrained).losses()

    def cut(self, tokens: Tokens) -> Lengths:
        return label(self.targets, _turns(tokens), None).cut()

    def samples(
        self, labels: Labels, positions: Sequence[int], whole: Lengths, rejected: list[Rejected]
    ) -> tuple[Encoded, Flags]:
        """The samples that can be trained on, and which of all they are. `positions`: the record of each; `whole`: its tokens before any
        were left out; `rejected` takes the others."""
        verdicts = labels.verdicts()
        keep = verdicts == USABLE
        rejected += filtered_by(verdicts, positions)
        kept = labels.take(keep)
        made = self._lay_out(kept, self.tokenizer)
        left_out = int((whole[keep] - kept.turns.samples.lengths).sum())
        lost = made.lost_tokens + left_out
        return replace(made, rejected=rejected, lost_tokens=lost), keep

    @property
    def _lay_out(self) -> LayOut:
        if self.encoding.pack:
            return as_documents
        return as_turns if "turns" in self.encoding.columns else as_pairs


def _turns(tokens: Tokens) -> Turns:
    lengths = np.stack([tokens.prompts, tokens.responses], axis=1).ravel()
    return Turns(Ragged.from_lengths(tokens.ids.values, lengths), np.diff(tokens.turns))


def targets_of(encoding: Encoding) -> Targets:
    """The policies that a stream was converted under."""
    return Targets(
        target_prompts=encoding.target_prompts,
        target_responses=encoding.target_responses,
        decoder_only_format=encoding.decoder_only_format,
        max_seq_len=encoding.max_seq_len,
        too_long=encoding.too_long,
    )
