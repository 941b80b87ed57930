"""How the board reaches Redis: moves, and the connections that carry them out, blocking or in asyncio."""
