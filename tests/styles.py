"""Tokenizers and chat templates in all the styles that converters get wrong, and kinds of streams
opened with them.

`write_letter_tokenizer` is for expectations worked out by hand: the id of a printable character
is its code point.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

from mdsmix.encode.backends import Reference
from mdsmix.kinds import Kind
from mdsmix.kinds.conversations import Conversations
from mdsmix.ragged import Ragged
from mdsmix.shards.manifest import Encoding
from mdsmix.tokenizer.card import Tokenizer
from tests.corpus import CHATML, docstrings, train_bpe, write_config
from tests.tool_styles import MISTRAL

BOS, EOS, START, END = 0, 1, 2, 3
"The ids of <s>, </s>, <|im_start|> and <|im_end|> in the letter tokenizer."
SPECIALS = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]

NO_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHATML
)
# Earlier answers lose the text before </think>, as in the templates of reasoning models.
FORGETS = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if loop.last %}{{ m['content'] }}{% else %}{{ m['content'].split('</think>')[-1] }}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA_2 = (
    "{% if messages[0]['role'] == 'system' %}{% set system = '<<SYS>>' + messages[0]['content'] + '<</SYS>>' %}"
    "{% set rest = messages[1:] %}{% else %}{% set system = '' %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate') }}{% endif %}"
    "{% set content = (system if loop.first else '') + m['content'] %}"
    "{% if m['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% elif m['role'] == 'assistant' %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
LLAMA_3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}"
    "{% set content = '<|im_start|>' + message['role'] + '\n\n' + message['content'] | trim + '<|im_end|>' %}"
    "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n\n' }}{% endif %}"
)
LAST_OPENS = (
    "{% for message in messages %}<{{ message.role }}>\n{{ message.content }}</s>\n"
    "{% if loop.last and add_generation_prompt %}<assistant>\n{% endif %}{% endfor %}"
)
DATED = "{{ date_string }} {{ strftime_now('%Y') }}\n" + CHATML
GENERATION = (
    "{% for m in messages %}{% if m.role == 'assistant' %}A:{% generation %}{{ m.content }}</s>"
    "{% endgeneration %}{% else %}{{ m.role }}:{{ {'é': m.content} | tojson }}{% continue %}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
)
# Five templates that rewrite history as today's models do. Earlier answers lose their reasoning
# (all but the last two), the generation prompt opens the reasoning (the first), every text ends
# in EOS (the third), the last answer ends differently from earlier ones (the fourth), and system
# prompt and tools are printed before the last question (the fifth).
DEEPSEEK_R1 = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}"
    "{% elif m.role == 'user' %}<User>{{ m.content }}"
    "{% else %}<Assistant>{{ m.content.split('</think>')[-1] }}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<Assistant><think>\n{% endif %}"
)
QWEN_3 = (
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and '</think>' in m.content %}"
    "{% set said = m.content.split('</think>')[-1].lstrip('\n') %}"
    "{% set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% if loop.index0 > ns.last %}<think>\n{{ thought }}\n</think>\n\n{{ said }}{% else %}{{ said }}{% endif %}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
PHI_3 = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
)
GPT_OSS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% if loop.last and not add_generation_prompt %}"
    "{% if '</think>' in m.content %}<|start|>assistant<|channel|>analysis<|message|>"
    "{{ m.content.split('</think>')[0].split('<think>')[-1] }}<|end|>{% endif %}"
    "<|start|>assistant<|channel|>final<|message|>{{ m.content.split('</think>')[-1] }}<|return|>"
    "{% else %}<|start|>assistant<|channel|>final<|message|>{{ m.content.split('</think>')[-1] }}<|end|>{% endif %}"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
# Three whose generation prompt opens reasoning that the printed answer may lack: the first prints
# an answer unchanged, the second prints an empty pair of tags before an answer without tags, the
# third prints the reasoning of the last answer in tags of its own.
DEEPSEEK_V3 = DEEPSEEK_R1.replace(".split('</think>')[-1]", "")
NEMOTRON_3 = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% set c = m.content %}"
    "{% if m.role == 'assistant' and '<think>' not in c and '</think>' not in c %}{% set c = '<think></think>' + c %}"
    "{% endif %}{{ c }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
QWEN_3_5_NOTHINK = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and '</think>' in m.content %}"
    "{% if loop.last %}<think>\n{{ m.content.split('</think>')[0].split('<think>')[-1].strip('\n') }}\n</think>\n\n{% endif %}"
    "{{ m.content.split('</think>')[-1].lstrip('\n') }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n\n</think>\n\n{% endif %}"
)
# Answers without reasoning begin with </think>, and the generation prompt ends in <think>. Each is
# a token.
GLM_4_7 = (
    "{% for m in messages %}{% if m.role != 'assistant' %}<|{{ m.role }}|>{{ m.content }}{% else %}<|assistant|>"
    "{% if '</think>' in m.content %}<think>{{ m.content.split('</think>')[0].split('<think>')[-1].strip() }}</think>"
    "{% else %}</think>{% endif %}{{ m.content.split('</think>')[-1].strip() }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{{ '</think>' if enable_thinking is defined and not enable_thinking else '<think>' }}"
    "{% endif %}"
)
MISTRAL_NEMO = (
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set rest = messages[1:] %}"
    "{% else %}{% set rest = messages %}{% endif %}{{ bos_token }}{% for m in rest %}{% if m.role == 'user' %}"
    "[INST]{% if loop.last and system is defined %}{{ system + '\n\n' }}{% endif %}{{ m.content }}[/INST]"
    "{% else %}{{ m.content + eos_token }}{% endif %}{% endfor %}"
)
"The system prompt is printed before the last message only, and there is no generation prompt."
REWRITING = {
    "deepseek_r1": DEEPSEEK_R1, "qwen_3": QWEN_3, "phi_3": PHI_3, "gpt_oss": GPT_OSS,
    "mistral_v3": MISTRAL,
}  # fmt: skip
TEMPLATES = {
    "chatml": CHATML, "no_system": NO_SYSTEM, "forgets": FORGETS, "llama_2": LLAMA_2,
    "llama_3": LLAMA_3, "last_opens": LAST_OPENS, "dated": DATED, "generation": GENERATION,
}  # fmt: skip


def write_letter_tokenizer(folder: Path, **changes: Any) -> Tokenizer:
    """Write a tokenizer with one token per character, <s> as BOS and </s> as EOS.

    Args:
        changes: fields of the returned Tokenizer.
    """
    from tokenizers import AddedToken, Regex, models, pre_tokenizers
    from tokenizers import Tokenizer as Model

    vocabulary = {chr(code): code for code in (10, *range(32, 127))}
    vocabulary |= {token: i for i, token in enumerate(SPECIALS)}
    model = Model(models.BPE(vocabulary, []))
    model.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    model.add_special_tokens([AddedToken(token, special=True) for token in SPECIALS])
    model.save(str(folder / "tokenizer.json"))
    snapshot: dict[str, Any] = {
        "name": "letters", "path": str(folder / "tokenizer.json"), "hash": "0",
        "class_name": "PreTrainedTokenizerFast", "vocab_size": 127, "bos_id": BOS, "eos_id": EOS,
        "pad_id": None, "padding_side": "right", "prefix_ids": [], "suffix_ids": [],
        "special_tokens": SPECIALS, "special_ids": [BOS, EOS, START, END], "chat_template": None,
        "template_variables": {"bos_token": "<s>", "eos_token": "</s>"},
    }  # fmt: skip
    return Tokenizer(**snapshot | changes)


STYLES: dict[str, dict[str, Any]] = {
    "plain": {"chat_template": CHATML}, "adds_bos": {"single": "<s> $A", "chat_template": LLAMA_3},
    "adds_both": {"single": "<s> $A </s>", "chat_template": LLAMA_2},
    "adds_eos": {"single": "$A </s>", "chat_template": LAST_OPENS}, "no_template": {},
    "no_system": {"chat_template": NO_SYSTEM}, "forgets": {"chat_template": FORGETS},
    "dated": {"chat_template": DATED},
    "metaspace": {"single": "<s> $A", "is_metaspace": True, "chat_template": GENERATION},
}  # fmt: skip


def train_style(folder: Path, style: str, chat_template: str | None = None) -> Path:
    """Write a tokenizer of 1,000 tokens in this style, with its template or another one. It is
    trained on the standard library's docstrings, and AutoTokenizer loads it.
    """
    from tokenizers import decoders, pre_tokenizers, processors

    settings = STYLES[style]
    split = None
    if settings.get("is_metaspace"):
        split = pre_tokenizers.Metaspace(prepend_scheme="first"), decoders.Metaspace()
    specials = [*SPECIALS, "<pad>"]
    model = train_bpe((d["text"] for d in docstrings(300)), 1000, specials, split)
    single = settings.get("single")
    if single:
        model.post_processor = processors.TemplateProcessing(
            single=single, special_tokens=[("<s>", BOS), ("</s>", EOS)]
        )
    folder.mkdir(parents=True, exist_ok=True)
    model.save(str(folder / "tokenizer.json"))
    template = chat_template or settings.get("chat_template")
    named = {} if template is None else {"chat_template": template}
    named |= {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    write_config(folder, specials, **named)
    return folder


IGNORED_BOS = {
    "tokenizer_class": "LlamaTokenizerFast",
    "bos_token": "<|im_start|>",
    "add_bos_token": True,
}
"Keys of a tokenizer_config.json with which transformers 4 adds BOS to a text, and 5 does not."


def copy_with_config(tokenizer: Path, folder: Path, **changes: Any) -> Path:
    """Copy a tokenizer's folder, and change keys of its tokenizer_config.json. Return the copy."""
    shutil.copytree(tokenizer, folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


def add_tokens(
    plain: Path,
    folder: Path,
    template: str,
    special: Sequence[str] = (),
    ordinary: Sequence[str] = (),
    stops: Any = None,
    **config: Any,
) -> Path:
    """Copy the tokenizer of the folder `plain`, with more tokens and another template.

    Args:
        ordinary: added tokens that are not special, as `<think>` is for most models.
        stops: the tokens of `eos_token_id` in its generation_config.json: a list, or one; None: no
            file.
        config: keys of its tokenizer_config.json.
    """
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Model

    shutil.copytree(plain, folder)
    model = Model.from_file(str(folder / "tokenizer.json"))
    model.add_special_tokens([AddedToken(token, special=True) for token in special])
    model.add_tokens([AddedToken(token, special=False) for token in ordinary])
    model.save(str(folder / "tokenizer.json"))
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text()) | {"chat_template": template} | config
    settings["added_tokens_decoder"] |= {
        str(model.token_to_id(token)): {"content": token, "special": token in special}
        for token in (*special, *ordinary)
    }
    path.write_text(json.dumps(settings))
    if stops is not None:
        if isinstance(stops, str):
            stop_ids: Any = model.token_to_id(stops)
        else:
            stop_ids = [model.token_to_id(token) for token in stops]
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stop_ids}))
    return folder


COLUMNS = {"turns": ("turns",), "pair": ("input_ids", "labels"), "rows": ("tokens",)}
USUAL_SETTINGS: dict[str, Any] = {
    "kind": "finetuning", "loader": "finetuning", "max_seq_len": 100, "decoder_only_format": True,
    "target_prompts": "none", "target_responses": "last", "special_tokens_in_text": "escape",
}  # fmt: skip
"Settings of an encoding, without its columns."


def to_lists(ragged: Ragged) -> list[list[int]]:
    return [row.tolist() for row in ragged]


def to_ids(text: str) -> list[int]:
    return [*map(ord, text)]


def make_dialogue(*texts: str) -> list[dict[str, Any]]:
    """Return messages of a user and an assistant in turn."""
    roles = cycle(("user", "assistant"))
    return [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]


def open_kind(kind: type[Kind], tokenizer: Tokenizer, changes: Any = None, **settings: Any) -> Any:
    """Return a kind of stream that encodes with a tokenizer.

    Args:
        changes: fields of the tokenizer.
        settings: of the encoding. `columns` is a key of COLUMNS, by default that of the kind.
            `backend` is the reference by default.
    """
    usual_columns = {"conversations": "turns", "pairs": "pair", "pretraining": "rows"}[kind.name]
    columns = settings.pop("columns", "") or usual_columns
    changed = replace(tokenizer, **changes or {})
    backend = settings.pop("backend", None) or Reference(changed)
    own_settings = {"kind": kind.word, "columns": dict.fromkeys(COLUMNS[columns], "")}
    return kind(Encoding(**USUAL_SETTINGS | own_settings | settings)).open(changed, backend)


def open_chats(
    tokenizer: Tokenizer, template: Any = None, variables: Any = (), **settings: Any
) -> Any:
    """Return the kind of conversations with a chat template."""
    changes = {"chat_template": template, "template_variables": dict(variables)}
    return open_kind(Conversations, tokenizer, changes, **{"date_string": "2026-01-01"} | settings)
