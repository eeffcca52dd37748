"""`mok doctor`: what this copy of mok was built from, what it finds, and what a run would take.

Works without a GPU, without the compiled half and without torch: it then says what is missing.
"""

import dataclasses
import os
import platform
import sys

from mok import _native
from mok._version import __version__

_ENVIRONMENT = {
    "MOK_TIMEOUT_S": "seconds a rank waits for a peer",
    "MOK_ARENA_BYTES": "address space per rank for mok.symm_empty",
    "MOK_CPU_ISA": "instruction set of the CPU backend",
    "MOK_HEAP_BACKING": "how GPU memory is shared",
}
_FEWEST_DESCRIPTORS = 256
_MARKS = {"ok": "ok  ", "info": "    ", "warning": "warn", "error": "FAIL"}


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of the report. `fix` says what to do about a warning or an error."""

    topic: str
    status: str  # "ok", "info", "warning" or "error"
    text: str
    fix: str = ""


def examine() -> list[Finding]:
    """Looks at everything; raises nothing. A few seconds, mostly torch's import."""
    findings = [Finding("mok", "info", f"{__version__} in {os.path.dirname(__file__)}")]
    findings.append(Finding("Python", "ok", f"{platform.python_version()} on {_machine()}"))
    try:
        import torch
    except ImportError as error:
        text = f"cannot be imported: {' '.join(str(error).split())}"
        return [*findings, Finding("torch", "error", text, "install torch >= 2.11")]
    findings.append(_torch(torch))
    findings += _compiled_half()
    if sys.platform == "linux":
        findings += _limits()
    if _native.is_available():
        findings += _cpu()
        findings += _gpus(torch)
        findings += _backends(torch)
        findings.append(_self_test(torch))
    findings += _environment()
    return findings


def exit_code(findings: list[Finding]) -> int:
    """1 if something is wrong, else 0; warnings are not wrong."""
    return int(any(finding.status == "error" for finding in findings))


def report(findings: list[Finding]) -> str:
    """The findings for people to read: one line each, and the fixes below what needs them."""
    width = max(len(finding.topic) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"{_MARKS[finding.status]}  {finding.topic:<{width}}  {finding.text}")
        if finding.fix:
            lines.append(f"{'':{width + 8}}-> {finding.fix}")
    wrong, warned = (sum(f.status == status for f in findings) for status in ("error", "warning"))
    verdict = f"{wrong} thing(s) to mend, marked FAIL" if wrong else "nothing is wrong"
    lines.append(verdict + (f"; {warned} limit(s) to know of, marked warn" if warned else ""))
    return "\n".join(lines)


def _machine() -> str:
    return f"{sys.platform}-{platform.machine()}"


def _torch(torch) -> Finding:
    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    text = f"{torch.__version__}, {cuda}"
    found = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if found < _native.MIN_TORCH:
        return Finding("torch", "error", text, "install torch >= 2.11 and rebuild mok")
    return Finding("torch", "ok", text)


def _compiled_half() -> list[Finding]:
    try:
        _native.load()
    except _native.ExtensionUnavailableError as error:
        return [
            Finding(
                "compiled half",
                "error",
                str(error),
                "pip install --no-build-isolation . in mok's source folder",
            )
        ]
    from mok import _build_info as info

    archs = " ".join(f"sm_{arch}" for arch in info.CUDA_ARCHS)
    cuda = f"CUDA {info.CUDA_VERSION} for {archs}" if info.CUDA_VERSION else "without CUDA"
    text = (
        f"built from {info.COMMIT or 'an unknown commit'} with torch {info.TORCH_VERSION}, {cuda}"
    )
    return [Finding("compiled half", "ok", text)]


def _limits() -> list[Finding]:
    import resource  # Linux

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    findings = []
    if soft < _FEWEST_DESCRIPTORS:
        findings.append(
            Finding(
                "file descriptors",
                "warning",
                f"at most {soft}: groups of many ranks need one per peer and workspace",
                f"ulimit -n {min(hard, 4096) if hard > 0 else 4096}",
            )
        )
    else:
        findings.append(Finding("file descriptors", "ok", f"at most {soft}"))
    findings.append(_shared_memory())
    memory = _memory_limit()
    if memory is not None:
        findings.append(
            Finding("memory limit", "info", f"{memory / 2**30:.1f} GiB for this process")
        )
    address_space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if address_space != resource.RLIM_INFINITY and address_space < 16 << 30:
        findings.append(
            Finding(
                "address space",
                "warning",
                f"limited to {address_space / 2**30:.1f} GiB: each rank maps every peer's window",
                "ulimit -v unlimited, or a smaller MOK_ARENA_BYTES",
            )
        )
    return findings


def _shared_memory() -> Finding:
    """What the windows of several CPU ranks are made of."""
    try:
        descriptor = os.memfd_create("mok-doctor")
    except (AttributeError, OSError) as error:
        return Finding(
            "shared memory",
            "warning",
            f"memfd_create: {error}: CPU ranks on this machine cannot share memory",
            "a Linux kernel >= 3.17 and a sandbox that allows memfd_create",
        )
    try:
        os.posix_fallocate(descriptor, 0, 1 << 20)
    except OSError as error:
        return Finding("shared memory", "warning", f"memfd: {error}", "raise the memory limit")
    finally:
        os.close(descriptor)
    return Finding("shared memory", "ok", "memfd between the processes of this machine")


def _memory_limit() -> int | None:
    """Of the container (cgroup v2 or v1), if there is one."""
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            with open(path) as file:
                text = file.read().strip()
        except OSError:
            continue
        if text.isdecimal() and int(text) < 1 << 60:
            return int(text)
    return None


def _cpu() -> list[Finding]:
    from mok import _C

    wanted = os.environ.get("MOK_CPU_ISA")
    available = [name for name in _C.kernels.available() if name != "emulated"]
    try:
        text = f"{_C.kernels.selected()} is taken; this processor runs {', '.join(available)}"
    except (RuntimeError, ValueError) as error:
        fix = f"unset MOK_CPU_ISA, or choose one of {', '.join(available)}"
        return [Finding("CPU kernels", "error", f"MOK_CPU_ISA is {wanted!r}: {error}", fix)]
    findings = [Finding("CPU kernels", "ok", text)]
    cores = len(os.sched_getaffinity(0))
    threads = os.environ.get("OMP_NUM_THREADS")
    text = f"{cores} usable, OMP_NUM_THREADS {threads or 'not set'}"
    findings.append(Finding("cores", "info", text))
    return findings


def _gpus(torch) -> list[Finding]:
    from mok import _build_info as info
    from mok.workspace import describe_device

    count = torch.cuda.device_count() if torch.version.cuda else 0
    if count == 0:
        reason = describe_device(0).reason if info.CUDA_VERSION else "none is visible to torch"
        return [Finding("GPUs", "info", f"none: {reason.rstrip('.')}")]
    findings = []
    for index in range(count):
        device = describe_device(index)
        major, minor = torch.cuda.get_device_capability(index)
        fits = [arch for arch in info.CUDA_ARCHS if arch.rstrip("af") == f"{major}{minor}"]
        memory = torch.cuda.get_device_properties(index).total_memory / 2**30
        name = device.gpu or torch.cuda.get_device_name(index)
        text = f"{name}, sm_{major}{minor}, {memory:.0f} GiB"
        if info.CUDA_ARCHS and not fits:
            built = " ".join(f"sm_{arch}" for arch in info.CUDA_ARCHS)
            fix = "mok's own kernels need compute capability 9.0; the collective backend runs"
            if (major, minor) == (9, 0):
                fix = "rebuild with MOK_CUDA_ARCHS=90a for mok's own kernels"
            text = f"{text}; mok was built for {built}"
            findings.append(Finding(f"cuda:{index}", "warning", text, fix))
        else:
            findings.append(Finding(f"cuda:{index}", "ok", text))
        if device.backing is None:
            findings.append(
                Finding(f"cuda:{index} heap", "warning", "memory cannot be shared", device.reason)
            )
            continue
        handles = {"fabric": "fabric handles", "posix_fd": "file descriptors"}[device.backing]
        domain = f", NVLink domain {device.nvlink_domain}" if device.nvlink_domain else ""
        text = f"memory is shared between ranks by {handles}: {device.reason}{domain}"
        findings.append(Finding(f"cuda:{index} heap", "ok", text))
        if device.unreachable:
            peers = ", ".join(f"cuda:{peer}" for peer in device.unreachable)
            findings.append(
                Finding(
                    f"cuda:{index} peers",
                    "warning",
                    f"no access to the memory of {peers}",
                    "a group with ranks on both takes the collective backend; for the megakernel "
                    "see what 'nvidia-smi topo -p2p r' says, and NVLink, IOMMU and ACS settings",
                )
            )
        elif count > 1:
            findings.append(Finding(f"cuda:{index} peers", "ok", "reaches all other visible GPUs"))
    return findings


def _backends(torch) -> list[Finding]:
    """What calls with tensors of each device take."""
    from mok import explain

    devices = ["cpu"]
    if torch.version.cuda and torch.cuda.device_count():
        devices.append("cuda")
    findings = []
    for device in devices:
        choice = explain(device=device)
        text = f"one rank takes the {choice.backend} backend, several do where they can map each "
        text += "other's memory, and else the collective backend"
        if choice.backend == "collective":
            text = f"take the collective backend: {choice.reason}"
        findings.append(Finding(f"{device} tensors", "info", text))
    return findings


def _self_test(torch) -> Finding:
    """A step of a tiny layer against plain PyTorch."""
    import mok

    try:
        torch.manual_seed(0)
        layer = mok.MoELayer(16, 8, 4, 2, dtype=torch.float32, backend="cpu")
        x_TH = torch.randn(5, 16, requires_grad=True)
        out, routing = layer(x_TH, return_router_output=True)
        out.sum().backward()
        experts = layer.experts
        expected = mok.reference.moe_reference(
            x_TH,
            routing.topk_ids_TK,
            routing.topk_weights_TK,
            *(experts.w_gate, experts.w_up, experts.w_down),
        )
        if not torch.allclose(out, expected, rtol=1e-4, atol=1e-5):
            raise ArithmeticError("its output is not that of plain PyTorch")
    except Exception as error:
        text = f"a layer on the CPU fails: {type(error).__name__}: {' '.join(str(error).split())}"
        return Finding("self-test", "error", text, "rebuild mok here; if it stays, report it")
    return Finding("self-test", "ok", "a layer's step on the CPU is that of plain PyTorch")


def _environment() -> list[Finding]:
    return [
        Finding(name, "info", f"{os.environ[name]!r}: {meaning}")
        for name, meaning in _ENVIRONMENT.items()
        if os.environ.get(name)
    ]
