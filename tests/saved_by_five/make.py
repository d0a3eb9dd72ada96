"""Makes the folders next to this file: small tokenizers of several families as transformers 5 saves
them, and `expected.json` with the ids that it gives for TEXTS and their hashes.

Run by hand, in the environment of `make test-today`: `.venv-today/bin/python -m
tests.saved_by_five.make`.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

HERE = Path(__file__).parent
VOCABULARY = 400
SAMPLE = [
    "Hello, world! The quick brown fox jumps over the lazy dog.",
    "def main():\n    return {'one': 1, 'two': 2}\n",
    "déjà vu, naïve café, Übung, 東京 and Москва",
    "one two three four five six seven eight nine ten",
] * 20
TEXTS = [
    *("", " ", "\n", "a", "Hello, world!", "one two  three\n", "déjà vu, 東京", "12345"),
    *("  a\n\n  b", "\tx = {1: 'one'}", "don't HTMLParser", "naïve ﬁ ½", "a</s>b <s> c"),
    *("<|im_start|>user\nHi<|im_end|>", "[CLS] a [SEP]", "नमस्ते مرحبا", "🙂👍🏽"),
]
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Family(NamedTuple):
    """A tokenizer of the tokenizers library, and the config that names its class."""

    model: Any
    config: dict[str, Any]


def families() -> Iterator[tuple[str, Family]]:
    from tokenizers import (
        Tokenizer,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
        processors,
        trainers,
    )

    def byte_level(special: list[str]) -> Tokenizer:
        model = Tokenizer(models.BPE())
        model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        model.decoder = decoders.ByteLevel()
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        trainer = trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=special,
            initial_alphabet=alphabet,
            show_progress=False,
        )
        model.train_from_iterator(SAMPLE, trainer)
        return model

    ends = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    marks = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "chat_template": CHATML}
    listed = {"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]}
    yield "qwen", Family(byte_level(ends), {"tokenizer_class": "Qwen2Tokenizer"} | marks | listed)

    model = byte_level(["<|begin|>", *ends])
    model.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", 0)]
    )
    own = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|begin|>"}
    yield "llama3", Family(model, own | marks)

    gpt2 = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>"}
    yield "gpt2", Family(byte_level(["<|endoftext|>"]), gpt2 | {"bos_token": "<|endoftext|>"})

    model = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    model.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    bytes_of_llama = [f"<0x{number:02X}>" for number in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY + 200,
        special_tokens=["<unk>", "<s>", "</s>", *bytes_of_llama],
        show_progress=False,
    )
    model.train_from_iterator(SAMPLE, trainer)
    own = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>"}
    yield "llama2", Family(model, own | {"unk_token": "<unk>"})

    model = Tokenizer(models.Unigram())
    model.pre_tokenizer = pre_tokenizers.Metaspace()
    model.decoder = decoders.Metaspace()
    unigram = trainers.UnigramTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<pad>", "</s>", "<unk>"],
        unk_token="<unk>",
        show_progress=False,
    )
    model.train_from_iterator(SAMPLE, unigram)
    model.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    own = {"tokenizer_class": "T5Tokenizer", "eos_token": "</s>", "pad_token": "<pad>"}
    yield "t5", Family(model, own | {"unk_token": "<unk>", "extra_ids": 0})

    model = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    model.normalizer = normalizers.BertNormalizer(lowercase=True)
    model.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(
        vocab_size=VOCABULARY, special_tokens=words, show_progress=False
    )
    model.train_from_iterator(SAMPLE, trainer)
    model.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    own = {"tokenizer_class": "BertTokenizer", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    others = {"pad_token": "[PAD]", "unk_token": "[UNK]", "mask_token": "[MASK]"}
    yield "bert", Family(model, own | others)


def main() -> None:
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    from transformers import AutoTokenizer, __version__

    from mdsmix.tokenizer.describe import describe_tokenizer

    expected: dict[str, Any] = {"transformers": __version__, "texts": TEXTS, "ids": {}, "hash": {}}
    for name, family in families():
        folder = HERE / name
        shutil.rmtree(folder, ignore_errors=True)
        with TemporaryDirectory() as before:
            family.model.save(f"{before}/tokenizer.json")
            Path(before, "tokenizer_config.json").write_text(json.dumps(family.config))
            tokenizer = AutoTokenizer.from_pretrained(before)
        tokenizer.save_pretrained(folder)
        model = json.loads((folder / "tokenizer.json").read_text())
        (folder / "tokenizer.json").write_text(json.dumps(model, ensure_ascii=False))
        expected["ids"][name] = [tokenizer(text)["input_ids"] for text in TEXTS]
        expected["hash"][name] = describe_tokenizer(str(folder), {})["hash"]
    lines = json.dumps(expected, ensure_ascii=False, indent=None)
    (HERE / "expected.json").write_text(f"{lines}\n")


if __name__ == "__main__":
    main()
