"""An export continues where it was killed, writes only what changed, compares its counts with the
manifest, and refuses what a format cannot contain.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from fcntl import LOCK_EX, flock
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import typer.main
from pyarrow import parquet

import mdsmix
from mdsmix.cli.commands import make_app
from mdsmix.errors import Damaged, MixRefused, RecipeError, Unreachable
from mdsmix.exporting import run, stream_rows
from mdsmix.exporting.journal import JOURNAL, append_piece
from mdsmix.exporting.writer import Piece
from mdsmix.exporting.writers import WRITERS
from tests.converting import assert_refused, read_files, read_times, run_ok
from tests.converting import mdsmix as command
from tests.published import (
    CONCAT,
    LENGTH,
    PACKED,
    PACKED_ROW,
    PAIR,
    PAIR_ROW,
    TURNS,
    TURNS_ROW,
    publish,
    write_mix,
)

SHARDS = 5
ROWS = [{"tokens": list(range(10 * i, 10 * i + LENGTH))} for i in range(10)]


def publish_rows(
    folder: Path, rows: list[dict[str, Any]] = ROWS, to: str = "parquet", **settings: Any
) -> Path:
    """Publish rows of plain tokens in five shards, and return the folder of the split. For
    megatron-bridge they are packed rows of one document.
    """
    totals = {"loss_tokens": (LENGTH - 1) * len(rows)}
    card = {"totals": totals | settings.pop("totals", {}), **settings}
    columns = CONCAT
    if to == "megatron-bridge":
        columns = {name: PACKED[name] for name in ("input_ids", "starts")}
        rows = [{"input_ids": row["tokens"], "starts": [0]} for row in rows]
        card |= {"pack": True, "layout": "document"}
    return publish(folder, columns, rows, shards=SHARDS, card=card) / "train"


def export(source: Path, out: Path, to: str = "parquet", **options: Any) -> Any:
    return mdsmix.export(str(source), to=to, out=out, progress=False, **options)


def read_exported(folder: Path) -> dict[str, bytes]:
    """Return the files of an export without its journal, whose lines may be in any order."""
    return {name: data for name, data in read_files(folder).items() if name != JOURNAL}


class Killed(BaseException):
    """A kill: nothing in mdsmix catches it."""


@dataclass
class Kill:
    """Stands in for `append_piece`, and kills the export at a piece."""

    done: int
    "Pieces that are noted before."
    is_noted: bool
    "Whether the kill is after the line of the piece, and not before it."

    def __call__(self, folder: Path, piece: Piece) -> None:
        is_last = piece.number == self.done
        if self.is_noted or not is_last:
            append_piece(folder, piece)
        if is_last:
            raise Killed


@pytest.mark.parametrize("to", WRITERS)
def test_a_killed_export_continues_and_gives_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str
) -> None:
    source = publish_rows(tmp_path / "web", to=to)
    export(source, tmp_path / "whole", to)
    whole = read_exported(tmp_path / "whole")
    for done in range(SHARDS):
        for is_noted in (False, True):
            out = tmp_path / f"{done}{is_noted}"
            with monkeypatch.context() as patch:
                patch.setattr(run, "append_piece", Kill(done, is_noted))
                with pytest.raises(Killed):
                    export(source, out, to)
            # What the kill left of the next line.
            with (out / JOURNAL).open("ab") as journal:
                journal.write(b'{"number":3,"sour')
            (outcome,) = export(source, out, to).streams
            assert outcome.state == ("continued" if done or is_noted else "written")
            assert read_exported(out) == whole


NEXT = {
    "parquet": "train-00002.parquet",
    "litdata": "chunk-0-2.bin",
    "megatron": "train.bin",
    "megatron-bridge": "train-00002.idx.parquet",
}
"Format -> the file that is being written when the third of five pieces is."


@pytest.mark.parametrize("first", ["parquet", "litdata", "megatron"])
@pytest.mark.parametrize("second", ["parquet", "litdata", "megatron"])
def test_of_a_killed_export_in_another_format_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str, second: str
) -> None:
    source = publish_rows(tmp_path / "web")
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(run, "append_piece", Kill(1, is_noted=True))
        with pytest.raises(Killed):
            export(source, out, first)
    # The kill was in the middle of a file. This one nobody but the user wrote.
    with (out / f"{NEXT[first]}.unfinished").open("ab") as file:
        file.write(b"half")
    (out / "notes.unfinished").touch()
    (outcome,) = export(source, out, second).streams
    assert {*read_files(out)} == {*outcome.files, JOURNAL, "notes.unfinished"}


def test_a_killed_export_to_litdata_has_no_index_of_earlier_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """litData would read old and new chunks as one stream."""
    source = publish_rows(tmp_path / "web")
    out = tmp_path / "out"
    export(source, out, "litdata")
    changed = publish_rows(tmp_path / "changed", ROWS[::-1])
    with monkeypatch.context() as patch:
        patch.setattr(run, "append_piece", Kill(0, is_noted=False))
        with pytest.raises(Killed):
            export(changed, out, "litdata")
    assert not (out / "index.json").exists()
    export(changed, out, "litdata")
    assert (out / "index.json").exists()


@pytest.mark.parametrize("to", WRITERS)
def test_an_unchanged_export_is_not_written_again(tmp_path: Path, to: str) -> None:
    source = publish_rows(tmp_path / "web", to=to)
    (first,) = export(source, tmp_path / "out", to).streams
    before = read_times(tmp_path / "out")
    (second,) = export(source, tmp_path / "out", to).streams
    assert (first.state, second.state) == ("written", "up to date")
    assert (first.counts, first.files) == (second.counts, second.files)
    assert read_times(tmp_path / "out") == before
    # A file that was lost is written again.
    name = next(iter(first.files))
    whole = read_exported(tmp_path / "out")
    (tmp_path / "out" / name).unlink()
    (third,) = export(source, tmp_path / "out", to).streams
    assert third.state != "up to date"
    assert read_exported(tmp_path / "out") == whole


@pytest.mark.parametrize("to", WRITERS)
def test_of_a_changed_stream_nothing_old_is_left(tmp_path: Path, to: str) -> None:
    source = publish_rows(tmp_path / "web", to=to)
    export(source, tmp_path / "out", to)
    before = read_times(tmp_path / "out")
    # The first shards are the same, then there are others, and fewer.
    rows = [*ROWS[:4], {"tokens": [9] * LENGTH}]
    other = publish_rows(tmp_path / "other" / "web", rows, to=to)
    export(other, tmp_path / "out", to)
    export(other, tmp_path / "fresh", to)
    assert read_exported(tmp_path / "out") == read_exported(tmp_path / "fresh")
    assert before.keys() != read_times(tmp_path / "fresh").keys()


def test_only_the_files_of_new_shards_are_written(tmp_path: Path) -> None:
    source = publish_rows(tmp_path / "web")
    export(source, tmp_path / "out")
    before = read_times(tmp_path / "out")
    rows = [*ROWS[:4], {"tokens": [9] * LENGTH}, {"tokens": [8] * LENGTH}, *ROWS[6:]]
    (outcome,) = export(publish_rows(tmp_path / "other" / "web", rows), tmp_path / "out").streams
    assert outcome.state == "continued"
    after = read_times(tmp_path / "out")
    changed = {Path(name).name for name in before if before[name] != after[name]}
    assert changed == {"train-00002.parquet", JOURNAL}
    # If a setting changed that the rows depend on, all are written again.
    longer = publish_rows(tmp_path / "longer" / "web", rows, max_seq_len=LENGTH + 1)
    (outcome,) = export(longer, tmp_path / "out").streams
    assert outcome.state == "written"


@pytest.mark.parametrize(
    ("totals", "words"),
    [
        ({"loss_tokens": 71}, "70 trained tokens, but its manifest states 71"),
        ({"tokens": 81}, "80 tokens, but its manifest states 81"),
    ],
)
@pytest.mark.parametrize("to", WRITERS)
def test_an_export_that_differs_from_the_manifest_is_deleted(
    tmp_path: Path, to: str, totals: dict[str, int], words: str
) -> None:
    source = publish_rows(tmp_path / "web", totals=totals, to=to)
    with pytest.raises(Damaged, match=words):
        export(source, tmp_path / "out", to)
    assert read_exported(tmp_path / "out") == {}
    # It is not taken for finished.
    with pytest.raises(Damaged, match=words):
        export(source, tmp_path / "out", to)


def test_a_damaged_shard_ends_the_export_and_the_rest_is_kept(tmp_path: Path) -> None:
    source = publish_rows(tmp_path / "web")
    shard = source / "shard.00003.mds"
    content = shard.read_bytes()
    shard.write_bytes(content[:-1] + b"\xff")
    with pytest.raises(Unreachable, match=r"shard\.00003\.mds is damaged"):
        export(source, tmp_path / "out")
    shard.write_bytes(content)
    (outcome,) = export(source, tmp_path / "out").streams
    assert outcome.state == "continued"


def test_files_of_others_are_refused_and_stay(tmp_path: Path) -> None:
    source = publish_rows(tmp_path / "web")
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.parquet").write_bytes(b"mine")
    with pytest.raises(RecipeError, match=r"contains mine.parquet, which no export wrote"):
        export(source, out)
    assert read_files(out) == {"mine.parquet": b"mine"}
    for inside in (source, source / "deeper", tmp_path / "web", tmp_path):
        with pytest.raises(RecipeError, match="among the files of the published stream"):
            export(source, inside)
    # A symbolic link hides where they are.
    (tmp_path / "link").symlink_to(source)
    before = read_files(source)
    for inside in (tmp_path / "link", tmp_path / "link/deeper"):
        with pytest.raises(RecipeError, match="among the files of the published stream"):
            export(source, inside)
    assert read_files(source) == before
    answer = command("export", source, "--to", "parquet", "-o", "s3://bucket/out")
    assert_refused(answer, 2, "s3://bucket/out is not a folder of this machine")


@pytest.mark.parametrize("content", [b"", b"[]\n", b'{"format":"parq'])
def test_a_damaged_journal_is_refused_and_nothing_is_lost(tmp_path: Path, content: bytes) -> None:
    source = publish_rows(tmp_path / "web")
    out = tmp_path / "out"
    export(source, out)
    (out / JOURNAL).write_bytes(content)
    before = read_files(out)
    with pytest.raises(RecipeError, match=r"mdsmix\.export is damaged, .*: delete the folder"):
        export(source, out)
    assert read_files(out) == before


def test_what_is_deleted_of_an_earlier_export_is_named(tmp_path: Path) -> None:
    """Such as that of another split, which the user may still want."""
    out = tmp_path / "out"
    export(publish_rows(tmp_path / "web"), out)
    rows = publish(
        tmp_path / "held", CONCAT, ROWS, card={"totals": {"loss_tokens": 70}}, split="val"
    )
    answer = run_ok("export", rows / "val", "--to", "parquet", "-o", out)
    assert "earlier export wrote it: train-00000.parquet, train-00001.parquet" in answer.out
    assert {*read_exported(out)} == {"val-00000.parquet"}


def list_replacements(outcome: run.ExportOutcome) -> list[str]:
    return [note for note in outcome.notes if "were replaced" in note]


@pytest.mark.parametrize("is_killed", [False, True])
def test_an_export_that_replaces_another_stream_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_killed: bool
) -> None:
    """The files have the same names, so none is listed as deleted."""
    out = tmp_path / "out"
    chat = publish_rows(tmp_path / "chat")
    faq = publish_rows(tmp_path / "faq", ROWS[::-1])
    (first,) = export(chat, out).streams
    if is_killed:
        with monkeypatch.context() as patch:
            patch.setattr(run, "append_piece", Kill(1, is_noted=True))
            with pytest.raises(Killed):
                export(faq, out)
    (second,) = export(faq, out).streams
    (third,) = export(faq, out).streams
    (fourth,) = export(publish_rows(tmp_path / "moved" / "faq", ROWS[1:]), out).streams
    note = f"files of an export of chat/train were replaced in {out}"
    replacements = [list_replacements(outcome) for outcome in (first, second, third, fourth)]
    assert replacements == [[], [note], [], []]


def test_a_journal_without_the_name_of_its_stream_is_read(tmp_path: Path) -> None:
    source = publish_rows(tmp_path / "web")
    out = tmp_path / "out"
    export(source, out)
    header, *pieces = (out / JOURNAL).read_bytes().splitlines(keepends=True)
    tree = orjson.loads(header)
    assert tree.pop("stream") == "web/train"
    assert tree.pop("replaced") == []
    (out / JOURNAL).write_bytes(b"".join([orjson.dumps(tree), b"\n", *pieces]))
    (outcome,) = export(source, out).streams
    assert outcome.state == "up to date"
    (outcome,) = export(publish_rows(tmp_path / "code", ROWS[1:]), out).streams
    assert list_replacements(outcome) == []


@pytest.mark.parametrize(
    ("header", "piece"),
    [
        ({"names": "train-(.parquet"}, {}),
        ({"names": "a{99999999999}"}, {}),
        ({"stale": ["../mine.txt"]}, {}),
        ({}, {"files": {"mine.txt": 4}}),
        ({"names": ".*"}, {"files": {"../mine.txt": 4}}),
    ],
)
def test_a_journal_that_names_files_of_others_is_damaged(
    tmp_path: Path, header: dict[str, Any], piece: dict[str, Any]
) -> None:
    source = publish_rows(tmp_path / "web")
    out = tmp_path / "out"
    export(source, out)
    (tmp_path / "mine.txt").write_bytes(b"mine")
    lines = [orjson.loads(line) for line in (out / JOURNAL).read_bytes().splitlines()]
    lines[0] |= header
    lines[1] |= piece
    (out / JOURNAL).write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    # The counts differ from the manifest, so the files of the journal's pieces would be deleted.
    publish_rows(tmp_path / "web", totals={"loss_tokens": 5})
    before = read_files(out)
    with pytest.raises(RecipeError, match=r"mdsmix\.export is damaged, .*: delete the folder"):
        export(source, out)
    assert read_files(out) == before
    assert (tmp_path / "mine.txt").read_bytes() == b"mine"


def test_an_unchanged_export_is_compared_with_a_changed_manifest(tmp_path: Path) -> None:
    source = publish_rows(tmp_path / "web")
    export(source, tmp_path / "out")
    publish_rows(tmp_path / "web", totals={"loss_tokens": 5})
    with pytest.raises(Damaged, match="70 trained tokens, but its manifest states 5"):
        export(source, tmp_path / "out")


def test_an_export_without_a_folder_is_refused(tmp_path: Path) -> None:
    out: Any = None
    with pytest.raises(RecipeError, match=r"^out is None; it must be a path or URL\.$"):
        export(publish_rows(tmp_path / "web"), out)


def test_an_empty_list_of_streams_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"^streams is \[\]"):
        mdsmix.export([], to="parquet", out=tmp_path / "out")


def test_two_exports_do_not_write_into_one_folder(tmp_path: Path) -> None:
    source = publish_rows(tmp_path / "web")
    out = tmp_path / "out"
    out.mkdir()
    descriptor = os.open(out, os.O_RDONLY)
    try:
        flock(descriptor, LOCK_EX)
        with pytest.raises(Unreachable, match="another export is writing to"):
            export(source, out)
    finally:
        os.close(descriptor)
    assert export(source, out).streams[0].state == "written"


def test_a_batch_is_small_and_samples_are_not_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_rows, "BATCH_BYTES", 40)
    source = publish(tmp_path / "web", CONCAT, ROWS, card={"totals": {"loss_tokens": 70}})
    export(source / "train", tmp_path / "out")
    (path,) = (tmp_path / "out").glob("*.parquet")
    file = parquet.ParquetFile(path)
    assert file.metadata.num_row_groups == 4  # two or three rows of 16 bytes each
    assert file.read()["input_ids"].to_pylist() == [row["tokens"] for row in ROWS]


def test_a_recipe_exports_its_streams_with_their_weights(tmp_path: Path) -> None:
    publish_rows(tmp_path / "web")
    publish_rows(tmp_path / "code", ROWS[:5])
    recipe = write_mix(
        tmp_path, "web", "code", mix={"web": {"repeat": 2}}, train_loader={"name": "text"}
    )
    exported = export(recipe, tmp_path / "out")
    assert exported.weights == {"web": 20 / 25, "code": 5 / 25}
    assert [outcome.folder.name for outcome in exported.streams] == ["web", "code"]
    tree = exported.to_dict()
    assert [row["weight"] for row in tree["rows"]] == [0.8, 0.2]
    assert tree["total"]["trained"] == 105
    only = export(recipe, tmp_path / "out", only=["code"])
    assert only.weights == {"code": 1}
    assert [outcome.state for outcome in only.streams] == ["up to date"]
    with pytest.raises(RecipeError, match="--only names cod, but the streams are web, code"):
        export(recipe, tmp_path / "out", only=["cod"])
    answer = run_ok("export", tmp_path / "web", "--to", "parquet", "-o", tmp_path / "alone")
    assert "weight" not in answer.out


def test_streams_that_may_not_be_mixed_are_not_exported(tmp_path: Path) -> None:
    publish_rows(tmp_path / "web")
    publish(tmp_path / "bare", CONCAT, ROWS)
    with pytest.raises(MixRefused, match="has no manifest that fits its index"):
        export(tmp_path / "bare", tmp_path / "out")
    (tmp_path / "web/train/shard.00001.mds").unlink()
    with pytest.raises(MixRefused, match="nothing was exported") as refused:
        export(write_mix(tmp_path, "web", train_loader={"name": "text"}), tmp_path / "out")
    assert "shard-missing" in [finding.id for finding in refused.value.checked]
    assert not (tmp_path / "out").exists()


IDS = np.arange(3).tobytes()
PREFERENCE = dict.fromkeys(("prompt", "chosen", "rejected"), IDS)
IMAGES = {"images": "list[jpeg]", "sizes": "json", **TURNS}
IMAGES_ROW = {"images": bytes(8), "sizes": [], **TURNS_ROW}
REFUSED: dict[str, tuple[Mapping[str, str], Mapping[str, Any], Mapping[str, Any]]] = {
    "images": (IMAGES, IMAGES_ROW, {"images": {"token": "<image>", "id": 7}}),
    "preferences": (
        dict.fromkeys(PREFERENCE, "bytes"),
        PREFERENCE,
        {"kind": "preference", "loader": "pairwise_preference"},
    ),
    "pairs": (PAIR, PAIR_ROW, {"kind": "finetuning", "layout": None}),
    "encoder": (PAIR, PAIR_ROW, {"kind": "finetuning", "decoder_only_format": False}),
    "packed": (PACKED, PACKED_ROW, {"kind": "finetuning", "pack": True, "layout": None}),
    "rows": (CONCAT, ROWS[0], {}),
}
"Name of a stream -> its columns, one row, and the settings of its encoding."


@pytest.mark.parametrize(
    ("to", "stream", "words"),
    [
        *((to, "images", "has images") for to in WRITERS),
        ("parquet", "encoder", "was converted with decoder_only_format: false"),
        ("litdata", "encoder", "was converted with decoder_only_format: false"),
        ("megatron", "pairs", "has prompts and responses, but"),
        ("megatron", "packed", "has prompts and responses, but"),
        ("megatron", "preferences", "has preferences"),
        ("megatron-bridge", "preferences", "has preferences"),
        ("megatron-bridge", "pairs", "is not packed"),
        ("megatron-bridge", "rows", "is not packed"),
    ],
)
def test_what_a_format_cannot_contain_is_refused(
    tmp_path: Path, to: str, stream: str, words: str
) -> None:
    columns, row, encoding = REFUSED[stream]
    source = publish(tmp_path / stream, columns, [row], card=encoding) / "train"
    with pytest.raises(RecipeError, match=f"^--to {to}: .*{stream}/train {words}"):
        export(source, tmp_path / "out", to)
    assert not (tmp_path / "out").exists()


def test_an_unknown_format_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    source = publish_rows(tmp_path / "web")
    answer = command("export", source, "--to", "parket", "-o", tmp_path / "out")
    assert_refused(answer, 2, "--to parket", "did you mean parquet?")
    to: Any = None
    with pytest.raises(RecipeError, match="to is None; it must be the name of a format"):
        export(source, tmp_path / "out", to)
    # The help names the formats without importing them.
    commands: Any = typer.main.get_command(make_app("export"))
    (option,) = [p for p in commands.commands["export"].params if p.name == "to"]
    *first, last = WRITERS
    assert option.help == f"The format: {', '.join(first)} or {last}."


def test_megatron_gets_the_weights_of_the_recipe_in_tokens(tmp_path: Path) -> None:
    publish_rows(tmp_path / "web")
    publish_rows(tmp_path / "code", ROWS[:5])
    recipe = write_mix(
        tmp_path, "web", "code", mix={"web": {"repeat": 2}}, train_loader={"name": "text"}
    )
    exported = export(recipe, tmp_path / "out", "megatron")
    line = f"0.8 {tmp_path}/out/web/train 0.2 {tmp_path}/out/code/train"
    assert (tmp_path / "out/data-args.txt").read_text() == line + "\n"
    assert f"--data-path {line}" in [*exported.items()]
    with pytest.raises(RecipeError, match="contains white space"):
        export(recipe, tmp_path / "my out", "megatron")
    assert not (tmp_path / "my out").exists()


def test_the_weights_for_megatron_go_with_its_datasets(tmp_path: Path) -> None:
    publish_rows(tmp_path / "web")
    publish_rows(tmp_path / "code", ROWS[:5])
    publish_rows(tmp_path / "docs", ROWS[:5])
    recipe = write_mix(tmp_path, "web", "code", "docs", train_loader={"name": "text"})
    out = tmp_path / "out"
    path = out / "data-args.txt"
    export(recipe, out, "megatron", only=["web", "code"])
    # Its datasets are all there.
    assert not export(recipe, out, "parquet", only=["docs"]).deleted_args
    assert path.exists()
    exported = export(recipe, out, "parquet", only=["code"])
    assert exported.deleted_args == path
    assert f"deleted {path}, since it named datasets that were replaced" in exported.notes
    assert not path.exists()
    # A file of this name that no export wrote stays.
    path.write_text("my notes on the arguments")
    export(recipe, out, "litdata", only=["code"])
    assert path.exists()


def test_a_small_share_is_not_written_as_zero(tmp_path: Path) -> None:
    """Megatron refuses a weight of zero when training begins."""
    folder = tmp_path / "web"
    folder.mkdir()
    (folder / "train.idx").touch()
    weights = {"web": 1.25e-8}
    path = WRITERS["megatron"].finish_mix(tmp_path, {"web": folder}, weights)
    assert path is not None
    assert float(path.read_text().split()[0]) == 1.25e-8


def test_a_stream_that_is_left_out_has_no_weight_for_megatron(tmp_path: Path) -> None:
    publish_rows(tmp_path / "web")
    publish_rows(tmp_path / "code")
    mix = {"web": "100%", "code": "0%"}
    recipe = write_mix(tmp_path, "web", "code", mix=mix, train_loader={"name": "text"})
    exported = export(recipe, tmp_path / "out", "megatron")
    assert exported.data_args is not None
    assert exported.data_args.read_text() == f"1 {tmp_path}/out/web/train\n"


def test_an_export_to_megatron_that_was_killed_between_its_files_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokens are published, and their index is not."""
    source = publish_rows(tmp_path / "web")
    export(source, tmp_path / "whole", "megatron")
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        replace = Path.replace

        def die(path: Path, target: Path) -> Path:
            if target.suffix == ".idx":
                raise Killed
            return replace(path, target)

        patch.setattr(Path, "replace", die)
        with pytest.raises(Killed):
            export(source, out, "megatron")
    assert {path.name for path in out.glob("train.bin*")} == {"train.bin"}
    (outcome,) = export(source, out, "megatron").streams
    assert outcome.state == "continued"
    assert read_exported(out) == read_exported(tmp_path / "whole")
