"""The rules of the order in which a stream is written, held against the steps of a run (`tests/recording.py`).

Each rule stands for a moment at which a process may die or a reader may look. Where steps overlap, what must be there
before a step counts only if it was done before the step began, and what must be gone only if it was gone by then.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

import orjson
import xxhash

from mdsmix.convert.ledger import UnitRecord, parse
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
    units = parse(name, state[name])
    return next(map(units.record, units.records), None) if units else None


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


Rule = Callable[[Story, Step], Iterator[bool]]
"For a step that the rule speaks of: whether it was kept."


def shards_bear_the_hash_of_their_bytes(story: Story, step: Step) -> Iterator[bool]:
    if step.content is not None and SHARD.fullmatch(_base(step)):
        yield is_shard({step.name: step.content}, step.name)


def a_shard_that_lay_there_is_not_written_again(story: Story, step: Step) -> Iterator[bool]:
    """Two workers with equal units may both write their shard, for neither can have seen the other's."""
    if step.content is not None and SHARD.fullmatch(_base(step)):
        yield step.name not in story.surely(step) or not is_shard(story.before, step.name)


def twins_are_files_of_their_own(story: Story, step: Step) -> Iterator[bool]:
    if step.how == "link":
        yield PurePosixPath(step.source).name == _base(step)


def shards_before_the_unit_record(story: Story, step: Step) -> Iterator[bool]:
    if step.content is not None and RECORD.fullmatch(step.name):
        state = story.surely(step) | {step.name: step.content}
        yield not lost_of(state, step.name)


def shards_before_the_index(story: Story, step: Step) -> Iterator[bool]:
    if step.content is not None and _base(step) == INDEX:
        yield not lacks(story.surely(step), _home(step), parse_index(step.content, step.name))


def shards_before_the_manifest(story: Story, step: Step) -> Iterator[bool]:
    if step.content is not None and _base(step) == MANIFEST:
        manifest = parse_manifest(step.content, step.name)
        versions = (name for name in story.after if name.startswith(_home(step)))
        coming = {digest(story.after[n]): n for n in versions if n.endswith(f"/{INDEX}")}
        name = coming[manifest.index_hash]
        folder = str(PurePosixPath(name).parent)
        yield not lacks(story.surely(step), folder, parse_index(story.after[name], name))


def shards_before_the_source_list(story: Story, step: Step) -> Iterator[bool]:
    """Into the target, which has the index or, of versions, the manifest that names the version with it."""
    split = _home(step)
    if step.content is not None and BESIDE.fullmatch(_base(step)) and split_of(split) == split:
        manifest = manifest_in(story.after, split)
        of_versions = f"{split}/{INDEX}" not in story.after
        folder = f"{split}-{manifest.index_hash[:8]}" if of_versions else split
        index = index_in(story.after, f"{folder}/{INDEX}")
        yield not lacks(story.surely(step), folder, index)


def the_source_list_before_the_manifest(story: Story, step: Step) -> Iterator[bool]:
    if step.content is not None and _base(step) == MANIFEST:
        state = story.surely(step)
        for part in parse_manifest(step.content, step.name).source_parts:
            yield bears_its_hash(state, f"{_home(step)}/{part.name}")


def a_source_list_is_written_once(story: Story, step: Step) -> Iterator[bool]:
    if step.content is not None and BESIDE.fullmatch(_base(step)):
        is_new = not bears_its_hash(story.surely(step), step.name)
        yield is_new and bears_its_hash({step.name: step.content}, step.name)


def no_manifest_loses_its_source_list(story: Story, step: Step) -> Iterator[bool]:
    """But for a damaged part, which is no use to a reader."""
    if step.content is None and BESIDE.fullmatch(_base(step)):
        state, folder = story.maybe(step), _home(step)
        manifest = manifest_in(state, folder)
        named = {file.name for file in manifest.named_files} if manifest else set()
        is_going = VERSION.fullmatch(folder) and f"{folder}/{INDEX}" not in state
        yield _base(step) not in named or not bears_its_hash(state, step.name) or bool(is_going)


def the_manifest_before_its_index(story: Story, step: Step) -> Iterator[bool]:
    if step.content is not None and _base(step) == INDEX:
        manifest = manifest_in(story.surely(step), _home(step))
        if manifest_in(story.after, _home(step)):
            yield bool(manifest) and manifest.index_hash == digest(step.content)


def a_version_is_whole_before_the_manifest_names_it(story: Story, step: Step) -> Iterator[bool]:
    folder = _home(step)
    if step.content is not None and _base(step) == MANIFEST and split_of(folder) == folder:
        manifest = parse_manifest(step.content, step.name)
        version = f"{folder}-{manifest.index_hash[:8]}"
        if f"{folder}/{INDEX}" not in story.after:
            state = story.surely(step)
            index = index_in(state, f"{version}/{INDEX}")
            card = manifest_in(state, version)
            yield (
                bool(index and card and not lacks(state, version, index))
                and index.hash == manifest.index_hash == card.index_hash
            )


def bad_records_are_public_before_the_manifest(story: Story, step: Step) -> Iterator[bool]:
    if step.content is not None and _base(step) == MANIFEST:
        folder = split_of(_home(step))
        state = story.surely(step)
        for part in parse_manifest(step.content, step.name).parts:
            for record in (n for n in state if n.startswith(f"{folder}/.mdsmix/{part.key}-")):
                if record_in(state, record).records.bad:
                    yield any(name.startswith(f"{folder}/quarantine/{part.key}-") for name in state)


def bad_records_stay_public_until_the_index_is_another(story: Story, step: Step) -> Iterator[bool]:
    if step.content is None and "/quarantine/" in step.name:
        split = split_of(_home(step))
        said = manifest_in(story.surely(step), split)
        yield bool(said) and said == manifest_in(story.after, split)


def an_index_is_kept_before_it_goes(story: Story, step: Step) -> Iterator[bool]:
    """For jobs that read by it, and for `gc`. That of a version is read under its own name as long as it is there."""
    folder = _home(step)
    before = story.maybe(step) if _base(step) == INDEX and split_of(folder) == folder else {}
    if step.name in story.before and index_in(story.before, step.name):
        old = story.before[step.name]
        if before and old != step.content:
            yield story.surely(step).get(f"{folder}/.mdsmix/{digest(old)}.index") == old


def an_index_goes_when_a_version_has_its_place(story: Story, step: Step) -> Iterator[bool]:
    folder = _home(step)
    if step.content is None and _base(step) == INDEX and split_of(folder) == folder:
        state = story.surely(step)
        manifest = manifest_in(state, folder)
        yield bool(manifest) and f"{folder}-{manifest.index_hash[:8]}/{INDEX}" in state


def a_version_is_marked_before_another_is_named(story: Story, step: Step) -> Iterator[bool]:
    folder = _home(step)
    if step.content is not None and _base(step) == MANIFEST and split_of(folder) == folder:
        state, manifest = story.surely(step), parse_manifest(step.content, step.name)
        in_place = f"{folder}/{INDEX}"
        old = None if in_place in state else manifest_in(state, folder)
        was_current = old and f"{folder}-{old.index_hash[:8]}/{INDEX}" in state
        is_another = not old or old.index_hash != manifest.index_hash or in_place in story.after
        if old and was_current and is_another:
            yield f"{folder}/.mdsmix/{old.index_hash[:8]}.replaced" in state


def a_version_never_changes(story: Story, step: Step) -> Iterator[bool]:
    """But for what was lost or damaged and is brought back."""
    folder = _home(step)
    if step.content is not None and VERSION.fullmatch(folder):
        state = story.maybe(step)
        if f"{folder}/{INDEX}" in story.surely(step):
            damaged = not is_shard(story.before, step.name) and not manifest_in(
                story.before, folder
            )
            there = step.name in story.surely(step)
            yield not there or damaged or (_base(step) == INDEX and not index_in(state, step.name))


def the_index_goes_first_of_a_version(story: Story, step: Step) -> Iterator[bool]:
    folder = _home(step)
    if step.content is None and VERSION.fullmatch(folder) and _base(step) != INDEX:
        state = story.maybe(step)
        is_hashed = SHARD.fullmatch(_base(step)) or BESIDE.fullmatch(_base(step))
        is_damaged = is_hashed and not bears_its_hash(state, step.name)
        yield bool(is_damaged) or f"{folder}/{INDEX}" not in state


def no_index_loses_a_shard(story: Story, step: Step) -> Iterator[bool]:
    """Nor one that was replaced and is kept. What is damaged may go, it is no use to a reader."""
    if step.content is None and SHARD.fullmatch(_base(step)):
        state, folder = story.maybe(step), _home(step)
        if is_shard(state, step.name):
            kept = (n for n in state if n.startswith(f"{folder}/.mdsmix/") and n.endswith(".index"))
            indexes = (index_in(state, name) for name in (f"{folder}/{INDEX}", *kept))
            yield all(_base(step) not in _names(index) for index in indexes if index)


def unit_records_before_their_shards_go(story: Story, step: Step) -> Iterator[bool]:
    """A shard that is damaged may go: a record that names one which is gone is believed less than one that names damage."""
    is_whole = step.content is None and is_shard(story.surely(step), step.name)
    if is_whole and SHARD.fullmatch(_base(step)):
        state, split = story.maybe(step), split_of(_home(step))
        elsewhere = {f"{folder}/{_base(step)}" for folder in folders(state, split)} - {step.name}
        if not any(is_shard(story.surely(step), name) for name in elsewhere):
            found = (RECORD.fullmatch(name) for name in state)
            records = (record_in(state, m[0]) for m in found if m and m[1] == split)
            yield all(_base(step) not in _names(record) for record in records if record)


def is_whole_tokenizer(state: State, folder: str) -> bool:
    card = f"{folder}/{TOKENIZER_CARD}"
    files = orjson.loads(state[card])["files"] if card in state else ()
    return bool(files) and all(f"{folder}/{name}" in state for name in files)


def the_tokenizer_before_any_index_that_needs_it(story: Story, step: Step) -> Iterator[bool]:
    """A mix of published streams is no stream of a recipe, and has none beside it."""
    if step.content is not None and _base(step) == INDEX:
        state, home = story.surely(step), PurePosixPath(_home(step))
        manifest = manifest_in(state, str(home))
        if manifest and not manifest.mixed:
            root = home.parent.parent
            yield is_whole_tokenizer(state, str(root / manifest.tokenizer.folder_name))


def the_card_comes_last_of_a_tokenizer(story: Story, step: Step) -> Iterator[bool]:
    if step.content is not None and _base(step) == TOKENIZER_CARD:
        state = story.surely(step) | {step.name: step.content}
        yield is_whole_tokenizer(state, _home(step))


def a_whole_tokenizer_is_not_written_again(story: Story, step: Step) -> Iterator[bool]:
    if step.content is not None and TOKENIZER.fullmatch(_home(step)):
        yield not is_whole_tokenizer(story.surely(step), _home(step))


def the_card_goes_first_of_a_tokenizer(story: Story, step: Step) -> Iterator[bool]:
    is_beside_it = TOKENIZER.fullmatch(_home(step)) and _base(step) != TOKENIZER_CARD
    if step.content is None and is_beside_it:
        yield f"{_home(step)}/{TOKENIZER_CARD}" not in story.maybe(step)


def all_is_done_under_the_lease(story: Story, step: Step) -> Iterator[bool]:
    """But for the trial of whether the store keeps conditions, which is made before a lease means anything, and for the
    tokenizer, which belongs to no stream."""
    is_of_a_stream = not TOKENIZER.fullmatch(_home(step))
    if is_of_a_stream and not re.search(rf"/{LEASE}(-trial-\w+)?$", step.name):
        yield f"{split_of(_home(step))}/{LEASE}" in story.surely(step)


def the_lease_is_confirmed_before_the_index(story: Story, step: Step) -> Iterator[bool]:
    """After the last unit record, or the last shard of a mix; of versions before the manifest that names one."""
    split = split_of(_home(step))
    is_card = _home(step) == split and _base(step) in (INDEX, MANIFEST)
    if step.content is not None and is_card:
        is_mix = f"{split}/.mdsmix/mixed" in story.after
        mine = [s for s in story.steps if split_of(_home(s)) == split and s.ended <= step.began]
        work = [
            s for s in mine if (SHARD.fullmatch(_base(s)) if is_mix else RECORD.fullmatch(s.name))
        ]
        beats = [s for s in mine if s.name == f"{split}/{LEASE}" and s.content is not None]
        yield max(s.began for s in beats) > max((s.ended for s in work), default=0)


RULES: tuple[Rule, ...] = (
    shards_bear_the_hash_of_their_bytes,
    a_shard_that_lay_there_is_not_written_again,
    twins_are_files_of_their_own,
    shards_before_the_unit_record,
    shards_before_the_index,
    shards_before_the_manifest,
    shards_before_the_source_list,
    the_source_list_before_the_manifest,
    a_source_list_is_written_once,
    no_manifest_loses_its_source_list,
    the_manifest_before_its_index,
    a_version_is_whole_before_the_manifest_names_it,
    bad_records_are_public_before_the_manifest,
    bad_records_stay_public_until_the_index_is_another,
    an_index_is_kept_before_it_goes,
    an_index_goes_when_a_version_has_its_place,
    a_version_is_marked_before_another_is_named,
    a_version_never_changes,
    the_index_goes_first_of_a_version,
    no_index_loses_a_shard,
    unit_records_before_their_shards_go,
    the_tokenizer_before_any_index_that_needs_it,
    the_card_comes_last_of_a_tokenizer,
    a_whole_tokenizer_is_not_written_again,
    the_card_goes_first_of_a_tokenizer,
    all_is_done_under_the_lease,
    the_lease_is_confirmed_before_the_index,
)


def held_against(story: Story) -> Counter[str]:
    """How often each rule spoke; AssertionError names the rule and the step that broke it."""
    spoke: Counter[str] = Counter()
    for step in story.steps:
        for rule in RULES:
            for is_kept in rule(story, step):
                assert is_kept, f"{rule.__name__}: {step}, step {story.steps.index(step)}"
                spoke[rule.__name__] += 1
    return spoke


def _base(step: Step) -> str:
    return PurePosixPath(step.name).name


def _home(step: Step) -> str:
    return str(PurePosixPath(step.name).parent)


def _names(of: Index | UnitRecord) -> set[str]:
    return {shard.stored.basename for shard in of.shards}
