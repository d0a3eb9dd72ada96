"""`train_parts`: rows have the tokens that they have without it, and the trained ones among them
are those of the trained parts. The tokenizer has a token for each character, so that texts are
compared. What is trained is found by searching the text for tags, not for messages.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import orjson
import pytest

from mdsmix.encode.encoded import Encoded
from mdsmix.record import Conversation
from mdsmix.shapes.messages import OPENAI
from mdsmix.tokenizer.card import Tokenizer
from tests.converting import (
    Project,
    assert_refused,
    chats,
    read_samples,
    run_ok,
)
from tests.corpus import CHATML
from tests.styles import SPECIALS, add_tokens, make_dialogue, open_chats
from tests.tool_styles import QWEN_3, draw_conversations

NO_REASONING = {"reasoning": False, "calls": True, "answer": True}
ONLY_CALLS = {"reasoning": False, "calls": True, "answer": False}
ONLY_REASONING = {"reasoning": True, "calls": False, "answer": False}
NO_ANSWER = {"reasoning": True, "calls": True, "answer": False}
SETTINGS: dict[str, Any] = {
    "target_responses": "all",
    "max_seq_len": 4000,
    "special_tokens_in_text": "allow",
    "rewritten_history": "each",
}
THOUGHT = re.compile(r"<think>.*?</think>", re.DOTALL)
CALL = re.compile(r"\n<tool_call>.*</tool_call>", re.DOTALL)
THINKS = "<think>\nHm.\n</think>\n\n"


def decode(ids: Any) -> str:
    return "".join(SPECIALS[id] if id < len(SPECIALS) else chr(id) for id in ids)


def read_rows(encoded: Encoded) -> list[list[tuple[str, str]]]:
    """Return the turns of each row as texts."""
    return [
        [(decode(turn["input_ids"]), decode(turn["labels"])) for turn in orjson.loads(blob)]
        for blob in encoded.columns["turns"].slices()
    ]


def alternate(row: list[tuple[str, str]]) -> Iterator[tuple[str, bool]]:
    """Yield each prompt and response of a row, and whether it is trained."""
    for prompt, response in row:
        yield prompt, False
        yield response, True


def to_ids(text: str) -> list[str]:
    """Return the tokens of a text: each character, or a special token."""
    return re.findall("|".join(map(re.escape, SPECIALS)) + "|.", text, re.DOTALL)


def read_records(count: int = 40) -> list[Any]:
    """Return conversations with calls, reasoning, and answers that are not trained."""
    fields = {"messages": "messages", "tools": "tools"}
    records = list[Any]()
    for number, (messages, tools) in enumerate(draw_conversations(count, seed=11)):
        for message in messages[:-1]:
            if number % 5 == 0 and message["role"] == "assistant":
                message["weight"] = 0
        records.append(OPENAI.read({"messages": messages, "tools": tools}, fields))
    return records


def find_pieces(response: str, parts: dict[str, bool]) -> list[tuple[str, bool]]:
    """Return the pieces of a response and whether each is trained, by the tags in its text. The
    end-of-turn token belongs to the last part.
    """
    owners = ["answer"] * len(response)
    thought = THOUGHT.search(response)
    if thought:
        owners[: thought.end()] = ["reasoning"] * thought.end()
    call = CALL.search(response)
    if call:
        start = call.start()
        # Before a call without a content there is only white space.
        while start and response[start - 1] == "\n" and owners[start - 1] == "answer":
            start -= 1
        has_answer = owners[start - 1 : start] == ["answer"]
        first = call.start() if has_answer else start
        owners[first:] = ["calls"] * (len(response) - first)
    if thought and not response[thought.end() :].removesuffix("<|im_end|>\n").strip():
        owners[thought.end() :] = ["reasoning"] * (len(response) - thought.end())
    pieces = list[tuple[str, bool]]()
    for character, owner in zip(response, owners, strict=True):
        if pieces and pieces[-1][1] == parts[owner]:
            pieces[-1] = (pieces[-1][0] + character, parts[owner])
        else:
            pieces.append((character, parts[owner]))
    return pieces


def expect_row(row: list[tuple[str, str]], parts: dict[str, bool]) -> list[tuple[str, bool]] | str:
    """Return the pieces of a row up to its last trained one, or its reason code."""
    pieces = list[tuple[str, bool, int]]()
    for number, (prompt, response) in enumerate(row):
        for text, trained in [(prompt, False), *find_pieces(response, parts)]:
            if pieces and pieces[-1][1] == trained:
                pieces[-1] = (pieces[-1][0] + text, trained, pieces[-1][2])
            else:
                pieces.append((text, trained, number))
    if not any(trained for _, trained, _ in pieces):
        return "nothing_trained"
    text = "".join(text for text, _, _ in pieces)
    while not pieces[-1][1]:
        pieces.pop()
    kept_text = "".join(text for text, _, _ in pieces)
    ends, end = list[int](), 0
    for prompt, response in row:
        end += len(prompt) + len(response)
        ends.append(end)
    if len(kept_text) not in ends and len(kept_text) < len(text):
        return "ends_untrained"
    return [(text, trained) for text, trained, _ in pieces]


@pytest.mark.parametrize("parts", [NO_REASONING, ONLY_CALLS, ONLY_REASONING, NO_ANSWER])
def test_the_trained_tokens_are_those_of_the_trained_parts(
    lettered: Tokenizer, parts: dict[str, bool]
) -> None:
    """And all others are the same tokens as without train_parts."""
    whole = open_chats(lettered, QWEN_3, lettered.template_variables, **SETTINGS)
    split = open_chats(lettered, QWEN_3, lettered.template_variables, train_parts=parts, **SETTINGS)
    reason_counts = dict[str, int]()
    for record in read_records():
        before = whole.encode([record])
        after = split.encode([record])
        verdicts = [expect_row(row, parts) for row in read_rows(before)]
        expected = [row for row in verdicts if not isinstance(row, str)]
        reasons = [row for row in verdicts if isinstance(row, str)]
        if "ends_untrained" in reasons:  # the record is refused as a whole
            reasons = ["ends_untrained"]
            expected = []
        rows = [[*alternate(row)] for row in read_rows(after)]
        assert rows == expected
        assert after.totals.tokens == sum(len(to_ids(text)) for row in rows for text, _ in row)
        rejected = [*before.rejected.values()] or [*reasons[-1:]]
        assert [*after.rejected.values()] == ([] if rows else rejected)
        for reason in (*reasons, *["rows"] * len(rows)):
            reason_counts[reason] = reason_counts.get(reason, 0) + 1
    # The message with the reasoning goes on with an answer or a call, so no row can end there.
    assert reason_counts.get("rows", 0) > 5 or parts == ONLY_REASONING
    assert parts["answer"] or len(reason_counts) > 1


def test_packed_rows_hold_every_combination(lettered: Tokenizer) -> None:
    """Also an answer that ends untrained: the tokens after it and the EOS stay, and are not
    trained.
    """
    for parts in (NO_REASONING, ONLY_CALLS, ONLY_REASONING, NO_ANSWER):
        settings = SETTINGS | {"train_parts": parts, "pack": True}
        packed = open_chats(lettered, QWEN_3, lettered.template_variables, **settings)
        whole = open_chats(lettered, QWEN_3, lettered.template_variables, **SETTINGS)
        trained_rows = 0
        for record in read_records(16):
            encoded = packed.encode([record])
            rows = [*zip(encoded.columns["input_ids"], encoded.columns["loss_mask"], strict=True)]
            expected = list[tuple[str, list[bool]]]()
            for row in read_rows(whole.encode([record])):
                flags = list[bool]()
                for prompt, response in row:
                    flags += [False] * len(to_ids(prompt))
                    for text, is_trained in find_pieces(response, parts):
                        flags += [is_trained] * len(to_ids(text))
                if any(flags):  # EOS is trained like the token before it
                    expected.append(("".join(map("".join, row)) + "</s>", [*flags, flags[-1]]))
            assert [(decode(ids), [*map(bool, mask)]) for ids, mask in rows] == expected
            trained_rows += len(rows)
            assert encoded.totals.loss_tokens == sum(sum(mask) for _, mask in expected)
        assert trained_rows > 1


def test_a_record_without_a_trained_part_trains_nothing(lettered: Tokenizer) -> None:
    """A larger max_seq_len would not keep it. It might keep a packed row that is cut before its
    first trained token.
    """
    settings = SETTINGS | {"train_parts": ONLY_REASONING}
    plain = Conversation(make_dialogue("Hi", "Ho"))
    rows = open_chats(lettered, QWEN_3, **settings)
    assert rows.encode([plain]).rejected == {0: "nothing_trained"}
    late = Conversation(make_dialogue("Hi" * 30, f"{THINKS}Ho"))
    packed = open_chats(lettered, QWEN_3, **settings | {"pack": True, "max_seq_len": 40})
    assert packed.encode([plain, late]).rejected == {0: "nothing_trained", 1: "no_loss_tokens"}


def test_the_last_answer_is_split_if_one_piece_is_trained(lettered: Tokenizer) -> None:
    """target_responses: last, and the columns of compact streams. The earlier answer is untrained
    anyway.
    """
    record = Conversation(make_dialogue("Hi", f"{THINKS}Ho", "And?", f"{THINKS}So"))
    settings = SETTINGS | {"target_responses": "last", "train_parts": NO_REASONING}
    prompt = (
        f"<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n{THINKS}Ho<|im_end|>\n"
        f"<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n<think>\nHm.\n</think>"
    )
    for columns in ("turns", "pair"):
        encoder = open_chats(
            lettered, CHATML, lettered.template_variables, columns=columns, **settings
        )
        encoded = encoder.encode([record])
        assert encoded.totals.loss_tokens == len(to_ids("\n\nSo<|im_end|>\n")) + 1  # EOS
        if columns == "pair":
            (context,) = encoded.columns["input_ids"]
            (target,) = encoded.columns["labels"]
            assert (decode(context), decode(target)) == (prompt, "\n\nSo<|im_end|>\n")
        else:
            (row,) = read_rows(encoded)
            assert "".join(map("".join, row)) == prompt + "\n\nSo<|im_end|>\n"
            assert row[-1][1] == "\n\nSo<|im_end|>\n"


def test_the_last_trained_answer_is_the_last_one_of_packed_rows_too(lettered: Tokenizer) -> None:
    """With target_responses: last, if no part of the final answer is trained."""
    record = Conversation(make_dialogue("Hi", f"{THINKS}Ho", "And?", "So"))
    settings = SETTINGS | {"target_responses": "last", "train_parts": ONLY_REASONING}
    variables = lettered.template_variables
    packed = open_chats(lettered, CHATML, variables, pack=True, columns="pair", **settings)
    encoded = packed.encode([record])
    (ids,) = encoded.columns["input_ids"]
    (mask,) = encoded.columns["loss_mask"]
    assert decode(ids[mask.astype(bool)]) == "<think>\nHm.\n</think>"


def test_the_last_answer_is_refused_if_several_pieces_are_trained(lettered: Tokenizer) -> None:
    """LLM-Foundry would train only the last of them."""
    call = {"type": "function", "function": {"name": "add", "arguments": {}}}
    message = {"role": "assistant", "content": f"{THINKS}I look.", "tool_calls": [call]}
    fields = {"messages": "messages", "tools": "tools"}
    tools = [{"type": "function", "function": {"name": "add"}}]
    messages = [{"role": "user", "content": "Hi"}, message]
    record = OPENAI.read({"messages": messages, "tools": tools}, fields)
    for responses, rejected in (("last", {0: "split_answer"}), ("all", {})):
        settings = SETTINGS | {"target_responses": responses, "train_parts": NO_ANSWER}
        encoder = open_chats(lettered, QWEN_3, lettered.template_variables, **settings)
        assert encoder.encode([record]).rejected == rejected


@pytest.mark.parametrize("too_long", ["filter", "first_turns", "last_turns"])
def test_whole_turns_are_left_out_before_answers_are_split(
    lettered: Tokenizer, too_long: str
) -> None:
    """The rows have the turns that they have without train_parts."""
    talk = [text for n in range(4) for text in (f"question {n}", f"{THINKS}answer {n}")]
    record = Conversation(make_dialogue(*talk))
    lengths = set[int]()
    for longest in range(60, 420, 20):
        settings = SETTINGS | {"max_seq_len": longest, "too_long": too_long}
        whole = open_chats(lettered, CHATML, lettered.template_variables, **settings)
        split = open_chats(
            lettered, CHATML, lettered.template_variables, train_parts=NO_REASONING, **settings
        )
        before = whole.encode([record])
        after = split.encode([record])
        assert after.rejected == before.rejected
        assert after.lengths.tolist() == before.lengths.tolist()
        for name in ("left_out_turns", "truncated_rows", "truncated_tokens", "lost_tokens"):
            assert getattr(after.totals, name) == getattr(before.totals, name)
        lengths |= {*before.lengths.tolist()}
        for row in read_rows(after):
            assert "".join(response for _, response in row).count("Hm.") == 0
            assert len(row) == "".join(map("".join, row)).count("Hm.")
    assert len(lengths) == (1 if too_long == "filter" else 4)


def test_what_is_cut_off_a_row_is_counted(lettered: Tokenizer) -> None:
    """The tokens after the last trained answer are not stored. The loader cuts a long row as it
    does any other.
    """
    messages = make_dialogue("Hi", f"{THINKS}Ho", "And?", "<think>Only this.</think>")
    encoder = open_chats(
        lettered, CHATML, lettered.template_variables, train_parts=NO_REASONING, **SETTINGS
    )
    encoded = encoder.encode([Conversation(messages)])
    (row,) = read_rows(encoded)
    end = "<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n<think>Only this.</think><|im_end|>\n"
    assert row[-1][1] == "\n\nHo<|im_end|>\n"
    assert encoded.totals.untrained_ends == encoded.totals.lost_tokens == len(to_ids(end))
    parts = {"reasoning": "<think>\nHm.\n</think><think>Only this.</think><|im_end|>\n"}
    parts["answer"] = "\n\nHo<|im_end|>\n"
    assert encoded.totals.answer_parts == {part: len(to_ids(text)) for part, text in parts.items()}


GLM = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def test_a_stop_token_belongs_to_the_last_part(project: Project) -> None:
    """Here the token of the next role stops the model. It is trained with the answer before it, and
    not after a thought alone, which is the whole message and not trained.
    """
    project.tokenizer = add_tokens(
        project.tokenizer, project.folder / "glm", GLM,
        special=["<|user|>", "<|assistant|>"], stops=["<|user|>"],
    )  # fmt: skip
    messages = make_dialogue("a", f"{THINKS}b", "c", "<think>\nd\n</think>", "e", f"{THINKS}f")
    project.write_source([{"messages": messages}])
    stream = chats("a.jsonl", train_parts={"reasoning": False})
    project.configure(stream, max_seq_len=256, target_responses="all").run()
    shown = run_ok("inspect", project.train, "--tokenizer", project.tokenizer).out
    assert "</think>⟦\n\nb⟨<|user|>⟩⟧c⟨<|assistant|>⟩<think>\nd\n</think>⟨<|user|>⟩e" in shown
    assert "</think>⟦\n\nf⟧" in shown


def test_the_summary_counts_each_part(project: Project) -> None:
    texts = [f"{THINKS}answer", "no thought", "So it is."]
    project.write_source([{"messages": make_dialogue("Hi", text)} for text in texts])
    stream = chats("a.jsonl", train_parts={"reasoning": False})
    settings = {"max_seq_len": 256, "target_responses": "all"}
    summary = project.configure(stream, **settings).convert_ok().out
    counts = project.manifest.totals.answer_parts
    assert set(counts) == {"reasoning", "answer"}
    assert (
        f"tokens of answers that are trained: 0 calls, {counts['answer']} answer; not trained "
        f"(train_parts): {counts['reasoning']} reasoning"
    ) in " ".join(summary.split())
    assert "has this part" not in summary
    trained = sum(len(t["labels"]) for row in read_samples(project.train) for t in row["turns"])
    assert trained == counts["answer"]
    # The counts are of all answers, so the summary does not call them trained.
    summary = project.configure(stream, **settings | {"target_responses": "last"}).convert_ok().out
    counted = "tokens of answers (target_responses: last trains only the last one of a row)"
    assert f"{counted}: 0 calls" in " ".join(summary.split())
    stream["train_parts"] = {"calls": False}
    summary = project.configure(stream, **settings).convert_ok().out
    assert (
        "WARNING: train_parts.calls is false, but no answer of the 3 records has this part"
    ) in " ".join(summary.split())


def test_records_that_cannot_be_split_are_quarantined_with_a_hint(project: Project) -> None:
    project.write_source([{"messages": make_dialogue("Hi", f"{THINKS}Ho")}])
    stream = chats("a.jsonl", train_parts={"answer": False})
    settings = {"max_seq_len": 256, "target_responses": "all"}
    answer = project.configure(stream, **settings).convert()
    assert_refused(answer, 5, "1 ends_untrained")
    project.write_source(
        [{"messages": make_dialogue("Hi", text)} for text in (f"{THINKS}a", "<think>b</think>")]
    )
    summary = project.configure(stream, **settings).convert_ok().out
    assert "1 ends_untrained" in summary
    assert "ends_untrained: pack: true keeps these records" in summary


def test_all_parts_are_the_default(project: Project) -> None:
    """A stream that trains all parts keeps its keys."""
    project.write_source([{"messages": make_dialogue("Hi", "Ho")}])
    project.configure(chats("a.jsonl"), max_seq_len=256).run()
    before = project.manifest
    for parts in ({}, {"reasoning": True, "calls": True, "answer": True}, None):
        project.configure(chats("a.jsonl", train_parts=parts), max_seq_len=256)
        assert "up to date" in project.convert_ok().out
    assert project.manifest == before
    assert not before.encoding.train_parts
    assert not before.totals.answer_parts


REFUSED = {
    "streams.web.train_parts={reasoning: false, calls: false, answer: false}": "leaves no part",
    "target_prompts=all": "but target_prompts: all trains prompts",
    "target_prompts=length>=4": "but target_prompts: length>=4 trains prompts",
    "decoder_only_format=false": "because an encoder would read the parts",
    "streams.web.train_parts={thinking: false}": "thinking is not a known key; write streams.web.train_parts.reasoning",
    "streams.web.train_parts={reasoning: 0.5}": "set loss_weights: true for this stream",
    "streams.web.source.messages=null streams.web.source.prompt=a streams.web.source.response=b":
        "train_parts is only for messages",
}  # fmt: skip


def test_contradictions_are_refused(project: Project) -> None:
    project.write_source([])
    project.configure(chats("a.jsonl", train_parts={"reasoning": False}), max_seq_len=256)
    for override, sentence in REFUSED.items():
        overrides = re.split(r" (?=streams)", override)
        assert_refused(project.convert(*overrides), 2, sentence)


def test_a_template_that_changes_answers_is_refused(project: Project) -> None:
    template = CHATML.replace("message['content']", "message['content'] | upper")
    project.tokenizer = add_tokens(project.tokenizer, project.folder / "upper", template)
    project.write_source([])
    project.configure(chats("a.jsonl", train_parts={"reasoning": False}), max_seq_len=256)
    sentence = "stream web: train_parts cannot be used with the chat template of this tokenizer"
    assert_refused(project.convert(), 2, sentence)


@pytest.mark.parametrize("template", [CHATML, QWEN_3])
def test_a_thought_that_nothing_closes_is_refused(lettered: Tokenizer, template: str) -> None:
    """A generation that was cut off. A tag inside a sentence opens no thought."""
    settings = SETTINGS | {"train_parts": NO_REASONING}
    contents = ["<think>\nHm", " <think>a<think>b</think>c", "Write <think> first."]
    records = [Conversation(make_dialogue("Hi", content)) for content in contents]
    rejected = open_chats(lettered, template, **settings).encode(records).rejected
    assert rejected == {0: "parts_not_found", 1: "parts_not_found"}
