"""A rollout double as the launcher starts it: `python -m tests.integration.scaling.gated FOLDER rollout`.

It ends at once when FOLDER/fail-LAUNCH_ID exists, and else waits until FOLDER/closed doesn't.
"""

import asyncio
import os
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    folder = Path(sys.argv.pop(1))
    if any(os.environ["RELAXD_LAUNCH_ID"].endswith(path.name[5:]) for path in folder.glob("fail-*")):
        sys.exit(f"told to fail; its server is {os.environ.get('RELAXD_SGLANG_URL')}")
    while (folder / "closed").exists():
        time.sleep(0.02)
    from tests.integration.peers.__main__ import main

    os.environ["PEER_LOG"] = str(folder / f"{os.environ['RELAXD_REPLICA_ID']}.calls")
    asyncio.run(main())
