"""Flower: its simulation on Ray, its FedAvg strategy, the ClientApp of its PyTorch quickstart.

In its favour: a worker reads the data and builds the model once, not for every client; no evaluation. Its own: parameters travel as
serialised arrays through Ray's object store, and the server asks for answers every 0.1 s.
"""

from functools import lru_cache
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch import nn

from contenders.common import CLIENTS, PARTICIPATION, SAMPLES, Clock, Work, flat

client_app = ClientApp()


@lru_cache(maxsize=1)
def bench(folder: str) -> tuple[Work, nn.Module]:
    work = Work.load(folder)
    return work, work.model()


@client_app.train()
def train(message: Message, context: Context) -> Message:
    config = message.content["config"]
    torch.set_num_threads(config["threads"])
    work, model = bench(config["work"])
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    work.train_client(model, config["server-round"] - 1, config["slot"])
    answer = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": SAMPLES})}
    return Message(RecordDict(answer), reply_to=message)


class SlottedFedAvg(FedAvg):
    """FedAvg that tells each node of the cohort whose batches to take: which node is which client is then of no consequence."""

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> list[Message]:
        messages = list(super().configure_train(server_round, arrays, config, grid))
        for slot, message in enumerate(messages):
            message.content = RecordDict({"arrays": arrays, "config": ConfigRecord({**config, "slot": slot})})
        return messages


def run(job: dict[str, Any]) -> None:
    torch.set_num_threads(job["threads"])
    work = Work.load(job["work"])
    clock, server_app = Clock(job), ServerApp()

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        state = work.model().state_dict()

        def after(round_: int, arrays: ArrayRecord) -> None:
            clock.lap(lambda: flat(arrays[name].numpy() for name in state)) if round_ else clock.start()

        SlottedFedAvg(fraction_train=PARTICIPATION, fraction_evaluate=0.0, min_available_nodes=CLIENTS).start(
            grid,
            ArrayRecord(state),
            num_rounds=len(work.cohorts),
            train_config=ConfigRecord({"work": job["work"], "threads": job["threads"]}),
            evaluate_fn=after,
        )

    run_simulation(
        server_app,
        client_app,
        num_supernodes=CLIENTS,
        backend_config={
            "init_args": {"num_cpus": job["workers"], "_temp_dir": job["scratch"], "_node_ip_address": "127.0.0.1"},
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        },
    )
    clock.finish("flwr", "ray", workers=job["workers"])
