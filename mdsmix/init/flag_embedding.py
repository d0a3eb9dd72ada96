"""A mixture file -> streams with their shares. A source without files, and a file without a source, is told.

The file is the one that FlagEmbedding publishes with its activation beacon: `mixture`, percents of the whole budget, and
`num_tokens_avg`, tokens of a record on average. A source is what a file is called by, or the nearest folder on its way from the
recipe, without numbers, suffixes and words such as part or train, in any case: `commoncrawl.jsonl`, `CommonCrawl/chunk1/*.parquet`, `commoncrawl-00001-of-00010.json`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mdsmix import typed
from mdsmix.errors import RecipeError
from mdsmix.init.data_files import Said, find_data
from mdsmix.init.drafts import Draft, plain_name, sort_out, telling
from mdsmix.sources import SourceFile, size_of
from mdsmix.storage import locate
from mdsmix.words import listed

WANTED = '{"mixture": {"c4": 26.7, "wiki": 3.8}, "num_tokens_avg": {"c4": 378}}'
ROUNDING = 0.5
"Percents are rounded, so their sum may exceed 100 by this much."
MOST_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """What a mixture file says."""

    mixture: dict[str, int | float]
    "Percents of the whole budget, by source."
    num_tokens_avg: dict[str, int | float] = field(default_factory=dict)
    "Tokens of a record on average."


def read_mixture(path: str) -> Mixture:
    """RecipeError where the file is no mixture: what is wrong in it, and how one is written."""
    content = locate(path).fetch()
    if content is None:
        raise RecipeError(f"There is no mixture file {path}: name a JSON file such as {WANTED}.")
    try:
        found = typed.load(Mixture, content[1])
    except typed.Misfit as error:
        raise RecipeError(f"{path} is no mixture file: {error} One is {WANTED}.") from None
    percents, total = found.mixture.values(), sum(found.mixture.values())
    if min(percents, default=0) < 0 or not 0 < total <= 100 + ROUNDING:
        raise RecipeError(
            f"{path}: the percents of its mixture come to {total:g}; they are of one budget, so give 100 in all at most, each 0 or more."
        )
    return found


def match(
    path: str, names: Sequence[str], base: Path, is_budgeted: bool, said: Said
) -> list[Draft]:
    """The streams of the sources of a mixture file that are among the files, folders and patterns.

    Args:
        is_budgeted: each is to be a sample as large as the budget wants.
    """
    mixture, drafts = read_mixture(path), list[Draft]()
    files = _files_of(path, mixture.mixture, names, base, said)
    for name, percent in mixture.mixture.items():
        if not (percent and files[name]):
            why = "and no file or folder that was named is called so: it is" if percent else "so it is"  # fmt: skip
            said.append(f"{name}: {percent:g}% of the mixture, {why} left out")
            continue
        for split, draft in _by_split(name, files[name], said).items():
            drafts.append(draft)
            if split:
                continue
            draft.share = f"{percent:g}%"
            if is_budgeted:
                draft.keys["sample"] = "budget"
            if mean := mixture.num_tokens_avg.get(name):
                draft.keys["expected_mean_tokens"] = mean
    return drafts


def _files_of(
    path: str, sources: Collection[str], names: Sequence[str], base: Path, said: Said
) -> dict[str, list[SourceFile]]:
    """Source -> its files. Files of no source are told."""
    by_word = {_known(name): name for name in sources}
    found, others = defaultdict[str, list[SourceFile]](list), list[str]()
    for file in find_data(names, base, said):
        *folders, last = file.name.split("/")
        parts = (last.partition(".")[0], *reversed(folders))
        words = (_known(w) for part in parts for w in (part, "".join(telling(part))))
        if word := next(filter(by_word.__contains__, words), None):
            found[by_word[word]].append(file)
        elif file.location.url != locate(path).url:
            others.append(file.name)
    if others:
        said.append(f"of no source of the mixture, and left out: {listed(others, MOST_SHOWN)}")
    return found


def _known(name: str) -> str:
    """The letters and digits of a name in lower case: people write the rest differently."""
    return re.sub(r"[\W_]", "", name.lower())


def _by_split(name: str, files: list[SourceFile], said: Said) -> dict[str, Draft]:
    """A stream for each split of the source. If its files differ in shape, the shape with the most bytes wins, and the others are told."""
    found = dict[str, Draft]()
    for draft in sorted(sort_out(files, said, is_one=True), key=lambda d: -size_of(d.files)):
        if found.setdefault(draft.keys.get("split", ""), draft) is not draft:
            others = listed([file.name for file in draft.files], MOST_SHOWN)
            said.append(f"{name}: {others} left out, since its fields are not those of most of it")
        draft.name = plain_name(name)
    if not found:
        said.append(f"{name}: none of its files can be read, so it is left out")
    return found
