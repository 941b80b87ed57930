"""A stack of services on this machine: supervisor, embedded Redis, ports, state folder.

`programs` names the modules of programs that the command line runs; `relaxd.roles` names the services' modules.
"""
