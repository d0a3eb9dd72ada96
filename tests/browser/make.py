"""The pages that the browser opens, made by the command: `python -m tests.browser.make FOLDER`, by
the Python that has mdsmix.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.converting import chats, documents, mdsmix, pairs, write_jsonl, write_recipe
from tests.corpus import train_tokenizer
from tests.pictures import record, seeing_tokenizer, stream, write_drawings
from tests.test_report_page import HOSTILE

LONG_NAME = "conversations_of_the_help_desk_with_its_customers_v2"


def _mix(home: Path, tokenizer: Path) -> Path:
    texts = [f"{HOSTILE[n % len(HOSTILE)]} needle{n}" for n in range(48)]
    write_jsonl(
        home / "docs.jsonl",
        [*({"text": t} for t in texts), {"text": "<i onclick=alert(1)>" * 2, "x": 1}, {"text": 7}],
    )
    write_jsonl(
        home / "faq.jsonl",
        [{"prompt": f"What is {n}?", "response": f"{n} 👩‍👩‍👧‍👦 it is."} for n in range(48)],
    )
    talk = [{"role": "user", "content": "Say it."}, {"role": "assistant", "content": "It, " * 99}]
    write_jsonl(home / "chat.jsonl", [{"messages": talk}] * 48)
    streams: dict[str, Any] = {
        "docs": documents("docs.jsonl", layout="document"),
        "faq": pairs("faq.jsonl"),
        LONG_NAME: chats("chat.jsonl"),
    }
    shares = {"docs": {"share": 0.5}, "faq": {"share": 0.3}, LONG_NAME: {"share": 0.2}}
    return write_recipe(
        home,
        tokenizer,
        max_seq_len=64,
        streams=streams,
        mix=shares,
        budget="400000 tokens",
        max_repeat=1000,
        special_tokens_in_text="allow",
    )


def _images(home: Path, tokenizer: Path) -> Path:
    write_drawings(home, 3, size=(600, 400))
    write_jsonl(home / "a.jsonl", [record("0.jpg", "1.png"), record("2.webp"), record()])
    seeing = seeing_tokenizer(tokenizer, home / "tokenizer")
    return write_recipe(home, seeing, max_seq_len=400, streams={"see": stream("a.jsonl")})


def make(folder: Path) -> None:
    """mix.html, with the first batches, and images.html; mix.json: what `inspect` says of its
    samples.
    """
    tokenizer = train_tokenizer(folder / "plain", documents_n=30)
    for make_recipe, more in ((_mix, ()), (_images, ("--no-preview",))):
        name = make_recipe.__name__[1:]
        (folder / name).mkdir()
        recipe = make_recipe(folder / name, tokenizer)
        report = ("report", recipe, "--gpus", 2, "-n", 8, *more, "-o", folder / f"{name}.html")
        for arguments in (("convert", recipe), report):
            answer = mdsmix(*arguments)
            assert answer.code == 0, answer.err
    shown = mdsmix(
        "inspect", folder / "mix/recipe.yaml", "--random", "--seed", 0, "-n", 8, "--json"
    )
    (folder / "mix.json").write_text(json.dumps(json.loads(shown.out)))


if __name__ == "__main__":
    make(Path(sys.argv[1]))
