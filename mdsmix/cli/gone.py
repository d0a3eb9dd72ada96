"""Options of earlier commits. Each is refused with one sentence that says why it went and what to use."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand

from mdsmix.errors import RecipeError

GONE: dict[str, str] = {
    "bench --bare": "a bare StreamingDataset makes no batch, so no setting was chosen by it. `python -m benchmarks.loading` in a clone "
    "compares the two.",
    "check --at": "what a resume on other data repeats is counted no more. `check --lock` says what differs; publish: versioned keeps "
    "what the run was planned with.",
    "check --eval": "an estimate refused nothing; mdsmix leaks MIX --eval STREAM finds the shared passages exactly",
    "render-yaml --tuned": "`mdsmix bench -o FILE` writes key=value lines: mdsmix render-yaml RECIPE $(cat FILE) renders them.",
    "plan --limit": "a survey reads the beginnings of 32 parts of a source, and all of one below 2 MiB; leave it out",
}
"`command --option` -> what follows `is gone: `. Give the reason, then what to use in its place."


class Command(TyperCommand):
    """A command that knows which of its options are gone."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        for word in args:
            option = f"{self.name} {word.partition('=')[0]}"
            if option in GONE:
                raise RecipeError(f"mdsmix {option} is gone: {GONE[option]}")
        return super().parse_args(ctx, args)
