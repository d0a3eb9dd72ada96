"""Conversations as people publish them, from a file to a stream: what is trained of them, what
their template prints, and what is said of records that are none. Rows of several records (`pack:
true`): they are golden ones, and all that is done to a stream works with them.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from mdsmix.ragged import Ragged
from mdsmix.shards.index import read_index
from mdsmix.shards.shard_samples import read_all_samples
from mdsmix.shards.token_ids import decode_tokens
from mdsmix.shards.verification import decode_and_count
from mdsmix.storage import locate
from tests.converting import (
    Project,
    assert_refused,
    chats,
    documents,
    make_encoder,
    manifest_of,
    mdsmix,
    pairs,
    read_samples,
    run_ok,
)
from tests.published import PACKED, PACKED_ROW, publish
from tests.styles import QWEN_3, train_style
from tests.tool_styles import QWEN_2_5

WITHOUT = "tokenizer.template.enable_thinking=false"


@pytest.fixture(scope="module")
def styles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tokenizers: one whose template knows tools, and one whose template drops the reasoning of
    earlier answers.
    """
    folder = tmp_path_factory.mktemp("styles")
    templates = {"tools": QWEN_2_5, "forgetful": QWEN_3}
    return {name: train_style(folder / name, "plain", text) for name, text in templates.items()}


def says(project: Project, tokenizer: Path, **source: Any) -> Project:
    project.tokenizer = tokenizer
    stream = chats("a.jsonl")
    stream["source"] |= source
    policies = {"target_responses": "all", "special_tokens_in_text": "allow"}
    return project.configure(stream, max_seq_len=1024, **policies)


def talk(*roles: str) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": role[0]} for role in roles]}


def weighed(*weights: int) -> dict[str, Any]:
    """A question and an answer for each weight."""
    messages = talk(*("user", "assistant") * len(weights))["messages"]
    for number, weight in enumerate(weights):
        messages[2 * number + 1] |= {"weight": weight, "content": f"answer {number}"}
    return {"messages": messages}


def test_what_is_not_to_be_trained_is_not_marked(project: Project, styles: dict[str, Path]) -> None:
    project.write_source([weighed(0, 1, 0, 1), weighed(0, 0, 0, 0), weighed(1, 0)])
    says(project, styles["tools"], shape="openai").run()
    assert project.manifest.records.filtered == {"nothing_trained": 1}
    shown = run_ok("inspect", project.train).out
    assert re.findall(r"⟦(answer \d)", shown) == ["answer 1", "answer 3", "answer 0"]
    # Where prompts are trained, so would be an answer in one; the last ends before its own.
    project.run("target_prompts=all")
    assert project.manifest.records.written == 1
    assert {bad["reason"] for bad in project.bad} == {"untrained_in_prompt"}


def test_nulls_of_arrow_are_told_and_dropped_where_asked(
    project: Project, styles: dict[str, Path]
) -> None:
    """A parquet file fills what one object lacks and another has; its calls are rendered
    with that.
    """
    rows = []
    for arguments in ({"city": "Köln"}, {"n": 3}):
        call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
        asked, calling, told, said = talk("user", "assistant", "tool", "assistant")["messages"]
        rows.append({"messages": [asked, calling | {"tool_calls": [call]}, told, said]})
    parquet.write_table(pa.Table.from_pylist(rows), project.folder / "a.parquet")
    for nulls, printed in (("keep", '{"city": "Köln", "n": null}'), ("drop", '{"city": "Köln"}')):
        project = says(project, styles["tools"], nulls=nulls, path="a.parquet", shape="openai")
        said = project.convert_ok("--reencode").out
        assert ("2 records have null entries inside messages" in said) == (nulls == "keep")
        assert printed in run_ok("inspect", project.train).out


TAGGED = (
    "{% for m in messages %}{{ m.role }}{% if m.refusal is defined %}{{ m.refusal }}{% endif %}: "
)
TAGGED += "{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant{% endif %}"


def test_nulls_of_openai_s_sdk_are_told_only_if_they_are_printed(
    project: Project, styles: dict[str, Path], tmp_path: Path
) -> None:
    dumped = {"refusal": None, "audio": None, "function_call": None, "tool_calls": None}
    asked, answered = talk("user", "assistant")["messages"]
    called = {"type": "function", "function": {"name": "weather", "arguments": {"n": None}}}
    result = {"role": "tool", "content": "Rain."}
    calling = {"role": "assistant", "content": None, "tool_calls": [called]}
    plain = {"messages": [asked | {"name": None}, answered | dumped]}
    deep = {"messages": [asked, calling, result, answered | dumped]}
    printing = train_style(tmp_path / "printing", "plain", TAGGED)
    for tokenizer, record, warning in (
        (styles["tools"], plain, ""),
        (styles["tools"], deep, "1 record has null entries inside messages"),
        (printing, plain, "1 record has null entries inside messages"),
    ):
        project.write_source([record])
        out = says(project, tokenizer, shape="openai").convert_ok("--reencode").out
        assert ("null entries" in out) == bool(warning), out
        assert warning in out
    assert "assistantNone: a" in run_ok("inspect", project.train).out.replace("⟦", "")


def test_of_records_of_another_shape_it_is_said_what_to_do(project: Project) -> None:
    alpaca = {"instruction": "Name a colour.", "output": "Red."}
    rounds = {"messages": [{"human": "Hi", "assistant": "Hello."}]}
    for record, said in (
        (talk("developer", "user", "assistant"), "shape: openai accepts the role developer"),
        (alpaca, 'first missing_field, of a.jsonl: missing: messages in {"instruction":'),
        (
            talk("user", "user", "assistant"),
            "consecutive_roles: merge joins consecutive messages of one role",
        ),
        (rounds, "mdsmix init SOURCE shows which shape and settings"),
        (talk("user", "bot"), "shape: sharegpt accepts any role that its tags name"),
    ):
        project.write_source([record])
        assert_refused(project.configure(chats("a.jsonl")).convert(), 5, said)


def test_variables_of_the_template_shape_the_stream(
    project: Project, styles: dict[str, Path]
) -> None:
    said = {"user": "a", "assistant": "<think>\n\n</think>\n\nb"}
    project.write_source(
        [{"messages": [{"role": role, "content": text} for role, text in said.items()]}]
    )
    sizes = []
    says(project, styles["forgetful"])
    for override in ("max_bad=100%", WITHOUT):
        project.run(override)
        ((turn,),) = (sample["turns"] for sample in read_samples(project.train))
        sizes.append((len(turn["input_ids"]), len(turn["labels"])))
    (asked, answered), (asked_without, answered_without) = sizes
    assert answered - answered_without == asked_without - asked > 0
    run_ok("check", project.recipe, WITHOUT)
    why = project.convert_ok("--dry-run").out
    assert "tokenizer.template.enable_thinking was false and is not set" in why


REFUSED = {
    "tokenizer.template.enable_thinkin=false": "does not read it: did you mean enable_thinking?",
    "tokenizer.template.messages=x": "tokenizer.template.messages is set by mdsmix itself",
    "tokenizer.kwargs.enable_thinking=false": " does not read it: correct or remove it; a variable",
    "tokenizer.kwargs.model_max_lenght=1": "tokenizer.kwargs: model_max_lenght would change nothing",
    "streams.web.rewritten_history=each target_responses=last": "each trains every answer",
}  # fmt: skip


def test_what_nothing_reads_is_refused(project: Project, styles: dict[str, Path]) -> None:
    project.write_source([])
    says(project, styles["forgetful"])
    for override, sentence in REFUSED.items():
        assert_refused(project.convert(*override.split()), 2, sentence)


def test_template_variables_need_messages_and_a_template_is_missed_by_them_alone(
    project: Project,
) -> None:
    project.write_source([talk("user", "assistant")])
    warning = "WARNING: the tokenizer has no chat template, so conversations are rendered as ChatML"
    assert (
        warning
        in says(project, train_style(project.folder / "bare", "no_template")).convert_ok().out
    )
    project.write_source(["a"], "docs.jsonl")
    project.configure(documents("docs.jsonl", layout="document"))
    assert "chat template" not in project.convert_ok("--reencode").out
    assert_refused(project.convert(WITHOUT), 2, "no stream has messages")


def text(number: int, most: int = 12) -> str:
    return "word " * (1 + number * 5 % most)


def records() -> list[dict[str, Any]]:
    """Pairs and conversations at once."""
    rounds = [talk(*("user", "assistant") * (1 + n % 3)) for n in range(40)]
    return [each | {"prompt": text(n, 5), "response": text(n, 7)} for n, each in enumerate(rounds)]


def test_each_document_of_a_row_is_named_and_duplicates_leave(project: Project) -> None:
    unique = [{"id": f"r{n}", "prompt": f"number {n}?", "response": text(n)} for n in range(40)]
    project.write_source([*unique, *unique[:5]])
    stream = pairs("a.jsonl", pack=True, duplicates="drop")
    stream["source"]["id"] = "id"
    project.configure(stream, max_seq_len=64).run()
    command = ("inspect", project.train, "--tokenizer", project.tokenizer, "-n")
    shown = json.loads(run_ok(*command, 1000, "--json").out)["shown"]
    names = [row["ids"] for row in shown]
    assert project.manifest.records.filtered == {"duplicate": 5}
    assert sorted(n for row in names for n in row) == sorted(f"r{n}" for n in range(40))
    assert [len(row) for row in names] == [
        len(row["starts"]) for row in read_samples(project.train)
    ]
    for row in shown:
        for number, name in enumerate(row["ids"]):
            said = "".join(s["text"] for s in row["sample"] if s["document"] == number)
            assert said.startswith(f"number {name[1:]}?")
    first = run_ok(*command, 1).out
    assert f"ids {', '.join(names[0])}" in first
    assert first.count("⟪document ") == len(names[0])
    assert project.manifest.totals.documents == 40


def test_verify_sees_a_document_that_begins_nowhere(project: Project) -> None:
    project.write_source(records())
    project.configure(chats("a.jsonl", pack=True), max_seq_len=256).run()
    folder = locate(project.train)
    (shard,) = read_index(folder).shards
    whole = read_all_samples(folder, shard)
    assert decode_and_count(shard, whole) is not None
    last = whole.values.copy()
    last[-4:] = [0, 0, 16, 0]  # the last column of the last row is `starts`
    with pytest.raises(ValueError, match="do not begin at its starts"):
        decode_and_count(shard, Ragged(last, whole.offsets))


def test_the_first_token_of_a_document_counts_as_trained_for_nobody(tmp_path: Path) -> None:
    """Whatever the mask of a stream of another tool says."""
    at = locate(publish(tmp_path, PACKED, [PACKED_ROW | {"loss_mask": [1] * 6}] * 3) / "train")
    (shard,) = read_index(at).shards
    found = decode_tokens(shard, read_all_samples(at, shard))
    assert found.trained.tolist() == [4, 4, 4]
    assert found.responses.tolist() == [4, 2] * 3


def test_the_offline_mix_of_two_packed_streams_is_packed(project: Project) -> None:
    source = project.write_source(records())
    both = {"pairs": pairs(source, pack=True), "chat": chats(source, pack=True)}
    outcomes = project.configure(streams=both, max_seq_len=64).run_all().values()
    parts = [outcome.manifest.totals for outcome in outcomes]
    run_ok("mix", project.recipe, "--out", project.folder / "one")
    mixed = manifest_of(project.folder / "one/train").totals
    assert mixed.documents == sum(of.documents for of in parts)
    assert mixed.loss_tokens == sum(of.loss_tokens for of in parts)
    run_ok("verify", project.folder / "one")


PACK, BY = "streams.web: pack: true", "train_loader.name: mdsmix"
UNPACKABLE: list[tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]] = [
    (documents("a.jsonl"), {}, (PACK, "set layout: document")),
    (chats("a.jsonl", columns="compact"), {}, ("streams.web: columns: compact",)),
    (pairs("a.jsonl"), {"decoder_only_format": False}, (PACK, "decoder_only_format: false")),
    (pairs("a.jsonl"), {"train_loader": {"name": "finetuning"}}, (PACK, BY)),
    (documents("a.jsonl", layout="document"), {"train_loader": {"name": "text"}}, (PACK, BY)),
    ({"local": "/nowhere"}, {}, ("pack is for streams with a source; take it out",)),
]


def test_what_cannot_be_packed_is_one_sentence(project: Project) -> None:
    project.write_source(records())
    for stream, more, said in UNPACKABLE:
        assert_refused(project.configure(stream | {"pack": True}, **more).convert(), 2, *said)


LONG = " ".join(f"word{n}" for n in range(400))


def test_cut_tokens_are_told_with_their_rows_whatever_the_kind(project: Project) -> None:
    """10 of 20 answers are longer than a row; the tokens that are cut off are counted by Hugging
    Face's tokenizer.
    """
    answers = [f"{n} {LONG}" for n in range(10)] + [f"answer {n}" for n in range(10)]
    asked = [{"prompt": "Which?", "response": answer} for answer in answers]
    talked = [
        {"messages": [{"role": r, "content": t} for r, t in zip(("user", "assistant"), each.values(), strict=True)]}
        for each in asked
    ]  # fmt: skip
    project.write_source(asked, "asked.json")
    project.write_source(talked, "talked.json")
    encode = make_encoder(project.tokenizer)
    sizes = [len(encode(each["prompt"])) + len(encode(each["response"])) for each in asked]
    cut = sum(max(0, size - 128) for size in sizes)
    whole = {"pairs": pairs("asked.json"), "packed": pairs("asked.json", pack=True)}
    for name, stream in (*whole.items(), ("chats", chats("talked.json"))):
        loader = {"name": "mdsmix", "dataset": {"shuffle": True, "eos_token_id": 0}}
        project.configure(streams={name: stream}, max_seq_len=128, train_loader=loader)
        told = project.convert_ok().out
        (line,) = [line for line in told.splitlines() if "max_seq_len)" in line or "longer" in line]
        assert "WARNING: " in line
        assert f"10 of 20 {'documents' if name == 'packed' else 'rows'}" in line
        checked, plan = mdsmix("check", project.recipe).out, run_ok("plan", project.recipe, "--batch", 1, "--gpus", 1).out  # fmt: skip
        assert f"rows-cut [{name}]: 10 of 20 samples" in checked
        assert "tokens an epoch are cut off at max_seq_len" in plan
        if name in whole:
            assert f"{cut:,} tokens truncated" in line
            # The ten short documents of packed rows hold the EOS that the loader appends to pairs.
            of_all = sum(sizes) + (10 if name == "packed" else 0)
            assert f"by {cut:,} of {of_all:,} tokens ({cut / of_all:.1%})" in checked
            assert f"{cut:,} tokens an epoch are cut off at max_seq_len, " in plan
        assert "partial" not in told


def test_tokens_of_a_last_partial_row_are_not_cut_off(project: Project) -> None:
    texts = [LONG, f"{LONG} and more", "short"]
    project.write_source(texts)
    project.configure(documents("*.jsonl"), max_seq_len=128)
    told = project.convert_ok().out
    lost = sum(len(make_encoder(project.tokenizer)(text)) + 1 for text in texts) % 128
    assert lost
    assert f"  {lost} tokens dropped (last partial row)\n" in told
    assert "truncated" not in told
    assert "rows-cut" not in mdsmix("check", project.recipe).out


def test_left_out_turns_and_cut_preferences_are_told_with_their_rows(project: Project) -> None:
    turns = [("user", "Which?"), ("assistant", "This."), ("user", "And?"), ("assistant", LONG)]
    messages = [{"role": role, "content": text} for role, text in turns]
    project.write_source(
        [{"messages": messages}] * 3 + [{"messages": messages[:2]}] * 2, "talked.json"
    )
    project.configure(chats("talked.json", too_long="first_turns"), max_seq_len=128)
    told = project.convert_ok().out
    assert re.search(r"[\d,]+ tokens truncated in 3 of 5 rows \(too_long: first_turns\)", told)
    assert "rows-cut" not in mdsmix("check", project.recipe).out, "as the recipe asks for"
    long, longer = LONG[:300], LONG[:700]
    project.write_source(
        [{"prompt": "Which?", "chosen": long, "rejected": longer}] * 3, "preferred.json"
    )
    source = {"path": "preferred.json", **{key: key for key in ("prompt", "chosen", "rejected")}}
    preferred = {"kind": "preference", "source": source}
    project.configure(preferred, max_seq_len=256, train_loader={"name": "pairwise_preference"})
    told = project.convert_ok(f"local={project.folder / 'preferred'}").out
    assert "3 of 3 rows are longer than max_seq_len" in told
    assert "tokens truncated in" in told
