"""Every synchronising call of the sm_90a GEMM kernels is left out in turn: the emulator notices, or
the lists below say why the call may be missing there. A call is known by its line of source."""

from pathlib import Path

from tests.emu._emulator import ROOT
from tests.emu._moe_backward import BackwardData, BackwardLayer, ExpectedBackward
from tests.emu._moe_backward import check as check_backward
from tests.emu._moe_forward import Data, Expected, Layer, needs_isa
from tests.emu._moe_forward import check as check_forward
from tests.emu._mutation import is_noticed
from tests.emu.test_grouped_gemm import Case

pytestmark = needs_isa

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

# The fastest first: it notices most. Then chunks that use the ring again, with gate and up made
# again and biases; cut segments; gradients that leave through stages; router gradients alone.
BACKWARD_LAYERS = (
    BackwardLayer((70,), num_experts=2, top_k=1, hidden=16, intermediate=8, num_blocks=1),
    BackwardLayer(
        (300, 60),
        num_experts=2,
        hidden=24,
        intermediate=72,
        save="gate_up",
        ring_rows=256,
        biases=True,
    ),
    BackwardLayer(
        (300,),
        num_experts=2,
        top_k=1,
        intermediate=16,
        ring_rows=128,
        skew=0.9,
        biases=True,
        shared=24,
    ),
    # Fewer dhidden tiles than blocks, so that not every block waits for its stores anyway.
    BackwardLayer(
        (400,),
        num_experts=1,
        top_k=1,
        hidden=264,
        intermediate=8,
        ring_rows=128,
        none_share=0.0,
        num_blocks=6,
    ),
    BackwardLayer(
        (40, 30),
        num_experts=2,
        hidden=296,
        save="all",
        shared=16,
        float32=("w_gate", "b_down"),
        accumulate=True,
    ),
    BackwardLayer(
        (90,),
        num_experts=2,
        hidden=16,
        intermediate=16,
        shared=16,
        gradients=("weights", "shared_weight"),
    ),
)

# (file, part of the line, or of it and the line before): why it is needed although no run shows it.
NOT_NOTICED = {
    ("gemm/sm90_block.cuh", "sync_block_or(is_expired)"): "runs only where a wait has expired",
    ("gemm/sm90_task.cuh", "named_barrier_sync("): "decides only where a wait has expired",
    ("gemm/sm90_mainloop.cuh", "mbar_wait_landed("): (
        "the consumers wait for the same, unless one has given up: tests/emu/test_ended.py"
    ),
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
    ("kernels/sm90_bf16_moe_pull.cuh", "fence_proxy_async_shared();\nptx::sync_warp()"): (
        "zeros of other lanes are stored one element later, behind another sync_warp"
    ),
    ("kernels/sm90_bf16_moe_pull.cuh", "bulk_wait_read<0>();\nptx::sync_warp()"): (
        "the freed slot of a batch that is not full is loaded again only in rare schedules"
    ),
    ("kernels/sm90_bf16_moe_pull.cuh", "bulk_wait_read<0>()"): "the same batches",
    ("kernels/sm90_bf16_moe_pull.cuh", "another proxy.\nptx::fence_proxy_async_global()"): (
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


# Those that the backward kernel's runs notice.
BACKWARD_NOTICED = (
    ("gemm/sm90_task.cuh", "mbar_wait(shared.task_empty"),
    ("gemm/sm90_task.cuh", "sync_warp()"),
    ("gemm/sm90_mainloop.cuh", "sync_warp()"),
)
BACKWARD_NOT_NOTICED = {
    call: why for call, why in NOT_NOTICED.items() if call not in BACKWARD_NOTICED
} | {
    ("kernels/sm90_bf16_moe_backward_router.cuh", "fence_proxy_async_global()"): (
        "the pull warp that stores to the row again has a fence of its own behind its wait"
    ),
    ("kernels/sm90_bf16_moe_backward_store.cuh", "of this stream releases.\nptx::bulk_wait<0>()"): (
        "at the kernel's end the machine completes all copies"
    ),
    ("kernels/sm90_bf16_moe_backward_store.cuh", "fence_acq_rel_sys()"): (
        "as in the forward kernel's store warp"
    ),
}


def source(file: Path) -> list[str]:
    return [line.strip() for line in file.read_text().splitlines()]


def is_known(known, file: str, line: int) -> bool:
    lines = source(ROOT / file)
    one, two = lines[line - 1], "\n".join(lines[line - 2 : line])
    return any(
        file.endswith(name) and part in (two if "\n" in part else one) for name, part in known
    )


def mutate(emulator, runs, known) -> None:
    """`runs`: functions of RunOptions that raise where the run went wrong."""
    sites = {}
    for run in runs:
        run(emulator.RunOptions(seed=0, collect_sites=True))
        clean = emulator.last_result()
        assert clean.warnings == []
        for site in clean.sites:
            sites.setdefault((site.wrapper, site.file, site.line), []).append(run)
    assert len(sites) > 20
    missed = []
    for left_out, those in sorted(sites.items(), key=lambda item: item[0]):
        wrapper, file, line = left_out
        if Path(file).parts[1:2] not in (("gemm",), ("kernels",)):
            continue  # the barriers between ranks have tests of their own
        if Path(file).name.startswith(("prepare", "publish")):
            continue  # so has the preparation
        if not is_known(known, file, line) and not any(
            is_noticed(emulator, run, left_out, seed, MAX_STEPS)
            for seed in range(SEEDS)
            for run in those
        ):
            missed.append(f"{wrapper} at {file}:{line}: {source(ROOT / file)[line - 1]}")
    assert not missed, "\n".join(missed)


def test_forward(emulator):
    expected = [Expected(Data(layer)) for layer in LAYERS]
    mutate(
        emulator,
        [lambda options, each=each: check_forward(emulator, each, options) for each in expected],
        NOT_NOTICED,
    )


def test_backward(emulator):
    expected = [ExpectedBackward(BackwardData(layer)) for layer in BACKWARD_LAYERS]
    mutate(
        emulator,
        [lambda options, each=each: check_backward(emulator, each, options) for each in expected],
        BACKWARD_NOT_NOTICED,
    )


def test_grouped_gemm(emulator):
    mutate(emulator, [lambda options: GEMM.run(emulator, options)], NOT_NOTICED)


def test_the_list_names_calls_that_there_are():
    for file, part in NOT_NOTICED | BACKWARD_NOT_NOTICED:
        assert part in "\n".join(source(ROOT / "csrc" / file)), (file, part)
