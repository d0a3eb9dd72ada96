"""One path type for local folders, S3-compatible stores, Google Cloud Storage, Azure Blob
Storage and the Hugging Face hub: `locate("s3://bucket/key")`.

Nothing else in mdsmix opens a file of a stream or of a source. Operations that a disk or a store
lacks (append, rename, lock) are not offered, so the same code works on both. Data sets of the hub
are only read. The packages of the stores take 0.2 s to 0.5 s to import, so they are
imported only at the first request to a bucket.
"""

from __future__ import annotations

from mdsmix.storage.location import (
    CHANGED,
    FoundFiles,
    Location,
    SkippedLink,
    Stat,
    cut_before_pattern,
    has_pattern,
)
from mdsmix.storage.threads import map_files, map_in_batches, map_threads
from mdsmix.storage.urls import (
    begins_like_url,
    find_key_terminator,
    find_store,
    import_stores,
    is_for_streaming_alone,
    is_url,
    locate,
    require_local,
    store_addresses,
)

__all__ = [
    "CHANGED",
    "FoundFiles",
    "Location",
    "SkippedLink",
    "Stat",
    "begins_like_url",
    "cut_before_pattern",
    "find_key_terminator",
    "find_store",
    "has_pattern",
    "import_stores",
    "is_for_streaming_alone",
    "is_url",
    "locate",
    "map_files",
    "map_in_batches",
    "map_threads",
    "require_local",
    "store_addresses",
]
