"""The names of class labels. `datasets` writes a column of the type ClassLabel as numbers, and the
names of these numbers into the metadata of the parquet or Arrow file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import orjson

from mdsmix.errors import Unreachable
from mdsmix.sources.arrow import open_arrow
from mdsmix.sources.formats import format_of
from mdsmix.sources.units import SourceFile

_METADATA_KEY = b"huggingface"
"The key of a schema's metadata under which `datasets` writes the types of its columns."


def read_class_names(file: SourceFile) -> dict[str, Sequence[str]]:
    """Return column -> the names of its classes, from 0 on, for the columns of class labels. {} for
    a file that has none, that `datasets` has not written, or that cannot be read.
    """
    rule = format_of(file).rule
    if rule not in ("format.parquet", "format.arrow"):
        return {}
    names = dict[str, Sequence[str]]()
    for column, feature in _read_features(file, is_parquet=rule == "format.parquet").items():
        if isinstance(feature, dict) and feature.get("_type") == "ClassLabel":
            names[column] = [str(name) for name in feature.get("names") or ()]
    return names


def _read_features(file: SourceFile, is_parquet: bool) -> Mapping[str, Any]:
    """Return column -> its type as `datasets` describes it; {} if there is no description."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with suppress(Unreachable, pa.ArrowException, OSError, ValueError, KeyError, TypeError):
        if is_parquet:
            with file.open_random() as stored:
                schema = pq.read_schema(stored)
        else:
            with open_arrow(file, ()) as opened:
                schema = opened.reader.schema
        description = (schema.metadata or {})[_METADATA_KEY]
        features: Mapping[str, Any] = orjson.loads(description)["info"]["features"]
        return features
    return {}
