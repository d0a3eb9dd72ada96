"""What was gathered -> the text of the page, by jinja2 with autoescape: a sample that holds markup stays text.

The page reaches nothing outside of itself: its policy allows its own style and script, by their hashes, and images that it holds.
"""

from __future__ import annotations

import base64
import hashlib
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from mdsmix import __version__
from mdsmix.mix.plan.figures import Figure, Plan
from mdsmix.mix.shares_table import shares_table, title
from mdsmix.mix.streams import Mix
from mdsmix.report.bad_records import bad_record_lines
from mdsmix.report.lengths import by_power
from mdsmix.report.page import svg
from mdsmix.report.page.gather import MOST_BAD, Gathered, OneStream
from mdsmix.report.page.places import TRAINED
from mdsmix.report.page.samples import samples_of
from mdsmix.report.page.spans import shown
from mdsmix.report.plan import epoch_of, node_pairs, run_of, step_pairs
from mdsmix.shards.manifest import Manifest
from mdsmix.table import Column, Estimate, Table, size_of
from mdsmix.table import shown as told
from mdsmix.words import plural, printable

TEMPLATES = Path(__file__).parent / "templates"
TOKENS_OF_A_ROW = 192
"Of a row of the first batches."


def page_html(page: Gathered) -> str:
    """The whole page."""
    style, script = _own("page.css"), _own("page.js")
    policy = (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    return _environment().get_template("page.html").render(
        **_context(page), style=Markup(style), script=Markup(script), policy=policy
    )  # fmt: skip


def _own(name: str) -> str:
    return (TEMPLATES / name).read_text("utf-8").strip()


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


@cache
def _environment() -> Environment:
    made = Environment(
        loader=FileSystemLoader(TEMPLATES, encoding="utf-8"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_printable,
    )
    made.filters |= {
        "figure": figure,
        "size": size_of,
        "told": told,
        "plural": plural,
        "ticks": ticks,
    }
    return made


def _printable(value: Any) -> Any:
    """Nothing that steers: no change of direction, no NUL, whoever wrote the text; Markup is ours."""
    if isinstance(value, str) and not isinstance(value, Markup):
        return printable(value, "\n\t")
    return value


def ticks(text: str) -> Markup:
    """A sentence with what stands in backticks as code."""
    parts = printable(text).split("`")
    if not len(parts) % 2:
        return escape(printable(text))
    return Markup("").join(
        Markup("<code>{}</code>").format(part) if n % 2 else part for n, part in enumerate(parts)
    )


def figure(found: Figure, form: str, name: str = "") -> Markup:
    """A figure of the plan as `plan` spells it; for programs with its value and what it rests on."""
    text = told(Column("", form), found.shown)
    value = "" if found.value is None else f"{found.value!r}"
    return Markup('<data value="{}" data-figure="{}" title="{}">{}</data>').format(
        value, name, found.basis, text
    )


@dataclass(frozen=True, slots=True)
class Part:
    """One bar of the mix."""

    what: str
    text: Markup | str
    share: float | None
    drawing: Markup


@dataclass(frozen=True, slots=True, kw_only=True)
class MixRow:
    """A stream in the mix."""

    stream: str
    css: str
    said: str
    parts: Sequence[Part]


def _context(page: Gathered) -> dict[str, Any]:
    trained = [s for s in page.streams if s.place.loader == TRAINED]
    names = [s.place.name for s in trained]
    if page.plan and not page.mix:
        names = [s.stream for s in page.plan.streams]
    others = [s.place.name for s in page.streams if s.place.name not in names]
    colours = {name: svg.colour(number) for number, name in enumerate([*names, *others])}
    css = [colours[s.place.name] for s in page.streams]
    samples, left_out = samples_of(page.streams, css)
    return {
        "page": page,
        "version": __version__,
        "title": _title(page),
        "command": shlex.join(["mdsmix", "report", *page.targets]),
        "svg": svg,
        "colours": colours,
        "rows": list(_mix_rows(page, colours)),
        "ribbons": list(_ribbons(page, colours)),
        "shares": _shares(page.mix),
        "samples": samples,
        "left_out": left_out,
        "streams": [_stream(each, colours[each.place.name]) for each in page.streams],
        "plan": _plan(page.plan),
        "preview": _preview(page, colours),
        "lost": [s for s in page.streams if s.problem],
        "most_bad": MOST_BAD,
    }


def _title(page: Gathered) -> str:
    if len(page.targets) == 1 or (page.mix and page.mix.recipe):
        name = Path(page.targets[0]).name or page.targets[0]
        return name.removesuffix(".yaml").removesuffix(".yml")
    return plural(len(page.streams), "stream")


def _shares(mix: Mix | None) -> tuple[str, Table] | None:
    return (title(mix.shares), shares_table(mix.shares)) if mix and mix.shares else None


def _mix_rows(page: Gathered, colours: dict[str, str]) -> Any:
    """A row a stream of the train loader: by the plan, or where there is none by what `check` says of an epoch."""
    for name, said, measures in _measured(page):
        css, asked = colours[name], _asked(page.mix, name)
        parts = [
            Part(what, text, share, svg.bar(f"{name}: {what}", share or 0.0, css, asked.get(key)))
            for key, what, text, share in measures
        ]
        yield MixRow(stream=name, css=css, said=said, parts=parts)


Measures = list[tuple[str, str, Markup | str, float | None]]


def _measured(page: Gathered) -> Any:
    """(stream, what is said of it, its measures: key, words, text, share of the epoch)."""
    if page.plan:
        step = page.plan.step
        for n, s in enumerate(page.plan.streams):
            passes = f"{told(Column('', 'times'), s.passes.shown)} passes"
            said = passes if s.state == "published" else f"not converted yet, {passes}"
            of = (
                ("samples", "samples", s.epoch_samples, step.samples),
                ("tokens", "tokens", s.epoch_tokens, step.epoch_tokens),
                ("loss_tokens", "trained tokens", s.epoch_trained, step.epoch_trained),
            )
            yield s.stream, said, [(key, what, figure(f, "count", f"streams.{n}.epoch_{what.split()[0]}"), _part(f, whole)) for key, what, f, whole in of]  # fmt: skip
        return
    for share in page.epoch:
        tokens = None if share.tokens is None else share.tokens if share.is_exact else Estimate(share.tokens)  # fmt: skip
        measures = [
            ("samples", "samples", told(Column(""), share.delivered), share.share),
            ("tokens", "tokens", told(Column(""), tokens), share.tokens_share),
        ]
        yield share.stream, f"{share.samples:,} samples in it", measures


def _part(figure: Figure, of: Figure) -> float | None:
    return figure.value / of.value if figure.value is not None and of.value else None


def _asked(mix: Mix | None, stream: str) -> dict[str, float]:
    """What shares were asked of -> how much, of this stream."""
    if mix is None or mix.shares is None:
        return {}
    asked = {part.stream: part.asked for part in mix.shares.parts}
    return {mix.shares.count: asked[stream]} if stream in asked else {}


def _ribbons(page: Gathered, colours: dict[str, str]) -> Any:
    """The whole epoch, a line for each measure."""
    measured = list(_measured(page))
    for at in range(len(measured[0][2]) if measured else 0):
        parts = [(name, m[at]) for name, _, m in measured if len(m) > at and m[at][3] is not None]
        if len(parts) < len(measured):
            continue
        what = parts[0][1][1]
        label = f"{what} of an epoch: " + ", ".join(f"{n} {m[3]:.1%}" for n, m in parts)
        yield what, svg.ribbon(label, [(colours[n], m[3] or 0.0, f"{n}: {m[3]:.1%}") for n, m in parts])  # fmt: skip


def _plan(plan: Plan | None) -> dict[str, Any] | None:
    if plan is None:
        return None
    step = plan.step
    rest = _row_parts(step.positions.known, step.tokens.known, step.trained.value)
    return {
        "tables": [("An epoch", epoch_of(plan)), ("The run", run_of(plan))],
        "pairs": [*step_pairs(plan), *node_pairs(plan)],
        "row": rest,
        "ribbon": svg.ribbon(
            "the positions of a step: " + ", ".join(f"{what} {s:.1%}" for what, _, s in rest),
            [(css, share, f"{what}: {share:.1%}") for what, css, share in rest],
            34,
        ),
    }


def _row_parts(
    positions: float, tokens: float, trained: float | None
) -> list[tuple[str, str, float]]:
    """(words, class, share of the positions): what the positions of a step hold."""
    if not positions:
        return []
    known = min(tokens, positions)
    parts = (
        [("tokens", "read", known)]
        if trained is None
        else [("trained tokens", "trained", trained), ("other tokens", "read", known - trained)]
    )
    parts.append(("padding", "padding", positions - known))
    return [(what, css, max(0.0, count) / positions) for what, css, count in parts]


def _stream(stream: OneStream, css: str) -> dict[str, Any]:
    """A stream's drawings and figures."""
    found = stream.found
    manifest = found.manifest if found and found.manifest and found.manifest.index_hash == found.index.hash else None  # fmt: skip
    sizes = [shard.stored.bytes for shard in found.index.shards] if found else []
    name = stream.place.name
    return {
        "one": stream,
        "name": name,
        "css": css,
        "loader": "" if stream.place.loader == TRAINED else stream.place.loader,
        "index": found.index if found else None,
        "manifest": manifest,
        "lengths": _lengths(name, manifest, css) if manifest else None,
        "fate": _fate(name, manifest, css) if manifest and not manifest.mixed else None,
        "sizes": svg.shard_sizes(f"{name}: sizes of {plural(len(sizes), 'shard')}", sizes, css),
        "smallest": min(sizes, default=0),
        "largest": max(sizes, default=0),
        "bad": [
            (reason, [_bad(record) for record in reason.records]) for reason in stream.bad.reasons
        ]
        if stream.bad
        else [],
        "bad_is_cut": bool(stream.bad and stream.bad.count >= MOST_BAD),
    }


def _bad(record: dict[str, Any]) -> tuple[str, list[str]]:
    place, *lines = [line for _, line in bad_record_lines(record)]
    return place, lines


def _lengths(name: str, manifest: Manifest, css: str) -> dict[str, Any]:
    totals, limit = manifest.totals, manifest.encoding.max_seq_len
    counts = by_power(totals.lengths)
    rows = [(f"{1 << k:,}", f"{min((2 << k) - 1, totals.longest):,}", n) for k, n in counts.items()]
    label = f"{name}: {plural(totals.samples, 'sample')} by length, the longest {totals.longest:,} tokens"
    return {
        "drawing": svg.histogram(label, counts, totals.longest, limit, bool(totals.cut_rows), css),
        "rows": rows,
    }


def _fate(name: str, manifest: Manifest, css: str) -> dict[str, Any]:
    """What became of the records."""
    records = manifest.records
    of = max(1, records.read)
    parts = [("written", css, records.written)]
    parts += [(f"filtered: {reason}", "filtered", n) for reason, n in records.filtered.items()]
    parts += [(f"quarantined: {reason}", "bad", n) for reason, n in records.quarantined.items()]
    label = f"{name}: {records.read:,} records read: " + ", ".join(f"{n:,} {w}" for w, _, n in parts)  # fmt: skip
    return {
        "drawing": svg.ribbon(
            label, [(c, n / of, f"{w}: {n:,} ({n / of:.1%})") for w, c, n in parts], 18
        ),
        "parts": [(w, c, n, n / of) for w, c, n in parts],
        "records": records,
    }


def _preview(page: Gathered, colours: dict[str, str]) -> dict[str, Any] | None:
    found = page.preview
    if found is None:
        return None
    from mdsmix.preview.verdict import verdict
    from mdsmix.report import preview as of

    names, w = found.streams, found.windows
    table = of.windows_table(found)
    return {
        "head": of.head(found),
        "steps": [_step(page, step, colours) for step in found.steps],
        "said": [said.sentence for said in verdict(found)],
        "read": of.read_line(found),
        "epoch": of.epoch_table(found),
        "windows": table,
        "of": "tokens" if w.of_tokens else "samples",
        "drawing": svg.windows(
            f"shares of {plural(len(names), 'stream')} in {plural(len(table.rows), 'window')} of the epoch's steps",
            w.shares.tolist(),
            [[f"steps {row[0]}, {n}: {share:.1%}" for n, share in zip(names, row[1:], strict=True)] for row in table.rows],
        ),
    }  # fmt: skip


def _step(page: Gathered, step: Any, colours: dict[str, str]) -> dict[str, Any]:
    from mdsmix.report import preview as of

    assert page.preview is not None
    found, table = page.preview, of.step_table(page.preview, step)
    drawn = [(row[0], row[2] or 0.0) for row in table.rows]
    label = f"samples of step {step.step}: " + ", ".join(f"{n} {share:.1%}" for n, share in drawn)
    rows = [
        (
            found.streams[each.row.place.stream],
            f"rank {each.rank}, {of.shard_of(found, each.row.place)}, row {each.row.place.position:,}",
            shown(of.row_segments(each.row), page.decoder, TOKENS_OF_A_ROW),
        )
        for each in step.shown
    ]
    return {
        "line": of.step_line(found, step),
        "number": step.step,
        "table": table,
        "ribbon": svg.ribbon(label, [(colours[n], share, f"{n}: {share:.1%}") for n, share in drawn], 18),
        "rows": rows,
    }  # fmt: skip
