"""Files of every format that is registered, in one folder: one recipe that converts them all and may be mixed."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from mdsmix.kinds import open_recipe
from tests.converting import manifest_of, mdsmix
from tests.formats import FORMATS, as_arrow, as_parquet, as_table, write

SAYS = [{"role": "user", "content": "Which?"}, {"role": "assistant", "content": "This."}]
TALKS: list[dict[str, Any]] = [{"id": "1", "messages": SAYS}] * 4
PAIRS = [{"prompt": f"a {n}", "response": "b"} for n in range(4)]
TEXTS = [{"text": f"some words {n}", "score": n} for n in range(4)]
CONTENTS = {
    **{f"pq/{part}-of-00002.parquet": as_parquet(TEXTS) for part in ("train-00000", "train-00001", "test-00000")},
    **{f"saved/{part}/data-00000-of-00001.arrow": as_arrow(PAIRS, pa.ipc.new_stream) for part in ("train", "test")},
    **{f"saved/{part}/state.json": b'{"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}' for part in ("train", "test")},
    "saved/train/dataset_info.json": b"{}",
    "saved/dataset_dict.json": b'{"splits": ["train", "test"]}',
    "talks.csv": as_table(TALKS, ","),
    "alpaca.tsv": as_table([{"instruction": "a\nb", "input": "", "output": "c"}] * 4, "\t"),
    "lines.txt": f"{'word ' * 40}\n".encode() * 4,
    "book.txt": b"A title\n\nSome text,\nbroken.\n",
}  # fmt: skip
"`saved` as save_to_disk of `datasets` writes it: streams of Arrow, and a file that says the order."


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, content in CONTENTS.items():
        (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / name).write_bytes(content)
    for format in FORMATS:
        write(tmp_path / "data/each" / format.replace(".", "-"), format, TEXTS)
    return tmp_path / "data"


def test_one_recipe_converts_files_of_all_formats(data: Path, tokenizer_folder: Path) -> None:
    answer = mdsmix("init", "data", "--tokenizer", tokenizer_folder, "-o", "recipe.yaml")
    assert answer.code == 0, answer.err
    converted = mdsmix("convert", "recipe.yaml", "--workers", "1")
    assert converted.code == 0, converted.err
    written = {}
    for stream in open_recipe("recipe.yaml").sourced:
        records = manifest_of(Path("mix") / stream.name / stream.split).records
        assert records.bad == 0
        assert stream.source is not None
        written[stream.name] = (*stream.source.fields, records.written)
    every = {name: written.pop(name) for name in [*written] if name not in EXPECTED}
    assert written == EXPECTED
    assert [*every.values()] == [("text", 4)] * len(FORMATS), every
    for name in ("pq/test-00000-of-00002.parquet", "each/arrow/records.arrow", "each/json/records.json"):  # fmt: skip
        Path("dump").write_bytes((data / name).read_bytes())
        answer = mdsmix("init", "dump", "--tokenizer", tokenizer_folder)
        assert f"format: {name.rpartition('.')[2]}  " in answer.out, "by its first bytes"


EXPECTED: dict[str, tuple[str | int, ...]] = {
    "pq": ("text", 8),
    "pq-test": ("text", 4),
    "saved": ("prompt", "response", 4),
    "saved-test": ("prompt", "response", 4),
    "talks": ("messages", 4),
    "alpaca": ("instruction", "input", "output", 4),
    "lines": ("text", 4),
    "book": ("text", 1),
}
"Stream -> the keys of its fields, and its records."
