"""A function of the user's reads records: the rows of a plain shape, bad records with its words,
converted again where it changes.
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
from mdsmix.record import Conversation, Document, Pair
from mdsmix.shapes import functions
from mdsmix.shapes.functions import find_function, function_shape, is_function
from mdsmix.tokenizer.card import open_tokenizer
from tests.converting import Web, mdsmix, quarantined, samples
from tests.styles import in_turn

RECORDS: list[dict[str, Any]] = [
    *({"q": "How many?", "a": "Seven, as always."}, {"q": "Who?", "a": "A king of old."}),
    *({"q": "", "a": "refuse"}, {"a": "no question"}, {"q": "other", "a": "x"}),
]
PAIR = """
from mdsmix.record import Conversation, Pair
import {helper}

def read(record):
    q, a = record["q"], record["a"]
    answer = {{"refuse": "nobody asked", "x": ["a", "list"]}}.get(a)
    return answer or {gives}
"""


@pytest.fixture
def home(web: Web) -> Web:
    """A folder whose modules no other test has imported."""
    web.holds(RECORDS)
    (web.folder / "x").mkdir()
    return web


def write(home: Web, name: str, gives: str, helper: str = "string") -> str:
    return code(home, name, PAIR.format(gives=gives, helper=helper))


def code(home: Web, name: str, text: str) -> str:
    (home.folder / "x" / f"{name}.py").write_text(text)
    return f"x/{name}.py:read"


def asked(home: Web, shape: str) -> Web:
    source = {"path": "a.jsonl", "shape": shape}
    return home.says({"kind": "finetuning", "source": source}, max_seq_len=64)


MESSAGES = '[{"role": "user", "content": q}, {"role": "assistant", "content": a}]'
GIVEN = [
    *(("pair", "Pair(q, a)"), ("pair", '{"prompt": q, "response": a}')),
    *(("pair", '{"prompt": q, "completion": a}'), ("document", '{"text": q + a}')),
    ("conversation", f"Conversation({MESSAGES})"),
    ("conversation", f'{{"messages": {MESSAGES}}}'),
    ("conversation", f'{{"messages": {MESSAGES}, "tools": None}}'),
]
MADE: dict[str, Callable[..., Any]] = {
    "pair": Pair,
    "conversation": lambda *said: Conversation(in_turn(*said)),
    "document": lambda q, a: Document(q + a),
}


def test_what_it_gives_is_a_record_and_the_rest_is_bad_with_why(home: Web) -> None:
    for number, (gives, expression) in enumerate(GIVEN):
        written = write(home, f"given_{number}", expression)
        shape = function_shape(find_function(written, gives, home.folder).name)
        found = [shape.read(record, {}) for record in RECORDS]
        assert [type(each) for each in found[:2]] == [shape.gives] * 2
        assert found[:2] == [MADE[gives](record["q"], record["a"]) for record in RECORDS[:2]]
        assert [(why, why.detail) for why in found[2:]] == [
            ("function_refused", {"said": "nobody asked"}),
            ("function_failed", {"error": "KeyError: 'q'"}),
            ("function_gave_other", {"said": "list"}),
        ]


def test_rules_of_the_plain_shapes_hold(home: Web) -> None:
    """No conversation that LLM-Foundry would refuse comes in by a function."""
    ruled = code(home, "ruled", "def read(record):\n    return record['given']\n")
    functions = (find_function(ruled, gives, home.folder) for gives in ("conversation", "pair"))
    talk, pair = (function_shape(function.name) for function in functions)
    user, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    named = {"messages": [user | {"name": "Ann"}, answer]}
    flagged = Conversation([user, answer], [False, True])
    for shape, given, found in (
        (talk, {"messages": [answer]}, "too_few_messages"),
        (talk, {"messages": [user, user]}, "repeated_role"),
        (talk, named, "bad_message_keys"),
        (talk, flagged, flagged),
        (pair, Pair("a", 1), "field_not_text"),  # type: ignore[arg-type]
        (pair, Document("a"), "function_gave_other"),
    ):
        assert shape.read({"given": given}, {}) == found
    tooled = talk.read({"given": named | {"tools": [{"name": "f"}]}}, {})
    assert tooled.messages == named["messages"]
    assert pair.read(["no", "object"], {}) == "not_an_object"
    other = pair.read({"given": flagged}, {}).detail["said"]
    assert "source.gives: conversation makes one of conversations" in other


def test_only_a_conversion_imports_it(home: Web) -> None:
    """The file is gone, and every other command works."""
    name = write(home, "gone", "Pair(q, a)")
    answer = asked(home, name).convert()
    assert answer.code == 0, answer.err
    assert "fields not read" not in answer.out, "nobody knows what a function reads"
    assert [len(samples(home.train)), len(home.bad)] == [2, 3]
    assert "up to date" in home.convert().out
    assert home.manifest.encoding.shape == find_function(name, "pair", home.folder).name
    (home.folder / "x/gone.py").unlink()
    for command in ("check", "render-yaml", "inspect", "verify", "quarantine", "plan", "gc"):
        more = ["--batch", "2", "--gpus", "1"] if command == "plan" else []
        answer = mdsmix(command, home.recipe, *more)
        assert answer.code == 0, (command, answer.err)
    assert "pair by gone.py:read of hash" in mdsmix("inspect", home.recipe).out
    assert "there is no file" in home.convert().err


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


def test_one_sentence_refuses(home: Web) -> None:
    code(home, "broken", "def read(:\n")
    code(home, "failing", "raise ValueError('on purpose')\n")
    code(home, "json", "def read(record): return record\n")
    for name, said in REFUSED.items():
        with pytest.raises(RecipeError, match=said):
            _ = find_function(name, "pair", home.folder).call
    answer = asked(home, "x/failing.py:read").convert()
    assert (answer.code, "Traceback" in answer.err) == (2, False)
    assert "cannot be imported (ValueError: on purpose)" in answer.err
    answer = mdsmix("plan", home.recipe, "--batch", "8")
    assert (answer.code, "only a conversion runs" in answer.err) == (2, True)


def test_a_package_is_known_by_version_or_files(tmp_path: Path, monkeypatch: Any) -> None:
    assert find_function("orjson:loads", "pair", tmp_path).files == {}
    package = tmp_path / "loose_package"
    package.mkdir()
    (package / "__init__.py").write_text("def read(record): return record\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    first = find_function("loose_package:read", "pair", tmp_path).name
    (package / "more.py").write_text("")
    assert find_function("loose_package:read", "pair", tmp_path).name != first


def test_another_process_has_it_by_its_job(home: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker of another machine has no file, and one that starts late reads the text by which the
    stream is known.
    """
    name = write(home, "sent", "Pair('a', sent_helper.SAID)", "sent_helper")
    code(home, "sent_helper", "SAID = 'found'\n")
    recipe = open_recipe(asked(home, name).recipe)
    job = make_job(recipe, recipe.streams["web"], open_tokenizer(recipe.tokenizer), None)
    assert is_function(job.function.name)
    assert job.function.name == job.encoding.shape
    sent = pickle.dumps(job.function)
    (home.folder / "x/sent.py").unlink()
    code(home, "sent_helper", "SAID = 'edited'\n")
    monkeypatch.setattr(functions, "_known", {})
    function = pickle.loads(sent)
    assert function_shape(function.name).read({"q": "a", "a": "b"}, {}) == Pair("a", "found")


LOCAL = {
    "odd/words.py": "# -*- coding: latin-1 -*-\nWORD = 'caf\xe9'\n",
    "odd_parts/__init__.py": "from .inner import deep\nfrom . import mid\nWORD = deep.WORD + mid.WORD\n",
    "odd_parts/mid.py": "WORD = 'mid '\n",
    "odd_parts/inner/deep.py": "from .. import mid\nWORD = 'deep ' + mid.WORD\n",
    "odd_shape.py": "import odd.words, odd_parts\nfrom pathlib import Path\nBESIDE = (Path(__file__).parent / 'beside.txt').read_text()\n"
    "def read(record):\n    return {'text': odd.words.WORD + odd_parts.WORD + BESIDE}\n",
}
"""A folder without `__init__.py`, a text that is not UTF-8, imports from above, and a file that is
read from beside the function's.
"""


def test_it_imports_what_lies_beside_it_and_is_another_where_that_changes(home: Web) -> None:
    def name() -> str:
        return find_function("x/odd_shape.py:read", "document", home.folder).name

    paths = {home.folder / "x" / path: text.encode("latin-1") for path, text in LOCAL.items()}
    for path, text in paths.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text)
    (home.folder / "x/beside.txt").write_text("beside")
    names = {first := name()}
    assert function_shape(first).read({}, {}) == Document("café" + "deep mid mid beside")
    code(home, "unread", "raise SystemExit\n")  # what is not imported does not count
    assert name() == first
    for path, text in paths.items():
        path.write_bytes(text + b"\n# more")
        names.add(name())
        path.write_bytes(text)
    assert len(names) == 1 + len(LOCAL)


ODD = {
    "loud": "import sys\nprint('imported')\ndef read(record):\n    print('read')\n    sys.exit('enough') if 'q' not in record else 0\n"
    "    return {'prompt': 'a', 'response': 'b'}\n",
    "changing": "def read(record):\n    return {'prompt': record.pop('a'), 'response': record.pop('name', 'c')}\n",
    "heavy": "import sys, types\nsys.modules['torch'] = types.ModuleType('torch')\n"
    "def read(record):\n    return {'prompt': 'a', 'response': 'b'}\n",
}


def test_it_may_print_and_end_and_change_its_record_and_import_torch(
    home: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it prints is no output of the command; the names of rows are read of the record as it
    stood in the file.
    """
    home.holds([{"a": "no question"}, {"q": "Who?", "a": "A king.", "name": "first"}])
    streams = {}
    for name, text in ODD.items():
        source = {"path": "a.jsonl", "shape": code(home, name, text)}
        named = {"id": "name"} if name == "changing" else {}
        streams[name] = {"kind": "finetuning", "source": source | named}
    # Another test of this process may have imported it (`preview` does).
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    try:
        answer = home.says(streams=streams, max_seq_len=64).convert()
    finally:
        sys.modules.pop("torch", None)
    assert (answer.code, "imported" in answer.out, "read\n" in answer.out) == (0, False, False)
    assert answer.err.count("imports torch: every process") == 1
    assert "heavy.py:read imports torch: every process" in answer.err
    [bad] = quarantined(home.out / "loud/train")
    assert (bad["reason"], bad["detail"]["error"]) == ("function_failed", "SystemExit: enough")
    assert "id first" in mdsmix("inspect", home.out / "changing/train").out
