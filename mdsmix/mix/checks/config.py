"""Whether what the YAML says beside its loaders fits them: the model, the lengths, the labels of evaluations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from mdsmix.mix.model import moved, pretrained_name
from mdsmix.mix.streams import Loader, Mix, names
from mdsmix.training.findings import Finding, check, check_loaders
from mdsmix.training.keys import whole

FIX = 'write "${max_seq_len}" for both.'


@check_loaders(
    "error",
    "The model has fewer positions than a row has tokens, and fails at the first full row.",
)
def length_model(mix: Mix, loader: Loader) -> Iterator[Finding]:
    model = whole(mix.yaml.at("model", "max_seq_len"))
    if model and loader.max_seq_len and model < loader.max_seq_len:
        yield Finding(
            f"model.max_seq_len is {model}, and rows of {{loader}} have {loader.max_seq_len} tokens.",
            FIX,
        )


@check(
    "warning",
    "Lengths that differ within one config are rarely meant: the model or the tokenizer is set for other rows than it gets.",
)
def length_differs(mix: Mix) -> Iterator[Finding]:
    length = mix.train.max_seq_len
    for key in ("max_seq_len", "model.max_seq_len", "tokenizer.kwargs.model_max_length"):
        value = mix.yaml.at(*key.split("."))
        if value is None or length is None or whole(value) == length:
            continue
        if key != "model.max_seq_len" or (whole(value) or length) > length:
            yield Finding(f"{key} is {value}, and max_seq_len of train_loader is {length}.", FIX)


@check(
    "error",
    "LLM-Foundry refuses an encoder-decoder model with the text loader, and in decoder-only batches its encoder sees the answer.",
)
def model_encoder(mix: Mix) -> Iterator[Finding]:
    if mix.yaml.at("model", "name") != "hf_t5":
        return
    if mix.train.is_text:
        yield Finding(
            "model.name is hf_t5, and train_loader is text.",
            "train it with name: finetuning.",
            names(mix.train.streams),
        )
    elif mix.train.dataset.get("decoder_only_format") is True:
        again = mix.makers(mix.train.streams, "convert", " decoder_only_format=false")
        yield Finding(
            "model.name is hf_t5, and train_loader says decoder_only_format: true.",
            f"{again} (finetuning data alone), or train a decoder-only model.",
            names(mix.train.streams),
        )


def _other_tokenizer(mix: Mix) -> tuple[str, str] | None:
    """The pretrained model and the tokenizer of the run, where the one does not name the other."""
    model, tokenizer = pretrained_name(mix.yaml), mix.yaml.at("tokenizer", "name")
    return (model, str(tokenizer)) if model and tokenizer and model != tokenizer else None


def _replaced(mix: Mix) -> str | None:
    """The change of the tokenizer that the config named, if it is one."""
    return next((str(c) for c in mix.changed if c.key in ("tokenizer", "tokenizer.name")), None)


@check(
    "error",
    "Pretrained weights know the ids of their own tokenizer alone: under another one they read and write other words, and nothing fails.",
)
def model_tokenizer(mix: Mix) -> Iterator[Finding]:
    if not (pair := _other_tokenizer(mix)):
        return
    model, tokenizer = pair
    path = mix.model_tokenizer
    fix = f"set tokenizer: {model} in the recipe and convert again, or train a model of this tokenizer's own."
    if path and mix.tokenizer_path:
        other, of = moved(path, mix.tokenizer_path)
        if other:
            yield Finding(
                f"the model is pretrained ({model}), and the tokenizer is {tokenizer}, under which {other:,} of the "
                f"{of:,} tokens of the model's own have another id.",
                fix,
            )
    elif replaced := _replaced(mix):
        yield Finding(
            f"the model is pretrained ({model}), its own tokenizer cannot be looked at here, and --into changes {replaced}.",
            f"{fix[:-1]}; where the two are the same, write tokenizer.name: {tokenizer} into the config first.",
        )


@check(
    "warning",
    "Pretrained weights know the ids of their own tokenizer alone, and the two could not be compared here.",
)
def model_tokenizer_unseen(mix: Mix) -> Iterator[Finding]:
    pair = _other_tokenizer(mix)
    if pair and not _replaced(mix) and not (mix.tokenizer_path and mix.model_tokenizer):
        yield Finding(
            f"the model is pretrained ({pair[0]}), and the tokenizer is {pair[1]}.",
            "make sure that the two are the same, or check where the model's folder or hub can be reached.",
        )


@check(
    "error",
    "LLM-Foundry refuses a list of evaluations without labels, or two of one label.",
)
def eval_label(mix: Mix) -> Iterator[Finding]:
    entries = mix.yaml.at("eval_loader")
    listed = entries if isinstance(entries, list) else []
    labels = [e.get("label") for e in listed if isinstance(e, Mapping)]
    for number, label in enumerate(labels):
        if label is None or label in labels[:number]:
            yield Finding(
                f"entry {number} of eval_loader has the label {label}.",
                "give every entry a label of its own.",
            )
