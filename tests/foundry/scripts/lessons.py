"""What LLM-Foundry's finetuning loader would train a model on of rows of the text loader, piece by piece."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from loaders import Batch, batches, config

Piece = tuple[tuple[int, ...], tuple[int, ...]]
"Ids and labels of what attends to itself alone: a row, or one document of a packed row."


def of_rows(
    tokenizer: str, text: str, finetuning: str, length: int, cases: list[dict[str, Any]]
) -> list[dict[str, int]]:
    """Fails unless every piece in the finetuning loader is a row of the text loader, none twice, and its labels are the
    ids, but for the first, which nothing in the piece predicts; gives for each case what was seen."""
    plain = batches(config(tokenizer, text, "text", {"max_seq_len": length}), 1)
    assert all(torch.equal(b["input_ids"], b["labels"]) for b in plain), "every token is trained"
    want = Counter(tuple(batch["input_ids"][0].tolist()) for batch in plain)
    return [_case(tokenizer, finetuning, {"max_seq_len": length, **case}, want) for case in cases]


def _case(
    tokenizer: str, folder: str, dataset: dict[str, Any], want: Counter[tuple[int, ...]]
) -> dict[str, int]:
    found = batches(config(tokenizer, folder, "finetuning", dataset))
    pieces = [piece for batch in found for piece in _pieces(batch)]
    assert not Counter(ids for ids, _ in pieces) - want, dataset
    assert all(labels[1:] == ids[1:] for ids, labels in pieces), dataset
    rows = sum(len(batch["input_ids"]) for batch in found)
    firsts = sum(labels[0] != -100 for _, labels in pieces)
    return {"wanted": want.total(), "pieces": len(pieces), "rows": rows, "firsts": firsts}


def _pieces(batch: Batch) -> Iterator[Piece]:
    """Cut by sequence_id, which is to count up from 0 in one run each, and to be -1 on padding alone."""
    for n in range(len(batch["input_ids"])):
        numbers = batch["sequence_id"][n]
        used = numbers[numbers >= 0]
        assert torch.equal(batch["attention_mask"][n].bool(), numbers >= 0)
        assert used.tolist() == sorted(used.tolist())
        assert set(used.tolist()) == set(range(int(used.max()) + 1))
        assert bool((batch["labels"][n][numbers < 0] == -100).all())
        for number in range(int(used.max()) + 1):
            here = numbers == number
            ids, labels = (tuple(batch[key][n][here].tolist()) for key in ("input_ids", "labels"))
            yield ids, labels
