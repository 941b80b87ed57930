"""Environments found by name, and refused where they can't be used."""

from pathlib import Path

import pytest

from relaxd.envs.environment import BadEnvironmentError
from relaxd.envs.loading import load_environment

FILE = """
class Game:
    def __init__(self, size=3):
        self.size = size

    def step(self, reply):
        return "well", 0.0

class Other:
    pass

number = 3
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "game.py"
    path.write_text(FILE)
    return str(path)


def test_a_class_of_a_file_is_made_with_its_settings(file: str) -> None:
    make = load_environment(f"{file}:Game", {"size": 5})
    one, other = make(), make()
    assert (one.size, other.size) == (5, 5)
    assert one is not other


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("calculater", {}, "agent.environment = \"calculater\": did you mean 'calculator'?"),
        ("calculator", {"size": 3}, "got an unexpected keyword argument 'size'"),
        ("{file}:Gama", {}, "has no Gama; did you mean Game"),
        ("{file}:Other", {}, "has no step: its class must have step(self, reply), which returns a Step"),
        ("{file}:number", {}, "is a int: it must be"),
        ("{file}:Game", {"sise": 3}, "got an unexpected keyword argument 'sise'; it is Game(size=3)"),
        ("nowhere.py:Game", {}, "there is no file"),
        ("no_such_module:Game", {}, "module no_such_module can't be imported"),
    ],
)
def test_what_is_no_environment_is_refused_by_name(
    file: str, name: str, settings: dict[str, object], message: str
) -> None:
    with pytest.raises(BadEnvironmentError) as refused:
        load_environment(name.format(file=file), settings)
    assert message in str(refused.value)
