"""What a process of the tests has done before it is forked: seconds of imports, and the first use of Hydra's groups."""

import torch
import torch._dynamo  # torch imports it for an optimizer

from fedlens.overrides import compose

torch.set_num_threads(1)
for experiment in ("centralized", "fedavg_iid", "fedavg_noniid"):
    compose(["data=folder", f"experiment={experiment}"])
