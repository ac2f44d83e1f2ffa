"""Graphs of operators of PyTorch, read as equations."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from ...capture.elementwise import ELEMENTWISE
from ...capture.equations import NotCaptured, Value
from .custom import Custom, Program
from .equations import MAKER, Called, EquationMaker, Kind, Slot, kind_of, torch_dtype
from .functions import ABOVE, GIVEN
from .functions import CUSTOM as CUSTOM_FUNCTION
from .operators import COPIES, CUSTOM, FILLED, NAMED
from .trace import FOLDERS


def read_graph(
    module: Any, arguments: Sequence[Value], outside: dict[int, Value]
) -> list[Value | None]:
    """Return the results of a graph of operators; None stays None.

    `outside` are values of tensors that the step closes over, by their identity.
    """
    values: dict[Any, Any] = {}
    made: dict[Any, frozenset[Value]] = {}
    given = iter(arguments)
    for node in module.graph.nodes:
        if node.op == "placeholder":
            values[node] = next(given)
        elif node.op == "get_attr":
            tensor = getattr(module, node.target)
            if not isinstance(tensor, Tensor):
                raise NotCaptured(f"{node.target}, a function among operators")
            values[node] = outside.get(id(tensor)) or Value(kind_of(tensor), constant=tensor)
        elif node.op == "output":
            leaves = node.args[0]
            return [None if each is None else values[each] for each in leaves]
        elif getattr(node.target, "__name__", "") == "getitem":
            values[node] = values[node.args[0]][node.args[1]]
        elif node.target == GIVEN:
            outer = values[node.args[0]]
            is_number = outer.number is not None
            inner = Value(outer.aval, None, None, outer.carries, outer.is_step)
            values[node] = outer if is_number else inner
        elif node.target == ABOVE:
            made[node] = frozenset(pytree.tree_leaves(list(values.values())))
            values[node] = Value(kind_of(node.meta["val"]), is_step=True)
        elif node.target == CUSTOM_FUNCTION:
            values[node] = _custom(node, values, made)
        else:
            values[node] = _call(node, values)
    raise NotCaptured("no results")


_COPY = "convert_element_type", "copy"


def _custom(node: Any, values: dict[Any, Any], made: dict[Any, frozenset[Value]]) -> Value:
    """Return the result of a function with gradients of its own."""
    result, above, given, grads, places, name, _ = node.args
    pairs = [(values[each.args[0]], values[each]) for each in given]
    slopes = {pairs[k][1]: values[each] for k, each in zip(places, grads, strict=True)}
    pairs = [pair for pair in pairs if pair[0] is not pair[1]]
    program = Program([inner for _, inner in pairs], values[result], values[above], slopes)
    equation = Custom(name, [outer for outer, _ in pairs], program, made[above])
    equation.where = _line(node)
    return equation.outputs[0]


def _call(node: Any, values: dict[Any, Any]) -> Any:
    """Return what a call in a graph returns."""
    target = node.target
    if not isinstance(target, OpOverload):
        raise NotCaptured(f"{getattr(target, '__name__', target)}: no operator of tensors")
    found = node.meta["val"]
    is_many = isinstance(found, (tuple, list))
    kinds = [kind_of(each) for each in (found if is_many else [found])]
    short = str(target).removeprefix("aten.").removesuffix(".default")
    short = short if short in NAMED or "aten." + short in CUSTOM else short.partition(".")[0]
    filled = FILLED.get(short.partition(".")[0])
    number = None if filled is None else filled(node)
    if isinstance(number, (bool, int, float)):
        constant = torch.tensor(number, dtype=torch_dtype(kinds[0].dtype))
        return MAKER.spread(Value(Kind((), kinds[0].dtype), constant=constant), kinds[0].shape)
    name = NAMED.get(short, f"aten.{short}")
    is_elementwise = name in ELEMENTWISE or name in CUSTOM
    if short in COPIES and COPIES[short](node):
        own = kind_of(node.args[0].meta["val"])
        if own.shape == kinds[0].shape:
            given, dtype = values[node.args[0]], torch_dtype(kinds[0].dtype)
            is_copy = own.dtype == kinds[0].dtype
            if is_copy and given.constant is not None:
                return given
            call: Callable[..., Any] = torch.clone if is_copy else torch.Tensor.to
            about: tuple[Any, ...] = (Slot(0),) if is_copy else (Slot(0), dtype)
            made = Called(call, (about, {}), _COPY[is_copy], [given], kinds)
            made.where = _line(node)
            return made.outputs[0]
    if name in ELEMENTWISE and (node.kwargs or _is_logical(name, node, kinds)):
        name, is_elementwise = f"aten.{short}", False
    inputs: list[Value] = []
    of_numbers = kinds[0].dtype
    if of_numbers.kind == "b" and node.all_input_nodes:
        of_numbers = kind_of(node.all_input_nodes[0].meta["val"]).dtype
    rank = len(kinds[0].shape)

    def slot(each: Any, is_top: bool) -> Any:
        if isinstance(each, torch.fx.Node):
            inputs.append(_of_rank(values[each], rank) if is_elementwise else values[each])
        elif is_elementwise and is_top and isinstance(each, (bool, int, float)):
            inputs.append(Value(Kind((), of_numbers), constant=each))
        elif isinstance(each, (tuple, list)):
            return type(each)([slot(one, False) for one in each])
        else:
            return each
        return Slot(len(inputs) - 1)

    args = tuple(slot(each, True) for each in node.args)
    kwargs = {key: slot(each, False) for key, each in node.kwargs.items()}
    options: dict[str, Any] = {"y": node.args[1]} if name == "integer_pow" else {}
    if short in ("cat", "concat", "concatenate"):
        axis = (node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)) % rank
        name, options = "concatenate", {"dimension": axis}
    made = Called(target, (args, kwargs), name, inputs, kinds, options)
    made.where = _line(node)
    return list(made.outputs) if is_many else made.outputs[0]


def _is_logical(name: str, node: Any, kinds: Sequence[Kind]) -> bool:
    """Return whether an operation of numbers is one of truth values, or a power no integer."""
    if name == "integer_pow":
        return not isinstance(node.args[1], int)
    arithmetic = name in ("add", "sub", "mul", "max", "min")
    return arithmetic and kinds[0].dtype == bool


def _of_rank(value: Value, rank: int) -> Value:
    """Return a value with as many axes as a result, before its own."""
    if not value.shape or len(value.shape) == rank:
        return value
    shape = (1,) * (rank - len(value.shape)) + value.shape
    reader = value.equation if isinstance(value.equation, Called) else None
    maker = MAKER if reader is None else EquationMaker(reader)
    return maker("reshape", value, new_sizes=shape)


def _line(node: Any) -> str:
    """Return the line of the caller's text where a call was traced."""
    found = ""
    lines = (node.stack_trace or "").splitlines()
    for place, text in itertools.pairwise(lines):
        parts = place.strip().split('"')
        if len(parts) == 3 and parts[0] == "File " and not parts[1].startswith(FOLDERS):
            number = parts[2].split(",")[1].strip()
            found = f" ({Path(parts[1]).name}, {number}: {text.strip()!r})"
    return found
