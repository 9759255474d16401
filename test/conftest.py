"""Loads the accelerator before any test module imports torch on its own."""

import common_pin


def pytest_report_header() -> list[str]:
    torch = common_pin.torch
    return [f"PyTorch {torch.__version__}, accelerator {common_pin.ACCELERATOR}"]
