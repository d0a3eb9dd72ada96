"""Chat templates that print tools, and random conversations that call tools.

The templates are written for the tests, in the style of those of well-known models.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

Message = dict[str, Any]

LLAMA_3 = (
    "{{ bos_token }}"
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content | trim %}"
    "{% set rest = messages[1:] %}"
    "{% else %}{% set system = '' %}{% set rest = messages %}{% endif %}"
    "<|im_start|>system\n\n{% if tools %}Environment: ipython\n{% endif %}{{ system }}<|im_end|>"
    "{% for m in rest %}"
    "{% if loop.first and tools and m.role == 'user' %}<|im_start|>user\n\nGiven the following "
    "functions:\n"
    "{% for t in tools %}{{ t | tojson(indent=4) + '\n\n' }}{% endfor %}"
    "{{ m.content | trim }}<|im_end|>"
    "{% elif m.tool_calls %}{% if m.tool_calls | length != 1 %}"
    "{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}"
    "{% set call = m.tool_calls[0].function %}<|im_start|>assistant\n\n"
    '{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}<|im_end|>'
    "{% elif m.role in ['tool', 'ipython'] %}<|im_start|>ipython\n\n"
    "{{ m.content | tojson }}<|im_end|>"
    "{% else %}<|im_start|>{{ m.role }}\n\n{{ m.content | trim }}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n\n{% endif %}"
)
_CHATML_TOOLS = (
    "{% if tools %}<|im_start|>system\n"
    "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% else %}You help.{% endif %}"
    "{{ '\n' }}\n# Tools\n<tools>"
    "{% for tool in tools %}{{ '\n' }}{{ tool | tojson }}{% endfor %}{{ '\n' }}</tools><|im_end|>\n"
    "{% elif messages[0].role == 'system' %}<|im_start|>system\n"
    "{{ messages[0].content }}<|im_end|>\n{% endif %}"
)
_RESULTS = (
    "{% elif m.role == 'tool' %}{% if loop.index0 == 0 or messages[loop.index0 - 1].role != "
    "'tool' %}<|im_start|>user{% endif %}"
    "\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN_2_5 = (
    _CHATML_TOOLS + "{% for m in messages %}"
    "{% if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}<|im_start|>"
    "{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% elif m.role == 'assistant' %}<|im_start|>assistant{% if m.content %}{{ '\n' }}"
    "{{ m.content }}{% endif %}"
    '{% for c in m.tool_calls %}{{ "\n" }}<tool_call>\n{"name": "'
    '{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}<|im_end|>\n" + _RESULTS
)
QWEN_3 = (
    _CHATML_TOOLS + "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
    "{% endfor %}"
    "{% for m in messages %}{% if m.role == 'user' %}<|im_start|>user\n{{ m.content }}<|im_end|>\n"
    "{% elif m.role == 'assistant' %}{% set content = m.content if m.content is string else '' %}"
    "{% set thought = '' %}"
    "{% if m.reasoning_content is string %}{% set thought = m.reasoning_content %}"
    "{% elif '</think>' in content %}{% set thought = "
    "content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "<|im_start|>assistant\n{% if loop.index0 > ns.last and thought %}<think>\n"
    "{{ thought }}\n</think>\n\n{% endif %}{{ content }}"
    "{% for c in m.tool_calls or [] %}{% set call = c.function or c %}{{ '\n' }}<tool_call>\n"
    '{"name": "{{ call.name }}", "arguments": {% if call.arguments is string %}'
    "{{ call.arguments }}{% else %}"
    "{{ call.arguments | tojson }}{% endif %}}\n</tool_call>{% endfor %}<|im_end|>\n" + _RESULTS
)
MISTRAL = (
    "{{ bos_token }}"
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content + '\n\n' %}"
    "{% set rest = messages[1:] %}"
    "{% else %}{% set system = '' %}{% set rest = messages %}{% endif %}"
    "{% set last = (rest | selectattr('role', 'equalto', 'user') | list)[-1] %}"
    "{% for m in rest %}{% if m.role == 'user' %}"
    "{% if tools and m is sameas last %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]"
    "{% endif %}"
    "[INST] {{ system if m is sameas last }}{{ m.content }}[/INST]"
    "{% elif m.tool_calls %}[TOOL_CALLS] [{% for c in m.tool_calls %}"
    "{% if c.id is not defined or c.id | length != 9 %}"
    "{{ raise_exception('Tool call IDs should be strings of length 9!') }}{% endif %}"
    '{{ (c.function | tojson)[:-1] }}, "id": "{{ c.id }}"}{{ \', \' if not loop.last }}'
    "{% endfor %}]{{ eos_token }}"
    "{% elif m.role == 'tool' %}[TOOL_RESULTS] {\"content\": "
    '{{ m.content | tojson }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]'
    "{% else %} {{ m.content | trim }}{{ eos_token }}{% endif %}{% endfor %}"
)
HERMES = QWEN_2_5.replace("not m.tool_calls", "m.tool_calls is not defined").replace(
    "{% if m.content %}{{ '\n' }}{{ m.content }}{% endif %}", ""
)
# Prints one call of each message. Content next to a call is its reasoning, which is dropped once an
# answer follows.
GPT_OSS = (
    "{% if tools %}<|start|>developer<|message|>{% for t in tools %}{{ t.function | tojson }}"
    "{% endfor %}<|end|>{% endif %}"
    "{% for m in messages %}{% if m.tool_calls %}{% set ns = namespace(answered=false) %}"
    "{% for later in messages[loop.index:] if later.role == 'assistant' and not later.tool_calls "
    "%}{% set ns.answered = true %}{% endfor %}"
    "{% if m.content and not ns.answered %}<|start|>assistant<|channel|>analysis<|message|>"
    "{{ m.content }}<|end|>{% endif %}"
    "{% set call = m.tool_calls[0].function %}"
    "<|start|>assistant to=functions.{{ call.name }}<|channel|>commentary json<|message|>"
    "{{ call.arguments | tojson }}<|call|>"
    "{% elif m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
    "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}"
    "{% elif m.role == 'tool' %}<|start|>functions to=assistant<|channel|>commentary<|message|>"
    "{{ m.content | tojson }}<|end|>"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
# Gemma 4 (keys sorted) and Kimi K3 print arguments that are an object in a syntax of their own, and
# arguments that are text as they are.
GEMMA_4 = (
    "{% macro value(v) %}{% if v is string %}<|q|>{{ v }}<|q|>{% elif v is boolean %}"
    "{{ 'true' if v else 'false' }}"
    "{% elif v is mapping %}{% raw %}{{% endraw %}{% for k, x in v | dictsort %}{{ k }}:"
    "{{ value(x) }}{{ ',' if not loop.last }}{% endfor %}}"
    "{% elif v is sequence %}[{% for x in v %}{{ value(x) }}{{ ',' if not loop.last }}"
    "{% endfor %}]{% else %}{{ v }}{% endif %}{% endmacro %}"
    "{{ tools | tojson }}{% for m in messages %}<|turn>"
    "{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{% for c in m.tool_calls or [] %}<|tool_call>call:{{ c.function.name + '{' }}"
    "{% if c.function.arguments is mapping %}{% for k, x in c.function.arguments | dictsort %}"
    "{{ k }}:{{ value(x) }}{{ ',' if not loop.last }}{% endfor %}"
    "{% else %}{{ c.function.arguments }}{% endif %}}<tool_call|>{% endfor %}"
    "{{ m.content or '' }}<turn|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn>model\n{% endif %}"
)
KIMI_K3 = (
    "{{ tools | tojson }}{% for m in messages %}<|open|>{{ m.role }}<|sep|>{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}"
    "<|open|>call {{ c.function.name }}<|sep|>{% if c.function.arguments is mapping %}"
    "{% for k, x in c.function.arguments.items() %}"
    "<|open|>argument {{ k }}<|sep|>{{ x if x is string else x | tojson }}<|close|>{% endfor %}"
    "{% else %}<|open|>json<|sep|>{{ c.function.arguments }}<|close|>{% endif %}<|close|>"
    "{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|open|>assistant<|sep|>{% endif %}"
)
# Takes null content only in the last message.
QWQ = QWEN_2_5.replace(
    "<|im_start|>assistant{% if m.content %}",
    (
        "{% set content = m.content %}{% if not loop.last %}"
        "{% set content = m.content.split('</think>')[-1] %}{% endif %}<|im_start|>assistant"
        "{% if m.content %}"
    ),
)
# Other ways to print arguments: only text (DeepSeek-V3), only an object, key by key (GLM), escaped
# twice, and an object as Python prints it. The last two need content, or print null as None.
_CALLS = (
    "{{{{ tools | tojson }}}}{{% for m in messages %}}<{{{{ m.role }}}}>{content}"
    "{{% for c in m.tool_calls or [] %}}[{{{{ c.function.name }}}} {arguments}]{{% endfor %}}{"
    "{% endfor %}}"
    "{{{{ '<assistant>' if add_generation_prompt }}}}"
)
_CONTENT = "{{ m.content or '' }}"
TEXT_ONLY = _CALLS.format(content=_CONTENT, arguments="{{ '```json ' + c.function.arguments }}")
ITEMS = _CALLS.format(
    content=_CONTENT,
    arguments="{% for k, v in c.function.arguments | items %}{{ k }}={{ v }};{% endfor %}",
)
ESCAPES = _CALLS.format(content=_CONTENT, arguments="{{ c.function.arguments | tojson | tojson }}")
PYTHON = _CALLS.format(content=_CONTENT, arguments="{{ c.function.arguments }}")
NEEDS_TEXT = _CALLS.format(
    content="{{ m['content'] + '' }}", arguments="{{ c.function.arguments | tojson }}"
)
PRINTS_NONE = _CALLS.format(
    content="{{ m.content if m.content is defined }}",
    arguments="{{ c.function.arguments | tojson }}",
)

TEMPLATES_WITH_TOOLS = {
    "llama_3": LLAMA_3,
    "qwen_2_5": QWEN_2_5,
    "qwen_3": QWEN_3,
    "mistral": MISTRAL,
    "hermes": HERMES,
}

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tells the weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["city"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": 'Adds <numbers> & "more"',
            "parameters": {"type": "object", "properties": {"of": {"type": "array"}}},
        },
    },
]
ARGUMENTS: list[dict[str, Any]] = [
    {"city": "Köln"},
    {"city": 'a "b" \\ c', "days": 3},
    {"of": [1, 2.5, None, True]},
    {},
    {"deep": {"er": ["é"]}},
]


def draw_conversations(
    count: int, seed: int = 7
) -> Iterator[tuple[list[Message], list[Message] | None]]:
    """Yield conversations as OpenAI writes them, each with its tools or None. About 7 of 10 have
    tools and may call them, with every form of arguments and content.
    """
    draw = random.Random(seed)
    for number in range(count):
        has_tools = draw.random() < 0.7
        messages = list[Message]()
        if draw.random() < 0.5:
            messages.append({"role": "system", "content": f"be {number}"})
        for turn in range(draw.randint(1, 3)):
            messages.append({"role": "user", "content": f"question {turn}?"})
            for step in range(draw.randint(0, 2) if has_tools else 0):
                messages += _draw_calls(draw, f"{number % 1000:03}{turn:03}{step:02}")
            thought = f"<think>\nhm {turn}\n</think>\n\n" if draw.random() < 0.3 else ""
            messages.append({"role": "assistant", "content": f"{thought}answer {turn}"})
        yield messages, TOOLS if has_tools else None


def _draw_calls(draw: random.Random, suffix: str) -> list[Message]:
    """Return a message with one call, or sometimes two, and its results. `suffix`: of the ids."""
    ids = [f"{number}{suffix}" for number in range(2 if draw.random() < 0.1 else 1)]
    calls = list[Message]()
    for call_id in ids:
        function = {"name": draw.choice(["weather", "add"]), "arguments": _draw_arguments(draw)}
        calls.append({"id": call_id, "type": "function", "function": function})
    content = draw.choice(
        [{}, {"content": None}, {"content": ""}, {"content": f"let me see {suffix}"}]
    )
    results = [
        {
            "role": "tool",
            "tool_call_id": call_id,
            "name": "weather",
            "content": f'{{"found": "{call_id}"}}',
        }
        for call_id in ids
    ]
    return [{"role": "assistant", **content, "tool_calls": calls}, *results]


def _draw_arguments(draw: random.Random) -> Any:
    """Return arguments as an object or as JSON text, with or without spaces."""
    arguments = draw.choice(ARGUMENTS)
    separators = draw.choice([(", ", ": "), (",", ":")])
    text = json.dumps(arguments, ensure_ascii=False, separators=separators)
    return text if draw.random() < 0.5 else arguments


def decode_arguments(messages: list[Message]) -> list[Message]:
    """Return a copy of the messages with all arguments as objects."""
    copy: list[Message] = json.loads(json.dumps(messages))
    for message in copy:
        for call in message.get("tool_calls") or ():
            arguments = call["function"]["arguments"]
            if isinstance(arguments, str):
                call["function"]["arguments"] = json.loads(arguments)
    return copy
