"""What a plan says beside its figures: what they rest on, and what of the data a run will not see."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from mdsmix.mix.plan.facts import Facts
from mdsmix.mix.plan.figures import (
    Figure,
    RunPlan,
    StepPlan,
)
from mdsmix.mix.plan.machines import Machines
from mdsmix.mix.plan.survey import Survey
from mdsmix.words import does, plural


def notes_of(
    facts: Sequence[Facts],
    step: StepPlan,
    run: RunPlan,
    on: Machines,
    came: Sequence[int],
    drawn: Sequence[int],
    epochs: int,
    others: Iterable[str],
) -> list[str]:
    found = [_surveyed(each.name, survey, each) for each in facts if (survey := each.survey)]
    for each, n in zip(facts, came, strict=True):
        found += _of_stream(each, n)
    found += _of_epoch(step, on, sum(came), sum(drawn))
    if 1 < epochs < run.epochs.known - 1:
        found.append(
            f"which shards a node reads was drawn for {plural(epochs, 'epoch')}; later ones add some of streams that are drawn in part"
        )
    if otherwise := ", ".join(others):
        found.append(f"set otherwise in the config: {otherwise}")
    return found


def _of_stream(facts: Facts, came: int) -> Iterator[str]:
    """What the loader cuts off of a stream, and what is not known of it. `came`: its samples in an epoch."""
    if cut := facts.cut_of(came).known:
        share = cut / max(1.0, cut + facts.tokens_of(came).known)
        yield f"{facts.name}: the loader cuts off {cut:,.0f} tokens an epoch at max_seq_len, {share:.1%} of all"
    if facts.tokens.value is None:
        yield f"{facts.name}: the loader itself tokenizes it, so its tokens are not known"
    elif facts.trained.value is None:
        yield f"{facts.name}: what is trained of it is not known: no manifest counts it for this loader's max_seq_len and targets"
    elif facts.tokens.basis == "estimated" and not facts.survey and facts.cut.value is None:
        yield f"{facts.name}: no manifest counts its tokens; the first samples of its first shard stand for all"


def _of_epoch(step: StepPlan, on: Machines, came: int, drawn: int) -> Iterator[str]:
    """What of an epoch is dropped, or waits. `came`: of the samples that the weights draw, those that the batching method delivers."""
    if on.packing > 1 and step.padding.value == 0 and step.tokens.basis == "estimated":
        over = step.drawn.known / max(1.0, step.samples.known) * step.epoch_tokens.known
        if over > step.positions.known:
            yield (
                f"packing_ratio {on.packing:g} draws {over:,.0f} tokens for {step.positions.known:,.0f} positions: what does not fit waits "
                "for later steps, and is dropped at the end of the epoch; take a smaller ratio"
            )
    if came < drawn:
        yield f"the batching method drops {drawn - came:,} of {drawn:,} samples an epoch"
    if step.dropped.known:
        yield f"{step.dropped.known:,.0f} samples of an epoch fill no last batch and are dropped (drop_last)"


def _surveyed(name: str, survey: Survey, facts: Facts) -> str:
    """How far a stream that is not published is known."""
    seen = f"{survey.records:,} records at {plural(survey.places, 'place')}"
    told = ", ".join((_with_bar(facts.tokens, "tokens"), _with_bar(facts.samples, "samples")))
    said = f"{name} is not converted yet: {'every record of it' if survey.is_all else seen} looked at, {told}"
    if not survey.is_all:
        sure = "one standard error" if survey.places > 1 else "how far off, one place does not tell"
        said += f" ({sure})"
    if survey.packed and not survey.is_all:
        said += f"; how far {plural(survey.packed, 'compressed file')} {does(range(survey.packed), 'expands', 'expand')} is taken from the beginning"
    if left := sum(survey.left_out.values()):
        reasons = ", ".join(f"{n} {reason}" for reason, n in survey.left_out.items())
        said += f"; {left:,} of these records become no sample ({reasons})"
    return said


def _with_bar(figure: Figure, word: str) -> str:
    bar = f" ± {figure.error:,.0f}" if figure.error else ""
    return f"{figure.known:,.0f}{bar} {word}"
