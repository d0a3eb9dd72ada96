"""The files that are kept of a tokenizer open to the tokenizer that they are of, and a YAML with an
S3 remote names them: they are fetched from the mix's root.
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
    """torch would be imported for nothing: 11 s and 900 MB more, where a tokenizer is used for the
    first time. transformers 4 is told so by USE_TORCH, which transformers 5 does not read.
    """
    main = "from mdsmix.tokenizer import describe; describe.main()"
    program = f"import sys; {main}; sys.exit(bool(sys.modules.get('torch')))"
    kwargs = {"bos_token": "<|im_start|>"}
    given = json.dumps({"name": str(tokenizer_folder), "kwargs": kwargs})
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [describe_tokenizer(str(tokenizer_folder), kwargs), ""]


@pytest.fixture
def remote(bucket: str) -> str:
    return f"s3://{bucket}/mix"


@pytest.fixture
def mix(remote: str, web: Web) -> Web:
    """A mix that was converted into a bucket; its tokenizer is given as a folder with a keyword of
    its own.
    """
    web.holds(f"one two three {n} " * 9 for n in range(9))
    web.says(remote=remote, train_loader={"num_workers": 0})
    tree = json.loads(web.recipe.read_text())
    tree["tokenizer"]["kwargs"] = {"bos_token": "<|im_start|>"}
    web.recipe.write_text(json.dumps(tree))
    web.done()
    return web


class Rendered:
    """A YAML, the tokenizer that it names, and the line that fetches it."""

    def __init__(self, mix: Web, *more: str) -> None:
        self.path, node = mix.folder / "train.yaml", f"local={mix.folder / 'node'}"
        self.err = done("render-yaml", mix.recipe, node, *more, "-o", self.path).err
        text = self.path.read_text()
        self.tokenizer: Any = yaml.safe_load(text)["tokenizer"]
        self.name = Path(self.tokenizer["name"])
        lines = [line for line in text.splitlines() if "aws s3 cp" in line]
        self.line = "".join(lines).removeprefix("# mdsmix:").strip()


def test_the_line_that_fetches_it_is_told(mix: Web, remote: str) -> None:
    """In the YAML and on the terminal."""
    found = Rendered(mix)
    assert str(mix.tokenizer) not in found.path.read_text()
    assert found.name.parent == mix.folder / "node"
    assert found.tokenizer["kwargs"] == {"model_max_length": "${max_seq_len}"}
    command = f"aws s3 cp --recursive --endpoint-url {os.environ['S3_ENDPOINT_URL']}"
    source = f"{remote}/{found.name.name}"
    assert shlex.split(found.line) == [*command.split(), source, f"{found.name}"]
    assert "tokenizer.json" in dict(locate(source).list())
    assert f": {found.line}\n" in found.err
    said = mdsmix("render-yaml", mix.recipe, f"local={mix.folder / 'node'}", "--json").out
    assert json.loads(said)["before_training"] == found.line


def test_fetch_takes_the_words_of_the_line(mix: Web, remote: str) -> None:
    """Without a variable for the store."""
    found = Rendered(mix)
    mix.patch.setenv("MDSMIX_CACHE", str(mix.folder / "another machine"))
    answer = mdsmix("fetch", f"{remote}/tokenizer-00000000", mix.folder / "to")
    assert (answer.code, "does not contain a tokenizer or processor" in answer.err) == (4, True)
    with mix.patch.context() as patch:
        patch.setenv("S3_ENDPOINT_URL", "")
        answer = done("fetch", *shlex.split(found.line)[4:])
    assert answer.out.startswith(f"{found.name}: ")
    assert AutoTokenizer.from_pretrained(found.name).bos_token == "<|im_start|>"
    assert "error tokenizer" not in mdsmix("check", found.path).out


def test_where_mdsmix_is_on_the_nodes_the_yaml_names_the_bucket(mix: Web, remote: str) -> None:
    for key in ("train_loader={name: mdsmix, num_workers: 0}", "mdsmix_on_nodes=true"):
        found = Rendered(mix, key)
        name = found.tokenizer["name"]
        assert name.startswith(f"{remote}/tokenizer-"), key
        assert "aws s3 cp" not in found.path.read_text() + found.err
        with mix.patch.context() as patch:
            patch.setenv("MDSMIX_CACHE", str(mix.folder / key[:12]))
            assert "error" not in mdsmix("check", found.path).out
            assert next(iter(build_loader(str(found.path), 2)))["input_ids"].shape == (2, 16)
    mix.patch.setenv("MDSMIX_CACHE", str(mix.folder / "another machine"))
    made = with_tokenizer_fetched({"tokenizer": {"name": name, "kwargs": {"a": 1}}, "seed": 7})
    assert Path(made["tokenizer"].pop("name"), "tokenizer.json").is_file()
    assert made == {"tokenizer": {"kwargs": {"a": 1}}, "seed": 7}
    with pytest.raises(Unreachable, match="no tokenizer is published at"):
        with_tokenizer_fetched({"tokenizer": {"name": f"{remote}/tokenizer-00000000"}})


def test_one_that_is_not_what_was_published_is_refused(mix: Web, remote: str) -> None:
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


def test_a_tokenizer_that_nobody_published_is_a_finding(mix: Web, remote: str) -> None:
    root = locate(remote)
    for name, _ in root.list(recursive=True):
        if name.startswith("tokenizer-"):
            (root / name).delete()
    answer = mdsmix("render-yaml", mix.recipe)
    assert (answer.code, "error tokenizer-unpublished: " in answer.err) == (3, True)
    mix.done()
    done("render-yaml", mix.recipe)
