"""A step and an epoch: what is drawn, how rows are padded, how many steps there are."""

from __future__ import annotations

from collections.abc import Sequence

from mdsmix.mix.delivered import METHODS, per_device
from mdsmix.mix.plan.facts import Facts
from mdsmix.mix.plan.figures import UNKNOWN, Figure, StepPlan, total
from mdsmix.mix.plan.machines import Machines
from mdsmix.mix.plan.padding import Lengths, mean_longest
from mdsmix.mix.streams import Loader
from mdsmix.mix.weights import batching


def step_plan(
    facts: Sequence[Facts], came: Sequence[int], loader: Loader, machines: Machines
) -> StepPlan:
    """`came`: samples of each stream that an epoch delivers."""
    samples = sum(came)
    is_surveyed = any(each.survey for each in facts)
    tokens = total(f.tokens_of(n) for f, n in zip(facts, came, strict=True))
    trained = total(f.trained_of(n) for f, n in zip(facts, came, strict=True))
    drawn = machines.drawn * machines.devices.nodes * machines.ranks
    steps = _steps(samples, loader, machines)
    width, how = _width(facts, came, loader, machines)
    positions = width.times(machines.batch)
    # A step is a draw of the epoch, so what is counted of the epoch is a mean of its steps.
    of_step = drawn / max(1, samples)
    step_tokens, step_trained = tokens.times(of_step), trained.times(of_step)
    if machines.packing > 1 and step_tokens.known > positions.known:
        filled = positions.known / step_tokens.known
        step_tokens, step_trained = (
            each.times(filled, "estimated") for each in (step_tokens, step_trained)
        )
    return StepPlan(
        global_batch=machines.batch,
        device_batch=machines.device_batch,
        drawn=Figure(drawn, "estimated" if machines.is_packing_guessed else "exact"),
        positions=positions,
        tokens=step_tokens,
        is_even=not any(sum(f.deviations) for f in facts)
        and len({f.lengths.longest for f in facts if f.lengths}) == 1,
        trained=step_trained,
        padding=padding_of(step_tokens, positions),
        how_padded=how,
        steps=Figure(steps, "estimated" if is_surveyed or machines.is_packing_guessed else "exact"),
        samples=Figure(samples, "estimated" if is_surveyed else "exact"),
        epoch_tokens=tokens,
        epoch_trained=trained,
        dropped=Figure(max(0, samples - steps * drawn), "estimated" if is_surveyed else "exact"),
    )


def padding_of(tokens: Figure, positions: Figure) -> Figure:
    """The share of the positions that hold no token."""
    if tokens.value is None or not positions.value:
        return UNKNOWN
    share = tokens.times(1 / positions.value, positions.basis)
    return Figure(max(0.0, 1 - share.known), share.basis, share.error)


def _steps(samples: int, loader: Loader, machines: Machines) -> int:
    if batching(loader) in METHODS:
        return samples // machines.devices.global_batch
    own = per_device(samples, machines.devices)
    drops = bool(loader.section.get("drop_last"))
    return own // machines.drawn if drops else -(-own // machines.drawn)


def _width(
    facts: Sequence[Facts], came: Sequence[int], loader: Loader, machines: Machines
) -> tuple[Figure, str]:
    """The mean padded length of a row, and in words how the loader pads."""
    limit, dataset = loader.max_seq_len or 0, loader.dataset
    known = [(f.lengths, n) for f, n in zip(facts, came, strict=True) if n and f.lengths]
    if dataset.get("packing_ratio") and machines.packing > 1:
        said = (
            " (auto: guessed here, found when training begins)"
            if machines.is_packing_guessed
            else ""
        )
        return Figure(
            limit
        ), f"packed: {machines.packing:g} samples a row of {limit:,} tokens{said}"
    if dataset.get("decoder_only_format") is False and not loader.is_text:
        return Figure(2 * limit), f"context and target padded to {limit:,} tokens each"
    if any(f.lengths is None for f in facts) or not known:
        return Figure(limit), f"rows padded to max_seq_len, {limit:,} tokens"
    multiple = 8 if dataset.get("allow_pad_trimming") else 1
    if loader.is_text:
        return _longest(
            known, machines, 1
        ), "name: text pads to the longest row of a device's batch"
    if dataset.get("pad_to_longest") or multiple > 1:
        key = "allow_pad_trimming" if multiple > 1 else "pad_to_longest"
        return _longest(known, machines, multiple), f"{key}: to the longest row of a device's batch"
    return Figure(limit), f"every row padded to max_seq_len, {limit:,} tokens"


def _longest(known: Sequence[tuple[Lengths, int]], machines: Machines, multiple: int) -> Figure:
    tops = {lengths.longest for lengths, _ in known}
    if len(tops) == 1 and all(lengths.is_one for lengths, _ in known):
        return Figure(-(-tops.pop() // multiple) * multiple)
    streams = [(lengths, float(n)) for lengths, n in known]
    return Figure(mean_longest(streams, machines.device_batch, multiple), "estimated")
