"""Barriers between ranks on the device that end well: order, delays, graphs, virtual ranks."""

import os
import subprocess
import sys

import pytest
import torch

from mok import _C, workspace
from tests._harness import run_ranks
from tests.gpu._peers import FIRST, LIMIT, SECOND, Peers, stream


def step_in_time(rank, group, steps, longest_delay):
    """Each step: write its number to all, meet, read everyone's, meet. None is early, none late."""
    peers = Peers(rank, group)
    ranks = range(group.size())
    numbers = torch.arange(1, steps + 1, device="cuda")
    seen = torch.zeros(steps, len(ranks), dtype=torch.int64, device="cuda")
    delays = torch.randint(
        0, longest_delay, (steps,), generator=torch.Generator().manual_seed(rank)
    )
    for step in range(steps):
        if step % 7 == rank:
            torch.cuda._sleep(int(delays[step]))
        for peer in ranks:
            peers.push(numbers[step : step + 1], peer, rank)
        peers.barrier(FIRST)
        if step % 5 == rank:
            torch.cuda._sleep(int(delays[step]) // 2)
        peers.pull(seen[step], rank, 0)
        peers.barrier(SECOND)
    torch.cuda.synchronize()
    peers.comm.check()
    assert torch.equal(seen, numbers[:, None].expand_as(seen))
    peers.close()


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_1000_barriers_with_random_delays(num_ranks):
    # Up to half a millisecond each. Ranks that share a GPU take turns of some milliseconds.
    steps = 500 if num_ranks == 2 or torch.cuda.device_count() >= num_ranks else 50
    run_ranks(num_ranks, step_in_time, steps, 1_000_000, timeout=60)


def rounds_in_one_kernel(rank, group, rounds):
    peers = Peers(rank, group)
    wrong, passed = torch.zeros(2, 1, dtype=torch.int32, device="cuda")
    for first in (1, 1 + rounds):
        peers.comm.rounds(
            rounds, peers.data, first, wrong.data_ptr(), passed.data_ptr(), False, stream()
        )
    torch.cuda.synchronize()
    peers.comm.check()
    assert (wrong.item(), passed.item()) == (0, rounds)
    peers.close()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_rounds_inside_one_kernel(num_ranks):
    rounds = 2000 if torch.cuda.device_count() >= num_ranks else 200
    run_ranks(num_ranks, rounds_in_one_kernel, rounds, timeout=60)


def capture_and_replay(rank, group, barriers, replays):
    peers = Peers(rank, group)
    ranks = range(group.size())
    number = torch.zeros(1, dtype=torch.int64, device="cuda")
    seen = torch.zeros(len(ranks), dtype=torch.int64, device="cuda")
    wrong = torch.zeros(1, dtype=torch.int64, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()

    def step():
        number.add_(1)
        for peer in ranks:
            peers.push(number, peer, rank)
        peers.barrier(FIRST)
        peers.pull(seen, rank, 0)
        wrong.add_((seen != number).sum())
        peers.barrier(SECOND)

    with torch.cuda.stream(side):
        step()
    side.synchronize()
    with torch.cuda.graph(graph, stream=side):
        for _ in range(barriers // 2):
            step()
    with torch.cuda.stream(side):
        for replay in range(replays):
            graph.replay()
            if replay % 10 == rank:
                torch.cuda._sleep(500_000)
            if replay % 20 == 7:
                step()  # eager calls between replays count on as well
    side.synchronize()
    peers.comm.check()
    eager = 1 + len([r for r in range(replays) if r % 20 == 7])
    assert number.item() == eager + replays * (barriers // 2)
    assert wrong.item() == 0
    peers.close()


def test_a_graph_of_10_barriers_replayed_50_times():
    run_ranks(2, capture_and_replay, 10, 50, timeout=60)


def two_groups_crosswise(rank, group):
    """Two workspaces over the same ranks, used in different orders on two streams."""
    one, two = Peers(rank, group), Peers(rank, group)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    order = [(one, streams[0]), (two, streams[1])]
    for _ in range(50):
        for peers, on in order if rank == 0 else reversed(order):
            with torch.cuda.stream(on):
                peers.barrier()
    torch.cuda.synchronize()
    for peers in (one, two):
        peers.comm.check()
        peers.close()


def test_two_workspaces_in_different_orders_on_two_streams():
    run_ranks(2, two_groups_crosswise)


def barrier_of_a_workspace(rank, group):
    torch.cuda.set_device(rank % torch.cuda.device_count())
    settings = {"max_tokens": 16, "hidden_size": 64, "top_k": 2, "dtype": torch.bfloat16}
    opened = workspace.ensure(workspace.declare(group, **settings, device="cuda"))
    opened.set_timeout(LIMIT)
    for _ in range(20):
        opened._core.barrier(FIRST, stream())
        opened._core.barrier(SECOND, stream())
    opened.check()
    opened.close()
    again = workspace.ensure(workspace.declare(group, **settings, device="cuda"))
    again._core.barrier(FIRST, stream())
    again.close()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_barriers_of_a_workspace(num_ranks):
    run_ranks(num_ranks, barrier_of_a_workspace)


# Virtual ranks: several in this process, on one GPU


def virtual_ranks(num_ranks):
    heaps = _C.virtual_heaps(num_ranks, _C.PeerComm.control_bytes(num_ranks) + 4096, 0, 0)
    comms = [_C.DeviceComm(heap) for heap in heaps]
    for comm in comms:
        comm.set_timeout(10.0)
    return heaps, comms


@pytest.mark.parametrize("num_ranks", [2, 3, 33, 72, 128])
def test_virtual_ranks_as_blocks_of_one_kernel(num_ranks):
    if torch.cuda.get_device_properties(0).multi_processor_count < num_ranks:
        pytest.skip("not all blocks fit on this GPU at once")
    heaps, comms = virtual_ranks(num_ranks)
    wrong, passed = torch.zeros(2, num_ranks, dtype=torch.int32, device="cuda")
    data = _C.PeerComm.control_bytes(num_ranks)
    rounds = 300
    for first in (5, 5 + rounds):
        comms[0].rounds(rounds, data, first, wrong.data_ptr(), passed.data_ptr(), True, stream())
    torch.cuda.synchronize()
    for comm in comms:
        comm.check()
    assert wrong.sum().item() == 0
    assert passed.unique().tolist() == [rounds]
    for heap in heaps:
        heap.close()


def test_virtual_ranks_as_streams():
    heaps, comms = virtual_ranks(3)
    streams = [torch.cuda.Stream() for _ in comms]
    for step in range(200):
        for rank, (comm, on) in enumerate(zip(comms, streams, strict=True)):
            if step % 3 == rank:
                with torch.cuda.stream(on):
                    torch.cuda._sleep(20_000)
            comm.barrier(FIRST + step % 2, on.cuda_stream)
    torch.cuda.synchronize()
    for heap, comm in zip(heaps, comms, strict=True):
        comm.check()
        heap.close()


EIGHT_STREAMS = """
import torch
from mok import _C
heaps = _C.virtual_heaps(8, _C.PeerComm.control_bytes(8), 0, 0)
comms = [_C.DeviceComm(heap) for heap in heaps]
streams = [torch.cuda.Stream() for _ in comms]
for comm in comms: comm.set_timeout(10.0)
for step in range(100):
    for comm, on in zip(comms, streams): comm.barrier(1, on.cuda_stream)
torch.cuda.synchronize()
for comm in comms: comm.check()
print("done")
"""


def test_eight_virtual_ranks_need_as_many_hardware_queues():
    environment = os.environ | {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    ended = subprocess.run(
        [sys.executable, "-c", EIGHT_STREAMS],
        capture_output=True,
        text=True,
        timeout=80,
        env=environment,
    )
    assert ended.stdout.strip() == "done", ended.stderr
