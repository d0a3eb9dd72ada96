"""A mixture file -> streams with their shares: which files are of which of its sources, and what is there of one of the two alone.

The file is the one that FlagEmbedding publishes with its activation beacon: `mixture`, percents of the whole budget, and
`num_tokens_avg`, tokens of a record on average. A source is what a file or a folder is called by, without numbers, suffixes and
words such as part or train, in any case: `commoncrawl.jsonl`, `CommonCrawl/chunk1/*.parquet`, `commoncrawl-00001-of-00010.json`.
"""

from __future__ import annotations

import glob
import json
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import orjson

from mdsmix.errors import RecipeError
from mdsmix.init.finding import find_data
from mdsmix.init.grouping import PLAIN, SPLITS, Draft, Sorted, named_apart, sort_out
from mdsmix.sources import SourceFile, size_of
from mdsmix.storage import Location, fixed_prefix, has_pattern, locate
from mdsmix.words import does, listed

WANTED = '{"mixture": {"c4": 26.7, "wiki": 3.8}, "num_tokens_avg": {"c4": 378}}'
ROUNDING = 0.5
"By how much percents may come to more than 100, each of them rounded."
MOST_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """What a mixture file says."""

    percents: Mapping[str, float]
    "Of the whole budget, by source; those above 0."
    means: Mapping[str, float]
    "Tokens of a record on average, where it says so."
    zero: Sequence[str]
    "Sources of 0 percent."
    unknown: Sequence[str]
    "Names in `num_tokens_avg` that are in no mixture."


@dataclass(slots=True)
class Matched:
    """The streams of a mixture, and what is to be said."""

    drafts: list[Draft] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    found: Sorted = field(default_factory=Sorted)
    "Files of no shape, and those that could not be read."


def read_mixture(path: str) -> Mixture:
    """RecipeError where the file is no mixture: what is wrong in it, and how one is written."""
    tree = _tree(path)
    mixture = _numbers(path, tree, "mixture")
    means = _numbers(path, tree, "num_tokens_avg") if "num_tokens_avg" in tree else {}
    if (total := math.fsum(mixture.values())) > 100 + ROUNDING:
        raise RecipeError(
            f"{path}: the percents of its mixture come to {total:g}, and they are of one budget: lower them to 100 in all."
        )
    if not total:
        raise RecipeError(f"{path}: no source of its mixture has a percent above 0.")
    if bad := next((name for name in means if not means[name]), None):
        raise RecipeError(f"{path}: num_tokens_avg.{bad} is 0; a record holds a token at least.")
    return Mixture(
        percents={name: percent for name, percent in mixture.items() if percent},
        means=means,
        zero=[name for name, percent in mixture.items() if not percent],
        unknown=sorted(means.keys() - mixture.keys()),
    )


def match(
    path: str, names: Sequence[str], base: Path, is_budgeted: bool, but: Collection[Location] = ()
) -> Matched:
    """The streams of the sources of a mixture file that are among the files, folders and patterns; `is_budgeted`: each is to
    be a sample as large as the budget wants."""
    mixture, matched = read_mixture(path), Matched()
    of, others = _assigned(
        path, [*mixture.percents, *mixture.zero], names, base, but, matched.left_out
    )
    for name, percent in mixture.percents.items():
        files = of.get(name, [])
        if not files:
            matched.left_out.append(
                f"{name}: {percent:g}% of the mixture, and no file or folder that was named is called so: it is left out"
            )
            continue
        for draft in _drafts(name, files, [f for of_one in of.values() for f in of_one], matched):
            is_trained = draft.split == "train"
            options = dict(draft.options)
            if is_trained and is_budgeted:
                options["sample"] = "budget"
            if is_trained and name in mixture.means:
                options["expected_mean_tokens"] = _whole(mixture.means[name])
            share = f"{_whole(percent)}%" if is_trained else ""
            matched.drafts.append(replace(draft, options=options, share=share))
    matched.drafts = list(named_apart(matched.drafts))
    matched.left_out += _told(mixture, others)
    return matched


def _told(mixture: Mixture, others: Sequence[SourceFile]) -> Iterator[str]:
    if mixture.zero:
        yield f"{listed(mixture.zero, MOST_SHOWN)}: 0% of the mixture, left out"
    if mixture.unknown:
        names = mixture.unknown
        yield f"{listed(names, MOST_SHOWN)} {does(names, 'stands', 'stand')} in num_tokens_avg and in no mixture, which changes nothing"
    if others:
        named = listed([file.name for file in others], MOST_SHOWN)
        yield f"of no source of the mixture, and left out: {named}"


def _tree(path: str) -> dict[str, Any]:
    place = locate(path)
    content = place.fetch()
    if content is None:
        raise RecipeError(f"There is no mixture file {path}: name a JSON file such as {WANTED}.")
    try:
        tree = orjson.loads(content[1])
    except orjson.JSONDecodeError as error:
        raise RecipeError(f"{path} is no JSON ({error}); a mixture file is {WANTED}.") from None
    _refuse_twice(path, content[1])
    if not isinstance(tree, dict) or "mixture" not in tree:
        held = listed(list(tree), MOST_SHOWN) if isinstance(tree, dict) else _json(tree)
        raise RecipeError(
            f"{path} has no key mixture (it holds {held or 'nothing'}); a mixture file is {WANTED}."
        )
    return tree


def _refuse_twice(path: str, content: bytes) -> None:
    """RecipeError for a key that stands twice in an object, of which orjson takes the last without a word."""

    def look(pairs: list[tuple[str, Any]]) -> None:
        if twice := next(
            (key for key, n in Counter(key for key, _ in pairs).items() if n > 1), None
        ):
            raise RecipeError(
                f"{path} names {twice} twice, and which of the two is meant it does not say: take one of them out."
            )

    try:
        json.loads(content, object_pairs_hook=look)
    except RecursionError:
        raise RecipeError(f"{path} is nested too deeply; a mixture file is {WANTED}.") from None


def _numbers(path: str, tree: Mapping[str, Any], key: str) -> dict[str, float]:
    section = tree[key]
    if not isinstance(section, dict) or not section:
        raise RecipeError(
            f"{path}: {key} is {_json(section)}; it must give each source a number, as in {WANTED}."
        )
    for name, value in section.items():
        is_number = type(value) in (int, float) and 0 <= value < math.inf
        if not is_number or not _known(name):
            what = f"is {_json(value)}; it must be a number of at least 0"
            why = (
                what
                if not is_number
                else "has a name without a letter or digit, by which no file could be told"
            )
            raise RecipeError(f"{path}: {key}.{name} {why}.")
    if twice := _alike(section):
        raise RecipeError(
            f"{path}: {key} names {' and '.join(twice)}, which no file could be told apart by: name them otherwise."
        )
    return section


def _alike(names: Iterable[str]) -> list[str]:
    by_word: dict[str, list[str]] = {}
    for name in names:
        by_word.setdefault(_known(name), []).append(name)
    return next((same for same in by_word.values() if len(same) > 1), [])


def _assigned(
    path: str,
    sources: Sequence[str],
    names: Sequence[str],
    base: Path,
    but: Collection[Location],
    left_out: list[str],
) -> tuple[dict[str, list[SourceFile]], list[SourceFile]]:
    """The files of each source, and those of none."""
    by_word = {_known(name): name for name in sources}
    of: dict[str, list[SourceFile]] = {}
    others, seen = list[SourceFile](), {locate(path).url}
    for name in names:
        found = find_data([name], base, but)
        left_out += found.sentences
        for file in found.files:
            if file.location.url in seen:
                continue
            seen.add(file.location.url)
            words = (each for part in _parts(name, file) for each in (_known(part), _plain(part)))
            source = next((by_word[word] for word in words if word in by_word), None)
            (others if source is None else of.setdefault(source, [])).append(file)
    return of, others


def _parts(named: str, file: SourceFile) -> Iterator[str]:
    """What a file is called and lies in, the nearest first, as far up as the folder that was named."""
    url = locate(named).url.rstrip("/")
    above = fixed_prefix(url) if has_pattern(url) and file.location.url != url else url
    inside = file.location.url.removeprefix(above.rpartition("/")[0] + "/")
    *folders, last = inside.split("/")
    yield last.partition(".")[0]
    yield from reversed(folders)


def _known(name: str) -> str:
    """A name without what people write differently."""
    return re.sub(r"[\W_]", "", name.lower())


def _plain(part: str) -> str:
    """A part of a path without numbers and words that name no source."""
    words = [word.rstrip("0123456789") for word in re.split(r"[\W_]+", part.lower())]
    kept = zip(re.split(r"[\W_]+", part.lower()), words, strict=True)
    return "".join(whole for whole, word in kept if word and word not in PLAIN | SPLITS.keys())


def _drafts(
    name: str, files: list[SourceFile], known: Sequence[SourceFile], matched: Matched
) -> Iterator[Draft]:
    """A stream of the source's files; of another split, another. Of files that are not alike those with the most bytes are it."""
    found = sort_out(files)
    matched.found.unknown += found.unknown
    matched.found.failed += found.failed
    if not found.drafts:
        matched.left_out.append(f"{name}: none of its files can be read, so it is left out")
    by_split: dict[str, dict[Any, list[Draft]]] = {}
    for draft in found.drafts:
        by_split.setdefault(draft.split, {}).setdefault(_sort(draft), []).append(draft)
    for sorts in by_split.values():
        first, *less = sorted(sorts.values(), key=_bytes, reverse=True)
        yield _joined(name, first, known)
        for others in less:
            spelled = listed([file.name for draft in others for file in draft.files], MOST_SHOWN)
            matched.left_out.append(
                f"{name}: {spelled} {does(others, 'has', 'have')} other fields than most of it, and cannot be of one stream: left out"
            )


def _sort(draft: Draft) -> Any:
    """By which streams may be one."""
    options = sorted(draft.options.items(), key=str)
    return draft.kind, str(sorted(draft.fields.items())), draft.shape, str(options), draft.files[0].read_as  # fmt: skip


def _bytes(drafts: Sequence[Draft]) -> int:
    return sum(size_of(draft.files) for draft in drafts)


def _joined(name: str, drafts: Sequence[Draft], known: Sequence[SourceFile]) -> Draft:
    files = [file for draft in drafts for file in draft.files]
    paths = [path for draft in drafts for path in draft.paths]
    if len(paths) > 1 and (pattern := _pattern(files, known)):
        paths = [pattern]
    records = [record for draft in drafts for record in draft.records][:50]
    written = re.sub(r"[^A-Za-z0-9._-]", "_", name).lstrip("._-") or "data"
    return replace(drafts[0], name=written, files=files, paths=paths, records=records)


def _pattern(files: Sequence[SourceFile], known: Sequence[SourceFile]) -> str | None:
    """One pattern for files of several folders of one, where it finds no other file that is known."""
    folder = _common([file.name for file in files])
    suffixes = {file.name.rpartition("/")[2].partition(".")[2] for file in files}
    if not folder or len(suffixes) > 1:
        return None
    (suffix,) = suffixes
    mine = {file.name for file in files}
    is_found = (
        f.name for f in known if f.name.startswith(f"{folder}/") and f.name.endswith(f".{suffix}")
    )
    return (
        f"{glob.escape(folder)}/**/*.{glob.escape(suffix)}" if mine.issuperset(is_found) else None
    )


def _common(names: Sequence[str]) -> str:
    """The folder that all of them lie in."""
    parts = [name.split("/")[:-1] for name in names]
    same = 0
    while all(len(each) > same and each[same] == parts[0][same] for each in parts):
        same += 1
    return "/".join(parts[0][:same])


def _whole(number: float) -> str | int | float:
    return int(number) if number == int(number) else number


def _json(value: Any) -> str:
    """A value as the file writes it, as far as a sentence has room for it."""
    text = orjson.dumps(value).decode()
    return text if len(text) <= 60 else f"{text[:60]}..."
