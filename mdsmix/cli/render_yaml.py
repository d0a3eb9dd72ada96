"""`mdsmix render-yaml`: the checked mix as LLM-Foundry reads it."""

from __future__ import annotations

import typer

from mdsmix.cli.options import (
    AS_JSON,
    ESTIMATE,
    KEEP_EVALS,
    OVERRIDES,
    RECIPE,
    Text,
    Texts,
    echo,
    echo_json,
    flag,
    option,
    own_evals_of,
)
from mdsmix.errors import MixRefused


def render_yaml(
    recipe: str = RECIPE,
    overrides: Texts = OVERRIDES,
    out: Text = option(
        None, "Write here.", "FILE", "-o", "--out", shown="the file of --into, else stdout"
    ),
    into: Text = option(
        None,
        "Set the loaders, tokenizer and length in this config, and keep all else.",
        "FOUNDRY.yaml",
    ),
    validate: bool = flag(
        "--validate",
        "Also build LLM-Foundry's real loaders from it and draw two batches of each.",
    ),
    keep_evals: bool = KEEP_EVALS,
    drop_evals: bool = flag(
        "--drop-evals", "With --into: take the config's own evaluations out of it."
    ),
    estimate: bool = ESTIMATE,
    as_json: bool = AS_JSON,
) -> None:
    """Check the mix of RECIPE and render it as train_loader, eval_loader and tokenizer of
    LLM-Foundry.
    """
    from mdsmix.mix.checking import findings, is_refused, report, unseen, verdict
    from mdsmix.mix.lock_check import lock_of, place_of
    from mdsmix.mix.render import before_training, refuse_recipe, render, require_place, write
    from mdsmix.report.show import print_briefly, print_findings

    target = out or into
    locked = place_of(target) if target else None
    for file in filter(None, (target, locked)):
        require_place(file)
    refuse_recipe(out or "", "--out")
    refuse_recipe(into or "", "--into")
    own_evals = own_evals_of(keep_evals, drop_evals)
    mix, text = render(recipe, overrides or [], into, own_evals, estimate)
    found = findings(mix)
    if into and is_refused(found) and not as_json:
        print_findings(found, to_stderr=True)  # no file is written that `mdsmix check` could judge
    elif not as_json:
        # `mdsmix check` of the recipe does not see the config of --into.
        print_briefly(found, [str(target)] if into else [recipe, *(overrides or [])])
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
    command = before_training(mix)
    if as_json:
        written = {"wrote": target, "lock": locked, "drawn": drawn, "yaml": text}
        echo_json(report(mix, found) | written | {"before_training": command})
        return
    if not target:
        typer.echo(text, nl=False)
    wrote = " and ".join(filter(None, (target, locked)))
    changed = [f"changed {change}" for change in mix.changed]
    kept = [f"kept unseen: {label}" for label in unseen(mix)]
    told = f"on every training node, before training: {command}" if command else None
    said = verdict(mix, found) + (f"; wrote {wrote}" if wrote else "")
    echo(*changed, *kept, *filter(None, (said, drawn, told)), err=True)
