"""What ptxas says of the kernels it has made (`nvcc -Xptxas -v`), and what it must not say.

problems(report)   one sentence for each spill, stack frame, serialised wgmma and wrong number
                   of registers
"""

import dataclasses
import re
from collections.abc import Iterator

# A kernel that moves registers between its roles (setmaxnreg) must be launched with what the roles
# have together: 384 threads with 168 are 128 with 72 and 256 with 216 (csrc/gemm/sm90_shared.cuh).
# With fewer, the consumers would wait for registers for ever.
EXACT_REGISTERS = {
    r"sm90_bf16_\w+_kernel": 168,
    r"ptx_setmaxnreg_kernel": 168,
}

# Bytes of a frame that are known and harmless: small arrays indexed at run time, by the warps that
# schedule and pull, once a task or a row; in the preparation, once a thread.
STACK_BYTES = {
    r"sm90_bf16_moe_(forward|backward)_kernel": 144,
    r"prepare\w*_kernel": 64,
}

# Bytes of spill stores and loads that are known: a few words of the preparation's, once a thread,
# where 1024 threads leave each 64 registers (16 bytes for sm_90a, 68 for Blackwell).
SPILLED_BYTES = {r"prepare_kernel": 68}

# What costs performance without being an error: wgmma serialised, waits injected (numbers in the
# 7500s), setmaxnreg left out. 7519, a fence that ptxas adds, costs nothing.
LOSS = re.compile(r"\(C75(?!19)\d\d\)|Potential Performance Loss|setmaxnreg.*ignored")


@dataclasses.dataclass
class Kernel:
    """One kernel for one chip; bytes are a thread's."""

    name: str  # without namespace and template arguments
    arch: str
    registers: int = 0
    stack_bytes: int = 0
    spilled_bytes: int = 0


def plain_name(mangled: str) -> str:
    """`_ZN3mok12merge_kernelILi2EEEvPf` -> `merge_kernel`; what is not mangled stays as it is."""
    match = re.match(r"_Z(N\d+mok)?", mangled)
    rest = mangled[match.end() :] if match else mangled
    while length := re.match(r"\d+", rest):
        begin = length.end()
        end = begin + int(length[0])
        name, rest = rest[begin:end], rest[end:]
        if not re.match(r"\d", rest):
            return name
    return rest


def kernels(report: str) -> Iterator[Kernel]:
    """In the report's order. Functions that were not inlined count for the kernel before them."""
    kernel = None
    for line in report.splitlines():
        if match := re.search(r"Compiling entry function '(\S+)' for 'sm_(\w+)'", line):
            if kernel is not None:
                yield kernel
            kernel = Kernel(plain_name(match[1]), match[2])
        elif kernel is None:
            continue
        elif match := re.search(
            r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line
        ):
            frame, stores, loads = map(int, match.groups())
            kernel.stack_bytes += frame
            kernel.spilled_bytes += stores + loads
        elif match := re.search(r"Used (\d+) registers", line):
            kernel.registers = int(match[1])
    if kernel is not None:
        yield kernel


def _limit(table: dict[str, int], name: str) -> int:
    return next((limit for pattern, limit in table.items() if re.fullmatch(pattern, name)), 0)


def problems(report: str) -> list[str]:
    """Sentences; none where all is well."""
    found = [line.strip() for line in report.splitlines() if LOSS.search(line)]
    for kernel in kernels(report):
        who = f"{kernel.name} (sm_{kernel.arch})"
        if kernel.registers == 0:
            found.append(f"{who}: the report has no number of registers")
        known_spills = _limit(SPILLED_BYTES, kernel.name)
        if kernel.spilled_bytes > known_spills:
            found.append(f"{who} spills registers: {kernel.spilled_bytes} bytes stored and loaded")
        known_frame = _limit(STACK_BYTES, kernel.name)
        if kernel.spilled_bytes <= known_spills and kernel.stack_bytes > known_frame:
            found.append(
                f"{who} has a stack frame of {kernel.stack_bytes} bytes, {known_frame} are known: "
                "an array is indexed by something that is not known when it is compiled"
            )
        exact = _limit(EXACT_REGISTERS, kernel.name)
        if exact != 0 and kernel.registers not in (0, exact):
            found.append(f"{who} has {kernel.registers} registers, must have {exact}")
    return found
