"""A tokenizer with several named chat templates: each conversation is rendered by the template that
transformers takes for it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.converting import Project, assert_refused, chats, mdsmix, read_samples, run_ok
from tests.styles import train_style
from tests.tool_styles import QWEN_2_5, TOOLS

DEFAULT = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
TOOL_USE = "{{ 'with tools' if tools is not none }}" + QWEN_2_5
NAMED = {"default": DEFAULT, "tool_use": TOOL_USE, "rag": "rag"}
ASKED = {"role": "user", "content": "2+3?"}
SAID = {"role": "assistant", "content": "5"}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"of": [2, 3]}}}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "5"}
RECORDS: list[dict[str, Any]] = [
    {"messages": [ASKED, SAID]},
    {"messages": [ASKED, SAID], "tools": None},
    {"messages": [ASKED, SAID], "tools": []},
    {"messages": [ASKED, SAID], "tools": TOOLS},
    {"messages": [ASKED, CALLING, RESULT, SAID], "tools": TOOLS},
    {"messages": [ASKED, SAID, ASKED, SAID], "tools": []},
]


def write_tokenizer(folder: Path, place: str, named: dict[str, str]) -> Path:
    """Write a tokenizer with these templates: in its config, as transformers <= 4.50 wrote them, or
    in files.
    """
    train_style(folder, "plain")
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    del config["chat_template"]
    if place == "config":
        config["chat_template"] = [{"name": n, "template": t} for n, t in named.items()]
    else:
        others = folder / "additional_chat_templates"
        others.mkdir()
        for name, text in named.items():
            file = folder / "chat_template.jinja" if name == "default" else others / f"{name}.jinja"
            file.write_text(text)
    path.write_text(json.dumps(config))
    return folder


def configure_tools(project: Project, tokenizer: Path, **settings: Any) -> Project:
    project.tokenizer = tokenizer
    stream = chats("a.jsonl", **settings)
    stream["source"] |= {"shape": "openai", "tools": "tools"}
    return project.configure(
        stream, max_seq_len=1024, target_responses="all", special_tokens_in_text="allow"
    )


def decode_rows(project: Project, tokenizer: Any) -> list[str]:
    """Return the text of each stored row."""
    rows = []
    for sample in read_samples(project.train):
        ids = [sides[side] for sides in sample["turns"] for side in ("input_ids", "labels")]
        rows.append("".join(map(tokenizer.decode, ids)))
    return rows


@pytest.mark.parametrize("place", ["config", "files"])
def test_a_conversation_with_tools_is_rendered_by_tool_use(
    project: Project, tmp_path: Path, place: str
) -> None:
    tokenizer = write_tokenizer(tmp_path / "tokenizer", place, NAMED)
    reference = AutoTokenizer.from_pretrained(tokenizer)
    assert reference.chat_template == NAMED
    project.write_source(RECORDS)
    configure_tools(project, tokenizer).run()
    expected = []
    for record in RECORDS:
        tools = record.get("tools")
        text = reference.apply_chat_template(record["messages"], tools=tools, tokenize=False)
        expected.append(text)
    assert decode_rows(project, reference) == expected
    # whoever opens the published folder renders the same, with tools and without
    (folder,) = (project.folder / "out").glob("tokenizer-*")
    published = AutoTokenizer.from_pretrained(folder)
    for record, text in zip(RECORDS, expected, strict=True):
        tools = record.get("tools")
        assert (
            published.apply_chat_template(record["messages"], tools=tools, tokenize=False) == text
        )
    run_ok("check", project.recipe)


def test_the_date_that_only_tool_use_prints_is_fixed(project: Project, tmp_path: Path) -> None:
    dated = NAMED | {"tool_use": "{{ strftime_now('%Y') }}" + TOOL_USE}
    project.write_source(RECORDS)
    configure_tools(
        project, write_tokenizer(tmp_path / "dated", "config", dated), date_string="2001-02-03"
    )
    project.run()
    assert project.manifest.encoding.date_string == "2001-02-03"
    shown = run_ok("inspect", project.train, "-n", 9).out
    assert shown.count("2001with tools") == 4
    configure_tools(project, project.tokenizer).run()
    assert project.manifest.encoding.date_string  # today's


def test_another_tool_use_template_converts_streams_with_tools_again(
    project: Project, tmp_path: Path
) -> None:
    """And no others. `check` refuses to mix streams with two such templates."""
    other_templates = NAMED | {"tool_use": TOOL_USE.replace("# Tools", "# Functions")}
    first_tokenizer, second_tokenizer = (
        write_tokenizer(tmp_path / f"t{n}", "files", t)
        for n, t in enumerate((NAMED, other_templates))
    )
    project.write_source(RECORDS)
    configure_tools(project, first_tokenizer).run()
    first = project.keys
    configure_tools(project, second_tokenizer)
    assert "the chat template tool_use was" in project.convert_ok("--dry-run").out
    assert "template-differs" in str(mdsmix("check", project.recipe))
    project.run()
    assert project.keys != first
    assert project.manifest.encoding.rules["template.named"] == 2
    run_ok("check", project.recipe)
    project.write_source(RECORDS[:2])
    project.configure(chats("a.jsonl"), max_seq_len=1024).run()
    plain = project.keys
    assert project.manifest.encoding.rules == {}
    project.tokenizer = first_tokenizer
    project.configure(chats("a.jsonl"), max_seq_len=1024).run()
    assert project.keys == plain
    run_ok("check", project.recipe)


def test_without_default_a_conversation_without_tools_is_quarantined(
    project: Project, tmp_path: Path
) -> None:
    """With one message. Without tool_use too, the tokenizer is refused."""
    tokenizer = write_tokenizer(tmp_path / "a", "config", {"tool_use": TOOL_USE, "rag": "rag"})
    project.write_source(RECORDS)
    configure_tools(project, tokenizer).run()
    assert project.manifest.records.written == 4
    why = "the tokenizer has the chat templates rag, tool_use, and none is named default"
    for bad in project.bad:
        assert bad["reason"] == "template_error"
        assert bad["detail"]["template"].startswith(why)
    assert "ChatML" not in str(
        mdsmix("report", project.recipe, "--no-preview", "-o", project.folder / "page.html")
    )
    neither = write_tokenizer(tmp_path / "b", "config", {"chat": DEFAULT, "rag": "rag"})
    assert_refused(
        configure_tools(project, neither).convert(), 2, "the chat templates chat, rag, and none is"
    )
    begun = mdsmix("init", project.folder / "a.jsonl", "--tokenizer", neither)
    assert begun.code == 2
    assert "the chat templates chat, rag, and none is" in begun.err
