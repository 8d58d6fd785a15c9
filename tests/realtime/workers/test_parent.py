"""How many workers a server gets, and what a reload checks before it is sent to them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from realtime.config import Config, ConfigError, LimitsConfig, ModelConfig, ServerConfig, load_config
from realtime.workers.parent import Parent, reserved_port, workers_for

GPU = ModelConfig(name="voxtral", device="cuda")


@pytest.mark.parametrize(
    ("config", "cores", "gpu", "wanted"),
    [
        (Config(), 64, True, 1),
        (Config(model=GPU), 2, True, 1),
        (Config(model=GPU), 16, True, 4),
        (Config(model=GPU), 4, True, 2),
        (Config(model=ModelConfig(name="voxtral", device="auto")), 16, False, 1),
        (Config(model=ModelConfig(name="voxtral", device="cpu")), 16, True, 1),
        (Config(model=ModelConfig(name="voxtral", device="cuda", max_streams=100)), 16, True, 1),
        (Config(model=GPU, limits=LimitsConfig(max_sessions=151)), 16, True, 2),
        (Config(model=ModelConfig(engines=("tcp://a:1", "tcp://b:1"))), 32, False, 8),
        # More workers than cores are allowed if they are asked for.
        (Config(server=ServerConfig(workers=5)), 2, False, 5),
    ],
)
def test_as_many_as_streams_call_for_and_cores_leave(config: Config, cores: int, gpu: bool, wanted: int) -> None:
    assert workers_for(config, cores, gpu) == wanted


def test_the_number_can_be_said_everywhere() -> None:
    assert load_config(environment={"TICKERTAPE_SERVER_WORKERS": "3"}).server.workers == 3
    assert load_config(environment={}, flags={"server.workers": "2"}).server.workers == 2
    for wrong in ("-1", "65", "many"):
        with pytest.raises(ConfigError, match=r"server\.workers"):
            load_config(environment={}, flags={"server.workers": wrong})
    with pytest.raises(ConfigError, match="16 characters"):
        load_config(environment={}, flags={"auth.secret": "short"})


async def test_a_reload_with_a_certificate_that_cannot_be_used_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "broken.pem"
    file.write_text("broken")
    config = Config(server=ServerConfig(tls_cert=str(file), tls_key=str(file)))
    async with reserved_port("127.0.0.1", 0) as held:
        parent = Parent(config, 2, [], held)
        with pytest.raises(ConfigError, match="must be PEM files"):
            parent.reload(replace(config, limits=replace(config.limits, upload_bytes=4000)))
    assert config.limits.upload_bytes != 4000
