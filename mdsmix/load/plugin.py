"""`train_loader.name: mdsmix`: LLM-Foundry's own `train` reads through this package.

Foundry finds the builder by an entry point (`llmfoundry_dataloaders` in pyproject.toml), so that
nothing of it is changed or imported before it asks. What the builder gives is the loader of
`build_loader`, in the DataSpec that Foundry's registry makes of its own loaders; Composer then
resumes it by `state_dict` of its dataset, as theirs.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from mdsmix.errors import RecipeError
from mdsmix.foundry_yaml.loader_keys import MDSMIX_LOADER
from mdsmix.foundry_yaml.training_yaml import LoaderSection
from mdsmix.load.collate import Batch, Collate
from mdsmix.load.loader import open_loader
from mdsmix.load.loader_settings import make_settings
from mdsmix.load.training_rows import TokenIds
from mdsmix.load.vision import PIXEL_ROWS


def build_dataloader(*, tokenizer: Any, device_batch_size: int, **section: Any) -> Any:
    """A loader's section of LLM-Foundry -> composer's DataSpec. Keys are those of README.md beside
    this file.

    Args:
        tokenizer: the one that Foundry built (transformers); only its special ids are used.
        device_batch_size: rows a batch of this device.
        section: `dataset`, `num_workers` and so on, every `${...}` filled in.

    Raises: as `build_loader`.
    """
    if tokenizer is None:
        raise RecipeError(
            f"name: {MDSMIX_LOADER} needs the EOS and padding ids of a tokenizer, and the config names none; add tokenizer: {{name: ...}}."
        )
    own = LoaderSection(
        label=f"the {MDSMIX_LOADER} loader", section={"name": MDSMIX_LOADER, **section}
    )
    ids = TokenIds(
        eos=tokenizer.eos_token_id,
        pad=tokenizer.pad_token_id,
        bos=tokenizer.bos_token_id,
        padding_side=tokenizer.padding_side,
    )
    loader = open_loader(make_settings(own), device_batch_size, ids)
    # By name: LLM-Foundry is no dependency of mdsmix.
    spec = import_module("llmfoundry").registry.data_specs.get("data_spec")(
        dl=loader, dataset_cfg=dict(own.dataset)
    )
    if loader.collate_fn.vision:
        spec.split_batch = prepare_microbatches(loader.collate_fn)
        spec.get_num_samples_in_batch = count_rows
    return spec


def prepare_microbatches(collate: Collate) -> Callable[[Batch, int | float], list[Batch]]:
    """Makes a loader of images give batches that can be cut into microbatches; returns the function
    that cuts them.
    """
    vision = collate.vision
    assert vision is not None, "a loader of images"
    vision.is_split, with_dummy = True, vision.with_dummy
    vision.with_dummy = False  # each microbatch has its own

    def split(batch: Batch, size: int | float) -> list[Batch]:
        if isinstance(size, float):
            raise RecipeError(
                f"device_train_microbatch_size is {size}, and a row with its images cannot be cut: give a whole number of rows."
            )
        return [part(batch, at, at + size) for at in range(0, count_rows(batch), size)]

    def part(batch: Batch, start: int, stop: int) -> Batch:
        """Rows of a batch, and the tensors of pixels where there are images among them."""
        whose: Any = batch.get(PIXEL_ROWS, {})
        rows = {k: v[start:stop] for k, v in batch.items() if k not in (PIXEL_ROWS, *whose)}
        pixels = {k: batch[k][sum(of[:start]) : sum(of[:stop])] for k, of in whose.items()}
        if any(map(len, pixels.values())):
            return rows | pixels
        return collate.with_dummy_image(rows) if with_dummy else rows

    return split


def count_rows(batch: Batch) -> int:
    """Rows of a batch or of a microbatch."""
    return len(batch["input_ids"])
