"""A stack of services on this machine: supervisor, embedded Redis, ports, state folder.

`modules` is the only place of the library that names the services' modules.
"""
