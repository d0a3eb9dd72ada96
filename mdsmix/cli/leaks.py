"""`mdsmix leaks`: which samples of an evaluation stand in the training streams?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Optional

import typer

from mdsmix.cli.options import AsJson, decoder_option, echo_json

if TYPE_CHECKING:
    from mdsmix.mix.streams import StreamInMix


def leaks(
    targets: Annotated[
        list[str],
        typer.Argument(
            metavar="RECIPE | TRAIN.yaml | STREAM...",
            help="What is trained: a recipe (key=value overrides may follow), a training YAML, or folders and s3:// URLs of published streams.",
            show_default=False,
        ),
    ],
    evaluations: Annotated[
        Optional[list[str]],  # noqa: UP045  typer of 0.15 reads no | under Python 3.10
        typer.Option(
            "--eval",
            metavar="STREAM",
            help="A published stream of evaluation samples, of the same tokenizer; may be repeated.",
            show_default="the evaluations of the recipe or YAML",
        ),
    ] = None,
    samples: Annotated[
        int,
        typer.Option(
            "-n", "--samples", min=0, metavar="N", help="Findings whose passages are shown."
        ),
    ] = 3,
    common: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="N",
            help="Leave grams out that stand in more than N samples of a stream; 0 leaves none out.",
        ),
    ] = 10,
    tokenizer: Annotated[
        Optional[str],  # noqa: UP045
        decoder_option("the streams"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Look for every run of 13 tokens of evaluation samples in all that is trained, and show both passages.

    Exit code 0, whatever is found: it is a finding and refuses nothing.
    """
    from mdsmix.encode.decoder import find_decoder
    from mdsmix.leaks.audit import audit
    from mdsmix.report.leaks import leaks_json, leaks_shown
    from mdsmix.report.progress import watching
    from mdsmix.report.show import show

    streams, evals = _streams(targets, evaluations or [])
    with watching() as watcher:
        found = audit(streams, evals, common, watcher.begin, watcher.on_progress)
    manifest = evals[0].trusted_manifest
    decoder = find_decoder(tokenizer, manifest.tokenizer.hash if manifest else None)
    if as_json:
        echo_json(leaks_json(found, decoder, samples))
    else:
        show(*leaks_shown(found, decoder, samples))


def _streams(
    targets: list[str], evaluations: list[str]
) -> tuple[list[StreamInMix], list[StreamInMix]]:
    """The training streams and the evaluation streams, each folder once."""
    from mdsmix.errors import RecipeError
    from mdsmix.mix.resolve import mix_of_streams, resolve
    from mdsmix.mix.streams import distinct

    mix = resolve(targets)
    named = mix_of_streams(evaluations).train.streams if evaluations else ()
    given = named or mix.evaluations
    if not given:
        raise RecipeError(
            f"{mix.yaml.origin} has no evaluation, so there is nothing to look for: name published streams by --eval; a file of "
            "questions becomes one by `mdsmix convert`, under the tokenizer of the mix."
        )
    return distinct(mix.train.streams), distinct(given)
