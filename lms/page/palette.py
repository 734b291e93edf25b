"""Colours for light and dark, as CSS; every text keeps a contrast of 4.5 to 1 on what it stands on."""

from collections.abc import Mapping

COLOURS = 8
"""Ranks and kinds beyond these begin again; each carries its number too, so that no colour has to be told."""

_LIGHT = {
    "fill": ("#cfe3f7", "#fde0b8", "#c9ecd9", "#f8d3e5", "#e2daf6", "#fbefa8", "#cdecf2", "#eadfd2"),
    "line": ("#2361a3", "#9a6213", "#24704a", "#a52a70", "#6340b5", "#7d6700", "#0a6375", "#72532f"),
}
_DARK = {
    "fill": ("#1d3b5e", "#553a12", "#17472f", "#561f40", "#3c2c68", "#474000", "#0d434d", "#43331f"),
    "line": ("#86b8ea", "#eab863", "#6fcf9f", "#ee94c4", "#b9a4ee", "#dccb45", "#66cbdb", "#d3b797"),
}


def _theme(values: Mapping[str, tuple[str, ...]], paint: Mapping[str, str]) -> str:
    ranks = "".join(
        f".lm-k{index}{{fill:{fill};stroke:{line}}}.lm-l{index}{{stroke:{line}}}.lm-t{index}{{fill:{line}}}"
        for index, (fill, line) in enumerate(zip(values["fill"], values["line"], strict=True))
    )
    plain = "".join(f".{name}{{{rule}}}" for name, rule in paint.items())
    return plain + ranks


_LIGHT_PAINT = {
    "lm-page": "fill:#ffffff",
    "lm-package": "fill:#f3f5f8;stroke:#b6bfcb",
    "lm-node": "fill:#ffffff;stroke:#c5cdd8",
    "lm-card": "fill:#eef1f5;stroke:#a3aebd",
    "lm-core": "fill:#e6eaf0;stroke:#aab4c2",
    "lm-off": "fill:none;stroke:#9aa5b4",
    "lm-bar": "fill:#e6eaf0;stroke:#aab4c2",
    "lm-text": "fill:#17202b",
    "lm-head": "fill:#17202b",
    "lm-dim": "fill:#4c5968",
    "lm-good": "fill:#17693c",
    "lm-bad": "fill:#b3261e",
    "lm-grid": "stroke:#d6dce4",
    "lm-axis": "stroke:#7c8896",
    "lm-limit": "stroke:#b3261e",
    "lm-badline": "stroke:#b3261e",
    "lm-peakdot": "fill:#b3261e",
    "lm-hole": "fill:#ffffff;stroke:#aab4c2",
}
_DARK_PAINT = {
    "lm-page": "fill:#12161c",
    "lm-package": "fill:#1a2029;stroke:#465365",
    "lm-node": "fill:#12161c;stroke:#3b4656",
    "lm-card": "fill:#232b36;stroke:#56657a",
    "lm-core": "fill:#262f3b;stroke:#516074",
    "lm-off": "fill:none;stroke:#66758a",
    "lm-bar": "fill:#262f3b;stroke:#516074",
    "lm-text": "fill:#e8edf3",
    "lm-head": "fill:#ffffff",
    "lm-dim": "fill:#a9b5c3",
    "lm-good": "fill:#6fd39c",
    "lm-bad": "fill:#ff9b92",
    "lm-grid": "stroke:#2c3541",
    "lm-axis": "stroke:#8492a3",
    "lm-limit": "stroke:#ff8a80",
    "lm-badline": "stroke:#ff8a80",
    "lm-peakdot": "fill:#ff8a80",
    "lm-hole": "fill:#12161c;stroke:#516074",
}

_SHAPE = (
    ".lm-drawing{font-family:system-ui,'Segoe UI','DejaVu Sans',Arial,sans-serif;font-size:12px}"
    ".lm-head{font-size:14px;font-weight:600}.lm-title{font-size:18px}.lm-small{font-size:11px}"
    ".lm-tiny{font-size:10px}.lm-bold{font-weight:600}"
    ".lm-off{stroke-dasharray:3 2}.lm-missing{fill-opacity:0.15;stroke-dasharray:3 2}"
    ".lm-badline{stroke-width:2.5;fill:none}.lm-limit{stroke-width:1.5;stroke-dasharray:6 4;fill:none}"
    ".lm-steps,.lm-steps *{vector-effect:non-scaling-stroke}"
    ".lm-thin{stroke-width:0.5}.lm-flat{stroke:none}.lm-line{fill:none;stroke-width:1.6}"
)

STYLE = (
    _SHAPE
    + _theme(_LIGHT, _LIGHT_PAINT)
    + "@media screen and (prefers-color-scheme:dark){"
    + _theme(_DARK, _DARK_PAINT)
    + "}"
)
"""What every drawing needs. Dark is for screens alone: paper is white."""


def kind(number: int) -> int:
    """Return the colour of a rank or kind."""
    return number % COLOURS
