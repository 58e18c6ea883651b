"""The common parts of the audit notebooks: the tables at one moment, a window of time, and plots.

**Reads** the Delta tables through Arrow, without a JVM, which is the fastest installed way to open them
(docs/how-to/use_the_audit_notebooks.md has the figures).
**Guarantees** that one notebook sees one version of each table, with views that are no newer than the ledger.
It writes no data.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from functools import reduce
from operator import and_

import matplotlib.pyplot as plt
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from schemas.settings.settings import Settings, load_settings
from schemas.streams.fold import STREAM_ENTRIES, VIEWS
from schemas.tables.arrow_tables import LEDGER_ARROW, VIEW_ARROW
from schemas.tables.delta_files import dataset_of
from schemas.tables.ledger import LEDGER
from schemas.tables.view_progress import NO_PROGRESS, read_progress

POSITION = ["partition", "offset"]
COLOURS = {
    "accepted": "#2f7d4f",
    "duplicate": "#d9902f",
    "rejected": "#b3362c",
    "completed": "#2f7d4f",
    "error": "#b3362c",
    "cancelled": "#8a8a8a",
    "running": "#0072b2",
    "pending": "#9cc4de",
}
INK, FAINT = "#222222", "#dddddd"
# Distinguishable in grey, and for people who do not see red and green (after Okabe and Ito).
_SERIES = (
    "#0072b2",
    "#e69f00",
    "#009e73",
    "#cc79a7",
    "#56b4e9",
    "#d55e00",
    "#6b4c9a",
    "#8a8a8a",
    "#000000",
    "#b5a642",
)
# A time axis covers at least ten seconds.
_LEAST_DAYS = 10 / 86_400
_LEAST_SECONDS = 0.001
_LANE_WIDTH, _GOLDEN = 0.4, 0.618034
_MOMENT = LEDGER_ARROW.field("logged_at").type


class Audit:
    """The tables of one data directory, each at the version that it had when this object was made.

    Args:
        data_dir: The data directory. None: the one of the settings.
        since: The beginning of the window of time for ledger rows, by Kafka's time (ISO 8601, UTC). None: the
            variable TRUNKLINE_AUDIT_SINCE; without it there is no bound.
        until: The end of the window, exclusive. None: the variable TRUNKLINE_AUDIT_UNTIL; without it there is
            no bound.

    Attributes:
        settings: The settings with this data directory.
        since: The beginning of the window, or None.
        until: The end of the window, or None.
        seen: The first offset that is not in the views, by Kafka partition.
    """

    def __init__(self, data_dir: str | None = None, since: str | None = None, until: str | None = None) -> None:
        given = {"TRUNKLINE__DATA_DIR": data_dir} if data_dir else {}
        self.settings: Settings = load_settings(os.environ | given)
        self.since, self.until = _moment(since or setting("since")), _moment(until or setting("until"))
        self._tables: dict[str, DeltaTable] = {}
        # Open the progress of the views first, then their rows, then the ledger, so that each is at least as
        # new.
        for name in (STREAM_ENTRIES, *reversed(VIEWS), LEDGER):
            if DeltaTable.is_deltatable(self.settings.table_path(name)):
                self._tables[name] = DeltaTable(self.settings.table_path(name))
        entries = self._tables.get(STREAM_ENTRIES)
        self.seen = (NO_PROGRESS if entries is None else read_progress(entries)).offsets

    def version(self, name: str) -> int | None:
        """Return the version at which the table `name` is read, or None if it does not exist."""
        table = self._tables.get(name)
        return None if table is None else table.version()

    def path(self, name: str) -> str:
        """Return the path or URI of the table `name`, whether it exists or not."""
        return self.settings.table_path(name)

    def whole_ledger(
        self, columns: Sequence[str] | None = None, where: pc.Expression | None = None
    ) -> pd.DataFrame:
        """Return ledger rows of all times, sorted by Kafka's time, partition and offset.

        Args:
            columns: The columns to return, in addition to the three by which rows are sorted. None: all
                columns.
            where: A condition on rows. None: all rows.
        """
        order = [("logged_at", "ascending"), ("partition", "ascending"), ("offset", "ascending")]
        wanted = None if columns is None else list(dict.fromkeys([*columns, "logged_at", *POSITION]))
        return self.arrow(LEDGER, wanted, where).sort_by(order).to_pandas()

    def ledger(self, columns: Sequence[str] | None = None, where: pc.Expression | None = None) -> pd.DataFrame:
        """Return ledger rows whose Kafka time is in the window, sorted by that time, partition and offset.

        Args:
            columns: The columns to return, in addition to the three by which rows are sorted. None: all
                columns.
            where: A further condition on rows. None: no condition.
        """
        bounds = [] if where is None else [where]
        if self.since is not None:
            bounds.append(pc.field("logged_at") >= pa.scalar(self.since, _MOMENT))
        if self.until is not None:
            bounds.append(pc.field("logged_at") < pa.scalar(self.until, _MOMENT))
        return self.whole_ledger(columns, reduce(and_, bounds) if bounds else None)

    def view(self, name: str, columns: Sequence[str] | None = None) -> pd.DataFrame:
        """Return all rows of the view `name`, without rows if the table does not exist.

        `columns` are the columns to return. None: all columns of the view.
        """
        wanted = VIEW_ARROW[name].names if columns is None else list(columns)
        return self.arrow(name, wanted).to_pandas()

    def arrow(
        self, name: str, columns: Sequence[str] | None = None, where: pc.Expression | None = None
    ) -> pa.Table:
        """Return rows of the table `name` as an Arrow table, of all times and in no order.

        The result has no rows if the table does not exist.

        Args:
            name: The ledger or a view. Another name raises KeyError.
            columns: The columns to return. None: all columns.
            where: A condition on rows. None: all rows.

        Raises:
            RuntimeError: Files of the opened version were deleted meanwhile. The notebook must be run again.
        """
        table = self._tables.get(name)
        if table is None:
            schema = LEDGER_ARROW if name == LEDGER else VIEW_ARROW[name]
            return schema.empty_table().select(schema.names if columns is None else columns)
        try:
            return dataset_of(table).to_table(columns=columns, filter=where)
        except FileNotFoundError as error:
            raise RuntimeError(
                f"files of {name} were deleted since this notebook opened it, by maintenance or a rebuild: "
                "run the notebook again from its first cell"
            ) from error

    def in_window(self, moments: pd.Series) -> pd.Series:
        """Return for each time in `moments` whether it is in the window of time; False if missing."""
        inside = moments.notna()
        if self.since is not None:
            inside &= moments >= self.since
        if self.until is not None:
            inside &= moments < self.until
        return inside

    def is_seen(self, rows: pd.DataFrame) -> pd.Series:
        """Return for each ledger row whether the views already contain the changes by its record.

        `rows` are ledger rows with the columns `partition` and `offset`. Compare only these with the views.
        """
        return rows["offset"] < rows["partition"].map(self.seen).fillna(0)

    def told(self) -> str:
        """Return a sentence about the opened ledger: its version, its number of records and the window.

        If there is no ledger, the sentence says how to get one.
        """
        if self.version(LEDGER) is None:
            return (
                f"There is no ledger below {self.settings.tables_root} yet: it appears with the first settled "
                "record. Start the stack (./trunkline up), or name the folder of one that ran (data_dir)."
            )
        rows = dataset_of(self._tables[LEDGER]).count_rows()
        window = f", of which {self.since or 'the first'} to {self.until or 'the newest'} is looked at"
        bounded = window if self.since is not None or self.until is not None else ""
        return f"The ledger at version {self.version(LEDGER)}: {rows} records{bounded}."


def _moment(text: str | None) -> pd.Timestamp | None:
    if not text:
        return None
    found = pd.Timestamp(text)
    return found.tz_localize("UTC") if found.tzinfo is None else found.tz_convert("UTC")


def setting(name: str) -> str | None:
    """Return the environment variable `TRUNKLINE_AUDIT_<NAME>`, a notebook's parameter; None if not set."""
    return os.environ.get(f"TRUNKLINE_AUDIT_{name.upper()}") or None


def listed(rows: pd.DataFrame, otherwise: str) -> pd.DataFrame | None:
    """Return `rows` for the notebook to show. If there are none, print the text `otherwise` and return None."""
    if len(rows):
        return rows
    print(otherwise)
    return None


def shown(value: object, most: int = 400) -> str | None:
    """Return bytes of a record as text that is safe to show, with control characters escaped.

    Args:
        value: The bytes. For other values the result is None.
        most: The number of bytes to show. If there are more, a note with the whole size follows.
    """
    if not isinstance(value, bytes):
        return None
    text = value[:most].decode("utf-8", "backslashreplace")
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
    return text if len(value) <= most else f"{text}… ({len(value)} bytes)"


def seconds(later: pd.Series, earlier: pd.Series) -> pd.Series:
    """Return `later` minus `earlier` in seconds, row by row. A missing time gives a missing number."""
    return (pd.to_datetime(later, utc=True) - pd.to_datetime(earlier, utc=True)).dt.total_seconds()


def counted(rows: pd.DataFrame, by: list[str], name: str) -> pd.DataFrame:
    """Count the rows with equal values in the columns `by`, most frequent first.

    A missing value counts as a value and is shown as a dash. The counts are in the column `name`.
    """
    plain = rows[by].astype(object).where(rows[by].notna(), "-")
    return plain.groupby(by).size().rename(name).sort_values(ascending=False, kind="stable").to_frame()


def quantiles(values: pd.Series, by: pd.Series) -> pd.DataFrame:
    """Return statistics of durations in seconds, with one row for each different value in `by`.

    `by` has the group of each element of `values`. The columns are `count`, the percentiles `p50`, `p95` and
    `p99`, and `longest`.
    """
    found = values.groupby(by).agg(
        count="count",
        p50=lambda group: group.quantile(0.5),
        p95=lambda group: group.quantile(0.95),
        p99=lambda group: group.quantile(0.99),
        longest="max",
    )
    return found.round(3)


def new_plot(title: str, x: str = "", y: str = "", *, height: float = 3.2, width: float = 9.0) -> Axes:
    """Return the axes of a new plot with a title, in the plain style of the audit notebooks.

    Args:
        title: The title.
        x: The label of the x axis, with its unit.
        y: The label of the y axis, with its unit.
        height: The height in inches.
        width: The width in inches.
    """
    _, axes = plt.subplots(figsize=(width, height), facecolor="white", layout="constrained")
    axes.set_title(title, loc="left", color=INK, fontsize=11)
    axes.set_xlabel(x, color=INK)
    axes.set_ylabel(y, color=INK)
    axes.set_axisbelow(True)
    axes.grid(axis="x", color=FAINT, linewidth=0.6)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(length=0)
    return axes


def by_time(axes: Axes) -> None:
    """Format the x axis as times in UTC, with the date at its end. Call it after the points are drawn.

    The axis covers at least ten seconds, also around a single point.
    """
    # The limits of matplotlib would be days around a single moment.
    left, right = axes.dataLim.intervalx
    margin = max(0.1 * (right - left), _LEAST_DAYS - (right - left)) / 2
    axes.set_xlim(left - margin, right + margin)
    locator = AutoDateLocator(minticks=3, maxticks=7)
    clock = ["%H:%M", "%H:%M", "%H:%M:%S.%f"]
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(
        ConciseDateFormatter(
            locator,
            formats=["%Y", "%b %Y", "%d %b", *clock],
            zero_formats=["", "%Y", "%b %Y", "%d %b", "%H:%M", "%H:%M:%S"],
            offset_formats=["", "", "%Y", *["%d %b %Y"] * 3],
        )
    )
    if not axes.get_xlabel():
        axes.set_xlabel("Kafka's time (UTC)", color=INK)


def by_duration(axes: Axes) -> None:
    """Make the x axis logarithmic, with ticks in seconds. Pass the values through `lasting` first."""
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=10))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda seconds, _: f"{seconds:g} s"))


def lasting(values: pd.Series) -> pd.Series:
    """Return durations in seconds with a minimum of a millisecond, because a logarithmic axis cannot show 0."""
    return values.clip(lower=_LEAST_SECONDS)


def whole_numbers(axis: Axis) -> None:
    """Set the ticks of an axis of counts to whole numbers."""
    axis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def lanes_apart(lanes: Iterable[float]) -> list[float]:
    """Return a y position for each point of a plot, so that points at the same time do not overlap.

    The position of a point is at most 0.2 from its lane. Equal input gives equal positions.

    Args:
        lanes: The lane of each point: the y position of the plot's row to which the point belongs.
    """
    return [lane + _LANE_WIDTH * (number * _GOLDEN % 1 - 0.5) for number, lane in enumerate(lanes)]


def with_room(axes: Axes, rows: int) -> None:
    """Set the limits of the y axis for `rows` horizontal bars, with room around them.

    Without the room, a single bar would fill the plot.
    """
    axes.set_ylim(-1.2, rows + 0.2)


def palette(names: Iterable[object]) -> list[str]:
    """Return one colour for each name, in the order of the names; the colours repeat after ten."""
    return [_SERIES[number % len(_SERIES)] for number, _ in enumerate(names)]


def say_instead(axes: Axes, sentence: str) -> None:
    """Replace axes, title and size of a plot without data by the text `sentence`."""
    axes.set_title("", loc="left")
    axes.axis("off")
    axes.figure.set_size_inches(9, 0.6)
    axes.text(0, 0.5, sentence, transform=axes.transAxes, va="center", color=INK)


def stacked_bars(axes: Axes, table: pd.DataFrame) -> None:
    """Draw one horizontal bar for each row of `table`, the longest on top.

    Each bar has a part for each column, and its sum as a label. Columns named after a verdict or a job's state
    get their colour of COLOURS.
    """
    table = table.loc[table.sum(axis=1).sort_values().index]
    left = pd.Series(0, index=table.index)
    names = [str(name) for name in table.index]
    for column, colour in zip(table.columns, palette(table.columns), strict=True):
        colour = COLOURS.get(column, colour)
        axes.barh(names, table[column], left=left, color=colour, label=str(column), height=0.7)
        left = left + table[column]
    for place, total in enumerate(left):
        axes.text(total, place, f" {int(total)}", va="center", fontsize=9, color=INK)
    whole_numbers(axes.xaxis)
    with_room(axes, len(names))
    if table.shape[1] > 1:
        axes.legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1.02, 0.5))
