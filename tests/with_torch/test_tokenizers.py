"""The files that are kept of a tokenizer open to the same tokenizer. A YAML with an S3 remote names
them, and they are fetched from the mix's root.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from mdsmix.errors import Unreachable
from mdsmix.load import build_loader
from mdsmix.recipe import TokenizerSpec
from mdsmix.storage import locate
from mdsmix.tokenizer.card import open_tokenizer
from mdsmix.tokenizer.describe import describe_tokenizer
from mdsmix.tokenizer.published import localize_spec, with_tokenizer_fetched
from tests.converting import Project, mdsmix, run_ok

TEXTS = ["", "Hello, world!", "a\n\n  b <|im_start|>x<|im_end|>", "déjà vu, 東京", "<s> 12345"]
TURNS = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello <|im_end|>"}]
TEMPLATE = "{% for m in messages %}{{ bos_token }}{{ m.content }}{% endfor %}"


def update_config(folder: Path, **changes: Any) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def use_llama_class(folder: Path) -> None:
    """Give the tokenizer a class that adds a post-processor, which puts BOS before every text."""
    bos = {"bos_token": "<|im_start|>", "add_bos_token": True}
    update_config(folder, tokenizer_class="LlamaTokenizer", **bos)
    (folder / "special_tokens_map.json").unlink()


def use_own_code(folder: Path) -> None:
    """Give the tokenizer a class with code in its folder, which is only run if asked for."""
    (folder / "tokenization_own.py").write_text(
        "from transformers import PreTrainedTokenizerFast\n"
        "class OwnTokenizerFast(PreTrainedTokenizerFast):\n"
        "    def __init__(self, *args, shout=False, **kwargs):\n"
        "        super().__init__(*args, **kwargs)\n"
        "        from tokenizers.normalizers import Lowercase\n"
        "        self.backend_tokenizer.normalizer = Lowercase()\n"
    )
    classes = {"AutoTokenizer": [None, "tokenization_own.OwnTokenizerFast"]}
    update_config(folder, tokenizer_class="OwnTokenizer", auto_map=classes)


def use_named_templates(folder: Path) -> None:
    templates = [{"name": "default", "template": TEMPLATE}, {"name": "tool_use", "template": "x"}]
    update_config(folder, chat_template=templates)


def probe(tokenizer: Any) -> list[Any]:
    ids = [tokenizer(text)["input_ids"] for text in TEXTS]
    chat = tokenizer.apply_chat_template(TURNS, tokenize=False) if tokenizer.chat_template else ""
    return [ids, chat, tokenizer.padding_side, tokenizer.special_tokens_map, len(tokenizer)]


@pytest.mark.parametrize("change", [None, use_llama_class, use_own_code, use_named_templates])
def test_the_kept_files_open_to_the_same_tokenizer(
    tmp_path: Path, tokenizer_folder: Path, change: Any
) -> None:
    folder = shutil.copytree(tokenizer_folder, tmp_path / "given")
    if change:
        change(folder)
    own = {"trust_remote_code": True} if change is use_own_code else {}
    changed = {"chat_template": TEMPLATE, "bos_token": "<|im_end|>", "padding_side": "left"}
    for number, kwargs in enumerate((own, own | changed)):
        kept = tmp_path / f"kept {number}"
        snapshot = open_tokenizer(TokenizerSpec(name=str(folder), kwargs=kwargs))
        shutil.copytree(Path(snapshot.path).parent, kept)
        before = probe(AutoTokenizer.from_pretrained(folder, **kwargs))
        folder.rename(tmp_path / "away")
        assert probe(AutoTokenizer.from_pretrained(kept)) == before
        assert not list(kept.rglob("*.py"))
        (tmp_path / "away").rename(folder)


def test_the_kept_files_of_a_single_file_open_to_the_same_tokenizer(tokenizer_folder: Path) -> None:
    file, kwargs = str(tokenizer_folder / "tokenizer.json"), {"eos_token": "<|endoftext|>"}
    snapshot = open_tokenizer(TokenizerSpec(name=file, kwargs=kwargs))
    kept = AutoTokenizer.from_pretrained(Path(snapshot.path).parent)
    assert probe(kept) == probe(PreTrainedTokenizerFast(tokenizer_file=file, **kwargs))


def test_a_tokenizer_is_described_without_torch_and_is_the_same(tokenizer_folder: Path) -> None:
    """Importing torch would take 11 s and 900 MB more. USE_TORCH tells transformers 4 not to;
    transformers 5 does not read that variable.
    """
    main = "from mdsmix.tokenizer import describe; describe.main()"
    program = f"import sys; {main}; sys.exit(bool(sys.modules.get('torch')))"
    kwargs = {"bos_token": "<|im_start|>"}
    question = json.dumps({"name": str(tokenizer_folder), "kwargs": kwargs})
    command = [sys.executable, "-c", program]
    answer = subprocess.run(command, input=question, capture_output=True, text=True, check=True)
    assert json.loads(answer.stdout) == [describe_tokenizer(str(tokenizer_folder), kwargs), ""]


@pytest.fixture
def remote(bucket: str) -> str:
    return f"s3://{bucket}/mix"


@pytest.fixture
def mix(remote: str, project: Project) -> Project:
    """Return a mix that was converted into a bucket. Its tokenizer is a folder, with a keyword
    argument.
    """
    project.write_source(f"one two three {n} " * 9 for n in range(9))
    project.configure(remote=remote, train_loader={"num_workers": 0})
    tree = json.loads(project.recipe.read_text())
    tree["tokenizer"]["kwargs"] = {"bos_token": "<|im_start|>"}
    project.recipe.write_text(json.dumps(tree))
    project.convert_ok()
    return project


class Rendered:
    """A rendered YAML, the tokenizer that it names, and the command that fetches that."""

    def __init__(self, mix: Project, *more: str) -> None:
        self.path, node = mix.folder / "train.yaml", f"local={mix.folder / 'node'}"
        self.err = run_ok("render-yaml", mix.recipe, node, *more, "-o", self.path).err
        text = self.path.read_text()
        self.tokenizer: Any = yaml.safe_load(text)["tokenizer"]
        self.name = Path(self.tokenizer["name"])
        lines = [line for line in text.splitlines() if "aws s3 cp" in line]
        self.command = "".join(lines).removeprefix("# mdsmix:").strip()


def test_the_command_that_fetches_the_tokenizer_is_shown(mix: Project, remote: str) -> None:
    """In the YAML and on the terminal."""
    rendered = Rendered(mix)
    assert str(mix.tokenizer) not in rendered.path.read_text()
    assert rendered.name.parent == mix.folder / "node"
    assert rendered.tokenizer["kwargs"] == {"model_max_length": "${max_seq_len}"}
    command = f"aws s3 cp --recursive --endpoint-url {os.environ['S3_ENDPOINT_URL']}"
    source = f"{remote}/{rendered.name.name}"
    assert shlex.split(rendered.command) == [*command.split(), source, f"{rendered.name}"]
    assert "tokenizer.json" in dict(locate(source).list())
    assert f": {rendered.command}\n" in rendered.err
    answer = mdsmix("render-yaml", mix.recipe, f"local={mix.folder / 'node'}", "--json").out
    assert json.loads(answer)["before_training"] == rendered.command


def test_fetch_takes_the_arguments_of_that_command(mix: Project, remote: str) -> None:
    """Without an environment variable for the store."""
    rendered = Rendered(mix)
    mix.patch.setenv("MDSMIX_CACHE", str(mix.folder / "another machine"))
    answer = mdsmix("fetch", f"{remote}/tokenizer-00000000", mix.folder / "to")
    assert (answer.code, "does not contain a tokenizer or processor" in answer.err) == (4, True)
    answer = mdsmix("fetch", remote, mix.folder / "to")
    assert (answer.code, f"such as {remote}/{rendered.name.name}." in answer.err) == (4, True)
    with mix.patch.context() as patch:
        patch.setenv("S3_ENDPOINT_URL", "")
        answer = run_ok("fetch", *shlex.split(rendered.command)[4:])
    assert answer.out.startswith(f"{rendered.name}: ")
    assert AutoTokenizer.from_pretrained(rendered.name).bos_token == "<|im_start|>"
    assert "error tokenizer" not in mdsmix("check", rendered.path).out


def test_if_mdsmix_is_on_the_nodes_the_yaml_names_the_bucket(mix: Project, remote: str) -> None:
    for key in ("train_loader={name: mdsmix, num_workers: 0}", "mdsmix_on_nodes=true"):
        rendered = Rendered(mix, key)
        name = rendered.tokenizer["name"]
        assert name.startswith(f"{remote}/tokenizer-"), key
        assert "aws s3 cp" not in rendered.path.read_text() + rendered.err
        with mix.patch.context() as patch:
            patch.setenv("MDSMIX_CACHE", str(mix.folder / key[:12]))
            assert "error" not in mdsmix("check", rendered.path).out
            assert next(iter(build_loader(str(rendered.path), 2)))["input_ids"].shape == (2, 16)
    mix.patch.setenv("MDSMIX_CACHE", str(mix.folder / "another machine"))
    config = with_tokenizer_fetched({"tokenizer": {"name": name, "kwargs": {"a": 1}}, "seed": 7})
    assert Path(config["tokenizer"].pop("name"), "tokenizer.json").is_file()
    assert config == {"tokenizer": {"kwargs": {"a": 1}}, "seed": 7}
    with pytest.raises(Unreachable, match="no tokenizer is published at"):
        with_tokenizer_fetched({"tokenizer": {"name": f"{remote}/tokenizer-00000000"}})


def test_a_node_with_mdsmix_fetches_a_folder_that_it_lacks(mix: Project, remote: str) -> None:
    """By default the YAML names a folder of the node."""
    config = yaml.safe_load(Rendered(mix).path.read_text())
    name = config["tokenizer"]["name"]
    assert name.startswith("/")
    assert not Path(name).exists()
    mix.patch.setenv("MDSMIX_CACHE", str(mix.folder / "another machine"))
    fetched = with_tokenizer_fetched(config)
    folder = Path(fetched["tokenizer"]["name"])
    assert (folder.name, folder.parent) != (name, Path(name).parent)
    assert (folder / "tokenizer.json").is_file()
    assert {**fetched, "tokenizer": None} == {**config, "tokenizer": None}
    Path(name).mkdir(parents=True)
    assert with_tokenizer_fetched(config) is config, "what is on the node is used"
    other = {"name": f"{mix.folder}/tokenizer-00000000"}
    with pytest.raises(Unreachable, match="not on this node and is not published next to s3://"):
        with_tokenizer_fetched({**config, "tokenizer": other})
    with pytest.raises(Unreachable, match="not on this node and has no remote: copy it there by"):
        with_tokenizer_fetched({"tokenizer": other})
    for plain in ({}, {"tokenizer": {"name": "gpt2"}}, {"tokenizer": None}):
        assert with_tokenizer_fetched(plain) is plain


def test_a_folder_that_was_changed_after_publication_is_refused(mix: Project, remote: str) -> None:
    spec = TokenizerSpec(name=str(Rendered(mix).name))
    mix.patch.setenv("MDSMIX_CACHE", str(mix.folder / "another machine"))
    fetched = Path(localize_spec(spec, [f"{remote}/web"]).name)
    file = shutil.copytree(fetched, mix.folder / "mix" / fetched.name) / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"normalizer": {"type": "NFC"}}))
    mix.patch.setenv("MDSMIX_CACHE", str(mix.folder / "a third machine"))
    with pytest.raises(Unreachable, match="have changed since the tokenizer was published"):
        localize_spec(spec, [str(mix.folder / "mix/web")])
    other = TokenizerSpec(name="tokenizer-00000000")
    assert localize_spec(other, [str(mix.folder / "mix/web")]) == other


def test_an_unpublished_tokenizer_is_a_finding(mix: Project, remote: str) -> None:
    root = locate(remote)
    for name, _ in root.list(recursive=True):
        if name.startswith("tokenizer-"):
            (root / name).delete()
    answer = mdsmix("render-yaml", mix.recipe)
    assert (answer.code, "error tokenizer-unpublished: " in answer.err) == (3, True)
    mix.convert_ok()
    run_ok("render-yaml", mix.recipe)
