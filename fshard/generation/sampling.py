"""Drawing tokens: temperature, the most likely ones, and random numbers that do not depend on ranks."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fshard.errors import bad_arguments
from fshard.model import random


@dataclass(frozen=True)
class Sampling:
    """A rule that draws a token from logits.

    Args:
        temperature: what logits are divided by; 0 takes the most likely token.
        top_k: draw of so many of the most likely tokens; None of all.
        top_p: draw of the fewest most likely tokens that have this probability together (nucleus sampling, Holtzman et
            al. 2020); 1 of all.
        seed: of the random numbers.

    Raises:
        PlanError: arguments out of range.

    >>> Sampling(0.0)(torch.tensor([[0.0, 2.0, 1.0]]), 0, 0)
    (tensor([1]), tensor([0.]))
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        problems = []
        if not self.temperature >= 0:
            problems.append(f"temperature = {self.temperature!r}: must be >= 0")
        if self.top_k is not None and (not isinstance(self.top_k, int) or self.top_k < 1):
            problems.append(f"top_k = {self.top_k!r}: must be an int >= 1, or None")
        if not 0 < self.top_p <= 1:
            problems.append(f"top_p = {self.top_p!r}: must be in (0, 1]")
        if problems:
            raise bad_arguments("fs.generation.Sampling", problems)

    def __call__(self, logits: Tensor, at: int, first: int) -> tuple[Tensor, Tensor]:
        """The next token of each row, and the logarithm of the probability with which it was drawn.

        Args:
            logits: (rows, vocabulary).
            at: how many tokens were drawn before. A row's random number depends on it, the seed, and the row's number.
            first: the number of the first row among those of all ranks.
        """
        if self.temperature == 0:
            best = logits.argmax(-1)
            return best, torch.zeros(len(best), device=best.device)
        wide = logits.float() / self.temperature
        ranked, tokens = wide.sort(dim=-1, descending=True, stable=True)
        odds = ranked.softmax(-1)
        left_out = torch.zeros_like(odds, dtype=torch.bool)
        if self.top_k is not None:
            left_out[:, self.top_k :] = True
        if self.top_p < 1:
            left_out |= odds.cumsum(-1) - odds >= self.top_p  # what stands before it is enough
        odds = odds.masked_fill(left_out, 0.0)
        odds = odds / odds.sum(-1, keepdim=True)
        key = random.fold_in(random.key(self.seed, device=logits.device), at)
        draw = random.uniform(key, (len(logits),), torch.float32, start=first)
        place = torch.searchsorted(odds.cumsum(-1), draw.unsqueeze(-1), right=True)
        last = (~left_out).sum(-1, keepdim=True) - 1  # rounding may leave the sum below 1
        place = place.minimum(last)
        return tokens.gather(-1, place).squeeze(-1), odds.gather(-1, place).log().squeeze(-1)
