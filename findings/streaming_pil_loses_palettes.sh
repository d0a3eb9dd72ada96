#!/usr/bin/env bash
# Surprise: the MDS encoding `pil` stores the pixels of an image without its palette. A GIF, or a PNG with few colours, comes
#   back in mode P with another palette, so it has other colours. MDSWriter and StreamingDataset report nothing.
# Likely guess: `pil` keeps an image as PIL has it (its mode, size and pixels), only without compression.
# Why it matters: charts, screenshots and icons are often such images. The encoding `png` keeps them.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet uv
"$folder/env/bin/uv" pip install --quiet --python "$folder/env" 'mosaicml-streaming==0.13.0' 'pillow==12.3.0'
HOME="$folder" "$folder/env/bin/python" - "$folder" 2>/dev/null <<'PY'
import io
import sys
from importlib.metadata import version
from pathlib import Path

from PIL import Image
from streaming import MDSWriter, StreamingDataset

print(*(f"{name} {version(name)}" for name in ("mosaicml-streaming", "pillow")))
RED, BLUE = (255, 0, 0), (0, 0, 255)
drawn = Image.new("RGB", (2, 1), RED)
drawn.putpixel((1, 0), BLUE)
file = io.BytesIO()
drawn.save(file, "GIF")
opened = Image.open(file)
stream = Path(sys.argv[1], "stream")
with MDSWriter(out=str(stream), columns={"pil": "pil", "png": "png"}) as writer:
    writer.write({"pil": opened, "png": opened})
row = StreamingDataset(local=str(stream), batch_size=1)[0]
images = {"the GIF": opened, **row}
colours = {}
for name, image in images.items():
    pixels = image.convert("RGB")
    colours[name] = [pixels.getpixel((x, 0)) for x in range(2)]
    print(f"{name}: mode {image.mode}, colours {colours[name]}")
assert row["pil"].mode == opened.mode == "P"
assert colours["the GIF"] == colours["png"] == [RED, BLUE]
assert colours["pil"] != [RED, BLUE]
PY
