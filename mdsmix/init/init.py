"""Writes a recipe for files and a tokenizer, with notes on each stream. The recipe can be converted
as it is.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from mdsmix.encode.answer_parts import (
    RECIPIENT,
    RECIPIENT_FIX,
    UNREAD_REASONING,
    describe_reasoning_fix,
)
from mdsmix.encode.open_template import NO_TEMPLATE, open_tokenizer_template
from mdsmix.encode.printed_parts import (
    describe_possible_marks,
    merge_unread_keys,
    name_in_records,
)
from mdsmix.errors import MdsmixError, RecipeError
from mdsmix.frozen import frozen
from mdsmix.init.data_files import DATASET_INFO, Notices, find_data
from mdsmix.init.drafts import WHY, Draft, format_recipe, group_files, make_names_unique
from mdsmix.init.field_doubts import (
    describe_classes,
    describe_doubts,
    describe_unread_variables,
)
from mdsmix.init.other_tools import match_mixture, read_dataset_info
from mdsmix.init.recognise import join_printable
from mdsmix.init.trials import set_images, try_all
from mdsmix.kinds.printed_texts import PRINTED_BY_TEMPLATE
from mdsmix.kinds.row_faults import ROW_FAULTS, describe_row_fault
from mdsmix.kinds.turn_rows import MESSAGES_AS_TEXT, describe_message_texts
from mdsmix.messages import Say, join_counts, plural
from mdsmix.recipe import TokenizerSpec
from mdsmix.recipe.read import locate_pretrained
from mdsmix.sources import estimate_size
from mdsmix.storage import find_store
from mdsmix.tokenizer.card import NO_EOS, Tokenizer, open_tokenizer

ROW_TOKENS = 2048
MAX_ROW_TOKENS = 8192
"A larger model_max_length is a limit of the model, not a good length of a row."
BYTES_PER_TOKEN = 4
MIN_ROWS = 8
"""A source whose joined text would fill fewer rows gets one row for each document. If its documents
were joined, too much text would be lost after the last full row.
"""
CALLS_WHY = (
    "calls of tools come before the last answer, and are only trained so; by default only the last "
    "answer is, as in LLM-Foundry"
)
CACHE = "./mix"
"The cache of a training node, if the streams are published in a bucket."
TAR_NAME = "__key__"
"The field with the name of a sample in a tar. It is not content for training."


@frozen(kw_only=True)
class FirstRecipe:
    """The result of `mdsmix init`: the text of a recipe, and the messages for the user."""

    text: str
    drafts: Sequence[Draft]
    tokenizer: Tokenizer
    notices: Sequence[str]
    "Lines on files that are in no stream, and on fields that are not read."

    @property
    def accepted(self) -> list[Draft]:
        """The streams that are not written as comments."""
        return [draft for draft in self.drafts if not draft.refused]


class _RowLength(NamedTuple):
    """The length of a row for the recipe (`max_seq_len`)."""

    tokens: int
    why: str
    "A phrase on the origin of the number."


def write_first_recipe(
    files: Sequence[str],
    tokenizer: str,
    folder: Path,
    *,
    target: str = "./mix",
    dataset_info: str | None = None,
    mixture: str | None = None,
    budget: str | None = None,
    max_seq_len: int | None = None,
    say: Say | None = None,
) -> FirstRecipe:
    """Recognise the files and return a recipe for them.

    Args:
        files: files, folders, patterns and URLs of data; or only a dataset_info.json.
        folder: the folder of the recipe.
        target: where to publish, written as in a recipe.
        dataset_info: path of LLaMA-Factory's dataset_info.json. `files` are then names of its
            entries; none means all.
        mixture: path of FlagEmbedding's mixture file, whose sources are the streams, with their
            shares.
        budget: the size of an epoch, written as in a recipe. The mixture's percentages are of it.
        max_seq_len: tokens of a row; None: the tokenizer's limit.
        say: called with a note for the user if the tokenizer must be read first; None: no note.

    Raises:
        RecipeError: no data was found, or none that can be converted.
        Unreachable: a file or the tokenizer cannot be read.
    """
    # Find the streams, and leave out those that the tokenizer or the other streams do not fit.
    notices: Notices = []
    files = [*map(os.path.expanduser, files)]  # a pattern in quotes may begin with ~
    drafts = _find_streams(files, folder, dataset_info, mixture, bool(budget), notices)
    # By the absolute path, as `convert` names it, so that a tokenizer is described only once.
    located = locate_pretrained(tokenizer, Path.cwd())
    opened = open_tokenizer(TokenizerSpec(name=located), say)
    notices += opened.remarks
    drafts = [
        draft
        for draft in _drop_special_loaders(drafts, notices)
        if draft.guess.shape.image_fields is None or set_images(draft, opened, folder, notices)
    ]
    if not drafts:
        raise _make_nothing_found(notices)

    # Choose the keys, and convert the first records with them.
    length = _RowLength(max_seq_len, "as asked") if max_seq_len else _choose_row_length(opened)
    _fit_short_texts(drafts, length.tokens, opened)
    keys: dict[str, Any] = {
        "tokenizer": _choose_tokenizer_key(_name_from(folder, tokenizer), opened, drafts),
        "max_seq_len": length.tokens,
    }
    why = WHY | {"max_seq_len": f"tokens of a row; {length.why}"}
    if find_store(target):
        # Without `local` Streaming caches in a temporary folder, and fails if it is there already.
        keys |= {"remote": target, "local": CACHE}
        why["local"] = "each training node caches the streams here"
    else:
        keys["local"] = target
    if budget:
        keys |= {"budget": budget, "absolute": True}
    # A stream that is left out does not decide which answers of the others are trained.
    others = list[Draft]()
    with_all = list[Draft]()
    for draft in drafts:
        trains_all = draft.guess.with_spans or draft.guess.with_earlier_calls
        (with_all if trains_all else others).append(draft)
    try_all(keys | {"target_responses": "all"}, with_all, opened, folder)
    deciding = [draft for draft in with_all if not (draft.refused and others)]
    if deciding:
        keys["target_responses"] = "all"
        if not any(draft.guess.with_spans for draft in deciding):
            why["target_responses"] = CALLS_WHY
    try_all(keys, others, opened, folder)

    # Collect the messages and write the text.
    for draft in drafts:
        notices += _describe_trial(draft)
        if draft.guess.kind.has_template and not draft.refused:
            variables = open_tokenizer_template(opened, {}).reads
            for doubt in describe_unread_variables(draft.guess, variables):
                notices.append(f"WARNING: {draft.name}: {doubt}")
    has_template = opened.chat_template is not None or opened.named_templates
    if not has_template and any(draft.guess.kind.has_template for draft in drafts):
        notices.append(f"WARNING: {NO_TEMPLATE}")
    if opened.eos_id is None:
        notices.append(f"WARNING: {NO_EOS}")
    return FirstRecipe(
        text=format_recipe(keys, drafts, why),
        drafts=drafts,
        tokenizer=opened,
        notices=list(dict.fromkeys(map(str, notices))),
    )


def _find_streams(
    files: Sequence[str],
    folder: Path,
    dataset_info: str | None,
    mixture: str | None,
    has_budget: bool,
    notices: Notices,
) -> list[Draft]:
    """Return a draft of each stream: of the entries of a dataset_info.json, of the sources of a
    mixture file, or otherwise of groups of files that are alike.

    Args:
        files: this and the next three are the arguments of `write_first_recipe`.
        has_budget: whether the recipe gets a budget. The mixture's percentages are shares of it.
        notices: gets the messages on files that are in no stream.
    """
    names = [os.path.basename(name) for name in files]
    if not dataset_info and not mixture and names == [DATASET_INFO]:
        dataset_info = files[0]
        files = ()
    if dataset_info:
        drafts = read_dataset_info(dataset_info, files, folder, notices)
    elif mixture:
        drafts = match_mixture(mixture, files, folder, has_budget, notices)
    else:
        drafts = group_files(find_data(files, folder, notices), notices)
    make_names_unique(drafts)
    return drafts


def _choose_tokenizer_key(
    name: str, tokenizer: Tokenizer, drafts: Sequence[Draft]
) -> str | dict[str, Any]:
    """Return the value of the recipe's key `tokenizer`: its name, with the setting that it pads on
    the left if the loader of the streams needs this.
    """
    loader = drafts[0].guess.kind.loader
    if loader and loader.pads_left and tokenizer.padding_side != "left":
        return {"name": name, "kwargs": {"padding_side": "left"}}
    return name


def _make_nothing_found(notices: Notices) -> MdsmixError:
    """Return the error to raise if no stream was found: the first error of a file that could not be
    read, or, if all files could be read, one error that lists all notices.
    """
    for notice in notices:
        if isinstance(notice, MdsmixError):
            return notice
    sentences = " ".join(f"{str(notice).strip().rstrip('.')}." for notice in notices)
    return RecipeError(
        f"no data that can be converted was found, so no recipe was written. {sentences}"
    )


def _drop_special_loaders(drafts: Sequence[Draft], notices: Notices) -> Sequence[Draft]:
    """Return the streams that can be mixed with others. Streams that need a run of their own, such
    as preferences, are only returned if there are no other streams, and then those of one kind.
    """
    has_others = any(not draft.guess.kind.needs_own_run() for draft in drafts)
    accepted = list[Draft]()
    for draft in drafts:
        kind = draft.guess.kind
        fits = not kind.needs_own_run() if has_others else kind is drafts[0].guess.kind
        if fits:
            accepted.append(draft)
        else:
            notices.append(
                f"{draft.name} is left out: a {kind.word} stream needs a run of its own; run init "
                "with only its files, or its entry of dataset_info.json"
            )
            notices += [f"{draft.name}: {doubt}" for doubt in describe_doubts(draft.guess)]
    return accepted


def _describe_trial(draft: Draft) -> Iterator[str]:
    """Yield messages for the user on what `init` found when it converted the first records of a
    stream: bad records, placeholders such as <image> that would be trained as text, fields that are
    not read, and how answers end.
    """
    tried = draft.tried
    first_records = f"the first {plural(tried.read, 'record')} of {draft.name}"
    if draft.refused:
        yield f"{draft.name} is left out: {draft.refused}"
    elif tried.quarantined:
        yield (
            f"convert would quarantine some of {first_records}: {join_counts(tried.quarantined)}"
        )
    media_counts = {**tried.placeholders}
    message_texts = media_counts.pop(MESSAGES_AS_TEXT, 0)
    if message_texts and not draft.refused:
        yield f"WARNING: of {first_records}, {describe_message_texts(message_texts)}"
    for name in ROW_FAULTS:
        count = media_counts.pop(name, 0)
        if count and not draft.refused:
            yield f"WARNING: of {first_records}, {describe_row_fault(name, count)}"
    if media_counts and not draft.refused:
        yield (
            f"WARNING: some of {first_records} contain placeholders of media, which would be "
            f"trained as text: {join_counts(media_counts)}"
        )
    if draft.is_printed and not draft.refused:
        yield (
            f"WARNING: most of {first_records} contain the text of a special token: "
            f"{PRINTED_BY_TEMPLATE}"
        )
    for doubt in (*describe_doubts(draft.guess), *describe_classes(draft.guess)):
        yield f"{draft.name}: {doubt}"
    fields = draft.guess.fields
    unread = list[str]()
    for name in merge_unread_keys(tried.unread):
        if name != TAR_NAME:
            unread.append(name_in_records(name, fields))
    if unread:
        yield f"fields of {draft.name} that are not read: {join_printable(unread)}"
    for name in (*UNREAD_REASONING, RECIPIENT):
        if name in tried.unread:
            fix = RECIPIENT_FIX if name == RECIPIENT else describe_reasoning_fix(name)
            yield (
                f"WARNING: of {first_records}, the field {name_in_records(name, fields)} of "
                f"{plural(tried.unread[name], 'record')} is not read, so it is ignored in "
                f"training: {fix}"
            )
    for mark in describe_possible_marks(tried.unread):
        yield f"WARNING: {draft.name}: {mark}"
    yield from draft.ends


def _name_from(folder: Path, tokenizer: str) -> str:
    """Return the tokenizer's name as a recipe in this folder writes it: the relative path of a
    folder, such as `./tokenizer`, or a hub name unchanged.
    """
    path = os.path.expanduser(tokenizer)
    if not os.path.exists(path):
        return tokenizer
    path = os.path.relpath(path, folder)
    return path if path.startswith("..") else f"./{path}"


def _choose_row_length(tokenizer: Tokenizer) -> _RowLength:
    """Return the tokenizer's model_max_length if that is a good length of a row, or ROW_TOKENS."""
    config = Path(tokenizer.path).with_name("tokenizer_config.json")
    limit = orjson.loads(config.read_bytes()).get("model_max_length") if config.exists() else None
    if isinstance(limit, (int, float)) and 2 <= limit <= MAX_ROW_TOKENS:
        return _RowLength(int(limit), "the tokenizer's model_max_length")
    why = f"the tokenizer has no limit of {MAX_ROW_TOKENS:,} or less (model_max_length)"
    return _RowLength(ROW_TOKENS, why)


def _fit_short_texts(drafts: Sequence[Draft], length: int, tokenizer: Tokenizer) -> None:
    """Set keys of pretraining streams. `layout: document` (a row for each document) is set if the
    source has so little text that joined documents would fill few rows; `add_eos: false` is set if
    the tokenizer has no EOS.

    Args:
        length: tokens of a row.
    """
    texts = [draft for draft in drafts if draft.guess.kind.word == "pretraining"]
    for draft in texts:
        if tokenizer.eos_id is None:
            draft.set("add_eos", False, "the tokenizer has no EOS")
        is_short = estimate_size(draft.files) < MIN_ROWS * length * BYTES_PER_TOKEN
        # With other kinds the loader is finetuning, for which `layout: document` needs an EOS.
        has_only_texts = len(texts) == len(drafts)
        if is_short and (has_only_texts or tokenizer.eos_id is not None):
            draft.set(
                "layout",
                "document",
                "a row for each document, since the joined documents would fill few rows; concat "
                "is for more text",
            )
