"""What a forward pass of few steps computes: its operators, with slices as a part of arguments."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from ...capture.equations import NotCaptured
from ..capture.functions import MARKS
from ..capture.trace import Trace

_aten = torch.ops.aten
STACK, CAT = _aten.stack.default, _aten.cat.default
_PARTS = {
    *(_aten.split.Tensor, _aten.split_with_sizes.default, _aten.chunk.default),
    *(_aten.tensor_split.sections, _aten.tensor_split.indices, _aten.split.sizes),
}
# Whose results are their arguments, in a graph that changes no tensor.
_SAME = {_aten.lift_fresh_copy.default, _aten.detach_.default, _aten.alias.default}
_NEW = {
    *(_aten.zeros.default, _aten.zeros_like.default, _aten.new_zeros.default),
    *(_aten.empty.memory_format, _aten.empty_like.default, _aten.new_empty.default),
    *(_aten.ones.default, _aten.ones_like.default, _aten.new_ones.default),
    *(_aten.full.default, _aten.full_like.default, _aten.new_full.default),
}


class Cut(NamedTuple):
    """A part of a tensor along an axis.

    Attributes
    ----------
    axis, begin : int
        The axis, and where the part begins.
    size : int or None
        Its size; None for one index, whose axis goes.
    """

    axis: int
    begin: int
    size: int | None


class Edge(NamedTuple):
    """What an operator reads.

    Attributes
    ----------
    kind : str
        ``"input"``, ``"outside"``, ``"constant"`` or ``"op"``.
    number : int
        Which one.
    item : int or None
        Which result of an operator that has several.
    cuts : tuple of Cut
        The parts that are taken of it, one after the other.
    """

    kind: str
    number: int
    item: int | None = None
    cuts: tuple[Cut, ...] = ()


class Op(NamedTuple):
    """A call of an operator.

    Attributes
    ----------
    target : callable
        The operator.
    leaves : list
        The leaves of its arguments: edges, numbers and others.
    spec : TreeSpec
        The tree of its arguments.
    shapes : Any
        The shape and the dtype of each result.
    """

    target: Any
    leaves: list[Any]
    spec: Any
    shapes: Any

    @property
    def edges(self) -> list[Edge]:
        """What it reads."""
        return [each for each in self.leaves if isinstance(each, Edge)]

    def key(self) -> Any:
        """Return what calls have in common that may be those of different steps."""
        return self.target, str(self.spec), *map(_common, self.leaves)


def is_number(leaf: Any) -> bool:
    """Return whether an argument is a number that may depend on the step or the length."""
    return type(leaf) in (int, float)


def _common(leaf: Any) -> Any:
    if isinstance(leaf, Edge):
        return leaf[:2] if leaf.kind in ("outside", "constant") else "edge"
    return "number" if is_number(leaf) else (type(leaf), leaf)


def _plain(tree: Any) -> Any:
    """Return arguments in lists and dicts that are no graph's own."""
    if isinstance(tree, dict):
        return {name: _plain(each) for name, each in tree.items()}
    if isinstance(tree, (tuple, list)):
        return [*map(_plain, tree)]
    return tree


def _with(given: Edge, cut: Cut) -> Edge:
    return given._replace(cuts=(*given.cuts, cut))


class Unrolled:
    """A forward pass of few steps.

    Attributes
    ----------
    ops : list of Op
        Its operators, each behind those it reads; none twice, but for marks of functions.
    results : list of Edge or None
        Its results.
    constants : list of Tensor
        Tensors that it makes of numbers.
    """

    def __init__(self, trace: Trace, length: int) -> None:
        self.ops: list[Op] = []
        self.constants: list[Any] = []
        self._outside = {id(each): k for k, each in enumerate(trace.stands)}
        self._known: dict[Any, int] = {}
        self._times: list[int] = []
        graph, values = trace.graph, dict[Any, Any]()
        graph.graph.eliminate_dead_code()
        self.results: list[Edge | None] = []
        inputs = 0
        for node in graph.graph.nodes:
            if node.op == "placeholder":
                values[node] = Edge("input", inputs)
                inputs += 1
            elif node.op == "get_attr":
                values[node] = self._leaf(getattr(graph, node.target))
            elif node.op == "output":
                self.results = self._returned([each and values[each] for each in node.args[0]])
            else:
                values[node] = self._read(node, values)
        self._arrange(length)

    def _returned(self, results: list[Any]) -> list[Any]:
        """Return results; those that are parts of others stay so."""
        whole = {each.number for each in results if each and each.kind == "op" and not each.cuts}
        return [each if each and each.number in whole else self._simple(each) for each in results]

    def _leaf(self, tensor: Any) -> Edge:
        if id(tensor) in self._outside:
            return Edge("outside", self._outside[id(tensor)])
        self.constants.append(tensor)
        return Edge("constant", len(self.constants) - 1)

    def _read(self, node: Any, values: dict[Any, Any]) -> Any:
        """Return the result of a call: an edge, or a list of them."""
        target, args = node.target, node.args
        first = values.get(args[0]) if args and isinstance(args[0], torch.fx.Node) else None
        if target is operator.getitem:
            assert first is not None
            return first[args[1]] if isinstance(first, list) else first._replace(item=args[1])
        if target in _SAME:
            return first
        if isinstance(first, Edge) and not node.kwargs:
            found = self._cut(node, first)
            if found is not None:
                return found
        leaves, spec = pytree.tree_flatten((_plain(args), _plain(node.kwargs)))
        leaves = [
            self._simple(values[each]) if isinstance(each, torch.fx.Node) else each
            for each in leaves
        ]
        if any(isinstance(each, list) for each in leaves):
            raise NotCaptured(f"{target}, which reads a list of results")
        own = len(self.ops) if target in MARKS else None
        key = target, own, str(spec), *((type(each), each) for each in leaves)
        number = self._known.setdefault(key, len(self.ops))
        if number == len(self.ops):
            shapes = pytree.tree_map(lambda each: (each.shape, each.dtype), node.meta["val"])
            self.ops.append(Op(target, leaves, spec, shapes))
            self._times.append(0)
        self._times[number] += 1
        return Edge("op", number)

    def _cut(self, node: Any, given: Edge) -> Any:
        """Return the edges for the result of a call that takes parts of a tensor, if it does."""
        target, args = node.target, node.args
        shape = args[0].meta["val"].shape
        if target is _aten.select.int:
            axis = args[1] % len(shape)
            return _with(given, Cut(axis, args[2] % shape[axis], None))
        if target is _aten.unbind.int:
            axis = (args[1] if len(args) > 1 else 0) % len(shape)
            return [_with(given, Cut(axis, k, None)) for k in range(shape[axis])]
        if target in _PARTS:
            axis, begin, found = (args[2] if len(args) > 2 else 0) % len(shape), 0, []
            for each in node.meta["val"]:
                size = each.shape[axis]
                found.append(_with(given, Cut(axis, begin, size)))
                begin += size
            return found
        if target is _aten.slice.Tensor and (len(args) < 5 or args[4] == 1):
            axis = (args[1] if len(args) > 1 else 0) % len(shape)
            begin, end = (*args[2:4], None, None)[:2]
            begin, end, _ = slice(begin, end).indices(shape[axis])
            size = max(end - begin, 0)
            return given if size == shape[axis] else _with(given, Cut(axis, begin, size))
        return None

    def _simple(self, edge: Any) -> Any:
        """Return an element of tensors that were stacked in place of a part of the stack."""
        while isinstance(edge, Edge) and edge.kind == "op" and edge.cuts:
            op, cut = self.ops[edge.number], edge.cuts[0]
            rows = op.edges
            axis = op.leaves[-1] if len(op.leaves) > len(rows) else 0
            if op.target is not STACK or cut.size is not None:
                break
            if axis % len(op.shapes[0]) != cut.axis:
                break
            edge = rows[cut.begin]._replace(cuts=(*rows[cut.begin].cuts, *edge.cuts[1:]))
        return edge

    def _arrange(self, length: int) -> None:
        """Move what all steps compute alike before the loop, and leave out what nobody reads."""
        ranks: list[tuple[int, int]] = []
        for k, op in enumerate(self.ops):
            read = [ranks[each.number][0] for each in op.edges if each.kind == "op"]
            is_shared = self._times[k] >= length - 1
            ranks.append((max(read, default=-1), k + 1) if is_shared else (k, 0))
        used, stack = set[int](), [each for each in self.results if each is not None]
        while stack:
            each = stack.pop()
            if each.kind == "op" and each.number not in used:
                used.add(each.number)
                stack += self.ops[each.number].edges
        order = sorted(used, key=ranks.__getitem__)
        places = {old: new for new, old in enumerate(order)}

        def moved(leaf: Any) -> Any:
            is_op = isinstance(leaf, Edge) and leaf.kind == "op"
            return leaf._replace(number=places[leaf.number]) if is_op else leaf

        self.ops = [self.ops[k]._replace(leaves=[*map(moved, self.ops[k].leaves)]) for k in order]
        self.results = [*map(moved, self.results)]


# -- Tensors that are filled row by row ------------------------------------------------------------


def without_writes(module: Any) -> None:
    """Put a stack in place of a new tensor of which each row is written once, and then read.

    Others stay: they are in the way.
    """
    graph = module.graph
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in _NEW:
            writes = list(_writes(node))
            if writes:
                _stack(graph, node, writes)


def _writes(new: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Yield the row, its index and the copy of each write to a new tensor."""
    for view in _views(new):
        for user in view.users:
            if user.target is _aten.copy_.default and user.args[0] is view:
                yield view, _index(view), user


def _views(node: Any) -> Iterator[Any]:
    """Yield the rows of a tensor that are selected, and slices that are the whole of a row."""
    for whole in _wholes(node):
        for user in whole.users:
            if user.target is _aten.select.int and user.args[0] is whole:
                yield from _wholes(user)


def _index(view: Any) -> tuple[int, int]:
    """Return the axis and the index of a row."""
    while view.target is not _aten.select.int:
        view = view.args[0]
    shape = view.args[0].meta["val"].shape
    axis = view.args[1] % len(shape)
    return axis, view.args[2] % shape[axis]


def _stack(graph: Any, new: Any, writes: Sequence[tuple[Any, Any, Any]]) -> None:
    places = {node: k for k, node in enumerate(graph.nodes)}
    rows = {index: copy for _, index, copy in writes}
    (axis, *others), shape = {each[0] for each in rows}, new.meta["val"].shape
    is_whole = not others and len(rows) == len(writes) == shape[axis]
    copies = set(rows.values())
    last = max(copies, key=places.__getitem__)
    own = set[Any]()
    for view in _views(new):
        if places[view] > places[last]:
            continue
        own.add(view)
        copy = rows.get(_index(view))
        for user in view.users:
            # A row that is read before it is written has other numbers.
            is_late = copy is not None and places[user] >= places[copy]
            if not is_late and user.target is not _aten.slice.Tensor:
                is_whole = False
    for copy in copies:
        source, target = copy.args[1].meta["val"], copy.args[0].meta["val"]
        is_whole &= source.shape == target.shape and source.dtype == target.dtype
    wholes = list(_wholes(new))
    for whole in wholes:
        for user in whole.users:
            is_view = user in own or user in wholes
            is_whole &= is_view or places[user] > places[last]
    if not is_whole:
        return
    for view in own:
        source = rows[_index(view)].args[1]
        for user in list(view.users):
            if user not in copies and user not in own:
                user.replace_input_with(view, source)
    with graph.inserting_after(last):
        stack = graph.call_function(
            STACK, ([rows[axis, k].args[1] for k in range(shape[axis])], axis)
        )
    stack.meta["val"] = new.meta["val"]
    for whole in wholes:
        for user in list(whole.users):
            if user not in own and user not in wholes:
                user.replace_input_with(whole, stack)
    for copy in copies:
        copy.replace_all_uses_with(copy.args[1])
        graph.erase_node(copy)
    graph.eliminate_dead_code()


def _wholes(node: Any) -> Iterator[Any]:
    """Yield a tensor, and slices that are the whole of it."""
    yield node
    for user in node.users:
        if user.target is _aten.slice.Tensor and user.meta["val"].shape == node.meta["val"].shape:
            yield from _wholes(user)
