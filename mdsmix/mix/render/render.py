"""The rendered YAML of a recipe: a file of its own, or its sections set into an existing config.

The text depends only on the recipe and the streams. It contains no time and no host, so rendering
twice gives the same bytes, and a difference under version control is a difference of the mix.

A config belongs to its owner, so it is written as a shell redirection (`> file`) would do it, but
never by half: a symlink is followed, the mode is kept, a FIFO or a device is written into, and a
folder that does not exist is refused as a typing error. The files of a stream are written in
another way, since nobody links them or changes their modes: storage replaces them by a rename and
makes their folders.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from io import StringIO
from itertools import islice
from pathlib import Path
from threading import Thread
from typing import NamedTuple

from mdsmix import __version__
from mdsmix.errors import MixRefused, RecipeError, Unreachable
from mdsmix.foundry_yaml.training_yaml import Settings, parse_training_yaml, read_unresolved
from mdsmix.kinds import is_data, open_recipe
from mdsmix.mix.epoch.apportion import describe_shares, make_shares_table
from mdsmix.mix.epoch.figures import make_epoch_table, measure_epoch
from mdsmix.mix.render.foundry_config import EVALS, Section, make_sections
from mdsmix.mix.render.phase_keys import list_phase_remarks, make_phase_keys, refuse_phase_yaml
from mdsmix.mix.render.set_into import MARK, dump_yaml, set_sections
from mdsmix.mix.render.small_epoch import find_small_epoch, forget_small_epoch
from mdsmix.mix.streams.command_words import is_recipe_file
from mdsmix.mix.streams.mix import Mix
from mdsmix.mix.streams.recipe_streams import (
    RecipeStreams,
    open_recipe_streams,
    with_published_hash,
)
from mdsmix.mix.streams.resolve import OwnEvals, make_mix
from mdsmix.recipe.phases import require_one_phase
from mdsmix.recipe.read import RecipeInput, name_recipe, read_text
from mdsmix.storage import locate
from mdsmix.table import format_table

DRAWN_BATCHES = 2
DRAWN_BATCH_SIZE = 2
DRAW_SECONDS = 300
"After this time --validate ends with an error."


def validate_with_foundry(text: str, labels: Sequence[str]) -> str:
    """Draw batches with LLM-Foundry's own loaders, and return a line on their shapes. What
    LLM-Foundry prints is not shown.

    Args:
        text: the rendered YAML.
        labels: the loaders to draw from.

    Raises MixRefused if a loader fails or gives no batch, and RecipeError if llmfoundry is not
    installed.
    """
    if find_spec("llmfoundry") is None:
        raise RecipeError(
            "--validate builds LLM-Foundry's own loader, and llmfoundry is not installed in the "
            "environment of this mdsmix: install mdsmix into Foundry's environment and run mdsmix "
            "there, or leave --validate out."
        )
    from concurrent.futures import Future, wait  # 2 ms, and only --validate needs it

    # Streaming may wait for ever for a shard, so a thread draws, and is abandoned then. An alarm
    # would work only in the main thread, and would replace the alarm of a scheduler.
    drawing = Future[str]()

    def draw() -> None:
        try:
            drawing.set_result(_draw_batches(text, labels))
        except BaseException as error:
            drawing.set_exception(error)

    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        Thread(target=draw, name="draw", daemon=True).start()
        wait([drawing], DRAW_SECONDS)
    if not drawing.done():
        reason = (
            f"no batch in {DRAW_SECONDS} s: a shard or a store does not answer; run `mdsmix check`."
        )
    else:
        error = drawing.exception()
        if error is None:
            return drawing.result()
        reason = f"{type(error).__name__}: {error}".strip()
    raise MixRefused(
        "LLM-Foundry's loader fails on the rendered YAML, so correct the loader's keys in the "
        f"recipe or config, or render without --validate: {reason}"
    )


def _draw_batches(text: str, labels: Sequence[str]) -> str:
    """Draw a few batches with each named loader, and return a line with their shapes."""
    from mdsmix.tokenizer.published import localize_spec

    # Imported by name: LLM-Foundry is not a dependency of mdsmix, and only this option imports it.
    build_dataloader = import_module("llmfoundry.data.dataloader").build_dataloader
    build_tokenizer = import_module("llmfoundry.utils.builders").build_tokenizer
    yaml = parse_training_yaml(text, "the rendered YAML")
    assert yaml.tokenizer is not None, "a rendered YAML names its tokenizer"
    kwargs = yaml.value_at("tokenizer", "kwargs") or {}
    tokenizer = build_tokenizer(localize_spec(yaml.tokenizer, yaml.stream_urls).name, kwargs)
    drawn = list[str]()
    for loader in (yaml.train, *yaml.evals):
        if loader.label not in labels:
            continue
        # `label` names an evaluation, and is not a key of a loader.
        section = {key: value for key, value in loader.section.items() if key != "label"}
        batches = build_dataloader(section, tokenizer, DRAWN_BATCH_SIZE).dataloader
        shapes = list[str]()
        for batch in islice(batches, DRAWN_BATCHES):
            shapes.append(str(tuple(batch["input_ids"].shape)))
        if not shapes:
            raise ValueError(
                f"{loader.label} gives no batch; check for a missing shard or too few samples"
            )
        drawn.append(f"{loader.label} {', '.join(shapes)}")
    return f"LLM-Foundry's loaders give batches of input_ids: {'; '.join(drawn)}"


def refuse_recipe(target: str, option: str) -> None:
    """Raise RecipeError if the target is a recipe or a data file, which writing would destroy.

    Args:
        target: the file to write; empty if the option is not given.
        option: the option that names the file, such as `--into`.
    """
    if os.path.isfile(target) and is_recipe_file(target):
        content = "data file" if is_data(target) else "recipe"
        raise RecipeError(
            f"{option} names the {content} {target}, and writing a training YAML would destroy the "
            f"{content}; name a config of LLM-Foundry, or a new file, with {option}."
        )


class RenderedRecipe(NamedTuple):
    """A recipe's mix, and its training YAML."""

    mix: Mix
    text: str
    "The YAML: a file of its own, or the config that the recipe's sections are set into."


def render_recipe(
    recipe_input: RecipeInput,
    overrides: Sequence[str],
    into: str | None,
    own_evals: OwnEvals = "look",
    may_estimate: bool = False,
    with_callback: bool = False,
    is_one: bool = False,
) -> list[RenderedRecipe]:
    """Render a recipe as a YAML of its own, or set into a config. If it has phases, render each
    phase that it chooses. Nothing is checked or written.

    Args:
        recipe_input: the recipe's path, or its keys and values.
        overrides: changes of the recipe, such as "max_seq_len=4096".
        into: path of the config that the sections are set into; None for a file of their own.
        own_evals: what to do with evaluations that are in the config and not in the recipe: `look`
            opens their streams, `keep` checks only the keys of those that cannot be opened, `drop`
            removes them.
        may_estimate: whether shares may be computed from the first samples of streams whose tokens
            were not counted.
        with_callback: whether to add the callback that logs the figures of each stream.
        is_one: whether to refuse a recipe with phases that chooses none of them.
    """
    path = name_recipe(recipe_input)
    recipe = open_recipe(recipe_input, overrides)
    if is_one:
        require_one_phase(recipe, path)
    rendered = list[RenderedRecipe]()
    for opened in open_recipe_streams(recipe, path, may_estimate, overrides=overrides):
        mix, text = _render_streams(opened, path, into, own_evals, with_callback)
        rendered.append(RenderedRecipe(replace(mix, overrides=overrides), text))
    return rendered


def _render_streams(
    opened: RecipeStreams, path: str, into: str | None, own_evals: OwnEvals, with_callback: bool
) -> RenderedRecipe:
    """Render the streams of a recipe, or of one phase. The other arguments are those of
    `render_recipe`.

    Args:
        opened: the streams.
        path: the recipe's path.
    """
    recipe = with_published_hash(opened.recipe, opened.streams.values())

    def make_tree(config: Settings) -> Section:
        keys = make_phase_keys(opened.phase, config) if opened.phase else None
        return make_sections(recipe, opened.streams, config, with_callback, keys)

    if not into:
        tree = make_tree({})
        mix = make_mix(tree, path, opened.streams, recipe, None, own_evals, opened.shares)
        mix = replace(mix, phase=opened.phase)
        return RenderedRecipe(mix, make_epoch_comment(mix) + dump_yaml(tree))

    old_text = read_text(into)
    if opened.phase:
        refuse_phase_yaml(old_text, into)
    config = read_unresolved(old_text, into)
    dropped = set[str]()
    if own_evals == "drop" and EVALS in config:
        dropped.add(EVALS)
    without_dropped = {key: value for key, value in config.items() if key not in dropped}
    remaining = forget_small_epoch(old_text, without_dropped)

    def set_into(source: Settings) -> RenderedRecipe:
        """Render the sections for a config that has the keys of `source`, and set them into
        `old_text`. Return the mix and the new text.
        """
        text, changed = set_sections(old_text, config, make_tree(source), into, without=dropped)
        mix = make_mix(text, path, opened.streams, recipe, into, own_evals, opened.shares)
        return RenderedRecipe(replace(mix, changed=changed, phase=opened.phase), text)

    # Render once to count the samples of an epoch. If they are few, render again with more keys.
    mix, text = set_into(remaining)
    small = find_small_epoch(mix, recipe, remaining)
    if small:
        mix, text = set_into(small.add_to(remaining))
        mix = replace(mix, changed=[small.explain(change) for change in mix.changed])
    head_line = f"{MARK} {small.head_line}\n" if small else ""
    return RenderedRecipe(mix, make_epoch_comment(mix) + head_line + text)


def list_remarks(mix: Mix) -> list[str]:
    """Return sentences on keys that the user of a rendered YAML must set."""
    return list_phase_remarks(mix.phase, mix.yaml.config) if mix.phase else []


def fetch_command(mix: Mix) -> str | None:
    """Return the shell command with which every training node fetches the tokenizer before it
    trains. The command names the store's endpoint as this machine knows it. None if nodes need not
    fetch the tokenizer.
    """
    name = mix.yaml.value_at("tokenizer", "name")
    if mix.tokenizer_home is None or name == mix.tokenizer_home.url:
        return None
    return shlex.join(mix.tokenizer_home.fetch_command(name))


def make_epoch_comment(mix: Mix) -> str:
    """Return the comment above the YAML: the samples, tokens and share of each stream in an epoch,
    and the recipe's shares as samples.
    """
    recipe = os.path.basename(mix.recipe_path or mix.yaml.origin)
    epoch = make_epoch_table(measure_epoch(mix.train, mix.yaml.batch_size))
    source = recipe
    if mix.phase:
        source += f", phase {mix.phase.name} ({mix.phase.number + 1} of {len(mix.phase.names)})"
    comment = [
        f"rendered by version {__version__} from {source}. An epoch of the {mix.train.name} "
        "loader:",
        *_indent(format_table(epoch)),
    ]
    if mix.shares:
        table = make_shares_table(mix.shares)
        comment.append(describe_shares(mix.shares))
        comment += _indent([*format_table(table), *table.notes])
    command = fetch_command(mix)
    if command:
        comment.append(
            "the tokenizer is stored next to the streams. If mdsmix is installed next to "
            "LLM-Foundry, training fetches it. Otherwise fetch it on every training node first "
            "with this command:"
        )
        comment += _indent([command])
    return "".join(f"{MARK} {line}".rstrip() + "\n" for line in comment)


def _indent(lines: Iterable[str]) -> list[str]:
    """Return the lines with two spaces before each."""
    return [f"  {line}" for line in lines]


def require_writable(target: str) -> None:
    """Raise RecipeError if the target cannot be a file. Commands call this before any work."""
    location = locate(target)
    if location.is_store:
        return
    path = os.path.realpath(location.url)
    folder = os.path.dirname(path)
    reason = ""
    if os.path.isdir(path):
        reason = "it is a folder; name a file in it"
    elif not os.path.exists(location.url) and not os.path.isdir(folder):
        reason = f"there is no folder {folder}; make it, or correct the path"
    if reason:
        raise RecipeError(f"the file {target} cannot be written: {reason}.")


def write_yaml(target: str, text: str) -> None:
    """Write the text to a store in one PUT, to a FIFO or device directly, or to a file.

    A file is replaced by a rename and keeps its mode. If the target is a symlink, the file that it
    points to is replaced, and the symlink stays.

    Raises Unreachable if the target cannot be written.
    """
    require_writable(target)
    location = locate(target)
    content = text.encode()
    if location.is_store:
        location.write(content)
        return
    path = os.path.realpath(location.url)
    try:
        if is_device(path):
            Path(path).write_bytes(content)
            return
        mode = os.stat(path).st_mode if os.path.exists(path) else None
        locate(path).write(content)
        if mode is not None:
            os.chmod(path, mode)
    except BrokenPipeError:
        raise  # the reader of the FIFO has gone: `main` handles the error as for every pipe
    except OSError as error:
        raise Unreachable(f"cannot write {target}: {error.strerror or error}.") from None


def is_device(path: str) -> bool:
    """Check whether the path exists and is not a regular file, such as a FIFO or a device."""
    return os.path.exists(path) and not os.path.isfile(path)
