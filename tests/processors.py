"""Processors of three families, made of their classes and a tokenizer of our own: nothing comes from a hub."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from mdsmix.encode import processor
from mdsmix.load.vision import opened

if TYPE_CHECKING:  # LLM-Foundry's environment has none
    import pytest

FAMILIES = ("qwen", "llava_next", "idefics")
TOKENS = (
    *("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
    *("<image>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>"),
    *(f"<row_{i}_col_{j}>" for i in range(1, 7) for j in range(1, 7)),
)
"What the tokenizer must know, whichever family reads it."
IMAGE_TOKEN = {"qwen": "<|image_pad|>", "llava_next": "<image>", "idefics": "<image>"}


def processor_of(family: str, tokenizer: Path, template: str = "") -> Any:
    """A processor whose images become 4 to 200 tokens; `tokenizer`: a folder whose tokenizer knows TOKENS."""
    import transformers as t

    words = t.AutoTokenizer.from_pretrained(str(tokenizer))
    given: dict[str, Any] = {"tokenizer": words} | ({"chat_template": template} if template else {})
    if family == "qwen":
        given["tokenizer"] = t.Qwen2TokenizerFast(
            tokenizer_file=str(tokenizer / "tokenizer.json"),
            **{k: getattr(words, k) for k in ("eos_token", "pad_token", "unk_token")},
        )
        pixels = t.Qwen2VLImageProcessor(min_pixels=56 * 56, max_pixels=224 * 224)
        if (
            hasattr(t, "Qwen2VLVideoProcessor")
            and "video_processor" in t.Qwen2_5_VLProcessor.__init__.__code__.co_varnames
        ):
            given["video_processor"] = t.Qwen2VLVideoProcessor()
        return t.Qwen2_5_VLProcessor(image_processor=pixels, **given)
    if family == "llava_next":
        size = {"shortest_edge": 56}
        pins = [[56, 112], [112, 56], [112, 112]]
        pixels = t.LlavaNextImageProcessor(
            size=size, crop_size={"height": 56, "width": 56}, image_grid_pinpoints=pins
        )
        chosen = {"patch_size": 14, "vision_feature_select_strategy": "default"}
        return t.LlavaNextProcessor(
            image_processor=pixels, num_additional_image_tokens=1, **chosen, **given
        )
    pixels = t.Idefics3ImageProcessor(
        size={"longest_edge": 112}, max_image_size={"longest_edge": 56}
    )
    return t.Idefics3Processor(image_processor=pixels, image_seq_len=4, **given)


def look_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """What conversion asks of a process of its own, which takes 15 s to start, is asked of this one."""
    monkeypatch.setattr(processor, "_ask", lambda name: opened(name).card())
    monkeypatch.setattr(
        processor.Counter,
        "_asked",
        lambda self, sizes: opened(str(processor.snapshot_of(self.digest))).counts_or_why(sizes),
    )


def tiny_model(vocabulary: int, seeing: Any) -> Any:
    """A randomly initialised Qwen2.5-VL, small enough for a test."""
    import torch
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    torch.manual_seed(1)
    config = Qwen2_5_VLConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        rope_scaling={"type": "mrope", "mrope_section": [2, 3, 3]},
        tie_word_embeddings=False,
        vision_config={
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 2,
            "out_hidden_size": 32,
            "fullatt_block_indexes": [0],
        },
        image_token_id=seeing.token_id,
        vision_start_token_id=seeing.tokenizer.convert_tokens_to_ids("<|vision_start|>"),
        vision_end_token_id=seeing.tokenizer.convert_tokens_to_ids("<|vision_end|>"),
        video_token_id=seeing.tokenizer.convert_tokens_to_ids("<|video_pad|>"),
    )
    return Qwen2_5_VLForConditionalGeneration(config)
