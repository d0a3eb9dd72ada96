"""Preferences in all their forms give the same rows as records with prompt and answers as texts or
messages.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from mdsmix.init.other_tools import read_dataset_info
from mdsmix.shapes import SHAPES
from mdsmix.shapes.image_parts import with_images
from tests.converting import (
    manifest_of,
    mdsmix,
    read_quarantined,
    run_ok,
    write_jsonl,
    write_recipe,
)

Record = dict[str, Any]


def message(role: str, text: str) -> Record:
    return {"role": role, "content": text}


def sharegpt_item(name: str, text: str) -> Record:
    return {"from": name, "value": text}


TALK = "\n\nHuman: Hi\n\nAssistant: Hello.\n\nHuman: Why?\n\nAssistant:"
HH = [
    # A dialogue as hh-rlhf writes it; its last answer differs.
    {"chosen": TALK + " Because of it.", "rejected": TALK + " Becoming it."},
    # The dialogues differ earlier: all that follows belongs to the answers.
    {"chosen": TALK + " So.\n\nHuman: Ok\n\nAssistant: Yes.", "rejected": TALK + " No."},
    # One text is the beginning of the other.
    {"chosen": TALK + " Yes, of course.", "rejected": TALK + " Yes"},
    # Without the names of speakers, no word is divided, and a space belongs to the answer.
    {"chosen": "The town is Paris.", "rejected": "The town is Parma."},
    {"chosen": "Which town?\nParis.", "rejected": "Which town?\nParma."},
    {"chosen": "Which town?\n- Rome", "rejected": "Which town?\n* Rome"},
    {"chosen": "今天天气好", "rejected": "今天天气坏"},
]
PROMPTS = [*[TALK] * 3, "The town is", "Which town?\n", "Which town?\n", "今天天气"]
HH_WITH_PROMPTS = [
    {"prompt": prompt} | {side: text.removeprefix(prompt) for side, text in record.items()}
    for prompt, record in zip(PROMPTS, HH, strict=True)
]
BEFORE = [message("system", "Be brief."), message("user", "Who?"), message("assistant", "Ann.")]
SHAREGPT = [
    {
        "conversations": [sharegpt_item("human", "Who?")],
        "chosen": sharegpt_item("gpt", "Ann."),
        "rejected": sharegpt_item("gpt", "Bob."),
    },
    {
        "conversations": [
            sharegpt_item("human", "Who?"),
            sharegpt_item("gpt", "Ann."),
            sharegpt_item("human", "Sure?"),
        ],
        "system": "Be brief.",
        "chosen": sharegpt_item("gpt", "Yes."),
        "rejected": sharegpt_item("gpt", "No."),
    },
]
TAGGED = [
    {
        "messages": [message("user", "Who?")],
        "chosen": message("assistant", "Ann."),
        "rejected": message("assistant", "Bob."),
    },
    {
        "messages": [*BEFORE, message("user", "Sure?")],
        "chosen": message("assistant", "Yes."),
        "rejected": message("assistant", "No."),
    },
]
RENAMED = [record | {"messages": [message("person", "Who?")]} for record in TAGGED[:1]]
CHATS = [
    {
        "prompt": record["messages"],
        "chosen": [record["chosen"]],
        "rejected": [record["rejected"]],
    }
    for record in TAGGED
]
ALPACA = [
    {"instruction": "Translate.", "input": "Bonjour", "chosen": "Hello", "rejected": "Bye"},
    {
        "instruction": "Sure?",
        "input": "",
        "system": "Be brief.",
        "history": [["Who?", "Ann."]],
        "chosen": "Yes.",
        "rejected": "No.",
    },
]
ALPACA_CHATS = [
    {
        "prompt": [message("user", "Translate.\nBonjour")],
        "chosen": [message("assistant", "Hello")],
        "rejected": [message("assistant", "Bye")],
    },
    CHATS[1],
]
ONE_MESSAGE = [
    record | {"chosen": record["chosen"][0], "rejected": record["rejected"][0]} for record in CHATS
]
ANSWERS_AS_TEXTS = [
    record | {side: record[side][0]["content"] for side in ("chosen", "rejected")}
    for record in CHATS
]
SWIFT = [
    {
        "messages": [*record["messages"], record["chosen"]],
        "rejected_response": record["rejected"]["content"],
    }
    for record in TAGGED
]
SWIFT_MESSAGES = [
    {
        "messages": [*record["messages"], record["chosen"]],
        "rejected_messages": [*record["messages"], record["rejected"]],
    }
    for record in TAGGED
]
TWICE = [message("user", "Who?"), message("user", "Sure?")]
REPEATED = [
    {"prompt": TWICE, "chosen": "Ann.", "rejected": "Bob."},
    {"prompt": TWICE[:1], "chosen": "Ann.", "rejected": "Bob."},
]
REPEATED_SHAREGPT = [
    {
        "conversations": [sharegpt_item("human", "Who?"), sharegpt_item("human", "Sure?")],
        "chosen": sharegpt_item("gpt", "Ann."),
        "rejected": sharegpt_item("gpt", "Bob."),
    },
    SHAREGPT[0],
]
MERGED = [record | {"prompt": [message("user", "Who?\n\nSure?")]} for record in REPEATED[:1]]
MERGED += REPEATED[1:]
WITHOUT_TOOLS = [record | {"tools": []} for record in CHATS]
ODD: list[Any] = [
    {"chosen": "a", "rejected": "b"},
    {"chosen": ["a"], "rejected": {}},
    {"chosen": 1},
]
FORMS: dict[str, tuple[Sequence[Record], Sequence[Record], str]] = {
    "hh_rlhf": (HH, HH_WITH_PROMPTS, "preference"),
    "sharegpt": (SHAREGPT, CHATS, "preference_sharegpt"),
    "openai": (TAGGED, CHATS, "preference_openai"),
    "ms_swift": (SWIFT, CHATS, "preference_openai"),
    "ms_swift_messages": (SWIFT_MESSAGES, CHATS, "preference_openai"),
    "trl_with_tools": (WITHOUT_TOOLS, CHATS, "preference_openai"),
    "repeated_roles": (REPEATED, MERGED, "preference"),
    "repeated_roles_with_tools": (
        [record | {"tools": []} for record in REPEATED],
        MERGED,
        "preference_openai",
    ),
    "repeated_roles_of_sharegpt": (REPEATED_SHAREGPT, MERGED, "preference_sharegpt"),
    "alpaca": (ALPACA, ALPACA_CHATS, "preference_alpaca"),
    "one_message": (ONE_MESSAGE, CHATS, "preference"),
    "answers_as_texts": (ANSWERS_AS_TEXTS, CHATS, "preference"),
}
"""Name -> records, the same records with messages or texts for prompt and answers, and the shape
that `init` recognises.
"""


def convert(
    folder: Path, tokenizer: Path, records: Sequence[Any], source: Mapping[str, Any], **keys: Any
) -> Any:
    """Convert a stream of preferences with these keys and return its manifest."""
    path = str(write_jsonl(folder / "a.jsonl", records))
    stream = {"kind": "preference", "source": {"path": path, **source}, **keys}
    settings = {"max_seq_len": 256, "train_loader": {"name": "pairwise_preference"}, "max_bad": 0.9}
    run_ok("convert", write_recipe(folder, tokenizer, streams={"likes": stream}, **settings))
    return manifest_of(folder / "out/likes/train")


@pytest.mark.parametrize("form", FORMS)
def test_each_form_is_recognised_and_gives_the_same_rows_as_the_plain_form(
    tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    records, plain, shape = FORMS[form]
    expected = convert(tmp_path / "plain", tokenizer_folder, plain, {"shape": "preference"})
    assert expected.records.written == len(plain)
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "likes.jsonl", records)
    run_ok("init", "likes.jsonl", "--tokenizer", tokenizer_folder, "-o", "recipe.yaml")
    (stream,) = yaml.safe_load((tmp_path / "recipe.yaml").read_text())["streams"].values()
    source = stream["source"]
    assert stream.pop("kind") == "preference"
    del source["path"], stream["source"]
    manifest = convert(tmp_path / "recognised", tokenizer_folder, records, source, **stream)
    assert manifest.encoding.shape in (shape, None)
    assert manifest.index_hash == expected.index_hash
    odd = convert(tmp_path / "odd", tokenizer_folder, [*records, *ODD], source, **stream)
    assert (odd.records.written, odd.records.bad) == (len(plain), len(ODD))
    assert odd.index_hash == expected.index_hash


def test_an_odd_record_does_not_spoil_its_neighbours(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    """The shape is named in the recipe, or follows from the fields that it names."""
    whole = [{"prompt": "Why?", "chosen": " So.", "rejected": " No."}]
    fields = {key: key for key in whole[0]}
    for number, source in enumerate(({"shape": "preference"}, fields)):
        folder = tmp_path / str(number)
        manifest = convert(folder, tokenizer_folder, [*whole, *ODD], source)
        assert manifest.records.written == 1
        reasons = [bad["reason"] for bad in read_quarantined(folder / "out/likes/train")]
        assert reasons == ["no_prompt", "bad_message_keys", "missing_field"]
        planned = mdsmix("plan", folder / "recipe.yaml", "--batch", "1")
        assert "mdsmix itself failed" not in planned.err


VALUES: list[Any] = [
    *(None, True, 0, -1.5, "", "a", "\ud800", [], {}, [None], ["a"], [[]], [{}], [["a", "b"]]),
    *(
        {"role": "assistant"},
        {"content": "a"},
        {"from": [], "value": 1},
        [{"from": "gpt", "value": "a"}],
    ),
    *([message("user", "a"), message("assistant", "b")], {"role": {}, "content": []}, [[["a"]]]),
    *(
        [sharegpt_item("human", "a"), sharegpt_item("gpt", "b")],
        message("assistant", "a"),
        sharegpt_item("gpt", "a"),
    ),
]


@pytest.mark.parametrize("name", SHAPES)
def test_no_value_of_any_field_raises_an_unexpected_error(name: str) -> None:
    """Each field of each shape has each value in turn; the other fields are good, absent or odd."""
    shape = SHAPES[name]
    keys = [*shape.fields, *shape.optional]
    for key in keys:
        for value in VALUES:
            for other_fields in (
                {},
                dict.fromkeys(keys, "a"),
                *(dict.fromkeys(keys, v) for v in VALUES),
            ):
                for fields in (shape.own_fields, {k: k for k in shape.fields}):
                    result = shape.read(other_fields | {key: value}, fields)
                    assert isinstance(result, (str, shape.gives)), (key, value, other_fields)


IMAGE_VALUES: list[Any] = [
    *VALUES,
    "a.jpg",
    ["a.jpg", "b.jpg"],
    [{"type": "image"}],
    {"role": "user", "content": [{"type": "image", "index": 5}, {"type": "text"}, None]},
    [{"role": "user", "content": [{"type": "image", "image": "a.jpg"}]}],
    [{"role": "assistant", "content": None, "images": ["a.jpg"]}],
    [{"from": "human", "value": [{"type": "image", "image": {}}]}],
]


@pytest.mark.parametrize("name", ["preference_openai", "preference_alpaca", "preference_sharegpt"])
def test_no_image_raises_an_unexpected_error(name: str) -> None:
    shape = with_images(SHAPES[name], [])
    good = {
        "prompt": [message("user", "<image>a")],
        "conversations": [sharegpt_item("human", "<image>a")],
        "instruction": "<image>a",
        "chosen": "b",
        "rejected": "c",
        "images": ["a.jpg"],
    }
    if name == "preference_sharegpt":
        good |= {"chosen": sharegpt_item("gpt", "b"), "rejected": sharegpt_item("gpt", "c")}
    fields = {key: key for key in shape.own_fields if key in good}
    assert shape.read(good, fields).images == ["a.jpg"]
    for key in ("prompt", "conversations", "chosen", "rejected", "images", "rejected_images"):
        for value in IMAGE_VALUES:
            for image_fields in ({}, {"images": None}, {"images": ["a.jpg", "b.jpg"]}):
                result = shape.read(good | image_fields | {key: value}, fields)
                assert isinstance(result, (str, shape.gives)), (key, value, image_fields)


RANKED: dict[str, tuple[Record, Sequence[Record], Record]] = {
    "chats": (
        {
            "formatting": "sharegpt",
            "columns": {
                "messages": "conversations",
                "chosen": "chosen",
                "rejected": "rejected",
                "system": "system",
            },
        },
        SHAREGPT,
        {"conversations": "conversations", "system": "system"},
    ),
    "plain": ({}, ALPACA[:1], {"instruction": "instruction", "input": "input"}),
    "asked": (
        {
            "columns": {
                "query": "instruction",
                "chosen": "chosen",
                "rejected": "rejected",
                "system": "system",
                "history": "history",
            }
        },
        ALPACA[1:],
        {"instruction": "instruction", "system": "system", "history": "history"},
    ),
    "openai": (
        {
            "formatting": "openai",
            "columns": {"messages": "messages", "chosen": "chosen", "rejected": "rejected"},
        },
        TAGGED,
        {"prompt": "messages", "shape": "preference_openai"},
    ),
    "other_roles": (
        {
            "formatting": "openai",
            "columns": {"messages": "messages", "chosen": "chosen", "rejected": "rejected"},
            "tags": {"user_tag": "person"},
        },
        RENAMED,
        {
            "conversations": "messages",
            "tags": {
                "role_tag": "role",
                "content_tag": "content",
                "user_tag": "person",
                "assistant_tag": "assistant",
                "observation_tag": "tool",
            },
        },
    ),
    "without_columns": (
        {"formatting": "openai"},
        TAGGED,
        {"prompt": "messages", "shape": "preference_openai"},
    ),
}
"""An entry with `ranking: true`, its records, and the source that its stream gets in addition to
`chosen` and `rejected`.
"""


@pytest.mark.parametrize("name", RANKED)
def test_a_ranked_entry_of_dataset_info_is_a_stream_of_preferences(
    tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    entry, records, source = RANKED[name]
    write_jsonl(tmp_path / "LF/data.jsonl", records)
    info = tmp_path / "LF/dataset_info.json"
    entries = {name: {"file_name": "data.jsonl", "ranking": True} | entry}
    info.write_text(json.dumps(entries))
    notices: list[Any] = []
    (draft,) = read_dataset_info(str(info), [], tmp_path, notices)
    both = {"chosen": "chosen", "rejected": "rejected"}
    assert (draft.source, notices) == ({"path": ["LF/data.jsonl"]} | both | source, [])
    run_ok("init", "--dataset-info", info, "--tokenizer", tokenizer_folder, "-o", "recipe.yaml")
    tree = yaml.safe_load(Path("recipe.yaml").read_text())
    assert (tree["streams"][name]["kind"], tree["train_loader"]) == (
        "preference",
        {"name": "pairwise_preference"},
    )
    run_ok("convert", "recipe.yaml")
    assert manifest_of(tmp_path / "mix" / name / "train").records.written == len(records)


FUNCTION = """
def read(record):
    if record["kind"] == "chat":
        return {"prompt": [{"role": "user", "content": "Who?"}], "chosen": record["good"], "rejected": record["bad"]}
    if record["kind"] == "tools":
        call = {"name": "find", "arguments": {"who": "Ann"}}
        return {
            "prompt": [{"role": "user", "content": "Who?"}],
            "chosen": [{"role": "assistant", "content": None, "tool_calls": [call]}],
            "rejected": record["bad"],
            "tools": [{"name": "find"}],
        }
    if record["kind"] == "text":
        return {"prompt": "Who?", "chosen": record["good"], "rejected": record["bad"]}
    return {"prompt": "Who?", "response": record["good"]}
"""


def test_a_function_may_return_a_preference(tmp_path: Path, tokenizer_folder: Path) -> None:
    (tmp_path / "likes.py").write_text(FUNCTION)
    records = [{"kind": kind, "good": " Ann.", "bad": " Bob."} for kind in ("text", "chat", "pair")]
    manifest = convert(tmp_path, tokenizer_folder, records, {"shape": "likes.py:read"})
    (bad,) = read_quarantined(tmp_path / "out/likes/train")
    assert (bad["reason"], bad["detail"]["said"]) == (
        "function_gave_other",
        "a pair in a stream of preferences: write source.gives: pair for pairs",
    )
    text = {"prompt": "Who?", "chosen": " Ann.", "rejected": " Bob."}
    chat = text | {"prompt": [message("user", "Who?")]}
    plain = convert(tmp_path / "p", tokenizer_folder, [text, chat], {"shape": "preference"})
    assert manifest.index_hash == plain.index_hash
    named = convert(
        tmp_path, tokenizer_folder, records, {"shape": "likes.py:read", "gives": "preference"}
    )
    assert named.index_hash == plain.index_hash


def test_tools_that_a_function_returns_are_read(tmp_path: Path, tokenizer_folder: Path) -> None:
    """The template of this tokenizer prints no tools: they are refused, and not ignored."""
    (tmp_path / "likes.py").write_text(FUNCTION)
    records = [{"kind": kind, "good": " Ann.", "bad": " Bob."} for kind in ("text", "tools")]
    manifest = convert(tmp_path, tokenizer_folder, records, {"shape": "likes.py:read"})
    assert manifest.records.quarantined == {"tools_not_printed": 1}


SYSTEM, QUESTION = message("system", "Be brief."), message("user", "Why?")
EARLIER = [message("user", "Who?"), message("assistant", "Ann.")]


@pytest.mark.parametrize("shape", ["preference", "preference_openai"])
def test_the_prompt_may_be_in_whole_conversations(shape: str) -> None:
    """The prompt is not printed a second time in front of them. TRL 1.16 ignores a text next to
    messages: its `maybe_extract_prompt` gives the same conversations
    (tests/exporting/test_peers.py).
    """
    keys = {key: key for key in ("prompt", "chosen", "rejected")}
    for prompt, beginning in (
        ("Why?", [QUESTION]),
        ("Why?", [SYSTEM, QUESTION]),
        ("Why?", [*EARLIER, QUESTION]),
        ("Who?", [*EARLIER, QUESTION]),
        ([QUESTION], [SYSTEM, QUESTION]),
        ([*EARLIER, QUESTION], [SYSTEM, *EARLIER, QUESTION]),
        ([SYSTEM, QUESTION], [SYSTEM, QUESTION]),
    ):
        whole = {
            "chosen": [*beginning, message("assistant", "So.")],
            "rejected": [*beginning, message("assistant", "No.")],
        }
        record = {"prompt": prompt, **whole}
        read = SHAPES[shape].read(record, keys)
        assert {key: getattr(read, key).messages for key in whole} == whole
        # Only one answer may be a whole conversation.
        alone = SHAPES[shape].read({**record, "rejected": whole["rejected"][-1:]}, keys)
        assert alone.chosen.messages == whole["chosen"]


@pytest.mark.parametrize("shape", ["preference", "preference_openai"])
@pytest.mark.parametrize("prompt", ["Why?", [*EARLIER, QUESTION]])
def test_whole_conversations_may_begin_with_the_assistant(shape: str, prompt: Any) -> None:
    """Both answers then contain the prompt after the same beginning. Otherwise such messages
    continue the prompt, even if they repeat it.
    """
    keys = {key: key for key in ("prompt", "chosen", "rejected")}
    messages = [QUESTION] if isinstance(prompt, str) else prompt
    beginning = [message("assistant", "Hello."), *messages]
    so, no = message("assistant", "So."), message("assistant", "No.")
    whole = {"chosen": [*beginning, so], "rejected": [*beginning, no]}
    read = SHAPES[shape].read({"prompt": prompt, **whole}, keys)
    if shape == "preference":  # takes no conversation that the assistant begins
        assert read == "starts_with_assistant"
    else:
        assert {key: getattr(read, key).messages for key in whole} == whole

    other = [message("assistant", "What?"), *messages, no]
    for rejected in ([no], other):
        record = {"prompt": prompt, "chosen": whole["chosen"], "rejected": rejected}
        read = SHAPES[shape].read(record, keys)
        assert read.chosen.messages == [*messages, *whole["chosen"]]
        assert read.rejected.messages == [*messages, *rejected]


def test_an_answer_that_is_only_the_prompt_has_no_messages() -> None:
    keys = {key: key for key in ("prompt", "chosen", "rejected")}
    answers = {"chosen": [QUESTION, message("assistant", "So.")], "rejected": [QUESTION]}
    shape = SHAPES["preference_openai"]
    for prompt in ("Why?", [QUESTION]):
        assert shape.read({"prompt": prompt, **answers}, keys) == "no_messages"


def test_a_reward_is_a_finite_number() -> None:
    """Tables may have NaN, and JSON a whole number that no float has."""
    record = {"prompt": "Why?", "chosen": "So.", "rejected": "No.", "rejected_reward": 1}
    keys = {key: key for key in (*record, "chosen_reward")}
    for reward in (float("nan"), float("inf"), -float("inf"), 10**400, True, "1", None):
        read = SHAPES["preference"].read(record | {"chosen_reward": reward}, keys)
        assert read == "bad_reward", reward
    for reward in (0, -2.5, 10**30):
        read = SHAPES["preference"].read(record | {"chosen_reward": reward}, keys)
        assert read.rewards == (float(reward), 1.0)


@pytest.mark.parametrize("shape", ["preference", "preference_openai"])
def test_a_prompt_that_whole_conversations_lack_is_refused(shape: str) -> None:
    """It would come before their system message."""
    keys = {key: key for key in ("prompt", "chosen", "rejected")}
    answers = {"chosen": message("assistant", "So."), "rejected": message("assistant", "No.")}
    for beginning in ([SYSTEM], [SYSTEM, message("user", "Why")]):
        record = {key: [*beginning, answer] for key, answer in answers.items()}
        assert SHAPES[shape].read({"prompt": "Why?", **record}, keys) == "prompt_not_found"
    record = {key: [QUESTION, answer] for key, answer in answers.items()}
    for prompt in (42, {"role": "user", "content": "Why?"}):
        assert isinstance(SHAPES[shape].read({"prompt": prompt, **record}, keys), str)
