"""Three published streams as a mix has them: full rows of text, documents of any length, and chats of which a part is trained.

Lengths spread as they do in real data (lognormal), and some chats are longer than a row, so that the loader cuts them.
"""

from pathlib import Path
from typing import Any

import numpy as np

from tests.converting import chats, documents, run_recipe, write_jsonl, write_recipe

LENGTH = 32
LOADER = {"num_workers": 0, "drop_last": False}
"So that an epoch is all that is drawn, whatever the batch."
WORDS = ("the", "of", "and", "in", "is", "for", "that", "with", "as", "it", "not", "be")


def write_three(folder: Path, tokenizer: Path, **settings: Any) -> Path:
    """The recipe; its streams web (layout: concat), docs (layout: document) and chat are published."""
    rng = np.random.default_rng(11)
    text = [{"text": _text(rng, 60)} for _ in range(800)]
    short = [{"text": _text(rng, 8)} for _ in range(1500)]
    talks = [{"messages": _talk(rng)} for _ in range(1500)]
    streams = {
        "web": documents(write_jsonl(folder / "web.jsonl", text)),
        "docs": documents(write_jsonl(folder / "docs.jsonl", short), layout="document"),
        "chat": chats(write_jsonl(folder / "chat.jsonl", talks)),
    }
    given = {"max_seq_len": LENGTH, "streams": streams, "train_loader": LOADER} | settings
    recipe = write_recipe(folder, tokenizer, **given)
    run_recipe(recipe)
    return recipe


def _talk(rng: np.random.Generator) -> list[dict[str, str]]:
    return [
        {"role": role, "content": _text(rng, 5)}
        for _ in range(int(rng.integers(1, 3)))
        for role in ("user", "assistant")
    ]


def _text(rng: np.random.Generator, median: int) -> str:
    count = 1 + int(median * rng.lognormal(0, 0.6))
    return " ".join(rng.choice(WORDS, count))
