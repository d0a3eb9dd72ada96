#!/usr/bin/env bash
# Surprise: torchtune's tokenizers of Llama 2, Mistral and Gemma do not only cut a conversation at max_seq_len: they write EOS
#   over the last token that is kept, and if that is in an answer, EOS is trained there.
# Likely guess: the tokens after max_seq_len are missing, and all others are as without it.
# Why it matters: a model that is trained on long answers learns to stop in the middle of a sentence. LLM-Foundry and TRL
#   write no EOS at the cut.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet uv
"$folder/env/bin/uv" pip install --quiet --python "$folder/env" \
    'torchtune==0.6.1' 'torchao==0.10.0' 'torch==2.7.0' 'sentencepiece==0.2.0'
HOME="$folder" "$folder/env/bin/python" - "$folder" 2>/dev/null <<'PY'
import sys
from importlib.metadata import version
from pathlib import Path

import sentencepiece
from torchtune.data import Message
from torchtune.models.gemma import GemmaTokenizer
from torchtune.models.llama2 import Llama2Tokenizer
from torchtune.models.mistral import MistralTokenizer

print("torchtune", version("torchtune"))
folder = Path(sys.argv[1])
words = "Where is Oslo ? It is in Norway , near Sweden .".split()
text = folder / "words.txt"
text.write_text("\n".join([" ".join(words)] * 20))
sentencepiece.SentencePieceTrainer.train(
    input=str(text), model_prefix=str(folder / "spm"), model_type="word", vocab_size=len({*words}) + 3,
    hard_vocab_limit=False, minloglevel=2,
)  # fmt: skip
messages = [
    Message("user", "Where is Oslo ?", masked=True),
    Message("assistant", "It is in Norway , near Sweden ."),
]


for Tokenizer in (Llama2Tokenizer, MistralTokenizer, GemmaTokenizer):
    trained = {}
    for length in (None, 100, 9):
        tokenizer = Tokenizer(str(folder / "spm.model"), max_seq_len=length)
        tokens, mask = tokenizer.tokenize_messages(messages)
        kept = [token for token, masked in zip(tokens, mask, strict=True) if not masked]
        trained[length] = [tokenizer._spm_model.spm_model.id_to_piece(token) for token in kept]
        print(f"{Tokenizer.__name__}, max_seq_len {length}: trained {trained[length]}")
    whole, cut = trained[None], trained[9]
    assert whole == trained[100]
    assert len(cut) < len(whole)
    assert cut == [*whole[: len(cut) - 1], "</s>"]
PY
