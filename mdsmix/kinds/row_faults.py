"""Finds records whose rows are probably damaged, and are trained as they are: a thought that is
never closed, one that the chat template leaves out, one in tags that it does not know, and
reasoning, calls, results or tools that the template prints twice, since the record has them both
under a key and in a text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

from mdsmix.encode.answer_parts import REASONING_KEYS, TAGGED_ANSWER, THINK, THINK_END
from mdsmix.encode.chat import ChatTemplate, PlainPart, find_trained_answers
from mdsmix.encode.forms import make_call_probe, make_tool_probe
from mdsmix.encode.printed_parts import prints_key
from mdsmix.encode.template_probes import QUESTION, render_probe
from mdsmix.frozen import frozen
from mdsmix.messages import plural
from mdsmix.record import SYSTEM_ROLES, Conversation, Message, RecordRefused

UNCLOSED = "<think> without </think>"
TWICE = "<think> next to a key for reasoning"
AS_ANSWER = "<think> that the template prints as answer"
LEFT_OUT = "text before </think> that the template does not print"
CALLS_TWICE = "calls of tools in a text next to tool_calls"
RESULTS_TWICE = "results of tools in the tags of the template"
TOOLS_TWICE = "tools in a system message next to tools"
LATER_SYSTEMS = "several system messages, not only at the beginning"
ROW_FAULTS = {
    UNCLOSED: (
        "an answer that begins with <think> and has no </think>, as generations that were cut off: "
        "the model would learn to end without an answer. Leave these records out, or complete them"
    ),
    TWICE: (
        "an answer with reasoning both under a key, such as reasoning_content, and between <think> "
        "and </think>, and the chat template prints both: remove one of the two"
    ),
    AS_ANSWER: (
        "an answer with reasoning between <think> and </think>, which the chat template prints as "
        "text of the answer: it does not know these tags, and prints reasoning elsewhere. Move it "
        "to the key that the template prints (reasoning_content, reasoning or thinking)"
    ),
    LEFT_OUT: (
        "an answer with text before </think>, mostly reasoning, which the chat template does not "
        "print: it is not trained, and the answer after it is. Use a template that prints it "
        "(tokenizer.kwargs: {chat_template: ...}), or remove the text"
    ),
    CALLS_TWICE: (
        "a call of a tool both under tool_calls and in the text of the answer, and the chat "
        "template prints both: remove one of the two"
    ),
    RESULTS_TWICE: (
        "a result of a tool that is already in the tags that the chat template prints around it, "
        "such as <tool_response>, so that they are printed twice: remove the tags from the records"
    ),
    TOOLS_TWICE: (
        "tools both in their field and in the system message, and the chat template prints both: "
        "remove source.tools, or the tools from the system message"
    ),
    LATER_SYSTEMS: (
        "several system messages, not only at the beginning, and each is read as one conversation. "
        "If conversations were joined to one list, as Megatron packs them, answers are trained "
        "after the messages of other conversations: split the lists at the system messages"
    ),
}
"Name of a fault, under which records are counted -> what these records have, and the fix."
_TAG = r"<[^<>\s|/]+>"
"An opening tag. Control tokens such as <|im_start|> are none: a text cannot contain them."


@frozen
class ToolTags:
    """The tags that a chat template prints directly before tools, calls and results; an empty
    string if it prints none there.
    """

    tools: str = ""
    "Such as `<tools>`."
    calls: str = ""
    "Such as `<tool_call>`."
    results: str = ""
    "Such as `<tool_response>`."


@lru_cache(maxsize=16)
def find_tool_tags(template: ChatTemplate) -> ToolTags:
    """Find the tags that a template prints before tools, calls and results, by rendering a call."""
    probe = make_call_probe(template)
    if probe is None:
        return ToolTags()
    try:
        with_tools = template.render(probe, add_generation_prompt=False, tools=[make_tool_probe()])
        without_tools = template.render(probe, add_generation_prompt=False)
    except RecordRefused:
        return ToolTags()
    return ToolTags(
        tools=_find_last_tag(with_tools.partition("probe_tool")[0]),
        calls=_find_last_tag(without_tools.partition("probe_tool")[0]),
        results=_find_last_tag(without_tools.partition("probe_result")[0], is_at_end=True),
    )


def list_signs(template: ChatTemplate) -> list[str]:
    """Return the tags of thoughts, and those that the template prints before tools, calls and
    results, such as `<tools>` or `<TOOLCALL>`. Each text with a fault contains at least one of
    them.
    """
    tags = find_tool_tags(template.for_tools([]))
    return [THINK, THINK_END, *filter(None, (tags.tools, tags.calls, tags.results))]


def _find_last_tag(text: str, is_at_end: bool = False) -> str:
    """Return the last opening tag of a text; an empty string if it has none.

    Args:
        text: the text.
        is_at_end: whether the tag must be the end of the text, without white space.
    """
    tags = re.findall(rf"{_TAG}\s*$" if is_at_end else _TAG, text)
    return tags[-1].rstrip() if tags else ""


@lru_cache(maxsize=16)
def prints_thoughts_elsewhere(template: ChatTemplate) -> bool:
    """Check whether a template prints the reasoning under a key, and knows no `</think>`, as those
    of gpt-oss and Gemma 4.
    """
    if THINK_END in template.source:
        return False
    return any(prints_key(template, "assistant", key) for key in REASONING_KEYS)


@lru_cache(maxsize=16)
def leaves_thoughts_out(template: ChatTemplate) -> bool:
    """Check whether a template prints only the text after `</think>`, even of the last answer, as
    those of DeepSeek R1 and V3.
    """
    if THINK_END not in template.source:
        return False
    text = render_probe(template, QUESTION, TAGGED_ANSWER, tools=None).text
    return "probe_answer" in text and "probe_thought" not in text


def find_faultless(plain: PlainPart, template: ChatTemplate, has_thoughts: bool) -> set[int]:
    """Return positions of plain conversations that certainly have no fault: the only possible
    faults of a plain conversation are a thought that is never closed, that the template prints as
    answer, or that it leaves out, and the tags of results.

    Args:
        plain: the plain conversations of a batch.
        template: the chat template.
        has_thoughts: whether a text of the batch contains `<think>` or `</think>`.
    """
    faultless = find_without_results(plain)
    if has_thoughts:
        is_suspect = _has_open_thought
        if prints_thoughts_elsewhere(template) or leaves_thoughts_out(template):
            is_suspect = has_thought
        contents_at = zip(plain.positions, plain.conversations.contents, strict=True)
        faultless -= {
            position for position, contents in contents_at if any(map(is_suspect, contents))
        }
    return faultless


def find_without_results(plain: PlainPart) -> set[int]:
    """Return positions of the plain conversations of a batch that have no result of a tool."""
    roles = plain.conversations.roles
    if not any("tool" in distinct for distinct in {*roles}):
        return {*plain.positions}
    roles_at = zip(plain.positions, roles, strict=True)
    return {position for position, roles_of_one in roles_at if "tool" not in roles_of_one}


def has_thought(text: str) -> bool:
    """Check whether a text contains `<think>` or `</think>`."""
    return THINK in text or THINK_END in text


def _has_open_thought(text: str) -> bool:
    """Check whether a text contains `<think>` and no `</think>`."""
    return THINK in text and THINK_END not in text


def find_row_faults(
    conversations: Sequence[Conversation],
    positions: Iterable[int],
    template: ChatTemplate,
    target_responses: str,
) -> dict[str, set[int]]:
    """Return name of a fault (ROW_FAULTS) -> positions of the conversations that have it in a
    message that is rendered; of thoughts, in an answer that is trained.

    Args:
        conversations: the records.
        positions: positions of those that are rendered.
        template: the chat template.
        target_responses: which answers of a record are trained: `last`, `all`, or "" for none.
    """
    tags = find_tool_tags(template.for_tools([]))
    faulty = dict[str, set[int]]()
    for position in positions:
        conversation = conversations[position]
        faults = {*_find_tool_faults(conversation, tags)}
        answers = find_trained_answers(conversation) if target_responses else []
        for answer in answers[-1:] if target_responses == "last" else answers:
            message = conversation.messages[answer]
            content = message.get("content")
            if type(content) is str and has_thought(content):
                faults |= _find_thought_faults(message, content, template)
        for fault in faults:
            faulty.setdefault(fault, set()).add(position)
    return faulty


def find_later_systems(
    conversations: Sequence[Conversation], positions: Iterable[int], plain: PlainPart
) -> set[int]:
    """Return the positions of the conversations with several system messages, not only at the
    beginning (LATER_SYSTEMS).

    Args:
        conversations: the records.
        positions: positions of those that are rendered.
        plain: the plain ones among them. Their few sequences of roles are looked at once.
    """
    all_roles = plain.conversations.roles
    joined_roles = {roles for roles in {*all_roles} if _has_later_system(roles)}
    found = set[int]()
    if joined_roles:
        pairs = zip(plain.positions, all_roles, strict=True)
        found = {position for position, roles in pairs if roles in joined_roles}
    rendered = {*positions}
    for position in rendered.difference(plain.positions):
        roles = [message["role"] for message in conversations[position].messages]
        if _has_later_system(roles):
            found.add(position)
    return found & rendered


def _has_later_system(roles: Sequence[str]) -> bool:
    """Check whether several messages are system messages, and not only the first ones."""
    systems = [position for position, role in enumerate(roles) if role in SYSTEM_ROLES]
    return len(systems) > 1 and systems[-1] >= len(systems)


def _find_thought_faults(message: Message, content: str, template: ChatTemplate) -> set[str]:
    """Return the faults of the reasoning of one answer.

    Args:
        message: the answer.
        content: its text, which contains `<think>` or `</think>`.
        template: the chat template, which may print no key for reasoning.
    """
    is_opened = content.lstrip().startswith(THINK)
    if THINK_END not in content:
        return {UNCLOSED} if is_opened else set()
    keys = [key for key in REASONING_KEYS if message.get(key)]
    has_key = any(prints_key(template, "assistant", key) for key in keys)
    if leaves_thoughts_out(template):
        thought = content.rpartition(THINK_END)[0].replace(THINK, "").replace(THINK_END, "")
        return {LEFT_OUT} if thought.strip() and not has_key else set()
    if not is_opened:
        return set()
    if has_key:
        return {TWICE}
    return {AS_ANSWER} if prints_thoughts_elsewhere(template) else set()


def _find_tool_faults(conversation: Conversation, tags: ToolTags) -> Iterator[str]:
    """Yield the faults of the tools, calls and results of a conversation.

    Args:
        conversation: the record.
        tags: the tags that the template prints before tools, calls and results.
    """
    for message in conversation.messages:
        content = message.get("content")
        if type(content) is not str:
            continue
        role = message["role"]
        if role == "tool" and tags.results and content.lstrip().startswith(tags.results):
            yield RESULTS_TWICE
        elif message.get("tool_calls") and tags.calls and tags.calls in content:
            yield CALLS_TWICE
        elif role in SYSTEM_ROLES and _lists_tools(content, conversation, tags.tools):
            yield TOOLS_TWICE


def _lists_tools(text: str, conversation: Conversation, tag: str) -> bool:
    """Check whether a system message lists tools of the conversation's field: it has the template's
    tag for tools, and the name of one of them.
    """
    if not tag or tag not in text:
        return False
    for tool in conversation.tools or ():
        name = tool.get("function", tool).get("name") if isinstance(tool, dict) else None
        if isinstance(name, str) and name in text:
            return True
    return False


def describe_row_fault(name: str, count: int) -> str:
    """Return a phrase on the records that have a fault, and the fix: `2 records have ...`."""
    verb = "has" if count == 1 else "have"
    return f"{plural(count, 'record')} {verb} {ROW_FAULTS[name]}"
