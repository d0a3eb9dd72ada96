"""Whether streams, run and model have one tokenizer and one length of rows, and what its special ids mean for the loss."""

from __future__ import annotations

from collections.abc import Mapping

from mdsmix.encode.published_folders import card_name
from mdsmix.kinds import kind_of
from mdsmix.mix.checks.columns import is_plain
from mdsmix.mix.streams import Loader, Mix, StreamInMix, moved, pretrained_name
from mdsmix.shards.manifest import TokenizerCard
from mdsmix.training.findings import Finding, Findings, check
from mdsmix.training.loader_keys import whole
from mdsmix.training.section_values import SEPARATORS
from mdsmix.training.section_values import separator_differs as _separator_differs

PARTS = ("vocab_size", "bos_id", "eos_id", "pad_id", "chat_template_hash")


def _differences(one: TokenizerCard, other: TokenizerCard) -> str:
    pairs = [(part, getattr(one, part), getattr(other, part)) for part in PARTS]
    told = ", ".join(f"{part} {a} against {b}" for part, a, b in pairs if a != b)
    return told or "the same vocabulary size and special ids, and other tokens or merges"


def _reference(mix: Mix) -> TokenizerCard | None:
    """The run's tokenizer, or the first stream's where the run's is not known."""
    manifests = (s.trusted_manifest for s in mix.streams)
    return mix.tokenizer or next((found.tokenizer for found in manifests if found), None)


@check(
    "error",
    "Ids below the vocabulary never fail: the model is trained on the wrong words without a word.",
)
def tokenizer_differs(mix: Mix, stream: StreamInMix) -> Findings:
    other, manifest = _reference(mix), stream.trusted_manifest
    if other and manifest and (own := manifest.tokenizer).hash != other.hash:
        whose = "run's" if mix.tokenizer else "first stream's"
        yield Finding(
            f"{{streams}}: converted with the tokenizer {own.name} ({own.hash[:8]}), and the {whose} is {other.name} "
            f"({other.hash[:8]}): {_differences(own, other)}.",
            "convert again with the run's tokenizer, or name that of the conversion.",
        )


@check(
    "error",
    "Chats of two templates teach the model two ways to speak, and generation uses only one of them.",
)
def template_differs(mix: Mix, stream: StreamInMix) -> Findings:
    other, manifest = _reference(mix), stream.trusted_manifest
    if not other or not manifest or not kind_of(manifest.encoding).has_template:
        return
    own, template = manifest.tokenizer, other.chat_template_hash
    if own.hash == other.hash and own.chat_template_hash != template:
        yield Finding(
            f"{{streams}}: converted with the chat template {own.chat_template_hash}, and that of the run is {template}.",
            "convert again with the run's tokenizer folder.",
        )


@check(
    "note",
    "Only a manifest says which tokenizer made the ids; of these streams only the range of their first ids could be compared.",
)
def tokenizer_unknown(stream: StreamInMix) -> Findings:
    if stream.manifest is None and {"tokens", "input_ids", "turns"} & set(stream.columns):
        yield Finding(
            "no manifest says with which tokenizer {streams} came to be.",
            "make sure of it yourself, or convert again with `mdsmix convert`.",
        )


@check(
    "warning",
    "Streams were compared with each other only, and padding and vocabulary not at all.",
)
def tokenizer_unseen(mix: Mix) -> Findings:
    if mix.tokenizer_problem:
        yield Finding(
            f"the run's tokenizer could not be looked at: {mix.tokenizer_problem.rstrip('.')}.",
            "check where the tokenizer can be loaded, for example on the machine that converts.",
        )


@check(
    "error",
    "LLM-Foundry loads tokenizers with AutoTokenizer, which wants a folder or a hub name.",
)
def tokenizer_lone_file(mix: Mix) -> Findings:
    name = mix.yaml.at("tokenizer", "name")
    if isinstance(name, str) and name.endswith(".json"):
        yield Finding(
            f"tokenizer.name is the file {name}.",
            "put the file into a folder beside a tokenizer_config.json that names its special tokens, and name the folder.",
        )


@check(
    "error",
    "The training nodes find the tokenizer nowhere else, and LLM-Foundry fails when it loads it.",
)
def tokenizer_unpublished(mix: Mix) -> Findings:
    if (home := mix.tokenizer_home) and not (home / card_name(home.name)).stat():
        yield Finding(
            f"the tokenizer is not at {home}, from where the training nodes are to fetch it.",
            f"run `mdsmix convert {mix.recipe}` again, which publishes it there.",
        )


@check(
    "error",
    "LLM-Foundry refuses a tokenizer without one, and nothing would tell the model where to stop.",
)
def eos_missing(mix: Mix) -> Findings:
    if mix.tokenizer and mix.tokenizer.eos_id is None:
        yield Finding(
            f"the tokenizer {mix.tokenizer.name} has no EOS token.",
            "add eos_token to tokenizer.kwargs and convert again.",
        )


@check(
    "warning",
    "The text loader takes every padding token out of the loss, even in full rows: no EOS is ever trained, so the model does not learn to stop.",
)
def pad_eos_text(mix: Mix, loader: Loader, stream: StreamInMix) -> Findings:
    if loader.trains and is_plain(loader, stream):
        fix = "give the tokenizer a padding token of its own (tokenizer.kwargs.pad_token), or train with the finetuning loader."
        yield from _pad_eos(mix, fix)


def _pad_eos(mix: Mix, fix: str) -> Findings:
    card = _reference(mix)
    if card and card.pad_id is not None and card.pad_id == card.eos_id:
        yield Finding(f"the tokenizer's padding token and its EOS are both {card.pad_id}.", fix)


@check(
    "note",
    "The finetuning loader masks by length, so EOS is trained: the loss differs a little from the text loader's, which would leave EOS out.",
)
def pad_eos_finetuning(mix: Mix, loader: Loader, stream: StreamInMix) -> Findings:
    if loader.trains and stream.has_targets is False and not is_plain(loader, stream):
        fix = "nothing; keep it in mind when losses are compared with a run under name: text."
        yield from _pad_eos(mix, fix)


@check("error", SEPARATORS)
def separator_differs(mix: Mix, loader: Loader) -> Findings:
    if (card := mix.tokenizer) and (loader.is_text or loader.is_own):
        yield from _separator_differs(loader, {"eos": card.eos_id, "bos": card.bos_id})


FIX = 'write "${max_seq_len}" for both.'


@check(
    "error",
    "The model has fewer positions than a row has tokens, and fails at the first full row.",
)
def length_model(mix: Mix, loader: Loader) -> Findings:
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
def length_differs(mix: Mix) -> Findings:
    length = mix.train.max_seq_len
    for key in ("max_seq_len", "model.max_seq_len", "tokenizer.kwargs.model_max_length"):
        value = mix.yaml.at(*key.split("."))
        if None not in (value, length) and whole(value) != length:
            yield Finding(f"{key} is {value}, and max_seq_len of train_loader is {length}.", FIX)


@check(
    "error",
    "LLM-Foundry refuses an encoder-decoder model with the text loader, and in decoder-only batches its encoder sees the answer.",
)
def model_encoder(mix: Mix, loader: Loader, stream: StreamInMix) -> Findings:
    is_decoder_only = loader.is_text or loader.decoder_only_format is True
    if loader.trains and is_decoder_only and mix.yaml.at("model", "name") == "hf_t5":
        again = mix.again(stream, "convert", " decoder_only_format=false")
        yield Finding(
            "model.name is hf_t5, and {loader} makes decoder-only batches.",
            f"train it with name: finetuning and decoder_only_format: false ({again}; finetuning data alone), or train a decoder-only model.",
        )


def _other_tokenizer(mix: Mix) -> str | None:
    """What the pretrained model and the tokenizer of the run are, where the one does not name the other."""
    model, tokenizer = pretrained_name(mix.yaml), mix.yaml.at("tokenizer", "name")
    if not model or tokenizer in (None, "", model):
        return None
    return f"the model is pretrained ({model}), and the tokenizer is {tokenizer}"


@check(
    "error",
    "Pretrained weights know the ids of their own tokenizer alone: under another one they read and write other words, and nothing fails.",
)
def model_tokenizer(mix: Mix) -> Findings:
    told = _other_tokenizer(mix)
    if told and mix.model_tokenizer and mix.opened:
        other, of = moved(mix.model_tokenizer, mix.opened.path)
        if other:
            yield Finding(
                f"{told}: {other:,} of the {of:,} tokens of the model's own have another id.",
                f"set tokenizer: {pretrained_name(mix.yaml)} in the recipe and convert again, or train a model of this tokenizer's own.",
            )


@check(
    "warning",
    "Pretrained weights know the ids of their own tokenizer alone, and the two could not be compared here.",
)
def model_tokenizer_unseen(mix: Mix) -> Findings:
    if (told := _other_tokenizer(mix)) and not (mix.opened and mix.model_tokenizer):
        yield Finding(
            f"{told}.",
            "make sure that the two are the same, or check where the model's folder or hub can be reached.",
        )


@check(
    "error",
    "LLM-Foundry refuses a list of evaluations without labels, or two of one label.",
)
def eval_label(mix: Mix) -> Findings:
    entries = mix.yaml.at("eval_loader")
    listed = entries if isinstance(entries, list) else []
    labels = [e.get("label") for e in listed if isinstance(e, Mapping)]
    for number, label in enumerate(labels):
        if label is None or label in labels[:number]:
            yield Finding(
                f"entry {number} of eval_loader has the label {label}.",
                "give every entry a label of its own.",
            )
