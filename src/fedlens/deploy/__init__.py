"""fedlens on Flower: the simulation's loop, client step, merge rules, masks and head, with the data where it really is.

    protocol.py  messages and their checks
    server.py    the server's requests: the clients of training/federated.py, on other machines
    site.py      a site's replies
    worker.py    the long-lived process of a site
    flower.py    Flower's ServerApp and ClientApp, and the transport over its grid
    secure.py    secure aggregation with Flower's SecAgg+
    programs.py  SuperLink, closed to all but sites, and SuperNode, which forks a process per message and has a worker beside it
    launch.py    fedlens federate init | server | client
    keys.py      certificates and keys

Only flower, secure and, when run, programs import Flower.
"""
