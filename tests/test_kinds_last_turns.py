"""`too_long: last_turns` gives the row of a record that has only the system message and the last
turns that fit. The oracle is `too_long: filter`, on records that are shortened here one by one.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import pytest

from mdsmix.encode.encoded import Encoded
from mdsmix.record import Conversation
from mdsmix.shapes.messages import OPENAI
from mdsmix.tokenizer.card import Tokenizer
from tests import pictures
from tests.converting import (
    Project,
    chats,
    manifest_of,
    mdsmix,
    read_samples,
    run_recipe,
    write_jsonl,
    write_recipe,
)
from tests.styles import FORGETS, GPT_OSS, LLAMA_2, MISTRAL_NEMO, make_dialogue, open_chats
from tests.tool_styles import LLAMA_3, MISTRAL, QWEN_2_5, QWEN_3, Message, draw_conversations

EOS_ENDED = "{% for m in messages %}{{ m.role }}:{{ m.content }}{{ eos_token if m.role == 'assistant' }}{% endfor %}"
"Each answer ends in EOS, so the loader appends none."
PLAIN_TEMPLATES = {
    "eos_ended": EOS_ENDED,
    "forgets": FORGETS,
    "gpt_oss": GPT_OSS,
    "llama_2": LLAMA_2,
    "mistral_nemo": MISTRAL_NEMO,
}
TOOL_TEMPLATES = {
    "llama_3": LLAMA_3,
    "mistral": MISTRAL,
    "qwen_2_5": QWEN_2_5,
    "qwen_3": QWEN_3,
}
SETTINGS = [
    ("reject", ("none", "all"), 40, 300),
    ("reject", ("none", "last"), 100, 1100),
    ("last", ("none", "all"), 60, 800),
    ("last", ("length>=30", "all"), 200, 1400),
]
"rewritten_history, the target policies, and max_seq_len: of records without and with tools."


class Record(NamedTuple):
    """A conversation as OpenAI writes it."""

    messages: list[Message]
    tools: list[Message] | None

    def read(self) -> Any:
        fields = {"messages": "messages", "tools": "tools"}
        return OPENAI.read({"messages": self.messages, "tools": self.tools}, fields)

    def shorten(self) -> Iterator[Record]:
        """Yield the records with the system message and fewer and fewer of the last turns."""
        has_system = self.messages[0]["role"] == "system"
        system = self.messages[:1] if has_system else []
        dialogue = self.messages[len(system) :]
        for position, message in enumerate(dialogue):
            if position and message["role"] == "user":
                yield Record([*system, *dialogue[position:]], self.tools)


def draw_records(count: int, with_tools: bool) -> list[Record]:
    """Return conversations of 1 to 12 questions, some with a system message, a greeting by the
    assistant, calls of tools, reasoning, and answers that are not trained.
    """
    draw = random.Random(count)
    drawn = draw_conversations(count * 20, seed=count)
    records = list[Record]()
    for _ in range(count):
        messages = list[Message]()
        tools = None
        for number in range(draw.randint(1, 4)):
            conversations = ((m, t) for m, t in drawn if with_tools or not t)
            turns, tools_of_turns = next(conversations)
            tools = tools or tools_of_turns
            is_later = number > 0
            messages += turns[1:] if is_later and turns[0]["role"] == "system" else turns
        if draw.random() < 0.2:
            greeting_position = 1 if messages[0]["role"] == "system" else 0
            messages.insert(greeting_position, {"role": "assistant", "content": "Welcome!"})
        for message in messages:
            if message["role"] == "assistant" and draw.random() < 0.1:
                message["weight"] = 0
        records.append(Record(messages, tools))
    return records


def read_turns(encoded: Encoded) -> list[Any]:
    return [orjson.loads(blob) for blob in encoded.columns["turns"].slices()]


def count_questions(record: Record) -> int:
    return len([message for message in record.messages if message["role"] == "user"])


@pytest.mark.parametrize("name", [*PLAIN_TEMPLATES, *TOOL_TEMPLATES])
def test_a_row_is_that_of_a_record_with_the_last_turns_that_fit(
    lettered: Tokenizer, name: str
) -> None:
    """Two sorts of records are refused for the same reason as under `filter`: one that has no row
    at any length, and one whose last turn does not fit.
    """
    template = (PLAIN_TEMPLATES | TOOL_TEMPLATES)[name]
    has_tools = name in TOOL_TEMPLATES
    records = draw_records(10, with_tools=has_tools)
    reasons = set[str]()
    shortened = 0
    for history, targets, longest, longest_with_tools in SETTINGS:
        prompts, responses = targets
        settings = {
            "rewritten_history": history,
            "target_prompts": prompts,
            "target_responses": responses,
            "special_tokens_in_text": "allow",
            "max_seq_len": longest_with_tools if has_tools else longest,
        }
        variables = lettered.template_variables
        filters = open_chats(lettered, template, variables, too_long="filter", **settings)
        encoder = open_chats(lettered, template, variables, too_long="last_turns", **settings)
        rows = list[Any]()
        rejected = dict[int, str]()
        left_out = 0
        for position, record in enumerate(records):
            whole = filters.encode([record.read()])
            fitting = whole
            fitting_record = record
            if whole.rejected == {0: "too_long"}:
                for fitting_record in record.shorten():
                    fitting = filters.encode([fitting_record.read()])
                    if not fitting.rejected:
                        break
            if fitting.rejected:
                rejected[position] = whole.rejected[0]
                continue
            rows += read_turns(fitting)
            left_out += count_questions(record) - count_questions(fitting_record)
        encoded = encoder.encode([record.read() for record in records])
        assert read_turns(encoded) == rows
        assert encoded.rejected == rejected
        assert encoded.totals.left_out_turns == left_out
        shortened += encoded.totals.truncated_rows
        reasons |= {*rejected.values()}
    assert shortened > 2
    assert "too_long" in reasons


def test_the_search_takes_few_renderings_and_none_if_all_rows_fit(
    lettered: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All conversations of a batch are searched together: 40 questions take 6 rounds."""
    policies = {"too_long": "last_turns", "special_tokens_in_text": "allow"}
    encoder = open_chats(lettered, EOS_ENDED, lettered.template_variables, **policies)
    render = encoder.renderer.render
    batches = list[int]()

    def count_rendered(conversations: list[Conversation]) -> Any:
        batches.append(len(conversations))
        return render(conversations)

    monkeypatch.setattr(encoder.renderer, "render", count_rendered)
    short = Conversation(make_dialogue("a", "b"))
    long = Conversation(make_dialogue(*["a", "b"] * 40))
    encoder.encode([short] * 3)
    assert batches == [3]
    encoder.encode([short, long, short, long])
    assert batches[1] == 4
    assert set(batches[2:]) == {2}
    assert len(batches[2:]) <= 6


def test_tokens_and_turns_that_are_left_out_are_counted(lettered: Tokenizer) -> None:
    """A row needs room for the EOS that the loader appends."""
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    encoder = open_chats(lettered, template, max_seq_len=12, too_long="last_turns")
    talk = make_dialogue("aaaa", "bb", "cccccc", "dd", "ee", "f")
    fits_with_eos = make_dialogue("aaa", "bbb", "ccc", "dd")
    fits_without_eos = make_dialogue("aaa", "bbb", "ccc", "ddd")
    talks = [talk, talk[-2:], talk[:4], fits_with_eos, fits_without_eos]
    encoded = encoder.encode([Conversation(messages) for messages in talks])
    lengths = [
        sum(len(turn["input_ids"]) + len(turn["labels"]) for turn in row)
        for row in read_turns(encoded)
    ]
    assert lengths == [11, 3, 8, 11, 6]
    totals = encoded.totals
    assert (totals.truncated_rows, totals.left_out_turns) == (3, 3)
    assert (totals.truncated_tokens, totals.lost_tokens) == (6 + 6 + 6, 6 + 6 + 6)


@pytest.mark.parametrize("settings", [{}, {"pack": True}, {"columns": "compact"}])
def test_a_stream_equals_that_of_records_without_the_first_turns(
    project: Project, settings: dict[str, Any]
) -> None:
    system = {"role": "system", "content": "Be brief."}
    talk = make_dialogue(*["Which one of these is it?", "It is the second one of these."] * 9)
    short = make_dialogue("Which?", "This.")
    last = "word " * 200
    unfit = make_dialogue("Which?", "This.", "And?", last)
    project.write_source([{"messages": m} for m in ([system, *talk], short, unfit)], "a.jsonl")
    project.configure(chats("a.jsonl", too_long="last_turns", **settings), max_seq_len=96)
    output = project.convert_ok().out
    samples = read_samples(project.train)
    manifest = manifest_of(project.train)
    left_out = manifest.totals.left_out_turns
    assert 0 < left_out < 9
    assert manifest.records.filtered == {"too_long": 1}
    rows = "documents" if settings.get("pack") else "rows"
    sentence = f"truncated in 1 of 2 {rows} (too_long: last_turns, {left_out} turns left out)"
    assert sentence in " ".join(output.split())
    assert "rows-cut" not in mdsmix("check", project.recipe).out, "as the recipe asks for"
    project.write_source(
        [{"messages": m} for m in ([system, *talk[2 * left_out :]], short)], "a.jsonl"
    )
    project.configure(chats("a.jsonl", too_long="filter", **settings), max_seq_len=96)
    project.convert_ok()
    assert str(read_samples(project.train)) == str(samples)
    project.write_source(
        [{"messages": [system, *talk[2 * left_out - 2 :]]}, {"messages": short}], "a.jsonl"
    )
    project.convert_ok()
    assert manifest_of(project.train).records.filtered == {"too_long": 1}, (
        "one turn more is too long"
    )


def test_images_of_turns_that_are_left_out_are_left_out(tmp_path: Path, seeing: Path) -> None:
    pictures.write_drawings(tmp_path / "img")
    names = [f"img/{path.name}" for path in sorted((tmp_path / "img").iterdir())]
    turns = [
        pictures.record(name, question=f"What is in it? {name}")["conversations"] for name in names
    ]
    long = {"image": names, "conversations": [m for turn in turns for m in turn]}
    last = {"image": names[1:], "conversations": [m for turn in turns[1:] for m in turn]}
    samples = list[Any]()
    for name, data, rule in (("long", long, "last_turns"), ("last", last, "filter")):
        path = write_jsonl(tmp_path / f"{name}.jsonl", [data, pictures.record(names[0])])
        streams = {"see": pictures.stream(path, too_long=rule)}
        recipe = write_recipe(tmp_path, seeing, max_seq_len=90, streams=streams)
        run_recipe(recipe, f"local={tmp_path}/{name}")
        samples.append(read_samples(tmp_path / name / "see/train"))
    assert str(samples[0]) == str(samples[1])
    assert len(samples[0][0]["images"]) == 2


def test_a_row_for_each_answer_cannot_be_shortened(project: Project) -> None:
    project.write_source([{"messages": make_dialogue("Which?", "This.")}], "a.jsonl")
    settings = {"too_long": "last_turns", "rewritten_history": "each"}
    project.configure(chats("a.jsonl", **settings), target_responses="all")
    answer = mdsmix("convert", project.recipe)
    assert answer.code == 2
    assert "too_long: last_turns shortens a conversation to one row" in " ".join(answer.err.split())
