"""Losses over a vocabulary split between ranks: every rank has the loss and the gradients that one process has."""

import pytest
import torch
import torch.distributed as dist
from lightning_5d.kernels import cross_entropy, linear_cross_entropy

from tests.ranks import run_ranks

VOCAB, HIDDEN, TOKENS = 43, 16, 24
OPTIONS = {"plain": {}, "all": {"label_smoothing": 0.1, "z_loss": 1e-2, "softcap": 4.0}}


def problem(seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator)
    weight = torch.randn(VOCAB, HIDDEN, generator=generator)
    target = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    target[torch.rand(TOKENS, generator=generator) < 0.3] = -100
    return hidden, weight, target


def shard(weight, rank, world):
    """Equal rows a rank, the last padded with rows that must count for nothing."""
    rows = -(-VOCAB // world)
    padded = torch.full((rows * world, weight.shape[1]), 3.0)
    padded[:VOCAB] = weight
    return padded[rank * rows : (rank + 1) * rows].clone()


def whole_case(options):
    hidden, weight, target = problem()
    hidden.requires_grad_(), weight.requires_grad_()
    loss = linear_cross_entropy(hidden, weight, target, **options)
    loss.backward()
    logits = (hidden.detach() @ weight.detach().t()).requires_grad_()
    cross_entropy(logits, target, **options).backward()
    return loss.detach(), hidden.grad, weight.grad, logits.grad


def split_case(options, partial):
    rank, world = dist.get_rank(), dist.get_world_size()
    hidden, weight, target = problem()
    hidden.requires_grad_()
    weight = shard(weight, rank, world).requires_grad_()
    split = {"group": dist.group.WORLD, "vocab_size": VOCAB, **options}
    loss = linear_cross_entropy(hidden, weight, target, partial_hidden_grad=partial, **split)
    loss.backward()
    logits = (hidden.detach() @ weight.detach().t()).requires_grad_()
    other = cross_entropy(logits, target, **split)
    other.backward()
    return loss.detach(), hidden.grad, weight.grad, logits.grad, other.detach()


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_split_equals_whole(world, name):
    loss, dhidden, dweight, dlogits = run_ranks(1, whole_case, OPTIONS[name])[0]
    ranks = run_ranks(world, split_case, OPTIONS[name], False, init=True)
    for rank_loss, rank_dhidden, _, _, given in ranks:
        torch.testing.assert_close(rank_loss, loss)
        torch.testing.assert_close(given, loss)
        torch.testing.assert_close(rank_dhidden, dhidden)
        assert torch.equal(rank_loss, ranks[0][0]) and torch.equal(rank_dhidden, ranks[0][1]), "replicas drift apart"
    gathered = torch.cat([r[2] for r in ranks])
    torch.testing.assert_close(gathered[:VOCAB], dweight)
    assert gathered[VOCAB:].abs().sum() == 0, "padded rows of the vocabulary got a gradient"
    torch.testing.assert_close(torch.cat([r[3] for r in ranks], 1)[:, :VOCAB], dlogits)


def test_partial_gradients_of_hidden_add_up():
    _, dhidden, _, _ = run_ranks(1, whole_case, {})[0]
    ranks = run_ranks(2, split_case, {}, True, init=True)
    torch.testing.assert_close(sum(r[1] for r in ranks), dhidden)
    assert not torch.allclose(ranks[0][1], dhidden), "already summed: a reduce-scatter after it would double the gradient"


def train(steps, fused):
    """A tiny model with a norm before a head split over ranks, trained by SGD; the whole model when no group exists."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    hidden, weight, _ = problem()
    scale, weight = torch.ones(HIDDEN, requires_grad=True), (0.3 * shard(weight, rank, world)).requires_grad_()
    options = {"group": dist.group.WORLD if world > 1 else None, "vocab_size": VOCAB}
    optimizer = torch.optim.SGD([scale, weight], lr=0.2)
    losses = []
    for step in range(steps):
        _, _, target = problem(step)
        x = hidden * scale
        if fused:
            loss = linear_cross_entropy(x, weight, target, **options)
        elif world > 1:
            loss = cross_entropy(_SumGradients.apply(x) @ weight.t(), target, **options)
        else:
            loss = torch.nn.functional.cross_entropy((x @ weight.t())[:, :VOCAB], target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, scale.detach()


class _SumGradients(torch.autograd.Function):
    """What a column-parallel linear layer does to its input."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        dist.all_reduce(grad)
        return grad


@pytest.mark.slow
def test_a_hundred_steps_with_and_without_the_fused_loss_under_tensor_parallelism():
    want, scale = run_ranks(1, train, 100, False)[0]
    for fused in (True, False):
        for losses, rank_scale in run_ranks(2, train, 100, fused, init=True):
            torch.testing.assert_close(losses, want, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(rank_scale, scale, rtol=1e-4, atol=1e-5)
