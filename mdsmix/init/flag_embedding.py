"""A mixture file -> streams with their shares. A source without files, and a file without a source, is told.

The file is the one that FlagEmbedding publishes with its activation beacon: `mixture`, percents of the whole budget, and
`num_tokens_avg`, tokens of a record on average. A source is what a file or a folder is called by, without numbers, suffixes and
words such as part or train, in any case: `commoncrawl.jsonl`, `CommonCrawl/chunk1/*.parquet`, `commoncrawl-00001-of-00010.json`.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mdsmix import typed
from mdsmix.errors import RecipeError
from mdsmix.init.data_files import find_data
from mdsmix.init.drafts import (
    PLAIN,
    SPLITS,
    Draft,
    Sorted,
    plain_name,
    sort_out,
)
from mdsmix.sources import SourceFile, size_of
from mdsmix.storage import Location, fixed_prefix, has_pattern, locate
from mdsmix.words import does, listed

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
    numbers = [*found.mixture.items(), *found.num_tokens_avg.items()]
    if bad := next((f"{name}: {value}" for name, value in numbers if value < 0), None):
        raise RecipeError(f"{path}: {bad} is a number below 0.")
    if (total := math.fsum(found.mixture.values())) > 100 + ROUNDING or not total:
        raise RecipeError(
            f"{path}: the percents of its mixture come to {total:g}; they are of one budget, so give 100 in all at most, and more than 0."
        )
    return found


def match(
    path: str, names: Sequence[str], base: Path, is_budgeted: bool, but: Collection[Location] = ()
) -> Sorted:
    """The streams of the sources of a mixture file that are among the files, folders and patterns; `is_budgeted`: each is to
    be a sample as large as the budget wants."""
    mixture, found = read_mixture(path), Sorted()
    of = _assigned(path, mixture.mixture, names, base, but, found)
    for name, percent in mixture.mixture.items():
        if not (percent and of[name]):
            why = (
                "and no file or folder that was named is called so: it is"
                if percent
                else "so it is"
            )
            found.left_out.append(f"{name}: {percent:g}% of the mixture, {why} left out")
            continue
        for draft in _drafts(name, of[name], found):
            if draft.split == "train":
                options = dict(draft.options)
                if is_budgeted:
                    options["sample"] = "budget"
                if mean := mixture.num_tokens_avg.get(name):
                    options["expected_mean_tokens"] = _whole(mean)
                draft = replace(draft, options=options, share=f"{_whole(percent)}%")
            found.drafts.append(draft)
    return found


def _assigned(
    path: str,
    sources: Collection[str],
    names: Sequence[str],
    base: Path,
    but: Collection[Location],
    found: Sorted,
) -> dict[str, list[SourceFile]]:
    """Source -> its files. Files of no source are told."""
    by_word = {_known(name): name for name in sources}
    of = defaultdict[str, list[SourceFile]](list)
    others, seen = list[str](), {locate(path).url}
    for name in names:
        data = find_data([name], base, but)
        found.left_out += data.sentences
        for file in data.files:
            if file.location.url in seen:
                continue
            seen.add(file.location.url)
            words = (each for part in _parts(name, file) for each in (_known(part), _plain(part)))
            source = next((by_word[word] for word in words if word in by_word), None)
            if source is None:
                others.append(file.name)
            else:
                of[source].append(file)
    if others:
        found.left_out.append(
            f"of no source of the mixture, and left out: {listed(others, MOST_SHOWN)}"
        )
    return of


def _parts(named: str, file: SourceFile) -> Iterator[str]:
    """The name of the file, then the names of its folders from the inside out, up to the folder that the user named."""
    url = locate(named).url.rstrip("/")
    above = fixed_prefix(url) if has_pattern(url) and file.location.url != url else url
    inside = file.location.url.removeprefix(above.rpartition("/")[0] + "/")
    *folders, last = inside.split("/")
    yield last.partition(".")[0]
    yield from reversed(folders)


def _known(name: str) -> str:
    """The letters and digits of a name in lower case: people write the rest differently."""
    return re.sub(r"[\W_]", "", name.lower())


def _plain(part: str) -> str:
    """A part of a path without numbers and without words such as part or train."""
    words = re.split(r"[\W_]+", part.lower())
    said_by_all = {"", *PLAIN, *SPLITS}
    return "".join(word for word in words if word.rstrip("0123456789") not in said_by_all)


def _drafts(name: str, files: list[SourceFile], told: Sorted) -> Iterator[Draft]:
    """A stream for each split of the source. If its files differ in shape, the shape with the most bytes wins, and the others are told."""
    found = sort_out(files)
    told.unknown += found.unknown
    told.failed += found.failed
    if not found.drafts:
        told.left_out.append(f"{name}: none of its files can be read, so it is left out")
    by_split = defaultdict[str, Any](lambda: defaultdict[Any, list[Draft]](list))
    for draft in found.drafts:
        by_split[draft.split][_sort(draft)].append(draft)
    for sorts in by_split.values():
        first, *less = sorted(
            sorts.values(), key=lambda drafts: -sum(size_of(draft.files) for draft in drafts)
        )
        yield _joined(name, first)
        for others in less:
            spelled = listed([file.name for draft in others for file in draft.files], MOST_SHOWN)
            told.left_out.append(
                f"{name}: {spelled} {does(others, 'has', 'have')} other fields than most of it, and cannot be of one stream: left out"
            )


def _sort(draft: Draft) -> Any:
    """Streams may be joined if they are equal in this."""
    return *draft.guess.same(), str(draft.options), draft.files[0].read_as


def _joined(name: str, drafts: Sequence[Draft]) -> Draft:
    files = [file for draft in drafts for file in draft.files]
    paths = [path for draft in drafts for path in draft.paths]
    records = [record for draft in drafts for record in draft.records][:50]
    return replace(drafts[0], name=plain_name(name), files=files, paths=paths, records=records)


def _whole(number: float) -> int | float:
    return int(number) if number == int(number) else number
