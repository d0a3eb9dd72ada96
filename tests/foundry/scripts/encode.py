"""Tokenizes records and collates rows with LLM-Foundry's own functions.

A case has settings, the name of its records, and "rows": what mdsmix stored for the usable ones, as lists of turns. Its
answer holds one outcome a record (the turns and whether they are valid, or the name of an exception), and a batch row
for each of Foundry's turns and of ours.
"""

from __future__ import annotations

from typing import Any

from llmfoundry.data.finetuning import tasks
from llmfoundry.data.finetuning.collator import Seq2SeqFinetuningCollator
from transformers import AutoTokenizer

Turns = list[dict[str, list[int]]]


def tokenized(record: Any, tokenizer: Any) -> dict[str, Any]:
    try:
        turns = tasks.tokenize_formatted_example(record, tokenizer)["turns"]
    except Exception as error:
        return {"error": type(error).__name__}
    return {"turns": [{key: list(turn[key]) for key in ("input_ids", "labels")} for turn in turns]}


def judged(found: dict[str, Any], case: dict[str, Any]) -> dict[str, Any]:
    if "error" in found:
        return found
    settings = ("max_seq_len", "target_prompts", "target_responses", "decoder_only_format")
    return {**found, "valid": tasks.is_valid_ift_example(*(case[name] for name in settings), found)}


def collated(rows: list[Turns], case: dict[str, Any], tokenizer: Any) -> list[dict[str, Any]]:
    """The rows of one batch, each padded to max_seq_len whatever stands beside it: input_ids, labels, attention_mask ..."""
    settings = ("max_seq_len", "decoder_only_format", "target_responses", "target_prompts")
    collate = Seq2SeqFinetuningCollator(tokenizer, *(case[name] for name in settings))
    batch = {k: v.tolist() for k, v in collate([{"turns": row} for row in rows]).items()}
    return [{k: v[n] for k, v in batch.items()} for n in range(len(rows))]


def loaded(row: Turns, case: dict[str, Any]) -> Turns:
    """As StreamingFinetuningDataset gives a row: it cuts ndarray columns, not turns."""
    if not case["is_pair"]:
        return row
    longest = case["max_seq_len"]
    return [{key: tokens[:longest] for key, tokens in turn.items()} for turn in row]


def answer(
    case: dict[str, Any], found: dict[str, list[dict[str, Any]]], tokenizer: Any
) -> dict[str, Any]:
    outcomes = [judged(result, case) for result in found[case["records"]]]
    theirs = [found["turns"] for found in outcomes if found.get("valid")]
    ours = [loaded(row, case) for row in case["rows"]]
    return {
        "outcomes": outcomes,
        "theirs": collated(theirs, case, tokenizer),
        "ours": collated(ours, case, tokenizer),
    }


def answers(
    tokenizer: str, date: str, records: dict[str, list[Any]], cases: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    tasks.get_date_string = lambda: date
    loaded_tokenizer = AutoTokenizer.from_pretrained(tokenizer)
    found = {
        name: [tokenized(record, loaded_tokenizer) for record in listed]
        for name, listed in records.items()
    }
    return [answer(case, found, loaded_tokenizer) for case in cases]
