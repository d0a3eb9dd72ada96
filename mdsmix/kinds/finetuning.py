"""Samples of prompts and responses, trained by the run's target policies, as Foundry's converter
makes them.

`Finetuning` is the base of pairs and conversations; `Pairs` is the kind of pairs, which no chat
template renders.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import chain, compress
from typing import Any, ClassVar

import numpy as np

from mdsmix.encode.backends import encode_texts
from mdsmix.encode.encoded import (
    Encoded,
    add_special_tokens,
    lay_out_documents,
    lay_out_pairs,
    lay_out_turns,
)
from mdsmix.encode.labels import (
    USABLE,
    Flags,
    Labels,
    Lengths,
    Targets,
    Turns,
    keep_first_turns,
)
from mdsmix.kinds.kind import Kind, packed_columns
from mdsmix.ragged import Ragged
from mdsmix.recipe import Recipe, StreamSpec
from mdsmix.record import Pair
from mdsmix.shapes.extras import FILLED_IN
from mdsmix.shards.manifest import Encoding
from mdsmix.shards.token_ids import Tokens
from mdsmix.tokenizer.card import Tokenizer

WINDOW_BYTES = 16 << 20
"""Source bytes of a work unit: half a second to two seconds of work. 100 MB of chats are 6 units:
two workers take 2.6 s for them; with units of 96 MiB (2 units, one of 5 MB) 4.6 s, with 32 MiB 3.0
s. More units cost 1 to 3 % of CPU: 4.9 to 5.3 s of user time at 16 MiB, 4.7 to 5.0 s at 96.
"""
PATH_END = "</img>"
"Ends a path in the texts of Qwen-VL; HTML has none."
PLACEHOLDERS = (
    *("<image>", "<video>", "<audio>", PATH_END),
    *("<start-image>", "<cot-process>", "<image_placeholder>"),  # ms-swift, DeepSeek-VL
    *FILLED_IN,
)
"Strings that stand for a medium in finetuning records; a stream of tokens trains them as text."
_PLACEHOLDER = re.compile("|".join(map(re.escape, PLACEHOLDERS)))


@dataclass(slots=True)
class TurnRows:
    """The tokenized rows of a batch of records, and the reasons of records that gave no row."""

    turns: Turns
    positions: list[int]
    "The position of each row's record in the batch."
    rejected: dict[int, str]
    "Positions of the records without a row -> their reason codes."
    marked: Set[int]
    "Positions of the records whose text holds the string of a special token."
    said: Mapping[str, Any]
    "Other fields of Encoded."
    images: Sequence[Sequence[Any]] = ()
    "The images of each row's record."


class Finetuning(Kind):
    word = "finetuning"
    keeps_long = True
    called: ClassVar[tuple[str, ...]] = ("finetuning",)
    window_bytes = WINDOW_BYTES

    @classmethod
    def settings(cls, recipe: Recipe, stream: StreamSpec, tokenizer: Tokenizer) -> dict[str, Any]:
        columns = dict.fromkeys(("input_ids", "labels"), f"ndarray:{tokenizer.dtype}")
        if stream.pack:
            columns = packed_columns(tokenizer, has_targets=True)
        return {"columns": columns, "too_long": stream.too_long, "pack": stream.pack}

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
        return Labels(self.targets, _turns(tokens), eos, self.untrained).losses()

    def appended(self, tokens: Tokens, eos: int | None) -> Flags | None:
        if not self.gets_eos:
            return None
        return Labels(self.targets, _turns(tokens), eos).appended()

    def cut(self, tokens: Tokens) -> Lengths:
        return Labels(self.targets, _turns(tokens), None).cut()

    def samples(self, rows: TurnRows) -> Encoded:
        """The rows that can be trained on, as samples in the stream's columns."""
        turns, targets, eos = rows.turns, self.targets, self.tokenizer.eos_id
        whole, positions = turns.samples.lengths, np.array(rows.positions, np.int64)
        if targets.too_long == "first_turns":
            turns = keep_first_turns(turns, targets.max_seq_len, eos, self.grown(turns, rows))
        turns = self.ended(turns)
        labels = Labels(targets, turns, eos, self.untrained)
        verdicts = labels.verdicts(self.grown(turns, rows))
        keep = verdicts == USABLE
        turns = turns.take(keep)
        labels = Labels(targets, turns, eos, self.untrained)
        lay_out = lay_out_turns if "turns" in self.encoding.columns else lay_out_pairs
        if self.encoding.pack:
            lay_out = lay_out_documents
        made = lay_out(labels, self.tokenizer, positions[keep])
        in_stream = np.isin(positions, positions[keep])  # one of several rows may be dropped alone
        lost = int(whole[in_stream].sum()) - len(turns.ids.values) + made.totals.lost_tokens
        totals = replace(made.totals, lost_tokens=lost, specials=len(rows.marked))
        if targets.too_long == "first_turns":
            left_out = whole[keep] - turns.samples.lengths
            totals = replace(
                totals,
                truncated_rows=int(np.count_nonzero(left_out)),
                truncated_tokens=int(left_out.sum()) + made.totals.truncated_tokens,
            )
        out = zip(positions[~in_stream].tolist(), verdicts[~in_stream], strict=True)
        images: Sequence[Sequence[Any]] = ()
        if self.untrained is not None:
            counts = turns.count(self.untrained).tolist()
            images = [of[:n] for of, n in zip(compress(rows.images, keep), counts, strict=True)]
        return replace(
            made, totals=totals, rejected=rows.rejected | dict(out), images=images, **rows.said
        )

    def ended(self, turns: Turns) -> Turns:
        """Return the turns with stop tokens as the ends of responses, where a template has them in
        the next prompt.
        """
        return turns

    def of_pairs(self, pairs: Sequence[Pair]) -> TurnRows:
        """The tokenized rows of pairs. Pairs that `special_tokens_in_text` refuses are left out."""
        rule = self.encoding.special_tokens_in_text
        texts = [*chain.from_iterable(pairs)]
        ids, *found = encode_texts(self.backend, texts, rule, self.tokenizer)
        marked, refused = ({row // 2 for row in rows} for rows in found)
        keep = np.ones(len(pairs), bool)
        keep[list(refused)] = False
        rejected = dict.fromkeys(sorted(refused), "special_token_in_text")
        turns = Turns(with_own_tokens(ids, self.tokenizer), np.ones(len(pairs), np.int64))
        said = {"placeholders": placeholders_in(texts, map("\n".join, pairs))}
        return TurnRows(turns.take(keep), np.flatnonzero(keep).tolist(), rejected, marked, said)

    def grown(self, turns: Turns, rows: TurnRows) -> Lengths | None:
        """int64: the length of each prompt and response with its images as the processor's tokens;
        None where no processor is named.
        """
        return None


def placeholders_in(texts: Iterable[str], records: Iterable[str]) -> dict[str, int]:
    """Placeholder -> how many records hold it. `texts`: the texts of the records. Those with a `<`,
    a few in a hundred, are searched for all placeholders at once. The records, as one text each,
    are searched only where a text holds any: 0.5 us a pair in place of 1.7.
    """
    holds_any = any(_PLACEHOLDER.search(text) for text in texts if "<" in text)
    some = [*records] if holds_any else []
    found = {each: sum(each in record for record in some) for each in PLACEHOLDERS}
    return {each: count for each, count in found.items() if count}


def _turns(tokens: Tokens) -> Turns:
    lengths = np.stack([tokens.prompts, tokens.responses], axis=1).ravel()
    return Turns(Ragged.from_lengths(tokens.ids.values, lengths), np.diff(tokens.turns))


def targets_of(encoding: Encoding) -> Targets:
    """The policies that a stream was converted under."""
    return Targets(**{each.name: getattr(encoding, each.name) for each in fields(Targets)})


class Pairs(Finetuning):
    name = "pairs"
    reads = Pair

    @cached_property
    def targets(self) -> Targets:
        """The stream's policies. `length>=N` with N above max_seq_len trains no prompt: the loader
        measures a prompt after it cuts it.
        """
        targets = super().targets
        is_reached = targets.least_trained_prompt <= targets.max_seq_len
        return targets if is_reached else replace(targets, target_prompts="none")

    def encode(self, pairs: Sequence[Pair]) -> Encoded:
        """One row per pair that can be trained on."""
        return self.samples(self.of_pairs(pairs))


def with_own_tokens(ids: Ragged, known: Tokenizer) -> Ragged:
    """Prompts and responses with the tokens that the tokenizer adds around a text. Where BOS begins
    both, the response's is removed.
    """
    rows = add_special_tokens(ids, known.prefix_ids, known.suffix_ids, known.dtype)
    begins = rows.lengths > 0
    begins[begins] = rows.values[rows.offsets[:-1][begins]] == known.bos_id
    begins[1::2] &= begins[0::2]
    begins[0::2] = False
    return rows.cut(begins.astype(np.int64), rows.lengths - begins)
