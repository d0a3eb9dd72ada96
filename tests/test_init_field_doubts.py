"""Fields that a recognised shape leaves unread although they may matter: `init` names them, sets a
condition, or leaves the stream out.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from mdsmix.init.data_files import find_data
from mdsmix.init.drafts import format_recipe, group_files
from mdsmix.kinds import open_recipe
from mdsmix.shapes.condition import parse_where
from tests.converting import Answer, run_ok, write_jsonl


def test_answers_that_a_field_marks_as_bad_are_left_out(tmp_path: Path) -> None:
    """Only TRL's names are those of unpaired preferences, which are a kind of their own."""
    kto = [{"prompt": f"q{n}", "response": f"a{n}", "label": n % 3 > 0} for n in range(9)]
    classes = [{"prompt": "q", "completion": "a", "label": n} for n in range(9)]
    good = [{"prompt": "q", "response": "a", "label": True}] * 9
    factory = [{"instruction": "q", "output": "a", "kto_tag": n % 3 > 0} for n in range(9)]
    for records, where in ((kto, "label"), (classes, None), (good, None), (factory, "kto_tag")):
        write_jsonl(tmp_path / "a.jsonl", records)
        notices: list[Any] = []
        (draft,) = group_files(find_data([str(tmp_path)], tmp_path, notices), notices)
        assert draft.source.get("where") == where
        (tmp_path / "recipe.yaml").write_text(
            format_recipe({"tokenizer": "t", "max_seq_len": 64, "local": "mix"}, [draft])
        )
        (stream,) = open_recipe(tmp_path / "recipe.yaml").streams.values()
        trained = (
            [parse_where(where).find_refusal(record) is None for record in records] if where else []
        )
        assert stream.source.where == where
        assert trained == [record[where] for record in records if where]


def run_init(folder: Path, tokenizer: Path, record: dict[str, Any]) -> Answer:
    """Run `init` on three equal records; `out` is the recipe."""
    write_jsonl(folder / "a.jsonl", [record] * 3)
    answer = run_ok(
        "init", folder / "a.jsonl", "--tokenizer", tokenizer, "-o", folder / "r.yaml", "--replace"
    )
    return Answer(answer.code, (folder / "r.yaml").read_text(), answer.err)


def test_a_second_field_for_the_same_key_is_named(tmp_path: Path, tokenizer_folder: Path) -> None:
    derived = {"question": "6 + 1?", "answer": "7", "solution": "We add them. 7"}
    answer = run_init(tmp_path, tokenizer_folder, derived)
    assert (
        "a: `response` is read from the field solution (14 characters), and not from answer (1 "
        "character): if that is wrong, write `response: answer`" in answer.err
    )
    assert "response: solution" in answer.out
    # Another field with numbers, nulls or lists is no second answer.
    for other in (7, None, ["7"]):
        answer = run_init(tmp_path, tokenizer_folder, derived | {"answer": other})
        assert "and not from" not in answer.err


def test_reasoning_in_a_field_of_its_own_is_named(tmp_path: Path, tokenizer_folder: Path) -> None:
    """The template that `init` proposes converts, and gives the reasoning before the answer."""
    record = {"prompt": "6 + 1?", "thinking": "I add them.", "response": "7"}
    answer = run_init(tmp_path, tokenizer_folder, record)
    proposed = 'response: "<think>\\n{thinking}\\n</think>\\n\\n{response}"'
    assert f"write `{proposed}`" in answer.err
    (tmp_path / "r.yaml").write_text(answer.out.replace("response: response", proposed))
    run_ok("convert", tmp_path / "r.yaml")
    shown = run_ok("inspect", tmp_path / "mix/a").out
    assert "<think>\nI add them.\n</think>\n\n7" in shown
    # Nemotron's field says only whether there is reasoning.
    switch = {"prompt": "6 + 1?", "reasoning": "on", "response": "7"}
    assert "are not trained" not in run_init(tmp_path, tokenizer_folder, switch).err


def test_answers_that_are_no_texts_are_said_to_be_untrained(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    """Such records are prompts for reinforcement learning. What init proposes makes pairs of them,
    whose answers are trained.
    """
    cases = {"response": [7, True, {"x": 1}], "answer": [7, 0.5], "completion": [7]}
    for name, values in cases.items():
        for value in values:
            answer = run_init(tmp_path, tokenizer_folder, {"prompt": "6 + 1?", name: value})
            assert "kind: prompt" in answer.out
            assert f"the values of {name} are not texts" in answer.err
            # `tostring` alone makes the answer "null" of a record without one.
            program = f"if .{name} == null then . else .{name} |= tostring end"
            assert f"`jq -c '{program}'`" in answer.err
    # A prompt stream that is left out beside others has the sentence too.
    write_jsonl(tmp_path / "b.jsonl", [{"text": "a document"}])
    write_jsonl(tmp_path / "a.jsonl", [{"prompt": "6 + 1?", "response": 7}])
    both = run_ok("init", tmp_path, "--tokenizer", tokenizer_folder)
    assert "a is left out: a prompt stream" in both.err
    assert "a: the values of response are not texts" in both.err
    # Strings, as jq writes them, make pairs; nulls are no answers; a verified answer is meant.
    pair = run_init(tmp_path, tokenizer_folder, {"prompt": "6 + 1?", "answer": "7"})
    assert "kind: finetuning" in pair.out
    for other in ({"response": None}, {"ground_truth": 7}):
        answer = run_init(tmp_path, tokenizer_folder, {"prompt": "6 + 1?"} | other)
        assert "kind: prompt" in answer.out
        assert "are not texts" not in answer.err


def test_possible_marks_of_bad_answers_are_named(tmp_path: Path, tokenizer_folder: Path) -> None:
    """The condition that `init` proposes leaves out the answers with false, 0 or -1."""
    cases = (
        ("resolved", [True, False, True], "where: resolved", "is false in 1 of the first 3"),
        ("label", [1, -1, -1], "where: label == 1", "is not 1 in 2 of the first 3"),
        ("correct", [0, 0, 1], "where: correct == 1", "is not 1 in 2 of the first 3"),
        ("reward", [0.0, 1.0, 1.0], "where: reward == 1", "is not 1 in 1 of the first 3"),
        ("reward", [0.0, 0.5, 1.0], "", ""),
        ("train", [0, 1, 1], "where: train == 1", "is not 1 in 1 of the first 3"),
        ("loss", [0.31, 1.0, 0.0], "", ""),
        ("resolved", [True, True, True], "", ""),
        ("synthetic", [False, False, True], "", ""),
        ("label", [4, 1, 0], "", ""),
    )
    for name, values, condition, words in cases:
        records = [{"prompt": "a", "response": "b", name: value} for value in values]
        source = write_jsonl(tmp_path / "a.jsonl", records)
        answer = run_ok("init", source, "--tokenizer", tokenizer_folder)
        assert ("if it marks bad answers" in answer.err) == bool(condition)
        assert words in answer.err
        assert f"`{condition}`" in answer.err or not condition
        if condition:
            where = parse_where(condition.removeprefix("where: "))
            kept = [record[name] for record in records if where.find_refusal(record) is None]
            assert kept == [value for value in values if value == 1]


def test_records_that_continue_others_are_named(tmp_path: Path, tokenizer_folder: Path) -> None:
    """H2O LLM Studio prints the parents of a record before its question."""
    head = "id,parent_id,instruction,output\n"
    warning = "2 records name another record in the field parent_id, which is not read"
    for name, rows, is_warned in (
        ("chained", "1,,a?,b\n2,1,c?,d\n3,2,e?,f\n", True),
        ("single", "1,,a?,b\n2,,c?,d\n3,,e?,f\n", False),
    ):
        source = tmp_path / f"{name}.csv"
        source.write_text(head + rows)
        recipe = tmp_path / f"{name}.yaml"
        drafted = run_ok("init", source, "--tokenizer", tokenizer_folder, "-o", recipe)
        assert (f"of the first 3 records, {warning}" in drafted.err) == is_warned
        assert (f"WARNING: {warning}" in run_ok("convert", recipe).out) == is_warned
    table = pa.table({"prompt": ["a?", "c?"], "response": ["b", "d"], "parent_id": [None, "1"]})
    pq.write_table(table, tmp_path / "column.parquet")
    recipe = tmp_path / "column.yaml"
    source = tmp_path / "column.parquet"
    drafted = run_ok("init", source, "--tokenizer", tokenizer_folder, "-o", recipe)
    assert "1 record names another record in the field parent_id" in drafted.err
    unseen = "WARNING: the records may name another record in the field parent_id"
    assert unseen in run_ok("convert", recipe).out


def test_marks_in_place_of_questions_are_named(tmp_path: Path, tokenizer_folder: Path) -> None:
    """NVIDIA's records for code have `-`, since the questions are in other data sets."""
    answer = {"role": "assistant", "content": "x = 1"}

    def talk(*questions: str) -> dict[str, Any]:
        asked = [{"role": "user", "content": question} for question in questions]
        return {"messages": [turn for each in asked for turn in (each, answer)]}

    words = "the question is only '-' or the like in 3 of the first 3 records"
    for record, is_named in (
        ({"question": "-", "answer": "x = 1"}, True),
        (talk("-"), True),
        (talk("-", "Why?"), False),
        ({"question": "是?", "answer": "x = 1"}, False),
    ):
        assert (words in run_init(tmp_path, tokenizer_folder, record).err) == is_named
    records = [talk("?"), talk("Why?")]
    source = write_jsonl(tmp_path / "b.jsonl", records)
    few = run_ok("init", source, "--tokenizer", tokenizer_folder)
    assert "the question is only" not in few.err


def test_tools_that_are_not_read_are_named(tmp_path: Path, tokenizer_folder: Path) -> None:
    """The tools of When2Call are a list of strings."""
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    tool = {"name": "f", "description": "g", "parameters": {"type": "object", "properties": {}}}
    for tools, is_named in (([json.dumps(tool)], True), ([], False)):
        record = {"messages": turns, "tools": tools}
        answer = run_init(tmp_path, tokenizer_folder, record)
        assert ("the tools in the field tools are not read" in answer.err) == is_named


def test_variables_of_the_chat_template_are_named(tmp_path: Path, tokenizer_folder: Path) -> None:
    """verl's records have `enable_thinking` at the top. The template prints it as soon as it is
    moved to where the message says.
    """
    thinker = tmp_path / "thinker"
    shutil.copytree(tokenizer_folder, thinker)
    (thinker / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content }}{% if enable_thinking is false %}/no{% endif %}"
        "<|im_end|>{% endfor %}{% if add_generation_prompt and tools %}?{% endif %}"
    )
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    said = "a: the chat template reads a variable enable_thinking, but the field enable_thinking"
    for tokenizer, value, is_named in (
        (thinker, False, True),
        (thinker, None, False),
        (tokenizer_folder, False, False),
    ):
        record = {"messages": turns, "enable_thinking": value, "add_generation_prompt": True}
        err = run_init(tmp_path, tokenizer, record).err
        assert (said in err) == is_named
        assert "a variable add_generation_prompt" not in err
    moved = {"messages": turns, "chat_template_kwargs": {"enable_thinking": False}}
    assert "a variable" not in run_init(tmp_path, thinker, moved).err
    printed = run_ok("init", tmp_path / "a.jsonl", "--tokenizer", thinker)
    assert "b/no" in printed.out + printed.err


def test_numbers_of_classes_are_named(tmp_path: Path, tokenizer_folder: Path) -> None:
    """`class_encode_column` of datasets sorts the names, so 1 is the bad answer here. The metadata
    is what datasets 5.2 writes.
    """
    label = {"names": ["desirable", "undesirable"], "_type": "ClassLabel"}
    described = json.dumps({"info": {"features": {"label": label}}})
    table = pa.table({"prompt": ["a"] * 2, "completion": ["b"] * 2, "label": [0, 1]})
    marked = table.replace_schema_metadata({"huggingface": described})
    with pa.ipc.new_stream(str(tmp_path / "a.arrow"), marked.schema) as stream:
        stream.write_table(marked)
    with pa.ipc.new_file(str(tmp_path / "b.arrow"), marked.schema) as file:
        file.write_table(marked)
    pq.write_table(marked, tmp_path / "c.parquet")
    for name in ("a.arrow", "b.arrow", "c.parquet"):
        answer = run_ok("init", tmp_path / name, "--tokenizer", tokenizer_folder)
        assert "numbers of classes (0 is desirable, 1 is undesirable); the numbers" in answer.err
    pq.write_table(table, tmp_path / "d.parquet")
    answer = run_ok("init", tmp_path / "d.parquet", "--tokenizer", tokenizer_folder)
    assert "numbers of classes" not in answer.err


def test_questions_without_their_choices_are_left_out(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    question = {"question": "Which town?", "answer": "B"}
    for name, choices in (
        ("choices", ["Ghent", "Liege"]),
        ("options", {"A": "Ghent", "B": "Liege"}),
        ("choices", {"text": ["Ghent", "Liege"], "label": ["A", "B"]}),
        ("Options", "A) Ghent B) Liege"),
    ):
        answer = run_init(tmp_path, tokenizer_folder, question | {name: choices})
        assert f"do not contain their choices, which are in the field {name}" in answer.err
        assert "# left out" in answer.out
    # The number of the choice, as in MMLU; and questions that contain their choices.
    numbered = question | {"answer": 1, "choices": ["Ghent", "Liege"]}
    assert "do not contain their choices" in run_init(tmp_path, tokenizer_folder, numbered).err
    whole = {"question": "Ghent or Liege?", "answer": "B", "options": ["Ghent", "Liege"]}
    answer = run_init(tmp_path, tokenizer_folder, whole)
    assert "# left out" not in answer.out
    assert "fields of a that are not read: options" in answer.err
    # One of three questions lacks a choice, since it is written in another way.
    records = [whole, whole, whole | {"question": "ghent or Liege?"}]
    source = write_jsonl(tmp_path / "b.jsonl", records)
    answer = run_ok("init", source, "--tokenizer", tokenizer_folder)
    assert "do not contain their choices" not in answer.err


def test_answers_that_nemo_masks_are_left_out(tmp_path: Path, tokenizer_folder: Path) -> None:
    """`mask` names the roles whose messages NeMo does not train."""
    turns = [{"from": "User", "value": "a"}, {"from": "Assistant", "value": "b"}]
    usual = {"mask": "User", "conversations": turns}
    masked = {"mask": "Assistant", "conversations": turns}
    answer = run_init(tmp_path, tokenizer_folder, usual)
    assert "where" not in answer.out
    answer = run_init(tmp_path, tokenizer_folder, masked)
    assert "where: mask != 'Assistant'" in answer.out
    assert "NeMo does not train the answers of these" in answer.err
    assert "no record becomes a sample" in answer.err
    write_jsonl(tmp_path / "b.jsonl", [usual, masked, usual])
    recipe = tmp_path / "b.yaml"
    run_ok("init", tmp_path / "b.jsonl", "--tokenizer", tokenizer_folder, "-o", recipe)
    assert "records tried: 3, written: 2; filtered: 1 where" in recipe.read_text()
