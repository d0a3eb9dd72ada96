"""`mdsmix render-yaml`: the checked mix as LLM-Foundry reads it."""

from __future__ import annotations

from typing import Annotated, Optional

import typer

from mdsmix.cli.options import RECIPE, AsJson, Estimated, Overrides, echo, echo_json


def render_yaml(
    recipe: Annotated[str, RECIPE],
    overrides: Overrides = None,
    out: Annotated[
        Optional[str],  # noqa: UP045  typer of 0.15 reads no | under Python 3.10
        typer.Option(
            "-o",
            "--out",
            metavar="FILE",
            help="Write here.",
            show_default="the file of --into, else stdout",
        ),
    ] = None,
    into: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            "--into",
            metavar="FOUNDRY.yaml",
            help="Set the loaders, tokenizer and length in this config, and keep all else.",
        ),
    ] = None,
    validate: Annotated[
        bool,
        typer.Option(
            "--validate",
            help="Also build LLM-Foundry's real loaders from it and draw two batches of each.",
        ),
    ] = False,
    keep_evals: Annotated[
        bool,
        typer.Option(
            "--keep-evals",
            help="With --into: keep the config's own evaluations without looking at them.",
        ),
    ] = False,
    estimate: Estimated = False,
    as_json: AsJson = False,
) -> None:
    """Check the mix of RECIPE and render it as train_loader, eval_loader and tokenizer of LLM-Foundry."""
    from mdsmix.errors import MixRefused
    from mdsmix.mix.check import findings, is_refused, report, unseen, verdict
    from mdsmix.mix.lock_check import lock_of, place_of
    from mdsmix.mix.output import require_place, write
    from mdsmix.mix.render import before_training, refuse_recipe, render
    from mdsmix.report.findings import print_briefly

    if target := out or into:
        require_place(target)
    if locked := place_of(target) if target else None:
        require_place(locked)
    for option, file in (("--out", out), ("--into", into)):
        refuse_recipe(file or "", option)
    mix, text = render(recipe, overrides or [], into, keep_evals, estimate)
    found = findings(mix)
    if not as_json:
        print_briefly(found, [recipe, *(overrides or [])])
    if is_refused(found):
        if as_json:
            echo_json(report(mix, found))
        raise MixRefused(f"{verdict(mix, found)}; nothing was rendered.")
    drawn = None
    if validate:
        from mdsmix.mix.render import validate as draw

        drawn = draw(text, [loader.label for loader in mix.loaders])
    if target:
        write(target, text)
    if locked:
        write(locked, lock_of(mix).to_bytes().decode())
    if as_json:
        wrote_of = {"wrote": target, "lock": locked, "drawn": drawn, "yaml": text}
        echo_json(report(mix, found) | wrote_of | {"before_training": before_training(mix)})
        return
    if not target:
        typer.echo(text, nl=False)
    wrote = f"; wrote {target}" + (f" and {locked}" if locked else "") if target else ""
    changed = [f"changed {change}" for change in mix.changed]
    kept = [f"kept unseen: {label}" for label in unseen(mix)]
    echo(*changed, *kept, f"{verdict(mix, found)}{wrote}", *filter(None, [drawn]), err=True)
    if command := before_training(mix):
        echo(f"on every training node, before training: {command}", err=True)
