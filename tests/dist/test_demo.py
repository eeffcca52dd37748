"""A very small run of examples/demo: its files, its resume, its checks and how it fails."""

import json
import math
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

DEMO = Path(__file__).parents[2] / "examples" / "demo"
sys.path.insert(0, str(DEMO))

import launch  # noqa: E402
import train  # noqa: E402
from model import ModelConfig  # noqa: E402

STEPS = 24
BATCH = 4
# After one step Adam's first moment is a tenth of the gradient: this checkpoint shows gradients.
CHECKPOINT_STEP = 1
SMALL = [
    *("--steps", STEPS),
    *("--batch", BATCH),
    *("--checkpoint-step", CHECKPOINT_STEP),
    *("--max-loss", 4.0),
    *("--device", "cpu"),
]
TIMEOUT = 240


def command(*args) -> list[str]:
    return [sys.executable, str(DEMO / "train.py"), *map(str, args)]


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """What the small run on two ranks printed, and its folder."""
    out = tmp_path_factory.mktemp("demo")
    done = subprocess.run(
        command(*SMALL, "--out", out), capture_output=True, text=True, timeout=TIMEOUT
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, out


def read(out: Path, name: str) -> dict:
    return json.loads((out / f"{name}.json").read_text())


def small_job(out: Path, name: str) -> train.Job:
    """The job of the small run's mok part, for one rank."""
    return train.Job(
        label=name,
        model=ModelConfig(max_tokens=BATCH * ModelConfig.length, emulate_bf16=train.bf16_is_slow()),
        result=out / f"{name}.json",
        device_type="cpu",
        steps=STEPS,
        stop=3,
        batch=BATCH,
        learning_rate=3e-3,
        checkpoint=out / f"{name}_checkpoint",
        checkpoint_step=CHECKPOINT_STEP,
        evaluate=False,
    )


def full_state(checkpoint: Path, scratch: Path) -> dict[str, torch.Tensor]:
    """What a checkpoint holds, put together from all ranks' files."""
    dcp_to_torch_save(checkpoint, scratch)
    return torch.load(scratch)


def test_run_ends_well_and_leaves_its_files(demo):
    printed, out = demo
    last = printed.splitlines()[-1]
    figures = (
        r"OK: final loss mok \d\.\d{3}, plain \d\.\d{3} .*difference \d\.\d{3}; mok [\d,]+ tok"
    )
    assert re.match(figures, last)
    assert str(out / "loss.png") in last
    assert "Text by the trained model:\ndef " in printed
    assert f"step {STEPS}/{STEPS}" in printed
    picture = (out / "loss.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 10_000
    assert (out / "checkpoint" / ".metadata").is_file()
    for name in ("mok", "plain"):
        losses = read(out, name)["losses"]
        assert len(losses) == STEPS
        assert losses[-1] < losses[0] - 1.0


def test_resumed_run_repeats_the_losses_bit_for_bit(demo):
    printed, out = demo
    assert "losses equal bit for bit" in printed
    losses, resumed = read(out, "mok")["losses"], read(out, "mok_resumed")["losses"]
    assert len(resumed) == train.RESUMED_STEPS
    assert resumed == losses[CHECKPOINT_STEP : CHECKPOINT_STEP + train.RESUMED_STEPS]


def test_one_rank_with_the_global_batch_has_the_same_gradients(demo, tmp_path):
    _, out = demo
    scratch = small_job(tmp_path, "one_rank")
    resumed = replace(
        scratch, result=tmp_path / "resharded.json", checkpoint=None, resume=out / "checkpoint"
    )
    one, resharded = train.run([scratch, resumed], 1)
    two = read(out, "mok")
    assert one["losses"] == pytest.approx(two["losses"][:3], abs=5e-3)
    assert one["grad_norms"] == pytest.approx(two["grad_norms"][:3], rel=2e-2)
    # Two ranks' checkpoint, resumed on one rank.
    assert resharded["losses"] == pytest.approx(two["losses"][CHECKPOINT_STEP:3], abs=5e-3)

    ours = full_state(out / "checkpoint", tmp_path / "two.pt")
    wanted = full_state(scratch.checkpoint, tmp_path / "one.pt")
    assert ours.keys() == wanted.keys()
    moments = [name for name in wanted if name.startswith("exp_avg.")]
    assert sum(".experts." in name for name in moments) == 3 * ModelConfig.blocks
    for name in moments:
        error = (ours[name] - wanted[name]).norm() / wanted[name].norm()
        assert error < 0.02, f"{name}: relative error {error:.2g}"


def test_checkpoint_holds_every_ranks_experts(demo, tmp_path):
    state = full_state(demo[1] / "checkpoint", tmp_path / "state.pt")
    experts = {name: t for name, t in state.items() if ".experts." in name and t.dim() > 0}
    assert len(experts) == 3 * 3 * ModelConfig.blocks  # weights and two moments
    for name, tensor in experts.items():
        assert len(tensor) == ModelConfig.experts, name
        first, second = tensor.chunk(2)
        assert not torch.equal(first, second), f"{name}: rank 1's experts are rank 0's"


def children_of(pid: int) -> list[int]:
    """The rank processes of a running demo."""
    pids = map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    return [p for p in pids if b"spawn_main" in Path(f"/proc/{p}/cmdline").read_bytes()]


def test_killed_rank_ends_the_run_and_is_named(tmp_path):
    args = ("--layer", "mok", "--steps", 60, "--batch", 2, "--device", "cpu", "--out", tmp_path)
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command(*args), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            # The first line of progress: both ranks are training.
            assert any("step" in line for line in process.stdout)
            ranks = children_of(process.pid)
            os.kill(ranks[1], signal.SIGKILL)
            _, errors = process.communicate(timeout=30)
        finally:
            process.kill()
    assert process.returncode == 1
    assert f"The demo failed: rank 1 (pid {ranks[1]}) was killed by SIGKILL" in errors
    assert not Path(f"/proc/{ranks[0]}").exists()


def test_error_of_a_rank_is_shown(demo, tmp_path):
    job = replace(small_job(tmp_path, "late"), resume=demo[1] / "checkpoint", stop=CHECKPOINT_STEP)
    with pytest.raises(launch.RankFailedError, match=r"rank 0 \(pid \d+\) raised an error") as info:
        train.run([job], 1)
    assert "is at step 1 and the run ends at step 1; raise --steps." in str(info.value)


def canned_results(mok=0.0, plain=0.0, resumed=0.0) -> list[list[dict]]:
    """Results of falling loss curves, each with a function of the step (or a constant) added."""
    curve = [2.0 + 3.0 * math.exp(-step / 10) for step in range(100)]

    def result(added, first=0, last=100):
        added = added if callable(added) else lambda _, value=added: value
        losses = [curve[step] + added(step) for step in range(first, last)]
        return {"losses": losses, "tokens_per_s": 1.0, "held_out": 2.0, "sample": "def"}

    return [[result(mok)], [result(resumed, 50, 70), result(plain)]]


@pytest.mark.parametrize(
    ("results", "message"),
    [
        (canned_results(), None),
        (canned_results(plain=0.03), None),
        (canned_results(mok=0.5, plain=0.5, resumed=0.5), "ends at loss 2.5"),
        (canned_results(plain=lambda step: 0.05 * (step >= 50)), "final 20-step means differ"),
        (canned_results(plain=lambda step: 0.2 * (step < 40)), "20-step means differ by 0.2"),
        (canned_results(plain=lambda step: math.nan if step == 30 else 0.0), "loss is nan at step"),
        (canned_results(mok=lambda step: math.inf if step == 99 else 0.0), "loss is inf at step"),
        (canned_results(resumed=lambda step: 1e-9 * (step == 69)), "resumed at step 50 has loss"),
    ],
    ids=["equal", "near", "high", "apart", "bump", "nan", "inf", "resume"],
)
def test_checks_fail_loudly(results, message, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(train, "run", lambda jobs, ranks: results.pop(0))
    args = ["train.py", "--device", "cpu", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [*args, "--steps", "100", "--checkpoint-step", "50"])
    status = train.main()
    printed = capsys.readouterr()
    last = printed.out.splitlines()[-1]
    assert str(tmp_path / "loss.png") in last
    assert (tmp_path / "loss.png").exists()
    if message is None:
        assert (status, printed.err) == (0, "")
        assert last.startswith("OK: ")
    else:
        assert status == 1
        assert last.startswith("FAILED: ")
        assert message in printed.err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--ranks", "3"], "--ranks must divide --batch"),
        (["--steps", "1"], "--steps must be 2 or more"),
        (["--resume", "nowhere"], "--resume needs --layer"),
        (["--resume", "nowhere", "--layer", "mok"], "nowhere is not a checkpoint"),
    ],
)
def test_bad_arguments_are_refused_before_anything_starts(args, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train.py", *args])
    with pytest.raises(SystemExit):
        train.main()
    assert message in capsys.readouterr().err
