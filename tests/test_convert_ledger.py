"""Unit records: what one says is believed without a look at the source, so it is read with care."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mdsmix.convert.ledger import FOLDER, UnitRecord, pack_tokens, read_record, write_record
from mdsmix.shards.counts import Records, Totals
from mdsmix.storage import Location, locate

RECORD = UnitRecord(
    key="a" * 32,
    backend="tokenizers 1",
    shards=[],
    totals=Totals(samples=2, tokens=9),
    records=Records(read=2, written=2),
    size=100,
    lines=2,
    leftover=pack_tokens(np.array([1, 65535, 3], np.uint16)),
)


@pytest.fixture
def folder(tmp_path: Path) -> Location:
    write_record(locate(tmp_path), RECORD)
    return locate(tmp_path)


def test_a_record_comes_back_with_its_leftover(folder: Location) -> None:
    found = read_record(folder, RECORD.key)
    assert found == RECORD
    assert found.leftover_tokens("uint16").tolist() == [1, 65535, 3]


def test_there_is_no_record_of_another_unit(folder: Location) -> None:
    assert read_record(folder, "b" * 32) is None


def test_a_record_under_another_units_name_is_not_believed(folder: Location) -> None:
    (folder / FOLDER / RECORD.key).copy_to(folder / FOLDER / ("b" * 32))
    assert read_record(folder, "b" * 32) is None


@pytest.mark.parametrize("cut", [1, 10, 33, 60])
def test_a_record_that_was_cut_off_is_none(folder: Location, cut: int) -> None:
    at = folder / FOLDER / RECORD.key
    at.write(at.read()[:-cut])
    assert read_record(folder, RECORD.key) is None


def test_a_record_whose_numbers_were_changed_is_none(folder: Location) -> None:
    at = folder / FOLDER / RECORD.key
    content = at.read().replace(b'"lines":2', b'"lines":3')
    at.write(content)
    assert read_record(folder, RECORD.key) is None


def test_a_whole_record_of_another_form_is_none(folder: Location) -> None:
    """As an older or a newer mdsmix may have written it."""
    from mdsmix.convert.ledger import _digest

    for content in (b"[]", b"3", b"{", b'{"key": "' + b"a" * 32 + b'"}'):
        (folder / FOLDER / RECORD.key).write(content, b"\n", _digest(content))
        assert read_record(folder, RECORD.key) is None


def test_the_last_record_of_a_unit_stands(folder: Location) -> None:
    write_record(folder, replace(RECORD, lines=3))
    found = read_record(folder, RECORD.key)
    assert found is not None
    assert found.lines == 3
