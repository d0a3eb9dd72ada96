"""Keys at the top of the YAML of a phase. Each phase is a run of `llmfoundry train` that begins
with the last checkpoint of the phase before.

Composer counts on from the checkpoint, so phase n ends with epoch n (`max_duration`), and the
learning rate follows one schedule over all phases. The state of the loader is not loaded
(`load_ignore_keys`): Streaming would take the seed and the epoch of the earlier phase from it, and
draw the samples again that this phase drew.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import Any

from mdsmix.errors import RecipeError
from mdsmix.foundry_yaml.training_yaml import Settings
from mdsmix.mix.render.set_into import MARK
from mdsmix.mix.streams.mix import PhaseOfMix

LOADER_STATE = "state/dataset_state"
"The key of a checkpoint of Composer that has the position of the loader, as `load_ignore_keys`."
LATEST = "latest-rank0.pt"
"The link that Composer makes to the last checkpoint, unless `save_latest_filename` is set."

SAVE_INTERVAL = "1000ba"
"LLM-Foundry's save_interval if the config sets none."

PHASE_HEAD = re.compile(rf"^{MARK} rendered by version .*, phase ([\w-]+) \(\d+ of \d+\)\.", re.M)
"""The first line above the YAML of a phase, as `make_epoch_comment` writes it; the group is the
name of the phase.
"""


def make_phase_keys(phase: PhaseOfMix, config: Settings) -> dict[str, Any]:
    """Return the keys at the top of a phase's YAML: when the phase ends, the folder of its
    checkpoints, and what it loads from the last checkpoint of the phase before.

    Args:
        phase: the phase, with its number from 0.
        config: the config that the phase is set into; empty if the YAML is a file of its own.
    """
    keys: dict[str, Any] = {"max_duration": f"{phase.number + 1}ep"}
    folder = config.get("save_folder")
    if folder:
        # A folder for each phase: with `autoresume` a run takes the newest checkpoint of its folder
        # and loads the state of the loader.
        keys["save_folder"] = _name_folder(folder, phase.name)
    if not _is_last(phase) and config.get("save_weights_only"):
        # The next phase goes on with the optimizer and the counts of epochs and steps.
        keys["save_weights_only"] = False
    if phase.number:
        if config.get("load_weights_only"):
            keys["load_weights_only"] = False  # without the counts it would train all epochs again
        ignored = config.get("load_ignore_keys")
        ignored_keys = list(ignored) if isinstance(ignored, list) else []
        if LOADER_STATE not in ignored_keys:
            ignored_keys.append(LOADER_STATE)
        keys["load_ignore_keys"] = ignored_keys
        if folder and not _names_own_checkpoints(config):
            before = _name_folder(folder, phase.names[phase.number - 1])
            # In a store the link is a file that contains the path of the checkpoint.
            suffix = ".symlink" if "://" in str(folder) else ""
            keys["load_path"] = f"{before}/{LATEST}{suffix}"
    return keys


def list_phase_remarks(phase: PhaseOfMix, config: Settings) -> list[str]:
    """Return sentences on what the user must set for the phases to follow each other.

    Args:
        config: the config that the phase is set into; empty if the YAML is a file of its own.
    """
    remarks = list[str]()
    interval = config.get("save_interval", SAVE_INTERVAL)
    if not config.get("save_folder") and not _is_last(phase):
        remarks.append("set save_folder: the next phase begins with the last checkpoint")
    elif not _is_last(phase) and not _counts_epochs(interval):
        remarks.append(
            f"set save_interval ({interval}) so that no checkpoint falls on the last step of this "
            "phase (`to step` of `mdsmix plan`), or to 1ep: Composer saves that step once, inside "
            "the epoch, and the next phase would train up to as many steps more as this one has"
        )
    has_path = config.get("save_folder") and not _names_own_checkpoints(config)
    if phase.number and not has_path:
        remarks.append(f"set load_path to the last checkpoint of {phase.names[phase.number - 1]}")
    scheduler = config.get("scheduler")
    if isinstance(scheduler, dict) and _is_of_one_yaml(scheduler):
        remarks.append(
            "set scheduler.t_max to the batches of all phases (`mdsmix plan` has them): without it "
            "or in `dur` it is the max_duration of each YAML, and the learning rate jumps between "
            "phases"
        )
    elif phase.number and isinstance(scheduler, dict) and "t_max" in scheduler:
        # Composer takes n epochs for n times the batches of this phase, and compares that.
        remarks.append(
            "set max_duration to the batches at the end of this phase (`to step` of `mdsmix plan`):"
            " in epochs, Composer may refuse it as longer than scheduler.t_max"
        )
    return remarks


def refuse_phase_yaml(text: str, into: str) -> None:
    """Raise RecipeError if a config is the YAML of a phase, so that its folders and its checkpoint
    are those of the phase and not those of the whole run.

    Args:
        text: the text of the config.
        into: its path.
    """
    phase = find_phase_of_yaml(text)
    if phase:
        raise RecipeError(
            f"--into names {into}, which is the YAML that was rendered for the phase {phase}: name "
            "the config of the whole run, from which the YAML of each phase is rendered."
        )


def find_phase_of_yaml(text: str) -> str | None:
    """Return the name of the phase that a YAML was rendered for; None for any other YAML."""
    match = PHASE_HEAD.search(text)
    return match[1] if match else None


def refuse_overwriting(into: str, targets: Iterable[str | None]) -> None:
    """Raise RecipeError if the YAML of a phase would replace the config of the whole run, which
    the other phases are rendered into too.

    Args:
        into: the path of the config.
        targets: the files of the YAMLs of phases; None for a YAML that is not written.
    """
    for target in filter(None, targets):
        if os.path.realpath(target) == os.path.realpath(into):
            raise RecipeError(
                f"the YAML of a phase would replace {into}, the config of the whole run: name "
                "another file with --out."
            )


def _counts_epochs(interval: Any) -> bool:
    """Return whether a save_interval saves checkpoints at the end of epochs alone: `1ep`, or a
    number.
    """
    return isinstance(interval, int) or str(interval).endswith("ep")


def _is_last(phase: PhaseOfMix) -> bool:
    return phase.number + 1 == len(phase.names)


def _name_folder(folder: object, name: str) -> str:
    """Return the folder of a phase's checkpoints in that of the run: `ckpt/main`."""
    return f"{str(folder).rstrip('/')}/{name}"


def _names_own_checkpoints(config: Settings) -> bool:
    """Check whether the last checkpoint has another name than Composer's default."""
    sharding = config.get("fsdp_config")
    is_sharded = isinstance(sharding, dict) and sharding.get("state_dict_type") == "sharded"
    return is_sharded or bool(config.get("save_latest_filename"))


def _is_of_one_yaml(scheduler: Settings) -> bool:
    """Check whether a schedule depends on the max_duration of its YAML. Schedules of Composer that
    end take `t_max`, which is `1dur` by default; a constant one has none.
    """
    name = str(scheduler.get("name", ""))
    if name.startswith("constant"):
        return False
    return str(scheduler.get("t_max", "1dur")).endswith("dur")
