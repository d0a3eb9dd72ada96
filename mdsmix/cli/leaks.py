"""`mdsmix leaks`: which samples of an evaluation stand in the training streams?"""

from __future__ import annotations

from mdsmix.cli.options import (
    AS_JSON,
    MIX,
    Text,
    Texts,
    argument,
    decoder_option,
    echo_json,
    option,
)
from mdsmix.errors import RecipeError


def leaks(
    targets: list[str] = argument("RECIPE | TRAIN.yaml | STREAM...", f"What is trained: {MIX}"),
    evaluations: Texts = option(
        None,
        "A published stream of evaluation samples, of the same tokenizer; may be repeated.",
        "STREAM",
        "--eval",
        shown="the evaluations of the recipe or YAML",
    ),
    samples: int = option(3, "Findings whose passages are shown.", "N", "-n", "--samples", least=0),
    common: int = option(
        10,
        "Leave grams out that stand in more than N samples of a stream; 0 leaves none out.",
        "N",
        least=0,
    ),
    tokenizer: Text = decoder_option("the streams"),
    as_json: bool = AS_JSON,
) -> None:
    """Look for every run of 13 tokens of evaluation samples in all training streams, and show both
    passages.

    The exit code is 0 whatever is found: a leak is a finding and refuses nothing.
    """
    from mdsmix.encode.pretrained import find_decoder
    from mdsmix.leaks.audit import audit
    from mdsmix.mix.resolve import mix_of_streams, resolve
    from mdsmix.mix.streams import distinct
    from mdsmix.report.leaked_samples import leaks_json, leaks_shown
    from mdsmix.report.progress import watching
    from mdsmix.report.show import show

    mix = resolve(targets)
    for loader in mix.loaders:
        loader.require_opened()
    loaders = [mix_of_streams(evaluations).train] if evaluations else mix.evals
    given = [stream for loader in loaders for stream in loader.streams]
    if not given:
        raise RecipeError(
            f"{mix.yaml.origin} has no evaluation, so there is nothing to look for: name published streams by --eval; a file of "
            "questions becomes one by `mdsmix convert`, under the tokenizer of the mix."
        )
    evals = distinct(given)
    with watching() as watcher:
        found = audit(distinct(mix.train.streams), evals, common, watcher)
    manifest = evals[0].trusted_manifest
    decoder = find_decoder(tokenizer, manifest.tokenizer.hash if manifest else None)
    if as_json:
        echo_json(leaks_json(found, decoder, samples))
    else:
        show(*leaks_shown(found, decoder, samples))
