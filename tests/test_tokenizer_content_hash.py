"""Two tokenizers have the same hash if, and only if, they give the same ids. Streams with the hash
of an earlier mdsmix keep it.

The oracle of the first part is the tokenizers library, which tokenizes the texts. In the second
part streams are published under the hash that mdsmix gave before: that of the JSON as it was
written.
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

from mdsmix.cache import cache_folder
from mdsmix.conversion.planning import Options, plan_streams
from mdsmix.encode.backend_files import name_fastokens
from mdsmix.encode.backends import Unequal, store_difference
from mdsmix.kinds import open_recipe
from mdsmix.recipe import TokenizerSpec
from mdsmix.tokenizer import snapshot
from mdsmix.tokenizer.card import open_tokenizer
from mdsmix.tokenizer.content_hash import hash_bytes, hash_content
from tests.converting import Project, chats, documents, manifest_of, mdsmix, run_ok

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
    """Return a change of a tokenizer.json, which sets the value at this path."""

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
    """Return the content of a byte-level tokenizer.json without a post-processor."""
    tree = json.loads((tokenizer_folder / "tokenizer.json").read_text())
    tree |= {"post_processor": None, "pre_tokenizer": BYTE_LEVEL, "normalizer": None}
    tree["model"] |= {"continuing_subword_prefix": None, "end_of_word_suffix": None}
    return tree


def encode_texts(tree: Any) -> list[list[int]]:
    model = Model.from_str(json.dumps(tree))
    return [model.encode(text).ids for text in TEXTS]


def hash_written(tree: Any, **ids: int | None) -> str:
    """Return the hash of a tokenizer.json as the library writes it."""
    return hash_content(json.loads(Model.from_str(json.dumps(tree)).to_str()), IDS | ids)


@pytest.mark.parametrize("name", SAME)
def test_the_same_ids_have_the_same_hash(plain: Any, name: str) -> None:
    tree = copy.deepcopy(plain)
    SAME[name](tree)
    assert tree != plain
    assert encode_texts(tree) == encode_texts(plain)
    assert hash_written(tree) == hash_written(plain)


@pytest.mark.parametrize("name", OTHER)
def test_other_ids_have_another_hash(plain: Any, name: str) -> None:
    tree = copy.deepcopy(plain)
    OTHER[name](tree)
    assert encode_texts(tree) != encode_texts(plain)
    assert hash_written(tree) != hash_written(plain)


def test_other_special_ids_have_another_hash(plain: Any) -> None:
    hashes = {hash_written(plain, **{name: 7}) for name in IDS} | {hash_written(plain)}
    assert len(hashes) == 4


def test_bert_and_roberta_processing_equal_their_templates(plain: Any) -> None:
    """transformers 5 writes a TemplateProcessing instead of BertProcessing."""
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
    assert (
        encode_texts(trees[0])
        == encode_texts(trees[1])
        == encode_texts(trees[2])
        != encode_texts(plain)
    )
    assert len({hash_written(tree) for tree in trees}) == 1


@pytest.fixture
def earlier(project: Project, monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Make mdsmix give hashes as before: of the JSON as it was written."""
    ask = snapshot.ask_transformers

    def asked(*arguments: Any) -> dict[str, Any]:
        answer = ask(*arguments)
        ids = {key: answer[key] for key in IDS}
        return answer | {"hash": hash_bytes(json.loads(answer["files"]["tokenizer.json"]), ids)}

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MDSMIX_CACHE", str(project.folder / "earlier cache"))
        patch.setattr(snapshot, "ask_transformers", asked)
        yield patch


@pytest.fixture
def published(project: Project, earlier: pytest.MonkeyPatch) -> tuple[Project, str]:
    """Publish a stream of documents and one of chats under the earlier hash. Return the project and
    that hash.
    """
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
    (project.folder / "chats").mkdir()
    (project.folder / "chats/a.jsonl").write_text(f"{json.dumps({'messages': turns})}\n" * 40)
    project.write_source([f"Document {n} of some." for n in range(400)])
    streams = {"web": documents("*.jsonl"), "chat": chats("chats/*.jsonl")}
    project.configure(streams=streams, local=str(project.out))
    project.convert_ok()
    old = project.manifest.tokenizer.hash
    earlier.undo()
    project.patch.setenv("MDSMIX_CACHE", str(project.folder / "cache of today"))
    return project, old


def hash_today(project: Project) -> str:
    return open_tokenizer(TokenizerSpec(name=str(project.tokenizer))).hash


def test_streams_of_the_earlier_hash_are_up_to_date(published: tuple[Project, str]) -> None:
    project, old = published
    assert hash_today(project) != old
    shards = project.files
    # The new cache knows no sources, so they are read, but nothing is converted.
    assert "work units reused" in project.convert_ok().out
    # Today's hash is kept in the cache; if that file is damaged, it is computed again.
    [kept] = cache_folder().glob("tokenizer_hashes/*")
    for content in (b"", b"other", b"\xff"):
        kept.write_bytes(content)
        assert "up to date" in project.convert_ok().out
        assert kept.read_text() == hash_today(project)
    assert project.files == shards
    assert project.manifest.tokenizer.hash == old
    # A new stream of the mix takes the hash that its neighbours have.
    streams = {name: chats("chats/*.jsonl") for name in ("chat", "more")}
    project.configure(streams={"web": documents("*.jsonl"), **streams}, local=str(project.out))
    project.convert_ok()
    assert manifest_of(project.out / "more/train").tokenizer.hash == old
    assert len([*project.out.glob("tokenizer-*")]) == 1


def test_a_stream_that_is_converted_alone_changes_no_other(published: tuple[Project, str]) -> None:
    """It takes today's hash, since no other stream is read. The others keep theirs."""
    project, old = published
    streams = {name: chats("chats/*.jsonl") for name in ("chat", "more")}
    project.configure(streams={"web": documents("*.jsonl"), **streams}, local=str(project.out))
    project.convert_ok("--only", "more")
    assert "up to date" in project.convert_ok().out
    assert project.manifest.tokenizer.hash == old
    assert "tokenizer-differs" not in mdsmix("check", project.recipe).out


def test_a_difference_of_backends_is_known_under_the_earlier_hash(
    published: tuple[Project, str],
) -> None:
    """Workers store it under the hash of their stream, and the next plan finds it there."""
    project, old = published
    tokenizer = open_tokenizer(TokenizerSpec(name=str(project.tokenizer)))
    store_difference(replace(tokenizer, hash=old), Unequal(name_fastokens(), "a text"))
    plans = plan_streams(open_recipe(project.recipe), Options())
    assert [plan.job.unequal for plan in plans] == [name_fastokens()] * 2


def test_every_command_accepts_the_earlier_hash(published: tuple[Project, str]) -> None:
    project, _ = published
    for words in (
        ["check", project.recipe],
        ["check", project.out],
        ["plan", project.recipe, "--batch", 8],
    ):
        answer = mdsmix(*words)
        assert (answer.code, "differs" in answer.out) == (0, False), answer
    train = project.folder / "train.yaml"
    run_ok("render-yaml", project.recipe, "-o", train)
    run_ok("check", train, "--lock")
    assert (
        "whole, nothing to repair"
        in run_ok("repair", project.train, "--recipe", project.recipe).out
    )
    assert "answer-end-unknown" not in run_ok("check", train).out


def test_a_lock_with_the_earlier_hash_is_accepted(
    project: Project, earlier: pytest.MonkeyPatch, published: tuple[Project, str]
) -> None:
    """The lock of a YAML that was rendered before has the tokenizer's earlier hash."""
    train = project.folder / "train.yaml"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MDSMIX_CACHE", str(project.folder / "earlier cache"))
        run_ok("render-yaml", project.recipe, "-o", train)
    assert published[1] in train.with_name("train.yaml.mix.lock").read_text()
    assert "differs" not in run_ok("check", train, "--lock").out


def test_streams_of_both_hashes_can_be_mixed(published: tuple[Project, str]) -> None:
    project, old = published
    project.convert_ok(f"local={project.folder}/new")
    new = manifest_of(project.folder / "new/web/train").tokenizer.hash
    assert new != old
    answer = run_ok("check", project.train, project.folder / "new/chat/train")
    assert "tokenizer-differs" not in answer.out
    run_ok("leaks", project.train, "--eval", project.folder / "new/chat/train")


def test_another_tokenizer_differs_from_the_earlier_hash(
    published: tuple[Project, str], tmp_path: Path
) -> None:
    project, old = published
    project.tokenizer = shutil.copytree(project.tokenizer, tmp_path / "other")
    tree = json.loads((project.tokenizer / "tokenizer.json").read_text())
    tree["model"]["merges"].pop(0)
    (project.tokenizer / "tokenizer.json").write_text(json.dumps(tree))
    streams = {"web": documents("*.jsonl"), "chat": chats("chats/*.jsonl")}
    project.configure(streams=streams, local=str(project.out))
    assert "tokenizer-differs" in mdsmix("check", project.recipe).out
    project.convert_ok()
    assert project.manifest.tokenizer.hash not in (old, "")


def test_a_published_folder_that_was_changed_is_not_used(published: tuple[Project, str]) -> None:
    """Its files were changed after publication, so the hash remains that of the manifest."""
    project, _ = published
    (file,) = project.out.glob("tokenizer-*/tokenizer.json")
    file.write_text(file.read_text().replace("<|im_end|>", "<|im_stop|>"))
    assert mdsmix("check", project.train, project.recipe).code == 2
    assert "tokenizer-differs" in mdsmix("check", project.recipe).out
