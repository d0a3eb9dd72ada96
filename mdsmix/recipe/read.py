"""Reads a recipe's YAML into a Recipe.

OmegaConf reads the file, so `${...}` interpolation and `key=value` overrides work as in
LLM-Foundry's configs. Relative paths become absolute here, from the recipe's folder. A section
becomes its dataclass by that class's annotations.

Credentials have no place in a recipe: its values are written into manifests, training YAMLs and
messages. A recipe is refused if it asks for an environment variable with the name of a credential
(`SECRET_NAME`), or contains the value of one. boto3 and transformers read their credentials from
the environment themselves.
"""

from __future__ import annotations

import glob
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from mdsmix import schema
from mdsmix.errors import RecipeError
from mdsmix.messages import choose_verb, flatten_error, join_names
from mdsmix.recipe.plain_yaml import read_plain_yaml
from mdsmix.recipe.rules import add_held_out, find_contradictions
from mdsmix.recipe.spec import Recipe, WeightSpec
from mdsmix.recipe.stream_spec import ImagesSpec, StreamSpec
from mdsmix.record import is_encodable
from mdsmix.storage import begins_like_url, is_url, locate

if TYPE_CHECKING:
    from omegaconf import DictConfig

RecipeInput = str | os.PathLike[str] | Mapping[Any, Any] | Recipe
"""A recipe as a user gives it: the path of a YAML file, keys and values (also an OmegaConf config),
or a `Recipe` that was built in Python.
"""
Section = TypeVar("Section", Recipe, StreamSpec, ImagesSpec)
OVERRIDE = re.compile(r"[\w.\-\[\]]+=")
KEYED_BY_STREAM = ("streams", "mix")
"Sections of a recipe whose keys are names of streams."
LONGEST = 1 << 20
"The most bytes of a recipe or a training YAML: 1 MiB is enough for some 5,000 streams."
SECRET_NAME = re.compile(
    r"SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|(ACCESS|API|PRIVATE|ACCOUNT|ENCRYPTION)_?KEY"
    r"|(^|_)(TOKEN|PAT|AUTH)(_|$)",
    re.IGNORECASE,
)
YAML_HINTS = {
    "mapping values are not allowed": (
        "indent it like the line before, or put a text with `: ` in quotes"
    ),
    "did not find expected key": "indent all keys of a section alike",
    "could not find expected ':'": "write a colon and a space after the key",
    "cannot start any token": "indent with spaces, not tabs, and quote a value that begins with @",
    "found unexpected end of stream": "close the quotation mark",
}
"Part of a message of the YAML parser -> what the user may have to change."
_ENV_VARIABLE = re.compile(r"\$\{\s*oc\.env\s*:\s*['\"]?(\w+)")
_SHORTEST_SECRET = 12
"""Values of credentials with fewer characters are not searched for, since a recipe may contain them
by coincidence.
"""


class CommandWords(NamedTuple):
    """The words of a command line."""

    names: list[str]
    overrides: list[str]
    "`key=value` overrides of a recipe."


def split_overrides(words: Sequence[str]) -> CommandWords:
    """Split the words of a command line into names and overrides. A word that is an existing path
    is a name.
    """
    overrides = [word for word in words if OVERRIDE.match(word) and not os.path.exists(word)]
    return CommandWords([word for word in words if word not in overrides], overrides)


def read_text(path: str | os.PathLike[str]) -> str:
    """Return the text of a YAML file. It is read once, so that a pipe works too.

    Raises RecipeError if it cannot be read, is not UTF-8, or is longer than 1 MiB.
    """
    try:
        with Path(path).open("rb") as file:
            content = file.read(LONGEST + 1)  # one byte more shows that it is too long
        text = content.decode()
    except OSError as error:
        if begins_like_url(path):
            raise RecipeError(_describe_remote_recipe(path)) from None
        if isinstance(error, FileNotFoundError):
            raise RecipeError(f"{path}: no such file; name a YAML file.") from None
        raise RecipeError(f"{path} cannot be read: {error.strerror}; name a YAML file.") from None
    except UnicodeDecodeError:
        raise RecipeError(
            f"{path} cannot be read as YAML: it is not UTF-8; name a YAML file."
        ) from None
    if len(content) > LONGEST:
        raise RecipeError(
            f"{path} is longer than {LONGEST:,} bytes, so it is not a recipe: name the YAML file, "
            "not the data."
        )
    return text


def _describe_remote_recipe(path: str | os.PathLike[str]) -> str:
    return (
        f"{path} is not a file of this machine: a YAML is read only from a local path; copy it "
        "here and name the copy."
    )


def name_recipe(recipe: RecipeInput) -> str:
    """Return the name of a recipe in messages: its path, or RECIPE if it is not a file."""
    return os.fspath(recipe) if isinstance(recipe, (str, os.PathLike)) else "RECIPE"


def load_recipe(
    recipe: RecipeInput, overrides: Sequence[str] = (), folder: Path | None = None
) -> Recipe:
    """Read a recipe and apply overrides.

    Args:
        recipe: the YAML file; or the keys and values of one, as a mapping, an OmegaConf config or a
            `Recipe` that was built in Python.
        overrides: `key=value` each.
        folder: the base of relative paths. The default is the recipe's own folder, for a recipe
            that is not a file the working directory.

    Raises RecipeError if the recipe cannot be read or breaks a rule.
    """
    path = name_recipe(recipe)
    if folder is None:
        folder = Path(path).resolve().parent
    try:
        tree = _read_tree(recipe, path, overrides)
        if not tree:
            raise RecipeError(f"{path} is empty: name a recipe; `mdsmix init` writes one.")
        if "model" in tree and "streams" not in tree:
            raise RecipeError(
                f"{path} is a training YAML, which loads streams: name the recipe, which converts "
                "them."
            )
        if tree.get("streams", {}) is None:
            # Only comments are below the key. The rule on empty streams has the better sentence.
            tree["streams"] = {}
        loaded = _locate(schema.parse_mapping(Recipe, tree), folder)
    except schema.UnknownKey as unknown:
        place = schema.find_place(Recipe, unknown.key)
        if place:
            at_top = "" if "." in place else " at the top level"
            unknown = schema.UnknownKey(unknown.path, f"write {place}{at_top}.")
        raise RecipeError(f"{name_origin(path, unknown, overrides)}: {unknown}") from None
    except schema.Misfit as misfit:
        raise RecipeError(f"{name_origin(path, misfit, overrides)}: {misfit}") from None
    contradiction = next(find_contradictions(loaded), None)
    if contradiction:
        raise RecipeError(f"{name_origin(path, contradiction, overrides)}: {contradiction}")
    return add_held_out(loaded)


def name_origin(path: str, error: object, overrides: Sequence[str]) -> str:
    """Return where a wrong value is: the recipe's name, and the overrides that have set a key which
    the message names before its remedy: `recipe.yaml, with the override of max_bad`.

    Args:
        path: the name of the recipe in messages.
        error: the message, or an error with it. If it begins with a stream, such as
            `streams.web: kind is 'x'; the kinds are ...`, the keys after it are the stream's.
        overrides: `key=value` each.
    """
    fault = str(error).partition("; ")[0]
    place, colon, fault_of_stream = fault.partition(": ")
    has_place = bool(colon) and place.startswith("streams.")
    named = list[str]()
    for override in overrides:
        written = override.partition("=")[0]
        key = written.replace("[", ".").replace("]", "")  # streams[a.b].kind means streams.a.b.kind
        if has_place and key.startswith(f"{place}."):
            is_named = _names_key(fault_of_stream, key.removeprefix(f"{place}."))
        else:
            # `mix.x names no stream` is about the override `mix.x.repeat=2` too.
            is_named = _names_key(fault, key) or key.startswith(f"{fault.partition(' ')[0]}.")
        if is_named:
            named.append(written)
    if not named:
        return path
    return f"{path}, with the {choose_verb(named, 'override', 'overrides')} of {join_names(named)}"


def _names_key(sentence: str, key: str) -> bool:
    """Return whether the sentence names the key, or a key below it."""
    return bool(re.search(rf"(?<![\w.-]){re.escape(key)}(?![\w-])", sentence))


def _read_tree(recipe: RecipeInput, path: str, overrides: Sequence[str]) -> Any:
    """Return the keys and values of a recipe, with overrides and interpolation applied.

    Args:
        path: the name of the recipe in messages.
    """
    for override in overrides:
        if not OVERRIDE.match(override):
            raise RecipeError(
                f"`{override}` is not an override: write key=value, for example max_seq_len=4096."
            )
        if not is_encodable(override):
            raise RecipeError(
                mask_secrets(
                    f"the override {override!r} is not valid UTF-8, which YAML must be: write it "
                    "in UTF-8, and rename a file whose name is not."
                )
            )
        _require_yaml_value(override)
    if isinstance(recipe, (str, os.PathLike)):
        content: Any = read_text(recipe)
    elif isinstance(recipe, Recipe):
        content = schema.list_set_values(recipe)
    else:
        content = recipe
    with translate_errors(path, "recipe"):
        plain = None
        if isinstance(content, str) and not overrides:
            plain = read_plain_yaml(content)
        if plain is None:
            return _read_with_omegaconf(content, overrides)
        _refuse_secrets(content)
        if isinstance(plain.get("tokenizer"), str):
            plain["tokenizer"] = {"name": plain["tokenizer"]}
        _refuse_secrets(json.dumps(plain))
        return plain


def _require_yaml_value(override: str) -> None:
    """Raise RecipeError if the value of an override, `key=value`, is not valid YAML."""
    from omegaconf import OmegaConf
    from yaml import YAMLError

    try:
        OmegaConf.from_dotlist([override])
    except YAMLError:
        key, _, value = override.partition("=")
        quoted = f"{key}={json.dumps(value, ensure_ascii=False)}"
        raise RecipeError(
            mask_secrets(
                f"the value of {override} is not valid YAML, in which characters such as * and [ "
                f"have a meaning: write it in quotes, '{quoted}' in a shell."
            )
        ) from None


def _read_with_omegaconf(content: Any, overrides: Sequence[str]) -> Any:
    """Return the keys and values of a recipe, with overrides and interpolation applied by
    OmegaConf.

    Raises an error of OmegaConf or PyYAML if the recipe cannot be read, and RecipeError if it
    contains a credential.

    Args:
        content: the text of a YAML file, or keys and values.
        overrides: `key=value` each.
    """
    from omegaconf import OmegaConf

    loaded = make_config(content)
    # Search for secrets twice: before interpolation for the names of variables, and after
    # interpolation for their values.
    _refuse_secrets("\n".join([_write_unresolved(content, loaded), *overrides]))
    # Read the overrides.
    streams = loaded.get("streams")
    dotted = [str(name) for name in streams or () if "." in str(name)]
    bracketed = [_bracket_name(override, dotted) for override in overrides]
    changes = OmegaConf.from_dotlist(bracketed)
    if isinstance(changes.get("tokenizer"), str):
        # The override names another tokenizer: drop the arguments that the file has for its own.
        loaded["tokenizer"] = {}
    # `tokenizer: NAME` is short for `tokenizer: {name: NAME}`.
    for config in (loaded, changes):
        name = config.get("tokenizer")
        if isinstance(name, str):
            config["tokenizer"] = {"name": name}
    # A merge is a third of the reading time, so it is left out if nothing is overridden.
    merged = OmegaConf.merge(loaded, changes) if overrides else loaded
    tree = OmegaConf.to_container(merged, resolve=True, throw_on_missing=True)
    _refuse_secrets(json.dumps(tree, default=str))
    return tree


def _write_unresolved(content: Any, config: DictConfig) -> str:
    """Return the text of a recipe with its interpolations (`${oc.env:NAME}`) as they are written.

    Args:
        content: the text of a file, which is returned unchanged, or keys and values.
        config: the content as a config.
    """
    from omegaconf import OmegaConf

    if isinstance(content, str):
        return content
    return json.dumps(OmegaConf.to_container(config, resolve=False), default=str)


def _bracket_name(override: str, dotted: Sequence[str]) -> str:
    """Return the override, with the stream's name in brackets if the name contains a dot:
    `streams[a.b].kind=...` for `streams.a.b.kind=...`. Without brackets OmegaConf would look for a
    stream `a`. If several names fit, the longest is used.

    Args:
        override: `key=value`.
        dotted: the names of the recipe's streams that have a dot.
    """
    for name in sorted(dotted, key=len, reverse=True):
        for section in KEYED_BY_STREAM:
            prefix = f"{section}.{name}"
            if override.startswith((f"{prefix}.", f"{prefix}[", f"{prefix}=")):
                return f"{section}[{name}]{override[len(prefix) :]}"
    return override


@contextmanager
def translate_errors(origin: object, noun: str) -> Iterator[None]:
    """Turn any error of reading YAML in the block into a RecipeError with the library's reason.

    Args:
        origin: the file, for the message.
        noun: the type of file, for the message, such as `recipe`.
    """
    try:
        yield
    except Exception as error:
        import yaml
        from omegaconf.errors import OmegaConfBaseException

        # RecursionError: YAML that is nested too deeply, or refers to itself.
        reported = (RecipeError, ValueError, TypeError, RecursionError)
        if not isinstance(error, (yaml.YAMLError, OmegaConfBaseException, *reported)):
            raise
        reason = mask_secrets(_explain_error(error)).rstrip(".")
        raise RecipeError(f"{origin} is not a readable {noun}: {reason}.") from None


def _explain_error(error: Exception) -> str:
    """Return the reason of an error of reading YAML, with the line or the key that it is about:
    `line 2, column 1: found duplicate key local`, `local: Interpolation key 'x' not found`. For the
    usual mistakes, a hint follows.
    """
    from omegaconf.errors import OmegaConfBaseException
    from yaml import MarkedYAMLError

    if isinstance(error, MarkedYAMLError) and error.problem_mark:
        mark = error.problem_mark
        start = error.context_mark
        if start and "simple key" in str(error.context):
            mark = start  # a missing colon is only noticed in the next line
        reason = f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}"
        for problem, hint in YAML_HINTS.items():
            if problem in str(error.problem):
                reason += f"; {hint}"
        if start and "flow" in str(error.context):  # a bracket that is not closed
            reason += f" ({error.context}, line {start.line + 1})"
        return reason
    if isinstance(error, OmegaConfBaseException):
        reason, _, _ = str(error).partition("\n")
        cause = re.fullmatch(r'\w+ raised while resolving interpolation: "?(.*?)"?', reason)
        if cause:
            reason = cause[1]
        return f"{error.full_key}: {reason}" if error.full_key else reason
    return flatten_error(error)


def make_config(tree: Any) -> DictConfig:
    """Return an OmegaConf config of YAML text, or of dicts and lists.

    Raises RecipeError if the top level is not a mapping.
    """
    from omegaconf import DictConfig, OmegaConf

    config = OmegaConf.create(tree)
    if not isinstance(config, DictConfig):
        raise RecipeError("its top level must be keys and values.")
    return config


def _locate(recipe: Recipe, folder: Path) -> Recipe:
    """Return the recipe with its paths made absolute, and the names of streams and phases set as
    strings.
    """
    streams = {
        str(name): _locate_stream(str(name), stream, folder)
        for name, stream in recipe.streams.items()
    }
    phases = {
        str(name): replace(phase, mix=_name_by_strings(phase.mix))
        for name, phase in recipe.phases.items()
    }
    tokenizer = recipe.tokenizer
    processor = recipe.processor
    if processor:
        processor = locate_pretrained(processor, folder)
    return replace(
        _make_absolute(recipe, folder, "remote", "local"),
        folder=folder,
        tokenizer=replace(tokenizer, name=locate_pretrained(tokenizer.name, folder)),
        processor=processor,
        streams=streams,
        mix=_name_by_strings(recipe.mix),
        phases=phases,
    )


def _name_by_strings(mix: Mapping[Any, WeightSpec]) -> dict[str, WeightSpec]:
    """Return a mix with the names of its streams as strings: YAML reads `2024:` as a number."""
    return {str(name): weight for name, weight in mix.items()}


def locate_pretrained(name: str, folder: Path) -> str:
    """Return the absolute path of a tokenizer or processor, if its name is a path that exists from
    the recipe's folder. Return any other name, such as a hub name, unchanged.
    """
    path = folder / os.path.expanduser(name)
    return os.path.normpath(path) if name and os.path.exists(path) else name


def _locate_stream(name: str, stream: StreamSpec, folder: Path) -> StreamSpec:
    """Return a stream with its name set and its paths made absolute from the recipe's folder."""
    source = stream.source
    if source:
        home = Path(glob.escape(str(folder)))  # a [ or * in the folder's own name is not a pattern
        source = replace(source, path=[_resolve_url(path, home) for path in source.path])
    images = stream.images
    if images:
        images = _make_absolute(images, folder, "root")
    stream = _make_absolute(stream, folder, "remote", "local")
    return replace(stream, name=name, source=source, images=images)


def _make_absolute(section: Section, folder: Path, *keys: str) -> Section:
    """Return the section with absolute paths under these keys."""
    changes = dict[str, Any]()
    for key in keys:
        url = getattr(section, key)
        if url:
            changes[key] = _resolve_url(url, folder)
    return replace(section, **changes)


def _resolve_url(url: str, folder: Path) -> str:
    """Return a path made absolute from `folder`, or a URL without a slash at its end.

    Raises RecipeError for a URL without a bucket. With a stream's name after it, the name would be
    taken for the bucket.
    """
    if is_url(url):
        locate(url)
        return url.rstrip("/")
    return os.path.normpath(folder / os.path.expanduser(url))


def _refuse_secrets(text: str) -> None:
    """Raise RecipeError if a recipe's text refers to an environment variable that is a credential
    (`${oc.env:API_KEY}`), or contains the value of such a variable.
    """
    names = [name for name in _ENV_VARIABLE.findall(text) if SECRET_NAME.search(name)]
    for name, value in _find_secrets().items():
        if json.dumps(value)[1:-1] in text:  # as JSON writes it, without the quotes
            names.append(name)
    for name in names:
        raise RecipeError(
            f"it contains the environment variable {name}, a credential, which everyone could then "
            "read in the manifest and the training YAML: remove it, since the clients of S3 and "
            f"Hugging Face read {name} from the environment themselves"
        )


def mask_secrets(text: str) -> str:
    """Replace each credential's value in a message with its variable's name: `<API_KEY>`."""
    for name, value in _find_secrets().items():
        text = text.replace(value, f"<{name}>")
    return text


def _find_secrets() -> dict[str, str]:
    """Return variable -> value, of the environment's credentials."""
    return {
        name: value
        for name, value in os.environ.items()
        if SECRET_NAME.search(name) and len(value) >= _SHORTEST_SECRET
    }
