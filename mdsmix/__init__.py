"""From raw pretraining and finetuning data to a checked mix of MDS streams and the Foundry YAML
that trains on it.

`mdsmix.convert`, `check`, `render_yaml`, `plan`, `inspect` and `build_loader` are the Python API
(docs/python.md). The package itself imports nothing: a name below is imported when it is first
used, so that `import mdsmix` and `mdsmix --help` stay fast.
"""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = False  # type checkers take it as True; importing `typing` for it takes 20 ms
if TYPE_CHECKING:
    from typing import Any

    from mdsmix.api import (
        check,
        convert,
        convert_part,
        export,
        inspect,
        make_report,
        plan,
        plan_conversion,
        render_yaml,
    )
    from mdsmix.errors import MdsmixError
    from mdsmix.foundry_yaml.findings import Finding
    from mdsmix.kinds import open_recipe
    from mdsmix.load import MixLoader, build_loader
    from mdsmix.recipe import (
        ImagesSpec,
        Recipe,
        SourceSpec,
        StreamSpec,
        TokenizerSpec,
        WeightSpec,
    )
    from mdsmix.report.checked_mix import CheckedMix
    from mdsmix.report.conversions import Conversion, ConvertedPart
    from mdsmix.report.exported_mix import ExportedMix
    from mdsmix.report.inspection import InspectedStream
    from mdsmix.report.planned_run import PlannedRun
    from mdsmix.report.progress import Progress
    from mdsmix.report.rendered_yaml import RenderedYaml
    from mdsmix.report.written_page import ReportPage

__version__ = "0.1.0"

_HOMES = {
    "check": "api",
    "convert": "api",
    "convert_part": "api",
    "export": "api",
    "inspect": "api",
    "make_report": "api",
    "plan": "api",
    "plan_conversion": "api",
    "render_yaml": "api",
    "MdsmixError": "errors",
    "Finding": "foundry_yaml.findings",
    "open_recipe": "kinds",
    "MixLoader": "load",
    "build_loader": "load",
    "ImagesSpec": "recipe",
    "Recipe": "recipe",
    "SourceSpec": "recipe",
    "StreamSpec": "recipe",
    "TokenizerSpec": "recipe",
    "WeightSpec": "recipe",
    "CheckedMix": "report.checked_mix",
    "Conversion": "report.conversions",
    "ConvertedPart": "report.conversions",
    "ExportedMix": "report.exported_mix",
    "InspectedStream": "report.inspection",
    "PlannedRun": "report.planned_run",
    "Progress": "report.progress",
    "RenderedYaml": "report.rendered_yaml",
    "ReportPage": "report.written_page",
}
"A public name -> the module of this package that it is imported from."

__all__ = [
    "CheckedMix",
    "Conversion",
    "ConvertedPart",
    "ExportedMix",
    "Finding",
    "ImagesSpec",
    "InspectedStream",
    "MdsmixError",
    "MixLoader",
    "PlannedRun",
    "Progress",
    "Recipe",
    "RenderedYaml",
    "ReportPage",
    "SourceSpec",
    "StreamSpec",
    "TokenizerSpec",
    "WeightSpec",
    "__version__",
    "build_loader",
    "check",
    "convert",
    "convert_part",
    "export",
    "inspect",
    "make_report",
    "open_recipe",
    "plan",
    "plan_conversion",
    "render_yaml",
]


if not TYPE_CHECKING:  # for a type checker every name would be Any

    def __getattr__(name: str) -> Any:
        """Import a public name when it is first used (PEP 562)."""
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
