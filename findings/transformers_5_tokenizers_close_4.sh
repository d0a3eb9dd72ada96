#!/usr/bin/env bash
# Surprise: a tokenizer that transformers 5 saved, of any PreTrainedTokenizerFast, cannot be opened by transformers 4,
#   which says that the class TokenizersBackend does not exist. Its tokenizer.json is unchanged: opened by
#   PreTrainedTokenizerFast it gives the same ids.
# Likely guess: a tokenizer folder is the same for both, since tokenizer.json is a format of its own.
# Why it matters: LLM-Foundry and Streaming pin transformers 4, so a tokenizer of 2026 looks broken there, and its user
#   looks for a fault in files that are sound.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
for release in 5.24.0 4.57.6; do
    python3 -m venv "$folder/$release"
    "$folder/$release/bin/pip" install --quiet "transformers==$release"
done
cat > "$folder/save.py" <<'PY'
import sys
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

model = Tokenizer(models.WordLevel({"<unk>": 0, "</s>": 1, "one": 2, "two": 3}, unk_token="<unk>"))
model.pre_tokenizer = pre_tokenizers.Whitespace()
made = transformers.PreTrainedTokenizerFast(tokenizer_object=model, eos_token="</s>", unk_token="<unk>")
made.save_pretrained(sys.argv[1])
print("transformers", transformers.__version__, "saves; ids of 'one two':", made("one two")["input_ids"])
PY
cat > "$folder/open.py" <<'PY'
import sys
import transformers

try:
    transformers.AutoTokenizer.from_pretrained(sys.argv[1])
except ValueError as error:
    said = str(error)
else:
    sys.exit("it opens now")
print("transformers", transformers.__version__, "AutoTokenizer:", said)
assert "TokenizersBackend" in said, said
plain = transformers.PreTrainedTokenizerFast(tokenizer_file=f"{sys.argv[1]}/tokenizer.json")
ids = plain("one two")["input_ids"]
print("PreTrainedTokenizerFast on its tokenizer.json: ids", ids)
assert ids == [2, 3], ids
PY
"$folder/5.24.0/bin/python" "$folder/save.py" "$folder/saved"
"$folder/4.57.6/bin/python" "$folder/open.py" "$folder/saved"
