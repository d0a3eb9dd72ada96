"""Check the order of a run's writes: a reader, or a run that continues after a kill, must be able
to use the target at any moment.

No step may add a fault to the state of the target (`find_faults`). The rules below cover what no
single state shows. Steps may overlap: what must exist before a step counts only if it was finished
before the step began, and what must be gone only if it was gone by then. `tests/recording.py`
records the steps of a run.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import orjson
import xxhash

from mdsmix.conversion.unit_files import UnitRecord, parse_record, parse_unit_file
from mdsmix.errors import Unreachable
from mdsmix.shards.index import Index, parse_index
from mdsmix.shards.manifest import Manifest, parse_manifest
from tests.recording import State, Step

SHARD = re.compile(r"([0-9a-f]{32})(-\d+)?\.mds(\.zstd)?")
RECORD = re.compile(r"(.+)/\.mdsmix/([0-9a-f]{32})-[0-9a-f]{8}\.unit")
VERSION = re.compile(r"(.+)-([0-9a-f]{8})")
INDEX, MANIFEST, LEASE = "index.json", "mdsmix.manifest", ".mdsmix/lease"
SIDE_FILE = re.compile(r"([0-9a-f]{32})\.(sources\.zst|[a-z0-9-]+\.side)")
TOKENIZER, TOKENIZER_CARD = re.compile(r"(.*/)?tokenizer-[0-9a-f]{8}"), "mdsmix.tokenizer"


def hash_content(content: bytes) -> str:
    return xxhash.xxh128_hexdigest(content)


def index_in(state: State, name: str) -> Index | None:
    """Return the index in a file. None if it is missing or damaged."""
    with suppress(Unreachable):
        return parse_index(state[name], name) if name in state else None


def manifest_in(state: State, folder: str) -> Manifest | None:
    """Return the manifest in a folder. None if it is missing or damaged."""
    name = f"{folder}/{MANIFEST}"
    with suppress(Unreachable):
        return parse_manifest(state[name], name) if name in state else None


def record_in(state: State, name: str) -> UnitRecord | None:
    lines = parse_unit_file(state[name]).records.values()
    return next(map(parse_record, lines), None)


def is_shard(state: State, name: str) -> bool:
    """Return whether a file is a shard with the bytes that its name gives the hash of."""
    return bool(SHARD.fullmatch(PurePosixPath(name).name)) and has_hash_of_name(state, name)


def has_hash_of_name(state: State, name: str) -> bool:
    return name in state and PurePosixPath(name).name.startswith(hash_content(state[name]))


def find_missing_shards(state: State, record_name: str) -> list[str]:
    """Return the shards of a unit record that are neither in its split nor in a version of it."""
    record = record_in(state, record_name)
    split = RECORD.fullmatch(record_name)[1]
    missing = list[str]()
    for shard in record.shards if record else []:
        name = shard.stored.basename
        if not any(is_shard(state, f"{folder}/{name}") for folder in list_folders(state, split)):
            missing.append(name)
    return missing


def list_folders(state: State, split: str) -> set[str]:
    """Return the split's folder and those of its versions."""
    folders = {str(PurePosixPath(name).parent) for name in state}
    return {split, *(folder for folder in folders if split_of(folder) == split)}


def split_of(folder: str) -> str:
    """Return the folder of the split to which a file or folder belongs."""
    home = re.sub(r"/(\.mdsmix|quarantine)$", "", folder)
    version = VERSION.fullmatch(home)
    return version[1] if version else home


@dataclass(frozen=True)
class RecordedRun:
    """The files at a target before a run, and the steps of the run."""

    before: State
    steps: Sequence[Step]

    def _state(self, is_written: Callable[[Step], Any], is_deleted: Callable[[Step], Any]) -> State:
        """Return the files after all steps that `is_written` or `is_deleted` says are finished."""
        state = dict(self.before)
        for step in sorted(self.steps, key=lambda step: step.ended):
            if step.content is None and is_deleted(step):
                state.pop(step.name, None)
            elif step.content is not None and is_written(step):
                state[step.name] = step.content
        return state

    def least_before(self, step: Step) -> State:
        """Return the files that certainly exist when the step begins, whatever overlapping steps
        have done.
        """
        return self._state(
            lambda other: other.ended <= step.began,
            lambda other: other.began < step.ended and other != step,
        )

    def most_after(self, step: Step) -> State:
        """Return the files that may exist when the step ends: all overlapping writes are done, and
        no overlapping deletion.
        """
        return self._state(
            lambda other: other.began < step.ended,
            lambda other: other.ended <= step.began,
        )

    @property
    def after(self) -> State:
        """The files after the run."""
        return self._state(bool, bool)


def find_faults(state: State) -> set[str]:
    """Return what would mislead a reader of this state, or a run that continues from it: sentences
    `<file> lacks <name>`.
    """
    faults = set[str]()
    for name in state:
        faults |= {f"{name} lacks {missing}" for missing in _find_missing(state, name)}
    return faults


def _find_missing(state: State, name: str) -> list[str]:
    """Return what a file refers to, and what does not exist."""
    folder, base = str(PurePosixPath(name).parent), PurePosixPath(name).name
    if base == INDEX or name.endswith(".index"):
        index = index_in(state, name)
        if not index:
            return ["all"]
        shard_folder = folder.removesuffix("/.mdsmix")
        shards = [shard.stored.basename for shard in index.shards]
        return [shard for shard in shards if not is_shard(state, f"{shard_folder}/{shard}")]
    if RECORD.fullmatch(name):
        return find_missing_shards(state, name)
    if base == MANIFEST:
        return [*_find_missing_of_manifest(state, folder)]
    if base == TOKENIZER_CARD:
        return [] if is_complete_tokenizer(state, folder) else ["a file"]
    is_named_by_hash = SHARD.fullmatch(base) or SIDE_FILE.fullmatch(base)
    if is_named_by_hash and not has_hash_of_name(state, name):
        return ["its bytes"]
    return []


def _find_missing_of_manifest(state: State, folder: str) -> Iterator[str]:
    """Yield what a manifest refers to and what does not exist: files next to it, bad records, and,
    if it has its index, the tokenizer of a recipe.
    """
    manifest = manifest_in(state, folder)
    split = split_of(folder)
    if not manifest:
        yield "all"
        return
    is_being_deleted = folder != split and f"{folder}/{INDEX}" not in state
    for file in manifest.named_files:
        if not is_being_deleted and not has_hash_of_name(state, f"{folder}/{file.name}"):
            yield file.name
    keys = {part.key for part in manifest.parts}
    for name in state if folder == split else ():
        unit = RECORD.fullmatch(name)
        if not unit or unit[1] != split or unit[2] not in keys:
            continue
        quarantine_file = f"{split}/quarantine/{unit[2]}-"
        is_published = any(other.startswith(quarantine_file) for other in state)
        record = record_in(state, name)
        if record and record.records.bad and not is_published:
            yield f"bad records of {unit[2]}"
    tokenizer = PurePosixPath(folder).parent.parent / manifest.tokenizer.folder_name
    is_of_recipe = f"{folder}/{INDEX}" in state and not manifest.mixed
    if is_of_recipe and not is_complete_tokenizer(state, str(tokenizer)):
        yield "the tokenizer"


def find_current_index(state: State, split: str) -> str:
    """Return the name of the index that a reader of the stream uses; empty if there is none."""
    manifest = manifest_in(state, split)
    version = f"{split}-{manifest.index_hash[:8]}" if manifest else ""
    for folder in (split, version):
        if f"{folder}/{INDEX}" in state:
            return f"{folder}/{INDEX}"
    return ""


def is_complete_tokenizer(state: State, folder: str) -> bool:
    card = f"{folder}/{TOKENIZER_CARD}"
    files = orjson.loads(state[card])["files"] if card in state else ()
    return bool(files) and all(f"{folder}/{name}" in state for name in files)


Rule = Callable[[RecordedRun, Step], bool | None]
"Returns whether a step obeys the rule. None if the rule does not apply to the step."
RULES: list[Rule] = []


def rule(
    name: str | re.Pattern[str] = ".*", deletes: bool | None = False
) -> Callable[[Rule], Rule]:
    """Register a rule for steps on files of this name: for those that write a file, for those that
    delete one (`deletes`), or for both (None).
    """

    def register(is_obeyed: Rule) -> Rule:
        @functools.wraps(is_obeyed)
        def check(run: RecordedRun, step: Step) -> bool | None:
            has_action = deletes in (None, step.content is None)
            applies = has_action and re.fullmatch(name, step.base)
            return is_obeyed(run, step) if applies else None

        RULES.append(check)
        return check

    return register


@rule(INDEX)
def the_manifest_is_written_before_its_index(run: RecordedRun, step: Step) -> bool | None:
    if not manifest_in(run.after, step.home):
        return None
    manifest = manifest_in(run.least_before(step), step.home)
    return bool(manifest) and manifest.index_hash == hash_content(step.content)


@rule(INDEX, deletes=None)
def an_index_is_copied_before_it_is_replaced(run: RecordedRun, step: Step) -> bool | None:
    """The copy is for jobs that read it, and for `gc`. The index of a version is read under its own
    name as long as it exists.
    """
    old = run.before.get(step.name)
    if split_of(step.home) != step.home or old == step.content:
        return None
    if not index_in(run.before, step.name):
        return None
    copy = f"{step.home}/.mdsmix/{hash_content(old)}.index"
    return run.least_before(step).get(copy) == old


@rule(MANIFEST)
def a_version_is_marked_before_another_is_named(run: RecordedRun, step: Step) -> bool | None:
    folder = step.home
    in_place = f"{folder}/{INDEX}"
    state = run.least_before(step)
    manifest = parse_manifest(step.content, step.name)
    if in_place in state or split_of(folder) != folder:
        return None
    old = manifest_in(state, folder)
    if not old or f"{folder}-{old.index_hash[:8]}/{INDEX}" not in state:
        return None
    if old.index_hash == manifest.index_hash and in_place not in run.after:
        return None
    return f"{folder}/.mdsmix/{old.index_hash[:8]}.replaced" in state


@rule()
def a_version_never_changes(run: RecordedRun, step: Step) -> bool | None:
    """Missing or damaged files may be written again."""
    state = run.least_before(step)
    if not VERSION.fullmatch(step.home) or f"{step.home}/{INDEX}" not in state:
        return None
    is_damaged = not is_shard(run.before, step.name) and not manifest_in(run.before, step.home)
    is_lost_index = step.base == INDEX and not index_in(run.most_after(step), step.name)
    return step.name not in state or is_damaged or is_lost_index


@rule(deletes=True)
def the_index_of_a_version_is_deleted_first(run: RecordedRun, step: Step) -> bool | None:
    if not VERSION.fullmatch(step.home) or step.base == INDEX:
        return None
    state = run.most_after(step)
    is_named_by_hash = SHARD.fullmatch(step.base) or SIDE_FILE.fullmatch(step.base)
    is_damaged = is_named_by_hash and not has_hash_of_name(state, step.name)
    return bool(is_damaged) or f"{step.home}/{INDEX}" not in state


@rule(deletes=None)
def all_is_done_under_the_lease(run: RecordedRun, step: Step) -> bool | None:
    """Exceptions are the test whether the store supports conditions, which is made before a lease
    means anything, and the tokenizer, which belongs to no stream.
    """
    if TOKENIZER.fullmatch(step.home) or re.search(rf"/{LEASE}(-trial-\w+)?$", step.name):
        return None
    return f"{split_of(step.home)}/{LEASE}" in run.least_before(step)


@rule(f"{INDEX}|{MANIFEST}")
def the_lease_is_confirmed_before_the_index(run: RecordedRun, step: Step) -> bool | None:
    """It is confirmed after the last unit record, or the last shard of a mix. Of versions, it is
    confirmed before the manifest that names one.
    """
    split = split_of(step.home)
    if step.home != split:
        return None
    is_mix = f"{split}/.mdsmix/mixed" in run.after
    work = list[float]()
    beats = list[float]()
    for other in run.steps:
        if split_of(other.home) != split or other.ended > step.began:
            continue
        if SHARD.fullmatch(other.base) if is_mix else RECORD.fullmatch(other.name):
            work.append(other.ended)
        if other.name == f"{split}/{LEASE}" and other.content is not None:
            beats.append(other.began)
    return max(beats) > max(work, default=0)


def check_order(run: RecordedRun) -> Counter[str]:
    """Return how often each rule applied to a step.

    Raises AssertionError with the step that broke a rule, or after which the state has a new fault.
    """
    applied: Counter[str] = Counter()
    known_faults = find_faults(run.before)
    served = _list_served_indexes(run)
    for number, step in enumerate(run.steps):
        state = _state_after(run, step)
        faults = find_faults(state)
        assert faults <= known_faults, f"{step}, step {number}: {faults - known_faults}"
        for split, indexes in served.items():
            assert state.get(find_current_index(state, split)) in indexes, f"{step}, step {number}"
        for rule in RULES:
            is_obeyed = rule(run, step)
            assert is_obeyed is not False, f"{rule.__name__}: {step}, step {number}"
            if is_obeyed is not None:
                applied[rule.__name__] += 1
    return applied


def _state_after(run: RecordedRun, step: Step) -> State:
    """Return the files after a step in the worst case: after a write, the fewest other files; after
    a deletion, the most.
    """
    state = run.most_after(step) if step.content is None else run.least_before(step)
    state = {name: content for name, content in state.items() if name != step.name}
    if step.content is not None:
        state[step.name] = step.content
    return state


def _list_served_indexes(run: RecordedRun) -> dict[str, set[bytes | None]]:
    """Return the indexes that readers of each split may use during the run: the old one or the new
    one. There may be none for a moment only when a stream changes from versions to in place.
    """
    served = {}
    for split in {split_of(step.home) for step in run.steps if step.base == INDEX}:
        old = find_current_index(run.before, split)
        new = find_current_index(run.after, split)
        served[split] = {run.before.get(old), run.after.get(new)}
        if new == f"{split}/{INDEX}" != old:
            served[split].add(None)
    return served
