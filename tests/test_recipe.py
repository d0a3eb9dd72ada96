"""A recipe is read into what it says, and refused in one sentence where it cannot be right."""

from __future__ import annotations

import json
from pathlib import Path
from textwrap import dedent

import pytest

from mdsmix.errors import RecipeError
from mdsmix.kinds import open_recipe
from mdsmix.recipe import Recipe, load_recipe
from mdsmix.recipe.stream_spec import SEEING
from mdsmix.shapes import SHAPES

RECIPE = """
tokenizer: {name: ./tok, kwargs: {}}
max_seq_len: 128
local: ./mix
streams:
  web: {kind: pretraining, source: {path: "a/*.jsonl", text: text}}
  faq: {kind: finetuning, source: {path: [faq.jsonl], prompt: q, response: a}}
  chat: {kind: finetuning, source: {path: s3://b/c.jsonl, messages: messages}, date_string: 2026-01-01}
  old: {remote: s3://bucket/old/, local: ./old}
mix: {web: {repeat: 0.5}}
"""


def load(folder: Path, *overrides: str, text: str = RECIPE) -> Recipe:
    (folder / "recipe.yaml").write_text(dedent(text))
    return open_recipe(folder / "recipe.yaml", overrides)


def test_the_shapes_with_images_are_those_of_which_recipes_know_it() -> None:
    assert {name for name, shape in SHAPES.items() if shape.has_images} == SEEING


@pytest.mark.parametrize(
    ("images", "named", "loader"),
    [(True, None, "mdsmix"), (True, "finetuning", "finetuning"), (False, None, "finetuning")],
)
def test_a_recipe_with_images_is_for_the_loader_that_reads_them(
    tmp_path: Path, images: bool, named: str | None, loader: str
) -> None:
    source = {"path": "a.jsonl"} | ({"shape": "llava"} if images else {"messages": "messages"})
    written = tmp_path / "recipe.yaml"
    tree = {"tokenizer": "t", "max_seq_len": 8, "local": "out"}
    tree["streams"] = {"see": {"kind": "finetuning", "source": source}}
    written.write_text(json.dumps(tree | ({"train_loader": {"name": named}} if named else {})))
    assert load_recipe(written).loader == loader


def test_paths_are_rooted_in_the_recipes_folder_and_urls_stay(tmp_path: Path) -> None:
    (tmp_path / "tok").mkdir()
    recipe = load(tmp_path)
    sources = [s.source.path for s in recipe.streams.values() if s.source]
    assert sources == [[f"{tmp_path}/a/*.jsonl"], [f"{tmp_path}/faq.jsonl"], ["s3://b/c.jsonl"]]
    assert recipe.tokenizer.name == f"{tmp_path}/tok"
    assert (recipe.streams["old"].remote, recipe.streams["old"].local) == (
        "s3://bucket/old",
        f"{tmp_path}/old",
    )
    assert recipe.published(recipe.streams["web"]) == f"{tmp_path}/mix/web"


def test_a_tokenizer_that_is_no_path_is_a_hub_name(tmp_path: Path) -> None:
    assert load(tmp_path, "tokenizer=org/name").tokenizer.name == "org/name"


def test_overrides_reach_into_a_tokenizer_that_is_only_named(tmp_path: Path) -> None:
    text = RECIPE.replace("{name: ./tok, kwargs: {}}", "gpt2")
    assert load(tmp_path, "tokenizer.backend=reference", text=text).tokenizer.name == "gpt2"
    other = load(
        tmp_path, "tokenizer=llama", text=text.replace("gpt2", "{name: gpt2, kwargs: {a: 1}}")
    )
    assert (other.tokenizer.name, other.tokenizer.kwargs) == ("llama", {})


def test_a_file_read_by_mistake_is_not_poured_into_the_message(tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as refusal:
        load(tmp_path, text="x" * 5000 + ": 1")
    assert len(str(refusal.value)) < 600


def test_yaml_dates_are_text(tmp_path: Path) -> None:
    assert load(tmp_path).streams["chat"].date_string == "2026-01-01"


def test_overrides_and_interpolation(tmp_path: Path) -> None:
    recipe = load(tmp_path, "max_seq_len=64", "streams.web.max_tokens=${max_seq_len}")
    assert (recipe.max_seq_len, recipe.streams["web"].max_tokens) == (64, 64)


def test_the_dial_is_finetuning_unless_every_stream_is_pretraining(tmp_path: Path) -> None:
    assert load(tmp_path).loader == "finetuning"


def test_the_dial_is_text_for_pretraining_alone(tmp_path: Path) -> None:
    text = """
    tokenizer: gpt2
    max_seq_len: 8
    local: mix
    streams: {web: {kind: pretraining, source: {path: a, text: t}}}
    """
    assert load(tmp_path, text=text).loader == "text"


REFUSED = {
    "max_seq_lem=1": "max_seq_lem is not a known key; did you mean max_seq_len?",
    "streams.web.layuot=x": "streams.web.layuot is not a known key; did you mean layout?",
    "streams.web.source.txt=x": "streams.web.source.txt is not a known key; did you mean text?",
    "streams.web.source.completion=x": "source.completion is not a known key; write streams.web.source.response.",
    "streams.web.source.question=x": "source.question is not a known key; write streams.web.source.prompt.",
    "streams.web.source.chat=x": "is not a known key; write streams.web.source.messages.",
    "streams.web.source.layout=x": "streams.web.source.layout is not a known key; write streams.web.layout.",
    "streams.web.where=x": "streams.web.where is not a known key; write streams.web.source.where.",
    "too_long=filter": "too_long is not a known key; write streams.NAME.too_long.",
    "where=x": "where is not a known key; write streams.NAME.source.where.",
    "backend=auto": "backend is not a known key; write tokenizer.backend.",
    "streams.web.repeat=2": "streams.web.repeat is not a known key; write mix.web.repeat.",
    "streams.web.max_bad=1%": "streams.web.max_bad is not a known key; write max_bad at the top.",
    "mix.web.layout=x": "mix.web.layout is not a known key; write streams.web.layout.",
    "folder=x": "folder is not a known key",
    "max_seq_len=1": "max_seq_len is 1",
    "max_seq_len=true": "max_seq_len is True; it must be a whole number",
    "streams.web.min_tokens=a": "streams.web.min_tokens is 'a'; it must be a whole number",
    "special_tokens_in_text=no": "it must be escape or allow or reject",
    "train_loader.name=text": "streams.faq: is finetuning data, which the text loader cannot read; set train_loader.name: finetuning",
    "train_loader.name=vision": "the loaders are text, finetuning, mdsmix",
    "decoder_only_format=false": "streams.web: is pretraining data under decoder_only_format: false",
    "target_prompts=length>=0": "target_prompts is 'length>=0'",
    "target_responses=first": "it must be last or all",
    "mix.wep.repeat=3": "mix.wep names no stream; did you mean web?",
    "mix.web.choose=3": "mix.web must give exactly one of repeat, proportion, choose and share",
    "mix.web.repeat=-1": "it must be 0 or more",
    "mix.web.repeat=.nan": "it must be 0 or more",
    "compression=gz": "compression is 'gz'; it must be zstd or zstd:N",
    "local=null": "neither remote nor local says where to publish",
    "streams.web.kind=null": "streams.web: kind is missing",
    "streams.web.source.prompt=p": "source names the fields text, prompt; pretraining reads text",
    "streams.faq.source.response=null": "source names the fields prompt; finetuning reads prompt and response",
    "streams.web.source.path=[]": "source.path is empty",
    "streams.web.split=a/b": "split is 'a/b'; it names one folder",
    "streams.web.split=train-0123abcd": "those of mdsmix's own first looks and versions",
    "streams.web.split=limit-7": "those of mdsmix's own first looks and versions",
    "streams.web.remote=s3://b/x": "remote is for streams without a source; take it out",
    "streams.old.remote=null streams.old.local=null": "streams.old: has neither a source nor a remote or local",
    "streams.faq.layout=document": "layout is for pretraining; take it out",
    "streams.web.date_string=x": "date_string is for messages; take it out",
    "streams.web.max_tokens=0": "max_tokens is 0",
    "streams.faq.columns=compact": "columns is for messages without images; take it out",
    "streams.web.layout=document streams.web.add_eos=false": "needs add_eos: true",
    "max_seq_len=${nothing}": "Interpolation key 'nothing' not found",
    "streams=[]": "is not a readable recipe: Cannot merge incompatible container types",
    "streams.web.source.where=len(": "streams.web: source.where: at character 4 of 'len(': '(' was never closed",
    "streams.web.source.where=3": "source.where is 3; it must be text",
    "streams.web.source.text='{a'": "streams.web: source.text: expected '}' before end of string",
    "streams.web.source.id='{}'": "source.id: a field has a name",
    "streams.chat.source.messages='{a}{b}'": "source.messages is '{a}{b}', a template, which makes a text",
    "streams.web.source.filter=x": "is not a known key; write streams.web.source.where.",
    "train_loader=3": "train_loader is 3; it must be keys and values",
    "no-equals-sign": "`no-equals-sign` is no override",
}


@pytest.mark.parametrize("override", REFUSED)
def test_what_cannot_be_right_is_refused_by_name(tmp_path: Path, override: str) -> None:
    with pytest.raises(RecipeError) as refusal:
        load(tmp_path, *override.split())
    assert REFUSED[override] in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_compact_is_refused_under_other_policies(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="columns: compact holds only what target_prompts: none"):
        load(tmp_path, "streams.chat.columns=compact", "target_responses=all")


def test_a_recipe_without_streams_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="streams is empty"):
        load(tmp_path, text="{tokenizer: gpt2, max_seq_len: 8, streams: {}}")


@pytest.mark.parametrize("text", ["a: [", "[]", "- 1", "", "a: 1\na: 2", "\x00"])
def test_what_is_no_mapping_is_no_recipe(tmp_path: Path, text: str) -> None:
    with pytest.raises(RecipeError):
        load(tmp_path, text=text)


def test_a_missing_recipe_and_a_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="cannot be read as a recipe: No such file"):
        open_recipe(tmp_path / "none.yaml")
    with pytest.raises(RecipeError, match="cannot be read as a recipe"):
        open_recipe(tmp_path)
