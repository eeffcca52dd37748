"""`mok.MoELayer` under activation checkpointing, torch.compile, and both."""

import functools

import pytest
import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import mok
from mok.router import load_balancing_loss
from tests._numerics import assert_bitwise_equal, relative_error

H, I, E, K = 32, 48, 6, 3
FULL = {"shared_intermediate_size": 16, "shared_gate": True, "bias": True}


class Block(torch.nn.Module):
    """A residual block around the layer that returns the load-balancing loss, too."""

    def __init__(self, context_fn=None, checkpointed=False, **settings):
        super().__init__()
        self.norm = torch.nn.LayerNorm(H)
        self.moe = mok.MoELayer(H, I, E, K, **FULL, **settings)
        self.checkpointed = checkpointed
        self.options = {"context_fn": context_fn} if context_fn else {}

    def body(self, x):
        out, routing = self.moe(self.norm(x), return_router_output=True)
        return x + out, load_balancing_loss(routing)

    def forward(self, x):
        if self.checkpointed:
            return checkpoint(self.body, x, use_reentrant=False, **self.options)
        return self.body(x)


def save_what_talks_to_peers(context, op, *args, **kwargs):
    if op.namespace == "mok":
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


selective = functools.partial(create_selective_checkpoint_contexts, save_what_talks_to_peers)


def step(function, module, x):
    module.zero_grad()
    x = x.detach().clone().requires_grad_()
    out, loss = function(x)
    (out.square().sum() + loss).backward()
    grads = {name: parameter.grad.clone() for name, parameter in module.named_parameters()}
    return {"out": out.detach(), "loss": loss.detach(), "dx": x.grad} | grads


def assert_same(results, expected):
    """Inductor may fuse the router's and the norm's FP32 arithmetic differently."""
    assert set(results) == set(expected)
    for name, value in results.items():
        assert relative_error(value, expected[name]) < 2e-5, name


@pytest.fixture
def plain():
    return Block()


def variant(plain, **options):
    block = Block(**options)
    block.load_state_dict(plain.state_dict())
    return block


@pytest.mark.quick
@pytest.mark.parametrize("context_fn", [None, selective])
@pytest.mark.parametrize("save", ["all", "gate_up", "none"])
def test_checkpoint_is_bitwise_the_same(plain, context_fn, save):
    x = torch.randn(2, 9, H)
    block = variant(plain, checkpointed=True, context_fn=context_fn, save=save)
    assert_bitwise_equal(step(block, block, x), step(plain, plain, x))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("dynamic", [None, True])
def test_compile_fullgraph(plain, backend, dynamic):
    torch._dynamo.reset()
    compiled = torch.compile(plain, fullgraph=True, backend=backend, dynamic=dynamic)
    for num_tokens in (17, 9, 1, 0):
        x = torch.randn(num_tokens, H)
        assert_same(step(compiled, plain, x), step(plain, plain, x))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("context_fn", [None, selective])
def test_compile_with_checkpoint(plain, backend, context_fn):
    torch._dynamo.reset()
    block = variant(plain, checkpointed=True, context_fn=context_fn)
    compiled = torch.compile(block, fullgraph=True, backend=backend)
    x = torch.randn(17, H)
    assert_same(step(compiled, block, x), step(plain, plain, x))


def test_compile_with_routing_from_outside_is_bitwise_the_same():
    torch._dynamo.reset()
    layer = mok.MoELayer(H, I, E, K, bias=True, router=None)
    compiled = torch.compile(layer, fullgraph=True)
    for num_tokens in (12, 5):
        x = torch.randn(num_tokens, H).bfloat16()
        routing = {"topk_ids": torch.randint(-1, E, (num_tokens, K))}
        routing["topk_weights"] = torch.rand(num_tokens, K)
        results = []
        for function in (layer, compiled):
            layer.zero_grad()
            leaf = x.clone().requires_grad_()
            out = function(leaf, **routing)
            out.sum().backward()
            grads = {n: p.grad.clone() for n, p in layer.named_parameters()}
            results.append({"out": out.detach(), "dx": leaf.grad} | grads)
        assert_bitwise_equal(*results)


def test_compile_under_autocast(plain):
    torch._dynamo.reset()
    compiled = torch.compile(plain, fullgraph=True, backend="aot_eager")
    x = torch.randn(17, H)
    under_autocast = torch.autocast("cpu", torch.bfloat16)
    results = step(under_autocast(compiled), plain, x)
    expected = step(under_autocast(plain), plain, x)
    for name, value in results.items():
        assert relative_error(value, expected[name]) < 0.01, name


def test_compile_says_what_is_wrong(plain):
    torch._dynamo.reset()
    compiled = torch.compile(plain.moe, backend="aot_eager")
    with pytest.raises(TypeError, match=r"x is torch\.float64"):
        compiled(torch.randn(3, H).double())
