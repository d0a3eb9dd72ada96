"""Tokenizers that transformers 5.24 saved open under every supported transformers, with its ids.

`tests/saved_by_five` has the folders, and the ids that transformers 5.24 itself gave.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoTokenizer

from mdsmix.tokenizer.describe import describe_tokenizer
from tests.converting import Web, chats, documents, done, mdsmix
from tests.versions import IS_TRANSFORMERS_4

HOME = Path(__file__).parent / "saved_by_five"
EXPECTED = json.loads((HOME / "expected.json").read_text())


@pytest.mark.parametrize("family", EXPECTED["ids"])
def test_its_ids_and_its_hash_are_those_of_transformers_5(family: str, tmp_path: Path) -> None:
    taken = describe_tokenizer(str(HOME / family), {})
    assert taken["hash"] == EXPECTED["hash"][family]
    assert taken["class_changes"] == ""
    # What is published with the streams is opened by any program.
    for name, content in taken["files"].items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    published = AutoTokenizer.from_pretrained(tmp_path)
    ids = [published(text)["input_ids"] for text in EXPECTED["texts"]]
    assert ids == EXPECTED["ids"][family]


@pytest.mark.parametrize("lost", ["backend", "tokenizer_class"])
def test_a_config_that_lacks_a_key_of_transformers_5_is_read(lost: str, tmp_path: Path) -> None:
    folder = shutil.copytree(HOME / "qwen", tmp_path / "qwen")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config[lost]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    taken = describe_tokenizer(str(folder), {})
    assert taken["hash"] == EXPECTED["hash"]["qwen"]
    if IS_TRANSFORMERS_4:
        own = config.get("tokenizer_class", "a tokenizer without a class")
        words = f"saved by transformers 5 as {own}, and is read from its tokenizer.json only"
        assert taken["read_as"] == words


def test_a_subfolder_is_read(tmp_path: Path) -> None:
    shutil.copytree(HOME / "qwen", tmp_path / "inner")
    taken = describe_tokenizer(str(tmp_path), {"subfolder": "inner"})
    assert taken["hash"] == EXPECTED["hash"]["qwen"]
    assert bool(taken["read_as"]) == IS_TRANSFORMERS_4


def test_additional_templates_are_read(tmp_path: Path) -> None:
    """transformers before 4.52 does not read them by itself."""
    folder = shutil.copytree(HOME / "qwen", tmp_path / "qwen")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates/tool_use.jinja").write_text("{{ tools }}")
    taken = describe_tokenizer(str(folder), {})
    default = (folder / "chat_template.jinja").read_text()
    assert taken["named_templates"] == {"default": default, "tool_use": "{{ tools }}"}
    assert taken["chat_template"] == default


@pytest.mark.skipif(not IS_TRANSFORMERS_4, reason="transformers 5 opens the folder as it is")
def test_it_is_said_and_the_yaml_names_the_published_folder(web: Web) -> None:
    web.tokenizer = HOME / "qwen"
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
    web.holds([{"messages": turns}] * 20)
    web.says(streams={"web": chats("*.jsonl")}, local=str(web.out), max_seq_len=64)
    said = "saved by transformers 5 as Qwen2Tokenizer, and is read from its tokenizer.json only"
    assert said in done("convert", web.recipe, "--dry-run").out
    assert said in web.done().err
    assert "note tokenizer-read" in done("check", web.recipe).out
    train = web.folder / "train.yaml"
    done("render-yaml", web.recipe, "-o", train)
    name = yaml.safe_load(train.read_text())["tokenizer"]["name"]
    assert Path(name).parent == web.out
    own = AutoTokenizer.from_pretrained(name)
    assert [own(text)["input_ids"] for text in EXPECTED["texts"]] == EXPECTED["ids"]["qwen"]
    assert "tokenizer-read" not in done("check", train).out


def test_a_class_that_transformers_does_not_know_is_read_by_its_file(
    web: Web, tokenizer_folder: Path
) -> None:
    web.tokenizer = shutil.copytree(tokenizer_folder, web.folder / "strange")
    config = json.loads((web.tokenizer / "tokenizer_config.json").read_text())
    changed = config | {"tokenizer_class": "ClaudeTokenizer"}
    (web.tokenizer / "tokenizer_config.json").write_text(json.dumps(changed))
    web.holds([f"Document number {n} of a few." for n in range(20)])
    web.says()
    assert "since transformers has no class ClaudeTokenizer" in web.done().err
    assert (
        describe_tokenizer(str(web.tokenizer), {})["hash"]
        == describe_tokenizer(str(tokenizer_folder), {})["hash"]
    )


def test_a_folder_without_a_vocabulary_is_refused(tmp_path: Path, web: Web) -> None:
    """transformers 5 opens a config.json alone to a tokenizer of special tokens."""
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    web.tokenizer = tmp_path
    web.holds(["one"])
    web.says()
    answer = web.convert()
    assert (answer.code, "could not be loaded" in answer.err) == (4, True)
    if not IS_TRANSFORMERS_4:
        assert "it opens as an empty tokenizer" in answer.err


@pytest.mark.skipif(
    not IS_TRANSFORMERS_4, reason="LlamaTokenizer of transformers 5 leaves this one alone"
)
def test_a_class_that_changes_ids_is_a_warning_with_an_example(
    web: Web, tokenizer_folder: Path
) -> None:
    """LlamaTokenizerFast of transformers 4 puts a BOS before each text, whatever tokenizer.json
    says; TokenizersBackend of transformers 5 does not.
    """
    config = json.loads((tokenizer_folder / "tokenizer_config.json").read_text())
    own: dict[str, Any] = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<|im_start|>"}
    web.tokenizer = shutil.copytree(tokenizer_folder, web.folder / "llama")
    (web.tokenizer / "tokenizer_config.json").write_text(json.dumps(config | own))
    web.holds([f"Document number {n} of a few." for n in range(20)])
    web.says()
    words = "gives other ids than its tokenizer.json: 'a' is ["
    assert words in web.done().err
    assert words in mdsmix("check", web.recipe).out
    assert words in done("convert", web.recipe, "--dry-run").out
    assert words in mdsmix("doctor", web.recipe).out
    answer = done("init", web.folder / "a.jsonl", "--tokenizer", web.tokenizer)
    assert words in answer.err
    # Named as a file, it is read by the file, and nothing is to be told.
    web.tokenizer = web.tokenizer / "tokenizer.json"
    plain = {"web": documents("*.jsonl", add_eos=False)}
    web.says(streams=plain, local=str(web.folder / "other"))
    assert words not in web.done().err
