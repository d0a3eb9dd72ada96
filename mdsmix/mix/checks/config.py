"""Whether what the YAML says beside its loaders fits them: the model, the lengths, the labels of evaluations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from mdsmix.mix.findings import check, check_loaders, names
from mdsmix.mix.streams import Loader, Mix
from mdsmix.training.keys import whole
from mdsmix.training.rules import Hit

FIX = 'write "${max_seq_len}" for both.'


@check_loaders(
    "length-model",
    "error",
    "The model has fewer positions than a row has tokens, and fails at the first full row.",
)
def length_model(mix: Mix, loader: Loader) -> Iterator[Hit]:
    model = whole(mix.yaml.at("model", "max_seq_len"))
    if model and loader.max_seq_len and model < loader.max_seq_len:
        yield Hit(
            f"model.max_seq_len is {model}, and rows of {{loader}} have {loader.max_seq_len} tokens.",
            FIX,
        )


@check(
    "length-differs",
    "warning",
    "Lengths that differ within one config are rarely meant: the model or the tokenizer is set for other rows than it gets.",
)
def length_differs(mix: Mix) -> Iterator[Hit]:
    length = mix.train.max_seq_len
    for key in ("max_seq_len", "model.max_seq_len", "tokenizer.kwargs.model_max_length"):
        value = mix.yaml.at(*key.split("."))
        if value is None or length is None or whole(value) == length:
            continue
        if key != "model.max_seq_len" or (whole(value) or length) > length:
            yield Hit(f"{key} is {value}, and max_seq_len of train_loader is {length}.", FIX)


@check(
    "model-encoder",
    "error",
    "LLM-Foundry refuses an encoder-decoder model with the text loader.",
)
def model_encoder(mix: Mix) -> Iterator[Hit]:
    if mix.train.is_text and mix.yaml.at("model", "name") == "hf_t5":
        yield Hit(
            "model.name is hf_t5, and train_loader is text.",
            "train it with name: finetuning.",
            names(mix.train.streams),
        )


@check(
    "eval-label",
    "error",
    "LLM-Foundry refuses a list of evaluations without labels, or two of one label.",
)
def eval_label(mix: Mix) -> Iterator[Hit]:
    entries = mix.yaml.at("eval_loader")
    listed = entries if isinstance(entries, list) else []
    labels = [e.get("label") for e in listed if isinstance(e, Mapping)]
    for number, label in enumerate(labels):
        if label is None or label in labels[:number]:
            yield Hit(
                f"entry {number} of eval_loader has the label {label}.",
                "give every entry a label of its own.",
            )
