"""A mixture file -> streams with their shares. Sources without files, and files without a source, are reported.

FlagEmbedding publishes such a file with its activation beacon. It holds `mixture`, percents of the whole budget, and
`num_tokens_avg`, mean tokens of a record. A file belongs to the source of its own name, or else of its nearest folder. Numbers,
suffixes, upper case and words such as part or train do not count: `commoncrawl.jsonl`, `CommonCrawl/chunk1/*.parquet` and
`commoncrawl-00001-of-00010.json` belong to `commoncrawl`.
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
"The most by which the sum of percents may exceed 100, since percents are rounded."
MOST_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """The contents of a mixture file."""

    mixture: dict[str, int | float]
    "Percents of the whole budget, by source."
    num_tokens_avg: dict[str, int | float] = field(default_factory=dict)
    "Mean tokens of a record, by source."


def read_mixture(path: str) -> Mixture:
    """The mixture in a file; RecipeError, with the fault and an example, where the file is no mixture."""
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
    """The streams of a mixture file's sources that have files among `names` (files, folders, patterns).

    Args:
        is_budgeted: each stream is to be a sample as large as its share of the budget.
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
    """Source -> its files. Files of no source are reported in `said`."""
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
    """The letters and digits of a name in lower case: spellings differ in all else."""
    return re.sub(r"[\W_]", "", name.lower())


def _by_split(name: str, files: list[SourceFile], said: Said) -> dict[str, Draft]:
    """A stream for each split of the source. If its files differ in shape, the shape with the most bytes wins; other files are reported."""
    found = dict[str, Draft]()
    for draft in sorted(sort_out(files, said, is_one=True), key=lambda d: -size_of(d.files)):
        if found.setdefault(draft.keys.get("split", ""), draft) is not draft:
            others = listed([file.name for file in draft.files], MOST_SHOWN)
            said.append(f"{name}: {others} left out, since its fields are not those of most of it")
        draft.name = plain_name(name)
    if not found:
        said.append(f"{name}: none of its files can be read, so it is left out")
    return found
