"""Processors of many families, made of transformers' classes and a tokenizer of our own: nothing is
downloaded from a hub.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from mdsmix.load.vision import load_processor
from mdsmix.processor import server
from mdsmix.processor.answers import answer_question
from tests.pictures import QWEN, seeing_tokenizer

if TYPE_CHECKING:  # LLM-Foundry's environment has none
    import pytest

FAMILIES = ("qwen", "llava_next", "idefics", "gemma3")
"The families whose batches are compared in most tests."
TOKENS = (
    *("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
    *("<image>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>"),
    *(f"<row_{i}_col_{j}>" for i in range(1, 7) for j in range(1, 7)),
    *("<start_of_image>", "<end_of_image>", "<image_soft_token>", "<video>", "<|image|>", "<bos>"),
    *("<|python_tag|>", "[IMG]", "[IMG_BREAK]", "[IMG_END]", "<|image_start|>", "<|image_end|>"),
    *("<|img_thumbnail|>", *(f"<|img_row_{i}_col_{j}|>" for i in range(1, 5) for j in range(1, 5))),
)
"The tokens that the tokenizer of any family needs."


def write_processor(family: str, plain: Path, home: Path) -> tuple[Path, Path]:
    """Write a tokenizer and a processor of the family to two folders in `home`, and return these.

    Args:
        plain: a folder with a tokenizer, which gets the family's tokens and template.
    """
    declared = {"image_token": IMAGE_TOKEN[family], **DECLARED.get(family, {})}
    template = QWEN
    if family != "qwen":
        template = QWEN.replace("<|vision_start|><|image_pad|><|vision_end|>", IMAGE_TOKEN[family])
    if family == "mllama":
        template = "<bos>" + template
    tokenizer = seeing_tokenizer(plain, home / f"{family}-tokenizer", TOKENS, template, declared)
    make_processor(family, tokenizer).save_pretrained(home / family)
    return tokenizer, home / family


SIZE = {"height": 56, "width": 56}
PINPOINTS = [[56, 112], [112, 56], [112, 112]]
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
    # family: the class of its processor, the class of its image processor, arguments of the image
    # processor, arguments of the processor
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
"Keys of the tokenizer's config that a family needs, in addition to image_token."


def make_processor(family: str, tokenizer: Path) -> Any:
    """Return a processor that makes 4 to 200 tokens of an image.

    Args:
        tokenizer: a folder with a tokenizer that has TOKENS.
    """
    import transformers

    name, image_class, image_arguments, processor_arguments = CLASSES[family]
    own_tokenizer = transformers.AutoTokenizer.from_pretrained(str(tokenizer))
    arguments: dict[str, Any] = {"tokenizer": own_tokenizer, **processor_arguments}
    suffix = "ImageProcessorFast" if family == "lfm2" else "ImageProcessor"
    images = getattr(transformers, image_class + suffix)(**image_arguments)
    processor = getattr(transformers, f"{name}Processor")
    tokens = {key: getattr(own_tokenizer, key) for key in ("eos_token", "pad_token", "unk_token")}
    file = str(tokenizer / "tokenizer.json")
    if family == "qwen":
        arguments["tokenizer"] = transformers.Qwen2TokenizerFast(tokenizer_file=file, **tokens)
        takes_videos = "video_processor" in processor.__init__.__code__.co_varnames
        if takes_videos and hasattr(transformers, "Qwen2VLVideoProcessor"):
            arguments["video_processor"] = transformers.Qwen2VLVideoProcessor()
    elif family == "mllama":
        own_tokenizer.bos_token = "<bos>"
    elif family == "paligemma":
        images.image_seq_length = 4
        tokens |= {"bos_token": "<bos>", "unk_token": tokens["eos_token"]}
        arguments["tokenizer"] = transformers.GemmaTokenizerFast(tokenizer_file=file, **tokens)
    elif family == "llava_onevision":
        videos = transformers.LlavaOnevisionVideoProcessor(size=SIZE)
        arguments["video_processor"] = videos
    return processor(image_processor=images, **arguments)


def ask_in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answer questions to processors in this process, since the server takes 15 s to start."""

    def answer(name: str, question: Any) -> tuple[Any, str]:
        return answer_question(load_processor(name), question), ""

    monkeypatch.setattr(server, "try_to_ask", answer)


def make_tiny_model(vocabulary: int, seeing: Any) -> Any:
    """Return a randomly initialised Qwen2.5-VL, small enough for a test.

    Args:
        vocabulary: number of tokens.
        seeing: the LoadedProcessor.
    """
    import torch
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    torch.manual_seed(1)
    size = {"hidden_size": 32, "intermediate_size": 48}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 1}
    images = size | {"depth": 1, "num_heads": 2, "out_hidden_size": 32}
    names = ("vision_start", "vision_end", "video_pad")
    to_id = seeing.tokenizer.convert_tokens_to_ids
    start, end, video = (to_id(f"<|{name}|>") for name in names)
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
