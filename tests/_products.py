"""A layer that is a chain of matrix products and nothing else, so that torch's matmul is an oracle
of its bits: one expert, K = 1, weight 1, and gates so large that their sigmoid is exactly 1.

Then h = rn(g u), one rounding of an exact product, and out = y.
"""

from dataclasses import dataclass

import torch

import mok

GATE = 64.0  # of which a sigmoid is 1 in FP32, as of everything above 18


@dataclass(frozen=True)
class ProductChain:
    """x [T, H], gate and up [1, I, H], down [1, H, I], all BF16."""

    x: torch.Tensor
    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor

    def by_matmul(self) -> torch.Tensor:
        """[T, H] by `torch.matmul`: its own order of summation."""
        g, u = self.x @ self.gate[0].T, self.x @ self.up[0].T
        assert float(g.min()) > 18, "a gate is not open"
        h = (g.float() * u.float()).bfloat16()
        return h @ self.down[0].T + 0.0  # the layer's sum starts at +0: never -0

    @torch.no_grad()
    def by_mok(self, first: int = 0, last: int | None = None, **options) -> torch.Tensor:
        """Rows [first, last) of it, alone in their batch, by `mok.moe`."""
        x = self.x[first:last]
        ids = torch.zeros(len(x), 1, dtype=torch.int64, device=x.device)
        weights = torch.ones(len(x), 1, device=x.device)
        return mok.moe(x, ids, weights, self.gate, self.up, self.down, **options)


def make_chain(
    tokens: int, hidden: int, intermediate: int, *, integers: bool = False, device: str = "cpu"
) -> ProductChain:
    """Random values; `integers`: small ones, whose sums are exact in any order."""
    generator = torch.Generator().manual_seed(hidden + intermediate)

    def values(*shape: int, scale: float) -> torch.Tensor:
        if integers:
            sparse = torch.rand(shape, generator=generator) < 0.2
            return torch.randint(-1, 2, shape, generator=generator) * sparse
        return torch.randn(shape, generator=generator) * scale

    x = values(tokens, hidden, scale=1.0)
    gate = values(1, intermediate, hidden, scale=8 * hidden**-0.5)
    x[:, 0], gate[..., 0] = 1.0, GATE
    up = values(1, intermediate, hidden, scale=hidden**-0.5)
    down = values(1, hidden, intermediate, scale=intermediate**-0.5)
    return ProductChain(*(each.to(device, torch.bfloat16) for each in (x, gate, up, down)))
