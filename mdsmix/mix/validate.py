"""The last proof, where LLM-Foundry is installed: its real data loaders are built from the rendered YAML and give batches.

That happens in a subprocess, since importing LLM-Foundry takes ten seconds and a loader that waits for a lost shard never
returns. Everywhere else the checks must do.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from itertools import islice
from typing import Any

from mdsmix.errors import MixRefused, RecipeError

BATCHES = 2
BATCH_SIZE = 2
SECONDS = 300


def validate(text: str) -> str:
    """One line on the batches that LLM-Foundry draws from a rendered YAML; MixRefused where it draws none."""
    if find_spec("llmfoundry") is None:
        raise RecipeError(
            "--validate builds LLM-Foundry's own loader, and llmfoundry is not installed beside this mdsmix: install "
            "mdsmix into Foundry's environment and run it there, or leave --validate out."
        )
    try:
        done = subprocess.run(
            [sys.executable, "-m", "mdsmix.mix.validate"],
            input=text,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise MixRefused(
            f"LLM-Foundry's loader gave no batch in {SECONDS} s: a shard or a store does not answer; run `mdsmix check`."
        ) from None
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise MixRefused(f"LLM-Foundry's loader fails on the rendered YAML: {reason}")
    return done.stdout.strip().splitlines()[-1]


def _draw(text: str) -> str:
    from mdsmix.mix.view import resolved

    # By name: LLM-Foundry is no dependency of mdsmix, and only this subprocess may import it.
    build_dataloader = import_module("llmfoundry.data.dataloader").build_dataloader
    build_tokenizer = import_module("llmfoundry.utils.builders").build_tokenizer
    config: Any = resolved(text, "the rendered YAML")
    tokenizer = build_tokenizer(config["tokenizer"]["name"], config["tokenizer"].get("kwargs", {}))
    told = []
    for label, section in _sections(config):
        loader = build_dataloader(section, tokenizer, BATCH_SIZE).dataloader
        shapes = [tuple(batch["input_ids"].shape) for batch in islice(loader, BATCHES)]
        if not shapes:
            raise ValueError(f"{label} gives no batch; look for a lost shard or too few samples")
        told.append(f"{label} {', '.join(map(str, shapes))}")
    return f"LLM-Foundry's loaders give batches of input_ids: {'; '.join(told)}"


def _sections(config: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The train_loader and every evaluation that reads streams, as LLM-Foundry hands them to its builder."""
    yield "train_loader", config["train_loader"]
    entries = config.get("eval_loader") or []
    for entry in entries if isinstance(entries, list) else [entries]:
        if not entry["dataset"].get("hf_name"):  # a hub dataset is none of ours, and is a download
            label = f"eval_loader {entry.get('label', '')}".strip()
            yield label, {k: v for k, v in entry.items() if k != "label"}


if __name__ == "__main__":
    print(_draw(sys.stdin.read()))
