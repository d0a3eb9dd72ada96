"""Conversations from a file to a stream: which turns are trained, what the template prints, and the
messages about other records. Rows of several records (`pack: true`) work with every command.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from mdsmix.encode import encoded
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
    """Two tokenizers: the template of one prints tools, that of the other drops the reasoning of
    earlier answers.
    """
    folder = tmp_path_factory.mktemp("styles")
    templates = {"tools": QWEN_2_5, "forgetful": QWEN_3}
    return {name: train_style(folder / name, "plain", text) for name, text in templates.items()}


def configure_chats(project: Project, tokenizer: Path, **source: Any) -> Project:
    project.tokenizer = tokenizer
    stream = chats("a.jsonl")
    stream["source"] |= source
    policies = {"target_responses": "all", "special_tokens_in_text": "allow"}
    return project.configure(stream, max_seq_len=1024, **policies)


def talk(*roles: str) -> dict[str, Any]:
    """Return a record with a message for each role."""
    return {"messages": [{"role": role, "content": role[0]} for role in roles]}


def make_weighted_record(*weights: int) -> dict[str, Any]:
    """Return a record with a question and an answer for each weight."""
    messages = talk(*("user", "assistant") * len(weights))["messages"]
    for number, weight in enumerate(weights):
        messages[2 * number + 1] |= {"weight": weight, "content": f"answer {number}"}
    return {"messages": messages}


def test_answers_of_weight_zero_are_not_trained(project: Project, styles: dict[str, Path]) -> None:
    project.write_source(
        [
            make_weighted_record(0, 1, 0, 1),
            make_weighted_record(0, 0, 0, 0),
            make_weighted_record(1, 0),
        ]
    )
    configure_chats(project, styles["tools"], shape="openai").run()
    assert project.manifest.records.filtered == {"nothing_trained": 1}
    shown = run_ok("inspect", project.train).out
    assert re.findall(r"⟦(answer \d)", shown) == ["answer 1", "answer 3", "answer 0"]
    # With trained prompts, an untrained answer would be part of a trained prompt, except for the
    # last answer.
    project.run("target_prompts=all")
    assert project.manifest.records.written == 1
    assert {bad["reason"] for bad in project.bad} == {"untrained_in_prompt"}


def test_nulls_of_arrow_are_reported_and_dropped_on_request(
    project: Project, styles: dict[str, Path]
) -> None:
    """A parquet file adds null for every key that another object has, and templates print it."""
    rows = []
    for arguments in ({"city": "Köln"}, {"n": 3}):
        call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
        question, request, result, answer = talk("user", "assistant", "tool", "assistant")[
            "messages"
        ]
        rows.append({"messages": [question, request | {"tool_calls": [call]}, result, answer]})
    parquet.write_table(pa.Table.from_pylist(rows), project.folder / "a.parquet")
    for nulls, printed in (("keep", '{"city": "Köln", "n": null}'), ("drop", '{"city": "Köln"}')):
        project = configure_chats(
            project, styles["tools"], nulls=nulls, path="a.parquet", shape="openai"
        )
        output = project.convert_ok("--reencode").out
        assert ("2 records have null entries inside messages" in output) == (nulls == "keep")
        assert printed in run_ok("inspect", project.train).out


TAGGED = (
    "{% for m in messages %}{{ m.role }}{% if m.refusal is defined %}{{ m.refusal }}{% endif %}: "
)
TAGGED += "{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant{% endif %}"


def test_nulls_of_openai_s_sdk_are_reported_only_if_they_are_printed(
    project: Project, styles: dict[str, Path], tmp_path: Path
) -> None:
    dumped = {"refusal": None, "audio": None, "function_call": None, "tool_calls": None}
    question, answer = talk("user", "assistant")["messages"]
    call = {"type": "function", "function": {"name": "weather", "arguments": {"n": None}}}
    result = {"role": "tool", "content": "Rain."}
    request = {"role": "assistant", "content": None, "tool_calls": [call]}
    plain = {"messages": [question | {"name": None}, answer | dumped]}
    deep = {"messages": [question, request, result, answer | dumped]}
    printing = train_style(tmp_path / "printing", "plain", TAGGED)
    for tokenizer, record, warning in (
        (styles["tools"], plain, ""),
        (styles["tools"], deep, "1 record has null entries inside messages"),
        (printing, plain, "1 record has null entries inside messages"),
    ):
        project.write_source([record])
        out = configure_chats(project, tokenizer, shape="openai").convert_ok("--reencode").out
        assert ("null entries" in out) == bool(warning), out
        assert warning in out
    assert "assistantNone: a" in run_ok("inspect", project.train).out.replace("⟦", "")


def test_nulls_inside_messages_are_reported_if_they_change_a_row(
    project: Project, styles: dict[str, Path]
) -> None:
    """The rows without the nulls are the oracle. OpenAI's SDK and Anthropic's write such nulls."""
    question, request, result, answer = talk("user", "assistant", "tool", "assistant")["messages"]
    function = {"name": "weather", "arguments": {"city": "Oslo"}}
    call = {"id": "c1", "type": "function", "function": function}
    records: dict[str, list[Any]] = {}
    for name, odd in (
        ("index", call | {"index": None}),
        ("no id", call | {"id": None}),
        ("parsed", call | {"function": function | {"parsed_arguments": None}}),
        ("argument", call | {"function": function | {"arguments": {"city": None, "n": 1}}}),
    ):
        records[name] = [question, request | {"tool_calls": [odd]}, result, answer]
    records["details"] = [question, answer | {"details": [{"a": None}]}]
    records["artifact"] = [
        question, request | {"tool_calls": [call]}, result | {"artifact": {"a": None}}, answer
    ]  # fmt: skip
    printed = list[str]()
    for name, messages in records.items():
        project.write_source([{"messages": messages}])
        rows = list[Any]()
        for nulls in ("keep", "drop"):
            configure_chats(project, styles["tools"], shape="openai", nulls=nulls)
            project.convert_ok("--reencode")
            rows.append(read_samples(project.train))
            if nulls == "keep":
                is_counted = bool(project.manifest.records.nulls.get("messages"))
        assert is_counted == (rows[0] != rows[1]), name
        printed += [name] * is_counted
    assert printed == ["argument"]


FAILS_ON_NULL = TAGGED.replace(
    "{% if m.refusal", "{% if 'thinking' in m and '<' in m.thinking %}?{% endif %}{% if m.refusal"
)


def test_nulls_on_which_a_template_fails_lead_to_the_key_that_drops_them(
    project: Project, tmp_path: Path
) -> None:
    """The template of gpt-oss fails so: `argument of type 'NoneType' is not iterable`."""
    failing = train_style(tmp_path / "failing", "plain", FAILS_ON_NULL)
    question, answer = talk("user", "assistant")["messages"]
    thoughts = (None, "hm", None, "oh")
    records = [{"messages": [question, answer | {"thinking": thought}]} for thought in thoughts]
    project.write_source(records)
    configure_chats(project, failing, shape="openai")
    assert "and may fail on them. " in project.convert_ok().out
    assert_refused(
        project.convert("max_bad=0", "--reencode"),
        5,
        "2 template_error",
        "null entries inside messages",
        "source.nulls: drop removes them",
    )
    configure_chats(project, failing, shape="openai", nulls="drop")
    assert "null entries" not in project.convert_ok("max_bad=0", "--reencode").out
    assert project.manifest.records.written == len(records)
    # `init` tries it.
    draft = tmp_path / "draft.yaml"
    run_ok("init", project.folder / "a.jsonl", "--tokenizer", failing, "-o", draft)
    assert "nulls: drop    # nulls inside objects are removed, since the chat" in draft.read_text()


def test_records_of_another_shape_are_refused_with_advice(project: Project) -> None:
    alpaca = {"instruction": "Name a colour.", "output": "Red."}
    rounds = {"messages": [{"human": "Hi", "assistant": "Hello."}]}
    for record, advice in (
        (talk("developer", "user", "assistant"), "shape: openai accepts the role developer"),
        (alpaca, 'first missing_field, of a.jsonl: no field messages in {"instruction":'),
        (
            talk("user", "user", "assistant"),
            "consecutive_roles: merge joins consecutive messages of one role",
        ),
        (rounds, "Run mdsmix init SOURCE, which shows which shape and settings"),
        (talk("user", "bot"), "shape: sharegpt accepts any role that its tags name"),
    ):
        project.write_source([record])
        assert_refused(project.configure(chats("a.jsonl")).convert(), 5, advice)


def test_variables_of_the_template_shape_the_stream(
    project: Project, styles: dict[str, Path]
) -> None:
    contents = {"user": "a", "assistant": "<think>\n\n</think>\n\nb"}
    messages = [{"role": role, "content": text} for role, text in contents.items()]
    project.write_source([{"messages": messages}])
    sizes = []
    configure_chats(project, styles["forgetful"])
    for override in ("max_bad=100%", WITHOUT):
        project.run(override)
        ((turn,),) = (sample["turns"] for sample in read_samples(project.train))
        sizes.append((len(turn["input_ids"]), len(turn["labels"])))
    (prompt, response), (prompt_without, response_without) = sizes
    assert response - response_without == prompt_without - prompt > 0
    run_ok("check", project.recipe, WITHOUT)
    reasons = project.convert_ok("--dry-run").out
    assert "tokenizer.template.enable_thinking was false and is not set" in reasons


REFUSED = {
    "tokenizer.template.enable_thinkin=false": "does not read it: did you mean enable_thinking?",
    "tokenizer.template.messages=x": "tokenizer.template.messages is set by mdsmix itself",
    "tokenizer.template.enable_thinking=18446744073709551616": "as JSON (Integer exceeds 64-bit range)",
    "tokenizer.kwargs.enable_thinking=false": "Correct the name or remove it from the recipe; a variable",
    "tokenizer.kwargs.model_max_lenght=1":
        "tokenizer.kwargs: model_max_lenght would change nothing",
    "streams.web.rewritten_history=each target_responses=last": "each trains on every answer",
}  # fmt: skip


def test_settings_that_nothing_reads_are_refused(project: Project, styles: dict[str, Path]) -> None:
    project.write_source([])
    configure_chats(project, styles["forgetful"])
    for override, sentence in REFUSED.items():
        assert_refused(project.convert(*override.split()), 2, sentence)
    mapping = "tokenizer.template.enable_thinking={1: a}"
    assert_refused(project.convert(mapping), 2, "(Dict key must be str): use strings as keys")


ADVISED = {
    # Style of a template -> the setting that is missing, and the one that is advised.
    "forgetful": ("rewritten_history=reject", "rewritten_history: last keeps a row"),
    "tools": ("consecutive_roles=reject", "consecutive_roles: merge joins consecutive messages"),
}


@pytest.mark.parametrize("style", ADVISED)
def test_the_setting_that_keeps_bad_records_is_named_and_works(
    project: Project, styles: dict[str, Path], style: str
) -> None:
    """An error of too many bad records names it, and the records are written with it."""
    roles = ("user", "assistant") * 2 if style == "forgetful" else ("user", "user", "assistant")
    record = talk(*roles)
    record["messages"][1]["content"] = "<think>\nHm.\n</think>\n\nYes."
    project.write_source([record] * 4)
    configure_chats(project, styles[style])
    setting, advice = ADVISED[style]
    assert_refused(project.convert(f"streams.web.{setting}"), 5, advice)
    key, _, value = advice.partition(" ")
    project.convert_ok(f"streams.web.{key.rstrip(':')}={value.split()[0]}")
    assert project.manifest.records.written == 4


def test_only_messages_need_a_chat_template_and_take_variables(project: Project) -> None:
    project.write_source([talk("user", "assistant")])
    warning = "WARNING: the tokenizer has no chat template, so conversations are rendered as ChatML"
    assert (
        warning
        in configure_chats(project, train_style(project.folder / "bare", "no_template"))
        .convert_ok()
        .out
    )
    project.write_source(["a"], "docs.jsonl")
    project.configure(documents("docs.jsonl", layout="document"))
    assert "chat template" not in project.convert_ok("--reencode").out
    assert_refused(project.convert(WITHOUT), 2, "no stream has messages")


def make_text(number: int, most_words: int = 12) -> str:
    return "word " * (1 + number * 5 % most_words)


def make_records() -> list[dict[str, Any]]:
    """Return records that are both pairs and conversations."""
    records = list[dict[str, Any]]()
    for n in range(40):
        pair = {"prompt": make_text(n, 5), "response": make_text(n, 7)}
        records.append(talk(*("user", "assistant") * (1 + n % 3)) | pair)
    return records


def test_packed_rows_name_their_documents_and_drop_duplicates(project: Project) -> None:
    unique = [
        {"id": f"r{n}", "prompt": f"number {n}?", "response": make_text(n)} for n in range(40)
    ]
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
            text = "".join(run["text"] for run in row["sample"] if run["document"] == number)
            assert text.startswith(f"number {name[1:]}?")
    first = run_ok(*command, 1).out
    assert f"ids {', '.join(names[0])}" in first
    assert first.count("⟪document ") == len(names[0])
    assert project.manifest.totals.documents == 40


def test_decoding_notices_a_document_that_begins_at_no_start(project: Project) -> None:
    project.write_source(make_records())
    project.configure(chats("a.jsonl", pack=True), max_seq_len=256).run()
    folder = locate(project.train)
    (shard,) = read_index(folder).shards
    samples = read_all_samples(folder, shard)
    assert decode_and_count(shard, samples) is not None
    values = samples.values.copy()
    values[-4:] = [0, 0, 16, 0]  # the last column of the last row is `starts`
    with pytest.raises(ValueError, match="does not ascend from 0"):
        decode_and_count(shard, Ragged(values, samples.offsets))


def test_the_first_token_of_a_document_is_never_counted_as_trained(tmp_path: Path) -> None:
    """Not even if the loss mask of a stream of another tool marks it."""
    folder = locate(publish(tmp_path, PACKED, [PACKED_ROW | {"loss_mask": [1] * 6}] * 3) / "train")
    (shard,) = read_index(folder).shards
    decoded = decode_tokens(shard, read_all_samples(folder, shard))
    assert decoded.trained.tolist() == [4, 4, 4]
    assert decoded.responses.tolist() == [4, 2] * 3


def test_the_offline_mix_of_two_packed_streams_is_packed(project: Project) -> None:
    source = project.write_source(make_records())
    streams = {"pairs": pairs(source, pack=True), "chat": chats(source, pack=True)}
    outcomes = project.configure(streams=streams, max_seq_len=64).run_all().values()
    totals = [outcome.manifest.totals for outcome in outcomes]
    run_ok("mix", project.recipe, "--out", project.folder / "one")
    mixed = manifest_of(project.folder / "one/train").totals
    assert mixed.documents == sum(stream.documents for stream in totals)
    assert mixed.loss_tokens == sum(stream.loss_tokens for stream in totals)
    run_ok("verify", project.folder / "one")


PACK = "streams.web: pack: true"
LOADER = "train_loader.name: mdsmix"
UNPACKABLE: list[tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]] = [
    (documents("a.jsonl"), {}, (PACK, "set layout: document")),
    (chats("a.jsonl", columns="compact"), {}, ("streams.web: columns: compact",)),
    (pairs("a.jsonl"), {"decoder_only_format": False}, (PACK, "decoder_only_format: false")),
    (pairs("a.jsonl"), {"train_loader": {"name": "finetuning"}}, (PACK, LOADER)),
    (documents("a.jsonl", layout="document"), {"train_loader": {"name": "text"}}, (PACK, LOADER)),
    (
        {"local": "/nowhere"},
        {},
        ("pack is only for streams with a source, so it would change nothing here: remove pack",),
    ),
]


def test_packing_is_refused_if_it_is_impossible(project: Project) -> None:
    project.write_source(make_records())
    for stream, settings, words in UNPACKABLE:
        project.configure(stream | {"pack": True}, **settings)
        assert_refused(project.convert(), 2, *words)


LONG = " ".join(f"word{n}" for n in range(400))


def test_truncated_tokens_are_reported_with_their_rows_for_every_kind(project: Project) -> None:
    """10 of 20 answers are longer than a row. The expected number of truncated tokens is counted
    with Hugging Face's tokenizer.
    """
    answers = [f"{n} {LONG}" for n in range(10)] + [f"answer {n}" for n in range(10)]
    pair_records = [{"prompt": "Which?", "response": answer} for answer in answers]
    chat_records = [
        {
            "messages": [
                {"role": "user", "content": pair["prompt"]},
                {"role": "assistant", "content": pair["response"]},
            ]
        }
        for pair in pair_records
    ]
    project.write_source(pair_records, "asked.json")
    project.write_source(chat_records, "talked.json")
    encode = make_encoder(project.tokenizer)
    sizes = [len(encode(each["prompt"])) + len(encode(each["response"])) for each in pair_records]
    cut = sum(max(0, size - 128) for size in sizes)
    whole = {"pairs": pairs("asked.json"), "packed": pairs("asked.json", pack=True)}
    for name, stream in (*whole.items(), ("chats", chats("talked.json"))):
        loader = {"name": "mdsmix", "dataset": {"shuffle": True, "eos_token_id": 0}}
        project.configure(streams={name: stream}, max_seq_len=128, train_loader=loader)
        output = project.convert_ok().out
        (line,) = [
            line for line in output.splitlines() if "max_seq_len)" in line or "longer" in line
        ]
        assert "WARNING: " in line
        assert f"10 of 20 {'documents' if name == 'packed' else 'rows'}" in line
        checked = mdsmix("check", project.recipe).out
        plan = run_ok("plan", project.recipe, "--batch", 1, "--gpus", 1).out
        assert f"rows-cut [{name}]: 10 of 20 samples" in checked
        assert "tokens an epoch are cut off at max_seq_len" in plan
        if name in whole:
            assert f"{cut:,} tokens truncated" in line
            # The ten short documents of packed rows contain the EOS, which the loader appends to
            # pairs.
            of_all = sum(sizes) + (10 if name == "packed" else 0)
            assert f"by {cut:,} of {of_all:,} tokens ({cut / of_all:.1%})" in checked
            assert f"{cut:,} tokens an epoch are cut off at max_seq_len, " in plan
        assert "partial" not in output


def test_tokens_of_the_last_partial_row_are_not_reported_as_truncated(project: Project) -> None:
    texts = [LONG, f"{LONG} and more", "short"]
    project.write_source(texts)
    project.configure(documents("*.jsonl"), max_seq_len=128)
    output = project.convert_ok().out
    lost = sum(len(make_encoder(project.tokenizer)(text)) + 1 for text in texts) % 128
    assert lost
    assert f"  {lost} tokens dropped (last partial row)\n" in output
    assert "truncated" not in output
    assert "rows-cut" not in mdsmix("check", project.recipe).out


def test_dropped_turns_and_truncated_preferences_are_reported_with_their_rows(
    project: Project,
) -> None:
    turns = [("user", "Which?"), ("assistant", "This."), ("user", "And?"), ("assistant", LONG)]
    messages = [{"role": role, "content": text} for role, text in turns]
    project.write_source(
        [{"messages": messages}] * 3 + [{"messages": messages[:2]}] * 2, "talked.json"
    )
    project.configure(chats("talked.json", too_long="first_turns"), max_seq_len=128)
    output = project.convert_ok().out
    assert re.search(r"[\d,]+ tokens truncated in 3 of 5 rows \(too_long: first_turns\)", output)
    assert "rows-cut" not in mdsmix("check", project.recipe).out, "as the recipe asks for"
    long, longer = LONG[:300], LONG[:700]
    project.write_source(
        [{"prompt": "Which?", "chosen": long, "rejected": longer}] * 3, "preferred.json"
    )
    source = {"path": "preferred.json", **{key: key for key in ("prompt", "chosen", "rejected")}}
    preferred = {"kind": "preference", "source": source}
    project.configure(preferred, max_seq_len=256, train_loader={"name": "pairwise_preference"})
    output = project.convert_ok(f"local={project.folder / 'preferred'}").out
    totals = manifest_of(project.folder / "preferred/web/train").totals
    truncated, cut = totals.truncated_tokens, totals.cut_tokens
    assert min(truncated, cut, totals.cut_rows) > 0
    assert (
        f"3 of 3 rows are longer than max_seq_len: {truncated + cut:,} tokens are cut off "
        f"({truncated:,} by the conversion, {cut:,} by the loader)"
    ) in output
    of_all = totals.tokens + truncated
    checked = mdsmix("check", project.recipe, f"local={project.folder / 'preferred'}").out
    assert f"3 of 3 samples of web are cut, by {truncated + cut:,} of {of_all:,} tokens" in checked


def test_pairs_whose_prompt_fills_the_row_count_each_token_that_is_cut(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One token of their answer is stored, and the loader cuts it. An export has the rows as they
    are trained, so it counts the tokens that remain. The whole rows are counted with Hugging Face's
    tokenizer.
    """
    records = [{"prompt": "Which? " * 100, "response": f"{n} {LONG}"} for n in range(5)]
    records += [{"prompt": "Which?", "response": f"{n} {LONG}"} for n in range(3)]
    records += [{"prompt": "Which?", "response": "This."}]
    project.write_source(records)
    project.configure(pairs("a.jsonl"), max_seq_len=64, target_prompts="all")
    encode = make_encoder(project.tokenizer)
    sizes = [len(encode(record["prompt"])) + len(encode(record["response"])) for record in records]
    lost = sum(max(0, size - 64) for size in sizes)
    output = project.convert_ok().out
    totals = project.manifest.totals
    assert (totals.cut_rows, totals.cut_tokens, totals.truncated_rows) == (5, 5, 3)
    assert totals.cut_tokens + totals.truncated_tokens == lost
    assert (
        f"8 of 9 rows are longer than max_seq_len: {lost:,} tokens are cut off "
        f"({lost - 5:,} by the conversion, 5 by the loader)"
    ) in output
    checked = mdsmix("check", project.recipe).out
    assert f"8 of 9 samples of web are cut, by {lost:,} of {sum(sizes):,} tokens" in checked
    run_ok("export", project.recipe, "--to", "parquet", "-o", project.folder / "rows")
    (path,) = (project.folder / "rows").rglob("*.parquet")
    rows = parquet.read_table(path)["input_ids"].to_pylist()
    assert sum(map(len, rows)) == totals.seen_tokens

    # An earlier commit did not count the five tokens. Its streams can be exported too.
    make_encoded = encoded.make_encoded
    with monkeypatch.context() as patch:
        patch.setattr(
            encoded, "make_encoded", lambda *columns, cut, **more: make_encoded(*columns, **more)
        )
        earlier = f"local={project.folder / 'earlier'}"
        project.convert_ok(earlier)
    assert manifest_of(project.folder / "earlier/web/train").totals.cut_tokens == 0
    run_ok("export", project.recipe, earlier, "--to", "parquet", "-o", project.folder / "again")
    (path,) = (project.folder / "again").rglob("*.parquet")
    assert parquet.read_table(path)["input_ids"].to_pylist() == rows
