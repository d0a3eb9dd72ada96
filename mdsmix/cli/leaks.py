"""`mdsmix leaks`: which samples of an evaluation are in the training streams?"""

from __future__ import annotations

from typing import Annotated

import typer

from mdsmix.cli.completion import complete_published
from mdsmix.cli.json_document import echo_json
from mdsmix.cli.options import (
    MIX_HELP,
    AsJson,
    DecodeWith,
    LogFile,
)
from mdsmix.errors import RecipeError


def leaks(
    targets: Annotated[
        list[str],
        typer.Argument(
            metavar="RECIPE | TRAIN.yaml | STREAM...",
            help=f"The training data: {MIX_HELP}",
            show_default=False,
        ),
    ],
    evaluations: Annotated[
        list[str] | None,
        typer.Option(
            "--eval",
            metavar="STREAM",
            help="A published stream of evaluation samples, of the same tokenizer; may be "
            "repeated.",
            show_default="the evaluations of the recipe or YAML",
            autocompletion=complete_published,
        ),
    ] = None,
    samples: Annotated[
        int,
        typer.Option(
            "-n", "--samples", metavar="N", min=0, help="Findings whose passages are shown."
        ),
    ] = 3,
    common: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=0,
            help="Ignore runs of 13 tokens that occur in more than N samples of a stream; 0 "
            "ignores none.",
        ),
    ] = 10,
    tokenizer: DecodeWith = None,
    as_json: AsJson = False,
    log_file: LogFile = None,
) -> None:
    """Search all training streams for every run of 13 tokens of the evaluation samples, and show
    the passages of both.

    The exit code is 0 even if leaks are found.
    """
    from mdsmix.leaks.audit import find_leaks
    from mdsmix.mix.streams.mix import drop_repeated_folders
    from mdsmix.mix.streams.resolve import make_stream_mix, resolve_mix
    from mdsmix.report.leaked_samples import leaks_to_json, show_leaks
    from mdsmix.report.progress import watching
    from mdsmix.report.show import show
    from mdsmix.tokenizer.decoder import find_decoder

    mix = resolve_mix(targets)
    for loader in mix.loaders:
        loader.require_opened()
    loaders = [make_stream_mix(evaluations).train] if evaluations else mix.evals
    eval_streams = [stream for loader in loaders for stream in loader.streams]
    if not eval_streams:
        raise RecipeError(
            f"{mix.yaml.origin} has no evaluation, so there is nothing to search for: name "
            "published evaluation streams by --eval (`mdsmix convert` makes such a stream from a "
            "file of questions, if its recipe has the tokenizer of the mix)."
        )
    evals = drop_repeated_folders(eval_streams)
    with watching() as watcher:
        audit = find_leaks(drop_repeated_folders(mix.train.streams), evals, common, watcher)
    manifest = evals[0].trusted_manifest
    decoder = find_decoder(tokenizer, manifest.tokenizer.hash if manifest else None)
    if as_json:
        echo_json(leaks_to_json(audit, decoder, samples))
    else:
        show(*show_leaks(audit, decoder, samples))
