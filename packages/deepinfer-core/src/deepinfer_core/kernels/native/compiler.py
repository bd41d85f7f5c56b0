"""Compiles the C sources of this package into a shared library in a cache folder, once a machine.

    key = blake2b(sources, flags, compiler's version, this CPU)        <folder>/native-<key>.so

The library is written beside its final name and renamed, so a process sees a whole file or none, and two processes that
compile at once end with the same one. The CPU is part of the key because -march=native is: a cache folder in a home
directory may be shared by unlike machines.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from deepinfer_core.errors import KernelError

__all__ = ["Compiler", "build_library", "default_cache_dir", "find_compiler"]

_log = logging.getLogger(__name__)

_SOURCES = Path(__file__).parent / "src"
_PROGRAMS = ("cc", "gcc", "clang")
_TIMEOUT_S = 300
_FLAGS = (
    "-std=c11", "-O3", "-march=native", "-fPIC", "-pthread",
    "-ffp-contract=off",  # whether two operations are fused is written in the source (simd.h)
    "-fno-math-errno", "-fno-trapping-math",  # neither changes a value
    "-fvisibility=default",
)  # fmt: skip
_X86_FLAGS = ("-mprefer-vector-width=512",)
_MESSAGE_CHARS = 400


@dataclass(frozen=True, slots=True)
class Compiler:
    """A C compiler that answered."""

    path: str
    version: str  # first line of --version


def default_cache_dir() -> Path:
    """Where libraries are kept when no folder is set. Raises KernelError for a user without a home folder."""
    try:
        return Path.home() / ".cache" / "deepinfer"
    except RuntimeError as error:
        raise KernelError("there is no home folder to keep compiled kernels in; set jit_cache_dir") from error


def find_compiler() -> Compiler:
    """The first of cc, gcc, clang on PATH that answers. Raises KernelError with what is missing."""
    problems: list[str] = []
    for program in _PROGRAMS:
        path = shutil.which(program)
        if path is None:
            continue
        try:
            done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30, check=True)
            return Compiler(path, done.stdout.splitlines()[0] if done.stdout else program)
        except (OSError, subprocess.SubprocessError) as error:
            problems.append(f"{path} does not run ({type(error).__name__})")
    if problems:
        raise KernelError(f"no C compiler works: {'; '.join(problems)}")
    raise KernelError(f"no C compiler is installed (looked for {', '.join(_PROGRAMS)}); install gcc or clang")


def build_library(cache_dir: Path, *, rebuild: bool = False) -> Path:
    """The compiled library, from `cache_dir` or made there. Raises KernelError with the reason and the way out."""
    compiler = find_compiler()
    sources = sorted(_SOURCES.glob("*.c"))
    flags = [*_FLAGS, *(_X86_FLAGS if platform.machine() in ("x86_64", "AMD64") else ())]
    library = cache_dir / f"native-{_key(compiler, flags)}.so"
    if library.exists() and not rebuild:
        return library
    _log.info("compiling the native CPU kernels into %s; this takes a few seconds, once", library)
    try:
        cache_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="build-", dir=cache_dir) as folder:
            made = _compile(compiler, flags, sources, Path(folder))
            made.replace(library)
    except OSError as error:
        raise KernelError(
            f"the kernel cache folder {cache_dir} cannot be written ({error.strerror or error}); set jit_cache_dir or "
            "DEEPINFER_JIT_CACHE_DIR to one that can"
        ) from error
    return library


def _compile(compiler: Compiler, flags: list[str], sources: list[Path], folder: Path) -> Path:
    """Objects side by side, then one library."""
    objects = [folder / f"{source.stem}.o" for source in sources]
    with ThreadPoolExecutor(min(len(sources), os.cpu_count() or 1)) as pool:
        commands = [
            [compiler.path, *flags, "-c", str(source), "-o", str(made)]
            for source, made in zip(sources, objects, strict=True)
        ]
        list(pool.map(_call, commands))
    library = folder / "library.so"
    _call([compiler.path, "-shared", "-pthread", *map(str, objects), "-lm", "-o", str(library)])
    return library


def _call(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        raise KernelError(f"{command[0]} could not be run: {type(error).__name__}: {error}") from error
    if done.returncode:
        message = (done.stderr or done.stdout).strip()[:_MESSAGE_CHARS]
        raise KernelError(f"{command[0]} ended with status {done.returncode}: {message or 'no message'}")


def _key(compiler: Compiler, flags: list[str]) -> str:
    digest = hashlib.blake2b(digest_size=12)
    for source in sorted(_SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    digest.update("\0".join([compiler.path, compiler.version, *flags, _cpu()]).encode())
    return digest.hexdigest()


def _cpu() -> str:
    """Model and instruction sets of this machine's processor."""
    wanted = ("model name", "flags", "Features", "CPU part")
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
        described = [line for line in lines if line.startswith(wanted)]
    except OSError:
        described = []
    return "\n".join(described) or f"{platform.machine()} {platform.processor()}"
