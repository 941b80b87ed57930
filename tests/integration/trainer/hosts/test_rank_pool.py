"""The processes that become ranks."""

from relaxd.process.child import Child
from services.trainer.service.rank_processes import RankPool, RankProcesses
from tests.kit.waiting import eventually

MODULE = "tests.integration.rpc.echo_child"


async def test_spare_processes_become_ranks() -> None:
    pool = RankPool({}, None, MODULE, spares=2)
    taken: list[Child] = []
    try:
        # None is there yet.
        taken.append(await pool.take("rank 0", {"RANK": "0"}))
        assert taken[0].name == "rank 0"
        pool.prepare()
        pool.prepare()
        await eventually(lambda: len(pool._spares) == 2, "spare processes are started", 60.0)
        first, second = pool._spares
        await first.wait_connected()
        first.kill()
        await first.exited
        taken.append(await pool.take("rank 1", {"RANK": "1"}))
        assert taken[1] is second
        assert (second.name, second.channel.name) == ("rank 1", "rank 1")
        pool.prepare()
        await eventually(lambda: len(pool._spares) == 2, "they are replaced", 60.0)
        spares = list(pool._spares)
    finally:
        await pool.close()
    assert not any(child.alive for child in spares)
    assert all(child.alive for child in taken)
    for child in taken:
        child.kill()
        await child.exited


async def test_spare_processes_start_once_the_ranks_have_loaded_their_code() -> None:
    """So they are there for a fault while the model is loaded, and take no time from the ranks before."""
    pool = RankPool({}, None, MODULE, spares=1)
    ranks = RankProcesses(range(1), lambda rank, event: None, pool)
    try:
        await ranks.start()
        await eventually(lambda: len(pool._spares) == 1, "a spare process is started", 60.0)
        assert pool._spares[0].pid != ranks.rank0.child.pid
    finally:
        await ranks.kill()
        await pool.close()


async def test_a_pool_without_spares_starts_none() -> None:
    pool = RankPool({}, None, MODULE)
    pool.prepare()
    await pool.close()
    assert pool._preparing is None
