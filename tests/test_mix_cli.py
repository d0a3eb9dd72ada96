"""`check` and `render-yaml` as a user meets them: what is told apart, what is printed where, and
the exit codes. Whatever stands at whatever key of a training YAML ends in findings or in one
sentence.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import xxhash
import yaml

from mdsmix.errors import MdsmixError, RecipeError
from mdsmix.mix.check import describe_verdict, make_report, run_checks
from mdsmix.mix.streams.resolve import make_mix, resolve_mix
from mdsmix.report.named_streams import named_streams
from mdsmix.tokenizer import card as pretrained
from tests import published as hand
from tests.converting import done, mdsmix
from tests.corpus import train_tokenizer
from tests.published import SPLIT, SPLIT_ROW, TURNS, TURNS_ROW, publish, write_mix
from tests.test_cli_streams import without_colours


def refused(code: int, words: str, *arguments: object) -> str:
    """In one sentence, below the findings if there are any; what is said on stderr."""
    answer = mdsmix(*arguments)
    assert (answer.code, answer.out) == (code, ""), answer
    assert words in answer.err.splitlines()[-1]
    return answer.err


@pytest.fixture
def streams(tmp_path: Path) -> Path:
    publish(tmp_path / "web", SPLIT, [SPLIT_ROW] * 30)
    publish(tmp_path / "plain", hand.CONCAT, [hand.TOKEN_ROW] * 30)
    publish(tmp_path / "chat", TURNS, [TURNS_ROW] * 30)
    return tmp_path


@pytest.fixture
def recipe(streams: Path, tokenizer_folder: Path) -> Path:
    workers = {"num_workers": 0}
    return write_mix(streams, "web", "chat", tokenizer=str(tokenizer_folder), train_loader=workers)


def test_a_target_is_folder_split_or_index(streams: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(streams / "flat", SPLIT, [SPLIT_ROW] * 10, split=".")
    shutil.copytree(streams / "web", streams / "elsewhere" / "web")
    monkeypatch.chdir(streams)
    for targets in (["web", "chat/train"], ["web/train/index.json", "flat"], ["flat/index.json"]):
        assert [s.name for s in resolve_mix(targets).streams] == targets
    shutil.copytree(streams / "web/train", streams / "elsewhere/web/val")
    assert [s.url for s in named_streams(["elsewhere", "flat"])] == ["elsewhere/web/train", "flat"]


def test_no_number_is_broken_in_a_narrow_terminal(
    streams: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`check` folds its last lines between words, as it does its findings."""
    whole = done("check", streams / "web", streams / "chat").out.splitlines()[-2:]
    for name, value in (("FORCE_COLOR", "1"), ("TERM", "xterm"), ("COLUMNS", "32")):
        monkeypatch.setenv(name, value)
    said = without_colours(done("check", streams / "web", streams / "chat").out)
    folded = said[said.index(whole[0].split(",")[0][:20]) :]
    assert folded.split() == " ".join(whole).split()
    assert max(map(len, folded.splitlines())) <= 32


def test_deep_reads_what_check_alone_does_not_and_two_kinds_are_refused(streams: Path) -> None:
    shard = next((streams / "plain/train").glob("*.mds"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"!")
    plain = done("check", streams / "plain")
    assert plain.out.splitlines()[-1].startswith(
        "shard contents not read (only names and sizes): 1 shard, "
    )
    deep = mdsmix("check", "--deep", streams / "plain")
    assert deep.code == 3
    assert deep.out.startswith(f"error shard-contents [{streams}/plain]: shard.00000.mds of ")
    assert deep.out.splitlines()[-1].startswith("read and hashed: 1 shard, ")
    two = (streams / "plain", streams / "chat")
    told, result = mdsmix("check", *two), mdsmix("check", "--json", *two)
    assert told.code == result.code == 3
    assert told.out.startswith(f"error columns-loader [{streams}/plain]: ")
    assert "2 streams may not be mixed (1 error, 1 note)" in told.out
    tree = json.loads(result.out)
    assert tree["may_be_mixed"] is False
    assert set(tree["findings"][0]) == {"id", "severity", "streams", "message", "why", "fix"}
    assert [share["delivered"] for share in tree["epoch"]] == [30, 30]


WRONG = (
    ("check nothing", 4, "holds no published stream"),
    ("check web web/train", 2, "web, web/train names a stream twice"),
    ("check web max_seq_len=4", 2, "is neither one recipe"),
    ("check nope.yaml", 2, "nope.yaml cannot be read as YAML: No such file"),
    ("inspect nope.yaml", 2, "nope.yaml cannot be read as YAML: No such file"),
    ("check seed.yaml", 2, "neither a recipe nor a training YAML"),
    ("render-yaml mix.yaml --validate", 2, "llmfoundry is not installed"),
    ("render-yaml mix.yaml --into mix.yaml", 2, "that file is a recipe"),
    ("render-yaml mix.yaml --out mix.yaml", 2, "that file is a recipe"),
    # A mix that is refused writes nothing.
    ("render-yaml mix.yaml train_loader.dataset.shuffel=1 -o out.yaml", 3, "nothing was rendered"),
)


def test_what_is_wrong_is_one_sentence(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, home = recipe.read_bytes(), recipe.parent
    (home / "seed.yaml").write_text("seed: 1\n")
    monkeypatch.chdir(home)
    for command, code, words in WRONG:
        said = refused(code, words, *command.split())
        assert recipe.read_bytes() == before
    assert "error key-rejected: " in said
    assert "or write the key that was meant (shuffle)" in said
    assert not (home / "out.yaml").exists()


def test_a_recipe_and_what_it_renders_get_the_same_findings(recipe: Path) -> None:
    out = recipe.with_name("out.yaml")
    rendered, shown = done("render-yaml", recipe, "-o", out), mdsmix("render-yaml", recipe)
    assert (rendered.out, shown.out) == ("", out.read_text())
    assert "may be mixed" in shown.err
    reports = [json.loads(mdsmix("check", "--json", p).out) for p in (recipe, out)]
    for part in ("findings", "epoch"):
        assert reports[0][part] == reports[1][part]
    for finding in reports[0]["findings"]:  # what check says in full, other commands name
        assert f" {finding['id']}" in rendered.err


def test_into_says_what_it_changed(recipe: Path) -> None:
    config = recipe.with_name("foundry.yaml")
    config.write_text("tokenizer: {name: gpt2}\nmax_seq_len: 16\ntrain_loader: {}\nseed: 1\n")
    told = json.loads(mdsmix("render-yaml", recipe, "--into", config, "--json").out)["changed"]
    assert "max_seq_len: 16 -> 8" in told
    assert not any(each.startswith("seed") for each in told)
    again = mdsmix("render-yaml", recipe, "max_seq_len=9", "--into", config).err
    assert "changed max_seq_len: 8 -> 9\n" in again
    assert again.count("changed ") == 1


def test_a_pretrained_model_keeps_its_tokenizer(recipe: Path) -> None:
    own = train_tokenizer(recipe.with_name("own"), vocab_size=700, documents_n=10)
    config = recipe.with_name("foundry.yaml")
    model = f'{{name: hf_causal_lm, pretrained_model_name_or_path: {own}, token: "${{oc.env:NO}}"}}'
    config.write_text(f"model: {model}\n")
    said = refused(3, "nothing was rendered", "render-yaml", recipe, "--into", config)
    assert "error model-tokenizer: " in said
    assert config.read_text() == f"model: {model}\n"
    same = ("render-yaml", recipe, f"tokenizer={own}", "--into", config)
    assert "model-tokenizer" not in done(*same).err


EVALS = """
eval_loader:
- label: c4
  name: finetuning
  num_workers: 2
  dataset: {streams: {c4: {local: HOME/c4, split: val}}, max_seq_len: 8, decoder_only_format: true}
"""


def test_an_evaluation_that_is_not_here_is_named_and_can_be_kept(recipe: Path) -> None:
    home, config = recipe.parent, recipe.with_name("foundry.yaml")
    config.write_text(before := EVALS.replace("HOME", str(home)))
    command = ("render-yaml", recipe, "--into", config)
    said = f"the stream c4 of eval_loader c4 is not at {home}/c4/val: "
    assert "--keep-evals" in refused(4, said, *command)
    assert "kept unseen: eval_loader c4\n" in done(*command, "--keep-evals").err
    assert before.strip() in config.read_text()


STOCK = """
variables:
  data_local: ./my-copy-c4
  max_seq_len: 2048
max_seq_len: ${variables.max_seq_len}
tokenizer:
  name: gpt2
  kwargs: {model_max_length: "${variables.max_seq_len}"}
train_loader:
  name: finetuning
  dataset:
    local: ${variables.data_local}
    split: train
    max_seq_len: ${variables.max_seq_len}  # as the model
  drop_last: true
  num_workers: 8
eval_loader:
  name: finetuning
  dataset: {local: "${variables.data_local}", split: val, max_seq_len: "${variables.max_seq_len}", decoder_only_format: true}
  drop_last: false
  num_workers: 8
seed: 17
"""
"Written as LLM-Foundry's own examples are: the evaluation reads data that the recipe replaces."


def test_a_stock_config_takes_the_mix_and_keeps_its_variables(recipe: Path) -> None:
    config = recipe.with_name("stock.yaml")
    config.write_text(STOCK)
    command = ("render-yaml", recipe, "--into", config)
    assert "--drop-evals" in refused(4, "is not at ", *command)
    done(*command, "--drop-evals")
    text = config.read_text()
    assert "eval_loader" not in text
    assert text.count("max_seq_len: ${variables.max_seq_len}") == 2
    assert yaml.safe_load(text)["tokenizer"]["kwargs"] == {
        "model_max_length": "${variables.max_seq_len}"
    }
    assert "  max_seq_len: 8\n" in text
    assert "seed: 17\n" in text
    done("check", config)
    refused(2, "contradict each other", *command, "--drop-evals", "--keep-evals")


def test_an_evaluation_kept_unseen_is_judged_by_its_keys(recipe: Path) -> None:
    """LLM-Foundry refuses a key that no loader reads, whether its streams are here or not."""
    config = recipe.with_name("stock.yaml")
    config.write_text(STOCK.replace("${variables.data_local}", "s3://nowhere-there/c4"))
    local = STOCK.replace('local: "${variables.data_local}", split: val,', "LOCAL")
    stream = "streams: {c4: {local: ./my-copy-c4, split: val}},"
    config.write_text(local.replace("LOCAL", stream))
    command = ("render-yaml", recipe, "--into", config, "--keep-evals")
    assert "kept unseen: eval_loader\n" in done(*command).err
    assert "kept unseen: eval_loader\n" in done("check", config, "--keep-evals").out
    refused(4, "is not at ", "check", config)
    done("check", config, "--drop-evals")
    config.write_text(
        local.replace("LOCAL", stream).replace("split: val}},", "split: val}}, odd: 1,")
    )
    assert "key-rejected" in refused(3, "nothing was rendered", *command)


CONFIG = """
variables: {length: 8}
max_seq_len: ${variables.length}
model: {name: mpt_causal_lm, token: "${oc.env:A_VARIABLE_OF_THE_TRAINING_NODE}"}
train_loader:
  name: finetuning
  num_workers: 2
  dataset: {streams: {chat: {local: HOME/chat, split: train}}, max_seq_len: "${max_seq_len}", decoder_only_format: true}
eval_loader: {name: finetuning, num_workers: 2, dataset: {hf_name: a/b, max_seq_len: 8}}
"""


def test_a_config_needs_no_variables_and_a_version_is_named_by_its_split(streams: Path) -> None:
    """A YAML that names the split would go on with another version once there is one."""
    train, config = streams / "chat/train", streams / "train.yaml"
    config.write_text(CONFIG.replace("HOME", str(streams)))
    assert "1 stream may be mixed" in done("check", config).out
    publish(streams / "chat", TURNS, [TURNS_ROW] * 30, card={})
    version = f"train-{xxhash.xxh128_hexdigest((train / 'index.json').read_bytes())[:8]}"
    shutil.copytree(train, train.with_name(version))
    (train / "index.json").unlink()
    refused(4, f"correct its split, {version}", "check", config)


SORTS: tuple[tuple[Any, ...], ...] = (
    (None, True, "", [], {}),
    (0, -1, 2.5, 10**30, float("nan"), float("inf")),
    ("text", "1e999", "${nothing}"),
    ([1, [2]], [{"a": None}], {"a": {"b": 1}}, {"streams": 3}),
)
TRAIN_YAML = """
max_seq_len: 8
global_train_batch_size: 4
model: {name: mpt_causal_lm, max_seq_len: 8, vocab_size: 512}
tokenizer: {name: tok, kwargs: {model_max_length: 8}}
train_loader: &loader
  name: finetuning
  drop_last: true
  num_workers: 2
  dataset: {
    streams: {web: {local: HOME/web, split: train, repeat: 1}, chat: {local: HOME/chat, split: train, repeat: 1}},
    max_seq_len: 8, decoder_only_format: true, target_prompts: none, target_responses: last, split: train,
    shuffle: true, shuffle_seed: 1, epoch_size: null, cache_limit: null, packing_ratio: 2.0, batching_method: stratified,
    num_canonical_nodes: 2, sampling_granularity: 1, token_encoding_type: int64, validate_hash: null,
    download_retry: 2, allow_unsafe_types: false, seq_parallel_replication: 1,
  }
eval_loader:
- <<: *loader
  label: held
  dataset: {streams: {web: {local: HOME/web, split: train}}, max_seq_len: 8}
"""


def places_in(tree: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    keys = [*tree] if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ()
    for key in keys:
        yield (*at, key)
        yield from places_in(tree[key], (*at, key))


def changed(tree: Any, at: tuple[Any, ...], value: Any) -> Any:
    inner = tree = copy.deepcopy(tree)
    for key in at[:-1]:
        inner = inner[key]
    inner[at[-1]] = value
    return tree


def is_answered(config: Any) -> bool:
    """Whether a mix ends in its verdict, or in the sentence that refuses it; any other error is a
    defect.
    """
    try:
        found = run_checks(mix := make_mix(config, "x"))
        return bool(make_report(mix, found)) and "\n" not in describe_verdict(mix, found)
    except MdsmixError as refusal:
        return "\n" not in str(refusal)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(pretrained, "open_tokenizer", Mock(side_effect=RecipeError("not here")))
    publish(tmp_path / "web", SPLIT, [SPLIT_ROW] * 8, card={})
    publish(tmp_path / "chat", TURNS, [TURNS_ROW] * 5)
    return tmp_path


def test_a_value_of_any_sort_at_any_key_is_judged_or_refused_in_a_sentence(home: Path) -> None:
    """An evaluation and the second stream are read by the code of the first: there each key gets
    one value, in turn.
    """
    tree = yaml.safe_load(TRAIN_YAML.replace("HOME", str(home)))
    for number, at in enumerate(places_in(tree)):
        is_second = at[0] == "eval_loader" or "chat" in at
        sorts = [SORTS[number % 4]] if is_second else [s for s in SORTS if s != SORTS[number % 4]]
        for value in (sort[number // 4 % len(sort)] for sort in sorts):
            assert is_answered(changed(tree, at, value)), (at, value)


def test_a_recipes_dataset_that_holds_no_keys_is_refused(home: Path) -> None:
    recipe = str(write_mix(home, "web", "chat"))
    for value in ("5", "[1]", "x"):
        with pytest.raises(RecipeError, match=r"train_loader\.dataset is .* must hold keys"):
            resolve_mix([recipe, f"train_loader.dataset={value}"])
