"""fedlens on Flower: the same loop, client step, merge rules, masks and head as the simulation, with the data where it really is.

wire.py        what travels, and what is refused
node.py        a site's answers
federation.py  the server's questions: the clients of training/federated.py, on other machines
apps.py        Flower's ServerApp and ClientApp around them
"""
