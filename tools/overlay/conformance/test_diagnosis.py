"""The one test that runs on every backend: is it complete enough for the others?"""

from __future__ import annotations

from torchpin.conformance.diagnosis import Diagnosis


def test_backend_is_complete(diagnosis: Diagnosis) -> None:
    """The backend can be imported, started and used, and supplies pinned memory."""
    if diagnosis.failure is not None:
        raise diagnosis.failure
