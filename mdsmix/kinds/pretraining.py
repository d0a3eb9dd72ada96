"""Documents for plain language modelling: joined and cut into full rows, or one row a document."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mdsmix.encode.backends import Backend
from mdsmix.encode.base import Encoder
from mdsmix.encode.targets import Lengths
from mdsmix.encode.tokenizer import Tokenizer
from mdsmix.kinds.assemble import Assembler, JoinedRows
from mdsmix.kinds.base import Kind, packed_columns
from mdsmix.recipe import Recipe, StreamSpec
from mdsmix.record import Document
from mdsmix.shards.manifest import Encoding
from mdsmix.shards.mds import Layout
from mdsmix.shards.tokens import Tokens


class Pretraining(Kind):
    """All its tokens are trained, whatever is trained of a conversation."""

    name = "pretraining"
    word = "pretraining"
    reads = Document
    keys = ("layout", "add_bos", "add_eos", "min_tokens", "max_tokens", "pack")
    called = "pretraining"
    has_targets = False

    def columns(self, recipe: Recipe, stream: StreamSpec, tokenizer: Tokenizer) -> dict[str, str]:
        tokens = f"ndarray:{tokenizer.dtype}"
        if stream.pack:
            return packed_columns(tokens, has_targets=False)
        row = recipe.max_seq_len if stream.layout == "concat" else None
        if recipe.has_plain_rows:
            return {"tokens": f"{tokens}:{row}" if row else tokens}
        if row:
            return {"input_ids": f"{tokens}:1", "labels": f"{tokens}:{row - 1}"}
        return {"input_ids": tokens, "labels": tokens}

    def settings(
        self, recipe: Recipe, stream: StreamSpec, tokenizer: Tokenizer
    ) -> Mapping[str, Any]:
        return {
            "target_prompts": "none",
            "target_responses": "last",
            **{key: getattr(stream, key) for key in self.keys},
        }

    def contradictions(self, recipe: Recipe, stream: StreamSpec) -> Iterator[str]:
        if stream.min_tokens < 0:
            yield f"min_tokens is {stream.min_tokens}; it cannot be below 0."
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

    def lacking(self, recipe: Recipe, stream: StreamSpec, tokenizer: Tokenizer) -> Iterator[str]:
        wanted = (
            ("bos", stream.add_bos, tokenizer.bos_id),
            ("eos", stream.add_eos, tokenizer.eos_id),
        )
        for name, is_wanted, token in wanted:
            if is_wanted and token is None:
                yield (
                    f"stream {stream.name} is to have add_{name}: true, but the tokenizer {tokenizer.name} has no "
                    f"{name.upper()} token, so nothing would mark where a document {'begins' if name == 'bos' else 'ends'}: "
                    f"set add_{name}: false for this stream, or name one in tokenizer.kwargs ({name}_token)."
                )

    def open_encoder(self, encoding: Encoding, tokenizer: Tokenizer, backend: Backend) -> Encoder:
        from mdsmix.encode.pretraining import Documents

        return Documents(
            tokenizer=tokenizer,
            backend=backend,
            max_seq_len=encoding.max_seq_len,
            is_concat=self.joins_units(encoding),
            has_targets=encoding.loader == "finetuning",
            add_bos=bool(encoding.add_bos),
            add_eos=bool(encoding.add_eos),
            min_tokens=encoding.min_tokens or 0,
            max_tokens=encoding.max_tokens,
            special_tokens_in_text=encoding.special_tokens_in_text,
            is_packed=encoding.pack,
        )

    def open_rows(self, encoding: Encoding, layout: Layout, dtype: str) -> Assembler:
        if self.joins_units(encoding):
            return JoinedRows(layout, encoding.max_seq_len, dtype)
        return super().open_rows(encoding, layout, dtype)

    def joins_units(self, encoding: Encoding) -> bool:
        return encoding.layout == "concat"

    def splits_records(self, encoding: Encoding) -> bool:
        return encoding.layout == "document"

    def losses(self, tokens: Tokens, encoding: Encoding, eos: int | None) -> Lengths:
        return tokens.ids.lengths - 1
