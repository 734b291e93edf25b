"""One HTML file of panels: its styles, its script and its data are in it, and nothing is fetched."""

import base64
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lms.page.palette import STYLE
from lms.page.svg import safe

_HERE = Path(__file__).parent
DATA_ID = "lms-data"


@dataclass(frozen=True)
class Panel:
    """One part of a page. ``html`` is written already: whatever came from outside is escaped in it."""

    key: str
    title: str
    html: str
    note: str = ""
    """What a reader must know of it: what is simulated, left out or unknown."""


def render_page(title: str, verdict: str, panels: Sequence[Panel], data: Any) -> str:
    """Write the page.

    Args:
        title: Its name.
        verdict: HTML that stands first.
        panels: In their order.
        data: What the page's script draws from and what a program may read, as values for JSON.
    """
    script = (_HERE / "page.js").read_text(encoding="utf-8")
    style = (_HERE / "page.css").read_text(encoding="utf-8") + STYLE
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:"
    links = "".join(f'<li><a href="#{panel.key}">{safe(panel.title)}</a></li>' for panel in panels)
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{safe(policy)}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            '<link rel="icon" href="data:,">',
            f"<title>{safe(title)}</title>",
            f"<style>{style}</style>",
            "</head>",
            "<body>",
            '<a class="skip" href="#main">Skip to the report</a>',
            f'<header><h1>{safe(title)}</h1><nav aria-label="Panels"><ul>{links}</ul></nav></header>',
            f'<main id="main" tabindex="-1">{verdict}',
            *map(_section, panels),
            "</main>",
            f'<script type="application/json" id="{DATA_ID}">{embedded(data)}</script>',
            f"<script>{script}</script>",
            "</body>",
            "</html>",
            "",
        ]
    )


def _section(panel: Panel) -> str:
    note = f'<p class="note">{safe(panel.note)}</p>' if panel.note else ""
    head = f'<h2 id="{panel.key}-head">{safe(panel.title)}</h2>'
    return f'<section id="{panel.key}" aria-labelledby="{panel.key}-head">{head}{note}{panel.html}</section>'


def embedded(data: Any) -> str:
    """Write values as JSON that nothing in them can end: no character that HTML would read is left."""
    try:
        written = json.dumps(data, separators=(",", ":"), allow_nan=False)
    except ValueError:  # A browser reads no NaN, which Python writes and reads.
        finite = json.loads(json.dumps(data), parse_constant=lambda _: None)
        written = json.dumps(finite, separators=(",", ":"))
    return written.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def render_table(
    caption: str,
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    numeric: Sequence[int] = (),
    tight: Sequence[int] = (),
) -> str:
    """Write a table.

    Args:
        caption: What it holds.
        heads: The heads of its columns.
        rows: Cells, which are HTML.
        numeric: The columns that stand to the right.
        tight: The columns whose cells are never broken.
    """
    classes = [_class(at, numeric, tight) for at in range(len(heads))]
    top = "".join(f'<th scope="col"{classes[at]}>{safe(head)}</th>' for at, head in enumerate(heads))
    body = "".join(
        "<tr>"
        + "".join(
            f'<th scope="row">{cell}</th>' if at == 0 else f"<td{classes[at]}>{cell}</td>"
            for at, cell in enumerate(row)
        )
        + "</tr>"
        for row in rows
    )
    return (
        f'<div class="scroll" tabindex="0" role="group" aria-label="{safe(caption)}"><table>'
        f"<caption>{safe(caption)}</caption><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def scrolled(label: str, svg: str) -> str:
    """Write a drawing so that a narrow screen scrolls it, by keys too, and can read it."""
    return f'<div class="scroll wide" tabindex="0" role="group" aria-label="{safe(label)}">{svg}</div>'


def _class(at: int, numeric: Sequence[int], tight: Sequence[int]) -> str:
    return ' class="num"' if at in numeric else ' class="tight"' if at in tight else ""
