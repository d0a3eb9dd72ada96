"""`mdsmix init` on records with images: each way to write them becomes a stream that converts with all of its images."""

import base64
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mdsmix.kinds import open_recipe
from tests.converting import Answer, manifest_of, mdsmix, write_jsonl
from tests.formats import tar_of
from tests.pictures import drawing, record, seeing_tokenizer, write_drawings

SAYS = [{"role": "user", "content": "<image>What?"}, {"role": "assistant", "content": "It."}]
URI = "data:image/png;base64," + base64.b64encode(drawing("PNG")).decode()
PARTS = [{"type": "image_url", "image_url": {"url": URI}}, {"type": "text", "text": "What?"}]
TAGGED = "Picture 1: <img>0.jpg</img>\nWhat?"
RECORDS: dict[str, list[Any]] = {
    "llava": [record("0.jpg"), record("0.jpg", "1.png"), record()],
    "qwen": [{"conversations": [{"from": "user", "value": TAGGED}, {"from": "assistant", "value": "It."}]}],
    "pairs": [{"input": TAGGED, "output": "It."}],
    "swift": [{"messages": SAYS, "images": ["0.jpg"]}],
    "parts": [{"messages": [{"role": "user", "content": PARTS}, SAYS[1]]}],
    "named": [{"messages": SAYS, "picture": "1.png"}],
    "talk": [{"messages": [{"role": "user", "content": "Who?"}, SAYS[1]]}],
}  # fmt: skip


@pytest.fixture(scope="module")
def seeing(tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return seeing_tokenizer(tokenizer_folder, tmp_path_factory.mktemp("seeing") / "tokenizer")


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files in a folder, their images in another one beside it."""
    monkeypatch.chdir(tmp_path)
    write_drawings(tmp_path / "pictures")
    for name, records in RECORDS.items():
        write_jsonl(tmp_path / f"data/{name}.jsonl", records)
    rows = [{"question": "What?", "answer": "It.", "image": {"bytes": drawing(), "path": "gone"}}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "data/table.parquet")
    said = json.dumps({"messages": SAYS}).encode()
    members = [("a.json", said), ("a.jpg", drawing()), ("b.json", said), ("b.png", drawing(seed=1))]
    (tmp_path / "data/archive.tar").write_bytes(tar_of(members))
    return tmp_path


def init(tokenizer: Path, *arguments: object) -> Answer:
    return mdsmix("init", *arguments, "--tokenizer", tokenizer, "-o", "recipe.yaml", "--replace")


def test_records_with_images_become_streams_that_convert_with_all_of_them(
    data: Path, seeing: Path
) -> None:
    answer = init(seeing, "data")
    assert (answer.code, answer.err) == (0, "")
    converted = mdsmix("convert", "recipe.yaml")
    assert converted.code == 0, converted.err
    streams = open_recipe("recipe.yaml").sourced
    found = {stream.name: manifest_of(data / "mix" / stream.name / "train") for stream in streams}
    counts = {"llava": 3, "archive": 2, "talk": 0}
    counts |= dict.fromkeys(("qwen", "pairs", "swift", "parts", "named", "table"), 1)
    assert {name: manifest.totals.images for name, manifest in found.items()} == counts
    assert all(each.records.written == each.records.read for each in found.values())
    assert not found["talk"].encoding.images
    text = (data / "recipe.yaml").read_text()
    assert text.count("images: {root: pictures}    # where the paths were found") == 4
    assert "images: {field: picture, root: pictures}" in text
    assert "images: {field: [jpg, png]}" in text
    assert "messages: json.messages" in text
    assert "# images of these records: 3; 3 by a path, 0 of these not found" in text
    assert "# images of these records: 1; 0 by a path" in text
    assert "# processor: ./model" in text


def test_what_is_not_found_is_said_with_its_number(data: Path, seeing: Path) -> None:
    write_jsonl(data / "a.jsonl", [record("0.jpg"), record("x/lost.jpg"), record("http://h/a.jpg")])
    answer = init(seeing, "a.jsonl")
    assert "a: of 2 images looked for 1 not there, such as x/lost.jpg: write" in answer.err
    text = (data / "recipe.yaml").read_text()
    assert "3; 2 by a path, 1 of these not found; others in the records, or at http(s) URLs" in text


def test_a_tokenizer_that_knows_no_image_leaves_the_stream_out(
    data: Path, tokenizer_folder: Path, tmp_path: Path
) -> None:
    answer = init(tokenizer_folder, "data/llava.jsonl", "data/talk.jsonl")
    assert "llava is left out: its records have images, and the tokenizer knows no" in answer.err
    assert "images" not in (data / "recipe.yaml").read_text()
    words = seeing_tokenizer(tokenizer_folder, tmp_path / "undeclared", declared={})
    assert init(words, "data/llava.jsonl").code == 0
    text = (data / "recipe.yaml").read_text()
    assert "token: <|image_pad|>" in text
    assert "# the tokenizer declares no image_token; where the paths were found" in text


def test_an_entry_of_llama_factory_has_the_images_of_its_column(data: Path, seeing: Path) -> None:
    columns = {"messages": "conversations", "images": "image"}
    entries = {
        "see": {"file_name": "llava.jsonl", "formatting": "sharegpt", "columns": columns},
        "text": {"file_name": "talk.jsonl", "columns": {"prompt": "text", "images": "image"}},
    }
    (data / "data/dataset_info.json").write_text(json.dumps(entries))
    answer = init(seeing, "--dataset-info", "data/dataset_info.json")
    assert "text: images: it is text alone, and where its images stand is not said" in answer.err
    assert mdsmix("convert", "recipe.yaml").code == 0
    assert manifest_of(data / "mix/see/train").totals.images == 3
