"""The page of one process: what ``lms.report().to_html(path)`` writes."""

from collections.abc import Mapping
from typing import Any

from lms.page.panels import config_panel, lms_panels, render_verdict, verdict_of
from lms.page.shell import render_page


def render_document(document: Mapping[str, Any], title: str = "Large Model Support") -> str:
    """Write the page of a document."""
    panels = [*lms_panels(document, 0), config_panel(document)]
    return render_page(title, render_verdict(*verdict_of(document)), panels, {"reports": [document]})
