"""Whole models with interpreted kernels equal themselves without: losses and every gradient, in float32."""

import pytest
from lightning_5d.kernels import use_kernels

from tests.kernels.models import MODELS, assert_kernels_change_nothing


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_model(name):
    report, _ = assert_kernels_change_nothing(name, use_kernels)
    assert report.replaced
