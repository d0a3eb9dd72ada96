"""The page of `mdsmix report`, in memory."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

from markupsafe import Markup

from mdsmix.errors import MdsmixError
from mdsmix.frozen import frozen
from mdsmix.mix.check import make_check_tree
from mdsmix.mix.render.render import write_yaml
from mdsmix.report.inspection import inspection_to_json
from mdsmix.report.page.gather import Gathered, StreamOnPage
from mdsmix.report.page.html import render_page
from mdsmix.report.planned_run import plan_to_json
from mdsmix.report.result import Result
from mdsmix.report.show import Item
from mdsmix.table import Tree, format_size

FRAME = Markup(
    '<iframe srcdoc="{}" style="width: 100%; height: 40em; border: 1px solid #ccc" '
    'sandbox="allow-scripts" title="mdsmix report"></iframe>'
)
"How a notebook shows the page: apart from the notebook's own page."


@frozen
class ReportPage(Result):
    """A mix as one self-contained HTML page, as `mdsmix.make_report` returns it."""

    gathered: Gathered
    "The data of the page."

    @cached_property
    def html(self) -> str:
        """The page."""
        return render_page(self.gathered)

    @property
    def problems(self) -> list[MdsmixError]:
        """Errors on data that could not be read. The page lists them."""
        return list(self.gathered.problems.values())

    def write(self, path: str) -> None:
        """Write the page to a file or a URL of a bucket. Raises Unreachable if that fails."""
        write_yaml(path, self.html)

    def items(self) -> Iterator[Item]:
        yield f"a report of {' '.join(self.gathered.targets)}, {format_size(len(self.html))}"

    def to_dict(self) -> Tree:
        """Return the data of the page as `mdsmix report --json` prints it. A part that has no data
        is null; `notes` or `problems` has the reason.
        """
        page = self.gathered
        preview = None
        if page.preview:
            from mdsmix.report.previewed_batches import preview_to_json  # imports torch

            preview = preview_to_json(page.preview, page.decoder)
        return {
            "targets": list(page.targets),
            "check": make_check_tree(page.mix, page.findings) if page.mix else None,
            "streams": [_stream_to_dict(stream) for stream in page.streams],
            "plan": plan_to_json(page.plan) if page.plan else None,
            "preview": preview,
            "notes": dict(page.notes),
            "problems": list(page.problems),
        }

    def _repr_html_(self) -> str:
        return str(FRAME.format(self.html))


def _stream_to_dict(stream: StreamOnPage) -> Tree:
    """Return a stream of the page: its name, what `mdsmix inspect` read, its bad records."""
    return {
        "name": stream.named.name,
        "loader": stream.named.loader,
        "inspection": inspection_to_json(stream.inspection) if stream.inspection else None,
        "quarantine": stream.bad,
        "errors": [str(error) for error in stream.errors],
    }
