"""The layer over several ranks, processes on as many GPUs as there are: the bits of one rank."""

import itertools
import os
import signal
import time

import pytest
import torch

import mok
from tests._harness import Died, run_ranks, run_ranks_fresh
from tests._numerics import SHARED, assert_bitwise_equal, assert_close, make_case
from tests.gpu._moe import bf16_tensors, forward, on_gpu, ours

pytestmark = pytest.mark.usefixtures("needs_sm90")

FULL = {"bias": True, "shared": 72, "shared_gate": True}
SPLITS = [(2, (0, 300, 500)), (2, (0, 0, 500)), (2, (0, 500, 500)), (3, (0, 17, 201, 500))]


def part_of(case, rank, group, starts):
    num_local = len(case.tensors["w_gate"]) // group.size()
    torch.cuda.set_device(rank % torch.cuda.device_count())
    part = case.tokens(starts[rank], starts[rank + 1])
    return on_gpu(part.experts(rank * num_local, (rank + 1) * num_local))


def longest(starts):
    return max(end - begin for begin, end in itertools.pairwise(starts))


def to_cpu(results):
    return {name: tensor.cpu() for name, tensor in results.items()}


def forward_on_rank(rank, group, case, starts, **options):
    part = part_of(case, rank, group, starts)
    options |= {"group": group, "max_tokens": longest(starts)}
    outs = [forward(part, **options).cpu() for _ in range(3)]
    for out in outs[1:]:
        assert_bitwise_equal({"out": out}, {"out": outs[0]})
    return outs[0]


def gradients_on_rank(rank, group, case, starts, **options):
    part = part_of(case, rank, group, starts)
    options |= {"group": group, "max_tokens": longest(starts)}
    first = to_cpu(ours(part, **options))
    assert_bitwise_equal(to_cpu(ours(part, **options)), first)
    return first


@pytest.mark.parametrize(("num_ranks", "starts"), SPLITS)
def test_forward_has_the_bits_of_one_rank(num_ranks, starts):
    case = make_case(500, 4, 12, 256, 192, **FULL)
    outs = run_ranks(num_ranks, forward_on_rank, case, starts)
    assert_bitwise_equal({"out": torch.cat(outs)}, {"out": forward(on_gpu(case)).cpu()})


@pytest.mark.parametrize("ring_rows", [128, 384])
def test_forward_in_chunks(ring_rows):
    case = make_case(600, 4, 4, 128, 64)
    outs = run_ranks(2, forward_on_rank, case, (0, 100, 600), ring_rows=ring_rows)
    assert_bitwise_equal({"out": torch.cat(outs)}, {"out": forward(on_gpu(case)).cpu()})


@pytest.mark.parametrize(("num_ranks", "starts"), SPLITS)
@pytest.mark.parametrize("save", ["gate_up", "none"])
def test_gradients_have_the_bits_of_one_rank(num_ranks, starts, save):
    case = make_case(500, 4, 12, 256, 192, **FULL)
    results = run_ranks(num_ranks, gradients_on_rank, case, starts, save=save)
    alone = to_cpu(ours(on_gpu(case)))
    shared = ["d" + name for name in SHARED]
    together = {n: torch.cat([r[n] for r in results]) for n in results[0] if n not in shared}
    assert_bitwise_equal(together, {n: t for n, t in alone.items() if n not in shared})
    sums = {n: sum(r[n].float() for r in results) for n in shared}
    assert_close(sums, {n: alone[n] for n in shared}, 8e-3)


def lose_the_last_rank(rank, group, case, starts):
    part = part_of(case, rank, group, starts)
    options = {"group": group, "max_tokens": 500, "tensors": bf16_tensors(part)}
    forward(part, **options)
    torch.cuda.synchronize()
    if rank == group.size() - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    ends = []
    for _ in range(3):
        begin = time.perf_counter()
        try:
            forward(part, **options)
            torch.cuda.synchronize()
            end = ("", "")
        except Exception as error:
            end = (type(error).__name__, str(error))
        ends.append((*end, time.perf_counter() - begin))
    return ends


def test_a_killed_peer_is_named(monkeypatch):
    monkeypatch.setenv("MOK_TIMEOUT_S", "3")
    case = make_case(500, 4, 12, 256, 192)
    survivor, lost = run_ranks_fresh(2, lose_the_last_rank, case, (0, 300, 500), timeout=60)
    assert lost == Died(1, signal.SIGKILL, None)
    # The first call's kernel traps when its time is up, and torch reports that first.
    for kind, text, seconds in survivor[1:]:
        assert kind == "PeerTimeoutError", survivor
        assert "rank 1" in text
        assert seconds < 2
    assert survivor[0][0], survivor
    assert survivor[0][2] < 15


def refuse_on_the_last_rank(rank, group, case, starts):
    part = part_of(case, rank, group, starts)
    options = {"group": group, "max_tokens": 500}
    forward(part, **options)
    try:
        if rank == group.size() - 1:
            forward(part, **options, save="everything")
        else:
            forward(part, **options)
            torch.cuda.synchronize()
            forward(part, **options)
    except (ValueError, mok.PeerAbortedError) as error:
        torch.cuda.synchronize()  # nothing has trapped
        return type(error).__name__, str(error)
    return None


def capture_too_early_on_the_last_rank(rank, group, case, starts):
    part = part_of(case, rank, group, starts)
    options = {"group": group, "max_tokens": 500, "tensors": bf16_tensors(part)}
    forward(part, **options, ring_rows=128)
    try:
        if rank == group.size() - 1:
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                forward(part, **options, ring_rows=4096)
        else:
            forward(part, **options, ring_rows=4096)
            torch.cuda.synchronize()
            forward(part, **options)
    except (ValueError, mok.PeerAbortedError) as error:
        torch.cuda.synchronize()
        return type(error).__name__, str(error)
    return None


def test_a_call_without_temporary_memory_reaches_the_peers():
    """Found once all arguments are checked, before the first launch."""
    case = make_case(500, 4, 12, 256, 192)
    survivor, refuser = run_ranks_fresh(
        2, capture_too_early_on_the_last_rank, case, (0, 300, 500), timeout=60
    )
    assert refuser[0] == "ValueError"
    assert "before the capture" in refuser[1]
    assert survivor[0] == "PeerAbortedError"
    assert "before the capture" in survivor[1]


def test_a_refused_argument_reaches_the_peers():
    case = make_case(500, 4, 12, 256, 192)
    survivor, refuser = run_ranks_fresh(2, refuse_on_the_last_rank, case, (0, 300, 500), timeout=60)
    assert refuser[0] == "ValueError"
    assert "save" in refuser[1]
    assert survivor[0] == "PeerAbortedError"
    assert "save" in survivor[1]
