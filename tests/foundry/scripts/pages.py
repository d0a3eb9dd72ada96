"""A block of a page, run in this environment with a model that has learned nothing."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def run(code: str) -> int:
    """How many batches the block's `trainer` was given."""
    torch.manual_seed(1)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 1}
    config = LlamaConfig(vocab_size=2048, num_hidden_layers=1, num_key_value_heads=1, **shape)
    names: dict[str, Any] = {"model": LlamaForCausalLM(config)}
    exec(code, names)
    return int(names["trainer"].state.timestamp.batch.value)
