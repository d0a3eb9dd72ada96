"""The steps of a user: convert a recipe, render it into a config of a tiny model."""

import shlex
from pathlib import Path
from typing import Any

from mdsmix.storage import locate
from tests.converting import chats, documents, done, pairs, write_recipe

TINY = Path(__file__).with_name("tiny.yaml")
MDSMIX = "from mdsmix.cli.main import run; run()"
LLMFOUNDRY = "from llmfoundry.cli.cli import app; app()"


def demo(corpus: Path, names: str = "web docs faq chat heldout") -> dict[str, Any]:
    """Streams of the demo: two of pretraining, two of finetuning, one held out."""
    held = {"layout": "document", "min_tokens": 8}
    streams = {
        "web": documents(corpus / "web.jsonl.zst"),
        "docs": documents(corpus / "docs.jsonl", **held),
        "faq": pairs(corpus / "faq.jsonl"),
        "chat": chats(corpus / "chat.jsonl"),
        "heldout": documents(corpus / "heldout.jsonl", **held, split="val"),
    }
    return {name: streams[name] for name in names.split()}


def converted(folder: Path, tokenizer: Path, **settings: Any) -> Path:
    """The recipe, in a folder of its own, whose streams are published in `out` there unless `settings` say otherwise."""
    folder.mkdir(parents=True, exist_ok=True)
    recipe = write_recipe(folder, tokenizer, **settings)
    done("convert", recipe)
    return recipe


def fetch_tokenizer(config: Path) -> None:
    """Does what the line in the YAML's head does on a training node: `aws s3 cp --recursive SOURCE FOLDER`."""
    (line,) = [line for line in config.read_text().splitlines() if "aws s3 cp" in line]
    source, folder = shlex.split(line)[-2:]
    for name, _ in locate(source).list(recursive=True):
        file = Path(folder, name)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes((locate(source) / name).read())


def rendered(recipe: Path) -> Path:
    """train.yaml beside the recipe: the tiny model on its mix."""
    config = recipe.with_name("train.yaml")
    done("render-yaml", recipe, "--into", TINY, "-o", config)
    return config
