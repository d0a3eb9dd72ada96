"""The model that a config names, as far as data must fit it: pretrained weights know the ids of one tokenizer alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from mdsmix.errors import MdsmixError
from mdsmix.recipe import TokenizerSpec
from mdsmix.training.sections import TrainingYaml

PRETRAINED = ("hf_causal_lm", "hf_t5")
"Models of LLM-Foundry that load pretrained weights unless `pretrained: false` is set."


def pretrained_name(yaml: TrainingYaml) -> str | None:
    """The folder or hub name of the weights that training begins with; None where it begins with none."""
    name = yaml.at("model", "pretrained_model_name_or_path")
    is_pretrained = yaml.at("model", "pretrained")
    if is_pretrained is None:
        is_pretrained = yaml.at("model", "name") in PRETRAINED
    return str(name) if name and is_pretrained else None


def find_tokenizer(yaml: TrainingYaml, model: str) -> str | None:
    """The tokenizer.json that lies beside the weights; None where this machine cannot see it."""
    from mdsmix.encode.pretrained import open_tokenizer

    trusted = yaml.at("model", "trust_remote_code")
    kwargs = {"trust_remote_code": True} if trusted else {}
    try:
        return open_tokenizer(TokenizerSpec(name=model, kwargs=kwargs)).path
    except MdsmixError:
        return None


def moved(model: str, run: str) -> tuple[int, int]:
    """Of the tokens in the tokenizer.json `model`: how many stand for another id in `run`, and how many there are.

    Tokens that were added to either are left out: those that a model has room for are named by whoever trains it.
    """
    wanted, found = _vocabulary(model), _vocabulary(run)
    added = {token["id"]: token["content"] for token in found[1]}
    ids = {number: token for token, number in found[0].items()} | added
    own = {token["id"] for token in wanted[1]}
    compared = {token: number for token, number in wanted[0].items() if number not in own}
    return sum(ids.get(n) != token for token, n in compared.items()), len(compared)


def _vocabulary(path: str) -> tuple[Mapping[str, int], list[dict[str, Any]]]:
    """Token -> id of the model in a tokenizer.json, and what was added."""
    tree = orjson.loads(Path(path).read_bytes())
    vocab = tree["model"]["vocab"]
    if isinstance(vocab, list):  # Unigram: a token and its score
        vocab = {token: number for number, (token, _) in enumerate(vocab)}
    return vocab, tree.get("added_tokens") or []
