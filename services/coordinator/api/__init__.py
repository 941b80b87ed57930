"""The gRPC calls of the Coordinator service: requests are checked here, and answered by the other rooms.

No state lives here.
"""
