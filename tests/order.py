"""The rules of the order in which a stream is written, held against the steps of a run (`tests/recording.py`).

Each rule stands for a moment at which a process may die or a reader may look. Where steps overlap, what must be there
before a step counts only if it was done before the step began, and what must be gone only if it was gone by then.
"""

import functools
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

import orjson
import xxhash

from mdsmix.convert.ledger import UnitRecord, parse, record_of
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
    try:
        return parse_index(state[name], name) if name in state else None
    except Unreachable:
        return None


def manifest_in(state: State, folder: str) -> Manifest | None:
    name = f"{folder}/{MANIFEST}"
    try:
        return parse_manifest(state[name], name) if name in state else None
    except Unreachable:
        return None


def record_in(state: State, name: str) -> UnitRecord | None:
    return next(map(record_of, parse(state[name]).records.values()), None)


def is_shard(state: State, name: str) -> bool:
    """Whether the shard is there and its bytes are those that it is named for."""
    return bool(SHARD.fullmatch(PurePosixPath(name).name)) and bears_its_hash(state, name)


def bears_its_hash(state: State, name: str) -> bool:
    return name in state and PurePosixPath(name).name.startswith(digest(state[name]))


def lacks(state: State, folder: str, index: Index) -> list[str]:
    """The shards of the index that are not in the folder, whole."""
    names = (shard.stored.basename for shard in index.shards)
    return [name for name in names if not is_shard(state, f"{folder}/{name}")]


def lost_of(state: State, name: str) -> list[str]:
    """What the unit record with this name speaks of and is nowhere: not in its split, nor in a version of it."""
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

    def surely(self, at: Step) -> dict[str, bytes]:
        """What is there when the step begins, whatever goes on beside it."""
        state = dict(self.before)
        for step in sorted(self.steps, key=lambda step: step.ended):
            if step.content is None and step.began < at.ended and step is not at:
                state.pop(step.name, None)
            elif step.content is not None and step.ended <= at.began:
                state[step.name] = step.content
        return state

    def maybe(self, at: Step) -> dict[str, bytes]:
        """What may be there when the step ends, if all beside it that makes something is done and all that deletes is not."""
        state = dict(self.before)
        for step in sorted(self.steps, key=lambda step: step.ended):
            if step.content is None and step.ended <= at.began:
                state.pop(step.name, None)
            elif step.content is not None and step.began < at.ended:
                state[step.name] = step.content
        return state

    @property
    def after(self) -> dict[str, bytes]:
        state: dict[str, bytes | None] = dict(self.before)
        for step in sorted(self.steps, key=lambda step: step.ended):
            state[step.name] = step.content
        return {name: content for name, content in state.items() if content is not None}


Rule = Callable[[Story, Step], bool | None]
"Whether a step kept it; None of a step that it does not speak of."
RULES: list[Rule] = []


def rule(name: str | re.Pattern[str] = ".*", goes: bool | None = False) -> Callable[[Rule], Rule]:
    """A rule of steps that make a file of such a name, that delete one (`goes`), or of both (None)."""

    def add(is_kept: Rule) -> Rule:
        @functools.wraps(is_kept)
        def asked(story: Story, step: Step) -> bool | None:
            is_meant = goes in (None, step.content is None) and re.fullmatch(name, step.base)
            return is_kept(story, step) if is_meant else None

        RULES.append(asked)
        return asked

    return add


@rule(SHARD)
def shards_bear_the_hash_of_their_bytes(story: Story, step: Step) -> bool:
    return is_shard({step.name: step.content}, step.name)


@rule()
def shards_before_the_unit_record(story: Story, step: Step) -> bool | None:
    if not RECORD.fullmatch(step.name):
        return None
    return not lost_of(story.surely(step) | {step.name: step.content}, step.name)


@rule(INDEX)
def shards_before_the_index(story: Story, step: Step) -> bool:
    return not lacks(story.surely(step), step.home, parse_index(step.content, step.name))


@rule(MANIFEST)
def shards_before_the_manifest(story: Story, step: Step) -> bool:
    manifest = parse_manifest(step.content, step.name)
    versions = (name for name in story.after if name.startswith(step.home))
    coming = {digest(story.after[n]): n for n in versions if n.endswith(f"/{INDEX}")}
    name = coming[manifest.index_hash]
    folder = str(PurePosixPath(name).parent)
    return not lacks(story.surely(step), folder, parse_index(story.after[name], name))


@rule(MANIFEST)
def the_source_list_before_the_manifest(story: Story, step: Step) -> bool | None:
    state, parts = story.surely(step), parse_manifest(step.content, step.name).source_parts
    if not parts:
        return None
    return all(bears_its_hash(state, f"{step.home}/{part.name}") for part in parts)


@rule(BESIDE, goes=True)
def no_manifest_loses_its_source_list(story: Story, step: Step) -> bool:
    """But for a damaged part, which is no use to a reader."""
    state, folder = story.maybe(step), step.home
    manifest = manifest_in(state, folder)
    named = {file.name for file in manifest.named_files} if manifest else set()
    is_going = VERSION.fullmatch(folder) and f"{folder}/{INDEX}" not in state
    return step.base not in named or not bears_its_hash(state, step.name) or bool(is_going)


@rule(INDEX)
def the_manifest_before_its_index(story: Story, step: Step) -> bool | None:
    if not manifest_in(story.after, step.home):
        return None
    manifest = manifest_in(story.surely(step), step.home)
    return bool(manifest) and manifest.index_hash == digest(step.content)


@rule(MANIFEST)
def a_version_is_whole_before_the_manifest_names_it(story: Story, step: Step) -> bool | None:
    if split_of(step.home) != step.home or f"{step.home}/{INDEX}" in story.after:
        return None
    state, hash = story.surely(step), parse_manifest(step.content, step.name).index_hash
    version = f"{step.home}-{hash[:8]}"
    index, card = index_in(state, f"{version}/{INDEX}"), manifest_in(state, version)
    is_whole = bool(index and card and not lacks(state, version, index))
    return is_whole and index.hash == hash == card.index_hash


@rule(MANIFEST)
def bad_records_are_public_before_the_manifest(story: Story, step: Step) -> bool | None:
    folder, state = split_of(step.home), story.surely(step)
    bad = [
        part.key
        for part in parse_manifest(step.content, step.name).parts
        for record in state
        if record.startswith(f"{folder}/.mdsmix/{part.key}-")
        and record_in(state, record).records.bad
    ]
    if not bad:
        return None
    return all(any(n.startswith(f"{folder}/quarantine/{key}-") for n in state) for key in bad)


@rule(goes=True)
def bad_records_stay_public_until_the_index_is_another(story: Story, step: Step) -> bool | None:
    if "/quarantine/" not in step.name:
        return None
    split = split_of(step.home)
    said = manifest_in(story.surely(step), split)
    return bool(said) and said == manifest_in(story.after, split)


@rule(INDEX, goes=None)
def an_index_is_kept_before_it_goes(story: Story, step: Step) -> bool | None:
    """For jobs that read by it, and for `gc`. That of a version is read under its own name as long as it is there."""
    old = story.before.get(step.name)
    if split_of(step.home) != step.home or old == step.content:
        return None
    if not index_in(story.before, step.name):
        return None
    return story.surely(step).get(f"{step.home}/.mdsmix/{digest(old)}.index") == old


@rule(INDEX, goes=True)
def an_index_goes_when_a_version_has_its_place(story: Story, step: Step) -> bool | None:
    if split_of(step.home) != step.home:
        return None
    state = story.surely(step)
    manifest = manifest_in(state, step.home)
    return bool(manifest) and f"{step.home}-{manifest.index_hash[:8]}/{INDEX}" in state


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


@rule(SHARD, goes=True)
def no_index_loses_a_shard(story: Story, step: Step) -> bool | None:
    """Nor one that was replaced and is kept. What is damaged may go, it is no use to a reader."""
    state, folder = story.maybe(step), step.home
    if not is_shard(state, step.name):
        return None
    kept = (n for n in state if n.startswith(f"{folder}/.mdsmix/") and n.endswith(".index"))
    indexes = (index_in(state, name) for name in (f"{folder}/{INDEX}", *kept))
    return all(step.base not in _names(index) for index in indexes if index)


@rule(SHARD, goes=True)
def unit_records_before_their_shards_go(story: Story, step: Step) -> bool | None:
    """A shard that is damaged may go: a record that names one which is gone is believed less than one that names damage."""
    sure, state, split = story.surely(step), story.maybe(step), split_of(step.home)
    elsewhere = {f"{folder}/{step.base}" for folder in folders(state, split)} - {step.name}
    if not is_shard(sure, step.name) or any(is_shard(sure, name) for name in elsewhere):
        return None
    found = (RECORD.fullmatch(name) for name in state)
    records = (record_in(state, m[0]) for m in found if m and m[1] == split)
    return all(step.base not in _names(record) for record in records if record)


def is_whole_tokenizer(state: State, folder: str) -> bool:
    card = f"{folder}/{TOKENIZER_CARD}"
    files = orjson.loads(state[card])["files"] if card in state else ()
    return bool(files) and all(f"{folder}/{name}" in state for name in files)


@rule(INDEX)
def the_tokenizer_before_any_index_that_needs_it(story: Story, step: Step) -> bool | None:
    """A mix of published streams is no stream of a recipe, and has none beside it."""
    state, root = story.surely(step), PurePosixPath(step.home).parent.parent
    manifest = manifest_in(state, step.home)
    if not manifest or manifest.mixed:
        return None
    return is_whole_tokenizer(state, str(root / manifest.tokenizer.folder_name))


@rule(TOKENIZER_CARD)
def the_card_comes_last_of_a_tokenizer(story: Story, step: Step) -> bool:
    return is_whole_tokenizer(story.surely(step) | {step.name: step.content}, step.home)


@rule(goes=None)
def all_is_done_under_the_lease(story: Story, step: Step) -> bool | None:
    """But for the trial of whether the store keeps conditions, which is made before a lease means anything, and for the
    tokenizer, which belongs to no stream."""
    if TOKENIZER.fullmatch(step.home) or re.search(rf"/{LEASE}(-trial-\w+)?$", step.name):
        return None
    return f"{split_of(step.home)}/{LEASE}" in story.surely(step)


@rule(f"{INDEX}|{MANIFEST}")
def the_lease_is_confirmed_before_the_index(story: Story, step: Step) -> bool | None:
    """After the last unit record, or the last shard of a mix; of versions before the manifest that names one."""
    split = split_of(step.home)
    if step.home != split:
        return None
    is_mix = f"{split}/.mdsmix/mixed" in story.after
    mine = [s for s in story.steps if split_of(s.home) == split and s.ended <= step.began]
    work = [s for s in mine if (SHARD.fullmatch(s.base) if is_mix else RECORD.fullmatch(s.name))]
    beats = [s for s in mine if s.name == f"{split}/{LEASE}" and s.content is not None]
    return max(s.began for s in beats) > max((s.ended for s in work), default=0)


def held_against(story: Story) -> Counter[str]:
    """How often each rule spoke; AssertionError names the rule and the step that broke it."""
    spoke: Counter[str] = Counter()
    for number, step in enumerate(story.steps):
        for rule in RULES:
            is_kept = rule(story, step)
            assert is_kept is not False, f"{rule.__name__}: {step}, step {number}"
            spoke[rule.__name__] += is_kept is not None
    return +spoke


def _names(of: Index | UnitRecord) -> set[str]:
    return {shard.stored.basename for shard in of.shards}
