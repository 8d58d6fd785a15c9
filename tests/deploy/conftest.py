import pytest

from engine.capacity import Capacity
from engine.supervisor import EngineMetrics


@pytest.fixture
def engine_figures() -> tuple[EngineMetrics, Capacity]:
    return EngineMetrics(), Capacity(0, 1, 0, 0.0, 1.0)
