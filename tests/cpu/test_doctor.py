"""`mok doctor` and `mok memory`: what they say, their exit codes, and machines that lack things."""

import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import mok
from mok import _kernels, doctor
from mok.__main__ import main

PACKAGE = Path(mok.__file__).parent
SIZES = ["--hidden-size", "64", "--intermediate-size", "32", "--num-experts", "8", "--top-k", "2"]


def find(findings, topic):
    (found,) = [finding for finding in findings if finding.topic == topic]
    return found


def run(*command, cwd=PACKAGE.parent, **environment):
    environment = os.environ | {"PYTHONPATH": str(cwd)} | environment
    return subprocess.run(
        [sys.executable, "-m", "mok", *command],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=environment,
        timeout=120,
    )


def test_this_machine_is_well():
    findings = doctor.examine()
    text = doctor.report(findings)
    assert doctor.exit_code(findings) == 0, text
    for topic in ("torch", "compiled half", "CPU kernels", "self-test", "shared memory"):
        assert find(findings, topic).status == "ok", text
    assert find(findings, "cpu tensors").text.startswith("one rank takes the cpu backend, several")
    assert text.endswith("nothing is wrong")


def test_a_backend_that_does_not_exist_is_not_explained():
    with pytest.raises(ValueError, match=r"backend is 'megakernels': it must be one of \('auto'"):
        mok.explain(backend="megakernels")


def test_fp32_tokens_do_not_take_the_gpu_kernels(monkeypatch):
    monkeypatch.setattr(_kernels, "has_kernel", lambda op: True)
    choice = mok.explain(device="cuda", dtype=torch.float32)
    assert choice.backend == "collective"
    assert "compute in bfloat16, and x is float32" in choice.reason
    assert "compute in bfloat16" not in mok.explain(device="cuda").reason


def test_json_has_the_same_findings():
    result = run("doctor", "--json", MOK_TIMEOUT_S="77")
    assert result.returncode == 0, result.stderr
    findings = json.loads(result.stdout)
    topics = [finding["topic"] for finding in findings]
    assert {"mok", "Python", "torch", "compiled half", "self-test"} <= set(topics)
    (timeout,) = [f for f in findings if f["topic"] == "MOK_TIMEOUT_S"]
    assert "'77'" in timeout["text"]


def test_what_is_wrong_gives_an_exit_code_and_a_fix():
    result = run("doctor", MOK_CPU_ISA="mmx")
    assert result.returncode == 1
    assert "FAIL  CPU kernels" in result.stdout
    assert "-> unset MOK_CPU_ISA, or choose one of" in result.stdout
    assert "to mend, marked FAIL" in result.stdout


def test_without_a_build(tmp_path):
    compiled = shutil.ignore_patterns("*.so", "_build_info.py", "__pycache__")
    shutil.copytree(PACKAGE, tmp_path / "mok", ignore=compiled)
    # An editable install's finder would lend this copy the compiled half of the other one.
    script = (
        "import sys\n"
        "sys.meta_path[:] = [f for f in sys.meta_path if 'Editable' not in str(f)]\n"
        "from mok.__main__ import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    outputs = {}
    for command in ("doctor", "memory"):
        arguments = ["--max-tokens", "9", *SIZES] if command == "memory" else []
        outputs[command] = subprocess.run(
            [sys.executable, "-c", script, command, *arguments],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(tmp_path)},
        )
    assert outputs["doctor"].returncode == 1
    assert "FAIL  compiled half" in outputs["doctor"].stdout
    assert "pip install --no-build-isolation ." in outputs["doctor"].stdout
    assert outputs["memory"].returncode == 2
    assert "mok memory: the compiled half of mok is not in" in outputs["memory"].stderr


def fake_gpus(monkeypatch, capability, reports):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(reports))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    properties = SimpleNamespace(total_memory=80 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr("mok.workspace.describe_device", lambda index: reports[index])
    monkeypatch.setattr("mok._build_info.CUDA_ARCHS", ("90a",))


def gpu(index, **changes):
    values = {
        "device": index,
        "gpu": f"Test GPU (cuda:{index})",
        "backing": "posix_fd",
        "reason": "no fabric",
        "nvlink_domain": None,
        "reachable": (1 - index,),
        "unreachable": (),
    }
    return mok._devices.DeviceReport(**values | changes)


def test_gpus_that_fit(monkeypatch):
    reports = [gpu(0), gpu(1, backing="fabric", reason="IMEX runs", nvlink_domain="c/7")]
    fake_gpus(monkeypatch, (9, 0), reports)
    findings = doctor._gpus(torch)
    assert {finding.status for finding in findings} == {"ok"}
    assert find(findings, "cuda:0").text == "Test GPU (cuda:0), sm_90, 80 GiB"
    assert find(findings, "cuda:1 heap").text == (
        "memory is shared between ranks by fabric handles: IMEX runs, NVLink domain c/7"
    )
    assert find(findings, "cuda:1 peers").text == "reaches all other visible GPUs"


def test_gpus_that_do_not_fit(monkeypatch):
    reports = [gpu(0, reachable=(), unreachable=(1,)), gpu(1, backing=None, reason="no VMM")]
    fake_gpus(monkeypatch, (8, 0), reports)
    findings = doctor._gpus(torch)
    assert "mok was built for sm_90a" in find(findings, "cuda:0").text
    assert "kernels need compute capability 9.0" in find(findings, "cuda:0").fix
    fake_gpus(monkeypatch, (10, 3), reports)
    assert "kernels need compute capability 9.0" in find(doctor._gpus(torch), "cuda:0").fix
    fake_gpus(monkeypatch, (9, 0), reports)
    monkeypatch.setattr(mok._build_info, "CUDA_ARCHS", ("100a",))
    assert "MOK_CUDA_ARCHS=90a" in find(doctor._gpus(torch), "cuda:0").fix
    assert find(findings, "cuda:0 peers").text == "no access to the memory of cuda:1"
    assert "takes the collective backend" in find(findings, "cuda:0 peers").fix
    assert find(findings, "cuda:1 heap").fix == "no VMM"
    assert doctor.exit_code(findings) == 0  # warnings: other backends run
    assert doctor.report(findings).endswith("nothing is wrong; 4 limit(s) to know of, marked warn")


def test_limits_that_are_low(monkeypatch):
    limits = {resource.RLIMIT_NOFILE: (64, 128), resource.RLIMIT_AS: (1 << 30, 1 << 30)}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits[kind])
    findings = doctor._limits()
    assert find(findings, "file descriptors").fix == "ulimit -n 128"
    assert find(findings, "address space").status == "warning"

    def refuse(name):
        raise OSError("not permitted")

    monkeypatch.setattr(os, "memfd_create", refuse)
    assert find(doctor._limits(), "shared memory").status == "warning"


def test_an_old_torch_and_a_wrong_result_are_errors(monkeypatch):
    old = SimpleNamespace(__version__="2.9.1", version=SimpleNamespace(cuda=None))
    assert doctor._torch(old).status == "error"
    monkeypatch.setattr(mok.reference, "moe_reference", lambda *args: torch.zeros(5, 16))
    found = doctor._self_test(torch)
    assert found.status == "error"
    assert "its output is not that of plain PyTorch" in found.text


@pytest.mark.skipif(not hasattr(mok._C, "device_memory"), reason="mok was built without kernels")
def test_memory_takes_a_gpus_workspace(capsys):
    assert main(["memory", "--max-tokens", "100", *SIZES, "--device", "cuda"]) == 0
    sizes = {"hidden_size": 64, "intermediate_size": 32, "num_experts": 8, "top_k": 2}
    estimate = mok.memory_estimate(max_tokens=100, **sizes, device="cuda")
    text = capsys.readouterr().out.strip()
    assert text == str(estimate)
    assert "once for all layers of a group, on a GPU" in text


def test_memory_prints_the_estimate(capsys):
    arguments = ["memory", "--max-tokens", "100", *SIZES]
    assert main(arguments) == 0
    sizes = {"hidden_size": 64, "intermediate_size": 32, "num_experts": 8, "top_k": 2}
    estimate = mok.memory_estimate(max_tokens=100, **sizes)
    assert capsys.readouterr().out.strip() == str(estimate)
    assert main([*arguments, "--json", "--dtype", "float32", "--num-ranks", "2"]) == 0
    estimate = mok.memory_estimate(max_tokens=100, **sizes, dtype=torch.float32, num_ranks=2)
    data = json.loads(capsys.readouterr().out)
    assert data["ring_rows"] == estimate.ring_rows
    assert sum(item["bytes"] for item in data["items"]) == sum(i.bytes for i in estimate.items)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--num-ranks", "3"], "num_experts is 8: it must be a multiple of 3 ranks"),
        (["--dtype", "float16"], "dtype is 'float16'"),
    ],
)
def test_memory_refuses_wrong_sizes(capsys, extra, message):
    assert main(["memory", "--max-tokens", "100", *SIZES, *extra]) == 2
    assert message in capsys.readouterr().err
