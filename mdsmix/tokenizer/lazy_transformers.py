"""Imports transformers without reading the code of all models.

`import transformers` reads the 2,000 modules in its folder `models`, to learn which names they
export. With transformers 4.57 that is 0.5 of 1.0 s. A tokenizer needs only the names of the folder
`models/auto`, and from the package `transformers` those of the modules with tokenizers. So these
packages first know these names. At the first question for another name a package reads all modules,
and is then as after a plain import.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any, NamedTuple

IMPORT_UTILS = "transformers.utils.import_utils"
"The module of transformers that reads what its models export."
AUTO_MODULES = ("auto/*.py",)
"""Patterns of the modules in `models` that the package `transformers.models` reads at first. To
read those with tokenizers too takes 0.1 s, and nobody asks this package for their names.
"""
TOKENIZER_MODULES = (*AUTO_MODULES, "*/tokenization_*.py")
"Patterns of the modules in `models` that the package `transformers` reads at first."
EXPECTED = {
    "__init__.py": """
    import_structure = define_import_structure(Path(__file__).parent / "models", prefix="models")
    import_structure[frozenset({})].update(_import_structure)

    sys.modules[__name__] = _LazyModule(
        __name__,
        globals()["__file__"],
        import_structure,
""",
    "models/__init__.py": """
    sys.modules[__name__] = _LazyModule(__name__, _file, define_import_structure(_file), module_spec=__spec__)
""",  # noqa: E501
}
"""The lines of transformers that use the structure of the folder `models`. A version with other
lines is imported as it is, since it may use a part as the whole.
"""
Structure = dict[frozenset[str], dict[str, set[str]]]
"Libraries that modules need -> module -> names that it exports."


def read_models_late() -> None:
    """Let a later `import transformers` read the code of models only when it is needed. This does
    nothing if transformers is imported already.
    """
    if IMPORT_UTILS not in sys.modules:
        sys.meta_path.insert(0, _ImportUtilsFinder())


class _ImportUtilsFinder(MetaPathFinder):
    """Finds `import_utils` as Python does, and changes it once Python has run its code."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != IMPORT_UTILS:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            run_code = spec.loader.exec_module

            def run_and_change(module: ModuleType) -> None:
                run_code(module)
                _change_import_utils(module)

            spec.loader.exec_module = run_and_change  # type: ignore[method-assign]
        return spec


class _ModelsPart(NamedTuple):
    """The structure of the folder `models` that was read at first."""

    structure: Structure
    "transformers adds its own modules to it."
    arguments: tuple[Any, ...]
    "The arguments with which transformers asked for the whole structure."
    named_arguments: dict[str, Any]


def _change_import_utils(import_utils: Any) -> None:
    """Change how transformers reads its folder `models`: `define_import_structure` returns a part,
    and a package that was made from a part completes it when it lacks a name.

    Nothing is changed if transformers has other lines than EXPECTED.

    Args:
        import_utils: the module `transformers.utils.import_utils`.
    """
    package = Path(import_utils.__file__).parent.parent
    for file, lines in EXPECTED.items():
        if lines not in (package / file).read_text("utf-8"):
            return
    define = import_utils.define_import_structure
    package_class = import_utils._LazyModule
    models = package / "models"
    parts = list[_ModelsPart]()

    def define_part(path: str | Path, *arguments: Any, **named_arguments: Any) -> Structure:
        """Return the structure of a folder: the whole, but only a part of that of `models`.

        Args:
            path: the folder or its `__init__.py`.
            arguments: the other arguments of `define_import_structure`.
            named_arguments: those by name.
        """
        if Path(path) not in (models, models / "__init__.py"):
            structure: Structure = define(path, *arguments, **named_arguments)
            return structure
        # The package `transformers` names the folder itself.
        patterns = TOKENIZER_MODULES if Path(path) == models else AUTO_MODULES
        # A folder that has links to some of the modules.
        with TemporaryDirectory(prefix="mdsmix-") as folder:
            for pattern in patterns:
                for module in models.glob(pattern):
                    link = Path(folder, module.relative_to(models))
                    link.parent.mkdir(exist_ok=True)
                    if not link.is_symlink():
                        link.symlink_to(module)
            structure = define(folder, *arguments, **named_arguments)
        parts.append(_ModelsPart(structure, (path, *arguments), named_arguments))
        return structure

    class LatePackage(package_class):  # type: ignore[misc, valid-type]
        """A package of transformers. If it was made from a part, it completes itself."""

        _models_part: _ModelsPart | None = None

        def __init__(self, name: str, file: str, structure: Structure, **settings: Any) -> None:
            super().__init__(name, file, structure, **settings)
            self._first_arguments = (name, file)
            self._settings = settings
            for models_part in parts:
                if models_part.structure is structure:
                    self._models_part = models_part

        def __getattr__(self, name: str) -> Any:
            # The original must not search a part for a name that it lacks: transformers 5 then
            # tries similar names.
            if self._models_part and not name.startswith("_") and not self._has_name(name):
                self._complete(self._models_part)
            return super().__getattr__(name)

        def _has_name(self, name: str) -> bool:
            tables = (self._class_to_module, self._modules, self._objects)
            return any(name in table for table in tables)

        def _complete(self, models_part: _ModelsPart) -> None:
            """Read all modules of `models`."""
            structure = define(*models_part.arguments, **models_part.named_arguments)
            for libraries, modules in models_part.structure.items():
                structure.setdefault(libraries, {}).update(modules)
            super().__init__(*self._first_arguments, structure, **self._settings)
            self._models_part = None

    import_utils.define_import_structure = define_part
    import_utils._LazyModule = LatePackage
