"""Here torch is wanted."""

from __future__ import annotations

import os

from mdsmix.encode.snapshot import WITHOUT

for name in WITHOUT:
    os.environ.pop(name, None)
