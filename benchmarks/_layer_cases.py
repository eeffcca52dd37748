"""Which whole layer calls are measured, the times they should reach, and what bounds them."""

import dataclasses

import torch

# shape: T, H, I, K of a rank, and E of all ranks
SHAPES = {
    "A": (16384, 2048, 768, 8, 128),
    "B": (8192, 4096, 1536, 8, 128),
    "C": (4096, 7168, 2048, 8, 64),
    "D": (8192, 4096, 14336, 2, 8),
}
TINY_SHAPES = {
    "A": (96, 64, 48, 4, 8),
    "B": (64, 96, 64, 4, 8),
    "C": (48, 128, 64, 4, 4),
    "D": (64, 64, 128, 2, 4),
}
TINY_TOKENS = {4096: 32, 1024: 8, 256: 2}
SMALL = (4096, 1024, 256)

# (shape, T or None, pass): milliseconds set beforehand for two ranks, burst; some sustained too.
TARGETS = {
    ("A", None, "forward"): (2.15, 2.40),
    ("B", None, "forward"): (3.85, 4.40),
    ("C", None, "forward"): (4.45, 5.00),
    ("D", None, "forward"): (8.1, 9.0),
    ("A", 4096, "forward"): (0.70, None),
    ("A", 1024, "forward"): (0.33, None),
    ("A", 256, "forward"): (0.28, None),
    ("B", 4096, "forward"): (2.1, None),
    ("B", 1024, "forward"): (1.0, None),
    ("B", 256, "forward"): (0.85, None),
    ("A", None, "backward"): (4.2, None),
    ("B", None, "backward"): (7.5, None),
    ("C", None, "backward"): (8.6, None),
    ("D", None, "backward"): (16.2, None),
    ("A", None, "forward_backward"): (6.4, None),
    ("B", None, "forward_backward"): (11.5, None),
    ("C", None, "forward_backward"): (13.2, None),
    ("D", None, "forward_backward"): (24.8, None),
    ("A", 4096, "forward_backward"): (2.0, None),
    ("A", 1024, "forward_backward"): (1.1, None),
    ("A", 256, "forward_backward"): (0.95, None),
    ("B", 4096, "forward_backward"): (6.3, None),
    ("B", 1024, "forward_backward"): (3.4, None),
    ("B", 256, "forward_backward"): (3.0, None),
}

# Forward that saves gate and up, over one that does not.
SAVING_COSTS = {"D": 1.07, "others": 1.04}

# What the products of the forward alone reached in the experiment: 12 figures, within 3 %.
MATRIX_TFLOPS = {"burst": 716.0, "burst3": 716.0, "sustained": 625.0}
LINK_GB_S = 335.0  # per direction, measured
HBM_GB_S = 4800.0  # peak
PRODUCTS = {"inference": 1, "forward": 1, "backward": 2, "forward_backward": 3}


@dataclasses.dataclass(frozen=True)
class LayerCase:
    """One layer call, or some passes over it, on every rank."""

    shape: str
    passes: tuple[str, ...]
    """"inference" (no gradients), "forward" (gradients wanted), "backward", "forward_backward"."""
    tokens: int | None = None  # instead of the shape's
    save: str = "gate_up"
    backend: str = "auto"  # or "collective": torch's products and all-to-all
    x_in_heap: bool = False
    routing: str = "random"
    ring: str = "default"  # or "quarter" of a balanced rank's rows
    main_grad: bool = False  # FP32, accumulated into
    memory: bool = False  # measured too
    tiny: bool = False

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """T, H, I, K of a rank, E of all."""
        tokens, *others = (TINY_SHAPES if self.tiny else SHAPES)[self.shape]
        if self.tokens is not None:
            tokens = TINY_TOKENS[self.tokens] if self.tiny else self.tokens
        return tokens, *others

    @property
    def name(self) -> str:
        parts = [self.shape]
        if self.tokens is not None:
            parts.append(f"T={self.tokens}")
        if self.passes == ("inference",):
            parts.append("inference")  # keeps nothing by itself
        elif self.save != "gate_up":
            parts.append(f"save={self.save}")
        if self.backend == "collective":
            parts.append("torch")
        for is_so, text in (
            (self.x_in_heap, "x in heap"),
            (self.routing != "random", self.routing),
            (self.ring != "default", f"{self.ring} ring"),
            (self.main_grad, "FP32 main_grad"),
        ):
            if is_so:
                parts.append(text)
        return " ".join(parts)

    @property
    def ring_rows(self) -> int | None:
        tokens, _, _, top_k, _ = self.sizes
        return max(tokens * top_k // 4, 128) if self.ring == "quarter" else None

    def target(self, what: str, regime: str) -> float | None:
        """Milliseconds, for the plain case: forward nothing saved, backward gate and up."""
        plain = LayerCase(self.shape, (), self.tokens, tiny=self.tiny)
        expected_save = "none" if what == "inference" else "gate_up"
        like_plain = dataclasses.replace(self, passes=(), save="gate_up", memory=False)
        if self.tiny or like_plain != plain or self.save != expected_save:
            return None
        key = (self.shape, self.tokens, "forward" if what == "inference" else what)
        target = TARGETS.get(key, (None, None))[regime == "sustained"]
        if target is not None and what == "forward":
            target *= SAVING_COSTS.get(self.shape, SAVING_COSTS["others"])
        return target


def layer_cases(tiny: bool = False) -> list[LayerCase]:
    """All of them, the most wanted first."""
    inference, training = ("inference",), ("forward", "backward", "forward_backward")
    cases = [LayerCase(shape, inference, save="none") for shape in SHAPES]
    cases += [LayerCase(shape, training, memory=True) for shape in SHAPES]
    for tokens in SMALL:
        for shape in ("A", "B"):
            cases.append(LayerCase(shape, inference, tokens, save="none"))
            cases.append(LayerCase(shape, ("forward_backward",), tokens))
    both = ("forward", "forward_backward")
    cases += [
        LayerCase("A", both, save="none", memory=True),
        LayerCase("A", both, save="all", memory=True),
        LayerCase("A", ("inference", "forward_backward"), x_in_heap=True),
        LayerCase("A", ("inference", "forward_backward"), routing="zipf"),
        LayerCase("A", ("inference", "forward_backward"), ring="quarter"),
        LayerCase("A", ("forward_backward",), main_grad=True),
        LayerCase("A", both, backend="collective"),
        LayerCase("B", both, save="none", memory=True),
        LayerCase("B", both, save="all", memory=True),
        LayerCase("B", ("inference", "forward_backward"), routing="zipf"),
        LayerCase("B", ("inference", "forward_backward"), ring="quarter"),
        LayerCase("B", ("forward_backward",), main_grad=True),
        LayerCase("D", ("forward",), save="none"),
        *(LayerCase(shape, both, backend="collective") for shape in ("B", "C", "D")),
    ]
    return [dataclasses.replace(case, tiny=tiny) for case in cases]


@dataclasses.dataclass(frozen=True)
class Floors:
    """Milliseconds that a pass on the most loaded rank cannot be below."""

    matrix: dict[str, float]  # by regime
    link: float
    weights: float  # read from HBM, gradients written
    load: float  # rows of the most loaded rank over the mean


def floors(case: LayerCase, what: str, ids_by_rank: list[torch.Tensor]) -> Floors:
    """From all ranks' routing. Rows that several experts of a rank need cross the link once."""
    _, hidden, inner, _, num_experts = case.sizes
    num_ranks = len(ids_by_rank)
    local = num_experts // num_ranks
    rows = torch.zeros(num_ranks)
    incoming = torch.zeros(num_ranks)  # rows over the link to this rank, in each of two directions
    returned = torch.zeros(num_ranks)
    for home, ids_TK in enumerate(ids_by_rank):
        owner_TK = torch.where(ids_TK >= 0, ids_TK // local, -1)
        for owner in range(num_ranks):
            here_TK = owner_TK == owner
            rows[owner] += here_TK.sum()
            if owner != home:
                incoming[owner] += here_TK.any(dim=1).sum()
                returned[home] += here_TK.sum()
    products = PRODUCTS[what]
    flops = products * 6.0 * rows.max().item() * hidden * inner
    # Backward brings dout, and x again where it was not kept.
    again = 0 if case.save == "all" else 1
    bring = {"inference": 1, "forward": 1, "backward": 1 + again, "forward_backward": 2 + again}
    home = {"inference": 1, "forward": 1, "backward": 1, "forward_backward": 2}
    link_rows = (bring[what] * incoming + home[what] * returned).max().item()
    weights = 3 * local * hidden * inner * 2
    passes = {"inference": 1, "forward": 1, "backward": 2, "forward_backward": 3}[what]
    return Floors(
        {regime: flops / (rate * 1e9) for regime, rate in MATRIX_TFLOPS.items()},
        link_rows * 2 * hidden / (LINK_GB_S * 1e6),
        passes * weights / (HBM_GB_S * 1e6),
        (rows.max() / rows.mean().clamp(min=1e-9)).item(),
    )
