#!/usr/bin/env bash
# Surprise: under a chat template whose generation prompt opens a thought (`<think>`), OpenRLHF trains answers without their
#   first characters: "The answer is four." is trained as "er is four.". Nothing warns. Its SFT and DPO data cut the text of
#   the whole conversation after as many characters as the generation prompt has, and do not compare the two.
# Likely guess: what is cut off is the prompt. If the text does not begin with the generation prompt, the record is refused,
#   or the answer is taken from the record.
# Why it matters: DeepSeek-R1, QwQ, GLM-4.7 and Nemotron 3 open a thought in the generation prompt, and print an answer
#   without reasoning otherwise. Short answers are lost whole, and such rows are dropped without a message.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet uv
"$folder/env/bin/uv" pip install --quiet --python "$folder/env" jinja2
# Only the source is read: openrlhf needs the packages of a GPU.
"$folder/env/bin/uv" pip install --quiet --no-deps --target "$folder/openrlhf" 'openrlhf==0.11.2'
"$folder/env/bin/python" - "$folder/openrlhf" <<'PY'
import ast
import sys
from pathlib import Path

from jinja2 import Environment


def load_function(file):
    """Return the function preprocess_data of a file of OpenRLHF, without the file's imports."""
    path = Path(sys.argv[1], "openrlhf/datasets", file)
    nodes = ast.parse(path.read_text()).body
    (function,) = (node for node in nodes if getattr(node, "name", "") == "preprocess_data")
    scope = {"exist_and_not_none": lambda record, key: record.get(key) is not None}
    exec(compile(ast.Module([function], []), str(path), "exec"), scope)
    return scope["preprocess_data"]


# In the manner of DeepSeek-R1: the thought is opened to ask for an answer, and is not printed with an answer.
TEMPLATE = Environment().from_string(
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant><think>\n{% endif %}"
)


def render(messages, tokenize=False, add_generation_prompt=False):
    return TEMPLATE.render(messages=messages, add_generation_prompt=add_generation_prompt)


def conversation(answer):
    return [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": answer}]


sft = load_function("sft_dataset.py")
for answer, left in {"The answer is four.": "er is four.", "Four.": ""}.items():
    record = {"messages": conversation(answer)}
    prompt, response = sft(record, input_key="messages", apply_chat_template=render)
    print(f"SFT: {answer!r} becomes {prompt!r} + {response!r}")
    assert (prompt, response) == ("<user>2 + 2?<assistant><think>\n", left)

dpo = load_function("reward_dataset.py")
record = {"chosen": conversation("The answer is four."), "rejected": conversation("I think it is five.")}
_, chosen, rejected, _ = dpo(record, apply_chat_template=render, is_dpo=True)
print(f"DPO: the answers become {chosen!r} and {rejected!r}")
assert (chosen, rejected) == ("er is four.", "it is five.")
print("as found: the characters of the opened thought are cut off each answer")
PY
