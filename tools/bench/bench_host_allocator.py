"""The caching host allocator against the one of the installed PyTorch (2.10 or newer).

Compiles ``bench_host_allocator.cpp`` against that PyTorch, runs it and prints nanoseconds for one
allocation and its release from the cache, medians of seven alternating runs, and what 400 random
sizes up to 4 MiB cost in page-locked memory with 16 of them live.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from base_probe import probe  # noqa: E402


def compile_program(target: Path) -> None:
    """Compiles the benchmark against the installed PyTorch."""
    base = probe()
    compiler = os.environ.get("CXX") or shutil.which("c++") or "g++"
    command = [compiler, f"-std=c++{base.cxx_standard}", "-O2", "-DNDEBUG", "-pthread"]
    command += [f"-D_GLIBCXX_USE_CXX11_ABI={base.cxx11_abi}", f"-I{ROOT}", f"-I{ROOT / 'aten/src'}"]
    command += [f"-isystem{folder}" for folder in base.include_dirs]
    command += [str(Path(__file__).with_suffix(".cpp")), "-o", str(target)]
    command += [f"-L{base.library_dir}", f"-Wl,-rpath,{base.library_dir}"]
    command += ["-lc10", "-ltorch_cpu", "-Wl,--allow-shlib-undefined"]
    subprocess.run(command, check=True)


def main() -> None:
    """Runs the benchmark and prints its table."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "bench_host_allocator"
        compile_program(program)
        output = subprocess.run(
            [str(program)], check=True, capture_output=True, text=True, timeout=600
        ).stdout
    print(f"PyTorch {probe().version}")
    print(f"{'':36}{'base':>10}{'torchpin':>10}{'difference':>12}")
    for name, (base, ours) in json.loads(output).items():
        print(f"{name:36}{base:>10}{ours:>10}{ours - base:>12.3g}")


if __name__ == "__main__":
    main()
