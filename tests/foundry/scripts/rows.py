"""Rows by LLM-Foundry's own functions, converters and collator."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from llmfoundry import command_utils
from llmfoundry.data.finetuning import tasks
from llmfoundry.data.finetuning.collator import Seq2SeqFinetuningCollator
from transformers import AutoTokenizer

Turns = list[dict[str, list[int]]]
SETTINGS = ("max_seq_len", "decoder_only_format", "target_responses", "target_prompts")


def compare(tokenizer: str, date: str, records: dict[str, Any], cases: list[Any]) -> list[Any]:
    """A case has settings, the name of its records, and `rows`: what mdsmix stored of the usable
    ones, as lists of turns. Fails unless these give the batch that Foundry's own turns give. The
    answer has `outcomes`, one a record: empty for a row, `filtered`, or the name of an exception;
    the number of rows, and of positions that give a loss.
    """
    tasks.get_date_string = lambda: date
    known = AutoTokenizer.from_pretrained(tokenizer)
    found = {name: [_tokenized(r, known) for r in listed] for name, listed in records.items()}
    return [_case(case, found[case["records"]], known) for case in cases]


def _tokenized(record: Any, tokenizer: Any) -> Turns | str:
    try:
        turns = tasks.tokenize_formatted_example(record, tokenizer)["turns"]
    except Exception as error:
        return type(error).__name__
    return [{key: list(turn[key]) for key in ("input_ids", "labels")} for turn in turns]


def _case(case: dict[str, Any], found: list[Turns | str], tokenizer: Any) -> dict[str, Any]:
    length, is_decoder, responses, prompts = (case[name] for name in SETTINGS)
    outcomes, valid = list[str](), list[Turns]()
    for turns in found:
        if isinstance(turns, str):
            outcomes.append(turns)
        elif tasks.is_valid_ift_example(length, prompts, responses, is_decoder, {"turns": turns}):
            outcomes.append("")
            valid.append(turns)
        else:
            outcomes.append("filtered")
    stored = case["rows"]
    if case["is_pair"]:  # StreamingFinetuningDataset cuts ndarray columns, not turns
        stored = [[{k: ids[:length] for k, ids in turn.items()} for turn in row] for row in stored]
    else:
        assert stored == valid
    collate = Seq2SeqFinetuningCollator(tokenizer, *(case[name] for name in SETTINGS))
    theirs, ours = (collate([{"turns": row} for row in rows]) for rows in (valid, stored))
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[key], ours[key]) for key in theirs), case["records"]
    # A decoder's labels are shifted by one, a target is not.
    losses = (theirs["labels"][:, 1 if is_decoder else 0 :] != -100).sum()
    return {"outcomes": outcomes, "rows": len(valid), "losses": int(losses)}


def ended_by_next_role(
    tokenizer: str, records: list[Any], rows: list[Turns], stops: list[int]
) -> int:
    """Fail unless the rows are Foundry's own turns, but for stop tokens, which are the last of the
    labels before and not the first of a prompt. The batches then differ in the labels of these
    tokens alone. Returns how many there are.
    """
    known = AutoTokenizer.from_pretrained(tokenizer)
    theirs: list[Any] = [_tokenized(record, known) for record in records]
    moved = list[Turns]()
    for turns in theirs:
        made = [{key: [*ids] for key, ids in turn.items()} for turn in turns]
        for before, turn in pairwise(made):
            if turn["input_ids"][0] in stops:
                before["labels"].append(turn["input_ids"].pop(0))
        moved.append(made)
    assert rows == moved
    collate = Seq2SeqFinetuningCollator(known, 64, True, "all", "none")
    plain, ended = (collate([{"turns": row} for row in each]) for each in (theirs, rows))
    for key in plain.keys() - {"labels"}:
        assert torch.equal(plain[key], ended[key]), key
    differs = plain["labels"] != ended["labels"]
    assert set(plain["labels"][differs].tolist()) == {-100}
    assert set(ended["labels"][differs].tolist()) <= {*stops}
    return int(differs.sum())


def trained_texts(tokenizer: str, rows: list[Turns], targets: dict[str, Any]) -> list[list[str]]:
    """The runs of tokens of each row whose labels in the batch of Foundry's collator are not -100,
    decoded.
    """
    known = AutoTokenizer.from_pretrained(tokenizer)
    batch = Seq2SeqFinetuningCollator(known, *(targets[name] for name in SETTINGS))(
        [{"turns": row} for row in rows]
    )
    found = list[list[str]]()
    for ids, labels in zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True):
        runs = list[list[int]]()
        previous = -100
        for id, label in zip(ids, labels, strict=True):
            if label != -100:
                assert label == id
                if previous == -100:
                    runs.append([])
                runs[-1].append(id)
            previous = label
        found.append([known.decode(run) for run in runs])
    return found


def text(path: str, out: str, tokenizer: str, max_seq_len: int, **around: str) -> None:
    """One shard of Foundry's converter of text, in the source's order. `around`: bos_text and
    eos_text.
    """
    how: dict[str, Any] = {"concat_tokens": max_seq_len, "split": "train", "compression": None}
    command_utils.convert_dataset_json_from_args(
        path=path, out_root=out, tokenizer=tokenizer, **how, **around
    )


def finetuning(
    path: str, out: str, tokenizer: str, targets: dict[str, Any], preprocessor: str | None = None
) -> int:
    """The same of pairs and conversations; gives the number of records that it could take: one that
    its tokenization, or the function `package.module:function`, refuses ends a whole conversion of
    Foundry's, so those are left out first.
    """
    taken, known = Path(path).with_suffix(".taken.jsonl"), AutoTokenizer.from_pretrained(tokenizer)
    prepared = tasks.dataset_constructor.get_preprocessing_fn_from_str(preprocessor)
    lines = Path(path).read_text().splitlines()
    good = [line for line in lines if _is_taken(prepared, line, known)]
    taken.write_text("".join(f"{line}\n" for line in good))
    policies = {key: targets[key] for key in SETTINGS if key != "decoder_only_format"}
    command_utils.convert_finetuning_dataset_from_args(
        dataset="json",
        splits=["train"],
        data_files=[str(taken)],
        num_workers=1,
        **dict.fromkeys(("data_subset", "local", "compression", "tokenizer_kwargs")),
        preprocessor=preprocessor,
        skip_preprocessing=preprocessor is None,
        out_root=out,
        tokenizer=tokenizer,
        encoder_decoder=not targets["decoder_only_format"],
        **policies,
    )
    return len(good)


def _is_taken(prepared: Any, line: str, tokenizer: Any) -> bool:
    try:
        record = json.loads(line)
        tasks.tokenize_formatted_example(prepared(record) if prepared else record, tokenizer)
    except Exception:
        return False
    return True
