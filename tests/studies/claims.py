"""The check of a study's claim on made-up rows."""

from collections.abc import Mapping


def check(study, rows: list[dict], refuted: Mapping[str, tuple[int, list[dict]]], title: str, alone=True) -> None:
    """The claim holds on the rows, each refutation fails its part alone, and the labelled figure states the claim.

    `refuted` has a part's number and other rows by what these say; without `alone` they may fail other parts as well.
    """
    verdict = study.judge(rows)
    assert verdict.held, str(verdict)
    assert {part for part, _ in refuted.values()} == set(range(len(verdict.parts)))
    for name, (part, others) in refuted.items():
        failed = [at for at, (held, _) in enumerate(study.judge(others).parts) if not held]
        assert failed == [part] or (not alone and part in failed), f"{name}: {study.judge(others)}"
    figure = study.draw(rows)
    assert title in figure.get_suptitle()
    assert all(axes.get_xlabel() and axes.get_ylabel() for axes in figure.axes if axes.lines)
