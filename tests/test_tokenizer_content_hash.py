"""Two tokenizers have one hash if, and only if, they give the same ids; streams that have the hash
of an earlier mdsmix keep it.

The oracle of the first part is the tokenizers library, which tokenizes the texts. In the second
part streams are published under the hash that mdsmix gave before: that of the JSON as written.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Model

from mdsmix.conversion.planning import Options, plan_streams
from mdsmix.encode.backends import Fastokens, Unequal, store_difference
from mdsmix.kinds import open_recipe
from mdsmix.recipe import TokenizerSpec
from mdsmix.tokenizer import snapshot
from mdsmix.tokenizer.card import open_tokenizer
from mdsmix.tokenizer.content_hash import hash_bytes, hash_content
from tests.converting import Web, chats, documents, done, manifest_of, mdsmix

IDS = {"bos_id": None, "eos_id": 0, "pad_id": 1}
TEXTS = (
    *("Hello, world!", "  two  spaces\n\n\tx = 1", "déjà vu 東京", "", " "),
    *("<|im_start|>user\nhi<|im_end|>", "a<|im_end|> b", "İ ﬁ é", "123 456"),
)
EMPTY_TEMPLATE = {
    "type": "TemplateProcessing",
    "single": [{"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {},
}
ENDED = EMPTY_TEMPLATE | {
    "single": [
        {"Sequence": {"id": "A", "type_id": 0}},
        {"SpecialToken": {"id": "<|im_end|>", "type_id": 0}},
    ],
    "special_tokens": {"<|im_end|>": {"id": "<|im_end|>", "ids": [3], "tokens": ["<|im_end|>"]}},
}
BYTE_LEVEL = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": True,
}


def set_to(*path: Any, value: Any) -> Callable[[Any], None]:
    """Return a change of a tokenizer.json: the value at this path."""

    def change(tree: Any) -> None:
        for key in path[:-1]:
            tree = tree[key]
        tree[path[-1]] = value

    return change


SAME: dict[str, Callable[[Any], None]] = {
    "transformers 5 writes an empty template": set_to("post_processor", value=EMPTY_TEMPLATE),
    "a ByteLevel post-processor moves offsets": set_to("post_processor", value=BYTE_LEVEL),
    "an empty prefix": set_to("model", "continuing_subword_prefix", value=""),
    "an empty suffix": set_to("model", "end_of_word_suffix", value=""),
    "offsets of the pre-tokenizer": set_to(
        "pre_tokenizer", value=BYTE_LEVEL | {"trim_offsets": False}
    ),
    "a sequence of one": set_to(
        "pre_tokenizer", value={"type": "Sequence", "pretokenizers": [BYTE_LEVEL]}
    ),
    "a sequence of none": set_to("normalizer", value={"type": "Sequence", "normalizers": []}),
    "another decoder": set_to("decoder", value={"type": "Fuse"}),
    "dropout of zero": set_to("model", "dropout", value=0.0),
}
OTHER: dict[str, Callable[[Any], None]] = {
    "fewer merges": lambda tree: tree["model"]["merges"].__delitem__(slice(500, None)),
    "a normalizer": set_to("normalizer", value={"type": "NFKC"}),
    "a prefix space": set_to("pre_tokenizer", value=BYTE_LEVEL | {"add_prefix_space": True}),
    "no regular expression": set_to("pre_tokenizer", value=BYTE_LEVEL | {"use_regex": False}),
    "an end": set_to("post_processor", value=ENDED),
    "an added token less": lambda tree: tree["added_tokens"].pop(),
    "a token that takes the space after it": set_to("added_tokens", 3, "rstrip", value=True),
}


@pytest.fixture(scope="module")
def plain(tokenizer_folder: Path) -> Any:
    """The content of a byte-level tokenizer.json without a post-processor."""
    tree = json.loads((tokenizer_folder / "tokenizer.json").read_text())
    tree |= {"post_processor": None, "pre_tokenizer": BYTE_LEVEL, "normalizer": None}
    tree["model"] |= {"continuing_subword_prefix": None, "end_of_word_suffix": None}
    return tree


def ids_of(tree: Any) -> list[list[int]]:
    model = Model.from_str(json.dumps(tree))
    return [model.encode(text).ids for text in TEXTS]


def hash_of(tree: Any, **ids: int | None) -> str:
    """Return the hash of what the library writes of a tokenizer.json."""
    return hash_content(json.loads(Model.from_str(json.dumps(tree)).to_str()), IDS | ids)


@pytest.mark.parametrize("name", SAME)
def test_the_same_ids_have_one_hash(plain: Any, name: str) -> None:
    tree = copy.deepcopy(plain)
    SAME[name](tree)
    assert tree != plain
    assert ids_of(tree) == ids_of(plain)
    assert hash_of(tree) == hash_of(plain)


@pytest.mark.parametrize("name", OTHER)
def test_other_ids_have_another_hash(plain: Any, name: str) -> None:
    tree = copy.deepcopy(plain)
    OTHER[name](tree)
    assert ids_of(tree) != ids_of(plain)
    assert hash_of(tree) != hash_of(plain)


def test_other_special_ids_have_another_hash(plain: Any) -> None:
    hashes = {hash_of(plain, **{name: 7}) for name in IDS} | {hash_of(plain)}
    assert len(hashes) == 4


def test_bert_and_roberta_are_the_template_that_they_are(plain: Any) -> None:
    """transformers 5 writes a TemplateProcessing where 4 wrote BertProcessing."""
    bert = {"type": "BertProcessing", "sep": ["<|im_end|>", 3], "cls": ["<|im_start|>", 2]}
    roberta = bert | {"type": "RobertaProcessing", "trim_offsets": True, "add_prefix_space": True}
    start, end = (
        {"id": token, "ids": [number], "tokens": [token]}
        for token, number in (("<|im_start|>", 2), ("<|im_end|>", 3))
    )
    template = ENDED | {
        "single": [
            {"SpecialToken": {"id": "<|im_start|>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
            {"SpecialToken": {"id": "<|im_end|>", "type_id": 0}},
        ],
        "special_tokens": {"<|im_start|>": start, "<|im_end|>": end},
    }
    trees = [plain | {"post_processor": each} for each in (bert, roberta, template)]
    assert ids_of(trees[0]) == ids_of(trees[1]) == ids_of(trees[2]) != ids_of(plain)
    assert len({hash_of(tree) for tree in trees}) == 1


@pytest.fixture
def earlier(web: Web, monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Makes mdsmix give hashes as before: of the JSON as written."""
    ask = snapshot.ask_transformers

    def asked(*arguments: Any) -> dict[str, Any]:
        answer = ask(*arguments)
        ids = {key: answer[key] for key in IDS}
        return answer | {"hash": hash_bytes(json.loads(answer["files"]["tokenizer.json"]), ids)}

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MDSMIX_CACHE", str(web.folder / "earlier cache"))
        patch.setattr(snapshot, "ask_transformers", asked)
        yield patch


@pytest.fixture
def published(web: Web, earlier: pytest.MonkeyPatch) -> tuple[Web, str]:
    """A stream of documents and one of chats, of the earlier hash, and that hash."""
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
    (web.folder / "chats").mkdir()
    (web.folder / "chats/a.jsonl").write_text(f"{json.dumps({'messages': turns})}\n" * 40)
    web.holds([f"Document {n} of some." for n in range(400)])
    streams = {"web": documents("*.jsonl"), "chat": chats("chats/*.jsonl")}
    web.says(streams=streams, local=str(web.out))
    web.done()
    old = web.manifest.tokenizer.hash
    earlier.undo()
    web.patch.setenv("MDSMIX_CACHE", str(web.folder / "cache of today"))
    return web, old


def today(web: Web) -> str:
    return open_tokenizer(TokenizerSpec(name=str(web.tokenizer))).hash


def test_streams_of_the_earlier_hash_are_up_to_date(published: tuple[Web, str]) -> None:
    web, old = published
    assert today(web) != old
    shards = web.files
    assert "up to date" in web.done().out
    assert web.files == shards
    assert web.manifest.tokenizer.hash == old
    # A new stream of the mix takes the hash that its neighbours have.
    streams = {name: chats("chats/*.jsonl") for name in ("chat", "more")}
    web.says(streams={"web": documents("*.jsonl"), **streams}, local=str(web.out))
    web.done()
    assert manifest_of(web.out / "more/train").tokenizer.hash == old
    assert len([*web.out.glob("tokenizer-*")]) == 1


def test_a_stream_that_is_converted_alone_changes_no_other(published: tuple[Web, str]) -> None:
    """It takes today's hash, since no other stream is looked at; theirs stays."""
    web, old = published
    streams = {name: chats("chats/*.jsonl") for name in ("chat", "more")}
    web.says(streams={"web": documents("*.jsonl"), **streams}, local=str(web.out))
    web.done("--only", "more")
    assert "up to date" in web.done().out
    assert web.manifest.tokenizer.hash == old
    assert "tokenizer-differs" not in mdsmix("check", web.recipe).out


def test_a_difference_of_backends_is_known_under_the_earlier_hash(
    published: tuple[Web, str],
) -> None:
    """Workers note it under the hash of their stream, and the next plan reads it there."""
    web, old = published
    tokenizer = open_tokenizer(TokenizerSpec(name=str(web.tokenizer)))
    store_difference(replace(tokenizer, hash=old), Unequal(Fastokens.name(), "a text"))
    plans = plan_streams(open_recipe(web.recipe), Options())
    assert [plan.job.unequal for plan in plans] == [Fastokens.name()] * 2


def test_every_command_knows_the_earlier_hash(published: tuple[Web, str]) -> None:
    web, _ = published
    for words in (["check", web.recipe], ["check", web.out], ["plan", web.recipe, "--batch", 8]):
        answer = mdsmix(*words)
        assert (answer.code, "differs" in answer.out) == (0, False), answer
    train = web.folder / "train.yaml"
    done("render-yaml", web.recipe, "-o", train)
    done("check", train, "--lock")
    assert "whole, nothing to repair" in done("repair", web.train, "--recipe", web.recipe).out
    assert "answer-end-unknown" not in done("check", train).out


def test_a_lock_of_the_earlier_hash_holds(
    web: Web, earlier: pytest.MonkeyPatch, published: tuple[Web, str]
) -> None:
    """A YAML that was rendered before, whose lock names the tokenizer by its earlier hash."""
    train = web.folder / "train.yaml"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MDSMIX_CACHE", str(web.folder / "earlier cache"))
        done("render-yaml", web.recipe, "-o", train)
    assert published[1] in train.with_name("train.yaml.mix.lock").read_text()
    assert "differs" not in done("check", train, "--lock").out


def test_mixes_of_both_hashes_fit(published: tuple[Web, str]) -> None:
    web, old = published
    web.done(f"local={web.folder}/new")
    new = manifest_of(web.folder / "new/web/train").tokenizer.hash
    assert new != old
    answer = done("check", web.train, web.folder / "new/chat/train")
    assert "tokenizer-differs" not in answer.out
    done("leaks", web.train, "--eval", web.folder / "new/chat/train")


def test_another_tokenizer_is_another(published: tuple[Web, str], tmp_path: Path) -> None:
    web, old = published
    web.tokenizer = shutil.copytree(web.tokenizer, tmp_path / "other")
    tree = json.loads((web.tokenizer / "tokenizer.json").read_text())
    tree["model"]["merges"].pop(0)
    (web.tokenizer / "tokenizer.json").write_text(json.dumps(tree))
    streams = {"web": documents("*.jsonl"), "chat": chats("chats/*.jsonl")}
    web.says(streams=streams, local=str(web.out))
    assert "tokenizer-differs" in mdsmix("check", web.recipe).out
    web.done()
    assert web.manifest.tokenizer.hash not in (old, "")


def test_a_folder_that_is_not_the_cards_proves_nothing(published: tuple[Web, str]) -> None:
    """Its files were changed after publication: the hash stays what the manifest says."""
    web, _ = published
    (file,) = web.out.glob("tokenizer-*/tokenizer.json")
    file.write_text(file.read_text().replace("<|im_end|>", "<|im_stop|>"))
    assert mdsmix("check", web.train, web.recipe).code == 2
    assert "tokenizer-differs" in mdsmix("check", web.recipe).out
