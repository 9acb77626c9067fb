"""The tutorial notebook runs from top to bottom, and its cells show what their text promises."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parents[1] / "docs" / "tutorial" / "notebook.ipynb"


def read() -> Any:
    nbformat = pytest.importorskip("nbformat")
    return nbformat.read(NOTEBOOK, as_version=4)


def outputs(notebook: Any, code: str) -> str:
    """Return everything that the cell with this code shows, as text; images as their MIME type."""
    [cell] = [cell for cell in notebook.cells if cell.cell_type == "code" and code in cell.source]
    shown = [{"text/plain": each.text} if each.output_type == "stream" else each.data for each in cell.outputs]
    return "\n".join(kind if kind.startswith("image") else text for data in shown for kind, text in data.items())


def test_the_notebook_is_stored_without_outputs():
    cells = [cell for cell in read().cells if cell.cell_type == "code"]
    assert len(cells) > 5
    assert all(cell.outputs == [] and cell.execution_count is None for cell in cells)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_notebook_runs_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # of the kernel: cores may be shared with other tests
    notebook = read()
    where = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=900, kernel_name="python3", resources=where).execute()
    assert "2048" in outputs(notebook, "thumbnail(mpp")
    assert "image/png" in outputs(notebook, "plt.imshow")
    assert "FAILED" not in outputs(notebook, 'study.run(until="embed")')
    table = outputs(notebook, "study.compare(")
    assert all(method in table for method in ("self-vit-mil", "abmil", "mean"))
    values = re.findall(r"(?m)^(\S+) +([\d.]+) +([\d.]+) +([\d.]+)$", outputs(notebook, "to_frame()"))
    assert [row[0] for row in values] == ["self-vit-mil", "abmil", "mean"]
    assert all(0 <= float(low) <= float(auc) <= float(high) <= 1 for _, auc, low, high in values)
    assert "image/png" in outputs(notebook, "plot_roc")
    heatmap = outputs(notebook, "study.heatmap(")
    assert "image/png" in heatmap
    assert re.search(r"slide_\d+ probability [01]\.\d\d", heatmap)
    assert "image/png" in outputs(notebook, "plt.subplots(2, 6")
    assert '<iframe src="http://127.0.0.1:' in outputs(notebook, "study.view()")
    assert "image/svg+xml" in outputs(notebook, "kaplan_meier")
    assert "torch.Size([4, 480])" in outputs(notebook, "encoder.embed(")
    shapes = re.findall(r"torch\.Size\(\[([\d, ]+)\]\)", outputs(notebook, "aggregators.DSMIL("))
    assert shapes[0] == "1"
    assert shapes[1] == shapes[2]
    assert shapes[1].endswith(", 1")
