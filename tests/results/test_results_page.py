"""The page of results: what it holds, that it loads nothing, and how Chromium shows and sorts it."""

import base64
import html
import math
import re
import shutil

import numpy as np
import pytest

from attnlab.results import charts, page
from attnlab.results.page import Section
from attnlab.results.table import Column, Table, with_interval

CHROMIUM = shutil.which("chromium")


def section(title="Text", names=("rotary", "alibi", "none"), columns=0) -> Section:
    """A section in which the last variant's loss is missing, and the second's is the lowest."""
    losses = [1.5, 1.4, *(1.6 + 0.1 * n for n in range(len(names) - 3)), math.nan]
    declared = [
        Column("variant", "variant", lambda of: of[0]),
        Column("verdict", "verdict", lambda of: "better", help="By the interval."),
        Column("p", "p", lambda of: 0.0123),
        *with_interval("loss", "loss", lambda of: (of[1], 0.01), "nats, ± 95 % over 3 seeds"),
        *(Column(f"more {n}", f"more {n}", lambda of: 1234.5) for n in range(columns)),
    ]
    table = Table.of(declared, zip(names, losses)).shown()
    figures = [chart(names)]
    return Section(title, ["alibi is better."], "again", table, figures, ["A note."], {"All columns": table})


def chart(names=("one", "two"), x=(1, 3, 5, 7, 9), log="") -> charts.Figure:
    series = {name: (x, [n + 1 / at for at in x]) for n, name in enumerate(names)}
    spread = {name: (np.subtract(ys, 0.1), np.add(ys, 0.1)) for name, (_, ys) in series.items()}
    return charts.curves("Loss over tokens", "tokens", "loss (nats per token)", series, spread, log)


def drawn(figure, names) -> str:
    """The SVG of a figure."""
    return base64.b64decode(figure.address(names).removeprefix("data:image/svg+xml;base64,")).decode()


def written(folder, *sections, title="A title") -> str:
    path = page.write(folder / "page.html", title, {"machine": "two cores"}, sections or (section(),))
    assert path == folder / "page.html" and [file.name for file in folder.iterdir()] == ["page.html"]
    return path.read_text(encoding="utf-8")


def shown(text: str) -> str:
    """The text between tags."""
    return html.unescape(re.sub(r"<[^>]*>", " ", text))


def test_names_are_shown_as_text_everywhere(tmp_path):
    name = "</script> <b> \" ' &amp; {{script}} $x_ <!-- \ud800 https://a.b"
    part = section(name, (f"{name} 1", f"{name} 2", f"{name} 3"))
    part = part._replace(notes=[name], sentences=[name], command=name, opened={name: name})
    part.table.rows[1]["verdict"] = name
    part.table.columns[2] = part.table.columns[2]._replace(title=name, unit=name, help=name)
    text = written(tmp_path, part, title=name)
    as_shown = name.replace("\ud800", "?")
    assert html.unescape(re.search("<h1[^>]*>(.*)</h1>", text)[1]) == as_shown
    assert len(re.findall("<script", text)) == text.count("</script>") == 1
    assert not re.search(r"<b>|<!--|<main>.*{{script}}.*<script>.*{{", text)
    assert shown(text).count(f"{as_shown} 1") == 2  # in the tables


def test_page_begins_with_the_answer_and_ends_with_the_setup(tmp_path):
    text = re.sub(" +", " ", shown(written(tmp_path).partition("<main>")[2]))
    parts = (
        "A title",
        "alibi is better.",
        "To decide, add seeds: again",
        "All columns",
        "By the interval.",
        "two cores",
    )
    positions = [text.rindex(part) for part in parts]
    assert positions == sorted(positions)


def test_page_loads_nothing_and_allows_only_its_own_script_and_style(tmp_path):
    text = written(tmp_path)
    policy = html.unescape(re.search('Content-Security-Policy" content="([^"]*)"', text)[1])
    assert re.match(
        r"default-src 'none'; img-src data:; style-src 'sha256-\S{43}='; script-src 'sha256-\S{43}=';", policy
    )
    assert {url[:10] for url in re.findall(r'(?:src|href)="([^"#]*)', text)} <= {"data:,", "data:image", ""}
    assert not re.search(r"https?://|@import|url\([^#]|fetch\(|\bstyle=|\bon\w+=", text)


def test_cells_have_sort_keys_unless_their_value_is_missing(tmp_path):
    rows = re.findall('<tr>(<th scope="row".*?)</tr>', written(tmp_path))[:3]
    assert '<td data-n="1.5">1.5000 <span class="interval">± 0.0100</span></td>' in rows[0]
    assert 'data-t="rotary"' in rows[0] and '<td data-t="better"><span class="verdict good better">' in rows[0]
    assert rows[2].endswith("<td></td>") and not rows[0].endswith("<td></td>")
    part = section()
    part.table.rows[0]["p"] = -math.inf
    assert 'data-n="-Infinity"' in written(tmp_path, part)  # as JavaScript spells it


def test_sections_have_navigation_and_one_colour_per_variant(tmp_path):
    assert "<nav" not in written(tmp_path)
    names = [f"variant {n}" for n in range(14)]
    text = written(tmp_path, section("Text", names), section("Copying", names[::-1]))
    links = re.findall('<a href="#(.*?)">(.*?)</a>', text)
    assert [shown(name).strip() for _, name in links] == ["Text", "Copying"]
    assert all(f'<section id="{at}"' in text for at, _ in links)
    for n, name in enumerate(names):
        assert set(re.findall(f'class="swatch ([^"]*)"></i><bdi>{name}<', text)) == {f"c{n % 12}"}


def test_colours_of_variants_are_the_colours_of_the_figures():
    style = pytest.importorskip("attnlab.plots._style")
    css = (page.FOLDER / "page.css").read_text()
    assert tuple(re.findall(r"\.c\d+ { background: (#\w+)", css)) == style.COLORS + style.MORE_COLORS


def test_chart_names_its_lines_at_their_ends_and_describes_itself():
    figure = chart()
    svg = drawn(figure, ["two", "one"])
    assert {"one", "two", "tokens", "loss (nats per token)"} <= set(re.findall(">([^<>]+)</text>", svg))
    assert "stroke: #d1495b" in svg and svg == drawn(figure, ["two", "one"]) != drawn(figure, ["one", "two"])
    assert figure.alt == "loss (nats per token) over tokens. At the last point: one 0.1111, two 1.111."


def test_long_numbers_on_axes_have_separators_and_do_not_overlap():
    svg = drawn(chart(x=(-6 * 10**6, 2 * 10**6, 9 * 10**6)), [])
    assert "5,000,000" in svg and "−5,000,000" in svg
    svg = drawn(chart(x=(1, 3 * 10**10)), [])
    assert "30 G" in svg
    svg = drawn(chart(x=(24_840, 25_648, 99_360), log="x"), [])
    assert "24,840" in svg and "25,648" not in svg and "99,360" in svg


def test_chart_shows_names_of_variants_verbatim():
    names = [' style="fill: red"', ' id="x"', "<metadata>a</metadata>", "<!-- a -->"]
    svg = drawn(chart(names), names)
    assert {html.escape(name, quote=False) for name in names} <= set(re.findall(">([^<>]+)</text>", svg))


def test_page_without_matplotlib_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.pyplot", None)
    text = written(tmp_path)
    assert "<img" not in text and "pip install &#x27;attnlab[plots]&#x27;" in text


# In Chromium ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def chromium():
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed: apt-get install chromium")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM)
        yield browser
        browser.close()


@pytest.fixture
def visit(chromium, tmp_path):
    """Opens a page of two wide sections; at the end, nothing may have been requested or reported as an error."""
    file = page.write(
        tmp_path / "page.html", "A title " + 30 * "x", {}, [section("Text", columns=12), section("word" * 20)]
    )
    opened = []

    def visit(width=1280, **options):
        context = chromium.new_context(viewport={"width": width, "height": 900}, **options)
        tab, requests, complaints = context.new_page(), [], []
        tab.on("request", lambda request: requests.append(request.url))
        tab.on("console", lambda message: complaints.append(message.text))
        tab.on("pageerror", lambda error: complaints.append(str(error)))
        tab.goto(file.as_uri())
        opened.append((context, requests, complaints))
        return tab

    yield visit
    for context, requests, complaints in opened:
        context.close()
        assert {url for url in requests if not url.startswith("data:")} == {file.as_uri()} and complaints == []


def order(tab) -> list[str]:
    return tab.locator("#s0 .sortable").first.locator("tbody th").all_inner_texts()


@pytest.mark.slow
def test_keyboard_sorts_with_missing_values_last(visit):
    tab = visit()
    tab.focus("#s0 thead th:nth-child(4) button")
    assert tab.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"
    states = []
    for key in ("Enter", "Space", "Enter"):
        tab.keyboard.press(key)
        states.append((tab.get_attribute("#s0 thead th:nth-child(4)", "aria-sort"), order(tab)))
    assert states == [
        ("ascending", ["alibi", "rotary", "none"]),
        ("descending", ["rotary", "alibi", "none"]),
        ("none", ["rotary", "alibi", "none"]),
    ]
    tab.click("#s0 thead th:first-child button")
    assert order(tab) == ["alibi", "none", "rotary"]
    assert tab.locator("[aria-sort=ascending]").count() == 1


@pytest.mark.slow
def test_wide_tables_scroll_and_the_page_does_not(visit):
    tab = visit(390)
    for summary in tab.locator("summary").all():
        summary.click()
    assert tab.evaluate("document.documentElement.scrollWidth") == 390
    wide = "(() => { const box = document.querySelector('#s0 .scroll'); return box.scrollWidth > box.clientWidth; })()"
    assert tab.evaluate(wide) and tab.locator("details table").first.is_visible()
    for head in (2, 3):  # verdict and p
        box = tab.locator(f"#s0 .sortable thead th:nth-child({head})").first.bounding_box()
        assert box["x"] + box["width"] < 390


BRIGHTNESS = "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number).reduce((a, b) => a + b)"


@pytest.mark.slow
def test_theme_follows_the_reader_until_the_button_is_pressed(visit):
    tab = visit(color_scheme="dark")
    color = "getComputedStyle(document.querySelector('.chart img')).filter"
    assert tab.evaluate(BRIGHTNESS) < 150 and tab.inner_text("#theme") == "Light theme"
    in_dark = tab.evaluate(color)
    tab.focus("#theme")
    tab.keyboard.press("Enter")
    assert tab.evaluate(BRIGHTNESS) > 600 and tab.inner_text("#theme") == "Dark theme"
    assert tab.evaluate(color) == "none" != in_dark
    assert visit(color_scheme="light").evaluate(BRIGHTNESS) > 600


@pytest.mark.slow
def test_without_javascript_tables_and_charts_are_shown(visit):
    tab = visit(java_script_enabled=False)
    assert order(tab) == ["rotary", "alibi", "none"] and tab.locator(".chart img").first.is_visible()
    assert not tab.is_visible("#theme")
