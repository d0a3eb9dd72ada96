"""What is printed: tables, cards, samples, the summary of a conversion and its progress; every
figure is there and adds up.
"""

from __future__ import annotations

import io
import os
import sys
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from rich.progress import Progress, TextColumn

from mdsmix.conversion.run import Outcome
from mdsmix.kinds import stored_pieces
from mdsmix.report.conversions import make_conversion_table
from mdsmix.report.inspection import list_card_rows, list_length_rows
from mdsmix.report.progress import Bar, PlainLines, watching
from mdsmix.report.show import (
    TERMINAL_VARIABLES,
    Heading,
    Item,
    NamedValues,
    SampleText,
    Title,
    show,
)
from mdsmix.report.shown_samples import Segment, make_segments, shorten, split_sample_into_runs
from mdsmix.shards.counts import Records, Totals, count_by_length
from mdsmix.shards.index import make_index
from mdsmix.shards.manifest import UnitShards
from mdsmix.shards.published import open_stream_in
from mdsmix.shards.side_files import SourceEntry
from mdsmix.storage import locate
from mdsmix.table import Column, Table, Worded, table_to_json
from mdsmix.tokenizer.decoder import Decoder
from tests.published import CONCAT, TOKEN_ROW, make_manifest, publish

SHARE = Column("share", "share", key="share_of_tokens")
TABLE = Table(
    columns=(Column("stream", "text"), Column("tokens"), SHARE, Column("seconds", "seconds")),
    rows=[("web[a]", 123_456_789_012, 0.25, 1.26), ("chat", None, 0.75, Worded("up to date", 0.0))],
    total=("all", 5, 1.0, 2.0),
    notes=["  a note of several words"],
)


def printed(item: Any, width: int, is_terminal: bool = True) -> list[str]:
    out = io.StringIO()
    terminal = Console(file=out, width=width, force_terminal=is_terminal, color_system=None)
    show(item, console=terminal)
    return [line.rstrip() for line in out.getvalue().splitlines() if line.strip()]


def test_a_pipe_gets_the_lines_that_rich_prints(
    capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in TERMINAL_VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    wide = Table(
        columns=(Column("流", "text"), Column("size", "size")),
        rows=[("语料库", 1_300_000), ("[bold]x\x1b[0m", 5)],
        notes=["  a note that :smile: no terminal folds " * 9],
    )
    items: list[Item] = [
        TABLE,
        wide,
        Heading("error mask-missing [web]", "bold red"),
        NamedValues([("name", "a/" * 90), ("日本", "two\nlines")]),
        Title("a title"),
        SampleText([("text [x]\n\n" * 30, "text"), ("<eos>", "control")]),
        "",
        "  a sentence " * 30,
    ]
    expected = io.StringIO()
    show(*items, console=Console(file=expected, highlight=False))
    for to_stderr in (False, True):
        show(*items, err=to_stderr)
        out, err = capsys.readouterr()
        assert (err if to_stderr else out) == expected.getvalue()


def test_programs_get_raw_values_and_people_get_them_spelled() -> None:
    tree = table_to_json(TABLE)
    keys = ("stream", "tokens", "share_of_tokens", "seconds")
    assert [tuple(row[key] for key in keys) for row in tree["rows"]] == [
        ("web[a]", 123_456_789_012, 0.25, 1.26),
        ("chat", None, 0.75, 0.0),
    ]
    assert (tree["total"]["tokens"], tree["notes"]) == (5, TABLE.notes)
    head, _, first, second, *_, total, note = printed(TABLE, 100)
    assert [" ".join(line.split()) for line in (head, first, second, total)] == [
        "stream tokens share seconds",
        "web[a] 123,456,789,012 25.0% 1.3",
        "chat ? 75.0% up to date",
        "all 5 100.0% 2.0",
    ]
    assert note == TABLE.notes[0]
    assert first.strip() in map(str.strip, printed(TABLE, 20, is_terminal=False)), "whole lines"


def test_a_narrow_terminal_folds_columns_and_sentences_and_never_a_number() -> None:
    for width in (20, 36, 80):
        lines = printed(TABLE, width)
        for cell in ("123,456,789,012", "25.0%", "1.3", "100.0%"):
            (holding,) = [line.split() for line in lines if cell in line.split()]
            assert holding[0] in ("web[a]", "all"), "each piece begins with the row's name"
        assert width == 20 or max(map(len, lines)) <= width, "a single column may go over the edge"
    assert printed(TABLE, 20)[-2:] == ["  a note of several", "  words"]
    value = "a/path/that/is/longer/than/the/terminal 123,456,789 and words [bold] :smile: \x1b[31m"
    pairs = [("what", value), ("more", "1")]
    assert printed(NamedValues(pairs), 34) == [
        "  what  a/path/that/is/longer/than/the/terminal",
        "        123,456,789 and words",
        "        [bold] :smile: \\x1b[31m",
        "  more  1",
    ]
    assert len(printed(NamedValues(pairs), 34, is_terminal=False)) == 2


def published(folder: Path, **how: object) -> Any:
    return open_stream_in(locate(publish(folder, CONCAT, [TOKEN_ROW] * 3, **how) / "train"))


def test_the_card_tells_the_manifest_its_lack_and_a_broken_publication(tmp_path: Path) -> None:
    records = Records(read=9, written=3, filtered={"empty": 4}, quarantined={"not_json": 2})
    stream = published(tmp_path / "web", card={"records": records})
    many = [SourceEntry(path=f"{n}.jsonl", size=1000, hash="") for n in range(7)]
    expected = {
        "stream": str(tmp_path / "web/train"),
        "tokens": "24",
        "records": "9 read = 3 written + 4 filtered + 2 quarantined",
        "filtered": "empty: 4",
        "quarantined": "not_json: 2",
        "sources": "7 files: 0.jsonl, 1.jsonl, 2.jsonl, 3.jsonl, 4.jsonl and 2 more",
        "columns": "tokens: ndarray:uint16:8",
        "index": stream.index.hash,
    }
    card = dict(list_card_rows(replace(stream, manifest=replace(stream.manifest, sources=many))))
    assert card | expected == card
    broken = dict(list_card_rows(published(tmp_path / "broken", card={"index_hash": "0" * 32})))
    assert "interrupted, run convert again" in broken["index"]
    bare = dict(list_card_rows(published(tmp_path / "bare")))
    assert "all figures are the index's" in bare["manifest"]


@settings(max_examples=25)
@given(st.lists(st.integers(1, 70_000), min_size=1, max_size=60))
def test_each_row_of_lengths_counts_the_samples_within_its_bounds(lengths: list[int]) -> None:
    totals = Totals(longest=max(lengths), lengths=count_by_length(np.array(lengths, np.int64)))
    rows, end = list(list_length_rows(totals)), 0
    for bounds, count, share in rows:
        # A row for one length has it alone: `2,048`.
        limits = [int(bound.replace(",", "")) for bound in bounds.split("-")]
        low, high = limits[0], limits[-1]
        assert len(limits) == len({low, high})
        assert count == sum(low <= length <= high for length in lengths) > 0
        assert share == count / len(lengths)
        assert end < low <= high
        end = high
    assert (end, sum(row[1] for row in rows)) == (max(lengths), len(lengths))


TURNS = {"turns": [{"input_ids": [1, 2], "labels": [3]}, {"input_ids": [4], "labels": [5, 6]}]}


def joined(parts: list[Segment], decoder: Decoder | None) -> str:
    return "".join(text for text, _ in split_sample_into_runs(parts, decoder))


def test_trained_tokens_are_bracketed_and_control_tokens_apart() -> None:
    for sample, prompts, responses, text in (
        ({"tokens": np.array([7, 8, 9], "u2")}, "none", "last", "7 ⟦8 9 ⟧"),
        (TURNS, "none", "last", "1 2 3 4 ⟦5 6 ⟧"),
        (TURNS, "all", "last", "1 ⟦2 ⟧3 ⟦4 5 6 ⟧"),
        (TURNS, "length>=2", "all", "1 ⟦2 3 ⟧4 ⟦5 6 ⟧"),
    ):
        assert joined(make_segments(stored_pieces(sample, prompts, responses)), None) == text
    # Neighbours are decoded together: a character may be several tokens, and many models drop the
    # space in front.
    model = SimpleNamespace(decode=lambda ids, **_: " ".join(map(str, ids)), id_to_token=str)
    parts = [Segment([9, 9, 1], False), Segment([2, 9], True, before=1)]
    assert joined(parts, Decoder(model, frozenset())) == "9 9 1⟦ 2 9⟧"
    assert joined(parts, Decoder(model, frozenset({9}))) == "⟨9⟩⟨ 9⟩ 1⟦ 2⟨ 9⟩⟧"


def test_a_long_sample_keeps_its_ends() -> None:
    pieces = [([*range(3)], False), ([*range(3, 8)], True), ([8, 9], False)]
    for limit in (2, 4, 8, 10, 99):
        segments = shorten(make_segments(pieces), limit)
        tokens = [token for part in segments for token in part.ids]
        ends = [*range(limit // 2), *range(10 - limit // 2, 10)]
        assert tokens == ([*range(10)] if limit >= 10 else ends)
        assert sum(part.gap for part in segments) == max(0, 10 - limit)
        trained = [token for part in segments if part.is_trained for token in part.ids]
        assert trained == [token for token in tokens if 3 <= token < 8]


def outcome(name: str, records: Records | None = None, **changes: Any) -> Outcome:
    totals = changes.pop("totals", {"samples": 3, "tokens": 24_000})
    card = {"totals": totals, "records": records} | changes.pop("encoding", {})
    manifest = make_manifest(CONCAT, [TOKEN_ROW] * 3, make_index([]), **card)
    manifest = replace(manifest, parts=[UnitShards(key="k", shards=2, samples=3)])
    fields = {"target": f"/mix/{name}/train", "bytes": 1_000, "units": 4, "reused": 0}
    fields |= {"new_tokens": 24_000, "seconds": 0.5}
    return Outcome(stream=name, manifest=manifest, **fields | changes)


def summed(*outcomes: Outcome) -> list[str]:
    return [
        line.strip() for line in printed(make_conversion_table(outcomes), 200, is_terminal=False)
    ]


def test_streams_are_rows_with_a_sum_and_what_was_there_is_not_counted_as_speed() -> None:
    _, _, row, *said = summed(outcome("web"))
    assert " ".join(row.split()) == "web 3 3 0 0 24,000 2 1,000 0.5 48,000"
    assert said == ["web: 4 of 4 work units converted, /mix/web/train"]
    records = Records(read=10, written=7, filtered={"empty": 2}, quarantined={"not_json": 1})
    total = summed(outcome("web"), outcome("docs", records))[4]
    assert " ".join(total.split()) == "all 13 10 2 1 48,000 4 2,000 1.0 48,000"
    _, _, row, one = summed(outcome("web", reused=3, new_tokens=6_000))
    assert row.split()[-1] == "12,000"
    assert one == "web: 1 of 4 work units converted, 3 reused, /mix/web/train"
    idle = summed(outcome("web", units=0, new_tokens=0), outcome("docs"))
    assert idle[2].endswith("up to date")
    assert idle[4].split()[-1] == "24,000", "tokens of what was converted, in all seconds"


def test_each_sentence_is_there_with_its_counts_and_warns_where_they_are_many() -> None:
    filtered = {"empty": 2, "one_token": 5}
    records = Records(read=300, written=290, filtered=filtered, quarantined={"not_json": 3})
    more = {"totals": {"lost_tokens": 1_234, "specials": 2}, "notes": ("a note [with] brackets",)}
    *_, dropped, bad, lost, special, note = summed(outcome("web", records, **more))
    assert dropped == "filtered: 2 empty, 5 one_token"
    assert bad == "quarantined: 3 not_json, in /mix/web/train/quarantine/"
    assert lost == "1,234 tokens dropped (last partial row)"
    assert (
        special == "2 records contain the text of a special token; special_tokens_in_text: escape"
    )
    assert note == "a note [with] brackets"
    more["totals"]["specials"] = 1
    assert "1 record contains the text of a special token; special_tokens_in_text: escape" in (
        summed(outcome("web", records, **more))
    )
    more["totals"]["specials"] = 151  # of 300 records
    assert "WARNING: 151 records contain the text of a special token" in " ".join(
        summed(outcome("web", records, **more))
    )
    for kind, reason, count, warned in (
        ("quarantined", "not_json", 1, ""),
        ("quarantined", "not_json", 2, "WARNING: 2.0% of the records are quarantined: "),
        ("filtered", "empty", 6, "WARNING: 6.0% of the records are filtered: "),
        ("filtered", "duplicate", 50, ""),
    ):
        records = Records(read=100, written=100 - count, **{kind: {reason: count}})
        text = "\n".join(summed(outcome("web", records)))
        assert ("WARNING" in text, warned in text) == (bool(warned), True), (reason, count)
    for rule in ("reject", "last"):
        records = Records(read=9, quarantined={"not_prefix_stable": 9})
        text = "\n".join(summed(outcome("chat", records, encoding={"rewritten_history": rule})))
        assert ("rewritten_history: last" in text) == (rule == "reject")


def test_a_reader_that_is_gone_ends_nothing(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    gone = os.fdopen(writing, "w")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", gone)
        with watching() as watcher:
            watcher.say("a line")
            watcher.say("another one")
    with pytest.raises(BrokenPipeError):
        gone.close()
    with watching() as watcher:
        watcher.say("web: a [sentence]")
    with watching(False) as watcher:
        watcher.on_step("no news")
        watcher.say("a warning")
    assert capsys.readouterr().err == "web: a [sentence]\na warning\n"
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with watching() as shown, watching(False) as silent:
        assert (type(shown), type(silent)) == (Bar, PlainLines)


def test_a_log_gets_a_line_each_half_minute(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("mdsmix.report.progress.time.monotonic", lambda: now[0])
    alone, several = PlainLines(), PlainLines()
    several.expect({"web": 600, "docs": 300, "known": 0, "chat": 100})
    for lines, stream, size, steps in (
        (alone, "web", 100_000_000, [(12.0, 10_000_000)] * 8),
        (several, "web", 1000, [(60, 3), (60, 597)]),
        (several, "docs", 1000, [(60, 300)]),
    ):
        lines.begin(stream, size)
        for seconds, done in steps:
            now[0] += seconds
            lines.on_progress(done, 6_000_000)
    out, err = capsys.readouterr()
    assert out == ""
    # Each line begins with the date and the time since the command began.
    parts = [line.split("  ") for line in err.splitlines()]
    assert all(datetime.fromisoformat(date).tzinfo for date, _, _ in parts)
    assert [elapsed for _, elapsed, _ in parts][:2] == ["0:00:36", "0:01:12"]
    sentences = [sentence for _, _, sentence in parts]
    first = [f"web: {n}%, 0.8 MB/s, 0.50 M tokens/s, about 1 min left" for n in (30, 60)]
    assert sentences[:2] == first
    beginnings = [sentence.partition("%, ")[0] for sentence in sentences[2:]]
    assert beginnings == [f"4 streams, now {done}" for done in ("web: 0", "web: 60", "docs: 90")]


def test_a_bar_for_all_streams_with_the_name_of_the_present_one_and_a_rate() -> None:
    out = io.StringIO()
    columns = (TextColumn("{task.description} {task.completed} {task.fields[rate]}"),)
    with Progress(*columns, console=Console(file=out, width=120)) as shown:
        bar = Bar(shown)
        bar.expect({"web": 60, "docs": 50})
        for stream, size, *steps in (("web", 100, 60), ("docs", 50, 20, 5)):
            bar.begin(stream, size)
            for done in steps:
                bar.on_progress(done, 10)
        bar.say("docs: a [sentence]")
        (task,) = shown.tasks
        assert (task.description, task.completed, task.total) == ("2 streams, now docs", 85, 110)
        bar.begin("alone", 7)  # was not expected
        bar.on_progress(7, 10)
        assert (task.description, task.completed, task.total) == ("alone", 7, 7)
    assert "docs: a [sentence]" in out.getvalue()
    assert "M tokens/s" in out.getvalue()
