#!/usr/bin/env bash
# Surprise: mistral-common's v2 and v3 tokenizers (Small 2402; Mixtral 8x22B, Nemo, Ministral 8B) encode the system message and
#   the tools not at the beginning but before the last question. So the first turns of a conversation are encoded without
#   them, and the encoding of a short conversation is no beginning of the longer one. v1 puts the system message first, v7 too,
#   but v7 still puts the tools before the last question.
# Likely guess: the system message comes first, since it is the first message, and a longer conversation only appends tokens.
# Why it matters: who trains all answers of a conversation trains the earlier ones as given without the instructions and without
#   the tools that they call; masks found by encoding prefixes are wrong, and a server's cache of prefixes never hits.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet uv
"$folder/env/bin/uv" pip install --quiet --python "$folder/env" 'mistral-common==1.13.1' 'sentencepiece==0.2.3' 'tiktoken==0.14.0'
"$folder/env/bin/python" - <<'PY'
import mistral_common
from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

FIRST = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Time in Rome?"},
]
BOTH = [
    *FIRST,
    {"role": "assistant", "content": "It is noon."},
    {"role": "user", "content": "And in Oslo?"},
]
TOOL = {"type": "function", "function": {"name": "clock", "description": "", "parameters": {}}}
TOKENIZERS = {
    "v1": MistralTokenizer.v1(),
    "v2": MistralTokenizer.v2(),
    "v3": MistralTokenizer.v3(),
    "v3 tekken": MistralTokenizer.v3(is_tekken=True),
    "v7": MistralTokenizer.v7(),
}

print("mistral-common", mistral_common.__version__)
found = {}
for name, tokenizer in TOKENIZERS.items():

    def encode(messages, tools=None):
        request = ChatCompletionRequest.from_openai(messages=messages, tools=tools)
        return tokenizer.encode_chat_completion(request)

    short, long = encode(FIRST), encode(BOTH)
    print(f"{name:10}", long.text.replace("▁", " "))
    is_prefix = long.tokens[: len(short.tokens)] == short.tokens
    system_at = long.text.index("brief") < long.text.index("Rome")
    tools_at = None
    if name != "v1":  # has no tools
        with_tools = encode(BOTH, [TOOL]).text
        tools_at = with_tools.index("AVAILABLE_TOOLS") < with_tools.index("Rome")
    found[name] = (is_prefix, system_at, tools_at)
print("(a prefix stays a prefix, the system message is first, the tools are first)")
for name, facts in found.items():
    print(f"{name:10}", facts)
last = (False, False, False)
assert found == {
    "v1": (True, True, None),
    "v2": last,
    "v3": last,
    "v3 tekken": last,
    "v7": (True, True, False),
}
PY
