"""The board's connections to Redis, blocking or in asyncio. They execute operations."""
