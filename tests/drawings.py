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
from tests.processors import TOKENS, processor_of, tiny_model

COLOURS = ("red", "green", "blue", "black", "orange", "purple")
FILES = (("jpg", "JPEG"), ("png", "PNG"), ("webp", "WEBP"))
DRAWINGS, TEXTS = 360, 60


def shape(draw: ImageDraw.ImageDraw, size: tuple[int, int], by: random.Random) -> tuple[str, str]:
    colour, name = by.choice(COLOURS), by.choice(("circle", "square", "triangle"))
    w, h = size
    if name == "triangle":
        draw.regular_polygon((w // 2, h // 2, h // 3), 3, fill=colour)
    else:
        inside = (w // 4, h // 4, 3 * w // 4, 3 * h // 4)
        (draw.ellipse if name == "circle" else draw.rectangle)(inside, fill=colour)
    return "What is drawn here?", f"A {colour} {name}."


def records(folder: Path) -> Iterator[dict[str, Any]]:
    """Drawings with a question each, two of a kind now and then, and records of text alone."""
    by = random.Random(7)
    (folder / "img").mkdir(parents=True)
    for number in range(DRAWINGS):
        size = by.choice(((112, 84), (84, 112), (140, 84), (84, 84)))
        suffix, format = FILES[number % 3]
        image = Image.new("RGB", size, "white")
        question, answer = shape(ImageDraw.Draw(image), size, by)
        image.save(folder / f"img/{number}.{suffix}", format)
        yield told([f"img/{number}.{suffix}"], question, answer)
        if number % 20 == 19:
            pair = [f"img/{number}.{suffix}"] * 2
            yield told(pair, "Are the two the same?", "Yes, they are.")
    for _ in range(TEXTS):
        one, other = by.randrange(9), by.randrange(9)
        yield told([], f"What is {one} + {other}?", f"It is {one + other}.")


def bad(folder: Path) -> Iterator[dict[str, Any]]:
    """Records whose images are cut off, a page of a server, lost, at a URL, or fewer than their
    text says.
    """
    good = (folder / "img/0.jpg").read_bytes()
    (folder / "img/cut.jpg").write_bytes(good[: len(good) // 2])
    (folder / "img/page.jpg").write_bytes(b"<html>404 Not Found</html>")
    for name in ("img/cut.jpg", "img/page.jpg", "img/lost.jpg", "https://example.org/a.jpg"):
        yield told([name], "What is this?", "A drawing.")
    yield told(["img/0.jpg"], "What are <image> and <image>?", "Two drawings.")


def told(images: list[str], question: str, answer: str) -> dict[str, Any]:
    said = "<image>\n" * len(images) + question
    talk = [{"from": "human", "value": said}, {"from": "gpt", "value": answer}]
    return {"image": images, "conversations": talk} if images else {"conversations": talk}


def make(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    made = [*records(folder), *bad(folder)]
    random.Random(1).shuffle(made)
    lines = [json.dumps(record) for record in made]
    (folder / "drawings.jsonl").write_text("\n".join(lines) + "\n")
    plain = train_tokenizer(folder / "plain", vocab_size=1000, documents_n=30)
    words = seeing_tokenizer(plain, folder / "tokenizer", tokens=TOKENS)
    processor_of("qwen", words).save_pretrained(folder / "processor")
    print(f"{len(made)} records about {DRAWINGS} drawings, bad ones among them: {folder}")


def train(config: str) -> None:
    import torch

    from mdsmix.load import build_loader
    from mdsmix.load.vision import load_processor

    loader = build_loader(config, batch_size=8)
    seeing = load_processor(loader.collate_fn.vision.name)
    model = tiny_model(len(seeing.tokenizer), seeing)
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
    {"make": lambda: make(Path(sys.argv[2])), "train": lambda: train(sys.argv[2])}[sys.argv[1]]()
