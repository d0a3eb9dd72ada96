"""The JSON Schema of a recipe takes what the reader takes: every recipe of the repository, and
recipes that are changed at one place. The rules that it cannot say are listed in docs/recipe.md.
"""

from __future__ import annotations

import copy
import json
import os
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import pytest
import yaml
from jsonschema import Draft202012Validator

from mdsmix.errors import RecipeError
from mdsmix.init.editor_schema import write_schema_file
from mdsmix.kinds import open_recipe
from mdsmix.kinds.recipe_schema import (
    SCHEMA_FILE,
    describe_recipe,
    is_written_by_mdsmix,
    write_schema,
)
from mdsmix.recipe import (
    ImagesSpec,
    PhaseSpec,
    Recipe,
    SourceSpec,
    StreamSpec,
    TokenizerSpec,
    WeightSpec,
)
from mdsmix.recipe.stream_spec import ReencodeSpec, ResizeSpec
from mdsmix.schema import Misfit, Reader, list_fields
from tests.converting import mdsmix
from tests.docs.blocks import blocks
from tests.editor import list_marks, open_schema

ROOT = Path(__file__).parents[1]
SEED = int(os.environ.get("MDSMIX_TEST_SEED", "0"))
CHANGES = 60
"Changes of each recipe below that are tried."


def test_the_file_in_the_repository_is_up_to_date_and_every_recipe_names_it() -> None:
    """`make tables` writes it."""
    assert (ROOT / "yamls" / SCHEMA_FILE).read_text("utf-8") == write_schema()
    for path in (ROOT / "yamls").rglob("*.yaml"):
        comment = path.read_text("utf-8").splitlines()[0]
        [named] = re.fullmatch(r"# yaml-language-server: \$schema=(\S+)", comment).groups()  # type: ignore[union-attr]
        assert (path.parent / named).resolve() == ROOT / "yamls" / SCHEMA_FILE


def list_recipes() -> Iterator[tuple[str, str]]:
    """Yield every recipe of the repository: files, and blocks of pages that have streams and no
    sections of a training YAML.
    """
    texts = {}
    for folder in ("yamls", "mdsmix", "tests", "docker", "benchmarks"):
        for path in (ROOT / folder).rglob("*.yaml"):
            texts[str(path)] = path.read_text("utf-8")
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *ROOT.glob("mdsmix/*/*.md")):
        for block in blocks(page):
            if block.language == "yaml" and block.mark == "file" and " over " not in block.said:
                texts[f"{page}, line {block.line}"] = block.text
    for name, text in texts.items():
        tree = yaml.safe_load(text)
        if isinstance(tree, dict) and "streams" in tree:
            yield name, text


def test_an_editor_marks_no_mistake_in_the_recipes_of_the_repository() -> None:
    recipes = dict(list_recipes())
    assert len(recipes) >= 12
    marked = {name: list_marks(text) for name, text in recipes.items()}
    assert {name: marks for name, marks in marked.items() if marks} == {}


WEB = {"kind": "pretraining", "source": {"path": ["a", "b"], "text": "text", "where": "n > 1"}}
CHAT = {
    "kind": "finetuning",
    "source": {"path": "c", "conversations": "c", "tags": {"user_tag": "me"}},
}
PICTURES = {
    "kind": "finetuning",
    "images": {"field": ["a"], "resize": {"longest": 3}, "reencode": {"quality": 3}},
    "source": {"path": "c", "shape": "llava"},
}
TOP: dict[str, Any] = {"tokenizer": "gpt2", "max_seq_len": 8, "local": "m"}
BASES: list[dict[str, Any]] = [
    TOP | {"tokenizer": {"name": "gpt2", "kwargs": {"a": 1}, "backend": "auto"},
           "streams": {"web": WEB | {"sample": "5%", "min_tokens": 3, "layout": "document"}},
           "compression": "zstd:3", "train_loader": {"name": "mdsmix", "dataset": {"shuffle": True}}},
    TOP | {"streams": {"chat": CHAT | {"date_string": "x", "too_long": "filter", "holdout": 0.01}},
           "tokenizer": {"name": "gpt2", "template": {"a": 1}, "stop_tokens": ["b"]}},
    TOP | {"streams": {"pictures": PICTURES}, "processor": "p"},
    TOP | {"streams": {"old": {"local": "x"}, "older": {"remote": "s3://b/y"}, "held": {"local": "z", "split": "val"}},
           "mix": {"old": "30%", "older": {"share": "70%"}}, "budget": "2B tokens", "count": "samples"},
    TOP | {"streams": {"old": {"local": "x"}}, "mix": {"old": {"repeat": 2}}},
    TOP | {"streams": {"old": {"local": "x"}}, "phase": "main",
           "phases": {"main": {"budget": "2B tokens", "mix": {"old": "100%"}, "shuffle_seed": 1},
                      "anneal": {"budget": "3 passes of old", "mix": {"old": {"share": 1, "max_repeat": 3}}}}},
]  # fmt: skip
SECTIONS: dict[str, Any] = {
    "": Recipe,
    "tokenizer": TokenizerSpec,
    "streams.*": StreamSpec,
    "streams.*.source": SourceSpec,
    "streams.*.images": ImagesSpec,
    "streams.*.images.resize": ResizeSpec,
    "streams.*.images.reencode": ReencodeSpec,
    "mix.*": WeightSpec,
    "phases.*": PhaseSpec,
    "phases.*.mix.*": WeightSpec,
}
"Keys that lead to a section -> its class; `*` is the name of a stream."
VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 3, 0.5, 1.5, -0.5, 1.0, 2**31, [], ["a"], [1], {}, {"a": 1}),
    *("", "text", "30%", "100%", "150%", "0%", "1/3", "3/2", "2B tokens", "0 tokens", "1 m SAMPLE"),
    *("2 passes of old", "zstd:3", "zstd:99", "all", "length>=3", "length>=0", "a/b", "jpeg"),
    *("budget", "train-0123abcd", {"name": "x"}, {"share": None, "repeat": 1}, "${max_seq_len}"),
    *(
        "pretraining",
        "finetuning",
        "preference",
        "prompt",
        "mdsmix",
        "1_000%",
        "0.0",
        "1.5%",
        "100.5%",
    ),
]
GONE = object()
"In place of a value: the key is left out."
Place = tuple[str | int, ...]


class Change(NamedTuple):
    """A value that is set at one place of a recipe."""

    place: Place
    value: Any

    def apply(self, recipe: dict[str, Any]) -> Any:
        changed = copy.deepcopy(recipe)
        *steps, last = self.place
        section: Any = changed
        for step in steps:
            section = section[step]
        if self.value is not GONE:
            section[last] = self.value
        elif isinstance(section, list) or last in section:
            del section[last]
        return changed


def list_places(tree: Any, place: Place = ()) -> Iterator[Place]:
    """Yield the place of every value of a recipe, and of every key that it could have."""
    steps = list(map(str, place))
    for i in (1, 3):  # the name of a stream or of a phase, and of a stream in a phase
        if len(steps) > i and place[0] != "tokenizer" and (i == 1 or place[0] == "phases"):
            steps[i] = "*"
    pattern = ".".join(steps)
    keys: dict[str | int, Any] = {}
    if isinstance(tree, dict):
        if pattern in SECTIONS:
            keys = dict.fromkeys(
                [*(field.name for field in list_fields(SECTIONS[pattern])), "unknown"]
            )
        if place in (("streams",), ("mix",)):
            keys = dict.fromkeys(["a b", "tokenizer-0123abcd", "new"])
        keys |= tree
    elif isinstance(tree, list):
        keys = dict(enumerate(tree))
    for key, value in keys.items():
        yield (*place, key)
        yield from list_places(value, (*place, key))


def find_refusal(recipe: Any) -> str | None:
    """Return the message of the reader; None if it takes the recipe."""
    try:
        open_recipe(recipe)
    except RecipeError as refused:
        return str(refused)
    return None


UNSAID = {
    "whole numbers": r" is 1\.0; it must be a whole number",
    "ratios and separators": r" is '(3/2|1_000%)'; it must be a share",
    "interpolations": r" (is|are) 8[;,. ]|Interpolation|interpolation|not iterable|'8'|'8 | 8:|=8",
    "names of shapes and formats": r"source\.shape is |source\.format is ",
    "fields of shapes": r"source names |source\.shape is .* needs|images\.field names no field",
    "keys of shapes": r" is for records of the shape| is for \w+",
    "keys of tokenizer": r"tokenizer\.\w+ (sets variables|is for the answers)",
    "conditions": r"source\.(where|id|\w+): ",
    "functions": r"source\.gives is ",
    "mix": r"mix\.[\w -]+ (names no stream|sets )|mix\.\w+\.share is .* more than the whole|the shares ",
    "phases": r"phases?\.?[\w-]*\.mix\.[\w -]+ names no|no phase draws|phase is |mix and phases|of the phases|parts of the recipe's|a part of the recipe's",
    "budget": r"absolute: true|budget (counts|is)|count is|is for mixes by share|sample: budget|epoch_size",
    "temperature": r"temperature is",
    "loader": r"loader|decoder_only_format|target_prompts: |train_loader",
    "sizes": r"max_tokens is|no document",
    "rows": r"pack|columns: compact|add_eos|layout|first_turns|last_turns|has images",
    "held out": r"holdout ",
    "places": r"neither remote nor local|the stream's URL|split is '[\w-]+'; it names one folder",
    "preferences": r"preference",
    "prompts": r"prompts",
}
"Rules of docs/recipe.md that the schema cannot say -> what their messages contain."


def test_the_schema_refuses_what_the_reader_refuses_but_for_the_rules_of_the_page() -> None:
    """At least a third of the changes is refused by both, and a twentieth is taken by both."""
    chance = random.Random(SEED)
    refused = accepted = 0
    broken_rules = set[str]()
    for base in BASES:
        assert (find_refusal(base), list_marks(base)) == (None, [])
        changes = [Change(p, v) for p in list_places(base) for v in (*VALUES, GONE)]
        for change in chance.sample(changes, CHANGES):
            recipe = change.apply(base)
            message = find_refusal(recipe)
            marked = not open_schema().is_valid(recipe)
            refused += marked
            accepted += message is None
            assert message or not marked, (change, list_marks(recipe))
            if message and not marked:
                rules = [rule for rule, words in UNSAID.items() if re.search(words, message)]
                assert rules, (change, message)
                broken_rules.update(rules[:1])
    assert refused > CHANGES * len(BASES) / 3
    assert accepted > CHANGES * len(BASES) / 20
    assert len(broken_rules) > 4


def test_every_key_has_a_type_and_no_section_takes_an_unknown_key() -> None:
    """Two values that no key takes, at every key of every section."""
    for base in BASES:
        for place in list_places(base):
            if not isinstance(place[-1], str) or place[0] == "train_loader":
                continue
            if {"kwargs", "template"} & set(place):
                continue
            for value in ([[]], [{"a": {}}]):
                assert not open_schema().is_valid(Change(place, value).apply(base)), place


def takes(cls: Any, name: str, value: Any) -> bool:
    """Check whether the reader takes a value of a key by its type and its bound."""
    [field] = [field for field in list_fields(cls) if field.name == name]
    try:
        Reader(get_type_hints(cls)[name]).read(value, name)
        return value is None or bool(field.metadata["must"][1](value))
    except (Misfit, ValueError):
        return False


def test_every_bound_is_that_of_the_reader() -> None:
    """By values at and beyond the bounds, at every key that has one."""
    schema = describe_recipe()
    bounds = [
        1 << 31,
        (1 << 31) - 1,
        2,
        22,
        100,
        101,
        0.001,
        1.01,
        "zstd:22",
        "zstd:23",
        "1 pass of a",
    ]
    compared = 0
    for cls in SECTIONS.values():
        section = schema if cls is Recipe else schema["$defs"][cls.__name__[:-4].lower()]
        for field in list_fields(cls):
            if "must" not in field.metadata:
                continue
            described = section["properties"][field.name] | {"$defs": schema["$defs"]}
            for value in (*VALUES, *bounds):
                is_unsaid = value in ("3/2", "1_000%", "${max_seq_len}") or (
                    type(value) is float and value == 1
                )
                if not is_unsaid:
                    is_valid = Draft202012Validator(described).is_valid(value)
                    assert is_valid == takes(cls, field.name, value), (cls, field.name, value)
                    compared += 1
    assert compared > 500


def test_every_key_is_described_and_names_its_values() -> None:
    schema = describe_recipe()
    assert schema["properties"]["budget"]["description"].startswith(
        "The size of an epoch: `2B tokens`"
    )
    stream = schema["$defs"]["stream"]["properties"]
    assert stream["layout"]["anyOf"][0] == {"enum": ["concat", "document"]}
    assert stream["layout"]["default"] == "concat"
    assert stream["layout"]["description"].startswith("Pretraining: `concat` joins documents")
    assert "pretraining" in stream["kind"]["anyOf"][0]["enum"]
    for name, cls in SECTIONS.items():
        section = schema if cls is Recipe else schema["$defs"][cls.__name__[:-4].lower()]
        texts = [key for key, value in section["properties"].items() if "description" not in value]
        assert texts == (["format", "quality"] if name.endswith("reencode") else [])
        for value in section["properties"].values():
            assert "](" not in value.get("description", ""), "an editor opens no link of the pages"


def test_the_command_prints_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    printed = mdsmix("schema")
    assert (printed.code, printed.out) == (0, write_schema())
    assert mdsmix("schema", "-o", "s.json").code == 0
    assert Path("s.json").read_text("utf-8") == write_schema()
    assert mdsmix("schema", "-o", "no/s.json").code == 2


def test_a_file_of_an_earlier_mdsmix_is_replaced_and_one_of_the_users_stays(tmp_path: Path) -> None:
    path = tmp_path / SCHEMA_FILE
    first = write_schema_file(tmp_path)
    assert first == (f"wrote {path}, so that editors check and complete the recipe", True)
    assert path.read_text("utf-8") == write_schema()
    written_at = path.stat().st_mtime_ns
    assert write_schema_file(tmp_path) is None
    assert path.stat().st_mtime_ns == written_at
    tree = json.loads(write_schema())
    for text in ("", "{}", "[]", json.dumps(tree | {"title": "mine"}), "\udcff"):
        path.write_text(text, "utf-8", "surrogateescape")
        kept_file = write_schema_file(tmp_path)
        assert kept_file
        assert not kept_file.is_written
        assert f"{path} stays as it is" in kept_file.message
        assert path.read_text("utf-8", "surrogateescape") == text
    assert is_written_by_mdsmix(EARLIER)
    path.write_text(EARLIER, "utf-8")
    refreshed = write_schema_file(tmp_path)
    assert refreshed
    assert refreshed.is_written
    assert path.read_text("utf-8") == write_schema()


EARLIER = '{"$schema": "https://json-schema.org/draft/2020-12/schema", "$comment": "Written by mdsmix schema, digest e4f261346567668d", "title": "Recipe of mdsmix"}'
"A schema as an earlier version may have written it."
