"""The files that are kept of a tokenizer are opened by AutoTokenizer, without an argument, to the tokenizer that they are of."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from mdsmix.encode.pretrained import open_tokenizer
from mdsmix.encode.transformers_process import take
from mdsmix.recipe.spec import TokenizerSpec
from tests.converting import chats, run_recipe, write_jsonl, write_recipe

TEXTS = ["", "Hello, world!", "a\n\n  b <|im_start|>x<|im_end|>", "déjà vu, 東京", "<s> 12345"]
TURNS = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello <|im_end|>"}]
TEMPLATE = "{% for m in messages %}{{ bos_token }}{{ m.content }}{% endfor %}"


def configured(folder: Path, **more: Any) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | more))


def llama(folder: Path) -> None:
    """A class that writes a post-processor of its own, which puts BOS before every text."""
    more = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<|im_start|>", "add_bos_token": True}
    configured(folder, **more)
    (folder / "special_tokens_map.json").unlink()


def own_code(folder: Path) -> None:
    """A class whose code lies beside the tokenizer and is run only where that is asked for."""
    (folder / "tokenization_own.py").write_text(
        "from transformers import PreTrainedTokenizerFast\n"
        "class OwnTokenizerFast(PreTrainedTokenizerFast):\n"
        "    def __init__(self, *args, shout=False, **kwargs):\n"
        "        super().__init__(*args, **kwargs)\n"
        "        from tokenizers.normalizers import Lowercase\n"
        "        self.backend_tokenizer.normalizer = Lowercase()\n"
    )
    classes = {"AutoTokenizer": [None, "tokenization_own.OwnTokenizerFast"]}
    configured(folder, tokenizer_class="OwnTokenizer", auto_map=classes)


def named_templates(folder: Path) -> None:
    templates = [{"name": "default", "template": TEMPLATE}, {"name": "tool_use", "template": "x"}]
    configured(folder, chat_template=templates)


def asked(tokenizer: Any) -> list[Any]:
    ids = [tokenizer(text)["input_ids"] for text in TEXTS]
    chat = tokenizer.apply_chat_template(TURNS, tokenize=False) if tokenizer.chat_template else ""
    return [ids, chat, tokenizer.padding_side, tokenizer.special_tokens_map, len(tokenizer)]


@pytest.mark.parametrize("change", [None, llama, own_code, named_templates])
def test_what_is_kept_of_a_folder_opens_to_the_same_tokenizer(
    tmp_path: Path, tokenizer_folder: Path, change: Any
) -> None:
    folder = tmp_path / "given"
    shutil.copytree(tokenizer_folder, folder)
    if change:
        change(folder)
    own = {"trust_remote_code": True} if change is own_code else {}
    changed = {"chat_template": TEMPLATE, "bos_token": "<|im_end|>", "padding_side": "left"}
    for number, given in enumerate((own, own | changed)):
        kept = tmp_path / f"kept {number}"
        snapshot = open_tokenizer(TokenizerSpec(name=str(folder), kwargs=given))
        shutil.copytree(Path(snapshot.path).parent, kept)
        before = asked(AutoTokenizer.from_pretrained(folder, **given))
        folder.rename(tmp_path / "away")
        assert asked(AutoTokenizer.from_pretrained(kept)) == before
        assert not list(kept.rglob("*.py"))
        (tmp_path / "away").rename(folder)


def test_a_lone_file_and_the_folder_beside_the_streams_open_to_the_recipes_tokenizer(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    file, kwargs = str(tokenizer_folder / "tokenizer.json"), {"eos_token": "<|endoftext|>"}
    snapshot = open_tokenizer(TokenizerSpec(name=file, kwargs=kwargs))
    kept = AutoTokenizer.from_pretrained(Path(snapshot.path).parent)
    assert asked(kept) == asked(PreTrainedTokenizerFast(tokenizer_file=file, **kwargs))

    turns = [{**turn, "content": "no special token"} for turn in TURNS]
    streams = {"chat": chats(write_jsonl(tmp_path / "a.jsonl", [{"messages": turns}]))}
    run_recipe(write_recipe(tmp_path, tokenizer_folder, streams=streams, max_seq_len=64))
    (published,) = (tmp_path / "out").glob("tokenizer-*")
    opened = AutoTokenizer.from_pretrained(published)
    assert asked(opened) == asked(AutoTokenizer.from_pretrained(tokenizer_folder))


def test_a_tokenizer_is_looked_at_without_torch_and_is_the_same(tokenizer_folder: Path) -> None:
    """torch would be imported for nothing: 11 s and 900 MB more, where a tokenizer is used for the first time."""
    program = (
        "import sys; from mdsmix.encode import transformers_process; transformers_process.main(); "
        "sys.exit('torch' in sys.modules)"
    )
    kwargs = {"bos_token": "<|im_start|>"}
    given = json.dumps({"name": str(tokenizer_folder), "kwargs": kwargs})
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [take(str(tokenizer_folder), kwargs), ""]
