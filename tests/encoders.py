"""Encoders for tests of functions: a kind of stream, opened with an encoding that says only what a test is about."""

from dataclasses import replace
from typing import Any

from mdsmix.encode.backends import Backend, Reference
from mdsmix.encode.pretrained import Tokenizer
from mdsmix.kinds import Kind
from mdsmix.kinds.conversations import Conversations
from mdsmix.shards.manifest import Encoding

COLUMNS = {"turns": ("turns",), "pair": ("input_ids", "labels"), "rows": ("tokens",)}


def opened(
    kind: type[Kind],
    tokenizer: Tokenizer,
    backend: Backend | None = None,
    columns: str = "",
    **settings: Any,
) -> Any:
    """`settings`: of the encoding. `columns`: of COLUMNS, the usual ones of the kind where it is empty."""
    usual = {"conversations": "turns", "pairs": "pair", "pretraining": "rows"}[kind.name]
    plain: dict[str, Any] = {
        "kind": kind.word,
        "loader": "finetuning",
        "columns": dict.fromkeys(COLUMNS[columns or usual], ""),
        "max_seq_len": 100,
        "decoder_only_format": True,
        "target_prompts": "none",
        "target_responses": "last",
        "special_tokens_in_text": "escape",
    }
    return kind(Encoding(**plain | settings)).open(tokenizer, backend or Reference(tokenizer))


def chats(
    tokenizer: Tokenizer, template: str | None, variables: dict[str, Any], **settings: Any
) -> Any:
    """The encoder of conversations under a template."""
    known = replace(tokenizer, chat_template=template, template_variables=variables)
    return opened(Conversations, known, **{"date_string": "2026-01-01"} | settings)
