"""Recognises texts that a chat template has printed, as other tools store conversations. Without
`special_tokens_in_text: allow` their control tokens, such as `<|im_start|>`, become plain text.
"""

from __future__ import annotations

from mdsmix.kinds.kind import Kind

MANY = 0.5
"The share of records with control tokens from which on their texts are probably printed."
PRINTED_BY_TEMPLATE = (
    "if a chat template has printed these texts, or if they end in EOS, set "
    "special_tokens_in_text: allow for the run, or <|im_start|> and the like are trained as plain "
    "text"
)
"What to do with such texts."


def is_printed_by_template(kind: Kind, with_specials: int, records: int) -> bool:
    """Check whether the texts of a stream are probably printed by a chat template, and their
    control tokens are encoded as plain text.

    Args:
        kind: the kind of the stream.
        with_specials: records whose text contains the string of a special token.
        records: all records.
    """
    escapes = kind.encoding.special_tokens_in_text == "escape"
    return escapes and not kind.has_template and with_specials > MANY * records
