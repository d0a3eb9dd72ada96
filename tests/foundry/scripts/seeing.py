"""A tiny model that sees, in LLM-Foundry's own registry of models: what `code_paths` of a YAML
names.
"""

from __future__ import annotations

from typing import Any

from composer.models import HuggingFaceModel
from llmfoundry import registry
from transformers import PreTrainedTokenizerBase

from mdsmix.load.vision import load_processor
from tests.processors import make_tiny_model


@registry.models.register("tiny_seeing")
class TinySeeing(HuggingFaceModel):
    """A randomly initialised Qwen2.5-VL, which the registry's `hf_causal_lm` does not load."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, processor: str, **_: Any) -> None:
        model = make_tiny_model(len(tokenizer), load_processor(processor))
        super().__init__(model, tokenizer=tokenizer, use_logits=True)
