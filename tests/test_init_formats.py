"""Files of every format that is registered, in one folder: one recipe that converts them all and may be mixed."""

from __future__ import annotations

import csv
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import feather, parquet

from mdsmix.kinds import open_recipe
from tests.converting import manifest_of, mdsmix

SAYS = [{"role": "user", "content": "Which?"}, {"role": "assistant", "content": "This."}]
PAIRS = [{"prompt": f"a {n}", "response": "b"} for n in range(4)]
TEXTS = [{"text": f"some words {n}", "score": n} for n in range(4)]


def write_saved(folder: Path, records: list[Any]) -> None:
    """As save_to_disk of `datasets` does: a stream of Arrow, and a file that says the order."""
    folder.mkdir(parents=True)
    table = pa.Table.from_pylist(records)
    with pa.OSFile(str(folder / "data-00000-of-00001.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:  # fmt: skip
        stream.write_table(table)
    said = {"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}
    (folder / "state.json").write_text(json.dumps(said))
    (folder / "dataset_info.json").write_text("{}")


def write_table(path: Path, rows: list[list[str]], delimiter: str = ",") -> None:
    with path.open("w", newline="") as file:
        csv.writer(file, delimiter=delimiter).writerows(rows)


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "data"
    (folder / "pq").mkdir(parents=True)
    for part in ("train-00000-of-00002", "train-00001-of-00002", "test-00000-of-00001"):
        parquet.write_table(pa.Table.from_pylist(TEXTS), folder / f"pq/{part}.parquet")
    feather.write_feather(pa.Table.from_pylist(PAIRS), str(folder / "pairs.arrow"))
    write_saved(folder / "saved/train", PAIRS)
    write_saved(folder / "saved/test", PAIRS)
    (folder / "saved/dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    write_table(folder / "talks.csv", [["id", "messages"], *[["1", json.dumps(SAYS)]] * 4])
    write_table(folder / "alpaca.tsv", [["instruction", "input", "output"], *[["a\nb", "", "c"]] * 4], "\t")  # fmt: skip
    said = {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}
    (folder / "shared.json").write_text(json.dumps([said] * 4, indent=1))
    (folder / "lines.txt").write_text(f"{'word ' * 40}\n" * 4)
    (folder / "book.txt").write_text("A title\n\nSome text,\nbroken.\n")
    with tarfile.open(folder / "web.tar", "w") as tar:
        for n in range(4):
            info = tarfile.TarInfo(f"{n}.txt")
            info.size = len(b"some words")
            tar.addfile(info, io.BytesIO(b"some words"))
    (folder / "docs.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in TEXTS))
    return folder


def test_one_recipe_converts_files_of_all_formats(data: Path, tokenizer_folder: Path) -> None:
    answer = mdsmix("init", "data", "--tokenizer", tokenizer_folder, "-o", "recipe.yaml")
    assert answer.code == 0, answer.err
    left = {"docs": "score", "pq": "score", "pq-test": "score", "talks": "id"}
    said = (line for line in answer.err.splitlines() if "if it is a copy" not in line)
    assert set(said) == {f"not read of {n}: {field}" for n, field in left.items()}
    converted = mdsmix("convert", "recipe.yaml", "--workers", "1")
    assert converted.code == 0, converted.err
    written = {}
    for stream in open_recipe("recipe.yaml").sourced:
        records = manifest_of(Path("mix") / stream.name / stream.split).records
        assert records.bad == 0
        assert stream.source is not None
        written[stream.name] = (*stream.source.fields, records.written)
    assert written == {
        "pq": ("text", 8),
        "pq-test": ("text", 4),
        "pairs": ("prompt", "response", 4),
        "saved": ("prompt", "response", 4),
        "saved-test": ("prompt", "response", 4),
        "talks": ("messages", 4),
        "alpaca": ("instruction", "input", "output", 4),
        "shared": ("conversations", 4),
        "lines": ("text", 4),
        "book": ("text", 1),
        "web": ("text", 4),
        "docs": ("text", 4),
    }
    assert mdsmix("check", "recipe.yaml").code == 0

    for name in ("pq/test-00000-of-00001.parquet", "pairs.arrow", "shared.json"):
        Path("dump").write_bytes((data / name).read_bytes())
        answer = mdsmix("init", "dump", "--tokenizer", tokenizer_folder)
        assert f"format: {name.rpartition('.')[2]}  " in answer.out, "by its first bytes"
