"""The table adds up, and every sentence that a user should read stands under it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mdsmix.convert.run import Outcome
from mdsmix.report.conversions import COLUMNS, summary
from mdsmix.report.show import show
from mdsmix.shards.counts import Records, Totals
from mdsmix.shards.index import make_index
from mdsmix.shards.manifest import Manifest, UnitShards
from tests.published import CONCAT, TOKEN_ROW, make_manifest


def outcome(name: str, records: Records | None = None, **changes: Any) -> Outcome:
    totals = changes.pop("totals", Totals(samples=3, tokens=24_000))
    made = make_manifest(CONCAT, [TOKEN_ROW] * 3, make_index([]))
    manifest: Manifest = replace(
        made,
        totals=totals,
        records=records or Records(read=3, written=3),
        parts=[UnitShards(key="k", shards=2, samples=3)],
    )
    settings = {"target": f"/mix/{name}/train", "bytes": 1_000, "units": 4, "reused": 0}
    settings |= {"new_tokens": 24_000, "seconds": 0.5}
    return Outcome(stream=name, manifest=manifest, **settings | changes)


def printed(capsys: pytest.CaptureFixture[str], *outcomes: Outcome) -> list[str]:
    show(summary(outcomes))
    out, err = capsys.readouterr()
    assert err == ""
    return [line.rstrip() for line in out.splitlines() if line.strip()]


def test_one_stream_is_one_row(capsys: pytest.CaptureFixture[str]) -> None:
    head, _, row, *said = printed(capsys, outcome("web"))
    assert head.split() == [column.heading for column in COLUMNS]
    assert row.split() == ["web", "3", "3", "0", "0", "24,000", "2", "1,000", "0.5", "48,000"]
    assert said == ["web: 4 of 4 work units converted, /mix/web/train"]


def test_several_streams_have_a_sum(capsys: pytest.CaptureFixture[str]) -> None:
    records = Records(read=10, written=7, filtered={"empty": 2}, quarantined={"not_json": 1})
    lines = printed(capsys, outcome("web"), outcome("docs", records))
    row = next(line for line in lines if line.lstrip().startswith("all"))
    assert row.split() == ["all", "13", "10", "2", "1", "48,000", "4", "2,000", "1.0", "48,000"]


def test_what_was_reused_is_told_and_not_counted_as_speed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = printed(capsys, outcome("web", reused=3, new_tokens=6_000))
    assert lines[2].split()[-1] == "12,000"
    assert lines[3] == "web: 1 of 4 work units converted, 3 reused, /mix/web/train"


def test_a_run_that_did_nothing_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    idle = outcome("web", units=0, new_tokens=0)
    lines = printed(capsys, idle)
    assert lines[2].endswith("up to date")
    assert lines[3] == "web: up to date, /mix/web/train"
    mixed = printed(capsys, idle, outcome("docs"))
    row = next(line for line in mixed if line.lstrip().startswith("all"))
    assert row.split()[-1] == "24,000", (
        "the tokens of the stream that was converted, in all seconds"
    )


def test_what_became_of_the_others_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    records = Records(
        read=300, written=290, filtered={"empty": 2, "one_token": 5}, quarantined={"not_json": 3}
    )
    totals = Totals(samples=3, tokens=9, lost_tokens=1_234, specials=2)
    *_, filtered, bad, kept, lost, special, note = printed(
        capsys, outcome("web", records, totals=totals, notes=("a note [with] brackets",))
    )  # fmt: skip
    assert filtered == "  filtered: 2 empty, 5 one_token"
    assert bad == "  quarantined: 3 not_json"
    assert kept == "  the bad records lie in /mix/web/train/quarantine/"
    assert lost.startswith("  1,234 tokens are in no sample")
    assert special == "  2 records hold the text of a special token; rule: escape"
    assert note == "  a note [with] brackets"


@pytest.mark.parametrize(("bad", "warned"), [(1, False), (2, True)])
def test_more_than_one_percent_bad_is_warned_of(
    capsys: pytest.CaptureFixture[str], bad: int, warned: bool
) -> None:
    records = Records(read=100, written=100 - bad, quarantined={"not_json": bad})
    assert ("WARNING" in "\n".join(printed(capsys, outcome("web", records)))) is warned


def test_no_digit_is_lost_on_a_narrow_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    huge = Totals(samples=1, tokens=123_456_789_012)
    lines = printed(capsys, outcome("a-stream-of-a-long-name", totals=huge, bytes=987_654_321_098))
    assert "123,456,789,012" in lines[2]
    assert "987,654,321,098" in lines[2]
    assert "a-stream-of-a-long-name" in lines[2]


@pytest.mark.parametrize("rule", ["reject", "last", "each"])
def test_a_history_that_no_rule_keeps_is_not_told_to_use_one(
    capsys: pytest.CaptureFixture[str], rule: Any
) -> None:
    made = outcome("chat", Records(read=9, quarantined={"not_prefix_stable": 9}))
    assert made.manifest
    encoding = replace(made.manifest.encoding, rewritten_history=rule)
    said = printed(capsys, replace(made, manifest=replace(made.manifest, encoding=encoding)))
    assert any("rewritten_history: last" in line for line in said) == (rule == "reject")
    assert any("rewrites the history of 9" in line for line in said)
