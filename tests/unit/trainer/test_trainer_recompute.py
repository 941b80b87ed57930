"""Making tensors anew in the backward pass: the same gradients to the bit, less memory, each recipe followed once."""

import gc
import weakref

import torch
import torch.nn.functional as functional
from torch import Tensor

from services.trainer.transformer.activation_memory import Recompute


class Chain:
    """norm -> product -> SwiGLU -> product, as in a layer, and what it counts."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.scale, self.first, self.second = (
            torch.randn(*shape, requires_grad=True) for shape in ((8,), (12, 8), (8, 6))
        )
        self.products = 0

    def norm(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, (8,), self.scale)

    def multiply(self, x: Tensor) -> Tensor:
        self.products += 1
        return x @ self.first.t()

    @staticmethod
    def swiglu(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return functional.silu(gate) * up

    def run(self, x: Tensor, active: bool) -> tuple[Tensor, list["weakref.ref[Tensor]"]]:
        with Recompute(active) as recompute:
            normed = recompute(self.norm, x)
            first = recompute(self.multiply, normed)
            activated = recompute(self.swiglu, first)
            output = x + activated @ self.second.t() + normed.view(-1, 8)  # a second use, in another shape
            return output, [weakref.ref(tensor) for tensor in (normed, first, activated)]


def gradients(active: bool) -> tuple[list[Tensor], Chain]:
    chain = Chain()
    x = torch.linspace(-1, 1, 40).view(5, 8).requires_grad_()
    output, made = chain.run(x, active)
    gc.collect()
    assert [tensor() is None for tensor in made] == [active] * 3
    output.square().sum().backward()
    return [tensor.grad for tensor in (x, chain.scale, chain.first, chain.second)], chain


def test_what_is_made_anew_is_not_kept_and_gives_the_same_gradients_to_the_bit() -> None:
    (ours, chain), (theirs, plain) = gradients(True), gradients(False)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert (chain.products, plain.products) == (2, 1)


def test_a_part_of_an_argument_is_kept() -> None:
    x = torch.randn(4, 6, requires_grad=True)
    factor = torch.randn(4, 2, requires_grad=True)
    with Recompute() as recompute:
        query, value = recompute(lambda t: (t[:, :4] * 2, t[:, 4:]), x)
        output = (value * factor).sum() + query.square().sum()
    output.backward()
    assert torch.equal(factor.grad, x.detach()[:, 4:])
    torch.testing.assert_close(x.grad[:, :4], 8 * x.detach()[:, :4])


def test_without_gradients_nothing_is_remembered() -> None:
    with torch.no_grad(), Recompute() as recompute:
        assert not recompute.active
        recompute(torch.relu, torch.ones(3))
        assert not recompute._made
