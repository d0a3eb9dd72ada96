"""The table adds up, and every sentence that a user should read stands under it."""

from collections.abc import Callable
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

Printed = Callable[..., list[str]]


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
def printed(capsys: pytest.CaptureFixture[str]) -> Printed:
    """Shows outcomes, and returns the lines: a heading, a rule, rows and sentences."""

    def lines(*outcomes: Outcome) -> list[str]:
        show(summary(outcomes))
        out, err = capsys.readouterr()
        assert err == ""
        return [line.strip() for line in out.splitlines() if line.strip()]

    return lines


def test_streams_are_rows_with_a_sum_and_what_was_there_is_not_counted_as_speed(
    printed: Printed,
) -> None:
    head, _, row, *said = printed(outcome("web"))
    assert head.split() == [column.heading for column in COLUMNS]
    assert row.split() == ["web", "3", "3", "0", "0", "24,000", "2", "1,000", "0.5", "48,000"]
    assert said == ["web: 4 of 4 work units converted, /mix/web/train"]
    records = Records(read=10, written=7, filtered={"empty": 2}, quarantined={"not_json": 1})
    total = printed(outcome("web"), outcome("docs", records))[4].split()
    assert total == ["all", "13", "10", "2", "1", "48,000", "4", "2,000", "1.0", "48,000"]

    _, _, row, one = printed(outcome("web", reused=3, new_tokens=6_000))
    assert row.split()[-1] == "12,000"
    assert one == "web: 1 of 4 work units converted, 3 reused, /mix/web/train"
    idle = outcome("web", units=0, new_tokens=0)
    _, _, row, one = printed(idle)
    assert (row[-10:], one) == ("up to date", "web: up to date, /mix/web/train")
    speed = printed(idle, outcome("docs"))[4].split()[-1]
    assert speed == "24,000", "tokens of the stream that was converted, in all seconds"


def test_each_sentence_is_there_with_its_counts_and_warns_where_they_are_many(
    printed: Printed,
) -> None:
    filtered = {"empty": 2, "one_token": 5}
    records = Records(read=300, written=290, filtered=filtered, quarantined={"not_json": 3})
    totals = Totals(samples=3, tokens=9, lost_tokens=1_234, specials=2)
    notes = ("a note [with] brackets",)
    *_, dropped, bad, lost, special, note = printed(outcome("web", records, totals=totals, notes=notes))  # fmt: skip
    assert dropped == "filtered: 2 empty, 5 one_token"
    assert bad == "quarantined: 3 not_json, in /mix/web/train/quarantine/"
    assert lost.startswith("in no sample: 1,234 tokens")
    assert special == "2 records hold the text of a special token; rule: escape"
    assert note == notes[0]
    for reasons, warned in (
        ({"quarantined": {"not_json": 1}}, ""),
        ({"quarantined": {"not_json": 2}}, "WARNING: 2.0% of the records are quarantined: "),
        ({"filtered": {"empty": 5}}, ""),
        ({"filtered": {"empty": 6}}, "WARNING: 6.0% of the records are filtered: "),
        ({"filtered": {"duplicate": 50}}, ""),
    ):
        lost_records = sum(sum(counts.values()) for counts in reasons.values())
        records = Records(read=100, written=100 - lost_records, **reasons)
        said = "\n".join(printed(outcome("web", records)))
        assert ("WARNING" in said, warned in said) == (bool(warned), True), reasons
    for rule in ("reject", "last", "each"):
        records = Records(read=9, quarantined={"not_prefix_stable": 9})
        said = "\n".join(printed(outcome("chat", records, encoding={"rewritten_history": rule})))
        assert ("rewritten_history: last" in said) == (rule == "reject")
        assert "rewrites the history of 9" in said
