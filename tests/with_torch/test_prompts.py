"""`kind: prompt`: rows are those of transformers' chat template, and mdsmix.load gives the batches
that ComposeRL's own dataset and collator made of the same rows, as `composerl_prompts.json` records
them (`record_composerl_prompts.py`).
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from streaming import StreamingDataset
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from mdsmix.errors import MixRefused
from mdsmix.load import build_loader
from mdsmix.shapes import SHAPES
from tests.converting import (
    make_encoder,
    manifest_of,
    mdsmix,
    read_quarantined,
    run_ok,
    set_window_size,
    write_jsonl,
)
from tests.with_torch.record_composerl_prompts import write_rows
from tests.with_torch.test_preferences import tensors_of

RECORDED = json.loads(Path(__file__).with_name("composerl_prompts.json").read_text())
"""Rows, and ComposeRL's batches of them."""
LENGTH, ANSWER_LENGTH = RECORDED["max_seq_len"], RECORDED["max_gen_len"]
EOS = "<|endoftext|>"
BOTH = {"prompt": "prompt", "verified_answer": "verified_answer"}
TOOL = {
    "type": "function",
    "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}},
}


def said(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": text}


def convert(
    folder: Path, tokenizer: Path, records: list[Any], fields: Any = None, /, **settings: Any
) -> tuple[Path, str]:
    """Convert records as the stream `rl`. Return the recipe, and what the command wrote."""
    path = str(write_jsonl(folder / "a.jsonl", records))
    stream = {"kind": "prompt", "source": {"path": path, **(fields or BOTH)}}
    dataset = {"max_gen_len": ANSWER_LENGTH, "shuffle": False}
    loader = {"name": "prompt", "num_workers": 0, "drop_last": False, "dataset": dataset}
    tree = {
        "tokenizer": {"name": str(tokenizer), "kwargs": {"padding_side": "left"}},
        "max_seq_len": LENGTH,
        "max_bad": "100%",
        "local": str(folder / "out"),
        "train_loader": loader,
        "streams": {"rl": stream},
    }
    recipe = folder / "recipe.yaml"
    recipe.write_text(json.dumps(tree | settings))
    return recipe, run_ok("convert", recipe).out


def stored(folder: Path) -> list[dict[str, Any]]:
    """Return the rows as plain Streaming reads them, ids as ComposeRL reads them."""
    rows = StreamingDataset(local=str(folder / "out/rl"), split="train", batch_size=1)
    return [row | {"prompt": np.frombuffer(row["prompt"], np.int64).tolist()} for row in rows]


def assert_equal(batches: list[dict[str, Any]], recorded: list[dict[str, Any]]) -> None:
    """Fail unless the batches are those that were recorded, dtypes too."""
    assert len(batches) == len(recorded) > 5
    for batch, expected in zip(batches, recorded, strict=True):
        assert batch.keys() == expected.keys()
        assert batch.get("verified_answer") == expected.get("verified_answer")
        for key, values in tensors_of(
            {k: v for k, v in expected.items() if isinstance(v, dict)}
        ).items():
            assert batch[key].dtype == values.dtype, key
            assert torch.equal(batch[key], values), key


WRITTEN = [n for n, case in enumerate(RECORDED["cases"]) if not case["has_values"]]


@pytest.mark.parametrize("number", WRITTEN)
def test_batches_are_those_of_composerl(
    tmp_path: Path, tokenizer_folder: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With padding on both sides, padding of its own and EOS as padding, with and without answers,
    in several shards. The prompts that ComposeRL cuts are left out.
    """
    set_window_size(monkeypatch, 1000)
    case = RECORDED["cases"][number]
    decode = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json")).decode
    rows = case["rows"]
    records = [row | {"prompt": decode(row["prompt"], skip_special_tokens=False)} for row in rows]
    kwargs = {"padding_side": case["padding_side"]}
    if case["pads_with_eos"]:
        kwargs["pad_token"] = EOS
    recipe, _ = convert(
        tmp_path, tokenizer_folder, records, {key: key for key in rows[0]},
        tokenizer={"name": str(tokenizer_folder), "kwargs": kwargs},
        special_tokens_in_text="allow",
    )  # fmt: skip
    assert stored(tmp_path) == [row for n, row in enumerate(rows) if n not in case["cut"]]
    manifest = manifest_of(tmp_path / "out/rl/train")
    assert len(manifest.parts) > 1, "the number of a sample is not its place in a shard"
    assert manifest.records.filtered == {"prompt_too_long": len(case["cut"])}
    assert manifest.totals.tokens == sum(len(row["prompt"]) for row in stored(tmp_path))
    assert manifest.totals.loss_tokens == 0

    # `check` refuses a tokenizer that pads on the right, and mdsmix.load does not.
    pads_right = case["padding_side"] == "right"
    checked = mdsmix("check", recipe)
    assert (checked.code, "padding-right" in checked.out) == (3 * pads_right, pads_right)
    assert ("pad-eos-prompt" in checked.out) == case["pads_with_eos"]
    pads_left = "tokenizer.kwargs.padding_side=left"
    run_ok("render-yaml", recipe, pads_left, "-o", tmp_path / "train.yaml")
    config = yaml.safe_load((tmp_path / "train.yaml").read_text())
    config["tokenizer"]["kwargs"]["padding_side"] = case["padding_side"]
    assert_equal(list(build_loader(config, 8)), case["batches"])


def test_streams_that_composerl_wrote_are_read(tmp_path: Path, tokenizer_folder: Path) -> None:
    """As its script writes them, without a manifest, and with a `vstar` for its A*PO."""
    (case,) = [case for case in RECORDED["cases"] if case["has_values"]]
    write_rows(tmp_path / "rl", [r for n, r in enumerate(case["rows"]) if n not in case["cut"]])
    lengths = {"max_seq_len": LENGTH, "max_gen_len": ANSWER_LENGTH}
    stream = {"local": str(tmp_path / "rl"), "split": None}
    config = {
        "max_seq_len": LENGTH,
        "tokenizer": {"name": str(tokenizer_folder), "kwargs": {"padding_side": "left"}},
        "train_loader": {
            "name": "prompt",
            "num_workers": 0,
            "prefetch_factor": None,
            "persistent_workers": False,
            "drop_last": False,
            "dataset": {"streams": {"rl": stream}, "shuffle": False, **lengths},
        },
    }
    assert_equal(list(build_loader(config, 8)), case["batches"])
    (tmp_path / "train.yaml").write_text(yaml.safe_dump(config))
    checked = mdsmix("check", tmp_path / "train.yaml")
    assert (checked.code, "may be mixed" in checked.out) == (0, True), checked.out
    config["train_loader"]["dataset"]["max_gen_len"] += 1
    (tmp_path / "cut.yaml").write_text(yaml.safe_dump(config))
    assert "prompt-cut" in mdsmix("check", tmp_path / "cut.yaml").out


CHATS: list[dict[str, Any]] = [
    {"prompt": [said("user", "Who?")], "verified_answer": "Ann"},
    {
        "prompt": [
            said("system", "Be brief."),
            said("user", "Who?"),
            said("assistant", "Ann."),
            said("user", "Sure?"),
        ],
        "verified_answer": 7,
    },
    {"prompt": [said("user", "Twice")] * 2, "verified_answer": "x"},
    {"prompt": [said("user", "Who?"), said("assistant", "Ann.")], "verified_answer": "Ann"},
    {"prompt": [said("system", "Be brief.")], "verified_answer": "x"},
    {"prompt": [], "verified_answer": "x"},
    {"prompt": [said("user", "Who?")], "verified_answer": " "},
    {"prompt": [said("user", "Who?")]},
    {"prompt": [said("user", "Who?")], "verified_answer": ["Ann"]},
    {"prompt": 7, "verified_answer": "x"},
]


def test_messages_are_rendered_with_the_generation_prompt(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    convert(tmp_path, tokenizer_folder, CHATS, max_seq_len=128)
    reference = AutoTokenizer.from_pretrained(tokenizer_folder)
    assert stored(tmp_path) == [
        {
            "prompt": reference.apply_chat_template(record["prompt"], add_generation_prompt=True),
            "verified_answer": answer,
        }
        for record, answer in zip(CHATS[:2], ("Ann", "7"), strict=True)
    ]
    reasons = sorted(entry["reason"] for entry in read_quarantined(tmp_path / "out/rl/train"))
    assert reasons == sorted(
        ["repeated_role", "last_not_user", "last_not_user", "no_messages", "messages_not_a_list"]
        + ["bad_answer"] * 3
    )


def test_an_answer_may_be_a_number_larger_than_any_float() -> None:
    number = 10**400
    prompt = SHAPES["prompt"].read({"prompt": "How many?", "verified_answer": number}, BOTH)
    assert prompt.answer == str(number)


def test_tools_are_in_the_prompt(tmp_path: Path, tokenizer_folder: Path) -> None:
    template = (
        "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|im_start|>"
        "{{ m.role }}\n{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}"
        "{{ m.content or '' }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    call = {"type": "function", "id": "c1", "function": {"name": "look_up", "arguments": {}}}
    messages = [said("user", "Who?"), {"role": "assistant", "content": "", "tool_calls": [call]}]
    records = [
        {"prompt": messages[:1], "tools": [TOOL]},
        {"prompt": [*messages, said("tool", "Ann") | {"tool_call_id": "c1"}], "tools": [TOOL]},
        {"prompt": messages, "tools": [TOOL]},
        {"prompt": "Who?", "tools": [TOOL]},
    ]
    kwargs = {"padding_side": "left", "chat_template": template}
    convert(
        tmp_path, tokenizer_folder, records, {"prompt": "prompt", "tools": "tools"},
        tokenizer={"name": str(tokenizer_folder), "kwargs": kwargs}, max_seq_len=512,
    )  # fmt: skip
    reference = AutoTokenizer.from_pretrained(tokenizer_folder, chat_template=template)
    assert stored(tmp_path) == [
        {
            "prompt": reference.apply_chat_template(
                record["prompt"], tools=record["tools"], add_generation_prompt=True
            )
        }
        for record in records[:2]
    ]
    reasons = [entry["reason"] for entry in read_quarantined(tmp_path / "out/rl/train")]
    assert reasons == ["last_not_user", "tools_of_text"]


def test_verls_records_give_the_rows_of_plain_ones(tmp_path: Path, tokenizer_folder: Path) -> None:
    plain = CHATS[:2]
    verl = [
        {
            "data_source": "openai/gsm8k",
            "prompt": record["prompt"],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": record["verified_answer"]},
            "extra_info": {"question": "Who?", "answer": "Ann"},
        }
        for record in plain
    ]
    questions = [
        {"instruction": "Who?", "verified_answer": "Ann"},
        {
            "instruction": "Sure?",
            "history": [["Who?", "Ann."]],
            "system": "Be brief.",
            "verified_answer": 7,
        },
    ]
    nested = {"prompt": "prompt", "verified_answer": "reward_model.ground_truth"}
    question_fields = {key: key for key in questions[1]}
    forms = {
        "plain": (plain, BOTH),
        "verl": (verl, nested),
        "question": (questions, question_fields),
    }
    rows = {}
    for name, (records, fields) in forms.items():
        convert(tmp_path / name, tokenizer_folder, records, fields, max_seq_len=128)
        rows[name] = stored(tmp_path / name)
    assert len(rows["plain"]) == 2
    assert rows["verl"] == rows["question"] == rows["plain"]


def test_strings_are_used_as_they_are(tmp_path: Path, tokenizer_folder: Path) -> None:
    """The tokenizer's BOS is before a string; its EOS is not after it, since the model goes on."""
    folder = tmp_path / "tokenizer"
    shutil.copytree(tokenizer_folder, folder)
    model = Tokenizer.from_file(str(folder / "tokenizer.json"))
    control = {token: model.token_to_id(token) for token in ("<|im_start|>", EOS)}
    model.post_processor = TemplateProcessing(f"<|im_start|> $A {EOS}", None, [*control.items()])
    model.save(str(folder / "tokenizer.json"))
    prompt = {"prompt": "prompt"}
    records = [{"prompt": text} for text in ("The sky is", "", f"a {EOS}")]
    convert(tmp_path, folder, records, prompt, max_seq_len=64)
    bare = model.encode("The sky is", add_special_tokens=False).ids
    assert bare == model.encode("The sky is").ids[1:-1]
    escaped = make_encoder(tokenizer_folder)(f"a {EOS}")
    assert control[EOS] not in escaped
    begin = [control["<|im_start|>"]]
    assert stored(tmp_path) == [{"prompt": begin + bare}, {"prompt": begin + escaped}]
    assert manifest_of(tmp_path / "out/rl/train").records.filtered == {"empty_prompt": 1}


def test_every_command_knows_it(tmp_path: Path, tokenizer_folder: Path) -> None:
    recipe, output = convert(tmp_path, tokenizer_folder, [*CHATS, *CHATS[:1]], max_seq_len=64)
    assert "bad_answer" in output
    for command in ("check", "verify", "quarantine", "gc"):
        run_ok(command, recipe)
    run_ok("report", recipe, "-o", tmp_path / "report.html")
    assert "verified_answer: Ann" in (tmp_path / "report.html").read_text()
    shown = run_ok("inspect", recipe, "-n", "1").out
    assert "assistant\n\nverified_answer: Ann" in shown
    assert "⟦" not in shown, "nothing is trained"
    url = tmp_path / "out/rl/train"
    (first,) = json.loads(run_ok("inspect", url, "-n", "1", "--json").out)["shown"]
    assert first["values"] == {"verified_answer": "Ann"}
    planned = json.loads(run_ok("plan", recipe, "--batch", "2", "--gpus", "1", "--json").out)
    (stream,) = planned["streams"]
    assert (stream["samples"], stream["trained"]) == (3, 0)
    run_ok("render-yaml", recipe, "-o", tmp_path / "train.yaml")
    refused = mdsmix("preview", recipe, "--gpus", "1", "--batch", "2")
    assert (refused.code, ", the loader of ComposeRL" in refused.err) == (2, True)
    for to in ("parquet", "litdata", "megatron", "megatron-bridge"):
        refused = mdsmix("export", recipe, "--to", to, "-o", tmp_path / "exported")
        assert (refused.code, "rl has prompts, which trainers of" in refused.err) == (2, True), to
    leaks = json.loads(run_ok("leaks", url, "--eval", url, "--json").out)
    assert leaks, "prompts are searched"


def test_a_prompt_that_composerl_would_cut_is_refused(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    recipe, _ = convert(tmp_path, tokenizer_folder, CHATS[:2], max_seq_len=64)
    run_ok("render-yaml", recipe, "-o", tmp_path / "train.yaml")
    config = yaml.safe_load((tmp_path / "train.yaml").read_text())
    config["train_loader"]["dataset"]["max_gen_len"] = 40
    (tmp_path / "cut.yaml").write_text(yaml.safe_dump(config))
    checked = mdsmix("check", tmp_path / "cut.yaml")
    assert (checked.code, "prompt-cut" in checked.out) == (3, True)
    with pytest.raises(MixRefused, match="ComposeRL would cut off its end"):
        list(build_loader(config, 2))
    del config["train_loader"]["dataset"]["max_gen_len"]
    (tmp_path / "unset.yaml").write_text(yaml.safe_dump(config))
    checked = mdsmix("check", tmp_path / "unset.yaml")
    assert (checked.code, "max_gen_len is missing in dataset" in checked.out) == (3, True)
    # A recipe with another length makes the streams again.
    output = " ".join(mdsmix("check", recipe, "train_loader.dataset.max_gen_len=40").out.split())
    assert "train_loader.dataset.max_gen_len was 10 and is 40" in output
    again = run_ok("convert", recipe, "train_loader.dataset.max_gen_len=40")
    assert "1 prompt_too_long" in again.out
    hint = "prompt_too_long: a larger max_seq_len, or a smaller max_gen_len, keeps these records"
    assert hint in again.out


def test_a_batch_has_answers_for_all_rows(tmp_path: Path, tokenizer_folder: Path) -> None:
    for name, fields in (("with", BOTH), ("without", {"prompt": "prompt"})):
        convert(tmp_path / name, tokenizer_folder, CHATS[:1], fields, max_seq_len=64)
    run_ok("render-yaml", tmp_path / "with/recipe.yaml", "-o", tmp_path / "train.yaml")
    config = yaml.safe_load((tmp_path / "train.yaml").read_text())
    second_stream = {"local": str(tmp_path / "without/out/rl"), "split": "train"}
    config["train_loader"]["dataset"]["streams"]["more"] = second_stream
    (tmp_path / "both.yaml").write_text(yaml.safe_dump(config))
    checked = mdsmix("check", tmp_path / "both.yaml")
    assert (checked.code, "columns-unlike" in checked.out) == (3, True), checked.out
    with pytest.raises(MixRefused, match="prompts with verified_answer and prompts without it"):
        list(build_loader(config, 2))


def test_init_writes_a_recipe_of_prompts_alone(
    tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "rl.jsonl", CHATS[:2])
    run_ok("init", "rl.jsonl", "--tokenizer", tokenizer_folder, "-o", "recipe.yaml")
    tree = yaml.safe_load((tmp_path / "recipe.yaml").read_text())
    assert tree["train_loader"] == {"name": "prompt", "dataset": {"max_gen_len": 1024}}
    assert tree["tokenizer"]["kwargs"] == {"padding_side": "left"}
    run_ok("convert", "recipe.yaml")
    run_ok("render-yaml", "recipe.yaml", "-o", "train.yaml")
    assert manifest_of(tmp_path / "mix/rl/train").totals.samples == 2


REFUSED: dict[str, str] = {
    "train_loader.name=finetuning": "is read only by train_loader.name: prompt",
    "streams.rl.pack=true": "remove pack from this stream",
    "streams.rl.too_long=filter": "too_long",
    "train_loader.dataset.max_gen_len=null": "max_gen_len is not set: set it to the tokens",
    "train_loader.dataset.max_gen_len=0": "max_gen_len is 0: set it to",
    "train_loader.dataset.max_gen_len=many": "max_gen_len is 'many': set it to",
    "train_loader.dataset.max_gen_len=64": "leaves no token of max_seq_len: 64 for a prompt",
    "streams.rl.source.chosen=x": "prompt reads prompt, or instruction",
}


def test_a_recipe_that_cannot_be_right_is_refused(tmp_path: Path, tokenizer_folder: Path) -> None:
    recipe, _ = convert(tmp_path, tokenizer_folder, CHATS[:1], max_seq_len=64)
    for change, message in REFUSED.items():
        answer = mdsmix("convert", recipe, change)
        assert (answer.code, message in answer.err) == (2, True), (change, answer.err)
