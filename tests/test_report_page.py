"""`mdsmix report`: the page agrees with the other commands, shows samples as text, and loads
nothing from outside.
"""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from mdsmix.recipe import TokenizerSpec
from mdsmix.report.inspection import list_length_rows
from mdsmix.report.page.html import prose
from mdsmix.report.page.sample_browser import BROKEN, cut_into_spans, make_thumbnail
from mdsmix.report.shown_samples import Picture, Segment
from mdsmix.tokenizer.card import open_tokenizer
from mdsmix.tokenizer.decoder import open_decoder
from tests.converting import Answer, Project, chats, documents, mdsmix, pairs
from tests.pages import Page
from tests.pictures import drawing, record, stream, write_drawings
from tests.published import CONCAT, PAIR, PAIR_ROW, TOKEN_ROW, publish

HOSTILE = (
    "</script><script>alert(1)</script>",
    '<img src=x onerror="alert(1)">"\'><svg/onload=alert(1)>',
    "nul \x00 escape \x1b]0;owned\x07 turn \u202e back",
    "שלום עולם مرحبا بالعالم",
    "e\u0301\u0323 q\u0307 👩‍👩‍👧‍👦 𝔘𝔫𝔦 한국어",
    "{{ 7 * 7 }} {% raw %} &amp; &lt;b&gt; <!-- -->",
)
NUMBERS = ("--batch", 8, "--gpus", 2)


def report(*arguments: object, out: Path, code: int = 0) -> tuple[Page, Answer]:
    """Run the command without the first batches, and return its page and output."""
    answer = mdsmix("report", *arguments, "--no-preview", "-o", out)
    assert answer.code == code, answer.err
    return Page(out.read_text("utf-8")), answer


def as_json(*arguments: object) -> Any:
    return json.loads(mdsmix(*arguments, "--json").out)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, tokenizer_folder: Path) -> Path:
    """Convert hostile documents, pairs with bad ones among them, and chats with long ones among
    them, mixed by shares.
    """
    project = Project(tmp_path_factory.mktemp("page"), tokenizer_folder, pytest.MonkeyPatch())
    texts: list[Any] = [f"{HOSTILE[n % len(HOSTILE)]} number {n}" for n in range(60)]
    docs = project.write_source(
        [*texts, {"text": 7}, {"other": "<b onclick=alert(1)>"}], "docs.jsonl"
    )
    asked = [{"prompt": f"What is {n}?", "response": f"{n} </mark> it is."} for n in range(60)]
    question = {"role": "user", "content": "Say it."}
    says = [[question, {"role": "assistant", "content": text}] for text in ("It.", "It, " * 60)]
    chat = project.write_source([{"messages": says[n % 9 == 0]} for n in range(60)], "chat.jsonl")
    streams = {"docs": documents(docs, layout="document"), "chat": chats(chat)}
    streams["faq"] = pairs(project.write_source(asked, "faq.jsonl"))
    streams["packed"] = streams["faq"] | {"pack": True}
    mix = {
        n: {"share": s} for n, s in (("docs", 0.4), ("faq", 0.3), ("chat", 0.2), ("packed", 0.1))
    }
    drawn = {"mix": mix, "budget": "400000 tokens", "max_repeat": 1000}
    drawn |= {"special_tokens_in_text": "allow", "max_seq_len": 64}
    project.configure(streams=streams, **drawn).convert_ok()
    return project.recipe


@pytest.fixture(scope="module")
def page(recipe: Path) -> Page:
    return report(recipe, *NUMBERS, "-n", 5, out=recipe.parent / "report.html")[0]


def test_the_page_says_what_the_commands_say(recipe: Path, page: Page) -> None:
    plan = as_json("plan", recipe, *NUMBERS)
    assert len(page.figures) == 5
    assert {"epoch.tokens", "step.padding"} <= page.figures.keys()
    for name, (value, text) in page.figures.items():
        part, key = name.split(".")
        assert (float(value) if value else None) == plan[part][key], name
        assert text.startswith("~") == (name in plan["estimated"]), name
    check = as_json("check", recipe)
    texts = [finding[key] for finding in check["findings"] for key in ("id", "message")]
    assert texts, "a test without a finding shows none"
    texts += [f"{row[key]:.2%}" for row in check["shares"]["rows"] for key in ("asked", "reached")]
    last = mdsmix("check", recipe).out.splitlines()[-1]
    assert last.startswith("shard contents not read")
    manifests = [found["manifest"] for found in as_json("inspect", recipe)["streams"]]
    for records in (manifest["records"] for manifest in manifests):
        dropped, bad = (sum(records[of].values()) for of in ("filtered", "quarantined"))
        texts.append(
            f"{records['read']:,} read = {records['written']:,} written + {dropped:,} filtered + "
            f"{bad:,} quarantined"
        )
    for code, reason in as_json("quarantine", recipe)["streams"][0]["reasons"].items():
        texts += [f"{code}: {reason['count']}", f"line {reason['records'][0]['line']}"]
    # Words between backticks are code on the page.
    words = [text.replace("`", "") for text in (*texts, last)]
    assert [text for text in words if text not in page.text] == []
    assert "<code>mdsmix check --deep</code>" in page.html


def test_the_lengths_of_samples_have_a_histogram(recipe: Path, page: Page) -> None:
    """A class of one length, such as the rows of a packed stream, is one number."""
    assert '<th scope="col">histogram</th>' in page.html
    assert ">bar</th>" not in page.html
    totals = SimpleNamespace(lengths={"2^11": 6, "2^0": 2, "2^7": 2}, longest=2048)
    assert list(list_length_rows(totals)) == [  # type: ignore[arg-type]
        ("1", 2, 0.2),
        ("128-255", 2, 0.2),
        ("2,048", 6, 0.6),
    ]


@pytest.mark.parametrize(
    ("text", "html"),
    [
        (
            "run `mdsmix gc`, then `<b>`.",
            "run <code>mdsmix gc</code>, then <code>&lt;b&gt;</code>.",
        ),
        ("a ` alone", "a ` alone"),
        ("`a` and ` alone", "<code>a</code> and ` alone"),
        ("<i>\u202e", "&lt;i&gt;\\u202e"),
        ("", ""),
    ],
)
def test_words_between_backticks_are_code(text: str, html: str) -> None:
    assert prose(text) == html


def test_samples_are_those_of_inspect_by_token_and_stay_text(recipe: Path, page: Page) -> None:
    inspected = as_json("inspect", recipe, "--random", "--seed", 0, "-n", 5)["streams"]
    expected = [(s["stream"].split("/")[-2], each) for s in inspected for each in s["shown"]]
    assert [s.stream for s in page.samples] == [name for name, _ in expected]
    for sample, (_, each) in zip(page.samples, expected, strict=True):
        assert f"sample {each['number']:,}" in sample.heading
        parts = each["sample"]
        assert sample.ids == [token for part in parts for token in part["ids"]]
        assert sample.trained == [t for part in parts if part["trained"] for t in part["ids"]]
        control = [part["ids"][at] for part in parts for at in part["control"]]
        assert [ids[0] for ids, _, css, _ in sample.tokens if css == "c"] == control
    assert (page.scripts, page.handlers, page.fetched) == (1, [], [])
    assert "default-src 'none'" in page.policy
    assert "</mark> it is." in "".join(sample.text for sample in page.samples)
    assert not {"\x00", "\x1b", "\u202e", "\x07"} & set(page.text)
    assert "<b onclick=alert(1)>" in page.text, "of a bad record"
    assert "document 1, " in mdsmix("inspect", recipe.parent / "out/packed").out, "of a packed row"


@pytest.fixture(scope="module")
def decoder(tokenizer_folder: Path) -> Any:
    return open_decoder(open_tokenizer(TokenizerSpec(name=str(tokenizer_folder))))


@settings(max_examples=20)
@given(st.text(max_size=40).filter(lambda text: BROKEN not in text))
def test_spans_are_the_text_and_all_its_tokens(decoder: Any, text: str) -> None:
    ids = decoder.model.encode(text, add_special_tokens=False).ids
    spans = list(cut_into_spans(Segment(ids, False), decoder))
    assert [token for span in spans for token in span.ids] == ids
    if not any(token in decoder.control for token in ids):
        assert all(span.form != "bytes" for span in spans), "every character of a text is whole"
        escaped = (c if c.isprintable() or c in "\n\t\xa0\u3000" else ascii(c)[1:-1] for c in text)
        shown = "".join(span.text for span in spans)
        joiners = str.maketrans({"\u200c": "\\u200c", "\u200d": "\\u200d"})
        assert shown.translate(joiners) == "".join(escaped), "a joiner alone is named"


def test_images_are_thumbnails_and_damaged_ones_a_sentence(project: Project, seeing: Path) -> None:
    write_drawings(project.folder, 3, size=(600, 400))
    project.write_source([record("0.jpg", "1.png"), record("2.webp"), record()])
    project.tokenizer = seeing
    project.configure(stream("a.jsonl"), max_seq_len=400).convert_ok()
    page, _ = report(project.recipe, out=project.folder / "r.html")
    assert sorted(len(sample.images) for sample in page.samples) == [0, 1, 2]
    assert all(url.startswith("data:image/webp;base64,") for s in page.samples for url in s.images)
    assert "600 x 400 JPEG" in page.text
    data = drawing("JPEG", (600, 400), seed=3)
    small = make_thumbnail(Picture(400, 600, data))
    with Image.open(io.BytesIO(base64.b64decode(small.data.partition(",")[2]))) as image:
        assert (small.width, small.height) == image.size == (144, 96)
        pixel: Any = image.convert("RGB").getpixel((130, 90))
    asked = (3 * 37 % 256, 3 * 91 % 256, 128)
    assert max(abs(a - b) for a, b in zip(pixel, asked, strict=True)) < 12, "its own colours"
    for damaged in (data[: len(data) // 2], b"<svg onload=alert(1)>", b""):
        thumbnail = make_thumbnail(Picture(400, 600, damaged))
        assert (thumbnail.data, "; not shown: " in thumbnail.caption) == ("", True)
    project.patch.setattr("mdsmix.report.page.sample_browser.MOST_PIXELS", 600 * 400 - 1)
    assert "image_too_large" in make_thumbnail(Picture(400, 600, data)).caption


def test_markup_in_stream_names_and_text_columns_stays_text(tmp_path: Path) -> None:
    name = 'we\u202eb\x1b[2J"><script>'
    publish(tmp_path / name, CONCAT, [TOKEN_ROW] * 5, card={"totals": {"lengths": {"2^3": 5}}})
    text = f"</pre><script>alert(1)</script> \x00{'x' * 1_000_000}"
    publish(tmp_path / "text", {"text": "str"}, [{"text": text}])
    page, _ = report(tmp_path / name, "-n", 1, out=tmp_path / "r.html")
    assert not {"\u202e", "\x1b"} & set((tmp_path / "r.html").read_text("utf-8"))
    assert (page.scripts, page.handlers) == (1, [])
    assert "we\\u202eb\\x1b[2J" in page.text
    page, _ = report(tmp_path / "text", out=tmp_path / "r.html")
    assert page.scripts == 1
    assert "</pre><script>alert(1)</script> \\x00xxx" in page.text
    assert "characters)" in page.text
    assert (tmp_path / "r.html").stat().st_size < 60_000


def test_missing_and_damaged_streams_are_reported_and_the_rest_is_shown(tmp_path: Path) -> None:
    project, hurt, out = tmp_path / "web", tmp_path / "hurt", tmp_path / "r.html"
    publish(project, CONCAT, [TOKEN_ROW] * 5)
    (shard,) = publish(hurt, CONCAT, [TOKEN_ROW] * 5, card={}).rglob("*.mds")
    shard.write_bytes(bytes(shard.stat().st_size))
    page, answer = report(project, hurt, out=out, code=4)
    assert ("is damaged" in answer.err, "is damaged" in page.text) == (True, True)
    assert answer.out.endswith(", without data that could not be read\n")
    assert page.samples
    page, answer = report(project, tmp_path / "gone", out=out, code=4)
    assert page.text.count("gone contains no published stream") == 1, "once, and referred to"
    assert page.text.count("see the problem at the top of the page") >= 4
    assert answer.err.count("\n") == 1


def test_a_recipe_is_planned_however_much_of_it_is_converted(project: Project) -> None:
    project.write_source(f"Number {n} of them." for n in range(50))
    project.write_source([""], "b.jsonl")
    streams = {name: documents("a.jsonl", layout="document") for name in "ab"}
    recipe, out = project.configure(streams=streams).recipe, project.folder / "r.html"
    page, answer = report(recipe, *NUMBERS, out=out, code=4)
    tokens = as_json("plan", recipe, *NUMBERS)["epoch"]["tokens"]
    assert float(page.figures["epoch.tokens"][0]) == tokens
    message = (
        f"error: these streams are not published: a at {project.out}/a/train; b at "
        f"{project.out}/b/train. Run `mdsmix convert` on this recipe first."
    )
    assert answer.err.startswith(message)
    for command in ("check", "render-yaml"):
        assert mdsmix(command, recipe) == Answer(4, "", f"{message}\n")
    assert "Nothing is published yet." in page.text
    project.convert_ok("--limit", 3, "--only", "a")
    for command in ("check", "render-yaml"):
        answer = mdsmix(command, recipe)
        assert answer.code == 4
        start, _, hint = answer.err.partition(", without --limit; ")
        assert start == message.removesuffix(".")
        looks = f"`mdsmix check {project.out}/a/limit-3`"
        assert hint == f"to check what --limit converted, run {looks}.\n"
    assert mdsmix("check", project.out / "a/limit-3").code == 0
    streams["b"] = documents("b.jsonl", layout="document")
    project.configure(streams=streams).convert_ok("--only", "a")
    page, _ = report(recipe, *NUMBERS, "-n", 2, out=out, code=4)
    assert [sample.stream for sample in page.samples] == ["a", "a"]
    assert "1 of these records become no sample" in page.text, "a stream that comes to nothing"


def test_the_page_of_another_mix_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    publish(tmp_path / "a", CONCAT, [TOKEN_ROW] * 9, card={})
    publish(tmp_path / "b", PAIR, [PAIR_ROW] * 9, card={})
    for name, code in (("a", 0), ("a", 0), ("b", 2)):
        answer = mdsmix("report", name, "--no-preview", "--nodes", 2)
        assert (answer.code, "is not a page of b" in answer.err) == (code, code == 2), answer.err
        assert "2 nodes of 8 devices, 128 rows" in Path("report.html").read_text()
    page, _ = report("a", "b", "-n", 1, out=tmp_path / "r.html")
    assert page.text.count("2 streams may not be mixed") == 1
    assert "so it cannot be trained or planned" in page.text


def test_one_sentence_says_why_there_is_no_page(tmp_path: Path) -> None:
    """An output that cannot be written is refused before streams are read."""
    project, page = publish(tmp_path / "web", CONCAT, [TOKEN_ROW] * 5, card={}), tmp_path / "r.html"
    for arguments, out, code, words in (
        ([tmp_path / "gone"], page, 4, "contains no published stream"),
        ([tmp_path / "a.yaml", "x=1"], page, 2, "a.yaml: no such file"),
        ([], page, 2, "Missing argument"),
        ([project, "--batch", 7, "--gpus", 2], page, 2, "cannot be divided among 2 devices"),
        ([project], tmp_path, 2, str(tmp_path)),
        ([project], tmp_path / "no/r.html", 2, str(tmp_path / "no/r.html")),
        ([project], Path("/proc/r.html"), 4, "/proc/r.html"),
    ):
        answer = mdsmix("report", *arguments, "--no-preview", "-o", out)
        assert (answer.code, words in answer.err) == (code, True), answer.err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["web"]
