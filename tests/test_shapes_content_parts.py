"""Records as the interfaces of OpenAI and Anthropic write them become what transformers renders of
the same in plain form.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from mdsmix.encode.chat import open_template, render_rows
from mdsmix.encode.forms import fit_tools
from mdsmix.record import Conversation, RichConversation
from mdsmix.shapes import SHAPES
from mdsmix.shapes.image_parts import with_images
from tests.test_encode_chat import VARIABLES, theirs
from tests.tool_styles import KIMI_K3, QWEN_3, TOOLS

USER = {"role": "user", "content": "2+3?"}
SAID = {"role": "assistant", "content": "5"}
ADD = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"of": [2, 3]}}}
CALLING = {"role": "assistant", "content": "", "tool_calls": [ADD]}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "5"}
PLAIN = [USER, CALLING, RESULT, SAID]


def said(role: str, *parts: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": [*parts], **more}


def text(words: str, kind: str = "text", **more: Any) -> dict[str, Any]:
    return {"type": kind, "text": words, **more}


CACHED = {"cache_control": {"type": "ephemeral"}}
USE = {"type": "tool_use", "id": "c1", "name": "add", "input": {"of": [2, 3]}}
GAVE = {"type": "tool_result", "tool_use_id": "c1", "content": "5"}
THOUGHT = {"type": "thinking", "thinking": "hm", "signature": "Eu8B"}
ANSWERS_IN_PARTS = [
    text("5", annotations=[]),
    text("5", "output_text", annotations=[], logprobs=[]),
]
SAME: list[tuple[list[Any], list[Any]]] = [
    # as written, and in plain form
    *(([USER, said("assistant", part)], [USER, SAID]) for part in ANSWERS_IN_PARTS),
    ([USER | {"content": [text("2+3?", **CACHED)]}, SAID], [USER, SAID]),
    ([USER | {"content": [text("2+", "input_text"), text("3?")]}, SAID], [USER, SAID]),
    ([USER | {"content": [text("2+3?", image_url=None)]}, SAID], [USER, SAID]),
    ([USER, SAID | {"tool_calls": None}], [USER, SAID]),
    ([USER | {"tool_calls": []}, SAID | {"tool_calls": []}], [USER, SAID]),
    ([USER, said("assistant", USE), said("user", GAVE), SAID], PLAIN),
    (
        [
            USER,
            said("assistant", USE),
            said("user", GAVE | {"content": [text("5")]} | CACHED),
            SAID,
        ],
        PLAIN,
    ),
    (
        [
            USER,
            said("assistant", THOUGHT, text("So."), USE),
            said("user", GAVE, text("And?")),
            SAID,
        ],
        [
            USER,
            CALLING | {"content": "So.", "reasoning_content": "hm"},
            RESULT,
            {"role": "user", "content": "And?"},
            SAID,
        ],
    ),
    ([USER, said("assistant", THOUGHT, text("5"))], [USER, SAID | {"reasoning_content": "hm"}]),
    *(
        (
            [USER, CALLING, RESULT | {"content": content}, SAID],
            [USER, CALLING, RESULT | {"content": plain}, SAID],
        )
        for content, plain in (
            ({"sum": 5, "ö": None}, '{"sum": 5, "ö": null}'),
            ([5, {"a": 1}], '[5, {"a": 1}]'),
            ([{"type": "sum", "of": 5}], '[{"type": "sum", "of": 5}]'),
            ([text("a"), text("b")], "ab"),
        )
    ),
]


def openai(messages: list[Any], tools: Any = TOOLS, **more: Any) -> Any:
    shape = SHAPES["openai"]
    return shape.read({"messages": messages, "tools": tools, **more}, shape.own_fields)


def printed(source: str, conversation: Conversation) -> str:
    template = open_template(source, VARIABLES)
    if isinstance(conversation, RichConversation):
        conversation = fit_tools(template, conversation)
    return template.render(conversation.messages, False, conversation.tools)


@pytest.mark.parametrize(("written", "plain"), SAME)
def test_what_an_interface_writes_is_printed_as_its_plain_form(written: Any, plain: Any) -> None:
    for tools in (TOOLS, None) if plain == [USER, SAID] else (TOOLS,):
        found = openai(written, tools)
        assert found.messages == plain
        assert printed(KIMI_K3, found) == theirs(KIMI_K3, plain, False, tools=tools)
        assert printed(QWEN_3, found) == theirs(QWEN_3, plain, False, tools=tools)
    with_pictures = with_images(SHAPES["openai"], ())
    record = {"messages": written, "tools": TOOLS}
    assert with_pictures.read(record, with_pictures.own_fields) == openai(plain)


def test_a_record_of_anthropic_is_printed_as_its_plain_form() -> None:
    """With its system prompt, a text or parts, and its tools, whose schema is printed as
    `parameters`.
    """
    plain_tools = TOOLS[1:]
    function: Any = plain_tools[0]["function"]
    schema = function["parameters"]
    named = {"name": function["name"], "description": function["description"]}
    messages = [USER, said("assistant", USE), said("user", GAVE), SAID]
    system = {"role": "system", "content": "Add."}
    for own in ({"input_schema": schema} | CACHED, {"inputSchema": schema}):
        for tool in (
            named | own,
            {"type": "custom", **named, **own},
            {"type": "function", "function": named | own},
        ):
            for given in ("Add.", [text("Add.", **CACHED)]):
                found = openai(messages, json.dumps([tool]), system=given)
                assert found.messages == [system, *PLAIN]
                expected = theirs(QWEN_3, [system, *PLAIN], False, tools=plain_tools)
                assert '"parameters": {"type": "object"' in expected
                assert printed(QWEN_3, found) == expected
    flat = {"type": "function", **named, "parameters": schema, "strict": True}
    found = openai([system, *PLAIN], [flat], system="not read, since the list has one")
    assert found.messages == [system, *PLAIN]
    responses = [{"type": "function", "function": function | {"strict": True}}]
    assert printed(QWEN_3, found) == theirs(QWEN_3, found.messages, False, tools=responses)


def test_tools_of_every_shape_have_their_schema() -> None:
    tools = json.dumps([{"name": "f", "input_schema": {"type": "object"}}])
    turns = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    alpaca = {"instruction": "a", "output": "b", "tools": tools}
    for name, record in (
        ("sharegpt", {"conversations": turns, "tools": tools}),
        ("alpaca", alpaca),
    ):
        found = SHAPES[name].read(record, SHAPES[name].own_fields)
        assert found.tools[0]["function"] == {"name": "f", "parameters": {"type": "object"}}


def test_empty_arguments_are_an_empty_object() -> None:
    plain = [
        USER,
        {**CALLING, "tool_calls": [ADD | {"function": {"name": "add", "arguments": {}}}]},
    ]
    for arguments in ("", " \n"):
        call = ADD | {"function": {"name": "add", "arguments": arguments}}
        found = openai([USER, {**CALLING, "tool_calls": [call]}])
        assert printed(QWEN_3, found) == theirs(QWEN_3, plain, False, tools=TOOLS)


def test_results_of_sharegpt_may_be_objects() -> None:
    call = json.dumps({"name": "add", "arguments": ""})
    turns: list[Any] = [
        ("human", "2+3?"),
        ("function_call", call),
        ("observation", {"sum": 5}),
        ("gpt", "5"),
    ]
    record = {"conversations": [{"from": name, "value": value} for name, value in turns]}
    found = SHAPES["sharegpt"].read(record | {"tools": TOOLS}, SHAPES["sharegpt"].own_fields)
    assert [message["content"] for message in found.messages] == ["2+3?", "", '{"sum": 5}', "5"]


@pytest.mark.parametrize(
    "messages",
    [
        [USER, said("assistant", text("5", files=["a"]))],
        [USER, said("assistant", {"type": "redacted_thinking", "data": "x"}, text("5"))],
        [USER, said("assistant", USE, text("So."))],
        [USER, said("assistant", text("So."), THOUGHT)],
        [USER, CALLING, RESULT | {"content": 5}, SAID],
        [USER, CALLING, said("user", GAVE | {"content": [{"type": "image", "source": {}}]}), SAID],
    ],
)
def test_what_no_template_prints_is_a_bad_record(messages: list[Any]) -> None:
    assert openai(messages) == "content_not_text"


def test_a_greeting_is_a_part_of_the_first_prompt() -> None:
    """No model is asked for it, and LLM-Foundry cannot render a prompt of no message."""
    greeting = {"role": "assistant", "content": "Hello!"}
    template = open_template(QWEN_3, VARIABLES)
    for found in (
        openai([greeting, USER, SAID, USER, SAID], None),
        SHAPES["sharegpt"].read(
            {
                "conversations": [
                    {"from": "gpt" if n % 2 == 0 else "human", "value": m["content"]}
                    for n, m in enumerate([greeting, USER, SAID, USER, SAID])
                ]
            },
            SHAPES["sharegpt"].own_fields,
        ),
    ):
        assert found == Conversation([greeting, USER, SAID, USER, SAID], [False, *[True] * 4])
        [[(prompt, answer), _]] = render_rows(template, found, "reject")
        assert prompt == theirs(QWEN_3, [greeting, USER], True)
        assert answer == "5<|im_end|>\n"
    assert openai([greeting, SAID], None) == "repeated_role"
    assert openai([greeting], None) == "too_few_messages"
    strict = SHAPES["messages"].read({"messages": [greeting, USER, SAID]}, {"messages": "messages"})
    assert strict == "starts_with_assistant"


@pytest.mark.parametrize("leading", ["system", "developer"])
def test_a_greeting_after_a_system_message_is_not_trained_either(leading: str) -> None:
    first = {"role": leading, "content": "Be kind."}
    greeting = {"role": "assistant", "content": "Hello!", "weight": 1}
    plain = {"role": "assistant", "content": "Hello!"}
    template = open_template(QWEN_3, VARIABLES)
    found = openai([first, greeting, USER, SAID], None)
    assert found[:2] == ([first, plain, USER, SAID], [True, False, True, True])
    [[(prompt, answer)]] = render_rows(template, found, "reject")
    assert prompt == theirs(QWEN_3, [first, plain, USER], True)
    assert answer == "5<|im_end|>\n"
    # A call before the first question, with its result and the greeting after it, opens too.
    opened = openai([first, CALLING, RESULT, greeting, USER, SAID])
    assert opened.trained == [True, False, True, False, True, True]
    # Without a question the answer is one to the system message.
    assert openai([first, SAID], None).trained is None


def test_a_greeting_after_a_system_message_of_sharegpt_is_not_trained_either() -> None:
    greeted = [
        {"from": "gpt", "value": "Hello!"},
        {"from": "human", "value": "2+3?"},
        {"from": "gpt", "value": "5"},
    ]
    in_list = {"conversations": [{"from": "system", "value": "Be kind."}, *greeted]}
    in_field = {"conversations": greeted, "system": "Be kind."}
    for record in (in_list, in_field):
        found = SHAPES["sharegpt"].read(
            record, {**SHAPES["sharegpt"].own_fields, "system": "system"}
        )
        assert [m["role"] for m in found.messages] == ["system", "assistant", "user", "assistant"]
        assert found.trained == [True, False, True, True]


def test_calls_of_llama_factory_and_of_openai_s_older_interface_are_printed_as_todays() -> None:
    function = {"name": "add", "arguments": {"of": [2, 3]}}
    calling = {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}
    named = {"role": "tool", "name": "add", "content": "5"}
    thought = {"type": "reasoning", "value": "hm"}
    so = {"type": "text", "value": "So."}
    in_part = {"type": "tool_call", "value": json.dumps(function)}
    older = {"role": "function", "name": "add", "content": "5"}
    of_text = function | {"arguments": json.dumps(function["arguments"])}
    both = calling | {"tool_calls": calling["tool_calls"] * 2, "content": "So."}
    for written, plain in (
        (
            [
                USER,
                said("assistant", thought, so, in_part),
                said("tool", {"type": "text", "value": "5"}),
                SAID,
            ],
            [
                USER,
                calling | {"content": "So.", "reasoning_content": "hm"},
                {"role": "tool", "content": "5"},
                SAID,
            ],
        ),
        (
            [USER, said("assistant", so, in_part, in_part), named, named, SAID],
            [USER, both, named, named, SAID],
        ),
        (
            [
                USER | {"function_call": None},
                {"role": "assistant", "content": None, "function_call": of_text},
                older,
                SAID,
            ],
            [USER, calling | {"content": None}, named, SAID],
        ),
    ):
        found = openai(written)
        assert printed(QWEN_3, found) == theirs(QWEN_3, plain, False, tools=TOOLS)
        with_pictures = with_images(SHAPES["openai"], ())
        record = {"messages": written, "tools": TOOLS}
        assert with_pictures.read(record, with_pictures.own_fields) == found
    for wrong, reason in (
        (said("assistant", in_part, so), "content_not_text"),
        (said("assistant", {"type": "tool_call", "value": "{"}), "bad_tool_call"),
        (said("assistant", {"type": "reasoning", "value": 3}), "content_not_text"),
        (
            {"role": "assistant", "content": None, "function_call": {"name": "f"}},
            "arguments_not_json",
        ),
    ):
        assert openai([USER, wrong]) == reason


def test_parallel_calls_that_are_written_one_a_message_are_one_message() -> None:
    """In the form of OpenAI, ms-swift and ShareGPT, with content null or empty."""
    other = {"id": "c2", "type": "function", "function": {"name": "add", "arguments": {"of": [1]}}}
    first = CALLING | {"content": "Both."}
    result = {"role": "tool", "tool_call_id": "c2", "content": "1"}
    plain = [USER, first | {"tool_calls": [ADD, other]}, RESULT, result, SAID]
    for content in ("", None):
        second = {"role": "assistant", "content": content, "tool_calls": [other]}
        found = openai([USER, first, second, RESULT, result, SAID])
        assert found.messages == plain
        assert printed(QWEN_3, found) == theirs(QWEN_3, plain, False, tools=TOOLS)
    bare = [{"type": "function", "function": each["function"]} for each in (ADD, other)]
    texts = [json.dumps(each["function"]) for each in bare]
    said = [
        ("user", "2+3?"),
        *(("tool_call", each) for each in texts),
        ("tool_response", "5"),
        ("tool_response", "1"),
        ("assistant", "5"),
    ]
    plain = [
        USER,
        {"role": "assistant", "content": "", "tool_calls": bare},
        *({"role": "tool", "content": text} for text in "51"),
        SAID,
    ]
    found = openai([{"role": role, "content": content} for role, content in said])
    assert found.messages == plain
    tags = {
        "role_tag": "role",
        "content_tag": "content",
        "user_tag": "user",
        "assistant_tag": "assistant",
        "observation_tag": "tool_response",
        "function_tag": "tool_call",
    }
    shape = SHAPES["sharegpt"]
    record = {"conversations": [{"role": r, "content": c} for r, c in said], "tools": TOOLS}
    assert shape.read(record, shape.own_fields, tags=tags) == found
    second = {"role": "assistant", "content": "And.", "tool_calls": [other]}
    for told in (second, second | {"content": "", "reasoning_content": "hm"}):
        assert openai([USER, CALLING, told, RESULT, result, SAID]) == "repeated_role"
    untrained = second | {"content": "", "weight": 0}
    assert openai([USER, CALLING, untrained, RESULT, result, SAID]) == "repeated_role"
