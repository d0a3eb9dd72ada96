#!/usr/bin/env bash
# Surprise: TRL's DPOTrainer counts the result of a tool as a part of the model's answer. If an answer has several
#   messages (a call, its result, a final answer), its completion mask is 1 at every token after the prompt, and the
#   loss rewards or punishes the model for text that a tool wrote. Nothing warns.
# Likely guess: only the assistant's messages count, since TRL takes `tools` and messages of the role `tool` in an
#   answer, and SFTTrainer can leave such messages out (`assistant_only_loss`). DPOConfig has no such key.
# Why it matters: a chosen answer that looks something up, against a rejected answer that does not, is the usual form
#   of preferences for agents. Their loss then depends on how long the results of the tools are.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet \
    'trl==1.16.0' 'transformers==5.24.0' 'torch==2.15.0' 'accelerate==1.15.0' 'datasets==5.2.0'
"$folder/env/bin/python" - "$folder/out" 2>/dev/null <<'PY'
import sys
from importlib.metadata import version

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer

print(*(f"{name} {version(name)}" for name in ("trl", "transformers", "torch")))
words = "<eos> user assistant tool Rain? lookup wet Yes No".split()
model = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, "<eos>"))
model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=model, eos_token="<eos>", pad_token="<eos>", unk_token="<eos>"
)
tokenizer.chat_template = (
    "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)
record = {
    "prompt": [{"role": "user", "content": "Rain?"}],
    "chosen": [
        {"role": "assistant", "content": "lookup"},
        {"role": "tool", "content": "wet wet wet"},
        {"role": "assistant", "content": "Yes"},
    ],
    "rejected": [{"role": "assistant", "content": "No"}],
}
config = GPT2Config(vocab_size=len(words), n_positions=16, n_embd=8, n_layer=1, n_head=2)
trainer = DPOTrainer(
    GPT2LMHeadModel(config),
    GPT2LMHeadModel(config),
    args=DPOConfig(sys.argv[1], use_cpu=True, report_to=[], bf16=False),
    train_dataset=Dataset.from_list([record] * 2),
    processing_class=tokenizer,
)
batch = trainer.data_collator([trainer.train_dataset[0]])
ids, mask = batch["input_ids"][0], batch["completion_mask"][0].bool()
counted = tokenizer.decode(ids[mask]).split()
print("the loss counts:", *counted)
assert counted.count("wet") == 3
assert not any("assistant_only" in name for name in vars(trainer.args))
print("as found: three tokens that the tool wrote are counted as the model's")
PY
