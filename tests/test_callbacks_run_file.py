"""The file of a run: what was written is read, a resumed run goes on, and a file that is not one is
refused in one sentence. Figures of streams, and the section of `mdsmix report --run`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from mdsmix.callbacks.run_file import RunFile, read_run
from mdsmix.callbacks.stream_figures import (
    PlannedStream,
    StreamCount,
    StreamFigures,
    compute_figures,
    make_metrics,
)
from mdsmix.errors import RecipeError
from mdsmix.report.page.run_curves import Curve, Curves, Point, choose_ticks, show_run
from tests.converting import assert_refused, mdsmix
from tests.pages import Page
from tests.published import TURNS, TURNS_ROW, publish

PLANNED = (
    PlannedStream(name="web", size=100, samples=50, tokens=3000.0, trained=2900.0),
    PlannedStream(name="chat", size=20, samples=50, tokens=1000.0, trained=600.0),
)


def figures(step: int) -> dict[str, StreamFigures]:
    """Return the figures of a step: ten samples of each stream a step."""
    now = {
        "web": StreamCount(samples=10 * step, tokens=600 * step, trained=580 * step, loss=4.0),
        "chat": StreamCount(samples=10 * step, tokens=200 * step, trained=120 * step, loss=3.0),
    }
    return compute_figures(PLANNED, now, {}, True)


def test_figures_are_shares_passes_and_means_since_they_were_logged() -> None:
    logged = {"web": StreamCount(samples=10, tokens=100, trained=90, loss=270.0)}
    now = {
        "web": StreamCount(samples=40, tokens=400, trained=290, loss=670.0),
        "chat": StreamCount(samples=60, tokens=100, trained=0, loss=0.0),
        "gone": StreamCount(samples=100, tokens=500, trained=10, loss=5.0),
    }
    got = compute_figures(PLANNED, now, logged, True)
    assert got["web"].loss == (670 - 270) / (290 - 90)
    assert got["web"].mean_loss == 670 / 290
    assert (got["chat"].loss, got["chat"].mean_loss) == (None, None)
    assert got["web"].passes == 0.4
    assert (got["chat"].passes, got["gone"].passes) == (3.0, None)
    assert got["web"].shares == {"samples": 0.2, "tokens": 0.4, "trained": 290 / 300}
    assert got["chat"].planned == {"samples": 0.5, "tokens": 0.25, "trained": 600 / 3500}
    metrics = make_metrics(got)
    assert metrics["mdsmix/web/planned_tokens_share"] == 0.75
    assert "mdsmix/chat/loss" not in metrics, "no value is logged as none"
    assert "mdsmix/gone/planned_tokens_share" not in metrics
    assert compute_figures(PLANNED, now, logged, False)["web"].mean_loss is None


def test_an_unknown_figure_of_one_stream_leaves_all_planned_shares_of_it_unknown() -> None:
    streams = [PLANNED[0], PlannedStream(name="chat", size=20, samples=50)]
    got = compute_figures(streams, {"web": StreamCount(samples=1)}, {}, True)
    assert got["web"].planned == {"samples": 0.5, "tokens": None, "trained": None}


def test_a_resumed_run_drops_the_lines_after_its_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "deep/run.jsonl"
    first = RunFile(str(path), PLANNED, 0)
    for step in (2, 4, 6):
        first.write(step, figures(step))
    whole = read_run(str(path))
    assert [line.step for line in whole.steps] == [2, 4, 6]
    assert whole.planned == list(PLANNED)
    assert whole.steps[1].streams["chat"].shares["tokens"] == 0.25
    with path.open("ab") as file:
        file.write(b'{"step": 8, "streams": {"we')
    assert read_run(str(path)).torn == 27

    second = RunFile(str(path), PLANNED, 4)
    second.write(6, figures(6))
    assert read_run(str(path)) == whole

    RunFile(str(path), PLANNED, 0)
    assert read_run(str(path)).steps == []
    assert read_run(f"{path}.old").steps == whole.steps, "an earlier run is kept"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "no such file"),
        ("", "no whole first line"),
        ("streams: {}\n", "line 1"),
        ('{"mdsmix_run": 2, "planned": []}\n', "another version of mdsmix"),
        ('{"mdsmix_run": 1, "planned": []}\n{"step": 2}\n', "line 2"),
        ('{"mdsmix_run": 1, "planned": []}\n[]\n', "line 2"),
    ],
)
def test_what_is_not_a_runs_file_is_refused(
    tmp_path: Path, content: str | None, words: str
) -> None:
    path = tmp_path / "run.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(RecipeError, match=words) as refused:
        read_run(str(path))
    assert str(path) in str(refused.value)
    assert_refused(mdsmix("report", tmp_path, "--run", path), 2, words)


@pytest.mark.parametrize(
    ("low", "high"), [(0.0, 1.0), (2.31, 2.34), (0.0, 0.0), (7.0, 7.0), (1e-4, 900.0), (-3.0, 2.0)]
)
def test_ticks_are_few_round_numbers_around_all_values(low: float, high: float) -> None:
    ticks = choose_ticks(low, high)
    assert ticks[0] <= low + 1e-9
    assert ticks[-1] >= high - 1e-9
    assert 2 <= len(ticks) <= 8
    assert all(len(f"{tick:.6g}") < 8 for tick in ticks)


def test_a_curve_has_a_gap_where_a_value_is_unknown() -> None:
    points = [Point(0, 0.0), Point(5, None), Point(10, 1.0), Point(20, 0.5)]
    drawing = Curves("x", "loss", [Curve("web", "s0", points, 0.25)])
    ((css, path),) = drawing.paths
    assert css == "s0"
    assert path.count("M") == 2
    places = [(float(x), float(y)) for x, y in re.findall(r"[ML]([\d.]+) ([\d.]+)", path)]
    assert places[0] == (drawing.x(0), drawing.y(0.0))
    assert [x for x, _ in places] == [52.0, 386.0, 720.0]
    assert [y for _, y in places] == [218.0, 0.0, 109.0]
    assert drawing.levels == [("s0", 163.5)]


def test_the_page_shows_a_run(tmp_path: Path) -> None:
    for name in ("web", "chat"):
        publish(tmp_path / name, TURNS, [TURNS_ROW] * 20, card={})
    run = RunFile(str(tmp_path / "run.jsonl"), PLANNED, 0)
    for step in range(1, 1301):
        run.write(step, figures(step))
    out = tmp_path / "page.html"
    streams = (tmp_path / "web/train", tmp_path / "chat/train")
    answer = mdsmix("report", *streams, "--run", run.path, "--no-preview", "-o", out)
    assert answer.code == 0, answer.err
    page = Page(out.read_text())
    assert (page.scripts, page.handlers, page.fetched) == (1, [], [])
    for words in ("The run", "1,300 steps", "75.0%", "130.00", "434 points of 1,300"):
        assert words in page.text, words
    html = out.read_text()
    assert html.count('class="curves"') == 3
    assert "web: 75.0%, planned 75.0%" in html
    assert out.stat().st_size < 400_000
    assert 'href="#run"' in html
    without = mdsmix("report", *streams, "--no-preview", "-o", out)
    assert without.code == 0
    assert 'id="run"' not in out.read_text()


def test_a_run_without_a_logged_step_says_so(tmp_path: Path) -> None:
    run = RunFile(str(tmp_path / "run.jsonl"), PLANNED, 0)
    items: list[Any] = list(show_run(read_run(str(run.path)), {}))
    assert items == ["The run has logged no step yet."]
    assert json.loads(Path(run.path).read_text())["planned"][0]["name"] == "web"
