#!/usr/bin/env bash
# Surprise: TRL's assistant_only_loss=True does not only mask tokens: for the chat templates of Qwen3, Qwen3.5 and Qwen3.6 it
#   changes the row. Each earlier answer of a conversation gets an empty thought (`<think>\n\n</think>\n\n`), or keeps the
#   reasoning that the model's own template drops, and these tokens are trained too. Nothing is logged.
# Likely guess: it decides which tokens have a label, and input_ids are those of the tokenizer's chat template. (TRL puts
#   a template of its own in the place of the tokenizer's, and leaves the tokenizer's in the checkpoint.)
# Why it matters: at inference the saved template prints earlier answers without thoughts, so the model never sees the
#   history that it was trained on. Rows of two runs that differ in this one key cannot be compared.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet uv
"$folder/env/bin/uv" pip install --quiet --python "$folder/env" \
    'trl==1.16.0' 'transformers==5.24.0' 'torch==2.15.0' 'accelerate==1.15.0' 'datasets==5.2.0'
HF_HUB_OFFLINE=1 "$folder/env/bin/python" - "$folder/out" 2>/dev/null <<'PY'
import sys
from importlib.metadata import version
from pathlib import Path

import trl
from datasets import Dataset
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

print(*(f"{name} {version(name)}" for name in ("trl", "transformers", "torch")))
PIECES = r"<\|\w+\|>|</?think>|\w+|\n|[^\w\n]"
words = "<|im_start|> <|im_end|> <think> </think> user assistant One Two Three Four Because".split()
vocabulary = {word: number for number, word in enumerate([*words, "\n", "<unk>"])}
model = Tokenizer(models.WordLevel(vocabulary, "<unk>"))
model.pre_tokenizer = pre_tokenizers.Split(Regex(PIECES), "isolated")
# Qwen3's own template, as TRL ships it to recognize it.
template = Path(trl.__file__).with_name("chat_templates") / "qwen3.jinja"


def row(first_answer, assistant_only_loss):
    """Return the text of a row of two questions and answers, and its trained part."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=model, eos_token="<|im_end|>", pad_token="<|im_end|>", unk_token="<unk>"
    )
    tokenizer.chat_template = template.read_text()
    messages = [
        {"role": "user", "content": "One"},
        {"role": "assistant", "content": "Two", **first_answer},
        {"role": "user", "content": "Three"},
        {"role": "assistant", "content": "Four"},
    ]
    config = GPT2Config(vocab_size=len(vocabulary), n_positions=64, n_embd=8, n_layer=1, n_head=2)
    arguments = SFTConfig(
        sys.argv[1], assistant_only_loss=assistant_only_loss, use_cpu=True, bf16=False, report_to=[]
    )
    trainer = SFTTrainer(
        GPT2LMHeadModel(config),
        args=arguments,
        train_dataset=Dataset.from_list([{"messages": messages}] * 2),
        processing_class=tokenizer,
    )
    batch = trainer.data_collator([trainer.train_dataset[0]])
    assert trainer.processing_class.chat_template == template.read_text()
    names = {number: word for word, number in vocabulary.items()}
    ids, labels = batch["input_ids"][0].tolist(), batch["labels"][0].tolist()
    text = "".join(names[token] for token in ids)
    return text, "".join(names[token] for token in labels if token != -100)


for first_answer, thought in (({}, ""), ({"reasoning_content": "Because"}, "Because")):
    plain, _ = row(first_answer, assistant_only_loss=False)
    masked, trained = row(first_answer, assistant_only_loss=True)
    print("first answer", {"content": "Two", **first_answer})
    print("  all tokens:         ", repr(plain))
    print("  assistant_only_loss:", repr(masked))
    print("  of it trained:      ", repr(trained))
    assert "assistant\nTwo<|im_end|>" in plain
    first = f"<think>\n{thought}\n</think>\n\nTwo<|im_end|>"
    assert "assistant\n" + first in masked
    assert trained.startswith(first)
print("as found: assistant_only_loss=True adds thoughts to the history, and trains them")
PY
