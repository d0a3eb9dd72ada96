"""Documents for plain language modelling.

`concat` joins documents and cuts rows of exactly max_seq_len: no padding, and documents that begin
and end inside rows. `document` makes one sample of each document, and splits those longer than
max_seq_len: no token is cut off, at the price of padding (or of packing, by `pack` or in the
loader). Under the finetuning loader a row is stored as its first token (context) and the rest
(labels), for which LLM-Foundry's collator computes exactly the language-modelling loss.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mdsmix.encode.backends import encode_texts
from mdsmix.encode.encoded import (
    Encoded,
    add_special_tokens,
    lay_out_targets,
    make_encoded,
    split_rows,
)
from mdsmix.encode.labels import USABLE, Lengths
from mdsmix.errors import RecipeError
from mdsmix.kinds.kind import Kind, packed_columns
from mdsmix.ragged import Ragged
from mdsmix.recipe import Recipe, StreamSpec
from mdsmix.record import Document
from mdsmix.shards.token_ids import Tokens
from mdsmix.tokenizer.card import Tokenizer

KEYS = ("layout", "add_bos", "add_eos", "min_tokens", "max_tokens", "pack")
"Settings of a stream that shape its samples and that are copied into its Encoding."


class Pretraining(Kind):
    """Documents. All their tokens are trained; the run's target policies do not apply."""

    name = "pretraining"
    word = "pretraining"
    reads = Document
    called = ("pretraining",)
    has_targets = False

    @classmethod
    def settings(cls, recipe: Recipe, stream: StreamSpec, tokenizer: Tokenizer) -> dict[str, Any]:
        wanted = (
            ("bos", stream.add_bos, tokenizer.bos_id),
            ("eos", stream.add_eos, tokenizer.eos_id),
        )
        for name, is_wanted, token in wanted:
            if is_wanted and token is None:
                raise RecipeError(
                    f"stream {stream.name} is to have add_{name}: true, but the tokenizer {tokenizer.name} has no {name.upper()} token, so "
                    f"nothing would mark where a document begins or ends: set add_{name}: false for this stream, or name one in "
                    f"tokenizer.kwargs ({name}_token)."
                )
        tokens = f"ndarray:{tokenizer.dtype}"
        row = recipe.max_seq_len if stream.layout == "concat" else None
        columns = {"input_ids": tokens, "labels": tokens}
        if stream.pack:
            columns = packed_columns(tokenizer, has_targets=False)
        elif recipe.has_plain_rows:
            columns = {"tokens": f"{tokens}:{row}" if row else tokens}
        elif row:
            columns = {"input_ids": f"{tokens}:1", "labels": f"{tokens}:{row - 1}"}
        own = {key: getattr(stream, key) for key in KEYS}
        return {"columns": columns, "target_prompts": "none", "target_responses": "last", **own}

    @classmethod
    def contradictions(cls, recipe: Recipe, stream: StreamSpec) -> Iterator[str]:
        if stream.max_tokens is not None and stream.max_tokens < max(1, stream.min_tokens):
            yield f"max_tokens is {stream.max_tokens}, below min_tokens {stream.min_tokens}: no document would be left."
        yield from super().contradictions(recipe, stream)
        if stream.pack and stream.layout == "concat":
            yield (
                "pack: true keeps documents whole and apart, and layout: concat joins and cuts them, so that its rows are full: "
                "set layout: document, or take pack out."
            )
        if recipe.loader == "text":
            return
        if not recipe.decoder_only_format:
            yield (
                "is pretraining data under decoder_only_format: false: the encoder would see one token of each "
                "sample; train it with train_loader.name: text or set decoder_only_format: true."
            )
        if stream.layout == "document" and not stream.add_eos and not recipe.has_plain_rows:
            yield (
                "layout: document needs add_eos: true under the finetuning loader, which would else add an EOS "
                "that the data does not hold and train on it."
            )

    @property
    def joins_units(self) -> bool:
        return self.encoding.layout == "concat"

    @property
    def splits_records(self) -> bool:
        return self.encoding.layout == "document"

    def losses(self, tokens: Tokens, eos: int | None) -> Lengths:
        return tokens.ids.lengths - 1

    def encode(self, documents: Sequence[Document]) -> Encoded:
        """Samples of documents. layout: concat gives one row per document in column `tokens`, which
        `JoinedRows` joins and cuts; layout: document gives finished rows.
        """
        rule, texts = self.encoding.special_tokens_in_text, [*chain.from_iterable(documents)]
        ids, marked, refused = encode_texts(self.backend, texts, rule, self.tokenizer)
        rows = self._framed(ids)
        verdicts = self._verdicts(ids.lengths, rows.lengths)
        verdicts[refused] = "special_token_in_text"
        keep = verdicts == USABLE
        positions, out = np.flatnonzero(keep), np.flatnonzero(~keep)
        rejected = dict(zip(out.tolist(), verdicts[out], strict=True))
        rows, lost = rows.take(keep), 0
        if not self.joins_units:
            whole = len(rows.values)
            rows, pieces = split_rows(rows, self.encoding.max_seq_len)
            positions, lost = positions[pieces], whole - len(rows.values)
        losses = int(np.maximum(rows.lengths - 1, 0).sum())
        columns, specials = self._columns(rows), len(marked)
        return make_encoded(
            columns, [rows], positions, losses, lost, specials=specials, rejected=rejected
        )

    def _framed(self, ids: Ragged) -> Ragged:
        """Documents with the tokens that the tokenizer adds around each. BOS and EOS are added
        where the stream asks for them and the tokenizer does not add them.
        """
        known = self.tokenizer
        head, tail = known.prefix_ids, known.suffix_ids
        if self.encoding.add_bos and known.bos_id is not None and head[:1] != [known.bos_id]:
            head = [known.bos_id, *head]
        if self.encoding.add_eos and known.eos_id is not None and tail[-1:] != [known.eos_id]:
            tail = [*tail, known.eos_id]
        return add_special_tokens(ids, head, tail, known.dtype)

    def _verdicts(self, bare: Lengths, whole: Lengths) -> NDArray[np.object_]:
        """object [n]: USABLE, or the reason code of a document that is left out. `bare`, `whole`:
        tokens without and with added ones.
        """
        found = np.full(len(whole), USABLE, object)
        if not self.joins_units:
            found[whole < 2] = "one_token"
        if (most := self.encoding.max_tokens) is not None:
            found[whole > most] = "max_tokens"
        found[whole < (self.encoding.min_tokens or 0)] = "min_tokens"
        found[bare == 0] = "empty"
        return found

    def _columns(self, rows: Ragged) -> Mapping[str, Ragged]:
        if self.encoding.pack:
            return {"input_ids": rows}
        if self.joins_units or self.encoding.loader == "text":
            return {"tokens": rows}
        return lay_out_targets(rows)
