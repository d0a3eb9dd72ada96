"""What the beginning of a split says of its source: tokens with those of its images, without those that are cut off."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np

from mdsmix import sources
from mdsmix.encode.encoded import encoded
from mdsmix.kinds import survey
from mdsmix.ragged import Ragged


def looked_at(monkeypatch: Any, made: Any) -> survey.SplitSample:
    beginning = SimpleNamespace(records=[{}] * 4, folder=None, weight=10, bad=Counter(not_json=2))
    reading = SimpleNamespace(encode=lambda records, folders: made)
    monkeypatch.setattr(sources, "read_beginnings", lambda units, size: [beginning])
    (found,) = survey.look([], lambda name: reading, "auto", False)  # type: ignore[arg-type,return-value]
    return found


def test_images_count_as_their_tokens_and_what_is_cut_off_does_not(monkeypatch: Any) -> None:
    rows = Ragged.of([[1, 2, 3], [4, 5], [6]], np.int64)
    images = [[SimpleNamespace(tokens=5), SimpleNamespace(tokens=0)], [], []]
    said: dict[str, Any] = {"images": images, "rejected": {1: "empty"}}
    made = encoded({}, [rows], [0, 0, 2], 0, cut=np.array([1, 0, 0]), **said)
    found = looked_at(monkeypatch, made)
    assert found.tokens == 6 - 1 + 4
    assert found.by_record.tolist() == [9, 1]  # two rows of the first record, cut or not
    assert found.left_out == {"empty": 1, "not_json": 2}
