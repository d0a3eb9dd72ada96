"""Processors of many families, made of their classes and a tokenizer of our own: nothing comes from
a hub.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from mdsmix.load.vision import load_processor
from mdsmix.processor import server
from tests.pictures import QWEN, seeing_tokenizer

if TYPE_CHECKING:  # LLM-Foundry's environment has none
    import pytest

FAMILIES = ("qwen", "llava_next", "idefics", "gemma3")
"Of which whole batches are compared; that of another tokenizer stands in its text around an image."
TOKENS = (
    *("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
    *("<image>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>"),
    *(f"<row_{i}_col_{j}>" for i in range(1, 7) for j in range(1, 7)),
    *("<start_of_image>", "<end_of_image>", "<image_soft_token>", "<video>", "<|image|>", "<bos>"),
    *("<|python_tag|>", "[IMG]", "[IMG_BREAK]", "[IMG_END]", "<|image_start|>", "<|image_end|>"),
    *("<|img_thumbnail|>", *(f"<|img_row_{i}_col_{j}|>" for i in range(1, 5) for j in range(1, 5))),
)
"What the tokenizer must know, whichever family reads it."


def made(family: str, plain: Path, home: Path) -> tuple[Path, Path]:
    """Folders of a tokenizer and a processor of the family, in `home`; `plain`: a folder with a
    tokenizer.
    """
    declared = {"image_token": IMAGE_TOKEN[family], **DECLARED.get(family, {})}
    seen = "<|vision_start|><|image_pad|><|vision_end|>"
    prints = QWEN if family == "qwen" else QWEN.replace(seen, IMAGE_TOKEN[family])
    prints = "<bos>" * (family == "mllama") + prints
    words = seeing_tokenizer(plain, home / f"{family}-tokenizer", TOKENS, prints, declared)
    processor_of(family, words).save_pretrained(home / family)
    return words, home / family


SIZE, PINPOINTS = {"height": 56, "width": 56}, [[56, 112], [112, 56], [112, 112]]
CLIP = {"size": {"shortest_edge": 56}, "crop_size": SIZE}
PATCHES = {"patch_size": 14, "num_additional_image_tokens": 1}
PATCHES |= {"vision_feature_select_strategy": "default"}
TILES = {"tile_size": 64, "max_tiles": 4, "min_image_tokens": 4, "max_image_tokens": 16}
EDGES = {"size": {"shortest_edge": 56, "longest_edge": 112}, "do_image_splitting": False}
SMALL = {"size": {"longest_edge": 112}, "max_image_size": {"longest_edge": 56}}
PIXTRAL = {"size": {"longest_edge": 112}, "patch_size": {"height": 16, "width": 16}}
FULL = {"vision_feature_select_strategy": "full", "num_image_tokens": 16}
SPLIT = {"size": SIZE, "image_grid_pinpoints": PINPOINTS}
CLASSES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    # family: its processor's class, its images' class, the arguments of these, and those of the
    # processor
    "qwen": ("Qwen2_5_VL", "Qwen2VL", {"min_pixels": 56 * 56, "max_pixels": 224 * 224}, {}),
    "llava_next": ("LlavaNext", "LlavaNext", CLIP | {"image_grid_pinpoints": PINPOINTS}, PATCHES),
    "idefics": ("Idefics3", "Idefics3", SMALL, {"image_seq_len": 4}),
    "gemma3": ("Gemma3", "Gemma3", {"size": SIZE}, {"image_seq_length": 4}),
    "llava": ("Llava", "CLIP", CLIP, PATCHES),
    "pixtral": ("Pixtral", "Pixtral", PIXTRAL, {"patch_size": 16}),
    "mllama": ("Mllama", "Mllama", {"size": SIZE, "max_image_tiles": 4}, {}),
    "idefics2": ("Idefics2", "Idefics2", EDGES, {"image_seq_len": 4}),
    "paligemma": ("PaliGemma", "Siglip", {"size": SIZE}, {}),
    "llava_onevision": ("LlavaOnevision", "LlavaOnevision", SPLIT, FULL),
    "lfm2": ("Lfm2Vl", "Lfm2Vl", TILES | {"max_num_patches": 64}, {}),
}
IMAGE_TOKEN = dict.fromkeys(CLASSES, "<image>") | {"mllama": "<|image|>", "pixtral": "[IMG]"}
IMAGE_TOKEN |= {"qwen": "<|image_pad|>", "gemma3": "<start_of_image>"}
GEMMA = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
LFM = {"image_start_token": "<|image_start|>", "image_end_token": "<|image_end|>"}
DECLARED = {
    "gemma3": GEMMA | {"image_token": "<image_soft_token>"},
    "idefics2": {"image_boundary_token": "<fake_token_around_image>"},
    "llava_onevision": {"video_token": "<video>"},
    "lfm2": LFM | {"image_thumbnail": "<|img_thumbnail|>"},
}
"What the tokenizer of a family says of itself beside its image_token."


def processor_of(family: str, tokenizer: Path) -> Any:
    """A processor whose images become 4 to 200 tokens; `tokenizer`: a folder whose tokenizer knows
    TOKENS.
    """
    import transformers as t

    name, images, sizes, more = CLASSES[family]
    words = t.AutoTokenizer.from_pretrained(str(tokenizer))
    given: dict[str, Any] = {"tokenizer": words, **more}
    pixels = getattr(t, f"{images}ImageProcessor{'Fast' * (family == 'lfm2')}")(**sizes)
    of = getattr(t, f"{name}Processor")
    named = {key: getattr(words, key) for key in ("eos_token", "pad_token", "unk_token")}
    file = str(tokenizer / "tokenizer.json")
    if family == "qwen":
        given["tokenizer"] = t.Qwen2TokenizerFast(tokenizer_file=file, **named)
        takes_videos = "video_processor" in of.__init__.__code__.co_varnames
        if takes_videos and hasattr(t, "Qwen2VLVideoProcessor"):
            given["video_processor"] = t.Qwen2VLVideoProcessor()
    elif family == "mllama":
        words.bos_token = "<bos>"
    elif family == "paligemma":
        pixels.image_seq_length = 4
        named |= {"bos_token": "<bos>", "unk_token": named["eos_token"]}
        given["tokenizer"] = t.GemmaTokenizerFast(tokenizer_file=file, **named)
    elif family == "llava_onevision":
        given["video_processor"] = t.LlavaOnevisionVideoProcessor(size=SIZE)
    return of(image_processor=pixels, **given)


def look_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """What conversion asks of a process of its own, which takes 15 s to start, is asked of this
    one.
    """
    monkeypatch.setattr(
        server,
        "try_to_ask",
        lambda name, asked: (load_processor(name).answer(asked), ""),
    )


def tiny_model(vocabulary: int, seeing: Any) -> Any:
    """A randomly initialised Qwen2.5-VL, small enough for a test."""
    import torch
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    torch.manual_seed(1)
    size, of = {"hidden_size": 32, "intermediate_size": 48}, seeing.tokenizer.convert_tokens_to_ids
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 1}
    images = size | {"depth": 1, "num_heads": 2, "out_hidden_size": 32}
    names = ("vision_start", "vision_end", "video_pad")
    start, end, video = (of(f"<|{name}|>") for name in names)
    config = Qwen2_5_VLConfig(
        **{"vocab_size": vocabulary, "tie_word_embeddings": False, **size, **heads},
        rope_scaling={"type": "mrope", "mrope_section": [2, 3, 3]},
        vision_config=images | {"fullatt_block_indexes": [0]},
        image_token_id=seeing.token_id,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
    )
    return Qwen2_5_VLForConditionalGeneration(config)
