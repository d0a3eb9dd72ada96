"""Conversations as people publish them, from a file to a stream: what is trained of them, what their template prints, and what is said
of records that are none."""

import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from tests.converting import Web, chats, documents, done, refused, samples
from tests.styles import QWEN_3, train_style
from tests.tool_styles import QWEN_2_5

WITHOUT = "tokenizer.template.enable_thinking=false"
WEATHER = {
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
ALPACA = {"instruction": "Name a colour.", "input": "", "output": "Red."}
ROUNDS = [{"human": "Hi", "assistant": "Hello."}]


@pytest.fixture(scope="module")
def styles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tokenizers: one whose template knows tools, and one whose template drops the reasoning of earlier answers."""
    folder = tmp_path_factory.mktemp("styles")
    templates = {"tools": QWEN_2_5, "forgetful": QWEN_3}
    return {name: train_style(folder / name, "plain", text) for name, text in templates.items()}


def says(web: Web, tokenizer: Path, **source: Any) -> Web:
    web.tokenizer = tokenizer
    stream = chats("a.jsonl")
    stream["source"] |= source
    policies = {"target_responses": "all", "special_tokens_in_text": "allow"}
    return web.says(stream, max_seq_len=1024, **policies)


def talk(*roles: str) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": role[0]} for role in roles]}


def weighed(*weights: int) -> dict[str, Any]:
    """A question and an answer for each weight."""
    messages = talk(*("user", "assistant") * len(weights))["messages"]
    for number, weight in enumerate(weights):
        messages[2 * number + 1] |= {"weight": weight, "content": f"answer {number}"}
    return {"messages": messages}


def test_what_is_not_to_be_trained_is_not_marked(web: Web, styles: dict[str, Path]) -> None:
    web.holds([weighed(0, 1, 0, 1), weighed(0, 0, 0, 0), weighed(1, 0)])
    says(web, styles["tools"], shape="openai").run()
    assert web.manifest.records.filtered == {"nothing_trained": 1}
    shown = done("inspect", web.train).out
    assert re.findall(r"⟦(answer \d)", shown) == ["answer 1", "answer 3", "answer 0"]
    # Where prompts are trained, so would be an answer in one; the last ends before its own.
    web.run("target_prompts=all")
    assert web.manifest.records.written == 1
    assert {bad["reason"] for bad in web.bad} == {"untrained_in_prompt"}


def test_nulls_of_arrow_are_told_and_dropped_where_asked(web: Web, styles: dict[str, Path]) -> None:
    """A parquet file fills what one object lacks and another has; its tools and calls are rendered with that."""
    rows = []
    for arguments in ({"city": "Köln"}, {"n": 3}):
        call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
        asked, calling, told, said = talk("user", "assistant", "tool", "assistant")["messages"]
        messages = [asked, calling | {"tool_calls": [call]}, told, said]
        tools = [{"type": "function", "function": WEATHER}]
        rows.append({"messages": messages, "tools": tools})
    parquet.write_table(pa.Table.from_pylist(rows), web.folder / "a.parquet")
    source = {"path": "a.parquet", "tools": "tools", "shape": "openai"}
    for nulls, printed in (("keep", '{"city": "Köln", "n": null}'), ("drop", '{"city": "Köln"}')):
        said = says(web, styles["tools"], nulls=nulls, **source).done("--reencode").out
        assert ("2 records have null entries inside messages" in said) == (nulls == "keep")
        shown = done("inspect", web.train).out
        assert printed in shown
        assert ("null" in shown.split("─")[-1]) == (nulls == "keep")


def test_of_records_of_another_shape_it_is_said_what_to_do(web: Web) -> None:
    for record, said in (
        (talk("developer", "user", "assistant"), "shape: openai that of a developer"),
        (ALPACA, 'The first missing_field, of a.jsonl: missing: messages in {"instruction":'),
        (talk("user", "user", "assistant"), "consecutive_roles: merge joins messages of one role"),
        ({"messages": ROUNDS}, "mdsmix init SOURCE says which shape and settings"),
        (talk("user", "bot"), "shape: sharegpt takes any role, named in its tags"),
    ):
        web.holds([record])
        refused(web.says(chats("a.jsonl")).convert(), 5, said)


def test_variables_of_the_template_shape_the_stream(web: Web, styles: dict[str, Path]) -> None:
    said = {"user": "a", "assistant": "<think>\n\n</think>\n\nb"}
    web.holds([{"messages": [{"role": role, "content": text} for role, text in said.items()]}])
    sizes = []
    says(web, styles["forgetful"])
    for override in ("max_bad=100%", WITHOUT):
        web.run(override)
        ((turn,),) = (sample["turns"] for sample in samples(web.train))
        sizes.append((len(turn["input_ids"]), len(turn["labels"])))
    (asked, answered), (asked_without, answered_without) = sizes
    assert answered - answered_without == asked_without - asked > 0
    done("check", web.recipe, WITHOUT)
    why = web.done("--dry-run").out
    assert "template was {'enable_thinking': False} and is {}" in why


REFUSED = {
    "tokenizer.template.enable_thinkin=false": "does not read it: did you mean enable_thinking?",
    "tokenizer.template.messages=x": "tokenizer.template.messages is given by mdsmix itself",
    "tokenizer.kwargs.enable_thinking=false": "PreTrainedTokenizerFast does not read it: correct or remove it; a variable",
    "tokenizer.kwargs.model_max_lenght=1": "tokenizer.kwargs: model_max_lenght would change nothing",
    "streams.web.rewritten_history=each target_responses=last": "each trains every answer",
}  # fmt: skip


def test_what_nothing_reads_is_refused(web: Web, styles: dict[str, Path]) -> None:
    web.holds([])
    says(web, styles["forgetful"])
    for override, sentence in REFUSED.items():
        refused(web.convert(*override.split()), 2, sentence)


def test_template_variables_need_messages_and_a_template_is_missed_by_them_alone(web: Web) -> None:
    web.holds([talk("user", "assistant")])
    warning = "WARNING: the tokenizer has no chat template, so conversations are rendered as ChatML"
    assert warning in says(web, train_style(web.folder / "bare", "no_template")).done().out
    web.holds(["a"], "docs.jsonl")
    web.says(documents("docs.jsonl", layout="document"))
    assert "chat template" not in web.done("--reencode").out
    refused(web.convert(WITHOUT), 2, "no stream has messages")
