"""Loops as PyTorch has them, by the kernels of recurrent cells."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..capture.equations import NotCaptured, Value
from ..capture.loop import Body, Explanation, Plan, plan
from ..capture.run import execute
from ..errors import InputError, InputTypeError, short
from .calls.direct import is_eager, is_transformed, uncompiled
from .capture.equations import kind_of
from .capture.graphs import read_graph
from .capture.run import TorchRunner
from .capture.trace import Found, Like, Trace, find

Step = Callable[[Any, Any], tuple[Any, Any]]


def scan(
    combine_fn: Step, init: Any, xs: Any, *, dim: int = 0, reverse: bool = False
) -> tuple[Any, Any]:
    """Return what a loop in Python over a step returns, by compiled kernels where they know it.

    ``carry, y = combine_fn(carry, x)`` runs for each slice ``x`` of `xs` along `dim`. Arguments and
    results are those of PyTorch's prototype ``torch._higher_order_ops.scan``. The operators that a
    step calls are read as those of a :class:`sparsescan.recurrent.Cell`, whose kernels run all
    steps and the backward pass. Modules may be called in a step; tensors and parameters that it
    closes over get gradients, of any order and in both modes, and the transforms of ``torch.func``
    may be around it.

    A step runs once in each call, to see which functions of PyTorch it calls, with tensors that
    have no numbers; so it has to do the same in all steps, apart from what it computes from
    tensors. It may change tensors that it has made, as in ``h += x`` or ``h[h > 1] = 0``, and call
    an ``autograd.Function`` of one number a unit, such as a spike with a surrogate gradient, whose
    ``backward`` is read as it is. Other steps run as a loop in Python: those that draw random
    numbers, change a tensor that they were given, or read numbers out of tensors; :func:`explain`
    says why. ``torch.compile`` leaves a call out of its graphs, which may not be one then.

    Parameters
    ----------
    combine_fn : callable
        The step, of any pytrees of tensors.
    init : pytree of Tensor
        The first carry. Leaves may be None.
    xs : pytree of Tensor
        What differs in each step, along an axis of each leaf.
    dim : int, default 0
        The axis.
    reverse : bool, default False
        Whether the last step is the first.

    Returns
    -------
    carry : pytree
        The last carry.
    ys : pytree
        The outputs of all steps, stacked along `dim`, or along the first axis of those that have
        fewer axes.

    Raises
    ------
    InputError, InputTypeError
        If an argument is wrong, or carries change their tree, their shapes or dtypes.

    See Also
    --------
    explain : Say what runs, and which operator is in the way.

    Examples
    --------
    >>> import torch
    >>> from sparsescan.torch import scan
    >>> cell = torch.nn.GRUCell(12, 20)
    >>> def step(h, x):
    ...     h = cell(x, h)
    ...     return h, h
    >>> last, states = scan(step, torch.zeros(16, 20), torch.ones(50, 16, 12))
    >>> states.square().sum().backward()
    >>> states.shape, cell.weight_hh.grad.shape
    (torch.Size([50, 16, 20]), torch.Size([60, 20]))
    """
    # A compiler of PyTorch would trace all steps, one by one. It has to under a transform.
    is_apart = torch.compiler.is_compiling() and not is_transformed()
    run = _uncompiled if is_apart else _run
    return run(combine_fn, init, xs, dim, reverse)


def _run(combine_fn: Step, init: Any, xs: Any, dim: int, reverse: bool) -> tuple[Any, Any]:
    return _Loop(combine_fn, init, xs, dim, reverse).run()


_uncompiled = uncompiled(_run)


def explained(combine_fn: Step, init: Any, xs: Any, dim: int = 0) -> Explanation:
    """Return whether kernels run a loop of :func:`scan`; if not, which operator is in the way."""
    loop = _Loop(combine_fn, init, xs, dim, False)
    made = loop.found.made if loop.found else None
    if made is None or made.plan is None:
        why = loop.obstacle if made is None else made.obstacle
        return Explanation(False, f"a loop in Python runs the steps: {why}")
    states = ", ".join(each.str_short() for each in made.plan.states)
    return Explanation(True, f"kernels run the carries {states}:\n{made.plan.one}")


class _Made(NamedTuple):
    """What is made of a trace.

    Attributes
    ----------
    plan : Plan or None
        How kernels run it.
    obstacle : str
        Why they do not.
    results : list of Tensor or None
        Tensors of the shapes of the results.
    """

    plan: Plan | None
    obstacle: str
    results: list[Any]


class _Loop:
    """A loop, as it is traced."""

    def __init__(self, step: Any, init: Any, xs: Any, dim: int, reverse: bool) -> None:
        if not callable(step):
            raise InputTypeError(f"combine_fn is {short(step)}; expected a function of two trees")
        if not isinstance(dim, int) or isinstance(dim, bool):
            raise InputTypeError(f"dim is {short(dim)}; expected an integer")
        if not isinstance(reverse, bool):
            raise InputTypeError(f"reverse is {short(reverse)}; expected True or False")
        self.step, self.reverse = step, reverse
        self.init, tree = pytree.tree_flatten(init)
        rows, of_rows = pytree.tree_flatten(xs)
        self.trees = tree, of_rows
        self.is_there = [each is not None for each in self.init]
        for name, leaves in (("init", self.init), ("xs", rows)):
            for each in leaves:
                if each is not None and not isinstance(each, Tensor):
                    raise InputTypeError(f"{name} has {short(each)}; expected tensors")
        rows = [each for each in rows if each is not None]
        if not rows:
            raise InputError("xs has no tensors; expected at least one, which says how many steps")
        rank = rows[0].dim()
        if not -rank <= dim < rank:
            raise InputError(f"dim is {dim}, and xs has a tensor of {rank} axes")
        self.dim = dim % rank
        if any(each.dim() <= self.dim for each in rows):
            raise InputError(f"xs has tensors without axis {self.dim}, which is dim")
        self.xs = [each.movedim(self.dim, 0) for each in rows]
        lengths = {len(each) for each in self.xs}
        if len(lengths) > 1:
            raise InputError(f"xs has {sorted(lengths)} steps; expected as many in each tensor")
        (self.length,) = lengths
        self.found: Found | None = None
        self.obstacle = ""
        self._given = rows
        self._find(pytree.tree_flatten(xs)[0])

    def _find(self, leaves: list[Any]) -> None:
        self._has_rows = [each is not None for each in leaves]
        own = [each for each in self.init if each is not None]
        if not is_eager(*own, *self.xs) or torch.is_autocast_enabled("cpu"):
            self.obstacle = "autocast, or something that wants to see each operator"
            return
        if torch._C._len_torch_function_stack():
            self.obstacle = "a mode that wants to see each function of PyTorch"
            return
        likes = [Like(each.dtype, tuple(each.shape), tuple(each.stride())) for each in own]
        likes += [
            Like(each.dtype, tuple(each.shape[1:]), tuple(each.stride()[1:])) for each in self.xs
        ]
        try:
            self.found = find(self._flat, self._flat_trees(), likes, self._make)
        except NotCaptured as error:
            self.obstacle = str(error)
        except Exception as error:
            self.obstacle = f"{type(error).__name__}: {error}".partition("\n")[0]

    def _flat_trees(self) -> list[Any]:
        own = [sum(self.is_there), len(self.xs)]
        return [pytree.tree_structure([0] * count) for count in own]

    def _flat(self, carry: list[Any], row: list[Any]) -> tuple[Any, Any]:
        """Return the new carry and the output of a step, from leaves that are no None."""
        result = self.step(
            pytree.tree_unflatten(_with_none(carry, self.is_there), self.trees[0]),
            pytree.tree_unflatten(_with_none(row, self._has_rows), self.trees[1]),
        )
        if not isinstance(result, (tuple, list)) or len(result) != 2:
            raise InputTypeError(
                f"combine_fn returns {short(result)}; expected a carry and an output"
            )
        new, y = result
        leaves, tree = pytree.tree_flatten(new)
        if tree != self.trees[0] or [each is not None for each in leaves] != self.is_there:
            raise InputError(f"the carry is {self.trees[0]}, and {tree} after a step")
        return [each for each in leaves if each is not None], y

    def _make(self, trace: Trace, spec: Any) -> _Made:
        """Return how kernels run a trace."""
        count = sum(self.is_there)
        outputs = next(each for each in trace.graph.graph.nodes if each.op == "output").args[0]
        results = [None if each is None else each.meta["val"] for each in outputs]
        if trace.obstacle:
            return _Made(None, trace.obstacle, results)
        try:
            return _Made(self._planned(trace, count), "", results)
        except NotCaptured as error:
            return _Made(None, str(error), results)

    def _planned(self, trace: Trace, count: int) -> Plan:
        nodes = list(trace.graph.graph.nodes)
        given = [each for each in nodes if each.op == "placeholder"]
        outputs = nodes[-1].args[0]
        outside = [Value(kind_of(each)) for each in trace.stands]
        values = []
        for k, each in enumerate(given):
            is_carry = k < count and outputs[k] is not each
            carries = frozenset([k] if is_carry else [])
            values.append(Value(kind_of(each.meta["val"]), carries=carries, is_step=k >= count))
        places = {id(each): own for each, own in zip(trace.stands, outside, strict=True)}
        results = read_graph(trace.graph, values, places)
        some = [each for each in results if each is not None]
        return plan(Body([*outside, *values], some, len(outside), count))

    def run(self) -> tuple[Any, Any]:
        """Return the last carry and the outputs."""
        made = None if self.found is None else self.found.made
        if made is not None:
            self._check(made.results)
        if made is None or made.plan is None or self.length == 0:
            return self._loop(made)
        assert self.found is not None
        own = [each for each in self.init if each is not None]
        arrays = [*self.found.outside, *own, *self.xs]
        found = execute(TorchRunner, made.plan, arrays, self.length, self.reverse)
        count = len(own)
        whole = iter(found[count:])
        ys = [None if each is None else next(whole) for each in made.results[count:]]
        (_, tree) = self.found.spec.children()
        apart = _Apart([*arrays, *self._given])
        return self._results([*map(apart, found[:count])], [*map(apart, ys)], tree)

    def _check(self, results: Sequence[Any]) -> None:
        own = [each for each in self.init if each is not None]
        for each, new in zip(own, results, strict=False):
            if (each.shape, each.dtype) != (new.shape, new.dtype):
                raise InputError(
                    f"init has a tensor of {each.dtype} and shape {tuple(each.shape)}, which is "
                    f"{new.dtype} and {tuple(new.shape)} after a step; expected no change"
                )

    def _results(self, carry: Sequence[Any], ys: Sequence[Any], tree: Any) -> tuple[Any, Any]:
        moved = [
            each.movedim(0, self.dim) if each is not None and self.dim < each.dim() else each
            for each in ys
        ]
        last = pytree.tree_unflatten(_with_none(carry, self.is_there), self.trees[0])
        return last, pytree.tree_unflatten(moved, tree)

    def _loop(self, made: _Made | None) -> tuple[Any, Any]:
        """Run the steps one by one, in Python."""
        carry = [each for each in self.init if each is not None]
        if self.length == 0:
            if made is None or self.found is None:
                raise InputError(
                    f"xs has no steps, and the shapes of outputs are unknown: {self.obstacle}"
                )
            (_, tree) = self.found.spec.children()
            ys = [
                None if each is None else torch.empty((0, *each.shape), dtype=each.dtype)
                for each in made.results[len(carry) :]
            ]
            return self._results(carry, ys, tree)
        rows: list[Any] = []
        steps = range(self.length)
        for k in reversed(steps) if self.reverse else steps:
            carry, y = self._flat(carry, [each[k] for each in self.xs])
            leaves, tree = pytree.tree_flatten(y)
            self._check(carry)
            rows.append(leaves)
        if self.reverse:
            rows.reverse()
        ys = []
        for column in zip(*rows, strict=True):
            if any(each is not None and not isinstance(each, Tensor) for each in column):
                raise InputTypeError(f"combine_fn returns {short(column[0])}; expected tensors")
            ys.append(None if column[0] is None else torch.stack(column))
        return self._results(carry, ys, tree)


class _Apart:
    """Makes tensors contiguous, and copies those that share memory with others."""

    def __init__(self, given: Sequence[Tensor]) -> None:
        # Transforms hide memory from each other.
        self.is_plain = not is_transformed()
        self.seen = {id(each): each for each in map(self._memory, given)}

    def _memory(self, tensor: Tensor) -> Any:
        return tensor.untyped_storage() if self.is_plain else tensor

    def __call__(self, tensor: Tensor | None) -> Tensor | None:
        """Return a tensor of its own."""
        if tensor is None:
            return None
        own = tensor.contiguous()
        if id(self._memory(own)) in self.seen:
            own = own.clone()
        memory = self._memory(own)
        self.seen[id(memory)] = memory
        return own


def _with_none(leaves: Sequence[Any], is_there: Sequence[bool]) -> list[Any]:
    rest = iter(leaves)
    return [next(rest) if there else None for there in is_there]
