"""Time lines: shares that add up, and files that viewers read."""

import json
import math

import pytest

import mok
from mok.timeline import TimelineEntry, draw_timeline, timeline_shares, write_chrome_trace

COSTS = {"gate_up": 22, "down": 10.5, "claim": 0.5, "store": 1.5, "pull": 0.9, "link": 0.0091}

# Two CTAs, 100 us. CTA 0: 10 us wait for rows, 40 us tile, 20 us wait for h, 30 us tile.
# CTA 1: one tile.
HAND_MADE = [
    TimelineEntry(0, 0, "gate_up", 0, 0, 10.0, 50.0, 10.0, "x"),
    TimelineEntry(0, 0, "down", 0, 0, 70.0, 100.0, 20.0, "gate_up"),
    TimelineEntry(0, 1, "shared_gate_up", 0, 0, 5.0, 25.0, 0.0, None),
    TimelineEntry(0, 1, "pull", 0, 0, 1.0, 9.0, 0.0, None),
]


@pytest.fixture(scope="module")
def simulated():
    result = mok.simulate(
        num_ranks=2,
        num_experts=8,
        num_tokens=256,
        top_k=2,
        hidden=512,
        intermediate=256,
        num_ctas=8,
        costs=COSTS,
    )
    assert result.ok
    return result


def test_shares_of_a_known_time_line():
    shares = timeline_shares(HAND_MADE)
    assert shares.duration == 100.0
    assert shares.gemm == pytest.approx((40 + 30 + 20) / 200)
    assert shares.communication == pytest.approx(10 / 200)
    assert shares.waiting == pytest.approx(20 / 200)
    assert shares.tail == pytest.approx(75 / 200)
    assert shares.other == pytest.approx(5 / 200)
    assert "gemm 45.0 %" in str(shares)


def test_idle_ctas_are_tail():
    assert timeline_shares(HAND_MADE, num_ctas=4).tail == pytest.approx((75 + 200) / 400)


def test_shares_of_a_simulated_call_agree_with_its_statistics(simulated):
    shares = timeline_shares(simulated.timeline, num_ctas=8)
    parts = (shares.gemm, shares.communication, shares.waiting, shares.tail, shares.other)
    assert math.isclose(sum(parts), 1.0)
    assert min(parts) > -1e-9
    assert shares.gemm * shares.duration * 16 == pytest.approx(simulated.statistics["busy"])
    assert shares.communication > 0


def test_chrome_trace_has_every_task(simulated, tmp_path):
    path = tmp_path / "trace.json"
    write_chrome_trace(simulated.timeline, path)
    events = json.loads(path.read_text())["traceEvents"]
    tasks = [event for event in events if event.get("cat") == "gemm"]
    assert len(tasks) == len(simulated.timeline)
    first = simulated.timeline[0]
    assert any(
        (event["pid"], event["tid"], event["ts"]) == (first.rank, 2 * first.cta, first.start)
        and event["dur"] == pytest.approx(first.end - first.start)
        for event in tasks
    )
    assert {event["name"] for event in events if event.get("cat") == "wait"} >= {"wait for x"}
    names = {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert {"rank 0", "rank 1", "CTA 0"} <= names


def test_communication_has_a_lane_of_its_own(tmp_path):
    path = tmp_path / "trace.json"
    write_chrome_trace(HAND_MADE, path)
    events = json.loads(path.read_text())["traceEvents"]
    (pull,) = (event for event in events if event.get("cat") == "communication")
    assert pull["tid"] == 3
    assert "CTA 1 communication" in {
        event["args"]["name"] for event in events if event["ph"] == "M"
    }


def test_picture(simulated, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "timeline.png"
    draw_timeline([*simulated.timeline, HAND_MADE[-1]], path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 10_000


def test_nothing_to_show():
    with pytest.raises(ValueError, match="timeline has no task"):
        timeline_shares([HAND_MADE[-1]])
    with pytest.raises(ValueError, match="timeline is empty"):
        draw_timeline([], "unused.png")
