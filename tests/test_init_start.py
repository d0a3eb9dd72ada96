"""The whole of `mdsmix init`: a recipe that converts and may be mixed, and one sentence where there is none."""

from __future__ import annotations

import gzip
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from mdsmix.kinds import open_recipe
from tests.converting import Answer, manifest_of, mdsmix, write_jsonl

SAYS = [{"role": "user", "content": "Which?"}, {"role": "assistant", "content": "This one."}]


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files of several shapes, and what is none, in the current folder."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "data"
    for n in range(2):
        write_jsonl(folder / f"web/part-{n}.jsonl", [{"text": f"some words {n}", "url": "u"}] * 60)
    write_jsonl(folder / "chat/train.jsonl", [{"messages": SAYS}] * 5)
    write_jsonl(folder / "chat/test.jsonl", [{"messages": SAYS}])
    write_jsonl(
        folder / "faq.jsonl", [{"qa": {"question": "a?", "answer": "b"}}] * 10 + [{"qa": {}}]
    )
    write_jsonl(folder / "odd.jsonl", [{"html": "<p>", "score": 1}])
    (folder / "empty.jsonl").touch()
    (folder / "README.md").write_text("about")
    (folder / ".hidden.jsonl").write_text("{}")
    return folder


def init(tokenizer: Path, *arguments: object) -> Answer:
    return mdsmix("init", *arguments, "--tokenizer", tokenizer)


def test_the_recipe_converts_as_it_is_and_may_be_mixed(data: Path, tokenizer_folder: Path) -> None:
    answer = init(tokenizer_folder, "data", "-o", "recipe.yaml")
    assert answer.code == 0, answer.err
    converted = mdsmix("convert", "recipe.yaml", "--workers", "1")
    assert converted.code == 0, converted.err
    read = {}
    for stream in open_recipe("recipe.yaml").sourced:
        records = manifest_of(Path("mix") / stream.name / stream.split).records
        read[stream.name, stream.split] = (records.read, records.written)
    assert read == {
        ("web", "train"): (120, 120),
        ("chat", "train"): (5, 5),
        ("chat-test", "test"): (1, 1),
        ("faq", "train"): (11, 10),
    }
    assert mdsmix("check", "recipe.yaml").code == 0
    again = init(tokenizer_folder, ".", "-o", "other.yaml")
    assert (
        "published streams were left alone: mix/chat-test/test, mix/chat/train, mix/faq/train, mix/web/train"
        in again.err
    )
    streams = open_recipe("recipe.yaml").streams
    assert open_recipe("other.yaml").streams == streams, "what was published is no data"


def test_it_shows_a_record_as_it_is_trained_and_says_what_it_leaves(
    data: Path, tokenizer_folder: Path
) -> None:
    answer = init(tokenizer_folder, "data", "-o", "recipe.yaml")
    assert "⟨<|im_start|>⟩assistant\n⟦This one.⟨<|im_end|>⟩\n⟧" in answer.out
    assert "wrote recipe.yaml" in answer.out
    for sentence in (
        "data/empty.jsonl is empty",
        "no data by their names: data/README.md (one that is named itself is known by how it begins)",
        "not read of web: url",
        "data/odd.jsonl is of no known shape; its records have the fields html, score",
        "text: there is no field text (or raw_content, txt, content, document, body)",
    ):
        assert sentence in answer.err
    text = Path("recipe.yaml").read_text()
    assert re.search(r"# 2 files, [\d,]+ bytes; records looked at: 100, written: 100\n +# not read: url\n", text)  # fmt: skip
    assert "quarantined: 1 missing_field" in text
    assert "    layout: document    # " in text


def test_answers_that_a_field_judges_are_a_comment_that_trains_the_good_ones(
    data: Path, tokenizer_folder: Path
) -> None:
    judged = [{"messages": SAYS, "label": n > 2} for n in range(5)]
    write_jsonl(data / "kto.jsonl", [*judged, {"messages": SAYS, "label": None}])
    csv = ["prompt,completion,label", *(f"Q{n}?,A{n},{n > 2}" for n in range(5))]
    (data / "judged.csv").write_text("\n".join(csv))
    write_jsonl(data / "scored.jsonl", [record | {"label": 1} for record in judged])
    answer = init(
        tokenizer_folder,
        "data/kto.jsonl",
        "data/scored.jsonl",
        "data/judged.csv",
        "-o",
        "recipe.yaml",
    )
    for name in ("kto", "judged"):
        assert f"{name} is left out: its field label judges its answers" in answer.err
    assert list(open_recipe("recipe.yaml").streams) == ["scored"]
    text = Path("recipe.yaml").read_text()
    Path("all.yaml").write_text(
        text.replace("\n  # ", "\n  ").replace("  left out", "  # left out")
    )
    assert mdsmix("convert", "all.yaml", "--workers", "1").code == 0
    for name, left_out in (("kto", 4), ("judged", 3)):
        records = manifest_of(Path(f"mix/{name}/train")).records
        assert (records.written, records.filtered) == (2, {"where": left_out})


def test_the_end_of_a_long_record_is_shown_since_it_is_trained(
    data: Path, tokenizer_folder: Path
) -> None:
    asked = {"role": "user", "content": "Which? " * 300}
    write_jsonl(data / "long.jsonl", [{"messages": [asked, SAYS[1]]}])
    answer = init(tokenizer_folder, "data/long.jsonl", "-o", "recipe.yaml")
    assert "⟦This one.⟨<|im_end|>⟩\n⟧" in answer.out
    assert len(answer.out) < 900


def test_without_a_file_the_recipe_goes_to_stdout_and_all_else_to_stderr(
    data: Path, tokenizer_folder: Path
) -> None:
    answer = init(tokenizer_folder, "data/web/*.jsonl", "--to", "s3://bucket/mix")
    Path("from_stdout.yaml").write_text(answer.out)
    recipe = open_recipe("from_stdout.yaml")
    assert recipe.remote == "s3://bucket/mix"
    assert list(recipe.streams) == ["web"]
    assert "the first record" in answer.err
    told = json.loads(init(tokenizer_folder, "data/faq.jsonl", "--json").out)
    assert told["streams"]["faq"]["quarantined"] == {"missing_field": 1}
    assert told["streams"]["faq"]["first"][-1]["text"] == "b"


def test_a_recipe_that_is_there_stays(data: Path, tokenizer_folder: Path) -> None:
    Path("recipe.yaml").write_text("mine")
    answer = init(tokenizer_folder, "data", "-o", "recipe.yaml")
    assert answer.code == 2
    assert "recipe.yaml is there already: pass --replace" in answer.err
    assert Path("recipe.yaml").read_text() == "mine"
    assert init(tokenizer_folder, "data", "-o", "recipe.yaml", "--replace").code == 0
    assert "streams:" in Path("recipe.yaml").read_text()


def test_a_name_that_yaml_and_patterns_read_otherwise_is_found(
    tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name = "a: [x] ${y} #1*.jsonl"
    write_jsonl(tmp_path / name, [{"text": "some words"}] * 9)
    write_jsonl(tmp_path / "a: x ${y} #1_.jsonl", [{"no": "text"}])
    assert init(tokenizer_folder, name, "-o", "recipe.yaml").code == 0
    assert mdsmix("convert", "recipe.yaml", "--workers", "1").code == 0
    assert manifest_of(tmp_path / "mix/a_x_y_1/train").records.written == 9


def test_a_file_without_a_suffix_is_known_by_its_first_bytes(
    tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "dump", [{"text": "some words"}] * 9)
    assert init(tokenizer_folder, "dump", "-o", "recipe.yaml").code == 0
    assert "format: jsonl" in Path("recipe.yaml").read_text()
    assert mdsmix("convert", "recipe.yaml", "--workers", "1").code == 0


REFUSED: dict[str, tuple[str, int, str]] = {
    "": ("", 2, "no files are named"),
    "gone.jsonl": ("", 2, "gone.jsonl is no file, and no folder or pattern that holds one"),
    "empty.jsonl": ("", 2, "empty.jsonl is empty"),
    "blank.jsonl": ("\n \n", 2, "blank.jsonl holds no record."),
    "none.json": ("[]", 2, "none.json holds no record."),
    "inside.json": ('{"version": 1, "data": [{"text": "a"}]}', 2, "its records are in the list data: `jq -c '.data[]'` writes them one on a line"),
    "inside.jsonl": ('{\n "data": [\n  {"text": "a"}]}', 2, "inside.jsonl is one object, and its records are in the list data"),
    "spread.jsonl": ('{\n "messages": [\n  {"role": 1}]}\n', 2, "as `jq -c .` writes it"),
    "binary": ("\x7fELF\x00\x01", 2, "binary is of no format that mdsmix reads: its name does not tell"),
    "odd.jsonl": ('{"html": 1}\n', 2, "odd.jsonl is of no known shape; its records have the fields html."),
    "list.jsonl": ("[1]\n", 2, "list.jsonl holds no record that is an object"),
    "bad.jsonl": ("bad\n", 2, "bad.jsonl holds no record that is an object (1 not_json)."),
    "array.jsonl": ('[{"text": "a"}]\n', 2, "(other values); it begins as JSON does: name it by what it is"),
    "shards.jsonl": ("PAR1", 2, "it begins as parquet does: name it by what it is, or say so by source.format."),
    "pretty.jsonl": ('{\n "text": "a"\n}\n', 2, "in JSON Lines a record stands on one line, as `jq -c .` writes it"),
    "latin.txt": ("K\xe4se", 2, "(1 invalid_utf8); text is read as UTF-8, as `iconv -f LATIN1 -t UTF-8` writes it"),
    "pretty.jsonl.gz": (gzip.compress(b'{\n "text": "a"\n}\n').decode("latin-1"), 2, "(3 not_json)."),
    "broken.jsonl.gz": ("no gzip", 4, "broken.jsonl.gz"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_where_there_is_no_recipe_one_sentence_says_why(
    tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    content, code, said = REFUSED[name]
    monkeypatch.chdir(tmp_path)
    if name and name != "gone.jsonl":
        Path(name).write_bytes(content.encode("latin-1"))
    answer = init(tokenizer_folder, *([name] if name else []), "-o", "recipe.yaml")
    assert answer.code == code
    assert said in answer.err
    assert answer.err.count("\n") == 1
    assert not Path("recipe.yaml").exists()


def test_an_unknown_tokenizer_is_a_sentence(data: Path) -> None:
    answer = init(Path("./no_tokenizer"), "data", "-o", "recipe.yaml")
    assert answer.code == 4
    assert "the tokenizer no_tokenizer could not be loaded" in answer.err
    assert not Path("recipe.yaml").exists()


def test_in_a_bucket(
    data: Path, tokenizer_folder: Path, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mdsmix.storage import locate

    for name in ("faq.jsonl", "web/part-0.jsonl", "web/part-1.jsonl"):
        locate(f"s3://{bucket}/data/{name}").write((data / name).read_bytes())
    answer = init(tokenizer_folder, f"s3://{bucket}/data", "-o", "recipe.yaml")
    assert answer.code == 0, answer.err
    sources: dict[str, Any] = {s.name: s.source and s.source.path for s in open_recipe("recipe.yaml").sourced}  # fmt: skip
    assert sources == {
        "faq": [f"s3://{bucket}/data/faq.jsonl"],
        "web": [f"s3://{bucket}/data/web/part-*.jsonl"],
    }
    assert mdsmix("convert", "recipe.yaml", "--workers", "1").code == 0


def without(tokenizer: Path, folder: Path, *keys: str) -> Path:
    """The tokenizer without these keys in its config."""
    shutil.copytree(tokenizer, folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    left = {key: value for key, value in config.items() if key not in keys}
    (folder / "tokenizer_config.json").write_text(json.dumps(left | {"model_max_length": 64}))
    return folder


def test_a_tokenizer_without_eos_or_template_converts_too(
    data: Path, tokenizer_folder: Path, tmp_path: Path
) -> None:
    bare = without(tokenizer_folder, tmp_path / "bare", "eos_token", "chat_template")
    assert init(bare, "data", "-o", "recipe.yaml").code == 0
    text = Path("recipe.yaml").read_text()
    assert "tokenizer: ./bare\n" in text
    assert "max_seq_len: 64    # tokens of a row; the tokenizer's model_max_length" in text
    assert "add_eos: false    # the tokenizer has no EOS" in text
    assert mdsmix("convert", "recipe.yaml", "--workers", "1").code == 0


def test_a_tokenizer_that_is_named_as_data_is_said_to_be_one(tokenizer_folder: Path) -> None:
    answer = init(tokenizer_folder, tokenizer_folder)
    assert answer.code == 2
    assert f"{tokenizer_folder} is the tokenizer, and was left alone." in answer.err


def test_where_streams_are_published_nothing_is_data(data: Path, tokenizer_folder: Path) -> None:
    assert init(tokenizer_folder, "data/chat", "-o", "recipe.yaml").code == 0
    assert mdsmix("convert", "recipe.yaml", "--workers", "1").code == 0
    (tokenizers,) = Path("mix").glob("tokenizer-*")
    answer = init(tokenizer_folder, "mix")
    assert answer.code == 2
    assert "published streams were left alone: chat-test/test, chat/train." in answer.err
    assert f"no data by their names: {tokenizers}/" in answer.err
    assert "of no known shape" not in answer.err
