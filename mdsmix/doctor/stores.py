"""Where requests to buckets go, and as whom."""

from __future__ import annotations

from collections.abc import Iterator

from mdsmix.doctor.diagnosis import Diagnosis, ok, problem
from mdsmix.errors import MdsmixError
from mdsmix.recipe import Recipe


def stores(recipe: Recipe) -> Iterator[Diagnosis]:
    """Endpoint and credentials, where the recipe names a bucket at all. Without credentials all that lies in one would fail of the
    same, so it is said once."""
    named = [recipe.remote or "", *(str(s.remote or "") for s in recipe.streams.values())]
    named += [path for s in recipe.sourced if s.source for path in s.source.path]
    if not any(name.startswith("s3://") for name in named):
        return
    from mdsmix.storage.s3_client import credentials_from
    from mdsmix.storage.s3_errors import shown_endpoint

    try:
        yield ok("store", f"endpoint {shown_endpoint()}, credentials from {credentials_from()}")
    except MdsmixError as error:
        yield problem("store", f"{error}; nothing that lies in a bucket was looked at")
