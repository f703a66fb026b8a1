"""The picture of eager and rendezvous: a valid file with the words of its subject."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from benchmarks.eager import from_plain, main, plain, plot
from zcactor.transport.cost import CostModel, Line, choose
from zcactor.transport.verbs.driver.bindings import Absent, Reason

ROOT = Path(__file__).resolve().parents[2]
MODEL = choose(Line(165e-9, 5000 * 2**20), Line(3605e-9, 11794 * 2**20))


def texts(path: Path) -> str:
    """All words of an SVG file."""
    root = ET.parse(path).getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    return " ".join(" ".join(root.itertext()).split())


@pytest.mark.slow
def test_plot_is_an_svg_file_of_lines_and_points(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    sizes = [64 << shift for shift in range(15)]
    eager, read = ([(size, line.cost(size) * 1.1) for size in sizes] for line in (MODEL.eager, MODEL.rendezvous))
    path = tmp_path / "eager.svg"
    plot(MODEL, eager, read, path)
    shown = texts(path)
    for part in (
        "in the frame: 0.17 us + bytes at 5,000 MiB/s",
        "by READ: 3.60 us + bytes at 11,794 MiB/s",
        "by READ, measured",
        "eager limit 31,296 bytes (equal at 31,309 bytes)",
        "64 KiB",
        "10 us",
    ):
        assert part in shown, part
    again = tmp_path / "again.svg"
    plot(MODEL, eager, read, again)
    assert path.read_bytes() == again.read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(
    "model", [MODEL, choose(Line(1e-6, 1e9), Line(2e-6, 1e9)), choose(Line(0, math.inf), Line(0, math.inf))]
)
def test_plot_without_points(tmp_path: Path, model: CostModel) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "eager.svg"
    plot(model, [], [(0, 1e-6), (1, 2e-6), (1 << 30, 0.1)], path)
    assert "in the frame, measured" not in texts(path)


@pytest.mark.parametrize("model", [MODEL, choose(Line(0, math.inf), Line(1e-6, math.inf))])
def test_figures_survive_the_file(model: CostModel) -> None:
    points = ([(1024, 1e-6), (4096, -2e-6)], [(1024, 3e-6)])
    text = json.dumps(plain(model, *points), allow_nan=False)
    assert from_plain(json.loads(text)) == (model, *points)


@pytest.mark.slow
def test_plot_of_a_file_leaves_out_what_has_no_logarithm(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figures, svg = tmp_path / "figures.json", tmp_path / "eager.svg"
    figures.write_text(json.dumps(plain(MODEL, [(1024, -1e-6)], [(1024, -1e-6), (2048, 4e-6)])))
    assert main(["plot", str(figures), str(svg)]) == 0
    shown = texts(svg)
    assert "by READ, measured" in shown
    assert "in the frame, measured" not in shown


def test_measuring_needs_a_device(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    absent = Absent((Reason("pyverbs", "the package is not installed", "apt"),))
    monkeypatch.setattr("benchmarks.eager.bindings", lambda _: absent)
    assert main(["measure"]) == 2
    shown = capsys.readouterr()
    assert "the package is not installed" in shown.err
    assert not shown.out


@pytest.mark.slow
def test_matplotlib_is_imported_for_drawing_only() -> None:
    program = "import sys, benchmarks.eager; sys.exit('matplotlib' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=50)
