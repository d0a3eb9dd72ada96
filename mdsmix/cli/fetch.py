"""`mdsmix fetch`: the tokenizer of a mix onto a training node."""

from __future__ import annotations

import os
from pathlib import Path

from mdsmix.cli.options import Text, argument, echo, option
from mdsmix.words import plural


def fetch(
    source: str = argument(
        "SOURCE",
        "The tokenizer or processor beside the streams: s3://bucket/mix/tokenizer-0f3a9c21.",
    ),
    folder: str = argument("FOLDER", "Where the training YAML looks for it."),
    endpoint_url: Text = option(
        None, "The store, where it is not AWS.", "URL", shown="S3_ENDPOINT_URL"
    ),
) -> None:
    """Copy a published tokenizer or processor into a folder of this node, and say whether it is as
    it was published.

    The line at the head of a rendered YAML does the same: `aws s3 cp --recursive`.
    """
    from mdsmix.encode.published_folders import copy_folder
    from mdsmix.storage import locate, require_local

    require_local(folder)

    if endpoint_url:
        os.environ["S3_ENDPOINT_URL"] = endpoint_url
    names = copy_folder(locate(source), Path(folder))
    echo(f"{folder}: {plural(len(names), 'file')}, as published")
