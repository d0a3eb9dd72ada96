"""A function of the user's reads records: the rows of a plain shape, bad records with its words, converted again where it changes."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mdsmix.convert.job import make_job
from mdsmix.encode.pretrained import open_tokenizer
from mdsmix.errors import RecipeError
from mdsmix.kinds import open_recipe
from mdsmix.record import Conversation, Document, Pair
from mdsmix.shapes.functions import find_function, function_shape, is_function
from tests.converting import (
    Answer,
    manifest_of,
    mdsmix,
    quarantined,
    samples,
    write_jsonl,
    write_recipe,
)

RECORDS: list[dict[str, Any]] = [
    {"q": "How many?", "a": "Seven, as always."},
    {"q": "Who?", "a": "A king of old."},
    {"q": "", "a": "refuse"},
    {"a": "no question"},
    {"q": "other", "a": "x"},
]
PAIR = """
from mdsmix.record import Pair
import {helper}

def read(record):
    if record["a"] == "refuse":
        return "nobody asked"
    if record["q"] == "other":
        return ["a", "list"]
    return {gives}
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder whose modules no other test has imported."""
    write_jsonl(tmp_path / "a.jsonl", RECORDS)
    (tmp_path / "x").mkdir()
    return tmp_path


def write(home: Path, name: str, gives: str, helper: str = "string") -> str:
    (home / "x" / f"{name}.py").write_text(PAIR.format(gives=gives, helper=helper))
    return f"x/{name}.py:read"


def convert(home: Path, tokenizer: Path, source: dict[str, Any], **more: Any) -> Answer:
    stream = {"kind": "finetuning", "source": {"path": "a.jsonl", **source}, **more}
    settings = {"max_seq_len": 64, "max_bad": 1.0}
    return mdsmix("convert", write_recipe(home, tokenizer, streams={"s": stream}, **settings))


def talk(said: list[str]) -> Conversation:
    roles = ("user", "assistant")
    return Conversation([{"role": r, "content": c} for r, c in zip(roles, said, strict=True)])


MESSAGES = (
    '[{"role": "user", "content": record["q"]}, {"role": "assistant", "content": record["a"]}]'
)


GIVEN: dict[str, tuple[str, str, Callable[[Any], Any]]] = {
    "pairs": ("pair", 'Pair(record["q"], record["a"])', tuple),
    "responses": ("pair", '{"prompt": record["q"], "response": record["a"]}', tuple),
    "completions": ("pair", '{"prompt": record["q"], "completion": record["a"]}', tuple),
    "messages": ("conversation", f'{{"messages": {MESSAGES}}}', talk),
    "talks": ("conversation", f'__import__("mdsmix.record").record.Conversation({MESSAGES})', talk),
    "toolless": ("conversation", f'{{"messages": {MESSAGES}, "tools": None}}', talk),
    "documents": ("document", '{"text": record["q"] + record["a"]}', lambda said: ("".join(said),)),
}


@pytest.mark.parametrize("name", GIVEN)
def test_what_it_gives_is_a_record_and_the_rest_is_bad_with_why(home: Path, name: str) -> None:
    gives, expression, made = GIVEN[name]
    shape = function_shape(find_function(write(home, name, expression), gives, home).name)
    found = [shape.read(record, {}) for record in RECORDS]
    assert [type(each) for each in found[:2]] == [shape.gives] * 2
    assert found[:2] == [made([record["q"], record["a"]]) for record in RECORDS[:2]]
    assert [(why, why.detail) for why in found[2:]] == [
        ("function_refused", {"said": "nobody asked"}),
        ("function_failed", {"error": "KeyError: 'q'"}),
        ("function_gave_other", {"said": "list"}),
    ]


def test_what_another_kind_would_want_is_said_with_the_key(
    home: Path, tokenizer_folder: Path
) -> None:
    name = write(home, "wrong_gives", f'{{"messages": {MESSAGES}}}')
    assert convert(home, tokenizer_folder, {"shape": name}).code == 5
    first = next(iter(quarantined(home / "out/s/train")))
    assert "source.gives: conversation makes one of conversations" in first["detail"]["said"]


def test_rules_of_the_plain_shapes_hold(home: Path) -> None:
    """No conversation that LLM-Foundry would refuse comes in by a function."""
    (home / "x/ruled.py").write_text("def read(record):\n    return record['given']\n")
    talk = function_shape(find_function("x/ruled.py:read", "conversation", home).name)
    pair = function_shape(find_function("x/ruled.py:read", "pair", home).name)
    user, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    assert talk.read({"given": {"messages": [answer]}}, {}) == "too_few_messages"
    assert talk.read({"given": {"messages": [user, user]}}, {}) == "repeated_role"
    named = {"messages": [user | {"name": "Ann"}, answer]}
    assert talk.read({"given": named}, {}) == "bad_message_keys"
    assert (
        talk.read({"given": named | {"tools": [{"name": "f"}]}}, {}).messages == named["messages"]
    )
    assert talk.read({"given": Conversation([user, answer])}, {}) == Conversation([user, answer])
    kept = talk.read({"given": Conversation([user, answer], [False, True])}, {})
    assert kept.trained == [False, True]
    assert pair.read({"given": Pair("a", 1)}, {}) == "field_not_text"  # type: ignore[arg-type]
    assert pair.read({"given": Document("a")}, {}).detail["said"].startswith("a document")
    assert pair.read(["no", "object"], {}) == "not_an_object"


def test_an_edit_converts_again_and_nothing_else_does(home: Path, tokenizer_folder: Path) -> None:
    """What it imports counts, a file beside it that it does not import does not."""
    write(home, "edited", "Pair(record['q'], edited_helper.said(record['a']))", "edited_helper")
    helper = home / "x/edited_helper.py"
    helper.write_text("def said(text):\n    return text\n")

    def name() -> str:
        return find_function("x/edited.py:read", "pair", home).name

    first = name()
    (home / "x/unread.py").write_text("raise SystemExit\n")
    assert name() == first
    helper.write_text("def said(text):\n    return text.upper()\n")
    assert name() != first
    helper.unlink()
    (home / "x/edited_helper").mkdir()
    (home / "x/edited_helper/__init__.py").write_text("from edited_helper.deep import said\n")
    (home / "x/edited_helper/deep.py").write_text("def said(text):\n    return text\n")
    assert name() != first
    assert convert(home, tokenizer_folder, {"shape": "x/edited.py:read"}).code == 0
    second = convert(home, tokenizer_folder, {"shape": "x/edited.py:read"})
    assert "up to date" in second.out
    assert manifest_of(home / "out/s/train").encoding.shape == name()


def test_only_a_conversion_imports_it(home: Path, tokenizer_folder: Path) -> None:
    """The file is gone, and every other command works."""
    answer = convert(home, tokenizer_folder, {"shape": write(home, "gone", GIVEN["pairs"][1])})
    assert answer.code == 0, answer.err
    assert "fields not read" not in answer.out, "nobody knows what a function reads"
    assert [len(samples(home / "out/s/train")), len(quarantined(home / "out/s/train"))] == [2, 3]
    (home / "x/gone.py").unlink()
    recipe = home / "recipe.yaml"
    for command in ("check", "render-yaml", "inspect", "verify", "quarantine", "plan", "gc"):
        answer = mdsmix(command, recipe, *["--batch", "2", "--gpus", "1"] * (command == "plan"))
        assert answer.code == 0, (command, answer.err)
    assert "pair by gone.py:read of hash" in mdsmix("inspect", recipe).out
    assert "there is no file" in mdsmix("convert", recipe).err


def test_a_plan_of_what_is_not_converted_says_how(home: Path, tokenizer_folder: Path) -> None:
    stream = {"kind": "finetuning", "source": {"path": "a.jsonl", "shape": "x/later.py:read"}}
    recipe = write_recipe(home, tokenizer_folder, streams={"s": stream}, max_seq_len=64)
    answer = mdsmix("plan", recipe, "--batch", "8")
    assert answer.code == 2
    assert "only a conversion runs" in answer.err


REFUSED = {
    "x/none.py:read": "there is no file",
    "no_such_package_at_all.shapes:read": "no package no_such_package_at_all",
    "json:loads_them": "has no attribute 'loads_them'",
    "json:__name__": "no function",
    "time:no_such_function": "has no attribute 'no_such_function'",
    "x/broken.py:read": "is no Python that can be read",
    "x/failing.py:read": r"cannot be imported \(ValueError: on purpose\)",
    "x/json.py:read": "has imported another module json",
}


@pytest.mark.parametrize("name", REFUSED)
def test_one_sentence_refuses(home: Path, name: str) -> None:
    (home / "x/broken.py").write_text("def read(:\n")
    (home / "x/failing.py").write_text("raise ValueError('on purpose')\n")
    (home / "x/json.py").write_text("def read(record): return record\n")
    with pytest.raises(RecipeError, match=REFUSED[name]):
        _ = find_function(name, "pair", home).call


def test_the_command_says_that_sentence_alone(home: Path, tokenizer_folder: Path) -> None:
    (home / "x/ending.py").write_text("raise ValueError('on purpose')\n")
    answer = convert(home, tokenizer_folder, {"shape": "x/ending.py:read"})
    assert (answer.code, "Traceback" in answer.err) == (2, False)
    assert "cannot be imported (ValueError: on purpose)" in answer.err


def test_a_package_is_known_by_its_version_or_by_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert find_function("orjson:loads", "pair", tmp_path).files == {}
    package = tmp_path / "loose_package"
    package.mkdir()
    (package / "__init__.py").write_text("def read(record): return record\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    first = find_function("loose_package:read", "pair", tmp_path).name
    (package / "more.py").write_text("")
    assert find_function("loose_package:read", "pair", tmp_path).name != first


def test_another_process_has_it_by_its_job(home: Path) -> None:
    """Without the file: as a worker of another machine."""
    write(home, "sent", GIVEN["responses"][1])
    function = find_function("x/sent.py:read", "pair", home)
    assert is_function(function.name)
    (home / "x/sent.py").unlink()
    code = (
        "import pickle, sys\n"
        "function = pickle.load(sys.stdin.buffer)\n"
        "from mdsmix.shapes import find_shape\n"
        "print(find_shape(function.name, ()).read({'q': 'a', 'a': 'b'}, {}))\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], input=pickle.dumps(function), capture_output=True
    )
    assert run.stdout.decode().strip() == "Pair(prompt='a', response='b')", run.stderr.decode()


def test_what_was_edited_since_is_read_as_it_was_found(home: Path) -> None:
    """A worker that starts late reads the text by which the stream is known."""
    write(home, "late", "Pair('a', late_helper.SAID)", "late_helper")
    helper = home / "x/late_helper.py"
    helper.write_text("SAID = 'found'\n")
    function = find_function("x/late.py:read", "pair", home)
    helper.write_text("SAID = 'edited'\n")
    assert function_shape(function.name).read({"q": "a", "a": "b"}, {}) == Pair("a", "found")


LOCAL = {
    "odd/words.py": "# -*- coding: latin-1 -*-\nWORD = 'caf\xe9'\n",
    "odd_parts/__init__.py": "from .inner import deep\nfrom . import mid\nWORD = deep.WORD + mid.WORD\n",
    "odd_parts/mid.py": "WORD = 'mid '\n",
    "odd_parts/inner/deep.py": "from .. import mid\nWORD = 'deep ' + mid.WORD\n",
    "odd_shape.py": "import odd.words, odd_parts\nfrom pathlib import Path\nBESIDE = (Path(__file__).parent / 'beside.txt').read_text()\n"
    "def read(record):\n    return {'text': odd.words.WORD + odd_parts.WORD + BESIDE}\n",
}
"A folder without `__init__.py`, a text that is not UTF-8, imports from above, and a file that is read from beside the function's."


def test_it_imports_what_lies_beside_it_and_is_another_where_that_changes(home: Path) -> None:
    for name, text in LOCAL.items():
        (home / "x" / name).parent.mkdir(parents=True, exist_ok=True)
        (home / "x" / name).write_bytes(text.encode("latin-1"))
    (home / "x/beside.txt").write_text("beside")
    found = find_function("x/odd_shape.py:read", "document", home)
    assert function_shape(found.name).read({}, {}) == Document("café" + "deep mid mid beside")
    names = {found.name}
    for name, text in LOCAL.items():
        (home / "x" / name).write_bytes(f"{text}\n# more".encode("latin-1"))
        names.add(find_function("x/odd_shape.py:read", "document", home).name)
        (home / "x" / name).write_bytes(text.encode("latin-1"))
    assert len(names) == 1 + len(LOCAL)


def test_what_it_prints_is_no_output_of_the_command_and_an_exit_is_a_failure(
    home: Path, tokenizer_folder: Path
) -> None:
    (home / "x/loud.py").write_text(
        "import sys\nprint('imported')\ndef read(record):\n    print('read')\n    sys.exit('enough') if 'q' not in record else 0\n"
        "    return {'prompt': 'a', 'response': 'b'}\n"
    )
    answer = convert(home, tokenizer_folder, {"shape": "x/loud.py:read"})
    assert (answer.code, "imported" in answer.out, "read\n" in answer.out) == (0, False, False)
    [bad] = quarantined(home / "out/s/train")
    assert (bad["reason"], bad["detail"]["error"]) == ("function_failed", "SystemExit: enough")


def test_a_function_may_change_its_record(home: Path, tokenizer_folder: Path) -> None:
    """The names of rows are read of the record as it stood in the file."""
    write_jsonl(home / "a.jsonl", [{"q": "Who?", "a": "A king.", "name": "first"}])
    (home / "x/changing.py").write_text(
        "def read(record):\n    return {'prompt': record.pop('q'), 'response': record.pop('name')}\n"
    )
    answer = convert(home, tokenizer_folder, {"shape": "x/changing.py:read", "id": "name"})
    assert answer.code == 0, answer.err
    assert "id first" in mdsmix("inspect", home / "out/s/train").out


def test_a_job_holds_its_function(home: Path, tokenizer_folder: Path) -> None:
    name = write(home, "held", GIVEN["responses"][1])
    stream = {"kind": "finetuning", "source": {"path": "a.jsonl", "shape": name}}
    recipe = open_recipe(write_recipe(home, tokenizer_folder, streams={"s": stream}))
    job = make_job(recipe, recipe.streams["s"], open_tokenizer(recipe.tokenizer), None)
    assert job.function is not None
    assert job.function.name == job.encoding.shape


def test_whoever_imports_torch_is_told(home: Path, tokenizer_folder: Path) -> None:
    """A stand-in that is imported in no time; in a process of its own, where nothing has imported torch."""
    (home / "x/torch.py").write_text("")
    name = write(home, "heavy", GIVEN["responses"][1], "torch")
    stream = {"kind": "finetuning", "source": {"path": "a.jsonl", "shape": name}}
    settings = {"max_seq_len": 64, "max_bad": 1.0}
    recipe = write_recipe(home, tokenizer_folder, streams={"s": stream}, **settings)
    command = [str(Path(sys.executable).parent / "mdsmix"), "convert", str(recipe)]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "heavy.py:read imports torch: every process" in run.stderr
