"""Ways to spread a training step over workers, behind one interface.

Which of them is fastest for a network, and what they take by a model of the workers::

    from sparsescan.strategies import build, compare, load_machine

    print(compare(build("vgg16"), load_machine(), workers=16, batch=256))
"""

from .compare import Comparison, compare, plot_comparison
from .graph import Graph, Layer
from .integrated import BatchParallel, DomainParallel, Integrated, ModelParallel
from .machine import Machine, load_machine, measure_machine, save_machine
from .networks import Recurrent, build, from_chain, from_sequential, sequential
from .per_layer.predict import PerLayer
from .pipeline.predict import MicroBatches, Pipeline
from .scan import Scan
from .strategy import LayerPlan, Prediction, Strategy

__all__ = [
    "BatchParallel",
    "Comparison",
    "DomainParallel",
    "Graph",
    "Integrated",
    "Layer",
    "LayerPlan",
    "Machine",
    "MicroBatches",
    "ModelParallel",
    "PerLayer",
    "Pipeline",
    "Prediction",
    "Recurrent",
    "Scan",
    "Strategy",
    "build",
    "compare",
    "from_chain",
    "from_sequential",
    "load_machine",
    "measure_machine",
    "plot_comparison",
    "save_machine",
    "sequential",
]
