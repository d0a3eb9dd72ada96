"""What commands ask of a store, by operation: one listing and a few reads a stream, not some requests for each file.

The bounds hold for a stream of any size: where the streams of a test have five units, the same bound with a thousand is
looked at by `python -m benchmarks.requests`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mdsmix.mix.check import findings
from mdsmix.mix.view import view
from tests.converting import chats, documents, run_recipe, windows, write_jsonl, write_recipe
from tests.counting import counted
from tests.faults import Proxy

LINE = len(b'{"text":""}\n') + 8 * len("Document 0 of many. ")
"A document of `texts` as a line: windows of so many bytes hold one each."


def texts(*numbers: int) -> list[dict[str, Any]]:
    return [{"text": f"Document {n} of many. " * 8} for n in numbers]


@pytest.fixture
def work(
    bucket: str, tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Any:
    """Writes a recipe of these streams, in that bucket."""
    windows(monkeypatch, LINE)

    def recipe(streams: dict[str, Any], **settings: Any) -> Path:
        remote = f"s3://{bucket}/mix"
        return write_recipe(tmp_path, tokenizer_folder, remote=remote, streams=streams, **settings)

    return recipe


def small(folder: Path, count: int) -> dict[str, Any]:
    """Streams of one unit each."""
    return {f"s{n}": documents(write_jsonl(folder / f"s{n}.jsonl", texts(n))) for n in range(count)}


def test_a_check_lists_a_stream_and_reads_two_small_files(
    work: Any, tmp_path: Path, proxy: Proxy
) -> None:
    recipe = work(small(tmp_path, 3))
    run_recipe(recipe)
    with counted(proxy) as found:
        assert not findings(view([str(recipe)]))
    assert found.by_operation == {"GET": 2 * 3, "GET list": 3}, found


def test_a_check_of_versions_asks_once_more_which_one_is_current(
    work: Any, tmp_path: Path, proxy: Proxy
) -> None:
    recipe = work(small(tmp_path, 3), publish="versioned")
    run_recipe(recipe)
    with counted(proxy) as found:
        assert not findings(view([str(recipe)]))
    assert found.by_operation == {"GET": 3 * 3, "GET list": 3}, found


def test_a_check_of_finetuning_streams_reads_no_shard_whose_samples_were_judged_so(
    work: Any, tmp_path: Path, proxy: Proxy
) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    source = write_jsonl(tmp_path / "a.jsonl", [{"messages": messages}] * 3)
    recipe = work({"chat": chats(source)}, max_seq_len=64)
    run_recipe(recipe)
    for overrides, reads in ([], 0), (["target_prompts=all"], 2):
        with counted(proxy) as found:
            findings(view([str(recipe), *overrides]))
        assert found.at(".mds") == ({"GET": reads} if reads else {}), overrides
