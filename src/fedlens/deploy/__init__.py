"""fedlens on Flower: the same loop, client step, merge rules, masks and head as the simulation, with the data where it really is.

    wire.py        what travels, and what is refused
    node.py        a site's answers
    worker.py      the process of a site that stays, and how others hand it messages
    federation.py  the server's questions: the clients of training/federated.py, on other machines
    records.py     what travels, as Flower's messages
    client.py      Flower's ClientApp: hands each message to the worker, without torch
    apps.py        Flower's ServerApp, and the grid of sites
    secure.py      the mean without its parts: Flower's SecAgg+, the server's half
    stretching.py  its masks
    programs.py    SuperLink and SuperNode as processes of ours, SuperLink's door closed to all but sites, a worker beside each SuperNode
    keys.py        certificates and keys
    launch.py      fedlens federate init | server | client

Only records, client, apps, secure, stretching and programs import Flower. Unlike the engines beside it this package stands on top of training: its apps are entry
points, as the command line is.
"""
