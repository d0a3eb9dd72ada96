"""A holder of the lease that is stopped at any of its writes publishes nothing over its successor, in a bucket too."""

from __future__ import annotations

from pathlib import Path

import pytest

from mdsmix.storage import locate
from tests.converting import documents, write_recipe
from tests.stalled import COMMITS, stalled_everywhere


@pytest.mark.parametrize("way", COMMITS)
def test_a_run_that_stands_still_at_any_step_publishes_nothing_over_a_newer_one(
    way: str, bucket: str, tmp_path: Path, tokenizer_folder: Path
) -> None:
    streams = {"web": documents(tmp_path / "a.jsonl")}
    remote = f"s3://{bucket}/mix"
    recipe = write_recipe(tmp_path, tokenizer_folder, remote=remote, streams=streams)
    stalled_everywhere(recipe, locate(f"{remote}/web/train"), way)
