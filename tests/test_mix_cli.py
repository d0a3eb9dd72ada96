"""`check` and `render-yaml` as a user meets them: what is told apart, what is printed where, and the exit codes."""

import json
import shutil
from pathlib import Path

import pytest
import xxhash
from typer.testing import CliRunner, Result

from mdsmix.cli.main import app
from mdsmix.errors import MdsmixError, MixRefused, RecipeError, Unreachable
from mdsmix.mix.resolve import resolve
from mdsmix.report.named_streams import named_streams
from tests.converting import documents, mdsmix, write_jsonl, write_recipe
from tests.corpus import train_tokenizer
from tests.published import (
    CONCAT,
    LENGTH,
    SPLIT,
    SPLIT_ROW,
    TOKEN_ROW,
    TURNS,
    TURNS_ROW,
    publish,
    write_mix,
)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def refused(kind: type[MdsmixError], words: str, *arguments: object) -> Result:
    """The console script turns its error into a sentence and an exit code."""
    result = run(*arguments)
    assert isinstance(result.exception, kind), result.output
    assert words in str(result.exception)
    return result


@pytest.fixture
def streams(tmp_path: Path) -> Path:
    publish(tmp_path / "web", SPLIT, [SPLIT_ROW] * 30)
    publish(tmp_path / "plain", CONCAT, [TOKEN_ROW] * 30)
    publish(tmp_path / "chat", TURNS, [TURNS_ROW] * 30)
    return tmp_path


def recipe(home: Path, tokenizer: Path) -> Path:
    settings = {"tokenizer": str(tokenizer), "train_loader": {"num_workers": 0}}
    return write_mix(home, "web", "chat", **settings)


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
    plain = run("check", streams / "plain")
    assert plain.stdout.splitlines()[-1].startswith("not looked at: the contents of 1 shard, ")
    shard = next((streams / "plain/train").glob("*.mds"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"!")
    assert run("check", streams / "plain").exit_code == 0
    deep = run("check", "--deep", streams / "plain")
    assert deep.exit_code == 3
    assert deep.stdout.startswith(f"error shard-contents [{streams}/plain]: shard.00000.mds of ")
    assert deep.stdout.splitlines()[-1].startswith("read and hashed: 1 shard, ")


def test_two_kinds_are_refused_to_people_and_to_machines(streams: Path) -> None:
    told, result = (
        run("check", *more, streams / "plain", streams / "chat") for more in ((), ("--json",))
    )
    assert told.exit_code == result.exit_code == 3
    assert told.stdout.startswith(f"error columns-loader [{streams}/plain]: ")
    assert "2 streams may not be mixed (1 error, 1 note)" in told.stdout
    report = json.loads(result.stdout)
    assert report["may_be_mixed"] is False
    assert set(report["findings"][0]) == {"id", "severity", "streams", "message", "why", "fix"}
    assert [share["delivered"] for share in report["epoch"]] == [30, 30]


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


WRONG = (
    ("check nothing", Unreachable, "holds no published stream"),
    ("check web web/train", RecipeError, "web, web/train names a stream twice"),
    ("check web max_seq_len=4", RecipeError, "names neither one recipe"),
    ("check nope.yaml", RecipeError, "nope.yaml cannot be read as YAML: No such file"),
    ("inspect nope.yaml", RecipeError, "nope.yaml cannot be read as YAML: No such file"),
    ("check seed.yaml", RecipeError, "neither a recipe nor a training YAML"),
    ("render-yaml mix.yaml --validate", RecipeError, "llmfoundry is not installed"),
    ("render-yaml mix.yaml --into mix.yaml", RecipeError, "that file is a recipe"),
    ("render-yaml mix.yaml --out mix.yaml", RecipeError, "that file is a recipe"),
)


def test_what_is_wrong_is_one_sentence(
    streams: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = recipe(streams, tokenizer_folder).read_bytes()
    (streams / "seed.yaml").write_text("seed: 1\n")
    monkeypatch.chdir(streams)
    for command, kind, words in WRONG:
        refused(kind, words, *command.split())
        assert (streams / "mix.yaml").read_bytes() == before


def test_a_recipe_and_what_it_renders_get_the_same_findings(
    streams: Path, tokenizer_folder: Path
) -> None:
    path, out = recipe(streams, tokenizer_folder), streams / "out.yaml"
    rendered, shown = run("render-yaml", path, "-o", out), run("render-yaml", path)
    assert (rendered.exit_code, rendered.stdout) == (0, "")
    assert shown.stdout == out.read_text()
    assert "may be mixed" in shown.stderr
    reports = [json.loads(run("check", "--json", p).stdout) for p in (path, out)]
    for part in ("findings", "epoch"):
        assert reports[0][part] == reports[1][part]
    for finding in reports[0]["findings"]:  # what check says in full, other commands name
        assert f" {finding['id']}" in rendered.stderr


def test_a_refused_mix_writes_nothing(streams: Path, tokenizer_folder: Path) -> None:
    typo = (recipe(streams, tokenizer_folder), "train_loader.dataset.shuffel=true")
    out = streams / "out.yaml"
    result = refused(MixRefused, "nothing was rendered", "render-yaml", *typo, "-o", out)
    assert "error key-rejected: " in result.stderr
    assert "or write what was meant (shuffle)" in result.stderr
    assert not out.exists()


def test_into_says_what_it_changed(streams: Path, tokenizer_folder: Path) -> None:
    path, config = recipe(streams, tokenizer_folder), streams / "foundry.yaml"
    config.write_text(
        "tokenizer: {name: gpt2}\nmax_seq_len: 16  # rows\ntrain_loader: {}\nseed: 1\n"
    )
    told = json.loads(run("render-yaml", path, "--into", config, "--json").stdout)["changed"]
    changed = dict(each.split(": ", 1) for each in told)
    assert changed["max_seq_len"] == f"16 -> {LENGTH}"
    assert "seed" not in changed
    again = run("render-yaml", path, "max_seq_len=9", "--into", config).stderr
    assert f"changed max_seq_len: {LENGTH} -> 9\n" in again
    assert again.count("changed ") == 1


def test_a_pretrained_model_keeps_its_tokenizer(streams: Path, tokenizer_folder: Path) -> None:
    own = train_tokenizer(streams / "own", vocab_size=700, documents_n=10)
    config = streams / "foundry.yaml"
    model = f'{{name: hf_causal_lm, pretrained_model_name_or_path: {own}, token: "${{oc.env:NO}}"}}'
    config.write_text(f"model: {model}\n")
    command = ("render-yaml", recipe(streams, tokenizer_folder), "--into", config)
    result = refused(MixRefused, "nothing was rendered", *command)
    assert "error model-tokenizer: " in result.stderr
    assert config.read_text() == f"model: {model}\n"
    same = recipe(streams, own)
    assert "model-tokenizer" not in run("render-yaml", same, "--into", config).stderr


EVALS = """
eval_loader:
- label: c4
  name: finetuning
  num_workers: 2
  dataset: {streams: {c4: {local: HOME/c4, split: val}}, max_seq_len: 8, decoder_only_format: true}
"""


def test_an_evaluation_that_is_not_here_is_named_and_can_be_kept(
    streams: Path, tokenizer_folder: Path
) -> None:
    path, config = recipe(streams, tokenizer_folder), streams / "foundry.yaml"
    config.write_text(EVALS.replace("HOME", str(streams)))
    command = ("render-yaml", path, "--into", config)
    said = f"the stream c4 of eval_loader c4 is not at {streams}/c4/val: "
    assert "--keep-evals" in str(refused(Unreachable, said, *command).exception)
    result = run(*command, "--keep-evals")
    assert result.exit_code == 0
    assert "kept unseen: eval_loader c4\n" in result.stderr
    assert EVALS.replace("HOME", str(streams)).strip() in config.read_text()


def test_a_config_is_read_without_the_nodes_variables_and_a_version_is_named_by_its_own_split(
    streams: Path,
) -> None:
    """A YAML that names the split would go on with another version once there is one."""
    train, config = streams / "chat/train", streams / "train.yaml"
    config.write_text(CONFIG.replace("HOME", str(streams)))
    result = run("check", config)
    assert (result.exit_code, "1 stream may be mixed" in result.stdout) == (0, True)
    publish(streams / "chat", TURNS, [TURNS_ROW] * 30, card={})
    version = f"train-{xxhash.xxh128_hexdigest((train / 'index.json').read_bytes())[:8]}"
    shutil.copytree(train, train.with_name(version))
    (train / "index.json").unlink()
    refused(Unreachable, f"correct its split, {version}", "check", config)


def test_streams_that_are_not_published_are_all_named(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    source = write_jsonl(tmp_path / "x.jsonl", [{"text": "x"}] * 9)
    made = {name: documents(source, layout="document") for name in "abc"}
    recipe = write_recipe(tmp_path, tokenizer_folder, streams=made)
    assert mdsmix("convert", recipe, "--only", "a").code == 0
    out = tmp_path / "out"
    for command in ("check", "render-yaml"):
        answer = mdsmix(command, recipe)
        assert (answer.code, answer.out) == (4, "")
        assert answer.err == (
            f"error: not published: b at {out}/b/train; c at {out}/c/train: run `mdsmix convert` on this recipe first.\n"
        )
