"""The page: every panel is there, nothing that came from outside breaks out of it, and nothing is fetched."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from html_pages import HOSTILE, assert_harmless, hostile, read
from hypothesis import given, settings
from hypothesis import strategies as st

from lms.page.lms_page import render_document
from lms.page.reading import byte_ticks, time_ticks
from lms.page.shell import embedded, render_table
from lms.page.svg import fitted, safe, text_width

FIXTURE = Path(__file__).resolve().parents[2] / "golden" / "lms-report.json"


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(FIXTURE.read_text())
    return found


def test_every_panel_is_there(document: dict[str, Any]) -> None:
    page = render_document(document)
    reader = read(page)
    sections = [attrs["id"] for tag, attrs in reader.started if tag == "section"]
    assert sections == ["r0-step", "r0-peak", "r0-pool", "r0-steps", "r0-policies", "configuration"]
    links = [attrs["href"] for tag, attrs in reader.started if tag == "a"]
    assert links == ["#main", *(f"#{name}" for name in sections)]
    for said in (
        "Fits: 373.0 MiB of 420.0 MiB, 47.0 MiB (11%) to spare.",
        "A step takes 1.09 times as long as without changes (simulated).",
        "the project's tests check it, this run did not",
        "you are here",
        "limit 420.0 MiB",
        "float32 32x56x56x64",
        "a warning",
    ):
        assert safe(said) in page, said
    assert len(page) < 400_000


def test_what_is_drawn_is_explained(document: dict[str, Any]) -> None:
    told = " ".join(read(render_document(document)).texts)
    assert told.count("where the upright dashes are") == 2
    assert "time of a step" in told and "A budget is a share of what" in told
    pool = render_document(document).partition('id="r0-pool"')[2].partition("</section>")[0]
    drawn = {name for names in re.findall(r'<rect [^>]*class="([^"]+)"', pool) for name in names.split()}
    legend = pool.partition('aria-label="Colours"')[2]
    assert drawn - {"lm-thin"} <= set(re.findall(r'class="([^"]+)"', legend))


def test_names_of_ops_break_behind_their_slashes(document: dict[str, Any]) -> None:
    peak = render_document(document).partition('id="r0-peak"')[2].partition("</section>")[0]
    assert re.search(r"<td>\w+/<wbr>\w+", peak)


def test_each_drawing_says_what_it_shows(document: dict[str, Any]) -> None:
    reader = read(render_document(document))
    drawings = [attrs for tag, attrs in reader.started if tag == "svg" and attrs.get("role") == "img"]
    ids = {attrs["id"] for _, attrs in reader.started if "id" in attrs}
    assert len(drawings) == 4
    for attrs in drawings:
        assert all(name in ids for name in str(attrs["aria-labelledby"]).split())


def test_what_is_unknown_is_said(document: dict[str, Any]) -> None:
    bare = {**document, "step": None, "steps": [], "measured_peak_bytes": None, "moved": None}
    page = render_document({**bare, "planned_peak_bytes": None})
    assert "Whether the step fits is unknown: no peak was planned or measured." in page
    assert "not counted" in page and "No step was recorded." in page
    page = render_document({**bare, "device": {"name": "CPU:0", "limit_bytes": None}})
    assert "The step needs 370.0 MiB; the device&#x27;s limit is unknown." in page


def test_what_does_not_fit_is_said(document: dict[str, Any]) -> None:
    page = render_document({**document, "device": {"name": "GPU:0", "limit_bytes": 300 << 20}})
    assert "Does not fit: 373.0 MiB is 73.0 MiB more than the limit of 300.0 MiB." in page
    assert 'class="verdict bad"' in page


def test_no_name_breaks_out(document: dict[str, Any]) -> None:
    page = render_document(hostile(document), HOSTILE)
    assert_harmless(page)
    assert "\x00" not in page and "\x1b" not in page
    data = re.search(r'<script type="application/json" id="lms-data">(.*?)</script>', page, re.DOTALL)
    assert data and json.loads(data[1])["reports"][0]["idle"] == HOSTILE


def test_embedded_data_come_back(document: dict[str, Any]) -> None:
    written = embedded({"a": HOSTILE, "b": document})
    assert not set("<>&\u2028") & set(written)
    assert json.loads(written) == {"a": HOSTILE, "b": document}
    assert embedded([float("nan"), float("inf"), 1.5, "NaN"]) == '[null,null,1.5,"NaN"]'


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=8), inner, max_size=5),
    max_leaves=20,
)
KEYS = [
    *("step", "steps", "device", "planned_peak_bytes", "measured_peak_bytes", "config", "graphs", "warnings"),
    *("idle", "moved", "versions", "step_count"),
]
STEP_KEYS = ["before", "after", "tensors", "at_peak", "pool", "policies", "base_bytes", "limit_bytes", "name"]
SIDE_KEYS = ["stays", "rest", "seconds", "peak_bytes", "peak_s", "out", "in", "busy", "rest_count"]


def _damaged(keys: list[str], inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.dictionaries(st.sampled_from(keys), inner, max_size=4)


SIDE = _damaged(
    SIDE_KEYS, JSON | st.lists(st.lists(st.integers(-9, 99) | st.floats(), max_size=4), max_size=5)
)
STEP = _damaged(STEP_KEYS, JSON | SIDE)


def cut(value: Any) -> Any:
    """A document with the first entries of its lists."""
    if isinstance(value, dict):
        return {key: cut(one) for key, one in value.items()}
    return [cut(one) for one in value[:4]] if isinstance(value, list) else value


SMALL = cut(json.loads(FIXTURE.read_text()))


@settings(max_examples=100, deadline=None)
@given(_damaged(KEYS, JSON | STEP), STEP)
def test_a_damaged_document_is_drawn_all_the_same(changes: dict[str, Any], step: dict[str, Any]) -> None:
    assert_harmless(render_document({**SMALL, **changes}))
    assert_harmless(render_document({**SMALL, "step": {**SMALL["step"], **step}}))


@pytest.mark.parametrize("value", [10**400, 5e-324, 0.5])
def test_numbers_that_no_machine_has_are_unknown(value: float) -> None:
    pool = {**SMALL["step"]["pool"], "size": value}
    assert_harmless(render_document({**SMALL, "step": {**SMALL["step"], "pool": pool}}))


def test_the_page_forbids_what_it_does_not_need(document: dict[str, Any]) -> None:
    page = render_document(document)
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', page)
    assert policy and policy[1].startswith("default-src &#x27;none&#x27;; style-src")
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "") and "https://" not in page


@pytest.mark.parametrize(
    ("top", "step"),
    [(1, 0.25), (700, 200), (1500, 256), (700 << 20, 200 << 20), (3 << 30, 1 << 29), (9e17, 200 * 2**50)],
)
def test_axes_have_few_round_numbers(top: float, step: float) -> None:
    ticks = byte_ticks(top)
    assert ticks[:2] == [0, step] and 2 <= len(ticks) <= 7 and ticks[-1] <= top


@pytest.mark.parametrize(
    ("top", "step"), [(0.031, 0.01), (1.9, 0.5), (7.0, 2.0), (0.0000123, 5e-6), (60, 10)]
)
def test_times_have_few_round_numbers(top: float, step: float) -> None:
    ticks = time_ticks(top)
    assert ticks[0] == 0 and ticks[1] == pytest.approx(step) and len(ticks) <= 7


def test_texts_are_fitted_and_tables_escaped_by_their_makers() -> None:
    assert fitted("short", 100) == "short"
    cut = fitted("long" * 40, 100)
    assert cut.endswith("…") and text_width(cut) <= 100
    assert fitted("anything", 1) == ""
    assert "<caption>&lt;b&gt;</caption>" in render_table("<b>", ("x",), [["y"]])
