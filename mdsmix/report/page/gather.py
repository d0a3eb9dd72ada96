"""Collects all data of a page by the functions of the commands: no figure is computed here.

A part that fails does not affect other parts. Data that could not be looked at is a failure, which
sets the command's exit code. A part that does not apply, such as a plan of streams without a
length, is a note on the page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from mdsmix.errors import (
    Damaged,
    MdsmixError,
    MixRefused,
    NotPublished,
    RecipeError,
    Unreachable,
)
from mdsmix.foundry_yaml.findings import Finding
from mdsmix.messages import Say, plural
from mdsmix.mix.check import run_checks
from mdsmix.mix.epoch.draws import Machines, make_run_machines
from mdsmix.mix.plan.plan import Plan, PlanOptions, find_plan_problems, make_plan, resolve_for_plan
from mdsmix.mix.streams.mix import Mix
from mdsmix.mix.streams.resolve import resolve_mix
from mdsmix.report.inspection import Inspection, find_bad_records, inspect
from mdsmix.report.named_streams import NamedStream, named_streams
from mdsmix.report.shown_samples import Choice
from mdsmix.shards.manifest import Manifest
from mdsmix.storage import map_threads
from mdsmix.table import Tree
from mdsmix.tokenizer.decoder import Decoder, find_decoder

if TYPE_CHECKING:
    from mdsmix.preview.epoch_windows import Preview

ROWS = 8
"Rows of one device in a step, where neither --batch nor the YAML says."
EXAMPLES = 3
"Bad records shown of each reason."
MOST_BAD = 200_000
"The most records that are read of a quarantine, which takes some seconds."
READ = 64 << 20
"The most bytes of shards that a preview reads."
STEPS, WINDOWS = 3, 12
COLOURS = 10
"Colours of streams. The eleventh stream has the first colour again, and its name beside it."
UNSEEN = "Not known: what could not be looked at is said at the top."
"A failure is told once, at the top of the page. This sentence stands in all other places."
NO_PREVIEW = "the first batches need published streams that may be mixed, and the loader's section of a recipe or a training YAML"
CANNOT = (RecipeError, MixRefused, Unreachable, Damaged)
"Errors that would end a command, and here end one part of the page."


@dataclass(frozen=True, kw_only=True)
class StreamOnPage:
    """The parts of a stream that were read, and the errors of the parts that were not."""

    named: NamedStream
    found: Inspection | None
    bad: Tree | None
    "Bad records, as `find_bad_records` gives them."
    failed: Sequence[MdsmixError]

    @property
    def manifest(self) -> Manifest | None:
        return self.found.stream.trusted_manifest if self.found else None


@dataclass(slots=True, kw_only=True)
class Gathered:
    """All data of a page."""

    targets: Sequence[str]
    choice: Choice
    streams: Sequence[StreamOnPage] = ()
    mix: Mix | None = None
    "None where it could not be looked at; then it has no findings either."
    findings: Sequence[Finding] = ()
    plan: Plan | None = None
    is_batch_guessed: bool = False
    preview: Preview | None = None
    decoder: Decoder | None = None
    "The decoder of the run's tokenizer."
    notes: dict[str, str] = field(default_factory=dict)
    "Name of a part -> why the page lacks the part."
    problems: dict[str, MdsmixError] = field(default_factory=dict)
    "Sentence of an error -> the error, for data that could not be looked at."

    @property
    def colours(self) -> dict[str, str]:
        """Stream -> class of the style sheet. Streams of the mix come first, in the order of the
        mix.
        """
        mixed = [stream.stream for stream in self.plan.streams] if self.plan else []
        names = dict.fromkeys([*mixed, *(stream.named.name for stream in self.streams)])
        return {name: f"s{number % COLOURS}" for number, name in enumerate(names)}


def gather(
    targets: Sequence[str],
    choice: Choice,
    asked: PlanOptions,
    tokenizer: str | None,
    say: Say | None,
) -> Gathered:
    """All data of the page of these targets.

    Args:
        choice: the samples of each stream.
        asked: the machines of the run. Without a batch, the YAML's batch is taken, else 8 rows a
        device.
        tokenizer: decodes streams whose own tokenizer this machine does not know.
        say: gets a line before slow work; None: the first batches are left out.

    Raises:
        RecipeError: the recipe, the YAML or the command line is wrong.
        MdsmixError: there is nothing to show.
    """
    if asked.batch:
        Machines(
            batch=asked.batch, nodes=asked.nodes, gpus=asked.gpus
        )  # refuses impossible batches
    page, named = Gathered(targets=targets, choice=choice), named_streams(targets)
    try:
        page.mix = resolve_mix(targets, may_estimate=True)
        page.findings = run_checks(page.mix)
        named = [
            NamedStream(name=stream.name, url=str(stream.folder), loader=loader.label)
            for loader in page.mix.loaders
            for stream in loader.streams
        ]
    except (Unreachable, MixRefused, Damaged) as error:
        page.mix, page.problems[str(error)] = None, error
    once = {stream.url: stream for stream in reversed(named)}  # several loaders may read one stream
    page.streams = map_threads(lambda stream: _stream(stream, choice, tokenizer), [*once.values()][::-1])  # fmt: skip
    for stream in page.streams:
        page.problems |= {str(error): error for error in stream.failed}
    _plan(page, asked)
    _preview(page, asked, tokenizer, say)
    if page.problems and page.plan is None and not any(s.found or s.bad for s in page.streams):
        raise next(iter(page.problems.values()))
    return page


def _stream(named: NamedStream, choice: Choice, tokenizer: str | None) -> StreamOnPage:
    """Reads one stream. Where no sample can be read, its index still is. Bad records may come from
    a conversion that published nothing.
    """
    failed, found, bad = list[MdsmixError](), None, None
    for samples in (choice, Choice(count=0)):
        try:
            found = found or inspect(named.url, samples, tokenizer)
        except (Unreachable, Damaged) as error:
            # The mix has reported all unpublished streams of a recipe already.
            failed += [] if named.is_made and isinstance(error, NotPublished) else [error]
    try:
        bad = find_bad_records(named.url, EXAMPLES, limit=MOST_BAD)
    except (Unreachable, Damaged) as error:
        failed += [error] if found else []
    return StreamOnPage(named=named, found=found, bad=bad, failed=failed)


def _plan(page: Gathered, asked: PlanOptions) -> None:
    """Adds the plan, by the same steps as `mdsmix plan`. Errors that the check reports are notes,
    and no failures.
    """
    try:
        # Where the mix could not be resolved, the streams are surveyed as `mdsmix plan` does.
        mix = replace(page.mix, evals=()) if page.mix else resolve_for_plan(page.targets)
        if errors := find_plan_problems(mix):
            page.notes["plan"] = (
                f"the mix has {plural(len(errors), 'error')}, so it cannot be trained and nothing was planned"
            )
            return
        batch = asked.batch or mix.yaml.batch_size
        page.is_batch_guessed = batch is None
        page.plan = make_plan(mix, replace(asked, batch=batch or ROWS * asked.nodes * asked.gpus))
    except CANNOT as error:
        page.notes["plan"] = UNSEEN if str(error) in page.problems else str(error)


def _preview(page: Gathered, asked: PlanOptions, tokenizer: str | None, say: Say | None) -> None:
    mix, plan = page.mix, page.plan
    if mix is None or plan is None or mix.is_bare:
        page.notes["preview"] = NO_PREVIEW
        return
    if say is None:
        page.notes["preview"] = "left out by --no-preview"
        return
    page.decoder = find_decoder(tokenizer, mix.tokenizer.hash if mix.tokenizer else None)
    say("the first batches: streaming and torch are imported, some seconds")
    try:
        from mdsmix.preview.options import PreviewOptions
        from mdsmix.preview.preview import preview

        world = make_run_machines(mix, asked.nodes, asked.gpus, plan.step.global_batch)
        page.preview = preview(mix, PreviewOptions(world=world, steps=STEPS, windows=WINDOWS, samples=2, read=READ))  # fmt: skip
    except CANNOT as error:
        page.notes["preview"] = str(error)
    except ImportError as error:
        page.notes["preview"] = f"the first batches are Streaming's own, and it cannot be imported here ({error})"  # fmt: skip
