"""Benchmarks of several ranks, dry: tiny sizes on the CPU, for when GPUs are at hand."""

import itertools
import json
import sys

import numpy as np
import pytest
import torch

from benchmarks import _gpu_timing, barrier, moe_forward_timeline, moe_layer, preparation
from benchmarks._layer_cases import LINK_GB_S, LayerCase, floors, layer_cases
from benchmarks._spans import traced_call
from benchmarks._timing import write_results
from benchmarks.moe_layer import describe_targets, stage_records
from tests._harness import close_pools
from tests.cpu.test_trace import memory
from tools.join_results import join


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs a benchmark's main with arguments; what it prints, and its records."""

    def call(main, *arguments: str, status: int = 0) -> tuple[str, list[dict]]:
        monkeypatch.setattr(sys, "argv", ["benchmark", "--out", str(tmp_path), *arguments])
        assert (main() or 0) == status
        files = list(tmp_path.glob("*.json"))
        records = json.loads(files[0].read_text())["records"] if files else []
        return capsys.readouterr().out, records

    yield call
    close_pools()  # workers whose fresh memory is not poisoned


DRY = ("--tiny", "--device", "cpu")


def test_layer_calls_of_two_ranks(run):
    names = "A save=none,A T=256,A x in heap,A zipf,A quarter ring,A FP32 main_grad,A torch,D inf"
    out, records = run(moe_layer.main, *DRY, "--ranks", "2", "--only", names)
    assert "FAILED" not in out
    shapes = {record["shape"] for record in records}
    assert shapes == {
        *("A save=none", "A T=256 inference", "A T=256", "A x in heap", "A zipf", "A torch"),
        *("A quarter ring", "A FP32 main_grad", "D inference"),
    }
    assert "targets: 0 of 0 reached; 0 case(s) failed" in out
    assert {record["regime"] for record in records} == {"burst", "burst3", "sustained"}
    assert {record["ranks"] for record in records} == {2}
    for record in records:
        assert 0 < record["p10"] <= record["ms"] <= record["p90"]
        assert record["settings"]["floor_ms"] > 0
        is_ours = record["contestant"] == "mok"
        assert (record["rel_error"] is not None) == is_ours
    kept = [r["settings"]["memory"] for r in records if r["shape"] == "A save=none"]
    assert {"documented": 0} in kept


def fail(ranks, case, trace, stages):
    raise RuntimeError("beside")


def test_times_are_kept_where_what_is_beside_them_fails(run, monkeypatch):
    monkeypatch.setattr(moe_layer, "look_beside", fail)
    out, records = run(moe_layer.main, *DRY, "--only", "A T=256", status=1)
    assert {record["shape"] for record in records} == {"A T=256 inference", "A T=256"}
    assert {record["rel_error"] for record in records} == {None}
    assert out.count("FAILED in fail") == 1  # the second case does not try


def test_a_layer_call_of_one_rank(run):
    out, records = run(moe_layer.main, *DRY, "--only", "A T=256 inf")
    assert "1 process(es) on the CPU" in out
    assert {record["ranks"] for record in records} == {1}


def test_no_case_begins_behind_the_budget(run):
    out, records = run(moe_layer.main, *DRY, "--only", "A T=256", "--budget", "0")
    assert out.count("left out: no time left") == 2
    assert records == []


def test_a_barrier_of_two_ranks(run):
    out, records = run(barrier.main, *DRY)
    assert "2 process(es) on the CPU" in out
    assert [record["contestant"] for record in records] == ["mok, CPU"]


def test_preparation(run):
    _, records = run(preparation.main, *DRY)
    assert {record["regime"] for record in records} == {"burst", "burst3", "sustained"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="this process has a GPU")
@pytest.mark.parametrize("main", [moe_layer.main, barrier.main, preparation.main])
def test_without_a_gpu_nothing_is_measured(run, main):
    out, records = run(main)
    assert "no CUDA device, nothing was measured" in out
    assert records == []


def test_clocks(monkeypatch):
    """A card that idleness cools and work heats: each clock sees the state that it is named for."""
    heat = 0
    seen = []

    def sleep(seconds):
        nonlocal heat
        heat = 0 if seconds >= 0.25 else heat

    def call():
        nonlocal heat
        heat += 1

    def timed(call, launches, device):
        call_heat = []
        for _ in range(launches):
            call()
            call_heat.append(float(heat))
        seen.append(launches)
        return call_heat

    monkeypatch.setattr(_gpu_timing.time, "sleep", sleep)
    monkeypatch.setattr(_gpu_timing, "seconds_of_each", timed)
    aligned = itertools.count()
    found = _gpu_timing.clocks_of(call, device="cpu", align=lambda: next(aligned))
    assert found["burst3"] == [1, 2, 3] * 5
    assert found["burst"] == list(range(1, 11))
    assert found["sustained"][0] > 10
    assert len(found["sustained"]) == 12
    assert next(aligned) == 6, "before each round and the burst"


def test_records_of_several_runs_are_joined(tmp_path):
    for name, records in (("b", [1, 2]), ("a", [3])):
        (tmp_path / name).mkdir()
        write_results("what", records, tmp_path / name)
    (tmp_path / "trace.json").write_text('{"traceEvents": []}')
    document = join(tmp_path)
    assert document["records"] == [3, 1, 2]
    assert {"commit", "machine"} <= set(document)
    assert join(tmp_path / "nothing") is None


def test_the_slowest_rank_counts():
    assert _gpu_timing.slowest([[1.0, 5.0], [2.0, 3.0]]) == [2.0, 5.0]


def test_floors_of_a_known_routing():
    case = LayerCase("A", ("forward",), save="none")
    tokens, hidden, inner, _, num_experts = case.sizes
    half = num_experts // 2
    # Rank 0's tokens go to two experts of rank 1 (one row over the link, two back), rank 1's stay.
    ids = [torch.tensor([[half, half + 1]]).expand(tokens, 2)] * 2
    floor = floors(case, "forward", ids)
    rows = 4 * tokens
    assert floor.matrix["burst"] == pytest.approx(6e-9 * rows * hidden * inner / 716)
    row_ms = 2 * hidden / (LINK_GB_S * 1e6)
    assert floor.link == pytest.approx(2 * tokens * row_ms), "to rank 0 come two rows a token back"
    assert floor.load == pytest.approx(2.0)
    assert floors(case, "backward", ids).matrix["burst"] == pytest.approx(2 * floor.matrix["burst"])


def test_cases_have_names_of_their_own_and_the_wanted_come_first():
    cases = layer_cases()
    names = [case.name for case in cases]
    assert len(set(names)) == len(names)
    assert names[:4] == [f"{shape} inference" for shape in "ABCD"]
    by_name = {case.name: case for case in cases}
    assert cases[0].target("inference", "sustained") == 2.40
    assert cases[4].target("forward_backward", "burst3") == 6.4
    assert by_name["A zipf"].target("inference", "burst") is None
    assert layer_cases(tiny=True)[0].target("inference", "burst") is None


def test_targets_are_counted():
    def record(shape, regime, ms, target):
        settings = {"target_ms": target}
        return {"shape": shape, "pass": "forward", "regime": regime, "ms": ms} | {
            "settings": settings
        }

    records = [
        record("A", "burst", 2.0, 2.15),
        record("A", "burst3", 9.0, 2.15),
        record("A", "sustained", 2.5, 2.4),
        record("A zipf", "burst", 2.0, None),
    ]
    assert describe_targets(records) == ("targets: 1 of 2 reached, missed by A forward sustained")


class FourMultiprocessors:
    multi_processor_count = 4


def test_time_lines_of_kernels_launched_by_hand(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: FourMultiprocessors)
    words = torch.from_numpy(memory()[1:].view(np.int32))
    sizes = {"T": 300, "H": 512, "I": 384, "E": 8, "K": 2}
    tasks, pulls = words[:4], words[4:]
    call = traced_call("forward", sizes, tasks, pulls)
    kinds = [entry.kind for entry in call.timeline]
    assert kinds == ["gate_up", "gate_up", "down", "pull"]
    assert (call.phases, call.lost_tasks) == ({}, 0)
    # From the first recorded moment on: nobody has noted when the kernel began.
    assert call.timeline[0].start == 8.0
    rates = {rate.kind: rate for rate in traced_call("forward", sizes, tasks).rates}
    assert rates["down"].mhz == pytest.approx(1500)
    moe_forward_timeline.describe(call)
    out = capsys.readouterr().out
    assert "waits for gate_up, in the first 100 us: 1," in out
    assert "first tile 8.0 us, last pull 2.0 us" in out


def test_stages_are_the_slowest_ranks(capsys):
    times = [{"stages": {"forward": {"kernel": [1e-3, 2e-3, 3e-3]}}}]
    times += [{"stages": {"forward": {"kernel": [2e-3, 2e-3, 2e-3]}}}]
    (record,) = stage_records(LayerCase("A", ("forward",)), 2, times)
    assert (record["ms"], record["settings"]) == (2.0, {"stage": "kernel"})
    assert "forward stages, traced, us: kernel 2000.0" in capsys.readouterr().out
