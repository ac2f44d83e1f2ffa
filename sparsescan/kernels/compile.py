"""The one door to ``numba.njit``: compiled functions whose cache on disk may be damaged.

Numba keeps what it has compiled in an index (``.nbi``) and in data files (``.nbc``), and trusts
them: a truncated file raises whatever ``pickle`` stumbles over, and a flipped bit is run as machine
code. Here each file ends with a checksum, and one that is damaged counts as missing: the function
is compiled anew, and the file replaced. One process at a time compiles and saves a function, and
others that wait for it read what it has saved: two that save at once would give their files one
name, and an index to code for other types. Where no folder can be written, each process compiles
what it needs, and one warning says so.

A function without a cache is a helper: only kernels call it. By itself Numba would optimise every
helper, make machine code of it and let Python call it, and do all of that again in each function
that calls it. Here a helper is only lowered, and then optimised once, as a part of each kernel.
"""

from __future__ import annotations

import functools
import hashlib
import io
import os
import pickle
import warnings
from collections.abc import Callable, Iterable
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numba
from numba.core.caching import (
    CompileResultCacheImpl,
    FunctionCache,
    IndexDataCacheFile,
    UserWideCacheLocator,
)
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler
from numba.core.compiler_lock import global_compiler_lock

try:
    import fcntl
except ImportError:  # not POSIX, where processes may compile a function at once
    fcntl = None  # type: ignore[assignment]

_DIGEST_SIZE = 16


def njit(function: Callable[..., Any] | None = None, *, cache: bool = False, **options: Any) -> Any:
    """Compile a function as ``numba.njit`` does, with the same options.

    Without `cache` it is a helper, which compiled functions can call, and Python cannot.

    Parameters
    ----------
    function : callable, optional
        The function; without it a decorator is returned.
    cache : bool, default False
        Whether to keep compiled code on disk, in Numba's places and format; where none of these can
        be written, it is kept in memory.
    **options
        As for ``numba.njit``.
    """

    def compiled(function: Callable[..., Any]) -> Any:
        if not cache:
            return _helper(function, dict(options))
        dispatcher = numba.njit(**options)(function)
        # Where NUMBA_DISABLE_JIT is set, it is the function itself.
        kept = _cache_of(function) if hasattr(dispatcher, "_cache") else None
        if kept is not None:
            dispatcher._cache = kept
            compile_or_load = dispatcher.compile

            def compile_alone(signature: Any) -> Any:
                # This lock comes first, or two threads could wait for each other.
                with global_compiler_lock, kept.lock:
                    return compile_or_load(signature)

            dispatcher.compile = compile_alone
        return dispatcher

    return compiled if function is None else compiled(function)


def _helper(function: Callable[..., Any], options: dict[str, Any]) -> Any:
    """Return a function that is compiled into the kernels that call it, and nowhere else."""
    options |= {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    dispatcher: Any = numba.njit(pipeline_class=_HelperCompiler, **options)(function)
    if not hasattr(dispatcher, "_compiler"):
        return dispatcher
    compiler = dispatcher._compiler
    compile_function = compiler.compile

    def without_code(flags: Any) -> Any:
        flags.no_compile = True
        return flags

    def refuse(*_: Any) -> None:
        raise TypeError(f"{function.__name__} can be called by compiled functions only")

    def compile_helper(args: Any, return_type: Any) -> Any:
        # Callers know code by its entry point, which is what Python calls.
        result = compile_function(args, return_type)
        result = result._replace(entry_point=functools.partial(refuse))
        context = dispatcher.targetctx
        context.insert_user_function(result.entry_point, result.fndesc, [result.library])
        return result

    def add_overload(result: Any) -> None:
        dispatcher.overloads[tuple(result.signature.args)] = result

    compiler._customize_flags = without_code
    compiler.compile = compile_helper
    dispatcher.add_overload = add_overload
    return dispatcher


class _HelperCompiler(Compiler):
    """Compile into a :class:`_HelperLibrary`."""

    def compile_extra(self, function: Callable[..., Any]) -> Any:
        """Compile a function from its bytecode."""
        state: Any = self.state
        library: Any = _HelperLibrary
        state.library = library(state.targetctx.codegen(), function.__qualname__)
        state.library.enable_object_caching()
        return super().compile_extra(function)  # type: ignore[no-untyped-call]


class _HelperLibrary(JITCodeLibrary):
    """Keep the code of a helper as it is lowered, linked with that of the helpers it calls."""

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalized = True


def cache_folder(function: Callable[..., Any]) -> Path | None:
    """Return the folder for the compiled code of a function, or None where none can be written."""
    try:
        locator = _Places(function).locator  # type: ignore[no-untyped-call]
        locator.ensure_cache_path()
    except (OSError, RuntimeError):
        return None
    return Path(locator.get_cache_path())


def _cache_of(function: Callable[..., Any]) -> _Cache | None:
    """Return the cache of a function; None where no folder can be written, and warn once."""
    try:
        return _Cache(function)
    except RuntimeError as error:
        if "no locator available" not in str(error):
            raise
        _warn_of_memory()
        return None


@functools.cache
def _warn_of_memory() -> None:
    named = os.environ.get("NUMBA_CACHE_DIR")
    place = f"NUMBA_CACHE_DIR, {named!r}," if named else "the user's cache folder"
    warnings.warn(
        f"neither {place} nor the folder of sparsescan can be written: kernels are compiled anew "
        "in every process, which takes seconds to a minute; set the environment variable "
        "NUMBA_CACHE_DIR to a folder that can be written",
        RuntimeWarning,
        stacklevel=2,
    )


class _HomeFolder(UserWideCacheLocator):
    """Keep compiled code in the user's cache folder, if the user has one.

    Without a home the folder would be called ``~``, in whichever directory the process is.
    """

    @classmethod
    def from_function(cls, py_func: Any, py_file: Any) -> Any:
        place = cls(py_func, py_file).get_cache_path()  # type: ignore[no-untyped-call]
        if not os.path.isabs(place):
            return None
        return super().from_function(py_func, py_file)  # type: ignore[no-untyped-call]


class _Places(CompileResultCacheImpl):
    """Find the folder of a function's compiled code, as Numba does."""

    _locator_classes = [  # noqa: RUF012
        _HomeFolder if place is UserWideCacheLocator else place
        for place in CompileResultCacheImpl._locator_classes
    ]


class _Cache(FunctionCache):
    """Keep the compiled code of one function, if the disk can be written.

    `lock` holds other processes up from when code is missing to the end of its ``with``.
    """

    _impl_class = _Places

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)  # type: ignore[no-untyped-call]
        self.lock = ExitStack()
        self._cache_file = _CheckedFiles(  # type: ignore[no-untyped-call]
            cache_path=self._cache_path,
            filename_base=self._impl.filename_base,
            source_stamp=_source_stamp(Path(function.__code__.co_filename).parent),
        )

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        load = super().load_overload
        code = load(sig, target_context)  # type: ignore[no-untyped-call]
        if code is None and fcntl is not None:
            with suppress(OSError):
                self._impl.locator.ensure_cache_path()
                path = Path(f"{self._cache_file._index_path}.lock")
                file = self.lock.enter_context(path.open("ab"))
                fcntl.flock(file, fcntl.LOCK_EX)  # until it is closed
                code = load(sig, target_context)  # type: ignore[no-untyped-call]
        return code

    def save_overload(self, sig: Any, data: Any) -> None:
        # A folder that cannot be written, or a full disk, takes time and nothing else.
        with suppress(OSError):
            super().save_overload(sig, data)  # type: ignore[no-untyped-call]


_Stamp = tuple[tuple[int, int], ...]
_ENGINE = Path(__file__).parent


@functools.cache
def _source_stamp(folder: Path) -> _Stamp:
    """Return what changes with any file of a folder, or of the engine's kernels.

    The compiled code of a function holds that of the functions that it calls.
    """
    if folder == _ENGINE:
        return _stamp(_ENGINE.rglob("*.py"))
    engine = _source_stamp(_ENGINE)
    return engine if _ENGINE in folder.parents else (*engine, *_stamp(folder.glob("*.py")))


def _stamp(files: Iterable[Path]) -> _Stamp:
    stats = (file.stat() for file in sorted(files))
    return tuple((stat.st_mtime_ns, stat.st_size) for stat in stats)


class _CheckedFiles(IndexDataCacheFile):
    """Read and write the index and the data files of a function, each followed by its checksum."""

    def _load_index(self) -> dict[Any, str]:
        try:
            with io.BytesIO(read_checked(self._index_path)) as file:
                if pickle.load(file) != self._version:
                    return {}
                stamp, overloads = pickle.load(file)
        # Of an earlier version of this package it may name types that are no more.
        except (OSError, AttributeError, ImportError):
            return {}
        kept: dict[Any, str] = overloads if stamp == self._source_stamp else {}
        return kept

    def _load_data(self, name: str) -> Any:
        # An OSError says that the file is missing.
        path = self._data_path(name)  # type: ignore[no-untyped-call]
        return pickle.loads(read_checked(path))

    @contextmanager
    def _open_for_write(self, path: str) -> Any:
        content = io.BytesIO()
        yield content
        with super()._open_for_write(path) as file:
            file.write(with_checksum(content.getvalue()))


def with_checksum(content: bytes) -> bytes:
    """Return the content of a file that :func:`read_checked` reads."""
    return content + _digest(content)


def read_checked(path: str | Path) -> bytes:
    """Return the content of a file without its checksum; an :class:`OSError` if that is wrong."""
    with open(path, "rb") as file:
        content = file.read()
    content, digest = content[:-_DIGEST_SIZE], content[-_DIGEST_SIZE:]
    if _digest(content) != digest:
        raise OSError(f"{path} is damaged: its checksum is wrong")
    return content


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_DIGEST_SIZE).digest()


@functools.cache
def entry_for_c(function: Any, kinds: tuple[Any, ...] = (numba.int64,)) -> int:
    """Return the address of a compiled function for C; `kinds` are Numba's types of arguments.

    Arrays have no type in C: a function of ``numba.types.CPointer`` takes addresses of numbers.
    """
    function.compile(kinds)
    compiled = function.overloads[kinds]
    name = compiled.fndesc.llvm_cfunc_wrapper_name
    return int(compiled.library.get_pointer_to_function(name))
