"""What cannot be right in a recipe, whatever the data and the kind of a stream: each rule yields one sentence that says why
and what to do. `mdsmix.kinds.open_recipe` adds the rules of the kinds."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from mdsmix.recipe.mix_rules import mix_contradictions
from mdsmix.recipe.sampling import sample_contradictions
from mdsmix.recipe.spec import Recipe, StreamSpec
from mdsmix.typed import brief

TARGET_PROMPTS = re.compile(r"none|all|length>=[1-9]\d*")
STREAM_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
TOKENIZER_FOLDER = re.compile(r"tokenizer-[0-9a-f]{8}")
PROCESSOR_FOLDER = re.compile(r"processor-[0-9a-f]{8}")
"What mdsmix names the folders of a tokenizer and of a processor beside the streams."
OWN_SPLIT = re.compile(r"limit-\d+|.+-[0-9a-f]{8}")
"Folders beside a split: first looks, and versions, which `mdsmix gc --keep` deletes."


def is_folder_beside(name: str) -> bool:
    """Whether a folder beside the streams is named as those that mdsmix keeps a tokenizer or a processor in."""
    return bool(TOKENIZER_FOLDER.fullmatch(name) or PROCESSOR_FOLDER.fullmatch(name))


def contradictions(recipe: Recipe) -> Iterator[str]:
    """Sentences on what cannot be right, whatever the data."""
    if not recipe.streams:
        yield "streams is empty; name at least one stream, for example web."
    if recipe.loader not in ("text", "finetuning", "mdsmix"):
        yield f"train_loader.name is {recipe.loader!r}; LLM-Foundry has the loaders text and finetuning, and with mdsmix beside it mdsmix."
    dataset = recipe.train_loader.get("dataset")
    if dataset is not None and not isinstance(dataset, Mapping):
        yield f"train_loader.dataset is {brief(dataset)}; it must hold keys, for example packing_ratio."
    yield from target_contradictions(
        recipe.target_prompts, recipe.target_responses, recipe.decoder_only_format
    )
    if recipe.sourced and not (recipe.remote or recipe.local):
        yield "neither remote nor local says where to publish; set local to a folder or remote to an s3:// URL."
    yield from mix_contradictions(recipe)
    for stream in recipe.streams.values():
        for sentence in _stream_contradictions(recipe, stream):
            yield f"streams.{stream.name}: {sentence}"


def target_contradictions(
    prompts: str, responses: str, decoder_only_format: bool = True
) -> Iterator[str]:
    """Sentences on target policies, of a recipe or of a training YAML, that LLM-Foundry does not have."""
    if not TARGET_PROMPTS.fullmatch(prompts):
        yield f"target_prompts is {prompts!r}; it must be none, all or length>=N with N of at least 1."
    if responses not in ("last", "all"):
        yield f"target_responses is {responses!r}; it must be last or all."
    if not decoder_only_format and (prompts, responses) != ("none", "last"):
        yield (
            f"target_prompts: {prompts} and target_responses: {responses} stand beside decoder_only_format: false; "
            "that allows only target_prompts: none and target_responses: last, as LLM-Foundry does."
        )


def _stream_contradictions(recipe: Recipe, stream: StreamSpec) -> Iterator[str]:
    if not STREAM_NAME.fullmatch(stream.name):
        yield "a stream's name becomes a folder: use letters, digits, '.', '_' and '-'."
    if is_folder_beside(stream.name):
        kept = stream.name.partition("-")[0]
        yield (
            f"{kept}- and 8 hex digits name the folder in which mdsmix keeps a {kept} beside the streams: name the stream otherwise."
        )
    if not STREAM_NAME.fullmatch(stream.split):
        yield f"split is {stream.split!r}; it names one folder: use letters, digits, '.', '_' and '-'."
    if stream.source is None:
        if stream.holdout is not None:
            yield "holdout takes a share out of the source when converting, and this stream has none: take it out."
        if stream.sample is not None:
            yield "sample takes a share of the source when converting, and this stream has none: take it out; mix says how much of it is drawn."
        if stream.duplicates != "keep":
            yield "duplicates: drop leaves records out when a source is converted, and this stream has none: take it out."
        if stream.pack:
            yield "pack: true packs samples when a source is converted, and this stream has none: take it out."
        if not (stream.remote or stream.local):
            yield "has neither a source nor a remote or local; say what to convert or where it was published."
        return
    if OWN_SPLIT.fullmatch(stream.split):
        yield (
            f"split is {stream.split!r}; limit-N and names that end in - and 8 hex digits are those of mdsmix's own first "
            "looks and versions, which are replaced and deleted: name it otherwise."
        )
    yield from sample_contradictions(recipe, stream)
    if stream.holdout is not None:
        yield from _holdout_contradictions(recipe, stream)
    if stream.remote or stream.local:
        yield "remote and local belong to streams without a source; this one is published under the recipe's remote or local."
    if not stream.source.path:
        yield "source.path is empty; name a file, a glob or an s3:// URL."
    if stream.kind is None:
        yield "kind is missing; it is pretraining or finetuning."


def _holdout_contradictions(recipe: Recipe, stream: StreamSpec) -> Iterator[str]:
    if stream.split != "train":
        yield f"holdout takes a share of what is trained on, and split is {stream.split}: take one of the two out."
    if held_out_name(stream) in recipe.streams:
        yield f"holdout makes a stream {held_out_name(stream)}, and the recipe has one of that name: rename it."


def held_out_name(stream: StreamSpec) -> str:
    """The name of a held-out stream, in tables and as the label of an eval_loader."""
    return f"{stream.name}-eval"


def with_held_out(recipe: Recipe) -> Recipe:
    """The recipe with a stream for evaluation behind each one that has a holdout."""
    streams = dict[str, StreamSpec]()
    for stream in recipe.streams.values():
        streams[stream.name] = stream
        if stream.holdout is not None:
            name = held_out_name(stream)
            streams[name] = replace(stream, name=name, split="eval", held_out_of=stream.name)
    return replace(recipe, streams=streams)
