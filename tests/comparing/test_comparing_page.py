"""The page of a comparison: what it holds, that it loads nothing, and how Chromium shows and sorts it."""

import html
import math
import re
import shutil

import numpy as np
import pytest

from attnlab.comparing import page
from attnlab.comparing.page import Chart, Line, Run, Section

CHROMIUM = shutil.which("chromium")
HEAD = ["variant", "loss", "verdict", "seeds needed"]


def section(title="Text", names=("rotary", "alibi", "none"), columns=0) -> Section:
    """A section in which the last variant's loss is missing, and the second's is the lowest."""
    losses = [1.5, 1.4, *(1.6 + 0.1 * n for n in range(len(names) - 3)), math.nan]
    cells = [[*HEAD, *(f"more {n}" for n in range(columns))]]
    keys: list[list] = []
    for name, loss in zip(names, losses):
        cells.append([name, f"{loss:.4f} ± 0.0100", "better", "nan", *["1,234.5"] * columns])
        keys.append([name, loss, "better", None, *[1234.5] * columns])
    cells[-1][1] = "nan"
    x = np.linspace(1, 9, 5).tolist()
    lines = [Line(name, x, [n + 1 / v for v in x], [n + 0.9 / v for v in x], None) for n, name in enumerate(names)]
    lines = [line._replace(high=[value + 0.2 for value in line.y]) for line in lines]
    charts = [Chart("Loss over tokens", "tokens", "loss (nats per token)", lines), Chart("Other", "x", "y", lines)]
    runs = [
        Run(f"{name}, {seed}", name, {"seed": seed, "learning_rate": 0.005, "loss": 1.5}, fields(name, seed))
        for name in names
        for seed in range(2)
    ]
    return Section(title, cells, keys, ["A note."], charts, runs)


def fields(name: str, seed: int) -> dict:
    shared = {f"model.field_{n}": 64 * n for n in range(14)}
    return {"seed": seed, "model.positions": name, "batch_size": 16, **shared}


def written(folder, *sections, title="A title") -> str:
    path = page.write(folder, title, sections or (section(),))
    assert path == folder / "comparison.html" and [file.name for file in folder.iterdir()] == ["comparison.html"]
    return path.read_text(encoding="utf-8")


def shown(text: str) -> str:
    """The text between tags."""
    return html.unescape(re.sub(r"<[^>]*>", " ", text))


def test_names_are_shown_as_text_wherever_they_are(tmp_path):
    name = "</script> <b> \" ' &amp; {{script}} <!-- \ud800 https://a.b"
    made = section(name, (f"{name} 1", f"{name} 2", f"{name} 3"))
    chart = Chart(name, name, name, made.charts[0].lines)
    run = Run(name, f"{name} 1", {name: 1.0}, {name: name})
    made = made._replace(notes=[name], charts=[chart], runs=[*made.runs, run])
    made.cells[0][1] = made.cells[1][2] = name
    made.sort_keys[0][2] = name
    text = written(tmp_path, made, title=name)
    as_shown = name.replace("\ud800", "?")
    assert html.unescape(re.search("<h1[^>]*>(.*)</h1>", text)[1]) == as_shown
    assert len(re.findall("<script", text)) == text.count("</script>") == 1
    assert not re.search(r"<b>|<!--|<main>.*{{script}}.*<script>.*{{", text)
    assert shown(text).count(f"{as_shown} 1") >= 3  # in the table, the legend and the runs


def test_page_loads_nothing_and_its_policy_admits_its_own_script_and_style_alone(tmp_path):
    text = written(tmp_path)
    policy = html.unescape(re.search('Content-Security-Policy" content="([^"]*)"', text)[1])
    assert re.match(
        r"default-src 'none'; img-src data:; style-src 'sha256-\S{43}='; script-src 'sha256-\S{43}=';", policy
    )
    assert set(re.findall(r'(?:src|href)="([^"#]*)', text)) <= {"data:,", ""}
    assert not re.search(r"https?://|@import|url\(|fetch\(|\bstyle=|\bon\w+=", text)


def test_numbers_and_texts_are_sort_keys_and_missing_values_are_blank_without_one(tmp_path):
    rows = re.findall('<tr data-line="(.*?)</tr>', written(tmp_path))
    assert '<td data-n="1.5">1.5000 <span class="interval">± 0.0100</span></td>' in rows[0]
    assert 'data-t="rotary"' in rows[0] and '<td data-t="better">' in rows[0]
    assert all(row.endswith("<td></td>") for row in rows) and "<td></td>" in rows[2].split("data-t")[1]
    assert shown(rows[2].split("</th>")[0]).split()[-1] == "none"  # a variant's name, not a missing value
    made = section()
    made.sort_keys[0][1] = -math.inf
    assert 'data-n="-Infinity"' in written(tmp_path, made)  # a number of JavaScript


def test_several_sections_have_a_navigation_and_one_has_none(tmp_path):
    assert "<nav" not in written(tmp_path)
    text = written(tmp_path, section("Text"), section("Copying"))
    links = re.findall('<a href="#(.*?)">(.*?)</a>', text)
    assert [shown(name).strip() for _, name in links] == ["Text", "Copying"]
    assert all(f'<section id="{at}"' in text for at, _ in links)


def test_variant_has_one_colour_in_all_sections_and_dashes_after_twelve(tmp_path):
    names = [f"variant {n}" for n in range(14)]
    text = written(tmp_path, section("Text", names), section("Copying", names[::-1]))
    for n, name in enumerate(names):
        found = re.findall(f'class="swatch ([^"]*)"></i><bdi>{name}<', text)
        assert len(found) == 6 and set(found) == {f"c{n % 12}{' dashed' * (n >= 12)}"}


def test_colours_in_light_are_the_colours_of_the_figures():
    style = pytest.importorskip("attnlab.plots._style")
    found = re.findall(r"--c\d+: light-dark\((#\w+)", (page.FOLDER / "page.css").read_text())
    assert tuple(found) == style.COLORS + style.MORE_COLORS


def test_runs_of_each_variant_have_their_values_and_fields(tmp_path):
    details = re.findall("<details>.*?</details>", written(tmp_path))
    assert len(details) == 3 and "2 runs" in details[1]
    own, shared = details[1].split("the same in all variants")
    assert "model.positions alibi" in re.sub(" +", " ", shown(own)) and "alibi, 1" in own
    assert "batch_size 16" in re.sub(" +", " ", shown(shared)) and "batch_size" not in own
    heads = [shown(head).strip() for head in re.findall('<th scope="col">(.*?)</th>', own)]
    assert heads == ["run", "seed", "learning rate", "loss"]  # the field "seed" is among the values


def test_field_in_which_runs_of_a_variant_differ_is_a_column(tmp_path):
    runs = [Run("a", "rotary", {"loss": math.nan}, {"eval.part": "first"}), Run("b", "rotary", {"loss": 1.25}, {})]
    text = written(tmp_path, section()._replace(runs=runs))
    rows = re.findall("<tr>(.*?)</tr>", re.search("<details>.*</details>", text)[0])
    assert [re.sub(" +", " ", shown(row)).split() for row in rows] == [
        ["run", "loss", "eval.part"], ["a", "first"], ["b", "1.25", "default"]
    ]  # fmt: skip


def chart(*lines: Line, log_x=False) -> Section:
    return section(names=("one", "two", "none"))._replace(charts=[Chart("Title", "x label", "y label", lines, log_x)])


def test_chart_has_labels_ticks_a_band_and_a_legend(tmp_path):
    line = Line("one", [1e6, 2e6, 3e6], [1.0, 2.0, 3.0], [0.5, 1.5, 2.5], [1.5, 2.5, 3.5])
    figure = re.search('<div class="legend.*?</figure>', written(tmp_path, chart(line)))[0]
    assert {"Title", "x label", "y label", "1.0M", "3.0M", "1", "3"} <= {
        part.strip() for part in html.unescape(re.sub("<[^>]*>", "\n", figure)).split("\n")
    }
    assert figure.count('class="band"') == figure.count('class="curve"') == figure.count("aria-pressed") == 1
    assert 'aria-label="Title: y label over x label. At the last point: one 3."' in figure


def test_nan_leaves_a_gap_and_a_line_without_values_draws_nothing(tmp_path):
    nan = math.nan
    gap = Line("one", [1, 2, 3, 4], [1.0, nan, 3.0, 4.0], [nan, nan, 2.0, 3.0], [nan, nan, 4.0, 5.0])
    text = written(tmp_path, chart(gap, Line("two", [1, 2], [nan, nan], None, None)))
    curves = re.findall('class="curve" d="(.*?)"', text)
    assert len(curves) == 1 and curves[0].count("M") == 2
    assert "nan" not in re.search("<svg.*?</svg>", text)[0]
    assert "No run has a value here." in written(tmp_path, chart(Line("two", [1.0], [nan], None, None)))


def test_powers_of_two_are_evenly_spaced_ticks_on_a_logarithmic_axis(tmp_path):
    lengths = [0, 64, 128, 256, 512]  # 0 has no logarithm
    text = written(tmp_path, chart(Line("one", lengths, [1.0] * 5, None, None), log_x=True))
    ticks = re.findall(r'<text x="([\d.]+)" y="[\d.]+" class="x">(\d+)</text>', text)
    assert [label for _, label in ticks] == ["64", "128", "256", "512"]
    np.testing.assert_allclose(np.diff([float(x) for x, _ in ticks], n=2), 0, atol=0.2)  # places have one decimal


@pytest.mark.parametrize("value, label", [(9999, "9999"), (15_360, "15.36k"), (2.5e6, "2.5M"), (3e9, "3B")])
def test_single_value_of_x_has_one_tick(tmp_path, value, label):
    text = written(tmp_path, chart(Line("one", [value], [1.0], None, None), Line("two", [value], [2.0], None, None)))
    assert re.findall('class="x">(.*?)<', text) == [label]


@pytest.mark.parametrize("low, high", [(1.4, 1.6), (-3, 2e-3), (5, 5 + 1e-9)])
def test_axis_of_any_range_has_different_ticks(tmp_path, low, high):
    text = written(tmp_path, chart(Line("one", [1, 2], [low, high], None, None)))
    ticks = re.findall('class="y">(.*?)<', text)
    assert 2 <= len(ticks) == len(set(ticks)) <= 7


def test_long_line_keeps_its_ends_and_an_axis_over_decades_has_powers_of_ten(tmp_path):
    x = np.geomspace(1, 1e6, 400)
    text = written(tmp_path, chart(Line("one", x, np.linspace(0, 1, 400), None, None), log_x=True))
    assert re.findall('class="x">(.*?)<', text) == ["1", "10", "100", "1000", "10k", "100k", "1M"]
    assert len({len(label) for label in re.findall('class="y">(.*?)<', text)}) == 1  # equally many decimals
    (curve,) = re.findall('class="curve" d="(.*?)"', text)
    first, *_, last = (float(at) for at in re.findall(r"[ML ](\d+\.?\d*) ", curve))
    lines = [float(at) for at in re.findall(r'<text x="([\d.]+)" y="[\d.]+" class="x">', text)]
    assert (first, last) == pytest.approx((lines[0], lines[-1]), abs=0.2)


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
    file = page.write(tmp_path, "A title " + 30 * "x", [section("Text", columns=12), section("word" * 20)])
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
    return tab.locator("#s0 .sortable tbody th").all_inner_texts()


@pytest.mark.slow
def test_keyboard_sorts_with_missing_values_last_and_emphasizes(visit):
    tab = visit()
    tab.focus("#s0 thead th:nth-child(2) button")
    assert tab.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"
    found = []
    for key in ("Enter", "Space", "Enter"):
        tab.keyboard.press(key)
        found.append((tab.get_attribute("#s0 thead th:nth-child(2)", "aria-sort"), order(tab)))
    assert found == [
        ("ascending", ["alibi", "rotary", "none"]),
        ("descending", ["rotary", "alibi", "none"]),
        ("none", ["rotary", "alibi", "none"]),
    ]
    tab.click("#s0 thead th:first-child button")
    assert order(tab) == ["alibi", "none", "rotary"]
    assert tab.locator("[aria-sort=ascending]").count() == 1
    tab.focus("#s0 .legend button:nth-child(2)")
    tab.keyboard.press("Space")
    assert tab.get_attribute("#s0 .legend button:nth-child(2)", "aria-pressed") == "true"
    emphasized = tab.evaluate("[...document.querySelectorAll('.on')].map(element => element.localName)")
    assert sorted(emphasized) == ["button", "g", "g", "tr"]


@pytest.mark.slow
def test_wide_tables_scroll_and_the_page_does_not(visit):
    tab = visit(390)
    for summary in tab.locator("summary").all():
        summary.click()
    assert tab.evaluate("document.documentElement.scrollWidth") == 390
    wide = "(() => { const box = document.querySelector('#s0 .scroll'); return box.scrollWidth > box.clientWidth; })()"
    assert tab.evaluate(wide) and tab.locator("details dl").first.is_visible()


BRIGHTNESS = "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number).reduce((a, b) => a + b)"


@pytest.mark.slow
def test_theme_follows_the_reader_until_the_button_is_pressed(visit):
    tab = visit(color_scheme="dark")
    color = "getComputedStyle(document.querySelector('svg .c0 .curve')).stroke"
    assert tab.evaluate(BRIGHTNESS) < 150 and tab.inner_text("#theme") == "Light theme"
    in_dark = tab.evaluate(color)
    tab.focus("#theme")
    tab.keyboard.press("Enter")
    assert tab.evaluate(BRIGHTNESS) > 600 and tab.inner_text("#theme") == "Dark theme"
    assert tab.evaluate(color) == "rgb(47, 111, 143)" != in_dark
    assert visit(color_scheme="light").evaluate(BRIGHTNESS) > 600


@pytest.mark.slow
def test_without_javascript_tables_and_charts_are_shown(visit):
    tab = visit(java_script_enabled=False)
    assert order(tab) == ["rotary", "alibi", "none"] and tab.locator("svg").first.is_visible()
    assert not tab.is_visible("#theme")
