"""The kind of documents for plain language modelling.

`layout: concat` joins documents and splits them into rows of exactly max_seq_len tokens. Rows need
no padding, but documents begin and end inside rows.

`layout: document` makes one sample of each document, and splits documents that are longer than
max_seq_len. Rows need padding, or packing (by `pack: true` or in the loader).

For the finetuning loader a row is stored as its first token (the context) and all other tokens (the
labels). So LLM-Foundry's collator gives the usual language-modelling loss.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mdsmix.encode.encoded import (
    Encoded,
    add_special_tokens,
    lay_out_targets,
    make_encoded,
    split_rows,
)
from mdsmix.encode.labels import USABLE, Lengths
from mdsmix.encode.special_tokens import encode_texts
from mdsmix.errors import RecipeError
from mdsmix.kinds.kind import Kind, make_packed_columns
from mdsmix.lazy_numpy import NDArray, np
from mdsmix.ragged import Ragged
from mdsmix.recipe import Recipe, StreamSpec
from mdsmix.record import Document, list_texts
from mdsmix.shards.token_ids import Tokens
from mdsmix.tokenizer.card import Tokenizer

KEYS = ("layout", "add_bos", "add_eos", "min_tokens", "max_tokens", "pack")
"Keys of a stream that change its samples, and that are copied into its Encoding."


class Pretraining(Kind):
    """The kind of documents. The model is trained on all their tokens: the recipe's
    `target_prompts` and `target_responses` are for prompts and responses only.
    """

    name = "pretraining"
    word = "pretraining"
    reads = Document
    key_groups = ("pretraining",)
    has_targets = False

    @classmethod
    def settings(cls, recipe: Recipe, stream: StreamSpec, tokenizer: Tokenizer) -> dict[str, Any]:
        """Return the settings that this kind adds to the stream's Encoding (the settings that a
        published stream stores), as field -> value, such as `{"layout": "concat", ...}`.

        Raises RecipeError if the stream adds BOS or EOS, and the tokenizer has no such token.
        """
        if stream.add_bos and tokenizer.bos_id is None:
            raise RecipeError(_describe_missing_token(stream, tokenizer, "bos"))
        if stream.add_eos and tokenizer.eos_id is None:
            raise RecipeError(_describe_missing_token(stream, tokenizer, "eos"))
        return {
            "columns": _list_columns(recipe, stream, tokenizer),
            "target_prompts": "none",
            "target_responses": "last",
            **{key: getattr(stream, key) for key in KEYS},
        }

    @classmethod
    def contradictions(cls, recipe: Recipe, stream: StreamSpec) -> Iterator[str]:
        """Yield a sentence for each setting of the recipe that is wrong for documents, or
        contradicts another setting. Checks for documents, such as the check of `max_tokens`, are
        added to the checks that all kinds share.
        """
        if stream.max_tokens is not None and stream.max_tokens < max(1, stream.min_tokens):
            yield (
                f"max_tokens is {stream.max_tokens} and min_tokens is {stream.min_tokens}, so no "
                "document would be left: set max_tokens to at least 1 and at least min_tokens."
            )
        yield from super().contradictions(recipe, stream)
        if stream.pack and stream.layout == "concat":
            yield (
                "pack: true keeps documents whole and apart, but layout: concat joins documents "
                "and splits them into full rows: set layout: document, or remove pack from this "
                "stream."
            )
        if recipe.loader == "text":
            return
        if not recipe.decoder_only_format:
            yield (
                "is pretraining data, which cannot be used with decoder_only_format: false, since "
                "the encoder would see only one token of each sample: set train_loader.name: text "
                "or decoder_only_format: true in the recipe."
            )
        if stream.layout == "document" and not stream.add_eos and not recipe.has_plain_rows:
            yield (
                "layout: document needs add_eos: true with the finetuning loader, which would "
                "otherwise add an EOS that is not in the data and train on this EOS: set add_eos: "
                "true for this stream."
            )

    @property
    def joins_units(self) -> bool:
        return self.encoding.layout == "concat"

    @property
    def splits_records(self) -> bool:
        return self.encoding.layout == "document"

    def count_losses(self, tokens: Tokens, eos: int | None) -> Lengths:
        return tokens.ids.lengths - 1

    def encode(self, documents: Sequence[Document]) -> Encoded:
        """Tokenize documents, and return those that can be used; the others get reason codes in
        `Encoded.rejected`.

        With `layout: document`, a document is one row, or several if it is longer than max_seq_len.

        With `layout: concat`, the result has each document as one row of any length. `JoinedRows`
        later joins the documents of all batches, and splits the joined tokens into rows of
        max_seq_len.
        """
        # Tokenize.
        texts = list_texts(documents)
        rule = self.encoding.special_tokens_in_text
        ids, with_specials, refused = encode_texts(self.backend, texts, rule, self.tokenizer)
        rows = self._add_bos_and_eos(ids)
        # Select the documents that can be used.
        verdicts = self._judge(ids.lengths, rows.lengths)
        verdicts[refused] = "special_token_in_text"
        keep = verdicts == USABLE
        positions = np.flatnonzero(keep)
        rejected = {position: verdicts[position] for position in np.flatnonzero(~keep).tolist()}
        rows = rows.take(keep)
        # With `layout: document`, split documents that are longer than a row. With `layout: concat`
        # they stay whole, since JoinedRows splits the joined documents.
        lost_tokens = 0
        if not self.joins_units:
            tokens_before = len(rows.values)
            rows, documents_of_rows = split_rows(rows, self.encoding.max_seq_len)
            positions = positions[documents_of_rows]
            lost_tokens = tokens_before - len(rows.values)
        return make_encoded(
            self._lay_out(rows),
            [rows],
            positions,
            loss_tokens=int(np.maximum(rows.lengths - 1, 0).sum()),
            lost_tokens=lost_tokens,
            specials=len(with_specials),
            rejected=rejected,
        )

    def _add_bos_and_eos(self, ids: Ragged) -> Ragged:
        """Add the tokens that the tokenizer puts around each document, and BOS and EOS if the
        stream asks for them and the tokenizer does not add them itself.
        """
        tokenizer = self.tokenizer
        head = tokenizer.prefix_ids
        tail = tokenizer.suffix_ids
        bos = tokenizer.bos_id
        eos = tokenizer.eos_id
        if self.encoding.add_bos and bos is not None and head[:1] != [bos]:
            head = [bos, *head]
        if self.encoding.add_eos and eos is not None and tail[-1:] != [eos]:
            tail = [*tail, eos]
        return add_special_tokens(ids, head, tail, tokenizer.dtype)

    def _judge(self, bare: Lengths, whole: Lengths) -> NDArray[np.object_]:
        """Return object [n]: for each document USABLE, or the reason code if it is left out.

        Args:
            bare: int64 [n], the tokens of each document without added tokens such as BOS.
            whole: int64 [n], the tokens of each document with added tokens.
        """
        # A later rule overwrites the code of an earlier rule.
        verdicts = np.full(len(whole), USABLE, object)
        if not self.joins_units:
            verdicts[whole < 2] = "one_token"
        if self.encoding.max_tokens is not None:
            verdicts[whole > self.encoding.max_tokens] = "max_tokens"
        verdicts[whole < (self.encoding.min_tokens or 0)] = "min_tokens"
        verdicts[bare == 0] = "empty"
        return verdicts

    def _lay_out(self, rows: Ragged) -> Mapping[str, Ragged]:
        """Return the same tokens in the columns that the stream's loader reads: name -> rows. For
        packed rows this is `input_ids`, for the finetuning loader `input_ids` and `labels`,
        otherwise `tokens`.
        """
        if self.encoding.pack:
            return {"input_ids": rows}
        if self.joins_units or self.encoding.loader == "text":
            return {"tokens": rows}
        return lay_out_targets(rows)


def _describe_missing_token(stream: StreamSpec, tokenizer: Tokenizer, name: str) -> str:
    """Return the message for a stream that adds a token which its tokenizer does not have.

    Args:
        stream: the stream.
        tokenizer: the tokenizer of the recipe.
        name: `bos` or `eos`.
    """
    return (
        f"stream {stream.name} sets add_{name}: true, but the tokenizer {tokenizer.name} has no "
        f"{name.upper()} token, so nothing would mark where a document begins or ends: set "
        f"add_{name}: false for this stream, or set tokenizer.kwargs.{name}_token in the recipe."
    )


def _list_columns(recipe: Recipe, stream: StreamSpec, tokenizer: Tokenizer) -> dict[str, str]:
    """Return the columns of the stream: name -> MDS encoding. The encoding contains the length of
    rows if all rows have the same length, as with `layout: concat`: `ndarray:uint16:2048`.
    """
    if stream.pack:
        return make_packed_columns(tokenizer, has_targets=False)
    tokens = f"ndarray:{tokenizer.dtype}"
    row = recipe.max_seq_len
    is_concat = stream.layout == "concat"
    if recipe.has_plain_rows:
        return {"tokens": f"{tokens}:{row}" if is_concat else tokens}
    # The finetuning loader: the first token is the context, all others are the target.
    if is_concat:
        return {"input_ids": f"{tokens}:1", "labels": f"{tokens}:{row - 1}"}
    return {"input_ids": tokens, "labels": tokens}
