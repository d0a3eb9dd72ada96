"""Records as the interfaces of OpenAI and Anthropic write them are rendered as transformers renders
the same conversation in plain form.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from mdsmix.encode.forms import fit_tools
from mdsmix.encode.open_template import open_template
from mdsmix.encode.rewritten_history import render_rows
from mdsmix.record import Conversation, RichConversation, detail_of
from mdsmix.shapes import SHAPES
from mdsmix.shapes.image_parts import with_images
from tests.test_encode_chat import VARIABLES, render_by_transformers
from tests.tool_styles import KIMI_K3, QWEN_3, TOOLS

USER = {"role": "user", "content": "2+3?"}
ANSWER = {"role": "assistant", "content": "5"}
ADD = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"of": [2, 3]}}}
CALLING = {"role": "assistant", "content": "", "tool_calls": [ADD]}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "5"}
PLAIN = [USER, CALLING, RESULT, ANSWER]


def message_of(role: str, *parts: Any, **keys: Any) -> dict[str, Any]:
    return {"role": role, "content": [*parts], **keys}


def text(words: str, part_type: str = "text", **keys: Any) -> dict[str, Any]:
    return {"type": part_type, "text": words, **keys}


CACHED = {"cache_control": {"type": "ephemeral"}}
TOOL_USE = {"type": "tool_use", "id": "c1", "name": "add", "input": {"of": [2, 3]}}
TOOL_RESULT = {"type": "tool_result", "tool_use_id": "c1", "content": "5"}
THOUGHT = {"type": "thinking", "thinking": "hm", "signature": "Eu8B"}
ANSWERS_IN_PARTS = [
    text("5", annotations=[]),
    text("5", "output_text", annotations=[], logprobs=[]),
]
EQUIVALENT: list[tuple[list[Any], list[Any]]] = [
    *(([USER, message_of("assistant", part)], [USER, ANSWER]) for part in ANSWERS_IN_PARTS),
    ([USER | {"content": [text("2+3?", **CACHED)]}, ANSWER], [USER, ANSWER]),
    ([USER | {"content": [text("2+", "input_text"), text("3?")]}, ANSWER], [USER, ANSWER]),
    ([USER | {"content": [text("2+3?", image_url=None)]}, ANSWER], [USER, ANSWER]),
    ([USER, ANSWER | {"tool_calls": None}], [USER, ANSWER]),
    ([USER | {"tool_calls": []}, ANSWER | {"tool_calls": []}], [USER, ANSWER]),
    ([USER, message_of("assistant", TOOL_USE), message_of("user", TOOL_RESULT), ANSWER], PLAIN),
    (
        [
            USER,
            message_of("assistant", TOOL_USE),
            message_of("user", TOOL_RESULT | {"content": [text("5")]} | CACHED),
            ANSWER,
        ],
        PLAIN,
    ),
    (
        [
            USER,
            message_of("assistant", THOUGHT, text("So."), TOOL_USE),
            message_of("user", TOOL_RESULT, text("And?")),
            ANSWER,
        ],
        [
            USER,
            CALLING | {"content": "So.", "reasoning_content": "hm"},
            RESULT,
            {"role": "user", "content": "And?"},
            ANSWER,
        ],
    ),
    (
        [USER, message_of("assistant", THOUGHT, text("5"))],
        [USER, ANSWER | {"reasoning_content": "hm"}],
    ),
    *(
        (
            [USER, CALLING, RESULT | {"content": content}, ANSWER],
            [USER, CALLING, RESULT | {"content": plain}, ANSWER],
        )
        for content, plain in (
            ({"sum": 5, "ö": None}, '{"sum": 5, "ö": null}'),
            ([5, {"a": 1}], '[5, {"a": 1}]'),
            ([{"type": "sum", "of": 5}], '[{"type": "sum", "of": 5}]'),
            ([text("a"), text("b")], "ab"),
        )
    ),
]
"Messages as an interface writes them, and in plain form."


def openai(messages: list[Any], tools: Any = TOOLS, **fields: Any) -> Any:
    shape = SHAPES["openai"]
    return shape.read({"messages": messages, "tools": tools, **fields}, shape.own_fields)


def render(source: str, conversation: Conversation) -> str:
    template = open_template(source, VARIABLES)
    if isinstance(conversation, RichConversation):
        conversation = fit_tools(template, conversation)
    return template.render(conversation.messages, False, conversation.tools)


@pytest.mark.parametrize(("written", "plain"), EQUIVALENT)
def test_messages_of_an_interface_are_rendered_as_their_plain_form(
    written: Any, plain: Any
) -> None:
    for tools in (TOOLS, None) if plain == [USER, ANSWER] else (TOOLS,):
        conversation = openai(written, tools)
        assert conversation.messages == plain
        assert render(KIMI_K3, conversation) == render_by_transformers(
            KIMI_K3, plain, False, tools=tools
        )
        assert render(QWEN_3, conversation) == render_by_transformers(
            QWEN_3, plain, False, tools=tools
        )
    with_pictures = with_images(SHAPES["openai"], ())
    record = {"messages": written, "tools": TOOLS}
    assert with_pictures.read(record, with_pictures.own_fields) == openai(plain)


def test_a_record_of_anthropic_is_rendered_as_its_plain_form() -> None:
    """Its system prompt is text or parts, and the schema of tools is rendered as `parameters`."""
    plain_tools = TOOLS[1:]
    function: Any = plain_tools[0]["function"]
    schema = function["parameters"]
    named = {"name": function["name"], "description": function["description"]}
    messages = [USER, message_of("assistant", TOOL_USE), message_of("user", TOOL_RESULT), ANSWER]
    system = {"role": "system", "content": "Add."}
    for schema_entry in ({"input_schema": schema} | CACHED, {"inputSchema": schema}):
        for tool in (
            named | schema_entry,
            {"type": "custom", **named, **schema_entry},
            {"type": "function", "function": named | schema_entry},
        ):
            for prompt in ("Add.", [text("Add.", **CACHED)]):
                conversation = openai(messages, json.dumps([tool]), system=prompt)
                assert conversation.messages == [system, *PLAIN]
                expected = render_by_transformers(
                    QWEN_3, [system, *PLAIN], False, tools=plain_tools
                )
                assert '"parameters": {"type": "object"' in expected
                assert render(QWEN_3, conversation) == expected
    flat = {"type": "function", **named, "parameters": schema, "strict": True}
    conversation = openai([system, *PLAIN], [flat], system="not read, since the list has one")
    assert conversation.messages == [system, *PLAIN]
    responses = [{"type": "function", "function": function | {"strict": True}}]
    assert render(QWEN_3, conversation) == render_by_transformers(
        QWEN_3, conversation.messages, False, tools=responses
    )


def test_tools_of_every_shape_have_their_schema() -> None:
    tools = json.dumps([{"name": "f", "input_schema": {"type": "object"}}])
    turns = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    alpaca = {"instruction": "a", "output": "b", "tools": tools}
    for name, record in (
        ("sharegpt", {"conversations": turns, "tools": tools}),
        ("alpaca", alpaca),
    ):
        conversation = SHAPES[name].read(record, SHAPES[name].own_fields)
        assert conversation.tools[0]["function"] == {"name": "f", "parameters": {"type": "object"}}


def test_empty_arguments_are_an_empty_object() -> None:
    plain = [
        USER,
        {**CALLING, "tool_calls": [ADD | {"function": {"name": "add", "arguments": {}}}]},
    ]
    for arguments in ("", " \n"):
        call = ADD | {"function": {"name": "add", "arguments": arguments}}
        conversation = openai([USER, {**CALLING, "tool_calls": [call]}])
        assert render(QWEN_3, conversation) == render_by_transformers(
            QWEN_3, plain, False, tools=TOOLS
        )


def test_results_of_sharegpt_may_be_objects() -> None:
    call = json.dumps({"name": "add", "arguments": ""})
    turns: list[Any] = [
        ("human", "2+3?"),
        ("function_call", call),
        ("observation", {"sum": 5}),
        ("gpt", "5"),
    ]
    record = {"conversations": [{"from": name, "value": value} for name, value in turns]}
    conversation = SHAPES["sharegpt"].read(record | {"tools": TOOLS}, SHAPES["sharegpt"].own_fields)
    assert [message["content"] for message in conversation.messages] == [
        "2+3?",
        "",
        '{"sum": 5}',
        "5",
    ]


@pytest.mark.parametrize(
    ("messages", "part"),
    [
        ([USER, message_of("assistant", text("5", files=["a"]))], "text with the key files"),
        (
            [USER, message_of("assistant", {"type": "redacted_thinking", "data": "x"}, text("5"))],
            "redacted_thinking",
        ),
        ([USER, message_of("assistant", TOOL_USE, text("So."))], "text after a call"),
        ([USER, message_of("assistant", text("So."), THOUGHT)], "thinking after a text"),
        (
            [USER, message_of("assistant", TOOL_USE | {"caller": {"type": "direct"}})],
            "tool_use with the key caller",
        ),
        (
            [message_of("user", {"type": "video", "video": "a.mp4"}, text("What?")), ANSWER],
            "video",
        ),
        ([message_of("user", {"text": "Hi"}), ANSWER], "without a type, with the keys text"),
        ([message_of("user", 5), ANSWER], "5, which is not an object"),
        ([USER, CALLING, RESULT | {"content": 5}, ANSWER], None),
        (
            [
                USER,
                CALLING,
                message_of("user", TOOL_RESULT | {"content": [{"type": "image", "source": {}}]}),
                ANSWER,
            ],
            "image",
        ),
    ],
)
def test_parts_that_no_template_prints_make_a_bad_record(
    messages: list[Any], part: str | None
) -> None:
    reason = openai(messages)
    assert reason == "content_not_text"
    assert detail_of(reason).get("part") == part


def test_a_greeting_belongs_to_the_first_prompt() -> None:
    """No prompt asks for it, and LLM-Foundry cannot render a prompt without messages."""
    greeting = {"role": "assistant", "content": "Hello!"}
    template = open_template(QWEN_3, VARIABLES)
    for conversation in (
        openai([greeting, USER, ANSWER, USER, ANSWER], None),
        SHAPES["sharegpt"].read(
            {
                "conversations": [
                    {"from": "gpt" if n % 2 == 0 else "human", "value": m["content"]}
                    for n, m in enumerate([greeting, USER, ANSWER, USER, ANSWER])
                ]
            },
            SHAPES["sharegpt"].own_fields,
        ),
    ):
        assert conversation == Conversation(
            [greeting, USER, ANSWER, USER, ANSWER], [False, *[True] * 4]
        )
        [[(prompt, answer), _]] = render_rows(template, conversation, "reject")
        assert prompt == render_by_transformers(QWEN_3, [greeting, USER], True)
        assert answer == "5<|im_end|>\n"
    assert openai([greeting, ANSWER], None) == "repeated_role"
    assert openai([greeting], None) == "too_few_messages"
    strict = SHAPES["messages"].read(
        {"messages": [greeting, USER, ANSWER]}, {"messages": "messages"}
    )
    assert strict == "starts_with_assistant"


@pytest.mark.parametrize("leading", ["system", "developer"])
def test_a_greeting_after_a_system_message_is_not_trained_either(leading: str) -> None:
    first = {"role": leading, "content": "Be kind."}
    greeting = {"role": "assistant", "content": "Hello!", "weight": 1}
    plain = {"role": "assistant", "content": "Hello!"}
    template = open_template(QWEN_3, VARIABLES)
    conversation = openai([first, greeting, USER, ANSWER], None)
    assert conversation[:2] == ([first, plain, USER, ANSWER], [True, False, True, True])
    [[(prompt, answer)]] = render_rows(template, conversation, "reject")
    assert prompt == render_by_transformers(QWEN_3, [first, plain, USER], True)
    assert answer == "5<|im_end|>\n"
    # A call before the first question, its result and a greeting after it belong to the prompt too.
    conversation = openai([first, CALLING, RESULT, greeting, USER, ANSWER])
    assert conversation.trained == [True, False, True, False, True, True]
    # Without a question, the assistant answers the system message.
    assert openai([first, ANSWER], None).trained is None


def test_a_greeting_after_a_system_message_of_sharegpt_is_not_trained_either() -> None:
    greeted = [
        {"from": "gpt", "value": "Hello!"},
        {"from": "human", "value": "2+3?"},
        {"from": "gpt", "value": "5"},
    ]
    in_list = {"conversations": [{"from": "system", "value": "Be kind."}, *greeted]}
    in_field = {"conversations": greeted, "system": "Be kind."}
    for record in (in_list, in_field):
        conversation = SHAPES["sharegpt"].read(
            record, {**SHAPES["sharegpt"].own_fields, "system": "system"}
        )
        assert [m["role"] for m in conversation.messages] == [
            "system",
            "assistant",
            "user",
            "assistant",
        ]
        assert conversation.trained == [True, False, True, True]


def test_calls_of_llama_factory_and_of_the_older_openai_interface_are_rendered_as_todays() -> None:
    function = {"name": "add", "arguments": {"of": [2, 3]}}
    calling = {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}
    named = {"role": "tool", "name": "add", "content": "5"}
    thought = {"type": "reasoning", "value": "hm"}
    text_part = {"type": "text", "value": "So."}
    call_part = {"type": "tool_call", "value": json.dumps(function)}
    older = {"role": "function", "name": "add", "content": "5"}
    call_in_text = function | {"arguments": json.dumps(function["arguments"])}
    both = calling | {"tool_calls": calling["tool_calls"] * 2, "content": "So."}
    for written, plain in (
        (
            [
                USER,
                message_of("assistant", thought, text_part, call_part),
                message_of("tool", {"type": "text", "value": "5"}),
                ANSWER,
            ],
            [
                USER,
                calling | {"content": "So.", "reasoning_content": "hm"},
                {"role": "tool", "content": "5"},
                ANSWER,
            ],
        ),
        (
            [USER, message_of("assistant", text_part, call_part, call_part), named, named, ANSWER],
            [USER, both, named, named, ANSWER],
        ),
        (
            [
                USER | {"function_call": None},
                {"role": "assistant", "content": None, "function_call": call_in_text},
                older,
                ANSWER,
            ],
            [USER, calling | {"content": None}, named, ANSWER],
        ),
    ):
        conversation = openai(written)
        assert render(QWEN_3, conversation) == render_by_transformers(
            QWEN_3, plain, False, tools=TOOLS
        )
        with_pictures = with_images(SHAPES["openai"], ())
        record = {"messages": written, "tools": TOOLS}
        assert with_pictures.read(record, with_pictures.own_fields) == conversation
    for wrong, reason in (
        (message_of("assistant", call_part, text_part), "content_not_text"),
        (message_of("assistant", {"type": "tool_call", "value": "{"}), "bad_tool_call"),
        (message_of("assistant", {"type": "reasoning", "value": 3}), "content_not_text"),
        (
            {"role": "assistant", "content": None, "function_call": {"name": "f"}},
            "arguments_not_json",
        ),
    ):
        assert openai([USER, wrong]) == reason


def test_parallel_calls_in_neighbouring_messages_become_one_message() -> None:
    """OpenAI, ms-swift and ShareGPT write them so, with content null or empty."""
    second_call = {
        "id": "c2",
        "type": "function",
        "function": {"name": "add", "arguments": {"of": [1]}},
    }
    first = CALLING | {"content": "Both."}
    result = {"role": "tool", "tool_call_id": "c2", "content": "1"}
    plain = [USER, first | {"tool_calls": [ADD, second_call]}, RESULT, result, ANSWER]
    for content in ("", None):
        second = {"role": "assistant", "content": content, "tool_calls": [second_call]}
        conversation = openai([USER, first, second, RESULT, result, ANSWER])
        assert conversation.messages == plain
        assert render(QWEN_3, conversation) == render_by_transformers(
            QWEN_3, plain, False, tools=TOOLS
        )
    bare = [{"type": "function", "function": call["function"]} for call in (ADD, second_call)]
    texts = [json.dumps(call["function"]) for call in bare]
    messages = [
        ("user", "2+3?"),
        *(("tool_call", text) for text in texts),
        ("tool_response", "5"),
        ("tool_response", "1"),
        ("assistant", "5"),
    ]
    plain = [
        USER,
        {"role": "assistant", "content": "", "tool_calls": bare},
        *({"role": "tool", "content": text} for text in "51"),
        ANSWER,
    ]
    conversation = openai([{"role": role, "content": content} for role, content in messages])
    assert conversation.messages == plain
    tags = {
        "role_tag": "role",
        "content_tag": "content",
        "user_tag": "user",
        "assistant_tag": "assistant",
        "observation_tag": "tool_response",
        "function_tag": "tool_call",
    }
    shape = SHAPES["sharegpt"]
    record = {"conversations": [{"role": r, "content": c} for r, c in messages], "tools": TOOLS}
    assert shape.read(record, shape.own_fields, tags=tags) == conversation
    second = {"role": "assistant", "content": "And.", "tool_calls": [second_call]}
    for message in (second, second | {"content": "", "reasoning_content": "hm"}):
        assert openai([USER, CALLING, message, RESULT, result, ANSWER]) == "repeated_role"
    untrained = second | {"content": "", "weight": 0}
    record = {"messages": [USER, CALLING, untrained, RESULT, result, ANSWER], "tools": TOOLS}
    for merge in ({}, {"consecutive_roles": "merge"}):
        shape = SHAPES["openai"]
        assert shape.read(record, shape.own_fields, **merge) == "repeated_role"
