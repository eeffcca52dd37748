"""The symmetric heap on GPUs, over a stand-in for the driver: windows, backings, closing."""

import os
import re

import pytest

from mok import _C
from tests._harness import run_ranks
from tests.dist._device_heaps import (
    GRANULARITY,
    build_fake_driver,
    fake_driver,
    open_device_heap,
    open_or_tell,
)
from tests.dist._heaps import exchange


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> str:
    return build_fake_driver(tmp_path_factory.mktemp("fake-cuda"))


@pytest.fixture
def driver(library):
    with fake_driver(library) as fake:
        yield fake


def write_and_read_everywhere(rank, group, library, fabric):
    with fake_driver(library) as driver:
        driver.set(fabric=fabric)
        control = _C.PeerComm.control_bytes(group.size())
        heap = open_device_heap(rank, group, control + 4096, arena_bytes=1 << 20)
        backing = heap.backing
        assert heap.device == rank % 2
        assert heap.stride % GRANULARITY == 0
        own = heap.window(rank)
        ranks = range(group.size())
        for peer in ranks:
            assert heap.window(peer) == own + (peer - rank) * heap.stride
            assert heap.contains(heap.window(peer), 1) == (peer == rank)
            # Zero before the address was published; with MOK_POISON only what has to be.
            assert heap.read(peer, 0, control) == bytes(control)
            assert heap.read(peer, control, 4096) == b"\xff" * 4096
        blocks = [heap.arena_allocate(512) for _ in range(rank + 1)]
        offsets = exchange(group, blocks[-1].offset)
        assert offsets == [heap.fixed_bytes + 512 * r for r in ranks]
        interface = blocks[-1].__cuda_array_interface__
        assert interface["data"] == (own + offsets[rank], False)
        assert interface["shape"] == (512,)
        for peer in ranks:
            heap.write(peer, control + 64 * rank, f"{rank} to {peer}".ljust(10).encode())
        heap.write(rank, offsets[rank], bytes([rank + 1]) * 512)
        exchange(group, None)
        for peer in ranks:
            text = heap.read(rank, control + 64 * peer, 10)
            assert text == f"{peer} to {rank}".ljust(10).encode()
            assert heap.read(peer, offsets[peer], 512) == bytes([peer + 1]) * 512
        exchange(group, None)
        heap.close()
        kept = driver.live()
        del blocks
        assert driver.live() == {}
        return backing, kept


@pytest.mark.parametrize(("num_ranks", "fabric"), [(1, 0), (2, 0), (3, 0), (2, 1), (3, 1)])
def test_every_rank_sees_every_window_at_its_own_offset(library, num_ranks, fabric):
    expected = "memory" if num_ranks == 1 else "fabric" if fabric else "posix_fd"
    for backing, kept in run_ranks(num_ranks, write_and_read_everywhere, library, fabric):
        assert backing == expected
        # A live tensor keeps its own window, and no peer's.
        assert kept.get("mappings", 0) == (1 if num_ranks > 1 else 0)
        assert kept.get("plain", 0) == (1 if num_ranks == 1 else 0)


def open_and_close_often(rank, group, library, cycles):
    with fake_driver(library) as driver:
        open_files = []
        for _ in range(cycles):
            heap = open_device_heap(rank, group, arena_bytes=4096)
            open_files.append(len(os.listdir("/proc/self/fd")))
            heap.close()
            heap.close()
            assert heap.closed
            exchange(group, None)
        assert driver.live() == {}
        assert open_files[-1] == open_files[0]


def test_20_cycles_leak_nothing(library):
    run_ranks(2, open_and_close_often, library, 20)


def choose_backing(rank, group, library, cliques, wanted):
    os.environ["MOK_HEAP_BACKING"] = wanted
    try:
        with fake_driver(library) as driver:
            driver.set(fabric=1, cluster=7, clique=cliques[rank], first_uuid=10 + rank * 10)
            backings = []

            def connect():
                heap = open_device_heap(rank, group)
                backings.append(heap.backing)
                exchange(group, None)
                heap.close()

            try:
                connect()
            except Exception as error:
                return f"{type(error).__name__}: {error}"
            return backings[0]
    finally:
        os.environ.pop("MOK_HEAP_BACKING")


@pytest.mark.parametrize(
    ("cliques", "wanted", "expected"),
    [
        ((1, 1), "auto", "fabric"),
        ((1, 1), "fabric", "fabric"),
        ((1, 1), "posix_fd", "posix_fd"),
        ((1, 2), "auto", "posix_fd"),
    ],
)
def test_fabric_handles_are_for_one_nvlink_domain(library, cliques, wanted, expected):
    assert run_ranks(2, choose_backing, library, cliques, wanted) == [expected] * 2


def test_ranks_of_two_domains_are_listed_with_their_cliques(library):
    for text in run_ranks(2, choose_backing, library, (1, 2), "fabric"):
        assert text.startswith("PeersNotLocalError: the GPUs of this group lie in several NVLink")
        assert re.search("clique 1: rank 0; NVLink cluster 070+ clique 2: rank 1", text)


def test_what_a_heap_would_take_is_described(driver):
    report = _C.describe_device(1)
    assert (report.gpu, report.backing) == ("Fake GPU (cuda:1)", "posix_fd")
    assert report.reason == "the device offers no fabric handles"
    assert (report.reachable, report.unreachable) == ([0], [])
    driver.set(fabric=2, p2p=0)
    report = _C.describe_device(0)
    assert (report.backing, report.unreachable) == ("posix_fd", [1])
    assert "CUDA_ERROR_NOT_PERMITTED" in report.reason
    assert "nvidia-imex" in report.reason
    driver.set(fabric=1, cluster=3, clique=2)
    report = _C.describe_device(0)
    assert (report.backing, report.clique, report.cluster[:2]) == ("fabric", "2", "03")
    driver.set(vmm=0)
    report = _C.describe_device(0)
    assert report.backing == ""
    assert "no virtual memory management" in report.reason
    report = _C.describe_device(7)
    assert (report.backing, report.gpu) == ("", "")
    assert "device is cuda:7, but this process sees 2 GPUs" in report.reason
    assert driver.live() == {}


def test_closing_after_the_context_is_gone_does_nothing(driver):
    heap = _C.SymmHeap(0, 1, 4096, 4096, device=0)
    block = heap.arena_allocate(100)
    driver.fail("cuCtxPushCurrent", 4)  # CUDA_ERROR_DEINITIALIZED
    heap.close()
    del block
    assert driver.live().keys() == {"plain", "streams", "pinned"}  # went with the context
    with pytest.raises(_workspace_closed(), match="used after close"):
        heap.window(0)


def _workspace_closed():
    from mok.errors import WorkspaceClosedError

    return WorkspaceClosedError


def test_one_process_can_play_all_ranks(driver):
    heaps = _C.virtual_heaps(3, 8192, 4096, 0)
    for heap in heaps:
        assert [heap.window(r) for r in range(3)] == [h.window(h.rank) for h in heaps]
        heap.write((heap.rank + 1) % 3, 8, bytes([heap.rank]))
    assert [heap.read(heap.rank, 8, 1)[0] for heap in heaps] == [2, 0, 1]
    heaps[0].close()
    assert heaps[1].read(1, 8, 1) == b"\0"
    heaps[1].close()
    heaps[2].close()
    assert driver.live() == {}


def test_a_window_on_the_cpu_does_not_meet_one_on_a_gpu(library):
    texts = run_ranks(2, one_on_the_cpu, library)
    assert all("SymmetricHeapError: rank " in text for text in texts)
    assert all("use one kind of device on all ranks" in text for text in texts)


def one_on_the_cpu(rank, group, library):
    with fake_driver(library):
        return open_or_tell(rank, group, device=-1 if rank == 0 else 1)
