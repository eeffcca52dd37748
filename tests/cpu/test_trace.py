"""mok.trace without a GPU: which calls are recorded where, and what becomes of the memory."""

import functools
import json

import numpy as np
import pytest
import torch

import mok
from mok import _C, _kernels, _trace
from mok._traced_call import ENTRY_BYTES, begin_of, num_batches, read_call
from mok.timeline import TimelineEntry, kind_rates

UNSET = 2**64 - 1
MEMORY = 4096  # an address; the host does not touch what lies there
LAYER = {"num_tokens": 4096, "num_experts": 64, "top_k": 8, "hidden": 2048, "intermediate": 768}
NONE_LEFT_OUT = {"captured": 0, "no_room": 0, "elsewhere": 0}


def call_of(num_tasks: int = 4, **changes) -> dict:
    call = {
        "kind": 1,
        "num_tokens": 300,
        "hidden": 512,
        "intermediate": 384,
        "shared_intermediate": 0,
        "num_experts": 8,
        "top_k": 2,
        "save": 0,
        "rank": 1,
        "num_ranks": 2,
        "num_ctas": 2,
        "first": 0,
        "num_tasks": num_tasks,
        "num_pulls": 2,
    }
    return call | changes


def span(kind, cta, block, column, waited_for, rows, steps, times, cycles) -> np.ndarray:
    head = np.array([kind, 0, cta, block, column, waited_for, rows, steps], np.int32)
    return np.concatenate(
        [head.view(np.uint8), np.array([*times, *cycles], np.uint64).view(np.uint8)]
    )


def memory() -> np.ndarray:
    """A forward call: two gate_up tiles and a down tile on two CTAs, a batch of pulls, 1000 ns of
    preparation, 100 us of kernel."""
    entries = np.full((1 + 4 + 2, ENTRY_BYTES), 0xFF, np.uint8)
    entries[0] = np.array(
        [1_000_000, 1_001_000, 1_101_000, 1_103_000, 1_110_000, 3, 5, 0], np.uint64
    ).view(np.uint8)
    # x from the counter 0; gate_up 2
    entries[1] = span(0, 0, 0, 0, 0, 128, 8, (1_011_000, 1_051_000), (0, 60_000))
    entries[2] = span(0, 1, 1, 256, -1, 100, 8, (1_012_000, 1_062_000), (500, 75_500))
    entries[3] = span(1, 0, 0, 256, 2, 128, 6, (1_071_000, 1_101_000), (80_000, 125_000))
    entries[5] = span(100, 0, 1, 4, -1, 0, 0, (1_003_000, 1_005_000), (0, 0))
    return entries


def test_a_call_is_read_back():
    call = read_call(call_of(), memory())
    assert (call.direction, call.rank, call.num_ranks) == ("forward", 1, 2)
    assert call.sizes == {"T": 300, "H": 512, "I": 384, "J": 0, "E": 8, "K": 2}
    assert call.phases == {"preparation": 1.0, "kernel": 100.0, "barrier": 2.0, "sum": 7.0}
    assert (call.duration, call.start) == (110.0, 0.0)
    gate_up, late, down, pull = call.timeline
    assert gate_up == TimelineEntry(
        *(1, 0, "gate_up", 0, 0, 10.0, 50.0, 8.0, "x"),
        *(2.0 * 128 * 256 * 512, 2.0 * 128 * 256 * 512, 60_000),
    )
    # Columns 256 to 383 of 384, rows 0 to 99 of two parts of 64.
    assert (late.waited_for, late.flops) == (None, 2.0 * 100 * 256 * 512)
    assert late.issued_flops == 2.0 * 128 * 256 * 512
    assert (down.wait, down.waited_for, down.flops) == (20.0, "gate_up", 2.0 * 128 * 256 * 384)
    assert (pull.kind, pull.start, pull.end, pull.column) == ("pull", 2.0, 4.0, 4)
    shares = call.shares
    assert shares.duration == 100.0
    assert shares.gemm == pytest.approx((40 + 50 + 30) / 200)
    assert shares.communication == pytest.approx(8 / 200)
    assert shares.waiting == pytest.approx(20 / 200)
    assert shares.tail == pytest.approx(39 / 200)
    assert (call.lost_tasks, call.lost_pulls) == (0, 0)


def test_rates_are_per_time_and_per_cycle():
    rates = {rate.kind: rate for rate in read_call(call_of(), memory()).rates}
    assert rates["gate_up"].tiles == 2
    assert rates["gate_up"].share == pytest.approx(90 / 200)
    flops = 2.0 * (128 + 100) * 256 * 512
    assert rates["gate_up"].tflops == pytest.approx(2 * flops / 90e-6 * 1e-12)
    assert rates["gate_up"].mhz == pytest.approx((60_000 + 75_000) / 90)
    assert rates["gate_up"].of_peak == pytest.approx(flops / (135_000 * 4096))
    assert rates["gate_up"].padding == pytest.approx(28 / 228)
    assert rates["down"].mhz == pytest.approx(1500)
    assert kind_rates([]) == []
    predicted = kind_rates([TimelineEntry(0, 0, "down", 0, 0, 1.0, 2.0, 0.0, None)])
    assert (predicted[0].mhz, predicted[0].of_peak, predicted[0].tflops) == (0, 0, 0)


def test_what_had_no_room_is_counted():
    entries = memory()
    entries[0].view(np.int64)[5:7] = (9, 17)  # batches of four
    call = read_call(call_of(), entries)
    assert (call.lost_tasks, call.lost_pulls) == (5, 3)
    assert "LOST: 5 tasks and 3 batches" in str(call)
    assert [num_batches(n, 132) for n in (0, 1, 131, 133, 264, 265, 529)] == [
        *(0, 1, 131, 67, 132, 89, 133)
    ]


def test_a_task_that_did_not_end_is_left_out():
    entries = memory()
    entries[3].view(np.uint64)[5] = UNSET
    kinds = [entry.kind for entry in read_call(call_of(), entries).timeline]
    assert kinds == ["gate_up", "gate_up", "pull"]


def test_calls_share_the_memory_without_overlap():
    trace = _C.CallTrace()
    assert not trace.take(**LAYER), "no trace is on"
    trace.begin(MEMORY, 1 << 20, 0)
    with pytest.raises(RuntimeError, match="a trace is on already"):
        trace.begin(MEMORY, 1, 0)
    assert trace.take(**LAYER)
    assert trace.take(**LAYER, num_ranks=2)
    calls, left_out = trace.end()
    assert left_out == NONE_LEFT_OUT
    assert [call["first"] for call in calls] == [
        0,
        1 + calls[0]["num_tasks"] + calls[0]["num_pulls"],
    ]
    # One rank: as many tiles as the routing can make, six for gate and up, eight for down.
    blocks = (LAYER["num_tokens"] * LAYER["top_k"] + LAYER["num_experts"] * 127) // 128
    assert calls[0]["num_tasks"] >= blocks * (6 + 8)
    # Two ranks: all routes of both may come here.
    assert calls[1]["num_tasks"] >= 2 * LAYER["num_tokens"] * LAYER["top_k"] // 128 * (6 + 8)
    with pytest.raises(RuntimeError, match="no trace is on"):
        trace.end()


def test_the_memory_is_bounded():
    trace = _C.CallTrace()
    trace.begin(MEMORY, 1000, 0)
    assert trace.take(**LAYER), "what room there is"
    assert not trace.take(**LAYER)
    assert not trace.take(**LAYER)
    calls, left_out = trace.end()
    assert (calls[0]["num_tasks"], calls[0]["num_pulls"]) == (999, 0)
    assert left_out == NONE_LEFT_OUT | {"no_room": 2}


def test_captured_calls_and_other_devices_are_left_out():
    trace = _C.CallTrace()
    trace.begin(MEMORY, 1 << 20, 1)
    assert not trace.take(**LAYER, device=1, is_captured=True)
    assert not trace.take(**LAYER, device=0)
    assert trace.take(**LAYER, device=1)
    calls, left_out = trace.end()
    assert len(calls) == 1
    assert left_out == {"captured": 1, "no_room": 0, "elsewhere": 1}
    trace.begin(MEMORY, 1 << 20, 1)
    assert trace.end() == ([], NONE_LEFT_OUT), "each trace counts from nothing"


def finished(path, calls, left_out=NONE_LEFT_OUT, entries=None, **options):
    trace = mok.trace(path, **options)
    trace._finish(calls, dict(left_out), memory() if entries is None else entries)
    return trace


def test_files_and_report(tmp_path, capsys):
    two = [call_of(), call_of(kind=2, first=7)]
    entries = np.concatenate([memory(), memory()])
    for moment in range(5):
        entries[7].view(np.uint64)[moment] += 500_000
    for index in range(8, 14):
        if (entries[index] != 0xFF).any():
            entries[index].view(np.uint64)[4:6] += 500_000
    trace = finished(tmp_path / "new" / "step", two, NONE_LEFT_OUT | {"captured": 3}, entries)
    assert [call.start for call in trace.calls] == [0.0, 500.0]
    assert trace.files[0] == tmp_path / "new" / "step.json"
    events = json.loads(trace.files[0].read_text())["traceEvents"]
    tiles = [event for event in events if event.get("cat") == "gemm"]
    assert [event["ts"] for event in tiles[:2]] == [11.0, 12.0]
    assert tiles[3]["ts"] == 511.0, "behind the second call's preparation"
    stages = {event["name"]: event for event in events if event.get("cat") == "stage"}
    assert (stages["backward 1: kernel"]["ts"], stages["backward 1: kernel"]["dur"]) == (
        501.0,
        100.0,
    )
    assert {event["pid"] for event in events} == {1}
    report = capsys.readouterr().out
    for part in (
        "rank 1 of 2, call 0: forward T=300 H=512 I=384 E=8 K=2: 110.0 us = preparation 1.0",
        "gemm 60.0 %, communication 4.0 %, waiting 10.0 %, tail 19.5 %",
        "call 1: backward",
        "3 call(s) captured into CUDA graphs, which are not recorded",
        "step.json",
    ):
        assert part in report


def test_the_picture(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    calls = [call_of()] * (_trace.MAX_PANELS + 1)
    trace = finished(tmp_path / "many", calls)
    assert trace.files[1].read_bytes().startswith(b"\x89PNG")
    assert "the picture has the first 8 of 9 calls" in capsys.readouterr().out


def test_quiet(tmp_path, capsys):
    trace = finished(tmp_path / "step", [call_of()], report=False)
    assert "mok.trace: rank" not in capsys.readouterr().out
    assert trace.calls[0].shares.gemm > 0
    assert (finished(None, [call_of()]).files, "call 0: forward" in capsys.readouterr().out) == (
        [],
        True,
    )


def test_each_rank_writes_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(_trace.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(_trace.dist, "get_rank", lambda: 3)
    trace = finished(tmp_path / "step.of.ten", [call_of()])
    assert trace.files[0].name == "step.of.ten-rank3.json"


def test_nothing_recorded_is_an_error(tmp_path):
    with pytest.raises(RuntimeError, match=r"recorded no call.*mok\.explain.*2 call\(s\) captured"):
        finished(
            tmp_path / "step", [], NONE_LEFT_OUT | {"captured": 2}, np.zeros((0, 64), np.uint8)
        )
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="this process has a GPU")
def test_without_a_gpu_one_sentence_says_so(tmp_path):
    with (
        pytest.raises(
            RuntimeError, match=r"mok\.trace records the megakernels of a GPU, and"
        ) as raised,
        mok.trace(tmp_path / "step"),
    ):
        raise AssertionError("not reached")
    assert "mok.simulate(costs=...)" in str(raised.value)
    assert _kernels.why_not(None, False) in str(raised.value)


class FakeDevice:
    """What mok.trace asks of CUDA, in this process's memory."""

    def __init__(self, monkeypatch):
        self.trace, self.log = _C.CallTrace(), []
        monkeypatch.setattr(_kernels, "why_not", lambda dtype, needs_gradients: None)
        monkeypatch.setattr(_C, "call_trace", lambda: self.trace, raising=False)
        load = functools.partial(self.log.append, "load")
        monkeypatch.setattr(_C, "load_traced_kernels", load, raising=False)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: self.log.append("synchronize"))
        plain = torch.full

        def full(*size, device, **options):
            tensor = plain(*size, **options)
            tensor.__class__ = OnDevice
            self.memory = tensor
            return tensor

        monkeypatch.setattr(torch, "full", full)


class OnDevice(torch.Tensor):
    device = torch.device("cuda", 0)


def test_a_block_records_and_reads_back(tmp_path, monkeypatch):
    device = FakeDevice(monkeypatch)
    with mok.trace(tmp_path / "step", max_spans=5000, report=False) as trace:
        assert device.log == ["synchronize", "load"]
        assert (device.memory == 0xFF).all()
        assert device.trace.take(300, 8, 2, 512, 384, num_ranks=2)
        entries = memory()[:5]  # the tasks
        entries[0].view(np.int64)[5:7] = (3, 5)
        device.memory[: len(entries)] = torch.from_numpy(entries)
    assert device.log[2:] == ["synchronize"]
    (call,) = trace.calls
    assert [entry.kind for entry in call.timeline] == ["gate_up", "gate_up", "down"]
    assert trace.files[0].exists()
    assert not device.trace.take(**LAYER), "the block is over"


def test_an_error_in_the_block_passes_and_ends_the_trace(tmp_path, monkeypatch):
    device = FakeDevice(monkeypatch)
    with pytest.raises(KeyError, match="of the user"), mok.trace(tmp_path / "step"):
        raise KeyError("of the user")
    assert device.log == ["synchronize", "load", "synchronize"], "kernels may write until then"
    assert not list(tmp_path.iterdir())
    assert not device.trace.take(**LAYER)


def test_arguments_are_checked(tmp_path):
    with pytest.raises(ValueError, match="max_spans = 0"):
        mok.trace(tmp_path / "step", max_spans=0)


def test_the_first_moment_of_a_call():
    entries = np.full((1, ENTRY_BYTES), 0xFF, np.uint8)
    assert begin_of(entries) == 0
    assert begin_of(memory()) == 1_000_000
