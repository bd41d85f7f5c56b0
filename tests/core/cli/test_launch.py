"""`deepinfer launch`: the command line that it writes, and two nodes (on one machine) that it really starts."""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.run import parse_args as parse_torchrun

from deepinfer_core.cli import main
from tests.core.harness import FIXTURES

TORCHRUN = ["-m", "torch.distributed.run"]


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> list[list[str]]:
    assert main(["launch", *words]) == 0
    return [shlex.split(line) for line in capsys.readouterr().out.splitlines()]


def test_one_node_needs_no_address(capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = printed(capsys, "--print", "generate", "The sea", "--expert-parallel-size", "4", "--temperature", "0")
    options = ["--nnodes=1", "--nproc-per-node=4", "--max-restarts=0", "--standalone", "-m", "--", "deepinfer_core.cli"]
    flags = ["generate", "The sea", "--expert-parallel-size", "4", "--temperature", "0"]
    assert line == [sys.executable, *TORCHRUN, *options, *flags]


def test_every_node_gets_its_own_line(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--data-parallel-size", "4", "--context-parallel-size", "2", "--expert-parallel-size", "8"]
    lines = printed(capsys, "--nodes", "2", "--master", "10.0.0.1:29500", "--print", "bench", *sizes)
    assert [line[6:9] for line in lines] == [
        [f"--node-rank={node}", "--master-addr=10.0.0.1", "--master-port=29500"] for node in range(2)
    ]
    assert all("--nproc-per-node=4" in line for line in lines)


def test_a_script_is_launched_with_the_ranks_that_it_is_given(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    script = tmp_path / "serve.py"
    script.touch()
    (line,) = printed(capsys, "--ranks", "2", "--print", str(script), "--its-own", "flag")
    assert line[-3:] == [str(script), "--its-own", "flag"]
    assert "--nproc-per-node=2" in line


def test_flags_of_the_command_are_no_flags_of_torchrun(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["generate", "The sea", "--n", "2", "--ma", "--print", "--expert-parallel-size", "4"]
    (line,) = printed(capsys, "--print", *words)
    parsed = parse_torchrun(line[3:])
    assert (parsed.training_script, parsed.training_script_args) == ("deepinfer_core.cli", words)
    assert parsed.module
    assert parsed.nproc_per_node == "4"


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "say what to launch"),
        (["fly"], "'fly' is no command"),
        (["--ranks", "3", "generate", "x", "--expert-parallel-size", "2"], "--ranks is 3, and the settings .* 2"),
        (["--nodes", "2", "generate", "x", "--expert-parallel-size", "4"], "say with --master HOST:PORT"),
        (["--nodes", "2", "--master", "a:1", "generate", "x", "--expert-parallel-size", "4"], "--node-rank which one"),
        (["--nodes", "3", "generate", "x", "--expert-parallel-size", "4"], "4 ranks do not fill 3 nodes"),
        (["--nodes", "2", "generate", "x"], "1 rank does not fill 2 nodes .* such as --expert-parallel-size 2"),
        (["--nodes", "0", "generate", "x"], "--nodes is 0"),
        (["--print", "--master", "here", "generate", "x"], "--master is 'here'; it must be HOST:PORT"),
        (["--print", "--master", "a:99999", "generate", "x"], "--master is 'a:99999'"),
        (["--node-rank", "1", "generate", "x"], "--node-rank is 1"),
        (["generate", "x", "--expert-parallel-size", "2", "--data-parallel-size", "3"], "expert_parallel_size is 2"),
    ],
)
def test_what_cannot_be_launched_is_refused(capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    assert main(["launch", *words]) == 2
    error = capsys.readouterr().err
    assert re.search(message, error), error


@pytest.mark.bad_input
def test_a_script_without_a_number_of_ranks_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    script = tmp_path / "serve.py"
    script.touch()
    assert main(["launch", str(script)]) == 2
    assert "say with --ranks" in capsys.readouterr().err


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@pytest.mark.slow
def test_two_nodes_answer_as_one_process_does(capfd: pytest.CaptureFixture[str]) -> None:
    generate = ["generate", "The sea", "--model", str(FIXTURES / "tiny-a"), "--quiet", "--max-tokens", "6"]
    generate += ["--temperature", "0", "--draft-schedule", "fixed", "--max-num-seqs", "4"]
    launch = [sys.executable, "-m", "deepinfer_core.cli", "launch", "--nodes", "2"]
    launch += ["--master", f"127.0.0.1:{free_port()}"]
    nodes = [
        subprocess.Popen(
            [*launch, "--node-rank", str(node), *generate, "--expert-parallel-size", "2"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        for node in range(2)
    ]
    answers = [node.communicate(timeout=120) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], answers
    assert main(generate) == 0
    assert answers[0][0] == capfd.readouterr().out
    assert answers[1][0] == ""
