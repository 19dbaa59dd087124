"""lm-evaluation-harness on sharded weights, through its own interface of models."""

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from fshard.arguments import Want, expect
from fshard.generation.generate import Sampling, make_generate
from fshard.generation.places import Forward, Places, padded, read
from fshard.runtime.comm import all_ranks_or_raise, enter, mesh_communicator, telling
from fshard.sharding.mesh import Mesh
from fshard.state.move import reshard_state
from fshard.state.train_state import TrainState
from fshard.tracking.tracker import need
from fshard.training.evaluate import make_eval_step


class Scorer:
    """Requests of the harness on all ranks: each data rank computes its part of them, and all learn all results.

    Args:
        forward: how the model reads tokens.
        encode: from text to tokens.
        decode: from tokens to text.
        eos: the token that ends a text, and stands before one that has no context.
        length: the most tokens that the model reads.
        batch: requests of a rank in one step.
    """

    def __init__(
        self,
        state: TrainState,
        forward: Forward,
        encode: Callable[[str], Sequence[int]],
        decode: Callable[[Sequence[int]], str],
        eos: int,
        length: int,
        batch: int,
    ) -> None:
        self.state, self.encode, self.decode, self.eos = state, encode, decode, eos
        self.length, self.batch, self.plan = length, batch, state.plan
        self.generate = make_generate(forward, self.plan)

        def score(params: Any, given: tuple[Tensor, Tensor, Places]) -> dict[str, Tensor]:
            tokens, targets, places = given
            logits, _ = read(forward, params, tokens, None, Places(*places))
            known = targets >= 0
            odds = logits.float().log_softmax(-1).gather(-1, targets.clamp_min(0).unsqueeze(-1)).squeeze(-1)
            best = (logits.argmax(-1) == targets) | ~known
            return {"logprob": (odds * known).sum(-1), "greedy": best.all(-1)}

        self.score = make_eval_step(score, self.plan)

    def logprobs(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[tuple[float, bool]]:
        """The log-probability of each continuation of a context, and whether each of its tokens is the likeliest."""

        def compute(mine: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Any]:
            rows, targets = [], []
            for context, continuation in mine:
                context = [*context] or [self.eos]
                whole = torch.tensor([*context, *continuation])[-self.length - 1 :]
                known = min(len(continuation), len(whole) - 1)
                wanted = whole[1:].clone()
                wanted[: len(wanted) - known] = -1
                rows.append(whole[:-1])
                targets.append(wanted)
            tokens, places = padded(rows, self.plan.mesh.device)
            wanted = padded([row + 1 for row in targets], self.plan.mesh.device)[0] - 1
            found = self.score(self.state, (tokens, wanted, places))
            return list(zip(found["logprob"].tolist(), found["greedy"].tolist(), strict=True))

        return [(logprob, greedy) for logprob, greedy in self._shared(pairs, compute, ((self.eos,), (self.eos,)))]

    def texts(self, requests: Sequence[tuple[str, dict[str, Any]]], max_new: int) -> list[str]:
        """Return what follows each prompt, up to one of its stops."""
        by_option: dict[tuple[int, float], list[int]] = {}
        for number, (_, options) in enumerate(requests):
            temperature = float(options.get("temperature", 0.0)) if options.get("do_sample") else 0.0
            by_option.setdefault((int(options.get("max_gen_toks", max_new)), temperature), []).append(number)
        out = [""] * len(requests)
        for (count, temperature), numbers in by_option.items():

            def compute(mine: Sequence[int], count: int = count, temperature: float = temperature) -> list[str]:
                prompts = [[*self.encode(requests[n][0])][-max(1, self.length - count) :] or [self.eos] for n in mine]
                sampling = Sampling(temperature)
                made = self.generate(self.state, prompts, max_new=count, sampling=sampling, eos=self.eos)
                return [self.decode([t for t in row.tolist() if t != self.eos]) for row in made.tokens]

            for number, text in zip(numbers, self._shared(numbers, compute, numbers[0]), strict=True):
                out[number] = _stopped(text, requests[number][1].get("until") or ())
        return out

    def _shared(self, items: Sequence[Any], compute: Callable[[Any], list[Any]], spare: Any) -> list[Any]:
        """The results of all items. Each data rank computes every ``data_size``-th of them. Collective."""
        mesh = self.plan.mesh
        with telling(mesh):
            return self._all_shared(mesh, items, compute, spare)

    def _all_shared(
        self, mesh: Mesh, items: Sequence[Any], compute: Callable[[Any], list[Any]], spare: Any
    ) -> list[Any]:
        ranks = self.plan.data_size
        enter(mesh, "harness")
        mine = list(items[self.plan.data_rank :: ranks])
        most = -(-len(items) // ranks)
        found: list[Any] = []
        for begin in range(0, most, self.batch):
            part = mine[begin : begin + self.batch]
            found += compute(part or [spare])[: len(part)]
        rows = all_ranks_or_raise(mesh_communicator(mesh, "control of the harness"), lambda: found)
        by_part = {mesh.index(self.plan.data_axes, rank): row for rank, row in enumerate(rows)}
        return [by_part[number % ranks][number // ranks] for number in range(len(items))]


def harness(
    state: TrainState,
    forward: Forward,
    *,
    encode: Callable[[str], Sequence[int]],
    decode: Callable[[Sequence[int]], str],
    eos: int,
    length: int = 2048,
    batch: int = 8,
    max_new: int = 256,
) -> Any:
    """A model for lm-evaluation-harness: ``lm_eval.simple_evaluate(model=harness(...), tasks=[...])``. Collective.

    All ranks call it, and the evaluation, alike. Requests are shared among the data ranks; all ranks get all results.

    Args:
        state: the state.
        forward: how the model reads tokens, as for ``fs.generation.make_generate``.
        encode: from text to tokens, such as ``tokenizer.encode``.
        decode: from tokens to text.
        eos: the token that ends a text.
        length: the most tokens that the model reads.
        batch: requests of a rank in one step.
        max_new: the most tokens of a generated text for tasks that do not say.

    Raises:
        ImportError: lm-eval is not installed: ``pip install "fshard[harness]"``.

    Example::

        read = fs.generation.hugging_face(model)
        served = fs.generation.harness(
            state, read, encode=tokenizer.encode, decode=tokenizer.decode, eos=tokenizer.eos_token_id
        )
        results = lm_eval.simple_evaluate(model=served, tasks=["lambada_openai"])
    """
    need("fs.generation.harness", "lm_eval", "lm-eval", "harness")
    wants: list[Want] = [
        ("state", state, TrainState, "what a step returned"),
        ("forward", forward, Callable, "a function (params, tokens, cache, places)"),
        ("encode", encode, Callable, "a function from text to tokens"),
        ("decode", decode, Callable, "a function from tokens to text"),
    ]
    expect("harness(state, forward)", wants)
    if state.plan.whole is not None:
        state = reshard_state(state, state.plan.replace(stages=None), None)
    return _served(Scorer(state, forward, encode, decode, eos, length, batch), max_new)


def _served(scorer: Scorer, max_new: int) -> Any:
    """A scorer as the harness takes it."""
    base: Any = import_module("lm_eval.api.model").LM

    class Sharded(base):  # type: ignore[misc]
        """Sharded weights as the harness sees them: one model, whose ranks are its own affair."""

        def loglikelihood(self, requests: Sequence[Any], **more: Any) -> list[tuple[float, bool]]:
            """The log-probability of each continuation of a context."""
            return scorer.logprobs([_pair(scorer.encode, *request.args) for request in requests])

        def loglikelihood_rolling(self, requests: Sequence[Any], **more: Any) -> list[float]:
            """The log-probability of each whole text, in windows of the model's length."""
            texts = [list(scorer.encode(request.args[0])) for request in requests]
            windows = [_windows(tokens, scorer.eos, scorer.length) for tokens in texts]
            found = iter(scorer.logprobs([window for row in windows for window in row]))
            return [sum(next(found)[0] for _ in row) for row in windows]

        def generate_until(self, requests: Sequence[Any], **more: Any) -> list[str]:
            """Return what follows each prompt."""
            return scorer.texts([request.args for request in requests], max_new)

    return Sharded()


def _pair(encode: Callable[[str], Sequence[int]], context: str, continuation: str) -> tuple[list[int], list[int]]:
    """The tokens of a context and of what follows. Spaces between the two belong to the latter, as in the harness."""
    kept = context.rstrip()
    continuation = context[len(kept) :] + continuation
    first = list(encode(kept)) if kept else []
    whole = list(encode(kept + continuation))
    return first, whole[len(first) :]


def _windows(tokens: list[int], eos: int, length: int) -> list[tuple[list[int], list[int]]]:
    """A text in parts, each with its context, as the harness cuts it: each token is predicted once."""
    tools = import_module("lm_eval.utils")
    rolled = tools.get_rolling_token_windows(tokens, prefix_token=eos, max_seq_len=length, context_len=1)
    return [tools.make_disjoint_window(window) for window in rolled]


def _stopped(text: str, stops: Sequence[str] | str) -> str:
    """A text up to the first of its stops."""
    for stop in [stops] if isinstance(stops, str) else stops:
        text = text.partition(stop)[0] if stop else text
    return text
