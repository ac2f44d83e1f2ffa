"""Graphs in which operators change tensors, as ones in which they make new ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import GraphModule, Node, map_arg

aten = torch.ops.aten

# Operators that see numbers in another shape, in the same order.
_RESHAPED = {
    *("view", "reshape", "_unsafe_view", "view_as", "reshape_as", "flatten", "unflatten"),
    *("squeeze", "unsqueeze", "alias", "contiguous", "to", "type_as"),
}
# Those that see parts, and which of their arguments is the axis.
_PIECES = {"chunk": 2, "split": 2, "split_with_sizes": 2, "tensor_split": 2, "unbind": 1}
# Overloads that have another name where they make a new tensor.
_OVERLOADS = {("pow", "Scalar"): "Tensor_Scalar", ("pow", "Tensor"): "Tensor_Tensor"}


class _Refused(Exception):  # noqa: N818
    """An operator that changes a tensor in a way that is not known."""


class View(NamedTuple):
    """A tensor in the memory of another one.

    Attributes
    ----------
    read : callable
        ``read(whole)`` returns the node of the view of a tensor.
    write : callable
        ``write(whole, new)`` returns that of the tensor in which the view is another one.
    """

    read: Callable[[Node], Node]
    write: Callable[[Node, Node], Node]


_SAME = View(lambda whole: whole, lambda whole, new: new)


def functional(module: GraphModule) -> None:
    """Put operators that make tensors in place of those that change a tensor of the graph's own.

    What has the memory of a changed tensor reads the new one. Operators that change what the graph
    was given, or a view of a kind that is not known, stay.
    """
    nodes = list(module.graph.nodes)
    if any(map(_is_change, nodes)):
        _Functional(module.graph).run(nodes)
        module.recompile()


def _is_change(node: Node) -> bool:
    target = node.target
    is_change = isinstance(target, OpOverload) and target._schema.is_mutable
    return is_change and target is not aten.detach_.default


def _is_many(node: Node) -> bool:
    return isinstance(node.meta.get("val"), (tuple, list))


def _name(node: Node) -> str:
    """Return the name of an operator."""
    target = node.target
    return target._schema.name.removeprefix("aten::") if isinstance(target, OpOverload) else ""


def _tensor(node: Node) -> Tensor:
    found = node.meta.get("val")
    found = found[0] if isinstance(found, (tuple, list)) and found else found
    if not isinstance(found, Tensor):
        raise _Refused
    return found


def _memory(node: Node) -> Any:
    """Return what nodes that share memory have in common."""
    try:
        return id(_tensor(node).untyped_storage())
    except (_Refused, NotImplementedError):  # no tensor, or none in memory
        return None


def _is_made(node: Node) -> bool:
    """Return whether an operator has made a tensor, whatever the strides of what it was given."""
    if not isinstance(node.target, OpOverload) or node.target.namespace != "aten":
        return False
    if node.target._schema.returns[0].alias_info is None:
        return True
    given = node.args[0]
    return isinstance(given, Node) and _tensor(given).dtype != _tensor(node).dtype


class _Functional:
    """The nodes of a graph, and those that took their place."""

    def __init__(self, graph: Any) -> None:
        self.graph = graph
        self.now: dict[Node, Node] = {}
        self.parents: dict[Node, Any] = {}
        # How nodes see memory that was changed.
        self.views: dict[Node, View] = {}
        # The nodes of each memory, in their order; the first one has made it.
        self.sharing: dict[Any, list[Node]] = {}
        self.about: dict[str, Any] = {}

    def run(self, nodes: list[Node]) -> None:
        """Go through the nodes, in their order."""
        gone: list[Node] = []
        for node in nodes:
            self.parents[node] = node.args[0] if node.args else None
            self.about = {key: each for key, each in node.meta.items() if key != "val"}
            with self.graph.inserting_before(node):
                if _is_change(node) and self.is_changed(node):
                    gone.append(node)
                else:
                    node.args = map_arg(node.args, self.current)
                    node.kwargs = map_arg(node.kwargs, self.current)
            memory = _memory(node)
            if memory is not None:
                self.sharing.setdefault(memory, []).append(node)
        for node in reversed(gone):
            self.graph.erase_node(node)

    def current(self, node: Node) -> Node:
        """Return what is read in place of a node."""
        if node in self.views and node not in self.now:
            self.now[node] = self.views[node].read(self.whole(node))
        return self.now.get(node, node)

    def whole(self, node: Node) -> Node:
        """Return the tensor, as it is now, that a node is a view of."""
        parent: Node = self.parents[node]
        return self.whole(parent) if _is_many(parent) else self.current(parent)

    def make(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        """Return a new call of an operator."""
        node: Node = self.graph.call_function(target, args, kwargs)
        value = target(*map_arg(args, _tensor), **map_arg(kwargs, _tensor))
        node.meta = {**self.about, "val": value}
        return node

    def is_changed(self, node: Node) -> bool:
        """Put a new tensor in place of one that a node changes, and of all that has its memory.

        Return whether that is known.
        """
        own = self.parents[node]
        sharing = self.sharing.get(_memory(own), []) if isinstance(own, Node) else []
        try:
            if not sharing or not _is_made(sharing[0]):
                return False
            views = {each: self.view(each) for each in sharing[1:]}
            new, each = self.result(node, own), own
        except _Refused:
            return False
        while each is not sharing[0]:
            new, each = views[each].write(self.whole(each), new), self.parents[each]
        self.views.update({**views, node: _SAME})
        for each in views:
            self.now.pop(each, None)
        self.now[sharing[0]] = new
        return True

    def result(self, node: Node, own: Node) -> Node:
        """Return what is in a tensor after a node that changes it."""
        name, target = _name(node), node.target
        assert isinstance(target, OpOverload)
        # Such as `unsqueeze_`: other views of its memory stay as they are.
        if torch.Tag.inplace_view in target.tags:
            raise _Refused
        here, like = self.current(own), _tensor(own)
        given: Any = map_arg(node.args[1:], self.current)
        kwargs: Any = map_arg(node.kwargs, self.current)
        if name == "zero_":
            return self.make(aten.full_like.default, here, 0)
        if name == "fill_" and not isinstance(given[0], Node):
            return self.make(aten.full_like.default, here, given[0])
        if name in ("copy_", "fill_"):
            return self.make(aten.expand.default, self.cast(given[0], like), list(like.shape))
        if name == "index_put_":
            (mask, *others), (number, *more) = given[0], given[1:]
            is_mask = isinstance(mask, Node) and _tensor(mask).dtype == torch.bool
            if not is_mask or others or more or _tensor(number).dim():
                raise _Refused
            if _tensor(mask).shape != like.shape:
                raise _Refused
            return self.make(aten.where.self, mask, self.cast(number, like), here)
        name, overload = name.removesuffix("_"), target._schema.overload_name or "default"
        overload = _OVERLOADS.get((name, overload), overload)
        own_operator = getattr(getattr(aten, name, None), overload, None)
        changed = [each for each in target._schema.arguments if each.alias_info is not None]
        if name == _name(node) or own_operator is None or len(changed) != 1:
            raise _Refused
        return self.cast(self.make(own_operator, here, *given, **kwargs), like)

    def cast(self, node: Node, like: Tensor) -> Node:
        """Return a tensor of the dtype of another one."""
        if _tensor(node).dtype == like.dtype:
            return node
        return self.make(aten.to.dtype, node, like.dtype)

    # -- Views -------------------------------------------------------------------------------------

    def view(self, node: Node) -> View:
        """Return how a node sees the memory of its parent."""
        name, parent = _name(node), self.parents[node]
        if not isinstance(parent, Node) or _memory(parent) != _memory(node):
            raise _Refused
        if _is_change(node) or _is_many(node):
            return _SAME
        whole, own = _tensor(parent), _tensor(node)
        args: Any = node.args[1:]
        if whole.dtype != own.dtype:
            raise _Refused
        if name in _RESHAPED:
            shapes = list(own.shape), list(whole.shape)
            return View(
                lambda whole: self.make(aten.reshape.default, whole, shapes[0]),
                lambda whole, new: self.make(aten.reshape.default, new, shapes[1]),
            )
        if name in ("t", "numpy_T", "transpose", "permute"):
            order = list(range(whole.dim()))
            if name == "permute":
                order = [k % whole.dim() for k in args[0]]
            elif name == "transpose" and order:
                a, b = args
                order[a], order[b] = order[b], order[a]
            elif name != "transpose":
                order.reverse()
            back = [order.index(k) for k in range(len(order))]
            return View(
                lambda whole: self.make(aten.permute.default, whole, order),
                lambda whole, new: self.make(aten.permute.default, new, back),
            )
        return self.part(node, parent, args)

    def part(self, node: Node, parent: Node, args: Any) -> View:
        """Return how a node sees a part of its parent along an axis."""
        name, own = _name(node), _tensor(node)
        if name in ("select", "slice", "narrow"):
            whole = _tensor(parent)
            axis, begin, *rest = (*args, *(0, None, None)[len(args) :])[:3]
            axis %= whole.dim()
            if name == "slice":
                begin, end, step = slice(begin, rest[0], *args[3:]).indices(whole.shape[axis])
            else:
                begin, step = begin % max(1, whole.shape[axis]), 1
                end = begin + (1 if name == "select" else own.shape[axis])
        elif name == "" and _name(parent) in _PIECES:
            pieces, place = parent.meta["val"], _PIECES[_name(parent)]
            own_args = parent.args
            axis = own_args[place] if len(own_args) > place else parent.kwargs.get("dim", 0)
            name = "select" if _name(parent) == "unbind" else "slice"
            axis %= pieces[0].dim() + (name == "select")
            sizes = [1 if name == "select" else each.shape[axis] for each in pieces]
            begin, step = sum(sizes[: args[0]]), 1
            end = begin + sizes[args[0]]
        else:
            raise _Refused
        if step != 1:
            raise _Refused

        def read(whole: Node) -> Node:
            if name == "select":
                return self.make(aten.select.int, whole, axis, begin)
            return self.make(aten.slice.Tensor, whole, axis, begin, end)

        def write(whole: Node, new: Node) -> Node:
            size = _tensor(whole).shape[axis]
            new = self.make(aten.unsqueeze.default, new, axis) if name == "select" else new
            around = [(0, begin), (end, size)]
            first, last = (
                [self.make(aten.slice.Tensor, whole, axis, *each)] if each[0] < each[1] else []
                for each in around
            )
            if not first and not last:
                return new
            return self.make(aten.cat.default, [*first, new, *last], axis)

        return View(read, write)
