"""The batches of LLM-Foundry's own loaders, with the Streaming that it pins, are those of `mdsmix.load` and those that a preview tells."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.converting import documents
from tests.foundry.conftest import Foundry
from tests.foundry.steps import converted, rendered
from tests.foundry.test_train import streams
from tests.with_torch.load_streams import config, write_stream

MAX_SEQ_LEN, EOS = 32, 0
NO_PAD = {"pad_token": None}
LEFT = {"padding_side": "left"}


def numbers(rng: np.random.Generator, least: int, most: int) -> list[int]:
    return [int(t) for t in rng.integers(5, 400, rng.integers(least, most + 1))]


def maybe_ended(rng: np.random.Generator, row: list[int]) -> list[int]:
    return [*row, EOS] if rng.random() < 0.5 else row


def write_streams(folder: Path) -> dict[str, dict[str, str]]:
    """160 rows of each shape: some too long (never by the whole last response), some ended by EOS."""
    rng = np.random.default_rng(7)
    variable = {"input_ids": "ndarray:int32", "labels": "ndarray:int32"}
    first = {"input_ids": "ndarray:uint16:1", "labels": f"ndarray:uint16:{MAX_SEQ_LEN - 1}"}
    chunks = [rng.integers(0, 400, MAX_SEQ_LEN).astype(np.uint16) for _ in range(160)]
    pairs = [(numbers(rng, 1, 24), maybe_ended(rng, numbers(rng, 1, 20))) for _ in range(160)]
    chats = [
        [
            {"input_ids": numbers(rng, 1, 6), "labels": maybe_ended(rng, numbers(rng, 1, 5))}
            for _ in range(rng.integers(1, 4))
        ]
        for _ in range(160)
    ]
    write_stream(
        folder / "text",
        {"tokens": f"ndarray:uint16:{MAX_SEQ_LEN}"},
        ({"tokens": c} for c in chunks),
    )
    write_stream(
        folder / "bytes",
        {"tokens": "bytes"},
        ({"tokens": c.astype(np.int64).tobytes()} for c in chunks),
    )
    write_stream(folder / "lm", first, ({"input_ids": c[:1], "labels": c[1:]} for c in chunks))
    write_stream(
        folder / "pairs",
        variable,
        ({"input_ids": np.int32(p), "labels": np.int32(r)} for p, r in pairs),
    )
    write_stream(folder / "chats", {"turns": "json"}, ({"turns": c} for c in chats))
    long = [(np.int32(numbers(rng, 1, 100)), np.int32(numbers(rng, 1, 100))) for _ in range(160)]
    write_stream(folder / "long", variable, ({"input_ids": p, "labels": r} for p, r in long))
    return {
        n: {"local": str(folder / n)} for n in ("text", "bytes", "lm", "pairs", "chats", "long")
    }


def cases(places: dict[str, dict[str, str]], tokenizer: Path) -> Iterator[dict[str, Any]]:
    """Every policy, padding side, packing and pad rule of the finetuning loader; the text loader's own rules."""

    def case(name: str, used: list[str], loader: str = "finetuning", **more: Any) -> dict[str, Any]:
        attributes = more.pop("attributes", {})
        length = more.pop("length", MAX_SEQ_LEN)
        shared = {"drop_last": False, "num_workers": 0, "prefetch_factor": None}
        made = config({n: places[n] for n in used}, loader, shuffle=True, **(shared | more))
        made["train_loader"] |= {"persistent_workers": False, "pin_memory": False}
        made["train_loader"]["dataset"]["max_seq_len"] = length
        return {
            "name": name,
            "config": made,
            "tokenizer": str(tokenizer),
            "attributes": attributes,
            "batch_size": 8,
        }

    mix = ["lm", "pairs", "chats"]
    for prompts in ("none", "all", "length>=5"):
        for responses in ("last", "all"):
            targets = {"target_prompts": prompts, "target_responses": responses}
            yield case(f"{prompts}/{responses}", mix, **targets)
    yield case("left", mix, attributes=LEFT)
    yield case("pad is eos", mix, attributes=NO_PAD)
    yield case("packed", mix, packing_ratio=1.7)
    yield case("packed left", mix, packing_ratio=2.5, attributes=LEFT, target_responses="all")
    yield case("packed, two wait", mix, packing_ratio=3.0, max_leftover_bins_to_keep=2)
    yield case("packed by itself", ["long"], packing_ratio="auto", length=200)
    yield case("packed by itself, too short", mix, packing_ratio="auto")
    yield case("trimmed", ["chats"], allow_pad_trimming=True)
    yield case("trimmed left", ["chats"], allow_pad_trimming=True, attributes=LEFT)
    yield case("longest", ["pairs", "chats"], pad_to_longest=True)
    for name, more in {"": {}, " left": {"attributes": LEFT}}.items():
        two_sided = {"decoder_only_format": False} | more
        yield case(f"encoder-decoder{name}", ["pairs", "chats"], **two_sided)
    yield case(
        "encoder-decoder trimmed", ["chats"], decoder_only_format=False, allow_pad_trimming=True
    )
    yield case("text", ["text"], "text")
    yield case("bytes", ["bytes"], "text")
    yield case("text, pad is eos", ["text"], "text", attributes={"pad_token": "<|endoftext|>"})
    yield case("text, no pad", ["text"], "text", attributes=NO_PAD)
    yield case("text, documents", ["text"], "text", eos_token_id=EOS)


def test_the_batches_of_mdsmix_load_are_foundrys(
    foundry: Foundry, tokenizer_folder: Path, tmp_path: Path
) -> None:
    listed = list(cases(write_streams(tmp_path), tokenizer_folder))
    for case in listed:
        assert foundry("loaders.compare", case=case) > 4, case["name"]


PREVIEWED: dict[str, dict[str, Any]] = {
    "finetuning": {"name": "finetuning", "num_workers": 2, "drop_last": True},
    "packed": {"name": "finetuning", "dataset": {"packing_ratio": 3.0}},
    "text": {"name": "text"},
}


@pytest.mark.parametrize("case", PREVIEWED)
def test_a_preview_is_what_the_real_loader_draws(
    case: str, tokenizer_folder: Path, corpus_folder: Path, foundry: Foundry, tmp_path: Path
) -> None:
    loader, corpus = PREVIEWED[case], corpus_folder
    dataset = {"shuffle": True, "shuffle_seed": 17, **loader.get("dataset", {})}
    plain = {"docs": documents(corpus / "docs.jsonl"), "web": documents(corpus / "web.jsonl.zst")}
    recipe = converted(
        tmp_path,
        tokenizer_folder,
        streams=plain if case == "text" else streams(corpus),
        max_seq_len=128,
        train_loader={"num_workers": 0, **loader, "dataset": dataset},
    )
    told = foundry("drawn.previewed", path=str(rendered(recipe)), steps=6)
    assert told["version"].startswith("0.12.")
    ours, theirs = told["ours"], told["theirs"]
    if case == "packed":  # a packed row is several of those that are shown
        rows = [[side.pop("rows") for side in step] for step in zip(ours, theirs, strict=True)]
        assert all(len(one) == len(other) == 6 for one, other in rows)
    assert ours == theirs
    assert len(ours) == 6
