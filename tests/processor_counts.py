"""What the installed transformers makes of images of nine sizes, by the processors in some folders (tests/processors.py, saved).

`PYTHONPATH=. PYTHON -m tests.processor_counts FOLDER...` prints a line each, the same under every version: the tokens of each size as the
processor makes them, and the processor's hash. What may differ is said on stderr: whether its own function told them.
"""

import sys

from mdsmix.encode.loaded_processor import LoadedProcessor

SIZES = (
    (30, 40),
    (56, 56),
    (57, 333),
    (84, 112),
    (200, 120),
    (100, 100),
    (224, 224),
    (500, 37),
    (640, 480),
)


def main() -> None:
    for folder in sys.argv[1:]:
        seeing = LoadedProcessor(folder)
        learned = [seeing.learned(size) for size in SIZES]
        assert [seeing.count(size) for size in SIZES] == learned
        card = seeing.card()
        print(card["class_name"], seeing.token, *learned, card["hash"][:8], flush=True)
        print(f"  by {'function' if seeing.has_function else 'learning'}", file=sys.stderr)


if __name__ == "__main__":
    main()
