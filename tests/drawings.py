"""The corpus of `make demo-images`: drawings with questions about them, bad ones among them, and a tiny model that is trained on them.

`python -m tests.drawings make FOLDER` writes drawings, records, tokenizer and processor; `python -m tests.drawings train YAML` trains a
randomly initialised Qwen2.5-VL on what the YAML names.
"""

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
WORDS = ("shard", "stream", "token", "batch", "epoch", "loss", "mix", "rank")
FILES = (("jpg", "JPEG"), ("png", "PNG"), ("webp", "WEBP"))
DRAWINGS, TEXTS = 360, 60


def shape(draw: ImageDraw.ImageDraw, size: tuple[int, int], by: random.Random) -> tuple[str, str]:
    colour, name = by.choice(COLOURS), by.choice(("circle", "square", "triangle"))
    w, h = size
    if name == "circle":
        draw.ellipse((w // 4, h // 4, 3 * w // 4, 3 * h // 4), fill=colour)
    elif name == "square":
        draw.rectangle((w // 4, h // 4, 3 * w // 4, 3 * h // 4), fill=colour)
    else:
        draw.polygon(
            [(w // 2, h // 5), (w // 5, 4 * h // 5), (4 * w // 5, 4 * h // 5)], fill=colour
        )
    return "What is drawn here?", f"A {colour} {name}."


def plot(draw: ImageDraw.ImageDraw, size: tuple[int, int], by: random.Random) -> tuple[str, str]:
    bars, (w, h) = by.sample(range(1, 10), 4), size
    for number, bar in enumerate(bars):
        draw.rectangle(
            (w * number // 4 + 2, h - h * bar // 10, w * (number + 1) // 4 - 2, h), fill="blue"
        )
    return "Which bar is the highest?", f"Bar {bars.index(max(bars)) + 1} of 4."


def text(draw: ImageDraw.ImageDraw, size: tuple[int, int], by: random.Random) -> tuple[str, str]:
    word = by.choice(WORDS)
    draw.text((6, size[1] // 3), word, fill="black")
    return "Which word is this?", f"It says {word}."


def records(folder: Path) -> Iterator[dict[str, Any]]:
    """Drawings with a question each, two of a kind now and then, and records of text alone."""
    by = random.Random(7)
    (folder / "img").mkdir(parents=True)
    for number in range(DRAWINGS):
        size = by.choice(((112, 84), (84, 112), (140, 84), (84, 84)))
        suffix, format = FILES[number % 3]
        image = Image.new("RGB", size, "white")
        question, answer = by.choice((shape, plot, text))(ImageDraw.Draw(image), size, by)
        image.save(folder / f"img/{number}.{suffix}", format)
        yield told([f"img/{number}.{suffix}"], question, answer)
        if number % 20 == 19:
            pair = [f"img/{number}.{suffix}"] * 2
            yield told(pair, "Are the two the same?", "Yes, they are.")
    for _ in range(TEXTS):
        one, other = by.randrange(9), by.randrange(9)
        yield told([], f"What is {one} + {other}?", f"It is {one + other}.")


def bad(folder: Path) -> Iterator[dict[str, Any]]:
    """One record for each of ten ways in which images are bad."""
    good = (folder / "img/0.jpg").read_bytes()
    files = {
        "truncated.jpg": good[: len(good) // 2],
        "empty.png": b"",
        "page.jpg": b"<html>404 Not Found</html>",
        "damaged.png": (folder / "img/1.png").read_bytes()[:60] + bytes(200),
    }
    for name, content in files.items():
        (folder / "img" / name).write_bytes(content)
        yield told([f"img/{name}"], "What is this?", "A drawing.")
    frames = [Image.new("RGB", (40, 40), colour) for colour in COLOURS]
    frames[0].save(folder / "img/moving.gif", save_all=True, append_images=frames[1:])
    Image.new("I;16", (40, 40)).save(folder / "img/deep.png")
    for name in ("moving.gif", "deep.png", "lost.jpg"):
        yield told([f"img/{name}"], "What is this?", "A drawing.")
    yield told(["https://example.org/a.jpg"], "What is this?", "A drawing.")
    yield told(["img/0.jpg"], "What are <image> and <image>?", "Two drawings.")
    Image.new("RGB", (2000, 2000), "red").save(folder / "img/large.png")
    yield told(["img/large.png"] * 8, "What are these?", "More than fits.")


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
    from mdsmix.load.vision import opened

    loader = build_loader(config, batch_size=8)
    seeing = opened(loader.collate_fn.vision.name)
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
