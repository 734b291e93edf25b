"""Write SVG: a canvas that collects shapes and texts, and estimates of how wide a text is."""

from collections.abc import Iterable
from html import escape

WIDE, NARROW = frozenset("MWmw@%&—"), frozenset("fijlrtI1.,:;|!'()[]{} ·-/")


def safe(text: object) -> str:
    """Return text as it may stand in SVG and HTML: escaped, without characters that XML forbids."""
    shown = "".join(char if char.isprintable() else "?" for char in str(text))
    return escape(shown, quote=True)


def text_width(text: str, size: float = 12) -> float:
    """Estimate the width of a text in a sans-serif font of ``size`` pixels, rather too wide."""
    units = sum(0.93 if char in WIDE else 0.36 if char in NARROW else 0.61 for char in text)
    return units * size


def fitted(text: str, width: float, size: float = 12) -> str:
    """Return a text, cut with an ellipsis where it is wider than ``width`` pixels."""
    if text_width(text, size) <= width:
        return text
    while text and text_width(text + "…", size) > width:
        text = text[:-1]
    return text.rstrip() + "…" if text else ""


def tag(name: str, content: str = "", **attributes: object) -> str:
    """Write one element; ``class_`` is ``class``, other underscores become hyphens, ``None`` is left out."""
    said = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_attribute(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return f"<{name}{said}>{content}</{name}>" if content else f"<{name}{said}/>"


def _attribute(value: object) -> str:
    return _number(value) if isinstance(value, float) else safe(value)


def _number(value: float) -> str:
    """Write a number with at most two decimals."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if value % 1 else f"{value:.0f}"


class Canvas:
    """Collects shapes and texts, in the order in which they are painted."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.height = 0.0
        """The lower end of what has been painted."""

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        class_: str,
        *,
        round_: float = 6,
        tip: str = "",
    ) -> None:
        """Paint a rectangle; ``tip`` is what a pointer on it shows."""
        content = tag("title", safe(tip)) if tip else ""
        corner = float(round_) or None
        self.parts.append(
            tag(
                "rect",
                content,
                x=float(x),
                y=float(y),
                width=float(max(width, 0)),
                height=float(max(height, 0)),
                rx=corner,
                class_=class_,
            )
        )
        self.height = max(self.height, y + height)

    def text(
        self, x: float, y: float, text: str, class_: str = "lm-text", *, anchor: str | None = None
    ) -> None:
        """Paint a line of text on its baseline."""
        self.parts.append(tag("text", safe(text), x=float(x), y=float(y), class_=class_, text_anchor=anchor))
        self.height = max(self.height, y + 4)

    def add(self, parts: Iterable[str]) -> None:
        """Add elements that are written already."""
        self.parts.extend(parts)

    def document(
        self, width: float, height: float, title: str, description: str, *, key: str, style: str = ""
    ) -> str:
        """Write the whole drawing.

        Args:
            width: In pixels; the drawing shrinks with the room that it gets.
            height: In pixels.
            title: Its name, for a screen reader.
            description: What can be seen, for one.
            key: Begins the ids, so that several drawings may stand on one page.
            style: CSS that travels with the drawing, to where nothing is known of the page behind it. So a
                background goes along.
        """
        head = tag("title", safe(title), id=f"{key}-title") + tag("desc", safe(description), id=f"{key}-desc")
        sheet = tag("rect", x=0.0, y=0.0, width=float(width), height=float(height), class_="lm-page")
        own = f"<style>{style}</style>\n{sheet}" if style else ""
        body = head + own + "\n" + "\n".join(self.parts) + "\n"
        return tag(
            "svg",
            body,
            xmlns="http://www.w3.org/2000/svg",
            viewBox=f"0 0 {_number(width)} {_number(height)}",
            width=float(width),
            height=float(height),
            role="img",
            aria_labelledby=f"{key}-title {key}-desc",
            class_="lm-drawing",
        )
