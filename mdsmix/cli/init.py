"""`mdsmix init`: files -> a first recipe."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from mdsmix.cli.options import (
    AS_JSON,
    Text,
    Texts,
    argument,
    echo,
    echo_json,
    flag,
    option,
)
from mdsmix.errors import RecipeError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mdsmix.encode.pretrained import Decoder
    from mdsmix.init.start import FirstRecipe
    from mdsmix.report.show import Item

ROWS = re.compile(r"(\d{1,9}):(.*)")
"FlagEmbedding writes a budget as `8192:2B`: the tokens of a row, then all tokens."
MOST_SAMPLES = 4
MOST_TOKENS = 150


def init(
    tokenizer: str = option(
        ...,
        "What the model is trained with: a folder or a hub name.",
        "NAME",
        shown=False,
    ),
    files: Texts = argument(
        "FILES...",
        "Files, folders, patterns or s3:// URLs of data; with --dataset-info names of its entries.",
        None,
    ),
    out: Text = option(None, "Write the recipe here.", "FILE", "-o", "--out", shown="stdout"),
    to: str = option(
        "./mix", "Where the streams are to be published: a folder or s3:// URL.", "PLACE"
    ),
    dataset_info: Text = option(
        None, "Make streams of the entries of LLaMA-Factory's dataset_info.json.", "FILE"
    ),
    mixture: Text = option(
        None,
        "Make streams of the sources of FlagEmbedding's mixture file, with its percents as shares.",
        "FILE",
    ),
    budget: Text = option(
        None,
        "With --mixture: what the percents are of, e.g. 2B, or 8192:2B with the tokens of a row; no more is converted.",
        "TOKENS",
    ),
    replace: bool = flag("--replace", "Allow overwriting the file of --out."),
    as_json: bool = AS_JSON,
) -> None:
    """Look at FILES, recognise their format and shape, and write a recipe that converts them.

    Shows a record of each stream as it will be trained, and whatever is not recognised with what is missing.
    """
    from mdsmix.encode.pretrained import decoder_of
    from mdsmix.init.start import Request, begin
    from mdsmix.mix.output import require_place, write
    from mdsmix.report.show import show

    if not files and not dataset_info:
        raise RecipeError(
            "no files are named: name files, folders or patterns of data (with --mixture its sources are among them), or "
            "--dataset-info FILE."
        )
    if mixture and dataset_info:
        raise RecipeError(
            "--mixture finds its sources among files and folders, and --dataset-info names entries: give one of the two."
        )
    if out:
        require_place(out)
        if os.path.isfile(out) and not replace:
            raise RecipeError(
                f"{out} is there already: pass --replace to overwrite it, or name another file."
            )
    folder = Path.cwd() if not out or "://" in out else Path(out).absolute().parent
    tokens, length = _budget(budget, mixture)
    begun = begin(
        Request(
            files=files or (),
            tokenizer=tokenizer,
            dataset_info=dataset_info,
            mixture=mixture,
            budget=tokens,
            max_seq_len=length,
            folder=Path(os.path.realpath(folder)),
            place=to,
        )
    )
    if out:
        write(out, begun.text)
    decoder = decoder_of(begun.tokenizer)
    if as_json:
        echo_json(_json(begun, decoder) | {"wrote": out})
        return
    if not out:
        typer.echo(begun.text, nl=False)
    show(*_shown(begun, decoder), err=not out)
    echo(*begun.not_read, *begun.left_out, *begun.unknown, err=True)
    if out:
        convert = f"mdsmix convert {out}" if begun.live else "mend what keeps its streams out"
        echo(f"wrote {out}; next: {convert}")


def _budget(written: str | None, mixture: str | None) -> tuple[str | None, int | None]:
    """The budget as a recipe writes it, and the tokens of a row if `8192:2B` names them. A number alone is tokens."""
    from mdsmix.recipe.amounts import bare_budget

    if written is None:
        return None, None
    rows = ROWS.fullmatch(written.strip())
    amount = rows[2] if rows else written.strip()
    length = int(rows[1]) if rows else None
    try:
        if not mixture:
            raise ValueError("it is the budget of a mixture file: name that by --mixture FILE")
        if bare_budget(amount).unit != "tokens":
            raise ValueError(
                "how many tokens that is only a conversion tells: give tokens, as in 2B"
            )
        if length is not None and length < 2:
            raise ValueError("a row needs 2 tokens at least to give a loss")
    except ValueError as error:
        raise RecipeError(f"--budget is {written!r}; {error}.") from None
    return amount if "token" in amount.lower() else f"{amount} tokens", length


def _shown(begun: FirstRecipe, decoder: Decoder) -> Iterator[Item]:
    """The first record of each stream, as it is trained."""
    from mdsmix.report.show import SampleText, Title
    from mdsmix.report.shown_samples import runs_of, segments, shortened

    for draft in begun.live[:MOST_SAMPLES]:
        yield Title(f"{draft.name}, the first record")
        if (pieces := draft.trial.pieces) is not None:
            yield SampleText(runs_of(shortened(segments(pieces), MOST_TOKENS), decoder))


def _json(begun: FirstRecipe, decoder: Decoder) -> dict[str, Any]:
    from mdsmix.report.shown_samples import sample_json, segments

    streams = {}
    for draft in begun.drafts:
        trial = draft.trial
        streams[draft.name] = {
            "files": [file.name for file in draft.files],
            "kind": draft.guess.kind,
            "looked_at": trial.read,
            "filtered": trial.filtered,
            "quarantined": trial.quarantined,
            "unread": trial.unread,
            "first": None if trial.pieces is None else sample_json(segments(trial.pieces), decoder),
        }
    told = {"left_out": list(begun.left_out), "unknown": list(begun.unknown)}
    return {"yaml": begun.text, "streams": streams} | told
