"""The figures of ``docs/source/benchmarks.md``: ``python -m torchpin bench`` on the project's own set.

Writes tables, pictures and every single measurement into ``docs/source/benchmarks``. Takes about twenty
minutes; nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from torchpin.bench import command

FIGURES = Path(__file__).resolve().parents[2] / "docs" / "source" / "benchmarks"


def main() -> int:
    """Runs both; returns the first exit status that is not zero."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--rounds", default="5", help="measurements of each [%(default)s]")
    parser.add_argument("--folder", type=Path, default=FIGURES, help="where to write [%(default)s]")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    sets = {
        "project": ["--preset", "project", "--rivals", "--seconds", "0.6"],
        "cost": ["--sweep", "bytes", "--sweep", "tensors", "--seconds", "0.4"],
    }
    # The cost curves are shown as a picture.
    sets["project"] += ["--markdown", str(options.folder / "project.inc")]
    status = 0
    for name, chosen in sets.items():
        target = options.folder / name
        arguments = [*chosen, "--import", "torch_refdev", "--rounds", options.rounds]
        arguments += ["--json", f"{target}.json", "--plot", f"{target}.svg"]
        status = command.main(arguments) or status
    return status


if __name__ == "__main__":
    sys.exit(main())
