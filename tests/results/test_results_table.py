"""A table of declared columns: its texts, and the columns that it hides."""

import pytest

from attnlab.results.table import Column, Table, with_interval

COLUMNS = [
    Column("name", "variant", lambda of: of[0]),
    *with_interval("loss", "loss", lambda of: of[1] and (of[1], 0.011), "nats, ± 95 % over 3 seeds"),
    Column("verdict", "verdict", lambda of: of[2]),
    Column("failed", "failed", lambda of: 0, usual=0),
    Column("rate", "", lambda of: 1e-3),
]
SUBJECTS = [("a long name of a variant", 1.4901, "not told apart"), ("other", -0.5, None), ("third", None, None)]


def test_rows_have_all_columns_and_shown_tables_hide_the_usual_ones():
    table = Table.of(COLUMNS, SUBJECTS)
    assert list(table.rows[0]) == ["name", "loss", "loss_interval", "verdict", "failed", "rate"]
    assert (table.rows[0]["loss_interval"], table.rows[2]["loss"], table.rows[0]["rate"]) == (0.011, None, 1e-3)
    assert table.shown().heads == ["variant", "loss (nats, ± 95 % over 3 seeds)", "verdict"]
    assert [row[1] for row in table.shown().cells()] == ["1.4901 ± 0.0110", "−0.5000 ± 0.0110", ""]
    assert table.only("verdict", "name").cells()[0] == ["not told apart", "a long name of a variant"]


@pytest.mark.parametrize(
    ("mean", "half", "text"),
    [
        (0.0317, 0.0051, "+0.0317 ± 0.0051"),
        (2.1e-6, 1.2e-6, "+0.000002 ± 0.000001"),
        (-2.1e-6, 2.2e-6, "−0.000002 ± 0.000002"),
        (0.5, float("nan"), "+0.5000"),
    ],
)
def test_mean_has_the_digits_of_its_interval(mean, half, text):
    assert Table.of(with_interval("x", "x", lambda of: of, "", "+"), [(mean, half)]).cells()[0][0] == text


def test_minus_is_typographic_except_in_exponents_and_texts():
    columns = [Column("x", "x", format=".3g"), Column("path", "path", format=lambda row: row["path"])]
    assert Table(columns, [{"x": -1e-5, "path": "a-b"}]).cells() == [["−1e-05", "a-b"]]


def test_terminal_table_wraps_words_but_not_intervals():
    table = Table.of(COLUMNS, SUBJECTS[:1]).shown()
    assert len(table.text(width=200).splitlines()) == 2
    narrow = table.text(width=45)
    assert max(map(len, narrow.splitlines())) <= 45 and "1.4901 ± 0.0110" in narrow


def test_names_are_escaped_in_markdown():
    names = [r"a|b\|c $x$ *d* _e_ f_g [h] `i", "two\nlines"]
    text = Table.of(COLUMNS[:1], [(name,) for name in names]).markdown(["before"], ["after"])
    lines = text.splitlines()
    assert lines[4:6] == [r"| a\|b\\\|c \$x\$ \*d\* \_e\_ f_g \[h] \`i |", "| two lines |"]
    assert (lines[0], lines[-1]) == ("before", "after")
