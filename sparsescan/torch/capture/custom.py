"""Equations that are functions with gradients of their own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd import Function

from ...capture.elementwise import program, with_slopes
from ...capture.equations import Value, before, compute
from ...graph.operations import Node, apply
from .equations import Called, Slot


class Program(NamedTuple):
    """What a function computes.

    Attributes
    ----------
    given : list of Value
        Its arguments.
    result, above : Value
        Its result, and the gradient of that.
    grads : dict of Value to Value
        The gradients of arguments that have some.
    """

    given: list[Value]
    result: Value
    above: Value
    grads: Mapping[Value, Value]


class Custom(Called):
    """A function with gradients of its own.

    `made` are values that were there when its gradient began. Gradients take those that ``forward``
    has made as constants, and its arguments as what they are.
    """

    __slots__ = ("kept", "program")

    def __init__(
        self, name: str, inputs: Sequence[Value], program: Program, made: Collection[Value]
    ) -> None:
        slots = tuple(Slot(k) for k in range(len(inputs)))
        super().__init__(self._run, (slots, {}), name, inputs, [program.result.aval])
        self.program = program
        known = {*program.given, program.above}
        roots = list(program.grads.values())
        equations = before(roots, lambda each: each in known or each in made)
        read = {*roots, *(one for each in equations for one in each.inputs)}
        self.kept = [each for each in read if each in made and each not in known]
        if program.result in self.kept:
            self.refuse("a gradient that reads the result")
        self._check([program.result, *roots], known)

    def _check(self, roots: Sequence[Value], known: Collection[Value]) -> None:
        """Refuse tensors that are no arguments."""
        equations = before(roots, known.__contains__)
        read = {*roots, *(one for each in equations for one in each.inputs)}
        for each in read.difference(known):
            if each.equation is None and each.constant is None:
                self.refuse("a tensor that it is not given")

    def custom(self) -> Callable[..., Node]:
        """Return the function as an operation of one number a unit."""
        own = self.program
        value, *kept = (program(self, own.given, [each]) for each in (own.result, *self.kept))

        def slope_in(grad: Value) -> Callable[..., Node]:
            slope = program(self, [own.above, *own.given, *self.kept], [grad], is_linear=True)

            def run(*given: Node) -> Node:
                return slope(*given, *(apply("stop_gradient", each(*given)) for each in kept))

            return run

        slopes = []
        for each, grad in own.grads.items():
            if each.shape != own.result.shape:
                self.refuse("a gradient in a number")
            slopes.append((own.given.index(each), slope_in(grad)))
        return with_slopes(value, slopes)

    def _run(self, *given: Tensor) -> Tensor:
        found: Tensor = _Run.apply(self, *given)
        return found


class _Run(Function):
    """Runs a function outside of kernels."""

    generate_vmap_rule = True

    @staticmethod
    def forward(equation: Custom, *given: Tensor) -> Any:
        own = equation.program
        (found,) = compute([own.result], dict(zip(own.given, given, strict=True)))
        return found.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.equation, *given = inputs
        ctx.save_for_backward(*given)

    @staticmethod
    def backward(ctx: Any, above: Any) -> Any:
        own, kept = ctx.equation.program, ctx.equation.kept
        known = dict(zip(own.given, ctx.saved_tensors, strict=True))
        constants = [each.detach() for each in compute(kept, known)]
        known |= {own.above: above, **dict(zip(kept, constants, strict=True))}
        grads = dict(zip(own.grads, compute([*own.grads.values()], known), strict=True))
        return None, *(grads.get(each) for each in own.given)
