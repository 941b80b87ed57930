"""`relaxd doctor` where services are up, and beside them."""

from pathlib import Path

from relaxd.local.state_folder import StateFolder
from tests.e2e.conftest import CONFIG, Workplace, open_workplace


def test_services_are_examined_and_named_to_others(workplace: Workplace, tmp_path: Path, tiny_model: Path) -> None:
    placed = CONFIG.format(model=tiny_model, steps=1) + "[placement]\nreplicas = { rollout = 2, reward = 3 }\n"
    (workplace.folder / "placed.toml").write_text(placed)
    code, output = workplace.relaxd("up", "placed.toml", "--port", "0", "--reward", "1")
    assert code == 0, output
    stack = StateFolder(workplace.folder / ".relaxd").read()
    assert stack is not None
    code, output = workplace.relaxd("doctor")
    assert code == 0, output
    assert "ok      services: up: coordinator, advantage, reward, rollout 2, trainer" in output
    assert f"ok      Redis: {stack.redis.rpartition('@')[2].partition('/')[0]}, version " in output
    beside = tmp_path / "beside"
    beside.mkdir()
    port = stack.coordinator.rpartition(":")[2]
    with open_workplace(beside, tiny_model) as other:
        code, output = other.relaxd("up", "--port", port)
    assert code == 1
    assert f"port {port} on 127.0.0.1 is taken by stack {stack.stack}, in {workplace.folder}/.relaxd (pid " in output
