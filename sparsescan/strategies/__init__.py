"""Predict the time of a training step over many workers, for all strategies.

A comparison for one network and one kind of worker::

    from sparsescan.strategies import Machine, compare

    print(compare("vgg16", Machine.load(), workers=16, batch=256))
"""

from ..checks import former_names
from .compare import build, compare
from .machine import Machine

__all__ = ["Machine", "build", "compare"]

_CLASSES = {
    "BatchParallel": ("integrated", "batch"),
    "DomainParallel": ("integrated", "domain"),
    "Integrated": ("integrated", "integrated"),
    "MicroBatches": ("pipeline", "pipeline, micro-batches"),
    "ModelParallel": ("integrated", "model"),
    "PerLayer": ("per_layer.predict", "per layer"),
    "Pipeline": ("pipeline", "pipeline, stale weights"),
    "Scan": ("scan", "scan"),
}
_ROOM = "sparsescan.strategies"

__getattr__ = former_names(
    __name__,
    {
        **{
            name: (
                f"strategies.{file}:{name}",
                f"compare(…, chosen=[{title!r}]), or with options {_ROOM}.{file}.{name}",
            )
            for name, (file, title) in _CLASSES.items()
        },
        **{
            name: (f"strategies.{file}:{name}", "")
            for name, file in (
                ("Comparison", "compare"),
                ("Graph", "graph"),
                ("Layer", "graph"),
                ("LayerPlan", "strategy"),
                ("Prediction", "strategy"),
                ("Recurrent", "networks"),
                ("Strategy", "strategy"),
                ("sequential", "networks"),
            )
        },
        "from_chain": ("strategies.networks:from_chain", "build(patterns)"),
        "from_sequential": ("strategies.networks:from_sequential", "build(network)"),
        "load_machine": ("strategies.machine:Machine.load", "Machine.load(path)"),
        "measure_machine": ("strategies.machine:Machine.measure", "Machine.measure()"),
        "plot_comparison": ("strategies.compare:plot_comparison", "compare(…).plot(path)"),
        "save_machine": ("strategies.machine:Machine.save", "machine.save(path)"),
    },
)
