"""Series in time, and what is learnt by acting."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.client_programs.training import Training


def train_pytorch_forecasting() -> Training:
    """A temporal fusion transformer on made-up series."""
    import numpy
    import pandas
    from pytorch_forecasting import TemporalFusionTransformer, TimeSeriesDataSet
    from pytorch_forecasting.metrics import QuantileLoss

    rows = [(series, time) for series in range(8) for time in range(40)]
    frame = pandas.DataFrame(rows, columns=["series", "time"])
    frame["value"] = numpy.sin(frame["time"] / 3 + frame["series"]) + 3.0
    frame["series"] = frame["series"].astype(str)
    data = TimeSeriesDataSet(
        frame,
        time_idx="time",
        target="value",
        group_ids=["series"],
        max_encoder_length=16,
        max_prediction_length=4,
        static_categoricals=["series"],
        time_varying_known_reals=["time"],
        time_varying_unknown_reals=["value"],
    )
    model = TemporalFusionTransformer.from_dataset(
        data, hidden_size=8, attention_head_size=2, hidden_continuous_size=8, loss=QuantileLoss()
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, y = next(iter(data.to_dataloader(train=False, batch_size=16)))
    model.train()

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = model.loss(model(x)["prediction"], y)
        loss.backward()
        optimizer.step()
        return loss

    return Training(step, lambda: [*model.parameters()])


def train_pytorch_tcn() -> Training:
    from pytorch_tcn import TCN

    tcn, head = TCN(4, [16, 16, 16], kernel_size=3, use_norm="weight_norm"), nn.Conv1d(16, 1, 1)
    model = nn.Sequential(tcn, head)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    x, target = torch.randn(8, 4, 50), torch.randn(8, 1, 50)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), target)
        loss.backward()
        optimizer.step()
        return loss

    return Training(step, lambda: [*model.parameters()])


def _world() -> Any:
    """An environment where the right action is the sign of what is seen."""
    import gymnasium
    import numpy

    class World(gymnasium.Env):
        observation_space = gymnasium.spaces.Box(-1.0, 1.0, (4,), dtype=numpy.float32)
        action_space = gymnasium.spaces.Discrete(2)

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            super().reset(seed=seed)
            self.left, self.seen = 16, self._look()
            return self.seen, {}

        def _look(self) -> Any:
            return self.np_random.uniform(-1, 1, 4).astype(numpy.float32)

        def step(self, action: Any) -> Any:
            reward = float((self.seen.sum() > 0) == bool(action))
            self.left, self.seen = self.left - 1, self._look()
            return self.seen, reward, self.left == 0, False, {}

    return World()


def train_stable_baselines3() -> Training:
    """PPO: a step plays 64 moves and learns from them, with four backwards."""
    from stable_baselines3 import PPO

    model = PPO("MlpPolicy", _world(), n_steps=64, batch_size=32, n_epochs=2, seed=0, device="cpu")

    def step() -> float:
        model.learn(64, reset_num_timesteps=False)
        return model.logger.name_to_value["train/loss"]

    return Training(step, lambda: [*model.policy.parameters()])


def train_torchrl() -> Training:
    """DQN on moves that were made up: the loss module keeps a copy of the network as its target."""
    from tensordict import TensorDict
    from torchrl.data import OneHot
    from torchrl.modules import MLP, QValueActor
    from torchrl.objectives import DQNLoss, SoftUpdate

    actor = QValueActor(MLP(in_features=8, out_features=4, num_cells=[32, 32]), in_keys=["seen"], spec=OneHot(4))
    loss_of = DQNLoss(actor, action_space=OneHot(4), delay_value=True)
    loss_of.make_value_estimator(gamma=0.99)
    loss_of.set_keys(done="done", terminated="terminated")
    update, optimizer = SoftUpdate(loss_of, tau=0.01), torch.optim.Adam(actor.parameters(), lr=1e-3)

    def moves() -> Any:
        action = nn.functional.one_hot(torch.randint(4, (64,)), 4)
        no = torch.zeros(64, 1, dtype=torch.bool)
        after = {"seen": torch.randn(64, 8), "reward": torch.randn(64, 1), "done": no, "terminated": no}
        return TensorDict({"seen": torch.randn(64, 8), "action": action, "next": after}, batch_size=[64])

    def step() -> Tensor:
        loss = loss_of(moves())["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        update.step()
        return loss

    return Training(step, lambda: [*actor.parameters()])
