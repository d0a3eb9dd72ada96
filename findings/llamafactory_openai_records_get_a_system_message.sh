#!/usr/bin/env bash
# Surprise: LLaMA-Factory's data sets with `formatting: openai` get the system message "detailed thinking off", or that line
#   after their own system message, unless they have tools, and whatever the model. The reasoning of a message
#   (`reasoning_content`) and the text next to `tool_calls` are dropped, without a warning.
# Likely guess: OpenAI's messages give the rows that the chat template makes of them, as `formatting: sharegpt` does for the
#   same conversation.
# Why it matters: a model is trained on a system message that no record has and that nobody sends when it is used. Under the
#   template of a reasoning model the lost reasoning becomes an empty thought, which is trained in its place.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet uv
# Only the source is read: llamafactory needs a newer Python, and torch.
"$folder/env/bin/uv" pip install --quiet --no-deps --python-version 3.13 --target "$folder/llamafactory" 'llamafactory==0.9.5'
"$folder/env/bin/python" - "$folder/llamafactory" <<'PY'
import ast
import json
import sys
from enum import Enum
from pathlib import Path
from types import SimpleNamespace

# The two converters without the file's imports, which need torch; the names of roles are LLaMA-Factory's own.
source = Path(sys.argv[1], "llamafactory/data")
future = ast.parse("from __future__ import annotations").body


def read_classes(name, wanted):
    nodes = ast.parse((source / name).read_text()).body
    return [node for node in nodes if isinstance(node, ast.ClassDef) and node.name in wanted]


class StrEnum(str, Enum):
    pass


roles = read_classes("data_utils.py", {"Role"})
converters = read_classes("converter.py", {"OpenAIDatasetConverter", "SharegptDatasetConverter"})
warnings = []
scope = {
    "json": json,
    "Enum": Enum,
    "StrEnum": StrEnum,
    "unique": lambda cls: cls,
    "dataclass": lambda cls: cls,
    "DatasetConverter": object,
    "logger": SimpleNamespace(warning_rank0=warnings.append),
}
exec(compile(ast.Module([*future, *roles, *converters], []), "llamafactory", "exec"), scope)

shared = {"user_tag": "user", "assistant_tag": "assistant", "observation_tag": "tool", "system_tag": "system"}
shared |= {"ranking": False, "kto_tag": None, "images": None, "videos": None, "audios": None, "system": None}
shared |= {"messages": "messages", "role_tag": "role", "content_tag": "content"}


def convert(form, function_tag, record):
    converter = scope[form]()
    tools = "tools" if "tools" in record else None
    converter.dataset_attr = SimpleNamespace(**shared, function_tag=function_tag, tools=tools)
    made = converter(json.loads(json.dumps(record)))
    turns = [turn["content"] for turn in made["_prompt"] + made["_response"]]
    print(f"{form}: system {made['_system']!r}, messages {turns}")
    return made["_system"], turns


question = {"role": "user", "content": "2 + 2?"}
answer = {"role": "assistant", "content": "Four."}
plain = {"messages": [question, answer]}
assert convert("SharegptDatasetConverter", "function_call", plain) == ("", ["2 + 2?", "Four."])
assert convert("OpenAIDatasetConverter", "tool_calls", plain) == ("detailed thinking off", ["2 + 2?", "Four."])
own = {"messages": [{"role": "system", "content": "Be short."}, question, answer]}
assert convert("OpenAIDatasetConverter", "tool_calls", own)[0] == "Be short.\ndetailed thinking off"
thought = {"messages": [question, answer | {"reasoning_content": "Two and two."}]}
assert "Two and two." not in str(convert("OpenAIDatasetConverter", "tool_calls", thought))
call = {"type": "function", "function": {"name": "add", "arguments": "{}"}}
called = {
    "messages": [
        question,
        {"role": "assistant", "content": "Let me add.", "tool_calls": [call]},
        {"role": "tool", "content": "4"},
        answer,
    ],
    "tools": [call],
}
assert "Let me add." not in str(convert("OpenAIDatasetConverter", "tool_calls", called))
assert not warnings
print("as found: a system message that no record has; reasoning and text next to a call are lost")
PY
