"""A recipe becomes dataclasses, with exact shares and budgets. A wrong one is refused in one
sentence.

`load` writes and opens a recipe, `load_mix` one of published streams with weights.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import yaml

from mdsmix.errors import RecipeError
from mdsmix.kinds import open_recipe
from mdsmix.recipe import Recipe, load_recipe
from mdsmix.recipe.amounts import read_budget, read_share
from mdsmix.recipe.phases import list_chosen_phases, make_phase_recipe
from mdsmix.recipe.rules import find_budget, read_shares
from mdsmix.recipe.stream_spec import SHAPES_WITH_IMAGES
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


def test_recipes_know_the_shapes_with_images() -> None:
    assert {name for name, shape in SHAPES.items() if shape.has_images} == SHAPES_WITH_IMAGES


def test_the_default_loader_reads_every_stream(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(ALONE)
    with_images = "streams.web.source.shape=llava"
    for overrides, loader in (
        ([], "text"),
        (["streams.web.kind=finetuning"], "finetuning"),
        (["streams.faq={kind: finetuning, local: x}"], "finetuning"),
        ([with_images], "mdsmix"),
        ([with_images, "train_loader.name=finetuning"], "finetuning"),
    ):
        assert load_recipe(tmp_path / "recipe.yaml", overrides).loader == loader


def test_paths_begin_at_the_recipes_folder_and_urls_and_hub_names_stay(tmp_path: Path) -> None:
    (tmp_path / "tok").mkdir()
    recipe = load(tmp_path)
    sources = [stream.source.path for stream in recipe.streams.values() if stream.source]
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
    alone = ALONE.replace("a}}}", "a, text: t}}}")
    tokenizer = load(tmp_path, "tokenizer.backend=reference", text=alone).tokenizer
    assert (tokenizer.name, tokenizer.backend) == ("gpt2", "reference")
    with_kwargs = RECIPE.replace("kwargs: {}", "kwargs: {a: 1}")
    tokenizer = load(tmp_path, "tokenizer=llama", text=with_kwargs).tokenizer
    assert (tokenizer.name, tokenizer.kwargs) == ("llama", {})


def test_an_override_can_name_a_stream_with_a_dot(tmp_path: Path) -> None:
    """By its plain name, or by OmegaConf's brackets. The longest plain name that fits counts."""
    stream = "kind: pretraining, source: {path: a, text: t}"
    names = ("a", "a.b", "a.b.c")
    streams = ", ".join(f"{name}: {{{stream}}}" for name in names)
    text = f"{{tokenizer: gpt2, max_seq_len: 8, local: m, streams: {{{streams}}}}}"
    for number, name in enumerate(names, 1):
        for key in (f"streams.{name}.max_tokens", f"streams[{name}].max_tokens"):
            recipe = load(tmp_path, f"{key}={number}", f"mix.{name}.repeat={number}", text=text)
            max_tokens = {stream.name: stream.max_tokens for stream in recipe.streams.values()}
            assert max_tokens == dict.fromkeys(recipe.streams, None) | {name: number}
            assert recipe.mix.keys() == {name}
            assert recipe.mix[name].repeat == number
    recipe = load(tmp_path, "streams.a.b.source.path=[x,y]", text=text)
    assert recipe.streams["a.b"].source.path == [f"{tmp_path}/x", f"{tmp_path}/y"]
    assert_refused("streams.a.b.knd", lambda: load(tmp_path, "streams.a.b.knd=x", text=text))


REFUSED_OVERRIDES = {
    "tokenizer.path=x": "tokenizer.path is not a known key; write tokenizer.name.",
    "max_seq_lem=1": "max_seq_lem is not a known key; did you mean max_seq_len?",
    "streams.web.source.txt=x": "streams.web.source.txt is not a known key; did you mean text?",
    "streams.web.source.question=x": "source.question is not a known key; write streams.web.source.prompt.",
    "streams.web.where=x": "streams.web.where is not a known key; write streams.web.source.where.",
    "seed=3": "seed is not a known key; the keys are tokenizer, max_seq_len, streams,",
    "streams.web.kind=media": "streams.web: kind is 'media'; the kinds are pretraining, finetuning,",
    "streams.web.source.shape=plainest": "source.shape is 'plainest'; the shapes are text,",
    "streams.web.source.path=[ab].txt": "the value of streams.web.source.path=[ab].txt is not valid YAML, in which characters such as * and [ have a meaning: write it in quotes, 'streams.web.source.path=\"[ab].txt\"' in a shell.",
    "mix.web.layout=x": "mix.web.layout is not a known key; write streams.NAME.layout.",
    "mix.web.seed=x": "mix.web.seed is not a known key; the keys are repeat, proportion, choose, share, max_repeat.",
    "pack=true": "pack is not a known key; write streams.NAME.pack.",
    "split_by=line": "split_by is not a known key; write streams.NAME.source.split_by.",
    "streams.web.max_seq_len=8": "streams.web.max_seq_len is not a known key; write max_seq_len at the top level.",
    "streams.web.repeat=2": "streams.web.repeat is not a known key; write mix.NAME.repeat.",
    "max_seq_len=1": "max_seq_len is 1",
    "train_loader.name=text": "streams.faq: is finetuning data, which the text loader cannot read: set train_loader.name: finetuning",
    "decoder_only_format=false": "streams.web: is pretraining data, which cannot be used with decoder_only_format: false",
    "target_prompts=length>=0": "target_prompts is 'length>=0'",
    "mix.wep.repeat=3": "mix.wep names no stream; did you mean web?",
    "mix.web.choose=3": "mix.web must set exactly one of repeat, proportion, choose and share",
    "compression=gz": "compression is 'gz'; it must be zstd or zstd:N",
    "local=null": "neither remote nor local is set",
    "streams.web.kind=null": "streams.web: kind is missing",
    "streams.web.source.prompt=p": "source names the fields text, prompt; pretraining reads text: name the fields of one of these under source",
    "streams.web.source.shape=alpaca streams.web.source.text=null": "source.shape is alpaca; pretraining reads text: correct the shape or the kind",
    "streams.faq.source.response=null": "source names the fields prompt; finetuning reads prompt and response",
    "streams.web.source.path=[]": "source.path is empty",
    "streams.web.split=a/b": "split is 'a/b'; it names one folder",
    "streams.web.split=train-0123abcd": "reserved for mdsmix's own trials and versions",
    "streams.web.remote=s3://b/x": "remote is only for streams without a source, so it would change nothing here: remove remote",
    "streams.old.remote=null streams.old.local=null": "streams.old: has neither a source nor a remote or local",
    "streams.faq.layout=document": "layout is only for pretraining, so it would change nothing here: remove layout",
    "streams.web.date_string=x": "date_string is only for messages, so it would change nothing here: remove date_string",
    "streams.faq.columns=compact": "columns is only for messages without images, so it would change nothing here: remove columns",
    "streams.web.layout=document streams.web.add_eos=false": "needs add_eos: true",
    "max_seq_len=${nothing}": "Interpolation key 'nothing' not found",
    "local=${oc.env:NOPE}": "recipe: local: Environment variable 'NOPE' not found.",
    "local=${nope}": "recipe: local: Interpolation key 'nope' not found.",
    "streams=[]": "is not a readable recipe: Cannot merge incompatible container types",
    "streams.web.source.where=len(": "streams.web: source.where: at character 4 of 'len(': '(' was never closed",
    "streams.web.source.id='{}'": "source.id: braces must contain only the name of a field",
    "streams.chat.source.messages='{a}{b}'": "source.messages is the template '{a}{b}', whose value is always text",
    "streams.chat.columns=compact target_responses=all": "columns: compact works only with target_prompts: none",
    "no-equals-sign": "`no-equals-sign` is not an override",
    "max_seq_len=\udcff": "the override 'max_seq_len=\\udcff' is not valid UTF-8",
    "streams.web.source.path=\udcff.txt": "the override 'streams.web.source.path=\\udcff.txt' is not valid UTF-8",
}


def assert_refused(words: str, read: Callable[[], object]) -> None:
    """Check that reading fails with one short line that contains these words."""
    with pytest.raises(RecipeError) as refusal:
        read()
    message = str(refusal.value)
    assert (words in message, "\n" in message, len(message) < 600) == (True, False, True), message
    assert not message.endswith(".."), message


def test_a_wrong_setting_is_refused_by_name(tmp_path: Path) -> None:
    for override, words in REFUSED_OVERRIDES.items():
        assert_refused(words, lambda override=override: load(tmp_path, *override.split()))


NAMED_OVERRIDES = {
    "max_seq_len=-1 max_bad=0.5": "the override of max_seq_len",
    "streams.web.kind=foo": "the override of streams.web.kind",
    "streams[web].kind=foo": "the override of streams[web].kind",
    "streams.web={kind: foo}": "the override of streams.web",
    "streams.web.split=a/b streams.faq.pack=true": "the override of streams.web.split",
    "streams.web.source.where=len(": "the override of streams.web.source.where",
    "streams.web.layout=document streams.web.add_eos=false": "the overrides of streams.web.layout, streams.web.add_eos",
    "train_loader.name=foo": "the override of train_loader.name",
    "mix.nope.repeat=2": "the override of mix.nope.repeat",
    "nope.x=2": "the override of nope.x",
    "streams.faq.max_bad=0.1 mix.web.repeat=1": "the override of streams.faq.max_bad",
}
"Overrides that are refused -> the words on those that the message is about."


def test_the_override_that_has_set_a_wrong_value_is_named(tmp_path: Path) -> None:
    for overrides, words in NAMED_OVERRIDES.items():
        separate = [overrides] if "{" in overrides else overrides.split()
        with pytest.raises(RecipeError) as refusal:
            load(tmp_path, *separate)
        assert f"recipe.yaml, with {words}: " in str(refusal.value)
    with pytest.raises(RecipeError, match=r"recipe\.yaml: streams\.web: kind is 'foo'"):
        load(
            tmp_path,
            "max_seq_len=64",
            text=RECIPE.replace("web: {kind: pretraining", "web: {kind: foo"),
        )


def test_other_files_are_refused_in_a_short_sentence(tmp_path: Path) -> None:
    for text, words in {
        "a: 1\nb: [1,\n  2\nc: 3": "recipe: line 4, column 2: did not find expected ',' or ']' "
        "(while parsing a flow sequence, line 2).",
        "a:\n  b: c\n d: e": "line 3, column 2: did not find expected key; indent all keys of a section "
        "alike.",
        "a: b: c": "mapping values are not allowed in this context; indent it like the line before, or "
        "put a text with `: ` in quotes.",
        "a: b\nmax_seq_len 2\nc: d": "line 2, column 1: could not find expected ':'; write a colon",
        "a: @b": "cannot start any token; indent with spaces, not tabs, and quote a value",
        "a: 'b": "found unexpected end of stream; close the quotation mark.",
        "max_seq_len: 8": "recipe.yaml: streams is missing; add it, for example streams: {web:",
        "max_seq_len: 8\nstreams: {}": "tokenizer is missing; add it, for example tokenizer: Qwen/",
        "streams: {}\ntokenizer: x": "max_seq_len is missing; add it, for example max_seq_len: 2048.",
        "streams: {a: {source: {text: t}}}": "streams.a.source.path is missing; add it, for example "
        "path: data.jsonl.",
        "a: 1\n\tb: 2": "recipe: line 2, column 1: found a tab character",
        "a: 1\na: 2": "recipe: line 2, column 1: found duplicate key a.",
        "a: &x [*x]": "recipe: line 1, column 4: YAML recursive aliases are not supported.",
        "[]": "must be keys and values",
        "- 1": "must be keys and values",
        "": "recipe.yaml is empty: name a recipe",
        "# a comment": "recipe.yaml is empty: name a recipe",
        "\x00": "",
        "x" * 5000 + ": 1": "",
    }.items():
        assert_refused(words, lambda text=text: load(tmp_path, text=text))
    for streams in ({}, None):
        assert_refused("streams is empty", lambda: load_mix(tmp_path, streams=streams))  # noqa: B023
    for path in (tmp_path / "none.yaml", tmp_path):
        with pytest.raises(RecipeError, match=r"no such file|cannot be read: Is a"):
            open_recipe(path)


PUBLISHED: dict[str, Any] = {
    "tokenizer": "gpt2",
    "max_seq_len": 8,
    "streams": {
        **{name: {"local": "mix/x"} for name in ("web", "chat", "code")},
        "held": {"local": "mix/x", "split": "val"},
    },
}
"A recipe of three published streams, and a fourth that is evaluated on."


def load_mix(home: Path, **keys: Any) -> Recipe:
    return load(home, text=json.dumps(PUBLISHED | keys))


SHARES = {
    "30%": "3/10",
    0.7: "7/10",
    "1/3": "1/3",
    7: "7",
    "52.2 %": "261/500",
    "0": "0",
    1e-7: "1/10000000",
}
WRONG_SHARES = (
    -1,
    "-3%",
    float("nan"),
    float("inf"),
    "half",
    "",
    "1e999",
    "3%%",
    "1/0",
    "0x1",
    True,
)
BUDGETS: tuple[tuple[str, Any, str | None, str | None], ...] = (
    ("2B tokens", 2 * 10**9, "tokens", None), ("400k samples", 400_000, "samples", None),
    ("1.5T loss_tokens", 15 * 10**11, "loss_tokens", None), ("1 sample", 1, "samples", None),
    ("2,000,000 tokens", 2_000_000, "tokens", None), ("2 m TOKENS", 2_000_000, "tokens", None),
    ("2 passes of chat", 2, None, "chat"), ("1 pass of a.b-c", 1, None, "a.b-c"),
    ("0.5 passes of chat", "1/2", None, "chat"),
)  # fmt: skip
WRONG_BUDGETS = (
    "2B",
    2_000_000,
    "0 tokens",
    "2B words",
    "-2B tokens",
    "two passes of chat",
    "2 passes",
    "nan tokens",
    "1e999 tokens",
)


def test_shares_and_budgets_are_read_exactly_or_refused() -> None:
    for share, exact in SHARES.items():
        assert read_share(share) == Fraction(exact), share
    for value, amount, unit, stream in BUDGETS:
        budget = read_budget(value)
        assert (budget.amount, budget.unit, budget.stream) == (Fraction(amount), unit, stream), (
            value
        )
    for read, values, words in (
        (read_share, WRONG_SHARES, "a number of at least 0, such as"),
        (read_budget, WRONG_BUDGETS, "above 0, with its unit: 2B tokens"),
    ):
        for value in values:
            with pytest.raises(ValueError, match=words):
                read(value)


def _mix(**weights: Any) -> dict[str, Any]:
    mix = {
        name: weight if isinstance(weight, dict) else {"share": weight}
        for name, weight in weights.items()
    }
    return {"mix": mix}


ALL = _mix(web=0.5, chat=0.3, code=0.2)
REPEATED = _mix(chat={"repeat": 2})
WHOLE = {"absolute": True, "budget": "2B tokens"}
EPOCH = {"train_loader": {"dataset": {"epoch_size": 9}}}
REFUSED_SHARES: list[tuple[dict[str, Any], str]] = [
    (_mix(web=-1), "mix.web.share is -1; it must be a number of at least 0"),
    (_mix(web=0, chat=0, code=0), "the shares sum to 0"),
    (_mix(web=0.5, chat={"repeat": 2}), "mix.chat sets repeat, but the recipe sets a share, a budget or a temperature"),
    (REPEATED | {"budget": "2B tokens"}, "mix.chat sets repeat, but the recipe sets a share, a budget or a temperature"),
    (_mix(web=0.5, chat=0.5), "sum to 100%, so nothing is left for code: lower them, or"),
    (_mix(web="60%", chat="70%", code=0), "sum to 130%, but shares in percent must sum to 100%"),
    (_mix(web="33.3%", chat="33.3%", code="33.3%"), "sum to 99.9%, but shares in percent must"),
    (_mix(web="60%", chat=0.3, code="0%"), "sum to 90%, but shares in percent must sum to 100%"),
    (_mix(web="60%", chat="70%"), "sum to 130%, so nothing is left for code: lower them, or"),
    (_mix(held=0.5), "mix.held sets a share, but the split of this stream is val"),
    (_mix(held={"proportion": 0.5}), "mix.held sets a proportion, but the split of this stream is val"),
    (_mix(web=70, chat="30%", code=0), "mix.web.share is 70, more than the whole: if it is"),
    (_mix(web=0.5) | WHOLE, "these have none: chat, code. Set a share for each stream"),
    (ALL | {"absolute": True}, "the recipe has no budget: add one"),
    (ALL | WHOLE | {"count": "samples"}, "count is samples, but with absolute: true each share is a part of the budget of 2,000,000,000 tokens"),
    (ALL | {"budget": "2B"}, "budget is '2B'; it must be above 0, with its unit"),
    (ALL | {"budget": "2 passes of wep"}, "passes of wep, which is not a stream that is trained on; did you mean web?"),
    (ALL | {"temperature": 2}, "it only affects streams without a share, and every stream has one"),
    (ALL | EPOCH, "epoch_size is set, but in a mix by shares"),
    ({"max_repeat": 2}, "max_repeat is for mixes by share, but the recipe has neither"),
    (_mix(web={"repeat": 1, "max_repeat": 2}), "mix.web.max_repeat is for mixes by share, but the recipe has neither"),
    (_mix(web={"share": 1, "max_repeat": 0}), "mix.web.max_repeat is 0; it must be a number above 0"),
    (_mix(web={"share": 1, "repeat": 1}), "exactly one of repeat, proportion, choose and share"),
]  # fmt: skip


MAIN = {"budget": "2B tokens", "mix": {"web": "50%", "chat": "30%", "code": "20%"}}
ANNEAL = {"budget": "1B tokens", "mix": {"code": {"share": 1}}}


def _phases(main: Any = (), **others: Any) -> dict[str, Any]:
    return {"phases": {"main": MAIN | dict(main), **(others or {"anneal": ANNEAL})}}


REFUSED_PHASES: list[tuple[dict[str, Any], str]] = [
    (_phases() | {"phase": "aneal"}, "phase is 'aneal', which is not a phase of the recipe; did you mean anneal?"),
    (ALL | {"phase": "main"}, "phase is main, but the recipe has no phases: remove phase, or add phases"),
    (_phases() | ALL, "mix and phases are both set: each phase has a mix of its own, so remove mix"),
    (_phases() | {"budget": "3B tokens"}, "budget is 3,000,000,000 tokens, but each phase has a budget of its own"),
    (_phases({"budget": "50%"}), "the recipe has no budget in tokens or samples: add one"),
    (_phases({"budget": "50%"}) | {"budget": "2 passes of web"}, "the recipe has no budget in tokens or samples: add one"),
    (_phases({"budget": "50%"}) | {"budget": "2B tokens"}, "the budgets of main are parts of the recipe's budget, and those of anneal are not"),
    (_phases({"budget": "50%"}, anneal=ANNEAL | {"budget": "1/3"}) | {"budget": "2B tokens"}, "sum to 83.33333333% of the recipe's budget, not to 100%"),
    (_phases({"budget": "99%"}, anneal=ANNEAL | {"budget": "1%"}) | {"budget": "40 tokens"}, "phases.anneal.budget is 1% of 40 tokens, which is rounded to 0"),
    (_phases(Main=ANNEAL), "phases.Main and phases.main differ only in case"),
    (_phases({"budget": "2B"}), "phases.main.budget is '2B'; it must be above 0, with its unit"),
    (_phases({"budget": "0%"}), "phases.main.budget is '0%'; it must be above 0"),
    (_phases({"mix": {"wep": "30%"}}), "phases.main.mix.wep names no stream that is trained on; did you mean web?"),
    (_phases({"mix": {"held": "30%"}}), "phases.main.mix.held names no stream that is trained on; these are"),
    (_phases({"mix": {}}), "phases.main.mix names no stream, so nothing would be trained"),
    (_phases({"mix": {"web": {"share": 1}}}), "no phase draws chat: give each stream a share in a phase"),
    (_phases({"mix": MAIN["mix"] | {"web": "60%"}}), "phases.main: the shares of the mix sum to 110%"),
    (_phases({"mix": MAIN["mix"] | {"web": {"repeat": 2}}}), "phases.main: mix.web sets repeat, but the recipe sets a share"),
    (_phases({"max_repeat": 0}), "phases.main.max_repeat is 0; it must be a number above 0"),
    (_phases({"shuffle_seed": -1}), "phases.main.shuffle_seed is -1; it must be 0 or more"),
    (_phases({"lr": 1}), "phases.main.lr is not a known key; the keys are budget, mix, max_repeat, shuffle_seed"),
    (_phases(**{"an/neal": ANNEAL}), "phases.an/neal: this name cannot be used, since it becomes a part of file names"),
    (_phases() | {"temperature": 2}, "in every phase every stream has one: remove temperature"),
    (_phases() | EPOCH, "phases.main: train_loader.dataset.epoch_size is set, but in a mix by shares"),
]  # fmt: skip


def test_phases_have_budgets_and_mixes_that_fit_together(tmp_path: Path) -> None:
    for keys, words in REFUSED_PHASES:
        assert_refused(words, lambda keys=keys: load_mix(tmp_path, **keys))
    halves = _phases({"budget": "1/3"}, anneal=ANNEAL | {"budget": "2/3"})
    recipe = load_mix(tmp_path, **halves, budget="2B tokens")
    whole = [make_phase_recipe(recipe, name) for name in recipe.phases]
    assert [phase.budget for phase in whole] == ["666666667 tokens", "1333333333 tokens"]
    assert [list(phase.streams) for phase in whole] == [
        ["web", "chat", "code", "held"],
        ["code", "held"],
    ]
    assert {phase.loader for phase in whole} == {recipe.loader}, "of all streams, in each phase"
    # A phase without a share for each stream divides what is left by size, so temperature counts.
    mix = {"web": "50%", "chat": {"max_repeat": 9}, "code": {"max_repeat": 9}}
    assert load_mix(tmp_path, **_phases({"mix": mix}), temperature=2).temperature == 2
    assert list_chosen_phases(recipe) == ["main", "anneal"]
    assert list_chosen_phases(load_mix(tmp_path, **_phases(), phase="anneal")) == ["anneal"]


def test_names_that_yaml_reads_as_numbers_are_strings(tmp_path: Path) -> None:
    streams = PUBLISHED["streams"]
    for keys, words in (
        ({"phases": {1: MAIN, "anneal": ANNEAL}}, "phases.1: this name cannot be used"),
        (_phases({"mix": {2024: "100%"}}), "phases.main.mix.2024 names no stream that is trained"),
        ({"mix": {2024: "100%"}}, "mix.2024 names no stream; the streams are"),
    ):
        text = yaml.safe_dump(PUBLISHED | keys)
        assert_refused(words, lambda text=text: load(tmp_path, text=text))
    numbered = {"streams": {2024: streams["web"]}, "mix": {2024: "100%"}}
    recipe = load(tmp_path, text=yaml.safe_dump(PUBLISHED | numbered))
    assert (list(recipe.streams), list(recipe.mix)) == (["2024"], ["2024"])


def test_a_share_in_percent_needs_no_key(tmp_path: Path) -> None:
    """From a file, an interpolation and an override; an override replaces the whole weight. A
    number alone could be a repeat, so it is refused.
    """
    whole = {"web": "30%", "chat": "1/5"}
    expected = {name: {"share": share} for name, share in whole.items()}
    read = load_mix(tmp_path, **_mix(**whole))
    short = load_mix(tmp_path, mix=whole)
    assert short == read
    assert {name: weight.set_keys for name, weight in short.mix.items()} == expected
    for overrides, web in (
        (["mix.web=20%"], {"share": "20%"}),
        (["mix.web.share=0.2"], {"share": 0.2}),
        (["mix={web: 10 %}"], {"share": "10 %"}),
        (["mix.web=${mix.chat}"], {"share": "1/5"}),
    ):
        for mix in (whole, expected):
            text = json.dumps({"mix": mix} | PUBLISHED)
            assert load(tmp_path, *overrides, text=text).mix["web"].set_keys == web
    weighted = json.dumps({"mix": {"web": {"repeat": 2}}} | PUBLISHED)
    assert load(tmp_path, "mix.web=40%", text=weighted).mix["web"].set_keys == {"share": "40%"}
    for lone in (0.3, 2, "0.3", "half", "-3%", None, True, ["30%"]):
        assert_refused(
            "could be a repeat or a share", lambda lone=lone: load_mix(tmp_path, mix={"web": lone})
        )


def test_shares_belong_to_streams_that_are_trained_on(tmp_path: Path) -> None:
    for keys, words in REFUSED_SHARES:
        assert_refused(words, lambda keys=keys: load_mix(tmp_path, **keys))
    recipe = load_mix(tmp_path, **_mix(web="30%", code=0.2), budget="2 passes of chat")
    assert read_shares(recipe) == {"web": Fraction(3, 10), "chat": None, "code": Fraction(1, 5)}
    assert str(find_budget(recipe)) == "2 passes of chat"
    for shares in (
        {"web": "60%", "chat": 0.25, "code": "15%"},
        {"web": "60%", "chat": "40%", "code": 0},
        {"web": "60%", "chat": "10%"},
        {"web": 60, "chat": 70, "code": 0},
    ):
        load_mix(tmp_path, **_mix(**shares))
    assert load_mix(tmp_path, **_mix(web="60%", chat="70%", code="1%") | WHOLE).absolute
    for keys, is_by_share in (({}, True), (REPEATED, False), ({"temperature": 2}, True)):
        assert load_mix(tmp_path, **(keys or ALL)).is_by_share is is_by_share
