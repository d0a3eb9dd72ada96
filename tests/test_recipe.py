"""A recipe is read into what it says, and refused in one sentence where it cannot be right."""

from __future__ import annotations

from pathlib import Path

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


ALONE = "{tokenizer: gpt2, max_seq_len: 8, local: m, streams: {web: {kind: pretraining, source: {path: a}}}}"


def load(folder: Path, *overrides: str, text: str = RECIPE) -> Recipe:
    (folder / "recipe.yaml").write_text(text)
    return open_recipe(folder / "recipe.yaml", overrides)


def test_the_shapes_with_images_are_those_of_which_recipes_know_it() -> None:
    assert {name for name, shape in SHAPES.items() if shape.has_images} == SEEING


def test_the_loader_is_the_one_that_reads_every_stream(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(ALONE)
    seeing = "streams.web.source.shape=llava"
    for overrides, loader in (
        ([], "text"),
        (["streams.web.kind=finetuning"], "finetuning"),
        (["streams.faq={kind: finetuning, local: x}"], "finetuning"),
        ([seeing], "mdsmix"),
        ([seeing, "train_loader.name=finetuning"], "finetuning"),
    ):
        assert load_recipe(tmp_path / "recipe.yaml", overrides).loader == loader


def test_paths_are_rooted_in_the_recipes_folder_and_urls_and_hub_names_stay(tmp_path: Path) -> None:
    (tmp_path / "tok").mkdir()
    recipe = load(tmp_path)
    sources = [s.source.path for s in recipe.streams.values() if s.source]
    assert sources == [[f"{tmp_path}/a/*.jsonl"], [f"{tmp_path}/faq.jsonl"], ["s3://b/c.jsonl"]]
    assert recipe.tokenizer.name == f"{tmp_path}/tok"
    old = recipe.streams["old"]
    assert (old.remote, old.local) == ("s3://bucket/old", f"{tmp_path}/old")
    assert recipe.published(recipe.streams["web"]) == f"{tmp_path}/mix/web"
    assert load(tmp_path, "tokenizer=org/name").tokenizer.name == "org/name"


def test_overrides_and_interpolation(tmp_path: Path) -> None:
    recipe = load(tmp_path, "max_seq_len=64", "streams.web.max_tokens=${max_seq_len}")
    assert (recipe.max_seq_len, recipe.streams["web"].max_tokens) == (64, 64)
    assert recipe.streams["chat"].date_string == "2026-01-01", "a date of YAML is text"
    named = load(tmp_path, "tokenizer.backend=reference", text=ALONE.replace("a}}}", "a, text: t}}}")).tokenizer  # fmt: skip
    assert (named.name, named.backend) == ("gpt2", "reference")
    other = load(tmp_path, "tokenizer=llama", text=RECIPE.replace("kwargs: {}", "kwargs: {a: 1}"))
    assert (other.tokenizer.name, other.tokenizer.kwargs) == ("llama", {})


REFUSED = {
    "max_seq_lem=1": "max_seq_lem is not a known key; did you mean max_seq_len?",
    "streams.web.source.txt=x": "streams.web.source.txt is not a known key; did you mean text?",
    "streams.web.source.question=x": "source.question is not a known key; write streams.web.source.prompt.",
    "mix.web.layout=x": "mix.web.layout is not a known key; the keys are repeat, proportion, choose, share.",
    "max_seq_len=1": "max_seq_len is 1",
    "max_seq_len=true": "max_seq_len is True; it must be a whole number",
    "special_tokens_in_text=no": "it must be escape or allow or reject",
    "train_loader.name=text": "streams.faq: is finetuning data, which the text loader cannot read; set train_loader.name: finetuning",
    "train_loader.name=vision": "the loaders are text, finetuning, mdsmix",
    "decoder_only_format=false": "streams.web: is pretraining data under decoder_only_format: false",
    "target_prompts=length>=0": "target_prompts is 'length>=0'",
    "target_responses=first": "it must be last or all",
    "mix.wep.repeat=3": "mix.wep names no stream; did you mean web?",
    "mix.web.choose=3": "mix.web must give exactly one of repeat, proportion, choose and share",
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
    "train_loader=3": "train_loader is 3; it must be keys and values",
    "no-equals-sign": "`no-equals-sign` is no override",
}


def test_what_cannot_be_right_is_refused_by_name(tmp_path: Path) -> None:
    for override, words in REFUSED.items():
        with pytest.raises(RecipeError) as refusal:
            load(tmp_path, *override.split())
        assert words in str(refusal.value)
        assert "\n" not in str(refusal.value)


def test_what_is_no_recipe_is_refused_in_a_short_sentence(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="columns: compact holds only what target_prompts: none"):
        load(tmp_path, "streams.chat.columns=compact", "target_responses=all")
    with pytest.raises(RecipeError, match="streams is empty"):
        load(tmp_path, text="{tokenizer: gpt2, max_seq_len: 8, streams: {}}")
    for text in ("a: [", "[]", "- 1", "", "a: 1\na: 2", "\x00", "x" * 5000 + ": 1"):
        with pytest.raises(RecipeError) as refusal:
            load(tmp_path, text=text)
        assert len(str(refusal.value)) < 600
    for path in (tmp_path / "none.yaml", tmp_path):
        with pytest.raises(RecipeError, match=r"cannot be read as YAML: (No such|Is a)"):
            open_recipe(path)
