"""`mdsmix render-yaml`: the checked mix as LLM-Foundry reads it."""

from __future__ import annotations

from typing import Annotated, Optional

import typer

from mdsmix.cli.options import RECIPE, Overrides


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
) -> None:
    """Check the mix of RECIPE and render it as train_loader, eval_loader and tokenizer of LLM-Foundry."""
    from mdsmix.cli.check import print_findings
    from mdsmix.errors import MixRefused
    from mdsmix.mix.check import findings, is_refused, verdict
    from mdsmix.mix.output import require_place, write
    from mdsmix.mix.render import render

    if target := out or into:
        require_place(target)
    mix, text = render(recipe, overrides or [], into)
    found = findings(mix)
    print_findings(found, to_stderr=True)
    if is_refused(found):
        raise MixRefused(f"{verdict(mix, found)}; nothing was rendered.")
    drawn = None
    if validate:
        from mdsmix.mix.validate import validate as draw

        drawn = draw(text)
    if target:
        write(target, text)
    else:
        typer.echo(text, nl=False)
    wrote = f"; wrote {target}" if target else ""
    typer.echo("\n".join(filter(None, [f"{verdict(mix, found)}{wrote}", drawn])), err=True)
