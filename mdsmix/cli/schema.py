"""`mdsmix schema`: the JSON Schema of a recipe."""

from __future__ import annotations

from typing import Annotated

import typer

from mdsmix.cli.options import OUTPUT, echo


def schema(
    out: Annotated[
        str | None,
        typer.Option(
            "-o",
            "--out",
            metavar="FILE",
            help="Write the schema here.",
            show_default="stdout",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
) -> None:
    """Print the JSON Schema of a recipe. With it editors complete the recipe's keys, show what they
    mean and mark mistakes.

    An editor with the YAML language server finds it by a comment in the recipe: `#
    yaml-language-server: $schema=./mdsmix.schema.json`. `mdsmix init -o FILE` writes this comment,
    and the schema next to the recipe.
    """
    from mdsmix.kinds.recipe_schema import write_schema
    from mdsmix.mix.render.render import write_yaml

    text = write_schema()
    if not out:
        typer.echo(text, nl=False)
        return
    write_yaml(out, text)
    echo(f"wrote {out}")
