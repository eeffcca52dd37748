"""The forward pass of ranks that this process plays itself on one GPU, kernel by kernel."""

import contextlib
import itertools
from dataclasses import dataclass

import numpy as np
import torch

from mok import _C

PREPARE, KERNEL, MEET, SUM = 1, 2, 4, 8
ALL = PREPARE | KERNEL | MEET | SUM
ACTIVATIONS = ("swiglu", "swiglu_limit", "gpt_oss")
BF16 = torch.bfloat16
UNTOUCHED = 0x7FB3  # a NaN that no kernel writes
SPAN_WORDS = 16  # of int32: csrc/kernels/task_span.h

_names = itertools.count()


@dataclass(frozen=True)
class Layer:
    num_experts: int
    top_k: int
    hidden: int
    intermediate: int
    shared: int = 0
    biases: bool = False
    activation: str = "swiglu"
    save: str = "none"
    ring_rows: int | None = None
    view: str = "separate"
    tuning: tuple[tuple[str, int], ...] = ()

    @property
    def limit(self) -> float:
        return 0.0 if self.activation == "swiglu" else 1.5


class Weights:
    """All experts' parameters, and the shared expert's."""

    def __init__(self, layer: Layer, seed: int = 0):
        generator = torch.Generator("cuda").manual_seed(seed)

        def normal(*shape, scale):
            return (torch.randn(*shape, generator=generator, device="cuda") * scale).to(BF16)

        E, H, I, J = layer.num_experts, layer.hidden, layer.intermediate, layer.shared
        both = torch.empty(E, 2 * I, H, dtype=BF16, device="cuda")
        self.gate, self.up = {
            "separate": (both[:, :I].contiguous(), both[:, I:].contiguous()),
            "packed": (both[:, :I], both[:, I:]),
            "interleaved": (both[:, 0::2], both[:, 1::2]),
        }[layer.view]
        for matrix in (self.gate, self.up):
            for expert in range(E):
                matrix[expert].copy_(normal(I, H, scale=H**-0.5))
        self.down = torch.empty(E, H, I, dtype=BF16, device="cuda")
        for expert in range(E):
            self.down[expert].copy_(normal(H, I, scale=I**-0.5))
        self.biases = None
        if layer.biases:
            self.biases = [normal(E, width, scale=1.0) for width in (I, I, H)]
        self.shared = None
        if J:
            self.shared = (
                normal(1, J, H, scale=H**-0.5),
                normal(1, J, H, scale=H**-0.5),
                normal(1, H, J, scale=J**-0.5),
            )


class Rank:
    """Buffers of one rank, poisoned, and its calls."""

    def __init__(
        self, layer, weights, workspace, place, num_sms, max_tokens, x_TH, ids_TK, weights_TK, spans
    ):
        rank, R = place
        ring_rows = layer.ring_rows or _C.default_ring_rows(
            R, layer.num_experts, layer.top_k, max_tokens, 128
        )
        worst = _C.worst_case_rows(R, layer.num_experts, layer.top_k, max_tokens, 128)
        settings = {
            "num_experts": layer.num_experts,
            "pad": 128,
            "hidden": layer.hidden,
            "intermediate": layer.intermediate,
            "shared_intermediate": layer.shared,
            "ring_rows": ring_rows,
            "save": layer.save,
            "direction": "forward",
            "num_sms": num_sms,
            "row_bytes": 2 * layer.hidden,
            "tuning": dict(layer.tuning),
        }
        self.forward = _C.DeviceForward(workspace, settings, layer.top_k, max_tokens)
        T, H, I, J = len(x_TH), layer.hidden, layer.intermediate, layer.shared
        used_rows, save_rows = min(ring_rows, worst), min(ring_rows, worst)
        self.kept = [x_TH, ids_TK, weights_TK, weights]

        def buffer(rows, columns):
            tensor = torch.full((rows, columns), UNTOUCHED, dtype=torch.int16, device="cuda")
            self.kept.append(tensor)
            return tensor.view(BF16)

        own = slice(rank * layer.num_experts // R, (rank + 1) * layer.num_experts // R)
        self.out = buffer(T, H)
        self.home_rows = buffer(T * layer.top_k, H) if R == 1 else None
        self.saved_gate = buffer(save_rows, I) if layer.save != "none" else None
        self.saved_up = buffer(save_rows, I) if layer.save != "none" else None
        self.saved_x = buffer(save_rows, H) if layer.save == "all" else None
        tensors = {
            "ring_x": buffer(ring_rows if ring_rows > used_rows else used_rows, H),
            "ring_hidden": buffer(max(ring_rows, used_rows), I),
            "out": self.out,
            "home_rows": self.home_rows,
            "saved_gate": self.saved_gate,
            "saved_up": self.saved_up,
            "saved_x": self.saved_x,
            "x": x_TH,
            "topk_ids": ids_TK,
            "topk_weights": weights_TK,
        }
        if J:
            tensors["shared_hidden"], tensors["shared_rows"] = buffer(T, J), buffer(T, H)
            if layer.save != "none":
                tensors["saved_shared_gate"], tensors["saved_shared_up"] = (
                    buffer(T, J),
                    buffer(T, J),
                )
        self.task_spans = self.pull_spans = None
        if spans:
            self.task_spans = torch.full((spans, SPAN_WORDS), -1, dtype=torch.int32, device="cuda")
            self.pull_spans = torch.full((spans, SPAN_WORDS), -1, dtype=torch.int32, device="cuda")
            tensors["task_spans"], tensors["pull_spans"] = self.task_spans, self.pull_spans
        self.arguments = {
            name: tensor.data_ptr()
            for name, tensor in tensors.items()
            if tensor is not None and tensor.numel() > 0
        }
        self.arguments |= {
            "num_tokens": T,
            "ids_are_int64": int(ids_TK.dtype == torch.int64),
            "x_stride": 2 * H,
            "save_rows": save_rows,
            "activation": ACTIVATIONS.index(layer.activation),
            "limit_millis": round(1000 * layer.limit),
            "num_task_spans": spans,
            "num_pull_spans": spans,
        }

        def strides(tensor):
            return (tensor.data_ptr(), *(2 * stride for stride in tensor.stride()[:-1]))

        names = ("gate", "up", "down")
        for name, matrix in zip(names, (weights.gate, weights.up, weights.down), strict=True):
            self.arguments[f"w_{name}"] = strides(matrix[own])
        for name, bias in zip(names, weights.biases or (), strict=False):
            self.arguments[f"b_{name}"] = strides(bias[own])
        for name, matrix in zip(names, weights.shared or (), strict=False):
            self.arguments[f"shared_{name}"] = strides(matrix)

    def launch(self, stages: int = ALL) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        self.forward.launch(self.arguments, stages, stream)


class Ranks:
    """One layer's ranks over a global batch that is split contiguously."""

    def __init__(self, layer, weights, tokens, x_TH, ids_TK, weights_TK, spans=0):
        multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
        num_sms = multiprocessors // len(tokens)
        max_tokens = max(*tokens, 1)
        self.workspaces = _C.virtual_workspaces(
            f"forward-{next(_names)}",
            len(tokens),
            max_tokens,
            layer.hidden,
            layer.top_k,
            True,
            1 << 20,
            0,
            multiprocessors,
        )
        for workspace in self.workspaces:
            workspace.set_timeout(20.0)
        bounds = [0, *np.cumsum(tokens).tolist()]
        self.ranks = [
            Rank(
                layer,
                weights,
                workspace,
                (r, len(tokens)),
                num_sms,
                max_tokens,
                *(
                    tensor[bounds[r] : bounds[r + 1]].contiguous()
                    for tensor in (x_TH, ids_TK, weights_TK)
                ),
                spans,
            )
            for r, workspace in enumerate(self.workspaces)
        ]
        self.streams = [torch.cuda.Stream() for _ in tokens]

    def launch(self, stages: int = ALL) -> None:
        """All ranks side by side, between the current stream's earlier and later work."""
        current = torch.cuda.current_stream()
        for rank, stream in zip(self.ranks, self.streams, strict=True):
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                rank.launch(stages)
        for stream in self.streams:
            current.wait_stream(stream)

    def out(self) -> torch.Tensor:
        """Runs a call; [T of all ranks, H]."""
        for rank in self.ranks:
            rank.out.fill_(torch.nan)
        self.launch()
        torch.cuda.synchronize()
        for workspace in self.workspaces:
            workspace.check()
        return torch.cat([rank.out for rank in self.ranks])

    def close(self) -> None:
        torch.cuda.synchronize()
        for workspace in self.workspaces:
            workspace.close(0)


@contextlib.contextmanager
def ranks_of(*arguments, **options):
    ranks = Ranks(*arguments, **options)
    try:
        yield ranks
    finally:
        ranks.close()


def make_batch(layer: Layer, tokens: int, *, seed=0, none_share=0.1, skew=0.0):
    """x, ids and weights of a global batch; routes that are none have a NaN weight."""
    generator = torch.Generator("cuda").manual_seed(seed + 1)
    x_TH = torch.randn(tokens, layer.hidden, generator=generator, device="cuda").to(BF16)
    scores_TE = torch.rand(tokens, layer.num_experts, generator=generator, device="cuda")
    if skew:
        scores_TE[:, 0] += skew
    ids_TK = scores_TE.topk(layer.top_k, dim=1).indices
    weights_TK = torch.rand(tokens, layer.top_k, generator=generator, device="cuda")
    none_TK = torch.rand(tokens, layer.top_k, generator=generator, device="cuda") < none_share
    ids_TK[none_TK] = -1
    weights_TK[none_TK] = torch.nan
    return x_TH, ids_TK, weights_TK


def reference(layer: Layer, weights: Weights, x_TH, ids_TK, weights_TK) -> torch.Tensor:
    """The layer in FP64 with the contract's rounding points."""

    def rounded(value):
        return value.to(BF16).double()

    def activate(g, u):
        if layer.activation != "swiglu":
            g, u = g.clamp(max=layer.limit), u.clamp(-layer.limit, layer.limit)
        if layer.activation == "gpt_oss":
            return g * torch.sigmoid(1.702 * g) * (u + 1)
        return g * torch.sigmoid(g) * u

    def expert(x, gate, up, down, biases):
        b_gate, b_up, b_down = (0.0, 0.0, 0.0) if biases is None else [b.double() for b in biases]
        g = rounded(x @ gate.double().T + b_gate)
        u = rounded(x @ up.double().T + b_up)
        return rounded(rounded(activate(g, u)) @ down.double().T + b_down)

    x = x_TH.double()
    out = torch.zeros_like(x)
    if weights.shared is not None:
        out += expert(x, *(w[0] for w in weights.shared), None)
    for index in range(layer.num_experts):
        token, choice = (ids_TK == index).nonzero(as_tuple=True)
        if len(token) == 0:
            continue
        biases = None if weights.biases is None else [b[index] for b in weights.biases]
        y = expert(x[token], weights.gate[index], weights.up[index], weights.down[index], biases)
        out.index_add_(0, token, y * weights_TK[token, choice].double()[:, None])
    return out


def relative_error(out: torch.Tensor, exact: torch.Tensor) -> float:
    if exact.numel() == 0 or exact.norm() == 0:
        return float(out.double().norm())
    return float((out.double() - exact).norm() / exact.norm())
