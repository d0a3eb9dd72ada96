"""`mdsmix mix`: published streams -> one published stream, drawn by weight and shuffled."""

from __future__ import annotations

from pathlib import Path

from mdsmix.cli.options import (
    AS_JSON,
    ESTIMATE,
    OVERRIDES,
    QUIET,
    RECIPE,
    Text,
    Texts,
    echo_json,
    flag,
    option,
)
from mdsmix.errors import MixRefused, RecipeError


def mix(
    recipe: Path = RECIPE,
    out: str = option(
        ...,
        "Publish here, as STREAM/train/: a folder or s3:// URL.",
        "STREAM",
        "-o",
        "--out",
        shown=False,
    ),
    overrides: Texts = OVERRIDES,
    seed: int = option(0, "Decides which samples are drawn, and their order.", "N", least=0),
    replace: bool = flag(
        "--replace", "Allow replacing another stream, or another draw, that lies at STREAM."
    ),
    tmp: Text = option(
        None,
        "The folder where all drawn samples lie meanwhile.",
        "FOLDER",
        shown="the cache folder",
    ),
    estimate: bool = ESTIMATE,
    quiet: bool = QUIET,
    as_json: bool = AS_JSON,
) -> None:
    """Draw from the train streams of RECIPE by weight, and publish the samples as one stream,
    shuffled across all of them.

    Samples are copied byte for byte. The same streams, weights and seed give the same stream.
    """
    from mdsmix.kinds import open_recipe
    from mdsmix.mix.checking import is_refused, verdict
    from mdsmix.mix.offline.mix_plan import findings_on_streams, make_plan
    from mdsmix.mix.offline.mix_streams import mix_offline, refuse_sources
    from mdsmix.mix.resolve import mix_of_recipe, training
    from mdsmix.report.conversions import mixture
    from mdsmix.report.progress import watching
    from mdsmix.report.show import print_briefly, show
    from mdsmix.storage import locate, require_local, sign_that_ends
    from mdsmix.table import as_json as as_json_of

    if tmp:
        require_local(tmp)
    if sign := sign_that_ends(out):
        raise RecipeError(
            f"{out} has a `{sign}`, at which Streaming ends a key: name another place."
        )
    loaded, path = open_recipe(recipe, overrides or ()), str(recipe)
    streams = mix_of_recipe(training(loaded, path), path, estimate, overrides=overrides or ())
    refuse_sources(loaded, locate(out))
    findings = findings_on_streams(streams)
    print_briefly(findings, [path, *(overrides or ())])
    if is_refused(findings):
        raise MixRefused(f"{verdict(streams, findings)}; nothing was mixed.")
    plan = make_plan(streams, loaded.compression, seed)
    with watching(quiet) as watcher:
        outcome = mix_offline(
            plan,
            locate(out),
            replace=replace,
            temporary=Path(tmp) if tmp else None,
            watcher=watcher,
        )
    if as_json:
        whose = {"target": outcome.target, "seed": outcome.record.seed}
        echo_json(as_json_of(mixture(outcome)) | whose)
    elif not quiet:
        show(mixture(outcome))
