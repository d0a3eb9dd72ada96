"""Whatever lies at a target while a run is at work may be what a reader finds or a killed run
leaves: no step may add a fault to it.

And the rules of the order that no single state tells. Where steps overlap, what must be there
before a step counts only if it was done before the step began, and what must be gone only if it was
gone by then (`tests/recording.py` notes the steps of a run).
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
BESIDE = re.compile(r"([0-9a-f]{32})\.(sources\.zst|[a-z0-9-]+\.side)")
TOKENIZER, TOKENIZER_CARD = re.compile(r"(.*/)?tokenizer-[0-9a-f]{8}"), "mdsmix.tokenizer"


def digest(content: bytes) -> str:
    return xxhash.xxh128_hexdigest(content)


def index_in(state: State, name: str) -> Index | None:
    """None where there is none that can be read."""
    with suppress(Unreachable):
        return parse_index(state[name], name) if name in state else None


def manifest_in(state: State, folder: str) -> Manifest | None:
    name = f"{folder}/{MANIFEST}"
    with suppress(Unreachable):
        return parse_manifest(state[name], name) if name in state else None


def record_in(state: State, name: str) -> UnitRecord | None:
    return next(map(parse_record, parse_unit_file(state[name]).records.values()), None)


def is_shard(state: State, name: str) -> bool:
    """Whether the shard is there and its bytes are those that it is named for."""
    return bool(SHARD.fullmatch(PurePosixPath(name).name)) and bears_its_hash(state, name)


def bears_its_hash(state: State, name: str) -> bool:
    return name in state and PurePosixPath(name).name.startswith(digest(state[name]))


def lost_of(state: State, name: str) -> list[str]:
    """What the unit record with this name speaks of and is nowhere: not in its split, nor in a
    version of it.
    """
    record = record_in(state, name)
    split = RECORD.fullmatch(name)[1]
    return [
        shard.stored.basename
        for shard in (record.shards if record else [])
        if not any(is_shard(state, f"{f}/{shard.stored.basename}") for f in folders(state, split))
    ]


def folders(state: State, split: str) -> set[str]:
    """The split's folder and its versions'."""
    homes = {str(PurePosixPath(name).parent) for name in state}
    return {split, *(home for home in homes if split_of(home) == split)}


def split_of(folder: str) -> str:
    """The folder of the split that a file or folder belongs to."""
    home = re.sub(r"/(\.mdsmix|quarantine)$", "", folder)
    version = VERSION.fullmatch(home)
    return version[1] if version else home


@dataclass(frozen=True)
class Story:
    """What lay there, and what was done then."""

    before: State
    steps: Sequence[Step]

    def _state(self, is_made: Callable[[Step], Any], is_gone: Callable[[Step], Any]) -> State:
        """What is there when these steps that make something are done, and these that delete."""
        state = dict(self.before)
        for step in sorted(self.steps, key=lambda step: step.ended):
            if step.content is None and is_gone(step):
                state.pop(step.name, None)
            elif step.content is not None and is_made(step):
                state[step.name] = step.content
        return state

    def surely(self, at: Step) -> State:
        """What is there when the step begins, whatever goes on beside it."""
        return self._state(lambda s: s.ended <= at.began, lambda s: s.began < at.ended and s != at)

    def maybe(self, at: Step) -> State:
        """What may be there when the step ends, if all beside it that makes something is done and
        all that deletes is not.
        """
        return self._state(lambda s: s.began < at.ended, lambda s: s.ended <= at.began)

    @property
    def after(self) -> State:
        return self._state(bool, bool)


def faults(state: State) -> set[str]:
    """What misleads whoever reads this state, or goes on from it."""
    found = set[str]()
    for name in state:
        home, base = str(PurePosixPath(name).parent), PurePosixPath(name).name
        if base == INDEX or name.endswith(".index"):
            index, folder = index_in(state, name), home.removesuffix("/.mdsmix")
            names = [shard.stored.basename for shard in index.shards] if index else ["all"]
            lost = [each for each in names if not is_shard(state, f"{folder}/{each}")]
        elif RECORD.fullmatch(name):
            lost = lost_of(state, name)
        elif base == MANIFEST:
            lost = [*_lost_of_manifest(state, home)]
        elif base == TOKENIZER_CARD:
            lost = [] if is_whole_tokenizer(state, home) else ["a file"]
        else:
            bears_one = SHARD.fullmatch(base) or BESIDE.fullmatch(base)
            lost = ["its bytes"] if bears_one and not bears_its_hash(state, name) else []
        found |= {f"{name} lacks {each}" for each in lost}
    return found


def _lost_of_manifest(state: State, home: str) -> Iterator[str]:
    """What it names and is not there: files beside it, bad records, and with its index the
    tokenizer of a recipe.
    """
    manifest, split = manifest_in(state, home), split_of(home)
    if not manifest:
        yield "all"
        return
    is_going = home != split and f"{home}/{INDEX}" not in state
    for file in manifest.named_files:
        if not is_going and not bears_its_hash(state, f"{home}/{file.name}"):
            yield file.name
    keys = {part.key for part in manifest.parts}
    for name in state if home == split else ():
        unit = RECORD.fullmatch(name)
        if not unit or unit[1] != split or unit[2] not in keys:
            continue
        is_public = any(n.startswith(f"{split}/quarantine/{unit[2]}-") for n in state)
        record = record_in(state, name)
        if record and record.records.bad and not is_public:
            yield f"bad records of {unit[2]}"
    tokenizer = PurePosixPath(home).parent.parent / manifest.tokenizer.folder_name
    is_of_recipe = f"{home}/{INDEX}" in state and not manifest.mixed
    if is_of_recipe and not is_whole_tokenizer(state, str(tokenizer)):
        yield "the tokenizer"


def current_of(state: State, split: str) -> str:
    """The index that a reader of the stream is sent to; none while there is none."""
    manifest = manifest_in(state, split)
    version = f"{split}-{manifest.index_hash[:8]}" if manifest else ""
    return next((name for f in (split, version) if (name := f"{f}/{INDEX}") in state), "")


def is_whole_tokenizer(state: State, folder: str) -> bool:
    card = f"{folder}/{TOKENIZER_CARD}"
    files = orjson.loads(state[card])["files"] if card in state else ()
    return bool(files) and all(f"{folder}/{name}" in state for name in files)


Rule = Callable[[Story, Step], bool | None]
"Whether a step kept it; None of a step that it does not speak of."
RULES: list[Rule] = []


def rule(name: str | re.Pattern[str] = ".*", goes: bool | None = False) -> Callable[[Rule], Rule]:
    """A rule of steps that make a file of such a name, that delete one (`goes`), or of
    both (None).
    """

    def add(is_kept: Rule) -> Rule:
        @functools.wraps(is_kept)
        def asked(story: Story, step: Step) -> bool | None:
            is_meant = goes in (None, step.content is None) and re.fullmatch(name, step.base)
            return is_kept(story, step) if is_meant else None

        RULES.append(asked)
        return asked

    return add


@rule(INDEX)
def the_manifest_before_its_index(story: Story, step: Step) -> bool | None:
    if not manifest_in(story.after, step.home):
        return None
    manifest = manifest_in(story.surely(step), step.home)
    return bool(manifest) and manifest.index_hash == digest(step.content)


@rule(INDEX, goes=None)
def an_index_is_kept_before_it_goes(story: Story, step: Step) -> bool | None:
    """For jobs that read by it, and for `gc`. That of a version is read under its own name as long
    as it is there.
    """
    old = story.before.get(step.name)
    if split_of(step.home) != step.home or old == step.content:
        return None
    if not index_in(story.before, step.name):
        return None
    return story.surely(step).get(f"{step.home}/.mdsmix/{digest(old)}.index") == old


@rule(MANIFEST)
def a_version_is_marked_before_another_is_named(story: Story, step: Step) -> bool | None:
    folder, in_place = step.home, f"{step.home}/{INDEX}"
    state, manifest = story.surely(step), parse_manifest(step.content, step.name)
    old = None if in_place in state or split_of(folder) != folder else manifest_in(state, folder)
    if not old or f"{folder}-{old.index_hash[:8]}/{INDEX}" not in state:
        return None
    if old.index_hash == manifest.index_hash and in_place not in story.after:
        return None
    return f"{folder}/.mdsmix/{old.index_hash[:8]}.replaced" in state


@rule()
def a_version_never_changes(story: Story, step: Step) -> bool | None:
    """But for what was lost or damaged and is brought back."""
    there, before = story.surely(step), story.before
    if not VERSION.fullmatch(step.home) or f"{step.home}/{INDEX}" not in there:
        return None
    damaged = not is_shard(before, step.name) and not manifest_in(before, step.home)
    is_lost_index = step.base == INDEX and not index_in(story.maybe(step), step.name)
    return step.name not in there or damaged or is_lost_index


@rule(goes=True)
def the_index_goes_first_of_a_version(story: Story, step: Step) -> bool | None:
    if not VERSION.fullmatch(step.home) or step.base == INDEX:
        return None
    state = story.maybe(step)
    is_hashed = SHARD.fullmatch(step.base) or BESIDE.fullmatch(step.base)
    is_damaged = is_hashed and not bears_its_hash(state, step.name)
    return bool(is_damaged) or f"{step.home}/{INDEX}" not in state


@rule(goes=None)
def all_is_done_under_the_lease(story: Story, step: Step) -> bool | None:
    """But for the trial of whether the store keeps conditions, which is made before a lease means
    anything, and for the tokenizer, which belongs to no stream.
    """
    if TOKENIZER.fullmatch(step.home) or re.search(rf"/{LEASE}(-trial-\w+)?$", step.name):
        return None
    return f"{split_of(step.home)}/{LEASE}" in story.surely(step)


@rule(f"{INDEX}|{MANIFEST}")
def the_lease_is_confirmed_before_the_index(story: Story, step: Step) -> bool | None:
    """After the last unit record, or the last shard of a mix; of versions before the manifest that
    names one.
    """
    split = split_of(step.home)
    if step.home != split:
        return None
    is_mix = f"{split}/.mdsmix/mixed" in story.after
    mine = [s for s in story.steps if split_of(s.home) == split and s.ended <= step.began]
    work = [s for s in mine if (SHARD.fullmatch(s.base) if is_mix else RECORD.fullmatch(s.name))]
    beats = [s for s in mine if s.name == f"{split}/{LEASE}" and s.content is not None]
    return max(s.began for s in beats) > max((s.ended for s in work), default=0)


def held_against(story: Story) -> Counter[str]:
    """How often each rule spoke; AssertionError names the step that broke one, or behind which a
    state has a fault more.
    """
    spoke: Counter[str] = Counter()
    known, served = faults(story.before), _served(story)
    for number, step in enumerate(story.steps):
        state = story.maybe(step) if step.content is None else story.surely(step)
        state = {name: content for name, content in state.items() if name != step.name}
        state |= {step.name: step.content} if step.content is not None else {}
        assert faults(state) <= known, f"{step}, step {number}: {faults(state) - known}"
        for split, indexes in served.items():
            assert state.get(current_of(state, split)) in indexes, f"{step}, step {number}"
        for rule in RULES:
            is_kept = rule(story, step)
            assert is_kept is not False, f"{rule.__name__}: {step}, step {number}"
            spoke[rule.__name__] += is_kept is not None
    return +spoke


def _served(story: Story) -> dict[str, set[bytes | None]]:
    """The indexes that readers of each split may be sent to: the old one or the new one. Only on
    the way from versions into place is there none for a moment.
    """
    served = {}
    for split in {split_of(step.home) for step in story.steps if step.base == INDEX}:
        was, will = current_of(story.before, split), current_of(story.after, split)
        served[split] = {story.before.get(was), story.after.get(will)}
        if will == f"{split}/{INDEX}" != was:
            served[split].add(None)
    return served
