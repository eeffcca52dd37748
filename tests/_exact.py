"""Cases whose sums are exact in FP32: two implementations of the contract agree bit for bit.

All values are small integers (halves in places), so no order of accumulation changes a sum, and
every sigmoid is exactly 0, 1/2 or 1: a gate is 0, about +384 or about -384. What is left are the
contract's rounding points, and each of them has something to round: g is an odd integer above 256,
and so are u or a in places; p, h', dg, du, y and dx have more than 8 significant bits.
"""

import torch

from tests._numerics import Case, run_contract

# Clamps that cut, and are met exactly by, some of the gates (about 384) and ups (about 400).
LIMIT = 400.0


def make_exact_case(
    tokens: int,
    top_k: int,
    num_experts: int,
    hidden: int,
    intermediate: int,
    *,
    shared: int | None = None,
    shared_gate: bool = False,
    bias: bool = False,
    activation: str = "swiglu",
    clamped: bool = False,
    wide: str = "up",
    seed: int = 0,
) -> Case:
    """Integers as above; ids -1 and >= E with NaN weights, duplicates, zero and negative weights.

    `wide`: either some ups are about 400 ("up"), or dout is and with it a = dout Wd and w dout
    ("dout"); sums with both would need more than 24 bits.
    """
    generator = torch.Generator().manual_seed(seed)

    def integers(low, high, *shape):
        return torch.randint(low, high + 1, shape, generator=generator).float()

    def sparse(*shape):
        """-1, 0 and 1, a seventh of them not 0."""
        return integers(-1, 1, *shape) * (torch.rand(shape, generator=generator) < 0.2)

    def choice(values, *shape):
        return torch.tensor(values)[torch.randint(len(values), shape, generator=generator)]

    def gate(*shape):
        """The first column, times x's 16, decides: on, off, or a row of zeros."""
        weight = sparse(*shape)
        kind = choice([24.0, 24.0, -24.0, 0.0], *shape[:-1])
        weight[..., 0] = kind
        return weight * (kind != 0)[..., None]

    def up(*shape):
        weight = sparse(*shape)
        if wide == "up":
            weight[..., 0] = choice([0.0] * 6 + [25.0, -25.0], *shape[:-1])
        return weight

    def down(*shape):
        weight = sparse(*shape)
        if wide == "dout":
            weight[..., 0, :] = choice([0.0, 12.0, 12.0], *shape[:-2], shape[-1])
        return weight

    x_TH = integers(-2, 2, tokens, hidden)
    x_TH[:, 0] = 16
    ids_TK = torch.randint(-1, num_experts + 1, (tokens, top_k), generator=generator)
    is_route_TK = (ids_TK >= 0) & (ids_TK < num_experts)
    weights_TK = choice([-3.0, -1.0, 0.0, 0.5, 1.0, 2.0, 5.0], tokens, top_k)
    tensors = {
        "x_TH": x_TH,
        "topk_weights_TK": torch.where(is_route_TK, weights_TK, torch.nan),
        "w_gate": gate(num_experts, intermediate, hidden),
        "w_up": up(num_experts, intermediate, hidden),
        "w_down": down(num_experts, hidden, intermediate),
    }
    if bias:
        # A column of zero gates stays one.
        is_on_EI = tensors["w_gate"][..., 0] != 0
        tensors["b_gate"] = integers(-9, 9, num_experts, intermediate) * is_on_EI
        tensors["b_up"] = integers(-9, 9, num_experts, intermediate)
        tensors["b_down"] = integers(-99, 99, num_experts, hidden)
    if shared is not None:
        tensors["shared_gate"] = gate(shared, hidden)
        tensors["shared_up"] = up(shared, hidden)
        tensors["shared_down"] = down(hidden, shared)
    if shared_gate:
        tensors["shared_weight_T"] = choice([-1.0, 0.0, 0.25, 1.0, 3.0], tokens)
    dout_TH = integers(-2, 2, tokens, hidden)
    if wide == "dout":
        dout_TH[:, 0] = 32
        dout_TH[:, 1] = integers(-100, 100, tokens)
    limit = LIMIT if clamped or activation == "gpt_oss" else None
    settings = {"activation": activation, "swiglu_limit": limit}
    return Case(tensors, ids_TK, dout_TH, settings)


def expected_bits(case: Case, weight_dtype: torch.dtype) -> dict:
    """What the contract says `run(mok.moe, case, torch.bfloat16, weight_dtype=...)` returns."""
    dtypes = {"out": torch.bfloat16, "dx_TH": torch.bfloat16}
    dtypes |= dict.fromkeys(("dtopk_weights_TK", "dshared_weight_T"), torch.float32)
    results = run_contract(case)
    return {name: value.to(dtypes.get(name, weight_dtype)) for name, value in results.items()}


def without_negative_zeros(results: dict) -> dict:
    """A sum of zeros may be -0 in a matrix product that starts with its first term."""
    return {name: value + 0.0 for name, value in results.items()}
