"""The exceptions a caller can catch; each is also the built-in one that fits."""


class SparseScanError(Exception):
    """Base class of every exception that this package raises on purpose."""


class InputError(SparseScanError, ValueError):
    """An argument has the right type but a wrong shape, index, size or value."""


class InputTypeError(SparseScanError, TypeError):
    """An argument has a type, a sparse format or a dtype that is not supported."""


class PatternMismatchError(InputError):
    """A Jacobian given to a plan has another pattern than the plan was made for."""


class ChainFileError(InputError):
    """A file is not a chain written by :func:`sparsescan.save_chain`."""


class PlanFileError(InputError):
    """A file is not a plan written by :meth:`sparsescan.ScanPlan.save`."""


class DeviceError(SparseScanError, RuntimeError):
    """A device was asked for, or holds the data, that cannot be used here."""


class MemoryLimitError(SparseScanError, MemoryError):
    """A plan needs more memory than it was allowed."""


class RankError(SparseScanError, RuntimeError):
    """One of the ranks of :mod:`sparsescan.parallel` met an exception that is none of these."""
