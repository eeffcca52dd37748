"""Problems for the layer's function, and how its numbers are judged.

Three legs run every `Case`: ours, plain BF16 PyTorch (`moe_reference` in BF16) and the exact one
(`moe_reference` in FP64). Ours may be at most twice as far from the exact one as the plain one is.
"""

from dataclasses import dataclass

import torch

from mok.reference import RankInputs, contract_reference, moe_reference

SMALL_TENSOR = 64  # elements; below, twice the plain error is missed by chance
SMALL_TENSOR_SLACK = 2**-7

WEIGHTS = ("w_gate", "w_up", "w_down")
BIASES = ("b_gate", "b_up", "b_down")
SHARED = ("shared_gate", "shared_up", "shared_down")


def relative_error(value: torch.Tensor, exact: torch.Tensor) -> float:
    """Frobenius norm of the difference over that of `exact` (over 1 where that is 0)."""
    assert value.shape == exact.shape, (value.shape, exact.shape)
    exact = exact.double()
    difference = torch.linalg.vector_norm(value.double() - exact).item()
    norm = torch.linalg.vector_norm(exact).item()
    return difference / norm if norm else difference


def three_way(ours: dict, plain: dict, exact: dict, factor: float = 2.0) -> None:
    """Every tensor of `ours` is at most `factor` times as far from `exact` as `plain` is."""
    assert set(ours) == set(plain) == set(exact), (set(ours), set(plain), set(exact))
    failures = []
    for name, value in ours.items():
        slack = SMALL_TENSOR_SLACK if value.numel() < SMALL_TENSOR else 0.0
        error = relative_error(value, exact[name])
        bound = factor * relative_error(plain[name], exact[name]) + slack
        if not error <= bound:  # a NaN fails
            failures.append(f"{name}: error {error:.3e}, allowed {bound:.3e}")
    assert not failures, "\n".join(failures)


def assert_close(values: dict, exact: dict, tolerance: float) -> None:
    """Every tensor within a relative Frobenius error."""
    assert set(values) == set(exact), (set(values), set(exact))
    errors = {name: relative_error(value, exact[name]) for name, value in values.items()}
    failures = {name: error for name, error in errors.items() if not error <= tolerance}
    assert not failures, failures


def assert_bitwise_equal(first: dict, second: dict) -> None:
    """Same tensors, same bits; names the first differing element of each."""
    assert set(first) == set(second), (set(first), set(second))
    failures = []
    for name, a in first.items():
        b = second[name]
        assert (a.shape, a.dtype) == (b.shape, b.dtype), name
        # NaN equals NaN here; -0.0 does not equal 0.0.
        as_integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
        differing = a.contiguous().view(as_integers) != b.contiguous().view(as_integers)
        if differing.any():
            where = tuple(differing.nonzero()[0].tolist())
            count = int(differing.sum())
            failures.append(f"{name}{list(where)}: {a[where]} and {b[where]} ({count} differ)")
    assert not failures, "\n".join(failures)


@dataclass
class Case:
    """One rank's arguments of `mok.moe`, in values that BF16 holds exactly, and a dout."""

    tensors: dict[str, torch.Tensor]  # what has a gradient, by name; weights are FP32
    topk_ids_TK: torch.Tensor
    dout_TH: torch.Tensor
    settings: dict

    def tokens(self, start: int, stop: int) -> "Case":
        """The same weights with the tokens start..stop-1 only."""
        per_token = ("x_TH", "topk_weights_TK", "shared_weight_T")
        tensors = {n: t[start:stop] if n in per_token else t for n, t in self.tensors.items()}
        ids_TK, dout_TH = self.topk_ids_TK[start:stop], self.dout_TH[start:stop]
        return Case(tensors, ids_TK, dout_TH, self.settings)

    def experts(self, start: int, stop: int) -> "Case":
        """The same tokens with the experts start..stop-1 only: a rank's share of the weights."""
        local = WEIGHTS + BIASES
        tensors = {n: t[start:stop] if n in local else t for n, t in self.tensors.items()}
        return Case(tensors, self.topk_ids_TK, self.dout_TH, self.settings)


def make_case(
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
    swiglu_limit: float | None = None,
    routing: str = "mixed",
    seed: int = 0,
) -> Case:
    """A random case of unit scale.

    `routing`: "uniform" (K different experts); "mixed" (also duplicates, ids -1 and >= E with NaN
    weights, a zero and negative weights); "one" (all routes to expert 0).
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape, scale=1.0):
        return (torch.randn(*shape, generator=generator) * scale).bfloat16().float()

    tensors = {
        "x_TH": normal(tokens, hidden),
        "topk_weights_TK": torch.rand(tokens, top_k, generator=generator) + 0.1,
        "w_gate": normal(num_experts, intermediate, hidden, scale=hidden**-0.5),
        "w_up": normal(num_experts, intermediate, hidden, scale=hidden**-0.5),
        "w_down": normal(num_experts, hidden, intermediate, scale=intermediate**-0.5),
    }
    if bias:
        tensors["b_gate"] = normal(num_experts, intermediate)
        tensors["b_up"] = normal(num_experts, intermediate)
        tensors["b_down"] = normal(num_experts, hidden)
    if shared is not None:
        tensors["shared_gate"] = normal(shared, hidden, scale=hidden**-0.5)
        tensors["shared_up"] = normal(shared, hidden, scale=hidden**-0.5)
        tensors["shared_down"] = normal(hidden, shared, scale=shared**-0.5)
    if shared_gate:
        tensors["shared_weight_T"] = torch.rand(tokens, generator=generator)

    scores = torch.rand(tokens, num_experts, generator=generator)
    ids_TK = torch.topk(scores, top_k).indices
    if routing == "one":
        ids_TK = torch.zeros_like(ids_TK)
    if routing == "mixed":
        shape = (tokens, top_k)
        ids_TK = torch.randint(-1, num_experts + 1, shape, generator=generator)
        is_route_TK = (ids_TK >= 0) & (ids_TK < num_experts)
        signs_TK = torch.randint(0, 2, shape, generator=generator) * 2.0 - 1
        weights_TK = tensors["topk_weights_TK"] * signs_TK
        weights_TK[::3, 0] = 0
        tensors["topk_weights_TK"] = torch.where(is_route_TK, weights_TK, torch.nan)
    settings = {"activation": activation, "swiglu_limit": swiglu_limit}
    return Case(tensors, ids_TK, normal(tokens, hidden), settings)


def run(function, case: Case, dtype: torch.dtype, *, weight_dtype=None, frozen=(), **options):
    """Forward and backward of `mok.moe` or `moe_reference`: {"out": ..., "dx_TH": ..., ...}.

    x and the weights enter in `dtype` (the weights in weight_dtype if given), the routing's and
    the shared expert's weight per token in FP32 or wider. `frozen` names tensors without gradient.
    """
    wide = torch.promote_types(dtype, torch.float32)
    dtypes = {"x_TH": dtype, "topk_weights_TK": wide, "shared_weight_T": wide}
    leaves = {}
    for name, tensor in case.tensors.items():
        leaf = tensor.to(dtypes.get(name, weight_dtype or dtype), copy=True)
        leaves[name] = leaf.requires_grad_(name not in frozen)
    out_TH = call(function, leaves, case.topk_ids_TK, **case.settings, **options)
    out_TH.backward(case.dout_TH.to(out_TH.dtype))
    results = {"out": out_TH.detach()}
    for name, leaf in leaves.items():
        if name not in frozen:
            assert leaf.grad is not None, f"{name} got no gradient"
            results["d" + name] = leaf.grad
    return results


def call(function, tensors: dict, topk_ids_TK: torch.Tensor, **options) -> torch.Tensor:
    """Spells out a call of `mok.moe` or `moe_reference` from tensors by name."""
    shared = tuple(tensors[name] for name in SHARED) if SHARED[0] in tensors else None
    return function(
        tensors["x_TH"],
        topk_ids_TK,
        tensors["topk_weights_TK"],
        *(tensors[name] for name in WEIGHTS),
        **{name: tensors.get(name) for name in BIASES},
        shared=shared,
        shared_weight_T=tensors.get("shared_weight_T"),
        **options,
    )


def run_exact(case: Case, mask_dtype=torch.bfloat16, **options) -> dict:
    """The exact leg. Masks of clamps come from values rounded to BF16, as the contract says."""
    return run(moe_reference, case, torch.float64, mask_dtype=mask_dtype, **options)


def run_plain(case: Case, **options) -> dict:
    """What a careful user's BF16 PyTorch gives."""
    return run(moe_reference, case, torch.bfloat16, **options)


def run_contract(case: Case, **options) -> dict:
    """`contract_reference` of one rank, named as `run` names its results."""
    tensors = case.tensors
    inputs = RankInputs(
        tensors["x_TH"],
        case.topk_ids_TK,
        tensors["topk_weights_TK"],
        case.dout_TH,
        tensors.get("shared_weight_T"),
    )
    shared = tuple(tensors[name] for name in SHARED) if SHARED[0] in tensors else None
    results = contract_reference(
        [inputs],
        *(tensors[name] for name in WEIGHTS),
        **{name: tensors.get(name) for name in BIASES},
        shared=shared,
        **case.settings,
        **options,
    )
    rank, gradients = results.ranks[0], results.gradients
    named = {
        "out": rank.out_TH,
        "dx_TH": rank.dx_TH,
        "dtopk_weights_TK": rank.dtopk_weights_TK,
        "dw_gate": gradients.gate,
        "dw_up": gradients.up,
        "dw_down": gradients.down,
    }
    if "b_gate" in tensors:
        biases = (gradients.b_gate, gradients.b_up, gradients.b_down)
        named |= {"d" + name: gradient for name, gradient in zip(BIASES, biases, strict=True)}
    if shared is not None:
        parts = (rank.dshared.gate, rank.dshared.up, rank.dshared.down)
        named |= {"d" + name: gradient for name, gradient in zip(SHARED, parts, strict=True)}
    if "shared_weight_T" in tensors:
        named["dshared_weight_T"] = rank.dshared_weight_T
    return named
