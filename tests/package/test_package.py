"""The wheel and the sdist as `make test-package` has built and installed them, used where there is
no checkout.
"""

from __future__ import annotations

import email
import json
import os
import re
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
(WHEEL,) = (ROOT / "dist").glob("*.whl")
(SDIST,) = (ROOT / "dist").glob("*.tar.gz")
BIN = ROOT / ".venv-package" / "bin"
UV = os.environ["UV"]

LOADS = """
import sys
from mdsmix.load import build_loader

batch = next(iter(build_loader("train.yaml", batch_size=2)))
print(tuple(batch["input_ids"].shape), sys.modules["mdsmix"].__file__)
"""
ENTRY = (
    "from importlib.metadata import entry_points; "
    "print(entry_points(group='llmfoundry_dataloaders')['mdsmix'].load().__name__)"
)


def tracked(folder: str) -> set[str]:
    """The files of the checkout that belong to it."""
    said = subprocess.run(["git", "ls-files", folder], cwd=ROOT, capture_output=True, check=True)
    return set(said.stdout.decode().split())


def run(*arguments: object, cwd: Path, code: int = 0) -> str:
    """What it prints; no module of the checkout is in its path."""
    env = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "VIRTUAL_ENV")
    }
    done = subprocess.run(
        list(map(str, arguments)), cwd=cwd, env=env, capture_output=True, text=True
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stderr + done.stdout


def test_the_wheel_holds_the_package_and_nothing_else() -> None:
    names = {n for n in zipfile.ZipFile(WHEEL).namelist() if ".dist-info/" not in n}
    assert names == tracked("mdsmix")
    assert "mdsmix/py.typed" in names


def test_the_sdist_holds_what_builds_and_tests_it() -> None:
    """The wheel was built from it, so it lacks nothing of the package."""
    with tarfile.open(SDIST) as packed:
        names = {name.partition("/")[2] for name in packed.getnames()}
    folders = ("mdsmix", "tests", "docs", "yamls", "benchmarks", "docker")
    wanted = {name for folder in folders for name in tracked(folder)}
    assert wanted - names == set()
    named = {"README.md", "LICENSE", "Makefile", "pyproject.toml", "PKG-INFO", ".gitignore"}
    named.add("overrides.txt")
    assert names - wanted == named, "stray files"
    page = (ROOT / "README.md").read_text("utf-8")
    links = {
        link.partition("#")[0].rstrip("/") for link in re.findall(r"\]\((?!http)([^)]+)\)", page)
    }
    there = {str(folder) for name in names for folder in (Path(name), *Path(name).parents)}
    assert links - there == set(), "links of README that lead nowhere"


def test_its_extras_are_the_documented_ones() -> None:
    (name,) = [n for n in zipfile.ZipFile(WHEEL).namelist() if n.endswith("METADATA")]
    metadata = email.message_from_bytes(zipfile.ZipFile(WHEEL).read(name))
    extras = set(metadata.get_all("Provides-Extra", [])) - {"dev"}
    page = (ROOT / "README.md").read_text("utf-8")
    assert extras == set(re.findall(r"'\.\[(\w+)\]'", page))
    assert "Typing :: Typed" in metadata.get_all("Classifier", [])
    assert (metadata["License-Expression"], metadata["License-File"]) == ("Apache-2.0", "LICENSE")
    wanted: dict[str, set[str]] = {extra: set() for extra in extras}
    for each in metadata.get_all("Requires-Dist", []):
        package, _, extra = each.replace("'", '"').partition("; extra == ")
        wanted.get(extra.strip('"'), set()).add(package)
    assert wanted["all"] == set().union(*(wanted[extra] for extra in extras - {"all"}))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two records and a tokenizer."""
    from tests.corpus import train_tokenizer

    folder = tmp_path_factory.mktemp("home")
    train_tokenizer(folder / "tokenizer", documents_n=5)
    lines = [{"prompt": f"Which is number {n}?", "response": f"It is {n}."} for n in range(8)]
    (folder / "mine.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_the_whole_way_by_the_installed_command(home: Path) -> None:
    mdsmix = BIN / "mdsmix"
    assert WHEEL.name.split("-")[1] in run(mdsmix, "--version", cwd=home)
    run(mdsmix, "init", "mine.jsonl", "--tokenizer", "./tokenizer", "-o", "recipe.yaml", cwd=home)
    run(mdsmix, "convert", "recipe.yaml", cwd=home)
    assert "may be mixed" in run(mdsmix, "check", "recipe.yaml", cwd=home)
    run(mdsmix, "report", "recipe.yaml", "--no-preview", cwd=home)
    assert (home / "report.html").read_text("utf-8").rstrip().endswith("</html>")
    run(mdsmix, "render-yaml", "recipe.yaml", "-o", "train.yaml", cwd=home)
    said = run(BIN / "python", "-c", LOADS, cwd=home).splitlines()[-1]
    assert said.startswith("(2, ")
    assert str(BIN.parent) in said, "the checkout was loaded, not the wheel"
    assert run(BIN / "python", "-c", ENTRY, cwd=home).split()[-1] == "build_dataloader"


def test_it_runs_without_being_installed(home: Path) -> None:
    """As `uvx --from mdsmix mdsmix` does."""
    assert "0." in run(UV, "tool", "run", "--from", WHEEL, "mdsmix", "--version", cwd=home)


def test_it_installs_beside_llm_foundry(home: Path) -> None:
    """One set of packages satisfies both."""
    (home / "both.in").write_text(f"mdsmix[all] @ {WHEEL.as_uri()}\nllm-foundry==0.22.0\n")
    run(
        UV,
        "pip",
        "compile",
        "--quiet",
        "--python-version",
        "3.11",
        "both.in",
        "-o",
        "both.txt",
        cwd=home,
    )
    assert re.search(r"^llm-foundry==0.22.0$", (home / "both.txt").read_text(), re.MULTILINE)
