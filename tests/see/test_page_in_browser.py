"""The page as Chromium shows it, opened from a file: numbers, keys, tokens, address, colours, accessibility."""

import re
import shutil
import subprocess
import tarfile
from pathlib import Path

import numpy as np
import pytest

from attnlab.see.pages import page
from tests.see.pages import causal_patterns, checkpoints, effects_of, run_of

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed: apt-get install chromium"),
]
AXE = "axe-core@4.10.3"

TOKENS = ["\n", " the", "</script>", "😀", "👩\u200d🔬", " שלום", "مرحبا", "e\u0301", "\u0301", "<b>", "\udcff", " the"]
STEPS = [0, 50, 200, 1000]


@pytest.fixture(scope="module")
def chromium():
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def runs():
    return checkpoints(STEPS, prompts=2)


@pytest.fixture(scope="module")
def file(runs, tmp_path_factory) -> Path:
    """A page of two prompts, four checkpoints, two layers of three heads, with scores and effects."""
    scores = {step: {"induction": np.array([[0.1, 0.2, 0.3], [0.0, step / 1000, 0.1]])} for step in STEPS}
    effects = {step: effects_of([[0, 0.1, 0], [-0.2, step / 500, 0]]) for step in STEPS}
    path = tmp_path_factory.mktemp("page") / "page.html"
    page(runs, [TOKENS, TOKENS[:5]], path, title="A title </title> & more", scores=scores, effects=effects)
    return path


@pytest.fixture
def visit(chromium):
    """Opens a file; at the end, nothing may have been requested from a network or reported as an error."""
    opened = []

    def visit(file: Path, fragment: str = "", **options):
        context = chromium.new_context(**({"viewport": {"width": 1280, "height": 900}} | options))
        tab, requests, complaints = context.new_page(), [], []
        tab.on("request", lambda request: requests.append(request.url))
        tab.on("console", lambda message: complaints.append(message.text))
        tab.on("pageerror", lambda error: complaints.append(str(error)))
        tab.goto(file.as_uri() + fragment)
        if options.get("java_script_enabled", True):  # a selector, because the policy forbids evaluating conditions
            tab.wait_for_selector("#app:not([hidden]), #problem:not([hidden])")
        opened.append((context, file, requests, complaints))
        return tab

    yield visit
    for context, file, requests, complaints in opened:
        context.close()
        assert {url.split("#")[0] for url in requests if not url.startswith("data:")} == {file.as_uri()}
        assert complaints == []


def press(tab, selector: str, *keys: str) -> dict:
    """Press keys on an element; returns the state afterwards."""
    tab.focus(selector)
    for key in keys:
        tab.keyboard.press(key)
    return tab.evaluate("attnlab.state()")


def slide(tab, to: int) -> None:
    tab.locator("#step").fill(str(to))


def test_decoded_weights_and_statistics_match_numpy(visit, file, runs):
    tab = visit(file)
    for prompt, length in ((0, 12), (1, 5)):
        for number, step in enumerate(STEPS):
            for layer, path in enumerate(runs[step].paths("pattern")):
                for head in range(3):
                    shown = tab.evaluate("at => attnlab.weights(...at)", [prompt, number, layer, head])
                    exact = runs[step].values["pattern"][path][prompt, head, :length, :length]
                    np.testing.assert_allclose(shown, exact, atol=0.004, rtol=0)
    row = runs[200].values["pattern"]["block_1/attention"][1, 2, 4, :5]
    statistics = tab.evaluate("attnlab.statistics(1, 2, 1, 2, 4)")
    np.testing.assert_allclose(statistics["sum"], row.sum(), rtol=1e-4)
    np.testing.assert_allclose(statistics["entropy"], -(row * np.log(row)).sum(), rtol=1e-4)


def test_largest_weights_of_long_rows_are_decoded(visit, tmp_path):
    weights = causal_patterns(0, 1, 2, 300)
    page(run_of(weights), [f"w{i}" for i in range(300)], tmp_path / "long.html")
    tab = visit(tmp_path / "long.html")
    shown = np.array(tab.evaluate("attnlab.weights(0, 0, 0, 1)"))
    largest = np.where(weights[0, 1] >= np.sort(weights[0, 1])[:, -8:-7], weights[0, 1], 0)
    np.testing.assert_allclose(shown, largest, atol=0.004, rtol=0)
    assert tab.is_visible("text=only the largest 8 weights")
    assert tab.locator("#cells tr").count() == 8


def test_slider_changes_readout_and_numbers(visit, file):
    tab = visit(file, "#layer=1&head=1")
    assert tab.inner_text("#step-shown") == "1,000" and "Checkpoint 1,000" in tab.inner_text("#readout")
    last = tab.inner_text("#readout")
    slide(tab, 1)
    assert tab.inner_text("#step-shown") == "50" and "Checkpoint 50, layer 1, head 1." in tab.inner_text("#readout")
    assert tab.inner_text("#readout").split(". ", 1)[1] != last.split(". ", 1)[1]
    assert re.search(r"induction\s+0\.05", tab.inner_text("#numbers"))
    assert tab.get_attribute("#step", "aria-valuetext") == "step 50"


def test_arrow_keys_move_between_heads_queries_and_keys(visit, file):
    tab = visit(file, "#layer=0&head=0&query=5")
    state = press(tab, ".head[aria-pressed=true]", "ArrowRight", "ArrowDown")
    assert (state["layer"], state["head"]) == (1, 1)
    assert tab.evaluate("document.activeElement.getAttribute('aria-label')").startswith("layer 1, head 1: induction")
    assert press(tab, "#queries [tabindex='0']", "ArrowLeft")["query"] == 4
    assert press(tab, "#keys [tabindex='0']", "ArrowRight", "ArrowRight")["key"] == 1
    state = press(tab, "#map", "ArrowDown", "ArrowRight")
    assert (state["query"], state["key"]) == (5, 2)
    assert "Query 5" in tab.inner_text("#readout") and "attends to key 2" in tab.inner_text("#readout")
    assert press(tab, "#map", "Escape")["key"] is None
    assert press(tab, "#map", *["ArrowUp"] * 20)["query"] == 0


def test_hovering_tokens_shows_what_is_under_the_pointer(visit, file):
    tab = visit(file, "#layer=0&head=0&query=0")
    shade = "([strip, at]) => document.querySelectorAll(`#${strip} span`)[at].style.backgroundColor"
    assert tab.evaluate(shade, ["keys", 3]) == "" and tab.evaluate(shade, ["queries", 7]) == ""
    tab.hover("#queries span:nth-child(5)")
    assert tab.evaluate(shade, ["keys", 3]).startswith("rgb")
    assert "Query 4" in tab.inner_text("#readout")
    tab.hover("#keys span:nth-child(6)")
    assert tab.evaluate(shade, ["queries", 7]).startswith("rgb")
    assert tab.evaluate(shade, ["queries", 3]) == "", "query 3 may not attend to key 5"
    tab.hover("h1")
    assert "Query 0" in tab.inner_text("#readout")


def test_tokens_of_all_kinds_are_shown_as_text(visit, file):
    tab = visit(file)
    first = ["⏎", "·the", "</script>", "😀", "👩\u200d🔬", "·שלום", "مرحبا"]
    shown = [*first, "e\u0301", "◌\u0301", "<b>", "⟨FF⟩", "·the"]
    assert tab.locator("#queries span").all_inner_texts() == shown
    directions = tab.evaluate("[...document.querySelectorAll('#queries span')].map(t => getComputedStyle(t).direction)")
    assert directions[5] == directions[6] == "rtl" and directions[1] == "ltr"
    assert tab.inner_text("h1") == tab.title() == "A title </title> & more"
    tab.select_option("#prompt", "1")
    assert tab.locator("#queries span").count() == 5


def test_table_has_the_weights_of_the_query_and_heads_are_sorted(visit, file, runs):
    tab = visit(file, "#step=200&layer=1&head=0&query=9")
    rows = [row.split("\t") for row in tab.locator("#cells tr").all_inner_texts()]
    row = runs[200].values["pattern"]["block_1/attention"][0, 0, 9, :10]
    assert len(rows) == 10 and int(rows[0][0]) == row.argmax()
    for key, _, weight, *_ in rows:
        assert abs(float(weight.strip("<")) - row[int(key)]) < 0.01  # 0.004, and rounding to two digits
    assert "Query 9" in tab.inner_text("caption")
    slide(tab, 3)
    tab.select_option("#table", label="effect")
    tab.check("#sorted")
    labels = tab.evaluate("[...document.querySelectorAll('.head')].map(head => head.getAttribute('aria-label'))")
    assert [label.split(": effect ") for label in labels[:3]] == [
        ["layer 1, head 1", "2.00"],
        ["layer 1, head 0", "−0.20"],
        ["layer 0, head 1", "0.10"],
    ]


def test_address_keeps_the_state_and_restores_it_as_far_as_it_exists(visit, file):
    tab = visit(file, "#prompt=1&step=50&layer=1&head=2&query=3&key=2")
    wanted = {"prompt": 1, "step": 1, "layer": 1, "head": 2, "query": 3, "key": 2}
    assert wanted.items() <= tab.evaluate("attnlab.state()").items()
    slide(tab, 2)
    assert tab.url.endswith("#prompt=1&step=200&layer=1&head=2&query=3&key=2")
    again = visit(file, "#" + tab.url.split("#")[1])
    assert again.evaluate("attnlab.state()") == tab.evaluate("attnlab.state()")
    tab.evaluate("location.hash = '#head=0'")
    tab.wait_for_selector(".head[aria-pressed=true][aria-label^='layer 1, head 0:']")
    state = visit(file, "#layer=99&head=-1&query=99&prompt=9&step=7&key=x&%%%").evaluate("attnlab.state()")
    assert state["layer"] <= 1 and 0 <= state["head"] <= 2 and state["query"] <= 11 and state["step"] == 3


def test_play_runs_to_the_last_checkpoint(visit, file):
    tab = visit(file)
    tab.click("#play")
    assert tab.evaluate("attnlab.state().step") == 0 and tab.inner_text("#play") == "Pause"
    tab.wait_for_selector("#play[aria-pressed=false]")
    assert tab.evaluate("attnlab.state().step") == 3
    still = visit(file, reduced_motion="reduce")
    assert not still.is_visible("#play")


def test_without_javascript_or_weights_the_picture_is_shown(visit, file, tmp_path):
    tab = visit(file, java_script_enabled=False)
    assert tab.is_visible("#picture img") and not tab.is_visible("#app")
    assert tab.locator("#picture img").bounding_box()["width"] > 200
    assert "one row per layer" in tab.get_attribute("#picture img", "alt")
    assert not visit(file).is_visible("#picture")

    broken, text = tmp_path / "broken.html", file.read_text(encoding="utf-8")
    broken.write_text(re.sub(r'"streams":\["....', '"streams":["AAAA', text), encoding="utf-8")
    tab = visit(broken)
    assert "cannot unpack the weights" in tab.inner_text("#problem")
    assert tab.is_visible("#picture img") and not tab.is_visible("#app")


@pytest.fixture(scope="module")
def long_names(runs, tmp_path_factory) -> Path:
    """A page with long names of a run, scores and a token; only one score has spaces at which it can be broken."""
    names = ("weight between the same positions of other sequences", "w" * 60)
    scores = {step: dict.fromkeys(names, np.full((2, 3), -1e5)) for step in STEPS}
    path = tmp_path_factory.mktemp("names") / "page.html"
    page(runs, [["t" * 80] * 12, ["u"] * 5], path, title="positions_rotary_" * 6, scores=scores)
    return path


def test_nothing_is_wider_than_the_window(visit, file, long_names):
    for shown in (file, long_names):
        tab = visit(shown, viewport={"width": 1280, "height": 800})
        for width in (1280, 800, 390, 320):
            tab.set_viewport_size({"width": width, "height": 800})
            # The page is redrawn a moment after its window is resized.
            tab.wait_for_function("width => document.documentElement.scrollWidth <= width", arg=width, timeout=5000)


@pytest.fixture(scope="module")
def axe(tmp_path_factory, request) -> str:
    """The source of axe-core, from npm, kept between runs of the tests."""
    script = Path(request.config.cache.mkdir("axe")) / f"{AXE}.js"
    if not script.exists():
        if not shutil.which("npm"):
            pytest.skip("npm is not installed: axe-core comes from there")
        folder = tmp_path_factory.mktemp("axe")
        done = subprocess.run(["npm", "pack", "--silent", AXE], cwd=folder, capture_output=True, text=True, timeout=120)
        if done.returncode:
            pytest.skip(f"npm cannot bring {AXE}: {done.stderr.strip()[-200:]}")
        with tarfile.open(next(folder.glob("*.tgz"))) as archive:
            script.write_bytes(archive.extractfile("package/axe.min.js").read())
    return script.read_text(encoding="utf-8")


@pytest.mark.parametrize("scheme, fragment", [("light", ""), ("dark", "#key=1&query=3")])
def test_axe_finds_nothing_serious(visit, file, axe, scheme, fragment):
    tab = visit(file, fragment, color_scheme=scheme)
    tab.evaluate(axe)  # through the debugger, to which the page's policy does not apply
    violations = tab.evaluate("axe.run(document).then(found => found.violations)")
    summaries = [(v["id"], v["impact"], [node["html"] for node in v["nodes"]][:3]) for v in violations]
    assert [entry for entry in summaries if entry[1] in ("serious", "critical")] == []
