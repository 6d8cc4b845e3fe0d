"""Prints which kernels this machine has: `python -m engine.cpu`."""

from __future__ import annotations

import sys

from engine.cpu.library import NoKernels, find_kernels


def main() -> None:
    found = find_kernels()
    said = (
        f"none, torch's operators are used: {found.reason}" if isinstance(found, NoKernels) else found.variant
    )
    sys.stdout.write(f"kernels for this processor: {said}\n")


if __name__ == "__main__":
    main()
