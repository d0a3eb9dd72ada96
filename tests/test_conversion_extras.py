"""Records with more than messages, from a file to a stream: variables of the chat template, tools
in the system message, training marks under unknown keys, and unread fields. Rows are compared with
what transformers renders for the same record.
"""

from __future__ import annotations

import csv
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import feather, parquet

from tests.converting import Project, chats, documents, mdsmix, pairs, read_samples, run_ok
from tests.pictures import drawing, seeing_tokenizer
from tests.styles import DEEPSEEK_R1, FORGETS, train_style
from tests.test_conversion_chats import configure_chats, talk
from tests.test_encode_chat import render_by_transformers
from tests.tool_styles import QWEN_2_5, TOOLS

MODES = (
    "{% if reasoning_effort is defined %}<{{ reasoning_effort }}>{% endif %}"
    "{% if enable_thinking is defined and enable_thinking is false %}/no_think{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Prints another text in each mode, like the templates of Qwen3 and gpt-oss. A null is a defined
reasoning_effort.
"""
GLM_4 = (
    "{% for m in messages %}{% if m['tools'] is defined and m.role == 'system' %}<|system|>"
    "{% for tool in m['tools'] %}{% if tool['type'] == 'function' %}## {{ "
    "tool['function']['name'] }}\n{% endif %}{% endfor %}"
    "{% endif %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}{% if add_generation_prompt "
    "%}<|assistant|>\n{% endif %}"
)
"Prints only the tools of the system message, like the template of GLM-4."
NO_SYSTEM = MODES.replace("in messages %}", "in messages if m.role != 'system' %}")
FIRST_SYSTEM = MODES.replace(
    "in messages %}", "in messages %}{% if m.role != 'system' or loop.first %}"
).replace("<|im_end|>\n{% endfor %}", "<|im_end|>\n{% endif %}{% endfor %}")
REASONS = MODES.replace("{{ m.content }}", "{{ m.reasoning }}{{ m.content }}")
TAGGED = REASONS.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}")
VARIABLES: list[Any] = [
    *({"enable_thinking": False}, {"reasoning_effort": "low"}, {}, None),
    {"enable_thinking": True, "reasoning_effort": "high"},
]


@pytest.fixture(scope="module")
def styles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("styles")
    templates = {
        "modes": MODES,
        "tools": QWEN_2_5,
        "glm": GLM_4,
        "no system": NO_SYSTEM,
        "first system": FIRST_SYSTEM,
        "forgets": FORGETS,
        "reasons": REASONS,
        "reasons in tags": TAGGED,
        "leaves out": DEEPSEEK_R1,
    }
    return {name: train_style(folder / name, "plain", text) for name, text in templates.items()}


def read_texts(project: Project) -> list[str]:
    """Return the text of each row, prompts and answers."""
    from tokenizers import Tokenizer

    decode = Tokenizer.from_file(str(project.tokenizer / "tokenizer.json")).decode
    rows = read_samples(project.train)
    parts = [[part for turn in row["turns"] for part in turn.values()] for row in rows]
    return [decode([id for part in row for id in part], skip_special_tokens=False) for row in parts]


def configure_preferences(project: Project, *fields: str) -> None:
    source = {"path": "a.jsonl", **{field: field for field in fields}}
    stream = {"kind": "preference", "source": source}
    loader = {"name": "pairwise_preference"}
    project.configure(stream, max_seq_len=1024, train_loader=loader)


def write_records(project: Project, form: str, records: list[dict[str, Any]]) -> str:
    path = project.folder / f"a.{form}"
    if form == "jsonl":
        project.write_source(records)
    elif form == "parquet":
        parquet.write_table(pa.Table.from_pylist(records), path)
    else:
        with path.open("w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(records[0])
            rows.writerows([value and json.dumps(value) for value in r.values()] for r in records)
    return path.name


@pytest.mark.parametrize("form", ["jsonl", "parquet", "csv"])
@pytest.mark.parametrize("shape", ["messages", "openai"])
def test_a_record_is_rendered_with_its_own_variables(
    project: Project, styles: dict[str, Path], form: str, shape: str
) -> None:
    """Parquet adds nulls for variables of other records, which transformers would print."""
    records = [
        talk("user", "assistant") | {"chat_template_kwargs": variables} for variables in VARIABLES
    ]
    configure_chats(
        project, styles["modes"], path=write_records(project, form, records), shape=shape
    ).run()
    messages = records[0]["messages"]
    expected = [
        render_by_transformers(MODES, messages, False, **(variables or {}))
        for variables in VARIABLES
    ]
    assert read_texts(project) == expected
    assert len({*expected}) == 4
    assert "fields not read" not in project.convert_ok("--reencode").out


def test_variables_of_a_record_override_the_recipe_and_unread_ones_are_reported(
    project: Project, styles: dict[str, Path]
) -> None:
    """This is how arguments of apply_chat_template override a tokenizer's own. Records without
    variables use the recipe's.
    """
    variables = [
        {"reasoning_effort": "low", "effort": "", "python_tools": [], "none": {}},
        {},
        {"effort": "low", "enable_thinking": False},
    ]
    project.write_source(
        talk("user", "assistant") | {"chat_template_kwargs": values} for values in variables
    )
    configure_chats(project, styles["modes"])
    output = project.convert_ok("tokenizer.template.reasoning_effort=high").out
    assert [text.partition("|")[0] for text in read_texts(project)] == [
        "<low><",
        "<high><",
        "<high>/no_think<",
    ]
    assert "fields not read: chat_template_kwargs.effort (1 of 3 not empty)" in output
    assert "WARNING: the field chat_template_kwargs.effort of 1 record is not read" in output
    preferred = talk("user", "assistant")["messages"]
    sides = {"chosen": preferred, "rejected": preferred, "chat_template_kwargs": variables[2]}
    project.write_source([sides])
    configure_preferences(project, "chosen", "rejected")
    output = project.convert_ok("--reencode").out
    assert "WARNING: the field chat_template_kwargs.effort of 1 record is not read" in output
    assert "/no_think" in run_ok("inspect", project.train).out


CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Oslo"}}}],
}
CALL_IN_TEXT = {"role": "assistant", "content": "<think>hm</think><tool_call>{}</tool_call>"}
RESULT = {"role": "tool", "content": "rain"}


def read_trained_calls(project: Project, last: bool) -> list[bool]:
    """Return for each row whether a response that is trained has a call."""
    from tokenizers import Tokenizer

    decode = Tokenizer.from_file(str(project.tokenizer / "tokenizer.json")).decode
    rows = [[turn["labels"] for turn in row["turns"]] for row in read_samples(project.train)]
    trained = [row[-1:] if last else row for row in rows]
    return ["<tool_call>" in "".join(map(decode, row)) for row in trained]


def test_texts_before_results_of_tools_are_calls(project: Project, styles: dict[str, Path]) -> None:
    """ToolACE's calls are texts of another form."""
    question, answer = talk("user", "assistant")["messages"]
    call = {"role": "assistant", "content": '[weather(city="Oslo")]'}
    called = [question, call, RESULT, answer]
    plain = [question, answer, question, answer]
    project.write_source({"messages": messages} for messages in (called, plain, called))
    configure_chats(project, styles["tools"], shape="openai")
    project.convert_ok("target_responses=last")
    assert project.manifest.totals.untrained_calls == 2
    drafted = run_ok("init", project.folder / "a.jsonl", "--tokenizer", project.tokenizer)
    assert "target_responses: all" in drafted.out
    project.convert_ok("target_responses=all", "--reencode")
    assert project.manifest.totals.untrained_calls == 0


@pytest.mark.parametrize("responses", ["last", "all"])
def test_records_whose_calls_are_not_trained_are_counted(
    project: Project, styles: dict[str, Path], responses: str
) -> None:
    """Under the default, the answer after the results of tools is the only one that is trained."""
    question, answer = talk("user", "assistant")["messages"]
    records = [
        [question, CALL, RESULT, answer],
        [question, answer, question, CALL],  # the last answer calls
        [question, answer],
        [question, CALL_IN_TEXT, RESULT, answer],
        [question, CALL | {"weight": 0}, RESULT, answer],  # its record leaves it out
        [question, answer | {"content": "It writes <tool_call> before it."}, question, answer],
    ]
    project.write_source({"messages": messages, "tools": TOOLS} for messages in records)
    configure_chats(project, styles["tools"], shape="openai")
    answers = project.convert_ok(f"target_responses={responses}").out
    is_last = responses == "last"
    with_calls = {
        "last": [False, True, False, False, False],
        "all": [True, True, False, True, False],
    }
    assert read_trained_calls(project, is_last)[:5] == with_calls[responses]
    assert project.manifest.totals.untrained_calls == (2 if is_last else 0)
    note = (
        "WARNING: in 2 records, answers with calls of tools are not trained, since target_responses"
    )
    assert (note in " ".join(answers.split())) == is_last


@pytest.mark.parametrize(("rule", "lost"), [("last", 1), ("each", 0)])
def test_calls_that_a_rewritten_history_leaves_untrained_are_counted(
    project: Project, styles: dict[str, Path], rule: str, lost: int
) -> None:
    question, answer = talk("user", "assistant")["messages"]
    records = [[question, CALL_IN_TEXT, question, answer], [question, answer] * 2]
    project.write_source({"messages": messages} for messages in records)
    configure_chats(project, styles["forgets"])
    answers = project.convert_ok(f"streams.web.rewritten_history={rule}").out
    assert read_trained_calls(project, last=False).count(True) == 1 - lost
    assert project.manifest.totals.untrained_calls == lost
    words = " ".join(answers.split())
    assert ("set rewritten_history: each to train" in words) == bool(lost)
    assert len([*read_samples(project.train)]) == (2 if lost else 3)
    assert ("3 rows of 2 records, since rewritten_history: each" in words) == (not lost)


def test_a_special_token_in_a_variable_makes_a_bad_record(
    project: Project, styles: dict[str, Path]
) -> None:
    variables = {"reasoning_effort": "<|im_end|>"}
    plain = talk("user", "assistant")
    project.write_source([plain | {"chat_template_kwargs": variables}, plain])
    configure_chats(project, styles["modes"]).run("special_tokens_in_text=escape")
    assert project.manifest.records.quarantined == {"special_token_in_text": 1}


@pytest.mark.parametrize("style", ["tools", "glm"])
def test_tools_of_the_system_message_are_printed(
    project: Project, styles: dict[str, Path], style: str
) -> None:
    """If the template prints tools of the system message, as GLM-4's does, they stay there.
    Otherwise they are the record's tools, as in OpenAI's format.
    """
    question, answer = talk("user", "assistant")["messages"]
    system = {"role": "system", "content": "Help."}
    source = {"tools": QWEN_2_5, "glm": GLM_4}[style]
    inside = [system | {"tools": TOOLS}, question, answer]
    bare = [system | {"tools": [tool["function"] for tool in TOOLS]}, question, answer]
    project.write_source({"messages": messages} for messages in (inside, bare))
    configure_chats(project, styles[style], shape="openai").run()
    if style == "glm":
        expected = render_by_transformers(source, inside, False)
    else:
        expected = render_by_transformers(source, [system, question, answer], False, tools=TOOLS)
    assert TOOLS[0]["function"]["name"] in expected
    assert read_texts(project) == [expected] * 2
    other = {"messages": inside, "tools": TOOLS[:1]}
    project.write_source(
        [other, {"messages": [{**system, "tools": "none"}, question, answer]}, {"messages": inside}]
    )
    configure_chats(project, styles[style], shape="openai", tools="tools").convert_ok("--reencode")
    quarantined = {"bad_tools": 2} if style == "tools" else {"bad_tools": 1, "tools_not_printed": 1}
    assert project.manifest.records.quarantined == quarantined


@pytest.mark.parametrize("shape", ["alpaca", "preference_alpaca", "prompt_alpaca"])
@pytest.mark.parametrize("field", ["input", "meta.context"])
def test_an_input_of_0_or_false_is_left_out_and_counted(
    project: Project, styles: dict[str, Path], shape: str, field: str
) -> None:
    """LLaMA-Factory leaves such an input out, and joins no other number. Empty values are counted
    nowhere.
    """
    answers = {"alpaca": ["output"], "preference_alpaca": ["chosen", "rejected"]}.get(shape, [])
    names = {name: name for name in ("instruction", *answers)}
    kept, left_out, refused = ["a text", "", None, [], {}], [0, 0.0, False], [5, True, ["x"]]
    records = [
        {name: f"{name}?" for name in names} | {"input": value, "meta": {"context": value}}
        for value in (*kept, *left_out, *refused)
    ]
    project.write_source(records)
    kind = {"alpaca": "finetuning", "prompt_alpaca": "prompt"}.get(shape, "preference")
    loader = {"preference": {"name": "pairwise_preference"}}.get(kind)
    if kind == "prompt":
        loader = {"name": "prompt", "dataset": {"max_gen_len": 8}}
    source = {"path": "a.jsonl", "shape": shape, **names, "input": field}
    settings = {"train_loader": loader} if loader else {}
    project.configure({"kind": kind, "source": source}, max_seq_len=256, **settings)
    output = project.convert_ok("--max-bad", "1").out
    assert f"WARNING: the field {field} of 3 records is 0 or false, not text" in output
    assert f"the field {field} of 3 records is not read" not in output
    assert f"{field} (3 of" not in output  # it is read from the other records
    counts = project.manifest.records
    assert counts.unread[field] == 3
    assert counts.quarantined == {"field_not_text": 3}
    assert counts.written == len(kept) + len(left_out)


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_a_field_that_the_recipe_names_and_no_record_has_is_warned_of(
    project: Project, form: str
) -> None:
    """A field under its own name, such as system, may be absent: a shape without named fields reads
    it from records that have it. A single record with a named field proves the name right.
    """
    records = [{"question": f"{n}?", "answer": "so", "meta": {"note": "x"}} for n in range(4)]
    records[0]["sys"] = "Be brief."  # from_pylist takes the columns of the first record
    path = write_records(project, form, records)
    source = {
        "path": path,
        "instruction": "question",
        "output": "answer",
        "system": "sys",
        "tools": "tools",
        "input": "meta.context",
        "id": "uuid",
    }
    project.configure({"kind": "finetuning", "source": source}, max_seq_len=256)
    output = project.convert_ok().out
    absent = [line for line in output.splitlines() if "a field that no record has" in line]
    assert len(absent) == 2
    assert "source.input is meta.context, a field that no record has (4 read)" in absent[0]
    assert "source.id is uuid, a field that no record has (4 read)" in absent[1]
    expected = {"sys": 3, "meta.context": 4, "uuid": 4}
    if form == "parquet":
        expected["sys"] = 0  # the column is there, with nulls
    counted = {name: project.manifest.records.absent.get(name, 0) for name in expected}
    assert counted == expected


def test_an_id_that_no_record_has_is_warned_of_also_under_the_name_id(project: Project) -> None:
    """Unlike system, no shape reads `id` by itself: the recipe asks for it."""
    records = [{"text": f"Document {number}."} for number in range(3)]
    source = {"path": write_records(project, "jsonl", records), "text": "text", "id": "id"}
    project.configure({"kind": "pretraining", "layout": "document", "source": source})
    output = project.convert_ok().out
    assert "WARNING: source.id is id, a field that no record has (3 read)" in output


@pytest.mark.parametrize("system", ["system", "sys"])
def test_a_column_that_only_one_file_has_is_counted(project: Project, system: str) -> None:
    records = [{"question": f"Where is {n}?", "answer": "Here."} for n in range(5)]
    write_records(project, "parquet", [record | {system: "Be brief."} for record in records[:3]])
    (project.folder / "a.parquet").rename(project.folder / "first.parquet")
    write_records(project, "parquet", records[3:])
    source = {"path": "*.parquet", "instruction": "question", "output": "answer", "system": system}
    project.configure({"kind": "finetuning", "source": source}, max_seq_len=256)
    output = project.convert_ok().out
    assert f"source.system is {system}, a field that 2 of 5 records lack" in output
    assert "WARNING" not in output


@pytest.mark.parametrize("id", ["{question}-{answer}", "meta.id"])
def test_templates_and_null_values_are_no_absent_fields(project: Project, id: str) -> None:
    record = {"question": "Where?", "answer": "Here.", "meta": {"id": None}}
    source = {
        "path": write_records(project, "jsonl", [record]),
        "instruction": "question",
        "input": "Again: {question}",
        "output": "answer",
        "id": id,
    }
    project.configure({"kind": "finetuning", "source": source}, max_seq_len=256)
    assert "a field that no record has" not in project.convert_ok().out
    assert not project.manifest.records.absent


@pytest.mark.parametrize("kind", ["finetuning", "preference", "prompt"])
def test_system_messages_that_the_template_leaves_out_are_warned_of(
    project: Project, styles: dict[str, Path], kind: str
) -> None:
    """Some templates print none, others only the first message of a conversation."""
    first = talk("system", "user", "assistant")["messages"]
    later = talk("user", "assistant", "system", "user", "assistant")["messages"]
    without = talk("user", "assistant")["messages"]
    chosen = [first, later, without]
    other = {"role": "assistant", "content": "no"}
    records: list[dict[str, Any]] = [{"messages": messages} for messages in chosen]
    settings: dict[str, Any] = {}
    stream = {"kind": kind, "source": {"path": "a.jsonl", "shape": "openai"}}
    fields = {"preference": "chosen/rejected", "prompt": "prompt"}.get(kind, "messages")
    if kind == "preference":
        records = [{"chosen": m, "rejected": [*m[:-1], other]} for m in chosen]
        stream["source"] = {"path": "a.jsonl", "chosen": "chosen", "rejected": "rejected"}
        settings = {"train_loader": {"name": "pairwise_preference"}}
    elif kind == "prompt":
        records = [{"prompt": m[:-1]} for m in chosen]
        stream["source"] = {"path": "a.jsonl", "prompt": "prompt"}
        settings = {"train_loader": {"name": "prompt", "dataset": {"max_gen_len": 8}}}
    project.write_source(records)
    names = ["messages.content of system messages", "messages.content of later system messages"]
    for style, unprinted in (("no system", names), ("first system", names[1:]), ("modes", [])):
        project.tokenizer = styles[style]
        output = project.configure(stream, max_seq_len=256, **settings).convert_ok("--reencode").out
        assert project.manifest.records.written == 3
        assert project.manifest.records.unread == dict.fromkeys(unprinted, 1)
        for name in names:
            shown = name.replace("messages", fields, 1)
            warning = f"WARNING: the field {shown} of 1 record is not read"
            assert (warning in output) == (name in unprinted)


@pytest.mark.parametrize("kind", ["finetuning", "preference"])
def test_unprinted_messages_are_counted_only_of_trained_records(
    project: Project, styles: dict[str, Path], kind: str
) -> None:
    """One record has the text of a special token, and another one a blank system message."""
    project.tokenizer = styles["no system"]
    system, question, answer = talk("system", "user", "assistant")["messages"]
    chats = [
        [system, question, answer],
        [system, question, answer],
        [system, question | {"content": "<|im_end|>"}, answer],
        [system | {"content": " "}, question, answer],
    ]
    stream: dict[str, Any] = {"kind": kind}
    settings: dict[str, Any] = {"special_tokens_in_text": "reject"}
    if kind == "preference":
        bad_answer = answer | {"content": "no"}
        project.write_source({"chosen": m, "rejected": [*m[:-1], bad_answer]} for m in chats)
        stream["source"] = {"path": "a.jsonl", "chosen": "chosen", "rejected": "rejected"}
        settings["train_loader"] = {"name": "pairwise_preference"}
    else:
        project.write_source({"messages": m} for m in chats)
        stream["source"] = {"path": "a.jsonl", "shape": "openai"}
    project.configure(stream, max_seq_len=256, **settings).convert_ok("--max-bad", "1")
    assert project.manifest.records.quarantined == {"special_token_in_text": 1}
    assert project.manifest.records.unread == {"messages.content of system messages": 2}


@pytest.mark.parametrize("style", ["modes", "tools", "no system", "first system"])
def test_messages_of_developers_are_warned_of_if_the_row_lacks_them(
    project: Project, styles: dict[str, Path], style: str
) -> None:
    """No template of these knows the role, so it gets system messages."""
    question, answer = talk("user", "assistant")["messages"]
    developer = {"role": "developer", "content": "Be brief."}
    records = [
        [developer, question, answer],
        [question, answer, developer | {"content": "Be long."}, question, answer],
    ]
    project.write_source({"messages": messages} for messages in records)
    configure_chats(project, styles[style], shape="openai").run()
    first, second = read_texts(project)
    lost = [text for text, row in (("Be brief.", first), ("Be long.", second)) if text not in row]
    assert len(lost) == {"modes": 0, "tools": 1, "no system": 2, "first system": 1}[style]
    unread = project.manifest.records.unread
    assert sum(unread.values()) == len(lost)
    assert all("developer messages" in name for name in unread)


@pytest.mark.parametrize("style", ["modes", "reasons"])
def test_thoughts_that_are_open_or_printed_wrongly_are_counted(
    project: Project, styles: dict[str, Path], style: str
) -> None:
    """The row has the fault. Tags are wrong only under a template that prints reasoning without
    them.
    """
    question, answer = talk("user", "assistant")["messages"]
    contents = ["<think>\ncut off", "<think>hm</think>so", "so", "write <think> there"]
    records = [[question, answer | {"content": content}] for content in contents]
    records.append([question, answer | {"content": "<think>hm</think>so", "reasoning": "hm"}])
    records.append([question, answer | {"content": "so", "reasoning": "hm"}])
    project.write_source({"messages": messages} for messages in records)
    configure_chats(project, styles[style], shape="openai")
    answers = " ".join(project.convert_ok().out.split())
    texts = read_texts(project)
    is_open = [text.count("<think>\n") > text.count("</think>") for text in texts]
    is_twice = [text.count("hm") > 1 for text in texts]
    has_key = style == "reasons"
    is_answer = [has_key and "</think>" in text and text.count("hm") == 1 for text in texts]
    counts = {
        "<think> without </think>": is_open.count(True),
        "<think> next to a key for reasoning": is_twice.count(True),
        "<think> that the template prints as answer": is_answer.count(True),
    }
    assert counts["<think> without </think>"] == 1
    assert is_twice.count(True) == is_answer.count(True) == has_key
    assert project.manifest.records.placeholders == {k: n for k, n in counts.items() if n}
    assert "WARNING: 1 record has an answer that begins with <think> and has no" in answers
    assert ("WARNING: 1 record has an answer with reasoning both" in answers) == any(is_twice)
    warned = "WARNING: 1 record has an answer with reasoning between <think> and </think>, which"
    assert (warned in answers) == any(is_answer)


def test_tags_that_a_template_knows_are_not_counted_as_answer(
    project: Project, styles: dict[str, Path]
) -> None:
    """Plain messages, which are looked at together, under templates with a key for reasoning. The
    second one prints no text in tags.
    """
    question, answer = talk("user", "assistant")["messages"]
    thought = answer | {"content": "<think>hm</think>so"}
    project.write_source([{"messages": [question, thought]}] * 3)
    found = list[dict[str, int]]()
    for style in ("reasons", "reasons in tags"):
        configure_chats(project, styles[style], shape="openai").run()
        found.append(project.manifest.records.placeholders)
    assert found == [
        {"<think> that the template prints as answer": 3},
        {"text before </think> that the template does not print": 3},
    ]


def test_thoughts_that_a_template_leaves_out_are_counted(
    project: Project, styles: dict[str, Path]
) -> None:
    """DeepSeek's templates print only the text after `</think>`, also of the last answer."""
    question, answer = talk("user", "assistant")["messages"]
    contents = ["<think>hm</think>so", "hm\n</think>\n\nso", "<think>\n\n</think>\n\nso", "so"]
    contents.append("so</think>")
    records = [[question, answer | {"content": content}] for content in contents]
    records.append([question, answer | {"content": "hm</think>so", "name": "x"}])
    records.append([question, answer | {"content": "hm</think>so"}, question, answer])
    project.write_source({"messages": messages} for messages in records)
    found = list[dict[str, int]]()
    for style in ("leaves out", "modes"):
        project.tokenizer = styles[style]
        stream = chats("a.jsonl", rewritten_history="each")
        stream["source"]["shape"] = "openai"
        policies = {"target_responses": "all", "special_tokens_in_text": "allow"}
        project.configure(stream, max_seq_len=1024, **policies)
        answers = " ".join(project.convert_ok().out.split())
        printed = ["hm" in text for text in read_texts(project)]
        assert any(printed) == (style == "modes")
        found.append(project.manifest.records.placeholders)
        warned = "WARNING: 5 records have an answer with text before </think>, mostly reasoning,"
        assert (warned in answers) == (style == "leaves out")
    assert found == [{"text before </think> that the template does not print": 5}, {}]


@pytest.mark.parametrize("responses", ["last", "all"])
def test_an_open_thought_in_an_answer_that_is_not_trained_is_not_counted(
    project: Project, styles: dict[str, Path], responses: str
) -> None:
    question, answer = talk("user", "assistant")["messages"]
    cut_off = answer | {"content": "<think>\ncut off"}
    records = [[question, cut_off | {"weight": 0}, question, answer]]
    records.append([question, cut_off, question, answer])
    project.write_source({"messages": messages} for messages in records)
    configure_chats(project, styles["modes"], shape="openai")
    project.convert_ok(f"target_responses={responses}")
    expected = {"last": {}, "all": {"<think> without </think>": 1}}
    assert project.manifest.records.placeholders == expected[responses]


def test_an_open_thought_of_a_record_that_is_left_out_is_not_counted(
    project: Project, styles: dict[str, Path]
) -> None:
    question, answer = talk("user", "assistant")["messages"]
    contents = ["<think>\ncut off", "<think>\ncut off" * 999]
    project.write_source(
        {"messages": [question, answer | {"content": content}]} for content in contents
    )
    project.tokenizer = styles["modes"]
    project.configure(chats("a.jsonl") | {"too_long": "filter"}, max_seq_len=1024)
    project.convert_ok()
    records = project.manifest.records
    assert records.filtered == {"too_long": 1}
    assert records.placeholders == {"<think> without </think>": 1}


def test_calls_results_and_tools_that_are_printed_twice_are_counted(
    project: Project, styles: dict[str, Path]
) -> None:
    """Hermes' records have them in texts, in the tags that Qwen's template prints too. Which rows
    have them twice follows from the rows.
    """
    question, answer = talk("user", "assistant")["messages"]
    called = {"name": "weather", "arguments": {"city": "Oslo"}}
    calling = {"role": "assistant", "content": "", "tool_calls": [{"function": called}]}
    in_text = f"<tool_call>\n{json.dumps(called)}\n</tool_call>"
    result = {"role": "tool", "content": "5"}
    tagged = {"role": "tool", "content": "<tool_response>\n5\n</tool_response>"}
    listing = {"role": "system", "content": f"You have <tools>\n{json.dumps(TOOLS)}\n</tools>"}
    mention = {"role": "system", "content": "Never write <tools> or <tool_response>."}
    records: list[Any] = [
        [question, calling, result, answer],
        [question, calling | {"content": "I call <tool>."}, result, answer],
        [mention, question, calling, result, answer],
        [question, calling, tagged, answer],
        [question, {"role": "assistant", "content": in_text}, tagged, answer],
        [question, calling | {"content": in_text}, result, answer],
        [listing, question, calling, tagged, answer],
    ]
    project.write_source({"messages": messages, "tools": TOOLS} for messages in records)
    configure_chats(project, styles["tools"], shape="openai", tools="tools")
    answers = " ".join(project.convert_ok().out.split())
    texts = read_texts(project)
    counts = {
        "calls of tools in a text next to tool_calls": [
            text.count('"arguments": {"city": "Oslo"}') > 1 for text in texts
        ].count(True),
        "results of tools in the tags of the template": [
            "<tool_response>\n<tool_response>" in text for text in texts
        ].count(True),
        "tools in a system message next to tools": [
            text.count("Tells the weather") > 1 for text in texts
        ].count(True),
    }
    assert [*counts.values()] == [1, 3, 1]
    assert project.manifest.records.placeholders == counts
    assert "WARNING: 3 records have a result of a tool that is already in the tags" in answers
    assert "WARNING: 1 record has a call of a tool both under tool_calls and in the" in answers
    assert "WARNING: 1 record has tools both in their field and in the system message" in answers


def test_a_result_that_is_printed_twice_is_counted_among_plain_messages(
    project: Project, styles: dict[str, Path]
) -> None:
    """Foundry's messages have a role tool, but no calls and no tools."""
    question, answer = talk("user", "assistant")["messages"]
    tagged = {"role": "tool", "content": "<tool_response>\n5\n</tool_response>"}
    quoted = question | {"content": "What is a <tool_response>?"}
    lists = [[question, answer, tagged, answer], [quoted, answer], [question, answer]]
    project.write_source({"messages": messages} for messages in lists)
    configure_chats(project, styles["tools"], shape="messages")
    project.convert_ok()
    counts = project.manifest.records.placeholders
    assert counts == {"results of tools in the tags of the template": 1}


def test_calls_in_tags_of_other_names_are_counted(
    project: Project, styles: dict[str, Path], tmp_path: Path
) -> None:
    """NVIDIA's Nemotron has tags in upper case, and MiniMax's results are in <response>."""
    folder = shutil.copytree(styles["tools"], tmp_path / "tokenizer")
    for file in folder.iterdir():
        text = file.read_text()
        for tag, other in {"tool_call>": "TOOLCALL>", "tool_response>": "response>"}.items():
            text = text.replace(tag, other)
        file.write_text(text)
    question, answer = talk("user", "assistant")["messages"]
    calling = {"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": {}}}]}
    in_text = '<TOOLCALL>{"name": "a", "arguments": {}}</TOOLCALL>'
    tagged = {"role": "tool", "content": "<response>5</response>"}
    result = {"role": "tool", "content": "5"}
    records: list[Any] = [
        [question, calling | {"content": ""}, result, answer],
        [question, calling | {"content": ""}, tagged, answer],
        [question, calling | {"content": in_text}, tagged, answer],
    ]
    project.write_source({"messages": messages, "tools": TOOLS} for messages in records)
    configure_chats(project, folder, shape="openai", tools="tools")
    project.convert_ok()
    assert project.manifest.records.placeholders == {
        "calls of tools in a text next to tool_calls": 1,
        "results of tools in the tags of the template": 2,
    }


@pytest.mark.parametrize("has_key", [False, True])
def test_several_system_messages_in_a_list_are_counted(
    project: Project, styles: dict[str, Path], has_key: bool
) -> None:
    """Megatron's SFTDataset splits a list at each system message. A further key of a message makes
    the conversations not plain.
    """
    system, question, answer = talk("system", "user", "assistant")["messages"]
    if has_key:
        question |= {"note": "x"}
    exchange = [question, answer]
    lists = [
        [system, *exchange, system, *exchange],
        [system, *exchange, system, *exchange, system, *exchange],
        [system, *exchange],
        [*exchange, system, *exchange],
        exchange,
    ]
    project.write_source({"messages": messages} for messages in lists)
    shape = "openai" if has_key else "messages"
    output = configure_chats(project, styles["modes"], shape=shape).convert_ok().out
    warning = "WARNING: 2 records have several system messages, not only at the beginning"
    assert warning in output
    shown = run_ok("inspect", project.train).out
    assert "2 several system messages, not only at the beginning" in shown
    drafted = run_ok("init", project.folder / "a.jsonl", "--tokenizer", project.tokenizer).err
    assert "of the first 5 records of a, 2 records have several system messages" in drafted
    assert len(project.bad) == 0


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"prompt": "prompt", "completion": "completion"}, "prompt/completion.note"),
        ({"prompt": "asked", "completion": "answered"}, "asked/answered.note"),
        ({"messages": "chat"}, "chat.note"),
    ],
)
def test_unread_keys_are_named_with_the_field_of_their_messages(
    project: Project, styles: dict[str, Path], fields: dict[str, str], name: str
) -> None:
    question, answer = talk("user", "assistant")["messages"]
    shape = "prompt_completion"
    halves = [[question | {"note": "x"}], [answer]]
    if len(fields) == 1:
        shape = "openai"
        halves = [[question | {"note": "x"}, answer]]
    project.write_source([dict(zip(fields.values(), halves, strict=True))])
    project.tokenizer = styles["modes"]
    stream = {"kind": "finetuning", "source": {"path": "a.jsonl", "shape": shape, **fields}}
    output = project.configure(stream, max_seq_len=256).convert_ok().out
    assert f"fields not read: {name} (1 of 1 not empty)" in output
    shown = run_ok("inspect", project.train).out
    assert f"1 {name}" in shown
    if "asked" not in fields.values():  # init knows these names
        drafted = run_ok("init", project.folder / "a.jsonl", "--tokenizer", project.tokenizer).err
        assert f"fields of a that are not read: {name}" in drafted


@pytest.mark.parametrize("shape", ["openai", "sharegpt"])
def test_a_system_field_next_to_another_system_message_is_warned_of(
    project: Project, styles: dict[str, Path], shape: str
) -> None:
    """The message is trained, as in LLaMA-Factory. Nothing is lost if both are equal or merged, or
    differ only in white space around them.
    """
    project.tokenizer = styles["modes"]
    with_system = talk("system", "user", "assistant")["messages"]
    without = talk("user", "assistant")["messages"]
    system = with_system[0]["content"]
    equal = [(with_system, text) for text in (system, f"{system}\n", "", " ")]
    records = [(with_system, "Other."), *equal, (without, "S.")]
    if shape == "sharegpt":
        roles = {"system": "system", "user": "human", "assistant": "gpt"}
        records = [
            ([{"from": roles[m["role"]], "value": m["content"]} for m in messages], text)
            for messages, text in records
        ]
    key = {"openai": "messages", "sharegpt": "conversations"}[shape]
    project.write_source({key: messages, "sys": text} for messages, text in records)
    source = {"path": "a.jsonl", "shape": shape, key: key, "system": "sys"}
    stream = {"kind": "finetuning", "source": source}
    output = project.configure(stream, max_seq_len=256).convert_ok().out
    assert project.manifest.records.unread == {"sys": 1}
    assert "fields not read: sys (1 of 6 not empty)" in output
    assert "WARNING: the field sys of 1 record is not read" in output
    assert "the list begins with a system message of its own: remove one of the two" in output
    printed = [text.partition("<|im_end|>")[0].partition("\n") for text in read_texts(project)]
    assert [content for _, _, content in printed] == [*[system] * 5, "S."]
    if shape == "sharegpt":
        project.configure({**stream, "consecutive_roles": "merge"}, max_seq_len=256)
        assert "fields not read" not in project.convert_ok("--reencode").out


def test_possible_marks_and_unprinted_reasoning_are_reported(
    project: Project, styles: dict[str, Path]
) -> None:
    question, answer = talk("user", "assistant")["messages"]
    keep = [
        {"messages": [question | {"keep": 0}, answer | {"keep": n}]} for n in (0, 1, True, False)
    ]
    # WildChat's keys say something else.
    keys = {"toxic": False, "turn_identifier": 1}
    keep.append({"messages": [question | keys, answer | keys]})
    thought = {"messages": [question, answer | {"reasoning": "Hm.", "score": 1}]}
    scored = {"messages": [question, answer | {"score": 0.5}]}
    rejected = {"messages": [question, answer], "rejected_response": "no"}
    rejected["tool_defs"] = [{"name": "f"}]
    project.write_source([*keep, thought, scored, rejected])
    output = configure_chats(project, styles["tools"], shape="openai").convert_ok().out
    assert (
        "WARNING: the key keep of messages is 0 or 1, or false or true, wherever it occurs "
        "(4 records), and is not read" in output
    )
    assert "name it in the recipe by source.train_mark: keep" in output
    # Keys as the records have them: `score` is 1 in one record and 0.5 in another.
    read = "messages.keep (4 of 8 not empty), messages.score (2 of 8 not empty), messages.reasoning"
    assert f"fields not read: {read} (1 of 8 not empty), " in output
    assert " as 0 or 1" not in output
    assert "score of messages" not in output
    assert "toxic of messages" not in output
    assert "turn_identifier of messages" not in output
    warning = "WARNING: the field messages.reasoning of 1 record is not read, so it is ignored in "
    warning += "training: the chat template does not print this key: rename it to the key that it "
    assert warning + "prints (reasoning_content or thinking), or move its text" in output
    assert "WARNING: the field rejected_response of 1 record is not read" in output
    assert "WARNING: the field tool_defs of 1 record is not read" in output
    assert "set tools: tool_defs on the source" in output
    drafted = run_ok("init", project.folder / "a.jsonl", "--tokenizer", project.tokenizer)
    assert "WARNING: a: the key keep of messages is 0 or 1" in drafted.err
    assert " as 0 or 1" not in drafted.err
    assert "the field messages.reasoning of 1 record is not read" in drafted.err
    assert "train_parts" not in drafted.out
    # So do documents for programs.
    shown = json.loads(run_ok("inspect", project.train, "--json").out)
    assert shown["manifest"]["records"]["unread"]["messages.score"] == 2
    drafted = run_ok("init", project.folder / "a.jsonl", "--tokenizer", project.tokenizer, "--json")
    assert json.loads(drafted.out)["streams"]["a"]["unread"]["messages.score"] == 2
    named = configure_chats(project, styles["tools"], shape="openai", train_mark="keep").convert_ok(
        "--reencode"
    )
    assert "keep of messages" not in named.out
    assert project.manifest.records.filtered == {"nothing_trained": 2}
    # Conversations without a trained answer are not tokenized: the keys of their messages are not
    # looked into.
    assert "messages.turn_identifier (in 1 of the records that were tokenized)" in named.out


@pytest.mark.parametrize(
    ("shape", "form"),
    [
        *[("messages", "jsonl"), ("openai", "csv"), ("sharegpt", "jsonl"), ("rounds", "jsonl")],
        ("prompt_completion", "jsonl"),
    ],
)
def test_a_list_that_may_be_marks_is_warned_of(
    project: Project, styles: dict[str, Path], shape: str, form: str
) -> None:
    """A list with an entry for each message or each answer. Under the name that the warning gives
    it is read: answers with 0 are not trained.
    """
    messages = talk("user", "assistant", "user", "assistant")["messages"]
    records = [{"messages": messages}]
    if shape == "sharegpt":
        roles = {"user": "human", "assistant": "gpt"}
        turns = [{"from": roles[m["role"]], "value": m["content"]} for m in messages]
        records = [{"conversations": turns}]
    elif shape == "rounds":
        rounds = [
            {"human": asked["content"], "assistant": told["content"]}
            for asked, told in zip(messages[::2], messages[1::2], strict=True)
        ]
        records = [{"conversation": rounds}]
    elif shape == "prompt_completion":
        records = [{"prompt": messages[:1], "completion": messages[1:]}]
    marks: list[list[Any]] = [[0, 1], [1, 1]]
    if shape != "rounds":
        marks.append([False, False, False, True])
    others = {"length": [1, 0, 1], "scores": [0, 2], "note": "[0, x]"}
    records = [records[0] | others | {"keep": keep} for keep in marks]
    project.write_source(records)
    source = {"path": "a.jsonl", "shape": shape}
    if form == "csv":
        source["path"] = "a.csv"
        with (project.folder / "a.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, [*records[0]])
            writer.writeheader()
            for record in records:
                cells = {n: v if isinstance(v, str) else json.dumps(v) for n, v in record.items()}
                writer.writerow(cells)
    project.tokenizer = styles["tools"]
    stream = {"kind": "finetuning", "source": source}
    settings = {"max_seq_len": 256, "target_responses": "all"}
    output = project.configure(stream, **settings).convert_ok().out
    count = f"{len(marks)} records"
    warning = (
        "the field keep is a list of 0 and 1, or false and true, with an entry for each message"
    )
    assert f"WARNING: {warning} or each answer ({count}), and is not read" in output
    assert output.count("is a list of 0 and 1") == 1
    assert f"keep ({len(marks)} of {len(marks)} not empty)" in output
    assert " as 0 or 1" not in output
    assert [len(row["turns"]) for row in read_samples(project.train)] == [2] * len(marks)
    if form == "jsonl":
        drafted = run_ok("init", project.folder / "a.jsonl", "--tokenizer", project.tokenizer)
        assert f"WARNING: a: {warning} or each answer ({count}), and is not read" in drafted.err
    stream["source"] = source | {"train_mark": "keep"}
    named = project.configure(stream, **settings).convert_ok("--reencode")
    assert "keep" not in named.out
    trained = [1, 2, 1][: len(marks)]
    assert [len(row["turns"]) for row in read_samples(project.train)] == trained


def test_a_list_of_marks_in_a_preference_is_not_warned_of(
    project: Project, styles: dict[str, Path]
) -> None:
    """Preferences have no lists of marks (train_mark)."""
    project.tokenizer = styles["tools"]
    question, answer = talk("user", "assistant")["messages"]
    answers = {"chosen": [question, answer], "rejected": [question, answer | {"content": "No."}]}
    project.write_source([answers | {"keep": [0, 1]}])
    configure_preferences(project, "chosen", "rejected")
    output = project.convert_ok().out
    assert "keep (1 of 1 not empty)" in output
    assert "is a list of 0 and 1" not in output


def test_ranges_of_characters_under_another_key_are_warned_of(
    project: Project, styles: dict[str, Path]
) -> None:
    """axolotl names the key of its ranges by `message_field_training_detail`."""
    question, answer = talk("user", "assistant")["messages"]
    ranges = [{"begin_offset": 0, "end_offset": 1, "train": False}]
    records = [{"messages": [question, answer | {"training_detail": ranges}]}]
    records.append({"messages": [question, answer | {"training_detail": []}]})
    records.append({"messages": [question, answer | {"spans": [{"begin": 0, "end": 1}]}]})
    project.write_source(records)
    output = configure_chats(project, styles["tools"], shape="openai").convert_ok().out
    warning = (
        "the key training_detail of messages has ranges of characters (1 record), and is not read: "
        "if it says which characters are trained, as train_detail does, rename it to train_detail"
    )
    assert f"WARNING: {warning}\n" in output
    assert output.count("has ranges of characters") == 1
    assert "messages.training_detail (1 of 3 not empty)" in output
    drafted = run_ok("init", project.folder / "a.jsonl", "--tokenizer", project.tokenizer)
    assert f"WARNING: a: {warning}\n" in drafted.err


def test_tools_under_a_template_that_prints_none_name_the_fix(
    project: Project, tokenizer_folder: Path
) -> None:
    question, answer = talk("user", "assistant")["messages"]
    project.write_source([{"messages": [question, answer], "tools": TOOLS}])
    configure_chats(project, tokenizer_folder, shape="openai", tools="tools")
    answered = project.convert()
    assert answered.code == 5
    assert "name a tokenizer whose chat template prints tools" in answered.err


def test_init_notes_that_records_mark_their_answers(
    project: Project, styles: dict[str, Path]
) -> None:
    question, answer = talk("user", "assistant")["messages"]
    messages = [question, answer | {"loss_mask": 0}, question, answer | {"loss_mask": 1}]
    project.write_source([{"messages": messages}] * 3)
    recipe = project.folder / "drafted.yaml"
    words = ("init", project.folder / "a.jsonl", "--tokenizer", styles["tools"], "-o", recipe)
    run_ok(*words)
    assert "# 3 records of these mark which answers are trained" in recipe.read_text()
    assert "loss_mask" not in recipe.read_text()
    project.write_source([{"messages": [answer, question, answer]}] * 3)  # a greeting is no mark
    run_ok(*words, "--replace")
    assert "mark which answers" not in recipe.read_text()


def test_an_image_key_of_a_message_is_read_like_a_content_part(
    project: Project, tmp_path: Path
) -> None:
    project.tokenizer = seeing_tokenizer(project.tokenizer, tmp_path / "seeing")
    for number in range(2):
        (project.folder / f"{number}.jpg").write_bytes(drawing(seed=number))
    question, answer = talk("user", "assistant")["messages"]
    parts = [{"type": "image", "image": "0.jpg"}, {"type": "text", "text": "u"}]
    in_parts = [question | {"content": parts}, answer]
    inside = [question | {"image": "0.jpg"}, answer]
    placed = [question | {"images": ["0.jpg"], "content": "<image>u"}, answer]
    later = [*inside, question | {"image": "1.jpg", "content": "v"}, answer]
    shared = [{"from": "human", "value": "u", "image": "0.jpg"}, {"from": "gpt", "value": "a"}]
    bad = [question | {"images": ["0.jpg", "1.jpg"], "content": "<image>u"}, answer]
    empty = [question | {"image": None}, answer]
    project.write_source(
        {"messages": messages} for messages in (in_parts, inside, placed, later, bad, empty)
    )
    for shape in ("openai", "messages"):
        project.configure(
            chats("a.jsonl", images={}) | {"source": {"path": "a.jsonl", "shape": shape}},
            max_seq_len=400,
        )
        project.convert_ok("--reencode")
        rows = read_samples(project.train)
        first = {key: rows[0][key] for key in ("turns", "images")}
        assert all({key: row[key] for key in first} == first for row in rows[1:3])
        assert [len(row["images"]) for row in rows] == [1, 1, 1, 2, 0]
        assert rows[3]["images"][1] == drawing(seed=1)
        assert project.manifest.records.quarantined == {"image_count": 1}
    project.write_source([{"conversations": shared}])
    project.configure(
        chats("a.jsonl", images={}) | {"source": {"path": "a.jsonl", "shape": "llava"}},
        max_seq_len=400,
    )
    project.convert_ok("--reencode")
    assert {key: read_samples(project.train)[0][key] for key in first} == first
    project.write_source([{"messages": inside}])
    project.configure(
        chats("a.jsonl") | {"source": {"path": "a.jsonl", "shape": "openai"}}, max_seq_len=400
    )
    assert (
        "WARNING: the field messages.image of 1 record is not read"
        in project.convert_ok("--reencode").out
    )
    drafted = run_ok("init", project.folder / "a.jsonl", "--tokenizer", project.tokenizer).out
    assert "images: {}" in drafted


def test_placeholders_in_preferences_are_reported(
    project: Project, styles: dict[str, Path]
) -> None:
    project.tokenizer = styles["tools"]
    question, answer = talk("user", "assistant")["messages"]
    pair = {"prompt": "<ref-object>?", "chosen": "<bbox>", "rejected": "no"}
    chosen = [{"role": "user", "content": "<video>"}, answer]
    project.write_source(
        [pair, {"prompt": None, "chosen": chosen, "rejected": [chosen[0], question | answer]}]
    )
    configure_preferences(project, "prompt", "chosen", "rejected")
    output = project.convert_ok().out
    for word in ("<ref-object>", "<bbox>", "<video>"):
        assert f"WARNING: {word} of 1 record is trained as text" in output
    project.write_source([{"prompt": "<ref-object>?", "response": "<bbox>"}])
    output = project.configure(pairs("a.jsonl")).convert_ok("--reencode").out
    assert "WARNING: <ref-object> of 1 record is trained as text" in output


MESSAGE_TEXTS = ('[{"role": "user", "content": "q"}]', "[{'from': 'human', 'value': 'q'}]")
UNDECODED: dict[str, dict[str, Any]] = {
    "pairs": {"prompt": 0, "response": 1},
    "answers": {"prompt": 0, "chosen": 1, "rejected": "no"},
    "prompts": {"prompt": 0},
    "judged": {"prompt": "q", "completion": 1, "label": True},
}
"Kind of stream -> its fields: a text, or the number of a text in MESSAGE_TEXTS."


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
@pytest.mark.parametrize("kind", UNDECODED)
def test_messages_that_are_trained_as_text_are_warned_of(
    project: Project, styles: dict[str, Path], kind: str, form: str
) -> None:
    """A list that its writer did not decode is a conversation, which no template would render."""
    project.tokenizer = styles["tools"]
    fields = UNDECODED[kind]
    undecoded = {
        name: MESSAGE_TEXTS[value] if type(value) is int else value
        for name, value in fields.items()
    }
    plain = {name: value if type(value) is bool else f"a {name}" for name, value in fields.items()}
    looks_alike = {**plain, "prompt": '["role", 1] [{"role": 1}]'}  # does not begin with a message
    path = write_records(project, form, [undecoded, undecoded, plain, looks_alike])
    source = {"path": path, **{name: name for name in fields}}
    settings: dict[str, Any] = {
        "pairs": {},
        "answers": {"train_loader": {"name": "pairwise_preference"}},
        "prompts": {"train_loader": {"name": "prompt", "dataset": {"max_gen_len": 8}}},
        "judged": {"train_loader": {"name": "unpaired_preference"}},
    }[kind]
    stream_kind = {"pairs": "finetuning", "prompts": "prompt"}.get(kind, "preference")
    project.configure({"kind": stream_kind, "source": source}, max_seq_len=256, **settings)
    output = project.convert_ok().out
    assert "WARNING: 2 records have a list of messages as text" in output
    assert project.manifest.records.written == 4
    drafted = mdsmix("init", project.folder / path, "--tokenizer", project.tokenizer)
    assert (
        "a is left out: records tried: 4, written: 4; 2 records have a list of messages as text"
        in drafted.err
    )


def test_only_the_completion_of_trl_is_trained(project: Project, styles: dict[str, Path]) -> None:
    """The trained text is what transformers renders for prompt and completion, without what it
    renders for the prompt.
    """
    messages = talk("user", "assistant", "user", "assistant")["messages"]
    calls = [{"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}]
    called = {"role": "assistant", "content": "", "tool_calls": calls}
    long = [called, {"role": "tool", "name": "weather", "content": "rain"}, messages[1]]
    records = [
        {"prompt": messages[:3], "completion": messages[3:], "tools": []},
        {"prompt": messages[:1], "completion": long, "tools": TOOLS},
    ]
    project.write_source(records)
    stream = {"kind": "finetuning", "source": {"path": "a.jsonl", "shape": "prompt_completion"}}
    project.tokenizer = styles["tools"]
    project.configure(
        stream, max_seq_len=1024, target_responses="all", special_tokens_in_text="allow"
    ).run()
    shown = re.sub("[⟨⟩]", "", run_ok("inspect", project.train).out)
    for record, row in zip(records, read_texts(project), strict=True):
        tools = record["tools"] or None
        assert row == render_by_transformers(
            QWEN_2_5, [*record["prompt"], *record["completion"]], False, tools=tools
        )
    runs = re.findall("⟦(.*?)⟧", shown, re.DOTALL)
    trained = [run for run in runs if run != "</s>"]  # the EOS that the loader appends
    before = render_by_transformers(QWEN_2_5, messages[:3], True)
    assert trained[0] == render_by_transformers(QWEN_2_5, messages, False).removeprefix(before)
    assert len(trained) == 3, "one answer of the first record, a call and an answer of the other"
    project.write_source(
        [
            {
                "prompt": [messages[0], messages[1] | {"train": 1}, messages[2]],
                "completion": messages[3:],
            },
            records[0],
        ]
    )
    project.convert_ok("--reencode")
    assert project.manifest.records.quarantined == {}


def test_images_of_finevision_come_before_the_first_question(
    project: Project, tmp_path: Path
) -> None:
    """The rows are the same as those of OpenAI's content parts."""
    project.tokenizer = seeing_tokenizer(project.tokenizer, tmp_path / "seeing")
    content = [drawing(seed=number) for number in range(2)]
    for number in range(2):
        (project.folder / f"{number}.jpg").write_bytes(content[number])
    question, answer = talk("user", "assistant")["messages"]
    parts = [{"type": "image", "image": f"{n}.jpg"} for n in range(2)]
    more = [question | {"content": "v"}, answer]
    project.write_source(
        [
            {
                "messages": [
                    question | {"content": [*parts, {"type": "text", "text": "u"}]},
                    answer,
                    *more,
                ]
            }
        ]
    )
    project.configure(
        chats("a.jsonl", images={}) | {"source": {"path": "a.jsonl", "shape": "openai"}},
        max_seq_len=400,
    ).run()
    (expected,) = read_samples(project.train)
    rounds = [{"user": text, "assistant": "a", "source": "x"} for text in "uv"]
    images = [{"bytes": image, "path": None} for image in content]
    parquet.write_table(
        pa.Table.from_pylist([{"images": images, "texts": rounds}]), project.folder / "b.parquet"
    )
    project.configure(
        chats("b.parquet", images={}) | {"source": {"path": "b.parquet", "texts": "texts"}},
        max_seq_len=400,
    )
    output = project.convert_ok("--reencode").out
    (row,) = read_samples(project.train)
    assert {key: row[key] for key in ("turns", "images")} == {
        key: expected[key] for key in ("turns", "images")
    }
    assert "fields not read: texts.source (1 of 1 not empty)" in output
    drafted = run_ok("init", project.folder / "b.parquet", "--tokenizer", project.tokenizer).out
    assert "texts: texts" in drafted
    assert "images: {}" in drafted


@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_columns_with_the_names_of_marks_are_warned_of_though_not_looked_into(
    project: Project, styles: dict[str, Path], form: str
) -> None:
    """Under the name that the warning gives the column is read. Pretraining has no marks."""
    messages = talk("user", "assistant", "user", "assistant")["messages"]
    rows = [{"messages": messages, "text": "a", "trainable": [0, 1], "score": 1}] * 3
    path = project.folder / f"a.{form}"
    write = {"parquet": parquet.write_table, "arrow": feather.write_feather}[form]
    write(pa.Table.from_pylist(rows), str(path))
    project.tokenizer = styles["tools"]
    settings = {"max_seq_len": 256, "target_responses": "all"}
    source = {"path": path.name, "messages": "messages"}
    stream = {"kind": "finetuning", "source": source}
    output = project.configure(stream, **settings).convert_ok().out
    assert output.count("has the name of a mark") == 1
    assert "WARNING: the column trainable has the name of a mark, and was not looked" in output
    assert "name it in the recipe by source.train_mark: trainable" in output
    trained = project.manifest.totals.loss_tokens
    source["train_mark"] = "trainable"
    output = project.configure(stream, **settings).convert_ok("--reencode").out
    assert "has the name of a mark" not in output
    assert 0 < project.manifest.totals.loss_tokens < trained
    project.configure(documents(path.name, layout="document"))
    output = project.convert_ok(f"local={project.folder / 'texts'}").out
    assert "trainable (not looked into)" in output
    assert "has the name of a mark" not in output


def test_unread_reasoning_details_are_warned_of_unless_they_repeat_the_reasoning(
    project: Project, styles: dict[str, Path]
) -> None:
    """OpenRouter writes both."""
    question, answer = talk("user", "assistant")["messages"]
    details = [{"type": "reasoning.text", "text": "Hm."}]
    alone = {"messages": [question, answer | {"reasoning_details": details}]}
    both = {"messages": [question, answer | {"reasoning_details": details, "reasoning": "Hm."}]}
    turns = {"messages": [*both["messages"], *alone["messages"]]}
    project.write_source([alone, both, turns])
    output = configure_chats(project, styles["tools"], shape="openai").convert_ok().out
    assert project.manifest.records.unread == {
        "messages.reasoning_details": 2,
        "messages.reasoning": 2,
    }
    warning = "WARNING: the field messages.reasoning_details of 2 records is not read, so it is "
    assert f"{warning}ignored in training: it is a list: write its texts under the key" in output
    drafted = run_ok("init", project.folder / "a.jsonl", "--tokenizer", project.tokenizer)
    assert "the field messages.reasoning_details of 2 records is not read" in drafted.err


def test_calls_that_are_contents_with_a_recipient_are_warned_of(
    project: Project, styles: dict[str, Path]
) -> None:
    """Messages of harmony, gpt-oss's format: their arguments would be trained as an answer."""
    question, answer = talk("user", "assistant")["messages"]
    call = {"role": "assistant", "content": "{}", "recipient": "functions.get_weather"}
    result = {"role": "tool", "content": "sun"}
    project.write_source(
        [{"messages": [question, call, result, answer]}, {"messages": [question, answer]}]
    )
    output = configure_chats(project, styles["tools"], shape="openai").convert_ok().out
    warning = "the field messages.recipient of 1 record is not read, so it is ignored in training: "
    assert f"WARNING: {warning}if it names a tool, the messages' contents" in output
    drafted = run_ok("init", project.folder / "a.jsonl", "--tokenizer", project.tokenizer)
    assert warning in drafted.err


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_nemos_mask_of_the_assistant_is_warned_of(
    project: Project, styles: dict[str, Path], form: str
) -> None:
    """The condition that the warning gives leaves these records out."""
    turns = [{"from": "User", "value": "Which?"}, {"from": "Assistant", "value": "This."}]
    rows = [{"mask": mask, "conversations": turns} for mask in ("User", "Assistant", "User")]
    path = project.folder / f"a.{form}"
    if form == "jsonl":
        project.write_source(rows)
    else:
        parquet.write_table(pa.Table.from_pylist(rows), path)
    project.tokenizer = styles["tools"]
    tags = {"user_tag": "User", "assistant_tag": "Assistant"}
    source = {"path": path.name, "conversations": "conversations", "tags": tags}
    stream = {"kind": "finetuning", "source": source}
    output = project.configure(stream, max_seq_len=256).convert_ok().out
    expected = {
        "jsonl": "WARNING: the field mask names the role of the answers (1 record), and is not",
        "parquet": "WARNING: the column mask has the name of a mark, and was not looked into",
    }
    assert expected[form] in output
    assert "as the role of answers" not in output
    source["where"] = re.findall("where: (mask != '.*')$", output, re.MULTILINE)[0]
    output = project.configure(stream, max_seq_len=256).convert_ok("--reencode").out
    assert "mask names" not in output
    assert "column mask" not in output
    assert project.manifest.records.filtered == {"where": 1}
