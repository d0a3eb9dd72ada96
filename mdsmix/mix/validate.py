"""The last proof, where LLM-Foundry is installed: its real data loaders are built from the rendered YAML and give batches.

That happens in a subprocess, since importing LLM-Foundry takes ten seconds and a loader that waits for a lost shard never
returns. Everywhere else the checks must do.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from itertools import islice

from mdsmix.errors import MixRefused, RecipeError

BATCHES = 2
BATCH_SIZE = 2
SECONDS = 300


def validate(text: str, labels: Sequence[str]) -> str:
    """One line on the batches that LLM-Foundry draws from the loaders of these labels; MixRefused where it draws none."""
    if find_spec("llmfoundry") is None:
        raise RecipeError(
            "--validate builds LLM-Foundry's own loader, and llmfoundry is not installed beside this mdsmix: install "
            "mdsmix into Foundry's environment and run it there, or leave --validate out."
        )
    try:
        done = subprocess.run(
            [sys.executable, "-m", "mdsmix.mix.validate", *labels],
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


def _draw(text: str, labels: Sequence[str]) -> str:
    from mdsmix.encode.folders import at_hand
    from mdsmix.training.training_yaml import parse

    # By name: LLM-Foundry is no dependency of mdsmix, and only this subprocess may import it.
    build_dataloader = import_module("llmfoundry.data.dataloader").build_dataloader
    build_tokenizer = import_module("llmfoundry.utils.builders").build_tokenizer
    yaml = parse(text, "the rendered YAML")
    spec = yaml.tokenizer
    assert spec is not None, "a rendered YAML names its tokenizer"
    kwargs = yaml.at("tokenizer", "kwargs") or {}
    tokenizer = build_tokenizer(at_hand(spec, yaml.places).name, kwargs)
    told = []
    for loader_section in (s for s in (yaml.train, *yaml.evals) if s.label in labels):
        label = loader_section.label
        section = {k: v for k, v in loader_section.section.items() if k != "label"}
        loader = build_dataloader(section, tokenizer, BATCH_SIZE).dataloader
        shapes = [tuple(batch["input_ids"].shape) for batch in islice(loader, BATCHES)]
        if not shapes:
            raise ValueError(f"{label} gives no batch; look for a lost shard or too few samples")
        told.append(f"{label} {', '.join(map(str, shapes))}")
    return f"LLM-Foundry's loaders give batches of input_ids: {'; '.join(told)}"


if __name__ == "__main__":
    print(_draw(sys.stdin.read(), sys.argv[1:]))
