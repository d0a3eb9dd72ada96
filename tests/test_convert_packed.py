"""`pack: true`: the samples of the unpacked stream, whole and each once, in rows that say where they begin; and all that is done
to a stream works with rows of several records."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mdsmix.ragged import Ragged
from mdsmix.shards.index import read_index
from mdsmix.shards.shard_samples import read_whole
from mdsmix.shards.token_ids import documents_of, tokens_of
from mdsmix.shards.verification import decode
from mdsmix.storage import locate
from tests.converting import (
    Web,
    chats,
    documents,
    done,
    manifest_of,
    mdsmix,
    pairs,
    refused,
    run_recipe,
    samples,
)
from tests.published import PACKED, PACKED_ROW, publish

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


def text(number: int, most: int = 12) -> str:
    return " ".join(WORDS[(number * 7 + i) % 10] for i in range(1 + number * 5 % most))


def records(count: int = 60) -> list[dict[str, Any]]:
    """Of every kind at once; the longest conversations have some 100 tokens."""
    return [
        {
            "id": f"r{n}",
            "text": text(n),
            "prompt": text(n, 5),
            "response": text(n + 1, 7),
            "messages": [
                {"role": role, "content": text(n + turn, 9)}
                for turn in range(1 + n % 3)
                for role in ("user", "assistant")
            ],
        }
        for n in range(count)
    ]


KINDS = {"docs": documents, "pairs": pairs, "chat": chats}


def streams(path: object, **settings: Any) -> dict[str, Any]:
    found = {name: make(path, **settings) for name, make in KINDS.items()}
    found["docs"]["layout"] = "document"
    for stream in found.values():
        stream["source"]["id"] = "id"
    return found


@pytest.mark.parametrize("policy", [("none", "last"), ("length>=4", "all")])
def test_a_packed_stream_trains_as_much_as_the_unpacked(web: Web, policy: tuple[str, str]) -> None:
    """What it is with_torch/test_load_packed.py compares."""
    source = web.holds(records())
    shared = {"max_seq_len": 64} | dict(
        zip(("target_prompts", "target_responses"), policy, strict=True)
    )
    web.says(streams=streams(source, pack=True), **shared)
    run_recipe(web.recipe)
    web.says(streams=streams(source), train_loader={"name": "finetuning"}, **shared)
    unpacked = web.anew().out
    for name in KINDS:
        packed, plain = (manifest_of(at / name / "train") for at in (web.out, unpacked))
        rows, totals = samples(web.out / name / "train"), packed.totals
        trained = sum(is_trained[1:].sum() for row in rows for _, is_trained in documents_of(row))
        assert totals.loss_tokens == plain.totals.loss_tokens == trained
        assert totals.documents == plain.totals.samples > totals.samples
        assert packed.records == plain.records
        assert totals.tokens == sum(len(row["input_ids"]) for row in rows)
        assert totals.longest == max(len(row["input_ids"]) for row in rows) <= 64
        assert all(row["starts"].dtype == np.int32 and row["starts"][0] == 0 for row in rows)


def test_each_document_of_a_row_is_named_and_duplicates_leave(web: Web) -> None:
    """A record stands in the row that is named after it."""
    unique = [{"id": f"r{n}", "prompt": f"number {n}?", "response": text(n)} for n in range(40)]
    web.holds([*unique, *unique[:5]])
    stream = streams("a.jsonl", pack=True, duplicates="drop")["pairs"]
    web.says(stream, max_seq_len=64).run()
    command = ("inspect", web.train, "--tokenizer", web.tokenizer, "-n")
    shown = json.loads(done(*command, 1000, "--json").out)["shown"]
    names = [row["ids"] for row in shown]
    assert web.manifest.records.filtered == {"duplicate": 5}
    assert sorted(n for row in names for n in row) == sorted(f"r{n}" for n in range(40))
    assert [len(row) for row in names] == [len(row["starts"]) for row in samples(web.train)]
    for row in shown:
        for number, name in enumerate(row["ids"]):
            said = "".join(s["text"] for s in row["sample"] if s["document"] == number)
            assert said.startswith(f"number {name[1:]}?")
    first = done(*command, 1).out
    assert f"ids {', '.join(names[0])}" in first
    assert first.count("⟪document ") == len(names[0])
    assert web.manifest.totals.documents == 40


def test_verify_sees_a_document_that_begins_nowhere(web: Web) -> None:
    web.holds(records(40))
    web.says(chats("a.jsonl", pack=True), max_seq_len=256).run()
    folder = locate(web.train)
    (shard,) = read_index(folder).shards
    whole = read_whole(folder, shard)
    assert decode(shard, whole) is not None
    last = whole.values.copy()
    last[-4:] = [0, 0, 16, 0]  # the last column of the last row is `starts`
    with pytest.raises(ValueError, match="do not begin where it says"):
        decode(shard, Ragged(last, whole.offsets))


def test_the_first_token_of_a_document_counts_as_trained_for_nobody(tmp_path: Path) -> None:
    """Whatever the mask of a stream of another tool says."""
    at = locate(publish(tmp_path, PACKED, [PACKED_ROW | {"loss_mask": [1] * 6}] * 3) / "train")
    (shard,) = read_index(at).shards
    found = tokens_of(shard, read_whole(at, shard))
    assert found.trained.tolist() == [4, 4, 4]
    assert found.responses.tolist() == [4, 2] * 3


def test_the_offline_mix_of_two_packed_streams_is_packed(web: Web) -> None:
    both = streams(web.holds(records(40)), pack=True)
    del both["docs"]
    web.says(streams=both, max_seq_len=64)
    parts = [outcome.manifest.totals for outcome in run_recipe(web.recipe)]
    done("mix", web.recipe, "--out", web.folder / "one")
    mixed = manifest_of(web.folder / "one/train").totals
    assert mixed.documents == sum(of.documents for of in parts)
    assert mixed.loss_tokens == sum(of.loss_tokens for of in parts)
    done("verify", web.folder / "one")


PACK, BY = "streams.web: pack: true", "train_loader.name: mdsmix"
UNPACKABLE: list[tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]] = [
    (documents("a.jsonl"), {}, (PACK, "set layout: document")),
    (chats("a.jsonl", columns="compact"), {}, ("streams.web: columns: compact",)),
    (pairs("a.jsonl"), {"decoder_only_format": False}, (PACK, "decoder_only_format: false")),
    (pairs("a.jsonl"), {"train_loader": {"name": "finetuning"}}, (PACK, BY)),
    (documents("a.jsonl", layout="document"), {"train_loader": {"name": "text"}}, (PACK, BY)),
    ({"local": "/nowhere"}, {}, ("pack is for streams with a source; take it out",)),
]


def test_what_cannot_be_packed_is_one_sentence(web: Web) -> None:
    web.holds(records(3))
    for stream, more, said in UNPACKABLE:
        web.says(stream | {"pack": True}, **more)
        refused(mdsmix("convert" if "source" in stream else "check", web.recipe), 2, *said)
