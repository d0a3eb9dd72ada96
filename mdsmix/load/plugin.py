"""`train_loader.name: mdsmix`: LLM-Foundry's own `train` reads through this package.

Foundry finds `build_dataloader` by an entry point (`llmfoundry_dataloaders` in pyproject.toml). So
Foundry is not changed, and nothing of Foundry is imported before it calls the function. The
function returns the loader of `build_loader`, in the DataSpec that Foundry's registry makes for its
own loaders. Composer resumes the loader by `state_dict` of its dataset, as it resumes Foundry's.
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
    """Build a loader from its section in LLM-Foundry's YAML, and return composer's DataSpec of it.

    Raises the errors of `build_loader`.

    Args:
        tokenizer: the transformers tokenizer that Foundry built; only its special ids are used.
        device_batch_size: rows in a batch of this device.
        section: `dataset`, `num_workers` and so on, with every `${...}` filled in.
    """
    if tokenizer is None:
        raise RecipeError(
            f"A loader with name: {MDSMIX_LOADER} needs the EOS and padding ids of a tokenizer, "
            "but the config names no tokenizer; add tokenizer: {name: ...} to it."
        )
    loader_section = LoaderSection(
        label=f"the {MDSMIX_LOADER} loader", section={"name": MDSMIX_LOADER, **section}
    )
    ids = TokenIds(
        eos=tokenizer.eos_token_id,
        pad=tokenizer.pad_token_id,
        bos=tokenizer.bos_token_id,
        padding_side=tokenizer.padding_side,
    )
    loader = open_loader(make_settings(loader_section), device_batch_size, ids)
    if loader.collate_fn.has_preferences:
        raise RecipeError(
            "LLM-Foundry has no model that trains preferences with images: read the streams with "
            "mdsmix.load in a training loop of your own."
        )
    # Imported by name, since LLM-Foundry is not a dependency of mdsmix.
    registry = import_module("llmfoundry").registry
    make_data_spec = registry.data_specs.get("data_spec")
    spec = make_data_spec(dl=loader, dataset_cfg=dict(loader_section.dataset))
    if loader.collate_fn.vision:
        spec.split_batch = prepare_microbatches(loader.collate_fn)
        spec.get_num_samples_in_batch = count_rows
    return spec


def prepare_microbatches(collate: Collate) -> Callable[[Batch, int | float], list[Batch]]:
    """Return a function that splits a batch of a loader of images into microbatches: it gets a
    batch and the number of rows of a microbatch. Composer calls this function.

    The loader's collator is changed, so that batches contain how many pixels belong to each row.
    """
    vision = collate.vision
    assert vision is not None, "called only for a loader of images"
    vision.is_split = True
    with_dummy = vision.with_dummy
    vision.with_dummy = False  # each microbatch gets its own

    def split(batch: Batch, size: int | float) -> list[Batch]:
        """Split a batch into microbatches of `size` rows each."""
        if isinstance(size, float):
            raise RecipeError(
                f"device_train_microbatch_size is {size}, but a row with its images cannot be "
                "split; set a whole number of rows in the training YAML."
            )
        starts = range(0, count_rows(batch), size)
        return [cut(batch, start, start + size) for start in starts]

    def cut(batch: Batch, start: int, stop: int) -> Batch:
        """Return the rows from `start` to `stop` of a batch, and the pixels of their images."""
        pixel_rows: Any = batch.get(PIXEL_ROWS, {})
        rows = {}
        for key, tensor in batch.items():
            if key != PIXEL_ROWS and key not in pixel_rows:
                rows[key] = tensor[start:stop]
        # A row's pixels follow the pixels of all rows before it.
        pixels = {}
        for key, entries_of_rows in pixel_rows.items():
            first_entry = sum(entries_of_rows[:start])
            end = sum(entries_of_rows[:stop])
            pixels[key] = batch[key][first_entry:end]
        if any(map(len, pixels.values())):
            return rows | pixels
        return collate.with_dummy_image(rows) if with_dummy else rows

    return split


def count_rows(batch: Batch) -> int:
    """Return the number of rows of a batch or of a microbatch."""
    return len(batch["input_ids"])
