"""`mdsmix init` writes a recipe that converts and can be mixed, or says in one sentence why not."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from mdsmix.kinds import open_recipe
from mdsmix.sources import find_files
from mdsmix.sources.find import describe_skipped_links
from mdsmix.storage import locate
from tests.converting import (
    Answer,
    assert_refused,
    manifest_of,
    mdsmix,
    read_samples,
    run_ok,
    write_jsonl,
)
from tests.editor import list_marks
from tests.published import LENGTH, publish
from tests.styles import DEEPSEEK_R1, FORGETS, train_style
from tests.tool_styles import QWEN_2_5

MESSAGES = [{"role": "user", "content": "Which?"}, {"role": "assistant", "content": "This one."}]

THOUGHT = {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nYes."}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def data(home: Path) -> Path:
    """Files of several shapes, and files that are not data."""
    folder = home / "data"
    question = {"qa": {"question": "a?", "answer": "b"}}
    for name, records in {
        "web/part-0": [{"text": "some words", "url": "u"}] * 60,
        "web/part-1": [{"text": "other words", "url": "u"}] * 60,
        "chat/train": [{"messages": MESSAGES}] * 5,
        "chat/test": [{"messages": MESSAGES}],
        "faq": [*[question] * 10, {"qa": {}}],
        "odd": [{"html": "<p>", "score": 1}],
        "empty": [],
    }.items():
        write_jsonl(folder / f"{name}.jsonl", records)
    (folder / "README.md").write_text("about")
    (folder / ".hidden.jsonl").write_text("{}")
    return folder


def init(tokenizer: Path, *arguments: object) -> Answer:
    return mdsmix("init", *arguments, "--tokenizer", tokenizer)


def write_recipe(tokenizer: Path, *arguments: object) -> tuple[Answer, str]:
    """Run init; return its answer and the text of the recipe."""
    answer = run_ok("init", *arguments, "--tokenizer", tokenizer, "-o", "recipe.yaml")
    text = Path("recipe.yaml").read_text()
    assert text.startswith("# yaml-language-server: $schema=./mdsmix.schema.json\n")
    assert Path("mdsmix.schema.json").is_file()
    assert list_marks(text) == []
    return answer, text


def test_the_recipe_converts_as_it_is_and_can_be_mixed(data: Path, tokenizer_folder: Path) -> None:
    answer, text = write_recipe(tokenizer_folder, "data")
    assert "⟨<|im_start|>⟩assistant\n⟦This one.⟨<|im_end|>⟩\n⟧" in answer.out
    assert "wrote recipe.yaml" in answer.out
    for sentence in (
        "data/empty.jsonl is empty",
        (
            "ignored, since these do not look like data: data/README.md; a file that you name "
            "yourself, and not by its folder, is also recognised by its first bytes"
        ),
        "fields of web that are not read: url",
        "data/odd.jsonl has no known shape; its records have the fields html, score",
        "text: there is no field text/raw_content/txt/content/document/body",
    ):
        assert sentence in answer.err
    assert re.search(r"# 2 files, [\d,]+ bytes; records tried: 100, written: 100\n", text)
    assert "quarantined: 1 missing_field" in text
    assert "    layout: document    # " in text
    run_ok("convert", "recipe.yaml")
    folders = [f"mix/{s.name}/{s.split}" for s in open_recipe("recipe.yaml").sourced]
    counts = dict[str, tuple[int, int]]()
    for folder in sorted(folders):
        records = manifest_of(folder).records
        counts[folder] = (records.read, records.written)
    trained = {"mix/chat/train": (5, 5), "mix/faq/train": (11, 10), "mix/web/train": (120, 120)}
    assert counts == {"mix/chat-test/test": (1, 1), **trained}
    run_ok("check", "recipe.yaml")
    again = init(tokenizer_folder, ".", "-o", "other.yaml")
    assert f"published streams were ignored: {', '.join(counts)}" in again.err
    streams = open_recipe("recipe.yaml").streams
    assert open_recipe("other.yaml").streams == streams, "published streams are not data"


def test_reading_a_tokenizer_for_the_first_time_has_a_note(
    data: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes seconds, and without a network 50. A relative path is the same tokenizer."""
    name = os.path.relpath(tokenizer_folder)
    monkeypatch.setenv("MDSMIX_CACHE", "cache")
    said = f"reading the tokenizer {tokenizer_folder} with transformers, once"
    first = run_ok("init", "data/web/*.jsonl", "--tokenizer", name, "-o", "recipe.yaml")
    assert first.err.startswith(said)
    assert said not in init(tokenizer_folder, "data/web/*.jsonl").err
    assert said not in run_ok("convert", "recipe.yaml").err


def test_paths_may_begin_with_a_tilde(
    data: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shell leaves a pattern in quotes, and `--tokenizer=~/model`, as they are."""
    monkeypatch.setenv("HOME", str(tokenizer_folder.parent))
    shutil.copytree(data, tokenizer_folder.parent / "data")
    _, text = write_recipe(Path("~", tokenizer_folder.name), "~/data/web/*.jsonl")
    assert f"tokenizer: {os.path.relpath(tokenizer_folder)}\n" in text
    run_ok("convert", "recipe.yaml")
    assert manifest_of("mix/web/train").records.written == 120


def test_a_stream_to_evaluate_is_no_example_of_a_weight(home: Path, tokenizer_folder: Path) -> None:
    write_jsonl(home / "a-test.jsonl", [{"messages": MESSAGES}])
    write_jsonl(home / "b.jsonl", [{"messages": MESSAGES}])
    _, both = write_recipe(tokenizer_folder, "a-test.jsonl", "b.jsonl")
    assert "# mix: {b: {repeat: 2}}" in both


def test_a_tokenizer_without_eos_is_warned_of_before_and_after_a_conversion(
    home: Path, tokenizer_folder: Path
) -> None:
    write_jsonl(home / "a.jsonl", [{"messages": MESSAGES}])
    answer, _ = write_recipe(tokenizer_folder / "tokenizer.json", "a.jsonl")
    warning = "WARNING: the tokenizer has no EOS token, so LLM-Foundry refuses it"
    assert warning in answer.err
    assert warning in run_ok("convert", "recipe.yaml").out
    assert "error eos-missing" in mdsmix("check", "recipe.yaml").out


def test_without_a_file_the_recipe_goes_to_stdout(data: Path, tokenizer_folder: Path) -> None:
    answer = init(tokenizer_folder, "data/web/*.jsonl", "--to", "s3://bucket/mix")
    Path("recipe.yaml").write_text(answer.out)
    recipe = open_recipe("recipe.yaml")
    assert (recipe.remote, list(recipe.streams)) == ("s3://bucket/mix", ["web"])
    assert recipe.local == str(Path("mix").absolute())  # not Streaming's temporary folder
    assert "the first record" in answer.err
    shown = json.loads(init(tokenizer_folder, "data/faq.jsonl", "--json").out)["streams"]["faq"]
    assert shown["quarantined"] == {"missing_field": 1}
    refused = init(tokenizer_folder, "data/faq.jsonl", "-o", "recipe.yaml")
    assert (refused.code, "exists already: pass --replace" in refused.err) == (2, True)
    assert Path("recipe.yaml").read_text() == answer.out
    assert "faq:" in write_recipe(tokenizer_folder, "data/faq.jsonl", "--replace")[1]


def test_a_stream_of_filtered_records_is_left_out_for_that_reason(
    home: Path, tokenizer_folder: Path
) -> None:
    """No record is bad: another max_bad would not help."""
    question = {"role": "user", "content": "Who?"}
    answer = {"role": "assistant", "content": "I.", "weight": 0}
    write_jsonl(home / "a.jsonl", [{"messages": [question, answer]}] * 3)
    write_jsonl(home / "b.jsonl", [{"text": "some words"}])
    init_answer, text = write_recipe(tokenizer_folder, "a.jsonl", "b.jsonl")
    reason = "records tried: 3, written: 0; filtered: 3 nothing_trained: no record becomes a sample"
    assert f"# left out: {reason}\n" in text
    assert f"a is left out: {reason}\n" in init_answer.err


def test_media_that_cannot_be_read_are_not_trained_as_text(
    home: Path, tokenizer_folder: Path
) -> None:
    """A stream of audio is left out; a rare placeholder is a warning with its number."""

    def chat(question: str) -> dict[str, Any]:
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": "Yes."}]
        return {"messages": turns}

    write_jsonl(home / "heard.jsonl", [chat("<audio>Who speaks?") | {"audios": ["a.wav"]}] * 9)
    spoken = [chat("<speech>Who?")] * 5 + [chat("<sound>Who?")] * 4
    write_jsonl(home / "spoken.jsonl", spoken)  # as NeMo RL and VILA write it
    write_jsonl(home / "mixed.jsonl", [chat("Who?")] * 19 + [chat("<video>Who?")])
    answer, text = write_recipe(tokenizer_folder, "heard.jsonl", "spoken.jsonl", "mixed.jsonl")
    assert [*open_recipe("recipe.yaml").streams] == ["mixed"]
    assert "# left out: records tried: 9, written: 9; 9 of these contain <audio>" in text
    assert "heard is left out: " in answer.err
    assert "spoken is left out: " in answer.err
    warning = (
        "some of the first 20 records of mixed contain placeholders of media, which would be "
        "trained as text: 1 <video>"
    )
    assert f"WARNING: {warning}" in answer.err


def test_files_with_odd_names_or_without_a_suffix_convert(
    home: Path, tokenizer_folder: Path
) -> None:
    name = "a: [x] ${y} #1*.jsonl"
    write_jsonl(home / name, [{"text": "some words"}] * 9)
    write_jsonl(home / "a: x ${y} #1_.jsonl", [{"no": "text"}])
    write_jsonl(home / "dump", [{"text": "some words"}] * 9)
    _, text = write_recipe(tokenizer_folder, name, "dump")
    assert "format: jsonl" in text
    run_ok("convert", "recipe.yaml")
    for stream in ("a_x_y", "dump"):
        assert manifest_of(home / f"mix/{stream}/train").records.written == 9


REFUSED: dict[str, tuple[str, int, str]] = {
    "": ("", 2, "no files are named"),
    "gone.jsonl": ("", 2, "gone.jsonl is not a file, and not a folder or pattern with files"),
    "empty.jsonl": ("", 2, "empty.jsonl is empty"),
    "blank.jsonl": ("\n \n", 2, "blank.jsonl has no records: only blank lines, an empty list, or"),
    "none.json": ("[]", 2, "none.json has no records: only blank lines, an empty list, or the"),
    "header.csv": ("text\n", 2, "header.csv has no records: only blank lines, an empty list, or"),
    "bare.jsonl": ("{}\n{}\n", 2, "bare.jsonl has only records without fields."),
    "null.json": ("null", 2, "null.json has no record that is an object (other values)."),
    "quoted.json": ('"a"', 2, "(other values), but strings; `jq -c '{text: .}'` makes records"),
    "binary": (
        "\x7fELF\x00\x01",
        2,
        (
            "ignored, since neither name nor first bytes show a format of mdsmix: binary; rename a "
            "file of plain text to .txt, or write the recipe by hand and set source.format (text, "
        ),
    ),
    "odd.jsonl": (
        '{"html": 1}\n',
        2,
        "odd.jsonl has no known shape; its records have the fields html.",
    ),
    "gemini.jsonl": (
        (
            '{"contents": [{"role": "user", "parts": [{"text": "Hi"}]}, {"role": "model", '
            '"parts": [{"text": "Hello."}]}]}\n'
        ),
        2,
        (
            "gemini.jsonl has the form of Gemini (contents of parts), which no shape reads; "
            "write each record as messages"
        ),
    ),
    "responses.jsonl": (
        (
            '{"input": [{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}], '
            '"output": [{"type": "message", "role": "assistant", "content": [{"type": '
            '"output_text", "text": "Hello."}]}]}\n'
        ),
        2,
        (
            "responses.jsonl has the form of OpenAI's Responses (input and output items), which "
            "no shape reads"
        ),
    ),
    "harmony.jsonl": (
        (
            '{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "channel": '
            '"analysis", "content": "hm"}, {"role": "assistant", "channel": "final", "content": '
            '"Hello."}]}\n'
        ),
        2,
        (
            "harmony.jsonl has the form of harmony (gpt-oss's messages with a channel), which no "
            "shape reads"
        ),
    ),
    "undecoded.csv": (
        "messages\n\"[{'role': 'user', 'content': 'Hi'}, {'role': 'assistant', 'content': 'Yo'}]\"\n",
        2,
        "undecoded.csv has the form of messages as text (a string in place of a list), which no",
    ),
    "undecoded.jsonl": (
        '{"conversations": "[{\\"from\\": \\"human\\", \\"value\\": \\"Hi\\"}]"}\n',
        2,
        "ast.literal_eval if its quotes are single, or read the records with a function",
    ),
    "nemotron.jsonl": (
        '{"input": [{"role": "user", "content": "a"}], "output": "b", "system_prompt": "s"}\n',
        2,
        "append the output to the messages of input",
    ),
    "sequence.jsonl": (
        '{"messages": {"role": ["user", "assistant"], "content": ["a", "b"]}}\n',
        2,
        "the form of a Sequence of datasets",
    ),
    "lima.jsonl": ('{"conversations": ["a", "b"]}\n', 2, "write each text as a message"),
    "steps.jsonl": (
        '{"prompt": "a", "completions": ["b", "c"], "labels": [true, false]}\n',
        2,
        "mdsmix makes no data for models that reward single steps",
    ),
    "bedrock.jsonl": (
        '{"messages": [{"role": "user", "content": [{"text": "a"}]}, {"role": "assistant", '
        '"content": [{"text": "b"}]}]}\n',
        2,
        "the form of Amazon Bedrock (contents of parts without a type)",
    ),
    "oumi.jsonl": (
        '{"messages": [{"role": "user", "content": [{"type": "text", "content": "a"}]}, {"role": '
        '"assistant", "content": "b"}]}\n',
        2,
        "the form of Oumi (parts with their text or image under content or binary), which",
    ),
    "generations.jsonl": (
        '{"instruction": "a", "generations": ["b", "c"], "ratings": [5, 3]}\n',
        2,
        "the form of several answers to each question (distilabel's generations)",
    ),
    "tokenized.jsonl": (
        '{"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}\n',
        2,
        "the form of rows of token ids (input_ids), which no shape reads; convert the texts",
    ),
    "rated.jsonl": (
        '{"instruction": "a", "completions": [{"response": "b", "overall_score": 8}]}\n',
        2,
        "the form of UltraFeedback (completions with scores)",
    ),
    "ranked.jsonl": (
        '{"context": [{"role": "user", "content": "a"}], "response1": "b", "response2": "c", '
        '"overall_preference": -2}\n',
        2,
        "response1 is the chosen one if overall_preference is below 0",
    ),
    "ranks.jsonl": (
        '{"context": [{"role": "user", "content": "a"}], "completions": [{"rank": 0, "completion": '
        '[{"role": "assistant", "content": "b"}]}, {"rank": 1, "completion": []}]}\n',
        2,
        "the completion of the lowest rank as `chosen`",
    ),
    "segments.jsonl": (
        '{"segments": [{"label": true, "text": "a"}]}\n',
        2,
        'parts with marks, `{"type": "text", "text": "...", "train": false}`',
    ),
    "stack.jsonl": ('{"blob_id": "a", "path": "/a.py"}\n', 2, "the form of The Stack v2"),
    "dialogue.jsonl": (
        '{"system": "s", "chat": "USER: a\\n\\nASSISTANT: b"}\n',
        2,
        "the form of a dialogue in one text",
    ),
    "xlam.jsonl": ('{"query": "a", "tools": "[]", "answers": "[]"}\n', 2, "the form of xLAM"),
    # A reason code is explained, with what the record has. Codes of shapes that write messages in
    # another way are not.
    "video.jsonl": (
        '{"messages": [{"role": "user", "content": [{"type": "video", "video": "a.mp4"}]}, '
        '{"role": "assistant", "content": "b"}]}\n',
        2,
        "sharegpt: reads 0 of 1 records (1 bad_message_keys). content_not_text: A message's "
        "content is not a string, and has no other form that its shape reads, here part: video. If",
    ),
    "roles.jsonl": (
        '{"messages": [{"role": "critic", "content": "a"}, {"role": "assistant", "content": "b"}]}\n',
        2,
        "unknown_role: A message has a role that its shape does not know, here role: 'critic'.",
    ),
    "around.json": ('{"version": 1, "data": [{"text": "a"}]}', 2, "jq -c '.data[]'"),
    "lines.json": ('{\n "data": [\n  {"text": "a"}\n ]\n}', 2, "jq -c '.data[]'"),
    "kit.json": (
        '{\n "summary": "s",\n "qa_pairs": [\n  {"question": "a", "answer": "b"}\n ]\n}',
        2,
        "the form of synthetic-data-kit (qa_pairs or cot_examples), which no shape reads; write",
    ),
    "columns.json": ('{"text": {"0": "a"}, "id": {"0": 1}}', 2, 'orient="records", lines=True'),
    "turns.jsonl": (
        '{"turns": [{"speaker": "x", "said": "a"}]}\n' * 2,
        2,
        "turns.jsonl has no known shape; its records have the fields turns",
    ),
    "unknown.jsonl": ('{"html": "a"}\n', 2, "If your fields have other names, write the recipe"),
    "bad.jsonl": ("bad\n", 2, "bad.jsonl has no record that is an object (1 not_json)."),
    "array.jsonl": (
        '[{"text": "a"}]\n',
        2,
        "(other values), but one list: set source.format: json",
    ),
    "strings.json": ('["a", "b"]', 2, "(other values), but strings; `jq -c '.[] | {text: .}'`"),
    "strings.jsonl": ('"a"\n"b"\n', 2, "(other values), but strings; `jq -c '{text: .}'`"),
    "lists.json": ('[["a"], ["b"]]', 2, "(other values): each element of its list must be one"),
    "printed.jsonl": ("{'text': 'a'}\n", 2, "as json.dumps, and not Python's print, writes it"),
    "tabs.csv": ("prompt\tresponse\na\tb\n", 2, "its cells end in tabs: set source.format: tsv"),
    "shards.jsonl": ("PAR1", 2, "its first bytes are those of parquet."),
    "commas.jsonl": (
        '{"text": "a"},\n{"text": "b"},\n',
        2,
        "(2 not_json); commas separate its records, as inside a list: write [ before",
    ),
    "pretty-commas.json": ('{\n"text": "a"\n},\n{\n"text": "b"\n}\n', 2, "commas separate its"),
    "commas.jsonl.gz": (
        gzip.compress(b'{"text": "a"},\n{"text": "b"},\n').decode("latin-1"),
        2,
        "(2 not_json); commas separate",
    ),
    "pretty.jsonl": (
        '{\n "text": "a"\n}\n',
        2,
        "those of jsonl, which needs each record on one line, as `jq -c .` writes it",
    ),
    "latin.txt": (
        "K\xe4se",
        2,
        "latin.txt has no record that is an object (1 invalid_utf8); it is not UTF-8: save ",
    ),
    "pretty.jsonl.gz": (
        gzip.compress(b'{\n "text": "a"\n}\n').decode("latin-1"),
        2,
        "(3 not_json)",
    ),
    "broken.jsonl.gz": ("no gzip", 4, "broken.jsonl.gz"),
}


def test_links_that_are_not_followed_are_named(home: Path, tokenizer_folder: Path) -> None:
    write_jsonl(home / "disk/a.jsonl", [{"text": "one"}])
    write_jsonl(home / "data/b.jsonl", [{"text": "two"}])
    for link, target in {
        "data/linked": "../disk",
        "data/up": "..",
        "data/gone": "../nowhere",
        "data/twin.jsonl": "b.jsonl",
        "only/linked": "../disk",
    }.items():
        (home / link).parent.mkdir(exist_ok=True)
        (home / link).symlink_to(target)

    def init(*names: str) -> Answer:
        options = ("--tokenizer", tokenizer_folder, "-o", "recipe.yaml", "--replace")
        return mdsmix("init", *names, *options)

    answer = init("data")
    assert answer.code == 0
    assert (
        f"links to folders are not followed, so the files in data/linked (to {home}/disk) are not "
        "read: to read them, name the link itself too\n"
    ) in answer.err
    assert f"data/gone (to {home}/nowhere) is a link to a place where there is" in answer.err
    assert (
        "data/twin.jsonl is by a link the same file as data/b.jsonl, whose records are"
        in answer.err
    )
    assert "data/up" not in answer.err
    assert [*open_recipe(home / "recipe.yaml").streams] == ["b"]
    assert_refused(init("only"), 2, "not read: to read them, name the link itself too.")
    # The advice works.
    assert init("data/linked").code == 0
    assert [*open_recipe(home / "recipe.yaml").streams] == ["a"]
    both = init("data/linked", "disk")
    assert "data/linked/a.jsonl is by a link the same file as disk/a.jsonl, whose" in both.err
    assert [*open_recipe(home / "recipe.yaml").streams] == ["a"]
    # Links to one file that is not among the data are one stream too.
    for link in ("one", "two"):
        (home / "pair").mkdir(exist_ok=True)
        (home / "pair" / f"{link}.jsonl").symlink_to(home / "disk/a.jsonl")
    pair = init("pair")
    assert "pair/two.jsonl is by a link the same file as pair/one.jsonl, whose" in pair.err
    (stream,) = open_recipe(home / "recipe.yaml").sourced
    assert stream.source.path == [str(home / "pair/one.jsonl")]
    # A folder that another path of a source names is read, though its link is not followed.
    (home / "data/gone").unlink()
    for paths, is_named in ((["data/**/*.jsonl"], True), (["data/**/*.jsonl", "disk/*"], False)):
        sentence = describe_skipped_links(paths, home, find_files(paths, home))
        assert ("data/linked" in sentence) is is_named
    # A pattern may not come through the folder of a link, though that is inside its root. Another
    # path that names only a file of this folder does not read the others.
    write_jsonl(home / "sets/other/c.jsonl", [{"text": "three"}])
    write_jsonl(home / "sets/other/d.jsonl", [{"text": "four"}])
    write_jsonl(home / "sets/main/e.jsonl", [{"text": "five"}])
    (home / "sets/main/link").symlink_to("../other")
    pattern = "sets/m*/**/*.jsonl"
    for paths, is_named in (
        ([pattern], True),
        ([pattern, "sets/other/c.jsonl"], True),
        ([pattern, "sets/other/*"], False),
        (["sets/**/*.jsonl"], False),
    ):
        sentence = describe_skipped_links(paths, home, find_files(paths, home))
        assert ("sets/main/link" in sentence) is is_named


def test_commas_between_records_are_named_with_a_command_that_makes_a_list(
    home: Path, tokenizer_folder: Path
) -> None:
    """The last record has no comma, so it is read. The command is run as it is printed."""
    Path("commas.jsonl").write_text('{"text": "first words"},\n{"text": "other words"}\n')
    answer = init(tokenizer_folder, "commas.jsonl", "-o", "recipe.yaml")
    output = answer.out + answer.err
    assert "WARNING: commas.jsonl has lines that are not JSON: commas separate its rec" in output
    command = output.partition("`(echo")[2].partition("`")[0]
    command = f"(echo{command}".replace("FILE", "commas.jsonl").replace("NEW", "new")
    subprocess.run(["sh", "-c", command], check=True)
    assert json.loads(Path("new.json").read_text()) == [
        {"text": "first words"},
        {"text": "other words"},
    ]


def test_lines_of_json_in_a_text_file_are_a_warning(home: Path, tokenizer_folder: Path) -> None:
    lines = {
        "lines.txt": ('{"text": "some words"}\n{"text": "b"}\n', True),
        "long.txt": ("".join(f'{{"text": "{"word " * 40}{n}"}}\n' for n in range(3)), True),
        "code.txt": ("{ return 1; }\n{ return 2; }\n", False),
        "plain.txt": ("some words\n", False),
    }
    for name, (text, is_json) in lines.items():
        Path(name).write_text(text)
        answer = init(tokenizer_folder, name, "-o", f"{name}.yaml")
        assert answer.code == 0
        warning = f"WARNING: {name} will be trained as plain text, but its first line is a JSON"
        assert (warning in answer.out + answer.err) == is_json, name
    recipe = Path("by-hand.yaml")
    recipe.write_text(re.sub(" +split_by: .*\n", "", Path("lines.txt.yaml").read_text()))
    assert_refused(mdsmix("convert", recipe), 2, "since it begins like JSON Lines, set source.form")


def test_files_that_give_no_recipe_are_refused_in_one_sentence(
    home: Path, tokenizer_folder: Path
) -> None:
    for name, (content, code, message) in REFUSED.items():
        if name and name != "gone.jsonl":
            Path(name).write_bytes(content.encode("latin-1"))
        answer = init(tokenizer_folder, *([name] if name else []), "-o", "recipe.yaml")
        assert (answer.code, answer.err.count("\n")) == (code, 1), name
        assert message in answer.err
    answer = init(tokenizer_folder, tokenizer_folder)
    assert answer.code == 2
    assert f"these do not look like data: ../{tokenizer_folder.name}/" in answer.err
    write_jsonl(home / "a.jsonl", [{"text": "a"}])
    unknown = init(Path("./no_tokenizer"), "a.jsonl", "-o", "recipe.yaml")
    assert unknown.code == 4
    assert "the tokenizer no_tokenizer was not found" in unknown.err
    assert not Path("recipe.yaml").exists()


def test_sources_in_a_bucket_are_named_by_their_urls(
    data: Path, tokenizer_folder: Path, bucket: str
) -> None:
    url = f"s3://{bucket}/data"
    for name in ("faq.jsonl", "web/part-0.jsonl", "web/part-1.jsonl"):
        locate(f"{url}/{name}").write((data / name).read_bytes())
    write_recipe(tokenizer_folder, url)
    sources: Any = {s.name: s.source.path for s in open_recipe("recipe.yaml").sourced}
    assert sources == {"faq": [f"{url}/faq.jsonl"], "web": [f"{url}/web/part-*.jsonl"]}


def test_a_recipe_fits_a_tokenizer_without_eos_or_template(
    data: Path, tokenizer_folder: Path
) -> None:
    bare = shutil.copytree(tokenizer_folder, data.parent / "bare")
    config = json.loads((bare / "tokenizer_config.json").read_text()) | {"model_max_length": 64}
    reduced = {key: config[key] for key in config if key not in ("eos_token", "chat_template")}
    (bare / "tokenizer_config.json").write_text(json.dumps(reduced))
    answer, text = write_recipe(bare, "data")
    assert "WARNING: the tokenizer has no chat template, so conversations are" in answer.err
    assert "chat template" not in init(bare, "data/web").err, "it has no conversations"
    assert "tokenizer: ./bare\n" in text
    assert "max_seq_len: 64    # tokens of a row; the tokenizer's model_max_length\n" in text
    assert "add_eos: false    # the tokenizer has no EOS" in text
    run_ok("convert", "recipe.yaml")


def test_records_of_anthropic_become_a_recipe(home: Path, tmp_path: Path) -> None:
    use = {"type": "tool_use", "id": "c1", "name": "add", "input": {"of": [2, 3]}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": "5"}
    messages = [
        {"role": "user", "content": "2+3?"},
        {"role": "assistant", "content": [{"type": "text", "text": "Let me see."}, use]},
        {"role": "user", "content": [result]},
        {"role": "assistant", "content": [{"type": "text", "text": "5"}]},
    ]
    tools = [{"name": "add", "description": "Adds", "input_schema": {"type": "object"}}]
    record = {"system": "Add.", "messages": messages, "tools": tools}
    write_jsonl(home / "anthropic.jsonl", [record] * 9)
    tokenizer = train_style(tmp_path / "tools", "plain", QWEN_2_5)
    _, text = write_recipe(tokenizer, "anthropic.jsonl")
    assert "messages: messages" in text
    run_ok("convert", "recipe.yaml", "special_tokens_in_text=allow")
    shown = run_ok("inspect", "mix/anthropic/train", "-n", 1).out
    assert '"parameters": {"type": "object"}' in shown
    assert "Add." in shown
    assert "⟦5" in shown


def test_reasoning_and_calls_can_be_left_untrained(home: Path, tokenizer_folder: Path) -> None:
    """A comment counts the records that have them, and shows the key that `convert` takes."""
    records = [{"messages": [MESSAGES[0], THOUGHT]}] * 2 + [{"messages": MESSAGES}] * 7
    write_jsonl(home / "thoughts.jsonl", records)
    _, text = write_recipe(tokenizer_folder, "thoughts.jsonl")
    comment = (
        "    # 2 records with reasoning in the answers; to leave these parts untrained: "
        "`train_parts: {reasoning: false}`\n"
    )
    assert comment in text
    key = comment.strip().partition("`")[2].strip("`")
    Path("recipe.yaml").write_text(text.replace(comment, f"    {key}\n"))
    run_ok("convert", "recipe.yaml")
    totals = manifest_of("mix/thoughts/train").totals
    assert totals.answer_parts["reasoning"] > 0
    write_jsonl(home / "plain.jsonl", [{"messages": MESSAGES}])
    assert "train_parts" not in init(tokenizer_folder, "plain.jsonl").out


def test_a_thought_that_is_cut_off_is_warned_of(home: Path, tokenizer_folder: Path) -> None:
    cut = {"role": "assistant", "content": "<think>\nHm."}
    write_jsonl(
        home / "cut.jsonl", [{"messages": [MESSAGES[0], answer]} for answer in (cut, THOUGHT)]
    )
    warning = (
        "WARNING: of the first 2 records of cut, 1 record has an answer that begins with <think>"
    )
    assert warning in init(tokenizer_folder, "cut.jsonl").err


def test_a_thought_that_the_template_leaves_out_is_warned_of(home: Path, tmp_path: Path) -> None:
    """It is not trained, so no comment says how to leave it untrained."""
    write_jsonl(home / "thoughts.jsonl", [{"messages": [MESSAGES[0], THOUGHT]}] * 2)
    tokenizer = train_style(tmp_path / "leaves-out", "plain", DEEPSEEK_R1)
    answer, text = write_recipe(tokenizer, "thoughts.jsonl")
    warning = (
        "WARNING: of the first 2 records of thoughts, 2 records have an answer with text before "
        "</think>, mostly reasoning, which the chat template does not print"
    )
    assert warning in answer.err
    assert "train_parts" not in text


def test_texts_that_a_chat_template_has_printed_are_warned_of(
    home: Path, tokenizer_folder: Path
) -> None:
    """Their control tokens are plain text, unless the recipe allows special tokens in texts."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    texts = [tokenizer.apply_chat_template(MESSAGES, tokenize=False), "Plain. " * 9]
    for records, is_warned in (([texts[0]] * 3, True), (texts, False), (texts[1:], False)):
        write_jsonl(home / "texts.jsonl", [{"text": text} for text in records])
        answer = init(tokenizer_folder, "texts.jsonl", "-o", "recipe.yaml", "--replace")
        assert ("contain the text of a special token: if a chat" in answer.err) == is_warned
        shown = run_ok("convert", "recipe.yaml", "--reencode").out
        assert ("WARNING: 3 records contain the text of" in " ".join(shown.split())) == is_warned
    write_jsonl(home / "texts.jsonl", [{"text": texts[0]}] * 3)
    run_ok("convert", "recipe.yaml", "special_tokens_in_text=allow", "--reencode")
    row = read_samples(home / "mix/texts/train")[0]["tokens"]
    expected = tokenizer(texts[0])["input_ids"]
    assert [*row][: len(expected)] == expected


def test_calls_of_tools_are_trained_as_their_records_have_them(home: Path, tmp_path: Path) -> None:
    """Calls come before the last answer, and parquet fills nulls into their arguments."""
    import pyarrow as pa
    from pyarrow import parquet

    def call(**arguments: str) -> list[dict[str, Any]]:
        return [
            MESSAGES[0],
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"function": {"name": "f", "arguments": arguments}}],
            },
            {"role": "tool", "content": "5"},
            {"role": "assistant", "content": "It is 5."},
        ]

    tools = json.dumps([{"name": "f", "parameters": {"type": "object"}}])
    records = [{"messages": call(**{name: "x"}), "tools": tools} for name in ("a", "b")]
    tokenizer = train_style(tmp_path / "tools", "plain", QWEN_2_5)
    for form in ("parquet", "jsonl"):
        table = pa.Table.from_pylist(records)
        if form == "parquet":
            parquet.write_table(table, home / "calls.parquet")
        else:  # nulls of JSON Lines stay, since their author wrote them
            write_jsonl(home / "calls.jsonl", table.to_pylist())
        _, text = write_recipe(tokenizer, f"calls.{form}", "--replace")
        assert "\ntarget_responses: all    # calls of tools come before the last answer" in text
        assert ("      nulls: drop    #" in text) == (form == "parquet")
        shown = run_ok("convert", "recipe.yaml", f"local=mix-{form}").out
        assert ("null entries" in shown) == (form == "jsonl")
        assert "not trained" not in shown
        samples = run_ok("inspect", f"mix-{form}/calls/train").out
        arguments = {"parquet": '{"b": "x"}', "jsonl": '{"a": null, "b": "x"}'}[form]
        assert f'⟦<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>' in samples


def test_a_stream_of_tokens_is_named_without_a_source(
    home: Path, tokenizer_folder: Path, bucket: str
) -> None:
    """What init proposes makes a recipe that can be checked: of a folder that is not called train,
    after it was renamed.
    """
    rows = [{"tokens": [number] * LENGTH} for number in range(8)]
    publish(home / "old/web", {"tokens": f"ndarray:int32:{LENGTH}"}, rows)
    refused = mdsmix("init", "old/web", "--tokenizer", tokenizer_folder)
    words = "old/web/train/index.json is the index of a stream of tokens, which needs no conversion"
    assert_refused(refused, 2, words)
    (stream,) = re.findall(r"without a source, `({.*})`", refused.err)
    tree = f"{{tokenizer: {tokenizer_folder}, max_seq_len: {LENGTH}, streams: {{web: {stream}}}}}"
    (home / "recipe.yaml").write_text(tree)
    assert "\n1 stream may be mixed" in run_ok("check", "recipe.yaml").out
    # MDSWriter writes into any folder; a recipe trains only on those called train.
    (home / "old/web/train").rename(home / "old/web/flat")
    refused = mdsmix("init", "old/web", "--tokenizer", tokenizer_folder)
    assert "to train on it, rename its folder to train, and name it" in refused.err
    assert f"without a source, `{stream}`; a folder of another" in refused.err
    # The recipe may be in the folder of the index.
    (home / "old/web/flat").rename(home / "old/web/train")
    with contextlib.chdir(home / "old/web/train"):
        refused = mdsmix("init", ".", "--tokenizer", tokenizer_folder)
        assert "`{kind: pretraining, local: .., split: train}`" in refused.err
    # In a bucket the folder is a remote.
    url = f"s3://{bucket}/web"
    for file in (home / "old/web/train").iterdir():
        locate(f"{url}/train/{file.name}").write(file.read_bytes())
    refused = mdsmix("init", url, "--tokenizer", tokenizer_folder)
    assert f"`{{kind: pretraining, remote: {url}, split: train}}`" in refused.err
    (home / "recipe.yaml").write_text(tree.replace("local: old/web", f"remote: {url}"))
    assert "\n1 stream may be mixed" in run_ok("check", "recipe.yaml").out
    # No loader reads ids without labels.
    publish(home / "ids", {"input_ids": f"ndarray:int32:{LENGTH}"}, [{"input_ids": [1] * LENGTH}])
    refused = mdsmix("init", "ids", "--tokenizer", tokenizer_folder)
    assert_refused(refused, 2, "has the form of rows of token ids (input_ids)")
    assert "needs no conversion" not in refused.err
    # A stream of texts is a source.
    publish(home / "texts", {"text": "str"}, [{"text": "a"}] * 3)
    assert "path: texts/train" in run_ok("init", "texts", "--tokenizer", tokenizer_folder).out


def test_a_stream_that_is_left_out_decides_nothing_about_the_others(
    home: Path, tokenizer_folder: Path
) -> None:
    """Its calls, which the template does not print, want all answers to be trained."""
    call = {"function": {"name": "f", "arguments": "{}"}}
    calling = {"role": "assistant", "content": "", "tool_calls": [call]}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    messages = [MESSAGES[0], calling, {"role": "tool", "content": "1"}, MESSAGES[1]]
    write_jsonl(home / "calls.jsonl", [{"messages": messages, "tools": tools}])
    write_jsonl(home / "chats.jsonl", [{"messages": MESSAGES}])
    _, text = write_recipe(tokenizer_folder, "calls.jsonl", "chats.jsonl")
    assert "# left out: records tried: 1, written: 0; quarantined: 1 tools_not_printed" in text
    assert "\ntarget_responses" not in text
    alone = mdsmix("init", "calls.jsonl", "--tokenizer", tokenizer_folder).out
    assert "\ntarget_responses: all    # calls of tools come before" in alone


def test_calls_before_a_rewritten_history_get_rows_of_their_own(home: Path, tmp_path: Path) -> None:
    called = {"role": "assistant", "content": "<think>hm</think><tool_call>{}</tool_call>"}
    write_jsonl(home / "a.jsonl", [{"messages": [MESSAGES[0], called, *MESSAGES]}])
    write_jsonl(home / "b.jsonl", [{"messages": [MESSAGES[0], THOUGHT, *MESSAGES]}])
    tokenizer = train_style(tmp_path / "forgets", "plain", FORGETS)
    _, text = write_recipe(tokenizer, "a.jsonl")
    assert "    rewritten_history: each    # the chat template rewrites earlier turns" in text
    run_ok("convert", "recipe.yaml")
    assert manifest_of("mix/a/train").totals.samples == 2
    _, text = write_recipe(tokenizer, "b.jsonl", "--replace")
    assert "    rewritten_history: last    #" in text
    assert "\ntarget_responses" not in text
