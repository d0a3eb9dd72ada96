"""What is written of shares and budgets is read exactly, or refused in one sentence that says what to write."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from mdsmix.errors import RecipeError
from mdsmix.recipe import Recipe, load_recipe
from mdsmix.recipe.amounts import read_budget, read_share
from mdsmix.recipe.rules import budget_of, written_shares


def load(home: Path, **keys: Any) -> Recipe:
    """A recipe of three streams that others made, and one that is evaluated on."""
    stream = {"local": "mix/x"}
    tree = {
        "tokenizer": "gpt2",
        "max_seq_len": 8,
        "streams": {
            "web": stream,
            "chat": stream,
            "code": stream,
            "held": {**stream, "split": "val"},
        },
    }
    path = home / "recipe.yaml"
    path.write_text(json.dumps(tree | keys))
    return load_recipe(path)


@pytest.mark.parametrize(
    ("written", "share"),
    [
        ("30%", "3/10"),
        (0.7, "7/10"),
        ("1/3", "1/3"),
        (7, "7"),
        ("52.2 %", "261/500"),
        ("0", "0"),
        (1e-7, "1/10000000"),
    ],
)
def test_a_share_is_read_exactly(written: str | float, share: str) -> None:
    assert read_share(written) == Fraction(share)


@pytest.mark.parametrize(
    "written",
    [-1, "-3%", float("nan"), float("inf"), "half", "", "1e999", "3%%", "1/0", "0x1", True],
)
def test_what_is_no_share_is_refused(written: Any) -> None:
    with pytest.raises(ValueError, match="a number of at least 0, such as"):
        read_share(written)


@pytest.mark.parametrize(
    ("written", "amount", "unit", "stream"),
    [
        ("2B tokens", 2 * 10**9, "tokens", None),
        ("400k samples", 400_000, "samples", None),
        ("1.5T loss_tokens", 15 * 10**11, "loss_tokens", None),
        ("1 sample", 1, "samples", None),
        ("2,000,000 tokens", 2_000_000, "tokens", None),
        ("2 m TOKENS", 2_000_000, "tokens", None),
        ("2 passes of chat", 2, None, "chat"),
        ("1 pass of a.b-c", 1, None, "a.b-c"),
        ("0.5 passes of chat", "1/2", None, "chat"),
    ],
)
def test_a_budget_is_read_exactly(
    written: str, amount: Any, unit: str | None, stream: str | None
) -> None:
    found = read_budget(written)
    assert (found.amount, found.unit, found.stream) == (Fraction(amount), unit, stream)


@pytest.mark.parametrize(
    "written",
    [
        *("2B", 2_000_000, "0 tokens", "2B words", "-2B tokens", "two passes of chat"),
        *("2 passes", "nan tokens", "1e999 tokens"),
    ],
)
def test_what_is_no_budget_is_refused(written: Any) -> None:
    with pytest.raises(ValueError, match="above 0, with its unit: 2B tokens"):
        read_budget(written)


def _mix(**weights: Any) -> dict[str, Any]:
    return {
        name: weight if isinstance(weight, dict) else {"share": weight}
        for name, weight in weights.items()
    }


ALL = _mix(web=0.5, chat=0.3, code=0.2)
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"mix": _mix(web=-1)}, "mix.web.share is -1; it must be a number of at least 0"),
    ({"mix": _mix(web="x" * 900)}, "'xxx"),
    ({"mix": _mix(web=0, chat=0, code=0)}, "the shares sum to 0"),
    ({"mix": _mix(web=0.5, chat={"repeat": 2})}, "mix.chat gives repeat in a mix by share"),
    (
        {"mix": {"chat": {"repeat": 2}}, "budget": "2B tokens"},
        "mix.chat gives repeat in a mix by share",
    ),
    (
        {"mix": {"chat": {"repeat": 2}}, "temperature": 2},
        "mix.chat gives repeat in a mix by share",
    ),
    (
        {"mix": _mix(web=0.5, chat=0.5)},
        "come to 100%, and nothing is left for code: lower them, or give each stream a share; 0 leaves",
    ),
    ({"mix": _mix(held=0.5)}, "mix.held is the share of a stream of the split val"),
    (
        {"mix": _mix(web=70, chat="30%", code=0)},
        "mix.web.share is 70, more than the whole: where it is meant in percent",
    ),
    (
        {"mix": _mix(web=52.2, chat=1, code=1), "absolute": True, "budget": "2B tokens"},
        "mix.web.share is 52.2, more than the whole",
    ),
    (
        {"mix": _mix(web=0.5), "absolute": True, "budget": "2B tokens"},
        "without a share: chat, code. Give each stream one",
    ),
    ({"mix": ALL, "absolute": True}, "there is none: add budget"),
    (
        {"mix": ALL, "absolute": True, "budget": "2B tokens", "count": "samples"},
        "which is 2,000,000,000 tokens, and count is samples",
    ),
    ({"mix": ALL, "budget": "2B"}, "budget is '2B'; it must be above 0, with its unit"),
    (
        {"mix": ALL, "budget": "2 passes of wep"},
        "passes of wep, which is no stream that is trained on; did you mean web?",
    ),
    ({"mix": ALL, "budget": "2 passes of held"}, "passes of held, which is no stream"),
    ({"mix": ALL, "temperature": 2}, "every stream has a share, so it decides nothing"),
    ({"temperature": 0}, "temperature is 0; it must be a number above 0"),
    ({"mix": ALL, "max_repeat": -1}, "max_repeat is -1; it must be a number above 0"),
    (
        {"mix": ALL, "count": "words"},
        "count is 'words'; it must be tokens or loss_tokens or samples",
    ),
    (
        {"mix": ALL, "train_loader": {"dataset": {"epoch_size": 9}}},
        "epoch_size stands in a mix by shares",
    ),
    ({"max_repeat": 2}, "max_repeat speaks of shares, and the recipe has neither"),
    ({"count": "tokens", "mix": {"web": {"repeat": 2}}}, "count speaks of shares"),
    (
        {"mix": {"web": {"share": 1, "repeat": 1}}},
        "exactly one of repeat, proportion, choose and share",
    ),
]


@pytest.mark.parametrize(("keys", "words"), REFUSED)
def test_what_cannot_be_right_of_shares_is_one_sentence(
    tmp_path: Path, keys: Any, words: str
) -> None:
    with pytest.raises(RecipeError) as refusal:
        load(tmp_path, **keys)
    assert words in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert len(str(refusal.value)) < 400


def test_shares_are_those_of_the_streams_that_are_trained_on(tmp_path: Path) -> None:
    recipe = load(tmp_path, mix=_mix(web="30%", code=0.2), budget="2 passes of chat")
    assert written_shares(recipe) == {"web": Fraction(3, 10), "chat": None, "code": Fraction(1, 5)}
    assert str(budget_of(recipe)) == "2 passes of chat"
    assert recipe.is_by_share
    assert not load(tmp_path, mix={"web": {"repeat": 2}}).is_by_share
    assert load(tmp_path, temperature=2).is_by_share
