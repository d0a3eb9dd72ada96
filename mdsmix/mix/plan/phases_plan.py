"""One plan over all phases of a run: the plan of each phase, counted on from phase to phase, and
what each phase draws that earlier phases have drawn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mdsmix.errors import MixRefused, RecipeError
from mdsmix.frozen import frozen
from mdsmix.mix.epoch.repeats import Repeats, count_repeated_draws
from mdsmix.mix.epoch.stream_counts import find_fixed_row_length
from mdsmix.mix.plan.plan import Plan, PlanOptions, make_plan
from mdsmix.mix.plan.steps import StreamInRun
from mdsmix.mix.streams.mix import Mix, StreamInMix
from mdsmix.table import Estimate, mark_estimate


@frozen(kw_only=True)
class StreamInPhase:
    """What one phase draws of a stream, and what earlier phases have drawn of that."""

    stream: str
    drawn: float
    "Samples, counted as often as they are drawn."
    tokens: float
    share: float
    "The stream's share of the phase's tokens, 0 to 1."
    passes: float
    "How often each sample is drawn in all phases up to this one, on average."
    repeated: float
    "How many of the drawn samples earlier phases have drawn."
    repeated_tokens: float
    "The tokens of the repeated samples."


@frozen(kw_only=True)
class PhasePlan:
    """The plan of one phase."""

    name: str
    budget: str
    steps_before: float
    "Steps of all earlier phases."
    plan: Plan
    streams: tuple[StreamInPhase, ...]


@frozen(kw_only=True)
class PhasesPlan:
    """The plan of a run in phases."""

    origin: str
    phases: tuple[PhasePlan, ...]

    @property
    def steps(self) -> float:
        return sum(phase.plan.run.steps for phase in self.phases)

    @property
    def tokens(self) -> float:
        return sum(phase.plan.run.tokens for phase in self.phases)

    @property
    def trained(self) -> float:
        return sum(phase.plan.run.trained for phase in self.phases)


def make_phases_plan(mixes: Sequence[Mix], options: PlanOptions) -> PhasesPlan:
    """Return the plan of a run whose phases have these mixes, in their order.

    Raises RecipeError if an option is wrong, and MixRefused if Streaming would refuse a mix.
    """
    phases = list[PhasePlan]()
    steps: float = 0
    passes = dict[str, float]()  # name of a stream -> its passes in the phases so far
    for mix, repeats in zip(mixes, count_repeated_draws(mixes), strict=True):
        assert mix.phase is not None, "the caller opened phases"
        assert mix.shares is not None, "a phase has a budget"
        try:
            plan = make_plan(mix, options)
        except (RecipeError, MixRefused) as error:
            raise type(error)(f"phase {mix.phase.name}: {error}") from None
        streams = tuple(_measure_streams(mix, plan, repeats, passes))
        phases.append(
            PhasePlan(
                name=mix.phase.name,
                budget=str(mix.shares.budget),
                steps_before=steps,
                plan=plan,
                streams=streams,
            )
        )
        steps = steps + plan.run.steps
    return PhasesPlan(origin=mixes[0].yaml.origin, phases=tuple(phases))


def _measure_streams(
    mix: Mix, plan: Plan, repeats: dict[str, Repeats], passes: dict[str, float]
) -> Iterator[StreamInPhase]:
    """Yield the figures of each stream of a phase, and add its passes to those of earlier phases.

    Args:
        repeats: name of a stream -> what the phase draws of it.
        passes: name of a stream -> its passes in the phases so far.
    """
    for stream, figures in zip(mix.train.streams, plan.streams, strict=True):
        counts = repeats[stream.name]
        passes[stream.name] = passes.get(stream.name, 0.0) + counts.drawn / max(
            1.0, float(figures.samples)
        )
        yield StreamInPhase(
            stream=stream.name,
            drawn=figures.drawn,
            tokens=figures.run_tokens,
            share=figures.share,
            passes=passes[stream.name],
            repeated=counts.repeated,
            repeated_tokens=_count_repeated_tokens(stream, figures, counts),
        )


def _count_repeated_tokens(stream: StreamInMix, figures: StreamInRun, repeats: Repeats) -> float:
    """Return the tokens of the repeated samples. They are exact if all or none are repeated, or if
    all rows have one length; otherwise they are a mean.
    """
    if not repeats.repeated:
        return repeats.repeated  # no samples, so no tokens: exact or estimated, as the samples are
    share = repeats.repeated / repeats.drawn
    has_equal_rows = find_fixed_row_length(stream) is not None
    is_exact = not isinstance(share, Estimate) and (share == 1 or has_equal_rows)
    return figures.run_tokens * mark_estimate(float(share), is_exact=is_exact)
