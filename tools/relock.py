"""Rewrite uv.lock so that it names no registry:  `uv lock && uv run tools/relock.py`.

    source = { registry = "<address>" }      becomes    source = { registry = "wheelhouse" }
    { url = "<address>/x.whl", hash = H }    becomes    { path = "x.whl", hash = H }
    sdist = { url = ... }                    goes: everything we install has a wheel

Versions and hashes stay, so an install is as exact as before: build.sh asks whichever registry the machine is set up
for, and uv checks each file against its hash. `uv sync --locked` and `uv lock --check` accept the result as it is.
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOCK_PATH = Path(__file__).resolve().parent.parent / "uv.lock"
WHEELHOUSE = "wheelhouse"

_REGISTRY = re.compile(r'registry = "[^"]*"')
_SDIST_LINE = re.compile(r"^sdist = \{.*\}\n", re.MULTILINE)
_WHEEL = re.compile(r'\{ url = "(?P<url>[^"]+)", (?P<hash>hash = "sha256:[0-9a-f]{64}")[^}\n]*\}')


class LockError(Exception):
    """The lock cannot be written without a registry's address."""


def rewrite(lock_text: str) -> str:
    """Return `lock_text` in the form above; text that has it already comes back unchanged.

    Raises LockError when a package has no wheel, a wheel no hash, or an address remains.
    """
    text = _REGISTRY.sub(f'registry = "{WHEELHOUSE}"', lock_text)
    text = _SDIST_LINE.sub("", text)
    text = _WHEEL.sub(lambda wheel: f'{{ path = "{_file_name(wheel["url"])}", {wheel["hash"]} }}', text)
    _validate(text)
    return text


def _file_name(url: str) -> str:
    return unquote(urlsplit(url).path.rsplit("/", 1)[-1])


def _validate(text: str) -> None:
    for package in tomllib.loads(text).get("package", []):
        name = f"{package['name']} {package.get('version', '')}".rstrip()
        if "registry" not in package["source"]:
            continue  # a member of the workspace
        wheels = package.get("wheels", [])
        if not wheels:
            raise LockError(f"{name} has no wheel: choose a release that has one, or do without the package")
        for wheel in wheels:
            if set(wheel) != {"path", "hash"}:
                raise LockError(f"a wheel of {name} is not a file name with a sha256 hash: {wheel}")
    for number, line in enumerate(text.splitlines(), start=1):
        if "://" in line:
            raise LockError(f"line {number} of the lock still holds an address: {line.strip()}")


def main(arguments: list[str] | None = None) -> int:
    """Rewrite the lock in place, or with `--check` only say whether it needs it (exit status 1)."""
    parser = argparse.ArgumentParser(description="Rewrite uv.lock so that it names no registry.")
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if the lock needs rewriting")
    parser.add_argument("lock", nargs="?", type=Path, default=LOCK_PATH, help="the lock file (default: %(default)s)")
    options = parser.parse_args(arguments)
    before = options.lock.read_text(encoding="utf-8")
    try:
        after = rewrite(before)
    except LockError as error:
        print(f"relock: {error}", file=sys.stderr)
        return 1
    if before == after:
        print(f"{options.lock}: names no registry")
        return 0
    if options.check:
        print(f"{options.lock}: names a registry; run tools/relock.py", file=sys.stderr)
        return 1
    options.lock.write_text(after, encoding="utf-8")
    print(f"{options.lock}: rewritten")
    return 0


if __name__ == "__main__":
    sys.exit(main())
