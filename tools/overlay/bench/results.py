"""What came out of the measurements, and the figures made of it."""

from __future__ import annotations

import os
import pathlib
import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from torchpin.bench import cases
from torchpin.bench.cases import Case, MiB

FORMAT: Final = 1
"""Version of the JSON that is written."""

_UNUSUAL: Final = {
    "stock_batches": "took the stock way",
    "copied_instead": "were copied although they could have stayed in place",
}


def spread(values: Sequence[float]) -> float:
    """Half the distance between the least and the largest, over the median."""
    middle = statistics.median(values)
    return (max(values) - min(values)) / 2 / middle if middle else 0.0


@dataclass
class WayResult:
    """All measurements of one way of one case."""

    measurements: list[dict[str, Any]] = field(default_factory=list)
    failed: str = ""

    def add(self, measurement: dict[str, Any]) -> None:
        self.measurements.append(measurement)

    def __bool__(self) -> bool:
        return bool(self.measurements) and not self.failed

    def rates(self) -> list[float]:
        """Batches per second, one value for each round."""
        return [one["batches"] / one["seconds"] for one in self.measurements]

    @property
    def rate(self) -> float:
        return float(statistics.median(self.rates()))

    @property
    def bytes(self) -> int:
        return int(self.measurements[0]["bytes"])

    @property
    def tensors(self) -> int:
        return int(self.measurements[0]["tensors"])

    @property
    def pinned(self) -> bool:
        return all(one["pinned"] for one in self.measurements)

    @property
    def cpu_ms(self) -> float:
        """CPU milliseconds of the main process, all its threads, for one batch."""
        return 1000 * float(
            statistics.median(one["cpu_seconds"] / one["batches"] for one in self.measurements)
        )

    @property
    def pause_ms(self) -> float | None:
        """The longest time that the main thread stood still, in milliseconds."""
        pauses = [one["pause_seconds"] for one in self.measurements]
        return None if None in pauses else 1000 * statistics.median(pauses)

    def counted(self, name: str) -> Any:
        """The sum over all rounds of one of the transport's counts; by reason where it has reasons."""
        values = [one["counted"].get(name, 0) for one in self.measurements]
        if not any(isinstance(value, dict) for value in values):
            return sum(values)
        reasons = {reason for value in values if value for reason in value}
        return {
            reason: sum(value.get(reason, 0) for value in values if value)
            for reason in sorted(reasons)
        }

    def arrival(self, name: str) -> str:
        """How most batches came to the training loop: what the way did, not what it was told to do."""
        if not self.pinned:
            return "not pinned"
        if name not in cases.MODES or name == "off":
            return "pinned"
        batches, in_place = self.counted("batches"), self.counted("in_place")
        if not batches and not self.counted("stock_batches"):
            return "pinned"  # without workers nothing travels
        if 2 * batches < sum(one["batches"] for one in self.measurements):
            return "stock way"
        return "in place" if 2 * in_place > batches else "copied"


@dataclass
class CaseResult:
    """All ways of one case."""

    case: Case
    ways: dict[str, WayResult]

    def ratio(self, way: str, to: str) -> float | None:
        """How many times as many batches a second as another way; the median over the rounds."""
        ours, theirs = self.ways.get(way), self.ways.get(to)
        if not ours or not theirs:
            return None
        pairs = zip(ours.rates(), theirs.rates(), strict=False)
        return statistics.median(one / other for one, other in pairs)

    def to_json(self) -> dict[str, Any]:
        return {
            "case": self.case.to_json(),
            "title": self.case.title,
            "ways": {
                name: {
                    "failed": way.failed or None,
                    "batches_per_second": round(way.rate, 3) if way else None,
                    "arrives": way.arrival(name) if way and name != cases.LIMIT else None,
                    "to_stock": self.ratio(name, cases.STOCK),
                    "to_limit": self.ratio(name, cases.LIMIT),
                    "rounds": way.measurements,
                }
                for name, way in self.ways.items()
            },
        }

    def notes(self) -> list[str]:
        """What a reader has to know about these figures."""
        lines = []
        for name, way in self.ways.items():
            if way.failed:
                lines.append(f"{self.case.title}, {name}: {way.failed}")
                continue
            total = sum(one["batches"] for one in way.measurements)
            for count, what in _UNUSUAL.items():
                by_reason = way.counted(count) if name in cases.MODES else None
                if isinstance(by_reason, dict) and by_reason:
                    reasons = ", ".join(
                        f"{number} {reason}" for reason, number in by_reason.items()
                    )
                    lines.append(f"{self.case.title}, {name}: of {total} batches {what}: {reasons}")
        return lines


def machine() -> dict[str, Any]:
    """This machine, as far as it matters for the figures."""
    cpu = platform.processor() or platform.machine()
    info = pathlib.Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                cpu = line.partition(":")[2].strip()
                break
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory / MiB / 1024),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }
