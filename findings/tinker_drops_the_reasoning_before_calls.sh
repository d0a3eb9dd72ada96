#!/usr/bin/env bash
# Surprise: tinker-cookbook's renderer of Qwen 3 leaves out the reasoning before a call of a tool, and trains the call without
#   it: it removes the thoughts of all answers but the last message. Qwen 3's chat template prints all reasoning since the
#   last question. Two results in a row become two messages, which the template prints as one.
# Likely guess: "this renderer produces identical tokens to HuggingFace's apply_chat_template with enable_thinking=True", as
#   its docstring says of the default strip_thinking_from_history=True.
# Why it matters: with ALL_ASSISTANT_MESSAGES an agent is trained to call tools without a thought. With the rows for single
#   answers that a warning advises, and in rollouts, each prompt still lacks the reasoning before earlier calls, so the model
#   reads other prompts where it is served with the template.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet uv
"$folder/env/bin/uv" pip install --quiet --python "$folder/env" pydantic tokenizers jinja2 numpy pillow
# Without torch and tinker, which only store the tokens here. TRL has a copy of Qwen 3's template.
"$folder/env/bin/uv" pip install --quiet --no-deps --python-version 3.13 --target "$folder/packages" \
  'tinker-cookbook==0.6.1' 'trl==1.16.0'
"$folder/env/bin/python" - "$folder/packages" <<'PY'
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace

from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

packages = Path(sys.argv[1])
sys.path.insert(0, str(packages))


@dataclass
class Chunk:
    tokens: list[int]

    @property
    def length(self):
        return len(self.tokens)


class Missing(ModuleType):
    """A package that is not installed. Its classes are only named in annotations."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return object


torch, tinker = Missing("torch"), Missing("tinker")
sys.modules |= {"torch": torch, "tinker": tinker}
torch.tensor = list
tinker.EncodedTextChunk, tinker.ModelInput = Chunk, SimpleNamespace
tinker.types = SimpleNamespace(EncodedTextChunk=Chunk, ModelInputChunk=Chunk, ImageChunk=object)

from tinker_cookbook.renderers.base import ToolCall, TrainOnWhat
from tinker_cookbook.renderers.qwen3 import Qwen3Renderer

END = 0x110000
"The token `<|im_end|>`; each character is a token too."


class Tokenizer:
    bos_token = None

    def encode(self, text, add_special_tokens=False):
        return [END] if text == "<|im_end|>" else [*map(ord, text)]

    @property
    def backend_tokenizer(self):
        return SimpleNamespace(encode=lambda text, add_special_tokens: SimpleNamespace(ids=self.encode(text)))


def decode(tokens):
    return "".join("<|im_end|>" if token == END else chr(token) for token in tokens)


environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
environment.filters["tojson"] = json.dumps
template = environment.from_string((packages / "trl/chat_templates/qwen3.jinja").read_text())


def answer(thought, text, *cities):
    calls = [{"name": "weather", "arguments": {"city": city}} for city in cities]
    openai = {"role": "assistant", "reasoning_content": thought, "content": text}
    parts = [{"type": "thinking", "thinking": thought}, {"type": "text", "text": text}]
    message = {"role": "assistant", "content": parts}
    if cities:
        openai["tool_calls"] = [{"type": "function", "function": call} for call in calls]
        texts = [{"name": call["name"], "arguments": json.dumps(call["arguments"])} for call in calls]
        message["tool_calls"] = [ToolCall.model_validate({"function": call}) for call in texts]
    return openai, message


pairs = [({"role": role, "content": text},) * 2 for role, text in
         (("user", "Rain?"), ("tool", "Oslo: rain"), ("tool", "Rome: sun"))]
pairs.insert(1, answer("I look it up.", "", "Oslo", "Rome"))
pairs.append(answer("The tools know.", "Only in Oslo."))

printed = template.render(messages=[openai for openai, _ in pairs])
model_input, weights = Qwen3Renderer(Tokenizer()).build_supervised_example(
    [message for _, message in pairs], train_on_what=TrainOnWhat.ALL_ASSISTANT_MESSAGES
)
tokens = [token for chunk in model_input.chunks for token in chunk.tokens]
rendered = decode(tokens)
trained = decode(token for token, weight in zip(tokens, weights, strict=True) if weight)
print(f"tinker-cookbook 0.6.1\n--- the template:\n{printed}\n--- the renderer:\n{rendered}\n--- trained:\n{trained}")
assert "I look it up." in printed and "The tools know." in printed
assert "I look it up." not in rendered and "The tools know." in trained
prompt = Qwen3Renderer(Tokenizer()).build_generation_prompt([message for _, message in pairs[:-1]])
assert "I look it up." not in decode(token for chunk in prompt.chunks for token in chunk.tokens)
assert trained.startswith('<tool_call>\n{"name": "weather"')
assert printed.count("<|im_start|>user") == 2 and rendered.count("<|im_start|>user") == 3
assert "identical" in Qwen3Renderer.__init__.__doc__ and "strip_thinking_from_history=True" in Qwen3Renderer.__init__.__doc__
print("as found: the call is trained without the reasoning before it, which the template prints")
PY
