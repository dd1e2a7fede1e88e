"""GPU time by kernel: which step launched what, the table "count × µs = µs a step", and the change between two files. Pure.

Times are integer nanoseconds of the file's own clock until they are shown.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import pairwise

import msgspec

from gate.markdown import DASH, inline, number, plural, signed, table

SCHEMA = "kernels/1"
STEP_PATTERN = r"walkgate\.step \d+ "  # the engine's range: walkgate.step <number> <walk> rows=<R> bucket=<B>
TOTALS = ("Σ kernels", "union", "gap", "span", "unattributed")
LEAST_STEPS = 3  # the first and the last are dropped
MOST_UNATTRIBUTED = 0.01  # a larger share means that the table is not the whole step

Interval = tuple[int, int]
Launch = tuple[int, int]


class TraceError(Exception):
    """A file that gives no kernel table; the text says why and what to do."""


class StepRange(msgspec.Struct, frozen=True):
    """A named range on a host thread."""

    process: int
    thread: str
    text: str
    start_ns: int
    end_ns: int


class Call(msgspec.Struct, frozen=True):
    """A call of the CUDA runtime or driver; what it launched carries its process and correlation id."""

    process: int
    thread: str
    correlation: int
    start_ns: int

    @property
    def launch(self) -> Launch:
        """What its kernels are found by."""
        return self.process, self.correlation


class Activity(msgspec.Struct, frozen=True):
    """A kernel, copy or fill on a GPU; `name` is the full one, `row` the row of the table that it counts in."""

    process: int
    device: int
    correlation: int
    name: str
    row: str
    start_ns: int
    end_ns: int

    @property
    def launch(self) -> Launch:
        """What its call is found by."""
        return self.process, self.correlation

    @property
    def interval(self) -> Interval:
        """Start and end."""
        return self.start_ns, self.end_ns

    @property
    def ns(self) -> int:
        """How long it ran."""
        return self.end_ns - self.start_ns


class Timeline(msgspec.Struct, frozen=True):
    """What a file holds; `source` says which program recorded it."""

    source: str
    ranges: Sequence[StepRange]
    calls: Sequence[Call]
    activities: Sequence[Activity]


class Row(msgspec.Struct, frozen=True):
    """A kernel's launches in the steps of a table; `variants` are the full names that its short one stands for."""

    name: str
    count: int
    total_ns: int
    variants: tuple[str, ...]


class KernelTable(msgspec.Struct, frozen=True):
    """One GPU's kernels. All counts and times are totals over `steps`; without steps, over the file.

    `union_ns` is time with at least one kernel, copy or fill, `gap_ns` time with none, and the two make `span_ns` exactly.
    `unattributed_ns` is kernel time inside the span that no step launched; None where the file has no step ranges.
    """

    source: str
    gpu: str
    kind: str | None
    steps: int | None
    rows: tuple[Row, ...]
    union_ns: int
    gap_ns: int
    span_ns: int
    unattributed_ns: int | None
    notes: tuple[str, ...]

    @property
    def sum_ns(self) -> int:
        """The rows' total; more than the union where kernels ran side by side."""
        return sum(row.total_ns for row in self.rows)

    @property
    def unattributed_share(self) -> float | None:
        """The unattributed part of all kernel time inside the span."""
        if self.unattributed_ns is None:
            return None
        return self.unattributed_ns / (self.sum_ns + self.unattributed_ns)


@cache
def short_name(name: str) -> str:
    """A kernel's name without return type, parameters, template arguments and unnamed namespaces; Triton's names stay.

    `void at::native::reduce_kernel<512, 1, …>(…)` becomes `at::native::reduce_kernel`.
    """
    bare = re.sub(r"(\(anonymous namespace\)|<unnamed>)::", "", name)
    plain, depth = "", 0
    for letter in bare:
        if letter == "(" and depth == 0:
            break
        depth += letter == "<"
        plain += letter if depth == 0 else ""
        depth -= letter == ">" and depth > 0
    words = plain.split()
    return words[-1] if words else name


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """The same points of time as disjoint intervals in ascending order."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        elif start < end:
            found.append((start, end))
    return found


def union_and_gap(intervals: Iterable[Interval], windows: Sequence[Interval]) -> tuple[int, int]:
    """Time inside the windows with at least one interval and with none; the windows are disjoint and ascending."""
    busy = merged(intervals)
    starts = [start for start, _ in busy]
    union = gap = 0
    for low, high in windows:
        at = low
        for start, end in busy[max(bisect_right(starts, low) - 1, 0) : bisect_right(starts, high)]:
            start, end = max(start, at), min(end, high)
            if start < end:
                gap += start - at
                union += end - start
                at = end
        gap += high - at
    return union, gap


def first_calls(calls: Iterable[Call]) -> dict[Launch, Call]:
    """Calls by what they launched. Some recorders list a call twice, as runtime and as driver; the first start counts."""
    return {call.launch: call for call in sorted(calls, key=lambda call: call.start_ns, reverse=True)}


def launched_in(ranges: Sequence[StepRange], calls: Iterable[Call]) -> dict[Launch, int]:
    """The index of the range that each call began in, by what the call launched.

    No range lies inside another of its thread. Where two overlap, a call is in the one that began last.
    """
    by_thread: dict[tuple[int, str], list[tuple[int, int]]] = defaultdict(list)
    for index, step in enumerate(ranges):
        by_thread[step.process, step.thread].append((step.start_ns, index))
    for starts in by_thread.values():
        starts.sort()
    found: dict[Launch, int] = {}
    for launch, call in first_calls(calls).items():
        starts = by_thread.get((call.process, call.thread), [])
        before = bisect_right(starts, call.start_ns, key=lambda start: start[0])
        if before and call.start_ns < ranges[starts[before - 1][1]].end_ns:
            found[launch] = starts[before - 1][1]
    return found


def outermost(ranges: Iterable[StepRange]) -> list[StepRange]:
    """The ranges that lie in no other one of the same thread; those that overlap only in part all stay."""
    found: list[StepRange] = []
    for step in sorted(ranges, key=lambda step: (step.process, step.thread, step.start_ns, -step.end_ns)):
        last = found[-1] if found else None
        if last and (last.process, last.thread) == (step.process, step.thread) and step.end_ns <= last.end_ns:
            continue
        found.append(step)
    return found


def overlapping(ranges: Iterable[StepRange]) -> int:
    """How many ranges begin before the one before them on their thread has ended."""
    ordered = sorted(ranges, key=lambda step: (step.process, step.thread, step.start_ns))
    return sum(
        (before.process, before.thread) == (after.process, after.thread) and after.start_ns < before.end_ns
        for before, after in pairwise(ordered)
    )


def tables(
    timeline: Timeline, steps: int | None = None, pattern: str | None = None, kind: str | None = None
) -> tuple[KernelTable, ...]:
    """A table for each GPU of the file.

    `pattern` is the regular expression that the text of a step's range begins with; what follows it is the kind of the step,
    and `kind` the one that is counted (None: the most frequent). With `steps` the whole file is that many steps. Without any
    of these the engine's own ranges are looked for, and where there are none the tables hold the file's totals. TraceError
    where the file has no GPU activity, no such range or kind, or too few steps.
    """
    sound = [activity for activity in timeline.activities if activity.ns > 0]
    if timeline.activities and not sound:
        many = plural(len(timeline.activities), "kernel, copy or fill", "kernels, copies and fills")
        raise TraceError(f"the file holds {many} and none that ends after its start; record it again")
    if not sound:
        raise TraceError("the file holds no kernel, copy or fill of a GPU; was it recorded on a CPU?")
    found = _tables(msgspec.structs.replace(timeline, activities=sound), steps, pattern, kind)
    if lost := len(timeline.activities) - len(sound):
        note = f"{plural(lost, 'row')} of the file left out for ending before its start or at it"
        return tuple(_noted(one, note) for one in found)
    return found


def _noted(one: KernelTable, *notes: str) -> KernelTable:
    return msgspec.structs.replace(one, notes=(*one.notes, *notes))


def _tables(timeline: Timeline, steps: int | None, pattern: str | None, kind: str | None) -> tuple[KernelTable, ...]:
    if steps is not None:
        return _whole(timeline, steps)
    wanted = STEP_PATTERN if pattern is None else pattern
    try:
        ranges = [step for step in timeline.ranges if re.match(wanted, step.text)]
    except (re.error, OverflowError, RecursionError) as error:
        raise TraceError(f"--range {wanted!r} is no regular expression: {error}") from error
    if ranges:
        return _stepwise(timeline, ranges, wanted, kind)
    if pattern is not None or kind is not None:
        texts = ", ".join(repr(text[:80]) for text in sorted({step.text for step in timeline.ranges})[:5]) or "none"
        raise TraceError(f"no range of the file begins with {wanted!r}; --range is to fit its ranges, such as: {texts}")
    return _whole(timeline, None)


def by_gpu(activities: Iterable[Activity]) -> dict[str, list[Activity]]:
    """Activities by the GPU's name; devices are numbered process by process."""
    found: dict[tuple[int, int], list[Activity]] = defaultdict(list)
    for activity in activities:
        found[activity.process, activity.device].append(activity)
    many = len({process for process, _ in found}) > 1
    return {
        f"GPU {device}, process {process & 0xFFFFFF}" if many else f"GPU {device}": found[process, device]
        for process, device in sorted(found)
    }


def _whole(timeline: Timeline, steps: int | None) -> tuple[KernelTable, ...]:
    notes = ["the whole file, start-up and edges included"]
    if steps is None:
        notes.append(
            "no steps of the engine in it: totals, not per step; --steps N or --range REGEX makes them per step"
        )
    called = {call.launch for call in timeline.calls}
    found = []
    for gpu, activities in by_gpu(timeline.activities).items():
        low = min(activity.start_ns for activity in activities)
        high = max(activity.end_ns for activity in activities)
        union, gap = union_and_gap((activity.interval for activity in activities), [(low, high)])
        missing = sum(activity.launch not in called for activity in activities)
        more = [f"{missing:,} of {len(activities):,} have no launch call in the file"] if missing else []
        rows = _rows(activities)
        found.append(
            KernelTable(timeline.source, gpu, None, steps, rows, union, gap, high - low, None, (*notes, *more))
        )
    return tuple(found)


class _Steps(msgspec.Struct, frozen=True):
    """The range and the kind of each step, which step launched what, and by which call."""

    ranges: Sequence[StepRange]
    kinds: Sequence[str]
    owners: Mapping[Launch, int]
    calls: Mapping[Launch, Call]

    def of(self, activity: Activity) -> int | None:
        return self.owners.get(activity.launch)

    def gpu_order(self, activities: Iterable[Activity]) -> list[tuple[int, int]]:
        """(first start on the GPU, step), in the order in which the GPU began the steps."""
        first: dict[int, int] = {}
        for activity in activities:
            step = self.of(activity)
            if step is not None:
                first[step] = min(activity.start_ns, first.get(step, activity.start_ns))
        return sorted((start, step) for step, start in first.items())

    def irregular(self, launched: Iterable[Activity]) -> int:
        """How many steps launched another multiset of kernels than the most frequent one."""
        by_step: dict[int | None, Counter[str]] = defaultdict(Counter)
        for activity in launched:
            by_step[self.of(activity)][activity.row] += 1
        sets = Counter(frozenset(counts.items()) for counts in by_step.values())
        return sets.total() - max(sets.values())

    def before_their_call(self, activities: Iterable[Activity]) -> int:
        """How many activities the GPU began before the call that launched them."""
        return sum(
            activity.start_ns < self.calls[activity.launch].start_ns
            for activity in activities
            if activity.launch in self.calls
        )

    def out_of_order(self, order: Iterable[tuple[int, int]]) -> int:
        """How many steps were launched before the step of their thread that the GPU began just before them."""
        begun: dict[tuple[int, str], list[int]] = defaultdict(list)
        for _, step in order:
            begun[self.ranges[step].process, self.ranges[step].thread].append(self.ranges[step].start_ns)
        return sum(after < before for starts in begun.values() for before, after in pairwise(starts))


def _stepwise(
    timeline: Timeline, found_ranges: Sequence[StepRange], pattern: str, kind: str | None
) -> tuple[KernelTable, ...]:
    sound = [step for step in found_ranges if step.start_ns < step.end_ns]
    ranges = outermost(sound)
    notes = _range_notes(len(found_ranges) - len(sound), len(sound) - len(ranges), overlapping(ranges))
    kinds = [re.sub(pattern, "", step.text, count=1).strip() or pattern for step in ranges]
    calls = first_calls(timeline.calls)
    steps = _Steps(ranges, kinds, launched_in(ranges, calls.values()), calls)
    found, short = [], []
    for gpu, activities in by_gpu(timeline.activities).items():
        many = len(steps.gpu_order(activities))
        if many < LEAST_STEPS:
            short.append(
                f"{gpu} has work of {plural(many, 'step range')}, no table: the first and the last are dropped"
            )
        else:
            found.append(_steady(timeline.source, gpu, activities, steps, kind))
    if not found:
        raise TraceError("; ".join([*short, *notes]))
    return tuple(_noted(one, *notes, *short) for one in found)


def _range_notes(empty: int, nested: int, overlaps: int) -> list[str]:
    texts = [
        (empty, "left out for ending before its start or at it"),
        (nested, "inside another of the same thread, counted as part of it"),
        (overlaps, "begun before the one before on the same thread had ended: a launch belongs to the one begun last"),
    ]
    return [f"{plural(many, 'step range')} {what}" for many, what in texts if many]


def _steady(source: str, gpu: str, activities: Sequence[Activity], steps: _Steps, wanted: str | None) -> KernelTable:
    """The table of one kind of step. A step's window lasts until the GPU begins the next step, of whatever kind."""
    order = steps.gpu_order(activities)
    inner = [(step, (start, end)) for (start, step), (end, _) in pairwise(order)][1:]
    counts = Counter(steps.kinds[step] for step, _ in inner)
    kind = counts.most_common(1)[0][0] if wanted is None else wanted
    if kind not in counts:
        raise TraceError(f"{gpu} has no step of --kind {kind!r}; there are {', '.join(map(repr, counts))}")
    windows = {step: window for step, window in inner if steps.kinds[step] == kind}
    launched = [activity for activity in activities if steps.of(activity) in windows]
    spans = list(windows.values())
    union, gap = union_and_gap((activity.interval for activity in activities), spans)
    foreign = sum(union_and_gap([one.interval], spans)[0] for one in activities if steps.of(one) is None)
    notes = [f"{len(windows):,} of {plural(len(order), 'step')} of the file, the first and the last dropped"]
    if others := [f"{many:,} × {inline(other)}" for other, many in counts.most_common() if other != kind]:
        notes.append(f"other kinds, not in the table: {', '.join(others)}")
    if irregular := steps.irregular(launched):
        notes.append(f"{irregular:,} of the steps launched other kernels than most")
    if early := steps.before_their_call(activities):
        notes.append(
            f"the clocks are in doubt: {early:,} of {len(activities):,} began before the call that launched them"
        )
    if swapped := steps.out_of_order(order):
        notes.append(
            f"the times are in doubt, or steps ran side by side: {plural(swapped, 'step')} launched before the step that "
            f"the GPU began just before"
        )
    span = sum(high - low for low, high in spans)
    return KernelTable(source, gpu, kind, len(windows), _rows(launched), union, gap, span, foreign, tuple(notes))


def _rows(activities: Iterable[Activity]) -> tuple[Row, ...]:
    by_row: dict[str, list[Activity]] = defaultdict(list)
    for activity in activities:
        by_row[activity.row].append(activity)
    rows = [
        Row(name, len(same), sum(one.ns for one in same), tuple(sorted({one.name for one in same})))
        for name, same in by_row.items()
    ]
    return tuple(sorted(rows, key=lambda row: (-row.total_ns, row.name)))


def encoded(head: Sequence[KernelTable], base: Sequence[KernelTable] | None = None) -> bytes:
    """The tables' integers as JSON, schema kernels/1; `base` is null without a second file."""
    arms = {"head": [_plain(one) for one in head], "base": None if base is None else [_plain(one) for one in base]}
    return msgspec.json.format(msgspec.json.encode({"schema": SCHEMA, **arms}), indent=1) + b"\n"


def _plain(one: KernelTable) -> dict[str, object]:
    fields: dict[str, object] = msgspec.to_builtins(one)
    return {**fields, "sum_ns": one.sum_ns}


def text(head: Sequence[KernelTable], base: Sequence[KernelTable] | None, top: int) -> list[str]:
    """Markdown lines: each table of `head`, beside the one of `base` where there is one. TraceError where they don't pair."""
    if base is None:
        return [line for one in head for line in shown(one, top)]
    if len(base) != len(head):
        raise TraceError(
            f"base has kernels of {plural(len(base), 'GPU')} and head of {len(head)}; their tables don't pair"
        )
    return [line for old, new in zip(base, head, strict=True) for line in change(old, new, top)]


def shown(one: KernelTable, top: int) -> list[str]:
    """A table as markdown lines: its `top` longest rows by name and the others as one, then the totals."""
    rows = [[name, _product(row, one), _percent(row.total_ns, one.sum_ns)] for name, row in _cut(one.rows, top)]
    totals = [("in all, ns", [number(ns, 0) for ns in _totals(one)])]
    if one.steps is not None:
        totals.insert(0, ("a step, µs", [number(_us_or_none(ns, one), 2) for ns in _totals(one)]))
    return [
        f"**{_title(one)}**",
        "",
        *(f"- {note}" for note in (one.source, *one.notes)),
        "",
        *table(["kernel", f"count × µs = {_unit(one)}", "share"], rows, right=(1, 2)),
        *table(["", *TOTALS], [[title, *values] for title, values in totals], right=range(1, 6)),
        *_warning(one),
    ]


def change(base: KernelTable, head: KernelTable, top: int) -> list[str]:
    """Two tables side by side as markdown lines, and what changed; TraceError where one is per step and the other is not."""
    if _unit(base) != _unit(head):
        raise TraceError(
            "one file is counted per step and the other is not: give --steps N or --range REGEX that fits both"
        )
    rows = [
        [
            name,
            DASH if before is None else _product(before, base),
            DASH if after is None else _product(after, head),
            signed(_us(after.total_ns if after else 0, head) - _us(before.total_ns if before else 0, base), 2),
        ]
        for name, before, after in _paired(base, head, top)
    ]
    totals = [
        [title, number(old, 2), number(new, 2), DASH if old is None or new is None else signed(new - old, 2)]
        for title, old, new in zip(
            TOTALS,
            (_us_or_none(ns, base) for ns in _totals(base)),
            (_us_or_none(ns, head) for ns in _totals(head)),
            strict=True,
        )
    ]
    columns = [f"base: count × µs = {_unit(base)}", "head", "change, µs"]
    return [
        f"**{_title(base)}** → **{_title(head)}**",
        "",
        *(f"- {arm}: {note}" for arm, one in (("base", base), ("head", head)) for note in (one.source, *one.notes)),
        *([] if base.kind == head.kind else ["- **the two files hold different kinds of step**"]),
        "",
        *table(["kernel", *columns], rows, right=(1, 2, 3)),
        *table([_unit(head), "base", "head", "change"], totals, right=(1, 2, 3)),
        *_warning(base),
        *_warning(head),
    ]


def _paired(base: KernelTable, head: KernelTable, top: int) -> list[tuple[str, Row | None, Row | None]]:
    """Rows of both tables by name, the longest of either first; from the `top`-th on they are one."""
    before, after = ({row.name: row for row in one.rows} for one in (base, head))
    longest = {row.name: 0.0 for row in (*base.rows, *head.rows)}
    for one in (base, head):
        longest |= {row.name: max(longest[row.name], _us(row.total_ns, one)) for row in one.rows}
    names = sorted(longest, key=lambda name: (-longest[name], name))
    pairs = [(_code(name), before.get(name), after.get(name)) for name in names[:top]]
    if rest := names[top:]:
        title = plural(len(rest), "other")
        old, new = (_joined(title, [rows[name] for name in rest if name in rows]) for rows in (before, after))
        pairs.append((title, old, new))
    return pairs


def _cut(rows: Sequence[Row], top: int) -> list[tuple[str, Row]]:
    """The `top` first rows by name, and the others as one."""
    title = plural(len(rows) - top, "other")
    rest = _joined(title, rows[top:])
    return [*((_code(row.name), row) for row in rows[:top]), *([] if rest is None else [(title, rest)])]


def _joined(name: str, rows: Sequence[Row]) -> Row | None:
    if not rows:
        return None
    variants = tuple(variant for row in rows for variant in row.variants)
    return Row(name, sum(row.count for row in rows), sum(row.total_ns for row in rows), variants)


def _us(ns: int, one: KernelTable) -> float:
    return ns / (one.steps or 1) / 1000


def _us_or_none(ns: int | None, one: KernelTable) -> float | None:
    return None if ns is None else _us(ns, one)


def _totals(one: KernelTable) -> tuple[int | None, ...]:
    return one.sum_ns, one.union_ns, one.gap_ns, one.span_ns, one.unattributed_ns


def _unit(one: KernelTable) -> str:
    return "µs" if one.steps is None else "µs a step"


def _title(one: KernelTable) -> str:
    what = one.kind if one.kind is not None else "whole file"
    return f"{one.gpu}: {inline(what)}" + ("" if one.steps is None else f", {plural(one.steps, 'step')}")


def _product(row: Row, one: KernelTable) -> str:
    steps = one.steps or 1
    count = number(row.count / steps, 0 if row.count % steps == 0 else 2)
    return f"{count} × {number(row.total_ns / row.count / 1000, 2)} = {number(row.total_ns / steps / 1000, 2)}"


def _code(name: str) -> str:
    return f"`{inline(name, 80)}`"


def _percent(part: int, whole: int) -> str:
    return f"{number(100 * part / whole, 1)} %"


def _warning(one: KernelTable) -> list[str]:
    share = one.unattributed_share
    if share is None or share <= MOST_UNATTRIBUTED:
        return []
    return [f"**{100 * share:.1f} % of the kernel time belongs to no step: the table is not the whole step.**", ""]
