"""The corpus of `make demo-images`: drawings with questions about them, bad ones among them, and a
tiny model that is trained on them.

`python -m tests.drawings make FOLDER` writes drawings, records, tokenizer and processor; `python -m
tests.drawings train YAML` trains a randomly initialised Qwen2.5-VL on what the YAML names.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

from tests.corpus import train_tokenizer
from tests.pictures import seeing_tokenizer
from tests.processors import TOKENS, make_processor, make_tiny_model

COLOURS = ("red", "green", "blue", "black", "orange", "purple")
FILES = (("jpg", "JPEG"), ("png", "PNG"), ("webp", "WEBP"))
DRAWINGS, TEXTS = 360, 60


def draw_shape(
    draw: ImageDraw.ImageDraw, size: tuple[int, int], rng: random.Random
) -> tuple[str, str]:
    colour, name = rng.choice(COLOURS), rng.choice(("circle", "square", "triangle"))
    w, h = size
    if name == "triangle":
        draw.regular_polygon((w // 2, h // 2, h // 3), 3, fill=colour)
    else:
        inside = (w // 4, h // 4, 3 * w // 4, 3 * h // 4)
        (draw.ellipse if name == "circle" else draw.rectangle)(inside, fill=colour)
    return "What is drawn here?", f"A {colour} {name}."


def good_records(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield records of one drawing, some of the same drawing twice, and some of text alone."""
    rng = random.Random(7)
    (folder / "img").mkdir(parents=True)
    for number in range(DRAWINGS):
        size = rng.choice(((112, 84), (84, 112), (140, 84), (84, 84)))
        suffix, format = FILES[number % 3]
        image = Image.new("RGB", size, "white")
        question, answer = draw_shape(ImageDraw.Draw(image), size, rng)
        image.save(folder / f"img/{number}.{suffix}", format)
        yield talk_about([f"img/{number}.{suffix}"], question, answer)
        if number % 20 == 19:
            pair = [f"img/{number}.{suffix}"] * 2
            yield talk_about(pair, "Are the two the same?", "Yes, they are.")
    for _ in range(TEXTS):
        first, second = rng.randrange(9), rng.randrange(9)
        yield talk_about([], f"What is {first} + {second}?", f"It is {first + second}.")


def bad_records(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield records whose images are truncated, an HTML page, missing, at a URL, or fewer than
    their text names.
    """
    good = (folder / "img/0.jpg").read_bytes()
    (folder / "img/cut.jpg").write_bytes(good[: len(good) // 2])
    (folder / "img/page.jpg").write_bytes(b"<html>404 Not Found</html>")
    for name in ("img/cut.jpg", "img/page.jpg", "img/lost.jpg", "https://example.org/a.jpg"):
        yield talk_about([name], "What is this?", "A drawing.")
    yield talk_about(["img/0.jpg"], "What are <image> and <image>?", "Two drawings.")


def talk_about(images: list[str], question: str, answer: str) -> dict[str, Any]:
    text = "<image>\n" * len(images) + question
    turns = [{"from": "human", "value": text}, {"from": "gpt", "value": answer}]
    return {"image": images, "conversations": turns} if images else {"conversations": turns}


def make_corpus(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    all_records = [*good_records(folder), *bad_records(folder)]
    random.Random(1).shuffle(all_records)
    lines = [json.dumps(record) for record in all_records]
    (folder / "drawings.jsonl").write_text("\n".join(lines) + "\n")
    plain = train_tokenizer(folder / "plain", vocab_size=1000, documents_n=30)
    words = seeing_tokenizer(plain, folder / "tokenizer", tokens=TOKENS)
    make_processor("qwen", words).save_pretrained(folder / "processor")
    print(f"{len(all_records)} records about {DRAWINGS} drawings, bad ones among them: {folder}")


def train_model(config: str) -> None:
    import torch

    from mdsmix.load import build_loader
    from mdsmix.load.vision import load_processor

    loader = build_loader(config, batch_size=8)
    vision = load_processor(loader.collate_fn.vision.name)
    model = make_tiny_model(len(vision.tokenizer), vision)
    steps = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for batch in loader:
        batch.pop("sequence_id")
        if not losses:
            print({name: tuple(tensor.shape) for name, tensor in batch.items()})
        loss = model(**batch).loss
        loss.backward()
        steps.step()
        steps.zero_grad()
        losses.append(loss.item())
    print(f"{len(losses)} batches: loss {losses[0]:.2f} -> {sum(losses[-5:]) / 5:.2f}")


if __name__ == "__main__":
    {"make": lambda: make_corpus(Path(sys.argv[2])), "train": lambda: train_model(sys.argv[2])}[
        sys.argv[1]
    ]()
