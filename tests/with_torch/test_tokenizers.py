"""The files that are kept of a tokenizer open to the tokenizer that they are of, and a YAML with an S3 remote names them: they are fetched from the mix's root."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from mdsmix.encode.pretrained import open_tokenizer
from mdsmix.encode.published_folders import at_hand, with_tokenizer_fetched
from mdsmix.encode.transformers_process import take
from mdsmix.errors import Unreachable
from mdsmix.load import build_loader
from mdsmix.recipe import TokenizerSpec
from mdsmix.storage import locate
from tests.converting import Web, done, mdsmix

TEXTS = ["", "Hello, world!", "a\n\n  b <|im_start|>x<|im_end|>", "déjà vu, 東京", "<s> 12345"]
TURNS = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello <|im_end|>"}]
TEMPLATE = "{% for m in messages %}{{ bos_token }}{{ m.content }}{% endfor %}"


def configured(folder: Path, **more: Any) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | more))


def llama(folder: Path) -> None:
    """A class that writes a post-processor of its own, which puts BOS before every text."""
    bos = {"bos_token": "<|im_start|>", "add_bos_token": True}
    configured(folder, tokenizer_class="LlamaTokenizer", **bos)
    (folder / "special_tokens_map.json").unlink()


def own_code(folder: Path) -> None:
    """A class whose code lies beside the tokenizer and is run only where that is asked for."""
    (folder / "tokenization_own.py").write_text(
        "from transformers import PreTrainedTokenizerFast\n"
        "class OwnTokenizerFast(PreTrainedTokenizerFast):\n"
        "    def __init__(self, *args, shout=False, **kwargs):\n"
        "        super().__init__(*args, **kwargs)\n"
        "        from tokenizers.normalizers import Lowercase\n"
        "        self.backend_tokenizer.normalizer = Lowercase()\n"
    )
    classes = {"AutoTokenizer": [None, "tokenization_own.OwnTokenizerFast"]}
    configured(folder, tokenizer_class="OwnTokenizer", auto_map=classes)


def named_templates(folder: Path) -> None:
    templates = [{"name": "default", "template": TEMPLATE}, {"name": "tool_use", "template": "x"}]
    configured(folder, chat_template=templates)


def asked(tokenizer: Any) -> list[Any]:
    ids = [tokenizer(text)["input_ids"] for text in TEXTS]
    chat = tokenizer.apply_chat_template(TURNS, tokenize=False) if tokenizer.chat_template else ""
    return [ids, chat, tokenizer.padding_side, tokenizer.special_tokens_map, len(tokenizer)]


@pytest.mark.parametrize("change", [None, llama, own_code, named_templates])
def test_what_is_kept_opens_alike(tmp_path: Path, tokenizer_folder: Path, change: Any) -> None:
    folder = shutil.copytree(tokenizer_folder, tmp_path / "given")
    if change:
        change(folder)
    own = {"trust_remote_code": True} if change is own_code else {}
    changed = {"chat_template": TEMPLATE, "bos_token": "<|im_end|>", "padding_side": "left"}
    for number, given in enumerate((own, own | changed)):
        kept = tmp_path / f"kept {number}"
        snapshot = open_tokenizer(TokenizerSpec(name=str(folder), kwargs=given))
        shutil.copytree(Path(snapshot.path).parent, kept)
        before = asked(AutoTokenizer.from_pretrained(folder, **given))
        folder.rename(tmp_path / "away")
        assert asked(AutoTokenizer.from_pretrained(kept)) == before
        assert not list(kept.rglob("*.py"))
        (tmp_path / "away").rename(folder)


def test_what_is_kept_of_a_lone_file_opens_alike(tokenizer_folder: Path) -> None:
    file, kwargs = str(tokenizer_folder / "tokenizer.json"), {"eos_token": "<|endoftext|>"}
    snapshot = open_tokenizer(TokenizerSpec(name=file, kwargs=kwargs))
    kept = AutoTokenizer.from_pretrained(Path(snapshot.path).parent)
    assert asked(kept) == asked(PreTrainedTokenizerFast(tokenizer_file=file, **kwargs))


def test_a_tokenizer_is_looked_at_without_torch_and_is_the_same(tokenizer_folder: Path) -> None:
    """torch would be imported for nothing: 11 s and 900 MB more, where a tokenizer is used for the first time."""
    main = "from mdsmix.encode import transformers_process; transformers_process.main()"
    program = f"import sys; {main}; sys.exit('torch' in sys.modules)"
    kwargs = {"bos_token": "<|im_start|>"}
    given = json.dumps({"name": str(tokenizer_folder), "kwargs": kwargs})
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [take(str(tokenizer_folder), kwargs), ""]


@dataclass
class Mix:
    """A mix that was converted into a bucket; its tokenizer is given as a folder with a keyword of its own."""

    recipe: Path
    remote: str


@pytest.fixture
def mix(bucket: str, web: Web) -> Mix:
    web.holds(f"one two three {n} " * 9 for n in range(9))
    web.says(remote=f"s3://{bucket}/mix", train_loader={"num_workers": 0})
    tree = json.loads(web.recipe.read_text())
    tree["tokenizer"]["kwargs"] = {"bos_token": "<|im_start|>"}
    web.recipe.write_text(json.dumps(tree))
    web.done()
    return Mix(web.recipe, f"s3://{bucket}/mix")


class Rendered:
    """A YAML, the tokenizer that it names, and the line that fetches it."""

    def __init__(self, mix: Mix, folder: Path, *more: str) -> None:
        self.path, node = folder / "train.yaml", f"local={folder / 'node'}"
        self.err = done("render-yaml", mix.recipe, node, *more, "-o", self.path).err
        text = self.path.read_text()
        self.tokenizer: Any = yaml.safe_load(text)["tokenizer"]
        self.name = Path(self.tokenizer["name"])
        lines = [line for line in text.splitlines() if "aws s3 cp" in line]
        self.line = "".join(lines).removeprefix("# mdsmix:").strip()


@pytest.fixture
def elsewhere(mix: Mix, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rendered:
    """The YAML on another machine: it has neither the converting machine's cache nor its tokenizer."""
    found = Rendered(mix, tmp_path)
    monkeypatch.setenv("MDSMIX_CACHE", str(tmp_path / "other cache"))
    return found


def test_the_line_that_fetches_it_is_told(mix: Mix, tmp_path: Path, tokenizer_folder: Path) -> None:
    """In the YAML and on the terminal."""
    found = Rendered(mix, tmp_path)
    assert str(tokenizer_folder) not in found.path.read_text()
    assert found.name.parent == tmp_path / "node"
    assert found.tokenizer["kwargs"] == {"model_max_length": "${max_seq_len}"}
    command = f"aws s3 cp --recursive --endpoint-url {os.environ['S3_ENDPOINT_URL']}"
    source = f"{mix.remote}/{found.name.name}"
    assert shlex.split(found.line) == [*command.split(), source, f"{found.name}"]
    assert "tokenizer.json" in dict(locate(source).list())
    assert f": {found.line}\n" in found.err
    said = mdsmix("render-yaml", mix.recipe, f"local={tmp_path / 'node'}", "--json").out
    assert json.loads(said)["before_training"] == found.line


def test_fetch_takes_the_words_of_the_line(
    mix: Mix, elsewhere: Rendered, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without a variable for the store."""
    answer = mdsmix("fetch", f"{mix.remote}/tokenizer-00000000", tmp_path / "to")
    assert (answer.code, "holds no tokenizer and no processor" in answer.err) == (4, True)
    with monkeypatch.context() as patch:
        patch.setenv("S3_ENDPOINT_URL", "")
        answer = done("fetch", *shlex.split(elsewhere.line)[4:])
    assert answer.out.startswith(f"{elsewhere.name}: ")
    assert AutoTokenizer.from_pretrained(elsewhere.name).bos_token == "<|im_start|>"
    assert "error tokenizer" not in mdsmix("check", elsewhere.path).out


def test_where_mdsmix_is_on_the_nodes_the_yaml_names_the_bucket(
    mix: Mix, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key in ("train_loader={name: mdsmix, num_workers: 0}", "mdsmix_on_nodes=true"):
        found = Rendered(mix, tmp_path, key)
        name = found.tokenizer["name"]
        assert name.startswith(f"{mix.remote}/tokenizer-"), key
        assert "aws s3 cp" not in found.path.read_text() + found.err
        with monkeypatch.context() as patch:
            patch.setenv("MDSMIX_CACHE", str(tmp_path / key[:12]))
            assert "error" not in mdsmix("check", found.path).out
            assert next(iter(build_loader(str(found.path), 2)))["input_ids"].shape == (2, 16)
    monkeypatch.setenv("MDSMIX_CACHE", str(tmp_path / "other cache"))
    config = {"tokenizer": {"name": name, "kwargs": {"a": 1}}, "seed": 7}
    made = with_tokenizer_fetched(config)
    assert Path(made["tokenizer"].pop("name"), "tokenizer.json").is_file()
    assert made == {"tokenizer": {"kwargs": {"a": 1}}, "seed": 7}
    with pytest.raises(Unreachable, match="no tokenizer is published at"):
        with_tokenizer_fetched({"tokenizer": {"name": f"{mix.remote}/tokenizer-00000000"}})


def test_one_that_is_not_what_was_published_is_refused(
    mix: Mix, elsewhere: Rendered, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = TokenizerSpec(name=str(elsewhere.name))
    fetched = Path(at_hand(spec, [f"{mix.remote}/web"]).name)
    file = shutil.copytree(fetched, tmp_path / "mix" / fetched.name) / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"normalizer": {"type": "NFC"}}))
    monkeypatch.setenv("MDSMIX_CACHE", str(tmp_path / "third cache"))
    with pytest.raises(Unreachable, match="does not hold the tokenizer as it was published"):
        at_hand(spec, [str(tmp_path / "mix/web")])
    other = TokenizerSpec(name="tokenizer-00000000")
    assert at_hand(other, [str(tmp_path / "mix/web")]) == other


def test_a_tokenizer_that_nobody_published_is_a_finding(mix: Mix) -> None:
    root = locate(mix.remote)
    for name, _ in root.list(recursive=True):
        if name.startswith("tokenizer-"):
            (root / name).delete()
    answer = mdsmix("render-yaml", mix.recipe)
    assert answer.code == 3
    assert "error tokenizer-unpublished: " in answer.err
    done("convert", mix.recipe)
    done("render-yaml", mix.recipe)
