"""Render deploy/helm with Helm and check it against schemas, in a process with separate packages.

The packages are only for this: ~/.cache/relaxd/helm-VERSIONS has them, and is made when it is missing.
"""

import fcntl
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.kit.crd_schemas import SCHEMAS

CHART = Path(__file__).parents[2] / "deploy" / "helm"
PACKAGES = ("helm-python-sdk==0.2.2", "kubernetes-validate==1.37.0", "PyYAML==6.0.4")
KUBERNETES = "1.37"
FOLDER = Path.home() / ".cache" / "relaxd" / "-".join(["helm", *(one.split("==")[1] for one in PACKAGES)])
INSTALL_SECONDS = 300
PROGRAM = """
import json, sys
import jsonschema, kubernetes_validate, yaml
from helm_python import chart as helm
from helm_python.errors import HelmError

folder, version, schemas, cases = json.load(sys.stdin)
answers = []
for values in cases:
    documents, problems, refusal = [], [], ""
    try:
        with helm.Chart.load(folder) as chart:
            given = yaml.safe_load(values) if isinstance(values, str) else values
            rendered = chart.render(values=given, name="r")
    except HelmError as error:
        rendered, refusal = {}, str(error)
    for text in rendered.values():
        documents += [one for one in yaml.safe_load_all(text) if one]
    for one in documents:
        schema = schemas.get(f"{one['apiVersion']} {one['kind']}")
        try:
            if schema is not None:
                jsonschema.validate(one, schema)
            else:
                kubernetes_validate.validate(one, version, strict=True)
        except (jsonschema.ValidationError, kubernetes_validate.ValidationError) as error:
            problems.append(f"{one['kind']} {one['metadata']['name']}: {error}")
    answers.append({"documents": documents, "problems": problems, "refusal": refusal})
json.dump({"lint": helm.lint(folder)["errors"], "answers": answers}, sys.stdout)
"""


class HelmUnavailable(Exception):
    """Helm can't be had here; the message is the reason."""


@dataclass(frozen=True)
class Rendered:
    """The chart with some values."""

    documents: dict[tuple[str, str], dict[str, Any]]
    """By kind and name."""
    problems: list[str]
    """Differences from Kubernetes' schemas and `SCHEMAS`, unknown fields included."""
    refusal: str
    """Helm's error; empty if it rendered the chart."""


def render_chart(*cases: dict[str, Any] | str, chart: Path = CHART) -> tuple[list[str], list[Rendered]]:
    """Lint the chart, and render it as release `r` with each of these values, also as YAML. Raises HelmUnavailable."""
    given = json.dumps([str(chart), KUBERNETES, SCHEMAS, cases])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "PYTHONPATH": str(_packages())},
        input=given,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    rendered = [
        Rendered({(one["kind"], one["metadata"]["name"]): one for one in answer.pop("documents")}, **answer)
        for answer in found["answers"]
    ]
    return found["lint"], rendered


def _packages() -> Path:
    """Return the folder with Helm's packages, which are installed first if need be."""
    FOLDER.parent.mkdir(parents=True, exist_ok=True)
    with FOLDER.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one installation at a time
        if not FOLDER.exists():
            unfinished = FOLDER.with_suffix(".unfinished")
            shutil.rmtree(unfinished, ignore_errors=True)
            words = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", "--target", str(unfinished)]
            installed = subprocess.run([*words, *PACKAGES], capture_output=True, text=True, timeout=INSTALL_SECONDS)
            if installed.returncode:
                raise HelmUnavailable(f"pip cannot install Helm: {installed.stderr.strip()[-300:]}")
            unfinished.rename(FOLDER)
    return FOLDER
