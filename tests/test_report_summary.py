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
from mdsmix.shards.manifest import UnitShards
from tests.published import CONCAT, TOKEN_ROW, make_manifest

HUGE = Totals(samples=1, tokens=123_456_789_012)


def outcome(name: str, records: Records | None = None, **changes: Any) -> Outcome:
    made = make_manifest(CONCAT, [TOKEN_ROW] * 3, make_index([]))
    manifest = replace(
        made,
        totals=changes.pop("totals", Totals(samples=3, tokens=24_000)),
        records=records or Records(read=3, written=3),
        parts=[UnitShards(key="k", shards=2, samples=3)],
        encoding=replace(made.encoding, **changes.pop("encoding", {})),
    )
    settings = {"target": f"/mix/{name}/train", "bytes": 1_000, "units": 4, "reused": 0}
    settings |= {"new_tokens": 24_000, "seconds": 0.5}
    return Outcome(stream=name, manifest=manifest, **settings | changes)


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> Any:
    """Shows outcomes, and returns the lines: a heading, a rule, rows and sentences."""

    def lines(*outcomes: Outcome) -> list[str]:
        show(summary(outcomes))
        out, err = capsys.readouterr()
        assert err == ""
        return [line.strip() for line in out.splitlines() if line.strip()]

    return lines


def test_one_stream_is_one_row_and_several_have_a_sum(printed: Any) -> None:
    head, _, row, *said = printed(outcome("web"))
    assert head.split() == [column.heading for column in COLUMNS]
    assert row.split() == ["web", "3", "3", "0", "0", "24,000", "2", "1,000", "0.5", "48,000"]
    assert said == ["web: 4 of 4 work units converted, /mix/web/train"]
    records = Records(read=10, written=7, filtered={"empty": 2}, quarantined={"not_json": 1})
    (row,) = [line for line in printed(outcome("web"), outcome("docs", records)) if line[:3] == "all"]  # fmt: skip
    assert row.split() == ["all", "13", "10", "2", "1", "48,000", "4", "2,000", "1.0", "48,000"]


def test_what_was_there_already_is_told_and_not_counted_as_speed(printed: Any) -> None:
    _, _, row, said = printed(outcome("web", reused=3, new_tokens=6_000))
    assert row.split()[-1] == "12,000"
    assert said == "web: 1 of 4 work units converted, 3 reused, /mix/web/train"
    idle = outcome("web", units=0, new_tokens=0)
    _, _, row, said = printed(idle)
    assert (row[-10:], said) == ("up to date", "web: up to date, /mix/web/train")
    (row,) = [line for line in printed(idle, outcome("docs")) if line[:3] == "all"]
    assert row.split()[-1] == "24,000", "tokens of the stream that was converted, in all seconds"


def test_what_became_of_the_others_is_said(printed: Any) -> None:
    filtered = {"empty": 2, "one_token": 5}
    records = Records(read=300, written=290, filtered=filtered, quarantined={"not_json": 3})
    totals = Totals(samples=3, tokens=9, lost_tokens=1_234, specials=2)
    *_, dropped, bad, lost, special, note = printed(
        outcome("web", records, totals=totals, notes=("a note [with] brackets",))
    )
    assert dropped == "filtered: 2 empty, 5 one_token"
    assert bad == "quarantined: 3 not_json, in /mix/web/train/quarantine/"
    assert lost.startswith("in no sample: 1,234 tokens")
    assert special == "2 records hold the text of a special token; rule: escape"
    assert note == "a note [with] brackets"


def test_more_than_one_percent_bad_and_five_filtered_are_warned_of(printed: Any) -> None:
    for reasons, warned in (
        ({"quarantined": {"not_json": 1}}, False),
        ({"quarantined": {"not_json": 2}}, True),
        ({"filtered": {"empty": 5}}, False),
        ({"filtered": {"empty": 6}}, True),
        ({"filtered": {"duplicate": 50}}, False),
    ):
        lost = sum(sum(counts.values()) for counts in reasons.values())
        lines = printed(outcome("web", Records(read=100, written=100 - lost, **reasons)))
        assert ("WARNING" in "\n".join(lines)) is warned, reasons


def test_no_digit_is_lost_on_a_narrow_terminal(
    printed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    row = printed(outcome("a-stream-of-a-long-name", totals=HUGE, bytes=987_654_321_098))[2]
    assert {"a-stream-of-a-long-name", "123,456,789,012", "987,654,321,098"} <= set(row.split())


@pytest.mark.parametrize("rule", ["reject", "last", "each"])
def test_a_history_that_no_rule_keeps_is_not_told_to_use_one(printed: Any, rule: str) -> None:
    records = Records(read=9, quarantined={"not_prefix_stable": 9})
    said = "\n".join(printed(outcome("chat", records, encoding={"rewritten_history": rule})))
    assert ("rewritten_history: last" in said) == (rule == "reject")
    assert "rewrites the history of 9" in said
