#!/usr/bin/env bash
# Surprise: with TRL's assistant_only_loss=True, tokens of the generation prompt are trained too for the templates of Qwen 2.5,
#   Qwen 3.5, Nemotron 3, DeepSeek V3 and gpt-oss: "\n", `<think>\n`, `<｜Assistant｜>`, `<|start|>assistant`. TRL's own
#   versions of these templates open `{% generation %}` before them. For Llama 3, Phi-3 and Gemma none of them is trained.
# Likely guess: the loss is on what the model writes, so it begins after the text that `add_generation_prompt=True` prints.
# Why it matters: the model never writes these tokens at inference, and learns them within a few steps. Each answer brings one
#   or two of them into the mean loss, which falls most for short answers: losses of two families or two trainers do not compare.
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
from os.path import commonprefix
from pathlib import Path

import trl
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

print(*(f"{name} {version(name)}" for name in ("trl", "transformers", "torch")))
TRAINED = {
    "qwen2_5": "\n",
    "qwen3_5_think": "<think>\n",
    "nemotron_3_nano": "<think>\n",
    "deepseekv3": "<｜Assistant｜>",
    "gptoss": "<|start|>assistant",
    "llama3": "",
    "phi3": "",
    "gemma": "",
}
"Family -> the part of its generation prompt that is trained."
# One token for each byte.
vocabulary = {letter: number for number, letter in enumerate(pre_tokenizers.ByteLevel.alphabet())}
model = Tokenizer(models.BPE(vocabulary, []))
model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
model.decoder = decoders.ByteLevel()
model.add_special_tokens(["<bos>", "<eos>"])
templates = Path(trl.__file__).with_name("chat_templates")
messages = [
    {"role": "user", "content": "How many?"},
    {"role": "assistant", "content": "Four.", "reasoning_content": "Two and two."},
]


def train_row(family):
    """Return the text of the generation prompt that the row has too, and its trained part."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=model, bos_token="<bos>", eos_token="<eos>", pad_token="<eos>"
    )
    # The model's own template, as TRL ships it to recognize it.
    tokenizer.chat_template = (templates / f"{family}.jinja").read_text()
    prompt = tokenizer.apply_chat_template(
        messages[:1], add_generation_prompt=True, tokenize=True, return_dict=False
    )
    config = GPT2Config(vocab_size=len(tokenizer), n_positions=64, n_embd=8, n_layer=1, n_head=2)
    arguments = SFTConfig(
        sys.argv[1], assistant_only_loss=True, max_length=None, use_cpu=True, bf16=False,
        report_to=[],
    )  # fmt: skip
    trainer = SFTTrainer(
        GPT2LMHeadModel(config),
        args=arguments,
        train_dataset=Dataset.from_list([{"messages": messages}] * 2),
        processing_class=tokenizer,
    )
    batch = trainer.data_collator([trainer.train_dataset[0]])
    ids, labels = batch["input_ids"][0].tolist(), batch["labels"][0].tolist()
    shared = commonprefix([prompt, ids])
    trained = [token for token in labels[: len(shared)] if token != -100]
    answer = [token for token in labels if token != -100]
    assert "Four." in tokenizer.decode(answer)
    return tokenizer.decode(shared), tokenizer.decode(trained)


for family, expected in TRAINED.items():
    shared, trained = train_row(family)
    print(f"{family}: of {shared[-40:]!r} trained: {trained!r}")
    assert trained == expected
print("as found: a part of the generation prompt is trained")
PY
