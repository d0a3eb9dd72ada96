"""Conversations whose history a template rewrites, or with tools: a row for an answer is what
transformers renders up to it.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from mdsmix.encode.chat import ChatTemplate, open_template, render_rows
from mdsmix.encode.forms import (
    find_forms,
    find_image_form,
    find_unread_keys,
    fit_tools,
    prints_null,
)
from mdsmix.encode.template_rules import raised_template_rules
from mdsmix.record import Conversation, RecordRefused, RichConversation
from mdsmix.shapes.messages import OPENAI
from mdsmix.shards.manifest import Encoding
from mdsmix.tokenizer.card import Tokenizer
from tests import tool_styles as styles
from tests.styles import (
    DEEPSEEK_V3,
    GLM_4_7,
    MISTRAL_NEMO,
    NEMOTRON_3,
    PHI_3,
    QWEN_3_5_NOTHINK,
    REWRITING,
    USUAL,
)
from tests.test_encode_chat import VARIABLES, text_or_fault, theirs
from tests.tool_styles import TEMPLATES_WITH_TOOLS, TOOLS, decode_arguments, draw_conversations

CHATS = [messages for messages, tools in draw_conversations(150) if not tools]
CHATML = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


@pytest.mark.parametrize("name", REWRITING)
def test_each_row_is_what_transformers_renders_at_its_answer(name: str) -> None:
    source, several = REWRITING[name], 0
    template = open_template(source, VARIABLES)
    for messages in CHATS:
        rows = render_rows(template, Conversation(messages), "each")
        assert render_rows(template, Conversation(messages), "last") == rows[-1:]
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if len(rows) == 1 and len(answers) > 1:
            whole = "".join(prompt + answer for prompt, answer in rows[0])
            assert whole == theirs(source, messages, False)
            continue
        several += len(rows) > 1
        for [(prompt, answer)], i in zip(rows, answers, strict=True):
            assert prompt + answer == theirs(source, messages[: i + 1], False)
            inference = theirs(source, messages[:i], True)
            assert inference.startswith(prompt)
            assert inference[len(prompt) :] in ("", "<think>\n")
            end = next(end for end in ENDS if answer.endswith(end))
            assert answer.endswith(messages[i]["content"].split("</think>")[-1] + end)
    assert several > 5


ENDS = ("<|im_end|>\n", "<|end|>\n</s>", "<|return|>", "</s>")
DEEPSEEK_V3_1 = """{%- for m in messages -%}{%- if m['role'] == 'user' -%}<User>{{ m['content'] }}{%- else -%}<Assistant></think>{{ m['content'].split('</think>')[-1] }}</s>{%- endif -%}{%- endfor -%}{%- if add_generation_prompt -%}<Assistant><think>{%- endif -%}"""
"With `thinking: true`: an answer ends the reasoning which the generation prompt begins."
OPENED = {
    # template: what it prints before every answer, and the rest of the generation prompt
    DEEPSEEK_V3: ("<Assistant>", "<think>\n"),
    DEEPSEEK_V3_1: ("<Assistant>", "<think>"),
    GLM_4_7: ("<|assistant|>", "<think>"),
    NEMOTRON_3: ("<|im_start|>assistant\n", "<think>\n"),
    QWEN_3_5_NOTHINK: ("<|im_start|>assistant\n", "<think>\n\n</think>\n\n"),
}


@pytest.mark.parametrize("source", OPENED)
def test_an_answer_is_cut_where_every_answer_begins(source: str) -> None:
    """Whatever it begins with: a part of the generation prompt or all of it, followed by a letter,
    a newline, or a thought.
    """
    template = open_template(source, VARIABLES)
    head, opening = OPENED[source]
    asked = {"role": "user", "content": "?"}
    inference = theirs(source, [asked], True)
    assert inference.endswith(head + opening)
    history, inside, whole = inference.removesuffix(head + opening), 0, head + opening
    pieces = {whole[at:] for at in range(len(whole))}
    pieces |= {opening[:at] for at in range(len(opening) + 1)}
    for piece, rest in product(sorted(pieces), ("able>", "\nhm", "hm\n</think>\n\nso", "")):
        said = {"role": "assistant", "content": piece + rest}
        [[(prompt, answer)]] = render_rows(template, Conversation([asked, said]), "each")
        printed = theirs(source, [asked, said], False)
        assert printed.startswith(history + head)
        text = printed.removeprefix(history + head)
        inside += text.startswith(opening[0])
        if text.startswith(opening):  # inference sees all of it
            assert (prompt, answer) == (inference, text.removeprefix(opening))
        else:
            assert (prompt, answer) == (history + head, text)
    assert inside > 20


def test_a_refusal_has_its_reason_and_its_detail() -> None:
    """Both texts where they part; no row at all where the text loses what was said; the template's
    own message.
    """
    lost = "{% for m in messages %}{{ m.content if loop.last }}{% endfor %}"
    fails = "{{ raise_exception('System role not supported') }}"
    first = "<|user|>\nuser<|end|>\n<|assistant|>\nassistant<|end|>\n"
    parting = {"printed": f"{first}</s>", "printed_later": f"{first}<|user|>\nuser<|end|>\n"}
    for source, rule, reason, detail in (
        (PHI_3, "reject", "not_prefix_stable", parting),
        *((lost, rule, "not_prefix_stable", {}) for rule in ("reject", "last", "each")),
        (fails, "each", "template_error", {"template": "System role not supported"}),
    ):
        said = Conversation([{"role": role, "content": role} for role in ("user", "assistant") * 2])
        with pytest.raises(RecordRefused, match=reason) as fault:
            render_rows(open_template(source, VARIABLES), said, rule)  # type: ignore[arg-type]
        for key, text in detail.items():
            assert fault.value.why.detail[key].startswith(text), source
            assert key != "printed" or fault.value.why.detail[key] == text


def read(messages: list[Any], tools: Any = None, **options: Any) -> Any:
    fields = {"messages": "messages", "tools": "tools"}
    return OPENAI.read({"messages": messages, "tools": tools}, fields, **options)


def opened(source: str) -> ChatTemplate:
    return open_template(source, VARIABLES, "2026-01-01")


def rows(template: ChatTemplate, said: Conversation) -> Any:
    """The rows of a conversation; None where the template fails on it."""
    with contextlib.suppress(RecordRefused):
        said = fit_tools(template, said) if isinstance(said, RichConversation) else said
        return render_rows(template, said, "each")
    return None


@pytest.mark.parametrize("name", TEMPLATES_WITH_TOOLS)
def test_each_text_is_what_transformers_renders(name: str) -> None:
    """Rows of whole conversations, or of each answer where history is rewritten."""
    template, called_in = opened(TEMPLATES_WITH_TOOLS[name]), 0
    for messages, tools in draw_conversations(40, seed=len(name)):
        reference = decode_arguments(messages) if name != "qwen_3" else messages
        found = rows(template, read(messages, tools))
        whole = text_or_fault(theirs, TEMPLATES_WITH_TOOLS[name], reference, False, tools=tools)
        if found is None or whole is None:
            assert found is whole
            continue
        called_in += any("tool_calls" in m for m in messages)
        answers = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
        texts = ["".join(p + a for p, a in row) for row in found]
        if len(found) == 1 and len(answers) > 1:
            assert texts == [whole]
        else:
            prefixes = [reference[: i + 1] for i in answers]
            assert texts == [
                theirs(TEMPLATES_WITH_TOOLS[name], said, False, tools=tools) for said in prefixes
            ]
    assert called_in > 8


def test_the_forms_that_a_template_takes_are_found() -> None:
    every = "empty absent null text"
    for source, arguments, contents in (
        *((styles.LLAMA_3, "object", every), (styles.QWEN_3, "object text", every)),
        *((styles.TEXT_ONLY, "text", every), (styles.ITEMS, "object", every)),
        *((styles.PYTHON, "text", every), (styles.NEEDS_TEXT, "object", "empty text")),
        *((styles.PRINTS_NONE, "object", "empty absent text"), (styles.ESCAPES, "", "")),
        (CHATML, "", ""),
    ):
        calls = find_forms(opened(source)).calls
        assert calls == tuple(product(arguments.split(), contents.split())), source
    assert find_forms(opened(CHATML)) is find_forms(opened(CHATML)), "looked for once a template"


ASKED, SAID = {"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}
NO_TEXT = (
    "{{ tools }}{% for m in messages %}{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls | tojson }}"
    "{% if m.content %}{{ raise_exception('no') }}{% endif %}{% endif %}{% endfor %}"
)


def calling(arguments: Any, calls: int = 1, **content: Any) -> dict[str, Any]:
    function = {"name": "add", "arguments": arguments}
    call = {"id": "012345678", "type": "function", "function": function}
    return {"role": "assistant", **content, "tool_calls": [call] * calls}


def test_a_call_in_any_form_is_printed_in_the_one_that_a_template_takes() -> None:
    contents: list[dict[str, Any]] = [{}, {"content": None}, {"content": ""}]
    sources = (styles.TEXT_ONLY, styles.NEEDS_TEXT, styles.PRINTS_NONE)
    for source, arguments, content in product(sources, ('{"of": ["é"]}', {"of": ["é"]}), contents):
        said = read([ASKED, calling(arguments, **content)], TOOLS)
        [[(prompt, answer)]] = rows(opened(source), said)
        spelled = '```json {"of": ["é"]}' if source == styles.TEXT_ONLY else '{"of": ["é"]}'
        assert answer == f"[add {spelled}]"
        assert prompt.endswith("<user>?<assistant>")


def test_what_a_template_does_not_print_is_refused_with_the_reason() -> None:
    """gpt-oss prints the first call of a message."""
    call, no_calls = calling({}, content=None), "it prints no calls of tools as they are"
    for source, message, why in (
        *((CHATML, call, "it prints no tools"), (CHATML + "{{ tools }}", call, no_calls)),
        *((styles.ESCAPES, call, no_calls), (CHATML, SAID, "it prints no tools")),
        (NO_TEXT, calling({}, content="so"), "it takes no call with text content"),
        (styles.GPT_OSS, calling({"of": [1]}, 2, content=None), "it prints one of several calls"),
    ):
        with pytest.raises(RecordRefused, match="tools_not_printed") as fault:
            fit_tools(opened(source), read([ASKED, message], TOOLS))
        assert fault.value.why.detail == {"template": why}


@pytest.mark.parametrize("rule", ["each", "last"])
def test_reasoning_that_an_answer_drops_stays_in_its_prompt_as_in_inference(rule: Any) -> None:
    result = {"role": "tool", "tool_call_id": "012345678", "content": "3"}
    thoughts, said = ["hm", "so", "and", "well"], list[Any]()
    for turn in range(2):  # two calls and an answer in each
        said.append(ASKED)
        for step in range(2):
            said += [calling({"of": [step]}, content=thoughts[2 * turn + step]), result]
        said.append({"role": "assistant", "content": f"<|start|>assistant {turn}"})
    template = opened(styles.GPT_OSS)
    found = render_rows(template, fit_tools(template, read(said, TOOLS)), rule)
    answers = [i for i, message in enumerate(said) if message["role"] == "assistant"]
    assert len(found) == (len(answers) if rule == "each" else 1)
    for [(prompt, answer)], i in zip(found, answers[-len(found) :], strict=True):
        assert prompt == theirs(styles.GPT_OSS, said[:i], True, tools=TOOLS)
        if "tool_calls" in said[i]:
            assert answer.startswith(f"<|channel|>analysis<|message|>{said[i]['content']}<|end|>")
            assert answer.endswith("<|call|>")
        else:
            assert answer == f"<|channel|>final<|message|>{said[i]['content']}<|return|>"


def test_messages_of_tools_and_developers_are_printed_where_there_are_no_tools() -> None:
    """Or refused; a developer is a system where the template knows none."""
    messages = [{"role": "developer", "content": "be brief"}, ASKED, SAID]
    assert "be brief" in str(rows(opened(TEMPLATES_WITH_TOOLS["qwen_2_5"]), read(messages)))
    knows = "{{ tools }}{% for m in messages %}{{ m.role if m.role != 'developer' }}{% endfor %}"
    for source, role in ((styles.QWEN_2_5, "system"), (knows, "developer")):
        assert fit_tools(opened(source), read(messages, TOOLS)).messages[0]["role"] == role
    messages = [ASKED, {"role": "tool", "content": "lost"}, SAID]
    prints_two = "{% for m in messages if m.role != 'tool' %}{{ m.content }}{% endfor %}"
    assert rows(opened(prints_two), read(messages)) is None
    assert rows(opened(CHATML), read(messages)) is not None


def test_what_the_template_does_not_print_of_a_message_is_told() -> None:
    thinking = calling({}, content="so", reasoning_content="hm")
    said = read([ASKED | {"name": "Ann"}, thinking], TOOLS)
    assert set(find_unread_keys(opened(styles.QWEN_3), said)) == {"messages.name"}
    both = {"messages.name", "messages.reasoning_content", "messages.content beside tool_calls"}
    assert set(find_unread_keys(opened(styles.HERMES), said)) == both
    result = {"role": "tool", "content": "3", "name": "add", "note": "hm"}
    told = find_unread_keys(opened(styles.HERMES), RichConversation([ASKED, result]))
    assert [*told] == ["messages.note"]


def test_images_are_looked_for_in_a_text_without_tools_and_with_a_system() -> None:
    """A template that prints tools as JSON prints "type" for each, as one does that prints parts as
    they are.
    """
    prints = (
        "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.role }}:"
        "{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for p in m.content %}{{ p.text if p.type == 'text' else '<image>' }}{% endfor %}{% endif %}{% endfor %}"
    )
    assert find_image_form(opened(prints), "<image>") == "parts"
    texts = "{% if m.role == 'system' %}{{ m.content if m.content is string }}{% elif m.content is string %}"
    no_parts_of_system = prints.replace("{% if m.content is string %}", texts)
    assert find_image_form(opened(no_parts_of_system), "<image>") == "mixed"


@pytest.mark.parametrize("source", [styles.GEMMA_4, styles.KIMI_K3])
def test_arguments_are_an_object_where_a_text_is_printed_otherwise(source: str) -> None:
    """As transformers renders the same record with objects, whatever the arguments are."""
    compared = 0
    for messages, tools in draw_conversations(200):
        if not tools:
            continue
        template = opened(source)
        given = fit_tools(template, read(messages, tools))
        printed = template.render(given.messages, False, given.tools)
        assert printed == theirs(source, decode_arguments(messages), False, tools=tools)
        compared += 1
    assert compared > 80
    two = calling('{"z": 1, "a": {"y": [true, "b"]}}', content=None)
    text = str(rows(opened(source), read([ASKED, two], TOOLS)))
    own = {
        styles.GEMMA_4: "call:add{a:{y:[true,<|q|>b<|q|>]},z:1}",
        styles.KIMI_K3: "argument z<|sep|>1<",
    }
    assert own[source] in text


def test_arguments_stay_as_they_are_where_both_are_printed_alike() -> None:
    """Byte by byte: a text keeps its spaces."""
    for source in (styles.QWEN_3, styles.TEXT_ONLY):
        said = read([ASKED, calling('{"of":[ 1]}', content="")], TOOLS)
        assert fit_tools(opened(source), said) == said


def test_null_content_that_only_the_last_message_may_have_is_replaced() -> None:
    result = {"role": "tool", "tool_call_id": "012345678", "content": "3"}
    messages = [ASKED, calling({"of": [1]}, content=None), result, SAID]
    assert text_or_fault(theirs, styles.QWQ, messages, False, tools=TOOLS) is None
    empty = [ASKED, calling({"of": [1]}, content=""), result, SAID]
    [turns] = rows(opened(styles.QWQ), read(messages, TOOLS))
    printed = "".join(prompt + answer for prompt, answer in turns)
    assert printed == theirs(styles.QWQ, empty, False, tools=TOOLS)


@pytest.mark.parametrize("rule", ["each", "last"])
def test_a_system_prompt_of_the_last_message_stays_in_the_prompt(rule: Any) -> None:
    """Mistral-Nemo's: the row is inference's prompt and the answer, though no text holds both."""
    template = open_template(MISTRAL_NEMO, VARIABLES)
    system = {"role": "system", "content": "Be brief."}
    compared = 0
    for messages in CHATS:
        said = messages if messages[0]["role"] == "system" else [system, *messages]
        found = render_rows(template, Conversation(said), rule)
        answers = [i for i, message in enumerate(said) if message["role"] == "assistant"]
        for [(prompt, answer)], i in zip(found, answers[-len(found) :], strict=True):
            assert prompt == theirs(MISTRAL_NEMO, said[:i], True)
            assert answer == said[i]["content"] + "</s>"
            compared += 1
        assert len(found) == (len(answers) if rule == "each" else 1)
    assert compared > 30


def test_only_streams_of_changed_templates_are_made_again(lettered: Tokenizer) -> None:
    """By the versions of the rules that their templates make others of than before."""
    usual = Encoding(**USUAL, columns={}, fields={"messages": "messages", "tools": "tools"})
    without_tools = replace(usual, fields={"messages": "messages"})
    last = replace(usual, rewritten_history="last")
    forms, system = {"template.call_forms": 2}, {"template.system_last": 2}
    for source, encoding, rules in (
        *(
            (source, last, {})
            for source in (CHATML, *TEMPLATES_WITH_TOOLS.values(), *REWRITING.values())
        ),
        *((source, usual, forms) for source in (styles.GEMMA_4, styles.KIMI_K3, styles.QWQ)),
        (styles.GEMMA_4, without_tools, {}),
        (MISTRAL_NEMO, last, system),
        (MISTRAL_NEMO, usual, {}),
    ):
        tokenizer = replace(lettered, chat_template=source)
        found = raised_template_rules(encoding, tokenizer)
        assert {name: found[name] for name in found if name in {*forms, *system}} == rules


def test_a_null_that_mistral_does_not_print_is_not_taken_for_printed() -> None:
    """Its template compares messages by identity, so a probe may not have one message twice."""
    template = open_template(styles.MISTRAL, VARIABLES)
    assert not prints_null(template, "assistant", "refusal")
    assert prints_null(template, "tool", "tool_call_id")
