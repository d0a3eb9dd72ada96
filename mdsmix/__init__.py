"""From raw pretraining and finetuning data to a checked mix of MDS streams and the Foundry YAML
that trains on it.

`mdsmix.convert`, `check`, `render_yaml`, `plan`, `inspect` and `build_loader` are the Python API
(docs/python.md). The package itself imports nothing: a name below is imported when it is first
used, so that `import mdsmix` and `mdsmix --help` stay fast.
"""

from __future__ import annotations

TYPE_CHECKING = False  # type checkers take it as True; importing `typing` for it takes 20 ms
if TYPE_CHECKING:
    from typing import Any

    from mdsmix.api import (
        check,
        check_phases,
        convert,
        convert_part,
        export,
        inspect,
        make_report,
        plan,
        plan_conversion,
        plan_phases,
        render_phases,
        render_yaml,
    )
    from mdsmix.errors import MdsmixError
    from mdsmix.foundry_yaml.findings import Finding
    from mdsmix.kinds import open_recipe
    from mdsmix.load import MixLoader, build_loader
    from mdsmix.recipe import (
        ImagesSpec,
        PhaseSpec,
        Recipe,
        SourceSpec,
        StreamSpec,
        TokenizerSpec,
        WeightSpec,
    )
    from mdsmix.report.checked_mix import CheckedMix
    from mdsmix.report.checked_phases import CheckedPhases
    from mdsmix.report.conversions import Conversion, ConvertedPart
    from mdsmix.report.exported_mix import ExportedMix
    from mdsmix.report.inspection import InspectedStream
    from mdsmix.report.planned_phases import PlannedPhases
    from mdsmix.report.planned_run import PlannedRun
    from mdsmix.report.progress import Progress
    from mdsmix.report.rendered_phases import RenderedPhases
    from mdsmix.report.rendered_yaml import RenderedYaml
    from mdsmix.report.written_page import ReportPage

__version__ = "0.1.0"

_HOMES = {
    "check": "api",
    "check_phases": "api",
    "convert": "api",
    "convert_part": "api",
    "export": "api",
    "inspect": "api",
    "make_report": "api",
    "plan": "api",
    "plan_conversion": "api",
    "plan_phases": "api",
    "render_phases": "api",
    "render_yaml": "api",
    "MdsmixError": "errors",
    "Finding": "foundry_yaml.findings",
    "open_recipe": "kinds",
    "MixLoader": "load",
    "build_loader": "load",
    "ImagesSpec": "recipe",
    "PhaseSpec": "recipe",
    "Recipe": "recipe",
    "SourceSpec": "recipe",
    "StreamSpec": "recipe",
    "TokenizerSpec": "recipe",
    "WeightSpec": "recipe",
    "CheckedMix": "report.checked_mix",
    "CheckedPhases": "report.checked_phases",
    "Conversion": "report.conversions",
    "ConvertedPart": "report.conversions",
    "ExportedMix": "report.exported_mix",
    "InspectedStream": "report.inspection",
    "PlannedPhases": "report.planned_phases",
    "PlannedRun": "report.planned_run",
    "Progress": "report.progress",
    "RenderedPhases": "report.rendered_phases",
    "RenderedYaml": "report.rendered_yaml",
    "ReportPage": "report.written_page",
}
"A public name -> the module of this package that it is imported from."

__all__ = [
    "CheckedMix",
    "CheckedPhases",
    "Conversion",
    "ConvertedPart",
    "ExportedMix",
    "Finding",
    "ImagesSpec",
    "InspectedStream",
    "MdsmixError",
    "MixLoader",
    "PhaseSpec",
    "PlannedPhases",
    "PlannedRun",
    "Progress",
    "Recipe",
    "RenderedPhases",
    "RenderedYaml",
    "ReportPage",
    "SourceSpec",
    "StreamSpec",
    "TokenizerSpec",
    "WeightSpec",
    "__version__",
    "build_loader",
    "check",
    "check_phases",
    "convert",
    "convert_part",
    "export",
    "inspect",
    "make_report",
    "open_recipe",
    "plan",
    "plan_conversion",
    "plan_phases",
    "render_phases",
    "render_yaml",
]


if not TYPE_CHECKING:  # for a type checker every name would be Any

    def __getattr__(name: str) -> Any:
        """Import a public name when it is first used (PEP 562)."""
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        from mdsmix.interrupts import keep_imports_whole

        module = keep_imports_whole(import_module)(f"{__name__}.{_HOMES[name]}")
        value = getattr(module, name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
