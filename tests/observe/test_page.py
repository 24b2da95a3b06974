# SPDX-License-Identifier: Apache-2.0
"""The page in a real browser, on real servers under load: `make test-browser`."""

from __future__ import annotations

import time
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.observe.browser import Browser
from tests.observe.conftest import KEY, GuardedServer
from tests.observe.support import Load, held, picture, without_moving
from tests.support.server import Server

SHOWN = "+(document.documentElement?.dataset.shown || 0)"
FACTS = "Object.fromEntries([...document.querySelectorAll('[data-fact]')].map(b => [b.dataset.fact, +b.dataset.value]))"
# Where on the screen a page is: its centre in the map.
PLACE = """(page => { const box = document.getElementById('map').getBoundingClientRect();
  return [box.left + (page % map.columns + .5) * map.size, box.top + (Math.floor(page / map.columns) + .5) * map.size];
})"""
# The colour of a page's corner in the map, as drawn.
PIXEL = """(page => { const x = (page % map.columns) * map.size, y = Math.floor(page / map.columns) * map.size;
  return [...map.canvas.getContext('2d').getImageData(x + 1, y + 1, 1, 1).data];
})"""


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    with Browser(tmp_path / "profile", 1280, 1240) as opened:
        yield opened
    assert opened.errors == []


def see(browser: Browser, polls: int = 1) -> None:
    """Wait until the page has shown so many more answers."""
    before = browser.run(SHOWN)
    browser.until(f"{SHOWN} >= {before + polls}", 60)


def facts(browser: Browser) -> dict[str, Any]:
    shown: dict[str, Any] = browser.run(FACTS)
    return shown


def keep(browser: Browser, root: Path, name: str) -> None:
    browser.screenshot(picture(root, name))


def test_live_under_load(large: Server, browser: Browser, root: Path) -> None:
    browser.prefer("light")
    browser.open(large.base + "/vattn")
    with Load(large, clients=12, new_tokens=150).running():
        see(browser, 8)
        keep(browser, root, "page-light.png")
        browser.prefer("dark")
        see(browser, 3)
        with held(large):
            see(browser, 2)
            assert without_moving(facts(browser)) == without_moving(large.vattn())
            hover_a_shared_page(browser)
            keep(browser, root, "page-dark.png")
    drawn = browser.run("[...map.canvas.getContext('2d').getImageData(0, 0, 400, 100).data].filter(v => v).length")
    assert drawn > 1000
    assert browser.run("view.states.length") == 7002
    assert browser.run("map.size") >= 6, "a page is a square that can be seen and pointed at"
    assert browser.run("document.documentElement.scrollWidth <= innerWidth"), "nothing runs off the side"
    assert {url.split("/")[2] for url in browser.requests if url.startswith("http")} == {large.base.split("//")[1]}


def hover_a_shared_page(browser: Browser) -> None:
    """Its sharers stay lit and the rest goes dim; the text names their number."""
    page = browser.run("[...view.sharers].findIndex(count => count > 1)")
    assert page > 0, "the load shares pages"
    sharers = browser.run(f"view.sharers[{page}]")
    free = browser.run("[...view.states].lastIndexOf(0)")
    bright = browser.run(f"{PIXEL}({free})")
    browser.point(*browser.run(f"{PLACE}({page})"))
    browser.until("document.getElementById('tip').style.display === 'block'")
    assert f"shared by {sharers} running requests" in browser.run("document.getElementById('tip').textContent")
    lit_rows = browser.run("[...lit().rows]")
    holders = browser.run(f"view.rows.flatMap((row, i) => row.pages.slice(0, row.shared).includes({page}) ? [i] : [])")
    assert set(holders) <= set(lit_rows), "and the request that wrote the page, if it still runs"
    assert len(holders) == sharers
    assert browser.run(f"{PIXEL}({free})") != bright, "other pages are dimmed"
    assert browser.run("document.querySelectorAll('#tree .lit').length") == 1, "its prefix is lit in the tree"


def test_graphs_reach_back_before_the_page_was_opened(large: Server, browser: Browser) -> None:
    large.generate([9] * 400, 100)
    browser.open(large.base + "/vattn")
    see(browser)
    assert browser.run("view.history.time_s.length") > 5
    assert browser.run("Math.max(...series(view.history, 'batches_rows', true).map(point => point[1]))") > 0


def test_64_pages_behind_a_key(guarded: GuardedServer, browser: Browser, root: Path) -> None:
    for path in ("/vattn", "/vattn/state"):
        with pytest.raises(urllib.error.HTTPError) as refused:
            guarded.open(path, key=None)
        assert refused.value.code == 401
        assert b"num_pages" not in refused.value.read()
    browser.open(guarded.base + "/vattn")
    browser.until("document.getElementById('key') !== null")
    type_key(browser, "wrong")
    browser.until("document.getElementById('status').textContent.includes('did not accept')")
    type_key(browser, KEY)
    browser.until(f"{SHOWN} > 0")
    guarded.together([[5] * 60 + [n] * 9 for n in range(4)], 30)
    see(browser, 2)
    assert facts(browser)["num_pages"] == 64
    assert browser.run("map.size") == 26
    browser.screenshot(root / "build" / "screenshots" / "page-64.png")
    browser.open(guarded.base + "/vattn")  # again in the same tab: no question
    browser.until(f"{SHOWN} > 0")


def type_key(browser: Browser, key: str) -> None:
    browser.run(f"document.getElementById('key').value = '{key}'")
    browser.run("document.querySelector('form button').click()")


def test_a_server_that_goes_away_is_told(large: Server, browser: Browser) -> None:
    browser.open(large.base + "/vattn")
    see(browser)
    browser.call("Network.emulateNetworkConditions", offline=True, latency=0, downloadThroughput=0, uploadThroughput=0)
    browser.until("document.getElementById('status').className === 'stale'")
    browser.call(
        "Network.emulateNetworkConditions", offline=False, latency=0, downloadThroughput=-1, uploadThroughput=-1
    )
    browser.until("document.getElementById('status').className === ''")
    time.sleep(0.1)
