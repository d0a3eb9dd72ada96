"""A page taken apart as a browser does: what it says, which samples and figures it holds, and
whatever could run or be fetched.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Any

VOID = ("meta", "input", "img", "br", "link")
FETCHED = ("src", "href", "data", "action", "poster", "srcset", "xlink:href")


@dataclass
class Sample:
    """An article of the browser."""

    stream: str
    heading: str = ""
    tokens: list[tuple[list[int], str, str, bool]] = field(default_factory=list)
    "(ids, text, class, whether it is trained)."
    images: list[str] = field(default_factory=list)

    @property
    def ids(self) -> list[int]:
        return [token for ids, *_ in self.tokens for token in ids]

    @property
    def trained(self) -> list[int]:
        return [token for ids, _, _, trained in self.tokens if trained for token in ids]

    @property
    def text(self) -> str:
        return "".join(text for _, text, _, _ in self.tokens)


class Page(HTMLParser):
    """What a page holds."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.html = html
        self.text = ""
        self.figures = dict[str, tuple[str, str]]()
        "data-figure -> (value, text)."
        self.samples = list[Sample]()
        self.scripts = 0
        self.handlers = list[str]()
        self.fetched = list[str]()
        self.policy = ""
        self._open = list[tuple[str, Mapping[str, Any]]]()
        self.feed(html)
        self.close()
        assert not self._open, f"never closed: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.scripts += tag == "script"
        self.handlers += [name for name in given if name.startswith("on")]
        self.fetched += [
            f"{tag} {v}"
            for k, v in given.items()
            if k in FETCHED and v and not v.startswith(("#", "data:image/"))
        ]
        if given.get("http-equiv") == "Content-Security-Policy":
            self.policy = str(given["content"])
        if "sample" in str(given.get("class")).split():
            self.samples.append(Sample(str(given["data-s"])))
        if "data-i" in given and self._in("article"):
            trained, ids = self._in("mark"), list(map(int, str(given["data-i"]).split()))
            self.samples[-1].tokens.append((ids, "", str(given.get("class") or ""), trained))
        if tag == "img":
            self.samples[-1].images.append(str(given["src"]))
        if tag not in VOID:
            self._open.append((tag, given))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        if self._in("script") or self._in("style"):
            return
        self.text += data
        given = self._open[-1][1] if self._open else {}
        if "data-figure" in given:
            self.figures[given["data-figure"]] = (given["value"], data)
        if not self._in("article"):
            return
        if "data-i" in given:
            ids, text, css, trained = self.samples[-1].tokens[-1]
            self.samples[-1].tokens[-1] = (ids, text + data, css, trained)
        elif self._in("h3"):
            self.samples[-1].heading += data

    def _in(self, tag: str) -> bool:
        return any(each == tag for each, _ in self._open)
