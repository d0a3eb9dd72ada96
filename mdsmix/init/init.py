"""Files and a tokenizer -> a recipe that converts, with notes on each stream and one record as it
will be trained.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson

from mdsmix.encode.chat import NO_TEMPLATE
from mdsmix.encode.forms import describe_possible_marks
from mdsmix.errors import MdsmixError, RecipeError
from mdsmix.init.data_files import THEIRS, Said, find_data
from mdsmix.init.drafts import WHY, Draft, name_apart, sort_out, text_of
from mdsmix.init.other_tools import match, read_dataset_info
from mdsmix.init.recognise import named
from mdsmix.init.trials import set_images, try_all
from mdsmix.messages import join_counts, plural
from mdsmix.recipe import TokenizerSpec
from mdsmix.sources import estimate_size
from mdsmix.storage import find_store
from mdsmix.tokenizer.card import Tokenizer, open_tokenizer

LENGTH = 2048
LONGEST = 8192
"A larger model_max_length is a limit of the model, not a good length of a row."
BYTES_PER_TOKEN = 4
FEWEST_ROWS = 8
"""Text of fewer rows gets one row for each document: if joined, too much text would be lost behind
the last full row.
"""
OF_TAR = "__key__"
"The field with the name of a sample in a tar. It holds no content."


@dataclass(frozen=True, kw_only=True)
class FirstRecipe:
    """A recipe, and the sentences for the user."""

    text: str
    drafts: Sequence[Draft]
    tokenizer: Tokenizer
    said: Sequence[str]
    "Lines on files that are in no stream, and on fields that are not read."

    @property
    def live(self) -> list[Draft]:
        """The streams that are not written as comments."""
        return [draft for draft in self.drafts if not draft.refused]


def begin(
    files: Sequence[str],
    tokenizer: str,
    folder: Path,
    *,
    place: str = "./mix",
    dataset_info: str | None = None,
    mixture: str | None = None,
    budget: str | None = None,
    max_seq_len: int | None = None,
) -> FirstRecipe:
    """Looks at the files and writes the recipe's text.

    Args:
        folder: where the recipe will lie.
        place: where to publish, written as in a recipe.
        dataset_info: path of LLaMA-Factory's dataset_info.json. `files` are then names of its
        entries; none means all.
            It may also be the only one of `files`.
        mixture: path of FlagEmbedding's mixture file, whose sources are the streams, with their
        shares.
        budget: the whole of which the mixture gives percents, written as in a recipe.
        max_seq_len: tokens of a row; None: the tokenizer's limit.

    Raises:
        RecipeError: no data was found, or none that can be converted.
        Unreachable: a file or the tokenizer cannot be read.
    """
    said: Said = []
    if not dataset_info and not mixture and [os.path.basename(name) for name in files] == [THEIRS]:
        dataset_info, files = files[0], ()
    if dataset_info:
        drafts = read_dataset_info(dataset_info, files, folder, said)
    elif mixture:
        drafts = match(mixture, files, folder, bool(budget), said)
    else:
        drafts = sort_out(find_data(files, folder, said), said)
    name_apart(drafts)
    known = open_tokenizer(TokenizerSpec(name=tokenizer))
    said += known.remarks
    drafts = [
        draft
        for draft in _of_one_run(drafts, said)
        if draft.guess.shape.image_fields is None or set_images(draft, known, folder, said)
    ]
    if not drafts:
        told = " ".join(f"{str(each).strip().rstrip('.')}." for each in said)
        nothing = f"nothing that converts was found, so there is no recipe to write. {told}"
        raise next((e for e in said if isinstance(e, MdsmixError)), RecipeError(nothing))
    length, why = (max_seq_len, "as asked") if max_seq_len else _length(known)
    keys = {"tokenizer": _from(folder, tokenizer), "max_seq_len": length}
    keys |= {"remote" if find_store(place) else "local": place}
    keys |= {"budget": budget, "absolute": True} if budget else {}
    _fit_texts(drafts, length, known)
    try_all(keys, drafts, known, folder)
    for draft in drafts:
        tried = draft.tried
        if draft.refused:
            said.append(f"{draft.name} is left out: {draft.refused}")
        elif tried.quarantined:
            first, bad = plural(tried.read, "record"), join_counts(tried.quarantined)
            said.append(f"of the first {first} of {draft.name}, conversion sets aside {bad}")
        if tried.placeholders and not draft.refused:
            said.append(
                f"WARNING: of the first {plural(tried.read, 'record')} of {draft.name}, placeholders of media are trained as text: "
                f"{join_counts(tried.placeholders)}"
            )
        if unread := [name for name in tried.unread if name != OF_TAR]:
            said.append(f"not read of {draft.name}: {named(unread)}")
        said += [f"WARNING: {draft.name}: {each}" for each in describe_possible_marks(tried.unread)]
        said += draft.ends
    has_template = known.chat_template is not None or known.named_templates
    if not has_template and any(draft.guess.kind.has_template for draft in drafts):
        said.append(f"WARNING: {NO_TEMPLATE}")
    text = text_of(keys, drafts, WHY | {"max_seq_len": f"tokens of a row; {why}"})
    return FirstRecipe(
        text=text, drafts=drafts, tokenizer=known, said=list(dict.fromkeys(map(str, said)))
    )


def _of_one_run(drafts: Sequence[Draft], said: Said) -> Sequence[Draft]:
    """The streams without those that only a loader of their own reads. If all are such streams, all
    are returned.
    """
    mixed = [draft for draft in drafts if not draft.guess.kind.loader]
    for draft in drafts if mixed else ():
        if draft.guess.kind.loader:
            said.append(
                f"{draft.name} is left out: a {draft.guess.kind.word} trains in a run of its own; name its files, or its entry of dataset_info.json, alone for a recipe of its own"
            )
    return mixed or drafts


def _from(folder: Path, tokenizer: str) -> str:
    """The tokenizer's name in a recipe that lies in `folder`."""
    path = os.path.expanduser(tokenizer)
    if not os.path.exists(path):
        return tokenizer
    path = os.path.relpath(path, folder)
    return path if path.startswith("..") else f"./{path}"


def _length(tokenizer: Tokenizer) -> tuple[int, str]:
    """Tokens of a row, and a phrase on the origin of the number."""
    config = Path(tokenizer.path).with_name("tokenizer_config.json")
    said = orjson.loads(config.read_bytes()).get("model_max_length") if config.exists() else None
    if isinstance(said, (int, float)) and 2 <= said <= LONGEST:
        return int(said), "the tokenizer's model_max_length"
    return LENGTH, f"the tokenizer names no limit of {LONGEST:,} or less (model_max_length)"


def _fit_texts(drafts: Sequence[Draft], length: int, tokenizer: Tokenizer) -> None:
    """Sets `layout: document` or `add_eos: false` of pretraining streams if the text is short or
    the tokenizer has no EOS.
    """
    texts = [draft for draft in drafts if draft.guess.kind.word == "pretraining"]
    for draft in texts:
        if tokenizer.eos_id is None:
            draft.set("add_eos", False, "the tokenizer has no EOS")
        is_short = estimate_size(draft.files) < FEWEST_ROWS * length * BYTES_PER_TOKEN
        if is_short and (len(texts) == len(drafts) or tokenizer.eos_id is not None):
            draft.set(
                "layout",
                "document",
                "a row a document: joined, they would fill few rows. concat is for more text",
            )
