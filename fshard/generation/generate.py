"""``fs.generate``: sequences that a model goes on with, from sharded weights, one token at a time."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fshard import tree
from fshard.arguments import Want, expect
from fshard.errors import PlanError, bad_arguments, lines
from fshard.generation.places import Forward, Places, padded, read
from fshard.model import random
from fshard.runtime.comm import collective_call, telling
from fshard.runtime.engine import Mean
from fshard.sharding.plan import Plan
from fshard.state.init import unshard
from fshard.state.move import reshard_state
from fshard.state.train_state import TrainState
from fshard.training.evaluate import make_eval_step


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

    >>> fs.generation.Sampling(0.0)(torch.tensor([[0.0, 2.0, 1.0]]), 0, 0)
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


WEIGHTS = ("sharded", "whole")


class Generated(NamedTuple):
    """The tokens generated for the prompts of this rank.

    Attributes:
        tokens: for each prompt the new tokens, 1-D, int64; with ``eos`` as the last one where it came.
        logprobs: the logarithms of the probabilities with which they were drawn, 1-D, float32.

    >>> made = fs.generation.Generated([torch.tensor([7, 2])], [torch.tensor([-0.1, -0.3])])
    >>> [row.tolist() for row in made.tokens], made.logprobs[0].sum()
    ([[7, 2]], tensor(-0.4000))
    """

    tokens: list[Tensor]
    logprobs: list[Tensor]


class Sequences:
    """The sequences of one rank while they grow.

    Attributes:
        active: which of them go on.
    """

    def __init__(self, prompts: Sequence[Tensor], eos: int | None, device: torch.device) -> None:
        self.count, self.eos = len(prompts), eos
        # A rank without prompts generates for a made-up one: all ranks make the same calls.
        self.tokens, self.places = padded(prompts or [torch.zeros(1, dtype=torch.int64)], device)
        self.active = torch.full((len(self.tokens),), bool(prompts), device=device)
        self.cache: Any = None
        self._new: list[tuple[Tensor, Tensor, Tensor]] = []

    def batch(self) -> dict[str, Any]:
        """Return what the next step reads."""
        active = self.active.sum()
        return {"tokens": self.tokens, "cache": self.cache, "places": self.places, "active": active}

    def take(self, tokens: Tensor, logprobs: Tensor, cache: Any) -> None:
        """Append a token to each sequence that goes on."""
        self._new.append((tokens, logprobs, self.active))
        self.tokens, self.cache = tokens.unsqueeze(-1), cache
        keys = torch.nn.functional.pad(self.places.keys, (0, 1), value=True)
        self.places = Places(self.places.positions[:, -1:] + 1, keys)
        if self.eos is not None:
            self.active = self.active & (tokens != self.eos)

    def generated(self) -> Generated:
        """The sequences."""
        if not self._new:
            empty = [torch.zeros(0, dtype=torch.int64) for _ in range(self.count)]
            return Generated(empty, [row.float() for row in empty])
        tokens, logprobs, kept = (torch.stack(column, 1) for column in zip(*self._new, strict=True))
        rows = range(self.count)
        return Generated([tokens[i][kept[i]] for i in rows], [logprobs[i][kept[i]] for i in rows])


class Generate:
    """``generate(state, prompts, max_new=...)``. Made by ``fs.generation.make_generate``.

    >>> plan = fs.make_plan({"next": torch.zeros(4, 4)}, fs.make_mesh((1,), ("data",)), [(".*", fs.fsdp("data"))])
    >>> state = fs.init_state(plan, params={"next": 9 * torch.eye(4).roll(1, 1)})
    >>> def forward(params, tokens, cache, places):
    ...     return params["next"][tokens], None
    >>> go_on = fs.generation.make_generate(forward, plan)
    >>> go_on(state, [[0], [2]], max_new=3, sampling=fs.generation.Sampling(temperature=0)).tokens
    [tensor([1, 2, 3]), tensor([3, 0, 1])]
    """

    def __init__(self, forward: Forward, plan: Plan, weights: str) -> None:
        self.forward, self.weights = forward, weights
        self.plan = plan if plan.stages is None else plan.replace(stages=None)
        self._step = make_eval_step(self._read, self.plan)

    def __repr__(self) -> str:
        return f"<generate from {self.weights} weights>"

    @collective_call
    def __call__(
        self,
        state: TrainState,
        prompts: Sequence[Any],
        *,
        max_new: int,
        sampling: Sampling | None = None,
        eos: int | None = None,
        first: int | None = None,
    ) -> Generated:
        """Go on with prompts. Collective: ranks whose sequences have ended go along until those of all ranks have.

        Args:
            state: the state.
            prompts: this rank's prompts: 1-D tensors of int64, or lists of ints, of any lengths; ranks may have unequal
                numbers of them, or none. Ranks that differ along other axes than those of the data give the same.
            max_new: the most tokens of a sequence; the same on all ranks.
            sampling: how tokens are drawn; None takes the most likely ones, as ``generate`` of transformers does.
            eos: the token that ends a sequence; None for none.
            first: the number of this rank's first prompt among those of all ranks. Random numbers depend on it, and so
                not on ranks. By default every data rank is taken to have as many prompts as this one.

        Raises:
            PlanError: prompts that are no sequences of tokens, or an empty one; a call outside of ``mesh.run``.
            TreeError: ``forward`` returned a cache of the wrong length; on all ranks alike.
        """
        if self.plan.mesh.everywhere:
            raise PlanError("fs.generate outside of mesh.run: ranks have prompts of their own; call it in mesh.run(fn)")
        with telling(self.plan.mesh):
            if state.plan.whole is not None:  # a token passes all units, so each rank takes part in all of them
                state = reshard_state(state, self.plan, None)
            return self._generated(state, self._rows(prompts, max_new, sampling, eos), max_new, sampling, first)

    def _generated(
        self, state: TrainState, rows: Sequences, max_new: int, sampling: Sampling | None, first: int | None
    ) -> Generated:
        sampling = sampling or Sampling(0.0)
        first = self.plan.data_rank * rows.count if first is None else first
        params = self._whole(state) if self.weights == "whole" else None
        with torch.no_grad():
            for at in range(max_new):
                found = self._step(state, rows.batch()) if params is None else self._alone(params, rows)
                if not found["going"]:
                    break
                rows.take(*sampling(found["last"], at, first), found["cache"])
        return rows.generated()

    def _rows(self, prompts: Any, max_new: Any, sampling: Any, eos: Any) -> Sequences:
        """The prompts, if they and the options are right."""
        kinds = Tensor if isinstance(prompts, str) else (Sequence, Tensor)
        wants: list[Want] = [
            ("prompts", prompts, kinds, "a list of 1-D tensors"),
            ("max_new", max_new, int, "the most tokens of a sequence"),
            ("sampling", sampling, (Sampling, type(None)), "fs.generation.Sampling(...), or None"),
            ("eos", eos, (int, type(None)), "the number of a token, or None"),
        ]
        expect("generate(state, prompts)", wants)
        if max_new < 0:
            raise PlanError(f"generate(max_new={max_new}): give the most tokens of a sequence, 0 or more")
        rows = [torch.as_tensor(prompt) for prompt in prompts]
        wrong = [
            f"prompts[{i}] is {row.dtype} {list(row.shape)}"
            for i, row in enumerate(rows)
            if row.ndim != 1 or not len(row) or row.dtype.is_floating_point or row.dtype == torch.bool
        ]
        if wrong:
            raise PlanError(lines("generate takes prompts of one token or more, 1-D:", wrong, "Encode them first."))
        return Sequences(rows, eos, self.plan.mesh.device)

    def _read(self, params: Any, batch: Mapping[str, Any]) -> dict[str, Any]:
        """The logits after the last token and the cache; and whether any rank still goes on."""
        places = Places(*batch["places"])
        logits, cache = read(self.forward, params, batch["tokens"], batch["cache"], places)
        return {"last": logits[:, -1], "cache": cache, "going": Mean(batch["active"].float(), 1)}

    def _alone(self, params: Any, rows: Sequences) -> dict[str, Any]:
        """The same of whole weights: no rank waits for another."""
        found = self._read(params, rows.batch())
        return {**found, "going": found["going"].total}

    def _whole(self, state: TrainState) -> Any:
        """All weights, in the dtypes in which units read them. Collective."""
        whole = dict(tree.paths(unshard(state.params, self.plan)))
        for group in self.plan.groups:
            for leaf in group.leaves:
                whole[leaf.path] = whole[leaf.path].to(group.compute_dtype)
        return tree.nest(whole)


def make_generate(forward: Forward, plan: Plan, *, weights: str = "sharded") -> Generate:
    """Make a function that generates: ``generate(state, prompts, max_new=...)``.

    Args:
        forward: how the model reads tokens, with a cache: ``forward(params, tokens, cache, places) -> (logits,
            cache)``; ``fs.generation.hugging_face(model)`` makes one. ``places`` is an ``fs.generation.Places``.
        plan: the plan. Where it has stages, each call first brings the parameters to all of them.
        weights: ``"sharded"`` gathers each unit when a token needs it, and frees it after it: each token costs all
            all-gathers. ``"whole"`` gathers all weights once a call: that takes the memory of the model on each rank,
            and then every rank generates by itself.

    Raises:
        PlanError: an invalid option.

    >>> params = {"next": torch.eye(4)[[1, 2, 3, 0]]}
    >>> plan = fs.make_plan(params, fs.make_mesh((1,), ("data",)), [(".*", fs.fsdp("data"))])
    >>> state = fs.init_state(plan, params=params)
    >>> go_on = fs.generation.make_generate(lambda params, tokens, cache, places: (params["next"][tokens], ()), plan)
    >>> go_on(state, [[0], [2, 3]], max_new=5, sampling=fs.generation.Sampling(0.0), eos=3).tokens
    [tensor([1, 2, 3]), tensor([0, 1, 2, 3])]
    """
    wants: list[Want] = [
        ("forward", forward, Callable, "a function (params, tokens, cache, places)"),
        ("plan", plan, Plan, "what fs.make_plan returned"),
    ]
    expect("make_generate(forward, plan)", wants)
    plan = plan.whole or plan
    if weights not in WEIGHTS:
        raise PlanError(f"weights={weights!r} must be one of {', '.join(map(repr, WEIGHTS))}")
    local = sorted({axis for leaf in plan.leaves.values() for axis in leaf.compute.axes})
    if weights == "whole" and local:
        raise PlanError(
            f"weights='whole': units compute on slices along the axes {', '.join(local)}, so whole weights are not "
            f"what they read: use weights='sharded'"
        )
    return Generate(forward, plan, weights)


@collective_call
def generate(state: TrainState, forward: Forward, prompts: Sequence[Any], **options: Any) -> Generated:
    """Go on with prompts, from sharded weights. Collective.

    That is ``fs.generation.make_generate(forward, state.plan)(state, prompts, **options)``, which a program that
    generates more than once makes once.

    Args:
        state: the state.
        forward: how the model reads tokens with a cache, such as ``fs.generation.hugging_face(model)``.
        prompts: this rank's prompts: 1-D tensors of int64, or lists of ints, of any lengths.
        **options: ``max_new``, ``sampling``, ``eos`` and ``first``, as for what ``fs.generation.make_generate``
            returns.

    >>> plan = fs.make_plan({"next": torch.eye(3)}, fs.make_mesh((1,), ("data",)), [(".*", fs.fsdp("data"))])
    >>> forward = lambda params, tokens, cache, places: (params["next"][tokens], ())
    >>> state = fs.init_state(plan, params={"next": torch.eye(3)})
    >>> fs.generate(state, forward, [[2]], max_new=2, sampling=fs.generation.Sampling(0.0)).tokens
    [tensor([2, 2])]
    """
    expect("generate(state, forward, prompts)", [("state", state, TrainState, "what a step returned")])
    return make_generate(forward, state.plan)(state, prompts, **options)
