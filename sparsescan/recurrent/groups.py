"""Groups of neighbouring samples, with each of which one thread at a time works."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from numpy.typing import NDArray

from .loops import sequences as kernels
from .loops.pauses import STRICT
from .loops.sequences import Sequence
from .loops.sums import Sums
from .packing import Weights

if TYPE_CHECKING:
    from .host import HostMemory

Array = NDArray[Any]


class SumsOf(NamedTuple):
    """Sums of gradients of a direction's parameters: dense ones, and entries of sparse ones."""

    dense: Sums
    entries: list[Array]


class Group:
    """Some neighbouring samples, with which one thread at a time works."""

    def __init__(
        self, memory: HostMemory, first: int, samples: int, own: dict[str, Iterator[Array]]
    ) -> None:
        self.memory, self.first, self.samples = memory, first, samples
        self._number = len(memory.groups)
        self._scratch = [tuple(map(next, own.values())) for _ in memory.directions]

    def sequence(self, k: int, span: tuple[int, int]) -> Sequence:
        """Return a direction for the kernels, with the gates of some steps."""
        memory, one, weights = self.memory, self.memory.directions[k], self.memory.packed[k]
        products, parts, block, row_grads = self._scratch[k]
        step, renderer = memory.grad_step(one), one.renderer
        return Sequence(
            steps=memory.steps,
            back=one.back,
            units=one.units,
            batch=memory.padded,
            given=memory.batch,
            first=self.first,
            count=self.samples,
            samples=max(1, min(self.samples, memory.group)),
            sample_lanes=memory.has_sample_lanes,
            pairs=one.sample_rows == 2,
            lengths=memory.lengths,
            states=memory.plane_of(memory.states, one),
            width=memory.widths[one.layer],
            next_output=memory.next_output(one),
            inputs=one.inputs,
            cols=one.cols,
            block=one.block,
            jump=memory.plane,
            cells=memory.cells_of(one, memory.cells),
            cell_plane=memory.plane,
            others=one.states - 1,
            befores=memory.plane_of(memory.befores, one),
            before_cells=memory.cells_of(one, memory.before_cells),
            resets=memory.resets,
            gates=memory.gates[k],
            segment=memory.segment,
            begin=memory.first_gates(one, span),
            kept=memory.step_rows(one),
            gate_step=memory.gate_step(one, min(self.samples, memory.group)),
            grads=block if step else memory.gates[k],
            grad_step=step,
            grads_first=memory.grads_first(one),
            has_grads=memory.has_grads[k],
            products=products,
            stride=one.stride,
            spare=one.spare,
            parts=parts,
            zeros=memory.zeros,
            bias=weights.bias,
            rows=weights.rows,
            row_step=one.row_step(memory.group),
            row_grads=row_grads,
            row_sums=memory.row_sums[k],
            row_count=one.rows,
            carry=memory.carries[k],
            carry_step=memory.carry_step,
            forward=one.code.forward,
            backward=one.code.backward,
            stages=one.program.stages,
            slots=one.slots,
            multiplied=one.multiplied,
            state_row=min(renderer.state_rows.values(), default=0),
            kept_count=one.kept,
            record=one.record,
            input_row=-1 if renderer.input_row is None else renderer.input_row,
            has_derived=any(each.grads for each in one.program.derived),
            helpers=memory.helpers,
            help=memory.help_of(self._number, one),
            # Behind a reset a state does not tell of those before it.
            pauses=min(one.pauses, STRICT) if len(memory.resets) else one.pauses,
        )


def run_group(
    group: Group,
    k: int,
    all_weights: list[Weights],
    span: tuple[int, int],
    *,
    is_again: bool = False,
) -> None:
    """Compute some states of one direction, in its order, and their gates."""
    memory, weights = group.memory, all_weights[k]
    one = memory.directions[k]
    memory.calls.launch(
        kernels.run,
        *(group.sequence(k, span), weights.forward, memory.states[one.layer - 1]),
        memory.no_caller._replace(ends=memory.ends[one.back]) if is_again else memory.caller(one),
        *span,
    )


def back_group(
    group: Group,
    k: int,
    all_weights: list[Weights],
    sums_of: dict[int, SumsOf],
    above: Array,
    parts: list[Array],
    span: tuple[int, int],
) -> None:
    """Compute the gradients in slots and inputs of some steps of one direction."""
    memory = group.memory
    one, weights = memory.directions[k], all_weights[k]
    below = parts[one.back].reshape(-1) if parts else memory.no_caller.x
    about = group.sequence(k, span), weights.back, memory.states[one.layer - 1]
    flat = above.reshape(-1)
    if one.kept and not memory.keeps_gates:
        memory.calls.launch(kernels.find_ends, *about, flat, memory.ends[one.back], *span)
        run_group(group, k, all_weights, span, is_again=True)
    memory.calls.launch(kernels.back, *about, sums_of[k].dense, flat, below, *span)
