#!/usr/bin/env bash
# Surprise: in OpenAI's interface the content of a call of a tool is null. Under transformers 4 (4.57.6) GLM-4.5's chat template
#   prints the word `None` for it, before the call. transformers 5 (5.24.0) drops the null before it renders, and the word is
#   gone. Templates of Qwen 3 and Llama 3.1 print the same text under both.
# Likely guess: null is no text, as in OpenAI's interface, and one template gives one text for the same messages.
# Why it matters: records of calls mostly come from such an interface (logs, distillation, rollouts). A trainer that pins
#   transformers 4, as LLM-Foundry does, trains the word before each call, and nothing warns. prime-rl's renderers (0.1.12),
#   which copy the template without transformers, write and train it too.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/tools"
"$folder/tools/bin/pip" install --quiet uv
uv="$folder/tools/bin/uv"
# TRL has copies of the models' templates.
"$uv" pip install --quiet --no-deps --python-version 3.13 --target "$folder/packages" 'trl==1.16.0'
cat >"$folder/render.py" <<'PY'
import sys
from pathlib import Path

import transformers
from tokenizers import Tokenizer, models

folder, marker = Path(sys.argv[1]), sys.argv[2]
model = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=model, bos_token="?", eos_token="?")
call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
tools = [{"type": "function", "function": {"name": "weather", "description": "d", "parameters": {}}}]


def render(name, content):
    """Return the text of a question and a call with this content."""
    messages = [{"role": "user", "content": "Rain?"}, {"role": "assistant", "content": content, "tool_calls": [call]}]
    tokenizer.chat_template = (folder / f"{name}.jinja").read_text()
    return tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)


print(f"transformers {transformers.__version__}, a call whose content is null:")
for name in ("glm4moe", "qwen3", "llama3_1"):
    null, empty = render(name, None), render(name, "")
    print(f"{name}: {null[null.rindex('Rain?') :]!r}")
    is_printed = name == "glm4moe" and marker == "printed"
    assert ("<think></think>\nNone\n<tool_call>weather" in null) == is_printed
    assert (null == empty) != is_printed
    assert "None" not in empty
PY
for pair in 4.57.6:printed 5.24.0:dropped; do
  version="${pair%%:*}"
  python3 -m venv "$folder/$version"
  "$uv" pip install --quiet --python "$folder/$version" "transformers==$version" jinja2
  HF_HUB_OFFLINE=1 "$folder/$version/bin/python" "$folder/render.py" "$folder/packages/trl/chat_templates" "${pair##*:}" 2>/dev/null
done
echo "as found: transformers 4 prints None before the call under GLM-4.5's template, and transformers 5 does not"
