"""Drawings in every format, records about them, and a tokenizer with an image token.

`drawing` returns the bytes of an image and `write_drawings` writes several; `record` is a LLaVA
record about images, `stream` the recipe of a stream of such records.
"""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

TOKEN = "<|image_pad|>"
QWEN = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif 'text' in part %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"A chat template like Qwen2.5-VL's."
LLAVA = (
    "{% for message in messages %}{{ message['role'].upper() + ': ' }}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'image') %}"
    "<image>\n{% endfor %}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{{ part['text'] + ' ' }}{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
"A chat template like LLaVA's: every content is a list of parts."


def drawing(
    format: str = "JPEG", size: tuple[int, int] = (40, 30), seed: int = 0, **options: Any
) -> bytes:
    """Return the bytes of an image of this width and height; each seed gives another image."""
    image = Image.new("RGB", size, (seed * 37 % 256, seed * 91 % 256, 128))
    draw = ImageDraw.Draw(image)
    draw.rectangle((2, 2, 4 + seed % 17, 10), fill="white")
    draw.text((5, 12), str(seed), fill="black")
    return saved(image, format, **options)


def saved(image: Image.Image, format: str = "JPEG", **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def write_drawings(folder: Path, count: int = 3, size: tuple[int, int] = (40, 30)) -> list[Path]:
    """Write `0.jpg`, `1.png`, `2.webp`, `3.jpg` ... and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{n}.{('jpg', 'png', 'webp')[n % 3]}" for n in range(count)]
    for n, path in enumerate(paths):
        path.write_bytes(drawing(("JPEG", "PNG", "WEBP")[n % 3], size, n))
    return paths


def record(
    *images: str, question: str = "What is it?", answer: str = "A drawing."
) -> dict[str, Any]:
    """Return a record of LLaVA's shape: one question about these images, and its answer."""
    value = "<image>\n" * len(images) + question
    talk = [{"from": "human", "value": value}, {"from": "gpt", "value": answer}]
    if not images:
        return {"conversations": talk}
    return {"image": images[0] if len(images) == 1 else list(images), "conversations": talk}


def stream(path: object, shape: str = "llava", **settings: Any) -> dict[str, Any]:
    source = {"path": str(path), "shape": shape, **settings.pop("source", {})}
    return {"kind": "finetuning", "source": source, **settings}


def seeing_tokenizer(
    plain_folder: Path,
    folder: Path,
    tokens: Sequence[str] = ("<|vision_start|>", "<|vision_end|>", TOKEN),
    template: str = QWEN,
    declared: Mapping[str, str] | None = None,
) -> Path:
    """Write the tokenizer of `plain_folder` with more tokens into `folder`.

    Args:
        declared: name -> token that the tokenizer declares; None: only `image_token`.
    """
    from tokenizers import AddedToken, Tokenizer

    shutil.copytree(plain_folder, folder)
    model = Tokenizer.from_file(str(folder / "tokenizer.json"))
    model.add_special_tokens([AddedToken(token, special=True) for token in tokens])
    model.save(str(folder / "tokenizer.json"))
    config_file = folder / "tokenizer_config.json"
    config = json.loads(config_file.read_text())
    extra = {"image_token": TOKEN} if declared is None else dict(declared)
    config |= {"chat_template": template, "extra_special_tokens": extra}
    config_file.write_text(json.dumps(config))
    return folder
