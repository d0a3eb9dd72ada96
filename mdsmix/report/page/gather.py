"""Collects everything that a page shows, by the functions of the commands: no figure is computed here.

A part that cannot be had leaves the others as they are. What could not be looked at is a failure, which the command's exit code
tells; what does not apply, as a plan of streams without a length, is a note on the page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from mdsmix.encode.decoder import Decoder, find_decoder
from mdsmix.errors import (
    Damaged,
    MdsmixError,
    MixRefused,
    NotPublished,
    RecipeError,
    Unreachable,
)
from mdsmix.mix.check import findings, in_order, is_refused, looked, verdict
from mdsmix.mix.plan.figures import Plan
from mdsmix.mix.plan.make import PlanOptions, make_plan, problems, resolve_for_plan
from mdsmix.mix.resolve import resolve
from mdsmix.mix.streams import Mix
from mdsmix.report.bad_records import BadRecords, find_bad_records
from mdsmix.report.inspection import Choice, Inspection, inspect
from mdsmix.report.targets import Target, targets_of
from mdsmix.storage import together
from mdsmix.training.findings import Finding
from mdsmix.training.loader_keys import whole
from mdsmix.words import plural

if TYPE_CHECKING:
    from mdsmix.preview.verdict import Preview

GPUS = (8, 4, 2, 1)
"Devices of a node without --gpus: the first of these that divides the batch."
ROWS = 8
"Rows of a device and step without --batch and without a batch in the YAML."
EXAMPLES = 3
"Bad records shown of each reason."
MOST_BAD = 200_000
"Records of a quarantine that are read: some seconds."
READ = 64 << 20
"Bytes of shards that a preview reads."
STEPS, WINDOWS = 3, 12
NOT_YET = "not published yet"
"Stands in place of each stream that is not published; the page names them all once."
LOST = ("shard-missing", "shard-size")
"Findings of the check that say why a stream's samples cannot be read."
CANNOT = (RecipeError, MixRefused, Unreachable, Damaged)
"What ends a command, and of a page one part."
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class PageOptions:
    """The options of the command line."""

    samples: int = 12
    seed: int = 0
    nodes: int = 1
    gpus: int | None = None
    "Devices of a node; None: as many as the batch is divided among."
    batch: int | None = None
    tokenizer: str | None = None
    "Of streams that do not name one that this machine knows."
    has_preview: bool = True

    def options(self) -> Iterator[str]:
        """The given options, as on a command line."""
        for key in ("samples", "seed", "nodes", "gpus", "batch", "tokenizer"):
            if (given := getattr(self, key)) != getattr(PageOptions(), key):
                yield from (f"--{key}", str(given))
        if not self.has_preview:
            yield "--no-preview"


@dataclass(frozen=True, slots=True, kw_only=True)
class OneStream:
    """What was read of a stream, or why nothing was."""

    place: Target
    found: Inspection | None = None
    bad: BadRecords | None = None
    bad_problem: str = ""
    "Why they are not known."
    problem: str = ""
    failed: tuple[MdsmixError, ...] = ()


@dataclass(slots=True, kw_only=True)
class Gathered:
    """All of it. `notes`: name of a part -> why it is not there."""

    targets: Sequence[str]
    asked: PageOptions
    origin: str
    streams: Sequence[OneStream] = ()
    mix: Mix | None = None
    findings: Sequence[Finding] = ()
    verdict: str = ""
    looked: Sequence[str] = ()
    "What the check looked at, and what it could not."
    is_refused: bool = False
    plan: Plan | None = None
    batch: int = 0
    gpus: int = 0
    is_batch_guessed: bool = False
    preview: Preview | None = None
    decoder: Decoder | None = None
    "Of the run's tokenizer."
    notes: dict[str, str] = field(default_factory=dict)
    failed: list[MdsmixError] = field(default_factory=list)


def gather(targets: Sequence[str], asked: PageOptions, say: Callable[[str], None]) -> Gathered:
    """`say` hears of what takes its time. RecipeError where the recipe, the YAML or the command line is wrong, and what failed
    where there is nothing to show."""
    page = Gathered(targets=targets, asked=asked, origin=", ".join(targets))
    places = targets_of(targets)
    page.mix = _try(page, "findings", lambda: resolve(targets, may_estimate=True))
    if page.mix:
        page.origin = page.mix.recipe or page.mix.yaml.origin
        places = [
            Target(name=s.name, url=str(s.folder), loader=loader.label)
            for loader in page.mix.loaders
            for s in loader.streams
        ]
    once = {place.url: place for place in reversed(places)}.values()  # several loaders may read one
    page.streams = together(lambda place: _stream(asked, place), list(once)[::-1])
    _check(page)
    _tell_failed(page)
    _plan(page)
    _preview(page, say)
    if page.failed and page.plan is None and not any(s.found or s.bad for s in page.streams):
        raise page.failed[0]
    return page


def _tell_failed(page: Gathered) -> None:
    """What failed of each stream. That some are not published is one cause and one sentence, the mix's; of a lost shard the check
    says more than who could not read it."""
    lost = {s: f for f in page.findings if f.id in LOST for s in f.streams}
    page.streams = [_as_checked(s, lost.get(s.place.name)) for s in page.streams]
    told = set(page.notes.values())
    every = [(s, e) for s in page.streams for e in s.failed if str(e) not in told]
    page.failed += [e for s, e in every if not (s.place.is_made and isinstance(e, NotPublished))]


def _as_checked(stream: OneStream, lost: Finding | None) -> OneStream:
    if lost is None or not stream.problem:
        return stream
    error = Unreachable(f"{lost.message} Fix: {lost.fix}")
    return replace(stream, problem=str(error), failed=(error,))


def _try(page: Gathered, part: str, do: Callable[[], T]) -> T | None:
    """The result; None if it fails, with the reason in the notes of the part."""
    try:
        return do()
    except (Unreachable, MixRefused, Damaged) as error:
        page.failed.append(error)
        page.notes[part] = str(error)
    return None


def _stream(asked: PageOptions, place: Target) -> OneStream:
    """A stream of which no sample can be read is still known by its index."""
    failed, found = list[MdsmixError](), None
    for choice in (Choice(count=asked.samples, seed=asked.seed), Choice(count=0)):
        try:
            found = inspect(place.url, choice, asked.tokenizer)
            break
        except (Unreachable, Damaged) as error:
            failed.append(error)
    problem, bad_problem, bad = str(failed[0]) if failed else "", "", None
    if failed and isinstance(failed[0], NotPublished) and place.is_made:
        problem = NOT_YET
    try:
        bad = _bad(place, found)
    except (Unreachable, Damaged) as error:
        bad_problem = str(error) if found else ""  # where nothing is published, that is said
        failed += [error] if found else []
    return OneStream(
        place=place,
        found=found,
        bad=bad,
        bad_problem=bad_problem,
        problem=problem,
        failed=tuple({str(error): error for error in failed}.values()),
    )


def _bad(place: Target, found: Inspection | None) -> BadRecords | None:
    """The bad records, also of a conversion that published nothing since there were too many; none are looked for where the
    manifest counts none."""
    if found and not (found.stream.manifest and found.stream.manifest.records.bad):
        return None
    return find_bad_records(place.url, EXAMPLES, most=MOST_BAD)


def _check(page: Gathered) -> None:
    mix = page.mix
    if mix is None:
        return
    found = _try(page, "findings", lambda: findings(mix))
    if found is not None:
        page.findings, page.is_refused = in_order(found), is_refused(found)
        page.verdict, page.looked = verdict(mix, found), (looked(mix),)


def _plan(page: Gathered) -> None:
    """By the same steps as `mdsmix plan`. What the check says too is no failure; RecipeError of what was given for the plan alone."""
    asked = page.asked
    try:
        mix = replace(page.mix, evals=()) if page.mix else resolve_for_plan(page.targets)
    except CANNOT as error:  # as of a stream that comes to no sample: the others are shown
        page.notes["plan"] = str(error)
        return
    try:
        _machines(page, mix.yaml.batch_size)
        if errors := problems(mix):
            page.notes["plan"] = (
                f"the mix has {plural(len(errors), 'error')}, so no run comes of it and nothing was planned"
            )
        else:
            wanted = PlanOptions(nodes=asked.nodes, gpus=page.gpus, batch=page.batch)
            page.plan = make_plan(mix, wanted)
    except CANNOT as error:
        is_asked = (asked.nodes, asked.gpus, asked.batch) != (1, None, None)
        if is_asked and isinstance(error, RecipeError):
            raise
        page.notes["plan"] = str(error)


def _machines(page: Gathered, found: int | None) -> None:
    """The devices and the batch that are planned for, where nobody gave them. `found`: the YAML's batch."""
    asked = page.asked
    given = asked.batch if asked.batch is not None else found
    page.is_batch_guessed = given is None
    page.batch = ROWS * asked.nodes * (asked.gpus or GPUS[0]) if given is None else given
    fitting = (n for n in GPUS if page.batch % (asked.nodes * n) == 0)
    page.gpus = next(fitting, 1) if asked.gpus is None else asked.gpus


def _preview(page: Gathered, say: Callable[[str], None]) -> None:
    mix = page.mix
    if mix is None or mix.is_bare or page.is_refused or page.plan is None:
        page.notes["preview"] = (
            "the first batches need published streams that may be mixed, and the loader's section of a recipe or a training YAML"
        )
        return
    if not page.asked.has_preview:
        page.notes["preview"] = "left out by --no-preview"
        return
    if mix.tokenizer or page.asked.tokenizer:
        hash = mix.tokenizer.hash if mix.tokenizer else None
        page.decoder = find_decoder(page.asked.tokenizer, hash)
    say("the first batches: streaming and torch are imported, some seconds")
    try:
        page.preview = _previewed(mix, page)
    except CANNOT as error:
        page.notes["preview"] = str(error)
    except ImportError as error:
        page.notes["preview"] = (
            f"the first batches are Streaming's own, and it cannot be imported here ({error})"
        )


def _previewed(mix: Mix, page: Gathered) -> Preview:
    from mdsmix.mix.world import World
    from mdsmix.preview.asked import Asked as AskedOfPreview
    from mdsmix.preview.first_steps import preview

    given: Any = mix.train.section.get("num_workers")
    world = World(
        nodes=page.asked.nodes,
        gpus=page.gpus,
        workers=whole(given) or 0,
        batch=page.batch,
        replication=whole(mix.train.dataset.get("replication")) or 1,
    )
    asked = AskedOfPreview(world=world, steps=STEPS, windows=WINDOWS, samples=2, read=READ)
    return preview(mix, asked)
