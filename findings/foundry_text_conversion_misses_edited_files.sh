#!/usr/bin/env bash
# Surprise: LLM-Foundry's `data_prep convert_text_to_mds`, run again after a text file was edited, converts nothing and ends
#   well ("is already processed"). It compares its arguments and the names of the files, not their sizes or times.
# Likely guess: as its docstring says, it does "only reprocess upon changes to the input folder".
# Why it matters: a corpus that is cleaned in place, with the same names, is trained as it was before.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet uv
"$folder/env/bin/uv" pip install --quiet --python "$folder/env" \
    'llm-foundry==0.22.0' 'setuptools<81'
cd "$folder"
export HOME="$folder" HF_HUB_OFFLINE=1
env/bin/python - 2>/dev/null <<'PY'
from importlib.metadata import version
from pathlib import Path

from llmfoundry.command_utils import convert_text_to_mds_from_args
from streaming import StreamingDataset
from streaming.base.util import clean_stale_shared_memory
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

print("llm-foundry", version("llm-foundry"))
words = ["old", "new", "</s>"]
model = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, "</s>"))
model.pre_tokenizer = pre_tokenizers.Whitespace()
PreTrainedTokenizerFast(tokenizer_object=model, eos_token="</s>").save_pretrained("tokenizer")
Path("texts").mkdir()


def convert(word):
    """Write a text of 64 times this word, convert the folder, and return the words of a row."""
    Path("texts/a.txt").write_text(f"{word} " * 64)
    convert_text_to_mds_from_args(
        output_folder="stream",
        input_folder="texts",
        compression=None,
        concat_tokens=16,
        tokenizer_name="tokenizer",
        bos_text=None,
        eos_text=None,
        use_tokenizer_eos=False,
        no_wrap=False,
        processes=1,
        reprocess=False,
        trust_remote_code=False,
        logging_level="INFO",
    )
    clean_stale_shared_memory()
    row = StreamingDataset(local="stream", batch_size=1)[0]
    return {words[token] for token in row["tokens"]}


for word in ("old", "new"):
    converted = convert(word)
    print(f"the file has {word!r}, the stream has {converted}")
    assert converted == {"old"}
PY
