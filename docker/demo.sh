#!/bin/sh
# The demo's mix published to a store and streamed from it: demo.sh s3://BUCKET/PREFIX
set -eu

python -m tests.corpus demo
{ echo "remote: $1"; cat yamls/demo.yaml; } > yamls/demo-s3.yaml
mdsmix convert yamls/demo-s3.yaml
mdsmix check yamls/demo-s3.yaml
mdsmix render-yaml yamls/demo-s3.yaml -o demo/train.yaml
mdsmix inspect "$1/chat"
python - <<'END'
from mdsmix.load import build_loader

batch = next(iter(build_loader("demo/train.yaml", batch_size=8)))
print({name: tuple(tensor.shape) for name, tensor in batch.items()})
END
