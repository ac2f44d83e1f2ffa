"""Every function and module of PyTorch's front door under every transform, beside plain loops."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from sampling import slow
from torch import Tensor
from torch.autograd import forward_ad, functional
from torch.func import functionalize, grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap
from torch_checks import close, tensors_of
from torch_doors import DOORS, door

Function = Callable[..., Any]
Given = tuple[Tensor, ...]


@pytest.fixture(autouse=True)
def _without_warnings() -> Iterator[None]:
    with warnings.catch_warnings():  # of PyTorch, about itself
        warnings.simplefilter("ignore")
        yield


# -- What transforms are made of -------------------------------------------------------------------


def drawn(tensors: Any, *lead: int) -> Given:
    """Return random tensors of some shapes, always the same ones."""
    rng = torch.Generator().manual_seed(3)
    shapes = [(*lead, *each.shape) for each in tensors]
    return tuple(torch.randn(each, dtype=torch.float64, generator=rng) for each in shapes)


def leaves_of(given: Given) -> Given:
    return tuple(each.detach().clone().requires_grad_() for each in given)


def total(tensors: Any) -> Tensor:
    """Return a number that depends on all tensors, with derivatives of any order."""
    terms = [each.sin().sum() * (k + 1) for k, each in enumerate(tensors_of(tensors))]
    return torch.stack(terms).sum()


def scalar(f: Function) -> Function:
    return lambda *given: total(f(*given))


def gradients(results: Any, leaves: Given, **options: Any) -> Given:
    """Return gradients of a number, or of results in random directions; zeros for None."""
    if isinstance(results, Tensor) and results.dim() == 0:
        return torch.autograd.grad(results, leaves, materialize_grads=True, **options)
    lead = (3,) if options.get("is_grads_batched") else ()
    above = drawn(results, *lead)
    return torch.autograd.grad(tuple(results), leaves, above, allow_unused=True, **options)


def by_order(f: Function, given: Given, order: int, **options: Any) -> Given:
    """Return gradients of gradients, the last of which are computed with options."""
    leaves = leaves_of(given)
    found: Any = total(f(*leaves))
    for _ in range(order - 1):
        found = total(gradients(found, leaves, create_graph=True))
    if options:
        found = gradients(found, leaves, create_graph=True)
    return gradients(found, leaves, **options)


def behind(derivative: Function, given: Given) -> Given:
    """Return gradients of a derivative that has a graph."""
    leaves = leaves_of(given)
    return gradients(total(derivative(leaves)), leaves)


def batched(f: Function, given: Given, **options: Any) -> Given:
    leaves = leaves_of(given)
    return gradients(f(*leaves), leaves, is_grads_batched=True, **options)


def many(given: Given, axis: int = 0) -> Given:
    """Return three of each tensor, along an axis."""
    rows = (0.3 * one + each for one, each in zip(drawn(given, 3), given, strict=True))
    return tuple(each.movedim(0, axis) for each in rows)


def dual(f: Function, given: Given, places: range | None = None) -> Any:
    """Return values and derivatives, in forward mode, in the tensors at some places."""
    with forward_ad.dual_level():
        pairs = zip(given, drawn(given), strict=True)
        some = [
            forward_ad.make_dual(*pair) if places is None or k in places else pair[0]
            for k, pair in enumerate(pairs)
        ]
        found = [forward_ad.unpack_dual(each) for each in tensors_of(f(*some))]
        # What does not depend on these tensors has no tangent.
        return [
            torch.zeros_like(value) if part is None else part.clone()
            for value, tangent in found
            for part in (value, tangent)
        ]


def backward_of_dual(f: Function, given: Given) -> Given:
    leaves = leaves_of(given)
    with forward_ad.dual_level():
        some = [forward_ad.make_dual(*pair) for pair in zip(leaves, drawn(leaves), strict=True)]
        slopes = [forward_ad.unpack_dual(each).tangent for each in tensors_of(f(*some))]
        return gradients(total(slopes), leaves)


def of_a_graph(f: Function, given: Given, transform: Function, **options: Any) -> Any:
    """Return what a transform makes of the backward pass of a graph from outside of it."""
    leaves = leaves_of(given)
    results = f(*leaves)

    def pull(*above: Tensor) -> Any:
        return torch.autograd.grad(
            results, leaves, above, retain_graph=True, materialize_grads=True, **options
        )

    return transform(pull, results)


def nested(f: Function, given: Given, strategy: str) -> Any:
    inner = partial(functional.jacobian, scalar(f), vectorize=True, create_graph=True)
    outer = {"vectorize": True, "strategy": strategy}
    return functional.jacobian(lambda *each: inner(each), given, **outer)


def every(given: Given) -> tuple[int, ...]:
    return tuple(range(len(given)))


def slopes(f: Function, given: Given) -> Function:
    return grad(scalar(f), every(given))


JACOBIANS: dict[str, Function] = {
    "jacrev": lambda f, g: jacrev(f, every(g))(*g),
    "jacfwd": lambda f, g: jacfwd(f, every(g))(*g),
    "hessian": lambda f, g: hessian(scalar(f), every(g))(*g),
    "jacrev of jacrev": lambda f, g: jacrev(jacrev(scalar(f), every(g)), every(g))(*g),
    "jacrev of jacfwd": lambda f, g: jacrev(jacfwd(scalar(f), every(g)), every(g))(*g),
    "jacfwd of jacfwd": lambda f, g: jacfwd(jacfwd(scalar(f), every(g)), every(g))(*g),
    "jacobian": lambda f, g: functional.jacobian(f, g),
    "jacobian, vectorized": lambda f, g: functional.jacobian(f, g, vectorize=True),
    "jacobian, forward": lambda f, g: functional.jacobian(
        f, g, vectorize=True, strategy="forward-mode"
    ),
    "hessian by rows": lambda f, g: functional.hessian(scalar(f), g),
    "hessian, vectorized": lambda f, g: functional.hessian(scalar(f), g, vectorize=True),
    "hessian, forward": lambda f, g: functional.hessian(
        scalar(f), g, vectorize=True, outer_jacobian_strategy="forward-mode"
    ),
    **{
        f"backward of {name}, vectorize={flag}": lambda f, g, name=name, flag=flag: behind(
            partial(
                getattr(functional, name),
                f if name == "jacobian" else scalar(f),
                create_graph=True,
                vectorize=flag,
            ),
            g,
        )
        for name in ("jacobian", "hessian")
        for flag in (False, True)
    },
    "jacobian of jacobian": lambda f, g: nested(f, g, "reverse-mode"),
    "jacobian of jacobian, forward": lambda f, g: nested(f, g, "forward-mode"),
}

PRODUCTS: dict[str, Function] = {
    "vjp": lambda f, g: (lambda out, pull: pull(drawn(out)))(*vjp(f, *g)),
    "jvp": lambda f, g: jvp(f, g, drawn(g)),
    "jvp in the first": lambda f, g: jvp(lambda x: f(x, *g[1:]), g[:1], drawn(g[:1])),
    "jvp in the last": lambda f, g: jvp(lambda x: f(*g[:-1], x), g[-1:], drawn(g[-1:])),
    "linearize": lambda f, g: (lambda out, push: [out, push(*drawn(g))])(*linearize(f, *g)),
    "functionalize": lambda f, g: functionalize(f)(*g),
    "jvp of grad": lambda f, g: jvp(slopes(f, g), g, drawn(g)),
    "vjp of grad": lambda f, g: vjp(slopes(f, g), *g)[1](drawn(g)),
    "grad of jvp": lambda f, g: grad(lambda *each: total(jvp(f, each, drawn(g))[1]), every(g))(*g),
    "backward of grad": lambda f, g: behind(lambda leaves: slopes(f, g)(*leaves), g),
    "functional.jvp": lambda f, g: functional.jvp(f, g, drawn(g)),
    "functional.vjp": lambda f, g: functional.vjp(scalar(f), g),
    "functional.hvp": lambda f, g: functional.hvp(scalar(f), g, drawn(g)),
    "functional.vhp": lambda f, g: functional.vhp(scalar(f), g, drawn(g)),
    "forward mode": dual,
    "forward mode in the first": lambda f, g: dual(f, g, range(1)),
    "forward mode in the last": lambda f, g: dual(f, g, range(len(g) - 1, len(g))),
    "forward mode of leaves": lambda f, g: dual(f, leaves_of(g)),
    "forward mode of a backward pass": lambda f, g: dual(
        lambda *each: torch.autograd.grad(total(f(*each)), each, create_graph=True), leaves_of(g)
    ),
    "backward of forward mode": backward_of_dual,
    "order 2": lambda f, g: by_order(f, g, 2),
    "order 3": lambda f, g: by_order(f, g, 3),
    "forward mode after many calls": lambda f, g: [
        *[f(*leaves_of(g)) for _ in range(7)][-1],
        *dual(f, g),
    ],
}

MAPS: dict[str, Function] = {
    "batches of gradients": lambda f, g: batched(f, g),
    "batches with a graph": lambda f, g: batched(f, g, create_graph=True),
    "backward of batches": lambda f, g: behind(
        lambda leaves: torch.autograd.grad(
            f(*leaves),
            leaves,
            drawn(f(*leaves), 3),
            is_grads_batched=True,
            create_graph=True,
            materialize_grads=True,
        ),
        g,
    ),
    "batches of order 2": lambda f, g: by_order(f, g, 1, is_grads_batched=True),
    "batches of order 3": lambda f, g: by_order(f, g, 2, is_grads_batched=True),
    "vmap": lambda f, g: vmap(f)(*many(g)),
    "vmap of last axes": lambda f, g: vmap(f, -1, -1)(*many(g, -1)),
    "vmap in chunks": lambda f, g: vmap(f, chunk_size=2)(*many(g)),
    "vmap of the first": lambda f, g: vmap(lambda x: f(x, *g[1:]))(many(g)[0]),
    "vmap of the last": lambda f, g: vmap(lambda x: f(*g[:-1], x))(many(g)[-1]),
    "vmap of all but the first": lambda f, g: vmap(lambda *each: f(g[0], *each))(*many(g)[1:]),
    "vmap of vmap": lambda f, g: vmap(vmap(f))(*(each[None] for each in many(g))),
    "vmap of grad": lambda f, g: vmap(slopes(f, g))(*many(g)),
    "vmap of grad in samples": lambda f, g: vmap(lambda x: slopes(f, g)(x, *g[1:]))(many(g)[0]),
    "vmap of jvp": lambda f, g: (lambda v: vmap(lambda *each: jvp(f, each, v))(*many(g)))(drawn(g)),
    "vmap of jacfwd": lambda f, g: vmap(jacfwd(f, every(g)))(*many(g)),
    "backward of vmap": lambda f, g: behind(lambda leaves: vmap(f)(*leaves), many(g)),
    "order 2 of vmap": lambda f, g: by_order(vmap(f), many(g), 2),
    **{
        f"{name} of a backward pass, {flag}": lambda f, g, how=how, flag=flag: of_a_graph(
            f, g, how, create_graph=flag
        )
        for name, how in (
            ("vmap", lambda pull, out: vmap(pull)(*drawn(out, 3))),
            ("jvp", lambda pull, out: jvp(pull, drawn(out), drawn(out))),
            ("forward mode", lambda pull, out: dual(pull, drawn(out))),
        )
        for flag in (False, True)
    },
}

TRANSFORMS = JACOBIANS | PRODUCTS | MAPS


def is_refused(name: str, transform: str) -> bool:
    """Return whether a call is refused: a trace reads no lengths of a packed sequence."""
    return transform == "linearize" and name.startswith("packed")


def cases() -> Iterator[Any]:
    """Yield all doors with all transforms; a sample has few of both, but each, the rest a third."""
    for k, name in enumerate(DOORS):
        for n, transform in enumerate(TRANSFORMS):
            turn = (7 * k + n) % len(DOORS)
            mark = pytest.mark.slow if turn % 3 == 0 else pytest.mark.release
            yield pytest.param(name, transform, marks=[mark] * (turn != 0))


@pytest.mark.parametrize(("name", "transform"), list(cases()))
def test_transforms(name: str, transform: str) -> None:
    one, run = door(name), TRANSFORMS[transform]
    if is_refused(name, transform):
        with pytest.raises(RuntimeError, match="value out of a tracing tensor"):
            run(one.ours, one.given)
        return
    found = [tensors_of(run(f, one.given)) for f in (one.ours, one.plain)]
    zeros = torch.zeros((), dtype=torch.float64)
    for ours, theirs in zip(*found, strict=True):
        # What a result does not depend on has a gradient of 0, or none.
        none = ours is None or theirs is None
        pair = [zeros if each is None else each.abs().max() for each in (ours, theirs)]
        close(*(pair if none else (ours, theirs)), 30.0)


@pytest.mark.parametrize("name", ["MGU", "affine_scan, sparse", *slow(*DOORS)])
def test_all_at_once(name: str) -> None:
    """PyTorch's own check, in both modes, batched and not."""
    one = door(name)
    leaves = leaves_of(one.given)
    options: Any = {"check_forward_ad": True, "check_batched_forward_grad": True}
    assert torch.autograd.gradcheck(one.ours, leaves, check_batched_grad=True, **options)
    assert torch.autograd.gradgradcheck(
        one.ours, leaves, check_fwd_over_rev=True, check_batched_grad=True
    )
