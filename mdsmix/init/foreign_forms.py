"""Forms of records that no shape reads, recognised by their fields, so that `mdsmix init` can
name the form and what to do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from mdsmix.init.data_files import FirstRecords
from mdsmix.kinds.turn_rows import is_message_text
from mdsmix.recipe.stream_spec import list_usual_names

EXAMPLE = (
    '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}'
)
OR_READ = "or read the records with a function of your own (source.shape: my_shapes.py:read)"
WRAPPERS = ("data", "dataset", "examples", "instances", "items", "records", "rows", "test", "train")
"Usual names of a list with all records of a file."
BEDROCK_PARTS = frozenset({"text", "toolUse", "toolResult", "image"})
"Keys of a part of a content at Amazon Bedrock."
CHANNELS = ("analysis", "commentary", "final")
"Channels of gpt-oss's answers."


class ForeignForm(NamedTuple):
    """A form of records that another program or data set has and no shape reads, such as Gemini's
    `contents`.
    """

    name: str
    fits: Callable[[Mapping[str, Any]], bool]
    "Record -> whether it has this form."
    advice: str
    "How a user can convert such records."
    is_whole_file: bool = False
    "Whether the record is all that is in the file."


def _list_objects(value: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the objects of a list, or the value itself if it is an object."""
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, dict):
            yield item


def _is_gemini(record: Mapping[str, Any]) -> bool:
    """Check whether a record has the form of Gemini: `{"contents": [{"parts": ...}, ...]}`."""
    return any("parts" in turn for turn in _list_objects(record.get("contents")))


def _is_responses(record: Mapping[str, Any]) -> bool:
    """Check whether a record has the form of OpenAI's Responses interface: `input`, a string or a
    list of items, and `output`, a list of items. Messages are items with a role; other items have a
    type.
    """
    question = record.get("input")
    has_question = isinstance(question, str) or bool(list(_list_objects(question)))
    items = _list_objects(record.get("output"))
    return has_question and any("role" in item or "type" in item for item in items)


def _is_harmony(record: Mapping[str, Any]) -> bool:
    """Check whether a record has the form of gpt-oss: a message has a `channel`, as in CHANNELS."""
    messages = _list_objects(record.get("messages"))
    return any(message.get("channel") in CHANNELS for message in messages)


def _is_olmo(record: Mapping[str, Any]) -> bool:
    """Check whether messages have calls and tools as text, as in Olmo's data (Dolci):
    `{"content": null, "function_calls": "get_weather(city=\"Rome\")"}`.
    """
    messages = _list_objects(record.get("messages"))
    return any(isinstance(message.get("function_calls"), str) for message in messages)


def _is_undecoded(record: Mapping[str, Any]) -> bool:
    """Check whether a field has a list of messages as text, as JSON or Python writes it. `datasets`
    and pandas write such fields to csv.
    """
    return any(isinstance(value, str) and is_message_text(value) for value in record.values())


def _is_input_of_messages(record: Mapping[str, Any]) -> bool:
    """Check whether a record has messages as its `input` and a text as its `output`, as in
    Nemotron's post-training data.
    """
    has_messages = any("role" in message for message in _list_objects(record.get("input")))
    return has_messages and isinstance(record.get("output"), str)


def _is_columns_of_messages(record: Mapping[str, Any]) -> bool:
    """Check whether a field has the roles and the contents of all messages as two lists, as
    `datasets` stores a Sequence of objects: `{"messages": {"role": [...], "content": [...]}}`.
    """
    for value in record.values():
        if isinstance(value, dict) and ("role" in value or "from" in value):
            return all(isinstance(column, list) for column in value.values())
    return False


def _is_list_of_texts(record: Mapping[str, Any]) -> bool:
    """Check whether the messages are only texts, as in LIMA: `{"conversations": ["a", "b"]}`."""
    for name in ("conversations", "conversation", "messages", "dialogue", "dialog"):
        value = record.get(name)
        if isinstance(value, list) and value:
            return all(isinstance(text, str) for text in value)
    return False


def _is_stepwise(record: Mapping[str, Any]) -> bool:
    """Check whether a record has a label for each step, as TRL's stepwise supervision."""
    return isinstance(record.get("completions"), list) and isinstance(record.get("labels"), list)


def _is_bedrock(record: Mapping[str, Any]) -> bool:
    """Check whether a message has the form of Amazon Bedrock: `{"content": [{"text": ...}]}`."""
    for message in _list_objects(record.get("messages")):
        parts = [*_list_objects(message.get("content"))]
        if parts and all("type" not in part for part in parts):
            return any(BEDROCK_PARTS & part.keys() for part in parts)
    return False


def _is_rated(record: Mapping[str, Any]) -> bool:
    """Check whether a record has several answers of models, each with its own scores, as in
    UltraFeedback: `{"instruction": ..., "completions": [{"response": ..., "overall_score": ...}]}`.
    """
    answers = [*_list_objects(record.get("completions"))]
    return bool(answers) and all("response" in answer for answer in answers)


def _is_ranked(record: Mapping[str, Any]) -> bool:
    """Check whether a record has two answers and a number for the better one, as in HelpSteer3."""
    return {"response1", "response2", "overall_preference"} <= record.keys()


def _is_ranked_list(record: Mapping[str, Any]) -> bool:
    """Check whether a record has a list of answers with ranks, as in NeMo RL: `{"context": [...],
    "completions": [{"rank": 0, "completion": [...]}, ...]}`.
    """
    answers = [*_list_objects(record.get("completions"))]
    return bool(answers) and all({"rank", "completion"} <= answer.keys() for answer in answers)


def _is_segments(record: Mapping[str, Any]) -> bool:
    """Check whether a record has the form of axolotl's input_output: `{"segments": [{"label": true,
    "text": "..."}]}`.
    """
    segments = [*_list_objects(record.get("segments"))]
    return bool(segments) and all(segment.keys() >= {"label", "text"} for segment in segments)


def _is_without_content(record: Mapping[str, Any]) -> bool:
    """Check whether a record names a file of The Stack v2 without its content."""
    return "blob_id" in record and not {"content", "text"} & record.keys()


def _is_dialogue_text(record: Mapping[str, Any]) -> bool:
    """Check whether a field has a conversation as one text, as in Glaive's data of functions:
    `{"chat": "USER: Hi\\n\\nASSISTANT: Hello <|endoftext|>"}`.
    """
    chat = record.get("chat")
    return isinstance(chat, str) and "USER:" in chat and "ASSISTANT:" in chat


def _is_token_ids(record: Mapping[str, Any]) -> bool:
    """Check whether a record is a row of token ids, as trainers write them once they have tokenized
    their data: `{"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}`.
    """
    ids = record.get("input_ids")
    return isinstance(ids, list) and all(type(id) is int for id in ids)


def _is_oumi(record: Mapping[str, Any]) -> bool:
    """Check whether a part of a content has its text or image under `content` or `binary`, as in
    Oumi's conversations: `{"type": "text", "content": "..."}`.
    """
    for message in _list_objects(record.get("messages")):
        content = message.get("content")
        if not isinstance(content, list):
            continue
        for part in _list_objects(content):
            if "type" in part and isinstance(part.get("content", part.get("binary")), str):
                return True
    return False


def _has_answers_in_list(record: Mapping[str, Any]) -> bool:
    """Check whether a record has several answers to one question as a list of texts, as in
    distilabel's data: `{"instruction": ..., "generations": ["...", "..."], "ratings": [5, 3]}`.
    """
    answers = record.get("generations")
    return bool(answers) and isinstance(answers, list) and isinstance(answers[0], str)


def _is_calls_as_answers(record: Mapping[str, Any]) -> bool:
    """Check whether a record has calls of tools as its answers, as in xLAM: `{"query": ...,
    "tools": "[...]", "answers": "[...]"}`.
    """
    return {"query", "tools", "answers"} <= record.keys()


def _is_preference_without_prompt(record: Mapping[str, Any]) -> bool:
    """Check whether a record has two answers, no prompt by a usual name, and another text or list
    that may be the prompt.
    """
    if "prompt" in record or not {"chosen", "rejected"} <= record.keys():
        return False
    others = [value for name, value in record.items() if name not in ("chosen", "rejected")]
    return any(
        isinstance(other, list) or (isinstance(other, str) and " " in other) for other in others
    )


def is_message_of_tree(record: Mapping[str, Any]) -> bool:
    """Check whether a record is one message of a tree of messages, as in OpenAssistant:
    `{"message_id": ..., "parent_id": ..., "role": ..., "text": ...}`.
    """
    return {"message_id", "parent_id", "role"} <= record.keys()


def _is_wrapped(record: Mapping[str, Any]) -> bool:
    """Check whether a record is a whole file: an object with its records in a list (WRAPPERS)
    that has no messages, `{"data": [{...}, ...]}`.
    """
    lists = {name: value for name, value in record.items() if isinstance(value, list)}
    if len(lists) != 1:
        return False
    [(name, items)] = lists.items()
    if name not in WRAPPERS or not items:
        return False
    return all(isinstance(item, dict) and not {"role", "from"} & {*item} for item in items)


def _is_synthetic_data_kit(record: Mapping[str, Any]) -> bool:
    """Check whether a record is a whole file of Meta's synthetic-data-kit: `{"summary": ...,
    "qa_pairs": [{"question": ..., "answer": ...}, ...]}`.
    """
    return any(
        "question" in pair
        for name in ("qa_pairs", "cot_examples")
        for pair in _list_objects(record.get(name))
    )


def _is_table_of_columns(record: Mapping[str, Any]) -> bool:
    """Check whether a record is a whole table, column by column, as pandas' `to_json` writes it:
    `{"text": {"0": "a", "1": "b"}}`.
    """
    return bool(record) and all(
        isinstance(value, dict) and "0" in value for value in record.values()
    )


def is_keyed_records(record: Mapping[str, Any]) -> bool:
    """Check whether a record is a whole file with each record under a name of its own:
    `{"q1": {"question": ..., "answer": ...}, "q2": {...}}`.
    """
    values = [*record.values()]
    if len(values) < 2 or not list_usual_names().isdisjoint(record):
        return False
    if not all(isinstance(value, dict) and value for value in values):
        return False
    return all(value.keys() == values[0].keys() for value in values)


FORMS = (
    ForeignForm(
        "Gemini (contents of parts)",
        _is_gemini,
        f"write each record as messages, as in {EXAMPLE}, with the role `assistant` instead of "
        f"`model` and systemInstruction as the first message, {OR_READ}",
    ),
    ForeignForm(
        "OpenAI's Responses (input and output items)",
        _is_responses,
        "write the items of input and output of each record as one list of messages, as in "
        f"{EXAMPLE}, {OR_READ}",
    ),
    ForeignForm(
        "harmony (gpt-oss's messages with a channel)",
        _is_harmony,
        "move each analysis into the key `thinking` of the message that follows it, and remove "
        f"`channel`, since the chat template of gpt-oss writes channels itself, {OR_READ}",
    ),
    ForeignForm(
        "Olmo's Dolci (messages with function_calls as text)",
        _is_olmo,
        "write each function_calls as the `tool_calls` of its message, the functions of the system "
        f"message as the field `tools`, and the role `environment` as `tool`, {OR_READ}",
    ),
    ForeignForm(
        "messages as text (a string in place of a list)",
        _is_undecoded,
        "write the file again, as JSON Lines or parquet, with each string decoded: by json.loads, "
        f"or by ast.literal_eval if its quotes are single, {OR_READ}",
    ),
    ForeignForm(
        "Nemotron's post-training data (messages as input, a text as output)",
        _is_input_of_messages,
        f"append the output to the messages of input, as in {EXAMPLE}, with its system_prompt as "
        f"the first message, {OR_READ}",
    ),
    ForeignForm(
        "a Sequence of datasets (the roles and the contents of messages as two lists)",
        _is_columns_of_messages,
        f"write a list of messages, as in {EXAMPLE}, {OR_READ}",
    ),
    ForeignForm(
        "LIMA (a list of texts in place of messages)",
        _is_list_of_texts,
        f"write each text as a message with its role, as in {EXAMPLE}, {OR_READ}",
    ),
    ForeignForm(
        "stepwise supervision (completions with labels)",
        _is_stepwise,
        "mdsmix makes no data for models that reward single steps",
    ),
    ForeignForm(
        "Amazon Bedrock (contents of parts without a type)",
        _is_bedrock,
        f"write each content as a string, as in {EXAMPLE}, or each part with its type, as in "
        '`{"type": "text", "text": "..."}`, ' + OR_READ,
    ),
    ForeignForm(
        "Oumi (parts with their text or image under content or binary)",
        _is_oumi,
        'write each text as `{"type": "text", "text": "..."}`, and each image as `{"type": '
        '"image_url", "image_url": {"url": "..."}}`, with a path, a URL or a data URI, ' + OR_READ,
    ),
    ForeignForm(
        "UltraFeedback (completions with scores)",
        _is_rated,
        "write the best and a worse response of each record as `chosen` and `rejected`, next to "
        f"the instruction as `prompt`, {OR_READ}",
    ),
    ForeignForm(
        "several answers to each question (distilabel's generations)",
        _has_answers_in_list,
        "write each answer that is good as a record of its own, with its question as `prompt` and "
        "the answer as `response`, or the best and a worse answer as `chosen` and `rejected`, "
        f"{OR_READ}",
    ),
    ForeignForm(
        "HelpSteer3 (two responses with a preference)",
        _is_ranked,
        "write `context` as `prompt`, and the two responses as `chosen` and `rejected`: response1 "
        f"is the chosen one if overall_preference is below 0, {OR_READ}",
    ),
    ForeignForm(
        "NeMo RL's preferences (completions with ranks)",
        _is_ranked_list,
        "write `context` as `prompt`, the completion of the lowest rank as `chosen`, and another "
        f"one as `rejected`, {OR_READ}",
    ),
    ForeignForm(
        "axolotl's input_output (segments of text with labels)",
        _is_segments,
        'write each record as messages whose contents are parts with marks, `{"type": "text", '
        f'"text": "...", "train": false}}`, {OR_READ}',
    ),
    ForeignForm(
        "rows of token ids (input_ids)",
        _is_token_ids,
        "convert the texts or conversations of which these rows were made, since mdsmix tokenizes "
        "them itself and decides which tokens are trained",
    ),
    ForeignForm(
        "The Stack v2 (names of files without their contents)",
        _is_without_content,
        "download the content of each blob_id as the data set's page describes, and write it as "
        "the field `content`",
    ),
    ForeignForm(
        "preferences whose prompt has an unusual name",
        _is_preference_without_prompt,
        "write a recipe with `kind: preference` and `source: {path: ..., prompt: FIELD, chosen: "
        f"chosen, rejected: rejected}}`, {OR_READ}",
    ),
    ForeignForm(
        "OpenAssistant (each message of a tree is a record)",
        is_message_of_tree,
        "join each message with those that it answers, from parent to parent, and write each such "
        f"path of the tree as messages, as in {EXAMPLE}, {OR_READ}",
    ),
    ForeignForm(
        "a dialogue in one text (USER: and ASSISTANT: in a field chat)",
        _is_dialogue_text,
        f"write each turn as a message, as in {EXAMPLE}, {OR_READ}",
    ),
    ForeignForm(
        "xLAM (calls of tools as answers)",
        _is_calls_as_answers,
        f"write each record as messages, as in {EXAMPLE}, with the answers as the `tool_calls` of "
        f"the assistant, and the tools as `tools`, {OR_READ}",
    ),
    ForeignForm(
        "synthetic-data-kit (qa_pairs or cot_examples)",
        _is_synthetic_data_kit,
        "write its records with `synthetic-data-kit save-as FILE -f ft`, or those of qa_pairs by "
        "`jq -c '.qa_pairs[]'`",
        is_whole_file=True,
    ),
    ForeignForm(
        "one object around all records",
        _is_wrapped,
        "write the records themselves, an object on each line, for example by `jq -c '.data[]'` if "
        "they are in the field data",
        is_whole_file=True,
    ),
    ForeignForm(
        "a table of columns (pandas' to_json)",
        _is_table_of_columns,
        'write a record on each line: to_json(..., orient="records", lines=True)',
        is_whole_file=True,
    ),
    ForeignForm(
        "an object with each record under a name of its own",
        is_keyed_records,
        "write the records themselves, an object on each line, for example by `jq -c '.[]'`",
        is_whole_file=True,
    ),
)


def find_foreign_form(head: FirstRecords) -> ForeignForm | None:
    """Return the form that at least half of the first records have; None if none of FORMS fits."""
    for form in FORMS:
        if form.is_whole_file and len(head) > 1:
            continue
        fitting = [record for record in head.objects if form.fits(record)]
        if fitting and 2 * len(fitting) >= len(head.objects):
            return form
    return None
