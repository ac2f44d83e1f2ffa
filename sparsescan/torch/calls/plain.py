"""Run recurrent networks step by step in PyTorch's own operations, from a step's program.

It is used where kernels cannot run: with other dtypes, on other devices, and during traces.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional

from ...graph.expressions import topological
from ...graph.operations import OPERATIONS, Node, Reduction
from ...recurrent.arguments import Returned
from ...recurrent.definition import bias_name, declared
from ...recurrent.program import INPUT, CellProgram
from .direct import is_forward_twice
from .resets import begins_before


class _Surrogate(torch.autograd.Function):
    """A value whose derivative in another vector is a given one."""

    generate_vmap_rule = True

    @staticmethod
    def forward(value: Tensor, a: Tensor, slope: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[2])
        ctx.save_for_forward(inputs[2])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (slope,) = ctx.saved_tensors
        return None, grad * slope, None

    @staticmethod
    def jvp(ctx: Any, of_value: Any, of_a: Any, of_slope: Any) -> Any:
        (slope,) = ctx.saved_tensors
        return of_a * slope


def _surrogate(value: Tensor, a: Tensor, slope: Tensor) -> Any:
    if not torch.is_grad_enabled() and forward_ad._current_level < 0:
        return value  # traces do not record its derivative
    if is_forward_twice():
        raise NotImplementedError(
            "forward mode of forward mode through a surrogate; expected reverse mode once, such as "
            "torch.func.hessian"
        )
    value, a, slope = torch.broadcast_tensors(value.detach(), a, slope)
    return _Surrogate.apply(value, a, slope)


# Functions that have another name in PyTorch.
_OTHERS: dict[str, Callable[..., Any]] = {
    "softplus": lambda a: torch.logaddexp(a, torch.zeros_like(a)),
    "less": lambda a, b: (a < b).to(a.dtype),
    "less_equal": lambda a, b: (a <= b).to(a.dtype),
    "where": lambda condition, a, b: torch.where(condition != 0, a, b),
    "stop_gradient": Tensor.detach,
    "surrogate": _surrogate,
}
_REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda parts: parts.sum(-1, keepdim=True),
    "mean": lambda parts: parts.mean(-1, keepdim=True),
    "maximum": lambda parts: parts.amax(-1, keepdim=True),
}
_FUNCTIONS = {name: _OTHERS.get(name) or getattr(torch, name) for name in OPERATIONS}


class _Direction:
    """A cell with its parameters, and the inputs of all steps."""

    def __init__(
        self,
        cell: type,
        program: CellProgram,
        params: Mapping[str, Tensor],
        x: Tensor,
        further: Sequence[Tensor],
        units: int,
    ) -> None:
        self._params, self._x, self._units, self._further = params, x, units, further
        self._parameters: dict[str, Any] = declared(cell)
        self._partial = program.partial
        self._order = topological(program.traced)
        self._outputs = program.traced
        products = Counter(
            (*each.arguments, each.details[0], each.details[2])
            for each in self._order
            if each.operation == "product"
        )
        # If all gates of a matrix multiply the same vector, one product serves all.
        blocks = {
            name: each.blocks
            for name, each in self._parameters.items()
            if name not in self._partial
        }
        self._whole = {key for key, count in products.items() if count == blocks.get(key[1])}
        # Vectors that do not depend on the state are computed for all steps at once.
        self._known: dict[Node, Tensor] = {}
        self._wholes: dict[Any, Tensor] = {}
        self._fixed: dict[Node, Tensor] = {}
        for each in self._order:
            if each.operation == "product" and each.arguments[0] is INPUT:
                self._known[each] = self._product(each, x, self._wholes)
            elif each.operation in ("number", "vector", "scalar"):
                self._fixed[each] = self._leaf(each)

    def _leaf(self, each: Node) -> Tensor:
        if each.operation == "number":
            return self._x.new_full((), each.details[0])
        name, gate = each.details
        param = self._params[name]
        return param if each.operation == "scalar" else self._block(param, gate)

    def _block(self, param: Tensor, gate: int) -> Tensor:
        return param[gate * self._units : (gate + 1) * self._units]

    def _product(self, each: Node, given: Tensor, wholes: dict[Any, Tensor]) -> Tensor:
        """Return a product, as a part of the product of all gates if others need that."""
        name, gate, is_transposed = each.details
        if isinstance(name, Reduction):
            parts = given.expand(*given.shape[:-1], self._units).unflatten(-1, (name.heads, -1))
            found = _REDUCTIONS[name.operation](parts)
            return found.expand_as(parts).flatten(-2)
        parameter, matrix = self._parameters[name], self._params[name]
        bias, biased = self._params.get(bias_name(name)), parameter.biased
        block = matrix.chunk(parameter.blocks)[gate]
        if is_transposed:
            return self._linear(name, block, given, None, is_transposed=True)
        key = each.arguments[0], name, is_transposed
        if key in self._whole and (bias is None or len(biased) in (0, parameter.blocks)):
            if key not in wholes:
                wholes[key] = functional.linear(given, matrix, bias if biased else None)
            return wholes[key][..., gate * self._units : (gate + 1) * self._units]
        own = None
        if bias is not None and gate in biased:
            own = self._block(bias, biased.index(gate))
        return self._linear(name, block, given, own)

    def _linear(
        self,
        name: str,
        block: Tensor,
        given: Tensor,
        bias: Tensor | None,
        *,
        is_transposed: bool = False,
    ) -> Tensor:
        """Return a product with a gate of a matrix; each head multiplies its own units."""
        heads, *sides = self._partial.get(name, (1, 0, 0))
        if heads == 1:
            block = block.T if is_transposed else block
            given = given[..., : block.shape[1]] if any(sides) else given
            found = functional.linear(given, block, bias)
            return functional.pad(found, (0, self._units - len(block)))
        blocks = block.unflatten(0, (heads, -1))
        parts = given.unflatten(-1, (heads, -1))
        equation = "...hi,hio->...ho" if is_transposed else "...hi,hoi->...ho"
        found = torch.einsum(equation, parts, blocks).flatten(-2)
        return found if bias is None else found + bias

    def step(self, t: int, states: Sequence[Tensor]) -> list[Tensor]:
        """Return the new states."""
        made: dict[Node, Tensor] = dict(self._fixed)
        wholes: dict[Any, Tensor] = {}
        for each in self._order:
            if each in made:
                continue
            if each in self._known:
                made[each] = self._known[each][t]
            elif each is INPUT:
                made[each] = self._x[t]
            elif each.operation == "further":
                made[each] = self._further[each.details[0]][t]
            elif each.operation == "state":
                made[each] = states[each.details[0]]
            elif each.operation == "product":
                made[each] = self._product(each, made[each.arguments[0]], wholes)
            else:
                made[each] = _FUNCTIONS[each.operation](*(made[a] for a in each.arguments))
        pairs = zip(self._outputs, states, strict=True)
        return [made[each].to(state.dtype).expand_as(state) for each, state in pairs]


def dropped(x: Tensor, share: float, lengths: Tensor | None) -> Tensor:
    """Return the outputs of a layer after dropout.

    For a packed sequence, dropout is drawn as in PyTorch: only for existing steps.
    """
    if lengths is None or torch.compiler.is_compiling():
        return functional.dropout(x, share)
    has = torch.arange(len(x), device=lengths.device)[:, None] < lengths
    places = has.flatten().nonzero()[:, 0].to(x.device)
    rows = functional.dropout(x.flatten(0, 1).index_select(0, places), share)
    return torch.zeros_like(x).flatten(0, 1).index_copy(0, places, rows).view(x.shape)


def run_plain(
    cell: type,
    program: CellProgram,
    cells: Sequence[Mapping[str, Tensor]],
    directions: int,
    x: Tensor,
    state: Tensor,
    lengths: Tensor | None,
    dropout: float = 0.0,
    resets: Tensor | None = None,
    *,
    return_states: Returned = False,
) -> tuple[Tensor, Tensor]:
    """Return the outputs and the last states of a network.

    Parameters
    ----------
    cell, program
        A class of cells, and the program of its step.
    cells : sequence of dict of str to Tensor
        The parameters of each direction of each layer.
    directions : int
        How many directions a layer has.
    x : Tensor, shape (T, batch, inputs)
        The inputs, followed by further inputs.
    state : Tensor, shape (layers · directions, batch, state_size)
        The initial states; twice as many if those that resets set are behind each direction's.
    lengths : Tensor or None
        How many steps each sample has.
    dropout : float
        Share of the outputs between layers that are dropped.
    resets : Tensor of bool, shape (T, batch), optional
        Where states begin anew.
    return_states : bool or "layers", default False
        Which states are outputs: see :class:`~sparsescan.recurrent.arguments.Options`.
    """
    units, lasts, every = state.shape[-1] // program.states, [], []
    begin = state.unflatten(0, (len(cells), -1))
    each_has = len(program.further_grads)
    inputs = x.shape[-1] - len(cells) * each_has * units
    x, further = x[..., :inputs], x[..., inputs:].split(units, -1)
    for first in range(0, len(cells), directions):
        if first and dropout:
            x = dropped(x, dropout, lengths)
        outputs: list[list[Tensor]] = []
        is_last = first + directions == len(cells)
        is_returned = return_states == "layers" or (return_states and is_last)
        count = program.states if is_returned else 1
        for back, params in enumerate(cells[first : first + directions]):
            own = further[(first + back) * each_has :][:each_has]
            one = _Direction(cell, program, params, x, own, units)
            states, *others = (each.split(units, -1) for each in begin[first + back])
            anew_states = others[0] if others else [states[0].new_zeros(())] * len(states)
            rows: list[Any] = [None] * len(x)
            begins = begins_before(resets, lengths, len(x), back)
            for t in range(len(x))[:: -1 if back else 1]:
                anew = begins[t]
                if anew is not None:
                    pairs = zip(anew_states, states, strict=True)
                    states = [torch.where(anew, *both) for both in pairs]
                new = one.step(t, states)
                if lengths is None:
                    states, rows[t] = new, new[:count]
                    continue
                has = (t < lengths).to(x.device)[:, None]
                states = [torch.where(has, *both) for both in zip(new, states, strict=True)]
                rows[t] = [torch.where(has, each, 0) for each in new[:count]]
            none = [x.new_zeros((0, x.shape[1], units))] * count
            outputs.append([torch.stack(each) for each in zip(*rows, strict=True)] or none)
            lasts.append(torch.cat(states, -1))
        parts = list(zip(*outputs, strict=True))
        if return_states == "layers":
            every += [torch.cat(each, -1) for each in outputs]
            parts = parts[:1]
        x = torch.cat([each for part in parts for each in part], -1)
    return torch.stack(every, -2) if every else x, torch.stack(lasts)
