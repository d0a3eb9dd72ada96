"""Streams -> the text of a recipe. A comment beside a key says why it has its value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mdsmix.init.drafts import Draft

HEAD = "# By mdsmix init, from what it saw. Every key is explained in docs/recipe.md of mdsmix."
LATER = """# mix: {{{first}: {{repeat: 2}}}}    # how often a stream is drawn an epoch; once where nothing is said
# target_responses: all    # trains every answer of a conversation; without it the last one alone, as LLM-Foundry does
"""
SEEING = """# processor: ./model    # the model's folder or hub name: how many tokens images become, so that what does not fit is left out
"""
WHY = {
    "local": "published there; `remote: s3://bucket/prefix` publishes to a bucket",
    "remote": "published there, streamed from there",
    "budget": "what an epoch holds, and of which `sample: budget` takes each stream's share",
    "absolute": "the percents are of the whole budget, and need not sum to 100 where a source is not there",
    "format": "by its first bytes",
    "split_by": "what is a document: file, line or paragraph",
}
"Key -> the comment beside it, whatever its value."


def text_of(keys: Mapping[str, Any], drafts: Sequence[Draft], why: Mapping[str, str] = WHY) -> str:
    """The recipe, with these keys at its top. A refused stream is commented out, below the reason."""
    live = [draft for draft in drafts if not draft.refused]
    shares = [
        f"  {'# ' if draft.refused else ''}{scalar(draft.name)}: {{share: {draft.share}}}"
        for draft in drafts
        if draft.share
    ]
    lines = [HEAD, *_lines(keys, why)]
    kind = drafts[0].guess.kind
    if kind.loader:
        only = f"the loader of {kind.loader.whose}, which reads {kind.word}s alone"
        lines.append(f"train_loader: {{name: {kind.loader.name}}}    # {only}")
    lines += [*(["mix:"] if shares else []), *shares, "streams:"]
    for draft in drafts:
        mark = "  # " if draft.refused else "  "
        lines += [f"  # left out: {draft.refused}"] if draft.refused else []
        lines += [mark + line for line in _stream(draft)]
    if live and not shares and not kind.loader:
        lines.append(LATER.format(first=live[0].name))
    if any(draft.guess.images is not None for draft in live):
        lines.append(SEEING)
    return "\n".join(lines).rstrip() + "\n"


def _stream(draft: Draft) -> Iterator[str]:
    yield f"{scalar(draft.name)}:"
    yield from (f"  # {note}" for note in draft.notes)
    yield from (f"  {line}" for line in _lines(draft.keys, draft.why))
    yield "  source:"
    yield from (f"    {line}" for line in _lines(draft.source, WHY))


def _lines(keys: Mapping[str, Any], why: Mapping[str, str]) -> Iterator[str]:
    """A line a key, with a comment where there is one; a line an item of several paths."""
    for key, value in keys.items():
        comment = f"    # {why[key]}" if key in why else ""
        if key == "path" and len(value) > 1:
            yield from ("path:", *(f"  - {scalar(path)}" for path in value))
        else:
            yield f"{key}: {scalar(value[0] if key == 'path' else value)}{comment}"


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
