#!/usr/bin/env bash
# Surprise: mistral-common's v2 tokenizer (mistral-small-2402 and others) leaves out each tool call and each result before the
#   last question, without a warning, also in its mode for finetuning. The answer that was read off a result follows the
#   question at once. From v3 on they are encoded.
# Likely guess: every message of a conversation that was accepted and validated is in its tokens.
# Why it matters: of a training set of tool use with several questions only the calls of the last one are trained; the earlier
#   answers teach the model to state what it would have to look up. Nothing shows it but a smaller number of tokens.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet uv
"$folder/env/bin/uv" pip install --quiet --python "$folder/env" 'mistral-common==1.13.1' 'sentencepiece==0.2.3' 'tiktoken==0.14.0'
"$folder/env/bin/python" - <<'PY'
import mistral_common
from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.protocol.instruct.validator import ValidationMode
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer


def turn(city, number):
    """Return a question, the call of a tool, its result and the answer."""
    call = {"name": "clock", "arguments": f'{{"city": "{city}"}}'}
    name = f"call0000{number}"
    return [
        {"role": "user", "content": f"Time in {city}?"},
        {"role": "assistant", "tool_calls": [{"id": name, "type": "function", "function": call}]},
        {"role": "tool", "tool_call_id": name, "name": "clock", "content": f"1{number}:00"},
        {"role": "assistant", "content": f"It is 1{number}:00 there."},
    ]


tool = {"type": "function", "function": {"name": "clock", "description": "", "parameters": {}}}
messages = [*turn("Rome", 1), *turn("Oslo", 2)]
print("mistral-common", mistral_common.__version__, "two questions, each with a call and a result")
found = {}
for version, shipped in (("v2", MistralTokenizer.v2()), ("v3", MistralTokenizer.v3())):
    path = shipped.instruct_tokenizer.tokenizer.file_path
    tokenizer = MistralTokenizer.from_file(str(path), mode=ValidationMode.finetuning)
    request = ChatCompletionRequest.from_openai(messages=messages, tools=[tool])
    text = tokenizer.encode_chat_completion(request).text.replace("▁", " ")
    print(version, text)
    found[version] = (text.count("[TOOL_CALLS]"), text.count("[TOOL_RESULTS]"))
print("calls and results:", found)
assert found == {"v2": (1, 1), "v3": (2, 2)}
PY
