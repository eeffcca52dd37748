"""One case of benchmarks/moe_layer.py on one rank."""

import functools
import time
from pathlib import Path

import torch

import mok
from benchmarks import _gpu_timing
from benchmarks._gpu_timing import clocks_of
from benchmarks._layer_cases import LayerCase, floors
from benchmarks._ranks import Ranks
from mok import workspace
from mok.simulation import routing_ids

BF16 = torch.bfloat16
STAGE_CALLS = 5
NOTHING_BESIDE = {"rel_error": None, "stages": {}, "report": None}  # of look_beside
REL_ERROR = 2e-2  # of BF16 layers that sum in other orders, far below any mistake


class Step:
    """The tensors of a case on this rank, and the passes over them."""

    def __init__(self, case: LayerCase, ranks: Ranks):
        self.case, self.ranks = case, ranks
        tokens, hidden, inner, top_k, num_experts = case.sizes
        device = ranks.device
        bf16 = {"dtype": BF16, "device": device}
        generator = torch.Generator(device).manual_seed(1 + ranks.rank)

        def normal(*shape, scale=1.0):
            values = torch.randn(*shape, generator=generator, device=device)
            return (values * scale).to(BF16)

        local = num_experts // ranks.size
        shapes = ((local, inner, hidden), (local, inner, hidden), (local, hidden, inner))
        self.experts = [torch.empty(shape, **bf16) for shape in shapes]
        for weight in self.experts:
            for matrix in weight:
                matrix.copy_(normal(*matrix.shape, scale=matrix.shape[1] ** -0.5))
            weight.requires_grad_()
            if case.main_grad:
                weight.grad_added_to_main_grad = False
                weight.main_grad = torch.zeros(weight.shape, dtype=torch.float32, device=device)
        self.weights = torch.rand(tokens, top_k, generator=generator, device=device)
        self.weights.requires_grad_()
        self.x = normal(tokens, hidden)
        if case.x_in_heap:
            self.forward_of(self.x, grad=False)  # makes the workspace
            in_heap = mok.symm_empty(tokens, hidden, dtype=BF16, group=ranks.group)
            self.x = in_heap.copy_(self.x)
        self.x.requires_grad_()
        self.dout = normal(tokens, hidden)

    @functools.cached_property
    def ids(self) -> torch.Tensor:
        """[T, K] of this rank."""
        tokens, _, _, top_k, num_experts = self.case.sizes
        if self.case.routing == "random":
            generator = torch.Generator().manual_seed(100 + self.ranks.rank)
            scores = torch.rand(tokens, num_experts, generator=generator)
            return scores.topk(top_k).indices.to(self.ranks.device)
        (ids,) = routing_ids(
            self.case.routing,
            num_ranks=1,
            num_tokens=tokens,
            num_experts=num_experts,
            top_k=top_k,
            seed=100 + self.ranks.rank,
        )
        return ids.to(self.ranks.device)

    @property
    def leaves(self) -> list[torch.Tensor]:
        return [self.x, self.weights, *self.experts]

    def forward_of(self, x: torch.Tensor, grad: bool, backend: str | None = None) -> torch.Tensor:
        case, ranks = self.case, self.ranks
        backend = case.backend if backend is None else backend
        if backend == "auto" and ranks.device == "cuda":
            backend = "megakernel"  # where GPUs do not reach each other, no other backend's times
        with torch.set_grad_enabled(grad):
            return mok.moe(
                x,
                self.ids,
                self.weights,
                *self.experts,
                group=ranks.torch_group if backend == "collective" else ranks.group,
                max_tokens=case.sizes[0],
                save=case.save,
                ring_rows=case.ring_rows,
                backend=backend,
            )

    # ---- passes: each makes a call that can be repeated

    def inference(self):
        return lambda: self.forward_of(self.x, grad=False)

    def forward(self):
        return lambda: self.forward_of(self.x, grad=True)

    def clear(self) -> None:
        for leaf in self.leaves:
            leaf.grad = None

    def backward(self):
        out = self.forward_of(self.x, grad=True)

        def call() -> None:
            self.clear()
            out.backward(self.dout, retain_graph=True)

        return call

    def forward_backward(self):
        def call() -> None:
            self.clear()
            self.forward_of(self.x, grad=True).backward(self.dout)

        return call

    def check_bits(self) -> None:
        out = self.forward_of(self.x, grad=False)
        assert torch.isfinite(out).all()
        assert torch.equal(out, self.forward_of(self.x, grad=False))

    def error(self) -> float | None:
        """Relative, of out against torch's products, where they can run."""
        if self.case.backend == "collective" or not self.ranks.can_collect:
            return None
        out = self.forward_of(self.x, grad=False)
        other = self.forward_of(self.x, grad=False, backend="collective")
        error = ((out - other).float().norm() / other.float().norm()).item()
        assert error < REL_ERROR, f"{self.case.name}: {error} from torch's products"
        return error

    def memory(self) -> dict[str, int] | None:
        """Bytes: what a call keeps for its backward, and the peak of a step beyond tensors that are
        there before and after it. Documented: `mok.memory_estimate`."""
        case = self.case
        tokens, hidden, inner, top_k, num_experts = case.sizes
        estimate = mok.memory_estimate(
            max_tokens=tokens,
            hidden_size=hidden,
            intermediate_size=inner,
            num_experts=num_experts,
            top_k=top_k,
            num_ranks=self.ranks.size,
            save=case.save,
            ring_rows=case.ring_rows,
        )
        found = {"documented": estimate.saved_by_policy[case.save]}
        if self.ranks.device == "cpu":
            return found
        self.forward_backward()()
        self.clear()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        out = self.forward_of(self.x, grad=True)
        found["kept"] = torch.cuda.memory_allocated() - before - out.nbytes
        out.backward(self.dout)
        torch.cuda.synchronize()
        grads = sum(leaf.grad.nbytes for leaf in self.leaves if leaf.grad is not None)
        found["peak"] = torch.cuda.max_memory_allocated() - before - grads
        found["workspaces"] = sum(w.memory_bytes for w in workspace.all_open())
        return found


def measure(ranks: Ranks, case: LayerCase) -> dict:
    """This rank's "times" (by pass and clock: seconds of each call), "floors" by pass, "memory"."""
    clocks = _gpu_timing.TINY if case.tiny else _gpu_timing.FULL
    step = Step(case, ranks)
    ids_by_rank = ranks.gather(step.ids.cpu())
    step.check_bits()
    result = {"memory": step.memory() if case.memory else None}
    result["floors"] = {what: floors(case, what, ids_by_rank) for what in case.passes}
    result["times"] = {}
    for what in case.passes:
        step.clear()
        result["times"][what] = clocks_of(
            getattr(step, what)(),
            device=ranks.device,
            clocks=clocks,
            align=ranks.align,
            agree=ranks.agree,
        )
    del step
    _clean_up(ranks)
    return result


def look_beside(ranks: Ranks, case: LayerCase, trace: str | None, stages: bool) -> dict:
    """What is not timed: this rank's "rel_error", "stages" (by direction and stage, seconds of each
    traced call) and "report" of the time line."""
    step = Step(case, ranks)
    result = dict(NOTHING_BESIDE, rel_error=step.error())
    if ranks.device == "cuda" and case.backend != "collective":
        if stages:
            result["stages"] = _stages(_traced(step, case.passes[-1], None, STAGE_CALLS))
        if trace is not None:
            calls = _traced(step, case.passes[-1], Path(trace), 1)
            result["report"] = "\n".join(str(each) for each in calls)
    del step
    _clean_up(ranks)
    return result


def _clean_up(ranks: Ranks) -> None:
    if ranks.device == "cuda":
        torch.cuda.synchronize()
    for opened in workspace.all_open():
        opened.close()
    if ranks.device == "cuda":
        torch.cuda.empty_cache()


def _traced(step: Step, what: str, path: Path | None, repeats: int) -> list:
    """The traced calls of a pass, after a warm-up and a moment of idleness."""
    call = getattr(step, what)()
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    with mok.trace(path, report=False, max_spans=1 << 22) as trace:
        time.sleep(_gpu_timing.FULL.idle)
        step.ranks.align()
        for _ in range(repeats):
            call()
    return trace.calls


def _stages(calls: list) -> dict[str, dict[str, list[float]]]:
    found: dict[str, dict[str, list[float]]] = {}
    for call in calls:
        for stage, microseconds in call.phases.items():
            times = found.setdefault(call.direction, {}).setdefault(stage, [])
            times.append(microseconds * 1e-6)
    return found
