"""Whether all streams were made by the tokenizer that the run uses, and what its special ids mean for the loss."""

from __future__ import annotations

from collections.abc import Iterator

from mdsmix.kinds import kind_of
from mdsmix.mix.findings import Hit, check, does, names, spelled
from mdsmix.mix.streams import Mix, Stream
from mdsmix.shards.manifest import TokenizerCard

PARTS = {
    "vocab_size": "vocabulary",
    "bos_id": "bos id",
    "eos_id": "eos id",
    "pad_id": "pad id",
    "chat_template_hash": "chat template",
}


def _differences(one: TokenizerCard, other: TokenizerCard) -> str:
    found = [
        f"{word} {getattr(one, part)} against {getattr(other, part)}"
        for part, word in PARTS.items()
        if getattr(one, part) != getattr(other, part)
    ]
    return (
        ", ".join(found) or "the same vocabulary size and special ids, and other tokens or merges"
    )


def _reference(mix: Mix) -> tuple[str, TokenizerCard] | None:
    """The run's tokenizer, or the first stream's where the run's is not known."""
    if mix.tokenizer:
        return "the run's tokenizer", mix.tokenizer
    return next(((s.name, s.card.tokenizer) for s in mix.streams if s.card), None)


@check(
    "tokenizer-differs",
    "error",
    "Ids below the vocabulary never fail: the model is trained on the wrong words without a word.",
)
def tokenizer_differs(mix: Mix) -> Iterator[Hit]:
    reference = _reference(mix)
    for stream in mix.streams:
        if reference and stream.card and stream.card.tokenizer.hash != reference[1].hash:
            yield Hit(
                [stream.name],
                f"{stream.name} was converted with the tokenizer {stream.card.tokenizer.name} "
                f"({stream.card.tokenizer.hash[:8]}), and {reference[0]} is {reference[1].name} "
                f"({reference[1].hash[:8]}): {_differences(stream.card.tokenizer, reference[1])}.",
                "convert the stream again with the run's tokenizer, or name the one that it was converted with.",
            )


@check(
    "template-differs",
    "error",
    "Chats of two templates teach the model two ways to speak, and generation uses only one of them.",
)
def template_differs(mix: Mix) -> Iterator[Hit]:
    reference = _reference(mix)
    for stream in mix.streams:
        if not reference or not stream.card or not kind_of(stream.card.encoding).has_template:
            continue
        own, other = stream.card.tokenizer, reference[1]
        if own.hash == other.hash and own.chat_template_hash != other.chat_template_hash:
            yield Hit(
                [stream.name],
                f"{stream.name} was converted with the chat template {_short(own)}, and {reference[0]} has {_short(other)}.",
                "convert the stream again with the run's tokenizer folder.",
            )


def _short(card: TokenizerCard) -> str:
    return (card.chat_template_hash or "none")[:8]


@check(
    "tokenizer-unknown",
    "note",
    "Only a manifest says which tokenizer made the ids; of these streams only the range of their first ids could be compared.",
)
def tokenizer_unknown(mix: Mix) -> Iterator[Hit]:
    unknown = [s for s in mix.streams if s.manifest is None and _holds_ids(s)]
    if unknown:
        yield Hit(
            names(unknown),
            f"{', '.join(names(unknown))} {does(unknown, 'has', 'have')} no manifest, so {does(unknown, 'its tokenizer is', 'their tokenizers are')} not known.",
            "make sure of it yourself, or convert again with `mdsmix convert`.",
        )


def _holds_ids(stream: Stream) -> bool:
    return bool({"tokens", "input_ids", "turns"} & set(stream.columns))


@check(
    "tokenizer-unseen",
    "warning",
    "Streams were compared with each other only, and padding and vocabulary not at all.",
)
def tokenizer_unseen(mix: Mix) -> Iterator[Hit]:
    if mix.tokenizer_problem:
        yield Hit(
            [],
            f"the run's tokenizer could not be looked at: {mix.tokenizer_problem.rstrip('.')}.",
            "check where the tokenizer can be loaded, for example on the machine that converts.",
        )


@check(
    "tokenizer-lone-file",
    "error",
    "LLM-Foundry loads tokenizers with AutoTokenizer, which wants a folder or a hub name.",
)
def tokenizer_lone_file(mix: Mix) -> Iterator[Hit]:
    name = mix.section("tokenizer", "name")
    if isinstance(name, str) and name.endswith(".json"):
        yield Hit(
            [],
            f"tokenizer.name is the file {name}.",
            "put the file into a folder beside a tokenizer_config.json that names its special tokens, and name the folder.",
        )


@check(
    "eos-missing",
    "error",
    "LLM-Foundry refuses a tokenizer without one, and nothing would tell the model where to stop.",
)
def eos_missing(mix: Mix) -> Iterator[Hit]:
    if mix.tokenizer and mix.tokenizer.eos_id is None:
        yield Hit(
            [],
            f"the tokenizer {mix.tokenizer.name} has no EOS token.",
            "add eos_token to tokenizer.kwargs and convert again.",
        )


def _known(mix: Mix) -> TokenizerCard | None:
    reference = _reference(mix)
    return reference[1] if reference else None


def _pads_with_eos(card: TokenizerCard | None) -> bool:
    return card is not None and card.eos_id is not None and card.pad_id == card.eos_id


@check(
    "pad-eos-text",
    "warning",
    "The text loader takes every padding token out of the loss, even in full rows: no EOS is ever trained, so the model does not learn to stop.",
)
def pad_eos_text(mix: Mix) -> Iterator[Hit]:
    card = _known(mix)
    if mix.train.is_text and card and _pads_with_eos(card):
        yield Hit(
            names(mix.train.streams),
            f"the tokenizer's padding token and its EOS are both {card.eos_id}.",
            "give the tokenizer a padding token of its own (tokenizer.kwargs.pad_token), or train with the finetuning loader.",
        )


@check(
    "pad-eos-finetuning",
    "note",
    "The finetuning loader masks by length, so EOS is trained: the loss differs a little from the text loader's, which would leave EOS out.",
)
def pad_eos_finetuning(mix: Mix) -> Iterator[Hit]:
    card = _known(mix)
    cards = ((s, s.card) for s in mix.train.streams)
    plain = [s for s, own in cards if own and not kind_of(own.encoding).has_targets]
    if not mix.train.is_text and plain and card and _pads_with_eos(card):
        yield Hit(
            names(plain),
            f"the tokenizer's padding token and its EOS are both {card.eos_id}.",
            "nothing; keep it in mind when losses are compared with a run under name: text.",
        )


@check(
    "separator-differs",
    "error",
    "LLM-Foundry refuses separators that are not the tokenizer's, and two of them at once.",
)
def separator_differs(mix: Mix) -> Iterator[Hit]:
    for loader in mix.loaders if mix.train.is_text else ():
        given = {w: loader.dataset.get(f"{w}_token_id") for w in ("eos", "bos")}
        if all(v is not None for v in given.values()):
            yield Hit(
                [],
                "eos_token_id and bos_token_id are both set in {loader}.",
                "keep one.",
                loader.label,
            )
        for word, token in given.items():
            own = getattr(mix.tokenizer, f"{word}_id", token)
            allowed = loader.dataset.get(f"override_{word}_token_id_mismatch_error")
            if token is not None and token != own and not allowed:
                yield Hit(
                    [],
                    f"{word}_token_id of {{loader}} is {token}, and the tokenizer's is {spelled(own)}.",
                    f"set {word}_token_id: {own}."
                    if own is not None
                    else f"leave {word}_token_id out.",
                    loader.label,
                )
