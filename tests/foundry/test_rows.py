"""For the same records, mdsmix's samples are those of LLM-Foundry: of its functions row by row, and
of its converters from file to batches.

Special tokens in the text are allowed here, since Foundry knows no other way.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from itertools import chain, islice, product
from pathlib import Path
from typing import Any

import orjson
import pytest

from mdsmix.encode.backends import open_backend
from mdsmix.encode.encoded import Encoded
from mdsmix.encode.open_template import format_today
from mdsmix.kinds.conversations import Conversations
from mdsmix.kinds.finetuning import Pairs
from mdsmix.kinds.read_records import RecordReader
from mdsmix.recipe import TokenizerSpec
from mdsmix.record import FILTERED
from mdsmix.shapes import SHAPES
from mdsmix.shapes.messages import MESSAGES
from mdsmix.tokenizer.card import Tokenizer, open_tokenizer
from tests import corpus
from tests.converting import (
    chats,
    documents,
    manifest_of,
    pairs,
    read_samples,
    run_recipe,
    write_jsonl,
    write_recipe,
)
from tests.foundry.conftest import MDSMIX, Foundry, Lab
from tests.preloaded import PreloadedPython
from tests.styles import STYLES, add_tokens, open_kind
from tests.test_encode_chat import draw_plain_conversations
from tests.tool_styles import QWEN_3, draw_conversations

ROWS = 160
POLICIES = [*product(("none", "all", "length>=20"), ("last", "all"), (True,))]
POLICIES += [("none", "last", False)]
"target_prompts, target_responses, decoder_only_format: all that Foundry has."


def policy(number: int) -> dict[str, Any]:
    keys = ("target_prompts", "target_responses", "decoder_only_format")
    return {"max_seq_len": 64, **dict(zip(keys, POLICIES[number], strict=True))}


def pair_records() -> list[dict[str, Any]]:
    """Real ones, and ones that are empty, hold special tokens, or are no text."""
    texts = ["", " ", "</s>", "<s>", "<s>a", "a</s>", "<|im_start|>a", "\n\n", "é", "x " * 80]
    both: list[tuple[Any, Any]] = [(a, b) for a in texts for b in texts]
    both += [pair for bad in (None, 3, ["a"], "a\ud800") for pair in ((bad, "a"), ("a", bad))]
    odd = [{"prompt": a, "response": b} for a, b in both]
    return [*islice(corpus.questions(), ROWS - len(odd)), *odd]


def chat_records() -> list[dict[str, Any]]:
    """Real ones, generated ones, and one for each rule that a conversation can break."""
    user, assistant = ({"role": role, "content": "hi"} for role in ("user", "assistant"))
    broken: list[Any] = [
        None,
        [],
        [assistant],
        [{"role": "user"}, assistant],
        [{**user, "name": "x"}, assistant],
        [{"role": "human", "content": "a"}, assistant],
        [{"role": "user", "content": None}, assistant],
        [user, user, assistant],
        [user, assistant, user],
        [assistant, user, assistant],
        [{"role": "user", "content": "a\ud800"}, assistant],
    ]
    generated = list(draw_plain_conversations(80))
    real = [r["messages"] for r in islice(corpus.chats(), ROWS - len(generated) - len(broken) - 1)]
    thinking = [{**assistant, "content": "<think>hm</think>yes"}, user, assistant]
    mixed = [*real, *generated, *broken, [user, *thinking]]
    random.Random(5).shuffle(mixed)
    return [{"messages": messages} for messages in mixed]


REFUSALS = {
    "field_not_text": {"InvalidPromptTypeError", "InvalidResponseTypeError"},
    "lone_surrogate": {"TypeError", "UnicodeEncodeError"},
    "messages_not_a_list": {"InvalidMessageTypeError"},
    "no_messages": {"NotEnoughChatDataError"},
    "too_few_messages": {"NotEnoughChatDataError"},
    "bad_message_keys": {"IncorrectMessageKeyQuantityError", "UnknownExampleTypeError"},
    "unknown_role": {"InvalidRoleError"},
    "content_not_text": {"InvalidContentTypeError"},
    "repeated_role": {"ConsecutiveRepeatedChatRolesError"},
    "last_not_assistant": {"InvalidLastChatMessageRoleError"},
    "starts_with_assistant": {"ChatTemplateError"},
    "template_error": {"ChatTemplateError"},
    "not_prefix_stable": {"InvalidConversationError"},
}
"What mdsmix calls a bad record -> the errors of Foundry."


def reading(tokenizer: Tokenizer, columns: str, **settings: Any) -> RecordReader:
    kind = Conversations if columns else Pairs
    settings |= {"special_tokens_in_text": "allow", "columns": columns}
    made = open_kind(kind, tokenizer, backend=open_backend(tokenizer), **settings)
    if columns:
        return RecordReader(SHAPES["messages"], {"messages": "messages"}, made)
    return RecordReader(
        SHAPES["prompt_response"], {"prompt": "prompt", "response": "response"}, made
    )


def stored(encoded: Encoded) -> list[list[dict[str, list[int]]]]:
    """Our rows as lists of turns."""
    columns = encoded.columns
    if "turns" in columns:
        blobs = columns["turns"]
        return [orjson.loads(blobs[i].tobytes()) for i in range(len(blobs))]
    names = ("input_ids", "labels")
    return [[{n: columns[n][i].tolist() for n in names}] for i in range(len(columns["labels"]))]


def cases(tokenizer: Tokenizer, date: str, listed: dict[str, Any]) -> Iterator[tuple[Any, Encoded]]:
    """Every policy over both shapes, and compact chats under the one that allows them."""
    for targets in map(policy, range(len(POLICIES))):
        shapes = [("pairs", ""), ("chats", "turns")]
        if (targets["target_prompts"], targets["target_responses"]) == ("none", "last"):
            shapes.append(("chats", "pair"))
        for name, columns in shapes:
            made = reading(tokenizer, columns, date_string=date, **targets).encode(listed[name])
            is_pair = "turns" not in made.columns
            yield {**targets, "records": name, "rows": stored(made), "is_pair": is_pair}, made


@pytest.mark.parametrize("style", STYLES)
def test_samples_are_foundrys(style: str, styled: dict[str, Path], foundry: Foundry) -> None:
    """And batches: those of its functions."""
    folder, date = str(styled[style]), format_today()
    listed = {"pairs": pair_records(), "chats": chat_records()}
    assert [*map(len, listed.values())] == [ROWS, ROWS]
    ours = list(cases(open_tokenizer(TokenizerSpec(name=folder)), date, listed))
    asked = [case for case, _ in ours]
    answers = foundry("rows.compare", tokenizer=folder, date=date, records=listed, cases=asked)
    for (_, encoded), found in zip(ours, answers, strict=True):
        for position, theirs in enumerate(found["outcomes"]):
            rejected = encoded.rejected.get(position)
            if theirs in ("", "filtered"):
                assert (rejected in FILTERED) if theirs else (rejected is None)
            else:
                assert rejected not in FILTERED
                assert theirs in REFUSALS[str(rejected)]
        assert len(found["outcomes"]) == ROWS
        assert found["rows"] > ROWS / 5
        assert encoded.totals.loss_tokens == found["losses"]


def test_the_stop_of_the_next_role_is_the_one_exception(
    tmp_path: Path, styled: dict[str, Path], foundry: Foundry
) -> None:
    """Under a template without an end of turn whose stop tokens are known, and target_responses:
    all.
    """
    source = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    roles = ["<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]
    folder = add_tokens(styled["plain"], tmp_path / "roles", source, roles, stops=roles[1::2])
    records = [record for record in chat_records() if not is_refused(record)]
    stream = {"kind": "finetuning", "source": {"path": "a.jsonl", "messages": "messages"}}
    write_jsonl(tmp_path / "a.jsonl", records)
    settings = {"target_responses": "all", "special_tokens_in_text": "allow"}
    recipe = write_recipe(tmp_path, folder, max_seq_len=64, streams={"web": stream}, **settings)
    run_recipe(recipe)
    rows = [sample["turns"] for sample in read_samples(tmp_path / "out/web/train")]
    assert len(rows) == len(records)
    stops = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    moved = foundry(
        "rows.ended_by_next_role", tokenizer=str(folder), records=records, rows=rows, stops=stops
    )
    assert moved > 20


def is_refused(record: Any) -> bool:
    """Whether no row comes of a conversation, or one of its texts may be empty once it is
    rendered.
    """
    messages = record["messages"]
    is_odd = isinstance(MESSAGES.read(record, {"messages": "messages"}), str)
    return is_odd or not all(str(message["content"]).strip() for message in messages)


@pytest.mark.parametrize(("style", "number"), [("plain", 0), ("adds_both", 5), ("metaspace", 6)])
def test_streams_are_those_of_its_converters(
    style: str, number: int, styled: dict[str, Path], lab: Lab, foundry: Foundry
) -> None:
    """A tokenizer that ends no text, one that ends every text, and one for an encoder-decoder."""
    targets, lab.tokenizer, home = policy(number), styled[style], lab.folder
    of_pairs, of_chats = home / "pairs.jsonl", home / "chats.jsonl"
    for path, rows in ((of_pairs, pair_records()), (of_chats, chat_records())):
        # Not by orjson, which writes no lone surrogate.
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    listed = {"pairs": pairs(of_pairs), "chats": chats(of_chats)}
    if number == 0:
        listed["compact"] = chats(of_chats, columns="compact")
    if targets["decoder_only_format"]:
        listed["docs"] = documents(lab.corpus / "docs.jsonl")
    loader = {"train_loader": {"name": "mdsmix"}} if "docs" in listed else {}
    lab.converted(streams=listed, special_tokens_in_text="allow", **targets, **loader)
    for name, stream in listed.items():
        ours, out, tokenizer = (
            f"{home}/out/{name}/train",
            f"{home}/theirs/{name}",
            str(lab.tokenizer),
        )
        asked = {"path": stream["source"]["path"], "out": out, "tokenizer": tokenizer}
        told, is_text = manifest_of(ours).records, name == "docs"
        dataset = {"max_seq_len": targets["max_seq_len"]} if is_text else targets
        if is_text:
            ended = "" if style == "adds_both" else "</s>"
            foundry("rows.text", **asked, **dataset, bos_text="", eos_text=ended)
        else:
            taken = foundry("rows.finetuning", **asked, targets=targets)
            assert taken == ROWS - told.bad
            out = f"{out}/train"
        same = {"tokenizer": tokenizer, "theirs": out, "ours": ours, "dataset": dataset}
        found = foundry("loaders.same", **same, name="text" if is_text else "finetuning")
        assert found["rows"] > ROWS / 5
        assert is_text or found["rows"] == told.written
        assert (
            found["trained"] == 64 * found["rows"] if is_text else found["trained"] > found["rows"]
        )


MODULE = "llmfoundry.data.finetuning.tasks"
ASKED, TOLD = "What is number {n}?", "It is {n} and no more."


def _turns(role: str, content: str, human: str, model: str) -> list[dict[str, str]]:
    return [{role: human, content: ASKED}, {role: model, content: TOLD}]


FUNCTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "alpaca_preprocessing_function": ("pair", {"text": f"{ASKED}\n### Response:{TOLD}"}),
    "dolly_preprocessing_function": ("pair", {"instruction": ASKED, "input": "{n}", "output": TOLD}),
    "p3_preprocessing_function": ("pair", {"inputs": ASKED, "targets": TOLD}),
    "muennighoff_tokenize_function": ("pair", {"inputs": ASKED, "targets": TOLD}),
    "shareGPT_format_preprocessor": ("conversation", {"conversations": _turns("from", "value", "human", "gpt")}),
    "QA_format_preprocessor": ("conversation", {"Q": ASKED, "A": TOLD}),
    "messages_format_preprocessor": ("conversation", {"messages": _turns("role", "content", "user", "assistant")}),
}  # fmt: skip
"Function -> what it gives, and a record of it."


def test_its_preprocessing_functions_are_shapes(
    tokenizer_folder: Path, programs: PreloadedPython, foundry: Foundry, tmp_path: Path
) -> None:
    """Converted by the mdsmix that is installed beside LLM-Foundry."""
    streams, tokenizer, targets = {}, str(tokenizer_folder), policy(0) | {"max_seq_len": 128}
    for name, (gives, record) in FUNCTIONS.items():
        text = json.dumps(record)
        rows = [json.loads(text.replace("{n}", "7" * n)) for n in range(1, 21)]
        path = write_jsonl(tmp_path / f"{name}.jsonl", rows)
        source = {"path": str(path), "shape": f"{MODULE}:{name}", "gives": gives}
        streams[name] = {"kind": "finetuning", "source": source}
    recipe = write_recipe(tmp_path, tokenizer_folder, streams=streams, **targets)
    done = programs.start(MDSMIX, "convert", recipe, "--workers", 1).wait()
    assert done.returncode == 0, done.stderr
    for name, (gives, _) in FUNCTIONS.items():
        out, ours = f"{tmp_path}/theirs/{name}", f"{tmp_path}/out/{name}/train"
        asked = {"path": str(tmp_path / f"{name}.jsonl"), "out": out, "tokenizer": tokenizer}
        told = {"targets": targets, "preprocessor": f"{MODULE}:{name}"}
        assert foundry("rows.finetuning", **asked, **told) == 20
        same = {"tokenizer": tokenizer, "theirs": f"{out}/train", "ours": ours}
        found = foundry("loaders.same", **same, name="finetuning", dataset=targets)
        assert found["rows"] == 20
        shape = manifest_of(ours).encoding.shape or ""
        assert shape.startswith(f"{gives} by {MODULE}:{name} of hash ")


THOUGHT = re.compile(r"<think>.*?</think>", re.DOTALL)
CALL = re.compile(r"\n*<tool_call>.*?</tool_call><\|im_end\|>\n", re.DOTALL)


def test_foundry_trains_exactly_the_trained_parts(lab: Lab, foundry: Foundry) -> None:
    """The labels of its collator, decoded, are the texts of the parts, found by their tags."""
    folder = lab.folder / "thinks"
    lab.tokenizer = add_tokens(
        lab.tokenizer, folder, QWEN_3, ordinary=["<think>", "</think>", "<tool_call>"]
    )
    records = [
        {"messages": messages, "tools": tools} for messages, tools in draw_conversations(40, seed=5)
    ]
    source = write_jsonl(lab.folder / "talks.jsonl", records)
    targets = {
        "max_seq_len": 2048,
        "decoder_only_format": True,
        "target_responses": "all",
        "target_prompts": "none",
    }
    stream = chats(source, rewritten_history="each")
    stream["source"] = {"path": str(source), "shape": "openai"}
    turns_of = dict[str, list[Any]]()
    for name, parts in (
        ("whole", {}),
        ("no_reasoning", {"reasoning": False}),
        ("calls", {"reasoning": False, "answer": False}),
    ):
        streams = {"talks": stream | {"train_parts": parts}}
        lab.converted(name, streams=streams, max_seq_len=2048, target_responses="all")
        rows = read_samples(str(lab.folder / name / "out/talks/train"))
        turns_of[name] = [row["turns"] for row in rows]
    trained = {
        name: foundry(
            "rows.trained_texts", tokenizer=str(lab.tokenizer), rows=rows, targets=targets
        )
        for name, rows in turns_of.items()
    }
    # By Foundry all of a response is trained; without thoughts and answers this remains. EOS is
    # appended to the last one of a row.
    eos = "<|endoftext|>"
    kept = list[list[str]]()
    calls = list[list[str]]()
    for row in trained["whole"]:
        kept.append([THOUGHT.sub("", response) for response in row])
        found = ["".join(CALL.findall(response)) for response in row]
        found = [text for text in found if text]
        if found:
            calls.append([*found[:-1], found[-1] + eos])
    assert trained["no_reasoning"] == kept
    assert trained["calls"] == calls
    assert len(calls) > 10
    assert sum(map(len, kept)) > 40
    # The tokens of a row are the same.
    for name in ("whole", "no_reasoning"):
        for row, other in zip(turns_of["whole"], turns_of[name], strict=True):
            assert [*chain(*(t["input_ids"] + t["labels"] for t in row))] == [
                *chain(*(t["input_ids"] + t["labels"] for t in other))
            ]
