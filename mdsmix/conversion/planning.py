"""Plans a conversion: finds out what is to be done for each stream of a recipe, and whether the
published stream is up to date.

Nothing is written here. Files of sources are listed with their sizes and times, not read (only for
`sample: budget` parts of them are read). A dry run prints the plan and its reasons.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Protocol

from mdsmix import sources
from mdsmix.conversion.bad_records import select_stale_files
from mdsmix.conversion.budget_sample import set_budget_sample
from mdsmix.conversion.finished_units import StoredUnits, list_stored
from mdsmix.conversion.job import (
    Dropped,
    Job,
    make_job,
    with_date,
    with_versions,
)
from mdsmix.conversion.keys import make_window_key, name_bad_records
from mdsmix.conversion.publish import is_published
from mdsmix.conversion.source_cache import (
    KnownSources,
    describe_finished_parts,
    forget_changed,
    recall_dropped,
)
from mdsmix.conversion.target import (
    TargetState,
    explain_rebuild,
    find_published_manifest,
    read_target,
    refuse_replacing,
    warn_lost_sources,
)
from mdsmix.conversion.unit_files import FOLDER
from mdsmix.encode.backends import find_known_difference
from mdsmix.errors import Damaged, RecipeError
from mdsmix.estimate.budget_share import BudgetShare
from mdsmix.frozen import frozen
from mdsmix.kinds.recipe_changes import SAMPLE, compare_encodings, compare_sources
from mdsmix.kinds.rules import compare_rules, find_record_rules
from mdsmix.messages import Say, join_names, plural
from mdsmix.processor.card import open_processor
from mdsmix.recipe import Recipe, StreamSpec
from mdsmix.shards.manifest import Manifest
from mdsmix.shards.verification import ReadingWatcher
from mdsmix.sources import Unit
from mdsmix.sources.find import (
    describe_empty_files,
    describe_repeated_paths,
    describe_skipped_links,
)
from mdsmix.sources.formats import format_of, list_raised_versions
from mdsmix.storage import map_threads
from mdsmix.tokenizer.card import Tokenizer, open_tokenizer
from mdsmix.tokenizer.published import PublishedTokenizer, adopt_hash
from mdsmix.tokenizer.snapshot import EarlyOpener


class Watcher(ReadingWatcher, Protocol):
    """Receives the events of a conversion; `report.progress` shows them."""

    def expect(self, sizes: Mapping[str, int]) -> None:
        """Receive the streams that are about to be converted, in order.

        Args:
            sizes: name of a stream -> bytes of its source.
        """

    def on_bad(self, records: int) -> None:
        """Receive how many bad records a work unit has. It is called for each unit that this run
        converts, and for each unit that was finished before.
        """

    def on_step(self, sentence: str) -> None:
        """Receive a sentence on a slow step that begins. `--quiet` hides such sentences."""


@frozen
class ArrayPart:
    """The value of `--part`. An array of jobs shares a conversion: with `--part 3/64` a job
    converts the third of 64 parts of the work units.
    """

    number: int
    count: int

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    @property
    def units(self) -> slice:
        """The slice of the plan's units that this part converts: part 2 of 3 converts the units at
        the positions 1, 4, 7, ...
        """
        return slice(self.number - 1, None, self.count)


def parse_part(text: str) -> ArrayPart:
    """Parse a value of `--part` such as `3/64`.

    Raises RecipeError if the text is not a number of a part and the number of all parts.
    """
    match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
    if match:
        part = ArrayPart(int(match[1]), int(match[2]))
        if 1 <= part.number <= part.count:
            return part
    raise RecipeError(
        f"--part {shlex.quote(text)} is not K/N: write the number of this part and the number of "
        "all parts. With 64 parts, they are 1/64, 2/64, ... 64/64. If your job array counts from "
        "0, add 1 to its number."
    )


@frozen(kw_only=True)
class Options:
    """The options of a run. No published byte of a whole stream depends on them."""

    only: Sequence[str] = ()
    "Streams to convert; empty: all."
    limit: int | None = None
    "Convert only so many first records of each stream, into a folder of their own; None: all."
    reencode: bool = False
    "Allow replacing a published stream that has other columns or another source."
    workers: int | None = None
    "Worker processes of this machine, or of each node; None: chosen by the number of processors."
    memory: int | None = None
    """Bytes of memory that the run and its workers may use; None: half of the memory of the machine
    or its control group.
    """
    quarantine_crashes: bool = False
    "Put records that crash workers into quarantine; otherwise the first such record ends the run."
    verify_source: bool = False
    "Read source files again even if their sizes and stamps (time or ETag) are unchanged."
    verify_target: bool = False
    "Read and hash existing shards before they are reused, and make damaged ones again."
    part: ArrayPart | None = None
    "Convert only the work units of one job of an array, and publish nothing."
    is_finish: bool = False
    """Publish the units that the jobs of an array have converted (`--finish`). The notes that they
    left at the target are read first.
    """
    engine: str = "local"
    "The engine that converts the units: `local`, `ray` or `ray://ADDRESS`."


@frozen(kw_only=True)
class StreamPlan:
    """What a conversion knows about a stream before it begins. `plan_streams` makes it for every
    command that needs it: `convert`, with or without `--part`, a dry run, and `repair`.
    """

    job: Job
    """The settings that workers get. If the chat template prints a date, they contain the date with
    which the published stream was converted.
    """
    files: list[sources.SourceFile]
    "The files of its source."
    options: Options
    target: TargetState
    "The files that are published, as they were when the plan was made."
    old: Manifest | None
    """The manifest of the published stream; None before the first publication, or if a run cannot
    continue from it.
    """
    budget_share: BudgetShare | None
    "The stream's share of a budget; None without `sample: budget`."
    expected_mean: float | None
    "The mean tokens per record that the recipe expects. The actual mean is compared with it."
    warnings: tuple[str, ...]
    """Sentences on source files of the published stream that are missing or smaller now, and on a
    condition that is true for empty texts too.
    """

    @property
    def bytes_to_read(self) -> int:
        """Source bytes that this run may read. It reads them twice if duplicates are dropped."""
        size = sources.estimate_size(self.files)
        if self.job.drops:
            size *= 2
        if self.options.part:
            size //= self.options.part.count
        return size

    @cached_property
    def units(self) -> list[Unit]:
        """The work units: parts of the source that are converted one by one."""
        return self.job.make_units(self.files)

    @cached_property
    def cache(self) -> KnownSources:
        """What is known of the content of the source files, so that they need not be read: from
        this machine's cache, and from the file `.mdsmix/sources.zst` next to the stream. It is
        empty under `--verify-source`, so that all sources are read again.
        """
        if self.options.verify_source:
            return KnownSources.empty(self.job.target)
        cache = KnownSources.load(self.job.target)
        if FOLDER in self.target.folders:
            cache.learn_objects(self.job.folder, self.units)
        forget_changed(self.job, cache)
        return cache

    @property
    def is_up_to_date(self) -> bool:
        """Whether nothing remains to be done. Two conditions must be true: no source file has
        changed (by its size and its time or ETag), and the stream is published with exactly the
        work units, bad records and names of these files, and with the recipe's keys that find them.
        """
        # The content of all sources must be known.
        contents = self.cache.contents(self.units)
        if self.old is None or not contents or len(contents) < len(self.units):
            return False
        dropped_by_unit = recall_dropped(self.job, contents, self.cache)
        if dropped_by_unit is None:
            return False
        # Compare the keys of all windows (slices of units) with the published ones.
        keys = list[str]()
        bad_names = set[str]()
        for content, dropped in zip(contents, dropped_by_unit, strict=True):
            for window in content.windows:
                key = make_window_key(self.job, window, dropped.get(window.number, b""))
                keys.append(key)
                bad_names.add(name_bad_records(key, window))
        if not is_published(self.job, self.old, self.target, keys):
            return False
        if compare_sources(self.old.source, self.job.source):
            return False
        if self._published_names != {file.name for unit in self.units for file in unit.files}:
            return False
        return not select_stale_files(self.target.quarantined, bad_names)

    @property
    def _published_names(self) -> set[str] | None:
        """The names of the files that the published stream was made from. None before the first
        publication, and if the list of the names is damaged; the next publication writes it again.
        """
        if self.old is None:
            return None
        try:
            return {entry.path for entry in self.old.read_sources(self.job.folder)}
        except Damaged:
            return None


@frozen(kw_only=True)
class _Draft:
    """What `plan_streams` has found out about a stream of the recipe before it makes the plan."""

    stream: StreamSpec
    files: list[sources.SourceFile]
    job: Job
    budget_share: BudgetShare | None
    target: TargetState
    old: Manifest | None
    """The manifest of the published stream; None before the first publication, or if a run cannot
    continue from it.
    """

    @property
    def published_tokenizer(self) -> PublishedTokenizer | None:
        """The tokenizer of the published stream; None if `old` is None."""
        return PublishedTokenizer(self.old.tokenizer, self.job.root) if self.old else None


def plan_streams(
    recipe: Recipe, options: Options, say: Say | None = None, opener: EarlyOpener | None = None
) -> list[StreamPlan]:
    """Plan the chosen streams, in the order of the recipe.

    Raises RecipeError if one of them may not be published.

    Args:
        recipe: the recipe with the streams.
        options: the options of the run, which choose the streams.
        say: called with sentences for the user; None: say nothing.
        opener: opens a tokenizer that is new to this machine while transformers describes it; None:
            it is opened later.
    """
    # Open the tokenizer and the processor, once for all streams.
    streams = _choose_streams(recipe, options.only)
    tokenizer = open_tokenizer(recipe.tokenizer, say, opener)
    if recipe.processor and any(stream.has_images for stream in streams):
        open_processor(recipe.processor, say)
    drafts = _draft_streams(recipe, streams, tokenizer, options)

    # A published stream keeps the tokenizer hash that it has. New streams take the hash that a
    # published stream has for the same tokenizer.
    published = [draft.published_tokenizer for draft in drafts if draft.published_tokenizer]
    tokenizer_of_new = adopt_hash(tokenizer, published)
    plans = list[StreamPlan]()
    for draft in drafts:
        adopted = tokenizer_of_new
        if draft.published_tokenizer:
            adopted = adopt_hash(tokenizer, [draft.published_tokenizer])
        plans.append(_complete(draft, adopted, options, recipe))
    return plans


def _draft_streams(
    recipe: Recipe, streams: Sequence[StreamSpec], tokenizer: Tokenizer, options: Options
) -> list[_Draft]:
    """List the source files of each stream, and read what is published of it.

    Args:
        recipe: the recipe of all streams.
        streams: the streams that are planned. All have a source.
        tokenizer: the tokenizer, with its hash by today's rule.
        options: the options of the run.
    """
    whole_jobs = [make_job(recipe, stream, tokenizer, options.limit) for stream in streams]
    # List the files of all sources at the same time.
    specs = [stream.source for stream in streams if stream.source]
    files = map_threads(
        lambda spec: sources.find_files(spec.path, recipe.folder, sources.ReadAs.of(spec)), specs
    )
    # A job has the sample that a budget asks for, which depends on the files.
    jobs = list[Job]()
    budget_shares = list[BudgetShare | None]()
    for stream, whole_job, stream_files in zip(streams, whole_jobs, files, strict=True):
        job, budget_share = set_budget_sample(recipe, stream, whole_job, stream_files)
        jobs.append(job)
        budget_shares.append(budget_share)
    # Read all targets at the same time.
    targets = map_threads(read_target, jobs)
    return [
        _Draft(
            stream=stream,
            files=stream_files,
            job=job,
            budget_share=budget_share,
            target=target,
            old=find_published_manifest(job, target, options.reencode),
        )
        for stream, stream_files, job, budget_share, target in zip(
            streams, files, jobs, budget_shares, targets, strict=True
        )
    ]


def _refuse_where_on_texts(draft: _Draft) -> None:
    """Raise RecipeError if `where` compares a field with a boolean, a number or null, and a file
    has only text. No text equals any of these, so the comparison would be the same for all records.
    """
    typed = draft.job.stream.fields_typed_by_where
    if not typed:
        return
    for file in draft.files:
        if format_of(file).cells_are_texts:
            raise RecipeError(
                f"stream {draft.stream.name}: source.where compares {typed[0]} with a boolean, "
                f"number or null, but {file.name} has only text, and no text equals one of them: "
                "'1' does not equal 1, and an empty value is '', not null. Compare the field with "
                f"text, for example {typed[0]} == '1', or {typed[0]} != '' if it may not be empty."
            )


def _warn_of_empty_texts(draft: _Draft) -> str:
    """Return a warning if `where` asks of a field only whether it exists, and the cells of a table
    are text. An empty cell is then '' and exists; in pandas and DuckDB it is null. Return ""
    otherwise.
    """
    names = draft.job.stream.fields_only_in_exists
    if not names:
        return ""
    name = names[0]
    for file in draft.files:
        if format_of(file).empty_cells_are_texts:
            return (
                f"WARNING: in source.where exists({name}) is true for an empty value of "
                f"{file.name} too, since all values of this file are text: an empty one is '', "
                f"not null. Compare it with '' instead: {name} != '' (or {name} == '' for "
                f"not exists({name}))"
            )
    return ""


def _complete(draft: _Draft, tokenizer: Tokenizer, options: Options, recipe: Recipe) -> StreamPlan:
    """Return the plan of a stream. If the stream is published, its job takes over the date of the
    chat template, and other settings that should not change.

    Raises RecipeError if the published stream may not be replaced, or `where` compares a field of a
    file that has only text with another value than text.

    Args:
        draft: what is known about the stream.
        tokenizer: the tokenizer, with the hash that the stream keeps.
        options: the options of the run.
        recipe: the recipe of all streams.
    """
    _refuse_where_on_texts(draft)
    old = draft.old
    job = replace(draft.job, tokenizer=tokenizer)
    unequal = find_known_difference(tokenizer)
    refuse_replacing(job, old, draft.files, options.reencode, recipe)
    job = with_date(job, old.encoding.date_string if old else None)
    if old:
        # These rules (such as that on `loss_mask`) count only if they change the published stream.
        rules = job.encoding.rules | find_record_rules(old, job.stream.shape)
        job = job.with_settings(rules=rules)
    has_messages = bool(job.stream.fields_with_text_or_messages)
    job = replace(
        job,
        unequal=unequal.label if unequal else "",
        formats=list_raised_versions(map(format_of, draft.files), has_messages),
        source=_list_source_keys(job, old),
    )
    paths = draft.stream.source.path if draft.stream.source else []
    warnings = (
        *warn_lost_sources(job, old, draft.files, options.reencode),
        _warn_of_empty_texts(draft),
        describe_empty_files(draft.files),
        describe_repeated_paths(paths),
        describe_skipped_links(paths, recipe.folder, draft.files),
    )
    return StreamPlan(
        job=job,
        files=draft.files,
        options=options,
        target=draft.target,
        old=old,
        budget_share=draft.budget_share,
        expected_mean=draft.stream.expected_mean_tokens,
        warnings=tuple(filter(None, warnings)),
    )


def _list_source_keys(job: Job, old: Manifest | None) -> dict[str, Any]:
    """Return the value of `source` in the job's manifest: the recipe's settings on which files are
    read, such as {"source.path": ["a/*.jsonl"]}.

    If a budget decided the sample of the published stream, its manifest has `sample: budget`. This
    key stays when the recipe now gives the same share as a number, so that a repair makes the same
    manifest.

    Args:
        job: the job of the stream.
        old: the manifest of the published stream.
    """
    keys = dict(job.source)
    if old and SAMPLE in old.source and old.encoding.sample == job.encoding.sample:
        keys[SAMPLE] = old.source[SAMPLE]
    return keys


def _choose_streams(recipe: Recipe, only: Sequence[str]) -> list[StreamSpec]:
    """Return the streams with these names, and the streams that are held out of them; without
    names, all streams with a source.

    Raises RecipeError if a name is unknown, or no stream has a source.

    Args:
        recipe: the recipe with the streams.
        only: the names (`--only`).
    """
    names = [stream.name for stream in recipe.sourced]
    for name in only:
        if name not in names:
            raise RecipeError(
                f"--only {name} names no stream that has a source; the streams with a source are: "
                f"{', '.join(names) or 'none'}."
            )
    if not names:
        raise RecipeError(
            "no stream of the recipe has a source, so there is nothing to convert: add a source to "
            "a stream in the recipe."
        )
    return recipe.choose_sourced(only)


def describe_plans(recipe: Recipe, options: Options) -> Iterator[str]:
    """Yield sentences on what a run would do: first about the tokenizer, then about each stream."""
    plans = plan_streams(recipe, options)
    yield from plans[0].job.tokenizer.remarks
    for plan in plans:
        yield from _describe_stream(plan)


def _describe_stream(plan: StreamPlan) -> Iterator[str]:
    """Yield sentences on what a run would do with a stream, and why. Details are indented."""
    job = plan.job
    units = plan.units
    if job.limit:  # which units contain these records is known only when they are read
        yield (
            f"{job.name}: the first {job.limit} records would be converted into {job.target}, "
            "unless they are converted already"
        )
        return
    if plan.options.is_finish:
        finished_parts = plan.cache.learn_parts(job.folder)
        yield f"{job.name}: {describe_finished_parts(finished_parts)}"
    # Say which units would be converted.
    contents = plan.cache.contents(units)
    dropped = recall_dropped(job, contents, plan.cache)
    unfinished = list[Unit]()
    if not plan.is_up_to_date:
        # Count as if nothing were dropped if the duplicates are not known (None).
        unfinished = _find_unfinished(plan, dropped or [{} for _ in contents])
    yield (
        f"{job.name}: {len(unfinished)} of {len(units)} work units would be converted, into "
        f"{job.target}"
    )
    if plan.budget_share:
        yield f"  {plan.budget_share.explanation}"
    # Say what is known only when the source is read.
    unknown = len(units) - len(contents)
    if unknown:
        yield (
            f"  {plural(unknown, 'unit')} must be read to see if the records have changed; units "
            "that are converted already are then skipped"
        )
    if dropped is None:
        yield (
            "  the source must be read to find duplicates; a work unit is also converted again if "
            "the duplicates to drop from it have changed"
        )
    yield from (f"  {warning}" for warning in plan.warnings)
    yield from (f"  {reason}" for reason in _list_reasons(plan, unfinished))


def _list_reasons(plan: StreamPlan, unfinished: Sequence[Unit]) -> Iterator[str]:
    """Yield sentences on why a run would convert or publish work units.

    Args:
        plan: the plan of the stream.
        unfinished: the units that the run would convert.
    """
    job = plan.job
    old = plan.old
    if old is None:
        reason = explain_rebuild(job, plan.target)
        yield "nothing is published there yet" if reason is None else reason
        return
    changes = _find_changes(job, old)
    yield from changes
    if unfinished and not changes:
        file_names = set[str]()
        for unit in unfinished:
            file_names.update(file.name for file in unit.files)
        names = sorted(file_names)
        yield f"units of {join_names(names, 5)} are new, edited or incomplete"
    if not unfinished and not plan.is_up_to_date:
        folder = job.place(old.index_hash)
        yield f"all units are converted already; they would be published at {folder}"


def _find_unfinished(plan: StreamPlan, dropped: Iterable[Dropped]) -> list[Unit]:
    """Return the work units that a run would convert, as far as is known without reading sources. A
    unit whose content is unknown on this machine counts as unfinished.

    Args:
        plan: the plan of the stream.
        dropped: for each unit with known content, in order, the duplicates that are dropped from
            it.
    """
    job = with_versions(plan.job, plan.old)
    stored = StoredUnits() if plan.target.is_empty else list_stored(job)
    dropped_by_unit = iter(dropped)
    unfinished = list[Unit]()
    for unit in plan.units:
        content = plan.cache.content(unit)
        if content is None:
            unfinished.append(unit)
            continue
        records = stored.find_records(job, content.windows, next(dropped_by_unit))
        if len(records) < len(content.windows):
            unfinished.append(unit)
    return unfinished


def _find_changes(job: Job, old: Manifest) -> list[str]:
    """Return a phrase for each changed setting that makes the run convert the stream again:
    `add_eos was true and is false`.

    Args:
        job: the job of the stream.
        old: the manifest of the published stream.
    """
    # Compare the hashes of tokenizer and templates.
    before = old.tokenizer
    after = job.tokenizer
    hashes: list[tuple[str, str | None, str | None]] = [
        ("the tokenizer", before.hash[:8], after.hash[:8]),
    ]
    if job.kind.has_template:
        hashes.append(("the chat template", before.chat_template_hash, after.chat_template_hash))
    if job.kind.has_template and job.may_have_tools:
        name = "the chat template tool_use"
        hashes.append((name, before.tool_template_hash, after.tool_template_hash))
    changes = list[str]()
    for name, old_hash, new_hash in hashes:
        if old_hash != new_hash:
            changes.append(f"{name} was {old_hash} and is {new_hash}")
    # Compare the other settings. The manifest joins the names of several backends by " + ".
    if not all(map(job.trusts, old.backend.split(" + "))):
        changes.append(f"the tokenizer's backend was {old.backend} and is the reference")
    changes += map(str, compare_encodings(old.encoding, job.encoding))
    changes += map(str, compare_sources(old.source, job.source))
    changes += [f"the rule {change}" for change in compare_rules(old.rules, job.rules)]
    return changes
