"""A user's function reads records: it makes the rows that a plain shape makes, its messages are
stored with bad records, and its stream is converted again after an edit.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mdsmix.conversion.job import make_job
from mdsmix.errors import RecipeError
from mdsmix.kinds import open_recipe
from mdsmix.record import AnswerLoss, Conversation, Document, Pair, Span
from mdsmix.shapes import Shape, functions
from mdsmix.shapes.functions import FunctionName, find_function, make_function_shape
from mdsmix.shapes.prompt import Prompt
from mdsmix.shapes.unpaired_preference import UnpairedPreference
from mdsmix.tokenizer.card import open_tokenizer
from tests.converting import Project, mdsmix, read_quarantined, read_samples
from tests.styles import make_dialogue

RECORDS: list[dict[str, Any]] = [
    {"q": "How many?", "a": "Seven, as always."},
    {"q": "Who?", "a": "A king of old."},
    {"q": "", "a": "refuse"},
    {"a": "no question"},
    {"q": "other", "a": "x"},
]
"Two good records, and three that the function of MODULE refuses, fails on or answers with a list."
MODULE = """
from mdsmix.record import Conversation, Pair
import {helper}

def read(record):
    q, a = record["q"], record["a"]
    answer = {{"refuse": "nobody asked", "x": ["a", "list"]}}.get(a)
    return answer or {expression}
"""


@pytest.fixture
def home(project: Project) -> Project:
    """A project whose modules no other test has imported."""
    project.write_source(RECORDS)
    (project.folder / "x").mkdir()
    return project


def write_module(home: Project, name: str, code: str) -> str:
    """Write a module into the folder `x`; return its function `read` as a recipe names it."""
    (home.folder / "x" / f"{name}.py").write_text(code)
    return f"x/{name}.py:read"


def write_function(home: Project, name: str, expression: str, helper: str = "string") -> str:
    """Write a module whose function returns the expression's value for the good RECORDS."""
    return write_module(home, name, MODULE.format(expression=expression, helper=helper))


def write_recipe(home: Project, shape: str) -> Project:
    source = {"path": "a.jsonl", "shape": shape}
    return home.configure({"kind": "finetuning", "source": source}, max_seq_len=64)


def shape_of(home: Project, shape: str, gives: str) -> Shape:
    return make_function_shape(find_function(shape, gives, home.folder).name)


MESSAGES = '[{"role": "user", "content": q}, {"role": "assistant", "content": a}]'
EXPRESSIONS = [
    ("pair", "Pair(q, a)"),
    ("pair", '{"prompt": q, "response": a}'),
    ("pair", '{"prompt": q, "completion": a}'),
    ("document", '{"text": q + a}'),
    ("conversation", f"Conversation({MESSAGES})"),
    ("conversation", f'{{"messages": {MESSAGES}}}'),
    ("conversation", f'{{"messages": {MESSAGES}, "tools": None}}'),
    ("prompt", '{"prompt": q, "verified_answer": a}'),
    ("unpaired_preference", '{"prompt": q, "completion": a, "label": True}'),
    ("pair", '{"prompt": q, "completion": a, "label": True}'),
]
EXPECTED: dict[str, Callable[..., Any]] = {
    "pair": Pair,
    "conversation": lambda *texts: Conversation(make_dialogue(*texts)),
    "document": lambda q, a: Document(q + a),
    "prompt": Prompt,
    "unpaired_preference": lambda q, a: UnpairedPreference(Pair(q, a), True),
}


def test_a_name_is_the_same_after_it_is_written_and_parsed() -> None:
    name = FunctionName("pair", "my_shapes.py", "read", "0f3a")
    assert name.to_text() == "pair by my_shapes.py:read of hash 0f3a"
    in_recipe = FunctionName.in_recipe("x/my_shapes.py:read", "pair")
    assert in_recipe.to_text() == "pair by x/my_shapes.py:read"
    for written_name in (name, in_recipe):
        assert FunctionName.from_text(written_name.to_text()) == written_name


def test_a_function_gives_records_or_the_reason_of_a_bad_one(home: Project) -> None:
    for number, (gives, expression) in enumerate(EXPRESSIONS):
        shape = shape_of(home, write_function(home, f"gives_{number}", expression), gives)
        results = [shape.read(record, {}) for record in RECORDS]
        good, bad = results[:2], results[2:]
        assert [type(record) for record in good] == [shape.gives] * 2
        assert good == [EXPECTED[gives](record["q"], record["a"]) for record in RECORDS[:2]]
        assert [(reason, reason.detail) for reason in bad] == [
            ("function_refused", {"said": "nobody asked"}),
            ("function_failed", {"error": "KeyError: 'q'"}),
            ("function_gave_other", {"said": "list"}),
        ]


def test_results_follow_the_rules_of_the_plain_shapes(home: Project) -> None:
    """No conversation that LLM-Foundry would refuse can come from a function."""
    returns_it = write_module(home, "returns_it", "def read(record):\n    return record['it']\n")
    conversation = shape_of(home, returns_it, "conversation")
    pair = shape_of(home, returns_it, "pair")
    user = {"role": "user", "content": "a"}
    answer = {"role": "assistant", "content": "b"}
    named = {"messages": [user | {"name": "Ann"}, answer]}
    flagged = Conversation([user, answer], [False, True])

    def with_losses(*losses: AnswerLoss) -> Conversation:
        return Conversation([user, answer], losses=[None, *losses])

    for shape, returned, expected in (
        (conversation, {"messages": [answer]}, "too_few_messages"),
        (conversation, {"messages": [user, user]}, "repeated_role"),
        (conversation, named, "bad_message_keys"),
        (conversation, flagged, flagged),
        (
            conversation,
            with_losses(AnswerLoss((Span(0, 1),))),
            with_losses(AnswerLoss((Span(0, 1),))),
        ),
        (conversation, with_losses(AnswerLoss((Span(0, 2),))), "bad_span"),
        (conversation, with_losses(AnswerLoss((Span(1, 1),))), "bad_span"),
        (conversation, with_losses(AnswerLoss(None, 0.5)), "bad_span"),
        (conversation, with_losses(), "bad_span"),
        (pair, Pair("a", 1), "field_not_text"),  # type: ignore[arg-type]
        (pair, Document("a"), "function_gave_other"),
    ):
        assert shape.read({"it": returned}, {}) == expected
    with_tools = conversation.read({"it": named | {"tools": [{"name": "f"}]}}, {})
    assert with_tools.messages == named["messages"]
    assert pair.read(["no", "object"], {}) == "not_an_object"
    detail = pair.read({"it": flagged}, {}).detail["said"]
    assert "write source.gives: conversation for conversations" in detail


def test_only_a_conversion_imports_the_function(home: Project) -> None:
    """After a conversion, every other command works without the function's file."""
    shape = write_function(home, "gone", "Pair(q, a)")
    answer = write_recipe(home, shape).convert()
    assert answer.code == 0, answer.err
    assert "fields not read" not in answer.out, "nobody knows which fields a function reads"
    assert [len(read_samples(home.train)), len(home.bad)] == [2, 3]
    assert "up to date" in home.convert().out
    name = find_function(shape, "pair", home.folder).name
    assert home.manifest.encoding.shape == name.to_text()
    (home.folder / "x/gone.py").unlink()
    for command in ("check", "render-yaml", "inspect", "verify", "quarantine", "plan", "gc"):
        options = ["--batch", "2", "--gpus", "1"] if command == "plan" else []
        answer = mdsmix(command, home.recipe, *options)
        assert answer.code == 0, (command, answer.err)
    assert "pair by gone.py:read of hash" in mdsmix("inspect", home.recipe).out
    assert "no such file" in home.convert().err


ERRORS = {
    "x/none.py:read": "no such file",
    "no_such_package_at_all.shapes:read": "no package no_such_package_at_all",
    "json:loads_them": "has no attribute 'loads_them'",
    "json:__name__": "not a function",
    "time:no_such_function": "has no attribute 'no_such_function'",
    "x/broken.py:read": "is not valid Python",
    "x/failing.py:read": r"cannot be imported \(ValueError: on purpose\)",
    "x/json.py:read": "has imported another module json",
}


def test_a_function_that_cannot_be_imported_is_one_sentence(home: Project) -> None:
    write_module(home, "broken", "def read(:\n")
    write_module(home, "failing", "raise ValueError('on purpose')\n")
    write_module(home, "json", "def read(record): return record\n")
    for shape, message in ERRORS.items():
        with pytest.raises(RecipeError, match=message):
            _ = find_function(shape, "pair", home.folder).call
    answer = write_recipe(home, "x/failing.py:read").convert()
    assert (answer.code, "Traceback" in answer.err) == (2, False)
    assert "cannot be imported (ValueError: on purpose)" in answer.err
    answer = mdsmix("plan", home.recipe, "--batch", "8")
    assert (answer.code, "only a conversion runs" in answer.err) == (2, True)


def test_a_package_is_identified_by_its_version_or_else_its_files(
    tmp_path: Path, monkeypatch: Any
) -> None:
    assert find_function("orjson:loads", "pair", tmp_path).files == {}
    package = tmp_path / "loose_package"
    package.mkdir()
    (package / "__init__.py").write_text("def read(record): return record\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = find_function("loose_package:read", "pair", tmp_path).name
    (package / "more.py").write_text("")
    assert find_function("loose_package:read", "pair", tmp_path).name != before


def test_another_process_gets_the_function_with_its_job(
    home: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker on another machine does not have the file, and one that starts after an edit still
    runs the content whose hash is in the stream's name.
    """
    shape = write_function(home, "sent", "Pair('a', sent_helper.ANSWER)", "sent_helper")
    write_module(home, "sent_helper", "ANSWER = 'before'\n")
    recipe = open_recipe(write_recipe(home, shape).recipe)
    job = make_job(recipe, recipe.streams["web"], open_tokenizer(recipe.tokenizer), None)
    assert job.function is not None
    assert job.function.name.to_text() == job.encoding.shape
    pickled = pickle.dumps(job.function)
    (home.folder / "x/sent.py").unlink()
    write_module(home, "sent_helper", "ANSWER = 'edited'\n")
    monkeypatch.setattr(functions, "_registry", {})
    function = pickle.loads(pickled)
    assert make_function_shape(function.name).read({"q": "a", "a": "b"}, {}) == Pair("a", "before")


LOCAL_FILES = {
    "odd/words.py": "# -*- coding: latin-1 -*-\nWORD = 'caf\xe9'\n",
    "odd_parts/__init__.py": (
        "from .inner import deep\nfrom . import mid\nWORD = deep.WORD + mid.WORD\n"
    ),
    "odd_parts/mid.py": "WORD = 'mid '\n",
    "odd_parts/inner/deep.py": "from .. import mid\nWORD = 'deep ' + mid.WORD\n",
    "odd_shape.py": (
        "import odd.words, odd_parts\n"
        "from pathlib import Path\n"
        "DATA = (Path(__file__).parent / 'data.txt').read_text()\n"
        "def read(record):\n"
        "    return {'text': odd.words.WORD + odd_parts.WORD + DATA}\n"
    ),
}
"""A folder without `__init__.py`, a file that is not UTF-8, imports from a parent package, and a
function that reads a data file from its own folder.
"""


def test_a_function_imports_files_of_its_folder_and_an_edit_of_them_renames_it(
    home: Project,
) -> None:
    def current_name() -> FunctionName:
        return find_function("x/odd_shape.py:read", "document", home.folder).name

    contents = {
        home.folder / "x" / path: code.encode("latin-1") for path, code in LOCAL_FILES.items()
    }
    for path, content in contents.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    (home.folder / "x/data.txt").write_text("data")
    unedited = current_name()
    names = {unedited}
    assert make_function_shape(unedited).read({}, {}) == Document("café" + "deep mid mid data")
    write_module(home, "unread", "raise SystemExit\n")  # a file that is not imported does not count
    assert current_name() == unedited
    for path, content in contents.items():
        path.write_bytes(content + b"\n# more")
        names.add(current_name())
        path.write_bytes(content)
    assert len(names) == 1 + len(LOCAL_FILES)


ODD_FUNCTIONS = {
    "loud": (
        "import sys\n"
        "print('imported')\n"
        "def read(record):\n"
        "    print('read')\n"
        "    sys.exit('enough') if 'q' not in record else 0\n"
        "    return {'prompt': 'a', 'response': 'b'}\n"
    ),
    "changing": (
        "def read(record):\n"
        "    return {'prompt': record.pop('a'), 'response': record.pop('name', 'c')}\n"
    ),
    "heavy": (
        "import sys, types\n"
        "sys.modules['torch'] = types.ModuleType('torch')\n"
        "def read(record):\n"
        "    return {'prompt': 'a', 'response': 'b'}\n"
    ),
}


def test_a_function_may_print_exit_change_its_record_and_import_torch(
    home: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its prints are not part of the command's output, and ids are read from the record as it is in
    the file.
    """
    home.write_source([{"a": "no question"}, {"q": "Who?", "a": "A king.", "name": "first"}])
    streams = {}
    for name, code in ODD_FUNCTIONS.items():
        source = {"path": "a.jsonl", "shape": write_module(home, name, code)}
        if name == "changing":
            source["id"] = "name"
        streams[name] = {"kind": "finetuning", "source": source}
    # Another test of this process may have imported it (`preview` does).
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    try:
        answer = home.configure(streams=streams, max_seq_len=64).convert()
    finally:
        sys.modules.pop("torch", None)
    assert (answer.code, "imported" in answer.out, "read\n" in answer.out) == (0, False, False)
    assert answer.err.count("imports torch: every process") == 1
    assert "heavy.py:read imports torch: every process" in answer.err
    [bad] = read_quarantined(home.out / "loud/train")
    assert (bad["reason"], bad["detail"]["error"]) == ("function_failed", "SystemExit: enough")
    assert "id first" in mdsmix("inspect", home.out / "changing/train").out
