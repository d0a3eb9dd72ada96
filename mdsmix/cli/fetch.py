"""`mdsmix fetch`: the tokenizer of a mix onto a training node."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from mdsmix.cli.options import (
    echo,
)
from mdsmix.messages import plural


def fetch(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="The tokenizer or processor published with the streams: "
            "s3://bucket/mix/tokenizer-0f3a9c21.",
            show_default=False,
        ),
    ],
    folder: Annotated[
        str,
        typer.Argument(
            metavar="FOLDER",
            help="The folder in which the training YAML looks for it.",
            show_default=False,
        ),
    ],
    endpoint_url: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="The address of the S3 store, if it is not AWS.",
            show_default="S3_ENDPOINT_URL",
        ),
    ] = None,
) -> None:
    """Copy a published tokenizer or processor into a folder of this node, and compare it with what
    was published.

    A node without mdsmix can run the command at the top of a rendered YAML instead, such as
    `aws s3 cp --recursive`.
    """
    from mdsmix.storage import locate, require_local
    from mdsmix.tokenizer.published import copy_folder

    require_local(folder)

    if endpoint_url:
        os.environ["S3_ENDPOINT_URL"] = endpoint_url
    names = copy_folder(locate(source), Path(folder))
    echo(f"{folder}: {plural(len(names), 'file')}, equal to the published ones")
