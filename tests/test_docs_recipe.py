"""What docs/recipe.md says is converted again when a key changes, against the keys of work units."""

import re
from pathlib import Path
from typing import Any

from mdsmix.convert.job import make_job
from mdsmix.encode.pretrained import open_tokenizer
from mdsmix.kinds import open_recipe
from tests.converting import chats, documents, pairs, write_recipe
from tests.pictures import seeing_tokenizer

PAGE = Path(__file__).parent.parent / "docs/recipe.md"


def finetuning(shape: str) -> dict[str, Any]:
    return {"kind": "finetuning", "source": {"path": f"{shape}.jsonl", "shape": shape}}


STREAMS = {
    "web": documents("web.jsonl", layout="document"),
    "pair": pairs("pair.jsonl"),
    "talk": chats("talk.jsonl"),
    **{shape: finetuning(shape) for shape in ("sharegpt", "rounds", "openai", "llava")},
    "alpaca": {
        "kind": "finetuning",
        "source": {"path": "a.jsonl", "instruction": "instruction", "output": "output"},
    },
}
CHANGES = {
    "tokenizer.backend": ("web", "reference"),
    "max_seq_len": ("web", "32"),
    "target_prompts": ("pair", "all"),
    "target_responses": ("talk", "all"),
    "special_tokens_in_text": ("web", "allow"),
    "compression": ("web", "zstd"),
    "max_bad": ("web", "1%"),
    "publish": ("web", "versioned"),
    "shared": ("web", "true"),
    "local": ("web", "elsewhere"),
    "source.path": ("web", "other.jsonl"),
    "source.text": ("web", "body"),
    "source.prompt": ("pair", "question"),
    "source.messages": ("talk", "turns"),
    "source.instruction": ("alpaca", "query"),
    "source.conversations": ("sharegpt", "chat"),
    "source.conversation": ("rounds", "chat"),
    "source.tags": ("sharegpt", "{user_tag: person}"),
    "source.nulls": ("openai", "drop"),
    "source.joined_by": ("alpaca", '"; "'),
    "source.shape": ("talk", "openai"),
    "source.where": ("web", '"n > 1"'),
    "source.id": ("web", "name"),
    "layout": ("web", "concat"),
    "min_tokens": ("web", "3"),
    "columns": ("talk", "compact"),
    "date_string": ("talk", "1 May 2024"),
    "rewritten_history": ("talk", "last"),
    "too_long": ("talk", "filter"),
    "consecutive_roles": ("talk", "merge"),
    "sample": ("web", "5%"),
    "expected_mean_tokens": ("web", "100"),
    "holdout": ("web", "5%"),
    "split": ("web", "eval"),
    "images.field": ("llava", "picture"),
    "images.root": ("llava", "pictures"),
    "images.decode": ("llava", "header"),
    "images.max_pixels": ("llava", "1000"),
    "images.max_images": ("llava", "2"),
    "images.resize": ("llava", "{longest: 100}"),
    "images.reencode": ("llava", "{format: jpeg, quality: 90}"),
    "images.http": ("llava", "fetch"),
    "images.outside": ("llava", "refuse"),
}
"A key -> the stream in which it is changed, and to what."
TOP = list(CHANGES)[:10]
"Those that stand above the streams."


def said() -> dict[str, bool]:
    """Whether the page marks a key, by its name below `streams.<name>`."""
    found, section = dict[str, bool](), ""
    for line in PAGE.read_text("utf-8").splitlines():
        if heading := re.fullmatch(r"## .*`streams\.<name>\.?(\w*)`.*", line):
            section = f"{heading[1]}." if heading[1] else ""
        elif key := re.match(r"- (\*\*●\*\* )?`([\w.]+)`:", line):
            found[f"{section}{key[2]}"] = bool(key[1])
    return found


def test_what_is_marked_converts_a_stream_again_and_nothing_else_does(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    tokenizer = seeing_tokenizer(tokenizer_folder, tmp_path / "seeing")
    paths = {}
    for name, stream in STREAMS.items():
        (tmp_path / name).mkdir()
        only, loader = {name: stream}, {"name": "mdsmix"}
        paths[name] = write_recipe(tmp_path / name, tokenizer, streams=only, train_loader=loader)
    opened = open_tokenizer(open_recipe(paths["web"]).tokenizer)

    def shaping(name: str, *overrides: str) -> str:
        recipe = open_recipe(paths[name], overrides)
        return make_job(recipe, recipe.streams[name], opened, None).settings_hash

    before = {name: shaping(name) for name in STREAMS}
    again = {}
    for key, (name, value) in CHANGES.items():
        place = key if key in TOP else f"streams.{name}.{key}"
        again[key] = shaping(name, f"{place}={value}") != before[name]
    marked = said()
    assert {key: marked.get(key) for key in again} == again
