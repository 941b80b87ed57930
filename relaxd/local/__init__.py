"""A stack of services on this machine: supervisor, embedded Redis, ports, state folder.

`programs` names the modules of programs that the command line runs; those of services are in `relaxd.roles`.
"""
