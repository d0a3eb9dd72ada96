"""Files and a tokenizer -> a recipe that converts, with what was seen of each stream and one record as it will be trained."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import orjson

from mdsmix.encode.pretrained import Tokenizer, open_tokenizer
from mdsmix.errors import RecipeError
from mdsmix.init.data_files import find_data
from mdsmix.init.dataset_info import read_dataset_info
from mdsmix.init.drafts import Draft, Sorted, named_apart, sort_out
from mdsmix.init.flag_embedding import match
from mdsmix.init.image_settings import settled
from mdsmix.init.recipe_text import Top, text_of
from mdsmix.init.recognise import named
from mdsmix.init.trials import try_all
from mdsmix.recipe import TokenizerSpec
from mdsmix.sources import size_of
from mdsmix.storage import locate

LENGTH = 2048
LONGEST = 8192
"A larger model_max_length names the limit of the model, not a good length of a row."
BYTES_PER_TOKEN = 4
FEWEST_ROWS = 8
"Text of fewer rows gets a row a document: joined, too much of it would be lost behind the last full row."
OF_TAR = "__key__"
"The field that names a sample of a tar. It holds no content."


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The command line."""

    files: Sequence[str]
    tokenizer: str
    dataset_info: str | None = None
    "LLaMA-Factory's; `files` are then names of its entries, none: all."
    mixture: str | None = None
    "FlagEmbedding's mixture file: the streams are its sources, with their shares."
    budget: str | None = None
    "With `mixture`: the percents are of this budget, written as in a recipe."
    max_seq_len: int | None = None
    "None: taken from the tokenizer."
    folder: Path
    "Where the recipe will lie."
    place: str = "./mix"
    "Where to publish, written as in a recipe."


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstRecipe:
    """A recipe, and the sentences for the user."""

    text: str
    drafts: Sequence[Draft]
    tokenizer: Tokenizer
    left_out: Sequence[str]
    "Sentences on what is in no stream."
    unknown: Sequence[str]
    "Lines on files of no known shape: what they hold, and what the nearest shapes lack."

    @property
    def live(self) -> list[Draft]:
        """The streams that are not written as comments."""
        return [draft for draft in self.drafts if not draft.refused]

    @property
    def not_read(self) -> Iterator[str]:
        """Lines on fields that no token comes from."""
        for draft in self.drafts:
            if unread := [field for field in draft.trial.unread if field != OF_TAR]:
                yield f"not read of {draft.name}: {named(unread)}"


def begin(asked: Request) -> FirstRecipe:
    """Looks at the files and writes the recipe's text.

    Raises:
        RecipeError: nothing was found, or nothing of what was found can be converted.
        Unreachable: a file or the tokenizer cannot be read.
    """
    found = _sorted(asked)
    drafts, left_out = list(named_apart(found.drafts)), [*found.left_out, *map(str, found.failed)]
    if not drafts:
        if found.failed and not found.unknown:
            raise found.failed[0]
        raise _nothing(found.unknown or left_out)
    tokenizer = open_tokenizer(TokenizerSpec(name=asked.tokenizer))
    top = _top(asked, tokenizer)
    mixed = [draft for draft in drafts if not draft.loader] or drafts
    left_out += [
        f"{draft.name} is left out: a {draft.guess.kind} trains in a run of its own; name its files alone for a recipe of theirs"
        for draft in drafts
        if draft.loader and mixed is not drafts
    ]
    drafts = [
        done for draft in mixed if (done := settled(draft, tokenizer, asked.folder, left_out))
    ]
    if not drafts:
        raise _nothing(left_out)
    drafts = [_with_needed_settings(draft, top, tokenizer, drafts) for draft in drafts]
    drafts = try_all(top, drafts, tokenizer, asked.folder)
    left_out += [f"{draft.name} is left out: {draft.refused}" for draft in drafts if draft.refused]
    return FirstRecipe(
        text=text_of(top, drafts),
        drafts=drafts,
        tokenizer=tokenizer,
        left_out=left_out,
        unknown=found.unknown,
    )


def _sorted(asked: Request) -> Sorted:
    if asked.dataset_info:
        return read_dataset_info(asked.dataset_info, asked.files, asked.folder)
    own = locate(os.path.expanduser(asked.tokenizer))
    if asked.mixture:
        return match(asked.mixture, asked.files, asked.folder, bool(asked.budget), but=[own])
    data = find_data(asked.files, asked.folder, but=[own])
    found = sort_out(data.files)
    found.left_out = data.sentences
    return found


def _top(asked: Request, tokenizer: Tokenizer) -> Top:
    length, why = (asked.max_seq_len, "as asked") if asked.max_seq_len else _length(tokenizer)
    name = asked.tokenizer
    if os.path.exists(os.path.expanduser(name)):
        path = os.path.relpath(os.path.expanduser(name), asked.folder)
        name = path if path.startswith("..") else f"./{path}"
    return Top(
        tokenizer=name, max_seq_len=length, why_length=why, place=asked.place, budget=asked.budget
    )


def _length(tokenizer: Tokenizer) -> tuple[int, str]:
    """Tokens of a row, and where the number is from."""
    config = Path(tokenizer.path).with_name("tokenizer_config.json")
    said = orjson.loads(config.read_bytes()).get("model_max_length") if config.exists() else None
    if not isinstance(said, (int, float)) or not 2 <= said < 1e9:
        return LENGTH, "the tokenizer names none of its own (model_max_length)"
    if said > LONGEST:
        return LENGTH, f"the tokenizer allows up to {int(said):,} (model_max_length)"
    return int(said), "the tokenizer's model_max_length"


def _with_needed_settings(
    draft: Draft, top: Top, tokenizer: Tokenizer, drafts: Sequence[Draft]
) -> Draft:
    """The stream with `layout: document` or `add_eos: false` if its text is short or the tokenizer has no EOS."""
    settings = dict(draft.settings)
    if draft.guess.kind == "pretraining":
        rows = size_of(draft.files) / BYTES_PER_TOKEN / top.max_seq_len
        alone = all(other.guess.kind == "pretraining" for other in drafts)
        if tokenizer.eos_id is None:
            settings["add_eos"] = (False, "the tokenizer has no EOS")
        if rows < FEWEST_ROWS and (alone or tokenizer.eos_id is not None):
            settings["layout"] = (
                "document",
                "a row a document: joined, they would fill few rows. concat is for more text",
            )
    return replace(draft, settings=settings)


def _nothing(lines: Sequence[str]) -> RecipeError:
    said = [line.strip().rstrip(".") + "." for line in lines]
    return RecipeError(
        " ".join(["nothing that converts was found, so there is no recipe to write.", *said])
    )
