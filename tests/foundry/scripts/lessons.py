"""What LLM-Foundry's loaders would train a model on, piece by piece: of rows of one loader in another, and of rows that mdsmix packed."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from loaders import Batch, batches, config

Piece = tuple[tuple[int, ...], tuple[int, ...]]
"Ids and labels of what attends to itself alone: a row, or one document of a packed row."
Lesson = tuple[tuple[int, ...], int]
"A trained token and all that stands before it in its document."


def of_rows(
    tokenizer: str, text: str, finetuning: str, length: int, cases: list[dict[str, Any]]
) -> list[dict[str, int]]:
    """Fails unless every piece in the finetuning loader is a row of the text loader, none twice, and its labels are the
    ids, but for the first, which nothing in the piece predicts; gives for each case what was seen."""
    plain = batches(config(tokenizer, text, "text", {"max_seq_len": length}), 1)
    rows = [(_listed(batch["input_ids"][0]), _listed(batch["labels"][0])) for batch in plain]
    assert all(ids == labels for ids, labels in rows), "plain language modelling trains every token"
    want = Counter(ids for ids, _ in rows)
    return [_case(tokenizer, finetuning, {"max_seq_len": length, **case}, want) for case in cases]


def _case(
    tokenizer: str, folder: str, dataset: dict[str, Any], want: Counter[tuple[int, ...]]
) -> dict[str, int]:
    found = batches(config(tokenizer, folder, "finetuning", dataset))
    pieces = [piece for batch in found for piece in _pieces(batch)]
    assert not Counter(ids for ids, _ in pieces) - want, dataset
    assert all(labels[1:] == ids[1:] for ids, labels in pieces), dataset
    return {
        "wanted": want.total(),
        "pieces": len(pieces),
        "rows": sum(len(batch["input_ids"]) for batch in found),
        "firsts": sum(labels[0] != -100 for _, labels in pieces),
    }


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
            yield _listed(batch["input_ids"][n][here]), _listed(batch["labels"][n][here])


def _listed(row: torch.Tensor) -> tuple[int, ...]:
    return tuple(row.tolist())


def of_packed(tokenizer: str, plain: str, packed: str, case: dict[str, Any]) -> dict[str, int]:
    """Fails unless both teach the same, each thing the same number of times; gives what was compared."""
    theirs = batches(config(tokenizer, plain, "finetuning", case))
    ours = batches(config(tokenizer, packed, "mdsmix", case))
    want, have = _lessons(theirs), _lessons(ours)
    assert have == want, (case, (have - want).most_common(1), (want - have).most_common(1))
    rows, packed_rows = (sum(len(batch["input_ids"]) for batch in each) for each in (theirs, ours))
    return {"lessons": want.total(), "rows": rows, "packed_rows": packed_rows}


def _lessons(loaded: list[Batch]) -> Counter[Lesson]:
    """By sequence_id, after the shift by one: a token in the first place of its document is predicted by none."""
    found: Counter[Lesson] = Counter()
    for batch in loaded:
        for ids, labels, numbers in zip(
            *(batch[key].tolist() for key in ("input_ids", "labels", "sequence_id")), strict=True
        ):
            begins = {number: numbers.index(number) for number in set(numbers)}
            for at in range(1, len(ids)):
                if labels[at] != -100:
                    assert begins[numbers[at]] < at, "a label crosses from one document to the next"
                    found[tuple(ids[begins[numbers[at]] : at]), labels[at]] += 1
    return found
