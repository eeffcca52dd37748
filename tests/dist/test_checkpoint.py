"""Checkpoints across numbers of ranks, and transformers' models with their experts spread."""

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import mok
from tests._harness import run_ranks
from tests._numerics import relative_error
from tests.cpu._hugging_face import make_model, tokens

H, I, E, K = 32, 24, 8, 2


def make_layer(group, seed):
    torch.manual_seed(seed)
    layer = mok.MoELayer(
        *(H, I, E, K), group=group, max_tokens=32, shared_intermediate_size=16, bias=True
    )
    return torch.nn.Sequential(torch.nn.Linear(H, H), layer)


def train(model, optimizer, steps, rank, num_ranks, seed):
    """Steps on this rank's part of the same 16 tokens."""
    x = torch.randn(16, H, generator=torch.Generator().manual_seed(seed))
    for _ in range(steps):
        optimizer.zero_grad()
        model(x.chunk(num_ranks)[rank]).square().mean().backward()
        if num_ranks > 1:
            mok.average_gradients(model)
        optimizer.step()


def save_or_load_job(rank, group, folder, load):
    """Loads what others wrote, takes a step; returns all parameters with global shapes."""
    num_ranks = group.size()
    group = group if num_ranks > 1 else None
    model = mok.shard_experts(make_layer(group, seed=100 + num_ranks if load else 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if not load:
        train(model, optimizer, 2, rank, num_ranks, seed=5)
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    if load:
        dcp.load(states, checkpoint_id=folder)
        set_state_dict(
            model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"]
        )
    else:
        dcp.save(states, checkpoint_id=folder)
    loaded = full_parameters(model)
    train(model, optimizer, 1, rank, num_ranks, seed=6)
    return loaded, full_parameters(model)


def full_parameters(model):
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in model.named_parameters()
    }


@pytest.mark.parametrize("written_by", [2, 1])
def test_saved_by_some_ranks_and_loaded_by_others(written_by, tmp_path):
    saved, trained = run_ranks(written_by, save_or_load_job, tmp_path, False)[0]
    assert saved["1.experts.w_up"].shape == (E, I, H)
    for num_ranks in (1, 2, 4):
        for loaded, trained_on in run_ranks(num_ranks, save_or_load_job, tmp_path, True):
            for name, tensor in saved.items():
                assert torch.equal(loaded[name], tensor), (num_ranks, name)
                # The optimizer's state came along: the next step is the same one.
                assert relative_error(trained_on[name], trained[name]) < 1e-4, (num_ranks, name)


def experts_differ_job(rank, group):
    """After a round trip each rank has its own experts, and not rank 0's."""
    model = mok.shard_experts(make_layer(group, seed=1))
    before = model[1].experts.w_up.to_local().clone()
    model.load_state_dict(model.state_dict())
    assert torch.equal(model[1].experts.w_up.to_local(), before)
    assert model[1].experts.w_up.shape == (E, I, H)
    assert model[1].experts.w_up.allreduce is False
    return before


def test_a_state_dict_round_trip_keeps_each_ranks_experts():
    first, second = run_ranks(2, experts_differ_job)
    assert not torch.equal(first, second)


def mesh_job(rank, group, folder):
    """Two replicas of two expert-parallel ranks: FSDP2 shards what shard_experts has sharded."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "expert"))
    model = make_layer(mesh["expert"].get_group(), seed=1)
    one = make_layer(None, seed=1)
    mok.shard_experts(model, mesh["expert"])
    fully_shard(model[1].experts, mesh=mesh["replica"])
    fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
    assert model[1].experts.w_up.shape == (E, I, H)
    x = torch.randn(16, H, generator=torch.Generator().manual_seed(5))
    model(x.chunk(4)[rank]).square().mean().backward()
    mok.scale_expert_gradients(model)
    one(x).square().mean().backward()
    expected = torch.nn.utils.clip_grad_norm_(one.parameters(), 0.01)
    norm = mok.clip_grad_norm_(model, 0.01)
    assert norm.item() == pytest.approx(expected.item(), rel=1e-5)
    for name, parameter in model.named_parameters():
        grad = parameter.grad.full_tensor()
        assert relative_error(grad, one.get_parameter(name).grad) < 1e-5, name
    state = {"model": model.state_dict()}
    dcp.save(state, checkpoint_id=folder)
    return None


def load_job(rank, group, folder):
    model = make_layer(None, seed=50)
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    for name, parameter in make_layer(None, seed=1).named_parameters():
        assert torch.equal(model.get_parameter(name), parameter), name


def test_experts_sharded_twice(tmp_path):
    run_ranks(4, mesh_job, tmp_path, timeout=120)
    run_ranks(1, load_job, tmp_path)


def wrong_mesh_job(rank, group):
    wide = init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))
    model = make_layer(group, seed=1)
    with pytest.raises(ValueError, match=r"mesh has the ranks .* spread over \[0, 1\]"):
        mok.shard_experts(model, wide)
    with pytest.raises(ValueError, match="mesh has the ranks"):
        mok.shard_experts(model, wide["b"])
    assert mok.shard_experts(make_layer(None, seed=1))[1].experts.w_up.shape == (E, I, H)


def test_a_wrong_mesh_is_named():
    run_ranks(2, wrong_mesh_job)


def swap_job(rank, group, family):
    """A transformers model with its experts spread: the same logits on each rank's own tokens."""
    theirs = make_model(family)
    ours = copy.deepcopy(theirs)
    names = mok.swap_moe_layers(ours, group=group, max_tokens=32)
    layer = ours.get_submodule(names[0])
    assert layer.experts.w_up.shape[0] == 8 // group.size()
    x = tokens(2, 7, seed=rank)
    with torch.no_grad():
        assert relative_error(ours(x).logits, theirs(x).logits) < 1e-5
    gathered = mok.convert.gather_experts(layer)
    back = mok.convert.to_transformers(gathered, family)
    for name, tensor in theirs.get_submodule(names[0]).state_dict().items():
        assert torch.equal(back[name], tensor), name
    mok.shard_experts(ours)
    sharded = mok.convert.gather_experts(layer)
    assert all(torch.equal(sharded[name], tensor) for name, tensor in gathered.items())


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_swapped_models_over_ranks(family):
    run_ranks(2, swap_job, family, timeout=120)
