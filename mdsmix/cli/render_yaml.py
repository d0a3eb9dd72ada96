"""`mdsmix render-yaml`: the checked mix as LLM-Foundry reads it."""

from __future__ import annotations

from typing import Annotated

import typer

from mdsmix.cli.options import (
    AsJson,
    Estimate,
    KeepEvals,
    Overrides,
    RecipeName,
    echo,
    echo_json,
    evals_mode,
)
from mdsmix.errors import MixRefused


def render_yaml(
    recipe: RecipeName,
    overrides: Overrides = None,
    out: Annotated[
        str | None,
        typer.Option(
            "-o",
            "--out",
            metavar="FILE",
            help="Write here.",
            show_default="the file of --into, else stdout",
        ),
    ] = None,
    into: Annotated[
        str | None,
        typer.Option(
            metavar="FOUNDRY.yaml",
            help="Set the loaders, tokenizer and length in this config; keep everything else.",
        ),
    ] = None,
    validate: Annotated[
        bool,
        typer.Option(
            "--validate",
            help="Also build LLM-Foundry's real loaders from the YAML, and draw two batches "
            "of each.",
        ),
    ] = False,
    keep_evals: KeepEvals = False,
    drop_evals: Annotated[
        bool,
        typer.Option(
            "--drop-evals", help="With --into: remove the config's own evaluations from it."
        ),
    ] = False,
    estimate: Estimate = False,
    as_json: AsJson = False,
) -> None:
    """Check the mix of RECIPE and render it as train_loader, eval_loader and tokenizer of
    LLM-Foundry.
    """
    from mdsmix.mix.check import (
        describe_verdict,
        is_refused,
        list_unopened_evals,
        make_report,
        run_checks,
    )
    from mdsmix.mix.lock_check import lock_path, make_lock
    from mdsmix.mix.render.render import (
        fetch_command,
        refuse_recipe,
        render_recipe,
        require_writable,
        write_yaml,
    )
    from mdsmix.report.show import print_briefly, print_findings

    # Refuse an output file that cannot be written before anything is read.
    target = out or into
    lock_file = lock_path(target) if target else None
    outputs = [file for file in (target, lock_file) if file]
    for file in outputs:
        require_writable(file)
    refuse_recipe(out or "", "--out")
    refuse_recipe(into or "", "--into")
    own_evals = evals_mode(keep_evals, drop_evals)
    mix, text = render_recipe(recipe, overrides or [], into, own_evals, estimate)

    # Print the findings in short, with the command of `mdsmix check` that shows all of them. If the
    # config of --into makes the mix one that is refused, no such command exists, so print them all.
    mix_findings = run_checks(mix)
    if into and is_refused(mix_findings) and not as_json:
        print_findings(mix_findings, to_stderr=True)
    elif not as_json:
        # With --into, only a check of the written file covers the config too.
        print_briefly(mix_findings, [str(target)] if into else [recipe, *(overrides or [])])
    if is_refused(mix_findings):
        if as_json:
            echo_json(make_report(mix, mix_findings))
        raise MixRefused(f"{describe_verdict(mix, mix_findings)}; nothing was rendered.")

    drawn = None
    if validate:
        from mdsmix.mix.render.render import validate_with_foundry as draw

        drawn = draw(text, [loader.label for loader in mix.loaders])
    if target:
        write_yaml(target, text)
    if lock_file:
        write_yaml(lock_file, make_lock(mix).to_bytes().decode())

    command = fetch_command(mix)
    if as_json:
        written = {"wrote": target, "lock": lock_file, "drawn": drawn, "yaml": text}
        echo_json(make_report(mix, mix_findings) | written | {"before_training": command})
        return
    if not target:
        typer.echo(text, nl=False)
    news = [f"changed {change}" for change in mix.changed]
    news += [
        f"kept, but its streams were not opened: {label}" for label in list_unopened_evals(mix)
    ]
    outcome = describe_verdict(mix, mix_findings)
    if target:
        outcome += f"; wrote {' and '.join(outputs)}"
    news.append(outcome)
    if drawn:
        news.append(drawn)
    if command:
        news.append(f"on every training node, before training: {command}")
    echo(*news, err=True)
