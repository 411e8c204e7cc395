"""Two servers for client libraries: one whose words are written down, and the default model.

The libraries live in an environment of their own (`make test-clients`), which has no millrace; the
servers are started with MILLRACE_PYTHON.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import PYTHON, ROOT, Server

collect_ignore_glob = [] if "MILLRACE_CLIENTS" in os.environ else ["test_*.py"]

# The libraries would ask the network about prices and send it traces.
os.environ |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "OPENAI_AGENTS_DISABLE_TRACING": "1"}

KEY = "sk-test"


@pytest.fixture(scope="session")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The scripted model (script.py), under the name `agent`, with a key."""
    folder = tmp_path_factory.mktemp("clients") / "agent"
    program = Path(__file__).with_name("script.py")
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    subprocess.run(
        [PYTHON, str(program), str(folder)], check=True, env=os.environ | {"PYTHONPATH": paths}
    )
    running = Server(str(folder), "--name", "agent", "--trust-remote-code", "--api-key", KEY)
    yield running.wait_ready()
    running.http.headers["authorization"] = f"Bearer {KEY}"
    left = running.status()["requests"]
    running.stop()
    assert left == [], "a client left something running"
    assert "Traceback" not in running.log()


@pytest.fixture(scope="session")
def smol() -> Iterator[Server]:
    """The default model, under its own name."""
    running = Server("--max-running", "8").wait_ready()
    yield running
    running.stop()
