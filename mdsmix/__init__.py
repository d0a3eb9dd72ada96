"""From raw pretraining and finetuning data to a checked mix of MDS streams and the Foundry YAML
that trains on it.

The package itself imports nothing: each command loads only the packages that it needs, so that
`mdsmix --help` stays fast.
"""

from __future__ import annotations

__version__ = "0.1.0"
