"""Collects everything that a page shows, by the functions of the commands: no figure is computed here.

A part that cannot be had leaves the others as they are. What could not be looked at is a failure, which the command's exit code
tells; what does not apply, as a plan of streams without a length, is a note on the page.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from mdsmix.encode.pretrained import Decoder, find_decoder
from mdsmix.errors import (
    Damaged,
    MdsmixError,
    MixRefused,
    NotPublished,
    RecipeError,
    Unreachable,
)
from mdsmix.mix.checking import findings, in_order, is_refused, looked, verdict
from mdsmix.mix.plan.figures import Plan
from mdsmix.mix.plan.make import PlanOptions, make_plan, problems, resolve_for_plan
from mdsmix.mix.resolve import resolve
from mdsmix.mix.streams import Mix
from mdsmix.report.inspection import Inspection, inspect
from mdsmix.report.named_streams import NamedStream, named_streams, world_of
from mdsmix.report.quarantine_report import find_bad_records
from mdsmix.report.shown_samples import Choice
from mdsmix.shards.manifest import Manifest
from mdsmix.storage import together
from mdsmix.training.findings import Finding
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
COLOURS, TEXTURES = 10, 4
UNSEEN = "Not known: what could not be looked at is said at the top."
"The page says a failure once, at its top, and this in all other places."
NO_PREVIEW = "the first batches need published streams that may be mixed, and the loader's section of a recipe or a training YAML"
CANNOT = (RecipeError, MixRefused, Unreachable, Damaged)
"What ends a command, and of a page one part."


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


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOnPage:
    """What was read of a stream, and what could not be."""

    named: NamedStream
    found: Inspection | None = None
    bad: dict[str, Any] | None = None
    "Bad records, as `find_bad_records` gives them."
    failed: tuple[MdsmixError, ...] = ()

    @property
    def manifest(self) -> Manifest | None:
        return self.found.stream.trusted_manifest if self.found else None


@dataclass(slots=True, kw_only=True)
class Gathered:
    """All of it."""

    targets: Sequence[str]
    asked: PageOptions
    origin: str
    streams: Sequence[StreamOnPage] = ()
    mix: Mix | None = None
    findings: Sequence[Finding] = ()
    verdict: str = ""
    looked: str = ""
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
    "Name of a part -> why it is not there."
    problems: dict[str, MdsmixError] = field(default_factory=dict)
    "What could not be looked at, by its sentence."

    @property
    def colours(self) -> dict[str, str]:
        """Stream -> class of the style sheet. Those of the mix come first, in its order."""
        mixed = [stream.stream for stream in self.plan.streams] if self.plan else []
        names = dict.fromkeys([*mixed, *(stream.named.name for stream in self.streams)])
        return {name: colour(number) for number, name in enumerate(names)}


def colour(number: int) -> str:
    """From the eleventh on a texture lies over the colour."""
    texture = number // COLOURS % TEXTURES
    return f"s{number % COLOURS}" + (f" t{texture}" if texture else "")


def gather(targets: Sequence[str], asked: PageOptions, say: Callable[[str], None]) -> Gathered:
    """`say` hears of what takes its time. RecipeError where the recipe, the YAML or the command line is wrong, and what failed
    where there is nothing to show."""
    page = Gathered(targets=targets, asked=asked, origin=", ".join(targets))
    named = named_streams(targets)
    try:
        named = _check(page) or named
    except (Unreachable, MixRefused, Damaged) as error:
        page.problems[str(error)] = error
    once = {stream.url: stream for stream in reversed(named)}  # several loaders may read one
    page.streams = together(lambda stream: _stream(asked, stream), list(once.values())[::-1])
    for stream in page.streams:
        # That some streams of a recipe are not published is one cause, and the mix has said it.
        is_known = stream.named.is_made and bool(page.problems)
        page.problems |= {
            str(e): e for e in stream.failed if not (is_known and isinstance(e, NotPublished))
        }
    _plan(page)
    _preview(page, say)
    if page.problems and page.plan is None and not any(s.found or s.bad for s in page.streams):
        raise next(iter(page.problems.values()))
    return page


def _check(page: Gathered) -> list[NamedStream]:
    """The mix and its findings; returns its streams."""
    page.mix = mix = resolve(page.targets, may_estimate=True)
    page.origin = mix.recipe or mix.yaml.origin
    found = findings(mix)
    page.findings, page.is_refused = in_order(found), is_refused(found)
    page.verdict, page.looked = verdict(mix, found), looked(mix)
    return [
        NamedStream(name=stream.name, url=str(stream.folder), loader=loader.label)
        for loader in mix.loaders
        for stream in loader.streams
    ]


def _stream(asked: PageOptions, named: NamedStream) -> StreamOnPage:
    """A stream of which no sample can be read is still known by its index. Bad records are those of a conversion that published
    nothing too; none are looked for where the manifest counts none."""
    failed, found, bad = list[MdsmixError](), None, None
    for count in (asked.samples, 0):
        try:
            choice = Choice(count=count, seed=asked.seed)
            found = found or inspect(named.url, choice, asked.tokenizer)
        except (Unreachable, Damaged) as error:
            failed.append(error)
    manifest = found.stream.manifest if found else None
    try:
        if found is None or (manifest and manifest.records.bad):
            bad = find_bad_records(named.url, EXAMPLES, MOST_BAD)
    except (Unreachable, Damaged) as error:
        failed += [error] if found else []
    return StreamOnPage(named=named, found=found, bad=bad, failed=tuple(failed))


def _plan(page: Gathered) -> None:
    """By the same steps as `mdsmix plan`. What the check says too is no failure; RecipeError of what was given for the plan alone."""
    asked = page.asked
    try:
        mix = replace(page.mix, evals=()) if page.mix else resolve_for_plan(page.targets)
    except CANNOT as error:  # as of a stream that comes to no sample: the others are shown
        page.notes["plan"] = UNSEEN if str(error) in page.problems else str(error)
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
    given = asked.batch or found
    page.is_batch_guessed = given is None
    page.batch = given or ROWS * asked.nodes * (asked.gpus or GPUS[0])
    fitting = (n for n in GPUS if page.batch % (asked.nodes * n) == 0)
    page.gpus = asked.gpus or next(fitting, 1)


def _preview(page: Gathered, say: Callable[[str], None]) -> None:
    mix, asked = page.mix, page.asked
    if mix is None or mix.is_bare or page.is_refused or page.plan is None:
        page.notes["preview"] = NO_PREVIEW
        return
    if not asked.has_preview:
        page.notes["preview"] = "left out by --no-preview"
        return
    page.decoder = find_decoder(asked.tokenizer, mix.tokenizer.hash if mix.tokenizer else None)
    say("the first batches: streaming and torch are imported, some seconds")
    try:
        from mdsmix.preview.asked import Asked
        from mdsmix.preview.first_steps import preview

        world = world_of(mix, asked.nodes, page.gpus, page.batch)
        page.preview = preview(mix, Asked(world=world, steps=STEPS, windows=WINDOWS, samples=2, read=READ))  # fmt: skip
    except CANNOT as error:
        page.notes["preview"] = str(error)
    except ImportError as error:
        page.notes["preview"] = f"the first batches are Streaming's own, and it cannot be imported here ({error})"  # fmt: skip
