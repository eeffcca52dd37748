"""Workspaces from Python: created by name, shared, closed, and nothing left behind."""

import copy
import gc
import os
import pickle
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from mok import _C, _workspace, workspace
from mok.errors import (
    PeerAbortedError,
    PeersNotLocalError,
    PeerTimeoutError,
    SymmetricHeapError,
    WorkspaceClosedError,
    translate,
)
from tests._harness import run_ranks
from tests.dist._heaps import declare, exchange, new_group, outcome_of


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

        _workspace._C = SimpleNamespace(Workspace=refuse)
    try:
        outcome = outcome_of(workspace.ensure, name)
    finally:
        _workspace._C = _C
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
        assert outcome.error == "PeerTimeoutError"
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
