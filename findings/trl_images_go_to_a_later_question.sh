#!/usr/bin/env bash
# Surprise: TRL puts the images of a record without placeholders before the first question whose content is a string, not
#   before the first question. If the first question is a list of parts with only text, as OpenAI's interface takes it, the
#   images move to a later question, without a word. If no later question is a string, the same record raises a ValueError.
# Likely guess: "before the first user message", as the docstring of prepare_multimodal_messages says, whatever the form of
#   its content.
# Why it matters: a data set with both forms of content trains answers on an image that comes after them, and the user sees
#   an error only for the shorter conversations.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
# Only the source is read: importing trl needs torch.
"$folder/env/bin/pip" install --quiet --no-deps --target "$folder/trl" 'trl==1.16.0'
"$folder/env/bin/python" - "$folder/trl" <<'PY'
import ast
import sys
from pathlib import Path
from typing import Any

tree = ast.parse(Path(sys.argv[1], "trl/data_utils.py").read_text())
name = "prepare_multimodal_messages"
nodes = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
scope = {"Any": Any}
exec(compile(ast.Module(nodes, []), "trl/data_utils.py", "exec"), scope)
prepare = scope[name]

print("trl 1.16.0")
text = "What is it?"
part = {"type": "text", "text": text}
answer = {"role": "assistant", "content": "A ball."}
later = [{"role": "user", "content": "Thanks. Bye?"}, {"role": "assistant", "content": "Bye."}]


def place(first_content, further):
    """Return the number of the message that gets the image."""
    messages = [{"role": "user", "content": first_content}, answer, *further]
    prepared = prepare(messages, ["ball.jpg"])
    return [any(piece["type"] == "image" for piece in m["content"]) for m in prepared].index(True)


as_text = place(text, later)
as_parts = place([part], later)
print(f"first question a string: image in message {as_text}; a list: in message {as_parts}")
assert (as_text, as_parts) == (0, 2)
try:
    place([part], [])
except ValueError as error:
    print("without a later question:", error)
else:
    raise AssertionError("no error")
print("as found: the image comes after the answer that is about it")
PY
