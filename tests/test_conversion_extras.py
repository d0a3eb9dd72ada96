"""What a record says beside its messages, from a file to a stream: variables of the chat template,
tools in the system message, marks under unknown keys, and what is not read. The oracle of a row is
transformers on the same record.
"""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from tests.converting import Project, chats, pairs, read_samples, run_ok
from tests.pictures import drawing, seeing_tokenizer
from tests.styles import train_style
from tests.test_conversion_chats import says, talk
from tests.test_encode_chat import theirs
from tests.tool_styles import QWEN_2_5, TOOLS

MODES = (
    "{% if reasoning_effort is defined %}<{{ reasoning_effort }}>{% endif %}"
    "{% if enable_thinking is defined and enable_thinking is false %}/no_think{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Another text in each mode, in the manner of Qwen3 and gpt-oss; a null is a defined
reasoning_effort.
"""
GLM_4 = (
    "{% for m in messages %}{% if m['tools'] is defined and m.role == 'system' %}<|system|>"
    "{% for tool in m['tools'] %}{% if tool['type'] == 'function' %}## {{ tool['function']['name'] }}\n{% endif %}{% endfor %}"
    "{% endif %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
"Prints the tools of the system message, and no others, in the manner of GLM-4."
GIVEN: list[Any] = [
    *({"enable_thinking": False}, {"reasoning_effort": "low"}, {}, None),
    {"enable_thinking": True, "reasoning_effort": "high"},
]


@pytest.fixture(scope="module")
def styles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("styles")
    templates = {"modes": MODES, "tools": QWEN_2_5, "glm": GLM_4}
    return {name: train_style(folder / name, "plain", text) for name, text in templates.items()}


def texts(project: Project) -> list[str]:
    """The text of each row, prompts and answers."""
    from tokenizers import Tokenizer

    decode = Tokenizer.from_file(str(project.tokenizer / "tokenizer.json")).decode
    rows = read_samples(project.train)
    parts = [[part for turn in row["turns"] for part in turn.values()] for row in rows]
    return [decode([id for part in row for id in part], skip_special_tokens=False) for row in parts]


def write(project: Project, form: str, records: list[dict[str, Any]]) -> str:
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
    """Parquet fills the variables that another record has by nulls, which transformers
    would print.
    """
    records = [talk("user", "assistant") | {"chat_template_kwargs": given} for given in GIVEN]
    says(project, styles["modes"], path=write(project, form, records), shape=shape).run()
    given = [each["chat_template_kwargs"] or {} for each in records]
    wanted = [theirs(MODES, records[0]["messages"], False, **each) for each in given]
    assert texts(project) == wanted
    assert len({*wanted}) == 4
    assert "fields not read" not in project.convert_ok("--reencode").out


def test_a_variable_of_a_record_wins_and_one_that_nothing_reads_is_told(
    project: Project, styles: dict[str, Path]
) -> None:
    """As arguments of apply_chat_template win over a tokenizer's own; and plain records keep the
    recipe's.
    """
    given = [{"reasoning_effort": "low"}, {}, {"effort": "low", "enable_thinking": False}]
    project.write_source(
        talk("user", "assistant") | {"chat_template_kwargs": each} for each in given
    )
    says(project, styles["modes"])
    said = project.convert_ok("tokenizer.template.reasoning_effort=high").out
    assert [text.partition("|")[0] for text in texts(project)] == [
        "<low><",
        "<high><",
        "<high>/no_think<",
    ]
    assert "fields not read: chat_template_kwargs.effort (1 of 3 not empty)" in said
    assert "WARNING: the field chat_template_kwargs.effort of 1 record is not read" in said
    preferred = talk("user", "assistant")["messages"]
    sides = {"chosen": preferred, "rejected": preferred, "chat_template_kwargs": given[2]}
    project.write_source([sides])
    project.configure({"kind": "preference", "source": {"path": "a.jsonl", "chosen": "chosen", "rejected": "rejected"}}, max_seq_len=1024, train_loader={"name": "pairwise_preference"})  # fmt: skip
    said = project.convert_ok("--reencode").out
    assert "WARNING: the field chat_template_kwargs.effort of 1 record is not read" in said
    assert "/no_think" in run_ok("inspect", project.train).out


def test_a_special_token_in_a_variable_is_that_of_a_record(
    project: Project, styles: dict[str, Path]
) -> None:
    given = {"reasoning_effort": "<|im_end|>"}
    plain = talk("user", "assistant")
    project.write_source([plain | {"chat_template_kwargs": given}, plain])
    says(project, styles["modes"]).run("special_tokens_in_text=escape")
    assert project.manifest.records.quarantined == {"special_token_in_text": 1}


@pytest.mark.parametrize("style", ["tools", "glm"])
def test_tools_of_the_system_message_are_printed_as_the_record_has_them(
    project: Project, styles: dict[str, Path], style: str
) -> None:
    """Where the template prints them there, as GLM-4's does, they stay; else they are the record's
    tools, as in OpenAI's form.
    """
    asked, answer = talk("user", "assistant")["messages"]
    system = {"role": "system", "content": "Help."}
    source = {"tools": QWEN_2_5, "glm": GLM_4}[style]
    inside = [system | {"tools": TOOLS}, asked, answer]
    bare = [system | {"tools": [tool["function"] for tool in TOOLS]}, asked, answer]
    project.write_source({"messages": messages} for messages in (inside, bare))
    says(project, styles[style], shape="openai").run()
    if style == "glm":
        wanted = theirs(source, inside, False)
    else:
        wanted = theirs(source, [system, asked, answer], False, tools=TOOLS)
    assert TOOLS[0]["function"]["name"] in wanted
    assert texts(project) == [wanted] * 2
    other = {"messages": inside, "tools": TOOLS[:1]}
    project.write_source(
        [other, {"messages": [{**system, "tools": "none"}, asked, answer]}, {"messages": inside}]
    )
    says(project, styles[style], shape="openai", tools="tools").convert_ok("--reencode")
    expected = {"bad_tools": 2} if style == "tools" else {"bad_tools": 1, "tools_not_printed": 1}
    assert project.manifest.records.quarantined == expected


def test_keys_that_may_be_marks_and_reasoning_that_is_not_printed_are_told(
    project: Project, styles: dict[str, Path]
) -> None:
    asked, answer = talk("user", "assistant")["messages"]
    keep = [{"messages": [asked | {"keep": 0}, answer | {"keep": n}]} for n in (0, 1, True, False)]
    thought = {"messages": [asked, answer | {"reasoning": "Hm.", "score": 1}]}
    scored = {"messages": [asked, answer | {"score": 0.5}]}
    beside = {"messages": [asked, answer], "rejected_response": "no"}
    project.write_source([*keep, thought, scored, beside])
    said = says(project, styles["tools"], shape="openai").convert_ok().out
    assert (
        "WARNING: keep of messages is 0 or 1, or false or true, in all 4 records that have it"
        in said
    )
    assert "name it by source.train_mark: keep" in said
    assert "score of messages" not in said
    assert "WARNING: the field messages.reasoning of 1 record is not read" in said
    assert "WARNING: the field rejected_response of 1 record is not read" in said
    drafted = run_ok("init", project.folder / "a.jsonl", "--tokenizer", project.tokenizer)
    assert "WARNING: a: keep of messages is 0 or 1" in drafted.err
    named = says(project, styles["tools"], shape="openai", train_mark="keep").convert_ok(
        "--reencode"
    )
    assert "keep of messages" not in named.out
    assert project.manifest.records.filtered == {"nothing_trained": 2}


def test_init_says_that_records_mark_their_answers(
    project: Project, styles: dict[str, Path]
) -> None:
    asked, answer = talk("user", "assistant")["messages"]
    said = [asked, answer | {"loss_mask": 0}, asked, answer | {"loss_mask": 1}]
    project.write_source([{"messages": said}] * 3)
    recipe = project.folder / "drafted.yaml"
    run_ok("init", project.folder / "a.jsonl", "--tokenizer", styles["tools"], "-o", recipe)
    assert "# 3 records of these say which answers are trained" in recipe.read_text()
    assert "loss_mask" not in recipe.read_text()


def test_an_image_of_a_message_is_read_as_a_part_is(project: Project, tmp_path: Path) -> None:
    project.tokenizer = seeing_tokenizer(project.tokenizer, tmp_path / "seeing")
    for number in range(2):
        (project.folder / f"{number}.jpg").write_bytes(drawing(seed=number))
    asked, answer = talk("user", "assistant")["messages"]
    parts = [{"type": "image", "image": "0.jpg"}, {"type": "text", "text": "u"}]
    in_parts = [asked | {"content": parts}, answer]
    inside = [asked | {"image": "0.jpg"}, answer]
    placed = [asked | {"images": ["0.jpg"], "content": "<image>u"}, answer]
    later = [*inside, asked | {"image": "1.jpg", "content": "v"}, answer]
    shared = [{"from": "human", "value": "u", "image": "0.jpg"}, {"from": "gpt", "value": "a"}]
    bad = [asked | {"images": ["0.jpg", "1.jpg"], "content": "<image>u"}, answer]
    empty = [asked | {"image": None}, answer]
    project.write_source(
        {"messages": each} for each in (in_parts, inside, placed, later, bad, empty)
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


def test_placeholders_in_preferences_are_told(project: Project, styles: dict[str, Path]) -> None:
    project.tokenizer = styles["tools"]
    asked, answer = talk("user", "assistant")["messages"]
    texts_ = {"prompt": "<ref-object>?", "chosen": "<bbox>", "rejected": "no"}
    said = [{"role": "user", "content": "<video>"}, answer]
    project.write_source(
        [texts_, {"prompt": None, "chosen": said, "rejected": [said[0], asked | answer]}]
    )
    project.configure({"kind": "preference", "source": {"path": "a.jsonl", "prompt": "prompt", "chosen": "chosen", "rejected": "rejected"}}, max_seq_len=1024, train_loader={"name": "pairwise_preference"})  # fmt: skip
    told = project.convert_ok().out
    for word in ("<ref-object>", "<bbox>", "<video>"):
        assert f"WARNING: {word} of 1 record is trained as text" in told
    project.write_source([{"prompt": "<ref-object>?", "response": "<bbox>"}])
    told = project.configure(pairs("a.jsonl")).convert_ok("--reencode").out
    assert "WARNING: <ref-object> of 1 record is trained as text" in told


def test_trl_s_completion_alone_is_trained(project: Project, styles: dict[str, Path]) -> None:
    """What transformers renders for prompt and completion, less what it renders for the prompt."""
    said = talk("user", "assistant", "user", "assistant")["messages"]
    calls = [{"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}]
    called = {"role": "assistant", "content": "", "tool_calls": calls}
    long = [called, {"role": "tool", "name": "weather", "content": "rain"}, said[1]]
    records = [
        {"prompt": said[:3], "completion": said[3:], "tools": []},
        {"prompt": said[:1], "completion": long, "tools": TOOLS},
    ]
    project.write_source(records)
    stream = {"kind": "finetuning", "source": {"path": "a.jsonl", "shape": "prompt_completion"}}
    project.tokenizer = styles["tools"]
    project.configure(
        stream, max_seq_len=1024, target_responses="all", special_tokens_in_text="allow"
    ).run()
    shown = re.sub("[⟨⟩]", "", run_ok("inspect", project.train).out)
    for record, row in zip(records, texts(project), strict=True):
        tools = record["tools"] or None
        assert row == theirs(
            QWEN_2_5, [*record["prompt"], *record["completion"]], False, tools=tools
        )
    runs = re.findall("⟦(.*?)⟧", shown, re.DOTALL)
    trained = [run for run in runs if run != "</s>"]  # the EOS that the loader appends
    before = theirs(QWEN_2_5, said[:3], True)
    assert trained[0] == theirs(QWEN_2_5, said, False).removeprefix(before)
    assert len(trained) == 3, "one answer of the first record, a call and an answer of the other"
    project.write_source(
        [{"prompt": [said[0], said[1] | {"train": 1}, said[2]], "completion": said[3:]}, records[0]]
    )
    project.convert_ok("--reencode")
    assert project.manifest.records.quarantined == {}


def test_finevision_s_images_come_before_its_first_question(
    project: Project, tmp_path: Path
) -> None:
    """The same rows as those of OpenAI's parts."""
    project.tokenizer = seeing_tokenizer(project.tokenizer, tmp_path / "seeing")
    content = [drawing(seed=number) for number in range(2)]
    for number in range(2):
        (project.folder / f"{number}.jpg").write_bytes(content[number])
    asked, answer = talk("user", "assistant")["messages"]
    parts = [{"type": "image", "image": f"{n}.jpg"} for n in range(2)]
    more = [asked | {"content": "v"}, answer]
    project.write_source(
        [
            {
                "messages": [
                    asked | {"content": [*parts, {"type": "text", "text": "u"}]},
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
    (wanted,) = read_samples(project.train)
    rounds = [{"user": said, "assistant": "a", "source": "x"} for said in "uv"]
    held = [{"bytes": each, "path": None} for each in content]
    parquet.write_table(
        pa.Table.from_pylist([{"images": held, "texts": rounds}]), project.folder / "b.parquet"
    )
    project.configure(
        chats("b.parquet", images={}) | {"source": {"path": "b.parquet", "texts": "texts"}},
        max_seq_len=400,
    )
    said = project.convert_ok("--reencode").out
    (row,) = read_samples(project.train)
    assert {key: row[key] for key in ("turns", "images")} == {
        key: wanted[key] for key in ("turns", "images")
    }
    assert "fields not read: messages.source (1 of 1 not empty)" in said
    drafted = run_ok("init", project.folder / "b.parquet", "--tokenizer", project.tokenizer).out
    assert "texts: texts" in drafted
    assert "images: {}" in drafted
