"""The ONNX example: the shipped digits model gives its documented accuracy in onnxruntime."""

import pytest

for package in ('sklearn', 'onnx', 'onnxscript', 'onnxruntime'):
    pytest.importorskip(package)
from examples.export_onnx import main  # noqa: E402  needs all of them


def test_it_runs(tmp_path, capsys):
    found = main(['--output', str(tmp_path / 'digits.onnx')])
    assert found['difference'] < 1e-4
    assert round(found['torch'], 2) == round(found['onnxruntime'], 2) == 98.61
    assert (tmp_path / 'digits.onnx').stat().st_size > 500_000  # the weights are in it
    assert 'onnxruntime 98.61' in capsys.readouterr().out
