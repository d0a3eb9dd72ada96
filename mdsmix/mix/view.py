"""What was asked about -> a Mix: a recipe, a training YAML, or folders of published streams.

Indexes and manifests are read here, two small files a stream, of many streams at a time. The rest of a stream is looked at only when
a check asks. A stream is read where it was published, at its remote, or in its local folder where it has none.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mdsmix.errors import MdsmixError, RecipeError, Unreachable
from mdsmix.kinds import open_recipe
from mdsmix.mix import sections
from mdsmix.mix.streams import Loader, Mix, Stream
from mdsmix.recipe import Recipe, StreamSpec, TokenizerSpec
from mdsmix.recipe import text as yaml_text
from mdsmix.recipe.read import OVERRIDE
from mdsmix.shards.index import BASENAME, read_index
from mdsmix.shards.manifest import TokenizerCard, read_manifest
from mdsmix.shards.published import Published, find_published, read_published
from mdsmix.storage import Location, locate, together
from mdsmix.typed import brief

JUDGED = ("max_seq_len", "tokenizer", "train_loader", "eval_loader")
"Sections that must resolve; of others, what does resolve is looked at."
DATA_KEYS = {"streams", "remote", "local", "hf_name"}
"How a training YAML names its data, under train_loader.dataset."


def view(targets: Sequence[str]) -> Mix:
    """Tells by content what was asked about: a recipe (with overrides), a training YAML, or streams."""
    overrides = [t for t in targets if OVERRIDE.match(t) and not os.path.exists(t)]
    named = [t for t in targets if t not in overrides]
    if len(named) == 1 and os.path.isfile(named[0]) and os.path.basename(named[0]) != BASENAME:
        if _is_recipe(named[0]):
            return view_recipe(open_recipe(named[0], overrides), named[0])
        if not overrides:
            return view_yaml(named[0])
    if overrides:
        raise RecipeError(f"`{overrides[0]}` overrides a recipe, and none was named before it.")
    return view_streams(named)


def _is_recipe(path: str) -> bool:
    """A recipe names its streams at the top level; a training YAML has a model, and data in train_loader.dataset."""
    try:
        tree = unresolved(read_text(path), path)
    except RecipeError:
        return False  # view_yaml says where it breaks
    loader = tree.get("train_loader")
    dataset = loader.get("dataset") if isinstance(loader, Mapping) else None
    names_data = isinstance(dataset, Mapping) and bool(DATA_KEYS & set(dataset))
    return "streams" in tree and "model" not in tree and not names_data


def view_recipe(recipe: Recipe, path: str | os.PathLike[str]) -> Mix:
    """The mix that a recipe renders."""
    specs = recipe.streams.values()
    streams = dict(
        zip(recipe.streams, together(lambda spec: _of_recipe(recipe, spec), specs), strict=True)
    )
    tree = sections.sections(recipe, {n: s.settings for n, s in streams.items()})
    return mix_of(resolved(tree, str(path)), str(path), streams, recipe=recipe)


def view_yaml(path: str | os.PathLike[str]) -> Mix:
    """The mix that a training YAML of LLM-Foundry describes; relative paths are the current folder's, as for Foundry."""
    return mix_of(resolved(read_text(path), str(path)), str(path))


def view_streams(urls: Sequence[str]) -> Mix:
    """The mix of streams at these places, unweighted, under the loader that can read most of them."""
    streams: dict[str, Stream] = {}
    for url, stream in zip(urls, together(_at, urls), strict=True):
        if stream.name in streams:
            raise RecipeError(f"{url} is named twice; name every stream once.")
        streams[stream.name] = stream
    dataset: dict[str, Any] = {"streams": {n: dict(s.settings) for n, s in streams.items()}}
    loader = _likely_loader(streams)
    if loader == "finetuning":
        dataset["decoder_only_format"] = True
    length = max((s.card.encoding.max_seq_len for s in streams.values() if s.card), default=None)
    if length:
        dataset["max_seq_len"] = length
    section = {"name": loader, "dataset": dataset | {"shuffle": True}}
    mix = mix_of({"train_loader": section}, ", ".join(urls), streams)
    return dataclasses.replace(mix, is_bare=True)


def _likely_loader(streams: Mapping[str, Stream]) -> str:
    """`text` where every stream holds plain tokens or text; what then does not fit is a finding."""
    plain = all({"tokens", "text"} & set(s.columns) for s in streams.values())
    return "text" if plain else "finetuning"


def mix_of(
    config: Mapping[str, Any],
    origin: str,
    known: Mapping[str, Stream] | None = None,
    recipe: Recipe | None = None,
) -> Mix:
    """A Mix from a resolved config; streams that were opened already are not opened again."""
    train = config.get("train_loader")
    if not isinstance(train, Mapping):
        raise RecipeError(
            f"{origin} is neither a recipe nor a training YAML: it has no train_loader."
        )
    if _hub_name(train):
        raise RecipeError(
            f"train_loader of {origin} reads the Hugging Face dataset {_hub_name(train)} and no MDS stream, so there is "
            "nothing to check."
        )
    card, problem = _tokenizer(config, recipe)
    return Mix(
        origin=origin,
        recipe=origin if recipe else None,
        config=config,
        train=_loader("train_loader", train, known or {}),
        evals=tuple(
            _loader(f"eval_loader {e.get('label', '')}".strip(), e, known or {})
            for e in _evals(config.get("eval_loader"))
        ),
        tokenizer=card,
        tokenizer_problem=problem,
    )


def _hub_name(section: Mapping[str, Any]) -> str | None:
    """The Hugging Face dataset that a finetuning loader reads instead of streams."""
    dataset = section.get("dataset")
    return dataset.get("hf_name") if isinstance(dataset, Mapping) else None


def _evals(entries: Any) -> list[Mapping[str, Any]]:
    """The evaluations that read streams; Foundry takes one or a list."""
    listed = entries if isinstance(entries, list) else [entries]
    return [e for e in listed if isinstance(e, Mapping) and not _hub_name(e)]


def resolved(tree: Any, origin: str) -> dict[str, Any]:
    """A config (text or mapping) with every `${...}` filled in; a section that cannot be and is not judged is left out."""
    with _readable(origin):
        config = _parsed(tree, origin)
        return {str(key): value for key in config for value in _filled(config, key)}


def unresolved(text: str, origin: str) -> dict[str, Any]:
    """A config's text as keys and values, every `${...}` as it stands."""
    from omegaconf import OmegaConf

    with _readable(origin):
        found: Any = OmegaConf.to_container(_parsed(text, origin))
        return dict(found)


def _parsed(tree: Any, origin: str) -> Any:
    from omegaconf import DictConfig, OmegaConf

    config = OmegaConf.create(tree)
    if not isinstance(config, DictConfig):
        raise RecipeError(f"{origin} is no training YAML: its top level must be keys.")
    return config


@contextmanager
def _readable(origin: str) -> Iterator[None]:
    import yaml
    from omegaconf.errors import OmegaConfBaseException

    try:
        yield
    except (yaml.YAMLError, OmegaConfBaseException, ValueError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise RecipeError(f"{origin} is not a readable training YAML: {reason}.") from None


def _filled(config: Any, key: Any) -> Iterator[Any]:
    """The section's value; nothing where it needs, say, an environment variable of the training node."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        section = config[key]
        is_tree = OmegaConf.is_config(section)
        yield OmegaConf.to_container(section, resolve=True) if is_tree else section
    except OmegaConfBaseException:
        if key in JUDGED:
            raise


def read_text(path: str | os.PathLike[str]) -> str:
    try:
        return yaml_text.read_text(Path(path))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise RecipeError(f"{path} cannot be read as YAML: {reason}.") from None


def _loader(label: str, section: Mapping[str, Any], known: Mapping[str, Stream]) -> Loader:
    dataset = section.get("dataset")
    found = dict(_stream_sections(dataset if isinstance(dataset, Mapping) else {}))
    if not found and label != "train_loader":
        return Loader(label=label, section=section, streams=())
    streams = together(
        lambda item: (
            known[item[0]]
            if item[0] in known and known[item[0]].settings == item[1]
            else _of_section(*item)
        ),
        found.items(),
    )
    return Loader(label=label, section=section, streams=tuple(streams))


def _stream_sections(dataset: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Name -> settings; a dataset with remote or local of its own is one stream. Split is inherited, as in Streaming."""
    streams = dataset.get("streams")
    if isinstance(streams, Mapping) and streams:
        for name, section in streams.items():
            settings = dict(section) if isinstance(section, Mapping) else {}
            inherited = {"split": dataset["split"]} if dataset.get("split") else {}
            yield str(name), settings if settings.get("split") else settings | inherited
    elif place := dataset.get("remote") or dataset.get("local"):
        keys = {k: dataset[k] for k in ("remote", "local", "split") if dataset.get(k)}
        yield str(place).rstrip("/").rpartition("/")[2], keys


def _of_section(name: str, settings: Mapping[str, Any]) -> Stream:
    place = settings.get("remote") or settings.get("local")
    if not place:
        raise RecipeError(
            f"The stream {name} has neither remote nor local, so nothing says where it is; add one of them."
        )
    folder = locate(str(place))
    return _open(
        name, folder / str(settings["split"]) if settings.get("split") else folder, settings
    )


def _of_recipe(recipe: Recipe, spec: StreamSpec) -> Stream:
    """A stream of the recipe. One made by others may lie flat, without a folder for its split."""
    place = locate(recipe.published(spec))
    found = read_published(place / spec.split)
    if found is None and spec.source:
        raise Unreachable(
            f"the stream {spec.name} is not published at {place / spec.split}: run `mdsmix convert` on this recipe first"
        )
    found = found or read_published(place) or _in(place / spec.split)
    root, split = (place, "") if found.folder == place else (found.folder.parent, found.folder.name)
    settings = sections.stream_section(recipe, spec, str(root), split, found.index)
    return _stream(spec.name, found, settings, is_sourced=spec.source is not None)


def _in(folder: Location) -> Published:
    """What is published in just this folder; where it has no index, the reading of it says so."""
    return Published(folder=folder, index=read_index(folder), manifest=read_manifest(folder))


def _stream(
    name: str, found: Published, settings: Mapping[str, Any], is_sourced: bool = False
) -> Stream:
    return Stream(
        name=name,
        folder=found.folder,
        index=found.index,
        manifest=found.manifest,
        settings=settings,
        is_sourced=is_sourced,
    )


def _open(name: str, folder: Location, settings: Mapping[str, Any]) -> Stream:
    found = read_published(folder)
    if found is None or found.folder != folder:
        fix = (
            f"set its split to {found.folder.name}"
            if found
            else "correct its remote, local or split"
        )
        raise Unreachable(f"the stream {name} is not at {folder}: there is no {BASENAME}; {fix}")
    return _stream(name, found, settings)


def _at(url: str) -> Stream:
    """The stream that a user points at: by the folder of its split, the index in it, or the folder above one split."""
    place = at.parent if (at := locate(url)).name == BASENAME else at
    found = read_published(place) or _in(find_published(place))
    folder, where = found.folder, "remote" if place.is_s3 else "local"
    if folder == place:
        return _stream(_name(url, folder), found, {where: str(place)})
    name = place.name if folder.parent == place else _name(url, place)
    return _stream(name, found, {where: str(folder.parent), "split": folder.name})


def _name(url: str, folder: Location) -> str:
    """`web/train` for a folder named by its split, which alone says little; no more than the user named."""
    named = url.rstrip("/").removesuffix(f"/{BASENAME}")
    return f"{folder.parent.name}/{folder.name}".strip("/") if "/" in named else folder.name


def _tokenizer(
    config: Mapping[str, Any], recipe: Recipe | None
) -> tuple[TokenizerCard | None, str | None]:
    """The run's tokenizer, or why it could not be looked at."""
    from mdsmix.encode.tokenizer import open_tokenizer

    section = config.get("tokenizer")
    if not isinstance(section, Mapping) or not section.get("name"):
        return None, None
    given = section.get("kwargs") or {}
    if not isinstance(given, Mapping):
        return None, f"tokenizer.kwargs is {brief(given)}, and must hold keys"
    # model_max_length shapes no id, and the recipe's own spec is the one whose snapshot was taken when converting.
    kwargs = {k: v for k, v in given.items() if k != "model_max_length"}
    spec = recipe.tokenizer if recipe else TokenizerSpec(name=str(section["name"]), kwargs=kwargs)
    try:
        found = open_tokenizer(spec)
    except MdsmixError as error:
        return None, str(error)
    return TokenizerCard.of(found), None
