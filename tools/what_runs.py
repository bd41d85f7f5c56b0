"""Say in one table what runs where on this machine; build.sh ends with it.  (`deepinfer doctor` says more.)"""

from __future__ import annotations

import platform

import torch

from deepinfer_core.kernels.contract import Capability
from deepinfer_core.kernels.registry import native_status, provider_statuses


def rows() -> list[tuple[str, str, str]]:
    """(where, runs here, with what or why not), the CPU first, then every installed kernel package."""
    native = native_status().result
    if isinstance(native, Capability):
        kernels = f"C kernels, {native.summary}"
    else:
        kernels = f"torch alone, several times slower, since {native.reason}"
    table = [("cpu", "yes", f"{kernels}; torch {torch.__version__} on {platform.machine()}")]
    for status in provider_statuses():
        if isinstance(status.result, Capability):
            table.append((status.name, "yes", status.result.summary))
        else:
            table.append((status.name, "no", status.result.reason))
    return table


def main() -> None:
    """Print the table."""
    for where, runs, what in [("where", "runs here", "with, or why not"), *rows()]:
        print(f"  {where:<10} {runs:<10} {what}")


if __name__ == "__main__":
    main()
