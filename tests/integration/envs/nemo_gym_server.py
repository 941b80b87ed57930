"""A resources server of NeMo Gym's own examples: `python nemo_gym_server.py PORT`, in an interpreter that has nemo-gym.

It is started without NeMo Gym's head server and Ray, which a resources server doesn't need.
"""

import sys

import uvicorn
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.server_utils import ServerClient
from omegaconf import OmegaConf
from resources_servers.example_session_state_mgmt.app import (
    StatefulCounterResourcesServer,
    StatefulCounterResourcesServerConfig,
)

if __name__ == "__main__":
    place = {"host": "127.0.0.1", "port": int(sys.argv[1])}
    head = BaseServerConfig(host="127.0.0.1", port=1)
    server = StatefulCounterResourcesServer(
        config=StatefulCounterResourcesServerConfig(name="counter", entrypoint="app.py", **place),
        server_client=ServerClient(head_server_config=head, global_config_dict=OmegaConf.create({})),
    )
    app = server.setup_webserver()
    server.setup_exception_middleware(app)
    uvicorn.run(app, log_level="warning", **place)
