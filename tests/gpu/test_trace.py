"""mok.trace on a GPU: every call, task and pull is recorded, and nothing else changes."""

import json

import pytest
import torch

import mok
from mok import _C
from mok._traced_call import num_batches
from tests._harness import run_ranks
from tests._numerics import assert_bitwise_equal, make_case
from tests.gpu._moe import bf16_tensors, forward, gpu_case, on_gpu, ours

pytestmark = pytest.mark.usefixtures("needs_sm90")

SIZES = (500, 4, 12, 256, 192)  # T, K, E, H, I


@pytest.fixture(scope="module")
def case():
    return gpu_case(*SIZES, shared=72)


def flops_of(call, kind: str) -> float:
    return sum(entry.flops for entry in call.timeline if entry.kind == kind)


def check_call(call, routes: int) -> None:
    _, _, _, hidden, inner = SIZES
    assert (call.lost_tasks, call.lost_pulls) == (0, 0)
    assert {"preparation", "kernel"} <= set(call.phases)
    assert all(0 <= microseconds < 1e5 for microseconds in call.phases.values())
    assert call.phases["kernel"] > 0
    product = 2 * hidden * inner * routes
    if call.direction == "forward":
        assert flops_of(call, "gate_up") == 2 * product
        assert flops_of(call, "down") == product
    else:
        assert flops_of(call, "dhidden") == product
        assert flops_of(call, "dx") == 2 * product
    for rate in call.rates:
        assert 0 <= rate.of_peak < 1, rate
        # Few short tiles say little: the nanoseconds come in steps of up to a microsecond.
        if rate.tiles >= 20 and rate.tflops > 0:
            assert 200 < rate.mhz < 2500, rate
    for entry in call.timeline:
        assert 0 <= entry.start <= entry.end <= call.phases["kernel"] + 5
    pulls = [entry for entry in call.timeline if entry.is_communication]
    elements = sum(entry.column for entry in pulls)
    assert len(pulls) == num_batches(elements, call.num_ctas)
    assert 0 < call.shares.gemm < 1


def test_a_step_keeps_its_bits_and_is_recorded(case, tmp_path, capsys):
    plain = ours(case)
    with mok.trace(tmp_path / "deep" / "step") as trace:
        traced = ours(case)
        again = ours(case)
    assert_bitwise_equal(traced, plain)
    assert_bitwise_equal(again, plain)
    assert [call.direction for call in trace.calls] == ["forward", "backward"] * 2
    routes = int((case.topk_ids_TK >= 0).sum())
    for call in trace.calls:
        check_call(call, routes)
    starts = [call.start for call in trace.calls]
    assert starts[0] == 0
    assert starts == sorted(starts)
    events = json.loads(trace.files[0].read_text())["traceEvents"]
    tiles = [event for event in events if event.get("cat") == "gemm"]
    expected = [e for call in trace.calls for e in call.timeline if not e.is_communication]
    assert len(tiles) == len(expected)
    report = capsys.readouterr().out
    assert "call 3: backward T=500" in report
    assert "of peak" in report
    assert_bitwise_equal(ours(case), plain)


def test_a_recomputed_context(case):
    """save="none" makes gate and up again in backward."""
    plain = ours(case, save="none")
    with mok.trace(None, report=False) as trace:
        assert_bitwise_equal(ours(case, save="none"), plain)
    product = 2 * SIZES[3] * SIZES[4] * int((case.topk_ids_TK >= 0).sum())
    assert flops_of(trace.calls[-1], "gate_up") == 2 * product


def test_calls_on_two_streams(case):
    tensors = bf16_tensors(case)
    plain = forward(case, tensors)
    side = torch.cuda.Stream()
    with mok.trace(None, report=False) as trace:
        first = forward(case, tensors)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            second = forward(case, tensors)
    assert len(trace.calls) == 2
    assert_bitwise_equal({"out": first}, {"out": plain})
    assert_bitwise_equal({"out": second}, {"out": plain})


def test_a_full_memory(case):
    plain = forward(case)
    with mok.trace(None, max_spans=20, report=False) as trace:
        out = [forward(case) for _ in range(3)]
    (call,) = trace.calls
    assert len(call.timeline) == 19
    assert call.lost_tasks > 0
    assert "LOST" in str(call)
    for each in out:
        assert_bitwise_equal({"out": each}, {"out": plain})


def test_captured_calls_are_left_out_and_their_graphs_outlive_the_trace(case, capsys):
    tensors = bf16_tensors(case)
    plain = forward(case, tensors)
    graph = torch.cuda.CUDAGraph()
    with mok.trace(None) as trace:
        with torch.cuda.graph(graph):
            out = forward(case, tensors)
        graph.replay()
        forward(case, tensors)
    assert len(trace.calls) == 1
    assert "1 call(s) captured into CUDA graphs" in capsys.readouterr().out
    out.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    assert_bitwise_equal({"out": out}, {"out": plain})


def test_replays_alone_are_an_error_that_says_so(case):
    tensors = bf16_tensors(case)
    forward(case, tensors)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = forward(case, tensors)
    with (
        pytest.raises(RuntimeError, match="recorded no call"),
        mok.trace(None),
    ):
        graph.replay()
    assert_bitwise_equal({"out": out}, {"out": forward(case, tensors)})


def test_one_trace_at_a_time(case):
    with mok.trace(None, report=False) as trace:
        with pytest.raises(RuntimeError, match="a trace is on already"), mok.trace(None):
            pass
        forward(case)
    assert len(trace.calls) == 1
    with pytest.raises(ValueError, match="save"), mok.trace(None):
        forward(case, save="everything")
    with pytest.raises(RuntimeError, match="no trace is on"):
        _C.call_trace().end()


def trace_on_rank(rank, group, case, path):
    num_local = len(case.tensors["w_gate"]) // group.size()
    torch.cuda.set_device(rank % torch.cuda.device_count())
    middle = case.topk_ids_TK.shape[0] // 2
    part = case.tokens(*((0, middle), (middle, 2 * middle))[rank])
    part = on_gpu(part.experts(rank * num_local, (rank + 1) * num_local))
    options = {"group": group, "max_tokens": middle}
    plain = {name: value.cpu() for name, value in ours(part, **options).items()}
    with mok.trace(path, report=False) as trace:
        traced = {name: value.cpu() for name, value in ours(part, **options).items()}
    assert_bitwise_equal(traced, plain)
    calls = [(call.direction, call.rank, call.num_ranks, call.phases) for call in trace.calls]
    flops = [flops_of(call, "gate_up") + flops_of(call, "dhidden") for call in trace.calls]
    return calls, flops, [file.name for file in trace.files]


def test_two_ranks_write_a_file_each(tmp_path):
    case = make_case(*SIZES)
    results = run_ranks(2, trace_on_rank, case, tmp_path / "ep")
    product = 2 * SIZES[3] * SIZES[4] * int((case.topk_ids_TK >= 0).sum())
    assert sum(flops[0] for _, flops, _ in results) == 2 * product
    assert sum(flops[1] for _, flops, _ in results) == product
    for rank, (calls, _, files) in enumerate(results):
        assert [call[:3] for call in calls] == [("forward", rank, 2), ("backward", rank, 2)]
        assert all("barrier" in call[3] for call in calls)
        assert files[0] == f"ep-rank{rank}.json"
        assert (tmp_path / files[0]).exists()
