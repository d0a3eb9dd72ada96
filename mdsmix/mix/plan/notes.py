"""What a plan says beside its figures: what they rest on, and what of the data a run will not see."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from mdsmix.kinds.survey import Survey
from mdsmix.mix.draws import batching
from mdsmix.mix.epoch import StreamInEpoch
from mdsmix.mix.plan.figures import EpochPlan, StepPlan
from mdsmix.mix.streams import Loader
from mdsmix.mix.world import World
from mdsmix.table import is_known
from mdsmix.words import plural


def notes_of(
    loader: Loader,
    streams: Sequence[StreamInEpoch],
    epoch: EpochPlan,
    step: StepPlan,
    world: World,
    others: Iterable[str],
) -> Iterator[str]:
    """`others`: settings that the config holds otherwise."""
    surveys = ((stream.survey, of) for stream, of in zip(loader.streams, streams, strict=True))
    yield from (_surveyed(survey, of) for survey, of in surveys if survey)
    for stream, of in zip(loader.streams, streams, strict=True):
        yield from _of_stream(of, has_manifest=stream.trusted_manifest is not None)
    yield from _of_epoch(loader, streams, epoch, step, world)
    if otherwise := ", ".join(others):
        yield f"set otherwise in the config: {otherwise}"


def _of_stream(of: StreamInEpoch, has_manifest: bool) -> Iterator[str]:
    """What the loader cuts off of a stream, and what is not known of it."""
    if is_known(of.cut) and of.cut:
        share = of.cut / max(1, of.cut + of.tokens)
        yield f"{of.stream}: the loader cuts off {of.cut:,.0f} tokens an epoch at max_seq_len, {share:.1%} of all"
    if not is_known(of.tokens):
        yield f"{of.stream}: the loader itself tokenizes it, so its tokens are not known"
    elif not is_known(of.trained):
        yield (
            f"{of.stream}: what is trained of it is not known: no manifest counts it for this loader's max_seq_len and targets"
        )
    elif not has_manifest and not is_known(of.cut):
        yield f"{of.stream}: no manifest counts its tokens; the first samples of its first shard stand for all"


def _of_epoch(
    loader: Loader,
    streams: Sequence[StreamInEpoch],
    epoch: EpochPlan,
    step: StepPlan,
    world: World,
) -> Iterator[str]:
    """What of an epoch is dropped, comes twice, or waits."""
    drawn, came = (sum(getattr(s, name) for s in streams) for name in ("drawn", "delivered"))
    wanted = sum(s.tokens for s in streams) * (world.drawn_together / max(1, float(came)))
    if world.packing > 1 and wanted > step.positions:
        yield (
            f"packing_ratio {world.packing:g} draws {wanted:,.0f} tokens for {step.positions:,.0f} positions: what does not fit waits "
            "for later steps, and is dropped at the end of the epoch; take a smaller ratio"
        )
    if came < drawn:
        yield f"the batching method drops {drawn - came:,.0f} of {drawn:,.0f} samples an epoch"
    if epoch.repeated:
        many = plural(int(epoch.repeated), "sample")
        yield f"{many} of an epoch {'comes' if epoch.repeated == 1 else 'come'} twice, so that all devices draw equally many"
    if not epoch.dropped:
        return
    dropped = plural(int(epoch.dropped), "sample")
    if batching(loader) == "device_per_stream":
        yield f"{dropped} of an epoch fill batches of some devices alone, which then have one batch more than the others"
    else:
        yield f"{dropped} of an epoch fill no last batch and are dropped (drop_last)"


def _surveyed(survey: Survey, of: StreamInEpoch) -> str:
    """How far a stream that is not published is known."""
    seen = (
        "every record of it"
        if survey.is_all
        else f"{plural(survey.records, 'record')} at {plural(survey.places, 'place')}"
    )
    said = f"{of.stream} is not converted yet: {seen} looked at"
    if left := survey.left_out.total():
        reasons = ", ".join(f"{n} {reason}" for reason, n in survey.left_out.items())
        said += f"; {left:,} of these records become no sample ({reasons})"
    return said
