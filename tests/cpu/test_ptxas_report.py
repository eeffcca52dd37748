"""tools/ptxas_report.py and tools/cuda_check.py: what the compiler says of a kernel is read, and
what it must not say fails the check."""

import os
import re
from pathlib import Path

import pytest

from tools import cuda_check, native_build, ptxas_report
from tools.native_build import Config, Cuda

TOOLKIT, TOOLKIT_REASON = native_build.find_toolkit(os.environ)

FORWARD = (
    "_ZN3mok28sm90_bf16_moe_forward_kernelILNS_14ActivationFormE2ELb0EEEvNS_16MoeForwardParamsE"
)


def report(name=FORWARD, frame=0, stores=0, loads=0, registers=168, more="") -> str:
    return f"""
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '{name}' for 'sm_90a'
{more}ptxas info    : Function properties for {name}
    {frame} bytes stack frame, {stores} bytes spill stores, {loads} bytes spill loads
ptxas info    : Used {registers} registers, used 16 barriers, {frame} bytes cumulative stack size
ptxas info    : Compile time = 658.199 ms
"""


CALLED = """ptxas info    : Function properties for _ZN3mok6calledEv
    8 bytes stack frame, 4 bytes spill stores, 4 bytes spill loads
"""
SERIALIZED = (
    "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are "
    "serialized due to insufficient register resources for the wgmma pipeline crossing function "
    "boundary in the function '_ZN3mok1fEv'\n"
)
INJECTED = SERIALIZED.replace("C7510", "C7519").replace("Potential Performance Loss: ", "")


@pytest.mark.parametrize(
    "text",
    [
        "",
        report(),
        report(frame=144),
        report("_ZN3mok12plain_kernelEPf", registers=255),
        report("plain", registers=12),
        report(more=INJECTED),
        report() + report("_ZN3mok14publish_kernelENS_13PublishParamsE", registers=49),
    ],
)
def test_nothing_to_complain_of(text):
    assert ptxas_report.problems(text) == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (report(stores=8), "sm90_bf16_moe_forward_kernel (sm_90a) spills registers: 8 bytes"),
        (report(loads=4), "sm90_bf16_moe_forward_kernel (sm_90a) spills registers: 4 bytes"),
        (report(more=CALLED), "sm90_bf16_moe_forward_kernel (sm_90a) spills registers: 8 bytes"),
        (report(frame=152), "stack frame of 152 bytes, 144 are known"),
        (
            report("_ZN3mok12plain_kernelEPf", frame=8),
            "plain_kernel (sm_90a) has a stack frame of 8",
        ),
        (report(registers=160), "has 160 registers, must have 168"),
        (report(registers=0), "has no number of registers"),
        (report(more=SERIALIZED), "(C7510) Potential Performance Loss: wgmma"),
        (
            report() + report("_ZN3mok8a_kernelEv", stores=16),
            "a_kernel (sm_90a) spills registers: 16",
        ),
        ("ptxas warning : setmaxnreg ignored to maintain minimum", "setmaxnreg ignored"),
    ],
)
def test_each_problem_is_one_sentence(text, problem):
    (found,) = ptxas_report.problems(text)
    assert problem in found


def test_names():
    names = {
        FORWARD: "sm90_bf16_moe_forward_kernel",
        "_ZN3mok12merge_kernelILi2EEEvPf": "merge_kernel",
        "_ZN3mok6detail12inner_kernelEv": "inner_kernel",
        "_Z5outerv": "outer",
        "plain": "plain",
    }
    assert {name: ptxas_report.plain_name(name) for name in names} == names


def test_the_tables_name_kernels_that_there_are():
    root = Path(__file__).resolve().parents[2] / "csrc" / "kernels"
    if not root.is_dir():
        pytest.skip("no csrc beside the tests")
    text = "\n".join(path.read_text() for path in sorted(root.glob("*.cuh")))
    tables = (
        ptxas_report.EXACT_REGISTERS,
        ptxas_report.SPILLED_BYTES,
        ptxas_report.STACK_BYTES,
    )
    for pattern in (pattern for table in tables for pattern in table):
        assert re.search(rf"\b{pattern}\(", text), pattern


SPILLING = """
__global__ void __launch_bounds__(1024, 2) spilling_kernel(float* x) {
    float values[64];
#pragma unroll
    for (int i = 0; i < 64; ++i) values[i] = x[i * 1024 + threadIdx.x];
    __syncthreads();
#pragma unroll
    for (int i = 63; i >= 0; --i) x[i * 1024 + threadIdx.x] = values[i] * values[63 - i];
}
"""


@pytest.mark.skipif(TOOLKIT is None, reason=TOOLKIT_REASON)
def test_a_spilling_kernel_fails_the_check_until_it_is_mended(tmp_path, capfd):
    source = tmp_path / "csrc" / "launch" / "spills.cu"
    source.parent.mkdir(parents=True)
    source.write_text(SPILLING)
    config = Config(
        tmp_path, tmp_path / "build", None, Cuda(TOOLKIT.home, TOOLKIT.version, ("90a",))
    )
    for _ in range(2):  # also where nothing is compiled again
        (found,) = cuda_check.check(config)
        assert found.startswith("csrc/launch/spills.cu: spilling_kernel (sm_90a) spills registers")
    source.write_text(
        SPILLING.replace("1024, 2", "1024, 1").replace("64", "16").replace("63", "15")
    )
    assert cuda_check.check(config) == []
    source.write_text("#error no kernel\n")
    with pytest.raises(native_build.BuildError, match="compiling mok failed"):
        cuda_check.check(config)
    assert "no kernel" in capfd.readouterr().out


def test_without_nvcc_the_check_says_so_and_passes(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    cuda_check.main([])
    assert "CUDA sources were not compiled: no nvcc was found" in capsys.readouterr().out


def test_a_fetch_that_fails_is_a_reason(tmp_path, monkeypatch):
    monkeypatch.setattr(cuda_check, "NVCC_PACKAGES", ("no-such-package @ file:///nowhere",))
    cuda, reason = cuda_check.fetch_toolkit(tmp_path / "nvcc")
    assert cuda is None
    assert "nvcc could not be fetched" in reason
