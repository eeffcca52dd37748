"""Gradient scale, averaging and clipping: a step on several ranks equals the step on one."""

import copy
import io

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

import mok
from tests._harness import run_ranks
from tests._numerics import relative_error

H, I, E, K = 32, 48, 12, 2
INFINITY = float("inf")


class Model(nn.Module):
    """Two MoE layers, the second with a shared expert, around a projection."""

    def __init__(self, group, backend="auto"):
        super().__init__()
        torch.manual_seed(7)
        common = {"group": group, "max_tokens": 64, "backend": backend}
        self.first = mok.MoELayer(H, I, E, K, bias=True, **common)
        self.proj = nn.Linear(H, H)
        self.second = mok.MoELayer(
            *(H, I, E, K),
            shared_intermediate_size=16,
            shared_gate=True,
            router="sigmoid",
            **common,
        )

    def forward(self, x):
        x = x + self.first(x)
        return self.second(self.proj(x))


def data(num_ranks, steps=2, tokens=10):
    generator = torch.Generator().manual_seed(1)
    shape = (steps, num_ranks, tokens, H)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def loss_of(model, x, target):
    return (model(x) - target).square().mean()


def whole_batch_steps(num_ranks, clip, micro_batches=1):
    """What one rank gets from the batches of all: the model after the steps, and the norms."""
    model = Model(None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    norms = []
    xs, targets = data(num_ranks, 2 * micro_batches)
    for step in range(2):
        optimizer.zero_grad()
        for micro in range(micro_batches):
            i = step * micro_batches + micro
            loss = loss_of(model, xs[i].flatten(0, 1), targets[i].flatten(0, 1))
            (loss / micro_batches).backward()
        if clip is not None:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), *clip))
        optimizer.step()
    return model, norms


def assert_same_model(model, whole, rank, num_ranks):
    experts = mok.expert_parameters(model)
    assert len(experts) == (9 if num_ranks > 1 else 0)
    for name, parameter in model.named_parameters():
        expected = whole.get_parameter(name)
        value = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        if name in experts and value.shape != expected.shape:
            expected = expected.chunk(num_ranks)[rank]
        assert relative_error(value.detach(), expected.detach()) < 1e-5, name


def step_job(rank, group, clip, micro_batches, backend="auto"):
    num_ranks = group.size()
    model = Model(group, backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    xs, targets = data(num_ranks, 2 * micro_batches)
    norms = []
    for step in range(2):
        optimizer.zero_grad()
        for micro in range(micro_batches):
            i = step * micro_batches + micro
            (loss_of(model, xs[i, rank], targets[i, rank]) / micro_batches).backward()
        mok.average_gradients(model, group)
        if clip is not None:
            norms.append(mok.clip_grad_norm_(model, *clip))
        optimizer.step()
    whole, expected = whole_batch_steps(num_ranks, clip, micro_batches)
    assert_same_model(model, whole, rank, num_ranks)
    for norm, value in zip(norms, expected, strict=True):
        assert norm.item() == pytest.approx(value.item(), rel=1e-5)
    return [norm.item() for norm in norms]


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("clip", [None, (0.05,), (0.01, INFINITY), (0.5, 1.0)])
def test_a_step_on_several_ranks_equals_the_step_on_one(num_ranks, clip):
    norms = run_ranks(num_ranks, step_job, clip, 1)
    assert all(norm == norms[0] for norm in norms)  # to the bit, or ranks drift apart


def test_the_collective_backend_takes_the_same_step():
    run_ranks(2, step_job, (0.05,), 2, "collective")


def test_gradient_accumulation_over_micro_batches():
    run_ranks(2, step_job, (0.05,), 3)


def bitwise_job(rank, group):
    """With the routing passed in, an expert's update is bitwise that of one rank (R = 2: the scale
    is a power of two)."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(20, H, generator=generator).bfloat16()
    target = torch.randn(20, H, generator=generator)
    ids_TK = torch.randint(E, (20, K), generator=generator)
    weights_TK = torch.rand(20, K, generator=generator)
    updated = []
    for some_group, tokens in ((group, slice(10 * rank, 10 * rank + 10)), (None, slice(20))):
        torch.manual_seed(4)
        layer = mok.MoELayer(H, I, E, K, router=None, bias=True, group=some_group, max_tokens=20)
        out = layer(x[tokens], topk_ids=ids_TK[tokens], topk_weights=weights_TK[tokens])
        (out.float() - target[tokens]).square().mean().backward()
        mok.scale_expert_gradients(layer)
        torch.optim.SGD(layer.parameters(), lr=0.5).step()
        updated.append(layer.state_dict())
    for name, value in updated[0].items():
        assert torch.equal(value, updated[1][name].chunk(2)[rank]), name


def test_experts_are_updated_bitwise_alike():
    run_ranks(2, bitwise_job)


def replicas_job(rank, group, way):
    """Four ranks, two expert-parallel groups of two: experts average over their replicas."""
    expert_group, replica_group = groups_of(rank, group)
    model = Model(expert_group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    wrapped = model
    if way == "ddp":
        mok.exclude_experts_from_ddp(model)
        wrapped = DistributedDataParallel(model)
    xs, targets = data(4)
    for step in range(2):
        optimizer.zero_grad()
        loss_of(wrapped, xs[step, rank], targets[step, rank]).backward()
        if way == "ddp":
            for parameter in mok.expert_parameters(model).values():
                dist.all_reduce(parameter.grad, group=replica_group)
                parameter.grad /= 2
            mok.scale_expert_gradients(model)
        else:
            mok.average_gradients(model, group, replica_group)
        mok.clip_grad_norm_(model, 0.05)
        optimizer.step()
    whole, _ = whole_batch_steps(4, (0.05,))
    assert_same_model(model, whole, rank % 2, 2)


def groups_of(rank, group):
    """(ranks {0, 1} or {2, 3} with all experts, ranks {0, 2} or {1, 3} with the same ones)."""
    expert_groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    replica_groups = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    return expert_groups[rank // 2], replica_groups[rank % 2]


@pytest.mark.parametrize("way", ["average_gradients", "ddp"])
def test_experts_with_replicas(way):
    run_ranks(4, replicas_job, way, timeout=120)


def fsdp_job(rank, group, experts):
    """FSDP2 over all ranks; experts stay out of it, or are sharded over their replicas."""
    num_ranks = group.size()
    expert_group = group
    model = Model(group) if experts == "ignored" else None
    mesh = DeviceMesh("cpu", list(range(num_ranks)))
    if experts == "ignored":
        fully_shard(model, mesh=mesh, ignored_params=set(mok.expert_parameters(model).values()))
    else:
        expert_group, replica_group = groups_of(rank, group)
        model = Model(expert_group)
        replica_mesh = DeviceMesh.from_group(replica_group, "cpu")
        for layer in (model.first, model.second):
            fully_shard(layer.experts, mesh=replica_mesh)
            if experts == "sharded, divided by FSDP":
                # The mean over all ranks' losses: FSDP would divide by the replicas alone.
                layer.experts.set_gradient_divide_factor(num_ranks)
                layer.experts.set_force_sum_reduction_for_comms(True)  # gloo knows no other
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    xs, targets = data(num_ranks)
    for step in range(2):
        optimizer.zero_grad()
        loss_of(model, xs[step, rank], targets[step, rank]).backward()
        if experts != "sharded, divided by FSDP":
            mok.scale_expert_gradients(model)
        norm = mok.clip_grad_norm_(model, 0.05)
        optimizer.step()
    whole, norms = whole_batch_steps(num_ranks, (0.05,))
    assert norm.item() == pytest.approx(norms[-1].item(), rel=1e-5)
    assert_same_model(model, whole, rank % expert_group.size(), expert_group.size())


@pytest.mark.parametrize(
    ("num_ranks", "experts"),
    [(2, "ignored"), (4, "sharded"), (4, "sharded, divided by FSDP")],
)
def test_fsdp2(num_ranks, experts):
    run_ranks(num_ranks, fsdp_job, experts, timeout=120)


def dtensor_job(rank, group):
    """Experts as DTensors over the expert-parallel mesh: gradients are DTensors; same step."""
    num_ranks = group.size()
    model = Model(group)
    mesh = DeviceMesh.from_group(group, "cpu")
    for layer in (model.first, model.second):
        for name, parameter in list(layer.experts.named_parameters()):
            shard = DTensor.from_local(parameter.data, mesh, [Shard(0)])
            layer.experts.register_parameter(name, nn.Parameter(shard))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    xs, targets = data(num_ranks)
    for step in range(2):
        optimizer.zero_grad()
        loss_of(model, xs[step, rank], targets[step, rank]).backward()
        assert isinstance(model.first.experts.w_up.grad, DTensor)
        mok.average_gradients(model, group)
        norm = mok.clip_grad_norm_(model, 0.05)
        optimizer.step()
    whole, norms = whole_batch_steps(num_ranks, (0.05,))
    assert norm.item() == pytest.approx(norms[-1].item(), rel=1e-5)
    assert_same_model(model, whole, rank, num_ranks)


def test_experts_as_dtensors():
    run_ranks(2, dtensor_job)


def marks_job(rank, group):
    layer = mok.MoELayer(H, I, E, K, group=group, shared_intermediate_size=16, device="meta")
    stream = io.BytesIO()
    torch.save(layer, stream)
    stream.seek(0)
    loaded = torch.load(stream, weights_only=False)
    moved = copy.deepcopy(layer).to_empty(device="cpu")
    one = mok.MoELayer(H, I, E, K)
    for each in (layer, copy.deepcopy(layer), loaded, moved, moved.bfloat16()):
        for name, parameter in each.named_parameters():
            assert getattr(parameter, "allreduce", True) == (not name.startswith("experts.")), name
        assert list(mok.expert_parameters(each)) == [
            "experts.w_gate",
            "experts.w_up",
            "experts.w_down",
        ]
    assert mok.expert_parameters(one) == {}
    assert not hasattr(one.experts.w_gate, "allreduce")


def test_expert_parameters_are_marked_and_stay_so():
    run_ranks(2, marks_job)


def clip_details_job(rank, group):
    """No gradient at all; on one rank only; main_grad; not finite."""
    model = Model(group)
    assert mok.clip_grad_norm_(model, 1.0) == 0
    if rank == 0:
        model.first.experts.w_up.grad = torch.full_like(model.first.experts.w_up, 2.0)
    count = model.first.experts.w_up.numel()
    norm = mok.clip_grad_norm_(model, 1.0)
    assert norm.item() == pytest.approx(2 * count**0.5)
    model.zero_grad()
    weight = model.second.experts.w_down
    weight.grad_added_to_main_grad = True
    weight.main_grad = torch.full_like(weight, 3.0)
    weight.grad = torch.zeros_like(weight)
    norm = mok.clip_grad_norm_(model, 1.0)
    assert norm.item() == pytest.approx(3 * (2 * weight.numel()) ** 0.5)
    assert weight.main_grad.norm().item() == pytest.approx(0.5**0.5, rel=1e-4)
    mok.scale_expert_gradients(model)
    assert weight.main_grad.norm().item() == pytest.approx(0.5**0.5 / 2, rel=1e-4)
    model.proj.weight.grad = torch.full_like(model.proj.weight, torch.inf)
    with pytest.raises(RuntimeError, match="norm of order 2"):
        mok.clip_grad_norm_(model, 1.0, error_if_nonfinite=True)
    model.zero_grad()
    mok.average_gradients(model, group)  # a rank without gradients takes part with zeros
    assert (model.proj.weight.grad == 0).all()


def test_clipping_without_gradients_with_main_grad_and_not_finite():
    run_ranks(2, clip_details_job)


def nan_job(rank, group, where, norm_type):
    """NaN on one rank only."""
    model = Model(group)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    if rank == where:
        model.first.experts.w_up.grad[0, 0, 0] = torch.nan
    norm = mok.clip_grad_norm_(model, 1.0, norm_type)
    assert norm.isnan()
    with pytest.raises(RuntimeError, match="is nan"):
        mok.clip_grad_norm_(model, 1.0, norm_type, error_if_nonfinite=True)


@pytest.mark.parametrize("where", [0, 1])
@pytest.mark.parametrize("norm_type", [2.0, INFINITY])
def test_a_nan_of_one_rank_is_in_the_norm_of_all(where, norm_type):
    run_ranks(2, nan_job, where, norm_type)


@pytest.mark.parametrize("norm_type", [0.0, -1.0, -INFINITY, float("nan")])
def test_orders_that_are_no_norm_are_refused(norm_type):
    with pytest.raises(ValueError, match=r"norm_type is .*: it must be positive"):
        mok.clip_grad_norm_(Model(None), 1.0, norm_type)


def test_parameters_instead_of_a_model_are_refused():
    with pytest.raises(TypeError, match="model is a generator: pass the module"):
        mok.clip_grad_norm_(Model(None).parameters(), 1.0)
