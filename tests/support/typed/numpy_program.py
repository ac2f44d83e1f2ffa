"""A program over NumPy, as a user who checks types writes it."""

import numpy as np
from numpy.typing import NDArray
from typing_extensions import assert_type

import sparsescan
from sparsescan.plan.scan_plan import ScanPlan
from sparsescan.recurrent import GRU, Cell, Hidden, Input, Node, sigmoid
from sparsescan.recurrent.step import TrainingStep
from sparsescan.simulate import TimeSteps


class MGU(Cell):
    weight_ih = Input("f", "n")
    weight_hh = Hidden("f", "n")

    def step(self, x: Node, h: Node) -> Node:
        f = sigmoid(self.weight_ih.f(x) + self.weight_hh.f(h))
        n: Node = np.tanh(self.weight_ih.n(x) + self.weight_hh.n(f * h))
        return h + f * (n - h)


def rate(u: NDArray[np.float64], t: float, p: dict[str, float]) -> NDArray[np.float64]:
    return np.asarray(p["r"] * u * (1 - u))


assert_type(GRU(12, 20).training_step(), TrainingStep)
assert_type(MGU(12, 20), MGU)
assert_type(sparsescan.plan([np.eye(3)]), ScanPlan)
run = TimeSteps(rate, method="sdirk2").forward(np.ones(3), {"r": 1.0}, steps=9, dt=0.1)
assert_type(run.backward(grad_last=np.ones(3)).u0, NDArray[np.float64])
