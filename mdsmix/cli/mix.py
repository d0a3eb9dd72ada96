"""`mdsmix mix`: published streams -> one published stream, drawn by weight and shuffled."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from mdsmix.cli.options import AsJson, Estimated, Overrides, Quiet, RecipePath, echo_json


def mix(
    recipe: RecipePath,
    out: Annotated[
        str,
        typer.Option(
            "-o",
            "--out",
            metavar="STREAM",
            help="Publish here, as STREAM/train/: a folder or s3:// URL.",
            show_default=False,
        ),
    ],
    overrides: Overrides = None,
    seed: Annotated[
        int,
        typer.Option(min=0, metavar="N", help="Decides which samples are drawn, and their order."),
    ] = 0,
    replace: Annotated[
        bool,
        typer.Option(
            "--replace",
            help="Allow replacing another stream, or another draw, that lies at STREAM.",
        ),
    ] = False,
    tmp: Annotated[
        Optional[Path],  # noqa: UP045  typer of 0.15 reads no | under Python 3.10
        typer.Option(
            metavar="FOLDER",
            help="Where all drawn samples lie meanwhile.",
            show_default="the cache folder",
        ),
    ] = None,
    estimate: Estimated = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Draw from the train streams of RECIPE by weight, and publish one stream of it, shuffled across all of them.

    Samples are copied byte for byte. The same streams, weights and seed give the same stream.
    """
    from mdsmix.errors import MixRefused
    from mdsmix.kinds import open_recipe
    from mdsmix.mix.check import is_refused, verdict
    from mdsmix.mix.offline.existing import refuse_sources
    from mdsmix.mix.offline.mix_plan import findings_on_streams, make_plan
    from mdsmix.mix.offline.mix_streams import mix_offline
    from mdsmix.mix.resolve import mix_of_recipe, training
    from mdsmix.report.findings import print_briefly
    from mdsmix.report.mix_summary import mixture, mixture_json
    from mdsmix.report.progress import watching
    from mdsmix.report.show import show
    from mdsmix.storage import locate

    loaded = open_recipe(recipe, overrides or ())
    streams = mix_of_recipe(training(loaded, recipe), recipe, estimate)
    refuse_sources(loaded, streams.train.streams, locate(out))
    found = findings_on_streams(streams)
    print_briefly(found, [str(recipe), *(overrides or ())])
    if is_refused(found):
        raise MixRefused(f"{verdict(streams, found)}; nothing was mixed.")
    plan = make_plan(streams, loaded.compression, seed)
    with watching(quiet) as watcher:
        outcome = mix_offline(plan, locate(out), replace=replace, temporary=tmp, watcher=watcher)
    if as_json:
        echo_json(mixture_json(outcome))
    elif not quiet:
        show(mixture(outcome))
