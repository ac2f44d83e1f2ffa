"""Ways of calling an operation, through each door, and what its plain formula gives for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from problems import Array, Call, Numbers, Problem
from torch import Tensor

MEMBERS = 2


class Drawn(NamedTuple):
    """A problem, weights of its results in a loss, and a direction in its numbers.

    Attributes
    ----------
    problem : Problem
        What is called.
    weights : tuple of ndarray
        The loss is the real part of the sum of the results times these, and half of their squares.
    along : dict of str to ndarray
        The direction.
    mapped : dict of str to int
        The axis along which a map has several of a number or a flag, the first or the last one.
    """

    problem: Problem
    weights: tuple[Array, ...]
    along: Numbers
    mapped: dict[str, int]

    @property
    def given(self) -> tuple[Numbers, Numbers]:
        return self.problem.numbers, self.problem.flags

    def member(self, k: int) -> tuple[Numbers, Numbers]:
        """Return the arguments of one call of a map."""
        numbers, flags = (
            {
                name: np.take(each, k, self.mapped[name]) if name in self.mapped else each
                for name, each in part.items()
            }
            for part in self.given
        )
        return numbers, flags


# -- The formula -----------------------------------------------------------------------------------


def tensors(numbers: Numbers, *, are_leaves: bool = False) -> Numbers:
    own = {name: torch.tensor(np.asarray(each)) for name, each in numbers.items()}
    return {name: each.requires_grad_() for name, each in own.items()} if are_leaves else own


def loss_of(results: Any, weights: Any) -> Any:
    """Return the loss, of PyTorch's tensors or of JAX's arrays.

    It has halves of squares, too, so that what enters a backward pass has derivatives.
    """
    pairs = zip(results, weights, strict=True)
    return sum((one * w + one * one.conj() / 2).sum().real for one, w in pairs)


def curvature_of(results: Any, slopes: Any, curved: Any, weights: Any) -> list[Any]:
    """Return the second derivative of the loss along a direction, from those of results."""
    parts = zip(results, slopes, curved, weights, strict=True)
    return [sum((c * (w + r.conj()) + s * s.conj()).sum().real for r, s, c, w in parts)]


def grads_of(loss: Any, leaves: Numbers, **options: Any) -> Numbers:
    if not (isinstance(loss, Tensor) and loss.requires_grad):
        return {name: torch.zeros_like(each) for name, each in leaves.items()}
    found = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True, **options)
    return dict(zip(leaves, found, strict=True))


def slope_of(grads: Numbers, along: Numbers) -> Any:
    """Return by how much a loss changes along a direction, if it has these gradients."""
    terms = [(grads[name].conj() * each).sum().real for name, each in along.items()]
    return sum(terms[1:], terms[0])


def _wide(array: Array) -> Array:
    """Return numbers in double precision."""
    return array.astype(np.result_type(array, np.float64))


def by_formula(drawn: Drawn, given: tuple[Numbers, Numbers], weights: Any) -> dict[str, Any]:
    """Return results, gradients, slopes of results along the direction and those of gradients."""
    wide = {name: _wide(each) for name, each in given[0].items()}
    leaves, flags = tensors(wide, are_leaves=True), tensors(given[1])
    results = tuple(drawn.problem.plain(leaves, flags))
    weights = [torch.from_numpy(_wide(w)).requires_grad_() for w in weights]
    grads = grads_of(loss_of(results, weights), leaves, create_graph=True)
    # How gradients depend on the weights, of which they are a linear function, are the slopes.
    slope = slope_of(grads, tensors(drawn.along))
    pairs = grads_of(slope, dict(enumerate(weights)), retain_graph=True)
    again = grads_of(slope, leaves)
    return {
        "results": [each.detach() for each in results],
        "gradients": {name: each.detach() for name, each in grads.items()},
        "slopes": [each.conj().resolve_conj() for each in pairs.values()],
        "slopes of gradients": again,
        "curvature": [slope_of(again, tensors(drawn.along))],
    }


def expected(drawn: Drawn) -> dict[str, Any]:
    """Return what the formula gives; of a map, what its members give, side by side."""
    if not drawn.mapped:
        return by_formula(drawn, drawn.given, drawn.weights)
    weights = [[w[k] for w in drawn.weights] for k in range(MEMBERS)]
    members = [by_formula(drawn, drawn.member(k), weights[k]) for k in range(MEMBERS)]
    results = [torch.stack(each) for each in zip(*(m["results"] for m in members), strict=True)]
    each = {
        name: torch.stack([member["gradients"][name] for member in members])
        for name in drawn.problem.numbers
    }
    whole = {
        name: g.movedim(0, drawn.mapped[name]) if name in drawn.mapped else g.sum(0)
        for name, g in each.items()
    }
    twice = [torch.stack([one, one.flip(0)]) for one in results]
    found = {"results": results, "gradients": whole, "gradients of members": each}
    return found | {"results of maps": twice}


# -- Doors -----------------------------------------------------------------------------------------

Found = dict[str, Any]


def numpy_reverse(f: Call, drawn: Drawn) -> Found:
    results, pull = f(*drawn.given)
    # Gradients in results are conjugates of what these are multiplied by.
    grads = pull(*(np.conj(w) + one for w, one in zip(drawn.weights, results, strict=True)))
    return {"results": results, "gradients": grads}


def numpy_plain(f: Call, drawn: Drawn) -> Found:
    return {"results": f(*drawn.given)[0]}


def torch_plain(f: Call, drawn: Drawn) -> Found:
    with torch.no_grad():
        return {"results": f(*map(tensors, drawn.given))}


def torch_reverse(f: Call, drawn: Drawn) -> Found:
    leaves, flags = tensors(drawn.given[0], are_leaves=True), tensors(drawn.given[1])
    for _ in range(2):  # what the first call has made is used again
        results = f(leaves, flags)
        grads = grads_of(loss_of(results, map(torch.from_numpy, drawn.weights)), leaves)
    return {"results": results, "gradients": grads}


def torch_compiled(f: Call, drawn: Drawn) -> Found:
    torch._dynamo.reset()  # else many forms of one function are too many
    is_whole = drawn.problem.is_one_graph
    compiled = torch.compile(f, fullgraph=is_whole, backend="aot_eager" if is_whole else "eager")
    return torch_reverse(torch._dynamo.config.patch(allow_rnn=True)(compiled), drawn)


def _torch_gradients(f: Call, flags: Numbers, weights: Any) -> Callable[[Numbers], Numbers]:
    return torch.func.grad(lambda numbers: loss_of(f(numbers, flags), weights))


def torch_forward(f: Call, drawn: Drawn) -> Found:
    (numbers, flags), along = map(tensors, drawn.given), tensors(drawn.along)
    weights = list(map(torch.from_numpy, drawn.weights))

    def slope(numbers: Numbers) -> Any:
        return torch.func.jvp(lambda own: tuple(f(own, flags)), (numbers,), (along,))

    results, slopes = slope(numbers)
    curved = torch.func.jvp(lambda own: slope(own)[1], (numbers,), (along,))[1]
    gradients = _torch_gradients(f, flags, weights)
    grads, of_grads = torch.func.jvp(gradients, (numbers,), (along,))
    found = {
        "results": results,
        "slopes": slopes,
        "curvature": curvature_of(results, slopes, curved, weights),
    }
    return found | {"gradients": grads, "slopes of gradients": of_grads}


def torch_second(f: Call, drawn: Drawn) -> Found:
    leaves, flags = tensors(drawn.given[0], are_leaves=True), tensors(drawn.given[1])
    loss = loss_of(f(leaves, flags), map(torch.from_numpy, drawn.weights))
    grads = grads_of(loss, leaves, create_graph=True)
    slope = slope_of(grads, tensors(drawn.along))
    return {"gradients": grads, "slopes of gradients": grads_of(slope, leaves)}


def torch_hessian(f: Call, drawn: Drawn) -> Found:
    (numbers, flags), weights = (
        map(tensors, drawn.given),
        list(map(torch.from_numpy, drawn.weights)),
    )
    whole = torch.func.hessian(lambda own: loss_of(f(own, flags), weights))(numbers)
    return {"slopes of gradients": _contracted(whole, tensors(drawn.along), torch.tensordot)}


def _contracted(hessian: Any, along: Numbers, product: Any) -> Numbers:
    """Return a Hessian, by two names, times a direction."""
    return {
        name: sum(product(row[other], each, each.ndim) for other, each in along.items())
        for name, row in hessian.items()
    }


def _axes(drawn: Drawn) -> Any:
    return tuple({name: drawn.mapped.get(name) for name in part} for part in drawn.given)


def _of_maps(drawn: Drawn) -> tuple[Any, Any]:
    """Return axes, and arguments, of a map of the map, whose second members are in reverse."""
    axes = tuple({name: 0 if name in drawn.mapped else None for name in p} for p in drawn.given)
    given = [
        {
            name: np.stack([each, np.flip(each, drawn.mapped[name])])
            if name in drawn.mapped
            else each
            for name, each in part.items()
        }
        for part in drawn.given
    ]
    return axes, given


def torch_vmap(f: Call, drawn: Drawn) -> Found:
    one = torch.func.vmap(f, _axes(drawn))
    found = torch_reverse(one, drawn)
    weights = tuple(map(torch.from_numpy, drawn.weights))

    def gradients(numbers: Numbers, flags: Numbers, weights: Any) -> Numbers:
        return _torch_gradients(f, flags, weights)(numbers)

    each = torch.func.vmap(gradients, (*_axes(drawn), 0))
    found["gradients of members"] = each(*map(tensors, drawn.given), weights)
    axes, given = _of_maps(drawn)
    return found | {"results of maps": torch.func.vmap(one, axes)(*map(tensors, given))}


def jax_plain(f: Call, drawn: Drawn) -> Found:
    return {"results": f(*drawn.given)}


def _jax_gradients(f: Call, weights: Any = None) -> Callable[..., Numbers]:
    """Return the function of gradients, which in JAX are conjugates of those of PyTorch."""

    def gradients(numbers: Numbers, flags: Numbers, weights: Any = weights) -> Numbers:
        own = {name: jnp.asarray(each) for name, each in numbers.items()}
        grads = jax.grad(lambda own: loss_of(f(own, flags), weights))(own)
        return jax.tree.map(jnp.conj, grads)

    return gradients


def jax_reverse(f: Call, drawn: Drawn) -> Found:
    grads = _jax_gradients(f, drawn.weights)(*drawn.given)
    return {"results": f(*drawn.given), "gradients": grads}


def jax_compiled(f: Call, drawn: Drawn) -> Found:
    def both(numbers: Numbers, flags: Numbers) -> Any:
        return f(numbers, flags), _jax_gradients(jax.checkpoint(f), drawn.weights)(numbers, flags)

    return dict(zip(("results", "gradients"), jax.jit(both)(*drawn.given), strict=True))


def jax_forward(f: Call, drawn: Drawn) -> Found:
    def derivative(function: Call) -> Any:
        def call(numbers: Numbers, flags: Numbers, along: Numbers) -> Any:
            return jax.jvp(lambda own: function(own, flags), (numbers,), (along,))

        return jax.jit(call)(*drawn.given, drawn.along)

    results, slopes = derivative(f)
    curved = derivative(
        lambda own, flags: jax.jvp(lambda x: f(x, flags), (own,), (drawn.along,))[1]
    )
    grads, of_grads = derivative(_jax_gradients(f, drawn.weights))
    found = {"results": results, "slopes": slopes}
    found["curvature"] = curvature_of(results, slopes, curved[1], drawn.weights)
    return found | {"gradients": grads, "slopes of gradients": of_grads}


def jax_second(f: Call, drawn: Drawn) -> Found:
    def slope(numbers: Numbers, flags: Numbers) -> Any:
        return slope_of(_jax_gradients(f, drawn.weights)(numbers, flags), drawn.along)

    twice = jax.jit(lambda *given: jax.tree.map(jnp.conj, jax.grad(slope)(*given)))
    return {"slopes of gradients": twice(*drawn.given)}


def jax_hessian(f: Call, drawn: Drawn) -> Found:
    def hessian(numbers: Numbers, flags: Numbers) -> Any:
        return jax.hessian(lambda own: loss_of(f(own, flags), drawn.weights))(numbers)

    whole = jax.jit(hessian)(*drawn.given)
    return {"slopes of gradients": _contracted(whole, drawn.along, np.tensordot)}


def jax_vmap(f: Call, drawn: Drawn) -> Found:
    one = jax.vmap(f, _axes(drawn))
    found = jax_compiled(one, drawn)
    each = jax.jit(jax.vmap(_jax_gradients(f), (*_axes(drawn), 0)))
    found["gradients of members"] = each(*drawn.given, drawn.weights)
    axes, given = _of_maps(drawn)
    return found | {"results of maps": jax.jit(jax.vmap(one, axes))(*given)}


DOORS: dict[str, dict[str, Callable[[Call, Drawn], Found]]] = {
    "NumPy": {"plain": numpy_plain, "reverse": numpy_reverse},
    "PyTorch": {
        "plain": torch_plain,
        "compiled": torch_compiled,
        "vmap": torch_vmap,
        "vmap of marks": torch_vmap,
        "forward": torch_forward,
        "reverse": torch_reverse,
        "second": torch_second,
        "hessian": torch_hessian,
    },
    "JAX": {
        "plain": jax_plain,
        "compiled": jax_compiled,
        "vmap": jax_vmap,
        "vmap of marks": jax_vmap,
        "forward": jax_forward,
        "reverse": jax_reverse,
        "second": jax_second,
        "hessian": jax_hessian,
    },
}
