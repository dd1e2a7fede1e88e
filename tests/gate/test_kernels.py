"""Which step launched what, union and gap, and the tables, on timelines written out by hand."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gate import kernels
from gate.kernels import (
    Activity,
    Call,
    Interval,
    KernelTable,
    StepRange,
    Timeline,
    TraceError,
    launched_in,
    outermost,
    short_name,
    tables,
    union_and_gap,
)

POINTS = st.integers(0, 60)
INTERVALS = st.lists(st.tuples(POINTS, POINTS), max_size=12)
DECODE = "decode rows=1 bucket=1"
PREFILL = "prefill rows=1 bucket=64"


def ranged(text: str, start_ns: int, end_ns: int, thread: str = "t") -> StepRange:
    return StepRange(7, thread, text, start_ns, end_ns)


def called(correlation: int, start_ns: int, thread: str = "t", process: int = 7) -> Call:
    return Call(process, thread, correlation, start_ns)


def ran(correlation: int, start_ns: int, ns: int, row: str = "k", device: int = 0, process: int = 7) -> Activity:
    return Activity(process, device, correlation, f"void {row}<1>()", row, start_ns, start_ns + ns)


def loop(kinds: list[str], ahead_ns: int = 20) -> Timeline:
    """One step each 100 ns on the GPU from 1,000 on: kernel `a` of 30 ns twice, 10 ns apart; `ahead_ns` after its range."""
    ranges, calls, activities = [], [], []
    for number, kind in enumerate(kinds):
        host, gpu = 1_000 + 100 * number - ahead_ns, 1_000 + 100 * number
        ranges.append(ranged(f"walkgate.step {number} {kind}", host, host + 50))
        calls.append(called(number, host + 10))
        activities += [ran(number, gpu, 30, "a"), ran(number, gpu + 40, 30, "a")]
    return Timeline("by hand", ranges, calls, activities)


def only(
    timeline: Timeline, steps: int | None = None, pattern: str | None = None, kind: str | None = None
) -> KernelTable:
    (one,) = tables(timeline, steps, pattern, kind)
    return one


def with_more(timeline: Timeline, *activities: Activity, calls: tuple[Call, ...] = ()) -> Timeline:
    return msgspec.structs.replace(
        timeline, activities=[*timeline.activities, *activities], calls=[*timeline.calls, *calls]
    )


@given(INTERVALS, st.lists(POINTS, max_size=8, unique=True))
def test_union_and_gap_count_the_same_points_as_counting_them_one_by_one(
    intervals: list[Interval], edges: list[int]
) -> None:
    edges = sorted(edges)
    windows = list(zip(edges[::2], edges[1::2], strict=False))
    points = [point for low, high in windows for point in range(low, high)]
    busy = [any(start <= point < end for start, end in intervals) for point in points]

    assert union_and_gap(intervals, windows) == (sum(busy), len(busy) - sum(busy))


@given(INTERVALS, st.integers(0, 2**61), st.integers(1, 2**40))
def test_union_and_gap_make_the_span_exactly_whatever_the_clock_reads(
    intervals: list[Interval], clock: int, scale: int
) -> None:
    moved = [(clock + scale * start, clock + scale * end) for start, end in intervals]
    union, gap = union_and_gap(moved, [(clock, clock + 60 * scale)])

    assert union + gap == 60 * scale
    assert 0 <= union <= sum(max(0, end - start) for start, end in moved)


@given(
    st.lists(
        st.tuples(st.sampled_from([DECODE, PREFILL]), st.integers(1, 90), st.integers(0, 40)), min_size=3, max_size=12
    )
)
def test_union_and_gap_of_a_table_make_its_span_and_all_kinds_together_the_whole_window(
    steps: list[tuple[str, int, int]],
) -> None:
    ranges = [ranged(f"walkgate.step {n} {kind}", 100 * n, 100 * n + 50) for n, (kind, _, _) in enumerate(steps)]
    calls = [called(n, 100 * n + 1) for n in range(len(steps))]
    activities = [ran(n, 100 * n + late, ns) for n, (_, ns, late) in enumerate(steps)]
    timeline = Timeline("random", ranges, calls, activities)
    kinds = {kind for kind, _, _ in steps[1:-1]}

    found = [only(timeline, kind=kind) for kind in kinds]

    assert all(one.union_ns + one.gap_ns == one.span_ns for one in found)
    assert sum(one.span_ns for one in found) == activities[-1].start_ns - activities[1].start_ns
    assert sum(one.steps or 0 for one in found) == len(steps) - 2


def test_a_steady_loop_gives_count_time_union_gap_and_span_of_the_inner_steps() -> None:
    one = only(loop([DECODE] * 5))

    assert (one.kind, one.steps) == (DECODE, 3)
    assert [(row.name, row.count, row.total_ns, row.variants) for row in one.rows] == [("a", 6, 180, ("void a<1>()",))]
    assert (one.sum_ns, one.union_ns, one.gap_ns, one.span_ns, one.unattributed_ns) == (180, 180, 120, 300, 0)
    assert one.notes == ("3 of 5 steps of the file, the first and the last dropped",)


@pytest.mark.parametrize("ahead_ns", [10, 90, 100, 730])
def test_how_far_ahead_of_the_gpu_the_steps_are_launched_changes_nothing(ahead_ns: int) -> None:
    kinds = [DECODE, DECODE, PREFILL, DECODE, DECODE, DECODE]
    assert only(loop(kinds, ahead_ns)) == only(loop(kinds))


def test_kernels_side_by_side_count_twice_in_the_sum_and_once_in_the_union() -> None:
    side = [ran(n, 1_000 + 100 * n + 10, 30, "b") for n in range(5)]
    one = only(with_more(loop([DECODE] * 5), *side))

    assert (one.sum_ns, one.union_ns, one.gap_ns, one.span_ns) == (270, 210, 90, 300)


def test_the_most_frequent_kind_is_counted_and_a_window_ends_where_a_step_of_another_kind_begins() -> None:
    timeline = loop([DECODE, DECODE, PREFILL, DECODE, DECODE])
    assert (only(timeline).kind, only(timeline).steps, only(timeline).span_ns) == (DECODE, 2, 200)
    assert f"other kinds, not in the table: 1 × {PREFILL}" in only(timeline).notes

    prefill = only(timeline, kind=PREFILL)
    assert (prefill.kind, prefill.steps, prefill.span_ns, prefill.unattributed_ns) == (PREFILL, 1, 100, 0)


def test_a_kind_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(TraceError, match=r"GPU 0 has no step of --kind 'decode'; there are 'decode rows=1 bucket=1'"):
        tables(loop([DECODE] * 4), kind="decode")


def test_unattributed_is_what_no_step_launched_inside_the_window_only() -> None:
    no_call = ran(90, 1_180, 5)
    call_outside_any_step = ran(91, 1_280, 7)
    over_the_edge = ran(92, 1_390, 50)  # the window ends at 1,400
    before_the_window = ran(93, 1_080, 20)
    extra = (no_call, call_outside_any_step, over_the_edge, before_the_window)
    one = only(with_more(loop([DECODE] * 5), *extra, calls=(called(91, 1_275),)))

    assert one.unattributed_ns == 5 + 7 + 10
    assert (one.union_ns, one.gap_ns, one.span_ns) == (202, 98, 300)
    assert one.sum_ns == 180
    assert one.unattributed_share == pytest.approx(22 / 202)
    assert "10.9 % of the kernel time belongs to no step" in "\n".join(kernels.shown(one, 30))


def test_a_little_unattributed_time_is_no_warning() -> None:
    one = only(with_more(loop([DECODE] * 5), ran(90, 1_180, 1)))
    assert one.unattributed_ns == 1
    assert "belongs to no step" not in "\n".join(kernels.shown(one, 30))


def test_a_launch_by_another_thread_or_process_during_a_step_is_not_the_steps() -> None:
    calls = (called(90, 1_110, thread="other"), called(91, 1_110, process=8))
    one = only(with_more(loop([DECODE] * 5), ran(90, 1_170, 5), ran(91, 1_180, 6), calls=calls))
    assert (one.unattributed_ns, one.sum_ns) == (11, 180)


def test_the_same_correlation_in_another_process_is_another_launch() -> None:
    timeline = with_more(loop([DECODE] * 5), *(ran(n, 1_000 + 100 * n, 20, "z", process=8) for n in range(5)))
    (one,) = tables(timeline)
    assert one.gpu == "GPU 0, process 7"
    assert [row.name for row in one.rows] == ["a"]
    assert "GPU 0, process 8 has work of 0 step ranges, no table: the first and the last are dropped" in one.notes


def test_a_call_listed_twice_counts_once_and_by_its_first_start() -> None:
    ranges = [ranged("s", 0, 10), ranged("s", 20, 30)]
    assert launched_in(ranges, [called(1, 25), called(1, 5), called(2, 22), called(2, 22)]) == {(7, 1): 0, (7, 2): 1}


def test_a_call_belongs_to_a_range_from_its_start_until_before_its_end() -> None:
    calls = [called(number, start) for number, start in enumerate((9, 10, 19, 20))]
    assert launched_in([ranged("s", 10, 20)], calls) == {(7, 1): 0, (7, 2): 0}


def test_ranges_inside_one_that_fits_too_are_part_of_it() -> None:
    inner, outer, later, elsewhere = (
        ranged("s in", 2, 5), ranged("s out", 0, 9), ranged("s", 9, 12), ranged("s", 3, 4, "u")
    )  # fmt: skip
    assert outermost([inner, outer, later, elsewhere]) == [outer, later, elsewhere]


def test_ranges_that_overlap_in_part_all_stay_and_a_launch_is_in_the_one_begun_last() -> None:
    ranges = [ranged("s", 0, 15), ranged("s", 10, 25), ranged("s", 10, 25, "u")]
    assert outermost(ranges) == ranges
    calls = [called(number, start) for number, start in enumerate((9, 10, 14, 15, 24, 25))]
    assert launched_in(ranges, calls) == {(7, 0): 0, (7, 1): 1, (7, 2): 1, (7, 3): 1, (7, 4): 1}


@pytest.mark.parametrize("lasts_ns", [150, 250, 350])
def test_steps_whose_ranges_overlap_are_steps_of_their_own_and_the_table_says_so(lasts_ns: int) -> None:
    ranges = [ranged(f"walkgate.step {n} {DECODE}", 100 * n, 100 * n + lasts_ns) for n in range(31)]
    calls = [called(n, 100 * n + 1) for n in range(31)]
    one = only(Timeline("by hand", ranges, calls, [ran(n, 100 * n + 5, 90) for n in range(31)]))

    assert (one.steps, [(row.count, row.total_ns) for row in one.rows]) == (29, [(29, 29 * 90)])
    assert (one.union_ns, one.gap_ns, one.span_ns) == (29 * 90, 29 * 10, 29 * 100)
    assert (
        "30 step ranges begun before the one before on the same thread had ended: a launch belongs to the one begun last"
        in one.notes
    )


def test_ranges_that_are_no_steps_of_their_own_are_said() -> None:
    timeline = loop([DECODE] * 5)
    more = [ranged("walkgate.step 8 x", 1_085, 1_100), ranged("walkgate.step 9 x", 1_000, 990)]
    one = only(msgspec.structs.replace(timeline, ranges=[*timeline.ranges, *more]))

    assert (one.steps, one.sum_ns) == (3, 180)
    assert one.notes[1:] == (
        "1 step range left out for ending before its start or at it",
        "1 step range inside another of the same thread, counted as part of it",
    )


def test_steps_that_all_lie_in_one_range_are_refused_with_that_reason() -> None:
    timeline = loop([DECODE] * 5)
    around = ranged("walkgate.step 9 around", 0, 9_000)
    with pytest.raises(TraceError, match=r"work of 1 step range, .*; 5 step ranges inside another of the same thread"):
        tables(msgspec.structs.replace(timeline, ranges=[*timeline.ranges, around]))


def test_a_step_that_a_backward_clock_moved_is_said() -> None:
    timeline = loop([DECODE] * 6)
    back_ns = 600
    ranges, calls = list(timeline.ranges), list(timeline.calls)
    ranges[2] = ranged(ranges[2].text, ranges[2].start_ns - back_ns, ranges[2].end_ns - back_ns)
    calls[2] = called(2, calls[2].start_ns - back_ns)
    one = only(msgspec.structs.replace(timeline, ranges=ranges, calls=calls))

    assert one.notes[1:] == (
        "the times are in doubt, or steps ran side by side: 1 step launched before the step that the GPU began just before",
    )


def test_steps_of_two_threads_need_no_common_order() -> None:
    first, second = loop([DECODE] * 3), loop([DECODE] * 3, ahead_ns=730)
    late = [ranged(one.text, one.start_ns, one.end_ns, "u") for one in second.ranges]
    calls = [called(10 + one.correlation, one.start_ns, "u") for one in second.calls]
    work = [ran(10 + n, 1_015 + 100 * n, 5, "b") for n in range(3)]
    both = Timeline("by hand", [*first.ranges, *late], [*first.calls, *calls], [*first.activities, *work])
    assert not any("in doubt" in note for note in only(both).notes)


def test_kernels_that_begin_before_they_are_launched_are_said() -> None:
    one = only(loop([DECODE] * 5, ahead_ns=0))
    assert one.notes[1:] == ("the clocks are in doubt: 5 of 10 began before the call that launched them",)


def test_a_step_with_other_kernels_is_counted_and_said() -> None:
    one = only(with_more(loop([DECODE] * 5), ran(2, 1_280, 6, "copy")))
    assert "1 of the steps launched other kernels than most" in one.notes
    assert "| `copy` | 0.33 × 0.01 = 0.00 | 3.2 % |" in kernels.shown(one, 30)


def test_each_gpu_has_its_own_table() -> None:
    timeline = with_more(loop([DECODE] * 4), *(ran(n, 1_003 + 100 * n, 20, "b", device=1) for n in range(4)))
    first, second = tables(timeline)
    assert [(one.gpu, one.sum_ns, one.span_ns) for one in (first, second)] == [("GPU 0", 120, 200), ("GPU 1", 40, 200)]


def test_two_steps_are_too_few() -> None:
    with pytest.raises(
        TraceError, match="GPU 0 has work of 2 step ranges, no table: the first and the last are dropped"
    ):
        tables(loop([DECODE] * 2))


def test_without_ranges_the_whole_file_is_totalled_and_the_table_says_so() -> None:
    timeline = msgspec.structs.replace(with_more(loop([DECODE] * 5), ran(90, 1_480, 20)), ranges=())
    one = only(timeline)

    assert (one.kind, one.steps, one.unattributed_ns) == (None, None, None)
    assert (one.sum_ns, one.union_ns, one.gap_ns, one.span_ns) == (320, 320, 180, 500)
    lines = kernels.shown(one, 30)
    assert lines[0] == "**GPU 0: whole file**"
    assert (
        "- no steps of the engine in it: totals, not per step; --steps N or --range REGEX makes them per step" in lines
    )
    assert "- 1 of 11 have no launch call in the file" in lines
    assert "| kernel | count × µs = µs | share |" in lines
    assert "| in all, ns | 320 | 320 | 180 | 500 | – |" in lines
    assert not any(line.startswith("| a step") for line in lines)


def test_a_given_number_of_steps_divides_the_whole_file_though_it_has_ranges() -> None:
    one = only(loop([DECODE] * 5), steps=5)
    assert (one.kind, one.steps, one.sum_ns, one.span_ns) == (None, 5, 300, 470)
    assert "| `a` | 2 × 0.03 = 0.06 | 100.0 % |" in kernels.shown(one, 30)


def test_a_pattern_picks_ranges_and_what_follows_it_is_the_kind() -> None:
    timeline = loop([DECODE, DECODE, PREFILL, DECODE, DECODE])
    assert only(timeline, pattern=r"walkgate\.step \d+ decode").kind == "rows=1 bucket=1"
    assert only(timeline, pattern=r"walkgate.*").kind == "walkgate.*"


def test_a_pattern_that_fits_nothing_is_refused_with_the_ranges_there_are() -> None:
    with pytest.raises(
        TraceError, match=r"begins with 'step'; --range is to fit its ranges, such as: 'walkgate.step 0 decode"
    ):
        tables(loop([DECODE] * 3), pattern="step")
    for pattern in ("(", "a{99999999999}", "(" * 10_000):
        with pytest.raises(TraceError, match=r"^--range '.*' is no regular expression"):
            tables(loop([DECODE] * 3), pattern=pattern)


def test_a_file_without_gpu_activity_is_refused() -> None:
    with pytest.raises(TraceError, match="was it recorded on a CPU"):
        tables(Timeline("by hand", [ranged("walkgate.step 1 decode", 0, 9)], [called(1, 2)], []))


def test_a_file_whose_kernels_all_last_no_time_is_refused_with_what_is_known() -> None:
    timeline = Timeline("by hand", [], [], [ran(1, 1_150, 0), ran(2, 1_150, -10)])
    with pytest.raises(TraceError, match="holds 2 kernels, copies and fills and none that ends after its start"):
        tables(timeline)


def test_rows_that_end_before_they_start_are_left_out_and_said() -> None:
    one = only(with_more(loop([DECODE] * 5), ran(1, 1_150, 0), ran(1, 1_150, -1_150)))
    assert one.sum_ns == 180
    assert one.notes[-1] == "2 rows of the file left out for ending before its start or at it"


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("_router_topk_kernel", "_router_topk_kernel"),
        ("nvjet_sm90_tst_64x8_64x16_4x1_v_bz_NNT", "nvjet_sm90_tst_64x8_64x16_4x1_v_bz_NNT"),
        ("triton_poi_fused_add_0", "triton_poi_fused_add_0"),
        ("void at::native::reduce_kernel<512, at::native::ReduceOp<float, 4> >(at::native::R<4>)", "at::native::reduce_kernel"),
        ("void (anonymous namespace)::softmax_warp_forward<float, 9, false>(float*, bool)", "softmax_warp_forward"),
        ("void <unnamed>::softmax_warp_forward<float, (int)9>(T2 *, const T1 *)", "softmax_warp_forward"),
        ("void at::native::<unnamed>::cat<at::native::<unnamed>::Op<(unsigned int)2>, (int)1>(char *)", "at::native::cat"),
        ("std::enable_if<(bool)1, void>::type flash::fwd<Traits<(int)128>>(flash::Params)", "flash::fwd"),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "ncclDevKernel_SendRecv"),
        ("void k<a(b)::{lambda()#1}::operator()() const, 2>(int)", "k"),
        ("void cut_off<float, at::nat", "cut_off"),
        ("(no name)", "(no name)"),
    ],
)  # fmt: skip
def test_short_names(name: str, short: str) -> None:
    assert short_name(name) == short


def test_kernels_of_one_short_name_share_a_row_that_keeps_the_full_names() -> None:
    timeline = Timeline(
        "by hand", [], [], [Activity(7, 0, 1, "void k<2>()", "k", 0, 5), Activity(7, 0, 2, "void k<1>()", "k", 5, 6)]
    )
    (found,) = only(timeline).rows
    assert (found.count, found.total_ns, found.variants) == (2, 6, ("void k<1>()", "void k<2>()"))


def row(name: str, count: int, total_ns: int) -> kernels.Row:
    return kernels.Row(name, count, total_ns, (name,))


BASE = KernelTable(
    source="torch profiler, base.json",
    gpu="GPU 0",
    kind=DECODE,
    steps=10,
    rows=(row("gemm", 960, 12_374_400), row("topk", 480, 1_171_200), row("cast", 480, 475_200)),
    union_ns=13_000_800,
    gap_ns=999_200,
    span_ns=14_000_000,
    unattributed_ns=20_800,
    notes=("10 of 12 steps of the file, the first and the last dropped",),
)
HEAD = KernelTable(
    source="torch profiler, head.json",
    gpu="GPU 0",
    kind=DECODE,
    steps=20,
    rows=(row("gemm", 1_920, 18_604_800), row("_route_align_kernel", 960, 3_542_400)),
    union_ns=22_147_200,
    gap_ns=852_800,
    span_ns=23_000_000,
    unattributed_ns=0,
    notes=(),
)


def test_a_table_as_markdown() -> None:
    assert kernels.shown(BASE, 2) == [
        "**GPU 0: decode rows=1 bucket=1, 10 steps**",
        "",
        "- torch profiler, base.json",
        "- 10 of 12 steps of the file, the first and the last dropped",
        "",
        "| kernel | count × µs = µs a step | share |",
        "|---|---:|---:|",
        "| `gemm` | 96 × 12.89 = 1,237.44 | 88.3 % |",
        "| `topk` | 48 × 2.44 = 117.12 | 8.4 % |",
        "| 1 other | 48 × 0.99 = 47.52 | 3.4 % |",
        "",
        "|  | Σ kernels | union | gap | span | unattributed |",
        "|---|---:|---:|---:|---:|---:|",
        "| a step, µs | 1,402.08 | 1,300.08 | 99.92 | 1,400.00 | 2.08 |",
        "| in all, ns | 14,020,800 | 13,000,800 | 999,200 | 14,000,000 | 20,800 |",
        "",
    ]


def test_two_tables_side_by_side_as_markdown() -> None:
    assert kernels.text([HEAD], [BASE], 3) == [
        "**GPU 0: decode rows=1 bucket=1, 10 steps** → **GPU 0: decode rows=1 bucket=1, 20 steps**",
        "",
        "- base: torch profiler, base.json",
        "- base: 10 of 12 steps of the file, the first and the last dropped",
        "- head: torch profiler, head.json",
        "",
        "| kernel | base: count × µs = µs a step | head | change, µs |",
        "|---|---:|---:|---:|",
        "| `gemm` | 96 × 12.89 = 1,237.44 | 96 × 9.69 = 930.24 | −307.20 |",
        "| `_route_align_kernel` | – | 48 × 3.69 = 177.12 | +177.12 |",
        "| `topk` | 48 × 2.44 = 117.12 | – | −117.12 |",
        "| 1 other | 48 × 0.99 = 47.52 | – | −47.52 |",
        "",
        "| µs a step | base | head | change |",
        "|---|---:|---:|---:|",
        "| Σ kernels | 1,402.08 | 1,107.36 | −294.72 |",
        "| union | 1,300.08 | 1,107.36 | −192.72 |",
        "| gap | 99.92 | 42.64 | −57.28 |",
        "| span | 1,400.00 | 1,150.00 | −250.00 |",
        "| unattributed | 2.08 | 0.00 | −2.08 |",
        "",
    ]


def test_tables_of_different_kinds_of_step_say_so() -> None:
    other = msgspec.structs.replace(HEAD, kind=PREFILL)
    assert "- **the two files hold different kinds of step**" in kernels.change(BASE, other, 3)
    assert "- **the two files hold different kinds of step**" not in kernels.change(BASE, HEAD, 3)


def test_per_step_and_total_do_not_compare_nor_do_different_numbers_of_gpus() -> None:
    with pytest.raises(TraceError, match="counted per step and the other is not"):
        kernels.change(BASE, msgspec.structs.replace(HEAD, steps=None), 3)
    with pytest.raises(TraceError, match="base has kernels of 2 GPUs and head of 1"):
        kernels.text([HEAD], [BASE, BASE], 3)


def test_the_json_form_holds_the_integers_of_every_row() -> None:
    document = msgspec.json.decode(kernels.encoded([HEAD], [BASE]))
    assert (document["schema"], len(document["head"]), len(document["base"])) == ("kernels/1", 1, 1)
    (base,) = document["base"]
    assert base.pop("sum_ns") == 14_020_800
    assert msgspec.convert(base, KernelTable) == BASE
    assert msgspec.json.decode(kernels.encoded([HEAD]))["base"] is None
