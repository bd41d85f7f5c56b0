"""Making the native library: what happens without a compiler, with a broken one, with two processes, with damage."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from deepinfer_core.errors import KernelError
from deepinfer_core.kernels.contract import OPS, SAMPLING_OPS, Unavailable
from deepinfer_core.kernels.native import NativeProvider, compiler, library
from deepinfer_core.kernels.registry import build_kernels, choose_provider, native_status
from tests.core.kernels.native_library import needs_compiler
from tests.core.model_configs import small_config

CPU = choose_provider("cpu")
SOURCES = Path(compiler.__file__).parent / "src"


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder as the whole PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


def make_program(folder: Path, script: str) -> None:
    program = folder / "cc"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)


# ---- where it cannot be made --------------------------------------------------------------------------------------


def test_without_a_compiler_the_reference_runs_and_the_reason_is_reported_and_logged(
    programs: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        kernels, sources = build_kernels(CPU, small_config(), torch.float32, cache_dir=str(tmp_path / "cache"))
    assert {source.provider for source in sources} == {"reference"}
    assert all("no C compiler is installed" in source.reason for source in sources)
    assert "no C compiler is installed" in caplog.text
    assert kernels.row_multiple == 8
    status = native_status()
    assert isinstance(status.result, Unavailable)
    assert "install gcc or clang" in status.result.reason


@pytest.mark.bad_input
def test_asked_for_by_name_they_are_an_error_where_there_is_no_compiler(programs: Path, tmp_path: Path) -> None:
    with pytest.raises(KernelError, match=r"cpu_kernels is 'native' .* no C compiler is installed"):
        build_kernels(CPU, small_config(), torch.float32, cpu_kernels="native", cache_dir=str(tmp_path))


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("exit 1", "no C compiler works"),
        (
            '[ "$1" = --version ] && echo "odd 1.0" && exit 0\necho "no such instruction" >&2; exit 3',
            "no such instruction",
        ),
    ],
)
def test_what_a_broken_compiler_says_is_the_reason(programs: Path, tmp_path: Path, script: str, reason: str) -> None:
    make_program(programs, script)
    with pytest.raises(KernelError, match=reason):
        compiler.build_library(tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("*.so"))


@needs_compiler
@pytest.mark.bad_input
def test_a_cache_folder_that_cannot_be_made_is_named_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(KernelError, match=r"file/cache cannot be written .* DEEPINFER_JIT_CACHE_DIR"):
        compiler.build_library(tmp_path / "file" / "cache")


def test_a_user_without_a_home_folder_runs_on_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.delenv("DEEPINFER_JIT_CACHE_DIR", raising=False)
    _, sources = build_kernels(CPU, small_config(), torch.float32)
    assert all(source.provider == "reference" and "no home folder" in source.reason for source in sources)


# ---- what is chosen -----------------------------------------------------------------------------------------------


@needs_compiler
def test_every_operation_of_the_forward_pass_comes_from_the_native_kernels() -> None:
    kernels, sources = build_kernels(CPU, small_config(), torch.float32)
    lacking = SAMPLING_OPS - {"draw_token"}  # torch is as good at what is left of sampling on a CPU
    assert {source.op for source in sources if source.provider == "native"} == set(OPS) - lacking
    assert kernels.row_multiple == 1


@needs_compiler
def test_another_dtype_runs_on_the_reference_with_the_reason() -> None:
    kernels, sources = build_kernels(CPU, small_config(), torch.bfloat16)
    assert all(source.provider == "reference" for source in sources)
    assert all("float32" in source.reason for source in sources if source.op not in SAMPLING_OPS - {"draw_token"})
    assert kernels.row_multiple == 8


def test_the_reference_can_be_asked_for() -> None:
    _, sources = build_kernels(CPU, small_config(), torch.float32, cpu_kernels="reference")
    assert {source.provider for source in sources} == {"reference"}


# ---- the cache ----------------------------------------------------------------------------------------------------

_BUILD = """
import sys
from pathlib import Path
from deepinfer_core.kernels.native.compiler import build_library
print(build_library(Path(sys.argv[1])))
"""


@needs_compiler
@pytest.mark.slow
def test_two_processes_at_once_and_a_damaged_file_end_with_one_good_library(tmp_path: Path) -> None:
    processes = [
        subprocess.Popen([sys.executable, "-c", _BUILD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    paths = {process.communicate()[0].strip() for process in processes}
    assert len(paths) == 1
    assert [str(path) for path in tmp_path.iterdir()] == list(paths)
    made = Path(paths.pop())
    made.write_bytes(b"not a library")
    NativeProvider(tmp_path).load()
    assert made.stat().st_size > 1000


@needs_compiler
def test_a_second_process_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = compiler.default_cache_dir()
    path = compiler.build_library(folder)
    monkeypatch.setattr(compiler, "_compile", lambda *_: pytest.fail("it was compiled again"))
    assert compiler.build_library(folder) == path


@needs_compiler
def test_the_key_changes_with_flags_and_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    found = compiler.find_compiler()
    key = compiler._key(found, ["-O3"])
    assert compiler._key(found, ["-O2"]) != key
    monkeypatch.setattr(compiler, "_cpu", lambda: "another processor")
    assert compiler._key(found, ["-O3"]) != key


# ---- the border between Python and C ------------------------------------------------------------------------------


def test_the_signatures_are_those_of_the_c_functions() -> None:
    letters = {"int64_t": "i", "int": "n", "float": "f"}
    declared: dict[str, str] = {}
    for source in SOURCES.glob("*.c"):
        for name, parameters in re.findall(r"^int di_(\w+)\(([^)]*)\)", source.read_text(), re.MULTILINE):
            declared[name] = "".join(
                "p" if "*" in parameter else letters[parameter.split()[-2]] for parameter in parameters.split(",")
            )
    assert declared == library._SIGNATURES


@needs_compiler
@pytest.mark.bad_input
def test_a_row_outside_its_cache_is_an_error_and_nothing_is_written() -> None:
    ops = NativeProvider().load()
    cache = torch.zeros(4, 64)
    for row in (-1, 4):
        with pytest.raises(KernelError, match="outside its table"):
            ops["write_window"](cache, torch.tensor([0, row]), torch.ones(2, 64))
        with pytest.raises(KernelError, match="outside its table"):
            ops["copy_rows"](cache, torch.tensor([0]), torch.tensor([row]))
    assert not cache.any()
    with pytest.raises(KernelError, match="outside its table"):
        ops["attend"](torch.ones(1, 2, 64), cache, torch.tensor([[4]]), None, None, torch.zeros(2))
