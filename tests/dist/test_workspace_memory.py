"""Memory of workspaces: tensors of symm_empty, and that nothing is left behind by anything."""

import atexit
import gc
import os
import random
import time

import pytest
import torch

from mok import _C, workspace
from mok.errors import SymmetricHeapError, WorkspaceClosedError
from tests._harness import run_ranks, run_ranks_fresh
from tests.dist._heaps import declare, exchange, new_group, outcome_of


def resident_bytes(kind):
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith(kind))
    return int(line.split()[1]) << 10


@pytest.fixture
def arena_of_8_mib(monkeypatch):
    monkeypatch.setenv("MOK_ARENA_BYTES", str(8 << 20))


def fill_an_arena(rank, group):
    group = new_group(group)
    os.environ["MOK_ARENA_BYTES"] = str(8 << 20)
    try:
        opened = workspace.ensure(declare(group))
    finally:
        del os.environ["MOK_ARENA_BYTES"]
    before = resident_bytes("RssShmem")
    x = workspace.symm_empty(4, 1 << 18, dtype=torch.float32, group=group)
    y = workspace.symm_empty((1 << 20,), dtype=torch.bfloat16, workspace=opened.name)
    assert x.data_ptr() % 256 == y.data_ptr() % 256 == 0
    grown = resident_bytes("RssShmem") - before
    full = outcome_of(workspace.symm_empty, 3 << 20, dtype=torch.bfloat16, group=group)
    view = x[1:].view(torch.int32)[2]
    x.fill_(float(rank))
    del x
    kept = opened._core.arena_in_use
    del view
    freed = opened._core.arena_in_use
    shrunk = resident_bytes("RssShmem") - before
    fits = workspace.symm_empty(1 << 20, group=group)
    assert workspace.symm_empty(0, 4, group=group).shape == (0, 4)
    with pytest.raises(ValueError, match="no extent may be negative"):
        workspace.symm_empty(-1, group=group)
    opened.close()
    # Memory under a live tensor does not vanish with its workspace.
    y.fill_(rank + 2.0)
    total = y.sum(dtype=torch.float64).item()
    mapped = memfd_mappings()
    del y, fits
    return grown, full, kept, freed, shrunk, total, mapped, memfd_mappings()


def memfd_mappings():
    with open("/proc/self/maps") as file:
        return sum("memfd:mok" in line for line in file)


def test_tensors_in_the_arena_live_as_long_as_their_storage():
    mib = 1 << 20
    for rank, result in enumerate(run_ranks(2, fill_an_arena)):
        grown, full, kept, freed, shrunk, total, mapped, unmapped = result
        assert 6 * mib <= grown < 7 * mib
        assert full.error == "SymmetricHeapError"
        assert "arena_bytes (MOK_ARENA_BYTES)" in full.text
        assert kept == 6 * mib  # a view holds the storage
        assert freed == 2 * mib
        assert 2 * mib <= shrunk < 3 * mib
        assert total == (rank + 2) * mib
        assert (mapped, unmapped) == (1, 0)


@pytest.mark.usefixtures("arena_of_8_mib")
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_an_arena_never_hands_out_memory_twice_and_heals(num_ranks):
    heap = _C.SymmHeap(0, num_ranks, 4096, 1 << 20)
    generator = random.Random(num_ranks)
    live = {}
    for step in range(3000):
        if live and generator.random() < 0.5:
            block, size, value = live.pop(generator.choice(list(live)))
            assert bytes(memoryview(block)) == bytes([value]) * size
            del block
        else:
            size = generator.choice([1, 255, 256, 257, 4096, 5000, 70000])
            try:
                block = heap.arena_allocate(size)
            except SymmetricHeapError:
                continue
            assert block.offset % 256 == 0
            memoryview(block)[:] = bytes([step % 251]) * size
            live[step] = block, size, step % 251
    for block, size, value in live.values():
        assert bytes(memoryview(block)) == bytes([value]) * size
    del block
    live.clear()
    assert heap.arena_in_use == 0
    assert heap.arena_allocate(1 << 20).offset == heap.fixed_bytes


def ask_for_the_only_workspace(rank, group):
    group = new_group(group)
    with pytest.raises(ValueError, match="none is declared"):
        workspace.symm_empty(3, group=group)
    names = [declare(group, top_k=k) for k in (5, 6)]
    with pytest.raises(ValueError, match=r"there are 2: .*workspace="):
        workspace.symm_empty(3, group=group)
    workspace.ensure(names[1])
    assert workspace.get(names[1]).contains(workspace.symm_empty(3, group=group))
    workspace.ensure(names[0])
    with pytest.raises(ValueError, match=r"there are 2: .*workspace="):
        workspace.symm_empty(3, group=group)
    workspace.close(names[1])
    assert workspace.get(names[0]).contains(workspace.symm_empty(3, group=group))
    workspace.close(names[0])


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_symm_empty_wants_exactly_one_workspace(num_ranks):
    run_ranks(num_ranks, ask_for_the_only_workspace)


# What must not be left behind


def footprint():
    gc.collect()
    with open("/proc/self/maps") as file:
        mappings = len(file.readlines())
    return len(os.listdir("/proc/self/fd")), mappings, resident_bytes("VmRSS")


def create_and_close(rank, group, cycles):
    group = new_group(group)
    for cycle in range(cycles):
        name = declare(group, max_tokens=1024, hidden_size=1024, dtype=torch.bfloat16)
        opened = workspace.ensure(name)
        x = workspace.symm_empty(1 << 20, workspace=opened)
        x.fill_(cycle)
        opened._core.abort("exercise the records")
        opened.close()
        del x, opened
        if cycle == cycles - 21:
            before = footprint()
    return before, footprint()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_20_cycles_leave_nothing(num_ranks):
    for before, after in run_ranks(num_ranks, create_and_close, 23):
        assert after[0] == before[0], "descriptors"
        assert after[1] <= before[1] + 2, "mappings"
        assert after[2] < before[2] + (4 << 20), "resident memory (a window has more than 8 MiB)"


def fork_in_mid_life(rank, group):
    group = new_group(group)
    opened = workspace.ensure(declare(group))
    x = workspace.symm_empty(1000, group=group)
    x.fill_(7.0)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            assert memfd_mappings() == 0
            for use in (opened.check, lambda: workspace.symm_empty(3, group=group)):
                try:
                    use()
                    os._exit(2)
                except WorkspaceClosedError:
                    pass
            del x
            gc.collect()
            atexit._run_exitfuncs()
            workspace._open.clear()
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    opened.check()
    alive = x.sum().item()
    opened.close()
    return os.waitstatus_to_exitcode(status), alive


def test_a_forked_process_disturbs_nothing():
    assert run_ranks(2, fork_in_mid_life) == [(0, 7000.0)] * 2


def leave_without_closing(rank, group):
    group = new_group(group)
    opened = workspace.ensure(declare(group))
    exchange(group, None)
    start = time.monotonic()
    workspace._close_all()
    return opened.closed, time.monotonic() - start, memfd_mappings()


def test_the_end_of_the_process_waits_for_nobody():
    for closed, seconds, mapped in run_ranks_fresh(2, leave_without_closing):
        assert closed
        assert seconds < 2
        assert mapped == 0
