"""The rules by which chat templates make rows, and their versions.

A rule is raised when the text or the labels of a conversation change for the tokenizers and
settings that it concerns. All other streams keep their rows.
"""

from collections.abc import Callable
from typing import NamedTuple

from mdsmix.encode.pretrained import Tokenizer
from mdsmix.shards.manifest import Encoding


class TemplateRule(NamedTuple):
    """The version of a rule, and the streams whose rows follow from it."""

    version: int
    concerns: Callable[[Encoding, Tokenizer], bool]
    "Whether it shapes a stream with a chat template."


def _is_any(encoding: Encoding, tokenizer: Tokenizer) -> bool:
    return True


def _rewrites_history(encoding: Encoding, tokenizer: Tokenizer) -> bool:
    return encoding.rewritten_history != "reject"


def _may_have_tools(encoding: Encoding, tokenizer: Tokenizer) -> bool:
    return "tools" in encoding.fields or encoding.shape is not None


TEMPLATE_RULES = {
    "template.rendering": TemplateRule(1, _is_any),
    "template.rewritten_history": TemplateRule(1, _rewrites_history),
    "template.tools": TemplateRule(1, _may_have_tools),
}
"A rule that is narrower than these, for example for one sort of template, is one more line."


def raised_template_rules(encoding: Encoding, tokenizer: Tokenizer | None) -> dict[str, int]:
    """Return the rules above version 1 that shape a stream with a chat template: name -> version.

    Args:
        encoding: that of the stream.
        tokenizer: None if it is not at hand; then rules that may concern it count too.
    """
    return {
        name: rule.version
        for name, rule in TEMPLATE_RULES.items()
        if rule.version > 1 and (tokenizer is None or rule.concerns(encoding, tokenizer))
    }
