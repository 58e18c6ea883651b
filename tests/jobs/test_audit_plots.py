"""The audit notebooks' plots: what their axes show, drawn without Spark."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import matplotlib
import pandas as pd
import pytest

from notebooks.audit_tables import by_time, lanes_apart, new_plot, stacked_bars
from tests.mixed_tables import mixed_tables
from tests.notebook_run import notebook, run_here

matplotlib.use("Agg")
pytestmark = pytest.mark.requirement("OP-24")


def labels(axis: Any) -> list[str]:
    """Return the labels of an axis once it is drawn."""
    axis.get_figure().canvas.draw()
    return [text.get_text() for text in axis.get_ticklabels()]


@pytest.mark.parametrize("span_s", [0.0, 0.2, 45, 7200])
def test_a_time_axis_has_clock_times_and_a_date(span_s: float) -> None:
    axes, first = new_plot("times"), datetime(2026, 11, 24, 10, 0, 11, 140_000, UTC)
    axes.plot([first, first + timedelta(seconds=span_s)], [0, 1], ".")
    by_time(axes)
    assert all(":" in label for label in labels(axes.xaxis))
    assert axes.xaxis.get_offset_text().get_text() == "24 Nov 2026"


def test_counts_have_whole_ticks_and_a_single_bar_does_not_fill_the_plot() -> None:
    axes = new_plot("bars")
    stacked_bars(axes, pd.DataFrame({"rejected": [1]}, index=["policy"]))
    axes.get_figure().canvas.draw()  # type: ignore[union-attr]
    assert all(tick == round(tick) for tick in axes.get_xticks())
    low, high = axes.get_ylim()
    assert axes.patches[0].get_height() < 0.4 * (high - low)  # type: ignore[attr-defined]


def test_points_of_one_lane_lie_apart_and_never_in_the_next() -> None:
    places = lanes_apart([0] * 20 + [1] * 20)
    assert len(set(places)) == 40
    assert all(abs(place - lane) <= 0.2 for place, lane in zip(places, [0] * 20 + [1] * 20, strict=True))


@pytest.mark.long
def test_waiting_times_are_logarithmic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_here("message_audit", mixed_tables(tmp_path).settings, monkeypatch)
    assert len(run.names["waited"])
    # `axes` are those of the last plot: the cell of the waiting times is run once more.
    (cell,) = [cell for cell in notebook("message_audit").cells if cell.id == "cell-12"]
    exec(compile(cell.source, "cell-12", "exec"), run.names)  # noqa: S102  the notebook is ours
    axes = run.names["axes"]
    assert axes.get_xscale() == "log" and all(label.endswith(" s") for label in labels(axes.xaxis) if label)
