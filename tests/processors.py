"""Processors of many families, made of their classes and a tokenizer of our own: nothing comes from a hub."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from mdsmix.encode import transformers_process
from mdsmix.load.vision import opened
from tests.pictures import QWEN, seeing_tokenizer

if TYPE_CHECKING:  # LLM-Foundry's environment has none
    import pytest

FAMILIES = ("qwen", "llava_next", "idefics", "gemma3")
"Of which whole batches are compared; that of another tokenizer stands in its text around an image."
OTHERS = ("llava", "pixtral", "mllama", "idefics2", "paligemma", "llava_onevision", "lfm2")
TOKENS = (
    *("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
    *("<image>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>"),
    *(f"<row_{i}_col_{j}>" for i in range(1, 7) for j in range(1, 7)),
    *("<start_of_image>", "<end_of_image>", "<image_soft_token>", "<video>", "<|image|>", "<bos>"),
    *("<|python_tag|>", "[IMG]", "[IMG_BREAK]", "[IMG_END]", "<|image_start|>", "<|image_end|>"),
    *("<|img_thumbnail|>", *(f"<|img_row_{i}_col_{j}|>" for i in range(1, 5) for j in range(1, 5))),
)
"What the tokenizer must know, whichever family reads it."
IMAGE_TOKEN = {
    **dict.fromkeys((*FAMILIES, *OTHERS), "<image>"),
    "qwen": "<|image_pad|>",
    "gemma3": "<start_of_image>",
    "mllama": "<|image|>",
    "pixtral": "[IMG]",
}
DECLARED = {
    "gemma3": {
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
        "image_token": "<image_soft_token>",
    },
    "idefics2": {"image_boundary_token": "<fake_token_around_image>"},
    "llava_onevision": {"video_token": "<video>"},
    "lfm2": {
        "image_start_token": "<|image_start|>",
        "image_end_token": "<|image_end|>",
        "image_thumbnail": "<|img_thumbnail|>",
    },
}
"What the tokenizer of a family says of itself beside its image_token."


def made(family: str, plain: Path, home: Path) -> tuple[Path, Path]:
    """Folders of a tokenizer and a processor of the family, in `home`; `plain`: a folder with a tokenizer."""
    declared = {"image_token": IMAGE_TOKEN[family], **DECLARED.get(family, {})}
    prints = QWEN
    if family != "qwen":
        prints = QWEN.replace("<|vision_start|><|image_pad|><|vision_end|>", IMAGE_TOKEN[family])
    prints = "<bos>" * (family == "mllama") + prints
    words = seeing_tokenizer(plain, home / f"{family}-tokenizer", TOKENS, prints, declared)
    processor_of(family, words).save_pretrained(home / family)
    return words, home / family


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
    if family in OTHERS or family == "gemma3":
        return _other(family, tokenizer, given)
    pixels = t.Idefics3ImageProcessor(
        size={"longest_edge": 112}, max_image_size={"longest_edge": 56}
    )
    return t.Idefics3Processor(image_processor=pixels, image_seq_len=4, **given)


def _other(family: str, tokenizer: Path, given: dict[str, Any]) -> Any:
    import transformers as t

    size, pinpoints = {"height": 56, "width": 56}, [[56, 112], [112, 56], [112, 112]]
    words = given["tokenizer"]
    if family == "gemma3":
        pixels: Any = t.Gemma3ImageProcessor(size=size)
        return t.Gemma3Processor(image_processor=pixels, image_seq_length=4, **given)
    if family == "llava":
        pixels = t.CLIPImageProcessor(size={"shortest_edge": 56}, crop_size=size)
        more: dict[str, Any] = {"patch_size": 14, "num_additional_image_tokens": 1}
        chosen = {"vision_feature_select_strategy": "default"}
        return t.LlavaProcessor(image_processor=pixels, **more, **chosen, **given)
    if family == "pixtral":
        patch = {"height": 16, "width": 16}
        pixels = t.PixtralImageProcessor(size={"longest_edge": 112}, patch_size=patch)
        return t.PixtralProcessor(image_processor=pixels, patch_size=16, **given)
    if family == "mllama":
        words.bos_token = "<bos>"
        pixels = t.MllamaImageProcessor(size=size, max_image_tiles=4)
        return t.MllamaProcessor(image_processor=pixels, **given)
    if family == "idefics2":
        edges = {"shortest_edge": 56, "longest_edge": 112}
        pixels = t.Idefics2ImageProcessor(size=edges, do_image_splitting=False)
        return t.Idefics2Processor(image_processor=pixels, image_seq_len=4, **given)
    if family == "paligemma":
        pixels = t.SiglipImageProcessor(size=size)
        pixels.image_seq_length = 4
        named = {k: getattr(words, k) for k in ("eos_token", "pad_token")}
        named |= {"bos_token": "<bos>", "unk_token": named["eos_token"]}
        given["tokenizer"] = t.GemmaTokenizerFast(
            tokenizer_file=str(tokenizer / "tokenizer.json"), **named
        )
        return t.PaliGemmaProcessor(image_processor=pixels, **given)
    if family == "llava_onevision":
        pixels = t.LlavaOnevisionImageProcessor(size=size, image_grid_pinpoints=pinpoints)
        video = t.LlavaOnevisionVideoProcessor(size=size)
        chosen = {"vision_feature_select_strategy": "full"}
        more = {"video_processor": video, "num_image_tokens": 16}
        return t.LlavaOnevisionProcessor(image_processor=pixels, **more, **chosen, **given)
    pixels = t.Lfm2VlImageProcessorFast(
        tile_size=64, max_tiles=4, min_image_tokens=4, max_image_tokens=16, max_num_patches=64
    )
    return t.Lfm2VlProcessor(image_processor=pixels, **given)


def look_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """What conversion asks of a process of its own, which takes 15 s to start, is asked of this one."""
    monkeypatch.setattr(
        transformers_process, "answered", lambda name, asked: (opened(name).answer(asked), "")
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
