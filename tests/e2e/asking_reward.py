"""A reward that asks the run's judge."""

REWARD = """
import zlib
from relaxd.rewards import judge

async def asked(sample):
    word = await judge.ask("How good is this? " + sample.response)
    return {"reward": zlib.crc32(word.encode()) / 2**32, "length": len(word)}
"""
