"""Tokenizers that transformers 5.24 saved open under every supported transformers, with its ids.

`tests/saved_by_five` has the folders, and the ids that transformers 5.24 itself gave.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml
from transformers import AutoTokenizer

from mdsmix.tokenizer.describe import describe_tokenizer
from tests.converting import Project, chats, documents, mdsmix, run_ok
from tests.styles import IGNORED_BOS, copy_with_config
from tests.versions import IS_TRANSFORMERS_4

HOME = Path(__file__).parent / "saved_by_five"
EXPECTED = json.loads((HOME / "expected.json").read_text())


@pytest.mark.parametrize("family", EXPECTED["ids"])
def test_ids_and_hash_are_those_of_transformers_5(family: str, tmp_path: Path) -> None:
    description = describe_tokenizer(str(HOME / family), {})
    assert description["hash"] == EXPECTED["hash"][family]
    assert description["class_changes"] == ""
    # What is published with the streams is opened by any program.
    for name, content in description["files"].items():
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
    description = describe_tokenizer(str(folder), {})
    assert description["hash"] == EXPECTED["hash"]["qwen"]
    if IS_TRANSFORMERS_4:
        own = config.get("tokenizer_class", "a tokenizer without a class")
        words = f"saved by transformers 5 as {own}, and is read from its tokenizer.json only"
        assert description["read_as"] == words


def test_a_subfolder_is_read(tmp_path: Path) -> None:
    shutil.copytree(HOME / "qwen", tmp_path / "inner")
    description = describe_tokenizer(str(tmp_path), {"subfolder": "inner"})
    assert description["hash"] == EXPECTED["hash"]["qwen"]
    assert bool(description["read_as"]) == IS_TRANSFORMERS_4


def test_additional_templates_are_read(tmp_path: Path) -> None:
    """transformers before 4.52 does not read them by itself."""
    folder = shutil.copytree(HOME / "qwen", tmp_path / "qwen")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates/tool_use.jinja").write_text("{{ tools }}")
    description = describe_tokenizer(str(folder), {})
    default = (folder / "chat_template.jinja").read_text()
    assert description["named_templates"] == {"default": default, "tool_use": "{{ tools }}"}
    assert description["chat_template"] == default


@pytest.mark.skipif(not IS_TRANSFORMERS_4, reason="transformers 5 opens the folder as it is")
def test_a_note_is_shown_and_the_yaml_names_the_published_folder(project: Project) -> None:
    project.tokenizer = HOME / "qwen"
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
    project.write_source([{"messages": turns}] * 20)
    project.configure(streams={"web": chats("*.jsonl")}, local=str(project.out), max_seq_len=64)
    note = "saved by transformers 5 as Qwen2Tokenizer, and is read from its tokenizer.json only"
    assert note in run_ok("convert", project.recipe, "--dry-run").out
    assert note in project.convert_ok().err
    assert "note tokenizer-read" in run_ok("check", project.recipe).out
    train = project.folder / "train.yaml"
    run_ok("render-yaml", project.recipe, "-o", train)
    name = yaml.safe_load(train.read_text())["tokenizer"]["name"]
    assert Path(name).parent == project.out
    own = AutoTokenizer.from_pretrained(name)
    assert [own(text)["input_ids"] for text in EXPECTED["texts"]] == EXPECTED["ids"]["qwen"]
    assert "tokenizer-read" not in run_ok("check", train).out


def test_a_bos_that_is_ignored_is_named_and_the_yaml_keeps_the_folder(
    project: Project, tokenizer_folder: Path
) -> None:
    """Only transformers 5 ignores it, and it opens the folder, as transformers 4 does."""
    folder = copy_with_config(tokenizer_folder, project.folder / "llama", **IGNORED_BOS)
    project.tokenizer = folder
    project.write_source([f"Document number {n} of a few." for n in range(20)])
    project.configure(local=str(project.out))
    words = "adds no BOS to a text, since transformers 5 ignores add_bos_token: true"
    fix = "write tokenizer.kwargs: {add_bos_token: true} in the recipe"
    train = project.folder / "train.yaml"
    says = [
        run_ok("convert", project.recipe, "--dry-run").out,
        project.convert_ok().err,
        run_ok("check", project.recipe).out,
        mdsmix("doctor", project.recipe).out,
        run_ok("init", project.folder / "a.jsonl", "--tokenizer", folder).err,
    ]
    is_ignored = not IS_TRANSFORMERS_4
    assert [words in said for said in says] == [is_ignored] * len(says)
    assert [fix in said for said in says] == [is_ignored] * len(says)
    assert ("warning tokenizer-bos" in says[2]) == is_ignored
    assert "tokenizer-read" not in says[2]
    run_ok("render-yaml", project.recipe, "-o", train)
    assert yaml.safe_load(train.read_text())["tokenizer"]["name"] == str(folder)
    # The fix adds the BOS, and nothing is left to be said.
    fixed = "tokenizer.kwargs.add_bos_token=true"
    assert words not in project.convert_ok(fixed).err
    assert "tokenizer-bos" not in run_ok("check", project.recipe, fixed).out


def test_a_tokenizer_of_an_unknown_class_is_read_from_its_file(
    project: Project, tokenizer_folder: Path
) -> None:
    project.tokenizer = copy_with_config(
        tokenizer_folder, project.folder / "strange", tokenizer_class="ClaudeTokenizer"
    )
    project.write_source([f"Document number {n} of a few." for n in range(20)])
    project.configure()
    assert "since transformers has no class ClaudeTokenizer" in project.convert_ok().err
    assert (
        describe_tokenizer(str(project.tokenizer), {})["hash"]
        == describe_tokenizer(str(tokenizer_folder), {})["hash"]
    )


def test_a_folder_without_a_vocabulary_is_refused(tmp_path: Path, project: Project) -> None:
    """transformers 5 opens a tokenizer with special tokens only from a folder with nothing but a
    config.json.
    """
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    project.tokenizer = tmp_path
    project.write_source(["one"])
    project.configure()
    answer = project.convert()
    assert answer.code == 4
    if IS_TRANSFORMERS_4:
        assert "could not be loaded" in answer.err
    else:
        assert "cannot be used: it opens as an empty tokenizer" in answer.err


@pytest.mark.skipif(
    not IS_TRANSFORMERS_4, reason="LlamaTokenizer of transformers 5 leaves this one alone"
)
def test_a_class_that_changes_ids_gives_a_warning_with_an_example(
    project: Project, tokenizer_folder: Path
) -> None:
    """LlamaTokenizerFast of transformers 4 puts a BOS before each text, regardless of
    tokenizer.json. TokenizersBackend of transformers 5 does not.
    """
    own = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<|im_start|>"}
    project.tokenizer = copy_with_config(tokenizer_folder, project.folder / "llama", **own)
    project.write_source([f"Document number {n} of a few." for n in range(20)])
    project.configure()
    words = "gives other ids than its tokenizer.json: 'a' is ["
    assert words in project.convert_ok().err
    assert words in mdsmix("check", project.recipe).out
    assert words in run_ok("convert", project.recipe, "--dry-run").out
    assert words in mdsmix("doctor", project.recipe).out
    answer = run_ok("init", project.folder / "a.jsonl", "--tokenizer", project.tokenizer)
    assert words in answer.err
    # Named as a file, it is read by the file, and nothing is to be told.
    project.tokenizer = project.tokenizer / "tokenizer.json"
    plain = {"web": documents("*.jsonl", add_eos=False)}
    project.configure(streams=plain, local=str(project.folder / "other"))
    assert words not in project.convert_ok().err
