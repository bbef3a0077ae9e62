"""The plan's page in a real browser: sliders by keyboard, on a desk and on a phone, without a network."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from html import escape
from importlib.resources import files
from pathlib import Path

import pytest
import torch

from narrowboat.options.schema import LoraOptions, Options
from narrowboat.planner import catalog
from narrowboat.planner.forecast import Forecaster, Workload
from narrowboat.planner.page import LENGTHS, filled, page_data, write_page
from narrowboat.planner.search import Search
from narrowboat.planner.target import SOME_CARD, Limits
from narrowboat.units import GIB
from tests.planner import browser


@pytest.fixture(scope="module")
def search() -> Search:
    work = Workload(catalog.model_config("smollm2-135m"), Options(lora=LoraOptions(rank=16)), torch.bfloat16, SOME_CARD)
    return Search(Forecaster(work), catalog.card("rtx-3060").target, "recompute")  # two rungs: enough for a page


def other(search: Search) -> Callable[[Options], Search]:
    return lambda options: Search(Forecaster(replace(search.work, options=options)), search.target, "recompute")


@pytest.fixture(scope="module")
def page(search: Search, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "plan.html"
    write_page(search, Limits(12 * GIB, 64 * GIB), 4096, "smollm2 <135m>", path, other(search))
    return path


def test_it_needs_no_network_and_escapes_its_title(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert "smollm2 &lt;135m&gt;" in text
    assert not re.findall(r"""(?:src|href)=["'](?!data:)|https?://""", text)


HOSTILE = "{{data}}<img src=x onerror=alert(1)></script><!--<script>{{title}}\u2028&\"'"


def test_a_hostile_title_is_text_and_nothing_else(search: Search) -> None:
    """A model's folder may have any name. A title of {{data}} was raw JSON in the page, and a tag in it a tag."""
    template = files("narrowboat.planner").joinpath("page.html").read_text(encoding="utf-8")
    data = {"title": HOSTILE, "tokens": 1}
    page = filled(template, data)
    places = template.count("{{title}}") + template.count("{{data}}")
    assert page.count("{{") == 2 * places  # the title's own two, as text, wherever it stands
    assert "<img" not in page and page.count("</script>") == template.count("</script>")
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page)
    assert found is not None
    assert json.loads(found[1]) == data
    assert escape(HOSTILE) in page


def test_its_figures_are_the_forecasts(page: Path, search: Search) -> None:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page.read_text(encoding="utf-8"))
    assert found is not None
    data = json.loads(found[1])
    for i, num_tokens in enumerate(LENGTHS[:4]):
        forecast = search.forecast(search.rungs[0], num_tokens)
        assert data["formats"]["none"][0][i]["causes"] == forecast.by_cause
    assert data == json.loads(
        json.dumps(page_data(search, Limits(12 * GIB, 64 * GIB), 4096, "smollm2 <135m>", other(search)))
    )


@pytest.mark.skipif(browser.PATH is None, reason="no chromium or chrome found to open the page with")
@pytest.mark.parametrize("width", [1200, 360])
def test_in_a_browser_keys_move_the_sliders_and_nothing_is_too_wide(page: Path, tmp_path: Path, width: int) -> None:
    with browser.Page(page.as_uri(), width, tmp_path / "profile") as shown:
        verdict = "document.getElementById('verdict').textContent"
        assert shown.value(verdict).startswith("Fits: ")
        assert shown.value("document.querySelectorAll('#rungs tr').length") == len(search_rungs(page))
        assert shown.value("document.documentElement.scrollWidth <= innerWidth")
        shown.press("Tab")
        assert shown.value("document.activeElement.id") == "tokens"
        before = shown.value("document.getElementById('tokens-out').value")
        shown.press("ArrowRight", 8)
        assert before == "4,096"
        assert shown.value("document.getElementById('tokens-out').value") == "8,192"
        shown.press("End")
        assert shown.value(verdict).startswith("Does not fit: the thriftiest plan needs ")
        base = shown.value("document.querySelector('#legend li').textContent")
        shown.press("Tab", 2)
        assert shown.value("document.activeElement.id") == "quantize"
        shown.press("ArrowDown")
        assert shown.value("document.getElementById('quantize').value") == "nf4"
        assert shown.value("document.querySelector('#legend li').textContent") != base


def search_rungs(page: Path) -> list[str]:
    found = re.search(r'id="data">(.*?)</script>', page.read_text(encoding="utf-8"))
    assert found is not None
    return json.loads(found[1])["rungs"]
