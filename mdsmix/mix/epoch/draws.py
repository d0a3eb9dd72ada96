"""The machines of a run; how many samples an epoch draws from each stream by the stream's weight,
and how many of these the batching method delivers. All are computed as Streaming computes them.

Sources: Stream.apply_weights in streaming/base/stream.py and streaming/base/batching/, 0.12 and
0.13 alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from mdsmix.errors import RecipeError
from mdsmix.foundry_yaml.loader_keys import COUNT_UNITS, as_whole_number, is_number, parse_quantity
from mdsmix.foundry_yaml.training_yaml import Settings
from mdsmix.frozen import frozen
from mdsmix.lazy_numpy import np
from mdsmix.messages import plural
from mdsmix.mix.streams.mix import Loader, Mix
from mdsmix.recipe.phases import SHUFFLE_SEED

OLD_SHUFFLES = ("py1s", "py2s")
"Streaming's default for these shuffles is 64 canonical nodes per node, for others 1."


@frozen(kw_only=True)
class Machines:
    """The nodes and devices of a run. By default one device draws the whole batch.

    Raises RecipeError if Streaming or LLM-Foundry would refuse such a run.
    """

    batch: int
    "Rows of a step, summed over all devices."
    nodes: int = 1
    gpus: int = 1
    "Devices of a node."
    workers: int = 0
    "Processes that read for each device; 0: the device's own process reads."
    replication: int = 1
    "Neighbouring devices that draw the same samples."
    packing: float = 1.0
    """The packing ratio: samples that are drawn for each row. It is an Estimate if training
    computes the ratio itself when it begins (`packing_ratio: auto`).
    """
    num_canonical_nodes: int = 0
    "0: not set."
    algo: str = "py1e"
    "shuffle_algo. Without shuffling it still decides Streaming's default of num_canonical_nodes."
    is_shuffled: bool = True

    def __post_init__(self) -> None:
        """Refuse machines that Streaming or LLM-Foundry would refuse."""
        if self.nodes * self.gpus % self.replication:
            raise RecipeError(
                f"replication is {self.replication}, which does not divide "
                f"{plural(self.nodes * self.gpus, 'device')}, and Streaming refuses that: set "
                "--nodes and --gpus to the numbers of the run, or set another replication in the "
                "loader's dataset."
            )
        if self.batch % self.ranks:
            raise RecipeError(
                f"a batch of {self.batch:,} rows cannot be divided among "
                f"{plural(self.ranks, 'device')}, and LLM-Foundry refuses such a run: take a "
                f"multiple of {self.ranks:,}, or set --nodes and --gpus to the numbers of the run."
            )
        count = self.canonical
        nodes = self.layout_nodes
        if count % nodes and nodes % count:
            raise RecipeError(
                f"num_canonical_nodes is {count}, which Streaming refuses to spread over "
                f"{plural(nodes, 'node')}, since every node would read nearly every shard: make "
                "one of the two a multiple of the other."
            )

    @property
    def shuffle(self) -> str:
        """The shuffle's name, such as `py1e`; `none` if samples are not shuffled."""
        return self.algo if self.is_shuffled else "none"

    @property
    def ranks(self) -> int:
        """Number of devices; devices that draw the same samples (replication) count as one."""
        return self.nodes * self.gpus // self.replication

    @property
    def layout_nodes(self) -> int:
        """The number of nodes with which Streaming computes the order of an epoch. It differs from
        the real number only with replication: devices that draw the same samples count as one
        device.
        """
        return self.ranks // self.gpus if self.ranks % self.gpus == 0 else 1

    @property
    def layout_ranks(self) -> int:
        """Devices of each of the `layout_nodes`: the nodes as Streaming counts them."""
        return self.ranks // self.layout_nodes

    @property
    def rows(self) -> int:
        """Rows (sequences of max_seq_len tokens) that one device trains in a step."""
        return self.batch // self.ranks

    @property
    def drawn(self) -> int:
        """Samples that a device draws for a step. They are more than its rows if samples are
        packed: 4 rows with a packing ratio of 2.6 need 10 samples. Rounded down, as LLM-Foundry
        does.
        """
        return int(self.rows * self.packing)

    @property
    def drawn_together(self) -> int:
        """Samples that all devices draw for a step."""
        return self.drawn * self.ranks

    @property
    def canonical(self) -> int:
        """The number of canonical nodes: sections into which Streaming divides an epoch, so that
        the order of samples does not depend on the real number of nodes. It is the number that the
        loader sets, otherwise Streaming's default.
        """
        if self.num_canonical_nodes:
            return self.num_canonical_nodes
        per_node = 64 if self.algo in OLD_SHUFFLES else 1
        return self.layout_nodes * per_node


Weights = Sequence[Settings]
"For each stream, the keys among repeat, proportion and choose that are set, such as {'repeat': 2}."
DEVICE_PER_STREAM = "device_per_stream"
METHODS = ("stratified", "per_stream", DEVICE_PER_STREAM)
"The batching methods that drop samples."
SMALLEST_BLOCKS = {"py1br": 2, "py1e": 1}
"Shuffle -> the least samples of its blocks. With fewer, Streaming draws from an empty range."
LARGEST_DEFAULT_BLOCK = 4_000_000
"Streaming's default shuffle_block_size for one canonical node; for more of them it is smaller."
SMALLEST_DEFAULT_BLOCK = 1 << 18


def choose_block_size(block_size: int | None, canonical: int) -> int:
    """Return shuffle_block_size, or Streaming's default if it is None.

    Args:
        canonical: the number of canonical nodes, on which the default depends.
    """
    return block_size or max(LARGEST_DEFAULT_BLOCK // canonical, SMALLEST_DEFAULT_BLOCK)


def count_delivered(
    method: str, drawn: Sequence[int], shares: Sequence[float], machines: Machines
) -> list[int]:
    """Count, for each stream, the drawn samples that reach training in an epoch. Some batching
    methods drop the samples that do not fill a last batch. If a count is 0, Streaming cannot build
    batches and the epoch fails.

    Args:
        method: the batching method, such as `stratified`.
        drawn: samples that the weights draw from each stream.
        shares: the streams' shares of a batch, which sum to 1.
        machines: the nodes and devices of the run.
    """
    if method not in METHODS:
        return list(drawn)
    if machines.shuffle == "py1e":
        # This shuffle fails on a stream of fewer samples than canonical nodes.
        drawn = [count if count >= machines.canonical else 0 for count in drawn]
    if method == "stratified":
        return _deliver_stratified(drawn, split_batch(shares, machines.drawn_together), machines)
    if method == "per_stream":
        # All devices draw a batch from one stream, and only whole batches are delivered.
        per_device = [count_per_device(count, machines) for count in drawn]
        return [count // machines.drawn * machines.drawn_together for count in per_device]
    # device_per_stream: each device draws a batch from one stream. Each node reads whole canonical
    # nodes, or none if there are fewer of them than nodes.
    canonical_per_node = machines.canonical // machines.layout_nodes
    delivered = list[int]()
    for count in drawn:
        # Samples of each canonical node, padded so that its devices get the same number.
        per_canonical = _round_up(_divide_up(count, machines.canonical), machines.layout_ranks)
        # The whole batches of a node, each of `machines.drawn` samples.
        batches = per_canonical * canonical_per_node // machines.drawn
        delivered.append(batches * machines.drawn * machines.layout_nodes)
    return delivered


def find_tiny_blocks(method: str, algo: str, block_size: int, shares: Sequence[float]) -> list[int]:
    """Return the numbers of the streams whose shuffle blocks are so small that Streaming fails with
    a ValueError when the first epoch begins. Batching methods other than random give each stream
    its share of shuffle_block_size, rounded down.

    Args:
        method: the batching method.
        algo: the shuffle's name, such as `py1e`; `none` if samples are not shuffled.
        block_size: shuffle_block_size.
        shares: the streams' shares of a batch, which sum to 1. A stream with the share 0 is left
            out, since it has no samples either.
    """
    if algo == "none":
        return []
    smallest = SMALLEST_BLOCKS.get(algo, 0)
    if method == DEVICE_PER_STREAM:
        smallest = max(smallest, 1)
    tiny = list[int]()
    for number, share in enumerate(shares):
        block = int(block_size * share) if method in METHODS else block_size
        if share and block < smallest:
            tiny.append(number)
    return tiny


def count_idle_devices(method: str, delivered: Sequence[int], machines: Machines) -> int:
    """Return how many devices get one batch fewer than the others in an epoch. At the last step
    they have no batch while the others wait for them, so training hangs.

    Only `device_per_stream` gives devices different numbers of batches: it deals out the batches of
    one device in turn. The other methods deal out whole steps.

    Args:
        method: the batching method.
        delivered: samples of each stream that reach training in an epoch (`count_delivered`).
        machines: the nodes and devices of the run.
    """
    if method != DEVICE_PER_STREAM:
        return 0
    batches = sum(delivered) // machines.drawn
    return -batches % machines.ranks


def describe_idle_devices(method: str, delivered: Sequence[int], machines: Machines) -> str:
    """Return a sentence on the devices that have no batch at the last step of an epoch; "" if there
    are none. The arguments are those of `count_idle_devices`.
    """
    idle = count_idle_devices(method, delivered, machines)
    if not idle:
        return ""
    return (
        f"in the last step of an epoch {idle:,} of {machines.ranks:,} devices have no batch while "
        f"the others have one, so training hangs there (batching_method: {method}): end the run "
        "before that step (max_duration), or use batching_method: random"
    )


def split_batch(shares: Sequence[float], batch: int) -> list[int]:
    """Return how many samples of each stream a stratified batch contains. Shares of the batch are
    rounded down; then streams with the largest remainders get one sample more, until it is full.

    Args:
        batch: samples of the batch.
    """
    exact = batch * np.array(shares, np.float64)
    counts = exact.astype(np.int64)
    # The same numpy calls as in Streaming, since they decide between equal remainders.
    largest_first = np.flip(np.argsort(exact - counts))
    left_over = batch - int(counts.sum())
    counts[largest_first[:left_over]] += 1
    return [int(count) for count in counts]


def _deliver_stratified(
    drawn: Sequence[int], portions: Sequence[int], machines: Machines
) -> list[int]:
    """Count the samples of each stream that reach the devices in an epoch, if Streaming's batching
    method is `stratified`: every batch has the same number of samples of a stream. The epoch ends
    when one stream cannot fill its portion of the next batch.

    Args:
        drawn: samples that the weights draw from each stream.
        portions: samples of each stream in a batch.
        machines: the nodes and devices of the run. Streaming repeats samples until all of them get
            the same number.
    """
    if min(portions) < 1 or not all(drawn):
        # Streaming cannot build batches; a stream without samples in a batch gets 0.
        return [
            count if portion >= 1 else 0 for portion, count in zip(portions, drawn, strict=True)
        ]
    batches_by_stream = list[int]()
    for count, portion in zip(drawn, portions, strict=True):
        # Streaming repeats samples until canonical nodes and devices get the same number.
        padded = _round_up(_round_up(count, machines.canonical), machines.layout_ranks)
        batches_by_stream.append(padded // portion)
    batches = min(batches_by_stream)
    return [batches * portion for portion in portions]


def count_per_device(samples: int, machines: Machines) -> int:
    """Count the samples of a stream that each device gets. Streaming repeats some samples, so that
    all devices get the same number.
    """
    per_canonical = _divide_up(samples, machines.canonical)
    if machines.canonical < machines.layout_nodes:
        # Several nodes divide one canonical node among them, so that each gets the same number.
        per_canonical = _round_up(per_canonical, machines.layout_nodes // machines.canonical)
    per_node = per_canonical * machines.canonical // machines.layout_nodes
    return _divide_up(per_node, machines.layout_ranks)


def _divide_up(number: int, divisor: int) -> int:
    """Return the quotient, rounded up: 3 for 7 and 3."""
    return -(-number // divisor)


def _round_up(number: int, step: int) -> int:
    """Return the number, rounded up to a multiple of the step: 9 for 7 and 3."""
    return _divide_up(number, step) * step


def count_draws(
    weights: Weights,
    samples: Sequence[int],
    epoch_size: int | None,
    seed: int = SHUFFLE_SEED,
) -> list[int]:
    """Count the samples that an epoch draws from each stream.

    Raises ValueError if Streaming refuses the weights.

    Args:
        weights: the weight of each stream, such as {"repeat": 2}; empty without a weight.
        samples: the samples of each stream.
        epoch_size: the samples of an epoch, if the loader sets them.
        seed: shuffle_seed. Counts are rounded down, and it decides which streams get one sample
            more, until the epoch is full.
    """
    _require_weights(weights, epoch_size)
    is_by_proportion = any("proportion" in weight for weight in weights)
    if not is_by_proportion and not epoch_size:
        return [int(count) for count in _list_requested(weights, samples, epoch_size)]
    shares = np.array(compute_batch_shares(weights, samples, epoch_size))
    if not shares.any():
        raise ValueError("all proportions are 0")
    total = epoch_size or sum(samples)
    counts = (total * shares).astype(np.int64)  # rounded down
    # The samples left over go to streams drawn at random, one each.
    left_over = int(total - counts.sum())
    chosen = np.random.default_rng(seed).choice(len(shares), left_over, replace=False)
    counts[chosen] += 1
    return [int(count) for count in counts]


def _require_weights(weights: Weights, epoch_size: int | None) -> None:
    """Raise ValueError if Streaming refuses the weights. Users never see these messages: `check`
    reports the same mistakes, with the name of the stream (mix/checks).
    """
    if any(len(weight) > 1 for weight in weights):
        raise ValueError("a stream has several weights")
    for weight in weights:
        for value in weight.values():
            if not is_number(value) or value < 0:
                raise ValueError("a weight is not a number of at least 0")
    by_proportion = ["proportion" in weight for weight in weights]
    if any(by_proportion) and not all(by_proportion):
        raise ValueError("only some streams have a proportion")
    if epoch_size and any(weights) and not any(by_proportion):
        raise ValueError("repeat or choose decides the size of an epoch, and so does epoch_size")


def compute_batch_shares(
    weights: Weights, samples: Sequence[int], epoch_size: int | None
) -> list[float]:
    """Return the streams' shares of an epoch or of a stratified batch, unrounded, with sum 1.
    Streaming must accept the weights.
    """
    requested = np.array(_list_requested(weights, samples, epoch_size), np.float64)
    return [float(share) for share in requested / max(1e-300, requested.sum())]


def _list_requested(
    weights: Weights, samples: Sequence[int], epoch_size: int | None
) -> Sequence[float]:
    """Return what each stream's weight asks for. These are numbers of samples (from repeat or
    choose, or all samples of a stream without a weight), or else proportions such as 0.3: Streaming
    allows proportions only for all streams or for none.
    """
    if epoch_size and not any(weights):
        return samples  # then an epoch draws from each stream in proportion to its samples
    return [
        _read_requested_amount(weight, count)
        for weight, count in zip(weights, samples, strict=True)
    ]


def _read_requested_amount(weight: Settings, samples: int) -> float:
    """Return what one stream's weight asks for: its proportion, such as 0.3, if it has one,
    otherwise a number of samples. A stream without a weight asks for all its samples.
    """
    if "proportion" in weight:
        return float(weight["proportion"])
    if "repeat" in weight:
        return int(weight["repeat"] * samples)
    return int(weight.get("choose", samples))


def count_loader_draws(loader: Loader) -> list[int] | None:
    """Count the samples that an epoch of a loader draws from each stream. None if Streaming refuses
    the weights (checks report why), or if a stream could not be opened.
    """
    if loader.unopened:
        return None
    seed = loader.dataset.get("shuffle_seed", SHUFFLE_SEED)
    if not isinstance(seed, int) or seed < 0:
        return None
    with suppress(ValueError):
        weighting = _read_weighting(loader)
        return count_draws(weighting.weights, weighting.samples, weighting.epoch_size, seed)
    return None


class _Weighting(NamedTuple):
    """How a loader weights its streams."""

    weights: Weights
    samples: list[int]
    "Samples in each stream."
    epoch_size: int | None
    "Samples that the section sets for an epoch; None if it sets none."


def _read_weighting(loader: Loader) -> _Weighting:
    """Read the weighting of a loader's section; an epoch_size of 0 or null is read as None."""
    size = loader.dataset.get("epoch_size") or None
    return _Weighting(
        weights=[stream.weight for stream in loader.streams],
        samples=[stream.index.samples for stream in loader.streams],
        epoch_size=parse_quantity(size, COUNT_UNITS) if size else None,
    )


def get_batching_method(loader: Loader) -> str:
    """Return the loader's batching method, or Streaming's default."""
    return str(loader.dataset.get("batching_method") or "random")


def make_run_machines(
    mix: Mix, nodes: int, gpus: int, batch: int | None, workers: int | None = None
) -> Machines:
    """Return the machines of a run.

    Raises RecipeError if the batch is unknown, or if Streaming or LLM-Foundry would refuse the run.

    Args:
        gpus: devices of a node.
        batch: rows of a step, summed over all devices. If None, the YAML's global_train_batch_size.
        workers: processes that read for each device. If None, the YAML's num_workers.
    """
    batch = batch or mix.yaml.batch_size
    if not batch or batch < 1:
        raise RecipeError(
            "the size of a batch is unknown: set --batch to the rows of a step, summed over all "
            "devices (global_train_batch_size of a training YAML)."
        )
    loader = mix.train
    if workers is None:
        workers = as_whole_number(loader.section.get("num_workers")) or 0
    return make_machines(
        loader,
        batch=batch,
        nodes=nodes,
        gpus=gpus,
        workers=workers,
        replication=as_whole_number(loader.dataset.get("replication")) or 1,
    )


def make_machines(loader: Loader, **fields: Any) -> Machines:
    """Return machines with the canonical nodes and the shuffle that the loader sets.

    Args:
        fields: the other fields of Machines, such as batch=64.
    """
    dataset = loader.dataset
    canonical = as_whole_number(dataset.get("num_canonical_nodes")) or 0
    return Machines(
        num_canonical_nodes=max(0, canonical),
        algo=str(dataset.get("shuffle_algo") or "py1e"),
        is_shuffled=bool(dataset.get("shuffle")),
        **fields,
    )


def count_delivered_on(loader: Loader, drawn: Sequence[int], machines: Machines) -> list[int]:
    """Count the samples of each stream that an epoch of a loader delivers on these machines. If a
    count is 0, Streaming cannot build batches and the epoch fails.

    Args:
        drawn: samples that an epoch draws from each stream.
    """
    weighting = _read_weighting(loader)
    shares = compute_batch_shares(weighting.weights, weighting.samples, weighting.epoch_size)
    return count_delivered(get_batching_method(loader), drawn, shares, machines)


def count_loader_delivered(loader: Loader, batch: int | None) -> list[int] | None:
    """Count the samples of each stream that an epoch delivers in batches of `batch` rows, for one
    device that draws whole batches.

    Returns None if Streaming refuses the weights, or if the batch or the packing ratio is unknown.
    """
    drawn = count_loader_draws(loader)
    if not drawn or get_batching_method(loader) not in METHODS:
        return drawn
    ratio = loader.dataset.get("packing_ratio") or 1
    if not sum(drawn) or not batch or batch < 1 or not is_number(ratio) or ratio < 1:
        return None
    return count_delivered_on(
        loader, drawn, make_machines(loader, batch=batch, packing=float(ratio))
    )


def find_tiny_blocks_of(loader: Loader) -> list[str]:
    """Return the names of the streams whose shuffle blocks are too small (`find_tiny_blocks`). If
    the loader sets no shuffle_block_size, the largest default is assumed.
    """
    drawn = count_loader_draws(loader)
    if not drawn:
        return []
    method = get_batching_method(loader)
    shares: Sequence[float] = drawn
    if method in METHODS:  # otherwise the shares do not matter, and numpy takes time to import
        weighting = _read_weighting(loader)
        shares = compute_batch_shares(weighting.weights, weighting.samples, weighting.epoch_size)
    size = as_whole_number(loader.dataset.get("shuffle_block_size")) or LARGEST_DEFAULT_BLOCK
    shuffle = make_machines(loader, batch=1).shuffle
    tiny = find_tiny_blocks(method, shuffle, size, shares)
    return [loader.streams[number].name for number in tiny]
