"""Streams -> the text of a recipe. A comment beside a key says why it has its value."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from mdsmix.init.drafts import Draft
from mdsmix.recipe import StreamSpec

HEAD = "# By mdsmix init, from what it saw. Every key is explained in docs/recipe.md of mdsmix."
LATER = """# mix: {{{first}: {{repeat: 2}}}}    # how often a stream is drawn an epoch; once where nothing is said
# target_responses: all    # trains every answer of a conversation; without it the last one alone, as LLM-Foundry does
"""
SEEING = """# processor: ./model    # the model's folder or hub name: how many tokens images become, so that what does not fit is left out
"""
STREAM_KEYS = {each.name for each in dataclasses.fields(StreamSpec)}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Top:
    """The keys at the top of the recipe."""

    tokenizer: str
    max_seq_len: int
    why_length: str
    place: str
    "Where to publish: a folder, or an s3:// URL."
    budget: str | None = None


def text_of(top: Top, drafts: Sequence[Draft]) -> str:
    """The recipe."""
    place = f"local: {scalar(top.place)}    # published there; `remote: s3://bucket/prefix` publishes to a bucket"
    if top.place.startswith("s3://"):
        place = f"remote: {scalar(top.place)}    # published there, streamed from there"
    lines = [
        HEAD,
        f"tokenizer: {scalar(top.tokenizer)}",
        f"max_seq_len: {top.max_seq_len}    # tokens of a row; {top.why_length}",
        place,
        *_loader(drafts),
        *_mix(top, drafts),
        "streams:",
        *(line for draft in drafts for line in _stream_or_comment(draft)),
    ]
    live = [draft for draft in drafts if not draft.refused]
    later = "" if not live or live[0].share or live[0].loader else LATER.format(first=live[0].name)
    if any(draft.guess.images is not None for draft in live):
        later += SEEING
    return "\n".join(lines) + "\n" + later


def _mix(top: Top, drafts: Sequence[Draft]) -> Iterator[str]:
    """The shares of a mixture, where there is one."""
    shares = [
        f"  {'# ' if draft.refused else ''}{scalar(draft.name)}: {{share: {draft.share}}}"
        for draft in drafts
        if draft.share
    ]
    if not shares:
        return
    if top.budget:
        yield f"budget: {scalar(top.budget)}    # what an epoch holds, and of which `sample: budget` takes each stream's share"
        yield "absolute: true    # the percents are of the whole budget, and need not sum to 100 where a source is not there"
    else:
        yield "# budget: 2B tokens    # with absolute: true the percents are of all of it, and sample: budget converts no more than that"
    yield "mix:"
    yield from shares


def _loader(drafts: Sequence[Draft]) -> Iterator[str]:
    """The loader that the streams' kind brings; all have the same."""
    for loader in {draft.loader.name: draft.loader for draft in drafts if draft.loader}.values():
        yield f"train_loader: {{name: {loader.name}}}    # the loader of {loader.whose}, which reads {drafts[0].guess.kind}s alone"


def _stream_or_comment(draft: Draft) -> Iterator[str]:
    """The lines of a stream. A refused stream is commented out, below the reason."""
    if not draft.refused:
        yield from _stream(draft)
        return
    yield f"  # left out: {draft.refused}"
    yield from (f"  # {line[2:]}" for line in _stream(draft))


def _stream(draft: Draft) -> Iterator[str]:
    yield f"  {scalar(draft.name)}:"
    yield from (f"    # {note}" for note in draft.notes)
    yield f"    kind: {draft.guess.kind}"
    if draft.split != "train":
        yield f"    split: {scalar(draft.split)}    # by the name: rendered as an eval_loader"
    for key, (value, why) in draft.settings.items():
        yield f"    {key}: {scalar(value)}    # {why}"
    options = {**draft.guess.options, **draft.options}
    own = [key for key in options if key in STREAM_KEYS]
    yield from (f"    {key}: {scalar(options.pop(key))}" for key in own)
    yield "    source:"
    yield from _paths(draft.paths)
    read_as = draft.files[0].read_as
    if read_as.format:
        yield f"      format: {scalar(read_as.format)}    # by its first bytes"
    if read_as.split_by:
        yield f"      split_by: {read_as.split_by}    # what is a document: file, line or paragraph"
    if draft.shape:
        yield f"      shape: {scalar(draft.shape)}"
    for key, value in {**draft.guess.fields, **options}.items():
        yield f"      {key}: {scalar(value)}"


def _paths(paths: Sequence[str]) -> Iterator[str]:
    if len(paths) == 1:
        yield f"      path: {scalar(paths[0])}"
        return
    yield "      path:"
    yield from (f"        - {scalar(path)}" for path in paths)


def scalar(value: Any) -> str:
    """A value on one line of YAML. `${` is escaped, since OmegaConf would replace it."""
    import yaml

    is_long = isinstance(value, str) and "\n" in value
    text = yaml.safe_dump(
        value,
        default_flow_style=True,
        default_style='"' if is_long else None,
        width=1 << 30,
        allow_unicode=True,
        sort_keys=False,
    )
    return text.removesuffix("...\n").strip().replace("${", "\\${")
