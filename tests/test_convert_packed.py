"""`pack: true`: the samples of the unpacked stream, whole and each once, in rows that say where they begin; and all that is done
to a stream works with rows of several records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mdsmix.encode.labels import Targets
from mdsmix.shards.index import read_index
from mdsmix.shards.shard_samples import Samples, read_whole
from mdsmix.shards.token_ids import documents_of, tokens_of, turns_of
from mdsmix.shards.verification import decode
from mdsmix.storage import locate
from tests.converting import (
    chats,
    documents,
    files,
    manifest_of,
    mdsmix,
    pairs,
    run_recipe,
    samples,
    windows,
    write_jsonl,
    write_recipe,
)
from tests.published import PACKED, PACKED_ROW, publish

WORDS = [
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
]


def text(number: int, most: int = 12) -> str:
    return " ".join(WORDS[(number * 7 + i) % 12] for i in range(1 + number * 5 % most))


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


def taught(tokens: list[int], trained: list[bool]) -> list[tuple[tuple[int, ...], int]]:
    """(context, token) of each trained token."""
    return [(tuple(tokens[:i]), t) for i, t in enumerate(tokens) if trained[i]]


def of_packed(folder: Path) -> list[tuple[tuple[int, ...], int]]:
    rows = [document for row in samples(folder) for document in documents_of(row)]
    return sorted(p for d in rows for p in taught(d.ids.tolist(), d.trained.tolist()))


def of_unpacked(folder: Path, targets: Targets, eos: int | None) -> list[Any]:
    """As the finetuning loader trains them: EOS behind the last response, the policies, the cut."""
    found = []
    for sample in samples(folder):
        *before, (prompt, response) = turns_of(sample)
        if response[-1] != eos:
            response = np.append(response, eos)
        tokens, trained = list[int](), list[bool]()
        for number, (one, other) in enumerate([*before, (prompt, response)]):
            tokens += [*one.tolist(), *other.tolist()]
            trained += [targets.trains_prompt(len(one))] * len(one)
            trained += [targets.trains_response(number == len(before))] * len(other)
        trained[0] = False
        found += taught(tokens[: targets.max_seq_len], trained[: targets.max_seq_len])
    return sorted(found)


@pytest.mark.parametrize(
    "policy", [("none", "last"), ("none", "all"), ("all", "last"), ("length>=4", "all")]
)
def test_what_is_trained_is_what_the_unpacked_stream_trains(
    tmp_path: Path, tokenizer_folder: Path, policy: tuple[str, str]
) -> None:
    source = write_jsonl(tmp_path / "all.jsonl", records())
    shared = {
        "max_seq_len": 64,
        "target_prompts": policy[0],
        "target_responses": policy[1],
    }
    for folder, settings in (("packed", {"pack": True}), ("plain", {})):
        (tmp_path / folder).mkdir()
        loader = {} if settings else {"train_loader": {"name": "finetuning"}}
        recipe = write_recipe(
            tmp_path / folder,
            tokenizer_folder,
            streams=streams(source, **settings),
            **shared | loader,
        )
        run_recipe(recipe)
    for name in KINDS:
        packed, plain = (tmp_path / f / "out" / name / "train" for f in ("packed", "plain"))
        manifest, before = manifest_of(packed), manifest_of(plain)
        eos = manifest.tokenizer.eos_id
        prompts, responses = policy if name != "docs" else ("none", "last")
        targets = Targets(max_seq_len=64, target_prompts=prompts, target_responses=responses)
        assert of_packed(packed) == of_unpacked(plain, targets, eos), name
        assert manifest.totals.loss_tokens == before.totals.loss_tokens == len(of_packed(packed))
        assert manifest.totals.documents == before.totals.samples > manifest.totals.samples
        assert manifest.records == before.records
        rows = samples(packed)
        assert manifest.totals.tokens == sum(len(row["input_ids"]) for row in rows)
        assert manifest.totals.longest == max(len(row["input_ids"]) for row in rows) <= 64
        assert all(row["starts"].dtype == np.int32 and row["starts"][0] == 0 for row in rows)
        assert mdsmix("verify", packed).code == 0


def packed_chats(
    folder: Path, tokenizer: Path, source: Path, length: int = 256, **settings: Any
) -> Path:
    folder.mkdir(exist_ok=True)
    stream = chats(source, pack=True, **settings)
    stream["source"]["id"] = "id"
    return write_recipe(folder, tokenizer, streams={"chat": stream}, max_seq_len=length)


def test_bytes_do_not_depend_on_the_workers(
    tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch, processes: None
) -> None:
    windows(monkeypatch, 4000)
    source = write_jsonl(tmp_path / "all.jsonl", records(100))
    found = []
    for workers in (1, 2):
        recipe = packed_chats(tmp_path / str(workers), tokenizer_folder, source)
        run_recipe(recipe, workers=workers)
        found.append(files(tmp_path / str(workers) / "out" / "chat" / "train"))
    assert len(manifest_of(tmp_path / "1/out/chat/train").parts) > 3
    assert found[0] == found[1]


def test_an_edit_touches_its_unit_alone(
    tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    windows(monkeypatch, 4000)
    all_of = records(100)
    source = write_jsonl(tmp_path / "all.jsonl", all_of)
    recipe = packed_chats(tmp_path, tokenizer_folder, source)
    run_recipe(recipe)
    before = [part.key for part in manifest_of(tmp_path / "out/chat/train").parts]
    all_of[0]["messages"][0]["content"] += " more"
    write_jsonl(source, all_of)
    run_recipe(recipe)
    after = [part.key for part in manifest_of(tmp_path / "out/chat/train").parts]
    assert len({*before} - {*after}) == 1
    assert [key for key in after if key in before] == before[1:]


def names_of(folder: Path) -> list[list[str]]:
    """The ids that inspect shows of every row."""
    answer = mdsmix("inspect", folder, "-n", 1000, "--json")
    assert answer.code == 0, answer.err
    return [shown["id"] for shown in json.loads(answer.out)["shown"]]


def test_each_document_of_a_row_is_named_and_duplicates_leave(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    source = write_jsonl(tmp_path / "all.jsonl", [*records(30), *records(5)])
    recipe = packed_chats(tmp_path, tokenizer_folder, source, duplicates="drop")
    run_recipe(recipe)
    folder = tmp_path / "out/chat/train"
    manifest, names = manifest_of(folder), names_of(folder)
    assert manifest.records.filtered == {"duplicate": 5}
    assert sorted(n for row in names for n in row) == sorted(f"r{n}" for n in range(30))
    assert [len(row) for row in names] == [len(row["starts"]) for row in samples(folder)]
    # The names are those of the documents: a record's answer stands in the row that is named after it.
    answer = mdsmix("inspect", folder, "-n", 1, "--tokenizer", str(tokenizer_folder))
    assert f"ids {', '.join(names[0])}" in answer.out
    assert answer.out.count("⟪document ") == len(names[0])
    assert "30 documents in" in answer.out


def test_a_record_stands_in_the_row_that_is_named_after_it(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    unique = [{"id": f"r{n}", "prompt": f"number {n}?", "response": text(n)} for n in range(40)]
    source = write_jsonl(tmp_path / "all.jsonl", unique)
    stream = pairs(source, pack=True)
    stream["source"]["id"] = "id"
    recipe = write_recipe(tmp_path, tokenizer_folder, streams={"p": stream}, max_seq_len=64)
    run_recipe(recipe)
    answer = mdsmix(
        "inspect", tmp_path / "out/p/train", "-n", 100, "--json", "--tokenizer", tokenizer_folder
    )
    for shown in json.loads(answer.out)["shown"]:
        for number, name in enumerate(shown["id"]):
            said = "".join(s["text"] for s in shown["sample"] if s["document"] == number)
            assert said.startswith(f"number {name[1:]}?")


@pytest.mark.parametrize(
    "settings", [{}, {"too_long": "filter"}, {"too_long": "first_turns"}, {"holdout": "50%"}]
)
def test_other_settings_stand_beside_it(
    tmp_path: Path, tokenizer_folder: Path, settings: dict[str, Any]
) -> None:
    source = write_jsonl(tmp_path / "all.jsonl", [*records(40), {"messages": 1}])
    recipe = packed_chats(tmp_path, tokenizer_folder, source, 64, **settings)
    outcomes = run_recipe(recipe)
    read = 0
    for outcome in outcomes:
        manifest = outcome.manifest
        assert manifest.records.adds_up
        assert manifest.records.bad == 1
        assert manifest.totals.documents == manifest.records.written > 0
        assert manifest.totals.longest <= 64
        assert not manifest.totals.cut_rows
        read = manifest.records.read
    assert read == 41
    assert mdsmix("convert", recipe, "--limit", 10).code == 0


def test_a_damaged_shard_is_made_again(tmp_path: Path, tokenizer_folder: Path) -> None:
    source = write_jsonl(tmp_path / "all.jsonl", records(40))
    recipe = packed_chats(tmp_path, tokenizer_folder, source)
    run_recipe(recipe)
    folder = tmp_path / "out/chat/train"
    before = files(folder)
    (shard,) = folder.glob("*.mds")
    shard.write_bytes(shard.read_bytes()[:-1])
    assert mdsmix("verify", folder).code == 3
    assert mdsmix("repair", folder, "--recipe", recipe).code == 0
    assert files(folder) == before


def test_verify_sees_a_document_that_begins_nowhere(tmp_path: Path, tokenizer_folder: Path) -> None:
    source = write_jsonl(tmp_path / "all.jsonl", records(40))
    run_recipe(packed_chats(tmp_path, tokenizer_folder, source))
    folder = locate(tmp_path / "out/chat/train")
    (shard,) = read_index(folder).shards
    whole = read_whole(folder, shard)
    assert decode(shard, whole) is not None
    last = bytearray(whole.data)
    last[-4:] = (1 << 20).to_bytes(4, "little")  # the last column of the last row is `starts`
    with pytest.raises(ValueError, match="do not begin where it says"):
        decode(shard, Samples(bytes(last), whole.offsets))


def test_the_first_token_of_a_document_counts_as_trained_for_nobody(tmp_path: Path) -> None:
    """Whatever the mask of a stream of another tool says."""
    at = locate(publish(tmp_path, PACKED, [PACKED_ROW | {"loss_mask": [1] * 6}] * 3) / "train")
    (shard,) = read_index(at).shards
    found = tokens_of(shard, read_whole(at, shard))
    assert found is not None
    assert found.trained is not None
    assert found.trained.tolist() == [4, 4, 4]
    assert found.responses.tolist() == [4, 2] * 3


def test_the_offline_mix_of_two_packed_streams_is_packed(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    source = write_jsonl(tmp_path / "all.jsonl", records(40))
    both = {name: stream for name, stream in streams(source, pack=True).items() if name != "docs"}
    recipe = write_recipe(tmp_path, tokenizer_folder, streams=both, max_seq_len=64)
    run_recipe(recipe)
    answer = mdsmix("mix", recipe, "--out", tmp_path / "one")
    assert answer.code == 0, answer.err
    parts = [manifest_of(tmp_path / "out" / name / "train").totals for name in both]
    mixed = manifest_of(tmp_path / "one/train")
    assert mixed.totals.documents == sum(t.documents for t in parts)
    assert mixed.totals.loss_tokens == sum(t.loss_tokens for t in parts)
    assert mdsmix("verify", tmp_path / "one").code == 0


@pytest.mark.parametrize(
    ("make", "settings", "more", "said"),
    [
        (documents, {}, {}, "set layout: document"),
        (chats, {"columns": "compact"}, {}, "columns: compact"),
        (pairs, {}, {"decoder_only_format": False}, "decoder_only_format: false"),
        (pairs, {}, {"train_loader": {"name": "finetuning"}}, "train_loader.name: mdsmix"),
        (
            documents,
            {"layout": "document"},
            {"train_loader": {"name": "text"}},
            "train_loader.name: mdsmix",
        ),
    ],
)
def test_what_cannot_be_packed_is_one_sentence(
    tmp_path: Path,
    tokenizer_folder: Path,
    make: Any,
    settings: dict[str, Any],
    more: dict[str, Any],
    said: str,
) -> None:
    source = write_jsonl(tmp_path / "all.jsonl", records(3))
    stream = make(source, pack=True, **settings)
    recipe = write_recipe(tmp_path, tokenizer_folder, streams={"s": stream}, **more)
    answer = mdsmix("convert", recipe)
    assert answer.code == 2
    assert "streams.s: pack: true" in answer.err or "streams.s: columns: compact" in answer.err
    assert said in answer.err


def test_a_published_stream_is_not_packed_again(tmp_path: Path, tokenizer_folder: Path) -> None:
    recipe = write_recipe(
        tmp_path, tokenizer_folder, streams={"s": {"local": str(tmp_path), "pack": True}}
    )
    answer = mdsmix("check", recipe)
    assert answer.code == 2
    assert "pack is for streams with a source; take it out" in answer.err
