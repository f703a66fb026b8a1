"""Run all that checks zcactor on a real GPU, and write one page about it.

    python tools/gpu_card.py --out DIR [--driver cuda|fake] [--seconds S] [--wheels DIR]
    python tools/gpu_card.py --gather DIR

The steps are `nvidia-smi`, `zcactor doctor`, all rows of `tools/gpu_check.py`, and the tests that need a GPU. Each has
a part of the seconds as its limit, and one that fails or hangs costs no other. ``DIR/page.md`` has the verdicts, and
the whole output of each step lies beside it. The exit status is 0 when all steps passed, and 1 otherwise. With the fake
GPU the page says nothing about a real one: it shows that the command runs.

A machine without a network takes the packages along: ``--gather`` builds the wheel of this checkout and downloads the
packages that it and its tests need, for the Python that runs it. ``--wheels`` installs them into a folder that is
removed at the end. NumPy, cuda-bindings, CuPy and PyTorch are those of the machine.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parents[1]
SECONDS: Final = 530.0
"""Seconds of a run: a machine that is lent for ten minutes has some left."""
GRACE: Final = 3.0
"""Seconds in which a step ends what it has started."""
BESIDE: Final = ("benchmarks", "examples", "simulation", "tests", "tools")
"""Folders that a wheel lacks, and tests import."""
TAIL: Final = 60
"""Lines of each step on the page."""
TESTERS: Final = ("pytest", "pytest-asyncio", "pytest-timeout", "pytest-xdist", "hypothesis", "psutil")
"""The packages that the tests need, beside zcactor's own."""
OF_THE_MACHINE: Final = ("numpy-", "cuda_bindings-", "cuda_pathfinder-")
"""The beginnings of the names of wheels that are not taken along."""


class Step(NamedTuple):
    """One step of a run."""

    name: str
    part: float
    """The part of the run's seconds that is its limit."""
    command: list[str]


PIP: Final = (sys.executable, "-m", "pip")


def steps(driver: str, out: Path) -> list[Step]:
    """The steps, in order."""
    python = sys.executable
    check = [python, "tools/gpu_check.py", "--driver", driver, "--out", str(out), "--limit", "40"]
    suite = [python, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "tests/device/cuda/test_gpu.py"]
    smi = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,memory.used,mig.mode.current", "--format=csv"]
    found = [
        Step("doctor", 0.1, [python, "-m", "zcactor", "doctor"]),
        Step("gpu_check", 0.75, check),
        Step("suite", 0.4, suite),
    ]
    return found if driver == "fake" else [Step("nvidia-smi", 0.05, smi), *found]


def run(step: Step, seconds: float, where: Path, env: dict[str, str], out: Path) -> tuple[str, float]:
    """Run a step. Returns its verdict, and the seconds that it took."""
    began = time.monotonic()
    with (out / f"{step.name}.txt").open("w") as file:
        try:
            process = subprocess.Popen(
                step.command, cwd=where, env=env, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )
        except FileNotFoundError as error:
            return f"missing: {error.filename}", 0.0
        try:
            status = process.wait(seconds)
            verdict = "pass" if status == 0 else f"ended with {status}"
        except subprocess.TimeoutExpired:
            verdict = f"not done after {seconds:.0f} s"
        finally:
            end(process)
    return verdict, time.monotonic() - began


def end(process: subprocess.Popen[bytes]) -> None:
    """End a step that has not ended, first by SIGTERM: `tools/gpu_check.py` ends its check then."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(GRACE)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def check(driver: str, out: Path, seconds: float, wheels: Path | None) -> int:
    """Run all steps, and write the page. Returns the exit status."""
    out = out.resolve()
    env = os.environ | ({"ZCACTOR_GPU": "fake"} if driver == "fake" else {})
    began, rows, tails = time.monotonic(), list[str](), list[str]()
    with tempfile.TemporaryDirectory(prefix="zcactor-gpu-") as folder:
        where = ROOT
        if wheels is not None:
            where = Path(folder) / "checkout"  # the checkout's own package has no built parts
            install(wheels, Path(folder) / "site")
            env["PYTHONPATH"] = str(Path(folder) / "site")
            for name in BESIDE:
                shutil.copytree(ROOT / name, where / name)
            shutil.copy(ROOT / "pyproject.toml", where)
        failed = 0
        for step in steps(driver, out):
            left = seconds - (time.monotonic() - began)
            verdict, took = run(step, max(min(step.part * seconds, left), 1), where, env, out)
            lines = (out / f"{step.name}.txt").read_text(errors="replace").splitlines()
            if step.name == "suite" and verdict == "pass" and " passed" not in "".join(lines[-1:]):
                verdict = "all skipped"
            failed += verdict not in {"pass", "all skipped" if driver == "fake" else "pass"}
            rows.append(f"| {step.name} | {verdict} | {took:.1f} |")
            tails += [f"\n## {step.name}\n\n```", *lines[-TAIL:], "```"]
            print(f"{step.name:10} {verdict:24} {took:6.1f} s", flush=True)
    head = f"# GPU arrays on this machine, driver {driver}\n\n| step | verdict | seconds |\n|---|---|---|"
    (out / "page.md").write_text("\n".join([head, *rows, *tails]) + "\n")
    print(f"the page is {out / 'page.md'}")
    return 1 if failed else 0


def install(wheels: Path, site: Path) -> None:
    """Install wheels into a folder, without a network.

    Raises:
        SystemExit: there are none, or pip refuses.
    """
    found = [str(each) for each in sorted(wheels.glob("*.whl"))]
    if not found:
        sys.exit(f"there is no wheel in {wheels}: python tools/gpu_card.py --gather {wheels} makes them")
    how = ("-q", "--no-index", "--no-deps", "--no-compile", "--target", str(site))
    if subprocess.run([*PIP, "install", *how, *found], check=False).returncode:
        sys.exit("the wheels cannot be installed: were they gathered by the same version of Python?")


def gather(wheels: Path) -> int:
    """Build and download all that a machine without a network needs. Returns the exit status."""
    wheels.mkdir(parents=True, exist_ok=True)
    subprocess.run([*PIP, "wheel", "-q", "--no-deps", "-w", str(wheels), str(ROOT)], check=True)
    own = max(wheels.glob("zcactor-*.whl"), key=lambda each: each.stat().st_mtime)
    packages = [f"zcactor[cli] @ {own.resolve().as_uri()}", *TESTERS]
    download = [*PIP, "download", "-q", "--only-binary=:all:", "-d", str(wheels), *packages]
    subprocess.run(download, check=True)
    for each in wheels.glob("*.whl"):
        if each.name.startswith(OF_THE_MACHINE):
            each.unlink()
    nbytes = sum(each.stat().st_size for each in wheels.glob("*.whl"))
    print(f"{len(list(wheels.glob('*.whl')))} wheels, {nbytes / (1 << 20):.0f} MiB, in {wheels}")
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Gather, or run. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, metavar="DIR")
    parser.add_argument("--driver", choices=("cuda", "fake"), default="cuda")
    parser.add_argument("--seconds", type=float, default=SECONDS, metavar="S", help="of the whole run")
    parser.add_argument("--wheels", type=Path, metavar="DIR", help="that --gather has filled")
    parser.add_argument("--gather", type=Path, metavar="DIR")
    options = parser.parse_args(arguments)
    if (options.out is None) == (options.gather is None):
        parser.error("either --out DIR or --gather DIR is needed")
    if not options.seconds > 0:
        parser.error(f"--seconds {options.seconds:g}: it must be above 0")
    if options.out is not None:
        try:
            options.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            parser.error(f"--out {options.out}: {error.strerror}")
    if options.gather is not None:
        return gather(options.gather)
    return check(options.driver, options.out, options.seconds, options.wheels)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the step is ended, too
    sys.exit(main())
