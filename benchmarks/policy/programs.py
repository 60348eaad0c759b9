"""The programs that are recorded, each as people write it, in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from . import acting, equations, models, tries


class Here(Protocol):
    """How a program is run."""

    def pause(self, seconds: float) -> None:
        """Let seconds go by without waiting: somebody thinks, or data is read."""


@dataclass(frozen=True)
class Program:
    """A program to be recorded.

    Attributes:
        run: runs it from begin to end.
        times: how often what was recorded is repeated, so that the sequence is as long as the program usually is.
        compiles: maximum number of tapes to compile; what others take is estimated from these.
        hit: time of a hit by eager's if no tape of the program was compiled: after the steady steps of the most similar
            library in docs/clients.md, of which backward is taken to be a half.
    """

    run: Callable[[Here], None]
    times: int = 1
    compiles: int = 1
    hit: float = 0.8


PROGRAMS: dict[str, Program] = {
    # ---- one model ----
    "tiny_100_steps": Program(models.tiny, hit=0.45),
    "tiny_accumulated": Program(models.tiny_accumulated, hit=0.6),
    "classifier_with_evaluation": Program(models.classifier_with_evaluation, times=228, compiles=2, hit=0.96),
    "accumulated_smaller_last": Program(models.accumulated_smaller_last, times=188, compiles=2, hit=0.6),
    "convolutions": Program(models.convolutions, times=500, hit=0.85),
    "hour_of_gpt": Program(models.gpt, times=300, hit=0.8),
    "ten_steps_of_gpt": Program(models.ten_steps_of_gpt, hit=0.8),
    "masked_language_model": Program(models.masked_language_model, times=500, hit=0.85),
    "diffusion": Program(models.diffusion, times=600, hit=0.95),
    "variational": Program(models.variational, times=34, hit=0.7),
    "sharpness_aware": Program(models.sharpness_aware, times=25, hit=0.55),
    "lbfgs": Program(models.lbfgs, hit=0.6),
    "one_image_attacked": Program(models.one_image_attacked, hit=0.9),
    # ---- lengths, graphs and losses that change ----
    "random_lengths": Program(models.random_lengths, times=34, compiles=2, hit=1.2),
    "bucketed_lengths": Program(models.bucketed_lengths, times=200, compiles=2, hit=0.8),
    "growing_lengths": Program(models.growing_lengths, times=25, compiles=2, hit=0.9),
    "packed_gru": Program(models.packed_gru, times=34, hit=0.6),
    "graph_batches": Program(models.graph_batches, times=34, compiles=2, hit=1.0),
    "metric_learning": Program(models.metric_learning, times=34, compiles=2, hit=1.4),
    "stochastic_depth": Program(models.stochastic_depth, times=34, hit=0.75),
    "random_heads": Program(models.random_heads, times=25, hit=0.75),
    "experts": Program(models.experts, times=42, compiles=2, hit=1.1),
    "unfreezing": Program(models.unfreezing, times=28, hit=0.7),
    # ---- acting ----
    "actor_critic": Program(acting.actor_critic, times=500, hit=0.4),
    "actor_critic_episodes": Program(acting.actor_critic_episodes, times=63, compiles=1, hit=0.4),
    "ppo": Program(acting.ppo, times=313, hit=0.85),
    "sac": Program(acting.sac, times=167, compiles=2, hit=0.7),
    "dqn": Program(acting.dqn, times=50, hit=0.8),
    # ---- equations and loops ----
    "dopri5": Program(equations.dopri5, times=84, hit=0.5),
    "dopri5_adjoint": Program(equations.dopri5_adjoint, times=5, hit=1.1),
    "physics_informed": Program(equations.physics_informed, times=300, hit=0.7),
    "long_loop": Program(equations.long_loop, times=84, compiles=1, hit=0.35),
    "spikes": Program(equations.spikes, times=63, hit=1.05),
    "maml": Program(equations.maml, times=375, hit=0.6),
    # ---- several models ----
    "gan_with_r1": Program(tries.gan_with_r1, times=221, compiles=2, hit=0.9),
    "wasserstein": Program(tries.wasserstein, times=42, hit=0.7),
    "ten_models": Program(tries.ten_models, hit=0.65),
    "search_of_widths": Program(tries.search_of_widths, hit=0.7),
    "notebook": Program(tries.notebook, hit=0.7),
    "forty_losses_once": Program(tries.forty_losses_once, hit=0.8),
    "two_threads": Program(tries.two_threads, times=25, hit=0.8),
    "hooks_on_every_module": Program(tries.hooks_on_every_module, times=39, hit=1.3),
}
