import pytest

from engine.client.capacity import Capacity
from engine.client.supervisor import EngineMetrics


@pytest.fixture
def engine_figures() -> tuple[EngineMetrics, Capacity]:
    return EngineMetrics(), Capacity(0, 1, 0, 0.0, 1.0)
