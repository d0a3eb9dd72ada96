"""Unpaired preferences (`kind: preference` with a label): the rows and counts of a conversion, and
the batches of mdsmix.load. tests/exporting compares both with TRL's own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoTokenizer

from mdsmix.errors import MixRefused, RecipeError
from mdsmix.load import build_loader
from tests.converting import (
    make_encoder,
    manifest_of,
    mdsmix,
    read_quarantined,
    run_ok,
    write_jsonl,
    write_recipe,
)
from tests.every_kind import expected_unpaired

EOS = 0
PAD = 1
LENGTH = 64
FIELDS = ("prompt", "completion", "label")
TEXTS: list[dict[str, Any]] = [
    {"prompt": "How many hens?", "completion": " Fourteen hens.", "label": True},
    {"prompt": "Why?", "completion": " No.", "label": False},
    {"prompt": "Why?", "completion": " Because." * 40, "label": 1},
]


def said(role: str, text: str) -> list[dict[str, Any]]:
    return [{"role": role, "content": text}]


CALL = {"type": "function", "id": "c1", "function": {"name": "look_up", "arguments": {}}}
CALLED = [{"role": "assistant", "content": "", "tool_calls": [CALL]}]
ASKED = said("user", "Who?")
CHATS: list[dict[str, Any]] = [
    {"prompt": ASKED, "completion": said("assistant", "Ann."), "label": True},
    {"prompt": ASKED, "completion": said("assistant", "Bob.")[0], "label": False},
    {"prompt": "Who?", "completion": said("assistant", "Eve."), "label": False},
    {"prompt": ASKED, "completion": "Zoe.", "label": True},
]
BAD: list[tuple[dict[str, Any], str]] = [
    ({"prompt": "q", "completion": "a", "label": 2}, "bad_label"),
    ({"prompt": "q", "completion": "a", "label": "yes"}, "bad_label"),
    ({"prompt": "q", "completion": "a", "label": 1.0}, "bad_label"),
    ({"prompt": "q", "completion": "a", "label": None}, "bad_label"),
    ({"prompt": "q", "completion": "a"}, "missing_field"),
    ({"prompt": "q", "label": True}, "missing_field"),
    ({"prompt": ASKED, "completion": 7, "label": True}, "messages_not_a_list"),
    ({"prompt": ASKED, "completion": [], "label": True}, "no_messages"),
    ({"prompt": ASKED + said("assistant", "Ann."), "completion": [], "label": True}, "no_messages"),
    ({"prompt": ASKED, "completion": ASKED, "label": True}, "repeated_role"),
    ({"prompt": ASKED, "completion": [*CALLED, *ASKED], "label": True}, "several_completions"),
    ({"prompt": "q", "completion": "a", "label": True, "tools": [CALL]}, "tools_of_text"),
]
FILTERED: list[tuple[dict[str, Any], str]] = [
    ({"prompt": "q", "completion": "", "label": True}, "empty_response"),
    ({"prompt": "", "completion": "a", "label": True}, "empty_prompt"),
    ({"prompt": "long " * 80, "completion": "a", "label": True}, "no_loss_tokens"),
    (
        CHATS[0] | {"completion": [said("assistant", "Ann.")[0] | {"train": False}]},
        "nothing_trained",
    ),
]


def convert(
    folder: Path, tokenizer: Path, records: list[Any], *further_fields: str
) -> tuple[Path, str]:
    """Convert records as the stream `kto`. Return the recipe, and what the command wrote.

    Args:
        further_fields: keys of `source` besides FIELDS, each a field of the same name.
    """
    path = write_jsonl(folder / "a.jsonl", records)
    return convert_file(path, tokenizer, *further_fields)


def convert_file(path: Path, tokenizer: Path, *further_fields: str) -> tuple[Path, str]:
    """Do the same as `convert` for a file that exists."""
    folder = path.parent
    source = {"path": str(path), **{key: key for key in (*FIELDS, *further_fields)}}
    recipe = write_recipe(
        folder, tokenizer, streams={"kto": {"kind": "preference", "source": source}},
        max_seq_len=LENGTH, train_loader={"name": "unpaired_preference", "num_workers": 0},
    )  # fmt: skip
    return recipe, run_ok("convert", recipe).out


def rows_of(folder: Path) -> list[Any]:
    return expected_unpaired(folder / "out/kto/train")


def test_texts_are_tokenized_and_end_in_eos(tmp_path: Path, tokenizer_folder: Path) -> None:
    _, output = convert(tmp_path, tokenizer_folder, TEXTS)
    encode = make_encoder(tokenizer_folder)
    expected = []
    truncated = 0
    for record in TEXTS:
        prompt = encode(record["prompt"])
        completion = [*encode(record["completion"]), EOS]
        fitting = completion[: LENGTH - len(prompt)]
        truncated += len(completion) - len(fitting)
        label = bool(record["label"])
        expected.append({"prompt_ids": prompt, "completion_ids": fitting, "label": label})
    assert rows_of(tmp_path) == expected
    totals = manifest_of(tmp_path / "out/kto/train").totals
    assert totals.labels == {"true": 2, "false": 1}
    assert totals.loss_tokens == sum(len(row["completion_ids"]) for row in expected)
    assert (totals.truncated_rows, totals.truncated_tokens) == (1, truncated)
    assert "labels: 2 true (desirable), 1 false" in output
    assert f"{truncated} tokens truncated in 1 of 3 rows" in output


def test_messages_are_rendered_by_the_chat_template(tmp_path: Path, tokenizer_folder: Path) -> None:
    convert(tmp_path, tokenizer_folder, CHATS)
    reference = AutoTokenizer.from_pretrained(tokenizer_folder)
    expected = []
    for text, label in (("Ann.", True), ("Bob.", False), ("Eve.", False), ("Zoe.", True)):
        prompt = reference.apply_chat_template(ASKED, add_generation_prompt=True)
        whole = reference.apply_chat_template([*ASKED, *said("assistant", text)])
        assert whole[: len(prompt)] == prompt
        completion = [*whole[len(prompt) :], EOS]
        expected.append({"prompt_ids": prompt, "completion_ids": completion, "label": label})
    assert rows_of(tmp_path) == expected


def test_labels_of_a_csv_file_may_be_those_of_pandas(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    labels = {"True": True, "False": False, "true": True, "0": False}
    lines = [f"question,answer,{label}\n" for label in (*labels, "TRUE", "yes")]
    path = tmp_path / "a.csv"
    path.write_text("prompt,completion,label\n" + "".join(lines))
    convert_file(path, tokenizer_folder)
    assert [row["label"] for row in rows_of(tmp_path)] == [*labels.values()]
    reasons = [record["reason"] for record in read_quarantined(tmp_path / "out/kto/train")]
    assert reasons == ["bad_label"] * 2


def test_other_records_are_bad_or_left_out(tmp_path: Path, tokenizer_folder: Path) -> None:
    convert(tmp_path, tokenizer_folder, [TEXTS[0], *(r for r, _ in (*BAD, *FILTERED))], "tools")
    reasons = [entry["reason"] for entry in read_quarantined(tmp_path / "out/kto/train")]
    assert reasons == [reason for _, reason in BAD]
    filtered = manifest_of(tmp_path / "out/kto/train").records.filtered
    assert filtered == {reason: 1 for _, reason in FILTERED}


def test_a_completion_keeps_at_least_one_token(tmp_path: Path, tokenizer_folder: Path) -> None:
    """Signs and digits in turn are tokens of their own."""
    prompts = ("#1" * (LENGTH // 2) + "#", "#1" * (LENGTH // 2), "#1" * (LENGTH // 2 - 1) + "#")
    records = [{"prompt": prompt, "completion": "#1", "label": True} for prompt in prompts]
    convert(tmp_path, tokenizer_folder, records)
    (row,) = rows_of(tmp_path)
    assert (len(row["prompt_ids"]), len(row["completion_ids"])) == (LENGTH - 1, 1)
    filtered = manifest_of(tmp_path / "out/kto/train").records.filtered
    assert filtered == {"no_loss_tokens": 2}


def test_hints_name_only_keys_that_such_streams_take(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    """The run's target_responses and `images:` are refused in these streams."""
    long = {"prompt": "long " * 80, "completion": "a", "label": True}
    with_image = {"prompt": "<image> q", "completion": " a", "label": False, "images": ["a.png"]}
    _, output = convert(tmp_path, tokenizer_folder, [*TEXTS, long, with_image])
    assert "no_loss_tokens: a larger max_seq_len may keep these records" in output
    assert "target_responses" not in output
    no_images = "streams of prompts and of unpaired preferences have no images"
    assert f"WARNING: <image> of 1 record is text: {no_images}" in output
    ignored = "the field images of 1 record is not read, so it is ignored in training"
    assert f"WARNING: {ignored}: {no_images}, or remove these records" in output
    assert "images: {}" not in output


@pytest.mark.parametrize(
    ("labels", "told"),
    [
        ([1, 1, 1, 0, 0, 0], "labels: 3 true (desirable), 3 false\n"),
        ([1, 1, 1, 1, 0, 0, 0], "labels: 4 true (desirable), 3 false\n"),
        ([1, 1, 1, 0], "1 false; KTO balances them with undesirable_weight from 2.25 to 3.00"),
        ([1, 0, 0], "2 false; KTO balances them with desirable_weight from 2.00 to 2.67"),
        ([1, 1], "WARNING: labels: 2 true (desirable), 0 false: KTO compares both labels"),
    ],
)
def test_the_balance_of_labels_is_shown(
    tmp_path: Path, tokenizer_folder: Path, labels: list[int], told: str
) -> None:
    """Weights are those that TRL recommends: times the weights, the desirable are 1 to 4/3 times
    the undesirable.
    """
    records = [
        {"prompt": "q", "completion": f" {number}", "label": label}
        for number, label in enumerate(labels)
    ]
    recipe, output = convert(tmp_path, tokenizer_folder, records)
    assert told in output
    assert ("labels-alike" in run_ok("check", recipe).out) == (len({*labels}) == 1)


def pad(rows: list[list[int]], fill: int) -> torch.Tensor:
    width = max(map(len, rows))
    return torch.tensor([row + [fill] * (width - len(row)) for row in rows])


def test_a_batch_has_each_prompt_with_its_completion_and_with_another(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    recipe, _ = convert(tmp_path, tokenizer_folder, [*TEXTS, *CHATS])
    run_ok("render-yaml", recipe, "-o", tmp_path / "train.yaml")
    config = yaml.safe_load((tmp_path / "train.yaml").read_text())
    config["train_loader"]["dataset"]["shuffle"] = False
    config["train_loader"]["drop_last"] = False
    rows = rows_of(tmp_path)
    for number, batch in enumerate(build_loader(config, 3)):
        few = rows[3 * number : 3 * number + 3]
        prompts = [row["prompt_ids"] for row in few]
        completions = [row["completion_ids"] for row in few]
        turned = [completions[n - 1] for n in range(len(few))]
        expected = {"label": torch.tensor([row["label"] for row in few])}
        for prefix, answers in (("", completions), ("KL_", turned)):
            pairs = [*zip(prompts, answers, strict=True)]
            wholes = [(p + a)[:LENGTH] for p, a in pairs]
            expected[f"{prefix}input_ids"] = pad(wholes, PAD)
            expected[f"{prefix}attention_mask"] = pad([[1] * len(whole) for whole in wholes], 0)
            masks = [([0] * len(p) + [1] * len(a))[:LENGTH] for p, a in pairs]
            expected[f"{prefix}completion_mask"] = pad(masks, 0)
        assert batch.keys() == expected.keys()
        for key, values in expected.items():
            assert batch[key].dtype == values.dtype, key
            assert torch.equal(batch[key], values), key
    with pytest.raises(RecipeError, match="needs batches of 2 rows or more"):
        build_loader(config, 1)
    # A shorter row cuts completions, and is refused if nothing of one is left.
    config["train_loader"]["dataset"]["max_seq_len"] = 20
    assert all(batch["input_ids"].shape[1] <= 20 for batch in build_loader(config, 3))
    config["train_loader"]["dataset"]["max_seq_len"] = 6
    with pytest.raises(MixRefused, match="leaves nothing of its completion"):
        list(build_loader(config, 3))


@pytest.mark.parametrize("batch", [2, 4])
def test_a_plan_names_the_rows_that_batches_have_in_addition(
    tmp_path: Path, tokenizer_folder: Path, batch: int
) -> None:
    """Compared with the batches of the loader; no row of these records is cut."""
    records = [record for record in [*TEXTS, *CHATS] if len(record["completion"]) < 40] * 2
    recipe, _ = convert(tmp_path, tokenizer_folder, records)
    run_ok("render-yaml", recipe, "-o", tmp_path / "train.yaml")
    batches = list(build_loader(yaml.safe_load((tmp_path / "train.yaml").read_text()), batch))
    steps = len(batches)
    rows = sum(len(loaded["KL_input_ids"]) for loaded in batches) / steps
    tokens = sum(int(loaded["KL_attention_mask"].sum()) for loaded in batches) / steps
    planned = run_ok("plan", recipe, "--batch", batch, "--gpus", "1").out
    assert f"steps: {steps}, samples: {len(records)}, " in planned
    assert f"a step has {rows:.0f} more rows, " in planned
    assert f"at most {tokens:.0f} more tokens" in planned


def test_a_plan_refuses_a_batch_that_the_loader_refuses(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    recipe, _ = convert(tmp_path, tokenizer_folder, [*TEXTS, *CHATS])
    refused = mdsmix("plan", recipe, "--batch", "4", "--gpus", "4")
    assert refused.code == 2
    assert "needs batches of 2 rows or more on each device" in refused.err
    assert "the batch size is 1: set --batch to 8 or more" in refused.err
    run_ok("plan", recipe, "--batch", "4", "--gpus", "2")


def test_every_command_knows_it(tmp_path: Path, tokenizer_folder: Path) -> None:
    recipe, _ = convert(tmp_path, tokenizer_folder, [*TEXTS, *CHATS])
    for command in ("check", "verify", "quarantine", "gc"):
        run_ok(command, recipe)
    run_ok("report", recipe, "-o", tmp_path / "report.html")
    shown = run_ok("inspect", recipe, "-n", "2").out.replace("⟧⟦", "")
    assert "How many hens?⟦ Fourteen hens.⟨<|endoftext|>⟩⟧\nlabel: 1" in shown
    assert "labels                  false: 3, true: 4" in shown
    planned = run_ok("plan", recipe, "--batch", "2", "--gpus", "1").out
    assert "padded to the longest of a device's batch" in planned
    run_ok("mix", recipe, "-o", tmp_path / "mixed")
    assert manifest_of(tmp_path / "mixed/train").totals.labels == {"true": 4, "false": 3}
    refused = mdsmix("preview", recipe, "--gpus", "1", "--batch", "2")
    assert (refused.code, ", the loader of mdsmix" in refused.err) == (2, True)
    url = tmp_path / "out/kto/train"
    assert json.loads(run_ok("leaks", url, "--eval", url, "--json").out)
    for change, output in {
        "train_loader.name=pairwise_preference": "is read only by train_loader.name: unpaired",
        "streams.kto.pack=true": "remove pack from this stream",
        "streams.kto.source.chosen=x": "or prompt and completion and label",
    }.items():
        answer = mdsmix("convert", recipe, change)
        assert (answer.code, output in answer.err) == (2, True), (change, answer.err)
