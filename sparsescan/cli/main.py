"""The command line: ``sparsescan``, or ``python -m sparsescan``."""

from __future__ import annotations

import argparse
import errno
import importlib.metadata
import importlib.util
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NoReturn

import numpy as np

from .. import __version__, exclusive_scan, inclusive_scan, load_chain, plan
from ..checks import check_count, check_packages
from ..errors import InputError, SparseScanError
from ..execution.threads import thread_count, usable_cores
from ..kernels.addresses import address_of
from ..plan.costs.constants import file_to_write, machine_file
from ..symbolic.implicit import explicit
from ..symbolic.schedule import read_schedule
from . import mpi as _mpi_commands

_SCHEDULES = "auto, linear, blelloch, truncated:K (K up-sweep levels) or chunked:C (C chunks)"
_DEMO_PACKAGES = {"matplotlib": "matplotlib", "sklearn": "scikit-learn", "tqdm": "tqdm"}
_MPI_SCHEDULES = ("auto", "vectors", "products")
# Those of sparsescan.strategies.networks, which is imported when it is used.
_NETWORKS = (
    *("lenet5", "alexnet", "alexnet-owt", "vgg11", "vgg16", "resnet-N", "inception-v3"),
    *("rnn:T", "gru:T"),
)
_SCAN = """\
Compute the gradients of a chain that sparsescan.save_chain has written, and write
them to another .npz file. If the chain is stacked (a CSRChain or one dense array),
they are one array, under the key "gradients"; if it is a list, they are arrays under
the keys "gradient_0", "gradient_1", and so on. The last layer comes first.

mpiexec -n 4 sparsescan scan FILE.npz -o OUT.npz --mpi does the same on four ranks,
each of which reads, holds and scans its part of the chain. Open MPI, .venv/bin/mpiexec, needs
--map-by :OVERSUBSCRIBE if there are fewer cores, and --allow-run-as-root for root.
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}; see {self.prog} --help")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Parameters
    ----------
    argv : sequence of str, optional
        The arguments; by default those of the process.

    Returns
    -------
    int
        The exit code: 0; 2, with one line on stderr, if a file or an option is wrong; 130 if
        interrupted.

    Examples
    --------
    >>> from sparsescan.cli.main import main
    >>> main(["scan", "no-such-file.npz", "-o", "gradients.npz"])  # and a line on stderr
    2
    """
    argv = sys.argv[1:] if argv is None else argv
    try:
        arguments = _parser().parse_args(argv)
        arguments.command(arguments)
        sys.stdout.flush()
    except (SparseScanError, ImportError, MemoryError) as error:
        return _complain(str(error), argv)
    except BrokenPipeError:
        # Whoever reads has enough; what is left is not written when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        name = "" if error.filename is None else f"{error.filename}: "
        return _complain(f"{name}{error.strerror or error}; give a path that works", argv)
    except KeyboardInterrupt:
        return 130
    return 0


def _complain(message: str, argv: Sequence[str]) -> int:
    if _mpi_commands.speaks(argv):
        # At once, so that no other rank's output comes between.
        sys.stderr.write(f"sparsescan: {' '.join(message.split())}\n")
        sys.stderr.flush()
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="sparsescan",
        description="Gradients of long chains as a parallel scan over sparse transposed Jacobians.",
    )
    parser.add_argument("--version", action="version", version=f"sparsescan {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    training = commands.add_parser(
        "demo",
        help="train two networks and scan a chain, compared with PyTorch, NumPy and SciPy",
        description="Train an MGU, which PyTorch lacks, and a GRU to predict the next pixel of "
        "photographs. Compute the gradients of a chain of sparse Jacobians. Compare times and "
        "results with PyTorch if it is installed, else with NumPy's loop; and with SciPy's loop.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    training.add_argument("--hidden", type=int, default=20, help="units of the MGU and the GRU")
    training.add_argument("--batches", type=int, default=200, help="training steps, at most")
    training.add_argument("--batch", type=int, default=16, help="rows of a batch")
    training.add_argument(
        "--output", default="demo.png", help="PNG file for losses over time, and times"
    )
    training.add_argument("--seed", type=int, default=0, help="seed of parameters and batches")
    training.set_defaults(command=_demo)

    info = commands.add_parser("info", help="print versions, devices, threads and cache folder")
    info.set_defaults(command=_info)

    calibration = commands.add_parser(
        "calibrate",
        help="measure the times of operations on this machine, for predictions",
        description="Scan chains of all kinds for some fifteen seconds, or on a GPU for some "
        "minutes, and store the times of operations in the cache folder. If PyTorch is installed, "
        "also time calls of recurrent modules, by our kernels and by PyTorch's, for some five "
        "minutes. Run nothing else meanwhile.",
    )
    calibration.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="what is measured"
    )
    calibration.add_argument(
        "--mpi", action="store_true", help="measure the network between mpiexec's ranks instead"
    )
    calibration.set_defaults(command=_calibrate)

    show = commands.add_parser("plan", help="print the plan for a chain")
    show.add_argument("file", metavar="FILE.npz", help="written by sparsescan.save_chain")
    _add_schedule(show)
    _add_device(show)
    show.set_defaults(command=_plan)

    scan = commands.add_parser(
        "scan",
        help="compute the gradients of a chain",
        description=_SCAN,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    scan.add_argument("file", metavar="FILE.npz", help="written by sparsescan.save_chain")
    scan.add_argument("-o", "--output", metavar="OUT.npz", required=True, help="file to write")
    scan.add_argument(
        "--inclusive", action="store_true", help="also write the first layer's input gradient"
    )
    _add_schedule(scan, f"; with --mpi {_listed(_MPI_SCHEDULES)}")
    _add_device(scan)
    scan.add_argument("--mpi", action="store_true", help="share the chain among mpiexec's ranks")
    scan.set_defaults(command=_scan)
    _add_strategies(commands)
    _add_export(commands)
    return parser


def _add_export(commands: Any) -> None:
    parser = commands.add_parser(
        "export",
        help="write a trained model of PyTorch as a C file",
        description="Write a model that torch.save(model, path) has written as a header and a "
        "source file in C99, and print the memory that they take. They allocate nothing and need "
        "only math.h. Use only files that you trust: loading a model runs code in the file.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("file", metavar="MODEL.pt", help="a recurrent module, or a Sequential")
    parser.add_argument("output", metavar="MODEL.c", help="file to write, with MODEL.h next to it")
    parser.add_argument("--name", help="prefix of names in C, by default the name of the file")
    parser.add_argument("--batch", type=int, default=1, help="samples of a step")
    parser.add_argument("--dtype", help="float32 or float64, by default that of the parameters")
    parser.add_argument(
        "--functions",
        default="libm",
        help="libm, or series, which compilers vectorise: faster, with a larger error",
    )
    parser.set_defaults(command=_export)


def _add_strategies(commands: Any) -> None:
    parser = commands.add_parser(
        "strategies",
        help="compare ways to spread a training step over workers",
        description="Predict the time of a training step of a network with batch, model, domain, "
        "per-layer and pipelined parallelism and with the scan, the best first.",
    )
    parser.add_argument(
        "network",
        metavar="NETWORK",
        help=f"{', '.join(_NETWORKS)}, where N is 6n + 2, such as 110, and T a number of steps; or "
        "a file FILE.npz that sparsescan.save_chain has written",
    )
    parser.add_argument("--workers", type=int, required=True, metavar="P", help="number of workers")
    parser.add_argument("--batch", type=int, required=True, metavar="B", help="samples of a step")
    parser.add_argument(
        "--machine",
        metavar="MACHINE",
        help="a worker and its networks: p100, v100, a100 or h100, or a JSON file; by default "
        "the one that strategies.Machine.save has stored, or else a GPU's",
    )
    parser.add_argument(
        "--strategy",
        action="append",
        metavar="NAME",
        help="show this one, by the name in the table; may be given several times",
    )
    parser.add_argument(
        "--overlap",
        action="store_true",
        help="sum gradients of parameters during the backward pass",
    )
    parser.add_argument(
        "--json", metavar="OUT.json", help="JSON file for the plans, layer by layer"
    )
    parser.add_argument("--plot", metavar="OUT.png", help="PNG file for the time of a step over P")
    parser.set_defaults(command=_strategies)


def _add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cpu", help="where the scan runs: cpu or cuda")


def _add_schedule(parser: argparse.ArgumentParser, more: str = "") -> None:
    parser.add_argument("--schedule", default="auto", help=_SCHEDULES + more)


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"


def _demo(arguments: argparse.Namespace) -> None:
    from ..examples import demo

    for name in ("hidden", "batches", "batch"):
        check_count(name, getattr(arguments, name), 1)
    check_count("seed", arguments.seed, 0)
    check_packages("the demo", "demo", _DEMO_PACKAGES)
    _check_output(arguments.output)
    demo.run(
        hidden=arguments.hidden,
        batches=arguments.batches,
        batch=arguments.batch,
        output=arguments.output,
        seed=arguments.seed,
    )


def _export(arguments: argparse.Namespace) -> None:
    check_packages("an export", "test", {"torch": "torch"})
    from .. import export
    from ..torch.networks import load

    options = ("name", "batch", "dtype", "functions")
    given = {name: getattr(arguments, name) for name in options}
    print(export.c(load(arguments.file), arguments.output, **given))


def _info(arguments: argparse.Namespace) -> None:
    rows = [("sparsescan", __version__), ("python", platform.python_version())]
    rows += [(name, _version(name)) for name in ("numba", "numpy", "scipy")]
    rows += [("cupy", _version("cupy", "cupy-cuda12x", "cupy-cuda13x"))]
    rows += [("numba-cuda", _version("numba-cuda"))]
    rows += [("CPU", f"{_cpu_name()}, {len(usable_cores())} usable")]
    rows += [("CUDA GPUs", ", ".join(_gpu_names()) or "none")]
    rows += [("threads", f"{thread_count()} (NUMBA_NUM_THREADS)")]
    rows += [("Numba cache", f"{address_of.stats.cache_path or 'none'} (NUMBA_CACHE_DIR)")]
    calibration = machine_file()
    # Not Path.exists, which raises where a folder above cannot be read.
    there = calibration is not None and os.path.exists(calibration)
    rows += [("calibration", str(calibration) if there else "none")]
    for name, value in rows:
        print(f"{name:<12}{value}")


def _calibrate(arguments: argparse.Namespace) -> None:
    if arguments.mpi:
        _mpi_commands.calibrate(arguments)
        return
    if arguments.device == "cuda":
        from ..plan.calibrate_device import calibrate_device
        from ..plan.costs.cuda import save_gpu

        file_to_write(machine_file())
        gpu = calibrate_device()
        _print_families(gpu.families)
        print(f"a run {gpu.run:.0f} ns, a launch {gpu.launch:.0f} ns")
        blocks = f"{gpu.blocks:.0f} blocks at once"
        print(f"{blocks}, memory {gpu.bandwidth:.0f} GB/s; kept in {save_gpu(gpu)}")
        return
    from ..plan.calibrate import calibrate
    from ..plan.costs.cpu import save_cpu

    file_to_write(machine_file())
    machine = calibrate()
    _print_families(machine.families)
    print(f"a run {machine.run:.0f} ns, a meeting of threads {machine.meet:.0f} ns")
    print(f"memory {machine.bandwidth:.0f} GB/s, one thread; kept in {save_cpu(machine)}")
    if importlib.util.find_spec("torch") is None:
        return
    from ..torch.calibrate import calibrate as calibrate_modules

    print("calls of recurrent modules by both kernels, for some five minutes more")
    print(f"kept in {calibrate_modules()}")


def _print_families(families: dict[str, list[list[float]]]) -> None:
    from ..plan.costs.operations import FAMILIES

    print(f"{'nanoseconds of':<16}{'multiply-add':>14}{'entry':>10}{'operation':>12}")
    for name, constants in families.items():
        for family, (multiply_add, entry, operation) in zip(FAMILIES, constants, strict=True):
            print(f"{family:<16}{multiply_add:>14.3f}{entry:>10.3f}{operation:>12.0f}  {name}")


def _plan(arguments: argparse.Namespace) -> None:
    # Before the file is read; a schedule for no Jacobians is the shortest.
    read_schedule(arguments.schedule, 0)
    grad, jacobians = load_chain(arguments.file)
    parts = jacobians if isinstance(jacobians, list) else [jacobians]
    prepared = plan(
        jacobians,
        schedule=arguments.schedule,
        batch=(len(grad) or None) if grad.ndim == 2 else None,
        dtype=np.result_type(grad, *{part.dtype for part in parts}),
        device=arguments.device,
    )
    print(prepared)


def _scan(arguments: argparse.Namespace) -> None:
    if arguments.mpi:
        if arguments.schedule not in _MPI_SCHEDULES:
            raise InputError(
                f"argument --schedule: {arguments.schedule!r} is no schedule of --mpi; expected "
                f"{_listed(_MPI_SCHEDULES)}"
            )
        _mpi_commands.scan(arguments)
        return
    read_schedule(arguments.schedule, 0)
    grad, jacobians = load_chain(arguments.file)
    scan = inclusive_scan if arguments.inclusive else exclusive_scan
    start = time.perf_counter()
    gradients = scan(grad, jacobians, schedule=arguments.schedule, device=arguments.device)
    seconds = time.perf_counter() - start
    arrays: dict[str, Any]
    if isinstance(gradients, np.ndarray):
        arrays = {"gradients": gradients}
    else:
        arrays = {f"gradient_{k}": gradient for k, gradient in enumerate(gradients)}
    # np.savez would append .npz to a name without it.
    with open(arguments.output, "wb") as file:
        np.savez(file, allow_pickle=False, **arrays)
    dtype = gradients[0].dtype if len(gradients) else grad.dtype
    print(f"{arguments.output}: {len(gradients)} gradients of {dtype}, in {seconds:.3g} s")


def _strategies(arguments: argparse.Namespace) -> None:
    name = arguments.network
    workers = check_count("--workers", arguments.workers, 1)
    batch = check_count("--batch", arguments.batch, 1)
    from ..strategies import Machine, build, compare
    from ..strategies.compare import named
    from ..strategies.machine import worker_file
    from ..strategies.networks import from_chain

    if arguments.plot is not None:
        check_packages("a picture", "plot", {"matplotlib": "matplotlib"})
        _check_output(arguments.plot)
    if arguments.json is not None:
        _check_output(arguments.json)
    chosen = named(arguments.strategy)
    if name.endswith(".npz"):
        _, jacobians = load_chain(name)
        patterns = plan(jacobians, schedule="linear").patterns
        network = from_chain(list(map(explicit, patterns)), name)
    else:
        network = build(name)
    machine = Machine.load(arguments.machine)
    machine = replace(machine, overlap=machine.overlap or arguments.overlap)
    compared = compare(network, machine, workers, batch, chosen)
    if arguments.plot is not None:
        compared.plot(arguments.plot)
    if arguments.json is not None:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(compared.to_dict(), file, indent=1)
    print(compared)
    kept = worker_file()
    if arguments.machine is None and kept is not None and os.path.exists(kept):
        print(f"for the machine that was measured and kept: {kept}")
    if arguments.plot is not None:
        print(f"time of a step over the number of workers: {arguments.plot}")
    if arguments.json is not None:
        print(f"the plans, layer by layer: {arguments.json}")


def _check_output(output: str | os.PathLike[str]) -> None:
    """Raise, before the work, if a file could not be written after it."""
    folder = os.path.dirname(os.path.abspath(output))
    if os.path.isdir(output):
        code = errno.EISDIR
    elif not os.path.isdir(folder):
        code = errno.ENOENT
    elif not os.access(output if os.path.exists(output) else folder, os.W_OK):
        code = errno.EACCES
    else:
        return
    raise OSError(code, os.strerror(code), os.fspath(output))


def _version(*names: str) -> str:
    """Return the version of the first of these distributions that is installed."""
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "not installed"


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _gpu_names() -> list[str]:
    """Return what the driver says, so that none of the optional packages is needed."""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return answer.stdout.strip().splitlines()


if __name__ == "__main__":
    sys.exit(main())
