"""The multi-process harness: results, named failures, and nothing that can hang a test run."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests import _harness
from tests._harness import Died, RankError, RankTimeoutError, run_ranks, run_ranks_fresh

pytestmark = pytest.mark.quick


def scaled_sum(rank, group, factor, offset=0.0):
    x = torch.full((3,), float(rank + 1))
    dist.all_reduce(x, group=group)
    return factor * x + offset


def process_id(rank, group):
    return os.getpid()


def raise_on_one(rank, group, failing_rank):
    if rank == failing_rank:
        raise ValueError("the planted error")
    dist.barrier(group)


def raise_everywhere(rank, group):
    raise KeyError(f"planted on {rank}")


def sleep_on_one(rank, group, sleeping_rank, seconds):
    if rank == sleeping_rank:
        time.sleep(seconds)


def die_on_one(rank, group, dying_rank, how):
    if rank == dying_rank:
        if how == "signal":
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(7)
    return f"survivor {rank}"


def return_lambda(rank, group):
    return lambda: rank


def worker_environment(rank, group):
    empty = [torch.empty(2), torch.empty(2, dtype=torch.int32)]
    settings = torch.get_num_threads(), os.environ["OMP_WAIT_POLICY"], torch.initial_seed()
    return settings, os.environ.get("MOK_TEST_VARIABLE"), empty


def test_results_come_by_rank():
    results = run_ranks(3, scaled_sum, 2.0, offset=1.0)
    assert [r.tolist() for r in results] == [[13.0] * 3] * 3
    assert len(set(run_ranks(3, process_id))) == 3


def test_the_pool_lasts_and_survives_its_users():
    before = run_ranks(2, process_id)
    assert run_ranks(2, process_id) == before
    with pytest.raises(RankError):
        run_ranks(2, raise_everywhere)
    after = run_ranks(2, process_id)
    assert set(before).isdisjoint(after)
    assert not any(Path(f"/proc/{pid}").exists() for pid in before)


def test_an_exception_is_named():
    start = time.monotonic()
    with pytest.raises(RankError) as caught:
        run_ranks(2, raise_on_one, 1)
    message = str(caught.value)
    assert "test_harness.raise_on_one failed: " in message
    assert "rank 1 of 2 raised ValueError: the planted error" in message
    assert "in raise_on_one" in message, "the traceback is missing"
    # Rank 0 waits in a barrier for ever: it is given up long before the 60 s of the job.
    assert "rank 0 of 2 gave no answer" in message
    assert time.monotonic() - start < 30


def test_a_hang_is_killed_and_located():
    before = run_ranks(2, process_id)
    start = time.monotonic()
    with pytest.raises(RankTimeoutError) as caught:
        run_ranks(2, sleep_on_one, 1, 600, timeout=1.5)
    assert time.monotonic() - start < 20
    message = str(caught.value)
    assert "took more than 1.5 s: rank 1 of 2 gave no answer" in message
    assert "in sleep_on_one" in message, "the stack is missing"
    assert not any(Path(f"/proc/{pid}").exists() for pid in before)


def test_a_death_is_an_error_in_the_pool():
    with pytest.raises(RankError, match=r"rank 0 of 2 was killed by signal SIGKILL"):
        run_ranks(2, die_on_one, 0, "signal")
    with pytest.raises(RankError, match=r"rank 1 of 2 ended with exit code 7"):
        run_ranks(2, die_on_one, 1, "exit")


def test_a_worker_that_died_between_jobs_is_named():
    victim = run_ranks(2, process_id)[1]
    os.kill(victim, signal.SIGKILL)
    with pytest.raises(RankError, match=r"rank 1 of 2 was killed by signal SIGKILL"):
        run_ranks(2, process_id)


def test_a_death_is_a_result_in_fresh_processes():
    assert run_ranks_fresh(2, die_on_one, 1, "signal") == [
        "survivor 0",
        Died(1, signal.SIGKILL, None),
    ]
    with pytest.raises(RankError, match=r"rank 1 of 2 raised ValueError: the planted error"):
        run_ranks_fresh(2, raise_on_one, 1, timeout=10)


def test_fresh_processes_are_not_the_pool():
    assert set(run_ranks_fresh(2, process_id)).isdisjoint(run_ranks(2, process_id))


def test_a_result_that_does_not_pickle_is_an_error():
    with pytest.raises(RankError, match=r"rank 0 of 1 raised the job's result cannot be pickled"):
        run_ranks(1, return_lambda)


def test_only_module_level_functions_run():
    with pytest.raises(TypeError, match="must be a module-level function"):
        run_ranks(1, lambda rank, group: rank)


def test_workers_have_one_thread_a_seed_and_poisoned_memory(monkeypatch):
    monkeypatch.setenv("MOK_TEST_VARIABLE", "set after the fork server's start")
    ((settings, variable, empty),) = run_ranks_fresh(1, worker_environment)
    assert settings == (1, "PASSIVE", 0)
    assert variable == "set after the fork server's start"
    assert empty[0].isnan().all()
    assert (empty[1] == torch.iinfo(torch.int32).max).all()


def test_workers_leave_in_order():
    pids = run_ranks(2, process_id)
    processes = _harness._pools[2].processes
    _harness.close_pools()
    assert [process.exitcode for process in processes] == [0, 0]
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
