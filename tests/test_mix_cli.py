"""`check` and `render-yaml` as a user meets them: what is told apart, what is printed where, and the exit codes."""

import json
import shutil
from pathlib import Path

import pytest
import xxhash

from mdsmix.mix.resolve import resolve
from mdsmix.report.named_streams import named_streams
from tests import published as hand
from tests.converting import mdsmix
from tests.corpus import train_tokenizer
from tests.published import SPLIT, SPLIT_ROW, TURNS, TURNS_ROW, publish, write_mix


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


def write_recipe(home: Path, tokenizer: Path) -> Path:
    settings = {"tokenizer": str(tokenizer), "train_loader": {"num_workers": 0}}
    return write_mix(home, "web", "chat", **settings)


@pytest.fixture
def recipe(streams: Path, tokenizer_folder: Path) -> Path:
    return write_recipe(streams, tokenizer_folder)


def test_streams_are_read_by_folder_split_or_index_and_named_as_they_were_asked_for(
    streams: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(streams / "flat", SPLIT, [SPLIT_ROW] * 10, split=".")
    shutil.copytree(streams / "web", streams / "elsewhere" / "web")
    monkeypatch.chdir(streams)
    for targets in (["web", "chat/train"], ["web/train/index.json", "flat"], ["flat/index.json"]):
        assert [s.name for s in resolve(targets).streams] == targets
    shutil.copytree(streams / "web/train", streams / "elsewhere/web/val")
    assert [s.url for s in named_streams(["elsewhere", "flat"])] == ["elsewhere/web/train", "flat"]


def test_deep_reads_what_check_alone_does_not_and_says_so(streams: Path) -> None:
    shard = next((streams / "plain/train").glob("*.mds"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"!")
    plain = mdsmix("check", streams / "plain")
    assert plain.code == 0
    assert plain.out.splitlines()[-1].startswith("not looked at: the contents of 1 shard, ")
    deep = mdsmix("check", "--deep", streams / "plain")
    assert deep.code == 3
    assert deep.out.startswith(f"error shard-contents [{streams}/plain]: shard.00000.mds of ")
    assert deep.out.splitlines()[-1].startswith("read and hashed: 1 shard, ")


def test_two_kinds_are_refused_to_people_and_to_machines(streams: Path) -> None:
    two = (streams / "plain", streams / "chat")
    told, result = mdsmix("check", *two), mdsmix("check", "--json", *two)
    assert told.code == result.code == 3
    assert told.out.startswith(f"error columns-loader [{streams}/plain]: ")
    assert "2 streams may not be mixed (1 error, 1 note)" in told.out
    report = json.loads(result.out)
    assert report["may_be_mixed"] is False
    assert set(report["findings"][0]) == {"id", "severity", "streams", "message", "why", "fix"}
    assert [share["delivered"] for share in report["epoch"]] == [30, 30]


WRONG = (
    ("check nothing", 4, "holds no published stream"),
    ("check web web/train", 2, "web, web/train names a stream twice"),
    ("check web max_seq_len=4", 2, "names neither one recipe"),
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
    assert "or write what was meant (shuffle)" in said
    assert not (home / "out.yaml").exists()


def test_a_recipe_and_what_it_renders_get_the_same_findings(recipe: Path) -> None:
    out = recipe.with_name("out.yaml")
    rendered, shown = mdsmix("render-yaml", recipe, "-o", out), mdsmix("render-yaml", recipe)
    assert (rendered.code, rendered.out) == (0, "")
    assert shown.out == out.read_text()
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
    same = write_recipe(recipe.parent, own)
    assert "model-tokenizer" not in mdsmix("render-yaml", same, "--into", config).err


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
    result = mdsmix(*command, "--keep-evals")
    assert result.code == 0
    assert "kept unseen: eval_loader c4\n" in result.err
    assert before.strip() in config.read_text()


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


def test_a_config_is_read_without_the_nodes_variables_and_a_version_is_named_by_its_own_split(
    streams: Path,
) -> None:
    """A YAML that names the split would go on with another version once there is one."""
    train, config = streams / "chat/train", streams / "train.yaml"
    config.write_text(CONFIG.replace("HOME", str(streams)))
    result = mdsmix("check", config)
    assert (result.code, "1 stream may be mixed" in result.out) == (0, True)
    publish(streams / "chat", TURNS, [TURNS_ROW] * 30, card={})
    version = f"train-{xxhash.xxh128_hexdigest((train / 'index.json').read_bytes())[:8]}"
    shutil.copytree(train, train.with_name(version))
    (train / "index.json").unlink()
    refused(4, f"correct its split, {version}", "check", config)
