import re, threading
import pytest
from tests.e2e.conftest import Workplace
from tests.e2e.test_run import check_books, read_summary
from tests.kit.sentinels import WatchedRedis
from tests.kit.redis_server import RedisServer


@pytest.mark.timeout(400)
def test_a_run_survives_failovers(workplace: Workplace, tmp_path_factory):
    d = tmp_path_factory.mktemp("w")
    w = WatchedRedis(d)
    n = tmp_path_factory.mktemp("n")
    node = RedisServer(n, append_only=True).start()
    threads = []
    try:
        w.start()
        import redis

        process = workplace.start(
            "run",
            "tiny.toml",
            "--run-id",
            "failover",
            "--run.steps",
            "8",
            "--board.data_urls",
            f'["{node.url}"]',
            "--rollout.max_new_tokens",
            "64",
            REDIS_URL=w.url,
        )
        out, kills = [], 0

        def kill():
            w.fail_over()
            w.revive()

        for line in process.stdout:
            out.append(line)
            print(line, end="", flush=True)
            if re.match(r"step +(2|5)/8", line):
                kills += 1
                t = threading.Thread(target=kill)
                t.start()
                threads.append(t)
        assert process.wait(timeout=100) == 0, "".join(out)
        assert kills == 2
        folder = workplace.folder / "runs" / "failover"
        check_books(read_summary(folder), steps=8)
        for f in (folder / "logs").glob("*.log"):
            t = f.read_text()
            for l in t.splitlines():
                if "edis" in l and ("WARN" in l or "ERROR" in l or "warn" in l):
                    print(f.name, l[:250])
        assert "restarted trainer" not in (folder / "logs" / "supervisor.log").read_text()
    finally:
        for t in threads:
            t.join()
        w.stop()
        node.stop()
