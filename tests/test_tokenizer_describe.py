"""The files that are saved by a skeleton of a tokenizer are those that are saved by the whole."""

from __future__ import annotations

import gc
import io
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import orjson
import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Model
from tokenizers.models import BPE, Unigram
from tokenizers.normalizers import Lowercase
from tokenizers.pre_tokenizers import ByteLevel

from mdsmix.errors import Unusable
from mdsmix.tokenizer import describe, saving
from mdsmix.tokenizer.bpe_json import BpeJson
from mdsmix.tokenizer.content_hash import hash_model
from mdsmix.tokenizer.differences import describe_class_changes, describe_model_changes
from mdsmix.tokenizer.fields import read_ids
from mdsmix.tokenizer.file_reader import FileFacts, FileReader
from mdsmix.tokenizer.opening import load_tokenizer
from mdsmix.tokenizer.transformers_five import PLAIN_CLASS, TOKENIZER_JSON
from tests.styles import IGNORED_BOS, copy_with_config
from tests.versions import IS_TRANSFORMERS_4

TEXT = {"Sequence": {"id": "A", "type_id": 0}}
ADDS_EOS = {
    "type": "TemplateProcessing",
    "single": [TEXT, {"SpecialToken": {"id": "eos", "type_id": 0}}],
    "pair": [TEXT, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {"eos": {"id": "eos", "ids": [0], "tokens": ["<|endoftext|>"]}},
}
"A post-processor that adds EOS, whose id is 0, after a text."

SWITCHES = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
CONFIGS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "a class with a post-processor": {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True},
    "named tokens": {"extra_special_tokens": {"image_token": "<|im_start|>"}},
    "a new token": {"cls_token": "<|new|>", "padding_side": "left", "model_max_length": 77},
}
Saved = list[dict[str, Any]]


@pytest.fixture
def saved(monkeypatch: pytest.MonkeyPatch) -> Saved:
    """Return the list of the tokenizer.json files that are saved and opened again."""
    contents = Saved()
    save_once = saving._save_once

    def save(tokenizer: Any, fields: dict[str, Any], content: str) -> dict[str, str]:
        contents.append(json.loads(content))
        return save_once(tokenizer, fields, content)

    monkeypatch.setattr(saving, "_save_once", save)
    return contents


@pytest.mark.parametrize("case", CONFIGS)
def test_a_skeleton_saves_the_files_of_the_whole(
    case: str, tokenizer_folder: Path, tmp_path: Path, saved: Saved, monkeypatch: Any
) -> None:
    folder = copy_with_config(tokenizer_folder, tmp_path / "tokenizer", **CONFIGS[case])
    (folder / "special_tokens_map.json").unlink()
    name = str(folder)
    by_skeleton = describe.describe_tokenizer(name, {})
    if IS_TRANSFORMERS_4:  # 5 may build a tokenizer in another way than its file says
        assert [len(tree["model"]["merges"]) for tree in saved] == [0]
    saved.clear()
    monkeypatch.setattr(describe, "parse_bpe_json", lambda content: None)
    assert describe.describe_tokenizer(name, {}) == by_skeleton
    assert all(tree["model"]["merges"] for tree in saved)
    assert json.loads(by_skeleton["files"][TOKENIZER_JSON])["model"]["merges"]
    config = json.loads(by_skeleton["files"]["tokenizer_config.json"])
    assert config["tokenizer_class"] == PLAIN_CLASS


SPECIAL_TOKENS = dict.fromkeys(("bos_token", "eos_token", "pad_token"), "<|im_start|>") | {
    "unk_token": "<|im_end|>"
}
OPENED_CONFIGS: dict[str, tuple[bool, dict[str, Any]]] = {
    "as it is": (True, {}),
    "Llama": (True, {"tokenizer_class": "LlamaTokenizer", "unk_token": None} | IGNORED_BOS),
    "Gemma": (True, {"tokenizer_class": "GemmaTokenizer"} | SPECIAL_TOKENS),
    "Qwen 2": (True, {"tokenizer_class": "Qwen2Tokenizer"} | SPECIAL_TOKENS),
    "GPT-2": (True, {"tokenizer_class": "GPT2Tokenizer"} | SPECIAL_TOKENS),
    "Cohere": (True, {"tokenizer_class": "CohereTokenizer"} | SPECIAL_TOKENS),
    "named tokens": (True, CONFIGS["named tokens"]),
    "an unknown class": (True, {"tokenizer_class": "NobodysTokenizer"}),
    "a class that nobody has read": (False, {"tokenizer_class": "BloomTokenizerFast"}),
    "a new token": (False, CONFIGS["a new token"]),
    "a token of the vocabulary": (False, {"cls_token": "and"}),
    "another regular expression": (False, {"fix_mistral_regex": True}),
    "a prefix": (False, {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True}),
}
"Case -> whether the skeleton suffices under transformers 4, and the changed keys of the config."


@pytest.mark.parametrize("case", OPENED_CONFIGS)
def test_a_skeleton_is_described_as_the_whole(
    case: str, tokenizer_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    suffices, changes = OPENED_CONFIGS[case]
    folder = copy_with_config(tokenizer_folder, tmp_path / "tokenizer", **changes)
    (folder / "special_tokens_map.json").unlink()
    name = str(folder)
    reader = FileReader(folder / TOKENIZER_JSON, tmp_path / "joined")
    expected = describe.describe_tokenizer(name, {}, of_facts(reader.wait()))
    opened = list[Path | None]()
    load = describe.load_tokenizer

    def note_file(name: str, kwargs: Any, file: Path | None = None) -> Any:
        opened.append(file)
        return load(name, kwargs, file)

    monkeypatch.setattr(describe, "load_tokenizer", note_file)
    capfd.readouterr()
    assert describe.describe_tokenizer(name, {}, reader) == expected
    assert capfd.readouterr().out == ""
    was_whole_opened = reader.wait().joined in opened
    assert was_whole_opened == (not suffices or not IS_TRANSFORMERS_4)


def test_a_skeleton_that_its_class_replaces_is_not_described(
    tokenizer_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As LlamaTokenizerFast does that reads a tokenizer.model, since add_prefix_space is set."""
    path = tokenizer_folder / TOKENIZER_JSON
    reader = FileReader(path, tmp_path / "joined")
    description = describe._describe_by_skeleton(str(tokenizer_folder), reader)
    assert (description is not None) == IS_TRANSFORMERS_4  # 5 opens no skeleton
    load = describe.load_tokenizer
    monkeypatch.setattr(
        describe, "load_tokenizer", lambda name, kwargs, _: load(name, kwargs, path)
    )
    assert describe._describe_by_skeleton(str(tokenizer_folder), reader) is None


def test_an_example_has_the_ids_of_the_whole(tokenizer_folder: Path, tmp_path: Path) -> None:
    """Each text begins with two letters that are merged, and the class adds BOS."""
    _, config = OPENED_CONFIGS["Llama"]
    folder = copy_with_config(tokenizer_folder, tmp_path / "tokenizer", **config)
    (folder / "special_tokens_map.json").unlink()
    tree = json.loads((folder / TOKENIZER_JSON).read_bytes())
    tree["normalizer"] = {"type": "Prepend", "prepend": "th"}
    (folder / TOKENIZER_JSON).write_text(json.dumps(tree))
    reader = FileReader(folder / TOKENIZER_JSON, tmp_path / "joined")
    expected = describe.describe_tokenizer(str(folder), {}, of_facts(reader.wait()))
    if IS_TRANSFORMERS_4:
        assert "'a' is [2, " in expected["class_changes"]
    assert describe.describe_tokenizer(str(folder), {}, reader) == expected


def test_a_skeleton_of_a_file_that_tokenizers_refuses_is_not_described(
    tokenizer_folder: Path, tmp_path: Path
) -> None:
    """A merge has a token that the vocabulary lacks."""
    folder = shutil.copytree(tokenizer_folder, tmp_path / "tokenizer")
    tree = json.loads((folder / TOKENIZER_JSON).read_bytes())
    tree["model"]["merges"].append(["no", "token"])
    (folder / TOKENIZER_JSON).write_text(json.dumps(tree))
    reader = FileReader(folder / TOKENIZER_JSON, tmp_path / "joined")
    with pytest.raises(Exception, match="out of vocabulary"):
        describe.describe_tokenizer(str(folder), {}, reader)


def test_an_unknown_token_that_only_a_skeleton_has_is_missed(
    tokenizer_folder: Path, tmp_path: Path
) -> None:
    """It is an added token, and the vocabulary lacks it. `é` is not a token."""
    folder = shutil.copytree(tokenizer_folder, tmp_path / "tokenizer")
    tree = json.loads((folder / TOKENIZER_JSON).read_bytes())
    largest = max(
        [*tree["model"]["vocab"].values(), *(each["id"] for each in tree["added_tokens"])]
    )
    tree["added_tokens"].append({"id": largest + 1, "content": "<nowhere>", **SWITCHES})
    tree["model"]["unk_token"] = "<nowhere>"
    tree["pre_tokenizer"] = None  # characters are no longer written as bytes
    (folder / TOKENIZER_JSON).write_text(json.dumps(tree))
    reader = FileReader(folder / TOKENIZER_JSON, tmp_path / "joined")
    with pytest.raises(Exception, match=r"<nowhere>. not found in the vocabulary"):
        describe.describe_tokenizer(str(folder), {}, reader)


def test_truncation_and_padding_of_the_file_change_nothing(
    tokenizer_folder: Path, tmp_path: Path
) -> None:
    """transformers writes those of the last call into the tokenizer.json that it saves."""
    folder = shutil.copytree(tokenizer_folder, tmp_path / "tokenizer")
    path = str(folder / TOKENIZER_JSON)
    model = Model.from_file(path)
    model.enable_truncation(4)
    model.enable_padding(length=9)
    model.save(path)
    text = "one two three four five six seven"
    assert (
        Model.from_file(path).encode(text).ids
        != Model.from_file(str(tokenizer_folder / TOKENIZER_JSON)).encode(text).ids
    )
    described = describe.describe_tokenizer(str(folder), {})
    assert described == describe.describe_tokenizer(str(tokenizer_folder), {})
    saved_model = Model.from_str(described["files"][TOKENIZER_JSON])
    assert saved_model.truncation is None
    assert saved_model.padding is None


def test_a_bos_that_transformers_5_does_not_add_is_named(
    tokenizer_folder: Path, tmp_path: Path
) -> None:
    """As for DeepSeek V3, whose tokenizer.json has no BOS."""
    configs: dict[str, dict[str, Any]] = {
        "a class that adds BOS": {},
        "a class that ignores the key": {"tokenizer_class": "PreTrainedTokenizerFast"},
        "no BOS": {"add_bos_token": False},
    }
    with_bos = set[str]()
    ignored = set[str]()
    for case, config in configs.items():
        changes = IGNORED_BOS | config
        folder = copy_with_config(tokenizer_folder, tmp_path / case, **changes)
        described = describe.describe_tokenizer(str(folder), {})
        if described["bos_id"] in described["prefix_ids"]:
            with_bos.add(case)
        if described["is_bos_ignored"]:
            ignored.add(case)
        assert described["read_as"] == "", "each folder is opened by the class that it names"
    if IS_TRANSFORMERS_4:
        assert with_bos == {"a class that adds BOS"}
        assert ignored == set()
    else:
        assert with_bos == set()
        assert ignored == {"a class that adds BOS"}
    # The argument that the warning names gives what the folder asks for, under both.
    folder = tmp_path / "a class that adds BOS"
    described = describe.describe_tokenizer(str(folder), {"add_bos_token": True})
    assert described["prefix_ids"] == [described["bos_id"]]
    assert not described["is_bos_ignored"]


def test_other_tokens_than_those_of_a_sentencepiece_model_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokens of a text with two spaces are those that transformers 5.24 and SentencePiece give
    for Mistral's model; tests/vocabularies compares the real ones.
    """
    by_class, by_model = ["▁x", "▁▁", "y"], ["▁x", "▁", "▁y"]
    encoded = SimpleNamespace(encode=lambda *_, **__: SimpleNamespace(tokens=by_class))
    model_file = tmp_path / "tokenizer.model"
    tokenizer = SimpleNamespace(backend_tokenizer=encoded, vocab_file=str(model_file))

    def describe_with(pieces: list[str]) -> str:
        model = SimpleNamespace(encode=lambda *_, **__: pieces)
        module = SimpleNamespace(SentencePieceProcessor=lambda **_: model)
        monkeypatch.setitem(sys.modules, "sentencepiece", module)
        return describe_model_changes(tokenizer)

    assert f"'x  y' is {by_class} by transformers and {by_model} by" in describe_with(by_model)
    assert describe_with(by_class) == ""
    assert describe_with(["x", "▁▁", "y"]) == "", "add_prefix_space: false"
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    assert describe_model_changes(tokenizer) == "", "not installed"
    model_file.with_name("tokenizer.json").write_text("{}")
    assert describe_with(by_model) == "", "the tokenizer comes from its tokenizer.json"
    model_file.with_name("tokenizer.json").unlink()
    tokenizer.vocab_file = None
    assert describe_with(by_model) == "", "the tokenizer comes from no file, or from vocab.json"


def lose_token(tree: dict[str, Any]) -> None:
    tree["added_tokens"].pop()


def add_post_processor(tree: dict[str, Any]) -> None:
    token = tree["added_tokens"][0]
    tree["post_processor"] = {
        "type": "RobertaProcessing",
        **{key: [token["content"], token["id"]] for key in ("sep", "cls")},
        "trim_offsets": True,
        "add_prefix_space": False,
    }


def lose_model(tree: dict[str, Any]) -> None:
    del tree["model"]


@pytest.mark.parametrize("damage", [lose_token, add_post_processor, lose_model])
def test_a_skeleton_of_another_tokenizer_is_not_used(
    damage: Callable[[dict[str, Any]], None],
    tokenizer_folder: Path,
    saved: Saved,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = describe.describe_tokenizer(str(tokenizer_folder), {})
    saved.clear()
    to_skeleton = BpeJson.to_skeleton

    def damaged(*arguments: Any) -> str:
        tree = json.loads(to_skeleton(*arguments))
        damage(tree)
        return json.dumps(tree)

    monkeypatch.setattr(BpeJson, "to_skeleton", damaged)
    assert describe.describe_tokenizer(str(tokenizer_folder), {}) == expected
    assert saved[-1] == json.loads(expected["files"][TOKENIZER_JSON])


def test_ids_are_those_that_the_tokenizer_gives(tokenizer_folder: Path) -> None:
    """Its file has most of them in the vocabulary, and others only as added tokens."""
    bpe = Model.from_file(str(tokenizer_folder / TOKENIZER_JSON))
    unigram = Model(Unigram([("a", 0.0), ("b", -1.0)]))
    for model in (bpe, unigram):
        size = model.get_vocab_size()
        model.add_tokens(["a new token", "a"])
        tokenizer = SimpleNamespace(get_vocab=model.get_vocab)
        ids = read_ids(tokenizer, json.loads(model.to_str()))
        assert ids == model.get_vocab()
        assert ids["a new token"] == size


def of_facts(facts: FileFacts) -> Any:
    """Return a reader that has found these facts, and no skeleton."""
    return SimpleNamespace(wait_for_skeleton=lambda: None, wait=lambda: facts)


def test_a_file_is_hashed_as_tokenizers_reads_it(tokenizer_folder: Path, tmp_path: Path) -> None:
    content = (tokenizer_folder / TOKENIZER_JSON).read_text()
    tree = json.loads(content)
    expected = hash_model(json.loads(Model.from_str(content).to_str()))
    joined, other, damaged = (tmp_path / name for name in ("joined", "other", "damaged"))
    joined.write_text(json.dumps(tree | {"model": tree["model"] | {"merges": join(tree)}}))
    other.write_text(json.dumps(tree | {"normalizer": {"type": "NFC"}}))
    damaged.write_text(content[:-1])
    paths = (tokenizer_folder / TOKENIZER_JSON, joined, other, damaged)
    answers = [
        FileReader(path, tmp_path / f"{number}.json").wait() for number, path in enumerate(paths)
    ]
    assert [answer.file_hash for answer in answers[:2]] == [expected, expected]
    assert answers[2].file_hash != expected
    assert answers[3] == FileFacts()
    # The files that are read in place of these are the same tokenizer.
    for path, answer in zip(paths, answers[:3], strict=False):
        assert answer.joined
        written = json.loads(answer.joined.read_text())
        assert written["model"]["merges"] == join(tree)
        assert Model.from_file(str(answer.joined)).to_str() == Model.from_file(str(path)).to_str()
    described = describe.describe_tokenizer(str(tokenizer_folder), {}, of_facts(answers[0]))
    assert described.pop("is_as_file")
    expected = describe.describe_tokenizer(str(tokenizer_folder), {})
    assert not expected.pop("is_as_file")  # nobody has hashed the file
    assert described == expected


def test_a_file_is_as_the_tokenizer_if_only_ids_around_texts_differ(
    tokenizer_folder: Path, tmp_path: Path
) -> None:
    """Backends encode texts without these."""
    tree = json.loads((tokenizer_folder / TOKENIZER_JSON).read_bytes())
    path = tmp_path / TOKENIZER_JSON
    other_normalizer = {"normalizer": {"type": "NFD"}}
    for changes, is_as_file in (({"post_processor": ADDS_EOS}, True), (other_normalizer, False)):
        path.write_text(json.dumps(tree | changes))
        facts = FileReader(path, tmp_path / "joined").wait()
        assert facts.file_hash != hash_model(tree)
        facts = facts._replace(joined=None)
        described = describe.describe_tokenizer(str(tokenizer_folder), {}, of_facts(facts))
        assert described["is_as_file"] == is_as_file


def test_ids_around_texts_are_compared_without_opening_the_whole_model(
    tokenizer_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sentence is the same, also for a file that cuts texts."""
    tree = json.loads((tokenizer_folder / TOKENIZER_JSON).read_bytes())
    cuts = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    tree_of_file = tree | {"post_processor": ADDS_EOS, "truncation": cuts}
    (tmp_path / TOKENIZER_JSON).write_text(json.dumps(tree_of_file))
    tokenizer, _ = load_tokenizer(str(tokenizer_folder), {})
    arguments = (str(tmp_path), tokenizer, hash_model(tree))
    expected = describe_class_changes(*arguments, FileFacts())
    assert expected.count("'a' is [") == 1
    hash_of_file = hash_model(tree_of_file)
    written = list[dict[str, Any]]()
    dumps = orjson.dumps
    monkeypatch.setattr(orjson, "dumps", lambda tree: written.append(tree) or dumps(tree))
    facts = FileFacts(hash_of_file)
    sentence = describe_class_changes(*arguments, facts)
    assert sentence == expected
    (small_tree,) = written
    assert small_tree["model"]["vocab"] == {}


@pytest.mark.parametrize(
    "changes",
    [
        {"normalizer": {"type": "Prepend", "prepend": "e"}},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True}},
        {"added_tokens": [{"content": "lo, w", "id": 2000} | SWITCHES]},
        {"normalizer": {"type": "Lowercase"}, "post_processor": ADDS_EOS},
    ],
)
def test_a_file_with_the_same_model_is_not_opened(
    changes: dict[str, Any],
    tokenizer_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its settings are those of its skeleton. The sentence is the same."""
    tree = json.loads((tokenizer_folder / TOKENIZER_JSON).read_bytes())
    path = tmp_path / TOKENIZER_JSON
    added = tree["added_tokens"] + changes.get("added_tokens", [])
    path.write_text(json.dumps(tree | changes | {"added_tokens": added}))
    facts = FileReader(path, tmp_path / "joined").wait()
    assert facts.skeleton
    tokenizer, _ = load_tokenizer(str(tokenizer_folder), {})
    arguments = (str(tmp_path), tokenizer, hash_model(tree))
    expected = describe_class_changes(*arguments, FileFacts())
    assert "by the class and" in expected
    path.write_text("{}")  # nobody opens it
    assert describe_class_changes(*arguments, facts) == expected


def test_a_switch_that_a_file_lacks_is_off(tokenizer_folder: Path) -> None:
    """DeepSeek V3's file lacks `ignore_merges`."""
    tree = json.loads((tokenizer_folder / TOKENIZER_JSON).read_bytes())
    for switch in ("ignore_merges", "byte_fallback", "fuse_unk"):
        values: list[dict[str, Any]] = [{}, {switch: False}, {switch: True}]
        settings = {key: value for key, value in tree["model"].items() if key != switch}
        trees = [tree | {"model": settings | value} for value in values]
        lacks, off, on = [Model.from_str(json.dumps(each)).to_str() for each in trees]
        assert lacks == off != on
        assert hash_model(trees[0]) == hash_model(trees[1]) != hash_model(trees[2])


def test_a_file_that_cuts_or_pads_texts_is_not_opened_ahead(
    tokenizer_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tree = json.loads((tokenizer_folder / TOKENIZER_JSON).read_bytes())
    cuts = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    for number, changes in enumerate(({}, {"truncation": cuts})):
        path = tmp_path / f"{number}.json"
        path.write_text(json.dumps(tree | changes))
        reader = FileReader(path, tmp_path / f"joined {number}.json")
        answer = reader.wait()
        assert answer.file_hash == hash_model(tree)
        notice = json.dumps({"file": str(answer.joined)}, separators=(",", ":")) + "\n"
        assert capfd.readouterr().out == ("" if changes else notice)


def test_the_notice_comes_before_the_description(
    tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    question = {"name": str(tokenizer_folder), "kwargs": {}}
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(question)))
    monkeypatch.setattr(gc, "disable", Mock())
    monkeypatch.setattr(describe, "hide_torch", Mock())
    monkeypatch.setattr(describe, "read_models_late", Mock())
    monkeypatch.setattr(os, "environ", dict(os.environ))
    describe_tokenizer = describe.describe_tokenizer
    models = list[dict[str, Any]]()

    def read_model(model: Model) -> dict[str, Any]:
        """Return all but the post-processor: transformers 5 adds one that adds no token."""
        return {**json.loads(model.to_str()), "post_processor": None}

    def read_notice(**arguments: Any) -> dict[str, Any]:
        arguments["file"].wait()
        notice = json.loads(capfd.readouterr().out)
        models.append(read_model(Model.from_file(notice["file"])))
        return describe_tokenizer(**arguments)

    monkeypatch.setattr(describe, "describe_tokenizer", read_notice)
    describe.main()
    description, error = json.loads(capfd.readouterr().out)
    assert (error, description["is_as_file"]) == ("", True)
    assert models == [read_model(Model.from_str(description["files"][TOKENIZER_JSON]))]


def join(tree: dict[str, Any]) -> list[str]:
    return [" ".join(merge) for merge in tree["model"]["merges"]]


def test_only_a_tokenizer_with_the_hash_of_its_file_is_not_compared(
    tokenizer_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = Mock(return_value="changed")
    monkeypatch.setattr(describe, "describe_class_changes", compared)
    reader = FileReader(tokenizer_folder / TOKENIZER_JSON, tmp_path / "joined")
    facts = reader.wait()
    assert facts.file_hash
    name = str(tokenizer_folder)
    found = list[str]()
    for file_hash in (facts.file_hash, None, facts.file_hash._replace(text_ids="0" * 32)):
        file = SimpleNamespace(
            wait_for_skeleton=reader.wait_for_skeleton,
            wait=lambda digest=file_hash: facts._replace(file_hash=digest),
        )
        found.append(describe.describe_tokenizer(name, {}, file)["class_changes"])
    assert found == ["", "changed", "changed"]
    assert [call.kwargs["is_skeleton"] for call in compared.call_args_list] == [False, False]


FLAG_TEXTS = ("a <S> b", "a<S>b", "a<s>b", "a foo b", "afoob", "A FOO b", " foo ", "Foo<S>foo")


def write_lowercase_tokenizer(folder: Path) -> dict[str, Any]:
    """A tokenizer of bytes that lowercases texts; returns its tokenizer_config.json."""
    alphabet = sorted(ByteLevel.alphabet())
    model = Model(BPE(vocab={letter: n for n, letter in enumerate(alphabet)}, merges=[]))
    model.pre_tokenizer = ByteLevel(add_prefix_space=False)
    model.normalizer = Lowercase()
    model.add_special_tokens([AddedToken("<S>", normalized=False)])
    model.add_tokens([AddedToken("foo")])
    folder.mkdir()
    model.save(str(folder / TOKENIZER_JSON))
    tokens = json.loads((folder / TOKENIZER_JSON).read_text())["added_tokens"]
    return {
        "tokenizer_class": PLAIN_CLASS,
        "eos_token": "<S>",
        "added_tokens_decoder": {str(token.pop("id")): token for token in tokens},
    }


@pytest.mark.parametrize("flag", SWITCHES)
@pytest.mark.parametrize("token", ["<S>", "foo"])
def test_added_tokens_are_matched_as_by_transformers(token: str, flag: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = tmp_path / "tokenizer"
    config = write_lowercase_tokenizer(folder)
    for entry in config["added_tokens_decoder"].values():
        if entry["content"] == token:
            entry[flag] = not entry[flag]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    described = describe.describe_tokenizer(str(folder), {})
    saved = Model.from_str(described["files"][TOKENIZER_JSON])
    for text in FLAG_TEXTS:
        assert saved.encode(text, add_special_tokens=False).ids == tokenizer.encode(
            text, add_special_tokens=False
        )
    special = {id for id, token in tokenizer.added_tokens_decoder.items() if token.special}
    assert {*described["special_ids"]} == special


def test_a_tokenizer_that_splits_special_tokens_is_refused(
    tokenizer_folder: Path, tmp_path: Path
) -> None:
    splits = {"split_special_tokens": True}
    with pytest.raises(Unusable, match="split_special_tokens: true"):
        describe.describe_tokenizer(str(tokenizer_folder), splits)
    folder = copy_with_config(tokenizer_folder, tmp_path / "tokenizer", **splits)
    reader = FileReader(folder / TOKENIZER_JSON, tmp_path / "joined.json")
    with pytest.raises(Unusable, match="split_special_tokens: true"):
        describe.describe_tokenizer(str(folder), {}, reader)
    # The recipe's argument decides.
    described = describe.describe_tokenizer(str(folder), {"split_special_tokens": False})
    assert described["special_tokens"]
