#!/usr/bin/env bash
# Surprise: verl's MultiTurnSFTDataset refuses every conversation under Qwen 3's chat template, and with the flag that its
#   error advises, ignore_input_ids_mismatch=True, it drops the reasoning of all answers, also of the last one. It renders
#   each message alone, and the template prints reasoning only after a question.
# Likely guess: the flag accepts small differences, such as an empty thought of an earlier answer ("Qwen Thinking series
#   models add <think></think> tags to last turn"). The reasoning of the records is trained.
# Why it matters: a model that reasons is trained to answer at once, on records that were made to teach reasoning. The loss
#   looks fine, since short answers are easy, and the one warning is the sentence of the error.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet uv
"$folder/env/bin/uv" pip install --quiet --python "$folder/env" jinja2 numpy
# Only sources are read: verl needs the packages of a GPU. TRL has a copy of Qwen 3's template.
"$folder/env/bin/uv" pip install --quiet --no-deps --python-version 3.13 --target "$folder/packages" 'verl==0.9.1' 'trl==1.16.0'
"$folder/env/bin/python" - "$folder/packages" <<'PY'
import ast
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

packages = Path(sys.argv[1])
environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
environment.filters["tojson"] = json.dumps
TEMPLATE = environment.from_string((packages / "trl/chat_templates/qwen3.jinja").read_text())


class Tokenizer:
    """A tokenizer with a token for each character, and Qwen 3's chat template."""

    def apply_chat_template(self, messages, tools=None, add_generation_prompt=False, return_dict=False, **_):
        text = TEMPLATE.render(messages=messages, tools=tools, add_generation_prompt=add_generation_prompt)
        ids = numpy.array([ord(character) for character in text])
        return {"input_ids": ids[None], "attention_mask": numpy.ones_like(ids)[None]} if return_dict else [*ids]


def run(path, names, scope):
    """Run some functions and classes of a file, without the file's imports."""
    nodes = ast.parse("from __future__ import annotations").body
    nodes += [node for node in ast.parse((packages / path).read_text()).body if getattr(node, "name", "") in names]
    exec(compile(ast.Module(nodes, []), path, "exec"), scope)
    return scope


# The parts of torch that are called, as numpy has them.
torch = SimpleNamespace(
    ones_like=numpy.ones_like,
    zeros_like=numpy.zeros_like,
    cat=lambda arrays, dim: numpy.concatenate(arrays, dim),
    arange=lambda length, dtype: numpy.arange(length),
    equal=numpy.array_equal,
    Tensor=numpy.ndarray,
    long=int,
)
scope = {"torch": torch, "normalize_token_ids": lambda ids: ids, "print_assembled_message": lambda *_: None}
scope |= {"Dataset": object, "convert_nested_value_to_list_recursive": lambda value: value}
scope |= {"DatasetPadMode": SimpleNamespace(RIGHT="right", NO_PADDING="no_padding")}
scope["logger"] = SimpleNamespace(warning_once=lambda message: None)
run("verl/utils/tokenizer/chat_template.py", {"apply_chat_template", "extract_system_prompt_and_generation"}, scope)
run("verl/utils/dataset/multiturn_sft_dataset.py", {"MultiTurnSFTDataset"}, scope)


def read(messages, ignore):
    """Return the text of a row of verl's data set, and the part of it that is trained."""
    dataset = object.__new__(scope["MultiTurnSFTDataset"])
    dataset.tokenizer, dataset.processor, dataset.apply_chat_template_kwargs = Tokenizer(), None, {}
    dataset.messages_key, dataset.image_key, dataset.video_key = "messages", "images", "videos"
    dataset.tools = dataset.enable_thinking = dataset.enable_thinking_default = None
    dataset.pad_mode, dataset.truncation, dataset.max_length = "no_padding", "error", 10_000
    dataset.ignore_input_ids_mismatch = ignore
    prompts = scope["extract_system_prompt_and_generation"](dataset.tokenizer)
    dataset.system_prompt, dataset.generation_prompt = prompts
    row = SimpleNamespace(to_dict=lambda: {"messages": [*map(dict, messages)]})
    dataset.dataframe = SimpleNamespace(iloc=[row])
    sample = dataset[0]
    return ["".join(map(chr, ids)) for ids in (sample["input_ids"], sample["input_ids"][sample["loss_mask"] == 1])]


print("verl 0.9.1, the chat template of Qwen 3")
question = {"role": "user", "content": "What is 2 + 2?"}
answers = {
    "reasoning_content": {"role": "assistant", "reasoning_content": "Two and two.", "content": "It is 4."},
    "<think> in the content": {"role": "assistant", "content": "<think>\nTwo and two.\n</think>\n\nIt is 4."},
    "no reasoning": {"role": "assistant", "content": "It is 4."},
}
for name, answer in answers.items():
    messages = [question, answer]
    try:
        read(messages, ignore=False)
        raise SystemExit(f"{name}: not refused")
    except AssertionError as error:
        assert "Set `ignore_input_ids_mismatch=True`" in str(error)
    printed = TEMPLATE.render(messages=messages)
    text, trained = read(messages, ignore=True)
    print(f"{name}: refused; with ignore_input_ids_mismatch=True trained: {trained!r}; the template prints {printed[64:]!r}")
    assert trained == "It is 4.<|im_end|>\n"
    assert "<think>" in printed and "<think>" not in text
    assert ("Two and two." in printed) == (name != "no reasoning")
print("as found: the reasoning of the only answer is neither trained nor in the row")
PY
