"""The Python API: a recipe of every form gives the same streams, results are those of the commands,
and errors are exceptions. `import mdsmix` loads nothing else.
"""

from __future__ import annotations

import ast
import json
import multiprocessing
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

import mdsmix
from mdsmix import Progress, Recipe, SourceSpec, StreamSpec, TokenizerSpec, schema
from mdsmix.errors import MixRefused, NotPublished, RecipeError
from mdsmix.storage import notices
from tests.converting import Project, documents, read_public_files, run_ok
from tests.converting import mdsmix as run_command

ROOT = Path(__file__).parents[1]
TEXTS = [f"a record with the number {n}" for n in range(40)]
HEAVY = {
    "typing",
    "dataclasses",
    "numpy",
    "omegaconf",
    "typer",
    "rich",
    "orjson",
    "boto3",
    "torch",
    "pyarrow",
}


def read_recipe(project: Project) -> dict[str, Any]:
    tree: dict[str, Any] = json.loads(project.recipe.read_text())
    return tree


def test_importing_mdsmix_loads_no_other_package() -> None:
    script = "import sys; before = {*sys.modules}; import mdsmix; new = {*sys.modules} - before"
    script += "\nprint([name for name in new if name.startswith('mdsmix.')])"
    script += f"\nprint(sorted({HEAVY} & new))"
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert answer.stdout.split("\n")[:2] == ["[]", "[]"], answer


def test_every_public_name_is_there_for_python_and_for_type_checkers() -> None:
    """A type checker reads the imports below `if TYPE_CHECKING`, Python the table of modules."""
    tree = ast.parse((ROOT / "mdsmix/__init__.py").read_text("utf-8"))
    (for_checkers, *_) = (node for node in tree.body if isinstance(node, ast.If))
    checked = {}
    for node in for_checkers.body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mdsmix."):
            checked |= {alias.name: str(node.module) for alias in node.names}
    homes = {name: f"mdsmix.{home}" for name, home in mdsmix._HOMES.items()}
    assert homes == checked
    assert {*homes, "__version__"} == set(mdsmix.__all__)
    for name in homes:
        if homes[name] != "mdsmix.load":  # imports torch; tests/with_torch
            assert getattr(mdsmix, name).__module__.startswith(homes[name])
    assert set(mdsmix.__all__) <= set(dir(mdsmix))
    with pytest.raises(AttributeError, match="no attribute 'konvert'"):
        _ = mdsmix.konvert


def test_the_consumer_of_the_type_check_uses_every_public_name() -> None:
    """`make lint` runs mypy on it: a cold cache would cost a test more than a minute."""
    text = (ROOT / "tests/types/consumer.py").read_text("utf-8")
    assert [name for name in mdsmix.__all__ if f"mdsmix.{name}" not in text] == []
    assert "mypy tests/types/consumer.py" in (ROOT / "Makefile").read_text("utf-8")


def test_wrong_arguments_are_refused_with_their_name(project: Project) -> None:
    project.write_source(TEXTS)
    project.configure()
    convert, inspect, plan = mdsmix.convert, mdsmix.inspect, mdsmix.plan
    calls: list[tuple[Any, Any, dict[str, Any]]] = [
        *((convert, project.recipe, {"limit": wrong}) for wrong in (0, -3, "3", True)),
        *((convert, project.recipe, {"workers": wrong}) for wrong in (0, "2")),
        *((convert, project.recipe, {"only": wrong}) for wrong in ("web", [3])),
        *((convert, project.recipe, {"overrides": wrong}) for wrong in ("max_seq_len=3", [3])),
        (convert, project.recipe, {"progress": "no"}),
        (convert, project.recipe, {"engine": None}),
        *((mdsmix.render_yaml, project.recipe, {name: {}}) for name in ("into", "out")),
        (mdsmix.check, project.recipe, {"evals": "sometimes"}),
        (mdsmix.make_report, project.recipe, {"samples": -1}),
        *((inspect, project.train, {"numbers": wrong}) for wrong in (3, [-1])),
        (inspect, project.train, {"seed": -1}),
        *((plan, project.recipe, {name: 0}) for name in ("nodes", "gpus", "batch")),
        (plan, project.recipe, {"tokens_per_second": 0}),
    ]
    for function, subject, arguments in calls:
        (name,) = arguments
        with pytest.raises(RecipeError, match=f"^{name} is .*; it must be"):
            function(subject, **arguments)
    # A generator gives its names once: a second reading would find none, which means all.
    for name in ("only", "overrides"):
        with pytest.raises(RecipeError, match=f"^{name} is .*a list of strings"):
            convert(project.recipe, **{name: (text for text in ["web"])})
    with pytest.raises(RecipeError, match=r"^stream is None; it must be a path or URL"):
        inspect(None)  # type: ignore[arg-type]
    for no_mix in ([], None, [3], 3):
        with pytest.raises(RecipeError, match=r"^mix is "):
            mdsmix.check(no_mix)  # type: ignore[arg-type]
    with pytest.raises(RecipeError, match="must be a file"):
        mdsmix.make_report(read_recipe(project))  # type: ignore[arg-type]


def test_wrong_values_of_a_built_recipe_name_their_key(project: Project) -> None:
    """A path may be a Path."""
    project.write_source(TEXTS)
    source: Any = {"path": project.folder / "a.jsonl", "text": "text"}
    stream: Any = {"kind": "pretraining", "source": SourceSpec(**source)}
    settings: Any = {"tokenizer": TokenizerSpec(name=str(project.tokenizer)), "max_seq_len": 16}
    settings |= {"local": project.out, "streams": {"web": StreamSpec(**stream)}}
    opened = mdsmix.open_recipe(Recipe(**settings))
    assert opened.local == str(project.out)
    assert opened.streams["web"].source == SourceSpec(
        path=[str(project.folder / "a.jsonl")], text="text"
    )
    for wrong, message in (
        ({"max_seq_len": "16"}, "max_seq_len is '16'; it must be a whole number"),
        ({"tokenizer": 3}, "tokenizer is 3; it must be a name"),
        ({"streams": [StreamSpec(**stream)]}, "streams is"),
        (
            {"streams": {"web": StreamSpec(**stream | {"source": "a.jsonl"})}},
            r"streams\.web\.source is",
        ),
        ({"mix": {"web": mdsmix.WeightSpec(repeat="x")}}, r"mix\.web\.repeat is 'x'"),  # type: ignore[arg-type]
    ):
        with pytest.raises(RecipeError, match=message):
            mdsmix.open_recipe(Recipe(**settings | wrong))


def test_the_module_is_the_command() -> None:
    answer = subprocess.run(
        [sys.executable, "-m", "mdsmix", "--version"], capture_output=True, text=True
    )
    assert (answer.returncode, answer.stdout) == (0, f"mdsmix {mdsmix.__version__}\n")


def test_a_recipe_of_every_form_gives_the_same_streams(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    project.write_source(TEXTS)
    project.configure(documents(project.folder / "*.jsonl"), max_bad="5%")
    tree = read_recipe(project)
    built = Recipe(
        tokenizer=TokenizerSpec(name=str(project.tokenizer)),
        max_seq_len=16,
        max_bad="5%",
        local=str(project.out),
        streams={
            "web": StreamSpec(
                kind="pretraining",
                source=SourceSpec(path=[str(project.folder / "*.jsonl")], text="text"),
            )
        },
    )
    forms = [project.recipe, str(project.recipe), tree, OmegaConf.create(tree), built]
    opened = [mdsmix.open_recipe(form, folder=project.folder) for form in forms]
    assert opened == [opened[0]] * 5
    published = []
    for number, form in enumerate([*forms, opened[0]]):
        if form is not opened[0]:
            conversion = mdsmix.convert(
                form, [f"local={project.folder}/{number}"], workers=1, progress=False
            )
            assert [outcome.stream for outcome in conversion.streams] == ["web"]
            published.append(read_public_files(project.folder / str(number)))
    assert mdsmix.convert(opened[0], workers=1, progress=False).streams[0].done == 1
    published.append(read_public_files(project.out))
    for files in published:
        assert files.keys() == published[0].keys()
        assert files["web/train/index.json"] == published[0]["web/train/index.json"]
    assert capsys.readouterr() == ("", "")


def test_relative_paths_of_a_mapping_are_those_of_the_working_directory(project: Project) -> None:
    project.write_source(TEXTS)
    project.configure(local="out")
    project.patch.chdir(project.folder)
    (outcome,) = mdsmix.convert(read_recipe(project), progress=False, workers=1).streams
    assert outcome.target == str(project.train)


def test_results_are_those_of_the_commands(project: Project) -> None:
    """The figures of `convert` are compared without times and memory."""
    project.write_source([*TEXTS, {"no": "text"}])
    project.configure()
    recipe = str(project.recipe)
    conversion = mdsmix.convert(recipe, workers=1, progress=False)
    again = json.loads(run_ok("convert", recipe, "--json").out)
    assert "missing_field" in conversion.warnings[0]
    row = conversion.to_dict()["rows"][0]
    for changing in ("seconds", "tokens_per_second", "state", "peak_bytes"):
        del row[changing], again["rows"][0][changing]
    assert row == again["rows"][0]
    for result, command in (
        (mdsmix.check(recipe), ["check", recipe]),
        (mdsmix.check([str(project.train)]), ["check", project.train]),
        (mdsmix.render_yaml(recipe), ["render-yaml", recipe]),
        (mdsmix.plan(recipe, gpus=1, batch=2), ["plan", recipe, "--gpus", 1, "--batch", 2]),
        (mdsmix.inspect(str(project.train), seed=3), ["inspect", project.train, "--seed", 3]),
    ):
        expected = json.loads(run_ok(*command, "--json").out)
        # As JSON writes it: an estimate is its number, an unknown figure is null.
        tree = json.loads(json.dumps(result.to_dict(), default=float).replace("NaN", "null"))
        assert tree == expected, command
        shown = run_ok(*command)
        for line in str(result).splitlines()[-3:]:
            if "───" not in line:  # a rule is as wide as the terminal
                assert line.strip() in shown.out + shown.err


def test_a_function_gets_the_progress_and_nothing_is_printed(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    source = project.write_source([*TEXTS, {"no": "text"}])
    project.configure()
    events = list[Progress]()
    streams = list[str]()
    conversion = mdsmix.convert(
        project.recipe,
        workers=1,
        progress=events.append,
        on_stream=lambda outcome: streams.append(outcome.stream),
    )
    assert streams == ["web"]
    last = events[-1]
    size = source.stat().st_size
    assert (last.bytes_done, last.bytes_expected, last.quarantined) == (size, size, 1)
    totals = conversion.streams[0].manifest.totals
    assert last.tokens == totals.tokens + totals.lost_tokens
    assert last.stream == "web"
    assert capsys.readouterr() == ("", "")


def test_published_streams_are_reported_even_if_another_one_fails(project: Project) -> None:
    project.write_source(TEXTS)
    bad = project.write_source([{"no": "text"}], "bad.json")
    streams = {
        "web": documents("*.jsonl"),
        "odd": documents(bad.rename(project.folder / "b.ndjson")),
    }
    project.configure(streams=streams, max_bad="1%")
    published = list[str]()
    with pytest.raises(mdsmix.MdsmixError) as error:
        mdsmix.convert(
            project.recipe,
            progress=False,
            workers=1,
            on_stream=lambda outcome: published.append(outcome.stream),
        )
    assert error.value.exit_code == 5
    assert published == ["web"]


def test_a_refused_mix_has_its_findings_and_nothing_is_written(project: Project) -> None:
    project.write_source(TEXTS)
    project.configure()
    with pytest.raises(NotPublished, match="web at"):
        mdsmix.check(project.recipe)
    mdsmix.convert(project.recipe, progress=False, workers=1)
    next(project.train.glob("*.mds")).unlink()
    target = project.folder / "train.yaml"
    with pytest.raises(MixRefused, match="nothing was rendered") as refused:
        mdsmix.render_yaml(project.recipe, out=str(target))
    assert not target.exists()
    ids = [finding.id for finding in refused.value.checked if finding.severity == "error"]
    checked = mdsmix.check(project.recipe)
    assert ids
    assert ids == [finding.id for finding in checked if finding.severity == "error"]
    assert checked.is_refused
    with pytest.raises(MixRefused, match="cannot be trained") as refused:
        mdsmix.plan(project.recipe)
    assert [finding.id for finding in refused.value.checked] == ids


def test_wrong_recipes_are_recipe_errors(project: Project) -> None:
    project.write_source(TEXTS)
    project.configure()
    tree = read_recipe(project)
    for wrong, words in (
        ({**tree, "max_seq_length": 8}, "did you mean max_seq_len"),
        ({"train_loader": {"name": "text"}}, "is missing"),
        ([], "must be keys and values"),
    ):
        with pytest.raises(RecipeError, match=words):
            mdsmix.convert(wrong)  # type: ignore[arg-type]
    opened = mdsmix.open_recipe(project.recipe)
    with pytest.raises(RecipeError, match="opened already"):
        mdsmix.convert(opened, ["max_seq_len=8"])
    secret = "a-credential-of-the-environment"
    project.patch.setenv("STORE_SECRET_KEY", secret)
    for value in (secret, "${oc.env:STORE_SECRET_KEY}"):
        with pytest.raises(RecipeError, match="STORE_SECRET_KEY, a credential"):
            mdsmix.open_recipe({**tree, "remote": f"s3://bucket/{value}"})


def test_set_values_of_every_recipe_give_it_back() -> None:
    for path in sorted((ROOT / "yamls").glob("*.yaml")):
        tree = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
        assert isinstance(tree, dict)
        if isinstance(tree["tokenizer"], str):
            tree["tokenizer"] = {"name": tree["tokenizer"]}
        recipe = schema.parse_mapping(Recipe, tree)
        values = schema.list_set_values(recipe)
        assert schema.parse_mapping(Recipe, values) == recipe
        assert set(values) <= set(tree)


def test_a_notebook_shows_tables_and_no_markup_of_records(project: Project) -> None:
    project.write_source(["<script>alert(1)</script> " * 3, *TEXTS])
    project.configure()
    conversion = mdsmix.convert(project.recipe, progress=False, workers=1)
    html = conversion._repr_html_()
    assert html.count("<tr>") == 2
    assert ">41<" in html  # records read
    shown = mdsmix.inspect(str(project.train), numbers=[0])._repr_html_()
    assert "<script>" not in shown
    assert "&lt;script&gt;" in shown
    page = mdsmix.make_report(str(project.recipe), preview=False, progress=False)
    assert "<script>alert" not in page._repr_html_()
    assert page.html.startswith("<!doctype html>")
    tree = page.to_dict()
    assert tree["check"] == mdsmix.check(project.recipe).to_dict()
    assert [stream["name"] for stream in tree["streams"]] == ["web"]


def test_the_parts_of_an_array_give_the_same_stream(project: Project) -> None:
    project.write_source(TEXTS, "a.jsonl")
    project.write_source(TEXTS[:7], "b.jsonl")
    project.configure()
    project.set_window_size(1000)
    lines = mdsmix.plan_conversion(project.recipe)
    assert lines[0].startswith("web: 3 of 3 work units would be converted")
    for number in (1, 2):
        part = mdsmix.convert_part(project.recipe, f"{number}/2", progress=False, workers=1)
        assert (part.part, part.streams[0].units) == (f"{number}/2", 3 - number)
    assert not (project.train / "index.json").exists()
    finished = mdsmix.convert(project.recipe, finish=True, progress=False, workers=1)
    assert (finished.streams[0].done, finished.streams[0].reused) == (0, 3)
    whole = project.convert_into()
    index = "index.json"
    assert (project.train / index).read_bytes() == (whole.train / index).read_bytes()


def test_a_conversion_with_bad_arguments_is_refused_as_by_the_command(project: Project) -> None:
    project.write_source(TEXTS)
    project.configure()
    for arguments, option in (
        ({"memory": "much"}, ["--memory", "much"]),
        ({"only": ["wbe"]}, ["--only", "wbe"]),
        ({"budget": "some"}, ["--budget", "some"]),
    ):
        with pytest.raises(RecipeError) as error:
            mdsmix.convert(project.recipe, progress=False, **arguments)  # type: ignore[arg-type]
        answer = run_command("convert", project.recipe, *option)
        assert answer.err.splitlines()[-1] == f"error: {error.value}"
        assert answer.code == error.value.exit_code


WITHOUT_GUARD = """
import sys, types

import mdsmix

sys.modules["ray"] = types.ModuleType("ray")  # then workers are spawned, as on macOS
print("begun")
print(mdsmix.convert("recipe.yaml", workers=2, progress=False).streams[0].manifest.totals.samples)
"""


def test_a_script_without_a_guard_is_not_run_again_by_spawned_workers(project: Project) -> None:
    project.write_source(TEXTS)
    project.configure(documents("*.jsonl", layout="document"))
    (project.folder / "script.py").write_text(WITHOUT_GUARD)
    answer = subprocess.run(
        [sys.executable, "script.py"],
        cwd=project.folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert (answer.stdout.split(), answer.returncode) == (["begun", str(len(TEXTS))], 0), answer


def test_a_process_that_may_start_no_workers_says_so_in_one_sentence(project: Project) -> None:
    project.write_source(TEXTS)
    project.configure()
    project.patch.setitem(multiprocessing.current_process()._config, "daemon", True)  # type: ignore[attr-defined]
    with pytest.raises(RecipeError, match="which Python forbids in a daemonic process"):
        mdsmix.convert(project.recipe, workers=2, progress=False)


@pytest.mark.usefixtures("processes")
def test_conversions_in_several_threads_of_one_process(project: Project) -> None:
    """The first conversion ends while the other still runs, and each shows its own notices."""
    project.write_source(TEXTS)
    project.configure()

    def convert_into(name: str) -> str:
        local = f"local={project.folder / name}"
        return mdsmix.convert(project.recipe, [local], progress=False, workers=1).streams[0].state

    before = list(notices._functions)
    with ThreadPoolExecutor(3) as pool:
        states = list(pool.map(convert_into, "abc"))
    assert states == ["1 of 1 work units converted"] * 3
    files = [read_public_files(project.folder / name) for name in "abc"]
    assert files[0]["web/train/index.json"] == files[1]["web/train/index.json"]
    assert notices._functions == before
    heard = list[str]()
    first, second = ExitStack(), ExitStack()
    first.enter_context(notices.redirect_notices(heard.append))
    second.enter_context(notices.redirect_notices(print))
    first.close()
    second.close()
    notices.show_notice("for nobody of them")
    assert heard == []


def test_an_error_of_a_callback_ends_the_run_and_the_next_one_continues(project: Project) -> None:
    project.write_source(TEXTS)
    project.configure()

    def refuse(_: object) -> None:
        raise LookupError("of the callback")

    for arguments in ({"progress": refuse}, {"on_stream": refuse, "progress": False}):
        with pytest.raises(LookupError, match="of the callback"):
            mdsmix.convert(project.recipe, workers=2, **arguments)  # type: ignore[arg-type]
        assert multiprocessing.active_children() == []
        assert not (project.train / ".mdsmix/lease").exists()
    assert mdsmix.convert(project.recipe, progress=False).streams[0].state == "up to date"
