"""Files are grouped into streams and named, and their records recognised, with images too."""

from __future__ import annotations

import base64
import re
from collections import Counter
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mdsmix.init.data_files import FirstRecords, find_data
from mdsmix.init.drafts import find_paths, group_files, make_names_unique
from mdsmix.init.foreign_forms import is_keyed_records
from mdsmix.init.recognise import describe_unknown, guess_shapes
from mdsmix.kinds import open_recipe
from mdsmix.sources import SourceFile
from mdsmix.storage import Stat, locate
from tests.converting import Answer, manifest_of, mdsmix, run_ok, write_jsonl
from tests.formats import encode_parquet, encode_tar
from tests.pictures import drawing, record, seeing_tokenizer, write_drawings

TEXT, PAIR = {"text": "some words"}, {"prompt": "a", "response": "b"}


def group_folder(folder: Path, files: dict[str, Any]) -> Any:
    """Return stream -> its paths, split and fields, of a folder with these files of one record."""
    for name, file_record in files.items():
        write_jsonl(folder / name, [file_record])
    notices: list[Any] = []
    drafts = group_files(find_data([str(folder)], folder, notices), notices)
    assert not notices
    make_names_unique(drafts)
    return {
        draft.name: (draft.source["path"], draft.keys.get("split"), [*draft.guess.fields])
        for draft in drafts
    }


def stream(*paths: str, split: str | None = None, fields: str = "text") -> Any:
    return [*paths], split, fields.split()


GROUPS: list[tuple[dict[str, Any], Any]] = [
    (
        {f"web/part-{n:04}.jsonl": TEXT for n in range(12)} | {"web/faq.jsonl": PAIR},
        {
            "web": stream("web/part-*.jsonl"),
            "faq": stream("web/faq.jsonl", fields="prompt response"),
        },
    ),
    # a-*.jsonl would find the pairs too
    (
        {"a-1.jsonl": TEXT, "a-2.jsonl": TEXT, "a-x.jsonl": PAIR},
        {
            "a": stream("a-1.jsonl", "a-2.jsonl"),
            "a_x": stream("a-x.jsonl", fields="prompt response"),
        },
    ),
    (
        dict.fromkeys(
            ("few/news.jsonl", "few/law.jsonl", *(f"many/{c}.jsonl" for c in "abcdefghijk")), TEXT
        ),
        {
            "law": stream("few/law.jsonl"),
            "news": stream("few/news.jsonl"),
            "many": stream("many/*.jsonl"),
        },
    ),
    (
        dict.fromkeys(
            ("chat/train.jsonl", "chat/test.jsonl", "valid_qa.jsonl", "protest.jsonl"), TEXT
        ),
        {
            "chat": stream("chat/train.jsonl"),
            "chat-test": stream("chat/test.jsonl", split="test"),
            "qa-validation": stream("valid_qa.jsonl", split="validation"),
            "protest": stream("protest.jsonl"),
        },
    ),
]
"Files with their records -> streams with their paths, split and fields."


def test_files_of_other_splits_that_are_trained_are_a_warning(tmp_path: Path) -> None:
    """They are trained if no file is for training; a file next to such a file is evaluated on."""
    cases: list[tuple[list[str], list[str]]] = [
        (
            ["test.jsonl"],
            [
                "test.jsonl will be trained on, since no file is for training, though its name is that of a test split"
            ],
        ),
        (
            ["a/val-1.jsonl", "a/val-2.jsonl", "a/test.jsonl"],
            [
                "a/test.jsonl will",
                "a/val-1.jsonl, a/val-2.jsonl will be trained on, since no file is for training, though their names are those of a validation split: if it is only to be evaluated on, write split: validation",
            ],
        ),
        (
            ["eval.jsonl"],
            [
                "eval.jsonl will be trained on, since no file is for training, though its name is that of an eval split"
            ],
        ),
        (["train.jsonl", "test.jsonl"], []),
        (["a.jsonl"], []),
    ]
    for number, (names, beginnings) in enumerate(cases):
        folder = tmp_path / str(number)
        for name in names:
            write_jsonl(folder / name, [TEXT])
        notices: list[Any] = []
        drafts = group_files(find_data([str(folder)], folder, notices), notices)
        assert any("split" not in draft.keys for draft in drafts)
        for notice, beginning in zip(notices, beginnings, strict=True):
            assert notice.startswith(f"WARNING: {beginning}")


def test_alike_files_are_one_stream_and_no_pattern_finds_another(tmp_path: Path) -> None:
    for number, (files, expected) in enumerate(GROUPS):
        assert group_folder(tmp_path / str(number), files) == expected


NAMES = st.lists(
    st.from_regex(r"[ab\[\]*?]{1,2}[0-9]{0,2}\.jsonl", fullmatch=True),
    unique=True,
    min_size=2,
    max_size=6,
)


@settings(max_examples=25)
@given(NAMES, st.integers(1, 6))
def test_the_paths_of_files_find_them_and_no_other_file(names: list[str], n: int) -> None:
    for folder in ("", "in/"):
        files = [SourceFile(location=locate(f), stat=Stat(1, ""), name=folder + f) for f in names]
        paths = find_paths(files[:n], files)
        matched = {f.name for f in files if any(fnmatchcase(f.name, path) for path in paths)}
        assert matched == {file.name for file in files[:n]}


MESSAGES = [{"role": "user", "content": "Which?"}, {"role": "assistant", "content": "This."}]
SHARED = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
BY_USERS = [{"from": "user", "value": "a"}, {"from": "assistant", "value": "b"}]
WEIGHED = [MESSAGES[0], {**MESSAGES[1], "weight": 1}]
CALLED = [
    MESSAGES[0],
    {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
]
IN_PARTS = [
    MESSAGES[0],
    {
        "role": "assistant",
        "content": [{"type": "reasoning", "value": "hm"}, {"type": "text", "value": "b"}],
    },
]
KNOWN: dict[str, tuple[dict[str, Any], str, dict[str, str]]] = {
    "text": ({"text": "a", "id": 1}, "text", {"text": "text"}),
    "another word": ({"Content": "a", "url": "b"}, "text", {"text": "Content"}),
    "a text in an object": ({"page": {"body": "a"}, "n": 1}, "text", {"text": "page.body"}),
    "a pair": (
        {"prompt": "a", "response": "b"},
        "prompt_response",
        {"prompt": "prompt", "response": "response"},
    ),
    "questions": (
        {"question": "a", "answer": "b"},
        "prompt_response",
        {"prompt": "question", "response": "answer"},
    ),
    "alpaca": (
        {"instruction": "a", "input": "", "output": "b"},
        "alpaca",
        {"instruction": "instruction", "output": "output", "input": "input"},
    ),
    "dolly": (
        {"instruction": "a", "context": "c", "response": "b", "category": "qa"},
        "alpaca",
        {"instruction": "instruction", "input": "context", "output": "response"},
    ),
    "a question on an article": (
        {"article": "c", "question": "a", "answer": "b"},
        "alpaca",
        {"instruction": "question", "input": "article", "output": "answer"},
    ),
    "a question with its context": (
        {"question": "a", "context": "c", "answer": "b"},
        "alpaca",
        {"instruction": "question", "input": "context", "output": "answer"},
    ),
    "openorca": (
        {"id": "1", "system_prompt": "s", "question": "a", "response": "b"},
        "alpaca",
        {"instruction": "question", "output": "response", "system": "system_prompt"},
    ),
    "messages with a system prompt": (
        {"system_prompt": "s", "messages": MESSAGES},
        "openai",
        {"messages": "messages", "system": "system_prompt"},
    ),
    "ms-swift with earlier rounds": (
        {"query": "a", "response": "b", "history": [["c", "d"]]},
        "alpaca",
        {"instruction": "query", "output": "response", "history": "history"},
    ),
    "a history that is no list of rounds": (
        {"query": "a", "response": "b", "history": "of France"},
        "prompt_response",
        {"prompt": "query", "response": "response"},
    ),
    "a question with all around it": (
        {"system": "s", "input": "a", "context": "c", "output": "b"},
        "alpaca",
        {"instruction": "input", "input": "context", "output": "output", "system": "system"},
    ),
    "alpaca in an object": (
        {"data": {"instruction": "a", "input": "c", "output": "b"}, "input": "other"},
        "alpaca",
        {"instruction": "data.instruction", "output": "data.output", "input": "data.input"},
    ),
    "messages": ({"messages": MESSAGES, "source": "x"}, "messages", {"messages": "messages"}),
    "another list": (
        {"conversation": MESSAGES, "text": "a summary"},
        "messages",
        {"messages": "conversation"},
    ),
    "messages that were made of the other fields": (
        {"problem": "a", "solution": "b", "messages": MESSAGES, "uuid": "c"},
        "messages",
        {"messages": "messages"},
    ),
    "openmathinstruct": (
        {"problem": "a", "generated_solution": "b", "expected_answer": "4"},
        "prompt_response",
        {"prompt": "problem", "response": "generated_solution"},
    ),
    "aya": (
        {"inputs": "a", "targets": "b", "language": "Dutch"},
        "prompt_response",
        {"prompt": "inputs", "response": "targets"},
    ),
    "s1": (
        {"question": "a", "solution": "b", "attempt": "c"},
        "prompt_response",
        {"prompt": "question", "response": "solution"},
    ),
    "openthoughts": (
        {"system": "s", "conversations": BY_USERS},
        "sharegpt",
        {"conversations": "conversations", "system": "system"},
    ),
    "messages with weights": ({"messages": WEIGHED}, "openai", {"messages": "messages"}),
    "messages and tools": (
        {"messages": MESSAGES, "tools": []},
        "openai",
        {"messages": "messages", "tools": "tools"},
    ),
    "sharegpt": (
        {"conversations": SHARED, "system": "s"},
        "sharegpt",
        {"conversations": "conversations", "system": "system"},
    ),
    "rounds": (
        {"conversation": [{"human": "a", "assistant": "b"}]},
        "rounds",
        {"conversation": "conversation"},
    ),
    "finevision": (
        {"texts": [{"user": "a", "assistant": "b", "source": "x"}]},
        "finevision",
        {"texts": "texts"},
    ),
    "trl's messages": (
        {"prompt": MESSAGES[:1], "completion": MESSAGES[1:]},
        "prompt_completion",
        {"prompt": "prompt", "completion": "completion"},
    ),
    "trl's texts": (
        {"prompt": "a", "completion": "b"},
        "prompt_response",
        {"prompt": "prompt", "response": "completion"},
    ),
    "trl's prompts": ({"prompt": MESSAGES[:1]}, "prompt", {"prompt": "prompt"}),
    "trl's prompts with an answer": (
        {"prompt": MESSAGES[:1], "solution": "7", "level": 3},
        "prompt",
        {"prompt": "prompt", "verified_answer": "solution"},
    ),
    "trl's prompts for GRPO": (
        {"prompt": "What is 3 + 4?", "solution": "7"},
        "prompt",
        {"prompt": "prompt", "verified_answer": "solution"},
    ),
    "prompts with a derivation and its answer": (
        {"prompt": MESSAGES[:1], "solution": "6 + 1 = 7", "answer": "7"},
        "prompt",
        {"prompt": "prompt", "verified_answer": "answer"},
    ),
    "verl": (
        {
            "data_source": "openai/gsm8k",
            "prompt": MESSAGES[:1],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": "7"},
            "extra_info": {"index": 0, "question": "q", "answer": "a"},
        },
        "prompt",
        {"prompt": "prompt", "verified_answer": "reward_model.ground_truth"},
    ),
    "slime": (
        {"prompt": MESSAGES[:1], "label": "7", "metadata": {}},
        "prompt",
        {"prompt": "prompt", "verified_answer": "label"},
    ),
    "distilabel": (
        {"instruction": "a", "generation": "b", "model_name": "m", "distilabel_metadata": {}},
        "prompt_response",
        {"prompt": "instruction", "response": "generation"},
    ),
    "verifiers": (
        {
            "example_id": 0,
            "prompt": MESSAGES[:1],
            "completion": CALLED[1:],
            "reward": 1.0,
            "tool_defs": [{"name": "f", "description": "d", "parameters": {}, "strict": None}],
        },
        "prompt_completion",
        {"prompt": "prompt", "completion": "completion", "tools": "tool_defs"},
    ),
    "openai's prompts": (
        {"messages": MESSAGES[:1], "reference_answer": "7"},
        "prompt",
        {"prompt": "messages", "verified_answer": "reference_answer"},
    ),
    "openai's preferences": (
        {
            "input": {"messages": MESSAGES[:1], "tools": [], "parallel_tool_calls": True},
            "preferred_output": MESSAGES[1:],
            "non_preferred_output": [{"role": "assistant", "content": "c"}],
        },
        "preference_openai",
        {
            "prompt": "input.messages",
            "chosen": "preferred_output",
            "rejected": "non_preferred_output",
            "tools": "input.tools",
        },
    ),
    "vertex's older pairs": (
        {"input_text": "a", "output_text": "b"},
        "prompt_response",
        {"prompt": "input_text", "response": "output_text"},
    ),
    "trl's unpaired preferences": (
        {"prompt": "a", "completion": "b", "label": True},
        "unpaired_preference",
        {"prompt": "prompt", "completion": "completion", "label": "label"},
    ),
    "gsm8k": (
        {"question": "q", "answer": "a"},
        "prompt_response",
        {"prompt": "question", "response": "answer"},
    ),
    "orca's preferences": (
        {"system": "s", "question": "q", "chosen": "a", "rejected": "b"},
        "preference_openai",
        {"prompt": "question", "chosen": "chosen", "rejected": "rejected", "system": "system"},
    ),
    "argilla's preferences": (
        {"system": "s", "input": "q", "chosen": "So it is", "rejected": "So it was", "n": 1},
        "preference_alpaca",
        {"instruction": "input", "chosen": "chosen", "rejected": "rejected", "system": "system"},
    ),
    "nemo's preferences": (
        {
            "prompt": "q",
            "chosen_response": "a",
            "rejected_response": "b",
            "chosen_reward": 2,
            "rejected_reward": 1.5,
        },
        "preference",
        {
            "prompt": "prompt",
            "chosen": "chosen_response",
            "rejected": "rejected_response",
            "chosen_reward": "chosen_reward",
            "rejected_reward": "rejected_reward",
        },
    ),
    "ms-swift's question with two answers": (
        {"query": "q", "response": "a", "rejected_response": "b"},
        "preference",
        {"prompt": "query", "chosen": "response", "rejected": "rejected_response"},
    ),
    "llama-factory's v1 preferences": (
        {
            name: [
                {"role": "user", "content": [{"type": "text", "value": "q"}], "loss_weight": 0.0},
                {"role": "assistant", "content": [{"type": "text", "value": answer}]},
            ]
            for name, answer in (("chosen_messages", "a"), ("rejected_messages", "b"))
        },
        "preference_openai",
        {"chosen": "chosen_messages", "rejected": "rejected_messages"},
    ),
    "preferences without their scores": (
        {"prompt": "q", "chosen": "a", "rejected": "b", "score_chosen": None, "score_rejected": 1},
        "preference",
        {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"},
    ),
    "a conversation that was made of question and solution": (
        {"question": "a", "solution": "b", "conversations": SHARED, "style": "x"},
        "sharegpt",
        {"conversations": "conversations"},
    ),
    "functions": (
        {"messages": CALLED, "functions": [{"name": "f", "parameters": {}}]},
        "openai",
        {"messages": "messages", "tools": "functions"},
    ),
    "llama-factory's parts": ({"messages": IN_PARTS}, "openai", {"messages": "messages"}),
    "a list under the other name": (
        {"conversations": MESSAGES},
        "messages",
        {"messages": "conversations"},
    ),
    "an agent's trajectory": (
        {"trajectory": CALLED, "tools": [{"name": "f"}], "instance_id": "a", "resolved": 1},
        "openai",
        {"messages": "trajectory", "tools": "tools"},
    ),
    "opencodereasoning 2": (
        {"question": "-", "r1_generation": "b", "solution": "c", "judgement": "right"},
        "prompt_response",
        {"prompt": "question", "response": "r1_generation"},
    ),
    "synth": (
        {"query": "a", "query_seed_text": "c", "synthetic_reasoning": "d", "synthetic_answer": "b"},
        "prompt_response",
        {"prompt": "query", "response": "synthetic_answer"},
    ),
}


def head(*records: Any, bad: Mapping[str, int] | None = None) -> FirstRecords:
    file = SourceFile(location=locate("a.jsonl"), stat=Stat(1, ""), name="a.jsonl")
    return FirstRecords(file=file, records=list(records), bad=Counter(bad or {}))


def test_common_records_are_recognised_by_their_fields() -> None:
    for case, (example, shape, fields) in KNOWN.items():
        best = guess_shapes(head(example, example))[0]
        assert best.is_right, case
        assert (best.shape.name, best.fields) == (shape, fields)
        assert best.unread == example.keys() - {name.split(".")[0] for name in fields.values()}


def test_prompts_with_another_text_are_not_recognised() -> None:
    """The other text may be the answer, under an unusual name."""
    for prompt in ("Who?", MESSAGES[:1]):
        assert not any(guess.is_right for guess in guess_shapes(head({"prompt": prompt, "z": "a"})))


def test_preferences_with_an_unknown_question_are_not_recognised() -> None:
    """The common beginning of two answers is no prompt, and a system message is none either."""
    answers = {"chosen": "It is a hen", "rejected": "It is a cow"}
    for asked in ({"frage": "What is it?"}, {"frage": "What?", "system": "Be short."}):
        assert not any(guess.is_right for guess in guess_shapes(head(asked | answers)))
    (line,) = describe_unknown(head({"frage": "What is it?"} | answers), [])
    assert "prompt: FIELD" in line
    for known in ({}, {"source": "web", "n": 3}):
        assert guess_shapes(head(known | answers))[0].is_right
    dialogue = {"chosen": "Human: A?\n\nAssistant: b", "rejected": "Human: A?\n\nAssistant: c"}
    assert guess_shapes(head(dialogue | {"topic": "two words"}))[0].is_right


def test_records_under_names_are_no_record() -> None:
    """The first of them was read, by a path, and the others were fields that are not read."""
    record = {"question": "a", "answer": "b"}
    keyed = {"q1": record, "q2": record}
    assert not any(guess.is_right for guess in guess_shapes(head(keyed)))
    (line,) = describe_unknown(head(keyed), [])
    assert "jq -c '.[]'" in line
    # Fields of one record, and two such records.
    message = {"role": "user", "content": "a"}
    assert not is_keyed_records({"prompt": message, "chosen": message, "rejected": message})
    assert guess_shapes(head(keyed, keyed))[0].is_right


def test_single_messages_of_a_tree_are_no_documents() -> None:
    message = {"message_id": "b", "parent_id": "a", "role": "prompter", "text": "Why?"}
    assert not any(guess.is_right for guess in guess_shapes(head(message)))
    (line,) = describe_unknown(head(message), [])
    assert "OpenAssistant" in line


def test_calls_of_olmo_are_named() -> None:
    """Where the content is not null, the call would be lost."""
    for content in (None, ""):
        call = {"role": "assistant", "content": content, "function_calls": 'f(a="b")'}
        result = {"role": "environment", "content": "c", "function_calls": None}
        records = [{"messages": [MESSAGES[0], call, result, MESSAGES[1]]}]
        assert not any(guess.is_right for guess in guess_shapes(head(*records)))
        (line,) = describe_unknown(head(*records), [])
        assert "Olmo's Dolci" in line


def test_words_for_keys_and_roles_are_tags_and_many_repeated_roles_are_merged() -> None:
    messages = [{"speaker": "prompter", "utterance": "a"}, {"speaker": "bot", "utterance": "b"}]
    words = {
        "role_tag": "speaker",
        "content_tag": "utterance",
        "user_tag": "prompter",
        "assistant_tag": "bot",
    }
    # NeMo's messages have a label too, which is a text in some of them.
    labelled = [
        {"from": "User", "value": "a", "label": None},
        {"from": "Assistant", "value": "b", "label": "quality:4"},
    ]
    call = '{"name": "f", "arguments": {}}'
    called = [{"from": "human", "value": "a"}, {"from": "function-call", "value": call}]
    called += [{"from": "function-response", "value": "5"}, {"from": "gpt", "value": "b"}]
    hyphens = {"function_tag": "function-call", "observation_tag": "function-response"}
    nemo = {"user_tag": "User", "assistant_tag": "Assistant"}
    merged = {"consecutive_roles": "merge"}
    twice, once = {"messages": [MESSAGES[0], *MESSAGES]}, {"messages": MESSAGES}
    for records, shape, options in (
        ([{"dialog": messages}], "sharegpt", {"tags": words}),
        ([{"conversations": labelled, "mask": "User"}], "sharegpt", {"tags": nemo}),
        ([{"conversations": called}], "sharegpt", {"tags": hyphens}),
        ([twice, *[once] * 19], "messages", {}),
        ([*[twice] * 3, *[once] * 17], "messages", merged),
    ):
        best = guess_shapes(head(*records))[0]
        assert (best.shape.name, best.options) == (shape, options)
        assert best.is_right


def test_a_shape_must_read_half_of_the_records() -> None:
    good, bad = {"text": "a"}, {"text": None}
    best = guess_shapes(head(good, good, bad, bad={"not_json": 1}))[0]
    assert best.is_right
    assert (best.read, len(best.head), best.reasons) == (2, 4, {"field_not_text": 1, "not_json": 1})
    for records in ((good, bad, bad), (), ("text", ["text"])):
        assert not guess_shapes(head(*records))[0].is_right


TALK = [{"role": "user", "content": "<image>What?"}, {"role": "assistant", "content": "It."}]
URI = "data:image/png;base64," + base64.b64encode(drawing("PNG")).decode()
PARTS = [{"type": "image_url", "image_url": {"url": URI}}, {"type": "text", "text": "What?"}]
TAGGED = "Picture 1: <img>0.jpg</img>\nWhat?"
RECORDS: dict[str, list[Any]] = {
    "llava": [record("0.jpg"), record("0.jpg", "1.png"), record()],
    "qwen": [
        {
            "conversations": [
                {"from": "user", "value": TAGGED},
                {"from": "assistant", "value": "It."},
            ]
        }
    ],
    "pairs": [{"input": TAGGED, "output": "It."}],
    "swift": [{"messages": TALK, "images": ["0.jpg"]}],
    "parts": [{"messages": [{"role": "user", "content": PARTS}, TALK[1]]}],
    "named": [{"messages": TALK, "picture": "1.png"}],
    "trl": [
        {
            "prompt": [{"role": "user", "content": "What?"}],
            "completion": [TALK[1]],
            "images": [{"bytes": None, "path": "0.jpg"}, {"bytes": None, "path": "1.png"}],
        }
    ],
    "talk": [{"messages": [{"role": "user", "content": "Who?"}, TALK[1]]}],
}


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write files in a folder, and their images in a folder next to it."""
    monkeypatch.chdir(tmp_path)
    write_drawings(tmp_path / "pictures")
    for name, records in RECORDS.items():
        write_jsonl(tmp_path / f"data/{name}.jsonl", records)
    rows = [{"question": "What?", "answer": "It.", "image": {"bytes": drawing(), "path": "gone"}}]
    (tmp_path / "data/table.parquet").write_bytes(encode_parquet(rows))
    member = {"json": {"messages": TALK}}
    members = [member | {"jpg": drawing()}, member | {"png": drawing(seed=1)}]
    (tmp_path / "data/archive.tar").write_bytes(encode_tar(members))
    captioned = [{"txt": f"A ball, {seed}.", "jpg": drawing(seed=seed)} for seed in range(2)]
    (tmp_path / "data/captioned.tar").write_bytes(encode_tar(captioned))
    listed = [{"json": TALK, "jpg": drawing()}, {"json": TALK, "jpg": drawing(seed=1)}]
    (tmp_path / "data/listed.tar").write_bytes(encode_tar(listed))
    # A page with the path of an image stays a text.
    write_jsonl(tmp_path / "data/pages.jsonl", [{"text": "A page. " * 9, "image": "0.jpg"}])
    return tmp_path


def init(tokenizer: Path, *arguments: object) -> Answer:
    return mdsmix("init", *arguments, "--tokenizer", tokenizer, "-o", "recipe.yaml", "--replace")


def test_records_with_images_become_streams_that_convert(data: Path, seeing: Path) -> None:
    answer = init(seeing, "data")
    assert answer.code == 0
    assert answer.err.endswith("fields of pages that are not read: image\n")
    run_ok("convert", "recipe.yaml")
    streams = open_recipe("recipe.yaml").sourced
    manifests = {
        stream.name: manifest_of(data / "mix" / stream.name / "train") for stream in streams
    }
    counts = {
        "llava": 3,
        "archive": 2,
        "captioned": 2,
        "listed": 2,
        "trl": 2,
        "talk": 0,
        "pages": 0,
    }
    counts |= dict.fromkeys(("qwen", "pairs", "swift", "parts", "named", "table"), 1)
    assert {name: manifest.totals.images for name, manifest in manifests.items()} == counts
    assert all(m.records.written == m.records.read for m in manifests.values())
    assert not manifests["talk"].encoding.images
    text = (data / "recipe.yaml").read_text()
    assert text.count("images: {root: pictures}    # where the paths were found") == 4
    assert "images: {field: picture, root: pictures}" in text
    assert "images: {field: [jpg, png]}" in text
    assert "images: {unplaced: first, root: pictures}    # texts without a placeholder" in text
    assert "messages: json.messages" in text
    assert re.search(r"instruction: .?<image>.?\n +output: txt", text)
    assert "# images of these records: 3; 3 by a path, 0 of these not found" in text
    assert "# images of these records: 1; 0 by a path" in text
    assert "# processor: ./model" in text


def test_images_that_are_not_found_are_counted(data: Path, seeing: Path) -> None:
    write_jsonl(data / "a.jsonl", [record("0.jpg"), record("x/lost.jpg"), record("http://h/a.jpg")])
    answer = init(seeing, "a.jsonl")
    assert "a: 1 of 2 images not found, such as x/lost.jpg: set" in answer.err
    text = (data / "recipe.yaml").read_text()
    assert (
        "3; 2 by a path, 1 of these not found; the others are in the records or at http(s) URLs"
        in text
    )


def test_a_tokenizer_without_an_image_token_leaves_the_stream_out(
    data: Path, tokenizer_folder: Path
) -> None:
    answer = init(tokenizer_folder, "data/llava.jsonl", "data/talk.jsonl")
    assert "llava is left out: its records contain images, but this tokenizer has no" in answer.err
    assert "images" not in (data / "recipe.yaml").read_text()
    words = seeing_tokenizer(tokenizer_folder, data / "undeclared", declared={})
    assert init(words, "data/llava.jsonl").code == 0
    text = (data / "recipe.yaml").read_text()
    assert "token: <|image_pad|>" in text
    assert "# the tokenizer declares no image_token; where the paths were found" in text
