"""Every synchronising call of the sm_90a GEMM kernels is left out in turn: the emulator notices, or
the list below says why the call may be missing there. A call is known by its line of source."""

from pathlib import Path

import pytest

from mok import _C
from tests.emu._emulator import ROOT
from tests.emu._moe_forward import ISA, Data, Expected, Layer
from tests.emu._moe_forward import check as check_forward
from tests.emu.test_grouped_gemm import Case

pytestmark = pytest.mark.skipif(
    ISA not in _C.kernels.available(), reason=f"this processor has no {ISA}"
)

SEEDS = 8
MAX_STEPS = 20_000_000  # a run without a fault takes 0.4 million

# Small, and yet with chunks, shared expert, saved context, padding, biases and short pull lists.
LAYERS = (
    Layer(
        (150, 70),
        num_experts=2,
        top_k=1,
        save="all",
        ring_rows=128,
        shared=24,
        none_share=0.0,
    ),
    Layer(
        (300, 60),
        num_experts=2,
        hidden=200,
        intermediate=72,
        save="gate_up",
        ring_rows=128,
        biases=True,
    ),
    Layer((5,), num_experts=2, top_k=1, num_blocks=2),
)
GEMM = Case([0, 300, 129, 70, 128, 1], 840, 136)  # each block runs through the task slots

# (file, part of the line): why it is needed although no run shows it.
NOT_NOTICED = {
    ("gemm/sm90_block.cuh", "sync_block_or(is_expired)"): "runs only where a wait has expired",
    ("gemm/sm90_task.cuh", "named_barrier_sync("): "decides only where a wait has expired",
    ("gemm/sm90_task.cuh", "mbar_wait(shared.task_empty"): (
        "the scheduler claims when the loader is near a task's end, so four slots are never full; "
        "it holds whatever the loader's pace"
    ),
    ("gemm/sm90_task.cuh", "sync_warp()"): (
        "the slot is written again three tasks later, long after the slowest lane has read it"
    ),
    ("gemm/sm90_mainloop.cuh", "sync_warp()"): (
        "keeps lanes of a part without rows within one phase of each other; here none lags two"
    ),
    ("kernels/sm90_bf16_moe_pull.cuh", "sync_warp()"): (
        "zeros of other lanes are stored one element later, behind another sync_warp; the freed "
        "slot of a batch that is not full is loaded again only in rare schedules"
    ),
    ("kernels/sm90_bf16_moe_pull.cuh", "bulk_wait_read<0>()"): "the same batches",
    ("kernels/sm90_bf16_moe_pull.cuh", "fence_proxy_async_global()"): (
        "the memory model asks for it; the machine does not model proxies of global memory there"
    ),
    ("kernels/sm90_bf16_moe_pull.cuh", "ld_acquire_gpu(counter) < target"): (
        "the wait behind it looks again"
    ),
    ("kernels/sm90_bf16_moe_scheduler_loop.cuh", "mbar_wait(shared.claim()"): (
        "claiming earlier is right, but at the end blocks would sit on tasks"
    ),
    ("kernels/sm90_bf16_moe_store.cuh", "bulk_wait<0>();"): (
        "at the kernel's end the machine completes all copies"
    ),
    ("kernels/sm90_bf16_moe_store.cuh", "fence_acq_rel_sys()"): (
        "the barrier kernel behind this one releases what its stream did before"
    ),
    ("kernels/sm90_bf16_grouped_gemm.cuh", "mbar_wait(shared.claim()"): "as in the scheduler above",
    ("kernels/sm90_bf16_grouped_gemm.cuh", "bulk_wait<0>()"): "as in the store warp above",
}


def source_line(file: str, line: int) -> str:
    return (ROOT / file).read_text().splitlines()[line - 1]


def is_known(file: str, line: int) -> bool:
    text = source_line(file, line)
    return any(file.endswith(name) and part in text for name, part in NOT_NOTICED)


def mutate(emulator, runs) -> None:
    """`runs`: functions of RunOptions that return a result or raise where the run went wrong."""
    sites = {}
    for run in runs:
        for site in run(emulator.RunOptions(seed=0, collect_sites=True)).sites:
            sites[site.file, site.line, site.wrapper] = site
    assert len(sites) > 20
    missed = []
    for file, line, wrapper in sorted(sites):
        if Path(file).parts[1:2] not in (("gemm",), ("kernels",)):
            continue  # the barriers between ranks have tests of their own
        left_out = (wrapper, file, line)
        if not is_known(file, line) and not is_noticed(emulator, runs, left_out):
            missed.append(f"{wrapper} at {file}:{line}: {source_line(file, line).strip()}")
    assert not missed, "\n".join(missed)


def is_noticed(emulator, runs, left_out) -> bool:
    for seed in range(SEEDS):
        for run in runs:
            options = emulator.RunOptions(seed=seed, left_out=left_out, max_steps=MAX_STEPS)
            try:
                run(options)
            except (emulator.EmulatorError, AssertionError):
                return True
    return False


def test_forward(emulator):
    expected = [Expected(Data(layer)) for layer in LAYERS]
    mutate(
        emulator,
        [lambda options, each=each: check_forward(emulator, each, options) for each in expected],
    )


def test_grouped_gemm(emulator):
    mutate(emulator, [lambda options: GEMM.run(emulator, options)])


def test_the_list_names_calls_that_there_are():
    for file, part in NOT_NOTICED:
        assert part in (ROOT / "csrc" / file).read_text(), (file, part)
