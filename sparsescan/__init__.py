"""Gradients of long chains as a parallel scan over sparse transposed Jacobians (BPPSA, MLSys 2020).

>>> import numpy as np, sparsescan
>>> jacobians = np.full((3, 2, 2), 0.25)  # from the last layer to the first, each transposed
>>> sparsescan.exclusive_scan([1.0, 3.0], jacobians)
array([[1. , 3. ],
       [1. , 1. ],
       [0.5, 0.5]])
"""

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from .api import exclusive_scan, inclusive_scan, plan
from .chains.containers import BatchedCSR, CSRChain
from .chains.implicit import ImplicitChain, ImplicitStep
from .chains.solve import SolveStep
from .checks import former_names
from .differences import check_grad
from .errors import (
    DeviceError,
    FileError,
    GradientError,
    InputError,
    InputTypeError,
    MemoryLimitError,
    NewtonError,
    PatternMismatchError,
    SingularMatrixError,
    SparseScanError,
)
from .ops.affine import affine_scan, affine_scan_vjp
from .ops.attention import linear_attention, linear_attention_vjp
from .plan.scan_plan import ScanPlan
from .symbolic.implicit import ImplicitPattern
from .symbolic.pattern import Pattern
from .symbolic.schedule import Schedule

if TYPE_CHECKING:
    from .chains.files import load_chain, save_chain

__all__ = [
    "BatchedCSR",
    "CSRChain",
    "DeviceError",
    "FileError",
    "GradientError",
    "ImplicitChain",
    "ImplicitPattern",
    "ImplicitStep",
    "InputError",
    "InputTypeError",
    "MemoryLimitError",
    "NewtonError",
    "Pattern",
    "PatternMismatchError",
    "ScanPlan",
    "Schedule",
    "SingularMatrixError",
    "SolveStep",
    "SparseScanError",
    "__version__",
    "affine_scan",
    "affine_scan_vjp",
    "check_grad",
    "exclusive_scan",
    "inclusive_scan",
    "linear_attention",
    "linear_attention_vjp",
    "load_chain",
    "plan",
    "save_chain",
]

try:
    __version__ = version("sparsescan")
except PackageNotFoundError:  # a source tree that is not installed
    __version__ = "0+unknown"


_former = former_names(
    __name__,
    {
        "AffineGrads": ("ops.affine:AffineGrads", ""),
        "ChainFileError": ("errors:FileError", "FileError"),
        "IndexedPattern": (
            "symbolic.indexed:IndexedPattern",
            "ImplicitPattern([pattern, …], indexed={0: (index, size)})",
        ),
        "PeriodicChain": (
            "chains.containers:PeriodicChain",
            "CSRChain.from_pattern(values, patterns)",
        ),
        "PlanFileError": ("errors:FileError", "FileError"),
    },
)


def __getattr__(name: str) -> Any:
    # Few programs read files; what does so is imported when it is asked for.
    if name in ("load_chain", "save_chain"):
        from .chains import files

        return getattr(files, name)
    return _former(name)


def __dir__() -> list[str]:
    return __all__
