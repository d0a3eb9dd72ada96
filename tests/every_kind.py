"""Streams of every kind for the tests of exports, and what each of their rows must be by mdsmix's
own loader, which makes one row of one sample and shares no code with an export.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mdsmix.shards.manifest import Manifest
from mdsmix.shards.token_ids import decode_preference
from tests.converting import (
    chats,
    documents,
    manifest_of,
    pairs,
    read_samples,
    run_recipe,
    write_jsonl,
    write_recipe,
)
from tests.corpus import write_corpus

ROW = 64
"max_seq_len of all streams: many pairs and conversations of the corpus are cut."


class Row(NamedTuple):
    """A row as a trainer must see it."""

    ids: list[int]
    labels: list[int]
    "-100 for tokens that are not trained, and for the first token of each document."
    lengths: list[int]
    "The tokens of each of its documents."


@dataclass(frozen=True)
class Streams:
    """Published streams, below one folder."""

    recipe: Path
    preferences: Path
    "The recipe of the preferences, which need a loader of their own."
    unpaired: Path
    "The recipe of the unpaired preferences."

    @cached_property
    def out(self) -> Path:
        return self.recipe.parent / "out"

    def url(self, name: str) -> Path:
        return self.out / name / "train"

    def manifest(self, name: str) -> Manifest:
        return manifest_of(self.url(name))

    def rows(self, name: str) -> list[Row]:
        return expected_rows(self.url(name))


PLAIN = ("concat", "document", "packed_documents")
FINETUNING = (
    *("pairs", "conversations", "every_answer", "answer_parts"),
    *("packed_pairs", "packed_chats", "packed_parts"),
)
PACKED = ("packed_documents", "packed_pairs", "packed_chats", "packed_parts")


def publish_every_kind(folder: Path, tokenizer: Path) -> Streams:
    """Convert a stream of each kind but images. Streams of plain text have two shards or more."""
    corpus = write_corpus(folder, (12, 60, 60, 30, 1))
    web, docs, faq, chat = (
        corpus / name for name in ("web.jsonl.zst", "docs.jsonl", "faq.jsonl", "chat.jsonl")
    )
    streams = {
        "concat": documents(web, layout="concat"),
        "document": documents(docs, layout="document"),
        "packed_documents": documents(docs, layout="document", pack=True),
        "pairs": pairs(faq),
        "conversations": chats(chat),
        "packed_pairs": pairs(faq, pack=True),
        "packed_chats": chats(chat, pack=True),
    }
    shared: dict[str, Any] = {"max_seq_len": ROW, "train_loader": {"name": "mdsmix"}}
    recipe = write_recipe(folder, tokenizer, streams=streams, **shared)
    run_recipe(recipe)
    # All answers of a conversation are trained, and it begins with a trained prompt.
    every = folder / "every"
    every.mkdir()
    targets = {"target_responses": "all", "target_prompts": "length>=45"}
    everything = write_recipe(
        every, tokenizer, streams={"every_answer": chats(chat)}, local=str(folder / "out"),
        **shared, **targets,
    )  # fmt: skip
    run_recipe(everything)
    _publish_answer_parts(folder, tokenizer, shared)
    return Streams(
        recipe, _publish_preferences(folder, tokenizer), _publish_unpaired(folder, tokenizer)
    )


def _publish_answer_parts(folder: Path, tokenizer: Path, shared: dict[str, Any]) -> None:
    """Convert conversations whose answers are trained without their reasoning."""
    home = folder / "thinking"
    records = []
    for number in range(30):
        messages = []
        for turn in range(1 + number % 3):
            thought = f"<think>{'hm ' * (number % 5)}</think>"
            messages.append({"role": "user", "content": f"Number {turn}?"})
            messages.append({"role": "assistant", "content": f"{thought}It is {number}."})
        records.append({"messages": messages})
    source = write_jsonl(home / "a.jsonl", records)
    parts = {"reasoning": False}
    streams = {
        "answer_parts": chats(source, train_parts=parts),
        "packed_parts": chats(source, train_parts=parts, pack=True),
    }
    recipe = write_recipe(
        home, tokenizer, streams=streams, local=str(folder / "out"), target_responses="all",
        **shared,
    )  # fmt: skip
    run_recipe(recipe)


def _publish_preferences(folder: Path, tokenizer: Path) -> Path:
    records = []
    for number in range(20):
        # The answers of every third preference do not fit.
        records.append(
            {
                "prompt": f"Question {number}?" * (1 + number % 4),
                "chosen": "yes " * (1 + 40 * (number % 3)),
                "rejected": "no " * (2 + number),
                "chosen_reward": number + 0.5,
                "rejected_reward": -number,
            }
        )
    home = folder / "preferred"
    source = {"path": str(write_jsonl(home / "a.jsonl", records))}
    fields = ("prompt", "chosen", "rejected", "chosen_reward", "rejected_reward")
    source |= {field: field for field in fields}
    stream = {"kind": "preference", "source": source}
    recipe = write_recipe(
        home, tokenizer, streams={"preferences": stream}, max_seq_len=ROW,
        local=str(folder / "out"), train_loader={"name": "pairwise_preference"},
    )  # fmt: skip
    run_recipe(recipe)
    return recipe


def make_unpaired_records() -> list[dict[str, Any]]:
    """Return unpaired preferences of texts, of which every third does not fit into a row."""
    return [
        {
            "prompt": f"Question {number}?" * (1 + number % 4),
            "completion": " yes" * (1 + 30 * (number % 3)),
            "label": number % 4 > 0,
        }
        for number in range(20)
    ]


def _publish_unpaired(folder: Path, tokenizer: Path) -> Path:
    home = folder / "labelled"
    source = {"path": str(write_jsonl(home / "a.jsonl", make_unpaired_records()))}
    source |= {field: field for field in ("prompt", "completion", "label")}
    recipe = write_recipe(
        home, tokenizer, streams={"unpaired": {"kind": "preference", "source": source}},
        max_seq_len=ROW, local=str(folder / "out"), train_loader={"name": "unpaired_preference"},
    )  # fmt: skip
    run_recipe(recipe)
    return recipe


def expected_rows(url: Path) -> list[Row]:
    """Return the rows of a stream by mdsmix's own loader. It needs torch."""
    from mdsmix.load.training_rows import RowRules, TokenIds, make_training_row

    manifest = manifest_of(url)
    encoding = manifest.encoding
    rules = RowRules(
        ids=TokenIds(eos=None if encoding.kind == "pretraining" else manifest.tokenizer.eos_id),
        max_seq_len=encoding.max_seq_len,
        target_prompts=encoding.target_prompts,
        target_responses=encoding.target_responses,
    )
    rows = []
    for sample in read_samples(url):
        row = make_training_row(sample, rules)
        documents = np.zeros(len(row.input_ids), int) if row.documents is None else row.documents
        begins = np.diff(documents, prepend=-1) != 0
        labels = np.where(begins, -100, row.labels)
        rows.append(Row(row.input_ids.tolist(), labels.tolist(), np.bincount(documents).tolist()))
    return rows


def expected_preferences(url: Path) -> list[Mapping[str, Any]]:
    """Return the preferences of a stream, by the names of TRL's columns."""
    rows = []
    for sample in read_samples(url):
        prompt, chosen, rejected = (ids.tolist() for ids in decode_preference(sample))
        rewards = {key: sample[key] for key in ("chosen_reward", "rejected_reward")}
        rows.append(
            {"prompt_ids": prompt, "chosen_ids": chosen, "rejected_ids": rejected} | rewards
        )
    return rows


def expected_unpaired(url: Path) -> list[Mapping[str, Any]]:
    """Return the unpaired preferences of a stream, by the names of TRL's columns."""
    rows = []
    for sample in read_samples(url):
        prompt, completion = (sample[name].tolist() for name in ("prompt_ids", "completion_ids"))
        label = bool(sample["label"])
        rows.append({"prompt_ids": prompt, "completion_ids": completion, "label": label})
    return rows
