"""The gateway's lists and counts come from indexes, which equal a scan of all rows after any changes."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from connectors.doors.dashboard.past_records import jobs_page
from connectors.hub.live import row_lists
from connectors.hub.live.row_lists import (
    CONTAINER_LISTS,
    TOKEN_LISTS,
    OrderedRows,
    RowLists,
    SortedKeys,
    job_lists,
    task_lists,
)
from schemas.fold.settled import AppliedChange
from schemas.fold.view_rows import Row
from schemas.state_store.ended_lists import WHOLE, Span, is_listed
from schemas.streams.agents.agent_registry import PRESENT, AgentKeyRow, ParticipantRow
from schemas.streams.container.containers import (
    CONTAINER_TRANSITIONS,
    PROVISIONING,
    RECYCLED,
    ContainerRow,
)
from schemas.streams.fold import VIEWS
from schemas.streams.job.job_registry import JOB_STATES, JobRow
from schemas.streams.session.sessions import SESSION_STATES, SessionRow
from schemas.streams.task.task_registry import TASK_STATES, TASK_TRANSITIONS, TaskRow, TokenRow
from schemas.streams.thread.threads import ALL, ThreadRow
from tests.connectors.folded_log import FoldedLog
from tests.random_log import WORKERS, RandomLog
from tests.schemas.job_records import KEYRING, START_US
from tests.test_random_log import logged

pytestmark = pytest.mark.requirement("ST-70")
RECORDS = 6_000


class View:
    """The rows that the real fold makes of a random log, and random rows of tasks, which that log lacks."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self._log = FoldedLog(KEYRING)
        self._records = RandomLog(seed, KEYRING).records(10**9)
        self._rows: dict[str, dict[str, Row]] = {view: {} for view in VIEWS}
        self._offset, self._now_us = 0, START_US
        self.callbacks: list[Callable[[AppliedChange], None]] = []

    def get(self, row_type: type[Any], key: str) -> Any:
        return self._rows[row_type.VIEW].get(key)

    def all(self, row_type: type[Any]) -> list[Any]:
        return list(self._rows[row_type.VIEW].values())

    def live(self, row_type: type[Any]) -> Any:
        return [row for row in self.all(row_type) if row.is_live]

    def newest_ended(self, row_type: type[Any], listed: str, span: Span) -> Iterator[Any]:
        listing = [row for row in self.all(row_type) if is_listed(row, listed, span)]
        yield from sorted(listing, key=lambda row: (getattr(row, row.ORDER), row.key), reverse=True)

    def count_ended(self, row_type: type[Any], listed: str, span: Span) -> int:
        return len(list(self.newest_ended(row_type, listed, span)))

    def oldest_ended(self, row_type: type[Any], listed: str) -> Any:
        return min(
            self.newest_ended(row_type, listed, WHOLE),
            key=lambda row: (getattr(row, row.ORDER), row.key),
            default=None,
        )

    def row_offset(self, view: str, key: str) -> int:
        return 0

    def grow(self, count: int) -> None:
        """Settle so many more records, and change a task with its token and container after each tenth."""
        for _ in range(count):
            # Often none, because Kafka's clock counts milliseconds.
            self._now_us += self._draw.choice([0, 0, 1_000, 5_000])
            self._offset += 1
            settled = self._log.add(logged(next(self._records), self._offset, self._now_us))
            for change in settled.changes:
                self._change(change.key, change.row)
            if self._offset % 10 == 0:
                for row in self._task_rows():
                    self._change(row.key, row)

    def _change(self, key: str, row: Row | None) -> None:
        assert row is not None
        self._rows[row.VIEW][key] = row
        for callback in self.callbacks:
            callback(AppliedChange(row.VIEW, key, self._offset, row))

    def _task_rows(self) -> list[Row]:
        tasks: list[Any] = list(self._rows[TaskRow.VIEW].values())
        if not tasks or self._draw.random() < 0.3:
            name, at = f"t{len(tasks)}", self._now_us
            agent = self._draw.choice(["coder", "tester"])
            token = TokenRow(name, "", agent, name, [], "active", at // 1000, at // 1000 + 60_000, None, None)
            task = TaskRow(name, "pending", "d", agent, name, name, None, None, "ann", at, None, None, None)
            return [task, token]
        task = self._draw.choice(tasks[-20:])
        following = sorted(TASK_TRANSITIONS[task.status])
        found: list[Row] = []
        if following:
            found.append(_with(task, status=self._draw.choice(following)))
        elif self._draw.random() < 0.5:
            found.append(_with(self.get(TokenRow, task.task_id), status="revoked"))
        known = self.get(ContainerRow, task.task_id)
        if known is None:
            at = self._now_us
            found.append(ContainerRow(task.task_id, PROVISIONING, "t", "a", "b", "h", None, None, None, at, at))
        elif states := sorted(CONTAINER_TRANSITIONS[known.state]):
            found.append(_with(known, state=self._draw.choice(states)))
        return found


def _with(row: Any, **columns: Any) -> Any:
    return type(row)(**{name: getattr(row, name) for name in row.__struct_fields__} | columns)


def loaded_amid_changes(seed: int) -> tuple[View, RowLists]:
    """A view, and its lists, which were loaded as in `Hub.open`: changes came before, and come meanwhile."""
    view = View(seed)
    lists = RowLists(view)
    view.grow(RECORDS // 3)  # the rows of the tables
    view.callbacks.append(lists.changed)
    view.grow(RECORDS // 6)

    live_rows = view.live

    def while_changes_come(row_type: type[Any]) -> Iterator[Any]:
        for number, row in enumerate(live_rows(row_type)):
            if number % 20 == 0:
                view.grow(5)
            yield row

    view.live = while_changes_come  # type: ignore[method-assign, assignment]
    lists.load()
    view.live = live_rows  # type: ignore[method-assign]
    return view, lists


def scan(view: View, row_type: type[Any], fits: Callable[[Any], bool], age: Callable[[Any], int]) -> list[Any]:
    """The rows that fit, newest first: what the routes did before there were indexes."""
    return sorted(filter(fits, view.all(row_type)), key=lambda row: (age(row), row.key), reverse=True)


def compare(index: OrderedRows[Any], groups: Sequence[str], expected: list[Any]) -> None:
    """A whole list, a page of it, its count and its oldest row."""
    assert index.newest(groups) == expected
    for most in (0, 1, 7):
        assert index.newest(groups, most) == expected[:most]
    assert index.count(groups) == len(expected)
    if len(groups) == 1:
        assert index.oldest(groups[0]) == (expected[-1] if expected else None)


def check_all(view: View, lists: RowLists) -> None:
    """Compare each list that a route asks for with a scan."""

    def registered(row: JobRow) -> int:
        return row.registered_at

    for state in (None, *JOB_STATES):
        for session in (None, *WORKERS, "unknown"):
            wanted = scan(
                view,
                JobRow,
                lambda row, state=state, session=session: (
                    state in (None, row.status) and session in (None, row.session or row.session_wanted)
                ),
                registered,
            )
            compare(lists.jobs, job_lists(state, session), wanted)
    assert lists.jobs_by_state() == Counter(row.status for row in view.all(JobRow))
    for state in (None, *SESSION_STATES):
        groups = SESSION_STATES if state is None else (state,)
        wanted = scan(
            view, SessionRow, lambda row, s=state: s in (None, row.status), lambda row: row.created_at
        )
        compare(lists.sessions, groups, wanted)
    for state in (None, *TASK_STATES):
        for agent in (None, "coder", "unknown"):
            wanted = scan(
                view,
                TaskRow,
                lambda row, s=state, a=agent: s in (None, row.status) and a in (None, row.agent_name),
                lambda row: row.submitted_at,
            )
            compare(lists.tasks, task_lists(state, agent), wanted)
    for status in (None, *TOKEN_LISTS):
        groups = TOKEN_LISTS if status is None else (status,)
        wanted = scan(view, TokenRow, lambda row, s=status: s in (None, row.status), lambda row: row.issued)
        compare(lists.tokens, groups, wanted)
    compare(
        lists.containers, CONTAINER_LISTS, scan(view, ContainerRow, lambda row: True, lambda r: r.created_at)
    )
    recycled = scan(view, ContainerRow, lambda row: row.state == RECYCLED, lambda row: row.created_at)
    compare(lists.containers, [RECYCLED], recycled)
    compare(lists.threads, [ALL], scan(view, ThreadRow, lambda row: True, lambda row: row.opened_at))
    for root in {row.root_thread for row in view.all(ThreadRow)}:
        of_root = scan(view, ThreadRow, lambda row, r=root: row.root_thread == r, lambda row: row.opened_at)
        compare(lists.threads, [root], of_root)
    check_participants(view, lists)


def check_participants(view: View, lists: RowLists) -> None:
    """Compare participants and keys with a scan."""

    def stop(row: ParticipantRow) -> int:
        return row.stopped_at or 0

    present = scan(view, ParticipantRow, lambda row: row.status != "stopped", stop)
    compare(lists.participants, [PRESENT], present)
    compare(
        lists.participants, ["stopped"], scan(view, ParticipantRow, lambda row: row.status == "stopped", stop)
    )
    for status in (None, "idle", "working", "stopped"):
        fit = [
            row
            for row in view.all(ParticipantRow)
            if (row.status == status if status else row.status != "stopped") and "count" in row.capabilities
        ]
        assert lists.participants_with(status, "count") == sorted(fit, key=lambda row: row.agent_name)
    keys = [row for row in view.all(AgentKeyRow) if row.status == "active"]
    for key in keys:
        assert lists.keys_of(key.agent_name) == sorted(
            (one for one in keys if one.agent_name == key.agent_name),
            key=lambda one: (one.registered_at, one.key_id),
        )
        assert {k.key for k in lists.keys_with(key.key_id)} == {k.key for k in keys if k.key_id == key.key_id}


@pytest.mark.long
def test_present_participants_and_active_keys_are_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    view, lists = loaded_amid_changes(7)
    monkeypatch.setattr(view, "newest_ended", lambda *_: pytest.fail("the store was read"))
    present = lists.participants_with(None)
    assert present and all(lists.keys_of(row.agent_name) for row in present)
    assert lists.keys_with(lists.keys_of(present[0].agent_name)[0].key_id)


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_each_list_equals_a_scan_also_of_rows_that_were_loaded_while_changes_came(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_lists, "_BLOCK", 8)
    view, lists = loaded_amid_changes(seed)
    check_all(view, lists)
    view.grow(RECORDS // 4)
    check_all(view, lists)
    assert len(view.all(JobRow)) > 300 and len(view.all(ThreadRow)) > 20 and len(view.all(TaskRow)) > 50


@pytest.mark.long
def test_jobs_of_an_age_equal_a_scan() -> None:
    view, lists = loaded_amid_changes(4)
    draw = random.Random(4)
    moments = sorted({row.registered_at for row in view.all(JobRow)})
    for _ in range(300):
        since, until = (draw.choice(moments) + draw.choice([-1, 0, 1]) for _ in range(2))
        groups = job_lists(draw.choice([None, "completed"]), draw.choice([None, WORKERS[0]]))
        expected = [row for row in lists.jobs.newest(groups) if since <= row.registered_at < until]
        assert lists.jobs.newest(groups, since=since, before=(until, "")) == expected
        assert lists.jobs.count(groups, since=since, before=(until, "")) == len(expected)


@pytest.mark.long
def test_pages_of_jobs_give_each_job_once_newest_first_and_none_twice_while_jobs_change() -> None:
    view, lists = loaded_amid_changes(5)
    for state in (None, "running", "completed"):
        before = {row.job_id for row in view.all(JobRow) if state in (None, row.status)}
        shown: list[str] = []
        after: str | None = None
        while True:
            page = jobs_page(view, lists, state, after, 13)  # type: ignore[arg-type]
            shown += [job["job_id"] for job in page["jobs"]]
            after = page["next"]
            if after is None:
                break
            view.grow(20)
        assert len(shown) == len(set(shown))
        places = [(view.get(JobRow, one).registered_at, one) for one in shown]
        assert places == sorted(places, reverse=True)
        still = {one for one in before if state in (None, view.get(JobRow, one).status)}
        assert still <= set(shown)


@pytest.mark.long
def test_a_row_that_memory_has_lost_or_that_left_its_group_is_left_out_and_the_page_is_full() -> None:
    view, lists = loaded_amid_changes(6)
    ids = [row.job_id for row in lists.jobs.newest(job_lists(None, None))]
    live = {row.job_id for row in view.live(JobRow)}
    lost = set([one for one in ids if one in live][3:60:2])
    assert len(lost) > 10
    get = view.get
    view.get = lambda row_type, key: None if key in lost else get(row_type, key)  # type: ignore[method-assign]
    index = RowLists(view).jobs
    index.load(view.live(JobRow))
    assert [row.job_id for row in index.newest(job_lists(None, None), 40)] == [
        one for one in ids if one not in lost
    ][:40]


def test_sorted_keys_equal_a_sorted_set_after_any_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    for block in (2, 5, 1024):
        monkeypatch.setattr(row_lists, "_BLOCK", block)
        draw, keys, model = random.Random(block), SortedKeys(), set[bytes]()
        for step in range(6_000):
            key = draw.randbytes(draw.choice([0, 1, 1, 2]))
            # First more are added than removed, and then the other way round.
            if draw.random() < (0.7 if step < 3_000 else 0.3):
                keys.add(key)
                model.add(key)
            else:
                keys.remove(key)
                model.discard(key)
            if step % 10 == 0:
                low, high = draw.randbytes(1), draw.randbytes(draw.choice([1, 2]))
                inside = sorted(one for one in model if low <= one < high)
                most = draw.choice([0, 1, 3, 10**9])
                assert keys.count(low, high) == len(inside)
                assert keys.highest(low, high, most) == inside[::-1][:most]
                assert keys.lowest(low, high, most) == inside[:most]
                assert len(keys) == len(model)
