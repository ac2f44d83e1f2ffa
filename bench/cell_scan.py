"""The training step of any cell in JAX: a jitted ``lax.scan``, made from the cell's own step.

It is what somebody who knows JAX would write by hand. What does not wait for the state is computed
for all time steps at once, before the scan. All gates that multiply one vector are one matrix
product: of the input, before the scan. A sum of products has its biases added before the scan, and
where it multiplies one vector by two matrices, these are added first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from typing import Any, NamedTuple

from sparsescan.graph.expressions import topological
from sparsescan.graph.operations import OPERATIONS, Node, Reduction
from sparsescan.recurrent import Cell
from sparsescan.recurrent.definition import bias_name, declared
from sparsescan.recurrent.program import INPUT

from . import peers, timing

Params = Mapping[str, Any]
# What is known when: from parameters alone, from the inputs of all steps, inside a step.
_FIXED, _EARLY, _LATE = 0, 1, 2
_MOST_ARGUMENTS = 3  # of an operation
_TRIALS = 3
# Longer turns of a loop are not tried where one takes so much longer than the best.
_SLOWER = 1.25


class _Product(NamedTuple):
    """A product in a sum."""

    sign: float
    matrix: str
    gate: int
    is_transposed: bool
    argument: Node


class _Sum(NamedTuple):
    """A sum of products, and of other terms with their signs."""

    products: list[_Product]
    rest: list[tuple[float, Node]]


def fastest(make: Callable[[int, bool], Any], unrolls: Sequence[int]) -> tuple[str, Any]:
    """Return what `make` makes of the fastest unroll and form, and its name.

    Forms are as those of :func:`outputs`. Compilation takes seconds, so an unroll is the last one
    that is tried if it takes a quarter more than the best so far.
    """
    more = ", gates in one array"
    name, best = timing.fastest({form: make(unrolls[0], form == more) for form in ("", more)})
    is_packed, unroll = name == more, unrolls[0]
    shortest = min(timing.seconds(best, _TRIALS))
    for longer in unrolls[1:]:
        other = make(longer, is_packed)
        taken = min(timing.seconds(other, _TRIALS))
        if taken < shortest:
            best, shortest, unroll = other, taken, longer
        elif taken > _SLOWER * shortest:
            break
    return f"unroll={unroll}{name}", best


def outputs(cell: Cell, unroll: int, is_packed: bool) -> Callable[[Params, Any, Any], Any]:
    """Return a function of parameters, inputs and first states, which returns the outputs.

    Parameters
    ----------
    cell : Cell
        The cell, whose step is read.
    unroll : int
        Steps in a turn of the loop.
    is_packed : bool
        Whether what a step adds to the gates of a matrix is one array, or one for each gate.
    """
    jax = peers.load_jax()

    def run(params: Params, x: Any, state: Any) -> Any:
        step = _Step(jax, cell, params, is_packed)
        read = step.before(x)
        begin = tuple(jax.numpy.split(state, cell.program.states, axis=-1))

        def body(states: Any, own: Any) -> Any:
            after = step.after(states, own)
            return after, after[0]

        return jax.lax.scan(body, begin, read, length=len(x), unroll=unroll)[1]

    return run


def with_gradients(
    outputs: Callable[[Params, Any, Any], Any],
) -> Callable[[Params, Any, Any, Any], Any]:
    """Return a function of gradients in the outputs, too, which returns all gradients as well."""
    jax = peers.load_jax()

    def run(params: Params, x: Any, state: Any, grad: Any) -> Any:
        output, pull = jax.vjp(outputs, params, x, state)
        return output, pull(grad)

    return run


class _Step:
    """A step of a cell on arrays of JAX, for some parameters."""

    def __init__(self, jax: Any, cell: Cell, params: Params, is_packed: bool) -> None:
        self.is_packed = is_packed
        self.jnp, self.params, self.units = jax.numpy, params, cell.hidden_size
        self.declared, self.bias = declared(type(cell)), cell.bias
        self.program = cell.program
        self.functions = _functions(jax)
        self.outputs = cell.program.traced
        self.order = topological(self.outputs)
        self.phases: dict[Node, int] = {}
        for each in self.order:
            own = {"input": _EARLY, "state": _LATE}.get(each.operation, _FIXED)
            self.phases[each] = max([own, *(self.phases[a] for a in each.arguments)])
        self.sums, self.absorbed = self._find_sums()
        self.blocks = {
            name: jax.numpy.split(param, len(param) // self.units)
            for name, param in params.items()
            if param.ndim
        }
        # Values that all steps share.
        self.fixed: dict[Any, Any] = {}
        self.weights: dict[tuple[Node, int], tuple[list[Node], Any]] = {}
        for argument, phase in dict.fromkeys(
            (one.argument, self.phases[one.argument])
            for each in self.sums.values()
            for one in each.products
        ):
            self.weights[argument, phase] = self._weights_of(argument)

    # -- Sums of products -------------------------------------------------------------------------

    def _find_sums(self) -> tuple[dict[Node, _Sum], set[Node]]:
        """Return the sums that have products, and the nodes that are parts of one."""
        uses = Counter(argument for each in self.order for argument in each.arguments)
        uses.update(self.outputs)
        sums: dict[Node, _Sum] = {}
        absorbed: set[Node] = set()
        for each in reversed(self.order):
            is_sum = each.operation in ("add", "subtract") or _is_product(each)
            if each in absorbed or not is_sum:
                continue
            found, inner = _Sum([], []), set[Node]()
            stack = [(1.0, each)]
            while stack:
                sign, one = stack.pop()
                is_inside = one is each or uses[one] == 1
                if is_inside and _is_product(one):
                    found.products.append(_Product(sign, *one.details, *one.arguments))
                elif is_inside and one.operation in ("add", "subtract"):
                    a, b = one.arguments
                    stack += [(-sign if one.operation == "subtract" else sign, b), (sign, a)]
                else:
                    found.rest.append((sign, one))
                    continue
                inner.add(one)
            if found.products:
                sums[each] = found
                absorbed |= inner - {each}
        return sums, absorbed

    def _weights_of(self, argument: Node) -> tuple[list[Node], Any]:
        """Return the sums that multiply a vector, and their matrices side by side."""
        blocks = {
            each: reduce(
                lambda a, b: a + b,
                [self._block(one) for one in own.products if one.argument is argument],
            )
            for each, own in sorted(self.sums.items(), key=self._reads_no_input)
            if any(one.argument is argument for one in own.products)
        }
        turned = [each.swapaxes(-1, -2) for each in blocks.values()]
        if turned[0].ndim == 3:  # head, column, gate, row
            return list(blocks), self.jnp.stack(turned, axis=2)
        return list(blocks), self.jnp.concatenate(turned, axis=1)

    def _reads_no_input(self, item: tuple[Node, _Sum]) -> bool:
        own = item[1]
        terms = [one.argument for one in own.products] + [one for _, one in own.rest]
        return all(self.phases[each] != _EARLY for each in terms)

    def _block(self, product: _Product) -> Any:
        block = self.blocks[product.matrix][product.gate]
        heads = self.program.heads_of(product.matrix)
        block = block if heads == 1 else block.reshape(heads, -1, block.shape[1])
        block = block.swapaxes(-1, -2) if product.is_transposed else block
        return block if product.sign == 1 else -block

    def _biases(self, own: _Sum) -> list[tuple[float, Any]]:
        """Return the biases of the matrices of a sum."""
        found = []
        for one in own.products:
            biased = self.declared[one.matrix].biased
            if self.bias and not one.is_transposed and one.gate in biased:
                found.append((one.sign, self.blocks[bias_name(one.matrix)][biased.index(one.gate)]))
        return found

    def _sum(self, each: Node, phase: int, values: dict[Any, Any]) -> Any:
        """Return a sum, as far as it is known in a phase, or what the last one adds to that."""
        own, terms = self.sums[each], list[tuple[float, Any]]()
        early = phase != _LATE
        if early:
            terms += self._biases(own)
        for argument in dict.fromkeys(one.argument for one in own.products):
            if (self.phases[argument] != _LATE) == early:
                terms.append((1.0, self._product(each, argument, values)))
        terms += [
            (sign, self._value(one, values))
            for sign, one in own.rest
            if (self.phases[one] != _LATE) == early
        ]
        if not early and (each, "early") in values:
            terms.append((1.0, values[each, "early"]))
        return _added(terms)

    def _product(self, each: Node, argument: Node, values: dict[Any, Any]) -> Any:
        sums, weights = self.weights[argument, self.phases[argument]]
        key = "product", argument
        if key not in values:
            # Split, since gradients of slices are sums of arrays of zeros.
            product = self._times(self._value(argument, values), weights)
            packed = values.get(("packed", argument))
            ends = [] if packed is None else [packed.shape[-1]]
            parts = [one for one in self.jnp.split(product, ends, axis=-1) if one.shape[-1]]
            if packed is not None:
                parts[0] = parts[0] + packed
            values[key] = [
                one
                for part in parts
                for one in self.jnp.split(part, part.shape[-1] // self.units, axis=-1)
            ]
        return values[key][sums.index(each)]

    def _times(self, vectors: Any, weights: Any) -> Any:
        """Return products with all gates, one after the other, by heads if there are several."""
        if weights.ndim == 2:
            return vectors @ weights
        parts = vectors.reshape(*vectors.shape[:-1], *weights.shape[:2])
        found = self.jnp.einsum("...hi,higo->...gho", parts, weights)
        return found.reshape(*vectors.shape[:-1], -1)

    # -- Values -----------------------------------------------------------------------------------

    def before(self, x: Any) -> list[Any]:
        """Compute all that no state is needed for; what the loop reads of it, for each step."""
        values = self.fixed = {INPUT: x}
        for each in self.order:
            if each in self.absorbed:
                continue
            if self.phases[each] != _LATE:
                self._value(each, values)
            elif each in self.sums:
                part = self._sum(each, _EARLY, values)
                if part is not None:
                    values[each, "early"] = part
        self._pack(values)
        is_late = [each for each in self.order if self.phases[each] == _LATE]
        read: dict[Any, None] = {
            argument: None
            for each in is_late
            if each not in self.sums and each not in self.absorbed
            for argument in each.arguments
        }
        read |= {key: None for key in values if isinstance(key, tuple)}
        read |= dict.fromkeys(self.outputs)
        # Of each step apart: what has an axis of time. All steps share the rest.
        arrays = {key: each for key, each in values.items() if not isinstance(each, list)}
        self.keys = [key for key in read if key in arrays and self.jnp.ndim(arrays[key]) == 3]
        self.fixed = {key: each for key, each in arrays.items() if self.jnp.ndim(each) < 3}
        return [arrays[key] for key in self.keys]

    def _pack(self, values: dict[Any, Any]) -> None:
        """Make one array of what is added, in a step, to gates that multiply one vector."""
        for (argument, phase), (sums, _) in self.weights.items():
            packed = []
            for each in sums if phase == _LATE and self.is_packed else ():
                late = {
                    one.argument
                    for one in self.sums[each].products
                    if self.phases[one.argument] == _LATE
                }
                if len(late) > 1 or self.jnp.ndim(values.get((each, "early"), 0)) != 3:
                    break
                packed.append(values.pop((each, "early")))
            if packed:
                values["packed", argument] = self.jnp.concatenate(packed, axis=-1)

    def after(self, states: tuple[Any, ...], own: list[Any]) -> tuple[Any, ...]:
        """Return the states after a step."""
        values = {**self.fixed, **dict(zip(self.keys, own, strict=True))}
        values |= {
            each: states[each.details[0]] for each in self.order if each.operation == "state"
        }
        like = states[0]
        after = [self.jnp.asarray(self._value(each, values), like.dtype) for each in self.outputs]
        return tuple(self.jnp.broadcast_to(each, like.shape) for each in after)

    def _value(self, each: Node, values: dict[Any, Any]) -> Any:
        """Return the value of a node, computed now unless it is known."""
        if each not in values:
            if each.operation == "number":
                return each.details[0]
            if each.operation == "scalar":
                return self.params[each.details[0]]
            if each.operation == "vector":
                name, gate = each.details
                return self.blocks[name][gate]
            if each in self.sums:
                values[each] = self._sum(each, self.phases[each], values)
            else:
                arguments = [self._value(one, values) for one in each.arguments]
                function = self.functions.get(each.operation, partial(self._reduced, each))
                values[each] = function(*arguments)
        return values[each]

    def _reduced(self, each: Node, value: Any) -> Any:
        """Return a reduction over the units of each head, which has one number for all of these."""
        reduction, value = each.details[0], self.jnp.asarray(value)
        whole = self.jnp.broadcast_to(value, (*value.shape[:-1], self.units))
        parts = whole.reshape(*whole.shape[:-1], reduction.heads, -1)
        compute = getattr(
            self.jnp, {"maximum": "max"}.get(reduction.operation, reduction.operation)
        )
        reduced = compute(parts, -1, keepdims=True)
        return reduced[..., 0] if reduction.heads == 1 else self._spread(reduced, parts)

    def _spread(self, reduced: Any, parts: Any) -> Any:
        whole = self.jnp.broadcast_to(reduced, parts.shape)
        return whole.reshape(*parts.shape[:-2], self.units)


def _is_product(each: Node) -> bool:
    """Return whether a node is a product with a matrix of parameters."""
    return each.operation == "product" and not isinstance(each.details[0], Reduction)


def _added(terms: list[tuple[float, Any]]) -> Any:
    """Return a sum of terms with signs; None without any."""
    total = None
    for sign, term in terms:
        if total is None:
            total = term if sign == 1 else -term
        else:
            total = total + term if sign == 1 else total - term
    return total


def _functions(jax: Any) -> dict[str, Callable[..., Any]]:
    """Return the operations of steps: their texts for NumPy, and what differs in JAX."""
    jnp = jax.numpy

    @jax.custom_jvp
    def surrogate(value: Any, a: Any, slope: Any) -> Any:
        return value

    @surrogate.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        value, _, slope = primals
        return value, slope * tangents[1]

    names = {"xp": jnp, "sigmoid": jax.nn.sigmoid, "softplus": jax.nn.softplus, "zero": 0}
    functions = {}
    for name, about in OPERATIONS.items():
        text = about.numpy.format(*(f"a[{k}]" for k in range(_MOST_ARGUMENTS)))
        functions[name] = eval(f"lambda *a: {text}", dict(names))
    return functions | {
        # At 0 the derivative is 0, and not a half.
        "relu": jax.nn.relu,
        "less": lambda a, b: (a < b).astype(jnp.result_type(a, b)),
        "less_equal": lambda a, b: (a <= b).astype(jnp.result_type(a, b)),
        "where": lambda condition, a, b: jnp.where(condition != 0, a, b),
        "stop_gradient": jax.lax.stop_gradient,
        "surrogate": surrogate,
    }
