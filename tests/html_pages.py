"""Read HTML pages as a browser would, and fill documents with names that want to break out of them."""

from collections.abc import Mapping
from html.parser import HTMLParser
from typing import Any

VOID = {"meta", "link", "br", "hr", "img", "input", "wbr"}
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\"'&\x00\x1b[31m\u2028]]>-->"


class Reader(HTMLParser):
    """What a browser would make of a page, as far as a test wants to know."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.started: list[tuple[str, Mapping[str, str | None]]] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.started.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.started.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> ends {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    reader.close()
    assert reader.open == []
    ids = [attrs["id"] for _, attrs in reader.started if "id" in attrs]
    assert len(ids) == len(set(ids))
    return reader


def assert_harmless(page: str) -> None:
    reader = read(page)
    scripts = [attrs for tag, attrs in reader.started if tag == "script"]
    assert [attrs.get("type") for attrs in scripts] == ["application/json", None]
    assert not any(tag in ("img", "iframe", "object", "embed", "form", "base") for tag, _ in reader.started)
    for tag, attrs in reader.started:
        assert not any(name.startswith("on") for name in attrs), (tag, attrs)
        for name in ("href", "src", "xlink:href"):
            value = attrs.get(name)
            assert value is None or value.startswith("#") or value == "data:,", (tag, name, value)


def hostile(value: Any) -> Any:
    """The same document, with every text in it hostile; also the keys that a page shows."""
    if isinstance(value, dict):
        return {key: hostile(one) for key, one in value.items()} | {HOSTILE: HOSTILE}
    if isinstance(value, list):
        return [hostile(one) for one in value]
    return HOSTILE if isinstance(value, str) else value
