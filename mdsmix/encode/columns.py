"""Which columns a stream is written in: decided by the recipe's one dial, never by the content of a record.

`train_loader.name` is `text` or `finetuning`; LLM-Foundry's two loaders read nothing of each other's columns, so one
recipe always gives streams that mix. Sources: llmfoundry/data/text_data.py and data/finetuning/tasks.py.
"""

from __future__ import annotations

from mdsmix.encode.tokenizer import Tokenizer
from mdsmix.recipe import Recipe, StreamSpec


def columns_of(recipe: Recipe, stream: StreamSpec, tokenizer: Tokenizer) -> dict[str, str]:
    """Column name -> MDS encoding for a stream with a source."""
    tokens = f"ndarray:{tokenizer.dtype}"
    if stream.kind == "finetuning":
        if has_messages(stream) and stream.columns == "turns":
            return {"turns": "json"}
        return {"input_ids": tokens, "labels": tokens}
    row = recipe.max_seq_len if stream.layout == "concat" else None
    if recipe.loader == "text":
        return {"tokens": f"{tokens}:{row}" if row else tokens}
    if row:
        return {"input_ids": f"{tokens}:1", "labels": f"{tokens}:{row - 1}"}
    return {"input_ids": tokens, "labels": tokens}


def has_messages(stream: StreamSpec) -> bool:
    return stream.source is not None and stream.source.messages is not None
