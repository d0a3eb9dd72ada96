"""Chats under a template that rewrites history, through every command: what a recipe's `rewritten_history` makes of them."""

import re
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.converting import Web, chats, documents, mdsmix, samples
from tests.styles import QWEN_3, train_style
from tests.test_encode_history import chats as conversations
from tests.test_encode_history import theirs

WITHOUT = "tokenizer.template.enable_thinking=false"


@pytest.fixture(scope="module")
def forgetful(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer whose template drops the reasoning of earlier answers."""
    return train_style(tmp_path_factory.mktemp("forgetful"), "plain", QWEN_3)


@pytest.fixture
def web(web: Web, forgetful: Path) -> Web:
    web.tokenizer = forgetful
    return web


def says(web: Web, said: list[Any], **stream: Any) -> Web:
    path = web.holds({"messages": messages} for messages in said)
    return web.says(chats(path, **stream), max_seq_len=512, target_responses="all")


def test_each_answer_is_published_as_inference_sees_it(web: Web) -> None:
    said = list(conversations(20))
    says(web, said, rewritten_history="each").run()
    totals, records = web.manifest.totals, web.manifest.records
    answers = [(m, i) for m in said for i in range(len(m)) if m[i]["role"] == "assistant"]
    expected = {theirs(QWEN_3, m[: i + 1], False) for m, i in answers}
    model = Tokenizer.from_file(str(web.tokenizer / "tokenizer.json"))
    found = model.decode_batch(web.rows, skip_special_tokens=False)
    assert set(found) <= expected
    assert len(found) == totals.samples > records.written == len(said)
    assert mdsmix("render-yaml", web.recipe).code == 0


def test_variables_of_the_template_are_part_of_the_stream(web: Web) -> None:
    said = {"user": "a", "assistant": "<think>\n\n</think>\n\nb"}
    says(web, [[{"role": role, "content": text} for role, text in said.items()]]).run()
    why = web.convert("--dry-run", WITHOUT).out
    assert "template was {} and is {'enable_thinking': False}" in why
    sizes = []
    for override in ("max_bad=100%", WITHOUT):
        assert web.convert(override).code == 0
        ((turn,),) = (sample["turns"] for sample in samples(web.train))
        sizes.append((len(turn["input_ids"]), len(turn["labels"])))
    (asked, answered), (asked_without, answered_without) = sizes
    assert answered - answered_without == asked_without - asked > 0
    assert mdsmix("check", web.recipe, WITHOUT).code == 0


REFUSED = {
    "tokenizer.template.enable_thinkin=false": "would change nothing, since the chat template of .* does not read it: did you mean enable_thinking?",
    "tokenizer.template.messages=x": "tokenizer.template.messages is given by mdsmix itself",
    "tokenizer.kwargs.enable_thinking=false": "PreTrainedTokenizerFast does not read it: correct or remove it; a variable",
    "tokenizer.kwargs.model_max_lenght=1": "tokenizer.kwargs: model_max_lenght would change nothing",
    "streams.web.rewritten_history=each target_responses=last": "each trains every answer",
}  # fmt: skip


def test_what_nothing_reads_is_refused(web: Web) -> None:
    says(web, [])
    for override, sentence in REFUSED.items():
        answer = web.convert(*override.split())
        assert answer.code == 2
        assert re.search(sentence, answer.err), answer.err


def test_template_variables_need_messages_and_a_template_is_missed_by_them_alone(web: Web) -> None:
    web.tokenizer = train_style(web.folder / "bare", "no_template")
    warning = "WARNING: the tokenizer has no chat template, so conversations are rendered as ChatML"
    assert warning in says(web, list(conversations(3))).convert().out
    web.holds(["a"], "docs.jsonl")
    web.says(documents("docs.jsonl", layout="document"))
    assert "chat template" not in web.convert("--reencode").out
    answer = web.convert(WITHOUT)
    assert answer.code == 2
    assert "no stream has messages" in answer.err
