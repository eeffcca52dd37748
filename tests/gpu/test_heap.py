"""The symmetric heap in GPU memory: what peers see, what is given back, how it ends."""

import gc
import subprocess
import sys

import pytest
import torch

import mok
from mok import _C, workspace
from mok.errors import SymmetricHeapError, WorkspaceClosedError
from tests._harness import run_ranks
from tests.dist._heaps import exchange, outcome_of
from tests.gpu._peers import SECOND, Peers, device_of, stream

WORDS = 1024


def pass_data_both_ways(rank, group, rounds, expandable=False):
    if expandable:
        torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    peers = Peers(rank, group, words=WORDS * group.size())
    ranks = range(group.size())
    assert peers.fresh == bytes(peers.data)  # the flags; the rest is not promised
    own = peers.heap.window(rank)
    assert all(peers.heap.window(p) == own + (p - rank) * peers.heap.stride for p in ranks)
    received = torch.zeros(rounds, len(ranks), WORDS, dtype=torch.int64, device="cuda")
    fetched = torch.zeros_like(received)
    column = torch.arange(WORDS, device="cuda")

    def sent(round_, source, target):
        return column + WORDS * (round_ * 100 + source * 10 + target)

    messages = [[sent(i, rank, p) for p in ranks] for i in range(rounds)]
    for i in range(rounds):
        for peer in ranks:
            peers.push(messages[i][peer], peer, WORDS * rank)  # over NVLink if it is another GPU
        peers.barrier()
        for peer in ranks:
            peers.pull(received[i, peer], rank, WORDS * peer)
            peers.pull(fetched[i, peer], peer, WORDS * ((rank + 1) % len(ranks)))
        peers.barrier(SECOND)
    torch.cuda.synchronize()
    peers.comm.check()
    for i in range(rounds):
        for peer in ranks:
            assert torch.equal(received[i, peer], sent(i, peer, rank)), (i, peer)
            neighbour = (rank + 1) % len(ranks)
            assert torch.equal(fetched[i, peer], sent(i, neighbour, peer)), (i, peer)
    backing = peers.heap.backing
    peers.close()
    return backing


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_data_is_seen_both_ways(num_ranks):
    backings = set(run_ranks(num_ranks, pass_data_both_ways, 20))
    report = workspace.describe_device(0)
    assert len(backings) == 1
    if num_ranks == 1:
        assert backings == {"memory"}
    elif torch.cuda.device_count() == 1 or report.nvlink_domain is None:
        assert backings == {report.backing}


def test_torch_memory_of_expandable_segments_changes_nothing():
    run_ranks(2, pass_data_both_ways, 3, expandable=True)


def open_and_close_often(rank, group, cycles):
    free = []
    for _ in range(cycles):
        peers = Peers(rank, group, words=1 << 20)
        peers.barrier()
        peers.close()
        peers.meet()
        free.append(torch.cuda.mem_get_info()[0])
        peers.meet()
    return free


def test_20_cycles_leak_nothing():
    for free in run_ranks(2, open_and_close_often, 22, timeout=60):
        # The first two may load modules; a leaked window would be 10 MiB a cycle.
        assert free[2] - free[-1] < 20 << 20, free


def use_tensors(rank, group):
    where = torch.device("cuda", device_of(rank))
    torch.cuda.set_device(where)
    settings = {"max_tokens": 64, "hidden_size": 256, "top_k": 2, "dtype": torch.bfloat16}
    name = workspace.declare(group, **settings, device="cuda")
    opened = workspace.ensure(name)
    assert (opened.device, opened.rank) == (where, rank)
    assert opened.backing == (
        "memory" if group.size() == 1 else workspace.describe_device().backing
    )
    x = workspace.symm_empty(64, 256, workspace=opened)
    assert (x.device, x.dtype, x.shape) == (where, torch.bfloat16, (64, 256))
    assert x.data_ptr() % 256 == 0
    assert opened.contains(x)
    assert not opened.contains(torch.empty(4, device="cuda"))
    x.fill_(rank + 1)
    y = x * 2
    assert y.unique().tolist() == [2 * rank + 2]
    assert workspace.symm_empty(0, 3, workspace=opened).device == where
    in_use = opened._core.arena_in_use
    del x
    gc.collect()
    assert opened._core.arena_in_use == in_use - 64 * 256 * 2
    with pytest.raises(SymmetricHeapError, match=r"no room for .*MOK_ARENA_BYTES"):
        workspace.symm_empty(1 << 30, workspace=opened)
    opened._core.barrier(1, stream())
    torch.cuda.synchronize()
    kept = workspace.symm_empty(8, dtype=torch.float32, workspace=name)
    opened.close()
    exchange(group, None)
    kept.fill_(7)
    assert kept.sum().item() == 56
    with pytest.raises(WorkspaceClosedError):
        workspace.symm_empty(8, workspace=opened)
    with pytest.raises(WorkspaceClosedError):
        opened._core.barrier(1, stream())
    with pytest.raises(WorkspaceClosedError):
        opened.check()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_tensors_in_the_heap(num_ranks):
    run_ranks(num_ranks, use_tensors)


def end_in_every_way(rank, group):
    """Closing with work pending, closing twice, dropping without closing."""
    peers = Peers(rank, group)
    torch.cuda._sleep(int(2e8))
    peers.barrier()
    peers.barrier(SECOND)
    peers.heap.close()  # waits for both
    peers.heap.close()
    with pytest.raises(WorkspaceClosedError, match="used after close"):
        peers.barrier()
    peers.meet()
    Peers(rank, group).barrier()
    gc.collect()
    torch.cuda.synchronize()
    return torch.ones(3, device="cuda").sum().item()


def test_ends_of_a_heap_leave_the_device_usable():
    assert run_ranks(2, end_in_every_way) == [3.0, 3.0]


def ask_for_too_much(rank, group):
    torch.cuda.set_device(device_of(rank))
    outcome = outcome_of(_C.SymmHeap, rank, group.size(), 1 << 40, 0, device=device_of(rank))
    works = Peers(rank, group)
    works.barrier()
    works.close()
    return outcome


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_too_much_memory_is_an_error_with_numbers(num_ranks):
    for rank, outcome in enumerate(run_ranks(num_ranks, ask_for_too_much)):
        assert outcome.error == "SymmetricHeapError"
        assert f"rank {rank} wants {1 << 40} bytes on NVIDIA" in outcome.text
        assert "are free" in outcome.text
        assert "lower max_tokens" in outcome.text


def test_a_device_that_is_not_there():
    with pytest.raises(SymmetricHeapError, match="device is cuda:99, but this process sees"):
        _C.SymmHeap(0, 1, 4096, 0, device=99)


EXITS = """
import torch
from mok import _C, workspace
settings = dict(max_tokens=8, hidden_size=8, top_k=1, dtype=torch.float32, device="cuda")
opened = workspace.ensure(workspace.declare(None, **settings))
x = workspace.symm_empty(8, workspace=opened)
heaps = _C.virtual_heaps(3, 1 << 20, 0, 0)
block = heaps[1].arena_allocate(256)
comm = _C.DeviceComm(heaps[0])
print("ready", x.device)
"""


def test_a_process_may_end_with_everything_open():
    ended = subprocess.run(
        [sys.executable, "-c", EXITS], capture_output=True, text=True, timeout=80, cwd="."
    )
    assert (ended.returncode, ended.stdout.strip()) == (0, "ready cuda:0"), ended.stderr
    assert "Error" not in ended.stderr


def test_importing_mok_leaves_the_gpus_alone():
    code = "import mok, torch; assert not torch.cuda.is_initialized(); print(mok.__version__)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=80)
    assert ended.stdout.strip() == mok.__version__, ended.stderr


def test_the_report_describes_this_gpu():
    report = workspace.describe_device(0)
    print(f"\n{report}")
    assert torch.cuda.get_device_name(0) in report.gpu
    assert report.backing in ("fabric", "posix_fd")
    assert report.reason
    others = sorted(report.reachable + report.unreachable)
    assert others == list(range(1, torch.cuda.device_count()))
