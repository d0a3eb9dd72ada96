"""The whole way: raw records, `mdsmix convert`, `mdsmix render-yaml --into`, and the unmodified
`llmfoundry train` learns: from folders and from a bucket, on two ranks with an empty disk, and by
the blocks of pages.
"""

from __future__ import annotations

import json
import re
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from mdsmix import plan_phases
from mdsmix.mix.checks.top_level_keys import TOP_LEVEL_KEYS
from mdsmix.mix.epoch.repeats import draw_epoch
from mdsmix.mix.streams.resolve import open_phase_mixes
from tests.converting import chats, read_files, run_ok, write_jsonl, write_recipe
from tests.counting import count_requests
from tests.docs.homes import Homes
from tests.docs.page import Page
from tests.faults import Proxy
from tests.foundry.conftest import LLMFOUNDRY, MDSMIX, ROOT, TINY, Foundry, Lab
from tests.preloaded import SECONDS, PreloadedPython
from tests.with_torch.load_streams import run_ranks

LOSS = re.compile(r"loss/train/total: ([\d.]+)")
METRIC = re.compile(r"metrics/eval/heldout/LanguageCrossEntropy: ([\d.]+)")
LOADER = {"num_workers": 0, "dataset": {"shuffle": True, "shuffle_seed": 17}}


def losses(said: str) -> list[float]:
    return [float(loss) for loss in LOSS.findall(said)]


def trained(programs: PreloadedPython, config: Path, *settings: str) -> str:
    """What `llmfoundry train` printed up to its good end: what that script runs, in a process that
    has imported it.
    """
    ended = programs.start(LLMFOUNDRY, "train", config, *settings).wait()
    assert ended.returncode == 0, (ended.stdout + ended.stderr)[-4000:]
    return ended.stdout + ended.stderr


def test_a_mix_trains_and_is_evaluated_from_folders_and_from_minio(
    programs: PreloadedPython, lab: Lab, bucket: str
) -> None:
    listed, mix = lab.demo(), {"web": {"repeat": 0.5}, "chat": {"repeat": 2}}
    settings = {"streams": listed, "mix": mix, "max_seq_len": 128, "train_loader": LOADER}
    local, cache = lab.rendered("local", **settings), lab.folder / "cache"
    store = {"remote": f"s3://{bucket}/mix", "local": str(cache)}
    minio = lab.rendered("minio", **settings, **store)
    tokenizer = Path(yaml.safe_load(minio.read_text())["tokenizer"]["name"])
    assert not tokenizer.exists(), "mdsmix in the environment of LLM-Foundry fetches it"
    assert "name: finetuning" in local.read_text()
    assert not list(cache.rglob("*.mds")), "what trains must come from the store"

    from_folders = trained(programs, local, "eval_interval=8ba")
    from_minio = trained(programs, minio, "max_duration=6ba", "eval_interval=6ba")
    found = losses(from_folders)
    assert len(found) == 24
    assert sum(found[:4]) / 4 - sum(found[-4:]) / 4 > 1, "means of four, since batches differ"
    assert losses(from_minio) == found[:6]
    metrics = [float(value) for value in METRIC.findall(from_folders)]
    assert len(metrics) == 3
    assert all(late < early for early, late in pairwise(metrics))
    cached = {path.parts[-3].rpartition("-")[0] for path in cache.rglob("*.mds")}
    assert cached == set(listed)


DRAWN_BY_TRAINING = f"""
import json
from streaming import StreamingDataset
resample = StreamingDataset.resample_streams
def tell(self, epoch, stream_id=None):
    drawn = resample(self, epoch, stream_id)
    print("DRAWN " + json.dumps([epoch, self.shuffle_seed, drawn[1].tolist()]), flush=True)
    return drawn
StreamingDataset.resample_streams = tell
{LLMFOUNDRY}
"""
"`llmfoundry train`, which prints the epoch, seed and samples of each draw of its loader."


def train_phase(
    programs: PreloadedPython, config: str, *settings: str
) -> tuple[list[float], tuple[int, int, list[int]]]:
    """Train a phase, and return its losses and the last draw: epoch, seed and samples."""
    ended = programs.start(DRAWN_BY_TRAINING, "train", config, *settings).wait()
    assert ended.returncode == 0, (ended.stdout + ended.stderr)[-4000:]
    said = ended.stdout + ended.stderr
    draws = [json.loads(line) for line in re.findall(r"^DRAWN (.*)$", said, re.M)]
    return losses(said), draws[-1]


def test_phases_train_one_after_the_other_on_what_the_plan_says(
    programs: PreloadedPython, lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The anneal begins with the weights, steps and learning rate of the first phase, and draws the
    samples that the plan counts. It is trained by mdsmix's loader and by Foundry's own, both from
    the checkpoint of the first phase. If the state of the loader were read from it, mdsmix's loader
    would refuse the other data, and Foundry's would draw by the seed of that phase.
    """
    monkeypatch.chdir(lab.folder)
    phases = {
        "main": {"budget": "200 samples", "mix": {"web": "60%", "docs": "40%"}},
        "anneal": {"budget": "80 samples", "mix": {"docs": "50%", "web": "50%"}},
    }
    loader = {"name": "mdsmix", "num_workers": 0, "dataset": {"shuffle": True, "shuffle_seed": 17}}
    settings = {"max_seq_len": 128, "train_loader": loader, "phases": phases}
    recipe = lab.converted(streams=lab.demo("web docs"), **settings)
    base = lab.folder / "base.yaml"
    schedule = "scheduler: {name: cosine_with_warmup, t_warmup: 2ba, t_max: 35ba}"
    kept = [line for line in TINY.read_text().splitlines() if not line.startswith("scheduler")]
    base.write_text("\n".join([*kept, schedule, "save_folder: ckpt", ""]))
    for name in ("mdsmix", "text"):
        named = f"train_loader.name={name}"
        run_ok("render-yaml", recipe, named, "--into", base, "-o", f"{name}.yaml")
    planned = plan_phases(recipe, gpus=1, batch=8)
    assert planned.steps == 35
    main, anneal = planned.phases
    mixes = open_phase_mixes(recipe)

    def assert_drawn(number: int, draw: tuple[int, int, list[int]]) -> None:
        epoch, seed, drawn = draw
        assert (epoch, seed) == (number, 17 + number)
        copies = np.concatenate(draw_epoch(mixes[number].train, number))
        assert np.bincount(drawn, minlength=len(copies)).tolist() == copies.tolist()

    first, draw = train_phase(programs, "mdsmix.main.yaml")
    assert len(first) == main.plan.run.steps
    assert_drawn(0, draw)
    seen = set(draw[2])
    for name in ("mdsmix", "text"):
        assert f"name: {name}" in Path(f"{name}.anneal.yaml").read_text()
        then, draw = train_phase(programs, f"{name}.anneal.yaml", f"save_folder=ckpt/{name}")
        assert len(then) == anneal.plan.run.steps
        assert_drawn(1, draw)
        assert sum(s.repeated for s in anneal.streams) == sum(sample in seen for sample in draw[2])
        assert abs(then[0] - first[-1]) < abs(first[0] - first[-1]) / 2


OPENED_HERE = """
import json, sys
from transformers import AutoTokenizer, __version__
name, texts = sys.argv[1], json.loads(sys.argv[2])
try:
    tokenizer = AutoTokenizer.from_pretrained(name)
except (AttributeError, ValueError):
    print(json.dumps([__version__, None]))
else:
    print(json.dumps([__version__, [tokenizer(text)["input_ids"] for text in texts]]))
"""


def test_a_tokenizer_that_only_transformers_5_opens_trains(
    programs: PreloadedPython, lab: Lab
) -> None:
    """tests/saved_by_five has the ids that transformers 5.24 gave; LLM-Foundry has 4.51."""
    saved = ROOT / "tests/saved_by_five"
    expected = json.loads((saved / "expected.json").read_text())
    lab.tokenizer = saved / "qwen"
    turns = [{"role": "user", "content": "one two"}, {"role": "assistant", "content": "three"}]
    write_jsonl(lab.folder / "chats.jsonl", [{"messages": turns}] * 64)
    mix = {"chat": chats(lab.folder / "chats.jsonl")}
    config = lab.rendered("five", streams=mix, max_seq_len=128, train_loader=LOADER)
    published = yaml.safe_load(config.read_text())["tokenizer"]["name"]

    def ids_of(folder: object) -> list[Any]:
        return json.loads(
            programs.start(OPENED_HERE, folder, json.dumps(expected["texts"])).wait().stdout
        )

    version, ids = ids_of(lab.tokenizer)
    assert (version[:4], ids) == ("4.51", None), "it does not open as it is"
    assert ids_of(published) == [version, expected["ids"]["qwen"]]
    found = losses(trained(programs, config, "max_duration=4ba"))
    assert len(found) == 4
    assert found[-1] < found[0]


TAKEN_HERE = """
import json, sys
from mdsmix.tokenizer.describe import describe_tokenizer
print(json.dumps(describe_tokenizer(sys.argv[1], {})["named_templates"]))
"""


def test_additional_templates_are_read_by_the_transformers_of_foundry(
    programs: PreloadedPython, tmp_path: Path
) -> None:
    """transformers 4.51 ignores them."""
    folder = shutil.copytree(ROOT / "tests/saved_by_five/qwen", tmp_path / "qwen")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates/tool_use.jinja").write_text("{{ tools }}")
    default = (folder / "chat_template.jinja").read_text()
    named = json.loads(programs.start(TAKEN_HERE, folder).wait().stdout)
    assert named == {"default": default, "tool_use": "{{ tools }}"}


def test_two_ranks_train_from_minio_with_an_empty_disk(
    programs: PreloadedPython, lab: Lab, bucket: str, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training node finds its tokenizer and its streams in the bucket, without a step by hand."""
    loader = {"name": "mdsmix", "num_workers": 0, "dataset": {"eos_token_id": 0}}
    both = {"streams": lab.demo("docs chat"), "max_seq_len": 128, "train_loader": loader}
    (node := lab.folder / "node").mkdir()
    store = {"remote": f"s3://{bucket}/mix", "local": str(node / "cache")}
    config = lab.rendered("maker", **both, **store)
    name = yaml.safe_load(config.read_text())["tokenizer"]["name"]
    assert name.startswith(f"s3://{bucket}/mix/tokenizer-")
    monkeypatch.chdir(node)
    words = ("train", config, "max_duration=6ba", "device_train_microbatch_size=4")
    with count_requests(proxy) as asked:
        cache = {"MDSMIX_CACHE": str(node / "mdsmix")}
        ended = run_ranks(programs, LLMFOUNDRY, *words, seconds=SECONDS, **cache)
    assert len(losses(ended[0].stdout + ended[0].stderr)) == 6
    assert asked.for_key("/tokenizer.json") == {"GET": 1}, "its files come once a node"
    assert asked.for_key("/mdsmix.tokenizer") == {"GET": 2}


def test_both_environments_write_the_same_bytes_and_the_real_loader_draws_from_them(
    programs: PreloadedPython, lab: Lab, tmp_path: Path
) -> None:
    """With the transformers and the Streaming that LLM-Foundry pins."""
    settings = {"streams": lab.demo(), "max_seq_len": 128, "train_loader": LOADER}
    lab.converted("ours", **settings)
    (tmp_path / "theirs").mkdir()
    recipe = write_recipe(tmp_path / "theirs", lab.tokenizer, **settings)
    # A cache of its own: the tokenizer is to be read by Foundry's transformers, not found in a
    # snapshot.
    environment = {"MDSMIX_CACHE": str(tmp_path / "cache")}
    validating = ("render-yaml", recipe, "-o", tmp_path / "o.yaml", "--validate")
    for words in (("convert", recipe), validating):
        ended = programs.start(MDSMIX, *words, **environment).wait()
        assert ended.returncode == 0, ended.stderr
    assert "(2, 128), (2, 128); eval_loader heldout (" in ended.stderr
    lying = (read_files(tmp_path / side / "out").items() for side in ("ours", "theirs"))
    ours, theirs = ({n: data for n, data in each if n.count("/") == 2} for each in lying)
    assert len([name for name in ours if name.endswith(".mds")]) >= 5
    assert ours == theirs, "shards, index and manifest of every stream"


def test_composers_block_of_the_page_trains(foundry: Foundry, lab: Lab) -> None:
    """Composer's own trainer over `mdsmix.load`, as docs/loading.md has it."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/loading.md").read_text("utf-8"), re.S)
    (code,) = (each for each in blocks if "composer" in each)
    both = lab.demo("docs chat")
    loader = {"num_workers": 0, "prefetch_factor": None, "persistent_workers": False}
    settings = {"mix": {n: {"choose": 16} for n in both}, "max_seq_len": 64, "train_loader": loader}
    recipe, config = lab.converted(streams=both, **settings), lab.folder / "train.yaml"
    run_ok("render-yaml", recipe, "-o", config)
    code = code.replace('"train.yaml"', repr(str(config)))
    assert foundry("train.run", code=code) == 4


@pytest.mark.parametrize(
    ("page", "config"), [("docs/tutorial.md", "example/foundry.yaml"), ("README.md", "train.yaml")]
)
def test_the_page_trains(
    page: str, config: str, foundry: Foundry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From its first command to the last, in an empty folder. README's one record is learned, a
    step an epoch, with a batch size of eight.
    """
    monkeypatch.chdir(tmp_path)
    homes = Homes(tmp_path)
    read = Page(ROOT / page, homes)
    read.read()
    assert read.wrong == []
    found = foundry("train.losses", path=str(homes.home / config), steps=12)
    assert len(found) == 12
    assert found[-1] < found[0] - 0.3


def test_the_top_level_keys_are_those_of_foundry(foundry: Foundry) -> None:
    assert foundry("train.list_top_level_keys") == sorted(TOP_LEVEL_KEYS)
