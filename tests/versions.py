"""Which libraries run the tests: `make test-today` has transformers 5, the other targets have 4."""

from __future__ import annotations

from importlib import metadata

IS_TRANSFORMERS_4 = metadata.version("transformers").startswith("4.")
