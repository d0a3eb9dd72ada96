"""The loader that a training loop iterates.

`MixLoader` is Streaming's StreamingDataLoader, so it has the `state_dict` and `load_state_dict`
that Composer and other training loops use. Two things are added: an error from a worker has our
sentence as its message, without a traceback, and packed batches count the samples that they were
made from.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from streaming import StreamingDataLoader

from mdsmix.errors import MdsmixError, RecipeError
from mdsmix.load.collate import Batch
from mdsmix.load.dataset import MixDataset
from mdsmix.load.loader_settings import LoaderSettings


class InProcessReader:
    """Torch's iterator of a pass without workers, which records each batch only if a profiler is
    running. A record takes 13 us, and everything else of a batch of 8 full rows 67.
    """

    def __init__(self, reader: Any) -> None:
        self.reader = reader

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        is_profiled = torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
        batch: Batch = next(self.reader) if is_profiled else self.reader._next_data()
        return batch


class MixLoader(StreamingDataLoader):  # type: ignore[misc]
    """A loader that yields batches: dicts of int64 tensors [batch, max_seq_len]. One pass is one
    epoch.

    `state_dict()` between two batches returns the position in the epoch. After
    `load_state_dict(state)` the next pass begins after the last batch that had been yielded when
    the state was made; prefetched batches are not counted. If the epoch has no batch left, the next
    pass is the next epoch.
    """

    settings: LoaderSettings
    "The settings that `open_loader` built the loader from."
    _iterator: Any
    """Torch's own attribute: its iterator of the last pass if workers are persistent, otherwise
    None. The next pass uses the workers of this iterator again.
    """
    _is_accelerate_prepared = True
    """Accelerator.prepare does not change a loader with this mark. Without the mark it would wrap
    the loader and divide the batches among the ranks a second time.
    """
    use_stateful_dataloader = True
    "With this mark Accelerator.save_state and load_state save and load the loader's state too."

    def __init__(self, dataset: MixDataset, **keys: Any) -> None:
        """Make the loader of a dataset.

        Args:
            keys: the keywords of torch's DataLoader.
        """
        super().__init__(dataset, **keys)
        # Lightning calls set_epoch of the sampler, not of the loader.
        self.sampler.set_epoch = dataset.set_epoch
        self._reader: Any = None
        "Torch's iterator of the current pass."
        self._passes = 0
        "The number of the current pass. A pass with a smaller number can no longer be read."
        self._starts = dataset.starts
        "The dataset's `starts` when the current pass began."
        self._may_be_over = False
        "Whether the next pass resumes from a state, which may be the end of an epoch."

    def __iter__(self) -> Iterator[Batch]:
        """Yield the remaining batches of the epoch.

        Raises RecipeError if another iterator of the loader is started, or `load_state_dict`,
        `set_epoch` or `end` is called, before this iterator ends.
        """
        self._follow_dataset()
        # Stop the workers of an earlier pass. Only persistent workers in the middle of a pass are
        # kept: torch resets them.
        if self._reader is not self._iterator:
            self._stop_workers()
        self._passes += 1
        number = self._passes
        self.dataset.is_read_by_loader[0] = True
        try:
            for batch in self._read_this_epoch_or_next():
                yield batch
                self._follow_dataset()
                if number != self._passes:
                    raise RecipeError(
                        "This iterator of the loader can no longer be read, because a newer "
                        "iterator was started, or load_state_dict, set_epoch or end was called: "
                        "read the newest iterator, or call iter(loader) again."
                    )
        except MdsmixError as error:
            if number == self._passes:
                self._stop_workers()
            sentence = _find_sentence_of_worker(error)
            if sentence is None:
                raise
            # Raise the error without torch's frames, which refer to the error and so keep the
            # workers of this pass alive. Otherwise frames and error are deleted together later:
            # the workers' queues before the workers are asked to stop, so that torch waits 5 s for
            # each worker.
            raise type(error)(sentence) from error.with_traceback(None)
        finally:
            if number == self._passes:
                self._reader = None
                self.dataset.is_read_by_loader[0] = False

    def _read_this_epoch_or_next(self) -> Iterator[Batch]:
        """Yield the remaining batches of the epoch. If a state at the end of an epoch was loaded,
        so that no batch remains, yield the batches of the next epoch.
        """
        is_over = self._may_be_over
        self._may_be_over = False
        for batch in self._read_batches():
            is_over = False
            yield batch
        if is_over:
            self.dataset.begin_next_epoch()
            self._starts = self.dataset.starts
            yield from self._read_batches()

    def _read_batches(self) -> Iterator[Batch]:
        """Yield the batches of Streaming's loader, and count the samples drawn for packed rows."""
        drawn = 0
        for batch in super().__iter__():
            if self.collate_fn.packer:
                # Streaming counted packed rows, but a state counts samples. Samples that wait for a
                # later batch are counted as read, so they are lost if the run is resumed.
                drawn = min(drawn + (self.batch_size or 0), len(self.dataset))
                self.num_samples_yielded = drawn
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the epoch and the lock of the data, for rank 0 to save."""
        self._follow_dataset()
        state: dict[str, Any] = super().state_dict()
        return state

    def load_state_dict(self, obj: dict[str, Any]) -> None:
        """Make the next pass resume from a state. The loader may have been iterated before."""
        self.dataset.load_state_dict(obj, self.drop_last)
        self._follow_dataset()
        self._may_be_over = True

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass read `epoch`, unless it would already read that epoch or a later one.
        Trainer calls this when it begins an epoch.
        """
        self.dataset.set_epoch(epoch)

    def add_stream_ids(self) -> None:
        """Add stream ids to batches, from the next pass on (`build_loader(..., stream_ids=True)`).

        Raises RecipeError if the rows are preferences, or those of a loader of another library.
        """
        if self.dataset.other_row or self.dataset.gives_preferences:
            raise RecipeError(
                f"rows of the {self.settings.section.name} loader have no labels, so the losses of "
                "each stream cannot be counted: leave out stream_ids, and the callback "
                "mdsmix_streams."
            )
        self.dataset.numbers_streams = True
        self.collate_fn.streams = len(self.dataset.streams)

    def end(self) -> None:
        """Stop the workers and threads of the current epoch, which will not be read to its end. The
        next pass is the next epoch.
        """
        self._passes += 1
        self._stop_workers()
        self.dataset.end()
        self.dataset.is_read_by_loader[0] = False

    def _follow_dataset(self) -> None:
        """End the current pass if the dataset's starting position was set since the pass began."""
        if self._starts != self.dataset.starts:
            self._starts = self.dataset.starts
            self._passes += 1
            self.num_samples_yielded = 0
            self._stop_workers()

    def _get_iterator(self) -> Any:
        """Return torch's iterator for a new pass. Torch calls this."""
        if self.num_workers:
            self.dataset.leave_to_workers()
        reader = super()._get_iterator()
        self._reader = reader if self.num_workers else InProcessReader(reader)
        return self._reader

    def _stop_workers(self) -> None:
        """Stop the workers of the current pass, and persistent workers. The next pass starts new
        ones.
        """
        for reader in (self._reader, self._iterator):
            if hasattr(reader, "_shutdown_workers"):
                reader._shutdown_workers()
        self._reader = self._iterator = None


def _find_sentence_of_worker(error: MdsmixError) -> str | None:
    """Return our sentence in the message of a worker's error, which is a whole traceback that ends
    with it. Return None for an error of this process, whose message is the sentence alone.
    """
    *traceback, last_line = str(error).strip().splitlines()
    return last_line.partition(": ")[2] if traceback else None
