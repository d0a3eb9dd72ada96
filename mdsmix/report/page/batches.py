"""The first batches of a run, and its epoch in windows, as the page shows them; `mdsmix preview` has the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from mdsmix.encode.tokenizer import Decoder
from mdsmix.report.page import svg
from mdsmix.report.page.gather import Gathered
from mdsmix.report.page.spans import Shown, shown
from mdsmix.table import Table
from mdsmix.words import plural

if TYPE_CHECKING:
    from mdsmix.preview.figures import Preview, Step

TOKENS_OF_A_ROW = 192
"Of a row that is shown."


def batches_of(page: Gathered, colours: Mapping[str, str]) -> dict[str, Any] | None:
    """None where there is no preview. Imported with it, since it imports streaming."""
    found = page.preview
    if found is None:
        return None
    from mdsmix.preview.verdict import verdict
    from mdsmix.report.preview import epoch_table, head, windows_table

    table = windows_table(found)
    return {
        "head": head(found),
        "steps": [_step(found, step, page.decoder, colours) for step in found.steps],
        "said": [said.sentence for said in verdict(found)],
        "epoch": epoch_table(found),
        "windows": table,
        "of": "tokens" if found.windows.of_tokens else "samples",
        "drawing": _windows(found, table),
    }


def _windows(found: Preview, table: Table) -> Markup:
    said = [
        [f"steps {row[0]}, {name}: {s:.1%}" for name, s in zip(found.streams, row[1:], strict=True)]
        for row in table.rows
    ]
    label = f"shares of {plural(len(found.streams), 'stream')} in {plural(len(said), 'window')} of the epoch's steps"
    return svg.windows(label, found.windows.shares.tolist(), said)


def _step(
    found: Preview, step: Step, decoder: Decoder | None, colours: Mapping[str, str]
) -> dict[str, Any]:
    from mdsmix.report.preview import step_line, step_table

    table = step_table(found, step)
    said = [f"{row[0]}: {row[2] or 0:.1%}" for row in table.rows]
    parts = [
        (colours[row[0]], row[2] or 0.0, text) for row, text in zip(table.rows, said, strict=True)
    ]
    return {
        "line": step_line(found, step),
        "name": f"step {step.step} of epoch {step.epoch}",
        "table": table,
        "ribbon": svg.ribbon(f"samples of step {step.step}: {', '.join(said)}", parts, 18),
        "rows": _rows(found, step, decoder),
    }


def _rows(found: Preview, step: Step, decoder: Decoder | None) -> Sequence[tuple[str, str, Shown]]:
    """(stream, where it lies, tokens) of the rows that are shown."""
    from mdsmix.report.preview import row_segments, shard_of

    return [
        (
            found.streams[each.row.place.stream],
            f"rank {each.rank}, {shard_of(found, each.row.place)}, row {each.row.place.position:,}",
            shown(row_segments(each.row), decoder, TOKENS_OF_A_ROW),
        )
        for each in step.shown
    ]
