"""A page holds its input in one file of limited size, loads nothing, and replaces only other pages."""

import base64
import html
import json
import os
import re
import types

import numpy as np
import pytest

from attnlab.see.pages import page
from attnlab.see.results import Effects, Run
from tests.see.pages import causal_patterns, checkpoints, data_of, drifting, effects_of, records_of, run_of, softmax

TOKENS = [f"w{i}" for i in range(12)]


def statistics_and_cells(html_page, heads: int, length: int):
    """The sums and entropies `[S, N, 2, T]` of a page, and the bytes after them."""
    records = records_of(html_page)
    size = 8 * heads * length
    return records[:, :size].copy().view("<f4").reshape(-1, heads, 2, length), records[:, size:]


def test_causal_weights_are_stored_as_lower_triangles_within_their_error():
    runs = checkpoints([0, 50, 200])
    html_page = page(runs, TOKENS)
    exact = np.stack([np.concatenate([layer[0] for layer in run.values["pattern"].values()]) for run in runs.values()])
    statistics, cells = statistics_and_cells(html_page, 6, 12)
    assert data_of(html_page)["causal"] and data_of(html_page)["steps"] == [0, 50, 200]
    stored = (cells.reshape(3, 6, -1) / 255.0) ** 2
    # √p is off by half of 1/255 at most, so p by √p/255 + (1/510)² ≤ 0.00393.
    np.testing.assert_allclose(stored, exact[..., *np.tril_indices(12)], atol=0.00393, rtol=0)
    # Sums and entropies keep 14 bits after the first.
    np.testing.assert_allclose(statistics[:, :, 0], exact.sum(-1), rtol=2**-15)
    logs = np.log(np.where(exact > 0, exact, 1))
    np.testing.assert_allclose(statistics[:, :, 1], -(exact * logs).sum(-1), rtol=2**-14, atol=1e-6)


def test_cross_attention_is_stored_whole_and_cut_to_each_prompt():
    weights = softmax(np.random.default_rng(0).normal(size=(2, 3, 4, 7)))
    queries, keys = list("abcd"), list("tuvwxyz")
    html_page = page(run_of(weights, weights[:, :1]), [(queries, keys), (queries[:2], keys[:3])])
    data = data_of(html_page)
    assert not data["causal"] and [layer["heads"] for layer in data["layers"]] == [3, 1]
    assert data["prompts"][1] == {"queries": ["a", "b"], "keys": ["t", "u", "v"]}
    cells = records_of(html_page, prompt=1)[:, 8 * 4 * 2 :].reshape(4, 2, 3)
    expected = np.concatenate([weights[1], weights[1, :1]])[:, :2, :3]
    np.testing.assert_allclose((cells / 255.0) ** 2, expected, atol=0.00393, rtol=0)


def test_long_rows_keep_their_eight_largest_weights():
    weights = causal_patterns(0, 1, 1, 300)
    html_page = page(run_of(weights), [str(i) for i in range(300)])
    statistics, cells = statistics_and_cells(html_page, 1, 300)
    values, keys = cells[0, : 8 * 300].reshape(300, 8), cells[0, 8 * 300 :].copy().view("<u4").reshape(300, 8)
    row = weights[0, 0, 250]
    assert set(keys[250]) == set(np.argsort(row)[-8:])
    np.testing.assert_allclose((values[250] / 255.0) ** 2, row[keys[250]], atol=0.00393, rtol=0)
    np.testing.assert_allclose(statistics[0, 0, 0], 1, rtol=2**-15)  # sums over whole rows
    assert data_of(html_page)["kept"] == 8
    wide = np.zeros((1, 1, 1, 70_000))
    wide[..., 65_540:65_548] = 1 / 8
    cells = records_of(page(run_of(wide), [(["a"], ["b"] * 70_000)]))[:, 8:]
    assert cells[0, 8:].copy().view("<u4").tolist() == [*range(65_540, 65_548)]


def test_steps_are_sorted_and_tables_have_null_for_absent_heads():
    layers = causal_patterns(0, 1, 3, 12), causal_patterns(1, 1, 2, 12)
    scores = {step: {"induction": np.array([[0.1, 0.2, 1 / 3], [step, 0.5, np.nan]])} for step in (10, 2)}
    effects = {step: effects_of([[0, 0, 1], [-1, 0, np.nan]]) for step in (2, 10)}
    data = data_of(page({10: run_of(*layers), 2: run_of(*layers)}, TOKENS, scores=scores, effects=effects))
    assert data["steps"] == [2, 10] and list(data["tables"]) == ["entropy", "induction", "effect"]
    assert data["tables"]["induction"][1] == [[0.1, 0.2, 0.33333], [10, 0.5, None]]
    assert data["tables"]["effect"][0] == [[0, 0, 1], [-1, 0, None]]
    assert data["tables"]["entropy"][0][1][2] is None
    scores = types.SimpleNamespace(values={"sink": np.ones((1, 2))})  # scores of one run
    data = data_of(page(run_of(causal_patterns(0, 1, 2, 12)), TOKENS, scores=scores))
    assert data["tables"]["sink"] == [[[1, 1]]] and data["steps"] == [None]


def test_tokens_and_titles_are_escaped():
    tokens = ["</script>", "<!--", "<script>", "{{script}}", "\u2028", "\ud800", '"', "&amp;"]
    title = f"a {' '.join(tokens)} b"
    html_page = page(run_of(causal_patterns(0, 1, 1, len(tokens))), tokens, title=title)
    assert len(re.findall("<script", html_page.html)) == html_page.html.count("</script>") == 2
    assert "" not in data_of(html_page)["prompts"][0]["queries"]
    assert html_page.html.encode().decode() == html_page.html
    assert html.unescape(re.search("<h1[^>]*>(.*)</h1>", html_page.html)[1]) == title.replace("\ud800", "?")


def test_policy_allows_only_the_small_script_and_style_of_the_page():
    text = page(run_of(causal_patterns(0, 1, 1, 2)), ["a", "b"]).html
    policy = html.unescape(re.search('Content-Security-Policy" content="([^"]*)"', text)[1])
    for kind in ("script", "style"):
        (directive,) = [part for part in policy.split("; ") if part.startswith(f"{kind}-src")]
        assert re.fullmatch(kind + r"-src 'sha256-[\w+/]{43}='", directive)
    assert policy.startswith("default-src 'none'; img-src data:; ")
    assert not re.search(r'\bstyle="|\bon\w+="|https?://', text)
    assert len(re.search("<script>(.*?)</script>", text, re.DOTALL)[1].encode()) < 30_000


def test_equal_arguments_give_equal_pages():
    first, second = (page(checkpoints([1, 2]), TOKENS).html for _ in range(2))
    assert first == second


def test_page_of_twenty_checkpoints_is_below_1_5_megabytes():
    # The quickstart itself has 4 layers of 4 heads.
    html_page = page(drifting(steps=20, layers=6, heads=6, length=64), list("x" * 64))
    assert len(html_page.html.encode()) < 1_500_000 and len(html_page.png) <= 150_000


def test_page_above_max_bytes_names_its_sizes_and_the_remedy():
    message = (
        r"the page of 2 prompts × 3 checkpoints × 2 layers × 3 heads × 12 tokens has \d+,\d+ bytes, .*max_bytes=1,000: "
        r".*max_bytes"
    )
    with pytest.raises(ValueError, match=f"^{message}$"):
        page(checkpoints([1, 2, 3], prompts=2), [TOKENS, TOKENS], max_bytes=1000)


def test_page_is_written_whole_and_replaces_a_page(tmp_path):
    path = tmp_path / "new" / "page.html"
    for title in ("first", "second"):
        html_page = page(run_of(causal_patterns(0, 1, 1, 2)), ["a", "b"], path, title=title)
        assert path.read_text(encoding="utf-8") == html_page.html and f"<title>{title}</title>" in html_page.html
    assert os.fspath(html_page) == str(path) == str(html_page.path)
    assert [file.name for file in path.parent.iterdir()] == ["page.html"]
    assert re.fullmatch(rf"Page\([\d,]+ bytes, in {re.escape(str(path))}\)", repr(html_page))


def test_file_of_the_user_is_not_overwritten(tmp_path):
    path = tmp_path / "notes.html"
    path.write_text("<!doctype html><title>mine</title>")
    for taken in (path, tmp_path):
        with pytest.raises(ValueError, match="exists and is not an attnlab page"):
            page(run_of(causal_patterns(0, 1, 1, 2)), ["a", "b"], taken)
    assert path.read_text() == "<!doctype html><title>mine</title>"


def test_notebook_shows_a_sandboxed_frame_beside_a_picture():
    html_page = page(run_of(causal_patterns(0, 1, 1, 2)), ['"', "<b>"], title='"quoted" & <b>')
    bundle = json.loads(json.dumps(html_page._repr_mimebundle_()))
    frame = bundle["text/html"]
    assert frame.count("<") == 2 and 'sandbox="allow-scripts"' in frame and 'height="900"' in frame
    assert html.unescape(re.search('srcdoc="([^"]*)"', frame)[1]) == html_page.html
    assert base64.b64decode(bundle["image/png"]) == html_page.png and html_page.png.startswith(b"\x89PNG")
    assert bundle["text/plain"] == repr(html_page)


WEIGHTS = causal_patterns(0, 2, 3, 4)
RUN = run_of(WEIGHTS)
WORDS = [list("abcd"), list("abc")]
OTHER_AXES = Effects(np.ones((1, 3, 4)), ("layer", "head", "position"), ("block_0/attention",), 0.0)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (({}, WORDS), r"runs = \{\}"),
        ((Run(None, {"z": {"a": WEIGHTS}}, ("a",)), WORDS), r"'pattern' .*, only z: .*want="),
        ((run_of(WEIGHTS - 0.5), WORDS), r"not within 0 … 1"),
        ((run_of(WEIGHTS, WEIGHTS[..., :3]), WORDS), r"layers differ in \(B, Tq, Tk\)"),
        (({1: RUN, 2: run_of(WEIGHTS[:, :2])}, WORDS), r"patterns of runs differ"),
        ((RUN, [list("abcd"), list("abcde")]), r"prompt 1 has 5 tokens"),
        ((RUN, [list("abcd"), [1, 2]]), r"tokens \[1, 2\]"),
        ((RUN, WORDS, {"sink": np.ones((3, 1))}), r"'sink' has shape \(3, 1\), .*\[1, 3\]"),
        (({1: RUN}, WORDS, {"sink": np.ones((1, 3))}), r"scores by step: .*\[1\]"),
        ((RUN, WORDS, None, OTHER_AXES), r"effects have axes .*'position'"),
    ],
    ids=lambda value: "" if isinstance(value, tuple) else value[:40],
)
def test_mismatched_arguments_are_named(arguments, message):
    runs, tokens, scores, effects = (*arguments, None, None)[:4]
    with pytest.raises(ValueError, match=message) as caught:
        page(runs, tokens, scores=scores, effects=effects)
    assert "\n" not in str(caught.value)
