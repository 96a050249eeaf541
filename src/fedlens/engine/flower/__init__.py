"""fedlens on Flower: the same loop, client step, merge rules, masks and head as the simulation, with the data where it really is.

    wire.py        what travels, and what is refused
    node.py        a site's answers
    federation.py  the server's questions: the clients of training/federated.py, on other machines
    apps.py        Flower's ServerApp and ClientApp around them
    secure.py      the mean without its parts: Flower's SecAgg+
    programs.py    SuperLink and SuperNode as processes of ours, SuperLink's door closed to all but sites
    keys.py        certificates and keys
    launch.py      fedlens federate init | server | client

Only apps, secure and programs import Flower. Unlike the engines beside it this package stands on top of training: its apps are entry points, as the command line is.
"""
