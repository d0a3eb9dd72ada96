"""The commands `check` and `render-yaml`: how they recognise their targets, what they print to
which stream, and their exit codes. Any value at any key of a training YAML gives findings or one
sentence.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import xxhash
import yaml

from mdsmix.errors import MdsmixError, RecipeError
from mdsmix.mix.check import describe_verdict, make_check_tree, run_checks
from mdsmix.mix.streams.resolve import make_mix, resolve_mix
from mdsmix.report.named_streams import list_named_streams
from mdsmix.tokenizer import card as pretrained
from tests import published
from tests.converting import mdsmix, run_ok
from tests.corpus import train_tokenizer
from tests.published import SPLIT, SPLIT_ROW, TURNS, TURNS_ROW, publish, write_mix
from tests.test_cli_streams import without_colours


def run_refused(code: int, words: str, *arguments: object) -> str:
    """Run a command that must be refused, and return its stderr. Its last line must contain the
    words; findings may come before.
    """
    answer = mdsmix(*arguments)
    assert (answer.code, answer.out) == (code, ""), answer
    assert words in answer.err.splitlines()[-1]
    return answer.err


@pytest.fixture
def streams(tmp_path: Path) -> Path:
    publish(tmp_path / "web", SPLIT, [SPLIT_ROW] * 30)
    publish(tmp_path / "plain", published.CONCAT, [published.TOKEN_ROW] * 30)
    publish(tmp_path / "chat", TURNS, [TURNS_ROW] * 30)
    return tmp_path


@pytest.fixture
def recipe(streams: Path, tokenizer_folder: Path) -> Path:
    workers = {"num_workers": 0}
    return write_mix(streams, "web", "chat", tokenizer=str(tokenizer_folder), train_loader=workers)


def test_a_stream_is_named_by_its_folder_its_split_or_its_index(
    streams: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(streams / "flat", SPLIT, [SPLIT_ROW] * 10, split=".")
    shutil.copytree(streams / "web", streams / "elsewhere" / "web")
    monkeypatch.chdir(streams)
    for targets in (["web", "chat/train"], ["web/train/index.json", "flat"], ["flat/index.json"]):
        assert [s.name for s in resolve_mix(targets).streams] == targets
    shutil.copytree(streams / "web/train", streams / "elsewhere/web/val")
    named = [stream.url for stream in list_named_streams(["elsewhere", "flat"])]
    assert named == ["elsewhere/web/train", "elsewhere/web/val", "flat"]


def test_the_last_lines_are_folded_between_words_in_a_narrow_terminal(
    streams: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As findings are, so that no number is broken."""
    wide = run_ok("check", streams / "web", streams / "chat").out.splitlines()[-2:]
    for name, value in (("FORCE_COLOR", "1"), ("TERM", "xterm"), ("COLUMNS", "32")):
        monkeypatch.setenv(name, value)
    narrow = without_colours(run_ok("check", streams / "web", streams / "chat").out)
    folded = narrow[narrow.index(wide[0].split(",")[0][:20]) :]
    assert folded.split() == " ".join(wide).split()
    assert max(map(len, folded.splitlines())) <= 32


def test_deep_reads_shard_contents(streams: Path) -> None:
    shard = next((streams / "plain/train").glob("*.mds"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"!")
    plain = run_ok("check", streams / "plain")
    assert plain.out.splitlines()[-1].startswith(
        "shard contents not read (only names and sizes): 1 shard, "
    )
    deep = mdsmix("check", "--deep", streams / "plain")
    assert deep.code == 3
    assert deep.out.startswith(f"error shard-contents [{streams}/plain]: shard.00000.mds of ")
    assert deep.out.splitlines()[-1].startswith("read and hashed: 1 shard, ")


def test_a_config_without_streams_is_told_so(tmp_path: Path) -> None:
    config = tmp_path / "train.yaml"
    config.write_text("model: {}\ntrain_loader: {}\n")
    answer = mdsmix("check", config)
    assert answer.code == 3
    assert "error streams-none: " in answer.out
    assert answer.out.splitlines()[-2:] == ["no streams (3 errors)", "no shards were found"]


def test_two_kinds_are_refused_in_print_and_as_json(streams: Path) -> None:
    targets = (streams / "plain", streams / "chat")
    printed = mdsmix("check", *targets)
    as_json = mdsmix("check", "--json", *targets)
    assert printed.code == as_json.code == 3
    assert printed.out.startswith(f"error columns-loader [{streams}/plain]: ")
    assert "2 streams may not be mixed (1 error, 1 note)" in printed.out
    tree = json.loads(as_json.out)
    assert tree["may_be_mixed"] is False
    assert set(tree["findings"][0]) == {"id", "severity", "streams", "message", "why", "fix"}
    assert [share["delivered"] for share in tree["epoch"]] == [30, 30]


WRONG = (
    ("check nothing", 4, "contains no published stream"),
    ("inspect web/train/index.json", 4, "index.json is a file, not the folder of a published"),
    ("check web web/train", 2, "the streams web, web/train contain one stream twice"),
    ("check web max_seq_len=4", 2, "is neither one recipe"),
    ("check nope.yaml", 2, "nope.yaml: no such file"),
    ("inspect nope.yaml", 2, "nope.yaml: no such file"),
    ("check seed.yaml", 2, "neither a recipe nor a training YAML"),
    ("check typed.yaml", 2, "typed.yaml: stream is not a known key; did you mean streams?"),
    ("check tabs.yaml", 2, "tabs.yaml is not a readable YAML file: line 2, column 1"),
    ("inspect mix/web", 4, "publish the stream first (`mdsmix convert`, if a recipe makes it)"),
    ("render-yaml mix.yaml --validate", 2, "llmfoundry is not installed"),
    ("render-yaml mix.yaml --into mix.yaml", 2, "names the recipe mix.yaml"),
    ("render-yaml mix.yaml --out mix.yaml", 2, "names the recipe mix.yaml"),
    ("render-yaml mix.yaml --into data.jsonl", 2, "names the data file data.jsonl"),
    # A mix that is refused writes nothing.
    ("render-yaml mix.yaml train_loader.dataset.shuffel=1 -o out.yaml", 3, "nothing was rendered"),
)


def test_a_wrong_command_is_refused_in_one_sentence(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = recipe.read_bytes()
    home = recipe.parent
    (home / "seed.yaml").write_text("seed: 1\n")
    (home / "data.jsonl").write_text('{"text": "a"}\n')
    (home / "tabs.yaml").write_text("streams:\n\tweb: {}\n")
    (home / "typed.yaml").write_text("stream: {web: {}}\ntrain_loader: {num_workers: 0}\n")
    monkeypatch.chdir(home)
    for command, code, words in WRONG:
        errors = run_refused(code, words, *command.split())
        assert recipe.read_bytes() == before
    assert "error key-rejected: " in errors
    assert "or write shuffle if that key was meant" in errors
    assert not (home / "out.yaml").exists()


def test_a_recipe_and_its_rendered_yaml_get_the_same_findings(recipe: Path) -> None:
    out = recipe.with_name("out.yaml")
    to_file = run_ok("render-yaml", recipe, "-o", out)
    printed = mdsmix("render-yaml", recipe)
    assert (to_file.out, printed.out) == ("", out.read_text())
    assert "may be mixed" in printed.err
    reports = [json.loads(mdsmix("check", "--json", path).out) for path in (recipe, out)]
    for key in ("findings", "epoch"):
        assert reports[0][key] == reports[1][key]
    for finding in reports[0]["findings"]:  # `render-yaml` prints only their ids
        assert f" {finding['id']}" in to_file.err


def test_into_lists_the_keys_that_it_changed(recipe: Path) -> None:
    config = recipe.with_name("foundry.yaml")
    config.write_text("tokenizer: {name: gpt2}\nmax_seq_len: 16\ntrain_loader: {}\nseed: 1\n")
    changed = json.loads(mdsmix("render-yaml", recipe, "--into", config, "--json").out)["changed"]
    assert "max_seq_len: 16 -> 8" in changed
    assert not any(line.startswith("seed") for line in changed)
    again = mdsmix("render-yaml", recipe, "max_seq_len=9", "--into", config).err
    assert "changed max_seq_len: 8 -> 9\n" in again
    assert again.count("changed ") == 1


def test_a_pretrained_model_is_refused_another_tokenizer(recipe: Path) -> None:
    model_tokenizer = train_tokenizer(recipe.with_name("own"), vocab_size=700, documents_n=10)
    config = recipe.with_name("foundry.yaml")
    before = (
        "model:\n  name: hf_causal_lm\n"
        f"  pretrained_model_name_or_path: {model_tokenizer}\n  token: ${{oc.env:NO}}\n"
    )
    config.write_text(before)
    errors = run_refused(3, "nothing was rendered", "render-yaml", recipe, "--into", config)
    assert "error model-tokenizer: " in errors
    assert config.read_text() == before
    same = ("render-yaml", recipe, f"tokenizer={model_tokenizer}", "--into", config)
    assert "model-tokenizer" not in run_ok(*same).err


EVALS = """
eval_loader:
- label: c4
  name: finetuning
  num_workers: 2
  dataset: {streams: {c4: {local: HOME/c4, split: val}}, max_seq_len: 8, decoder_only_format: true}
"""


def test_an_evaluation_without_its_data_is_refused_unless_it_is_kept(recipe: Path) -> None:
    home = recipe.parent
    before = EVALS.replace("HOME", str(home))
    config = recipe.with_name("foundry.yaml")
    config.write_text(before)
    command = ("render-yaml", recipe, "--into", config)
    problem = f"the stream c4 of eval_loader c4 is not at {home}/c4/val: "
    assert "--keep-evals" in run_refused(4, problem, *command)
    assert (
        "kept, but its streams were not opened: eval_loader c4\n"
        in run_ok(*command, "--keep-evals").err
    )
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
  dataset:
    local: ${variables.data_local}
    split: val
    max_seq_len: ${variables.max_seq_len}
    decoder_only_format: true
  drop_last: false
  num_workers: 8
seed: 17
"""
"A config in the style of LLM-Foundry's examples: its evaluation reads data that is not here."


def test_a_mix_set_into_a_config_keeps_the_variables_of_the_config(recipe: Path) -> None:
    config = recipe.with_name("stock.yaml")
    config.write_text(STOCK)
    command = ("render-yaml", recipe, "--into", config)
    assert "--drop-evals" in run_refused(4, "is not at ", *command)
    run_ok(*command, "--drop-evals")
    text = config.read_text()
    assert "eval_loader" not in text
    assert text.count("max_seq_len: ${variables.max_seq_len}") == 2
    assert yaml.safe_load(text)["tokenizer"]["kwargs"] == {
        "model_max_length": "${variables.max_seq_len}"
    }
    assert "  max_seq_len: 8\n" in text
    assert "seed: 17\n" in text
    run_ok("check", config)
    run_refused(2, "contradict each other", *command, "--drop-evals", "--keep-evals")


def test_evaluations_are_left_out_by_an_option(recipe: Path) -> None:
    """`check` leaves out those of a recipe and of a YAML; `render-yaml` only those of a config,
    since the recipe's own are asked for by the recipe.
    """
    source = {"path": "quiz.jsonl", "prompt": "a", "response": "b"}
    tree = yaml.safe_load(recipe.read_text())
    tree["streams"]["quiz"] = {"kind": "finetuning", "split": "eval", "source": source}
    with_quiz = recipe.with_name("with_quiz.yaml")
    with_quiz.write_text(json.dumps(tree | {"local": str(recipe.parent)}))
    run_refused(4, "quiz", "check", with_quiz)
    assert run_ok("check", with_quiz, "--drop-evals").out == run_ok("check", recipe).out
    command = ("render-yaml", recipe, "--drop-evals")
    run_refused(2, "removes evaluations from the config of --into", *command)
    # Of a config the recipe's evaluations are rendered, and the config's own are gone.
    publish(recipe.parent / "quiz", SPLIT, [SPLIT_ROW] * 9, split="eval")
    tree["streams"]["quiz"] = {"local": str(recipe.parent / "quiz"), "split": "eval"}
    with_quiz.write_text(json.dumps(tree))
    config = recipe.with_name("foundry.yaml")
    config.write_text(EVALS.replace("HOME", str(recipe.parent)))
    run_ok("render-yaml", with_quiz, "--into", config, "--drop-evals")
    labels = [entry["label"] for entry in yaml.safe_load(config.read_text())["eval_loader"]]
    assert labels == ["quiz"]


def test_the_keys_of_an_evaluation_that_is_kept_unseen_are_checked(recipe: Path) -> None:
    """LLM-Foundry refuses a key that no loader reads, with or without the streams."""
    config = recipe.with_name("stock.yaml")
    config.write_text(STOCK.replace("${variables.data_local}", "s3://nowhere-there/c4"))
    data = "    local: ${variables.data_local}\n    split: val\n"
    stream = "    streams: {c4: {local: ./my-copy-c4, split: val}}\n"
    config.write_text(STOCK.replace(data, stream))
    command = ("render-yaml", recipe, "--into", config, "--keep-evals")
    assert "kept, but its streams were not opened: eval_loader\n" in run_ok(*command).err
    assert (
        "kept, but its streams were not opened: eval_loader\n"
        in run_ok("check", config, "--keep-evals").out
    )
    run_refused(4, "is not at ", "check", config)
    run_ok("check", config, "--drop-evals")
    config.write_text(STOCK.replace(data, f"{stream}    odd: 1\n"))
    assert "key-rejected" in run_refused(3, "nothing was rendered", *command)


CONFIG = """
variables: {length: 8}
max_seq_len: ${variables.length}
model: {name: mpt_causal_lm, token: "${oc.env:A_VARIABLE_OF_THE_TRAINING_NODE}"}
train_loader:
  name: finetuning
  num_workers: 2
  dataset:
    streams: {chat: {local: HOME/chat, split: train}}
    max_seq_len: ${max_seq_len}
    decoder_only_format: true
eval_loader: {name: finetuning, num_workers: 2, dataset: {hf_name: a/b, max_seq_len: 8}}
"""


def test_a_config_is_checked_without_the_variables_of_the_training_node(streams: Path) -> None:
    config = streams / "train.yaml"
    config.write_text(CONFIG.replace("HOME", str(streams)))
    assert "1 stream may be mixed" in run_ok("check", config).out


def test_a_yaml_that_names_a_split_is_refused_once_versions_are_published(streams: Path) -> None:
    """Otherwise the run would go on with another version."""
    train = streams / "chat/train"
    config = streams / "train.yaml"
    config.write_text(CONFIG.replace("HOME", str(streams)))
    publish(streams / "chat", TURNS, [TURNS_ROW] * 30, card={})
    version = f"train-{xxhash.xxh128_hexdigest((train / 'index.json').read_bytes())[:8]}"
    shutil.copytree(train, train.with_name(version))
    (train / "index.json").unlink()
    run_refused(4, f"correct its split, which is {version} now", "check", config)


VALUES: tuple[tuple[Any, ...], ...] = (
    (None, True, "", [], {}),
    (0, -1, 2.5, 10**30, float("nan"), float("inf")),
    ("text", "1e999", "${nothing}"),
    ([1, [2]], [{"a": None}], {"a": {"b": 1}}, {"streams": 3}),
)
"Values of four sorts; most are wrong at most keys."
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
    streams: {
      web: {local: HOME/web, split: train, repeat: 1},
      chat: {local: HOME/chat, split: train, repeat: 1},
    },
    max_seq_len: 8, decoder_only_format: true, target_prompts: none, target_responses: last,
    split: train, shuffle: true, shuffle_seed: 1, epoch_size: null, cache_limit: null,
    packing_ratio: 2.0, batching_method: stratified, num_canonical_nodes: 2,
    sampling_granularity: 1, token_encoding_type: int64, validate_hash: null, download_retry: 2,
    allow_unsafe_types: false, seq_parallel_replication: 1,
  }
eval_loader:
- <<: *loader
  label: held
  dataset: {streams: {web: {local: HOME/web, split: train}}, max_seq_len: 8}
"""


KeyPath = tuple[Any, ...]


def list_paths(tree: Any, parent: KeyPath = ()) -> Iterator[KeyPath]:
    """Yield the keys and indexes that lead to each value of a tree."""
    keys: Iterable[Any] = ()
    if isinstance(tree, dict):
        keys = list(tree)
    elif isinstance(tree, list):
        keys = range(len(tree))
    for key in keys:
        yield (*parent, key)
        yield from list_paths(tree[key], (*parent, key))


def replace_value(tree: Any, path: KeyPath, value: Any) -> Any:
    """Return a copy of the tree with another value at the path."""
    copied = copy.deepcopy(tree)
    inner = copied
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return copied


def is_answered(config: Any) -> bool:
    """Check whether a mix gives a verdict or is refused in one sentence. Any other error is raised,
    since it is a defect.
    """
    try:
        mix = make_mix(config, "x")
        findings = run_checks(mix)
        return bool(make_check_tree(mix, findings)) and "\n" not in describe_verdict(mix, findings)
    except MdsmixError as refusal:
        return "\n" not in str(refusal)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(pretrained, "open_tokenizer", Mock(side_effect=RecipeError("not here")))
    publish(tmp_path / "web", SPLIT, [SPLIT_ROW] * 8, card={})
    publish(tmp_path / "chat", TURNS, [TURNS_ROW] * 5)
    return tmp_path


def test_any_value_at_any_key_gives_findings_or_one_sentence(home: Path) -> None:
    """An evaluation and the second stream are read by the code that reads the first, so each of
    their keys gets the values of one group, in turn.
    """
    tree = yaml.safe_load(TRAIN_YAML.replace("HOME", str(home)))
    for number, path in enumerate(list_paths(tree)):
        is_second = path[0] == "eval_loader" or "chat" in path
        own_group = VALUES[number % 4]
        groups = [own_group] if is_second else [group for group in VALUES if group != own_group]
        for group in groups:
            value = group[number // 4 % len(group)]
            assert is_answered(replace_value(tree, path, value)), (path, value)


def test_a_recipes_dataset_that_has_no_keys_is_refused(home: Path) -> None:
    recipe = str(write_mix(home, "web", "chat"))
    for value in ("5", "[1]", "x"):
        with pytest.raises(
            RecipeError, match=r"train_loader\.dataset is .* must be keys and values"
        ):
            resolve_mix([recipe, f"train_loader.dataset={value}"])


def test_the_callback_of_streams_joins_those_of_the_config(recipe: Path) -> None:
    """Its loader must tell which stream a row is from; its own keys are kept."""
    config = recipe.with_name("train.yaml")
    config.write_text(
        "callbacks:\n  lr_monitor: {}\n  # speed\n  speed_monitor: {window_size: 10}\n"
    )
    command = ("render-yaml", recipe, "--into", config, "--callback")
    errors = run_refused(3, "nothing was rendered", *command)
    assert "callback-without-streams" in errors
    assert "the finetuning loader of train_loader does not tell" in errors
    run_ok(*command, "train_loader.name=mdsmix")
    text = config.read_text()
    assert "  speed_monitor: {window_size: 10}\n  mdsmix_streams: {}\n" in text
    assert "  # speed\n" in text
    config.write_text(text.replace("mdsmix_streams: {}", "mdsmix_streams: {log_every: 5}"))
    run_ok(*command, "train_loader.name=mdsmix")
    assert yaml.safe_load(config.read_text())["callbacks"]["mdsmix_streams"] == {"log_every": 5}
    # A list would be lost: it is refused, and stays as it is.
    listed = config.with_name("listed.yaml")
    listed.write_text("callbacks:\n- lr_monitor: {}\n")
    refused = mdsmix("render-yaml", recipe, "--into", listed, "--callback")
    assert refused.code == 2
    assert "callbacks of the config is not keys and values" in refused.err
    assert listed.read_text() == "callbacks:\n- lr_monitor: {}\n"
    assert "callbacks" not in yaml.safe_load(run_ok("render-yaml", recipe).out)
    alone = run_ok("render-yaml", recipe, "--callback", "train_loader.name=mdsmix").out
    assert yaml.safe_load(alone)["callbacks"] == {"mdsmix_streams": {}}
    once = run_ok("check", config)
    assert "callback-without-streams" not in once.out
