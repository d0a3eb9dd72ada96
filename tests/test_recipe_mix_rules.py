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
    streams = {name: {"local": "mix/x"} for name in ("web", "chat", "code")}
    streams["held"] = {"local": "mix/x", "split": "val"}
    tree = {"tokenizer": "gpt2", "max_seq_len": 8, "streams": streams}
    path = home / "recipe.yaml"
    path.write_text(json.dumps(tree | keys))
    return load_recipe(path)


SHARES = {"30%": "3/10", 0.7: "7/10", "1/3": "1/3", 7: "7", "52.2 %": "261/500", "0": "0", 1e-7: "1/10000000"}  # fmt: skip
NO_SHARES = (-1, "-3%", float("nan"), float("inf"), "half", "", "1e999", "3%%", "1/0", "0x1", True)
BUDGETS: dict[str, tuple[Any, str | None, str | None]] = {
    "2B tokens": (2 * 10**9, "tokens", None),
    "400k samples": (400_000, "samples", None),
    "1.5T loss_tokens": (15 * 10**11, "loss_tokens", None),
    "1 sample": (1, "samples", None),
    "2,000,000 tokens": (2_000_000, "tokens", None),
    "2 m TOKENS": (2_000_000, "tokens", None),
    "2 passes of chat": (2, None, "chat"),
    "1 pass of a.b-c": (1, None, "a.b-c"),
    "0.5 passes of chat": ("1/2", None, "chat"),
}
NO_BUDGETS = (
    *("2B", 2_000_000, "0 tokens", "2B words", "-2B tokens", "two passes of chat"),
    *("2 passes", "nan tokens", "1e999 tokens"),
)


def test_shares_and_budgets_are_read_exactly() -> None:
    for share, exact in SHARES.items():
        assert read_share(share) == Fraction(exact), share
    for written, (amount, unit, stream) in BUDGETS.items():
        found = read_budget(written)
        assert (found.amount, found.unit, found.stream) == (Fraction(amount), unit, stream), written


def test_what_is_neither_is_refused() -> None:
    for wrong in NO_SHARES:
        with pytest.raises(ValueError, match="a number of at least 0, such as"):
            read_share(wrong)
    for other in NO_BUDGETS:
        with pytest.raises(ValueError, match="above 0, with its unit: 2B tokens"):
            read_budget(other)


def _mix(**weights: Any) -> dict[str, Any]:
    shares = {name: w if isinstance(w, dict) else {"share": w} for name, w in weights.items()}
    return {"mix": shares}


ALL = _mix(web=0.5, chat=0.3, code=0.2)
REPEATED = _mix(chat={"repeat": 2})
WHOLE = {"absolute": True, "budget": "2B tokens"}
EPOCH = {"train_loader": {"dataset": {"epoch_size": 9}}}
REFUSED: list[tuple[dict[str, Any], str]] = [
    (_mix(web=-1), "mix.web.share is -1; it must be a number of at least 0"),
    (_mix(web="x" * 900), "'xxx"),
    (_mix(web=0, chat=0, code=0), "the shares sum to 0"),
    (_mix(web=0.5, chat={"repeat": 2}), "mix.chat gives repeat in a mix by share"),
    (REPEATED | {"budget": "2B tokens"}, "mix.chat gives repeat in a mix by share"),
    (REPEATED | {"temperature": 2}, "mix.chat gives repeat in a mix by share"),
    (_mix(web=0.5, chat=0.5), "come to 100%, and nothing is left for code: lower them, or"),
    (_mix(held=0.5), "mix.held is the share of a stream of the split val"),
    (_mix(web=70, chat="30%", code=0), "mix.web.share is 70, more than the whole: where it is"),
    (_mix(web=52.2, chat=1, code=1) | WHOLE, "mix.web.share is 52.2, more than the whole"),
    (_mix(web=0.5) | WHOLE, "without a share: chat, code. Give each stream one"),
    (ALL | {"absolute": True}, "there is none: add budget"),
    (ALL | WHOLE | {"count": "samples"}, "which is 2,000,000,000 tokens, and count is samples"),
    (ALL | {"budget": "2B"}, "budget is '2B'; it must be above 0, with its unit"),
    (ALL | {"budget": "2 passes of wep"}, "passes of wep, which is no stream that is trained on; did you mean web?"),
    (ALL | {"budget": "2 passes of held"}, "passes of held, which is no stream"),
    (ALL | {"temperature": 2}, "every stream has a share, so it decides nothing"),
    ({"temperature": 0}, "temperature is 0; it must be a number above 0"),
    (ALL | {"count": "words"}, "count is 'words'; it must be tokens or loss_tokens or samples"),
    (ALL | EPOCH, "epoch_size stands in a mix by shares"),
    ({"max_repeat": 2}, "max_repeat speaks of shares, and the recipe has neither"),
    (REPEATED | {"count": "tokens"}, "count speaks of shares"),
    (_mix(web={"share": 1, "repeat": 1}), "exactly one of repeat, proportion, choose and share"),
]  # fmt: skip


def test_what_cannot_be_right_of_shares_is_one_sentence(tmp_path: Path) -> None:
    for keys, words in REFUSED:
        with pytest.raises(RecipeError) as refusal:
            load(tmp_path, **keys)
        assert words in str(refusal.value)
        assert "\n" not in str(refusal.value)
        assert len(str(refusal.value)) < 400


def test_shares_are_those_of_the_streams_that_are_trained_on(tmp_path: Path) -> None:
    recipe = load(tmp_path, **_mix(web="30%", code=0.2), budget="2 passes of chat")
    assert written_shares(recipe) == {"web": Fraction(3, 10), "chat": None, "code": Fraction(1, 5)}
    assert str(budget_of(recipe)) == "2 passes of chat"
    for keys, is_by_share in (({}, True), (REPEATED, False), ({"temperature": 2}, True)):
        assert load(tmp_path, **(keys or ALL)).is_by_share is is_by_share
