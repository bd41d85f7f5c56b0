"""`python -m deepinfer_core.cli`: the command `deepinfer`, for launchers that want a module."""

from __future__ import annotations

import sys

from deepinfer_core.cli.main import main

sys.exit(main())
