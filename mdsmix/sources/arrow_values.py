"""Decodes values that Arrow and parquet store in another way than JSON Lines: strings of JSON in
columns of the type `arrow.json`, and maps. Both may be at any depth of a column.

A map whose keys are strings or whole numbers becomes an object, as DuckDB writes it to JSON. A map
with other keys stays a list of pairs.

A string of JSON is recognised by one of three signs: the column's type; the field's metadata, if
the release of pyarrow does not know the type; in parquet, the logical type JSON of a leaf (a column
without inner columns). The leaves of an Arrow schema have the same order as parquet's columns, so a
leaf is identified by its number.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from itertools import count
from typing import TYPE_CHECKING, Any

from mdsmix.json_values import read_json
from mdsmix.record import NoRecord, RecordRefused
from mdsmix.sources.jsonl import find_line_reason

if TYPE_CHECKING:
    import pyarrow as pa

JSON = "arrow.json"
MAP_REASONS = {"duplicate_key": "A map of parquet or Arrow has one key twice."}
_NAME_KEY = b"ARROW:extension:name"
_OWN_REASONS = ("lone_surrogate", "too_deep", "unreadable_value")
"""Reason codes of a line of JSON that are also used for a string of JSON in a column. Any other
fault of such a string is `not_json`.
"""

Decode = Callable[[Any], Any]
"""A value as pyarrow returns it -> the value as JSON Lines would have it. Raises RecordRefused for
a value that JSON Lines cannot have.
"""


def make_decoders(schema: pa.Schema, json_leaves: Container[int] = ()) -> dict[str, Decode]:
    """Return column -> decoder of its values, for the columns with JSON strings or maps; {} for
    most files.

    Args:
        schema: the schema of all columns of the file.
        json_leaves: the numbers of the leaves (columns without inner columns) that have parquet's
            logical type JSON.
    """
    # For each leaf of the file in order, whether it is JSON. `_make_decoder` takes from these.
    leaves = (number in json_leaves for number in count())
    decoders = dict[str, Decode]()
    for field in schema:
        decode = _make_decoder(field, leaves)
        if decode:
            decoders[field.name] = decode
    return decoders


def decode_record(record: dict[str, Any], decoders: dict[str, Decode]) -> dict[str, Any]:
    """Return a copy of the record with the values of some columns decoded.

    Args:
        decoders: column -> decoder of its values, for the columns to decode.

    Raises RecordRefused if a value cannot be decoded. The error's detail names the column.
    """
    decoded = dict(record)
    for name, decode in decoders.items():
        if name not in record:
            continue
        try:
            decoded[name] = decode(record[name])
        except RecordRefused as error:
            # The reason code, with the column added to its detail.
            error.why = NoRecord(error.why, column=name, **error.why.detail)
            raise
    return decoded


def _make_decoder(field: pa.Field, leaves: Iterator[bool]) -> Decode | None:
    """Return the decoder of a field's values; None if the values need no decoding.

    Args:
        leaves: yields for each leaf (a column without inner columns), from this field on, whether
            the leaf is JSON. One value is taken for each leaf of the field.
    """
    import pyarrow as pa

    kind, types = field.type, pa.types
    if isinstance(kind, pa.BaseExtensionType):
        metadata = {_NAME_KEY: kind.extension_name.encode()}
        return _make_decoder(pa.field(field.name, kind.storage_type, metadata=metadata), leaves)
    if types.is_dictionary(kind) or types.is_run_end_encoded(kind):
        return _make_decoder(field.with_type(kind.value_type), leaves)
    if types.is_struct(kind):  # decode every member, so that its leaves are taken
        inner = {member.name: _make_decoder(member, leaves) for member in kind}
        return _make_struct_decoder({name: decode for name, decode in inner.items() if decode})
    if types.is_map(kind):
        _make_decoder(kind.key_field, leaves)  # only takes the leaves of the keys
        return _map_decoder(kind.key_type, _make_decoder(kind.item_field, leaves))
    if hasattr(kind, "value_field"):  # a list of any sort
        return _list_decoder(_make_decoder(kind.value_field, leaves))
    if types.is_union(kind):  # a Python value does not show which of the union's types it has
        return None
    is_marked = (field.metadata or {}).get(_NAME_KEY) == JSON.encode()
    return _decode_json if next(leaves) or is_marked else None


def _decode_json(text: Any) -> Any:
    """Return the value of a JSON string; None for None.

    Raises RecordRefused with a reason code if the string cannot be read.
    """
    if text is None:
        return None
    try:
        return read_json(text)
    except (ValueError, RecursionError) as error:
        raw = text.encode() if isinstance(text, str) else bytes(text)
        reason = find_line_reason(raw, error)
        # The other reasons of `find_line_reason` are about a line of a file, not about one value.
        raise RecordRefused(reason if reason in _OWN_REASONS else "not_json") from None


def _make_struct_decoder(inner: dict[str, Decode]) -> Decode | None:
    """Return the decoder of a struct; None if none of its members needs decoding.

    Args:
        inner: name of a member -> decoder of its values, for the members that need decoding.
    """
    if not inner:
        return None

    def decode(struct: Any) -> Any:
        if struct is None:
            return None
        decoded = {name: decode_member(struct[name]) for name, decode_member in inner.items()}
        return struct | decoded

    return decode


def _list_decoder(inner: Decode | None) -> Decode | None:
    """Return the decoder of a list; None if its elements need no decoding.

    Args:
        inner: the decoder of an element; None if elements need no decoding.
    """
    if inner is None:
        return None

    def decode(values: Any) -> Any:
        if values is None:
            return None
        return [inner(value) for value in values]

    return decode


def _map_decoder(keys: pa.DataType, inner: Decode | None) -> Decode:
    """Return the decoder of a map.

    pyarrow returns a map as a list of pairs (key, value). The decoder returns the map as an
    object (a dict) if the keys are strings or integers; otherwise it returns a list of pairs.

    Args:
        keys: the type of the keys.
        inner: the decoder of the map's values; None if the values need no decoding.
    """
    import pyarrow as pa

    kind = keys.value_type if pa.types.is_dictionary(keys) else keys
    has_text_keys = str(kind) in ("string", "large_string", "string_view")
    is_object = has_text_keys or pa.types.is_integer(kind)

    def decode(pairs: Any) -> Any:
        """Return the pairs (key, value) of one map, with `inner` applied to the values: an object
        if `is_object`, otherwise a list.

        Raises RecordRefused if a key of an object is repeated.
        """
        if pairs is None:
            return None
        if inner:
            pairs = [(key, inner(value)) for key, value in pairs]
        if not is_object:
            return pairs
        # A key that is repeated has overwritten an earlier value, so there are fewer values.
        values = {str(key): value for key, value in pairs}
        if len(values) < len(pairs):
            raise RecordRefused("duplicate_key")
        return values

    return decode
