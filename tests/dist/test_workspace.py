"""Workspaces from Python: created by name, shared, closed, and nothing left behind."""

import atexit
import copy
import gc
import os
import pickle
import random
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from mok import _C, workspace
from mok.errors import (
    PeerAbortedError,
    PeersNotLocalError,
    PeerTimeoutError,
    SymmetricHeapError,
    WorkspaceClosedError,
    translate,
)
from tests._harness import run_ranks, run_ranks_fresh
from tests.dist._heaps import exchange, outcome_of

SETTINGS = {"max_tokens": 32, "hidden_size": 64, "top_k": 2, "dtype": torch.float32}


def declare(group, **changes):
    return workspace.declare(group, **(SETTINGS | changes))


def new_group(group):
    """The same ranks again: no workspace of another test is in the way."""
    return dist.new_group(list(range(group.size())))


def share_one_workspace(rank, group):
    group = new_group(group)
    name = declare(group)
    assert declare(group) == name
    assert declare(group, top_k=3) != name
    with pytest.raises(WorkspaceClosedError):
        workspace.get(name)
    opened = workspace.ensure(name)
    assert workspace.ensure(name) is workspace.get(name) is opened
    assert declare(group) == name
    assert _C.find_workspace(name).name == name
    assert copy.deepcopy(opened) is opened
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(opened)
    opened.check()
    facts = opened.num_ranks, opened.backing, opened.closed, f"rank {rank} of" in repr(opened)
    opened.close()
    opened.close()
    assert opened.closed
    assert "closed" in repr(opened)
    for use in (opened.check, lambda: workspace.ensure(name), lambda: _C.find_workspace(name)):
        with pytest.raises(WorkspaceClosedError):
            use()
    with pytest.raises(WorkspaceClosedError):
        workspace.symm_empty(4, workspace=opened)
    # A layer built later gets a new workspace of the same settings.
    again = declare(group)
    assert again != name
    workspace.ensure(again).close()
    return facts


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_equal_settings_share_a_workspace_until_it_is_closed(num_ranks):
    backing = "memory" if num_ranks == 1 else "memfd"
    assert (
        run_ranks(num_ranks, share_one_workspace) == [(num_ranks, backing, False, True)] * num_ranks
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_tokens": -1}, "max_tokens is -1"),
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"top_k": 1.5}, "top_k is 1.5"),
        ({"dtype": torch.float16}, "dtype is torch.float16"),
    ],
)
def test_settings_are_checked_when_declared(changes, words):
    with pytest.raises(ValueError, match=words):
        declare(None, **changes)


def test_a_group_must_be_a_group():
    with pytest.raises(TypeError, match="group is 'ep'"):
        declare("ep")


def declare_differently(rank, group):
    subgroup = new_group(group)
    outcome = outcome_of(workspace.ensure, declare(subgroup, max_tokens=32 + rank // 2))
    works = outcome_of(workspace.ensure(declare(subgroup)).close)
    return outcome, works


def test_settings_that_differ_between_ranks_are_named_on_all():
    for outcome, works in run_ranks(3, declare_differently):
        assert outcome.error == "SymmetricHeapError"
        assert "max_tokens is 33 on rank 2 and 32 on rank 0" in outcome.text
        assert outcome.seconds < 5
        assert works.error == ""


def fail_to_allocate_on_rank_1(rank, group):
    subgroup = new_group(group)
    name = declare(subgroup)
    if rank == 1:

        def refuse(*args, **kwargs):
            raise SymmetricHeapError("no memory here")

        workspace._C = SimpleNamespace(Workspace=refuse, default_timeout=_C.default_timeout)
    try:
        outcome = outcome_of(workspace.ensure, name)
    finally:
        workspace._C = _C
    return outcome, outcome_of(workspace.ensure, name)


def test_a_rank_without_memory_is_named_on_all():
    for rank, (outcome, again) in enumerate(run_ranks(2, fail_to_allocate_on_rank_1)):
        assert outcome.error == again.error == "SymmetricHeapError"
        assert "no memory here" in outcome.text
        assert ("rank 1 could not" in outcome.text) == (rank == 0)
        assert again.text == outcome.text


def ensure_without_rank_2(rank, group):
    subgroup = new_group(group)
    os.environ["MOK_TIMEOUT_S"] = "0.5"
    try:
        return outcome_of(workspace.ensure, declare(subgroup)) if rank != 2 else None
    finally:
        del os.environ["MOK_TIMEOUT_S"]


def test_a_rank_that_never_makes_its_first_call_is_named():
    for outcome in run_ranks(3, ensure_without_rank_2)[:2]:
        assert outcome.error == "SymmetricHeapError"
        assert "rank(s) 2 " in outcome.text
        assert "MOK_TIMEOUT_S" in outcome.text
        assert outcome.seconds < 5


@pytest.mark.parametrize("text", ["soon", "-1", "nan"])
def test_a_wrong_time_limit_is_refused(text, monkeypatch):
    monkeypatch.setenv("MOK_TIMEOUT_S", text)
    with pytest.raises(ValueError, match=f"MOK_TIMEOUT_S is '{text}'"):
        _C.default_timeout()


def ensure_while_tracing(rank, group):
    group = new_group(group)
    with FakeTensorMode():
        opened = workspace.ensure(declare(group))
    x = workspace.symm_empty(3, 64, workspace=opened)
    kind = type(x)
    opened.close()
    return kind


def test_a_workspace_can_be_created_while_torch_traces():
    assert run_ranks(2, ensure_while_tracing) == [torch.Tensor] * 2


def abort_by_name(rank, group):
    group = new_group(group)
    name = declare(group)
    reason = "x.shape[0] is 40, but max_tokens is 32"
    outcomes = []
    for _ in range(2):  # before there is a workspace, and again
        attempt = workspace.abort if rank == 0 else workspace.ensure
        arguments = (name, reason) if rank == 0 else (name,)
        outcomes.append(outcome_of(attempt, *arguments))
    workspace.ensure(name).check()
    workspace.abort(name, reason)  # all ranks: each has its own error
    workspace.get(name).check()
    workspace.close(name)
    workspace.abort(name, "nobody is there to hear it")
    return outcomes


def test_abort_by_name_also_ends_the_creation_of_a_workspace():
    first, *peers = run_ranks(3, abort_by_name)
    assert [outcome.error for outcome in first] == ["", ""]
    for outcomes in peers:
        for outcome in outcomes:
            assert outcome.error == "PeerAbortedError"
            assert "rank 0: x.shape[0] is 40, but max_tokens is 32" in outcome.text
            assert outcome.seconds < 5


def close_late(rank, group):
    group = new_group(group)
    opened = workspace.ensure(declare(group))
    time.sleep(0.4 * rank)
    waited = outcome_of(opened.close)
    exchange(group, None)
    other = workspace.ensure(declare(group))
    lonely = outcome_of(other.close, 0.3) if rank == 0 else None
    exchange(group, None)
    other.close(0)
    return waited, lonely


def test_close_waits_for_the_peers_but_not_for_ever():
    (waited, lonely), (late, _) = run_ranks(2, close_late)
    assert waited.error == late.error == ""
    assert waited.seconds > 0.3
    assert late.seconds < 0.3 + 4
    assert lonely.error == "PeerTimeoutError"
    assert "rank(s) 1 did not" in lonely.text


def use_two_groups(rank, group):
    group = new_group(group)
    other = dist.new_group([2, 0, 1])
    names = [declare(group), declare(other)]
    assert names[0] != names[1]
    opened = [workspace.ensure(name) for name in names]
    tensors = [workspace.symm_empty(8, group=g) for g in (group, other)]
    for which, tensor in enumerate(tensors):
        tensor.fill_(which)
        inside = [w.contains(tensor) for w in opened]
        assert inside == [which == 0, which == 1]
    # An abort in one group is none in the other.
    opened[0]._core.abort("only here")
    opened[1].check()
    for w in reversed(opened):
        w.close()
    return [t.sum().item() for t in tensors]


def test_two_groups_over_the_same_ranks_do_not_meet():
    assert run_ranks(3, use_two_groups) == [[0.0, 8.0]] * 3


def remake_process_group(rank, group):
    names = []
    for _ in range(2):
        subgroup = new_group(group)
        names.append(declare(subgroup))
        workspace.ensure(names[-1]).close()
        dist.destroy_process_group(subgroup)
        del subgroup
        gc.collect()
    stale = workspace._specs[names[0]].group
    with pytest.raises(SymmetricHeapError, match="was destroyed"):
        stale.store()
    return names


def test_a_process_group_that_is_gone_is_not_confused_with_a_new_one():
    for names in run_ranks(2, remake_process_group):
        assert len(set(names)) == 2


# symm_empty


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


def test_errors_that_crossed_the_dispatcher_get_their_class_back():
    for cls in (
        PeerTimeoutError,
        PeerAbortedError,
        WorkspaceClosedError,
        SymmetricHeapError,
        PeersNotLocalError,
    ):
        error = RuntimeError(f"mok.{cls.__name__}: rank 3 is gone.\nException raised from f at g")
        translated = translate(error)
        assert type(translated) is cls
        assert str(translated) == "rank 3 is gone."
        assert translated.__cause__ is error
    for other in (RuntimeError("shape mismatch"), ValueError("mok.PeerTimeoutError: no")):
        assert translate(other) is other
