#!/usr/bin/env bash
# Surprise: transformers 5 does not read `add_bos_token` and `add_eos_token` of tokenizer_config.json if the folder has a
#   tokenizer.json, and saves the folder without them. As arguments of from_pretrained both work. transformers 4 obeys the
#   file under LlamaTokenizerFast, and ignores both, in the file and as arguments, under PreTrainedTokenizerFast.
# Likely guess: the same folder gives the same ids in both releases; an argument and the key of its name in the file are
#   the same setting.
# Why it matters: DeepSeek V3's tokenizer.json has no BOS, its config says `add_bos_token: true`, and its class is
#   LlamaTokenizerFast. Under 5 its texts lose the BOS that the model was trained with, without a message. Whoever tries
#   the argument under 4 sees no BOS, and the same line adds one under 5.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/tools"
"$folder/tools/bin/pip" install --quiet uv
cat > "$folder/read.py" <<'PY'
import json
import sys
from pathlib import Path

import transformers
from tokenizers import Tokenizer, models, processors

release = transformers.__version__.partition(".")[0]
print("transformers", transformers.__version__)


def tokens(name, in_file, **arguments):
    """Return the tokens of a text by a tokenizer of this class."""
    folder = Path(sys.argv[1], f"{release}-{name}-{len(in_file)}")
    folder.mkdir(exist_ok=True)
    model = Tokenizer(models.BPE({"a": 0, "b": 1, "<s>": 2, "</s>": 3}, []))
    model.add_special_tokens(["<s>", "</s>"])
    model.post_processor = processors.ByteLevel(trim_offsets=False)
    model.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": name, "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config | in_file))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **arguments)
    made = tokenizer.convert_ids_to_tokens(tokenizer("ab")["input_ids"])
    print(f"  {name}, in the file {in_file}, as arguments {arguments}: {' '.join(made)}")
    return made


both = {"add_bos_token": True, "add_eos_token": True}
plain, marked = ["a", "b"], ["<s>", "a", "b", "</s>"]
llama, general = "LlamaTokenizerFast", "PreTrainedTokenizerFast"
found = [
    tokens(llama, both),
    tokens(llama, {"add_bos_token": False}, **both),
    tokens(general, both),
    tokens(general, {}, **both),
]
wanted = {"4": [marked, marked, plain, plain], "5": [plain, marked, plain, marked]}
assert found == wanted[release], found
PY
for release in 4.57.6 5.24.0; do
    "$folder/tools/bin/uv" venv --quiet "$folder/$release"
    "$folder/tools/bin/uv" pip install --quiet --python "$folder/$release" "transformers==$release"
    HF_HUB_OFFLINE=1 "$folder/$release/bin/python" "$folder/read.py" "$folder" 2>/dev/null
done
echo "as found: the file decides under 4 and the class, the argument under 5"
