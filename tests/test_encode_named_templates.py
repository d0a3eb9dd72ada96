"""A tokenizer with several named chat templates: each conversation is rendered by the one that
transformers takes for it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.converting import Web, chats, done, mdsmix, refused, samples
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
    """A tokenizer with these templates: in its config, as transformers <= 4.50 wrote them, or in
    files.
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


def with_tools(web: Web, tokenizer: Path, **settings: Any) -> Web:
    web.tokenizer = tokenizer
    stream = chats("a.jsonl", **settings)
    stream["source"] |= {"shape": "openai", "tools": "tools"}
    return web.says(
        stream, max_seq_len=1024, target_responses="all", special_tokens_in_text="allow"
    )


def rows_of(web: Web, tokenizer: Any) -> list[str]:
    """The text of each stored row."""
    rows = []
    for sample in samples(web.train):
        ids = [sides[side] for sides in sample["turns"] for side in ("input_ids", "labels")]
        rows.append("".join(map(tokenizer.decode, ids)))
    return rows


@pytest.mark.parametrize("place", ["config", "files"])
def test_a_conversation_with_tools_is_rendered_by_tool_use(
    web: Web, tmp_path: Path, place: str
) -> None:
    tokenizer = write_tokenizer(tmp_path / "tokenizer", place, NAMED)
    reference = AutoTokenizer.from_pretrained(tokenizer)
    assert reference.chat_template == NAMED
    web.holds(RECORDS)
    with_tools(web, tokenizer).run()
    expected = []
    for record in RECORDS:
        tools = record.get("tools")
        text = reference.apply_chat_template(record["messages"], tools=tools, tokenize=False)
        expected.append(text)
    assert rows_of(web, reference) == expected
    # whoever opens the published folder renders the same, with tools and without
    (folder,) = (web.folder / "out").glob("tokenizer-*")
    published = AutoTokenizer.from_pretrained(folder)
    for record, text in zip(RECORDS, expected, strict=True):
        tools = record.get("tools")
        assert (
            published.apply_chat_template(record["messages"], tools=tools, tokenize=False) == text
        )
    done("check", web.recipe)


def test_the_date_that_only_tool_use_prints_is_fixed(web: Web, tmp_path: Path) -> None:
    dated = NAMED | {"tool_use": "{{ strftime_now('%Y') }}" + TOOL_USE}
    web.holds(RECORDS)
    with_tools(web, write_tokenizer(tmp_path / "dated", "config", dated), date_string="2001-02-03")
    web.run()
    assert web.manifest.encoding.date_string == "2001-02-03"
    shown = done("inspect", web.train, "-n", 9).out
    assert shown.count("2001with tools") == 4
    with_tools(web, web.tokenizer).run()
    assert web.manifest.encoding.date_string  # today's


def test_another_tool_use_makes_streams_with_tools_again(web: Web, tmp_path: Path) -> None:
    """And no others. `check` refuses to mix streams of two such templates."""
    other = NAMED | {"tool_use": TOOL_USE.replace("# Tools", "# Functions")}
    one, two = (
        write_tokenizer(tmp_path / f"t{n}", "files", t) for n, t in enumerate((NAMED, other))
    )
    web.holds(RECORDS)
    with_tools(web, one).run()
    first = web.keys
    with_tools(web, two)
    assert "the chat template tool_use was" in web.done("--dry-run").out
    assert "template-differs" in str(mdsmix("check", web.recipe))
    web.run()
    assert web.keys != first
    assert web.manifest.encoding.rules["template.named"] == 2
    done("check", web.recipe)
    web.holds(RECORDS[:2])
    web.says(chats("a.jsonl"), max_seq_len=1024).run()
    plain = web.keys
    assert web.manifest.encoding.rules == {}
    web.tokenizer = one
    web.says(chats("a.jsonl"), max_seq_len=1024).run()
    assert web.keys == plain
    done("check", web.recipe)


def test_without_default_a_conversation_without_tools_is_set_aside(
    web: Web, tmp_path: Path
) -> None:
    """With one sentence; and without tool_use the tokenizer is refused."""
    tokenizer = write_tokenizer(tmp_path / "a", "config", {"tool_use": TOOL_USE, "rag": "rag"})
    web.holds(RECORDS)
    with_tools(web, tokenizer).run()
    assert web.manifest.records.written == 4
    why = "the tokenizer has the chat templates rag, tool_use, and none is named default"
    for bad in web.bad:
        assert bad["reason"] == "template_error"
        assert bad["detail"]["template"].startswith(why)
    assert "ChatML" not in str(
        mdsmix("report", web.recipe, "--no-preview", "-o", web.folder / "page.html")
    )
    neither = write_tokenizer(tmp_path / "b", "config", {"chat": DEFAULT, "rag": "rag"})
    refused(with_tools(web, neither).convert(), 2, "the chat templates chat, rag, and none is")
    begun = mdsmix("init", web.folder / "a.jsonl", "--tokenizer", neither)
    assert begun.code == 2
    assert "the chat templates chat, rag, and none is" in begun.err
