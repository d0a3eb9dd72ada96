"""LLM-Foundry's own converters over local JSONL, one shard each, so that both sides hold their rows in the source's order."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from llmfoundry.command_utils import (
    convert_dataset_json_from_args,
    convert_finetuning_dataset_from_args,
)
from llmfoundry.data.finetuning.tasks import dataset_constructor, tokenize_formatted_example
from transformers import AutoTokenizer


def text(path: str, out: str, tokenizer: str, max_seq_len: int, **around: str) -> None:
    """`around`: bos_text and eos_text."""
    convert_dataset_json_from_args(
        path=path,
        out_root=out,
        compression=None,
        concat_tokens=max_seq_len,
        split="train",
        tokenizer=tokenizer,
        **around,
    )


def finetuning(
    path: str, out: str, tokenizer: str, targets: dict[str, Any], preprocessor: str | None = None
) -> int:
    """Writes `out`/train and gives the number of records that it could take: one that its tokenization, or the function
    `package.module:function`, refuses ends a whole conversion of Foundry's, so those are left out first."""
    taken = Path(path).with_suffix(".taken.jsonl")
    lines = Path(path).read_text().splitlines()
    known = AutoTokenizer.from_pretrained(tokenizer)
    prepared = dataset_constructor.get_preprocessing_fn_from_str(preprocessor) or (
        lambda each: each
    )
    good = [line for line in lines if _is_taken(prepared, json.loads(line), known)]
    taken.write_text("".join(f"{line}\n" for line in good))
    convert_finetuning_dataset_from_args(
        dataset="json",
        data_subset=None,
        splits=["train"],
        preprocessor=preprocessor,
        data_files=[str(taken)],
        skip_preprocessing=preprocessor is None,
        out_root=out,
        local=None,
        compression=None,
        num_workers=1,
        tokenizer=tokenizer,
        tokenizer_kwargs=None,
        max_seq_len=targets["max_seq_len"],
        target_prompts=targets["target_prompts"],
        target_responses=targets["target_responses"],
        encoder_decoder=not targets["decoder_only_format"],
    )
    return len(good)


def _is_taken(prepared: Any, record: Any, tokenizer: Any) -> bool:
    try:
        tokenize_formatted_example(prepared(record), tokenizer)
    except Exception:
        return False
    return True
