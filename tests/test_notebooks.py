"""The notebooks run, and are committed as they ran."""

import copy
import re

import nbformat
import pytest
from nbclient import NotebookClient

from tests.commands.process import ENVIRONMENT
from tests.conftest import ROOT, long

NOTEBOOKS = {path.stem: nbformat.read(path, as_version=4) for path in sorted((ROOT / "notebooks").glob("*.ipynb"))}


def code_of(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def outputs_of(notebook) -> list:
    return [output for cell in code_of(notebook) for output in cell.outputs]


@pytest.mark.parametrize("name", [name if name == "restore" else long(name) for name in NOTEBOOKS])
def test_a_notebook_runs_on_another_run(name, finished, tmp_path, monkeypatch):
    notebook = copy.deepcopy(NOTEBOOKS[name])
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path))
    environment = ENVIRONMENT | {"WORKDIR": str(finished), "IPYTHONDIR": str(tmp_path)}
    environment |= {"FOLDER": str(tmp_path / "train"), "STEPS": "2", "JAX_NUM_CPU_DEVICES": "1"}
    client = NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(ROOT / "notebooks")}})
    client.execute(env=environment)
    outputs = outputs_of(notebook)
    if "WORKDIR" in str(notebook.cells):
        assert "<Run numbers: the mean of the parameters at steps 150, 200>" in str(outputs)
    assert not [output for output in outputs if output.get("name") == "stderr"]  # as warnings are
    assert "\\x1b[" not in str(outputs)  # nor bars


@pytest.mark.parametrize("notebook", NOTEBOOKS.values(), ids=NOTEBOOKS)
def test_a_notebook_is_committed_as_it_ran(notebook):
    code, outputs = code_of(notebook), outputs_of(notebook)
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert {output.output_type for output in outputs} <= {"stream", "display_data", "execute_result"}
    assert not [output for output in outputs if output.get("name") == "stderr"]
    assert not re.search(r"/(home|root|tmp|Users|work|usr)/", nbformat.writes(notebook))
    assert len(nbformat.writes(notebook)) < 300_000
