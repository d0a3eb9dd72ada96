"""`mdsmix init`: files -> a first recipe."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

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
    from mdsmix.table import Tree

BUDGET = re.compile(r"(?:(\d{1,9}):)?(\d[\d.,_]*\s*[kmbt]?)(?:\s*tokens?)?", re.IGNORECASE)
"""A budget such as `2B`, or as FlagEmbedding writes it, `8192:2B`: the tokens of a row, then all
tokens.
"""
MOST_SAMPLES = 4
MOST_TOKENS = 150


def init(
    tokenizer: str = option(
        ...,
        "The model's tokenizer: a folder or a hub name.",
        "NAME",
        shown=False,
    ),
    files: Texts = argument(
        "FILES...",
        "Files, folders, patterns or s3:// URLs of data, or a dataset_info.json; with --dataset-info names of its entries.",
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
        "With --mixture: the tokens that the percents are of, e.g. 2B, or 8192:2B with the tokens of a row; no more are converted.",
        "TOKENS",
    ),
    replace: bool = flag("--replace", "Allow overwriting the file of --out."),
    as_json: bool = AS_JSON,
) -> None:
    """Look at FILES, recognise their format and shape, and write a recipe that converts them.

    It shows one record of each stream as it will be trained, and says what is missing where data is
    not recognised.
    """
    from mdsmix.encode.pretrained import decoder_of
    from mdsmix.init.start import begin
    from mdsmix.mix.render import require_place, write
    from mdsmix.report.show import show

    asked = BUDGET.fullmatch(budget or "1")
    if sentence := _misuse(files, dataset_info, mixture, budget, asked):
        raise RecipeError(sentence)
    if out:
        require_place(out)
        if os.path.isfile(out) and not replace:
            raise RecipeError(
                f"{out} is there already: pass --replace to overwrite it, or name another file."
            )
    folder = Path.cwd() if not out or "://" in out else Path(out).absolute().parent
    begun = begin(
        files or (),
        tokenizer,
        Path(os.path.realpath(folder)),
        place=to,
        dataset_info=dataset_info,
        mixture=mixture,
        budget=f"{asked[2]} tokens" if budget and asked else None,
        max_seq_len=int(asked[1]) if asked and asked[1] else None,
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
    echo(*begun.said, err=True)
    if out:
        convert = f"mdsmix convert {out}" if begun.live else "mend what keeps its streams out"
        echo(f"wrote {out}; next: {convert}")


def _misuse(
    files: Texts, dataset_info: Text, mixture: Text, budget: Text, asked: re.Match[str] | None
) -> str | None:
    """A sentence on options that do not go together; None where they do."""
    if not files and not dataset_info:
        return (
            "no files are named: name files, folders or patterns of data (with --mixture its sources are among them), or "
            "--dataset-info FILE."
        )
    if mixture and dataset_info:
        return "--mixture finds its sources among files and folders, and --dataset-info names entries: give one of the two."
    if budget and not (mixture and asked):
        return f"--budget is {budget!r}; it is of a mixture file (--mixture FILE), and counts tokens, as in 2B or 8192:2B."
    return None


def _shown(begun: FirstRecipe, decoder: Decoder) -> Iterator[Item]:
    """The first record of each stream, as it is trained."""
    from mdsmix.report.show import SampleText, Title
    from mdsmix.report.shown_samples import runs_of, segments, shortened

    for draft in begun.live[:MOST_SAMPLES]:
        yield Title(f"{draft.name}, the first record")
        first = segments(draft.pieces or (), draft.eos)
        yield SampleText(runs_of(shortened(first, MOST_TOKENS), decoder))


def _json(begun: FirstRecipe, decoder: Decoder) -> Tree:
    from mdsmix.report.shown_samples import sample_json, segments

    streams = {
        draft.name: {
            "files": [file.name for file in draft.files],
            "kind": draft.guess.kind.word,
            "looked_at": draft.tried.read,
            "filtered": draft.tried.filtered,
            "quarantined": draft.tried.quarantined,
            "unread": draft.tried.unread,
            "first": draft.pieces and sample_json(segments(draft.pieces, draft.eos), decoder),
        }
        for draft in begun.drafts
    }
    return {"yaml": begun.text, "streams": streams, "left_out": list(begun.said)}
