"""The rendered YAML of a recipe: a file of its own, or its sections set into an existing config.

The text depends on the recipe and the streams alone: no time and no host, so that rendering twice
gives the same bytes and a difference under version control is a difference of the mix.

A file that a user named is written as by a shell redirection, yet never half of it. Nobody links or
changes modes of a stream's files, so storage replaces them by a rename and makes their folders. A
config belongs to its owner: a symlink is followed, the mode is kept, a FIFO or a device is written
into, and a folder that does not exist is refused as a typing error.
"""

from __future__ import annotations

import os
import shlex
import signal
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from io import StringIO
from itertools import islice
from pathlib import Path

from mdsmix import __version__
from mdsmix.errors import MixRefused, RecipeError, Unreachable
from mdsmix.foundry_yaml.training_yaml import parse_training_yaml, read_unresolved
from mdsmix.kinds import open_recipe
from mdsmix.mix.epoch.apportion import describe_shares, make_shares_table
from mdsmix.mix.epoch.figures import make_epoch_table, measure_epoch
from mdsmix.mix.render.foundry_config import EVALS, make_sections
from mdsmix.mix.render.set_into import MARK, dump_yaml, set_sections
from mdsmix.mix.streams.mix import Mix
from mdsmix.mix.streams.resolve import (
    OwnEvals,
    is_recipe_file,
    make_mix,
    open_recipe_streams,
    with_published_hash,
)
from mdsmix.recipe.read import read_text
from mdsmix.storage import locate
from mdsmix.table import format_lines

BATCHES = 2
BATCH_SIZE = 2
SECONDS = 300


def validate_with_foundry(text: str, labels: Sequence[str]) -> str:
    """One line on the batches that LLM-Foundry draws from the loaders of these labels; what
    LLM-Foundry prints is not shown. MixRefused where it draws none, RecipeError where llmfoundry is
    not installed.
    """
    if find_spec("llmfoundry") is None:
        raise RecipeError(
            "--validate builds LLM-Foundry's own loader, and llmfoundry is not installed beside this mdsmix: install "
            "mdsmix into Foundry's environment and run it there, or leave --validate out."
        )
    signal.signal(signal.SIGALRM, _give_up)
    signal.alarm(SECONDS)
    try:
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            return _draw(text, labels)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".strip()
        raise MixRefused(f"LLM-Foundry's loader fails on the rendered YAML: {reason}") from None
    finally:
        signal.alarm(0)


def _give_up(*_: object) -> None:
    raise TimeoutError(
        f"no batch in {SECONDS} s: a shard or a store does not answer; run `mdsmix check`."
    )


def _draw(text: str, labels: Sequence[str]) -> str:
    from mdsmix.tokenizer.published import localize_spec

    # By name: LLM-Foundry is no dependency of mdsmix, and only this option imports it.
    build_dataloader = import_module("llmfoundry.data.dataloader").build_dataloader
    build_tokenizer = import_module("llmfoundry.utils.builders").build_tokenizer
    yaml = parse_training_yaml(text, "the rendered YAML")
    spec, told = yaml.tokenizer, list[str]()
    assert spec is not None, "a rendered YAML names its tokenizer"
    kwargs = yaml.value_at("tokenizer", "kwargs") or {}
    tokenizer = build_tokenizer(localize_spec(spec, yaml.stream_urls).name, kwargs)
    for each in (s for s in (yaml.train, *yaml.evals) if s.label in labels):
        section = {k: v for k, v in each.section.items() if k != "label"}
        loader = build_dataloader(section, tokenizer, BATCH_SIZE).dataloader
        shapes = [str(tuple(batch["input_ids"].shape)) for batch in islice(loader, BATCHES)]
        if not shapes:
            raise ValueError(
                f"{each.label} gives no batch; look for a lost shard or too few samples"
            )
        told.append(f"{each.label} {', '.join(shapes)}")
    return f"LLM-Foundry's loaders give batches of input_ids: {'; '.join(told)}"


def refuse_recipe(target: str, option: str) -> None:
    """RecipeError where the file `target`, which would be overwritten, is a recipe."""
    if os.path.isfile(target) and is_recipe_file(target):
        raise RecipeError(
            f"{option} {target}: that file is a recipe, which the sections of a training YAML would spoil; name a config of "
            "LLM-Foundry, or a new file."
        )


def render_recipe(
    path: str,
    overrides: Sequence[str],
    into: str | None,
    own_evals: OwnEvals = "look",
    may_estimate: bool = False,
) -> tuple[Mix, str]:
    """The mix of a recipe and its YAML, a file of its own or set into the config `into`. Nothing is
    checked or written.

    Args:
        own_evals: what becomes of the config's own evaluations.
        may_estimate: shares may be worked out from first samples of streams whose tokens were not
        counted.
    """
    recipe = open_recipe(path, overrides)
    streams, shares = open_recipe_streams(recipe, path, may_estimate, overrides=overrides)
    recipe = with_published_hash(recipe, streams.values())
    before = read_text(into) if into else ""
    config = read_unresolved(before, into) if into else {}
    kept = config
    if own_evals == "drop":
        kept = {key: value for key, value in config.items() if key != EVALS}
    tree = make_sections(recipe, streams, kept)
    text, changed = dump_yaml(tree), list[str]()
    if into:
        text, changed = set_sections(
            before, config, tree, into, without=config.keys() - kept.keys()
        )
    mix = make_mix(text if into else tree, path, streams, recipe, into, own_evals, shares)
    mix = replace(mix, changed=changed, overrides=overrides)
    return mix, make_epoch_comment(mix) + text


def fetch_command(mix: Mix) -> str | None:
    """The command by which every training node first fetches the tokenizer, with this machine's
    endpoint; None where none is needed.
    """
    name = mix.yaml.value_at("tokenizer", "name")
    if mix.tokenizer_home is None or name == mix.tokenizer_home.url:
        return None
    return shlex.join(mix.tokenizer_home.fetch_command(name))


def make_epoch_comment(mix: Mix) -> str:
    """The comment above the YAML: samples, tokens and share of every stream in an epoch, and the
    recipe's shares as samples.
    """
    recipe, shares = os.path.basename(mix.recipe_path or mix.yaml.origin), mix.shares
    epoch = make_epoch_table(measure_epoch(mix.train, mix.yaml.batch_size))
    told = [
        f"rendered by version {__version__} from {recipe}. An epoch of the {mix.train.name} loader comes to",
        *(f"  {line}" for line in format_lines(epoch)),
    ]
    if shares:
        table = make_shares_table(shares)
        told += [
            describe_shares(shares),
            *(f"  {line}" for line in (*format_lines(table), *table.notes)),
        ]
    if command := fetch_command(mix):
        told += [
            "the tokenizer lies beside the streams; on every training node, before training, by this command or by `mdsmix fetch`, which takes the same words:",
            f"  {command}",
        ]
    return "".join(f"{MARK} {line}".rstrip() + "\n" for line in told)


def require_writable(target: str) -> None:
    """RecipeError where the target cannot be a file; asked before any work is done."""
    place = locate(target)
    path = os.path.realpath(place.url)
    is_lost = not os.path.exists(place.url) and not os.path.isdir(os.path.dirname(path))
    if not place.is_store and (is_lost or os.path.isdir(path)):
        raise RecipeError(
            f"{target} cannot be written: it is a folder, or there is no folder {os.path.dirname(path)}; correct the path."
        )


def write_yaml(target: str, text: str) -> None:
    """Writes the text: to a store by one PUT, to a FIFO or device directly, to a file by a rename
    where its symlinks end.

    Unreachable where the target cannot be written.
    """
    require_writable(target)
    place, content = locate(target), text.encode()
    if place.is_store:
        place.write(content)
        return
    path = os.path.realpath(place.url)
    try:
        if is_device(path):
            Path(path).write_bytes(content)
            return
        mode = os.stat(path).st_mode if os.path.exists(path) else None
        locate(path).write(content)
        if mode is not None:
            os.chmod(path, mode)
    except BrokenPipeError:
        raise  # the reader of the FIFO has gone: main handles it as for every pipe
    except OSError as error:
        raise Unreachable(f"cannot write {target}: {error.strerror or error}.") from None


def is_device(path: str) -> bool:
    """Whether the path is a FIFO, a device or a folder: it exists and is no regular file."""
    return os.path.exists(path) and not os.path.isfile(path)
