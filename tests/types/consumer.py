"""Uses every public name as a user of the Python API does, for `make lint`: mypy reveals no Any
where a type is known, and reports exactly the errors that are marked. It is never run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from typing_extensions import assert_type

import mdsmix
from mdsmix import errors

recipe = mdsmix.Recipe(
    tokenizer=mdsmix.TokenizerSpec(name="./tokenizer"),
    max_seq_len=2048,
    local="./mix",
    streams={
        "web": mdsmix.StreamSpec(
            kind="pretraining", source=mdsmix.SourceSpec(path=["web/*.jsonl"], text="text")
        ),
        "seen": mdsmix.StreamSpec(
            kind="finetuning",
            source=mdsmix.SourceSpec(path=["seen.jsonl"], messages="messages"),
            images=mdsmix.ImagesSpec(),
        ),
    },
    mix={"web": mdsmix.WeightSpec(share="30%")},
)
phase = mdsmix.PhaseSpec(budget="2B tokens", mix={"web": mdsmix.WeightSpec(share="30%")})
assert_type(phase.mix["web"].max_repeat, int | float | None)
assert_type(recipe.streams["web"].kind, str | None)
assert_type(mdsmix.open_recipe({"max_seq_len": 8}, ["max_seq_len=16"]), mdsmix.Recipe)
assert_type(mdsmix.__version__, str)


def note(progress: mdsmix.Progress) -> None:
    assert_type(progress.bytes_done, int)
    assert_type(progress.message, str)


conversion = mdsmix.convert(Path("recipe.yaml"), workers=2, memory="8GiB", progress=note)
assert_type(conversion, mdsmix.Conversion)
assert_type(conversion.streams[0].manifest.totals.tokens, int)
assert_type(conversion.streams[0].manifest.records.quarantined, dict[str, int])
assert_type(conversion.streams[0].state, str)
assert_type(conversion.warnings, list[str])
assert_type(conversion.to_dict(), dict[str, Any])
part = mdsmix.convert_part(recipe, "1/64", progress=False)
assert_type(part, mdsmix.ConvertedPart)
assert_type(part.streams[0].tokens, int)
assert_type(mdsmix.plan_conversion(recipe), list[str])

checked = mdsmix.check(recipe, evals="keep")
assert_type(checked, mdsmix.CheckedMix)
assert_type(checked[0], mdsmix.Finding)
assert_type(checked[0].id, str)
assert_type(checked.is_refused, bool)
rendered = mdsmix.render_yaml(recipe, out="train.yaml")
assert_type(rendered, mdsmix.RenderedYaml)
assert_type(rendered.yaml, str)
assert_type(rendered.wrote, str | None)
planned = mdsmix.plan("train.yaml", tokens="100B")
assert_type(planned, mdsmix.PlannedRun)
assert_type(planned.run.steps, float)
phases = mdsmix.plan_phases("phases.yaml", batch=8)
assert_type(phases, mdsmix.PlannedPhases)
assert_type(phases.phases[0].streams[0].repeated, float)
assert_type(mdsmix.check_phases("phases.yaml"), mdsmix.CheckedPhases)
assert_type(mdsmix.check_phases("phases.yaml").phases["main"], mdsmix.CheckedMix)
assert_type(mdsmix.render_phases("phases.yaml"), mdsmix.RenderedPhases)
assert_type(mdsmix.render_phases("phases.yaml").phases["main"], mdsmix.RenderedYaml)
inspected = mdsmix.inspect("mix/web/train", samples=1)
assert_type(inspected, mdsmix.InspectedStream)
assert_type(inspected.samples[0].number, int)
assert_type(inspected.stream.index.samples, int)
page = mdsmix.make_report("recipe.yaml")
assert_type(page, mdsmix.ReportPage)
assert_type(page.html, str)
assert_type(page.problems, list[errors.MdsmixError])
try:
    mdsmix.convert(recipe, limit=3)
except mdsmix.MdsmixError as error:
    assert_type(error.exit_code, int)
exported = mdsmix.export(recipe, to="parquet", out=Path("exported"), only=["web"])
assert_type(exported, mdsmix.ExportedMix)
assert_type(exported.streams[0].counts.trained, int)
loader = mdsmix.build_loader("train.yaml", batch_size=8)
assert_type(loader, mdsmix.MixLoader)

mdsmix.convert(3)  # type: ignore[arg-type]
mdsmix.check(recipe, evals="sometimes")  # type: ignore[arg-type]
mdsmix.export(recipe, out="exported")  # type: ignore[call-arg]
mdsmix.convert(recipe, workrs=2)  # type: ignore[call-arg]
mdsmix.SourceSpec(path=3)  # type: ignore[arg-type]
conversion.streams[0].token  # type: ignore[attr-defined]  # noqa: B018
mdsmix.konvert  # type: ignore[attr-defined]  # noqa: B018
