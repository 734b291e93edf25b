"""The page in a real browser: its panels can be used, nothing is fetched, nothing goes wrong."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from run_folders import write_folder

from lmsrun.report.page import render_report
from lmsrun.report.record import read_record

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    not (BROWSER and DRIVER), reason="no chromium and chromedriver (CLUSTER_TOOLS=1 installs them)"
)
QUIET = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-dev-shm-usage", "--hide-scrollbars", "--window-size=1240,900"),
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = str(BROWSER)
    for word in (*QUIET, f"--user-data-dir={tmp_path_factory.mktemp('browser')}"):
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    service = webdriver.ChromeService(executable_path=str(DRIVER))
    driver = webdriver.Chrome(options=options, service=service)
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_folder(tmp_path_factory.mktemp("job") / "job", 8)
    path = folder / "report.html"
    path.write_text(render_report(read_record(folder)))
    return path


@pytest.fixture
def opened(browser: Any, page: Path) -> Any:
    """The page as it has just been opened; what was logged before is read and gone."""
    browser.get_log("browser")
    browser.get_log("performance")
    browser.get(page.as_uri())
    return browser


def requests(driver: Any, of: str) -> list[str]:
    """What a page has asked for; the browser's own pages may still be loading."""
    events = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    sent = [one["params"] for one in events if one["method"] == "Network.requestWillBeSent"]
    return [one["request"]["url"] for one in sent if one["documentURL"] == of]


def test_nothing_is_fetched_and_nothing_goes_wrong(opened: Any, page: Path) -> None:
    shown = [section.get_attribute("id") for section in opened.find_elements(By.TAG_NAME, "section")]
    assert shown[:3] == ["machine", "ranks", "r0-step"] and shown[-1] == "configuration"
    assert all(section.is_displayed() for section in opened.find_elements(By.TAG_NAME, "section"))
    wide = opened.execute_script("return document.documentElement.scrollWidth - window.innerWidth")
    assert wide <= 0
    asked = requests(opened, page.as_uri())
    assert page.as_uri() in asked
    assert [url for url in asked if url != page.as_uri() and not url.startswith("data:")] == []
    assert opened.get_log("browser") == []


def test_a_narrow_window_scrolls_drawings_that_can_still_be_read(opened: Any) -> None:
    before = opened.get_window_size()
    opened.set_window_size(520, 900)
    try:
        wide = opened.execute_script("return document.documentElement.scrollWidth - window.innerWidth")
        drawn = opened.execute_script(
            "return [...document.querySelectorAll('.wide svg.lm-drawing')].map(one => one.clientWidth)"
        )
    finally:
        opened.set_window_size(before["width"], before["height"])
    assert wide <= 0 and len(drawn) == 5 and min(drawn) >= 760


def test_the_step_can_be_zoomed_read_and_thinned_by_keys(opened: Any) -> None:
    chart = opened.find_element(By.CSS_SELECTOR, "[data-step]")
    zoomed = chart.find_element(By.CSS_SELECTOR, ".lm-zoom")
    whole = zoomed.get_dom_attribute("viewBox")
    chart.send_keys("+")
    assert float(zoomed.get_dom_attribute("viewBox").split()[2]) == 500
    before = chart.find_element(By.CSS_SELECTOR, ".lm-tick").text
    chart.send_keys(Keys.ARROW_RIGHT * 40)
    assert chart.find_element(By.CSS_SELECTOR, ".lm-tick").text != before
    said = opened.find_element(By.CSS_SELECTOR, "#r0-step .said").text
    assert "as planned: " in said and " MiB model/" in said
    chart.send_keys("0")
    assert zoomed.get_dom_attribute("viewBox") == whole
    button = opened.find_element(By.CSS_SELECTOR, '[data-hide="swapped"]')
    bands = opened.find_elements(By.CSS_SELECTOR, 'g[data-fate="swapped"]')
    assert len(bands) == 2 and all(band.is_displayed() for band in bands)
    button.click()
    assert button.get_attribute("aria-pressed") == "false"
    assert not any(band.is_displayed() for band in bands)
    assert opened.get_log("browser") == []


def test_a_pointer_shows_what_is_alive(opened: Any) -> None:
    chart = opened.find_element(By.CSS_SELECTOR, "[data-step]")
    opened.execute_script("arguments[0].scrollIntoView()", chart)
    webdriver.ActionChains(opened).move_to_element(chart).perform()
    tip = chart.find_element(By.CSS_SELECTOR, ".tip")
    assert tip.is_displayed() and "MiB model/" in tip.text
    assert opened.get_log("browser") == []


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_screen_reader_finds_its_way(opened: Any, theme: str) -> None:
    axe = Path(pytest.importorskip("axe_core_python").__file__ or "").parent / "axe.min.js"
    dark = {"media": "screen", "features": [{"name": "prefers-color-scheme", "value": theme}]}
    opened.execute_cdp_cmd("Emulation.setEmulatedMedia", dark)
    opened.execute_script(axe.read_text())
    found = opened.execute_async_script("axe.run().then(arguments[0])")
    told = [
        f"{one['id']}: {one['help']}: {node['html'][:160]} {node.get('any') and node['any'][0]['message']}"
        for one in found["violations"]
        for node in one["nodes"][:3]
    ]
    assert told == []
    assert len(found["passes"]) > 20


def test_a_narrow_window_cuts_nothing_off(opened: Any) -> None:
    size = opened.get_window_size()
    opened.set_window_size(600, 900)
    wide = opened.execute_script("return document.documentElement.scrollWidth - window.innerWidth")
    opened.set_window_size(size["width"], size["height"])
    assert wide <= 0
