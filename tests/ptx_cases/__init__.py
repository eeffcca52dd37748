"""What the test kernels of csrc/ptx must give, for tests/gpu and tests/emu alike.

The same kernels run on the hardware and in the emulator (csrc/emu) and have to pass the same cases:
that ties the emulator's instructions to the real ones.
"""

from tests.ptx_cases import block, copies, grid, wgmma
from tests.ptx_cases._runner import Case, Runner, WaitRecord, bf16_bits, bf16_values, filled

CASES: tuple[Case, ...] = (*block.CASES, *copies.CASES, *grid.CASES, *wgmma.CASES)

__all__ = ["CASES", "Case", "Runner", "WaitRecord", "bf16_bits", "bf16_values", "filled"]
